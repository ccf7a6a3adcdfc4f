"""Sharded parameters and optimiser state: numbers, memory per device, and collectives."""

import collections
import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import fdg
import policies
from fdg import Group, keys
from fdg.commands.parse import parse
from fdg.training.checkpoint import Checkpoints
from tests.conformance.transformer import Sequences
from tests.refusing import refuses

ITERATIONS = 5

# Heads and hidden units over `model` (Shoeybi et al., arXiv 1909.08053), otherwise the largest dimension.
TENSOR = (
    ("qkv", P(None, None, "model")),
    ("attention.*out", P("model")),
    (r"mlp.*(in|bias)'", "model"),
    ("mlp.*out", P("model")),
    (".*", "model"),
)
BOTH = (
    ("qkv", P("batch", None, "model")),
    ("attention.*out", P("model", "batch")),
    (r"mlp.*in'", P("batch", "model")),
    ("mlp.*out", P("model", "batch")),
    (".*", "batch+model"),
)
COARSE = policies.SingleLearnerCoarse(actors=2, learners=4, model_parallel=2, parameters=BOTH)
SETUPS = {  # (policy, number of devices, fraction of parameters and optimiser state per device)
    "fsdp 8": (policies.GPUOnly(parameters=policies.fsdp()), 8, 1 / 8),
    "tensor 4": (policies.GPUOnly(model_parallel=4, parameters=TENSOR), 4, 1 / 4),
    "fsdp 2 x tensor 4": (policies.GPUOnly(model_parallel=4, parameters=BOTH), 8, 1 / 8),
    "learners 2 x 2 beside actors": (COARSE, 6, 1 / 4),
}


def to_numpy(tree):
    return [np.asarray(jax.random.key_data(x) if keys.is_key(x.dtype) else x) for x in jax.tree.leaves(tree)]


@functools.cache
def start():
    return jax.jit(Sequences().init)(jax.random.key(0))


@functools.cache
def reference():
    """State and metrics of plain calls of `iterate` on one device."""
    state, rows = start(), []
    iterate = jax.jit(Sequences().iterate)
    for _ in range(ITERATIONS):
        state, metrics = iterate(state)
        rows.append(metrics)
    return to_numpy(state), [np.asarray(list(row.values())) for row in rows]


@pytest.fixture(scope="module")
def engine_of(devices):
    @functools.cache
    def compiled(setup):
        policy, count, _ = SETUPS[setup]
        engine = fdg.compile(Sequences(), policy, devices[:count])
        engine.compile(1)
        return engine

    return compiled


@functools.cache
def run(engine):
    state, rows = engine.init(0), []
    for _ in range(ITERATIONS):
        state, metrics = engine.run(state, 1)
        rows.append(np.asarray([metrics[name][0] for name in ("loss", "reward")]))
    return state, rows


def fractions(state):
    """The fraction of parameters and optimiser state on each device, from the arrays' shards."""
    leaves = jax.tree.leaves((state["params"], state["adam"]))
    bytes_by_device = collections.Counter()
    for leaf in leaves:
        for shard in leaf.addressable_shards:
            bytes_by_device[shard.device] += shard.data.nbytes
    total = sum(leaf.nbytes for leaf in leaves)
    return {device: size / total for device, size in bytes_by_device.items()}


def assert_sharded(state, part, count):
    found = fractions(state)
    assert len(found) == count
    for device, fraction in found.items():
        assert fraction <= part * 1.02, f"{device} holds {fraction:.4f} of parameters and optimiser state"


