"""Assignment of fragments to groups, on graphs built by hand."""

import dataclasses
import warnings

import pytest

import policies
from fdg import Group, PlanError
from fdg.errors import FdgWarning
from fdg.placing.assignment import (
    assign,
    check_placement,
    fit_to_batches,
    merge_same_devices,
    warn_of_near_roles,
)
from fdg.tracing.graph import FDG, Array, Edge, Fragment
from fdg.tracing.trace import WHOLE_ITERATION
from tests.refusing import refuses

POLICY = policies.GPUOnly()
A, B = Group("a", (0, 1)), Group("b", (2,))


def fragment(name, role, parent=None, batch=None):
    inputs = () if batch is None else (Array(0, (3, batch), "float32", 12 * batch, 1),)
    return Fragment(name, role, parent, 1, True, 0, 0, inputs, ())


def edge(source, target, size):
    return Edge(source, target, (), size, 1, "")


def graph(*fragments, edges=()):
    return FDG("mine", fragments, tuple(edges))


def names(assigned):
    return {fragment: group.name for fragment, group in assigned.items()}


def test_assignment_by_role_parent_and_largest_input():
    mine = graph(
        fragment("act", "actor"),
        fragment("judge", "critic"),  # its largest input comes from `learn`
        fragment("learn", "learner"),
        fragment("gradient", "gradient", "learn"),  # nested: follows its parent
        fragment("deep", "other", "gradient"),
        fragment("alone", "other"),  # reads only its own last result: first group
        fragment("last", "other"),  # follows `judge`
        edges=[
            edge("act", "judge", 8),
            edge("learn", "judge", 9),
            edge("judge", "judge", 100),
            edge("act", "gradient", 9),
            edge("alone", "alone", 9),
            edge("judge", "last", 1),
        ],
    )
    assert names(assign(mine, {"actor": A, "learner": B})) == {
        "act": "a",
        "judge": "b",
        "learn": "b",
        "gradient": "b",
        "deep": "b",
        "alone": "a",
        "last": "b",
    }


def test_fragments_in_a_cycle_use_the_first_group():
    two = fragment("one", "x"), fragment("other", "y")
    mine = graph(*two, fragment("learn", "learner"), edges=[edge("one", "other", 1), edge("other", "one", 1)])
    assert names(assign(mine, {"actor": A, "learner": B})) == {"one": "a", "other": "a", "learn": "b"}
    assert list(assign(mine, {"learner": B, "actor": A})) == ["one", "other", "learn"]


# --- the number of devices divides the batch ---


@pytest.mark.parametrize(
    ("devices", "model", "batches", "used"),
    [
        (4, 1, (8, 12), 4),
        (4, 1, (6,), 3),
        (4, 1, (8, 6), 2),
        (3, 1, (7,), 1),
        (8, 1, (4,), 4),
        (3, 1, (None,), 3),  # no batch: replicated
        (8, 2, (6,), 6),  # three rows of two
        (7, 2, (6,), 6),
    ],
)
def test_devices_that_divide_the_batch(devices, model, batches, used):
    fragments = [fragment(f"f{i}", "actor", batch=n) for i, n in enumerate(batches)]
    group = Group("a", tuple(range(10, 10 + devices)), model=model)
    assert fit_to_batches(group, fragments, POLICY).devices == tuple(range(10, 10 + used))


@pytest.mark.parametrize(
    ("group", "words"),
    [
        (
            Group("a", (0, 1, 2, 3), exact=True),
            "fragment 'f' (actor) has a batch of 6, which is not divisible by the 4 devices of its a: use 3,"
            " or a batch of 4 or 8",
        ),
        (Group("a", tuple(range(8)), exact=True), "by the 8 devices of its a: use 6, or a batch of 8"),
        (Group("a", tuple(range(8)), exact=True, model=2), "by the 4 rows of its a: use 3,"),
        (
            Group("a", (0, 1, 2), exact=True, model=2),
            "group 'a' has 3 devices, but its model is split over 2",
        ),
        (Group("a", (0,), model=2), "use a multiple of 2"),
    ],
)
def test_indivisible_batch_or_model(group, words):
    with refuses(words, kind=PlanError):
        fit_to_batches(
            group,
            [fragment("free", "x"), fragment("fine", "x", batch=24), fragment("f", "actor", batch=6)],
            POLICY,
        )


# --- groups on the same devices ---


