"""Each algorithm with each feature works or raises a one-line error, as docs/matrix.md records."""

import datetime
import random

import pytest

import algos
from tests.algos import matrix

SAMPLE = 1


def check(algorithm, feature):
    result = matrix.run(algorithm, feature)
    assert result.kind == matrix.recorded()[algorithm, feature], (
        matrix.line(algorithm, feature),
        result.output,
    )


def test_page_lists_every_cell():
    assert set(matrix.SMALL) == set(algos.names())
    assert set(matrix.recorded()) == set(matrix.cells())
    assert "bug" not in matrix.recorded().values()


def test_sampled_cells_match_page():
    """The cells of the day: all runs of one day check the same ones."""
    day = datetime.date.today().isoformat()
    for algorithm, feature in random.Random(day).sample(matrix.cells(), SAMPLE):
        check(algorithm, feature)


@pytest.mark.whole
@pytest.mark.parametrize(("algorithm", "feature"), matrix.cells())
def test_every_cell_matches_page(algorithm, feature):
    check(algorithm, feature)
