"""Layout changes on the same devices: predicted collectives against those of XLA's programs."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fdg
import policies
from bench.resharding import ENGINES, evaluate_formula, group_size
from fdg.lowering.mesh import mesh_of
from fdg.placing.layout import Layout
from fdg.placing.policy import Group
from fdg.placing.resharding import CommonMesh, change, common_mesh
from fdg.running.steps import resharding, shardings
from policies.parameters import generation_group
from tests.conformance.comparison import assert_same, plain
from tests.conformance.dialogue import Dialogue
from tests.placing.schedules import assert_valid, described

SHAPE = (512, 256)
M = 4 * SHAPE[0] * SHAPE[1]  # bytes
MESH = (("dp", 2), ("tg", 2), ("mdp", 2))
COMMON = CommonMesh(MESH, tuple(range(8)), *[tuple((name, (name,)) for name, _ in MESH)] * 2)
CASES = {  # layouts before and after, kind, predicted temporary bytes / M, group sizes of the all-gathers
    "1-D to fewer": ((("tg", "mdp"),), (("tg",),), "all-gather", 0, [2]),
    "fewer to 1-D": ((("tg",),), (("tg", "mdp"),), "slice", 0, []),
    "2-D to tensor parallel": ((("dp", "mdp"), ("tg",)), ((), ("tg",)), "all-gather", 0, [4]),
    "to replicated": ((("dp", "tg", "mdp"),), (), "all-gather", 0, [8]),
    "two dimensions": ((("dp",), ("tg", "mdp")), ((), ("tg",)), "all-gather", 0.25, [2, 2]),
    "not contained": ((("tg", "mdp"),), (("mdp",),), "exchange", 1.0, None),
    "another dimension": ((("tg",),), ((), ("tg",)), "exchange", 1.0, None),
    "the same": ((("tg",),), (("tg",),), "stays", 0, []),
}


COLLECTIVE = re.compile(r" = .*? (all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\(")


def compiled(reshard, devices):
    mesh = mesh_of(devices, reshard.mesh.axes)
    before, _ = shardings(reshard, mesh)
    argument = jax.ShapeDtypeStruct(reshard.source.shape, np.float32, sharding=before)
    return resharding(reshard, mesh).lower(argument).compile()


def gathering(text):
    """For each collective of an HLO text: the group size of an all-gather, or else its name."""
    found = []
    for line in text.splitlines():
        if kind := COLLECTIVE.search(line):
            found.append(group_size(line) if kind[1] == "all-gather" else kind[1])
    return found


@pytest.mark.parametrize("case", CASES)
def test_prediction_matches_xla(case, devices):
    before, after, kind, temporary, groups = CASES[case]
    reshard = change(COMMON, Layout(SHAPE, before, MESH), Layout(SHAPE, after, MESH))
    assert reshard.kind == kind and reshard.temporary_bytes(M) == temporary * M
    program = compiled(reshard, devices)
    measured = program.memory_analysis().temp_size_in_bytes
    assert measured <= reshard.temporary_bytes(M) + 64  # a few words for indices
    if groups is None:
        assert gathering(program.as_text())
        return
    assert gathering(program.as_text()) == groups
    assert measured >= reshard.temporary_bytes(M)
    assert reshard.gather_size == (np.prod(groups) if groups else 1)


def parts(group, spec, length=64):
    """The index range that each device holds of an array, computed without meshes."""
    layout = Layout((length,), spec, group.mesh)
    size = length // layout.parts[0]
    return {
        device: range(part * size, (part + 1) * size)
        for device, (part,) in zip(group.devices, layout.part_of_device, strict=True)
    }


@pytest.mark.parametrize(
    ("count", "wide", "narrow"), [(8, 4, 2), (8, 8, 2), (8, 2, 1), (12, 6, 3), (16, 8, 2)]
)
def test_training_shards_lie_within_generation_shards(count, wide, narrow):
    train = Group("training", tuple(range(count)), model=wide, parameters="declared")
    generate = generation_group(train, "generation", narrow)
    assert sorted(generate.devices) == list(train.devices) and generate.num_batch_parts == count // narrow
    small, large = (parts(group, (("model",),), 48) for group in (train, generate))
    assert all(set(small[device]) <= set(large[device]) for device in train.devices)
    batch = [parts(group, (("batch",),), 48) for group in (generate, train)]  # samples move back
    assert all(set(batch[0][device]) <= set(batch[1][device]) for device in train.devices)
    mesh = common_mesh(train, generate)
    reshard = change(mesh, *(Layout((48,), (("model",),), group.mesh) for group in (train, generate)))
    assert reshard.kind == "all-gather" and reshard.gather_size == wide // narrow
    assert reshard.arriving(48) == sum(len(large[d]) - len(small[d]) for d in train.devices)
    back = common_mesh(generate, train)
    assert (
        change(
            back, Layout((48,), (("model",),), generate.mesh), Layout((48,), (("model",),), train.mesh)
        ).kind
        == "slice"
    )


def test_generation_on_consecutive_devices_moves_shards():
    """Engines without HybridFlow's grouping place generation in this way."""
    train = Group("training", tuple(range(8)), model=4, parameters="declared")
    near = Group("generation", tuple(range(8)), model=2, parameters="declared")
    reshard = change(common_mesh(train, near), *(Layout((64,), (("model",),), g.mesh) for g in (train, near)))
    assert reshard.kind == "exchange" and reshard.temporary_bytes(256) == 256
    small, large = (parts(group, (("model",),)) for group in (train, near))
    assert not all(set(small[device]) <= set(large[device]) for device in train.devices)