def test_groups_on_the_same_devices_are_merged():
    one, two = Group("one", (0, 1)), Group("two", (0, 1), exact=True, model=2, parameters="fsdp")
    apart, some = Group("apart", (0, 1), apart=True), Group("some", (1,))
    merged = merge_same_devices({"f": one, "g": two, "h": apart, "i": some, "j": one}, POLICY)
    assert names(merged) == {"f": "one+two", "g": "one+two", "h": "apart", "i": "some", "j": "one+two"}
    both = merged["f"]
    assert (both.devices, both.exact, both.model, both.parameters) == ((0, 1), True, 2, two.parameters)
    assert merged["h"] is apart
    whole = Group("whole", (0, 1), parameters="declared", whole_along_batch=True)
    assert merge_same_devices({"f": one, "g": whole}, POLICY)["f"].whole_along_batch


def test_groups_with_different_sharding_are_not_merged():
    one, two = (
        Group(name, (0, 1), parameters=(("w", over),)) for name, over in (("x", "batch"), ("y", "model"))
    )
    with pytest.raises(PlanError, match="groups 'x' and 'y' are on the same devices"):
        merge_same_devices({"f": one, "g": two}, POLICY)
    merge_same_devices({"f": one, "g": Group("y", (0, 1), parameters=(("w", "batch"),))}, POLICY)


# --- placements returned by a policy ---

ACTING = graph(fragment("act", "actor"), fragment("learn", "learner"))


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        ([A], "return a dict from roles to fdg.Group(name, devices)"),
        ({"actor": (0,)}, "return a dict from roles to fdg.Group(name, devices)"),
        ({}, "returned no role"),
        (
            {"actor": Group("g", (4, -1))},
            "places 'actor' on device 4 (group g), but there are 4 devices, 0 to 3",
        ),
        ({"actor": Group("g", (0, -1))}, "on device -1"),
        ({"actor": Group("g", ())}, "on no device"),
        ({"actor": Group("g", (1, 0, 1, 0))}, "on device 1 twice"),
        (
            {"actor": A, "x": A, "learner": Group("a", (2,))},
            "two groups 'a', of 'actor' on devices (0, 1)",
        ),
        (
            {"actor": A, "learner": dataclasses.replace(A, apart=True)},
            "two groups 'a', of 'actor' on devices",
        ),
        ({"actor": A, "learner": Group("a+b", (2,))}, "calls the group of 'learner' 'a+b': give a printable"),
        ({"actor": Group("a\n", (0,))}, r"calls the group of 'actor' 'a\n': give a printable name"),
        (
            {"actor": A, "critic": B},
            "runs 'critic' on its b, and mine has no fragment of that role (its roles are",
        ),
        ({"actor": A, "critic": B, "buffer": B}, "no fragment of those roles"),
        ({"actor": A, "critic": B, "buffer": B}, "mark one with fdg.fragment('critic')"),
    ],
)
def test_invalid_placement(placement, words):
    with refuses(words, kind=PlanError):
        check_placement(ACTING, POLICY, placement, 4)


@pytest.mark.parametrize(
    "placement",
    [
        {"actor": A, "learner": B},
        {"critic": A},  # one group holds everything
        {"actor": A, "critic": A, "learner": Group("a", (0, 1), exact=True)},
        {"actor": A, "critic": Group("b", (2,), optional=True)},
    ],
)
def test_valid_placement(placement):
    check_placement(ACTING, POLICY, placement, 3)


def test_algorithm_without_fragments_uses_the_first_group():
    check_placement(graph(fragment("iterate", WHOLE_ITERATION)), POLICY, {"actor": A, "learner": B}, 3)


@pytest.mark.parametrize(
    ("role", "placement", "words"),
    [
        ("leaner", {"actor": A}, ["fragment 'f' has the role 'leaner'", "mean 'learner'"]),
        ("actor", {"laerner": A}, ["places the role 'laerner'", "mean 'learner'"]),
        ("mine", {"mien": A}, ["'mine'", "'mien'"]),  # a user's role
        ("mine", {"mine": A}, []),
        ("dreamer", {"actor": A, "learner": B}, []),
    ],
)
def test_misspelled_roles_warn(role, placement, words):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_near_roles(graph(fragment("f", role)), placement)
    text = " ".join(str(each.message) for each in caught)
    assert bool(caught) == bool(words) and all(word in text for word in words), text
    assert all(each.category is FdgWarning for each in caught)