@pytest.mark.parametrize("setup", SETUPS)
def test_matches_one_device(setup, engine_of):
    state, rows = run(engine_of(setup))
    expected, metrics = reference()
    for got, want in zip(to_numpy(state), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    np.testing.assert_allclose(rows, metrics, rtol=0, atol=1e-5)
    assert np.ptp([row[0] for row in rows]) > 1e-3  # it learns


@pytest.mark.parametrize("setup", SETUPS)
def test_memory_per_device(setup, engine_of):
    _, count, part = SETUPS[setup]
    engine = engine_of(setup)
    learners = len(engine.plan.groups[-1])
    assert learners == (count if part != 1 / 4 else 4)
    assert_sharded(engine.init(0), part, learners)
    state, _ = run(engine)
    assert_sharded(state, part, learners)
    for leaf, shape in zip(jax.tree.leaves(state), jax.tree.leaves(engine.state_shape), strict=True):
        assert leaf.sharding.is_equivalent_to(shape.sharding, leaf.ndim)


# --- collectives ---

WIDTHS = {"f32": 4, "s32": 4, "u32": 4, "pred": 1}
COLLECTIVE = re.compile(
    r" = (.*?) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


def hlo_collectives(text):
    """Bytes of collectives by kind, parsed independently of fdg: a computation and those that it calls, times
    the known trip counts of loops."""
    body, computations, entry = None, {}, None
    for line in text.splitlines():
        if not line.startswith(" ") and line.endswith("{") and "(" in line:
            name = line.removeprefix("ENTRY ").split()[0].lstrip("%")
            body = computations.setdefault(name, [])
            entry = name if line.startswith("ENTRY") else entry
        elif line.startswith("}"):
            body = None
        elif body is not None:
            body.append(line)

    @functools.cache
    def total(name):
        found = collections.Counter()
        for line in computations[name]:
            if made := COLLECTIVE.search(line):
                for dtype, sizes in re.findall(r"(\w+)\[([\d,]*)\]", made[1]):
                    found[made[2]] += WIDTHS[dtype] * int(np.prod([int(n) for n in sizes.split(",") if n]))
            trips = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line)
            for called in re.findall(r"(?:body|condition|calls|to_apply)=%([\w.\-]+)", line):
                for kind, size in total(called).items():
                    found[kind] += size * (int(trips[1]) if trips else 1)
        return found

    return total(entry)


def planned(plan):
    found = collections.Counter()
    for movement in plan.movements:
        if movement.program:
            found[movement.how] += movement.bytes_per_iteration
    return found


@pytest.mark.parametrize("setup", SETUPS)
def test_planned_collectives_match_compiled_programs(setup, engine_of):
    engine = engine_of(setup)
    found = collections.Counter()
    for program in engine.programs:
        for kind, size in hlo_collectives(program.hlo()).items():
            found[kind] += size * program.calls_per_iteration
    stated = planned(engine.plan)
    assert stated.keys() == found.keys() and sum(found.values())
    for kind, size in found.items():
        assert stated[kind] == pytest.approx(size, rel=0.05), kind
    assert engine.unexplained() == ()
    assert "read from its compiled programs" in str(engine.plan)
    assert all(m.read for m in engine.plan.movements if m.where == engine.plan.groups[-1].name)
    assert "all-gather" in engine.plan.to_mermaid() and "all-gather" in engine.plan._repr_svg_()


def test_fsdp_collectives_by_hand(engine_of):
    """By hand: acting (twice with the same parameters) and each of two epochs gather the parameters once;
    gradients are reduced once per epoch, as without sharding. 5% tolerance for other collectives of XLA."""
    stated = planned(engine_of("fsdp 8").plan)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(start()["params"]))
    assert stated["all-gather"] == pytest.approx(3 * size, rel=0.05)
    assert stated["all-reduce"] == pytest.approx(2 * size, rel=0.05)
    assert sum(stated.values()) == pytest.approx(5 * size, rel=0.05)


def test_plan_before_compiling_names_unknown_collectives():
    plan = fdg.place(Sequences(), COARSE, 6)
    assert plan.unpredicted == ("learners",)
    text = str(plan)
    assert "collectives of group learners: known after compiling" in text
    assert not any(m.program and m.where == "learners" for m in plan.movements)
    assert "sharded on learners (batch 2 x model 2): " in text
    assert "'qkv' as (batch, -, model): " in text
    moved = {m.where: m.bytes_per_iteration for m in plan.movements if m.how == "transfer"}
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(start()["params"]))
    assert moved["learners -> actors"] == 2 * size  # each of two actors has all of them
    other = fdg.place(Sequences(), policies.SingleLearnerCoarse(actors=2, learners=2), 4)  # same rows
    assert dict(plan.memory)["learners"] < dict(other.memory)["learners"] - size


# --- checkpoints, staleness, parameter servers, command line ---


