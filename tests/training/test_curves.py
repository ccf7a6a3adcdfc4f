"""Learning curves of runs: grouping into curves, labels, drawing, and statistics against SciPy."""

import io
import json
import shutil

import numpy as np
import pytest
import scipy  # imports `stats` lazily
from PIL import Image

from fdg.errors import FdgError
from fdg.plot import main as plot_main
from fdg.training import curves, statistics
from tests.refusing import refused

RESAMPLES = statistics.RESAMPLES


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch):
    """Only the comparison with SciPy needs precise intervals, and 2,000 resamples take seconds."""
    monkeypatch.setattr(statistics, "RESAMPLES", 100)


def write_run(path, returns, *, seed=0, summary=None, algo="ppo", env="CartPole-v1", **hyperparameters):
    """Writes a run directory with these returns: [iterations] or [iterations, seeds]."""
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
    "extra",
    [{"self_play": "size=2 every=1 latest=0.5"}, {"sweep": "learning_rate=0.1,0.2", "exploit_every": 2}],
)
def test_self_play_and_populations_are_separate_curves(extra, tmp_path):
    plain, other = write_run(tmp_path / "a", [1, 2]), write_run(tmp_path / "b", [3, 4])
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, **extra}))
    assert [len(curve.seeds) for curve in curves.plot_runs([plain, other])[1]] == [1, 1]


def test_agents_of_a_population_have_different_seeds(tmp_path):
    run = write_run(tmp_path / "a", [[1, 2, 3, 4]] * 2, seed=5)
    config = json.loads((run / "config.json").read_text())
    population = {"sweep": "rate=0.1,0.2", "num_seeds": 2, "exploit_every": 2}
    (run / "config.json").write_text(json.dumps({**config, **population}))
    (found,) = curves.plot_runs([run])[1]
    assert found.seeds == (5, 6, 7, 8)


def test_seeds_share_a_curve(tmp_path):
    one = write_run(tmp_path / "a", [1, 2, 3], seed=0, learning_rate=0.1, summary={"eval_return": 30.0})
    two = write_run(tmp_path / "b", [3, 4, 5], seed=1, learning_rate=0.1, summary={"eval_return": 50.0})
    other = write_run(tmp_path / "c", [9, 9, 9], learning_rate=0.2)
    figure, found = curves.plot_runs([one, two, other])
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
    # The legend is below the axes.
    figure.canvas.draw()
    assert legend.get_window_extent().y1 <= figure.axes[0].get_window_extent().y0
    assert "mean 40.0 (30.0 to 50.0), iqm 40.0" in curves.returns_table(
        found
    ) and "2 seeds, evaluation" in curves.returns_table(found)


def test_table_of_a_metric_without_values_at_the_end(tmp_path):
    """Evaluations may be rare."""
    path = write_run(tmp_path / "run", [1.0] * 20)
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    lines = [json.dumps({**row, "eval_return": 1.0 if i < 9 else None}) + "\n" for i, row in enumerate(rows)]
    (path / "metrics.jsonl").write_text("".join(lines))
    _, found = curves.plot_runs([path], metric="eval_return")
    assert curves.returns_table(found) == "ppo: no finite value in the last tenth of training"


def test_labels_omit_none(tmp_path):
    """A setting of one run does not appear as None in the labels of others."""
    for i, fields in enumerate([{"rate": 0.1}, {"rate": 0.2}, {"rate": 0.1, "clip": 0.5}]):
        write_run(tmp_path / str(i), [1, 2], **{"clip": None, **fields})
    _, found = curves.plot_runs([tmp_path / str(i) for i in range(3)])
    assert [curve.label for curve in found] == ["ppo, rate=0.1", "ppo, rate=0.2", "ppo, clip=0.5, rate=0.1"]


