"""Each drawing of a graph or plan is, to the letter, one that somebody has looked at."""

import pytest

from tests.showing.golden_drawings import DRAWINGS, FOLDER, lines


@pytest.mark.parametrize("name", DRAWINGS)
def test_it_is_drawn_as_before(name):
    """If it should look otherwise: `python -m tests.showing.golden_drawings`."""
    assert lines(DRAWINGS[name]()) == (FOLDER / name).read_text()