def test_no_common_mesh():
    group = Group("a", tuple(range(8)), model=2, parameters="declared")
    assert common_mesh(group, Group("b", (0, 1, 2, 3, 4, 5, 7, 6), model=2, parameters="declared")) is None
    assert common_mesh(group, Group("b", tuple(range(4)), model=2, parameters="declared")) is None


HYBRID = policies.Colocated(model_parallel=4, generation_parallel=2)


def test_parameters_are_lent_and_returned():
    plan = fdg.place(Dialogue(), HYBRID, 8)
    assert_valid(plan.schedule)
    steps = described(plan.schedule)
    lent, *_ = steps
    assert lent.startswith("training -> generation: ") and lent.count("f32") == 3  # the actor's three leaves
    assert steps[1] == "generation: ask+generate+judge" and steps[-1] == "training: refer+criticise+learn"
    assert steps[2].startswith("generation -> training: ") and steps[2].count("f32") == 3
    # The generation group keeps no parameters, so training has all the memory.
    kept = [value for places in plan.schedule.leaves for value in places if value.group == "generation"]
    assert [value.shape for value in kept] == [()]  # the key
    text = str(plan)
    assert "resharding training lends to generation, x1: 1 array gathered among 2 neighbours, 0 B" in text
    assert "resharding generation lends to training, x1: 3 arrays cut, which moves nothing, 0 B" in text


class TrainsFirst:
    """The learner replaces the weight before the actor uses the old one."""

    def init(self, key):
        return {"w": jnp.arange(8.0), "x": jnp.ones((8, 8))}

    def iterate(self, state):
        learn = fdg.fragment("learner", in_axes=(None, 0), out_axes=(None, 0))(
            lambda w, x: (0.5 * w, x + w[None])
        )
        act = fdg.fragment("actor", in_axes=(None, 0), out_axes=0)(lambda w, y: jnp.sin(w[None] * y))
        w, y = learn(state["w"], state["x"])
        return {"w": w, "x": act(state["w"], y)}, {}


def test_parameters_that_training_has_replaced_are_not_lent(devices):
    algorithm = TrainsFirst()
    policy = dataclasses.replace(HYBRID, parameters=[("w", "model")])
    engine = fdg.compile(algorithm, policy, devices[:8])
    assert_valid(engine.plan.schedule)
    assert_same(plain(algorithm, algorithm.init(None), 3), engine.run(engine.init(0), 3))


@pytest.mark.parametrize("engine", ENGINES)
def test_hybridflow_table_2(engine):
    """Table 2 of HybridFlow (arXiv 2409.19256) with tp = 4, tg = 2, d = 2, worked by hand."""
    before, after, arrives, peak, redundant = ENGINES[engine]
    figures = {"DeepSpeed-Chat": (7 / 8, 1, 1 / 8), "HybridFlow-V": (3 / 4, 1, 1 / 4)}.get(
        engine, (1 / 4, 1 / 2, 0)
    )
    sizes = {"t": 4, "p": 1, "tg": 2, "d": 2}
    assert tuple(evaluate_formula(formula, sizes) for formula in (arrives, peak, redundant)) == figures
    mesh = (("d", 2), ("g", 2), ("j", 2))
    common = CommonMesh(mesh, tuple(range(8)), *[tuple((name, (name,)) for name, _ in mesh)] * 2)
    reshard = change(common, Layout(SHAPE, before, mesh), Layout(SHAPE, after, mesh))
    assert (
        reshard.arriving(M) == 8 * M * figures[0]
        and M // reshard.target.num_parts + reshard.temporary_bytes(M) == M * figures[1]
    )


def test_only_missing_parameters_arrive():
    """HybridFlow's Table 2: (tp - tg) / (tg tp) of the parameters arrive at each device."""
    plan = fdg.place(
        Dialogue(),
        policies.Colocated(model_parallel=4, generation_parallel=2, parameters=[(".*", "model")]),
        4,
    )
    lent = next(m for m in plan.movements if m.how == "transfer" and m.where == "training -> generation")
    size = sum(x.size * 4 for x in jax.tree.leaves(plan.graph.state["params"]["actor"]))
    assert lent.bytes_per_crossing == 4 * size * (4 - 2) // (2 * 4)


def test_invalid_policies():
    with pytest.raises(fdg.PlanError, match="generation_parallel=3 is not a divisor of model_parallel=4"):
        policies.Colocated(model_parallel=4, generation_parallel=3)
    with pytest.raises(fdg.PlanError, match="references=-1: give a number of devices"):
        policies.Standalone(references=-1)
