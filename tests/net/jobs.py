"""The jobs of a recording: short trainings, plans and messages."""

import dataclasses
import fnmatch
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class Job:
    """One item to record.

    Attributes:
      name: also the name of its files; `--jobs` selects by it.
      kind: selects the worker's function.
      arguments: command lines of a training (the first starts the run in folder `run`, the others resume
        it), flags of a plan by name, or a test module whose messages are recorded.
    """

    name: str
    kind: Literal["train", "plan", "messages"]
    arguments: Any


# Two small environments per algorithm, for a few iterations, with flags so that replay algorithms learn too.
REPLAY = "--learning-starts 64 --buffer-size 1024"
SMALL = f"{REPLAY} --hidden 16 --batch-size 16"  # for ensembles, which have many networks and updates
TRAINED: dict[str, tuple[str, str, str]] = {
    "ppo": ("CartPole-v1", "Pendulum-v1", "--total-steps 3072"),
    "recurrent_ppo": ("probe:memory", "CartPole-v1", "--total-steps 3072 --num-minibatches 2"),
    "ippo": ("MPE_simple_spread_v3", "probe:unlike", "--total-steps 6144"),
    "mappo": ("MPE_simple_spread_v3", "probe:agents", "--total-steps 6144"),
    "a2c": ("CartPole-v1", "Pendulum-v1", "--total-steps 800"),
    "a3c": ("CartPole-v1", "Acrobot-v1", "--total-steps 800"),
    "impala": ("CartPole-v1", "Acrobot-v1", "--total-steps 1280"),
    "dqn": ("CartPole-v1", "Acrobot-v1", f"--total-steps 512 {REPLAY}"),
    "pqn": ("CartPole-v1", "Breakout-MinAtar", "--total-steps 8192"),
    "sac": ("Pendulum-v1", "probe:continuous", f"--total-steps 256 {REPLAY}"),
    "td3": ("Pendulum-v1", "probe:continuous", f"--total-steps 256 {REPLAY}"),
    "qr_dqn": ("CartPole-v1", "probe:masked", f"--total-steps 512 {REPLAY}"),
    "c51": ("CartPole-v1", "probe:masked", f"--total-steps 512 {REPLAY}"),
    "crossq": ("Pendulum-v1", "probe:continuous", f"--total-steps 256 {REPLAY}"),
    "fast_td3": ("Pendulum-v1", "probe:continuous", f"--total-steps 256 {SMALL}"),
    "redq": ("Pendulum-v1", "probe:continuous", f"--total-steps 256 {SMALL}"),
    "droq": ("Pendulum-v1", "probe:continuous", f"--total-steps 256 {SMALL}"),
    "tqc": ("Pendulum-v1", "probe:continuous", f"--total-steps 256 {SMALL}"),
    "vdn": (
        "MPE_simple_spread_v3",
        "probe:team",
        "--total-steps 1024 --learning-starts 256 --buffer-size 2048",
    ),
    "qmix": (
        "MPE_simple_spread_v3",
        "probe:agents",
        "--total-steps 1024 --learning-starts 256 --buffer-size 2048",
    ),
    "alphazero": (
        "game:tic_tac_toe",
        "game:connect_four?rows=4&columns=4",
        "--total-steps 2048 --num-simulations 4",
    ),
    "muzero": ("CartPole-v1", "Breakout-MinAtar", "--total-steps 4096 --num-simulations 4"),
    "sft": ("text:addition", "text:sorting", "--total-steps 384"),
    "dpo": ("text:addition", "text:sorting", "--total-steps 384"),
    "ppo_rlhf": ("text:addition", "text:sorting", "--total-steps 192"),
    "grpo": ("text:addition", "text:sorting", "--total-steps 1024"),
    "reward_model": ("text:addition", "text:sorting", "--total-steps 384"),
}
COARSE = "--policy single_learner_coarse --actors 2 --devices 3"
TEXT_SPLIT = "--policy split --actors 2 --learners 2 --devices 4"
TEXT_ALGORITHMS = ("sft", "dpo", "ppo_rlhf", "grpo", "reward_model")

