"""Predictions of plans: by hand where that can be, and overlap where staleness allows it."""

import dataclasses

import pytest

import algos
import envs
import fdg
import policies
from fdg.costs.prediction import predict
from fdg.costs.program_time import CLASSES, seconds_of
from fdg.costs.program_work import program_works
from fdg.errors import FdgError
from tests.costs.machines import cluster, link
from tests.tiny import Pupil

WHOLE = dict.fromkeys(CLASSES, 1.0)


@pytest.fixture(scope="module")
def language():
    return fdg.trace(algos.GRPO(env=envs.make("text:addition"), num_prompts=16, group_size=8))


@pytest.fixture(scope="module")
def graph():
    return fdg.trace(Pupil(num_envs=64))


def test_one_program_takes_its_work_and_what_it_exchanges(graph):
    plan = fdg.place(graph, policies.GPUOnly(), 4)
    slow = cluster(4, figures={"joined": WHOLE}, inside=link("inside", call=1e-3))
    found = predict(plan, slow)
    (load,) = program_works(plan, slow.target)
    calls = sum(c.calls for c in plan.programs[0].collectives)
    assert calls >= 2
    computing = sum(seconds_of(load.work, slow.kind).by_class.values())
    passed = sum(c.calls * 1.5 * c.bytes / 1e9 for c in load.collectives)
    assert found.seconds == pytest.approx(computing + calls * 1e-3 + passed)
    assert sum(found.shares.values()) == pytest.approx(found.seconds)
    assert found.bound == "inside latency among all"


def test_more_devices_do_less_each(graph):
    one, four = (predict(fdg.place(graph, policies.GPUOnly(), n), cluster(n)) for n in (1, 4))
    assert one.shares["transcendental on all"] == pytest.approx(
        4 * four.shares["transcendental on all"], rel=0.2
    )
    assert one.inside == 0 < four.inside


def test_the_host_starts_each_program_in_turn(graph):
    """Where nothing else takes time, an iteration takes as long as the host needs to start it."""
    plan = fdg.place(graph, policies.SingleLearnerCoarse(), 2)
    quick = {"product/float32": 1e30, "memory": 1e30, "dispatch": 1e-3, "transfer": 1e-4}
    found = predict(plan, cluster(2, figures=quick, inside=link("inside", bandwidth=1e30)))
    programs = sum(times for _, times in plan.schedule.calls())
    moves = sum(times for _, times in plan.schedule.moves())
    assert found.seconds == pytest.approx(programs * 1e-3 + moves * (1e-4 + 1e-3))
    assert found.bound == "starting programs on the host"


def test_staleness_lets_groups_work_at_the_same_time(graph):
    def seconds(staleness):
        plan = fdg.place(graph, policies.SingleLearnerCoarse(staleness=staleness), 2)
        return predict(plan, cluster(2, figures={"memory": 1e6, "product/float32": 1e7}))

    apart, together = seconds(0), seconds(1)
    longest = max(apart.busy.values())
    assert apart.seconds == pytest.approx(sum(apart.busy.values()), rel=0.05)
    assert together.seconds == pytest.approx(longest, rel=0.1)
    assert min(together.idle.values()) < 0.1 < max(apart.idle.values())


def test_groups_that_are_ahead_still_have_work_while_iterations_are_counted():
    """Two groups that want both cores of a machine gain nothing by working at the same time, and are not
    quicker the more iterations of the actors lie before those that are counted.
    """
    graph = fdg.trace(Pupil(num_envs=8192))
    figures = {"memory": 1e6, "product/float32": 1e7, "parallel": 1.0, "parallel_bytes": 1.0}
    where = dataclasses.replace(cluster(2, figures=figures), cores=2)

    def seconds(staleness):
        plan = fdg.place(graph, policies.SingleLearnerCoarse(staleness=staleness), 2)
        return predict(plan, where).seconds

    apart, together, further = (seconds(staleness) for staleness in (0, 1, 2))
    assert together == pytest.approx(further, rel=1e-3)
    assert 0.98 * apart < together <= apart


def test_between_processes_a_transfer_is_a_program_of_both_groups(graph):
    """Neither can do anything else meanwhile, so staleness hides nothing of it."""
    plan = fdg.place(graph, policies.SingleLearnerCoarse(staleness=1), 2)
    moves = sum(times for _, times in plan.schedule.moves())
    far = predict(plan, cluster(2, 2, between=link("between", call=1.0))).seconds
    near = predict(plan, cluster(2, inside=link("inside", latency=1.0))).seconds
    assert far == pytest.approx(moves, rel=0.05) and near < 0.6 * far


