"""Predictions of plans, compared with times computed by hand where possible."""

import dataclasses

import pytest

import algos
import envs
import fdg
import policies
from fdg.costs.prediction import predict
from fdg.costs.program_time import CLASSES, seconds_of
from fdg.costs.program_work import occupies_all_cores, program_works
from fdg.errors import FdgError
from fdg.placing.policy import Group
from tests.costs.machines import cluster, link
from tests.tiny import Pupil

UNFUSED = dict.fromkeys(CLASSES, 1.0)


@pytest.fixture(scope="module")
def language():
    return fdg.trace(algos.GRPO(env=envs.make("text:addition"), num_prompts=16, group_size=8))


@pytest.fixture(scope="module")
def graph():
    return fdg.trace(Pupil(num_envs=64))


def test_time_of_one_program(graph):
    plan = fdg.place(graph, policies.GPUOnly(), 4)
    slow = cluster(4, figures={"shares_after_fusion": UNFUSED}, inside=link("inside", call=1e-3))
    found = predict(plan, slow)
    (load,) = program_works(plan, slow)
    calls = sum(c.calls for c in plan.programs[0].collectives)
    assert calls >= 2
    computing = sum(seconds_of(load.work, slow.kind).by_class.values())
    transferring = sum(c.calls * 1.5 * c.bytes / 1e9 for c in load.collectives)
    assert found.seconds == pytest.approx(computing + calls * 1e-3 + transferring)
    assert sum(found.seconds_by_part.values()) == pytest.approx(found.seconds)
    assert found.largest_part == "inside latency among all"


def test_work_per_device_shrinks_with_devices(graph):
    one, four = (predict(fdg.place(graph, policies.GPUOnly(), n), cluster(n)) for n in (1, 4))
    assert one.seconds_by_part["transcendental on all"] == pytest.approx(
        4 * four.seconds_by_part["transcendental on all"], rel=0.2
    )
    assert one.inside == 0 < four.inside


def test_groups_have_the_rates_of_their_hosts(graph):
    """Actors on hosts whose devices are ten times as slow as the learners'; the policy puts them first."""
    where = cluster(4, first=cluster(4, figures={"product/float32": 1e8, "memory": 1e8}))
    plan = fdg.place(graph, policies.SingleLearnerCoarse(learners=4), where.to_place(where.devices))
    fast = fdg.place(graph, policies.SingleLearnerCoarse(learners=4), 8)
    found, alike = predict(plan, where), predict(fast, cluster(8))
    assert found.busy["actors"] == pytest.approx(10 * alike.busy["actors"], rel=0.1)
    with pytest.raises(FdgError, match="of another kind"):
        predict(fdg.place(graph, policies.GPUOnly(), where.to_place(8)), where)


def test_dispatch_bound_iteration(graph):
    """If nothing else takes time, an iteration takes as long as its dispatches on the host."""
    plan = fdg.place(graph, policies.SingleLearnerCoarse(), 2)
    fast = {"product/float32": 1e30, "memory": 1e30, "dispatch": 1e-3, "transfer": 1e-4}
    found = predict(plan, cluster(2, figures=fast, inside=link("inside", bandwidth=1e30)))
    programs = sum(times for _, times in plan.schedule.calls())
    moves = sum(times for _, times in plan.schedule.moves())
    assert found.seconds == pytest.approx(programs * 1e-3 + moves * (1e-4 + 1e-3))
    assert found.largest_part == "starting programs on the host"


@dataclasses.dataclass(frozen=True)
class Named:
    """Two groups, or one if their names are equal."""

    acting: str
    learning: str

    def place(self, devices):
        groups = {self.acting: fdg.Group(self.acting, (0, 1))}
        groups.setdefault(self.learning, fdg.Group(self.learning, (2, 3)))
        acting = groups[self.acting]
        return {"environment": acting, "actor": acting, "learner": groups[self.learning]}


