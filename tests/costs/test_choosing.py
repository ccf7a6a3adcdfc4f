"""`policies.auto`: its candidates, its choice, and what it refuses."""

import dataclasses
import types
from unittest import mock

import jax
import pytest

import fdg
import policies
from fdg.commands.cluster import sensitivity, sensitivity_table
from fdg.costs import choosing
from fdg.errors import FdgError, PlanError
from policies.auto import device_counts, group_sizes, policies_of
from tests.costs.machines import cluster, link
from tests.tiny import Pupil, Silent


def test_auto_chooses_the_fastest():
    """All devices if communication is free, one device if it is expensive."""
    fast = cluster(4, inside=link("inside", bandwidth=1e30))
    slow_links = cluster(4, inside=link("inside", latency=1.0, call=1.0))
    assert policies.auto(Pupil(64), fast).devices == 4
    alone = policies.auto(Pupil(64), slow_links)
    assert alone.devices == 1
    feasible = [
        row.seconds for row in alone.rows if row.prediction is not None and not row.candidate.required_flag
    ]
    assert alone.seconds == min(feasible)


def test_auto_names_invalid_devices_and_policies():
    with pytest.raises(FdgError, match=r"devices=\[\]: give at least 1$"):
        policies.auto(Pupil(), [])
    with pytest.raises(FdgError, match="'gpu_only' is the name of a policy, not a policy"):
        policies.auto(Pupil(), 2, policies=["gpu_only"])


def test_staleness_needs_permission():
    slow = cluster(2, figures={"memory": 1e6, "product/float32": 1e7}, inside=link("inside", latency=1e-2))
    found = policies.auto(Pupil(64), slow, all_devices=True, policies=[policies.SingleLearnerCoarse])
    assert found.policy.staleness == 0
    assert "only with --max-staleness 1" in found.table
    stale = policies.auto(
        Pupil(64), slow, all_devices=True, policies=[policies.SingleLearnerCoarse], max_staleness=1
    )
    assert stale.policy.staleness == 1 and stale.seconds < found.seconds


def test_table_lists_candidates_and_choice():
    table = policies.auto(Pupil(64), cluster(4)).table
    assert "candidates in" in table and "largest part" in table
    assert "chosen: " in table.splitlines()[-1] and "per iteration predicted" in table


def test_table_counts_its_rows():
    found = policies.auto(Pupil(6), cluster(8))
    predicted = sum(row.prediction is not None for row in found.rows)
    skipped = sum(row.refused.startswith("skipped: ") for row in found.rows)
    others = len(found.rows) - predicted - skipped
    reason = "others of their kind are faster, or all are far slower than the best"
    expected = f"{predicted} of them predicted, {skipped} skipped ({reason}), {others} not feasible;"
    assert predicted and others > 0 and expected in found.table


def test_search_continues_past_infeasible_sizes():
    """Five of ten sizes are feasible; infeasible ones lie between the start and the fastest."""
    seconds = {0: 9.0, 2: 8.5, 5: 8.0, 8: 7.0, 9: 7.5}
    candidates = [choosing.Candidate(policies.GPUOnly(), 1, (("size", i),)) for i in range(10)]

    def evaluate(candidate):
        i = candidates.index(candidate)
        found = types.SimpleNamespace(seconds=seconds[i]) if i in seconds else None
        return choosing.Row(candidate, found, "" if found else "refused")

    rows = choosing._KindRows(evaluate)
    rows.candidates += candidates
    rows.predict(0)
    while choosing._try_neighbours(rows):
        pass
    assert min(rows, key=lambda i: rows[i].seconds) == 8
    assert len(rows) == 10  # both neighbours of the best were evaluated


def test_too_little_memory_is_refused():
    small = cluster(2, figures={"memory_bytes": 100.0})
    with pytest.raises(PlanError, match=r"needs .* of memory, and round has 100 B: use more devices"):
        policies.auto(Pupil(64), small)


def test_indivisible_sizes_are_refused_in_the_table():
    found = policies.auto(Pupil(6), cluster(8))
    assert any("is not divisible" in row.refused for row in found.rows)


@dataclasses.dataclass(frozen=True)
class UserPolicy:
    """A distribution policy of a user."""

    helpers: int = dataclasses.field(default=1, metadata={"devices": True})

    def place(self, devices):
        rest = fdg.Group("rest", tuple(range(self.helpers, len(devices))))
        helpers = fdg.Group("helpers", tuple(range(self.helpers)), exact=True)
        return {"environment": rest, "actor": rest, "learner": helpers}


def test_every_process_has_work():
    """Eight environments on seven actors would leave three of them, and their processes, idle."""
    devices = [mock.Mock(jax.Device, platform="cpu", device_kind="cpu", process_index=i) for i in range(8)]
    coarse = [policies.SingleLearnerCoarse]
    choice = policies.auto(Pupil(num_envs=8), devices, policies=coarse, all_devices=True)
    refused = {row.candidate.policy.learners: row.refused for row in choice.rows if row.refused}
    assert "leaves process 4 without work" in refused[1]
    assert choice.policy.learners == 4


def test_user_policy_is_a_candidate():
    found = policies.auto(Pupil(64), cluster(8), policies=[UserPolicy], all_devices=True)
    assert isinstance(found.policy, UserPolicy)
    assert {row.candidate.policy.helpers for row in found.rows if row.prediction} >= {1, 4}


def test_device_counts_and_group_sizes():
    assert device_counts(8) == [8, 4, 2, 1] and group_sizes(8) == [1, 2, 3, 4, 6, 7]
    values = policies_of([policies.SingleLearnerCoarse], 4, range(2))
    assert {(value.learners, value.staleness) for value in values} == {
        (n, k) for n in (1, 2, 3) for k in (0, 1)
    }


def test_algorithm_without_batch():
    assert policies.auto(Silent(), cluster(2)).devices in (1, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_staleness": -1}, "max_staleness=-1"),
        ({"max_staleness": 201}, "max_staleness=201: give a whole number of iterations, 0 to 200"),
        ({"may_change": ["env"]}, "'env' must be one of shuffle"),
    ],
)
def test_invalid_arguments(arguments, message):
    with pytest.raises(FdgError, match=message):
        policies.auto(Pupil(64), cluster(2), **arguments)
    with pytest.raises(FdgError, match="at least 1"):
        policies.auto(Pupil(64), 0)


@pytest.mark.parametrize(("name", "value"), [("max_staleness", True), ("measure", "no"), ("measure", 1)])
def test_fields_of_auto_of_another_type_are_refused(name, value):
    with pytest.raises(FdgError, match=f"{name}={value!r}: give "):
        policies.Auto(**{name: value})


@pytest.mark.parametrize("agents", [None, 64])
def test_sensitivity_to_halved_rates(agents):
    where = cluster(4, inside=link("inside", latency=1e-4))
    options = {"policies": [policies.GPUOnly, policies.SingleLearnerCoarse], "num_seeds": agents}
    graph = fdg.trace(Pupil(64))
    found = sensitivity(lambda one: policies.auto(Pupil(64), one, graph=graph, **options), where, agents)
    assert next(one for one in found if one.rate == "sort").seconds == pytest.approx(found[0].seconds)
    assert {"memory", "product/float32", "inside/latency", "inside/bandwidth"} <= {one.rate for one in found}
    assert all(one.seconds >= found[0].seconds * (1 - 1e-9) for one in found)
    assert all(one.slowdown >= -1e-9 for one in found)
    assert "as they are" in sensitivity_table(found)