def test_a_long_loop_goes_on_as_it_began():
    """Of 100 trips some are simulated, of 24 all: a trip takes as long."""
    where = cluster(2, figures={"dispatch": 1e-5, "memory": 1e8}, inside=link("inside", latency=1e-5))

    def predicted(trips):
        graph = fdg.trace(dataclasses.replace(Pupil(num_envs=8), num_updates=trips))
        return predict(fdg.place(graph, policies.Central(), 2), where)

    few, more, many = map(predicted, (20, 24, 100))
    assert (many.seconds - more.seconds) / 76 == pytest.approx((more.seconds - few.seconds) / 4, rel=1e-3)
    for group in many.busy:
        grown = (many.busy[group] - more.busy[group]) / 76
        assert grown == pytest.approx((more.busy[group] - few.busy[group]) / 4, rel=1e-3)


def test_stragglers_cost_more_the_more_devices_wait_for_them(graph):
    def slower(devices):
        plan = fdg.place(graph, policies.GPUOnly(), devices)
        alike = predict(plan, cluster(devices)).seconds
        return predict(plan, cluster(devices, straggling=0.1)).seconds / alike

    assert slower(1) == pytest.approx(1.0) and 1.0 < slower(2) < slower(16) < 1.3


def test_hosts_apart_send_over_the_network(graph):
    plan = fdg.place(graph, policies.GPUOnly(), 4)
    near, far = predict(plan, cluster(4)), predict(plan, cluster(4, hosts=2))
    assert near.between == 0 < far.between


def test_processes_of_one_machine_share_its_cores():
    """Devices that want two cores each, in two processes: with two machines they have them, with one not."""
    apart = dataclasses.replace(cluster(2, 2, {"parallel": 1.0, "parallel_bytes": 1.0}), cores=2)
    together = dataclasses.replace(apart, hosts_per_machine=2)
    assert (apart.machines, apart.devices_per_machine) == (2, 1)
    assert (together.machines, together.devices_per_machine) == (1, 2)
    plan = fdg.place(fdg.trace(Pupil(num_envs=8192)), policies.GPUOnly(), 2)
    quick, slow = (predict(plan, one) for one in (apart, together))
    assert quick.seconds < slow.seconds


def test_a_plan_larger_than_the_cluster(graph):
    with pytest.raises(FdgError, match="4 devices does not fit on a cluster of 2: use --devices 2"):
        predict(fdg.place(graph, policies.GPUOnly(), 4), cluster(2))


def test_generation_counts_each_token_it_may_make():
    """Tokens after the first cost the same each, to within what attention and caches grow by."""

    def flops(longest):
        env = envs.make("text:addition")
        graph = fdg.trace(
            algos.GRPO(env=env, max_response=longest, num_prompts=4, group_size=4, num_layers=1)
        )
        return next(f.flops_per_call for f in graph.fragments if f.name == "respond")

    few, more, most = map(flops, (8, 16, 32))
    assert most - more == pytest.approx(2 * (more - few), rel=0.1)


def test_sharded_parameters_are_exchanged_once_a_pass_and_gradients_once(language):
    plan = fdg.place(language, policies.GPUOnly(parameters="fsdp"), 4)
    (load,) = program_works(plan, cluster(4).target)
    size = next(e.bytes_per_crossing for e in language.edges if e.source == "gradient")
    once = {(c.fragment, c.kind): (c.bytes, c.calls) for c in load.collectives}
    assert once == {
        ("respond", "all-gather"): (size, 1),
        ("refer", "all-gather"): (size, 1),
        ("gradient", "all-gather"): (size, 2),
        ("gradient", "reduce-scatter"): (size, 1),
    }
    whole = fdg.place(language, policies.GPUOnly(), 4)
    assert not any(c.kind == "all-gather" for c in program_works(whole, cluster(4).target)[0].collectives)


def test_groups_on_the_same_devices_have_one_figure_of_memory(language):
    plan = fdg.place(language, policies.Colocated(model_parallel=2, generation_parallel=1), 4)
    assert len(plan.memory) == 2 and len({size for _, size in plan.memory}) == 1
    assert [line for line in str(plan).splitlines() if "together" in line] == []


def test_generation_that_is_split_is_work_of_a_device_for_its_own_rows(language):
    one, four = (
        program_works(fdg.place(language, policies.GPUOnly(), n), cluster(n).target)[0] for n in (1, 4)
    )
    assert four.work.trips == one.work.trips > 1
    assert four.work.total_flops == pytest.approx(one.work.total_flops / 4, rel=0.02)