@pytest.mark.parametrize(("plain", "odd"), [(("a", "l"), ("host", "l")), (("a", "a"), ("a on b", "a on b"))])
def test_predictions_do_not_depend_on_names_of_groups(graph, plain, odd):
    slow = cluster(4, figures={"product/float32": 1e9, "memory": 1e9, "dispatch": 1e-4})
    expected, found = (predict(fdg.place(graph, Named(*names), 4), slow) for names in (plain, odd))
    assert found.seconds == expected.seconds and [*found.busy.values()] == [*expected.busy.values()]


def test_staleness_overlaps_groups(graph):
    def seconds(staleness):
        plan = fdg.place(graph, policies.SingleLearnerCoarse(staleness=staleness), 2)
        return predict(plan, cluster(2, figures={"memory": 1e6, "product/float32": 1e7}))

    synchronous, stale = seconds(0), seconds(1)
    largest = max(synchronous.busy.values())
    assert synchronous.seconds == pytest.approx(sum(synchronous.busy.values()), rel=0.05)
    assert stale.seconds == pytest.approx(largest, rel=0.1)
    assert min(stale.idle.values()) < 0.1 < max(synchronous.idle.values())


def test_more_staleness_does_not_shorten_iterations():
    """Two groups that each use both cores of a machine gain nothing from overlap. Iterations that the actors
    ran ahead before the measured ones must not make them look faster.
    """
    graph = fdg.trace(Pupil(num_envs=8192))
    figures = {"memory": 1e6, "product/float32": 1e7, "parallel": 1.0, "parallel_bytes": 1.0}
    where = dataclasses.replace(cluster(2, figures=figures), cores=2)

    def seconds(staleness):
        plan = fdg.place(graph, policies.SingleLearnerCoarse(staleness=staleness), 2)
        return predict(plan, where).seconds

    synchronous, stale, staler = (seconds(staleness) for staleness in (0, 1, 2))
    assert stale == pytest.approx(staler, rel=1e-3)
    assert 0.98 * synchronous < stale <= synchronous


def test_transfer_between_processes_blocks_both_groups(graph):
    """Neither group can compute during the transfer, so staleness does not hide it."""
    plan = fdg.place(graph, policies.SingleLearnerCoarse(staleness=1), 2)
    moves = sum(times for _, times in plan.schedule.moves())
    other_host = predict(plan, cluster(2, 2, between=link("between", call=1.0))).seconds
    same_host = predict(plan, cluster(2, inside=link("inside", latency=1.0))).seconds
    assert other_host == pytest.approx(moves, rel=0.05) and same_host < 0.6 * other_host


def test_long_loops_are_extrapolated():
    """All of 24 trips are simulated, but only some of 100: the time per trip is equal."""
    where = cluster(2, figures={"dispatch": 1e-5, "memory": 1e8}, inside=link("inside", latency=1e-5))

    def predicted(trips):
        graph = fdg.trace(dataclasses.replace(Pupil(num_envs=8), num_updates=trips))
        return predict(fdg.place(graph, policies.Central(), 2), where)

    few, more, many = map(predicted, (20, 24, 100))
    assert (many.seconds - more.seconds) / 76 == pytest.approx((more.seconds - few.seconds) / 4, rel=1e-3)
    for group in many.busy:
        growth = (many.busy[group] - more.busy[group]) / 76
        assert growth == pytest.approx((more.busy[group] - few.busy[group]) / 4, rel=1e-3)


def test_straggling_grows_with_devices(graph):
    def slower(devices):
        plan = fdg.place(graph, policies.GPUOnly(), devices)
        without = predict(plan, cluster(devices)).seconds
        return predict(plan, cluster(devices, straggling=0.1)).seconds / without

    assert slower(1) == pytest.approx(1.0) and 1.0 < slower(2) < slower(16) < 1.3


def test_bytes_between_hosts(graph):
    plan = fdg.place(graph, policies.GPUOnly(), 4)
    same_host, other_host = predict(plan, cluster(4)), predict(plan, cluster(4, hosts=2))
    assert same_host.between == 0 < other_host.between


