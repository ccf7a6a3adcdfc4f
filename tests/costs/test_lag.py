"""`policies.auto` chooses the smallest lag within 5% of the best; the reference predicts every lag."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import fdg
import policies
from fdg.costs.choosing import lags
from fdg.costs.prediction import predict
from tests.costs.machines import cluster, link

PARTS = 4


@dataclasses.dataclass(frozen=True)
class Products:
    """Generation multiplies `generation_work` times as many matrices as learning."""

    generation_work: int = 1

    def init(self, key):
        return {"weight": jnp.ones((256, 256)), "rows": jnp.ones((256, 256))}

    def iterate(self, state):
        def multiply(x, weight, times):
            return jax.lax.fori_loop(0, 8 * times, lambda _, x: jnp.dot(x, weight) * 1e-3, x)

        @fdg.fragment("actor", in_axes=(None, 0))
        def respond(weight, rows):
            return multiply(rows, weight, self.generation_work)

        @fdg.fragment("learner", in_axes=(None, 0, None), out_axes=None)
        def gradient(weight, rows, total):
            return total + multiply(rows, weight, 1).T @ rows

        @fdg.fragment("learner", in_axes=None, out_axes=None)
        def update(weight, total):
            return weight + total

        def one(total, _):
            return gradient(state["weight"], respond(state["weight"], state["rows"]), total), None

        total, _ = jax.lax.scan(one, jnp.zeros((256, 256)), None, PARTS)
        return {**state, "weight": update(state["weight"], total)}, {}


PAIR = cluster(2, figures={"product/float32": 1e9}, inside=link("inside", bandwidth=1e12))


def choose_lag(algorithm, where):
    candidates = lags(fdg.trace(algorithm), policies.Split())
    return policies.auto(algorithm, where, policies=candidates, all_devices=True, further=False)


@pytest.mark.parametrize("generation_work", [1, 3])
def test_smallest_lag_within_5_percent(generation_work):
    graph = fdg.trace(Products(generation_work))
    found = choose_lag(Products(generation_work), PAIR)
    seconds = [
        predict(fdg.place(graph, policies.Split(lag=lag), 2), PAIR).seconds for lag in range(2 * PARTS + 1)
    ]
    acceptable = [lag for lag, one in enumerate(seconds) if one <= 1.05 * min(seconds)]
    assert found.policy == policies.Split(lag=acceptable[0]) and 1 <= acceptable[0] < PARTS
    predicted = [row for row in found.rows if row.prediction is not None]
    assert all(row.seconds == seconds[row.candidate.policy.lag] for row in predicted)
    assert len(found.rows) == 2 * PARTS + 1 and f"lag={acceptable[0]}) on 2 devices" in found.reason


def test_no_lag_without_overlap():
    """On one device nothing overlaps."""
    assert choose_lag(Products(), PAIR.of(1)).policy.lag == 0


def test_policies_that_differ_only_in_lag_are_all_predicted():
    given = [policies.Split(lag=lag) for lag in (0, 1, 2)]
    choice = policies.auto(Products(), PAIR, policies=given, all_devices=True, further=False)
    assert {row.candidate.policy for row in choice.rows} == set(given) and choice.policy.lag > 0