def test_short_labels_and_one_panel_per_environment(tmp_path, capsys):
    """Labels stay short where runs differ in many hyperparameters."""
    many = {f"field_{i}": i for i in range(30)}
    paths = [
        write_run(tmp_path / "a", [0.1, 0.953], learning_rate=0.1, **many),
        write_run(tmp_path / "b", [0.1, 0.7], algo="dqn", buffer_size=10),
        write_run(tmp_path / "c", [10, 20], env="Pendulum-v1", learning_rate=0.1, **many),
        write_run(tmp_path / "d", [10, 30], env="Pendulum-v1", learning_rate=0.2, **many),
    ]
    figure, found = curves.plot_runs(paths)
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
    apart = write_run(tmp_path / "e", [1, 2], learning_rate=0.3, **many_apart)
    _, found = curves.plot_runs([paths[0], apart])
    assert found[1].label == "ppo, learning_rate=0.3, field_0=1, field_1=2, field_2=3, and 27 more"
    words = [*map(str, paths[:2]), "--out", str(tmp_path / "x.png"), "--label"]
    assert plot_main([*words, "wide,narrow"]) == 0
    assert "\nwide: mean 0.953" in capsys.readouterr().out
    assert plot_main([*words, "wide"]) == 2
    assert f"1 label for 2 runs: give one for each, in this order: {paths[0]} and" in capsys.readouterr().err
    shutil.copytree(paths[0], tmp_path / "both" / "b")
    shutil.copytree(paths[1], tmp_path / "both" / "a")
    words = [str(tmp_path / "both"), "--out", str(tmp_path / "x.png"), "--label", "narrow, wide"]
    assert plot_main(words) == 0  # a folder of runs, sorted by name
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"narrow = {tmp_path}/both/a", f"wide = {tmp_path}/both/b"]
    assert next(line for line in lines if line.startswith("wide: ")).startswith("wide: mean 0.953")


def test_agents_of_one_run_over_wall_time(tmp_path):
    run = write_run(tmp_path / "a", [[1, 3, 100], [2, 4, 200]])
    figure, (found,) = curves.plot_runs([run], x="wall_s", statistic="iqm")
    assert len(found.y) == 3 and found.final.tolist() == [2, 4, 200]
    middle = statistics.interquartile_mean(np.array([1.0, 3.0, 100.0]))
    np.testing.assert_allclose(figure.axes[0].get_lines()[0].get_ydata()[0], middle)
    np.testing.assert_allclose(figure.axes[0].get_lines()[0].get_xdata()[[0, -1]], [0.5, 1.0])


def test_command_line(tmp_path, capsys):
    run = write_run(tmp_path / "a", [1, 2, 3])
    out = tmp_path / "comparison.png"
    other = write_run(tmp_path / "b", [1, 2, 3])
    assert plot_main([str(run), str(other), "--out", str(out)]) == 0
    assert capsys.readouterr().out.endswith(f"{out}\n")
    with Image.open(out) as image:
        assert image.size[0] == 1050
    for words, message in (
        ([str(tmp_path / "none")], f"no run in {tmp_path / 'none'}"),
        ([str(run), f"{tmp_path}/b/../a"], "is given twice"),
        ([str(run), "--out", str(run / "config.json" / "x.png")], "config.json is not a folder"),
        ([str(run), "--out", str(tmp_path / "curve")], "the ending of a plot is .png, .svg or .pdf: write "),
        ([str(run), "--metric", "loss"], "has no metric 'loss': it has episode_return, episodes"),
        ([str(run), "--x", "time"], "--x time: it must be one of env_steps, wall_s"),
        ([str(run), "--statistic", "median"], "--statistic median: it must be one of mean, iqm"),
        ([], "arguments are required: RUN_DIR"),
    ):
        assert message in refused(capsys, words, plot_main)


@pytest.fixture
def figures(monkeypatch):
    """Figure and axes of each picture that a test draws."""
    made, original = [], curves.make_figure
    monkeypatch.setattr(curves, "make_figure", lambda: made.append(original()) or made[-1])
    return made


