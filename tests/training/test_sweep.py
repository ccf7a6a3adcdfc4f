"""Sweeps: floats may be traced, agents have the numbers of runs of their own, and can be taken out."""

import csv
import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import partial_eval

import algos
import envs
import fdg
from algos.agent import Agent
from fdg.commands.cli import train_main
from fdg.errors import FdgError
from fdg.fragment import with_numbers
from fdg.settings.fields import structural
from fdg.training import curves, loop
from fdg.training.space import grid_text, make_grid, parse_grid
from fdg.training.sweep import Sweep
from fdg.training.sweep_results import PointResult, best_index, point_results
from tests.refusing import refused, refuses
from tests.training.descent import Descent, assert_close
from tests.training.trained import assert_same, small, timeless


@pytest.fixture(scope="module", autouse=True)
def _without_learning_curves():
    """Which take as long as the runs here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "draw_learning_curve", lambda *_, **__: None)
        yield


# --- the text of a grid ---


def test_grid_there_and_back():
    grid = parse_grid("learning_rate=1e-4,3e-4 discount=lin:0.9..0.99x4")
    assert parse_grid(grid_text(grid)) == grid
    assert [len(values) for _, values in grid] == [2, 4]
    np.testing.assert_allclose(grid[1][1], [0.9, 0.93, 0.96, 0.99])
    factors = make_grid({"learning_rate": "log:1e-4..1e-2x8"})[0][1]
    np.testing.assert_allclose(np.diff(np.log(factors)), np.log(100) / 7, rtol=1e-6)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "nothing to try"),
        ("learning_rate", "has no values"),
        ("=3", "has no values"),
        ("rate=1,,2", "'' is not a number"),
        ("rate=1,nan", "'nan' is not a number"),
        ("rate=1e99", "float32"),
        ("rate=1 rate=2", "rate is given twice"),
        ("rate=0.1,0.10000000001", "twice (as float32)"),
        ("rate=log:0..1x3", "begins above 0"),
        ("rate=log:1..0.1x3", "from the lower to the higher number"),
        ("rate=log:1e-4..1e-2", "log:LOW..HIGHxCOUNT"),
        ("rate=lin:0..1x1", "2 values or more"),
        ("rate=lin:0..1x200 pull=lin:0..1x200", "more than 10,000 points"),
        ("rate=lin:0..1x" + "1" * 5000, "LOW..HIGHxCOUNT"),
    ],
)
def test_grid_mistakes(text, said):
    with refuses(said):
        parse_grid(text)


@pytest.mark.parametrize(
    "given",
    [
        {"rate": True},
        {"rate": None},
        {"rate": []},
        {"rate": [[1.0]]},
        {},
        3,
        "rate",
        [0.1],
        [("rate",)],
        None,
    ],
)
def test_grid_mistakes_in_python(given):
    with pytest.raises(FdgError):
        make_grid(given)
    with pytest.raises(FdgError):
        Sweep(Descent(), given)


def test_a_sweep_takes_what_fdg_sweep_takes():
    values = {"rate": [0.05, 0.2], "offset": [0.0, 1.0]}
    assert Sweep(Descent(), values) == Sweep(Descent(), make_grid(values))


# --- which hyperparameters can be swept ---

# Have PPO's floats, and its code where they are used; has the step size alone.
_ALIKE = ("ippo", "mappo", "bc")


@pytest.mark.parametrize(
    "name", [name for name in algos.names() if issubclass(algos.get(name), Agent) and name not in _ALIKE]
)
def test_every_float_is_in_the_program(name):
    """Each float that does not decide what the program is, all at once: traced, and used."""
    cls = algos.get(name)
    alone = "Pendulum-v1" if envs.Box in cls.action_spaces else getattr(cls, "default_env", "CartPole-v1")
    env = envs.make("probe:agents" if cls.several_agents else alone)
    sizes = {
        "num_minibatches": 1,
        "atoms": 3,
        "num_epochs": 1,
        "batch_size": 4,
        "updates_per_step": 1.0,
        "max_error": 1.0,
        "priority_exponent": 0.5,
        "rnd": name != "alphazero",
    }
    fields = {field.name for field in dataclasses.fields(cls)}
    if name in ("qr_dqn", "c51"):
        fields -= {"max_error"}  # refused: its loss is another
    algorithm = cls(
        env=env, num_envs=4, num_steps=2, hidden=(4,), **{k: v for k, v in sizes.items() if k in fields}
    )
    floats = [
        field.name
        for field in dataclasses.fields(cls)
        if re.search(r"\bfloat\b", str(field.type))
        and field.name not in structural(cls)
        and (name != "alphazero" or field.metadata.get("only_with") != "rnd")  # refused there
    ]
    values = {
        field: 0.5 if getattr(algorithm, field) is None else getattr(algorithm, field) for field in floats
    }
    numbers = {field: jnp.float32(value) for field, value in values.items()}
    assert Sweep(algorithm, make_grid(values)).points == [values]

    def whole(numbers):
        own = with_numbers(algorithm, numbers)
        state = own.init(jax.random.key(0))
        return own.iterate(state)

    jaxpr = jax.make_jaxpr(whole)(numbers).jaxpr
    assert len(numbers) >= 5
    _, used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    unread = [field for field, is_used in zip(sorted(numbers), used, strict=True) if not is_used]
    # Discrete actions have no standard deviation.
    assert set(unread) <= ({"initial_log_std"} if isinstance(env.action_space, envs.Discrete) else set())


@pytest.mark.parametrize(
    ("algorithm", "values", "said"),
    [
        (small(), {"num_envs": [4, 8]}, "num_envs of PPO is not a float"),
        (small(), {"anneal_learning_rate": [0, 1]}, "is not a float"),
        (small(), {"learning_rat": [0.1]}, "did you mean 'learning_rate'?"),
        (small("dqn"), {"priority_exponent": [0, 0.5]}, "decides whether there are priorities"),
        (small("dqn"), {"updates_per_step": [0.125, 0.25]}, "decides how often a loop runs"),
        (small(), {"learning_rate": [0.1, -0.1]}, "learning_rate=-0.1: it must be above"),
        (small(), {"discount": [0.9, 1.5]}, "it must be from 0 to 1"),
        (Descent(), {"rate": [-1.0]}, "rate=-1: rate=-1.0: it must not be negative"),
        (Descent(), {"width": [3]}, "a sweep can have rate, pull, offset"),
        (object(), {"rate": [1.0]}, "has no fields"),
    ],
)  # fmt: skip
def test_what_cannot_be_swept(algorithm, values, said):
    with refuses(said):
        Sweep(algorithm, make_grid(values))


@dataclasses.dataclass(frozen=True)
class Undecided(Descent):
    """Decides in Python by one of its floats."""

    def iterate(self, state):
        state, metrics = super().iterate(state)
        return state, metrics if self.pull > 1.0 else {**metrics, "small": jnp.float32(1.0)}


def test_an_algorithm_that_asks_for_the_number():
    sweep = Sweep(Undecided(), make_grid({"rate": [0.1, 0.2], "pull": [1.0, 2.0]}))
    with refuses(match=r"Undecided branches in Python on pull, .*--search pull="):
        fdg.trace(sweep)


# --- the numbers ---


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A2C on CartPole (whose program is the smallest), two step sizes and two seeds."""
    return fdg.sweep(
        small("a2c", hidden=(8,)),
        {"learning_rate": [1e-3, 3e-2], "entropy_coefficient": 0.0},
        num_seeds=2,
        seed=3,
        total_steps=4 * 32,
        devices=2,
        eval_episodes=8,
        out=tmp_path_factory.mktemp("sweep") / "run",
        progress=False,
    )


