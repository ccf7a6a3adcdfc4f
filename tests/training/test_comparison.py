"""`fdg.compare`: statistics against hand-worked numbers and SciPy, notes, failed seeds and errors."""

import io
import json
import math
import shutil
import sys

import numpy as np
import pytest
import scipy  # imports `stats` lazily

import fdg
from bench import table
from fdg.__main__ import main
from fdg.training import comparison, curves, statistics
from fdg.training.comparison import TOGETHER
from fdg.training.difference import Difference
from fdg.training.run_directory import to_json_types
from fdg.training.statistics import probability_of_improvement
from tests.refusing import refused, refuses


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch):
    """No test here needs precise intervals, and 2,000 resamples take seconds."""
    monkeypatch.setattr(statistics, "RESAMPLES", 100)


def write_run(
    path, algo, env, returns, rows, preset=None, total_steps=300, last=None, seed=0, id=None, **changes
):
    """Writes a run directory of several seeds, as training does: `rows` [rows, seeds], 100 steps per row."""
    path.mkdir(parents=True)
    config = {
        "algo": algo,
        "env": env,
        "policy": "gpu_only",
        "policy_fields": {},
        "seed": seed,
        **({"id": id} if id else {}),
        "num_seeds": len(returns),
        "versions": {"fdg": "0.2.0", "jax": "0.10.2"},
        "hyperparameters": {"total_steps": total_steps, **changes},
        **({"preset_name": preset, "preset": {}} if preset else {}),
    }
    (path / "config.json").write_text(json.dumps(config))
    rows = [
        {"iteration": i, "env_steps": 100 * i, "wall_s": 0.1 * i, "loss": 1.0, "episodes": 1}
        | {"episode_return": 0.0, "episode_return_per_seed": list(row)}
        for i, row in enumerate(rows, 1)
    ]
    rows[-1] |= last or {}
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {"env_steps": 300, "eval_return": 0.0, "eval_returns": returns, "eval_episodes": 128}
    (path / "summary.json").write_text(json.dumps(summary))
    return path


FLAT = [[1.0] * 4] * 3


def make_runs(folder):
    """Runs of PPO and A2C, four seeds in each of two environments."""
    return [
        write_run(folder / "a", "ppo", "CartPole-v1", [1.0, 2.0, 3.0, 100.0], FLAT),
        write_run(folder / "b", "ppo", "Pendulum-v1", [-4.0, -3.0, -2.0, -1.0], FLAT),
        write_run(
            folder / "c", "a2c", "CartPole-v1", [0.0, 2.0, 2.0, 4.0], [[0.0] * 4, [3.0] * 4, [4.0] * 4]
        ),
        write_run(folder / "d", "a2c", "Pendulum-v1", [-8.0, -7.0, -6.0, -5.0], FLAT),
    ]


def test_statistics_by_hand(tmp_path):
    found = fdg.compare(make_runs(tmp_path))
    assert found.sides == ["ppo", "a2c"] and found.notes == []
    assert found.estimate("ppo", "CartPole-v1").value == 2.5  # mean of 2 and 3
    # By the trapezoid rule over 200 steps: (1.5 * 100 + 3.5 * 100) / 200.
    assert found.estimate("a2c", "CartPole-v1", "areas").value == 2.5
    # CartPole, 16 pairs: 1 and 2 win once, 3 three times, 100 four times; two ties of 2. Pendulum: all win.
    value, (low, high) = found.improvement("ppo", "a2c")
    assert value == pytest.approx(((1 + 1 + 3 + 4 + 0.5 * 2) / 16 + 1) / 2)
    assert 0.5 < low < value < high <= 1.0
    # Returns are normalised from worst to best seed: 0 to 100 in CartPole, -8 to -1 in Pendulum.
    normalized = sorted([0.01, 0.02, 0.03, 1.0, 4 / 7, 5 / 7, 6 / 7, 1.0])[2:-2]
    assert found.estimate("ppo", TOGETHER).value == pytest.approx(np.mean(normalized))


def test_probability_of_improvement_matches_mann_whitney():
    x, y = np.random.default_rng(0).integers(0, 9, (2, 12)).astype(float)
    value, _ = probability_of_improvement([(x, y[:7])])
    assert value == pytest.approx(scipy.stats.mannwhitneyu(x, y[:7]).statistic / (12 * 7))
    same, (low, high) = probability_of_improvement([(x, x), (y, y)])
    assert same == 0.5 and low < 0.5 < high