def test_checkpoint_keeps_sharding(devices, tmp_path):
    algorithm = Sequences()
    engine = fdg.compile(algorithm, policies.GPUOnly(model_parallel=2, parameters=BOTH), devices[:4])
    state = engine.init(3)
    expected = to_numpy(state)
    written = Checkpoints(tmp_path)
    written.save(1, state)
    written.close()
    for policy in (engine.plan.policy, policies.GPUOnly(parameters="fsdp")):
        other = fdg.compile(algorithm, policy, devices[:4])
        restored = Checkpoints(tmp_path).restore(1, other.state_shape)
        for got, want, shape in zip(
            jax.tree.leaves(restored), expected, jax.tree.leaves(other.state_shape), strict=True
        ):
            assert got.sharding.is_equivalent_to(shape.sharding, got.ndim)
            np.testing.assert_array_equal(to_numpy([got])[0], want)
        assert max(fractions(restored).values()) <= 1.02 / 4


def test_plan_says_that_no_rule_splits_over_model():
    found = fdg.place(Sequences(), policies.GPUOnly(model_parallel=2, parameters=policies.fsdp()), 4)
    line = "no rule splits over model: the 2 devices of a row compute the same; use --parameters declared"
    assert line in str(found)
    assert line not in str(fdg.place(Sequences(), policies.GPUOnly(model_parallel=2, parameters=TENSOR), 4))


SPLIT = policies.Split(actors=4, learners=4, model_parallel=2, generation_parallel=2, parameters=BOTH)


def test_older_parameters_are_sharded_like_the_newest():
    found = fdg.place(Sequences(), dataclasses.replace(SPLIT, staleness=2), 8)
    history = found.schedule.leaves[len(jax.tree.leaves(found.graph.state.state)) :]
    assert len(history) == 2 * len(found.delayed.leaves) > 0
    for copies in history:  # generation splits over `model` only
        assert [(value.group, value.laid_out.num_parts) for value in copies] == [("actors", 2)]


@pytest.mark.parametrize("policy", [COARSE, SPLIT], ids=["learners", "actors and learners"])
def test_staleness_with_sharded_parameters(policy, devices):
    policy = dataclasses.replace(policy, staleness=1)
    algorithm = Sequences()
    engine = fdg.compile(algorithm, policy, devices[:8])
    one = fdg.compile(algorithm, policies.SingleLearnerCoarse(staleness=1), devices[:1])
    results = []
    for each in (engine, one):
        state, _ = each.run(each.init(0), 3)
        results.append(to_numpy(each.algorithm_state(state)))
        if each is engine and policy.learners == 4:
            assert_sharded(engine.algorithm_state(state), 1 / 4, 4)
    for got, want in zip(*results, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def test_servers_shard_and_workers_replicate():
    """Servers keep the sharded state and update it; workers, which take gradients, get all parameters."""
    found = plan("fsdp", policy=policies.Central, workers=2, servers=2)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(found.graph.state)]
    for path, places in zip(paths, found.schedule.leaves, strict=True):
        parts = {value.group: value.laid_out.num_parts for value in places}
        if "params" in path:
            assert list(parts.items()) == [("servers", 2), ("workers", 1)], path
        elif ".mu" in path or ".nu" in path:
            assert parts == {"servers": 2}, path
    moved = [m for m in found.movements if m.where == "servers -> workers"]
    size = sum(leaf.size * 4 for leaf in jax.tree.leaves(found.graph.state["params"]))
    assert sum(m.bytes_per_iteration for m in moved) == 2 * 2 * size  # two updates, two workers


def test_command_line_flags():
    words = ["--parameters", "fsdp", "--model-parallel", "2", "--devices", "4", "--num-envs", "16"]
    assert parse(words, "plan", "").policy == policies.GPUOnly(parameters="fsdp", model_parallel=2)
    with pytest.raises(fdg.FdgError, match="parameters='fdsp': give rules, 'fsdp' or 'declared'"):
        parse(["--parameters", "fdsp"], "plan", "")


def plan(parameters, devices=4, algorithm=None, policy=policies.GPUOnly, **fields):
    return fdg.place(algorithm or Sequences(), policy(parameters=parameters, **fields), devices)


@dataclasses.dataclass(frozen=True)
class Declares(Sequences):
    parameter_rules = (("mlp", "model"),)


def test_rules_declared_by_the_algorithm():
    declared = plan(None, model_parallel=2, algorithm=Declares())
    assert {leaf.rule for leaf in declared.sharded} == {"mlp"}
    assert {leaf.layout.num_parts for leaf in declared.sharded} == {2}
    assert plan("declared", algorithm=Declares()).sharded != ()
    assert plan(None, algorithm=Declares()).sharded == ()  # replicated by default