@pytest.fixture(scope="module")
def separate(tmp_path_factory):
    """One of those agents, in a run of its own."""
    return fdg.fit(
        small("a2c", hidden=(8,), learning_rate=3e-2, entropy_coefficient=0.0),
        seed=4,
        total_steps=4 * 32,
        devices=1,
        eval_episodes=8,
        out=tmp_path_factory.mktemp("separate") / "run",
        progress=False,
    )


def test_agent_by_agent(swept, separate):
    member = swept.member(learning_rate=3e-2, seed=4)
    assert member.algorithm == separate.algorithm and member.seed == 4 and member.num_seeds is None
    assert_close(member.state, separate.state)
    each = [row["episode_return_per_seed"][3] for row in swept.metrics]
    assert each == [row["episode_return"] for row in separate.metrics]
    assert swept.summary["eval_returns"][3] == separate.summary["eval_return"]


def test_files_and_best(swept):
    said = json.loads((swept.path / "sweep.json").read_text())
    assert said["measure"] == "greedy evaluation after training" and said["num_seeds"] == 2
    means = [point["mean"] for point in said["points"]]
    evaluated = swept.summary["eval_returns"]
    np.testing.assert_allclose(means, np.reshape(evaluated, (2, 2)).mean(axis=1))
    assert said["best"]["point"] == int(np.argmax(means))
    assert swept.best.algorithm.learning_rate == said["best"]["values"]["learning_rate"]
    assert swept.best.num_seeds == 2 and swept.best.seed == 3
    with (swept.path / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["learning_rate"]) for row in rows] == [1e-3, 3e-2]
    assert float(rows[1]["return_1"]) == pytest.approx(evaluated[3])
    assert (swept.path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert swept.summary["seeds"] == [3, 4, 3, 4]
    config = json.loads((swept.path / "config.json").read_text())
    assert config["sweep"] == "learning_rate=0.001,0.03 entropy_coefficient=0.0" and config["num_seeds"] == 2


def test_loaded_and_plotted(swept):
    loaded = fdg.load(swept.path)
    assert loaded.algorithm == swept.algorithm and (loaded.agents, loaded.num_seeds) == (4, 2)
    assert loaded.best.algorithm == loaded.member("best").algorithm == swept.best.algorithm
    assert loaded.member(agent=3).algorithm.learning_rate == 3e-2
    _, found = curves.compare([swept.path])
    assert [len(curve.y) for curve in found] == [2, 2]
    assert [curve.label.rpartition(", ")[2] for curve in found] == [
        "learning_rate=0.001",
        "learning_rate=0.03",
    ]
    with pytest.raises(FdgError, match="only as a mean over all agents"):
        curves.compare([swept.path], metric="loss")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"learning_rate": 0.5}, "no point has learning_rate=0.5"),
        ({}, "2 points have those values"),
        ({"learning_rat": 0.5}, "did you mean 'learning_rate'?"),
        ({"agent": 4}, "4 agents, 0 to 3"),
        ({"agent": 0, "seed": 3}, "leave out seed"),
        ({"learning_rate": 1e-3, "seed": 5}, "seed"),
    ],
)
def test_no_such_member(swept, asked, said):
    with refuses(said):
        swept.member(**asked)