PPO = "--algo ppo --env CartPole-v1"
A3C = "--algo a3c --env CartPole-v1 --policy central --workers 2 --devices 3 --total-steps 800"
DQN = f"--algo dqn --env CartPole-v1 --policy gpu_only --total-steps 512 {REPLAY}"
SAC = f"--algo sac --env Pendulum-v1 --policy gpu_only --devices 1 --total-steps 256 {REPLAY}"
MEMORY = "--algo recurrent_ppo --env probe:memory --num-minibatches 2 --total-steps 2048"
GRPO = "--algo grpo --env text:sorting"
NORMALISED = "--normalize-observation true --normalize-reward true"
# A name and its command lines: the first starts a run, the others resume it.
SPECIAL: dict[str, tuple[str, ...]] = {
    "staleness.ppo.1": (f"{PPO} {COARSE} --staleness 1 --total-steps 4096",),
    "staleness.ppo.2": (f"{PPO} {COARSE} --staleness 2 --total-steps 4096",),
    "staleness.ppo.normalised": (f"{PPO} {COARSE} --staleness 1 --total-steps 4096 {NORMALISED}",),
    "staleness.impala.1": (f"--algo impala --env CartPole-v1 {COARSE} --staleness 1 --total-steps 1600",),
    "staleness.impala.2": (f"--algo impala --env CartPole-v1 {COARSE} --staleness 2 --total-steps 1600",),
    "staleness.a3c.1": (f"{A3C} --staleness 1",),
    "staleness.a3c.2": (f"{A3C} --staleness 2",),
    "staleness.grpo.1": (f"{GRPO} {TEXT_SPLIT} --staleness 1 --total-steps 2048",),
    "staleness.grpo.2": (f"{GRPO} {TEXT_SPLIT} --staleness 2 --total-steps 2048",),
    "seeds.ppo.1": (f"{PPO} --policy gpu_only --num-seeds 4 --devices 1 --total-steps 2048",),
    "seeds.ppo.4": (f"{PPO} --policy gpu_only --num-seeds 4 --devices 4 --total-steps 2048",),
    "seeds.dqn.4": (f"{DQN} --num-seeds 4 --devices 4",),
    "sweep.ppo.1": (
        f"{PPO} --policy gpu_only --sweep learning_rate=1e-4,1e-3 entropy_coefficient=0,0.01 --devices 1"
        " --total-steps 2048",
    ),
    "sweep.ppo.4": (
        f"{PPO} --policy gpu_only --sweep learning_rate=1e-4,1e-3 --num-seeds 2 --devices 4"
        " --total-steps 2048",
    ),
    "sweep.sac.1": (f"{SAC} --sweep learning_rate=1e-4,1e-3",),
    "population.ppo.1": (
        f"{PPO} --policy gpu_only --sweep learning_rate=1e-5,1e-4,1e-3,1e-2 --exploit-every 2 --devices 1"
        " --total-steps 4096",
    ),
    "population.ppo.4": (
        f"{PPO} --policy gpu_only --sweep learning_rate=1e-5,1e-4,1e-3,1e-2 --exploit-every 2 --devices 4"
        " --total-steps 4096",
    ),
    "normalised.ppo": (
        f"--algo ppo --env Pendulum-v1 --policy gpu_only --devices 4 {NORMALISED} --total-steps 3072",
    ),
    "normalised.a2c": (f"--algo a2c --env CartPole-v1 {COARSE} {NORMALISED} --total-steps 800",),
    "normalised.sac": (f"{SAC} --normalize-observation true",),
    **{
        f"memory.{memory}": (f"{MEMORY} --policy gpu_only --devices 4 --memory {memory}",)
        for memory in ("gru", "lstm", "mingru", "transformer")
    },
    "memory.qmix": (
        "--algo qmix --env probe:agents --policy gpu_only --devices 1 --memory gru --total-steps 1024"
        " --learning-starts 256 --buffer-size 2048",
    ),
    "rnd.ppo": (f"{PPO} --policy gpu_only --devices 4 --rnd true --total-steps 2048",),
    "bfloat16.ppo": (f"{PPO} --policy gpu_only --devices 4 --precision bfloat16 --total-steps 2048",),
    "bfloat16.dqn": (f"{DQN} --devices 1 --precision bfloat16",),
    "bfloat16.grpo": (f"{GRPO} --policy colocated --devices 4 --dtype bfloat16 --total-steps 1024",),
    "sharded.ppo": (f"{PPO} --policy gpu_only --parameters fsdp --devices 4 --total-steps 2048",),
    "sharded.grpo": (f"{GRPO} --policy colocated --parameters fsdp --devices 4 --total-steps 1024",),
    "model_parallel.ppo": (f"{PPO} --policy gpu_only --model-parallel 2 --devices 4 --total-steps 2048",),
    "fine.ppo": (f"{PPO} --policy single_learner_fine --workers 2 --devices 3 --total-steps 1024",),
    "environments.ppo": (
        f"{PPO} --policy environments --workers 2 --learners 2 --devices 4 --total-steps 1024",
    ),
    "central.ppo": (f"{PPO} --policy central --workers 2 --devices 3 --total-steps 1024",),
    "multi_learner.ppo": (f"{PPO} --policy multi_learner --devices 4 --total-steps 1024",),
    "standalone.ppo_rlhf": (
        "--algo ppo_rlhf --env text:addition --policy standalone --actors 2 --critics 1 --devices 4"
        " --total-steps 192",
    ),
    "evaluated.ppo": (
        f"{PPO} --policy gpu_only --devices 1 --total-steps 4096 --eval-every 4 --eval-episodes 8",
    ),
    "resumed.ppo": (
        f"{PPO} {COARSE} --staleness 1 --total-steps 2048 --anneal-learning-rate false",
        "--total-steps 4096",
    ),
    "resumed.dqn": (f"{DQN} --devices 4", "--total-steps 1024"),
    "resumed.grpo": (
        f"{GRPO} --policy colocated --devices 2 --total-steps 1024 --anneal-learning-rate false",
        "--total-steps 2048",
    ),
}