def test_common_setting_is_not_noted(tmp_path):
    """`num_envs` is set on both sides, `discount` on one."""
    runs = [
        write_run(
            tmp_path / "a", "ppo", "CartPole-v1", [1.0] * 2, [[1.0] * 2] * 3, num_envs=12, discount=0.5
        ),
        write_run(tmp_path / "b", "a2c", "CartPole-v1", [1.0] * 2, [[1.0] * 2] * 3, num_envs=12),
    ]
    assert [line for line in fdg.compare(runs).notes if "by hand" in line] == [
        "settings by hand: ppo has discount=0.5 (CartPole-v1)"
    ]


def test_unequal_runs_are_noted(tmp_path):
    runs = [
        write_run(tmp_path / "a", "ppo", "CartPole-v1", [1.0] * 4, FLAT, "CartPole-v1", discount=0.5),
        write_run(tmp_path / "b", "a2c", "CartPole-v1", [1.0] * 2, [[1.0] * 2] * 3, total_steps=900),
    ]
    (tmp_path / "b" / "summary.json").unlink()
    message = "\n".join(fdg.compare(runs).notes)
    for line in (
        "budgets differ, in steps of each seed: ppo 300; a2c 900 (CartPole-v1)",
        "numbers of seeds differ: ppo 4; a2c 2",
        "tuned settings on one side: ppo a preset; a2c none",
        "settings by hand: ppo has discount=0.5",
        "runs have not ended: a2c 1 of 1 runs",
        "measured differently: ppo greedy evaluations of 128 episodes; a2c the last tenth of the training",
    ):
        assert line in message
    assert f"- {fdg.compare(runs).notes[0]}" in str(fdg.compare(runs))


def test_unequal_measures_within_a_side_are_noted(tmp_path):
    runs = [
        write_run(tmp_path / name, "ppo", "CartPole-v1", [1.0, 2.0], [[1.0] * 2] * 3, seed=2 * i)
        for i, name in enumerate("ab")
    ]
    assert not any("measured" in note for note in fdg.compare(runs).notes)
    (tmp_path / "b" / "summary.json").unlink()
    measures = (
        "greedy evaluations of 128 episodes in 2 of 4 seeds, the last tenth of the training in 2 of 4 seeds"
    )
    message = f"final returns within a side are measured differently: ppo {measures} (CartPole-v1)"
    assert message in fdg.compare(runs).notes
    assert "evaluation of 2 and last tenth of training of 2" in repr(curves.plot_runs(runs))


def test_equal_labels_are_one_side(tmp_path):
    shape = ("CartPole-v1", [1.0, 2.0], [[1.0] * 2] * 3)
    runs = [
        write_run(tmp_path / "a", "ppo", *shape, rate=0.1),
        write_run(tmp_path / "b", "a2c", *shape, seed=2, rate=0.2),
    ]
    (tmp_path / "a" / "summary.json").unlink()
    found = fdg.compare(runs, labels=["mine", "mine"])
    assert found.sides == ["mine"] and list(found.cells[0].seeds) == [0, 1, 2, 3]
    assert (
        "settings within a side differ: mine has rate=0.1 or 0.2, algo=ppo or a2c (CartPole-v1)"
        in found.notes
    )
    assert any("measured differently: mine greedy" in note for note in found.notes)
    assert "runs have not ended: mine 1 of 2 runs (CartPole-v1)" in found.notes


def test_results_do_not_depend_on_the_order_of_runs(tmp_path):
    shape = ("CartPole-v1", [1.0, 5.0], [[1.0] * 2] * 3)
    runs = [write_run(tmp_path / str(i), "ppo", *shape, seed=2 * i, rate=0.1 * i) for i in range(3)]
    for labels in ((), ("mine",) * 3):
        found, reversed_order = (fdg.compare(order, labels=labels) for order in (runs, runs[::-1]))
        assert {cell.label: list(cell.seeds) for cell in found.cells} == {
            cell.label: list(cell.seeds) for cell in reversed_order.cells
        }
    assert list(reversed_order.cells[0].seeds) == [0, 1, 2, 3, 4, 5]
    assert reversed_order.estimate("mine", "CartPole-v1") == found.estimate("mine", "CartPole-v1")


