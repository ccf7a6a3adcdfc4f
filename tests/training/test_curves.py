"""Comparing runs: which belong together, what is drawn of them, and statistics against SciPy's."""

import io
import json
import shutil

import numpy as np
import pytest
import scipy  # imports `stats` when it is asked for
from PIL import Image

from fdg.errors import FdgError
from fdg.plot import main as plot_main
from fdg.training import curves, statistics
from tests.refusing import refused


def written(path, returns, *, seed=0, summary=None, algo="ppo", env="CartPole-v1", **hyperparameters):
    """A run directory with a given curve: `[iterations]` or `[iterations, seeds]`."""
    path.mkdir()
    config = {"algo": algo, "env": env, "policy": "gpu_only", "policy_fields": {}, "seed": seed}
    (path / "config.json").write_text(json.dumps({**config, "hyperparameters": hyperparameters}))
    lines = []
    for i, value in enumerate(np.asarray(returns, float), 1):
        row = {"iteration": i, "env_steps": 10 * i, "wall_s": 0.5 * i, "episodes": 2}
        row["episode_return"] = float(np.mean(value))
        if np.ndim(value):
            row["episode_return_per_seed"] = value.tolist()
        lines.append(json.dumps(row) + "\n")
    (path / "metrics.jsonl").write_text("".join(lines))
    if summary:
        (path / "summary.json").write_text(json.dumps(summary))
    return path


@pytest.mark.parametrize(
    "around",
    [{"self_play": "size=2 every=1 latest=0.5"}, {"sweep": "learning_rate=0.1,0.2", "exploit_every": 2}],
)
def test_self_play_and_populations_are_no_seeds_of_the_algorithm_itself(around, tmp_path):
    plain, other = written(tmp_path / "a", [1, 2]), written(tmp_path / "b", [3, 4])
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, **around}))
    assert [len(curve.seeds) for curve in curves.compare([plain, other])[1]] == [1, 1]


def test_runs_that_differ_in_their_seed_are_one_curve(tmp_path):
    one = written(tmp_path / "a", [1, 2, 3], seed=0, learning_rate=0.1, summary={"eval_return": 30.0})
    two = written(tmp_path / "b", [3, 4, 5], seed=1, learning_rate=0.1, summary={"eval_return": 50.0})
    other = written(tmp_path / "c", [9, 9, 9], learning_rate=0.2)
    figure, found = curves.compare([one, two, other])
    assert [curve.label for curve in found] == [
        "ppo, learning_rate=0.1",
        "ppo, learning_rate=0.2",
    ]
    assert found[0].final.tolist() == [30, 50] and found[0].evaluated == (True, True)
    assert found[1].final.tolist() == [9] and found[1].evaluated == (False,)
    lines = figure.axes[0].get_lines()
    np.testing.assert_allclose(lines[0].get_ydata()[[0, -1]], [2, 4])
    np.testing.assert_allclose(lines[0].get_xdata()[[0, -1]], [10, 30])
    (legend,) = figure.legends
    assert next(text.get_text() for text in legend.get_texts()).endswith("learning_rate=0.1 (2 seeds)")
    # Below the axes, where it hides nothing.
    figure.canvas.draw()
    assert legend.get_window_extent().y1 <= figure.axes[0].get_window_extent().y0
    assert "mean 40.0 (30.0 to 50.0), iqm 40.0" in curves.returns_table(
        found
    ) and "2 seeds, evaluation" in curves.returns_table(found)


def test_labels_leave_out_what_is_none(tmp_path):
    """One run has a setting that the others lack: theirs need not say so."""
    for i, fields in enumerate([{"rate": 0.1}, {"rate": 0.2}, {"rate": 0.1, "clip": 0.5}]):
        written(tmp_path / str(i), [1, 2], **{"clip": None, **fields})
    _, found = curves.compare([tmp_path / str(i) for i in range(3)])
    assert [curve.label for curve in found] == ["ppo, rate=0.1", "ppo, rate=0.2", "ppo, clip=0.5, rate=0.1"]


