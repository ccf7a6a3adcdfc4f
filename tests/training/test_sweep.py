"""Sweeps: grids, traced hyperparameters, members equal to single runs, resume, result statistics."""

import csv
import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.interpreters import partial_eval

import algos
import envs
import fdg
import policies
from algos.agent import Agent
from fdg.commands.cli import train_main
from fdg.errors import FdgError
from fdg.fragment import with_numbers
from fdg.settings.fields import structural
from fdg.training import curves
from fdg.training.space import grid_text, make_grid, parse_grid
from fdg.training.sweep import Sweep
from fdg.training.sweep_results import PointResult, best_index, point_results
from tests.refusing import refused, refuses
from tests.tiny import Walk
from tests.training.descent import Descent, assert_close
from tests.training.descent import single_run as run_alone
from tests.training.trained import assert_same, small, untimed_rows

# --- grids ---


def test_grid_round_trip():
    grid = parse_grid("learning_rate=1e-4,3e-4 discount=lin:0.9..0.99x4")
    assert parse_grid(grid_text(grid)) == grid
    assert [len(values) for _, values in grid] == [2, 4]
    np.testing.assert_allclose(grid[1][1], [0.9, 0.93, 0.96, 0.99])
    factors = make_grid({"learning_rate": "log:1e-4..1e-2x8"})[0][1]
    np.testing.assert_allclose(np.diff(np.log(factors)), np.log(100) / 7, rtol=1e-6)


