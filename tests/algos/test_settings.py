"""Settings are equal to those in `settings.json`, with which docs/results.md was measured."""

import json

import pytest

from algos import presets
from algos.rlhf.variants import VARIANTS
from tests.algos.settings import FILE, algorithms, defaults, entry

KNOWN = json.loads(FILE.read_text())


@pytest.mark.parametrize("name", KNOWN["defaults"])
def test_defaults(name):
    """After an intended change, run `python -m tests.algos.settings`. New fields may be missing there."""
    now = defaults(name)
    assert {field: now[field] for field in KNOWN["defaults"][name]} == KNOWN["defaults"][name]


@pytest.mark.parametrize("name", KNOWN["presets"])
def test_presets_of_environments(name):
    for env, settings in KNOWN["presets"][name].items():
        assert json.loads(json.dumps(presets.of(name, env))) == settings
    assert presets.of(name, "no-such-environment") == {}


def test_presets():
    assert {key: entry(*key.split()) for key in KNOWN["entries"]} == KNOWN["entries"]


def test_grpo_variants():
    assert {name: dict(fields) for name, fields in VARIANTS.items()} == KNOWN["variants"]


def test_all_algorithms_are_listed():
    assert sorted(KNOWN["defaults"]) == algorithms()
