"""The command line of `fdg train` and `fdg plan`: values, defaults, and one-line errors."""

import json
import os
import re
from pathlib import Path

import pytest

import policies
from fdg.commands import parse as command_line
from fdg.commands.calibrate_machine import main as calibrate_main
from fdg.commands.cli import plan_main, train_main
from tests.refusing import refused

WALK = ["--algo", "tests.tiny:Walk"]


def parse(words):
    return command_line.parse(words.split() if isinstance(words, str) else words, "train", "")


@pytest.fixture
def run(tmp_path):
    """The directory of a finished run."""
    path = tmp_path / "run"
    assert train_main([*WALK, "--total-steps", "16", "--devices", "1", "--out", str(path)]) == 0
    return path


def refuse(capsys, words, command=train_main):
    return refused(capsys, words, command)


ERRORS = {
    # unknown names
    "--env CartPole-v2": "unknown environment 'CartPole-v2': did you mean 'CartPole-v1'?",
    "--env cartpole-v1": "did you mean 'CartPole-v1'?",
    "--algo pppo": "unknown algorithm 'pppo': did you mean 'ppo'?",
    "--policy gpu_onyl": "unknown policy 'gpu_onyl': did you mean 'gpu_only'?",
    "--num-env 3": "unknown flag '--num-env': did you mean '--num-envs'?",
    "--qqq 3": "unknown flag '--qqq' (--help lists them all)",
    "--total_step=3": "unknown flag '--total-step': did you mean '--total-steps'?",
    "stray": "'stray' does not belong to a flag: write --NAME VALUE",
    "algo=a2c": "'algo=a2c' does not belong to a flag: write --algo a2c",
    "--track": "unknown flag '--track': --wandb PROJECT logs to Weights & Biases",
    "--device cuda": "unknown flag '--device': JAX uses the accelerators that it finds: --devices N says",
    "--env chat.jsonl": "environment 'chat.jsonl' is a file of data: write text:file?path=chat.jsonl",
    "--algo sft --train_dataset chat.jsonl": "a file of data is the environment: --env text:file?path=FILE",
    "--env mazes.py": "unknown environment 'mazes.py': write one of your own as mazes:NAME",
    "--algo algos/ppo.py": "unknown algorithm 'algos/ppo.py': write one of your own as algos.ppo:NAME",
    "--algo sunset": "unknown algorithm 'sunset' (known: a2c, a3c, ",
    # values of the wrong type
    "--learning-rate fast": "--learning-rate: 'fast' is not a number",
    "--learning-rate nan": "--learning-rate: 'nan' is not a number",
    "--seed 1.5": "--seed: '1.5' is not an integer",
    "--seed": "--seed takes one value: write --seed INT",
    "--env-workers 1.5": "a ray:... or gymnasium:... environment): write --env-workers 1",
    "--devices two": "--devices: 'two' is not an integer",
    "--clip-value 3": "--clip-value: '3' is not true or false",
    "--activation tan": "'tan' is not one of tanh, relu, silu, gelu, elu (did you mean 'tanh'?)",
    "--hidden 64 wide": "--hidden: 'wide' is not an integer or none: write --hidden 64 64",
    "--learning-rate 1e-3,1e-4": "give one value; --sweep learning_rate=1e-3,1e-4 tries several",
    "--network mine": "network='mine': it must be an algos.Network(init, apply), a module of Flax or Equinox",
    "--env CartPole-v1?200": "'200' is not PARAMETER=VALUE: write CartPole-v1?steps=200",
    "--env CartPole-v1?frame_stack=4,hide_observations=(1,3)": "by &: write CartPole-v1?frame_stack=4&",
    "--env CartPole-v1?hide_observations=(1,3);frame_stack=4": "v1?hide_observations=(1,3)&frame",
    "--env CartPole-v1?time_aware=True?frame_stack=4": "write CartPole-v1?time_aware=True&frame_stack=4",
    "--env CartPole-v1?num_envs=8": "it is a setting of the algorithm: algos.PPO(env=..., num_envs=8)",
    "--env CartPole-v1?stepz=200": "environment 'CartPole-v1': unknown parameter 'stepz'",
    "--env gymnasium:CartPole-v1?timeout=inf": "timeout=inf must be above 0 and at most 1e6 seconds",
    # sizes
    "--num-envs 0": "num_envs=0: it must be above zero",
    "--num_envs=-4": "num_envs=-4: it must be above zero",
    "--num-steps 0": "num_steps=0: it must be above zero",
    "--num-epochs -1": "num_epochs=-1: it must be above zero",
    "--num-minibatches 0": "num_minibatches=0: it must be above zero",
    "--hidden 64 0": "hidden=(64, 0): widths must be above zero",
    "--total-steps 0": "total_steps=0: it must be above zero",
    "--total-steps 511": "--total-steps 511 is less than one iteration of 512",
    "--num-seeds 0": "--num-seeds 0: it must be at least 1",
    "--devices 0": "--devices 0: it must be at least 1",
    "--devices -1": "--devices -1: it must be at least 1",
    "--devices 1000": "use --devices ",
    "--eval-episodes -1": "--eval-episodes -1: it must be at least 0",
    "--checkpoint-every 0": "--checkpoint-every 0: it must be at least 1",
    "--stop-at 100": "needs evaluations during training: give --eval-every N",
    "--seed -1": "--seed -1: it must be at least 0",
    "--seed 4294967296": "seeds are below 4294967296: give at most 4294967295",
    "--staleness -1": "--staleness -1: it must be at least 0",
    "--staleness 1": "use --max-staleness 1, or name a policy, such as --policy single_learner_coarse",
    "--lag 1": "chooses among whole iterations (--max-staleness 1): name a policy, such as --policy split",
    "--lag -1": "--lag -1: it must be at least 0",
    "--policy gpu_only --lag auto": "--lag auto: under gpu_only, actors always have the newest parameters",
    "--policy gpu_only --staleness 1": "under gpu_only, actors always have the newest parameters",
    "--policy central --actors 3": "'--actors' under --policy central, which has --workers, --servers",
    "--policy auto --measure true": "'--measure': --policy auto:measure compiles and times",
    "--workers 3": "it is a flag of --policy single_learner_fine, environments, central",
    "--policy gpu_only --workers 3": "under --policy gpu_only, which has --model-parallel, --parameters: it",
    "--algo pqn --memory gru": "'--memory' under --algo pqn: it is a flag of --algo recurrent_ppo, ippo",
    "--batch-size 64": "--num-minibatches N makes minibatches of num_envs * num_steps / N samples; it is",
    "--minibatch-size=64": "--num-minibatches N makes minibatches of num_envs * num_steps / N samples",
    "--algo dqn --clip-eps 0.1": "unknown flag '--clip-eps' under --algo dqn: it is a flag of --algo ",
    "--memory gru --n-step 3": "recurrent_ppo (PPO with a --memory): it is a flag of --algo dqn",
    "--policy MlpPolicy": "'MlpPolicy' is a network, which follows from the observation here: leave it out",
    "--policy cnnlstmpolicy": "policy 'cnnlstmpolicy' is a network",
    "--sweep lr=1e-4..1e-2": "is a range: write learning_rate=log:1e-4..1e-2x8",
    "--sweep discount=0..1x4": "is a range: write discount=lin:0..1x8",
    "--policy central --workers 0": "workers=0: give a whole number of at least 1",
    "--policy single_learner_fine --staleness 1": "use --policy single_learner_coarse or central",
    "--learning-rate -1e-3": "learning_rate=-0.001: it must be above zero",
    "--learning-rate -inf": "learning_rate=-inf: it must be above zero",
    "--stop-at -nan": "--stop-at: '-nan' is not a number",
    # user-defined algorithms
    "--algo tests.tiny:Continuous": "that of CartPole-v1 is Discrete(n=2): use --algo ppo, ",
    "--algo tests.tiny:Walc": "unknown algorithm in tests.tiny 'Walc': did you mean 'Walk'?",
    "--algo json:JSONDecoder": "an algorithm is a class with init(key) and iterate(state)",
    "--algo nowhere.at_all:Mine": "there is no module 'nowhere.at_all'",
    "--algo ./tests/tiny.py:Walk": "write tests.tiny:Walk",
    "--algo tests.tiny:Walk --env CartPole-v1": "--env CartPole-v1: tests.tiny:Walk has its own environment",
    "--algo tests.tiny:Walk --num-envs 0": "num_envs=0 must be above zero",
    "--algo tests.tiny:Walk --total-steps 7": "--total-steps 7 is less than one iteration of 8",
    "--algo tests.tiny:Walk --total-steps 0": "--total-steps 0 is less than one iteration of 8",
    "--algo tests.tiny:Endless": "tests.tiny:Endless needs --rate: it has no default",
    "--algo tests.tiny:Endless --rate 1": "has no attribute steps_per_iteration",
    # directories
    "--out": "--out takes one value: write --out NAME",
    "--out=": "--out '': the value is empty: give a directory",
    "--out /dev/null": "--out /dev/null is a file: give a directory",
    "--out /dev/null/below": "--out /dev/null/below cannot be made: /dev/null is a file",
    "--algo tests.tiny:Walk --devices 1 --out /proc/nowhere": "--out /proc/nowhere cannot be written to",
    "--out \udcff": "\\udcff: its name is not UTF-8: give another directory",
    "--resume \udcff": "\\udcff: its name is not UTF-8: give another directory",
    "--resume": "--resume needs a run directory: --resume runs/NAME",
    "--resume /nowhere": "no run in /nowhere (it has no config.json): leave out --resume to start one",
    "--from /nowhere": "--from: no run in /nowhere (it has no config.json): give the run directory",
    "--resume a --out b": "--resume a and --out b are two directories",
}