def test_repeated_seed_is_noted(tmp_path):
    shape = ("ppo", "CartPole-v1", [1.0] * 2, [[1.0] * 2] * 3)
    runs = [write_run(tmp_path / name, *shape, seed=seed) for name, seed in (("a", 0), ("b", 1), ("c", 3))]
    notes = fdg.compare(runs).notes
    assert notes == [
        "runs of one side have the same seed, so they are not independent:"
        f" ppo has seed 1 in {runs[0]} and {runs[1]} (CartPole-v1)"
    ]
    assert fdg.compare([runs[0], runs[2]]).notes == []


@pytest.mark.parametrize("read", [fdg.compare, curves.plot_runs])
def test_copy_of_a_run_is_refused(tmp_path, read):
    run = write_run(tmp_path / "a", "ppo", "CartPole-v1", [1.0], [[1.0]] * 3, id="0123")
    copy = shutil.copytree(run, tmp_path / "b")
    with refuses(
        f"{run} and {copy} are one run and its copy (both have the id 0123), and would count as two"
    ):
        read([run, copy])


@pytest.mark.parametrize("read", [fdg.compare, curves.plot_runs])
def test_id_that_is_no_string_is_refused(tmp_path, read):
    run = write_run(tmp_path / "a", "ppo", "CartPole-v1", [1.0], [[1.0]] * 3, id=["x"])
    with refuses(f"{run}/config.json has id = ['x'], which is not"):
        read([run])


def test_failed_seed_ranks_last(tmp_path):
    last = {"loss_per_seed": [1.0, None, 1.0, 1.0]}
    runs = make_runs(tmp_path)
    runs[0] = write_run(tmp_path / "lost", "ppo", "CartPole-v1", [5.0, 900.0, 7.0, 9.0], FLAT, last=last)
    found = fdg.compare(runs)
    assert "ppo on CartPole-v1: 1 of 4 seeds failed (1)" in found.notes[-1]
    estimate = found.estimate("ppo", "CartPole-v1")
    assert estimate.value == 6.0 and estimate.interval[0] == -math.inf  # mean of 5 and 7
    assert found.improvement("ppo", "a2c")[0] == pytest.approx((12 / 16 + 1) / 2)
    cells = to_json_types(found.content())["cells"]
    assert cells[0]["returns"] == [5.0, None, 7.0, 9.0] and cells[0]["failed"] == [1]


def test_random_level_is_marked(tmp_path):
    found = fdg.compare(make_runs(tmp_path), random={"CartPole-v1": [2.0, 3.0], "Pendulum-v1": [-10.0, -9.0]})
    assert found.is_random("a2c", "CartPole-v1") and not found.is_random("ppo", "Pendulum-v1")
    assert found.ends("Pendulum-v1") == (-9.5, -1.0)
    row = next(line for line in str(found).splitlines() if line.startswith("| CartPole-v1"))
    assert "†" in row and "2.50 [2.00, 3.00] |" in row
    assert table.cells_of(found)["random"] == {"CartPole-v1": "2.5", "Pendulum-v1": "-9.5"}


def test_command_line_output(tmp_path, capsys):
    runs = [str(run) for run in make_runs(tmp_path / "runs")]
    assert main(["compare", *runs, "--out", str(tmp_path / "one")]) == 0
    assert "## Final return" in capsys.readouterr().out
    again = fdg.compare([tmp_path / "runs"])
    assert (tmp_path / "one" / "comparison.md").read_text() == again.markdown()
    assert json.loads((tmp_path / "one" / "comparison.json").read_text()) == to_json_types(again.content())
    assert all(
        (tmp_path / "one" / name).read_bytes()[1:4] == b"PNG" for name in ("curves.png", "intervals.png")
    )
    latex = (tmp_path / "one" / "comparison.tex").read_text()
    assert r"\toprule" in latex and latex.count(r"\begin{table}") == latex.count(r"\end{table}") == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: RUN_DIR"),
        (["none"], "no run in none (it has no config.json): give"),
        (["a", "a"], "a is given twice, and would count as two seeds: name each run once"),
        (["a", "--out", "a"], "--out a is a run directory: give another folder"),
        (["a", "--out", "a/config.json"], "cannot be written"),
        (["a", "b", "--label", "one"], "1 label for 2 runs: give one for each"),
        (["a", "--metric", "loss"], "unknown flag '--metric'"),
    ],
)
def test_command_line_errors(tmp_path, monkeypatch, capsys, words, message):
    make_runs(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, ["compare", *words], main)