def test_solved_line_off_scale_is_marked(figures):
    rows = [{"env_steps": i, "episode_return": i % 3, "episodes": 1} for i in range(1, 50)]
    for solved in (475.0, 2.5):
        curves.draw_run(rows, "what\nhow", solved, io.BytesIO())
    (_, far), (_, near) = figures
    assert [text.get_text() for text in far.texts] == ["", "solved: 475 above"] and far.get_ylim()[1] < 5
    assert not near.texts and near.get_ylim()[1] >= 2.5


@pytest.mark.parametrize(
    ("metrics", "label"),
    [
        ({"loss": 2.0, "mean_reward": 1.0}, "mean reward"),
        ({"loss": 2.0, "accuracy": 1.0}, "loss"),
        ({"loss": 2.0, "episode_return": 1.0, "reward": 3.0}, "mean episode return"),
    ],
)
def test_metric_to_plot(figures, metrics, label):
    """Draws one metric at its value, and no column that every run has (`eval_return`)."""
    rows = [
        {"iteration": i, "env_steps": 8 * i, "wall_s": 0.1, **metrics, "eval_return": 9.0} for i in (1, 2)
    ]
    curves.draw_run(rows, "what", None, io.BytesIO())
    ((_, axes),) = figures
    metric = curves.metric_to_plot(rows)
    assert axes.get_ylabel() == label and axes.lines[0].get_ydata().tolist() == [metrics[metric]] * 2
    curves.draw_run([{**row, metric: None} for row in rows], "what", None, io.BytesIO())
    nothing = figures[1][1]
    text = "no episode ended" if metric == "episode_return" else f"{metric.replace('_', ' ')} is not a number"
    assert nothing.texts[0].get_text() == text and nothing.get_xlim() == (0, 16)


def test_sweep_points_are_separate_curves(figures):
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

    def last_values(axes):
        return {
            line.get_label(): line.get_ydata()[-1]
            for line in axes.lines
            if not line.get_label().startswith("_")
        }

    assert last_values(few) == {"a=1": 1.0, "a=2": 7.0}  # the second agent of a=1 has no episode yet
    assert last_values(seeds) == {"mean of 4 seeds": 4.0} and last_values(many) == {"mean of 4 agents": 4.0}
    losses = [{"env_steps": i, "policy_loss": 2.0, "policy_loss_per_seed": [1.0, 3.0]} for i in (1, 2)]
    curves.draw_run(losses, "what", None, io.BytesIO(), points=("a=1", "a=2"))
    assert figures[-1][1].get_ylabel() == "policy loss"


def test_statistics_match_scipy(monkeypatch):
    monkeypatch.setattr(statistics, "RESAMPLES", RESAMPLES)
    values = np.random.default_rng(0).gamma(2.0, size=12)
    assert statistics.interquartile_mean(values) == scipy.stats.trim_mean(values, 0.25)
    for statistic in statistics.STATISTICS.values():
        low, high = statistics.interval(values, statistic)
        expected = scipy.stats.bootstrap(
            (values,), statistic, n_resamples=3_999, method="percentile", rng=np.random.default_rng(1)
        ).confidence_interval
        assert low == pytest.approx(expected.low, abs=0.08) and high == pytest.approx(expected.high, abs=0.08)
        assert statistics.interval(values, statistic) == (low, high)
    columns = np.stack([values, values + 1], axis=1)
    low, high = statistics.intervals(columns)
    np.testing.assert_allclose(low[1] - low[0], 1.0)
    with pytest.raises(FdgError):
        curves.plot_runs([])


def test_curve_omits_failed_agents():
    def picture_of(last, failed):
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

    assert picture_of(5.0, [2]) == picture_of(90.0, [2]) != picture_of(90.0, [])
    assert picture_of(90.0, [0, 1, 2]) == picture_of(90.0, [])  # all failed: all are shown