@pytest.mark.parametrize("words", ERRORS)
def test_errors(words, capsys):
    assert ERRORS[words] in refuse(capsys, words.split())


def test_unknown_flag_lists_the_known_ones(capsys):
    line = refuse(capsys, ["--kind", "H100"], calibrate_main)
    assert "unknown flag '--kind': known are --out, --disturbed, --show" in line


def test_indivisible_batches_are_refused(capsys, host_devices):
    pupil = "--algo tests.tiny:Pupil"
    line = refuse(capsys, f"{pupil} --num-envs 6 --devices 4".split())
    assert "--num-envs 6 is not divisible by --devices 4" in line
    assert "use --num-envs 4 or 8, or --devices 3" in line
    line = refuse(capsys, f"{pupil} --num-seeds 3 --devices 2".split())
    assert "--num-seeds 3 is not divisible by --devices 2: use --num-seeds 2 or 4, or --devices 1" in line
    line = refuse(capsys, f"{pupil} --num-envs 1 --devices 2".split())
    assert "use --num-envs 2, or --devices 1" in line


def test_group_size_must_divide_the_batch(capsys, host_devices, monkeypatch, tmp_path):
    """An explicit group size is kept, or refused before compilation; a default one adapts to the batch."""
    words = ["--algo", "tests.tiny:Pupil", "--policy", "single_learner_coarse", "--devices", "4"]
    words += ["--num-envs", "64", "--total-steps", "16", "--out", str(tmp_path / "run")]
    assert train_main(words) == 0
    idle = "idle: 2 (actors: a batch of 64 divides over 2 of 3 devices)"
    assert idle in capsys.readouterr().out
    assert plan_main(words) == 0 and idle in capsys.readouterr().out

    def fail(*_):
        raise AssertionError("it was compiled")

    monkeypatch.setattr("fdg.engine.Engine", fail)
    words[-1] = str(tmp_path / "other")
    line = refuse(capsys, [*words, "--actors", "3"])
    assert "SingleLearnerCoarse(actors=3" in line and "'act' (actor) has a batch of 64" in line
    assert "is not divisible by the 3 devices of its actors: use 2, or a batch of 63 or 66" in line
    line = refuse(capsys, [*words, "--actors", "2", "--learners", "3"])
    assert "needs 2 actors + 3 learners = 5 devices, but there are 4" in line
    assert not (tmp_path / "other").exists()