def test_processes_of_a_machine_share_its_cores():
    """Devices that can use two cores each, in two processes: slower on one two-core machine than on two."""
    two_machines = dataclasses.replace(cluster(2, 2, {"parallel": 1.0, "parallel_bytes": 1.0}), cores=2)
    one_machine = dataclasses.replace(two_machines, hosts_per_machine=2)
    assert (two_machines.machines, two_machines.devices_per_machine) == (2, 1)
    assert (one_machine.machines, one_machine.devices_per_machine) == (1, 2)
    plan = fdg.place(fdg.trace(Pupil(num_envs=8192)), policies.GPUOnly(), 2)
    fast, slow = (predict(plan, one) for one in (two_machines, one_machine))
    assert fast.seconds < slow.seconds


def test_plan_larger_than_the_cluster(graph):
    with pytest.raises(FdgError, match="4 devices does not fit on a cluster of 2: use --devices 2"):
        predict(fdg.place(graph, policies.GPUOnly(), 4), cluster(2))


def test_collectives_of_fsdp(language):
    plan = fdg.place(language, policies.GPUOnly(parameters="fsdp"), 4)
    (load,) = program_works(plan, cluster(4))
    size = next(e.bytes_per_crossing for e in language.edges if e.source == "gradient")
    collectives = {(c.fragment, c.kind): (c.bytes, c.calls) for c in load.collectives}
    assert collectives == {
        ("respond", "all-gather"): (size, 1),
        ("refer", "all-gather"): (size, 1),
        ("gradient", "all-gather"): (size, 2),
        ("gradient", "reduce-scatter"): (size, 1),
    }
    plain = fdg.place(language, policies.GPUOnly(), 4)
    assert not any(c.kind == "all-gather" for c in program_works(plain, cluster(4))[0].collectives)


def test_memory_of_groups_on_the_same_devices(language):
    plan = fdg.place(language, policies.Colocated(model_parallel=2, generation_parallel=1), 4)
    assert len(plan.memory) == 2 and len({size for _, size in plan.memory}) == 1
    assert [line for line in str(plan).splitlines() if "together" in line] == []


def test_work_of_split_generation(language):
    one, four = (program_works(fdg.place(language, policies.GPUOnly(), n), cluster(n))[0] for n in (1, 4))
    assert four.work.trips == one.work.trips > 1
    assert four.work.total_flops == pytest.approx(one.work.total_flops / 4, rel=0.02)


def test_work_of_split_streams():
    """Devices divide the prompts of starting responses and recomputed caches, as they divide ticks."""
    task = envs.make("text:addition")
    stream = fdg.trace(algos.GRPO(env=task, num_prompts=16, group_size=8, micro_batches=2, ahead=1))
    one, four = (program_works(fdg.place(stream, policies.GPUOnly(), n), cluster(n))[0] for n in (1, 4))
    assert four.work.total_flops == pytest.approx(one.work.total_flops / 4, rel=0.02)


@pytest.mark.parametrize(
    ("count", "cores", "each", "uses_all"),
    [(1, 1, 8, True), (2, 4, 8, False), (8, 4, 4, True), (8, 6, 4, False), (8, 8, 8, True)],
)
def test_cores_of_a_cluster(count, cores, each, uses_all):
    """A group uses all cores of a machine if the machine has at least as many of its devices as cores."""
    group = Group("all", tuple(range(count)))
    gpus = cluster(each, cores=cores)
    cpus = dataclasses.replace(gpus, kind=dataclasses.replace(gpus.kind, platform="cpu"))
    assert occupies_all_cores(group, cpus) == uses_all and not occupies_all_cores(group, gpus)


@pytest.mark.parametrize(("parameters", "share"), [("declared", 0.5), ("fsdp", 1)])
def test_devices_of_a_row_split_products_if_rules_split_parameters(language, parameters, share):
    """Attention's products too, of which there is one per head; in decoding, each has a single column."""
    policy = policies.GPUOnly(model_parallel=2, parameters=parameters)
    for of_heads in (False, True):
        alone, row = (
            sum(p.flops * count for p, count in work.work.products.items() if (p.batch > 1) == of_heads)
            for policy, devices in ((policies.GPUOnly(), 1), (policy, 2))
            for work in program_works(fdg.place(language, policy, devices), cluster(devices))
        )
        assert row == pytest.approx(share * alone, rel=1e-3)