def test_labels_are_short_and_each_environment_has_a_panel(tmp_path, capsys):
    """Two algorithms with many hyperparameters of their own: 400 characters in a label until 2026-11."""
    many = {f"field_{i}": i for i in range(30)}
    paths = [
        written(tmp_path / "a", [0.1, 0.953], learning_rate=0.1, **many),
        written(tmp_path / "b", [0.1, 0.7], algo="dqn", buffer_size=10),
        written(tmp_path / "c", [10, 20], env="Pendulum-v1", learning_rate=0.1, **many),
        written(tmp_path / "d", [10, 30], env="Pendulum-v1", learning_rate=0.2, **many),
    ]
    figure, found = curves.compare(paths)
    assert [(curve.env, curve.label) for curve in found] == [
        ("CartPole-v1", "ppo"),
        ("CartPole-v1", "dqn"),
        ("Pendulum-v1", "ppo, learning_rate=0.1"),
        ("Pendulum-v1", "ppo, learning_rate=0.2"),
    ]
    assert [axes.get_title() for axes in figure.axes] == ["CartPole-v1", "Pendulum-v1"]
    assert [len(axes.get_lines()) for axes in figure.axes] == [2, 2]
    assert "ppo on CartPole-v1: mean 0.953" in curves.returns_table(found)
    figure.canvas.draw()
    (legend,) = figure.legends
    assert legend.get_window_extent().x0 >= 0 and legend.get_window_extent().x1 <= figure.bbox.x1
    many_apart = {f"field_{i}": i + 1 for i in range(30)}
    apart = written(tmp_path / "e", [1, 2], learning_rate=0.3, **many_apart)
    _, found = curves.compare([paths[0], apart])
    assert found[1].label == "ppo, learning_rate=0.3, field_0=1, field_1=2, field_2=3, and 27 more"
    words = [*map(str, paths[:2]), "--out", str(tmp_path / "x.png"), "--label"]
    assert plot_main([*words, "wide,narrow"]) == 0
    assert "\nwide: mean 0.953" in capsys.readouterr().out
    assert plot_main([*words, "wide"]) == 2
    assert f"1 label for 2 runs: give one for each, in this order: {paths[0]} and" in capsys.readouterr().err
    shutil.copytree(paths[0], tmp_path / "both" / "b")
    shutil.copytree(paths[1], tmp_path / "both" / "a")
    words = [str(tmp_path / "both"), "--out", str(tmp_path / "x.png"), "--label", "narrow, wide"]
    assert plot_main(words) == 0  # a folder of runs, by name
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == [f"narrow = {tmp_path}/both/a", f"wide = {tmp_path}/both/b"]
    assert next(line for line in said if line.startswith("wide: ")).startswith("wide: mean 0.953")


def test_agents_of_one_run_and_seconds(tmp_path):
    run = written(tmp_path / "a", [[1, 3, 100], [2, 4, 200]])
    figure, (found,) = curves.compare([run], x="wall_s", statistic="iqm")
    assert len(found.y) == 3 and found.final.tolist() == [2, 4, 200]
    middle = statistics.interquartile_mean(np.array([1.0, 3.0, 100.0]))
    np.testing.assert_allclose(figure.axes[0].get_lines()[0].get_ydata()[0], middle)
    np.testing.assert_allclose(figure.axes[0].get_lines()[0].get_xdata()[[0, -1]], [0.5, 1.0])


def test_the_command(tmp_path, capsys):
    run = written(tmp_path / "a", [1, 2, 3])
    out = tmp_path / "comparison.png"
    other = written(tmp_path / "b", [1, 2, 3])
    assert plot_main([str(run), str(other), "--out", str(out)]) == 0
    assert capsys.readouterr().out.endswith(f"{out}\n")
    with Image.open(out) as image:
        assert image.size[0] == 1050
    for words in (
        [str(tmp_path / "none")],
        [str(run), f"{tmp_path}/b/../a"],  # once, or it would count twice
        [str(run), "--out", str(run / "config.json" / "x.png")],
        [str(run), "--metric", "loss"],
        [str(run), "--x", "time"],
        [str(run), "--statistic", "median"],
        [],
    ):
        said = refused(capsys, words, plot_main)
    assert "none yet" not in said


@pytest.fixture
def figures(monkeypatch):
    """Figure and axes of each picture that a test draws."""
    made, original = [], curves.make_figure
    monkeypatch.setattr(curves, "make_figure", lambda: made.append(original()) or made[-1])
    return made