def test_a_run_that_is_no_sweep_has_no_members(separate):
    with pytest.raises(FdgError, match="is not a sweep"):
        separate.member(agent=0)
    with pytest.raises(FdgError, match="is not a sweep"):
        _ = separate.best


@pytest.mark.parametrize("exploit_every", [None, 3])
def test_resumed_bit_for_bit(tmp_path, exploit_every):
    """A grid, and a population that is stopped between two exchanges."""

    def one(out, **settings):
        return fdg.sweep(
            Descent(), {"rate": [0.1, 0.3]}, num_seeds=2, total_steps=64, checkpoint_every=2, out=out,
            devices=2, progress=False, exploit_every=exploit_every, **settings,
        )  # fmt: skip

    whole = one(tmp_path / "whole")
    half = one(tmp_path / "half", callbacks=[lambda report: report.iteration >= 4])
    assert 4 <= half.iteration < 8 and not half.finished
    (tmp_path / "half" / "summary.json").unlink()
    again = one(tmp_path / "half", resume=True)
    assert again.iteration == 8
    assert_same(whole.state, again.state)
    assert timeless(again.path) == timeless(whole.path)
    rates = set(np.asarray(whole.state.hyperparameters["rate"]).tolist())
    assert (rates == {np.float32(0.1), np.float32(0.3)}) == (exploit_every is None)
    with pytest.raises(FdgError, match="sweep="):
        fdg.sweep(
            Descent(), {"rate": [0.1, 0.2]}, num_seeds=2, total_steps=64, out=tmp_path / "half", resume=True
        )


