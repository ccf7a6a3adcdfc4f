"""Pictures of predictions: which axes are logarithmic."""

import pytest
from matplotlib.figure import Figure

from fdg.costs.pictures import draw_lines


@pytest.mark.parametrize("logs", ["", "x", "y", "xy"])
def test_axes_are_logarithmic_where_it_is_asked(logs, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, dpi: drawn.append((self.axes[0], path)))
    draw_lines({"a": [(1, 2), (2, 3)], "b": [(1, 5)]}, tmp_path / "x" / "a.png", "T", "across", "up", logs)
    ((axis, path),) = drawn
    scales = {"x": axis.get_xscale(), "y": axis.get_yscale()}
    assert scales == {name: "log" if name in logs else "linear" for name in "xy"}
    assert path.parent.is_dir() and (axis.get_title(), axis.get_xlabel(), axis.get_ylabel()) == (
        *("T", "across", "up"),
    )
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["a", "b"]