def test_python_errors(tmp_path):
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text('{"algo": "ppo", "env": "CartPole-v1"}')
    for runs, message in (
        ([tmp_path / "odd"], "odd/config.json is not the configuration of a run: give the config.json of"),
        ("runs", "compare(runs='runs'): give a sequence of strings: write ['runs']"),
        ([], "give at least one run directory"),
    ):
        with refuses(message):
            fdg.compare(runs)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("preset", "fast"),
        ("follows", [1]),
        ("versions", ["fdg"]),
        ("total_steps", "1e6"),
        ("total_steps", [1]),
    ],
)
def test_config_entry_of_wrong_type_is_named(tmp_path, name, value):
    run = write_run(tmp_path / "a", "ppo", "CartPole-v1", [1.0], [[1.0]] * 3)
    config = json.loads((run / "config.json").read_text())
    (config["hyperparameters"] if name == "total_steps" else config)[name] = value
    (run / "config.json").write_text(json.dumps(config))
    with pytest.raises(fdg.FdgError, match=f"config.json has {name} = .*, which is not"):
        fdg.compare([run])


@pytest.mark.parametrize("wrong", [{"eval_episodes": [1]}, {"versions": "x"}, {"seeds": 1}])
def test_invalid_summary_is_ignored(tmp_path, wrong):
    run = write_run(tmp_path / "a", "ppo", "CartPole-v1", [1.0], [[1.0]] * 3)
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | wrong))
    assert "runs have not ended" in str(fdg.compare([run]))


def test_labels_are_escaped(tmp_path):
    shape = ("CartPole-v1", [1.0, 2.0], [[1.0] * 2] * 3)
    runs = [write_run(tmp_path / "a", "my:A$", *shape), write_run(tmp_path / "b", "ppo", *shape)]
    assert fdg.compare(runs).sides == ["A$", "ppo"] and "| A$ |" in str(fdg.compare(runs))
    found = fdg.compare(runs, labels=["$x", "<b>|$y"])
    assert "| environment | $x | &lt;b>\\|$y |" in str(found) and "<b>" not in str(found)
    assert r"environment & \$x & \textless{}b\textgreater{}|\$y" in found.latex()
    for figure in found.pictures().values():
        figure.savefig(io.BytesIO(), format="png")
    assert r"\$x" in curves.plot_runs(runs, labels=found.labels).figure.legends[0].get_texts()[0].get_text()


def test_terminal_sequences_are_escaped(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(comparison.Comparison, "pictures", lambda self: {})  # drawn in another test
    ends, rows = [1.0, 2.0], [[1.0] * 2] * 3
    for name in "ab":
        write_run(tmp_path / name, "ppo", f"\x1b[2J{name}", ends, rows, clip=f"\x1b[31m{name}")
    difference = Difference("a", "b", notes=("settings: \x1b[2Jlr 1 and 2\nno",))
    assert str(difference) == "a and b: no difference\n  settings: \\x1b[2Jlr 1 and 2\\nno"
    assert main(["compare", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    assert main(["plot", str(tmp_path), "--out", str(tmp_path / "plot.png")]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "out" / "comparison.md").unlink()
    with open(tmp_path / "printed", "w") as out, monkeypatch.context() as patch:  # fdg compare ... | head -1
        patch.setattr(sys, "stdout", out)
        patch.setattr("builtins.print", lambda *_, **__: (_ for _ in ()).throw(BrokenPipeError))
        assert main(["compare", str(tmp_path), "--out", str(tmp_path / "out")]) == 141
    assert "\x1b" not in printed + (tmp_path / "out" / "comparison.md").read_text()
    assert "| \\x1b[2Ja |" in printed and "on ?[2Jb: " in printed


def test_no_training_episode_gives_no_area(tmp_path):
    run = write_run(tmp_path / "a", "ppo", "CartPole-v1", [1.0, 2.0], [[None, None]] * 3)
    found = fdg.compare([run])
    assert str(found.estimate("ppo", "CartPole-v1", "areas")) == "-"
    assert found.cells[0].failed == [] and "| CartPole-v1 | - |" in str(found)