def test_rules_split_only_parameters_and_optimiser_state():
    paths = {leaf.path for leaf in plan([("", "batch")]).sharded}
    assert paths and all("params" in path or ".mu" in path or ".nu" in path for path in paths)


def test_first_matching_rule_applies():
    found = {leaf.path: leaf for leaf in plan({"mlp.*bias": None, "mlp": "batch"}).sharded}
    assert found["['params']['layer0']['mlp']['bias']"].layout.num_parts == 1
    assert found["['params']['layer0']['mlp']['in']"].layout.parts == (1, 4)  # the larger dimension


def test_indivisible_leaf_is_replicated():
    found = plan("fsdp", devices=4, algorithm=Sequences(batch=12), policy=policies.GPUOnly)
    assert all(leaf.layout.num_parts == 4 for leaf in found.sharded)
    found = plan("fsdp", devices=3, algorithm=Sequences(batch=12, width=32))
    assert {leaf.layout.num_parts for leaf in found.sharded} == {1, 3}  # 3 divides only q, k and v
    assert "whole, for no dimension divides: " in str(found)


def test_unused_rule_is_named():
    assert "rule 'mpl' of all takes no leaf" in str(plan([("mpl", "batch"), ("mlp", "batch")]))


@pytest.mark.parametrize(
    ("parameters", "fields", "words"),
    [
        ([("mlp", P("bacth"))], {}, ["'mlp'", "'bacth'", "'batch' and 'model'"]),
        (
            [("bias", P(None, "batch"))],
            {},
            ["'bias'", "['bias']", "[128]", "2 dimensions, but the array has 1"],
        ),
        (
            [("embed", P("batch"))],
            {"devices": 3},
            ["'embed'", "['embedding']", "16 is not divisible by the 3 devices"],
        ),
        ("declared", {}, ["Sequences declares no rules", "parameter_rules"]),
        ("fsdp", {"model_parallel": 0}, ["model_parallel=0", "at least 1"]),
        ("fsdp", {"model_parallel": 8}, ["group 'all' has 4 devices", "a multiple of 8"]),
        (
            "fsdp",
            {"model_parallel": 2, "learners": 3, "policy": policies.SingleLearnerCoarse},
            ["group 'learners' has 3 devices", "a multiple of 2"],
        ),
    ],
)
def test_invalid_rules_are_refused(parameters, fields, words):
    with refuses(*words, kind=fdg.PlanError):
        plan(parameters, **{"algorithm": Sequences(batch=12), **fields})


@dataclasses.dataclass(frozen=True)
class Together:
    """Actors and learners on the same devices, as two groups."""

    acting: str | None
    learning: str | None

    def place(self, devices):
        everywhere = tuple(range(len(devices)))
        acting = Group("actors", everywhere, parameters=self.acting)
        learning = Group("learners", everywhere, parameters=self.learning)
        return {"actor": acting, "environment": acting, "learner": learning}


def test_groups_on_the_same_devices_share_sharding():
    for policy in (Together(None, "fsdp"), Together("fsdp", None), Together("fsdp", "fsdp")):
        found = fdg.place(Sequences(), policy, 2)
        assert {leaf.group for leaf in found.sharded} == {"actors+learners"}
    with pytest.raises(fdg.PlanError, match="'actors' and 'learners' are on the same devices but shard"):
        fdg.place(Declares(), Together("declared", "fsdp"), 2)


def test_model_axis_without_sharding_exchanges_nothing():
    policy = policies.GPUOnly(model_parallel=2, parameters=())
    assert not [m for m in fdg.place(Sequences(), policy, 2).movements if m.how]
    found = fdg.place(Sequences(), policy, 4)
    two = fdg.place(Sequences(), policies.GPUOnly(), 2)
    assert [m for m in found.movements if m.how] == [m for m in two.movements if m.how]


def test_policies_with_rules_compare_and_hash():
    one, other = (
        policies.GPUOnly(parameters=rules) for rules in ({"mlp": P("model")}, [("mlp", ("model",))])
    )
    assert one == other and hash(one) == hash(other)
    assert repr(one) == "GPUOnly(parameters=(('mlp', ('model',)),))"
    assert repr(policies.GPUOnly()) == "GPUOnly()"