def test_unwritable_directory(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # file modes do not restrict root
    assert "no permission to write" in refuse(capsys, ["--out", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


def test_run_is_not_overwritten(capsys, run):
    before = {path.name: path.stat().st_mtime_ns for path in run.iterdir()}
    assert f"already contains a run: give another directory, or go on with --resume {run}" in refuse(
        capsys, [*WALK, "--out", str(run)]
    )
    assert before == {path.name: path.stat().st_mtime_ns for path in run.iterdir()}


def test_other_files_are_not_overwritten(capsys, tmp_path):
    (tmp_path / "summary.json").write_text("mine")
    assert "already contains summary.json" in refuse(capsys, [*WALK, "--out", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_resume_refuses_other_settings(capsys, host_devices, run):
    resume = ["--resume", str(run), "--trust"]
    assert "--scale 0.5 contradicts the run's 0.1" in refuse(capsys, [*resume, "--scale", "0.5"])
    assert "--seed 1 contradicts the run's 0" in refuse(capsys, [*resume, "--seed", "1"])
    assert "--num-seeds 2 contradicts the run, which was trained without it" in refuse(
        capsys, [*resume, "--num-seeds", "2"]
    )
    assert "has already run 2 iterations, but --total-steps asks for 1" in refuse(
        capsys, [*resume, "--total-steps", "8"]
    )
    assert "--algo ppo contradicts the run's tests.tiny:Walk" in refuse(capsys, [*resume, "--algo", "ppo"])
    assert train_main([*resume, "--scale", "0.1", "--devices", "2"]) == 0


def test_values():
    job = parse(
        "--algo tests.tiny:Walk --num_envs 1_6 --scale -1e-3 --label none --widths 4 5 --width 7 --drifts"
        " --total-steps 8e2 --seed=3 --num-seeds 2 --devices 4 --eval-episodes 0 --checkpoint-every 5 --out x"
    )
    walk = job.algorithm
    assert (walk.num_envs, walk.scale, walk.label, walk.widths) == (16, -1e-3, "none", (4, 5))
    assert (walk.width, walk.drifts) == (7, True)
    assert (job.num_iterations, job.seed, job.agents, job.devices) == (100, 3, 2, 4)
    assert (job.eval_episodes, job.checkpoint_every, job.out) == (0, 5, Path("x"))
    again = parse("--algo tests.tiny:Walk --widths 4,5 --width none --no-drifts --num-seeds none").algorithm
    assert (again.widths, again.width, again.drifts) == ((4, 5), None, False)
    assert parse("--algo tests.tiny:Walk --drifts false").algorithm.drifts is False


def test_defaults():
    job = parse("")
    assert (job.config["algo"], job.config["env"], job.config["policy"]) == ("ppo", "CartPole-v1", "auto")
    assert not job.explains and parse("--policy auto").explains
    assert job.algorithm.total_steps == 500_000 and job.algorithm.env.name == "CartPole-v1"


@pytest.mark.parametrize("flag", ["--model-parallel 1", "--parameters=fsdp"])
def test_gpu_only_flags_select_the_policy(flag):
    assert parse(flag).config["policy"] == "gpu_only"


def test_environment_parameters():
    import envs

    job = parse("--env CartPole-v1?max_steps_in_episode=200&gravity=9.0")
    assert job.algorithm.env == envs.make("CartPole-v1", max_steps_in_episode=200, gravity=9.0)
    assert job.config["env"] == "CartPole-v1?max_steps_in_episode=200&gravity=9.0"


def test_configuration_round_trip(tmp_path):
    words = (
        "--env Pendulum-v1 --hidden 32 16 --max-grad-norm inf --shuffle time --no-clip-value --num-seeds 2"
    )
    job = parse(words)
    (tmp_path / "config.json").write_text(json.dumps(job.config, allow_nan=False))
    again = parse(["--resume", str(tmp_path)])
    assert again.resumes and again.out == tmp_path
    assert (again.algorithm, again.policy, again.config) == (job.algorithm, job.policy, job.config)


def test_help_shows_preset_values(capsys):
    assert train_main(["--env", "Pendulum-v1", "--help"]) == 0
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "--discount FLOAT gamma, the discount per step (in a game per move, in a text per" in text
    assert "per token) (default: 0.95)" in text
    assert "--shuffle {each,all,time}" in text and "--staleness INT" in text and "--resume [DIR]" in text
    assert train_main([*WALK, "--help"]) == 0
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "--scale FLOAT of one step (default: 0.1)" in text and "--widths N [N ...] (default: 2 3)" in text


def test_plan_needs_no_devices_and_writes_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert plan_main("--policy gpu_only --num-envs 128 --devices 64 --out here".split()) == 0
    text = capsys.readouterr().out
    assert "FDG of PPO" in text and "places PPO on 64 devices" in text and "all-reduce" in text
    assert not list(tmp_path.iterdir())
    assert "unknown environment" in refuse(capsys, ["--env", "CartPole"], plan_main)


@pytest.mark.parametrize("policy", policies.names())
def test_plan_for_absent_devices(policy, capsys):
    batch = 62 if policy in ("standalone", "workers") else 63  # one device is for the reference or the actor
    assert plan_main(["--policy", policy, "--devices", "64", "--num-envs", str(batch)]) == 0
    text = capsys.readouterr().out
    assert "FDG of PPO" in text and "places PPO on 64 devices" in text and "memory per device" in text
    assert repr(policies.get(policy)()) in text
    assert re.search(rf"\b0-{batch - 1}\b", text)  # devices of the environments


@pytest.mark.parametrize(
    "words",
    [
        "--config {}", "--resume {}", "--from {}", "--out {}", "--program-cache {}",
        "--algo sft --env text:sorting --model {}", "--algo grpo --env text:sorting --reward-model {}",
    ],
)  # fmt: skip
def test_too_long_paths(words, capsys, monkeypatch, tmp_path):
    """`Path.exists` and the like raise an error for such a path, instead of returning False."""
    monkeypatch.chdir(tmp_path)
    for name in ("x" * 3000, "y/" + "x" * 300):
        line = refuse(capsys, [*words.format(name).split(), "--total-steps", "16"])
        assert len(line) < 1500, line
