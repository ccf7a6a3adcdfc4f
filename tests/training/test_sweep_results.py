"""The results table of a sweep, for given returns."""

import math

import numpy as np
import pytest

from fdg.errors import FdgError
from fdg.training.sweep_results import PointResult, best_agents, points_table


def point(rate, *returns, training=1.5):
    return PointResult({"learning_rate": rate}, range(len(returns)), np.array(returns, float), training)


def test_best_first_and_failed_last():
    found = [point(0.1, 4.0, 6.0), point(0.2, math.nan, 9.0), point(0.3, 20.0, 20.0), point(0.4, 1.0)]
    lines = [line.split() for line in points_table(found, "of the last tenth").splitlines()]
    rows = [words for words in lines if words and words[0] in ("0.1", "0.2", "0.3", "0.4")]
    assert [words[0] for words in rows] == ["0.3", "0.1", "0.4", "0.2"]
    assert rows[0] == ["0.3", "20.0", "20.0", "to", "20.0", "20.0", "1.50"]
    assert rows[2] == ["0.4", "1.00", "-", "1.00", "1.50"]
    assert rows[3][:2] == ["0.2", "-"]


def test_table_has_at_most_twenty_rows():
    text = points_table([point(i, float(i)) for i in range(23)], "returns")
    assert text.splitlines()[-1] == "... and 3 more"
    assert "22.0" in text and " 2.00 " not in text


def test_missing_and_damaged_results(tmp_path):
    with pytest.raises(
        FdgError, match=r"has no sweep\.json: it is not a sweep, or the sweep has not finished"
    ):
        best_agents(tmp_path, 4)
    (tmp_path / "sweep.json").write_text('{"best": ')
    with pytest.raises(FdgError, match=r"sweep\.json: is not JSON"):
        best_agents(tmp_path, 4)
    for wrong in ("{}", '{"best": 1}', '{"best": {"agents": []}}', '{"best": {"agents": [4]}}'):
        (tmp_path / "sweep.json").write_text(wrong)
        with pytest.raises(FdgError, match=r"this sweep has agents 0 to 3: restore the file$"):
            best_agents(tmp_path, 4)
    (tmp_path / "sweep.json").write_text('{"best": {"agents": [1, 3]}}')
    assert best_agents(tmp_path, 4) == [1, 3]