def test_a_line_far_above_is_marked_at_the_edge(figures):
    rows = [{"env_steps": i, "episode_return": i % 3, "episodes": 1} for i in range(1, 50)]
    for solved in (475.0, 2.5):
        curves.draw_run(rows, "what\nhow", solved, io.BytesIO())
    (_, far), (_, near) = figures
    assert [text.get_text() for text in far.texts] == ["", "solved: 475 above"] and far.get_ylim()[1] < 5
    assert not near.texts and near.get_ylim()[1] >= 2.5


@pytest.mark.parametrize(
    ("metrics", "shown"),
    [
        ({"loss": 2.0, "mean_reward": 1.0}, "mean reward"),
        ({"loss": 2.0, "accuracy": 1.0}, "loss"),
        ({"loss": 2.0, "episode_return": 1.0, "reward": 3.0}, "mean episode return"),
    ],
)
def test_metrics_without_returns_are_drawn_by_name(figures, metrics, shown):
    """One of them is drawn, as high as it is; none of a run's own columns."""
    rows = [
        {"iteration": i, "env_steps": 8 * i, "wall_s": 0.1, **metrics, "eval_return": 9.0} for i in (1, 2)
    ]
    curves.draw_run(rows, "what", None, io.BytesIO())
    ((_, axes),) = figures
    metric = curves.metric_to_plot(rows)
    assert axes.get_ylabel() == shown and axes.lines[0].get_ydata().tolist() == [metrics[metric]] * 2
    curves.draw_run([{**row, metric: None} for row in rows], "what", None, io.BytesIO())
    nothing = figures[1][1]
    said = "no episode ended" if metric == "episode_return" else f"{metric.replace('_', ' ')} is not a number"
    assert nothing.texts[0].get_text() == said and nothing.get_xlim() == (0, 16)


def test_the_points_of_a_sweep_are_curves_of_their_own(figures):
    rows = [
        {
            "env_steps": i,
            "episode_return": 4.0,
            "episode_return_per_seed": [1.0, None, 6.0, 8.0],
            "episodes": 4,
        }
        for i in range(1, 9)
    ]
    for points in ((), ("a=1", "a=2"), [f"a={i}" for i in range(40)]):
        curves.draw_run(rows, "what", None, io.BytesIO(), points=points)
    (_, seeds), (_, few), (_, many) = figures

    def named(axes):
        return {
            line.get_label(): line.get_ydata()[-1]
            for line in axes.lines
            if not line.get_label().startswith("_")
        }

    assert named(few) == {"a=1": 1.0, "a=2": 7.0}  # one agent of the first has not ended an episode yet
    assert named(seeds) == {"mean of 4 seeds": 4.0} and named(many) == {"mean of 4 agents": 4.0}


def test_statistics_are_scipys():
    values = np.random.default_rng(0).gamma(2.0, size=12)
    assert statistics.interquartile_mean(values) == scipy.stats.trim_mean(values, 0.25)
    for statistic in statistics.STATISTICS.values():
        low, high = statistics.interval(values, statistic)
        theirs = scipy.stats.bootstrap(
            (values,), statistic, n_resamples=9_999, method="percentile", rng=np.random.default_rng(1)
        ).confidence_interval
        assert low == pytest.approx(theirs.low, abs=0.08) and high == pytest.approx(theirs.high, abs=0.08)
        assert statistics.interval(values, statistic) == (low, high)
    columns = np.stack([values, values + 1], axis=1)
    low, high = statistics.intervals(columns)
    np.testing.assert_allclose(low[1] - low[0], 1.0)
    with pytest.raises(FdgError):
        curves.compare([])


def test_a_learning_curve_leaves_failed_agents_out():
    def drawn(last, failed):
        rows = [
            {
                "iteration": i,
                "env_steps": 8 * i,
                "wall_s": 0.1 * i,
                "episode_return": (1.0 + i + last) / 3,
                "episode_return_per_seed": [1.0, float(i), last],
            }
            for i in range(1, 4)
        ]
        picture = io.BytesIO()
        curves.draw_run(rows, "what", None, picture, dpi=40, failed=failed)
        return picture.getvalue()

    assert drawn(5.0, [2]) == drawn(90.0, [2]) != drawn(90.0, [])
    assert drawn(90.0, [0, 1, 2]) == drawn(90.0, [])  # where all failed, all are shown
