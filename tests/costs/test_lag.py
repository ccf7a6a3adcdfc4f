"""The lag that is chosen: the smallest within 5% of the best prediction, against all of them looked at."""

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
class Balanced:
    """Products of matrices; those of generating are `of_generating` times those of learning."""

    of_generating: int = 1

    def init(self, key):
        return {"weight": jnp.ones((256, 256)), "rows": jnp.ones((256, 256))}

    def iterate(self, state):
        def worked(x, weight, times):
            return jax.lax.fori_loop(0, 8 * times, lambda _, x: jnp.dot(x, weight) * 1e-3, x)

        @fdg.fragment("actor", in_axes=(None, 0))
        def respond(weight, rows):
            return worked(rows, weight, self.of_generating)

        @fdg.fragment("learner", in_axes=(None, 0, None), out_axes=None)
        def gradient(weight, rows, total):
            return total + worked(rows, weight, 1).T @ rows

        @fdg.fragment("learner", in_axes=None, out_axes=None)
        def update(weight, total):
            return weight + total

        def one(total, _):
            return gradient(state["weight"], respond(state["weight"], state["rows"]), total), None

        total, _ = jax.lax.scan(one, jnp.zeros((256, 256)), None, PARTS)
        return {**state, "weight": update(state["weight"], total)}, {}


TWO = cluster(2, figures={"product/float32": 1e9}, inside=link("inside", bandwidth=1e12))


def quickest_lag(algorithm, machine):
    among = lags(fdg.trace(algorithm), policies.Split())
    return policies.auto(algorithm, machine, policies=among, all_devices=True, further=False)


@pytest.mark.parametrize("of_generating", [1, 3])
def test_the_smallest_lag_near_the_best(of_generating):
    graph = fdg.trace(Balanced(of_generating))
    found = quickest_lag(Balanced(of_generating), TWO)
    seconds = [
        predict(fdg.place(graph, policies.Split(lag=lag), 2), TWO).seconds for lag in range(2 * PARTS + 1)
    ]
    near = [lag for lag, one in enumerate(seconds) if one <= 1.05 * min(seconds)]
    assert found.policy == policies.Split(lag=near[0]) and 1 <= near[0] < PARTS
    looked_at = [row for row in found.rows if row.prediction is not None]
    assert all(row.seconds == seconds[row.candidate.policy.lag] for row in looked_at)
    assert len(found.rows) == 2 * PARTS + 1 and f"lag={near[0]}) on 2 devices" in found.reason


def test_no_lag_where_it_brings_nothing():
    """On one device nothing overlaps."""
    assert quickest_lag(Balanced(), TWO.of(1)).policy.lag == 0


def test_policies_that_differ_by_lag_alone_are_all_looked_at():
    given = [policies.Split(lag=lag) for lag in (0, 1, 2)]
    choice = policies.auto(Balanced(), TWO, policies=given, all_devices=True, further=False)
    assert {row.candidate.policy for row in choice.rows} == set(given) and choice.policy.lag > 0
