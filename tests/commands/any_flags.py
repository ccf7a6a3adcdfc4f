"""Random command lines: existing and unknown flags, with valid and invalid values.

Flags come from the tables of the commands' parsers, so new flags are drawn too.
"""

import dataclasses
import functools
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import algos
import policies
from fdg.commands import calibrate_machine, cluster, launch_processes, using
from fdg.commands.flags import Flag, JobFlags, flags_of
from fdg.kinds import is_tuple, shown
from fdg.training.settings import Processes
from tests import tiny

NUMBERS = (
    *("0", "1", "2", "3", "7", "8", "16", "64", "-1", "1.5", "1e3", "1e-3", "-1e-3", ".5", "0x10", "1_000"),
    *("1e400", "-1e400", "inf", "-inf", "nan", "4294967295", "4294967296", "9223372036854775808", "1" * 5000),
)
WORDS = (
    *("", " ", "--", "-", "none", "None", "true", "no", "maybe", "ppo", "PPO", "all", "each", "fast", "{}"),
    *("{{}}", "[1]", "a=b", "=", "?", "a?b=c", "/dev/null", "\x00", "\udcff", "ünï", "x" * 3000),
)
ENVIRONMENTS = (
    *("CartPole-v1", "Pendulum-v1", "probe:value", "probe:memory", "Breakout-MinAtar", "CartPole-v2"),
    *("cartpole", "CartPole-v1?gravity=9.0", "CartPole-v1?gravity=", "CartPole-v1?max_steps_in_episode=0"),
    *("CartPole-v1?max_steps_in_episode=1e400", "CartPole-v1?max_steps_in_episode=99999999999999999999"),
    *("CartPole-v1?gravity={{}}", "CartPole-v1?gravity=[1]", "CartPole-v1?gravity=(1,", "CartPole-v1?=3"),
    *("CartPole-v1?{{}}", "probe:memory?delay=0", "probe:memory?delay=-1", "probe:memory?delay={{}}"),
    *("gymnasium:", "gymnasium:Nothing-v0", "envpool:", "brax:", "brax:nothing", "nowhere:maze"),
    *("text:addition", "text:sorting?length=3", "text:nothing", "text:", "text:addition?digits=0"),
    *("MPE_simple_spread_v3", "MPE_simple_spread_v3?num_agents=1", "tests.tiny:Walk", "tests.tiny:nothing"),
    *("json:loads", "gymnasium:CartPole-v1", "ray:CartPole-v1", "tests.mistakes:none"),
)
NO_ALGORITHMS = (
    *("PPO", "pppo", "nowhere:Mine", "tests.tiny:", ":", "tests.tiny:Endless", "tests.tiny:Continuous"),
    *("json:loads", "a:b:c", ""),
)
# Sweep grids and search spaces, valid and invalid.
GRIDS = (
    *("learning_rate=1e-3,1e-2", "lr=log:1e-4..1e-2x3", "discount=lin:0.9..0.99x2", "scale=0.1,0.2"),
    *("learning_rate=1e-3 discount=0.9,0.99", "num_envs=2,4", "learning_rate=", "learning_rate", "a=1"),
    *("learning_rate=nan", "learning_rate=1e400", "learning_rate=1,1", "learning_rate=log:0..1x3"),
    *("learning_rate=log:1..0x3", "learning_rate=lin:0..1x1", "learning_rate=log:1e-4..1e-2x999999"),
    *("learning_rate=-1,1", "clip_ratio=0.1,0.2 clip_ratio=0.3", "entropy_coefficient=0,0.01"),
    *("lambda=0.9,1"),
)
SPACES = (
    *("hidden=8/8,8 num_envs=2,4", "num_steps=8,16", "widths=2,3/4", "width=1,2", "label=a,b"),
    *("scale=0.1,0.2", "learning_rate=log:1e-4..1e-2", "num_envs=lin:2..4", "num_envs=0,1", "hidden=a"),
    *("nothing=1,2", "=", "num_steps=log:0..2", "num_steps=", "num_steps", "drifts=true,false"),
    *("activation=relu,tanh", "env=a,b"),
)
# Valid values that determine the length of a run are small.
BY_NAME: dict[str, Sequence[str]] = {
    "env": ENVIRONMENTS,
    "sweep": GRIDS,
    "search": SPACES,
    "optuna": ("1", "2", "0", "-1", "1.5", "x", "1e400"),
    "preset": ("none", "minatar", "CartPole-v1", "brax", "nothing", ""),
    "memory": ("gru", "lstm", "mingru", "transformer", "none", "gruu", ""),
    "resume": ("", "run", "damaged", "nowhere", "/dev/null", "x" * 3000),
    "start_from": ("", "run", "damaged", "nowhere", "/dev/null", "x" * 3000),
    "config": (
        "",
        "run",
        "run/config.json",
        "damaged/config.json",
        "nowhere",
        "/dev/null",
        "run/metrics.jsonl",
    ),
    "out": ("", "new", "new/below", "run", "/dev/null", "/dev/null/below", "x" * 3000, "\x00", "video.mp4"),
    "record": ("", "new.npz", "run", "/dev/null", "/dev/null/below", "x" * 3000, "\x00"),
    "iterations": ("1", "2", "0", "-1", "1.5", "x", "none", ""),
    "checkpoint": ("last", "best", "1", "0", "99", "-1", "x", ""),
    "member": ("best", "learning_rate=1e-3", "agent=1", "seed=1", "=", ""),
    "format": ("jax", "onnx", "pdf", ""),
    "actions": ("greedy", "sampled", "both", "none", ""),
    "metric": ("episode_return", "loss", "nothing", ""),
    "statistic": ("mean", "iqm", "median", ""),
    "x": ("env_steps", "wall_s", "iteration", ""),
    "num_processes": ("1", "2", "3", "0", "-1", "x", "1e400"),
    "restarts": ("0", "1", "2", "-1", "x", "1e400"),
    "cluster": ("nowhere.toml", "run/config.json", "/dev/null", ""),
    "xla_options": ("preset", "none", "xla_x=1", "a=b", "", "xla_cpu_prefer_vector_width=256"),
}
# One process cannot join and leave a multi-process run thousands of times.
PROCESSES = {flag.name for flag in flags_of(Processes)}
TEST_ALGORITHMS: Mapping[str, type] = {
    f"tests.tiny:{kind.__name__}": kind for kind in (tiny.Walk, tiny.Pupil, tiny.Silent)
}
UNKNOWN = ("hel", "qqq", "num_env", "learning-rat", "", "no-such", "no-halving", "lr-", "algo.name", "-", "é")
_WITHOUT_FLAG = ("resume", "start_from", "config", "help")  # parser options without a `Flag`