# --- what came of it, by hand ---


def test_results_by_hand():
    sweep = Sweep(Descent(), make_grid({"rate": [0.1, 0.2]}), num_seeds=2)
    rows = [
        {"env_steps": 10 * (i + 1), "episode_return_per_seed": [1.0 * i, 3.0 * i, None, 4.0]}
        for i in range(10)
    ]  # fmt: skip
    found = point_results(sweep, rows, None)
    assert found[0].returns.tolist() == [9.0, 27.0] and found[0].mean == 18.0
    assert found[0].training == 9.0  # of 4.5 and 13.5
    assert np.isnan(found[1].mean) and found[1].interval is None
    assert best_index(found) == 0  # a point that lost an agent comes last
    evaluated = point_results(sweep, rows, [1.0, 2.0, 3.0, 4.0])
    assert [one.mean for one in evaluated] == [1.5, 3.5] and best_index(evaluated) == 1
    lost = point_results(sweep, rows, [1.0, 2.0, 3.0, 4.0], failed=[3], seed=10)[1].entry()
    assert np.isnan(lost["mean"]) and lost["failed_seeds"] == [11]  # the second seed of its point
    low, high = evaluated[1].interval
    assert 3.0 <= low <= 3.5 <= high <= 4.0


def test_an_interval_takes_several_seeds_that_are_all_known():
    def interval(*returns):
        return PointResult({"rate": 0.1}, range(len(returns)), np.array(returns), 0.0).interval

    for returns in [(1.0, 3.0), (1.0, 2.0, 3.0)]:
        low, high = interval(*returns)
        assert 1.0 <= low < 2.0 < high <= 3.0
    assert interval(2.0) is None and interval(1.0, 2.0, np.nan) is None and interval(1.0, np.inf) is None


# --- the command line ---


def test_command(tmp_path, capsys, host_devices):
    out = tmp_path / "run"
    words = f"--algo {__name__}:Descent --total-steps 64 --out {out} --devices 2 --trust"
    assert train_main([*words.split(), "--sweep", "rate=0.1,0.5", "pull=lin:1..2x2", "--num-seeds", "2"]) == 0
    said = capsys.readouterr().out
    assert "8 agents" in said and "best: return" in said and "by flags: --rate" in said
    assert max(map(len, said.splitlines())) <= 120
    assert len(json.loads((out / "sweep.json").read_text())["points"]) == 4
    assert train_main(["--resume", str(out), "--sweep", "rate=0.1", "--trust"]) == 2
    assert "contradicts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--sweep learning_rate=1e-3 --lr 1e-3", "leave out one of them"),
        ("--sweep", "--sweep takes a value or more: write --sweep NAME=VALUES"),
        ("--sweep num_envs=4,8", "--optuna"),
        ("--sweep lr=x", "not a number"),
        ("--exploit-every 5", "give them with --sweep"),
    ],
)
def test_command_mistakes(words, said, capsys, tmp_path):
    assert said in refused(capsys, [*words.split(), "--out", str(tmp_path / "run")], train_main)
    assert not (tmp_path / "run").exists()


def test_a_sweep_begins_with_weights(tmp_path):
    """Each agent with its own where there are as many, with the best one's where there are not."""

    def one(out, values, **settings):
        return fdg.sweep(
            Descent(), values, total_steps=8, devices=1, out=tmp_path / out, progress=False, **settings
        )

    first = one("first", {"rate": [0.1, 0.5]})
    for out, values, sources in (("as many", [0.0, 1e-9], [0, 1]), ("more", [0.0, 1e-9, 2e-9], None)):
        second = one(out, {"rate": values}, start_from=tmp_path / "first")
        sources = sources or [json.loads((first.path / "sweep.json").read_text())["best"]["agents"][0]] * 3
        assert_close(second.state.state["x"], first.state.state["x"][np.array(sources)])
        assert second.state.hyperparameters["rate"].tolist() == [np.float32(value) for value in values]
