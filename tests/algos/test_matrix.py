"""Each algorithm with each feature works, or is refused in one line: a cell; all with `--whole`."""

import random

import pytest

import algos
from tests.algos import matrix

SEED = random.SystemRandom().randrange(10_000)
SAMPLE = 1


def check(algorithm, feature):
    result = matrix.run(algorithm, feature)
    assert result.kind == matrix.recorded()[algorithm, feature], (
        matrix.line(algorithm, feature),
        result.said,
    )


def test_every_algorithm_is_there_and_the_page_has_every_cell():
    assert set(matrix.SMALL) == set(algos.names())
    assert set(matrix.recorded()) == set(matrix.cells())
    assert "bug" not in matrix.recorded().values()


def test_a_sample_of_cells_ends_as_the_page_says():
    print(f"random.Random({SEED})")  # pytest shows it where a cell fails
    for algorithm, feature in random.Random(SEED).sample(matrix.cells(), SAMPLE):
        check(algorithm, feature)


@pytest.mark.whole
@pytest.mark.parametrize(("algorithm", "feature"), matrix.cells())
def test_every_cell_ends_as_the_page_says(algorithm, feature):
    check(algorithm, feature)
