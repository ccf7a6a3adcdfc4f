"""`policies.auto`: what is looked at, what is taken, what is refused."""

import dataclasses
import time
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


def test_the_quickest_is_taken():
    """Without any cost of exchanging, all devices share all work; where that is dear, one does it alone."""
    free = cluster(4, inside=link("inside", bandwidth=1e30))
    dear = cluster(4, inside=link("inside", latency=1.0, call=1.0))
    assert policies.auto(Pupil(64), free).devices == 4
    alone = policies.auto(Pupil(64), dear)
    assert alone.devices == 1
    taken = [row.seconds for row in alone.rows if row.prediction is not None and not row.candidate.asks]
    assert alone.seconds == min(taken)


def test_staleness_only_where_it_is_allowed():
    slow = cluster(2, figures={"memory": 1e6, "product/float32": 1e7}, inside=link("inside", latency=1e-2))
    found = policies.auto(Pupil(64), slow, all_devices=True, policies=[policies.SingleLearnerCoarse])
    assert found.policy.staleness == 0
    assert "only with --max-staleness 1" in found.table
    lagging = policies.auto(
        Pupil(64), slow, all_devices=True, policies=[policies.SingleLearnerCoarse], max_staleness=1
    )
    assert lagging.policy.staleness == 1 and lagging.seconds < found.seconds


def test_the_table_says_what_was_looked_at_and_why():
    table = policies.auto(Pupil(64), cluster(4)).table
    assert "candidates in" in table and "largest part" in table
    assert "chosen: " in table.splitlines()[-1] and "per iteration predicted" in table


def test_the_table_counts_its_rows():
    found = policies.auto(Pupil(6), cluster(8))
    good = sum(row.prediction is not None for row in found.rows)
    left = sum(row.refused.startswith("skipped: ") for row in found.rows)
    others = len(found.rows) - good - left
    why = "others of their kind are faster, or all are far slower than the best"
    said = f"{good} of them predicted, {left} skipped ({why}), {others} not feasible;"
    assert good and others > 0 and said in found.table


def test_sizes_that_cannot_be_do_not_end_the_search():
    """Of ten sizes every other is refused, and the quickest lies beyond some of them."""
    seconds = {0: 9.0, 2: 8.5, 5: 8.0, 8: 7.0, 9: 7.5}
    some = [choosing.Candidate(policies.GPUOnly(), 1, (("size", i),)) for i in range(10)]

    def look(one):
        i = some.index(one)
        found = types.SimpleNamespace(seconds=seconds[i]) if i in seconds else None
        return choosing.Row(one, found, "" if found else "refused")

    rows = choosing._KindRows(look)
    rows.options += some
    rows.predict(0)
    while choosing._try_neighbours(rows):
        pass
    assert min(rows, key=lambda i: rows[i].seconds) == 8
    assert len(rows) == 10  # both neighbours of the best were looked at


def test_what_does_not_fit_is_refused_with_the_number_and_the_fix():
    small = cluster(2, figures={"memory_bytes": 100.0})
    with pytest.raises(PlanError, match=r"needs .* of memory, and round has 100 B: use more devices"):
        policies.auto(Pupil(64), small)


def test_sizes_that_do_not_divide_are_refused_in_the_table():
    found = policies.auto(Pupil(6), cluster(8))
    assert any("is not divisible" in row.refused for row in found.rows)


@dataclasses.dataclass(frozen=True)
class Mine:
    """A policy of a user's own."""

    helpers: int = dataclasses.field(default=1, metadata={"devices": True})

    def place(self, devices):
        rest = fdg.Group("rest", tuple(range(self.helpers, len(devices))))
        helpers = fdg.Group("helpers", tuple(range(self.helpers)), exact=True)
        return {"environment": rest, "actor": rest, "learner": helpers}


def test_no_process_is_left_without_work():
    """Eight environments over seven actors leave three of them idle, and so do the processes of these."""
    devices = [mock.Mock(jax.Device, platform="cpu", device_kind="cpu", process_index=i) for i in range(8)]
    coarse = [policies.SingleLearnerCoarse]
    choice = policies.auto(Pupil(num_envs=8), devices, policies=coarse, all_devices=True)
    refused = {row.candidate.policy.learners: row.refused for row in choice.rows if row.refused}
    assert "leaves process 4 without work" in refused[1]
    assert choice.policy.learners == 4


def test_a_policy_of_ones_own_takes_part():
    found = policies.auto(Pupil(64), cluster(8), policies=[Mine], all_devices=True)
    assert isinstance(found.policy, Mine)
    assert {row.candidate.policy.helpers for row in found.rows if row.prediction} >= {1, 4}


def test_numbers_to_look_at():
    assert device_counts(8) == [8, 4, 2, 1] and group_sizes(8) == [1, 2, 3, 4, 6, 7]
    values = policies_of([policies.SingleLearnerCoarse], 4, range(2))
    assert {(value.learners, value.staleness) for value in values} == {
        (n, k) for n in (1, 2, 3) for k in (0, 1)
    }


def test_more_than_two_hundred_in_less_than_ten_seconds():
    begun = time.perf_counter()
    found = policies.auto(Pupil(64), cluster(64, hosts=8), max_staleness=3)
    assert len(found.rows) >= 200
    assert time.perf_counter() - begun < 30  # ten on a quiet machine: `python -m bench.costs` says


def test_an_algorithm_without_a_batch():
    assert policies.auto(Silent(), cluster(2)).devices in (1, 2)


@pytest.mark.parametrize(
    ("given", "says"),
    [({"max_staleness": -1}, "max_staleness=-1"), ({"may_change": ["env"]}, "'env' must be one of shuffle")],
)
def test_bad_requests(given, says):
    with pytest.raises(FdgError, match=says):
        policies.auto(Pupil(64), cluster(2), **given)
    with pytest.raises(FdgError, match="at least 1"):
        policies.auto(Pupil(64), 0)


def test_each_rate_halved():
    where = cluster(4, inside=link("inside", latency=1e-4))
    classes = [policies.GPUOnly, policies.SingleLearnerCoarse]
    graph = fdg.trace(Pupil(64))
    found = sensitivity(lambda one: policies.auto(Pupil(64), one, graph=graph, policies=classes), where)
    assert {"memory", "product/float32", "inside/latency", "inside/bandwidth"} <= {one.rate for one in found}
    assert all(one.seconds >= found[0].seconds * (1 - 1e-9) for one in found)
    assert all(one.slowdown >= -1e-9 for one in found)
    assert "as they are" in sensitivity_table(found)