@functools.cache
def job_flags(algorithm: type, policy: type) -> dict[str, Flag]:
    """All flags of an algorithm under a policy, by each of their spellings."""
    flags = JobFlags.of(algorithm, policy)
    known = {name: Flag(name, str, None, "") for name in _WITHOUT_FLAG}
    known |= {flag.name: flag for group in flags.groups.values() for flag in group}
    return {option.lstrip("-"): known[name] for option, name in flags.parser("own").options().items()}


@functools.cache
def all_flags() -> dict[str, Flag]:
    """The flags of all algorithms, all policies and cluster plans."""
    known = {flag.option.lstrip("-"): flag for flag in cluster.FLAGS}
    for algorithm in (*map(algos.get, algos.names()), *TEST_ALGORITHMS.values()):
        known |= job_flags(algorithm, policies.GPUOnly)
    for policy in (*map(policies.get, policies.names()), policies.Auto):
        known |= job_flags(algos.PPO, policy)
    return known


def draw_line(rng: random.Random) -> tuple[str, list[str]]:
    """A random command and its arguments. If it trains, it trains a tiny algorithm for 64 steps."""
    if rng.random() < 0.08:
        command = rng.choice(("evaluate", "answer", "play", "export", "plot"))
        small = ["--max-steps", "4"] if command == "play" else []
        return command, [*small, *draw_run_command(rng, command)]
    if rng.random() < 0.05:
        command = rng.choice(("launch", "launch", "calibrate", "diff"))
        if command == "launch":
            return command, draw_launch(rng)
        if command == "diff":
            return command, [
                *rng.choices(("run", "damaged", "nowhere", ""), k=2),
                *_draw_flags(rng, using.COMMANDS["diff"].flags, 4),
            ]
        return command, _draw_flags(rng, calibrate_machine.FLAGS, 3)
    words = draw_words(rng)
    names = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in words}
    if any("tests.tiny:" in word for word in words) and not names & PROCESSES:
        return "train", [*words, "--total-steps", "64"]  # overrides earlier values
    return "plan", words


