"""Groups, parameter rules, policies and lists of devices that users give: valid and invalid ones."""

import types

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import fdg
import policies
from fdg import Group, PlanError
from fdg.placing.policy import check_policy, checked_devices, parameter_rules, with_host
from tests.tiny import Pupil


@pytest.mark.parametrize(
    ("given", "rules"),
    [
        (None, ()),
        ("fsdp", ((".*", "batch"),)),
        ("declared", "declared"),
        ({"a": "model"}, (("a", "model"),)),
        ([["a", "batch+model"]], (("a", "batch+model"),)),
        ([("a", PartitionSpec(None, ("batch", "model")))], (("a", (None, ("batch", "model"))),)),
        ((("a", [None, ["model", "batch"]]),), (("a", (None, ("model", "batch"))),)),
        (iter([("a", None), ("b", ())]), (("a", ()), ("b", ()))),
    ],
)
def test_parameter_rules(given, rules):
    found = parameter_rules(given)
    assert found == rules and hash(found) == hash(rules)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (3, "parameters=3: give 'fsdp', or a PartitionSpec"),
        ("fdsp", "parameters='fdsp': give rules, 'fsdp' or 'declared'"),
        ([3], "3 is not a pair"),
        (["a"], "'a' is not a pair"),
        (["ab"], "'ab' is not a pair"),  # two characters
        ([("a",)], "('a',) is not a pair"),
        ([("a", "batch", "model")], "('a', 'batch', 'model') is not a pair"),
        ([frozenset(["a", "b"])], "is not a pair"),  # unordered
        ([("(", "batch")], "'(' is not a regular expression"),
        ([(None, "batch")], "None is not a regular expression"),
        ([("a", 3)], "rule 'a' has the sharding 3: give 'batch', 'model', or a PartitionSpec"),
        ([("a", "rows")], "splits over 'rows'"),
        ([("a", "batch+")], "splits over ''"),
        ([("a", (None, 2))], "splits over '2'"),
        ([("a", ("batch", ("model", "batch")))], "names an axis twice"),
        ([("a", "model+model")], "names an axis twice"),
    ],
)
def test_invalid_parameter_rules(given, words):
    with pytest.raises(PlanError) as error:
        parameter_rules(given)
    assert str(error.value).startswith("parameters") and words in str(error.value), error.value
    assert "\n" not in str(error.value)


def test_whole_along_batch_shards_over_model_only():
    rules = ("a", ("batch", "model")), ("b", "batch")
    group = Group("g", (0, 1, 2, 3), model=2, parameters=rules, whole_along_batch=True)
    assert group.parameters == (("a", (None, "model")), ("b", ()))
    assert Group("g", (0, 1), parameters="declared", whole_along_batch=True).parameters == "declared"
    assert Group("g", (0, 1), parameters=rules).parameters == (("a", ("batch", "model")), ("b", "batch"))
    with pytest.deprecated_call():
        assert group.rows == group.num_batch_parts == 2


@pytest.mark.parametrize(
    ("group", "rows", "mesh", "shards"),
    [
        (Group("g", (0, 1)), 2, (("batch", 2),), False),
        (Group("g", (0,), parameters="fsdp"), 1, (("batch", 1), ("model", 1)), False),
        (Group("g", (0, 1), parameters="fsdp"), 2, (("batch", 2), ("model", 1)), True),
        (Group("g", (5, 4, 3, 2, 1, 0), model=3), 2, (("batch", 2), ("model", 3)), False),
        (Group("g", (0, 1, 2, 3), model=4, parameters="declared"), 1, (("batch", 1), ("model", 4)), True),
    ],
)
def test_groups(group, rows, mesh, shards):
    assert (len(group), group.num_batch_parts, group.mesh) == (len(group.devices), rows, mesh)
    assert group.shards is shards


def test_numpy_integers_are_plain_numbers():
    """In the fields of policies, and as numbers of devices and of agents."""
    one, two = np.int32(1), np.int64(2)
    policy = policies.SingleLearnerCoarse(actors=two, learners=one, staleness=one)
    assert repr(policy) == "SingleLearnerCoarse(actors=2, learners=1, staleness=1)"
    assert fdg.place(Pupil(), policy, np.int64(3)).num_devices == 3
    assert "lag=1" in str(fdg.place(Pupil(), policies.Split(generation_parallel=one, lag=one), two).policy)
    assert policies.Colocated(model_parallel=two, generation_parallel=one).place(["cpu"] * 2)
    assert fdg.place(Pupil(), policies.GPUOnly(), 4, two).graph.agents == fdg.agents(Pupil(), two).count == 2
    assert policies.auto(Pupil(), two, policies=[policies.GPUOnly()], max_staleness=one).devices in (1, 2)


@pytest.mark.parametrize("kind", [policies.Split, policies.Standalone])
@pytest.mark.parametrize("size", [0, -1])
def test_generation_parallel_is_at_least_one(kind, size):
    with pytest.raises(PlanError, match=f"{kind.__name__}: generation_parallel={size}: give a whole number"):
        kind(generation_parallel=size)


def test_any_object_with_place_is_a_policy():
    check_policy(policies.GPUOnly())
    check_policy(types.SimpleNamespace(place=lambda devices: {}))


def test_checked_devices(devices):
    assert checked_devices(iter(devices[:2])) == devices[:2]
    assert checked_devices([]) == []
    assert checked_devices(2) == checked_devices(np.int64(2)) == devices[:2]


def test_host_cpu_comes_first_if_the_policy_uses_it():
    gpus = [types.SimpleNamespace(platform="gpu")] * 2
    uses = types.SimpleNamespace(uses_host=True)
    cpu = jax.local_devices(backend="cpu")[0]
    assert with_host(uses, gpus) == [cpu, *gpus]
    assert with_host(types.SimpleNamespace(), gpus) == gpus
    assert with_host(uses, [cpu]) == [cpu] and with_host(uses, []) == []