@pytest.mark.parametrize(
    ("text", "message"),
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
def test_grid_errors(text, message):
    with refuses(message):
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
def test_grid_errors_in_python(given):
    with pytest.raises(FdgError):
        make_grid(given)
    with pytest.raises(FdgError):
        Sweep(Descent(), given)


def test_sweep_accepts_a_dict():
    values = {"rate": [0.05, 0.2], "offset": [0.0, 1.0]}
    assert Sweep(Descent(), values) == Sweep(Descent(), make_grid(values))


# --- which hyperparameters can be swept ---

# IPPO and MAPPO have PPO's floats and code; BC has only a learning rate.
_SKIPPED = ("ippo", "mappo", "bc")


@pytest.mark.parametrize(
    "name", [name for name in algos.names() if issubclass(algos.get(name), Agent) and name not in _SKIPPED]
)
def test_every_float_is_traced(name):
    """The program takes and uses every float field that does not determine its structure."""
    cls = algos.get(name)
    single = "Pendulum-v1" if envs.Box in cls.action_spaces else getattr(cls, "default_env", "CartPole-v1")
    env = envs.make("probe:agents" if cls.several_agents else single)
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
        fields -= {"max_error"}  # refused: their losses lack it
    algorithm = cls(
        env=env, num_envs=4, num_steps=2, hidden=(4,), **{k: v for k, v in sizes.items() if k in fields}
    )
    floats = [
        field.name
        for field in dataclasses.fields(cls)
        if re.search(r"\bfloat\b", str(field.type))
        and field.name not in structural(cls)
        and (name != "alphazero" or field.metadata.get("only_with") != "rnd")  # refused
    ]
    values = {
        field: 0.5 if getattr(algorithm, field) is None else getattr(algorithm, field) for field in floats
    }
    numbers = {field: jnp.float32(value) for field, value in values.items()}
    assert Sweep(algorithm, make_grid(values)).points == [values]

    def first_iteration(numbers):
        traced = with_numbers(algorithm, numbers)
        state = traced.init(jax.random.key(0))
        return traced.iterate(state)

    jaxpr = jax.make_jaxpr(first_iteration)(numbers).jaxpr
    assert len(numbers) >= 5
    _, used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    unused = [field for field, is_used in zip(sorted(numbers), used, strict=True) if not is_used]
    # Discrete actions have no standard deviation.
    assert set(unused) <= ({"initial_log_std"} if isinstance(env.action_space, envs.Discrete) else set())


GRPO = algos.make("grpo", envs.make("text:addition"))


@pytest.mark.parametrize(
    ("algorithm", "values", "message"),
    [
        (small(), {"num_envs": [4, 8]}, "num_envs of PPO is not a float"),
        (small(), {"anneal_learning_rate": [0, 1]}, "is not a float"),
        (small(), {"learning_rat": [0.1]}, "did you mean 'learning_rate'?"),
        (small("dqn"), {"priority_exponent": [0, 0.5]}, "decides whether there are priorities"),
        (small("dqn"), {"updates_per_step": [0.125, 0.25]}, "decides how often a loop runs"),
        (GRPO, {"kl_coefficient": [0.1, 0.2]}, "decides whether there is a reference: try its values"),
        (GRPO, {"overlong_buffer": [0.1, 0.2]}, "decides how many tokens have a penalty: try its values"),
        (small(), {"learning_rate": [0.1, -0.1]}, "learning_rate=-0.1: it must be above"),
        (small(), {"discount": [0.9, 1.5]}, "it must be from 0 to 1"),
        (Descent(), {"rate": [-1.0]}, "rate=-1: rate=-1.0: it must not be negative"),
        (Descent(), {"width": [3]}, "a sweep can have rate, pull, offset"),
        (object(), {"rate": [1.0]}, "has no fields"),
    ],
)  # fmt: skip
def test_invalid_sweeps(algorithm, values, message):
    with refuses(message):
        Sweep(algorithm, make_grid(values))


@dataclasses.dataclass(frozen=True)
class Undecided(Descent):
    """Branches in Python on one of its floats."""

    def iterate(self, state):
        state, metrics = super().iterate(state)
        return state, metrics if self.pull > 1.0 else {**metrics, "small": jnp.float32(1.0)}

    def evaluate(self, state, key, episodes):
        return {"return": -jnp.sum(state["x"]) if self.rate > 0 else jnp.float32(0)}


def test_python_branch_on_a_swept_float_is_refused():
    sweep = Sweep(Undecided(), make_grid({"rate": [0.1, 0.2], "pull": [1.0, 2.0]}))
    with refuses(match=r"Undecided branches in Python on pull, .*--search pull="):
        fdg.trace(sweep)
    state = jax.eval_shape(lambda: Sweep(Descent(), sweep.grid).init(jax.random.key(0)))
    with refuses(match="Undecided branches in Python on rate, .*--search rate="):
        jax.eval_shape(sweep.evaluate, state, jax.random.key(0), 1)


# --- runs ---


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A2C on CartPole (the smallest program), with two learning rates and two seeds."""
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
def single_run(tmp_path_factory):
    """A single run of one of these agents."""
    return fdg.fit(
        small("a2c", hidden=(8,), learning_rate=3e-2, entropy_coefficient=0.0),
        seed=4,
        total_steps=4 * 32,
        devices=1,
        eval_episodes=8,
        out=tmp_path_factory.mktemp("separate") / "run",
        progress=False,
    )


def test_member_matches_a_single_run(swept, single_run):
    member = swept.member(learning_rate=3e-2, seed=4)
    assert member.algorithm == single_run.algorithm and member.seed == 4 and member.num_seeds is None
    assert_close(member.state, single_run.state)
    each = [row["episode_return_per_seed"][3] for row in swept.metrics]
    assert each == [row["episode_return"] for row in single_run.metrics]
    assert swept.summary["eval_returns"][3] == single_run.summary["eval_return"]


def test_files_and_best(swept):
    result = json.loads((swept.path / "sweep.json").read_text())
    assert result["measure"] == "greedy evaluation after training" and result["num_seeds"] == 2
    means = [point["mean"] for point in result["points"]]
    evaluated = swept.summary["eval_returns"]
    np.testing.assert_allclose(means, np.reshape(evaluated, (2, 2)).mean(axis=1))
    assert result["best"]["point"] == int(np.argmax(means))
    assert swept.best.algorithm.learning_rate == result["best"]["values"]["learning_rate"]
    assert swept.best.num_seeds == 2 and swept.best.seed == 3
    with (swept.path / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["learning_rate"]) for row in rows] == [1e-3, 3e-2]
    assert float(rows[1]["return_1"]) == pytest.approx(evaluated[3])
    assert (swept.path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert swept.summary["seeds"] == [3, 4, 3, 4]
    config = json.loads((swept.path / "config.json").read_text())
    assert config["sweep"] == "learning_rate=0.001,0.03 entropy_coefficient=0.0" and config["num_seeds"] == 2


def test_load_and_plot(swept):
    loaded = fdg.load(swept.path)
    assert loaded.algorithm == swept.algorithm and (loaded.agents, loaded.num_seeds) == (4, 2)
    assert loaded.best.algorithm == loaded.member("best").algorithm == swept.best.algorithm
    assert loaded.member(agent=3).algorithm.learning_rate == 3e-2
    _, found = curves.plot_runs([swept.path])
    assert [len(curve.y) for curve in found] == [2, 2]
    assert [curve.label.rpartition(", ")[2] for curve in found] == [
        "learning_rate=0.001",
        "learning_rate=0.03",
    ]
    with pytest.raises(FdgError, match="only as a mean over all agents"):
        curves.plot_runs([swept.path], metric="loss")


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ({"learning_rate": 0.5}, "no point has learning_rate=0.5"),
        ({}, "the sweep has 2 points: give the values of one"),
        ({"learning_rat": 0.5}, "did you mean 'learning_rate'?"),
        ({"agent": 4}, "4 agents, 0 to 3"),
        ({"agent": 0, "seed": 3}, "leave out seed"),
        ({"learning_rate": 1e-3, "seed": 5}, "seed"),
    ],
)
def test_missing_member(swept, selection, message):
    with refuses(message):
        swept.member(**selection)


def test_single_run_has_no_members(single_run):
    with pytest.raises(FdgError, match="is not a sweep"):
        single_run.member(agent=0)
    with pytest.raises(FdgError, match="is not a sweep"):
        _ = single_run.best


@pytest.mark.parametrize("exploit_every", [None, 3])
def test_resume_is_bit_exact(tmp_path, exploit_every):
    """A grid, and a population that is stopped between two exploit steps."""

    def run(out, **settings):
        return fdg.sweep(
            Descent(), {"rate": [0.1, 0.3]}, num_seeds=2, total_steps=64, checkpoint_every=2, out=out,
            devices=2, progress=False, exploit_every=exploit_every, **settings,
        )  # fmt: skip

    reference = run(tmp_path / "reference")
    stopped = run(tmp_path / "part", callbacks=[lambda report: report.iteration >= 4])
    assert 4 <= stopped.iteration < 8 and not stopped.finished
    (tmp_path / "part" / "summary.json").unlink()
    again = run(tmp_path / "part", resume=True)
    assert again.iteration == 8
    assert_same(reference.state, again.state)
    assert untimed_rows(again.path) == untimed_rows(reference.path)
    rates = set(np.asarray(reference.state.hyperparameters["rate"]).tolist())
    assert (rates == {np.float32(0.1), np.float32(0.3)}) == (exploit_every is None)
    with pytest.raises(FdgError, match="sweep="):
        fdg.sweep(
            Descent(), {"rate": [0.1, 0.2]}, num_seeds=2, total_steps=64, out=tmp_path / "part", resume=True
        )


# --- statistics by hand ---


def test_results_by_hand():
    sweep = Sweep(Descent(), make_grid({"rate": [0.1, 0.2]}), num_seeds=2)
    rows = [
        {"env_steps": 10 * (i + 1), "episode_return_per_seed": [1.0 * i, 3.0 * i, None, 4.0]}
        for i in range(10)
    ]  # fmt: skip
    found = point_results(sweep, rows, None)
    assert found[0].returns.tolist() == [9.0, 27.0] and found[0].mean == 18.0
    assert found[0].training == 9.0  # mean of 4.5 and 13.5
    assert np.isnan(found[1].mean) and found[1].interval is None
    # A point with a missing return ranks last.
    assert best_index(found) == 0 and best_index(found[::-1]) == 1
    evaluated = point_results(sweep, rows, [1.0, 2.0, 3.0, 4.0])
    assert [point.mean for point in evaluated] == [1.5, 3.5] and best_index(evaluated) == 1
    failed = point_results(sweep, rows, [1.0, 2.0, 3.0, 4.0], failed=[3], seed=10)
    assert best_index(failed) == 0 and np.isnan(failed[1].mean)
    assert failed[1].entry()["failed_seeds"] == [11]  # the second seed of its point
    low, high = evaluated[1].interval
    assert 3.0 <= low <= 3.5 <= high <= 4.0


def test_interval_needs_several_finite_returns():
    def interval(*returns):
        return PointResult({"rate": 0.1}, range(len(returns)), np.array(returns), 0.0).interval

    for returns in [(1.0, 3.0), (1.0, 2.0, 3.0)]:
        low, high = interval(*returns)
        assert 1.0 <= low < 2.0 < high <= 3.0
    assert interval(2.0) is None and interval(1.0, 2.0, np.nan) is None and interval(1.0, np.inf) is None


# --- the command line ---


def test_command_line(tmp_path, capsys, host_devices):
    out = tmp_path / "run"
    words = f"--algo {__name__}:Descent --total-steps 64 --out {out} --devices 2 --trust"
    assert train_main([*words.split(), "--sweep", "rate=0.1,0.5", "pull=lin:1..2x2", "--num-seeds", "2"]) == 0
    text = capsys.readouterr().out
    assert "8 agents" in text and "best: return" in text and "by flags: --rate" in text
    assert max(map(len, text.splitlines())) <= 120
    assert len(json.loads((out / "sweep.json").read_text())["points"]) == 4
    assert train_main(["--resume", str(out), "--sweep", "rate=0.1", "--trust"]) == 2
    assert "contradicts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--sweep learning_rate=1e-3 --lr 1e-3", "leave out one of them"),
        ("--sweep", "--sweep takes a value or more: write --sweep NAME=VALUES"),
        ("--sweep num_envs=4,8", "--optuna"),
        ("--sweep lr=x", "not a number"),
        ("--exploit-every 5", "give them with --sweep"),
    ],
)
def test_command_line_errors(words, message, capsys, tmp_path):
    assert message in refused(capsys, [*words.split(), "--out", str(tmp_path / "run")], train_main)
    assert not (tmp_path / "run").exists()


@dataclasses.dataclass(frozen=True)
class Narrow(Descent):
    """Computes in bfloat16, which Python floats do not widen."""

    def init(self, key):
        return {"x": jax.random.normal(key, (self.width,), jnp.bfloat16)}

    def iterate(self, state):
        x = state["x"] - self.rate * self.slope(state["x"], jnp.zeros((), jnp.bfloat16))
        return {"x": x}, {"episode_return": -jnp.sum(x)}


def test_swept_floats_do_not_widen_bfloat16():
    algorithm = Sweep(Narrow(), {"rate": (0.1, 0.3), "pull": (0.7,)})
    engine = fdg.compile(algorithm, policies.GPUOnly(), devices=1, num_seeds=2)
    state, _ = engine.run(engine.init(seed=0), iterations=3)
    for point in range(2):
        expected, _ = run_alone(algorithm.at(point), 0, 3)
        assert state.state["x"].dtype == expected["x"].dtype == jnp.bfloat16
        np.testing.assert_array_equal(state.state["x"][point], expected["x"])


def test_swept_floats_keep_all_digits_in_64_bits():
    with jax.enable_x64(True):
        algorithm = Sweep(Descent(), {"rate": (0.1, 0.3)})
        engine = fdg.compile(algorithm, policies.GPUOnly(), devices=1, num_seeds=2)
        state, _ = engine.run(engine.init(seed=0), iterations=3)
        assert state.hyperparameters["rate"].tolist() == [0.1, 0.3]
        expected, _ = run_alone(algorithm.at(0), 0, 3)
        assert expected["x"].dtype == jnp.float64
        np.testing.assert_allclose(state.state["x"][0], expected["x"], rtol=1e-14)
        assert algorithm.of(jax.tree.map(lambda x: x[1], state)) == algorithm.at(1)


def test_cached_properties_are_computed_for_each_agent():
    @dataclasses.dataclass(frozen=True)
    class Halving(Walk):
        @functools.cached_property
        def half(self):
            return self.scale / 2

        def iterate(self, state):
            return state, {"half": jnp.asarray(self.half)}

    algorithm = Halving()
    assert algorithm.half == 0.05  # now it is cached
    sweep = Sweep(algorithm, (("scale", (0.2, 0.4)),))
    engine = fdg.compile(sweep, policies.GPUOnly(), devices=1, num_seeds=2)
    _, metrics = engine.run(engine.init(seed=0), iterations=1)
    np.testing.assert_allclose(metrics["half"], [[0.1, 0.2]], rtol=1e-6)


def test_a_construction_that_takes_no_traced_numbers_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Named(Walk):
        def __post_init__(self):
            object.__setattr__(self, "title", f"{self.scale:.2f}")

    sweep = Sweep(Named(), (("scale", (0.2, 0.4)),))
    with refuses("Named.__post_init__ does not take traced numbers (scale)", "in properties instead"):
        fdg.compile(sweep, policies.GPUOnly(), devices=1, num_seeds=2)


def test_values_made_at_construction_are_made_for_each_agent():
    @dataclasses.dataclass(frozen=True)
    class Halved(Walk):
        half: float = dataclasses.field(init=False)

        def __post_init__(self):
            object.__setattr__(self, "half", self.scale / 2)
            object.__setattr__(self, "optimizer", optax.sgd(self.scale))

        def iterate(self, state):
            state, metrics = super().iterate(state)
            update, _ = self.optimizer.update(jnp.ones(()), self.optimizer.init(jnp.ones(())))
            return state, metrics | {"half": self.half, "update": update}

    sweep = Sweep(Halved(), (("scale", (0.2, 0.4)),))
    engine = fdg.compile(sweep, policies.GPUOnly(), devices=1, num_seeds=2)
    _, metrics = engine.run(engine.init(seed=0), iterations=1)
    np.testing.assert_allclose(metrics["half"], [[0.1, 0.2]], rtol=1e-6)
    np.testing.assert_allclose(metrics["update"], [[-0.2, -0.4]], rtol=1e-6)
