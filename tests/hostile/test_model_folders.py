"""A few malformed checkpoints and packages; more of them: `python -m tests.hostile.model_folders`."""

import pytest

from algos.language import weights
from tests.hostile import driver, model_folders


@pytest.mark.parametrize(
    ("kind", "number"),
    [*(("folders", i) for i in range(1000, 1012)), *(("packages", i) for i in range(1000, 1008))],
)
def test_whatever_is_wrong_is_one_line(kind, number):
    row = model_folders.attempt(kind, number, seed=1)
    assert not [found["faults"] for found in row["tries"].values() if found["faults"]], row


def test_each_try_can_fail(monkeypatch):
    def careless(folder):
        raise KeyError("num_hidden_layers")

    monkeypatch.setattr(weights, "check", careless)
    monkeypatch.setattr(weights, "load", lambda folder, lora_rank: bytearray(1 << 28).find(1))
    monkeypatch.setattr(driver, "MEMORY", 1 << 26)
    tries = model_folders.attempt("folders", 0, seed=1)["tries"]
    assert "traceback: KeyError" in tries["check"]["faults"][0] and "took 0.2" in tries["load"]["faults"][0]