def draw_words(rng: random.Random) -> list[str]:
    """Random flags of a job: up to eight, most of them valid."""
    algorithm: type = algos.PPO
    policy: type = policies.GPUOnly
    words = []
    if rng.random() < 0.7:
        name = rng.choice([*algos.names(), *TEST_ALGORITHMS, *TEST_ALGORITHMS])
        algorithm = TEST_ALGORITHMS[name] if name in TEST_ALGORITHMS else algos.get(name)
        words += _spell(rng, "algo", name)
        if name in algos.names("text") and rng.random() < 0.8:
            words += _spell(rng, "env", rng.choice(ENVIRONMENTS[-14:]))
    elif rng.random() < 0.3:
        words += _spell(rng, "algo", rng.choice(NO_ALGORITHMS))
    if rng.random() < 0.4:
        name = rng.choice([*policies.names(), "auto"])
        policy = policies.Auto if name == "auto" else policies.get(name)
        words += _spell(rng, "policy", name)
    for _ in range(rng.randrange(6)):
        words += _draw_flag(rng, job_flags(algorithm, policy) if rng.random() < 0.8 else all_flags())
    return words


def draw_run_command(rng: random.Random, command: str) -> list[str]:
    """A run directory, and random flags of a command that uses a run."""
    words = [] if rng.random() < 0.05 else [rng.choice(("run", "run", "run", "damaged", "nowhere", ""))]
    return [*words, *_draw_flags(rng, using.COMMANDS[command].flags, 4)]


def draw_launch(rng: random.Random) -> list[str]:
    """Random flags of the launcher, then of a job, with or without `--` in between."""
    between = ["--"] if rng.random() < 0.7 else []
    return [*_draw_flags(rng, launch_processes.FLAGS, 3), *between, *draw_words(rng)]


def _draw_flags(rng: random.Random, flags: Sequence[Flag], below: int) -> list[str]:
    """Fewer than `below` random flags, with values."""
    known = {flag.option.lstrip("-"): flag for flag in flags}
    return [word for _ in range(rng.randrange(below)) for word in _draw_flag(rng, known)]


def values_of(flag: Flag) -> Sequence[str]:
    """Valid and invalid values of a flag."""
    if flag.name in BY_NAME:
        return BY_NAME[flag.name]
    kinds = (flag.kind, *get_args(flag.kind))
    choices = [str(one) for kind in kinds if get_origin(kind) is Literal for one in get_args(kind)]
    if choices:
        return (*choices, *choices, *WORDS[:12])
    if bool in kinds:
        return ("true", "false", "yes", "0", "1", "maybe", "", "none")
    if is_tuple(flag.kind):
        return (*NUMBERS, "8,8", "8,", ",", "0,8", "-1,8", "none", "8,x")
    return NUMBERS if int in kinds or float in kinds else (*WORDS, *NUMBERS)


def _draw_flag(rng: random.Random, known: Mapping[str, Flag]) -> list[str]:
    """A random flag with a value; rarely an unknown flag."""
    if rng.random() < 0.05:
        return _spell(rng, rng.choice(UNKNOWN), rng.choice((*WORDS, *NUMBERS)))
    name = rng.choice([*known])
    flag = known[name]
    if flag.default not in (None, dataclasses.MISSING) and rng.random() < 0.4:  # a valid value
        return _spell(rng, name, ",".join(shown(flag.default).split()))
    return _spell(rng, name, rng.choice(WORDS if rng.random() < 0.1 else values_of(flag)))


def _spell(rng: random.Random, name: str, value: str) -> list[str]:
    """`--name value` or `--name=value`, with dashes or underscores; rarely only the name or the value."""
    option = f"--{name.replace('-', '_')}" if rng.random() < 0.5 else f"--{name}"
    shape = rng.random()
    if shape < 0.45:
        return [option, *value.split(" ")] if name in ("sweep", "search") else [option, value]
    if shape < 0.95:
        return [f"{option}={value}"]
    return [option] if shape < 0.98 else [value]


def lay_out(folder: Path, run: Path) -> None:
    """Creates the run directories that command lines name: a finished one and a damaged one."""
    shutil.copytree(run, folder / "run")
    shutil.copytree(run, folder / "damaged")
    (folder / "damaged" / "config.json").write_text('{"algo": "ppo"')


def outcome(command: Callable[[list[str]], int], words: list[str], capsys: Any) -> str | None:
    """Runs a command: what is wrong with its status and errors, or None."""
    capsys.readouterr()
    try:
        status = command(words)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    errors = [
        line
        for line in capsys.readouterr().err.splitlines()
        if not line.startswith(("warning: ", "restart "))
    ]
    if status == 0:
        return f"it says {errors}" if errors else None
    if status != 2 or len(errors) != 1 or not errors[0].startswith("error: ") or len(errors[0]) > 1500:
        return f"status {status}, {len(errors)} lines: {errors[:3]}"
    return None
