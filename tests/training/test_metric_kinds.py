"""Types and names of metrics that `metrics.jsonl` accepts or refuses."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import fdg
from tests.refusing import refuses


@dataclasses.dataclass(frozen=True)
class Counter:
    """An algorithm with one metric of any type and name."""

    metric: Any
    name: str = "odd"
    total_steps: int = 3
    steps_per_iteration = 1

    def init(self, key):
        return jnp.zeros(2)

    def iterate(self, state):
        return state + 1, {self.name: self.metric()}


@pytest.mark.parametrize(
    "metric, name, words",
    [
        (lambda: jax.random.key(0), "odd", "'odd' is key<fry>: metrics.jsonl holds real numbers"),
        (lambda: jnp.zeros((), jnp.complex64), "odd", "'odd' is complex64"),
        (lambda: 2**70, "odd", "metrics['odd'] as 1180591620717411303424, which does not fit 32 bits"),
        *[(lambda: 1.0, name, f"'{name}': metrics.jsonl has its own column of this name")
          for name in ("iteration", "env_steps", "wall_s", "eval_return", "eval_returns_sampled")],
        (lambda: 1.0, "loss_per_seed", "'loss_per_seed': names that end in _per_seed are lists by agent"),
    ],
)  # fmt: skip
def test_invalid_metrics_are_refused(metric, name, words, tmp_path):
    with refuses(words):
        fdg.fit(Counter(metric, name), out=tmp_path / "run")


@pytest.mark.parametrize(
    "metric", [lambda: True, lambda: 3, lambda: jnp.bfloat16(0.5), lambda: jnp.uint8(7), lambda: jnp.int4(-3)]
)
def test_real_numbers_are_recorded(metric, tmp_path):
    fdg.fit(Counter(metric), out=tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["odd"] for row in rows] == [float(metric())] * 3


def test_keyword_only_init_is_refused():
    class KeywordOnly(Counter):
        def init(self, *, key):
            return jnp.zeros(2)

    with pytest.raises(
        fdg.FdgError, match=r"init takes \(\*, key\).*\(key\): .* by position, so remove the \*"
    ):
        fdg.trace(KeywordOnly(lambda: 1.0))
