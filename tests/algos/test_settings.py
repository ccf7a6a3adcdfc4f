"""Settings are those that the figures in docs/results.md were measured with."""

import json

import pytest

from algos import presets
from algos.rlhf.variants import VARIANTS
from tests.algos.settings import FILE, algorithms, defaults, entry

KNOWN = json.loads(FILE.read_text())


@pytest.mark.parametrize("name", KNOWN["defaults"])
def test_what_an_algorithm_does_without_a_flag(name):
    """If it should do something else: `python -m tests.algos.settings`. A new field may come first."""
    now = defaults(name)
    assert {field: now[field] for field in KNOWN["defaults"][name]} == KNOWN["defaults"][name]


@pytest.mark.parametrize("name", KNOWN["presets"])
def test_what_it_does_on_an_environment(name):
    for env, settings in KNOWN["presets"][name].items():
        assert json.loads(json.dumps(presets.of(name, env))) == settings
    assert presets.of(name, "no-such-environment") == {}


@pytest.mark.parametrize("key", KNOWN["entries"])
def test_every_preset_is_what_was_measured(key):
    assert entry(*key.split()) == KNOWN["entries"][key]


def test_the_variants_of_grpo_are_those_of_their_papers():
    assert {name: dict(fields) for name, fields in VARIANTS.items()} == KNOWN["variants"]


def test_every_algorithm_is_there():
    assert sorted(KNOWN["defaults"]) == algorithms()
