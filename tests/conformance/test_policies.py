"""Results under every policy equal those of plain calls of `iterate`.

The algorithms of tests/user_algorithm.py run with all group sizes; those of `algos/`, which take seconds to
compile, run under every policy in `test_algorithms.py`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fdg
import policies
from fdg.placing.policy import Group
from tests.compilations import compilations
from tests.conformance import dialogue
from tests.conformance.comparison import (
    ALGORITHMS,
    ITERATIONS,
    assert_same,
    leaves,
    plain,
    reference,
    start,
)
from tests.user_algorithm import Walker

# (policy, number of devices): uneven groups, several learners and servers, more devices than used.
SETUPS = {
    "gpu_only 1": (policies.GPUOnly(), 1),
    "gpu_only 3": (policies.GPUOnly(), 3),
    "gpu_only 8": (policies.GPUOnly(), 8),
    "multi_learner 5": (policies.MultiLearner(), 5),
    "coarse on one": (policies.SingleLearnerCoarse(), 1),
    "coarse 3+1": (policies.SingleLearnerCoarse(actors=3), 4),
    "coarse 4+2": (policies.SingleLearnerCoarse(actors=4, learners=2), 6),
    "fine 3+1": (policies.SingleLearnerFine(), 4),
    "fine 4+2": (policies.SingleLearnerFine(workers=4, learners=2), 8),
    "environments 2+3": (policies.Environments(workers=2, learners=3), 8),
    "central 2+1": (policies.Central(workers=2), 3),
    "central 3+2": (policies.Central(workers=3, servers=2), 8),
    "workers 3+2+1": (policies.Workers(environments=3, actors=2), 6),
    # with a batch of 60
    "coarse 5+3": (policies.SingleLearnerCoarse(actors=5, learners=3), 8),
    "fine 5+1": (policies.SingleLearnerFine(workers=5), 8),
    "environments 5+2": (policies.Environments(workers=5, learners=2), 8),
    "central 5+2": (policies.Central(workers=5, servers=2), 8),
    "workers 5+1+2": (policies.Workers(environments=5, learners=2), 8),
}
BATCH_60 = ("coarse 5+3", "fine 5+1", "environments 5+2", "central 5+2", "workers 5+1+2")

CASES = [("walker 48", setup) for setup in SETUPS if setup not in BATCH_60 and setup != "multi_learner 5"]
CASES += [("walker 60", setup) for setup in ("multi_learner 5", *BATCH_60)]
CASES += [("gardener", setup) for setup in ("gpu_only 8", "multi_learner 5", *BATCH_60)]
CASES += [  # variants of PPO; `test_algorithms.py` runs it under every policy
    ("discrete", "gpu_only 1"),
    ("discrete", "gpu_only 8"),
    ("discrete", "fine 4+2"),
    ("discrete", "central 3+2"),
    ("continuous", "coarse 4+2"),
    ("discrete, time shuffle", "multi_learner 5"),
]


@pytest.fixture(scope="module")
def engine_of(devices):
    """Compiles the engine of an algorithm in a setup, cached for all tests."""

    @functools.cache
    def compiled(name, setup):
        policy, count = SETUPS[setup]
        return fdg.compile(ALGORITHMS[name](), policy, devices[:count])

    return compiled


@pytest.mark.parametrize(("name", "setup"), CASES)
def test_policy_matches_plain_jax(name, setup, engine_of):
    """Same numbers, structure and dtypes; no recompilation; the planned bytes and programs."""
    engine = engine_of(name, setup)
    engine.compile(ITERATIONS)
    state, metrics = engine.run(start(name), ITERATIONS)
    expected = reference(name)
    assert_same(expected, (state, metrics))
    ours, theirs = (
        {path: x for path, x in leaves(s).items() if "parameters" in path or "weight" in path}
        for s in (state, expected[0])
    )
    largest = max(float(np.max(np.abs(ours[path] - theirs[path]))) for path in ours)
    print(f"\n{name}, {setup}: parameters differ by at most {largest:.1e}")
    assert largest < 1e-5

    with compilations() as compiled:
        jax.block_until_ready(engine.run(state, ITERATIONS))
    assert compiled == []
    planned = sum(m.bytes_per_iteration for m in engine.plan.movements if m.how == "transfer")
    assert engine.moved_bytes == 2 * ITERATIONS * planned
    assert (planned > 0) == (len(engine.plan.groups) > 1)
    groups = {g.name: tuple(engine.devices[i] for i in g.devices) for g in engine.plan.groups}
    programs = [p for p in engine.programs if not p.name.startswith(("cut ", "join ", "copy "))]
    assert [(p.name, p.fragments, p.devices, p.calls_per_iteration) for p in programs] == [
        (p.name, p.fragments, groups[p.group], p.calls_per_iteration) for p in engine.plan.programs
    ]


def test_every_policy_is_listed():
    for family in ("walker", "gardener"):
        tested = {type(SETUPS[setup][0]) for name, setup in CASES if name.startswith(family)}
        assert {policies.get(name) for name in set(policies.names()) - dialogue.POLICIES} == tested


@pytest.mark.parametrize("setup", ["gpu_only 8", "coarse 3+1", "fine 4+2", "central 3+2"])
def test_init_matches_the_algorithm(setup, engine_of):
    engine = engine_of("walker 48", setup)
    state = engine.init(3)
    assert_same(start("walker 48"), state, 1e-6)
    assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(lambda x: x.sharding, engine.state_shape)


def test_programs_export_for_gpu_and_tpu(engine_of):
    """With the public `jax.export`."""
    for program in engine_of("walker 48", "fine 4+2").programs:
        exported = jax.export.export(program.function, platforms=["cuda", "tpu"])(*program.arguments)
        assert exported.platforms == ("cuda", "tpu")
        assert exported.nr_devices == len(program.devices)


# --- user-defined placements ---


@dataclasses.dataclass(frozen=True)
class Custom:
    """A policy with arbitrary groups."""

    groups: tuple[tuple[str, Group], ...]

    def place(self, devices):
        return dict(self.groups)


def test_groups_that_share_devices(devices):
    """Overlapping groups give the same numbers."""
    groups = {
        "environment": Group("a", (0, 1, 2)),
        "actor": Group("b", (2, 1)),
        "learner": Group("c", (0, 3)),
        "update": Group("d", (2,)),
    }
    engine = fdg.compile(Walker(48), Custom(tuple(groups.items())), devices[:4])
    assert len(engine.plan.groups) == 4
    assert_same(reference("walker 48"), engine.run(start("walker 48"), ITERATIONS))


def test_wrong_batch_axis_gives_the_same_numbers(devices):
    """An algorithm that declares a wrong batch axis."""

    class WrongAxis(Walker):
        def iterate(self, state):
            state, metrics = super().iterate(state)

            @fdg.fragment("learner", in_axes=1, out_axes=None)
            def rotate(position):  # [B, FEATURES]: the batch is not axis 1
                return position[:, ::-1] + jnp.sum(position, axis=0, keepdims=True)

            return state._replace(position=jnp.tanh(rotate(state.position))), metrics

    engine = fdg.compile(WrongAxis(48), policies.SingleLearnerCoarse(actors=2, learners=3), devices[:5])
    state = WrongAxis(48).init(jax.random.key(1))
    assert_same(plain(WrongAxis(48), state, 3), engine.run(jax.tree.map(jnp.copy, state), 3))


# --- invalid requests are refused before compiling ---

DIVIDED = {
    policies.SingleLearnerCoarse: ("actors", "learners", "act", "actor"),
    policies.SingleLearnerFine: ("workers", "learners", "step", "environment"),
    policies.Environments: ("workers", "learners", "step", "environment"),
    policies.Central: ("workers", "servers", "act", "actor"),
}


def refused(algorithm, policy, devices, *words):
    with compilations() as compiled, pytest.raises(fdg.PlanError) as error:
        fdg.compile(algorithm, policy, devices)
    assert "\n" not in str(error.value)
    for word in (str(policy), *words):
        assert word in str(error.value), str(error.value)
    assert [name for name in compiled if "backend_compile" in name or "mlir" in name] == []


@pytest.mark.parametrize("policy", DIVIDED)
def test_too_many_devices(policy, devices):
    many, few, *_ = DIVIDED[policy]
    request = policy(**{many: 7, few: 2})
    refused(
        Walker(), request, devices, f"7 {many} + 2 {few} = 9", "there are 8", "use more devices, or smaller"
    )
    refused(Walker(), policy(**{few: 8}), devices, f"1 {many} + 8 {few} = 9", "there are 8")


@pytest.mark.parametrize("policy", DIVIDED)
@pytest.mark.parametrize("number", [0, -1, 1.5])
def test_invalid_group_size(policy, number, devices):
    many, few, *_ = DIVIDED[policy]
    refused(Walker(), policy(**{many: number}), devices, f"{many}={number}", "at least 1")
    refused(Walker(), policy(**{few: number}), devices, f"{few}={number}", "at least 1")


@pytest.mark.parametrize("policy", DIVIDED)
def test_batch_must_be_divisible(policy, devices):
    many, _, fragment, role = DIVIDED[policy]
    # 16 environments on 5 devices.
    words = [
        f"'{fragment}' ({role})",
        "a batch of 16",
        f"5 devices of its {many}",
        "use 4",
        "a batch of 15 or 20",
    ]
    refused(Walker(16), policy(**{many: 5}), devices, *words)


class Lonely:
    """One fragment, with a role that no policy names."""

    role = "dreamer"

    def init(self, key):
        return jnp.zeros(8)

    def iterate(self, x):
        return fdg.fragment(self.role)(jnp.cos)(x), {}


@pytest.mark.parametrize("policy", DIVIDED)
def test_missing_role(policy, devices):
    refused(
        Lonely(), policy(), devices, "Lonely has no fragment", "'dreamer'", "mark one with fdg.fragment('"
    )


@pytest.mark.parametrize("policy", [policies.GPUOnly, policies.MultiLearner])
def test_colocating_policies_place_any_role(policy, devices):
    """These place all roles together, on the most devices that divide the batch (8)."""
    engine = fdg.compile(Lonely(), policy(), devices[:3])
    assert [g.devices for g in engine.plan.groups] == [(0, 1)]
    refused(Lonely(), policy(), [], "0 devices", "at least one is needed")


def test_staleness_must_be_a_whole_number(devices):
    for staleness in (-1, 0.5):
        policy = policies.SingleLearnerCoarse(staleness=staleness)
        refused(Walker(), policy, devices, f"staleness={staleness}", "a whole number of iterations")