# (policy, key of _PLANNED, devices, fields of the policy).
_PLANS: tuple[tuple[str, str, int, dict[str, Any]], ...] = (
    *(("gpu_only", "rl", devices, {}) for devices in (1, 4, 8)),
    ("multi_learner", "rl", 4, {}),
    ("single_learner_coarse", "rl", 4, {}),
    ("single_learner_coarse", "rl", 8, {"learners": 2, "staleness": 1}),
    ("single_learner_fine", "rl", 4, {}),
    ("environments", "rl", 4, {}),
    ("central", "rl", 4, {"staleness": 2}),
    ("gpu_only", "rl", 4, {"parameters": "fsdp"}),
    ("gpu_only", "seeds", 4, {}),
    ("single_learner_coarse", "seeds", 4, {}),
    ("gpu_only", "rl", 8, {"model_parallel": 2}),
    ("colocated", "text", 4, {}),
    ("colocated", "text", 4, {"parameters": "fsdp"}),
    ("split", "text", 4, {"staleness": 1}),
    ("split", "text", 4, {"learners": 2}),
    ("standalone", "text", 8, {"references": 1, "critics": 1}),
)
_PLANNED = {
    "rl": (("ppo", "CartPole-v1", {}), ("dqn", "CartPole-v1", {}), ("recurrent_ppo", "probe:memory", {})),
    "seeds": (("ppo", "CartPole-v1", {"num_seeds": 8}), ("sac", "Pendulum-v1", {"num_seeds": 4})),
    "text": (("grpo", "text:sorting", {}), ("ppo_rlhf", "text:addition", {})),
}


def all_jobs() -> list[Job]:
    """All jobs, the longest first, so that all processes end at about the same time."""
    return [*_messages(), *_trainings(0), *_special_jobs(), *_trainings(1), *_plans()]


def select_jobs(patterns: list[str]) -> list[Job]:
    """The jobs whose names match one of these shell patterns; all jobs without patterns."""
    return [job for job in all_jobs() if not patterns or any(fnmatch.fnmatch(job.name, p) for p in patterns)]


def _trainings(number: int) -> list[Job]:
    """Trainings of each algorithm on its environment `number`."""
    found = []
    for algorithm, (*environments, flags) in TRAINED.items():
        for name, policy in (
            ("gpu_only.1", "--policy gpu_only --devices 1"),
            ("gpu_only.4", "--policy gpu_only --devices 4"),
            ("split", TEXT_SPLIT if algorithm in TEXT_ALGORITHMS else COARSE),
        ):
            line = f"--algo {algorithm} --env {environments[number]} {policy} {flags}"
            found.append(_training(f"train.{algorithm}.{environments[number]}.{name}", line))
    return found


def _special_jobs() -> list[Job]:
    return [_training(name, *lines) for name, lines in SPECIAL.items()]


def _training(name: str, first: str, *others: str) -> Job:
    evaluation = "" if "--eval-episodes" in first else " --eval-episodes 0"
    lines = [f"{first} --seed 7{evaluation} --out run", *(f"--resume run {line}" for line in others)]
    return Job(name.replace(":", "-"), "train", lines)


def _plans() -> list[Job]:
    found = []
    for policy, kind, devices, fields in _PLANS:
        for algorithm, env, job in _PLANNED[kind]:
            words = [f"{name}={value}" for name, value in fields.items()]
            name = ".".join(["plan", algorithm, policy, str(devices), *words, *(["seeds"] if job else [])])
            arguments = {
                "algo": algorithm, "env": env, "policy": policy, "devices": devices, "fields": fields, **job
            }  # fmt: skip
            found.append(Job(name, "plan", arguments))
    return found


def _messages() -> list[Job]:
    modules = ("test_mistakes", "test_arguments")
    return [Job(f"messages.{module}", "messages", f"tests.mistakes.{module}") for module in modules]
