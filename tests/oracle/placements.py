"""Where a random program's fragments live: a policy, devices, and how the engine is run."""

import dataclasses
import random
from typing import Any

import policies
from fdg.placing.policy import Group
from tests.oracle.program import Program, features, fragments, parents, walk

DEVICES = 8
SPLIT = ((3, 8), (8, 3), (8,), (5,), (6, 5))  # shapes that rules may split, or leave as they are


@dataclasses.dataclass(frozen=True)
class Scattered:
    """Any roles on any groups."""

    groups: tuple[tuple[str, Group], ...]
    staleness: int = 0

    def place(self, devices: Any) -> dict[str, Group]:
        return dict(self.groups)


@dataclasses.dataclass(frozen=True)
class Placement:
    """A policy on the first `devices` devices; `runs` are the iterations of each call of `run`.

    With `shares_arrays` the engine starts from `algorithm.init`'s own arrays, the same one twice included;
    with `num_seeds` it runs so many agents, of which a device maps `together` at a time, or as many as the
    engine chooses.
    """

    policy: Any
    devices: int
    runs: tuple[int, ...] = (3,)
    shares_arrays: bool = False
    num_seeds: int | None = None
    together: int | None = None

    @property
    def staleness(self) -> int:
        return getattr(self.policy, "staleness", 0)

    def __str__(self) -> str:
        shared = ", from init's own arrays" if self.shares_arrays else ""
        agents = f", {self.num_seeds} agents" if self.num_seeds else ""
        agents += f", {self.together} at a time" if self.together else ""
        return f"{self.policy} on {self.devices} devices, runs of {self.runs}{shared}{agents}"


def groups_of(program: Program, placement: Placement) -> dict[str, str] | None:
    """The policy's group of each fragment, by name; None where that hangs on the engine's choice."""
    placed = placement.policy.place(["cpu"] * placement.devices)
    roles, around = fragments(program), parents(program.lines)
    found: dict[str, str] = {}
    for name in roles:
        outer: str | None = name
        while outer is not None and roles[outer] not in placed:
            outer = around[outer]
        if outer is None:
            return None
        found[name] = placed[roles[outer]].name
    return found


def placements_of(program: Program, seed: int, stale: bool) -> tuple[Placement, ...]:
    """One that is one group or device, one of two or three groups apart, and one that is neither.

    A third of the programs have a fourth: one of these with several agents. Where leaves can be split, there
    is one that splits them.
    """
    rng = random.Random(f"placements {seed}")
    staleness = rng.choice([1, 1, 2, 4]) if stale else 0
    roles = list(dict.fromkeys(fragments(program).values()))
    single = {x.role for x in walk(program.lines) if x.kind == "fragment" and _calls_host(x)}
    shares = "aliased" in features(program) and rng.random() < 0.3
    last = staleness + 2 if staleness else 3
    runs = (last,) if rng.random() < 0.75 else (1, last - 1)
    chosen = [
        _alone(rng, roles, single, staleness),
        (_apart(rng, roles, single, staleness), DEVICES),
        _other(rng, roles, single, staleness),
    ]
    agents = random.Random(f"agents {seed}")  # of its own, so that the others are as they would be without
    several = [(*agents.choice(chosen), agents.choice([2, 3, 4, 8]))] if agents.random() < 0.35 else []
    together = agents.choice([None, 1, 2])
    splits = random.Random(f"splits {seed}")
    is_wide = any(leaf.value.shape in SPLIT for leaf in program.leaves)
    whole = splits.choice([(policies.GPUOnly(), splits.choice([2, 4, 6, 8])), *chosen[1:]])
    split = [_split(splits, program, *whole)] if is_wide or splits.random() < 0.05 else []
    return (
        *(
            Placement(policy, devices, runs, shares and not getattr(policy, "staleness", 0))
            for policy, devices in [*chosen, *split]
        ),
        *(
            Placement(policy, devices, runs, num_seeds=count, together=together)
            for policy, devices, count in several
        ),
    )


def _split(rng: random.Random, program: Program, policy: Any, devices: int) -> tuple[Any, int]:
    """The policy with leaves of the state split over devices of its groups, or of one of them."""
    named = [  # by their dimensions, which divide or are refused
        (
            rf"\[{i}\]",
            rng.choice([(None, "model"), ("model", None), ("model", "batch"), (("batch", "model"),)]),
        )
        for i, leaf in enumerate(program.leaves)
        if leaf.value.shape in SPLIT[:2]
    ]
    rules = rng.choice(["fsdp", (("", "model"),), (("", "batch+model"),), (*named, ("", "batch"))])
    width = rng.choice([1, 2, 2, 4])
    if not isinstance(policy, Scattered):
        sizes = {field.name for field in dataclasses.fields(policy)} & {"learners", "servers"}
        more = dict.fromkeys(sizes, width)
        return dataclasses.replace(policy, model_parallel=width, parameters=rules, **more), max(
            devices, width + 1
        )
    new = {
        group.name: dataclasses.replace(group, model=width, parameters=rules)
        if len(group) % width == 0 and rng.random() < 0.8
        else group
        for _, group in policy.groups
    }
    groups = tuple((role, new[group.name]) for role, group in policy.groups)
    return dataclasses.replace(policy, groups=groups), devices


def _calls_host(line: Any) -> bool:
    return any(x.kind == "effect" or x.name == "host_seed" for x in walk(line.blocks[0].lines))


def _alone(rng: random.Random, roles: list[str], single: set[str], staleness: int) -> tuple[Any, int]:
    """All on the same devices."""
    if staleness:  # on one device groups keep their names
        return Scattered(_scatter(rng, roles, [(0,)] * 3, single, staleness), staleness), 1
    devices = 1 if single and rng.random() < 0.8 else rng.choice([1, 2, 3, 4, 5, 8])
    return rng.choice([policies.GPUOnly(), policies.GPUOnly(), policies.MultiLearner()]), devices


def _apart(rng: random.Random, roles: list[str], single: set[str], staleness: int) -> Scattered:
    sizes = [rng.choice([1, 1, 2, 3]) for _ in range(rng.choice([2, 2, 3]))]
    sizes = sizes if sum(sizes) <= DEVICES else [3, 3, 2]
    order = rng.sample(range(DEVICES), DEVICES)
    groups = [tuple(order.pop() for _ in range(size)) for size in sizes]
    if rng.random() < 0.15:
        # Inexact: four of the five are used.
        groups[0] = (*groups[0], *[order.pop() for _ in range(5 - len(groups[0])) if order])
    return Scattered(_scatter(rng, roles, groups, single, staleness), staleness)


def _other(rng: random.Random, roles: list[str], single: set[str], staleness: int) -> tuple[Any, int]:
    """Overlapping groups, or a policy of the library on an uneven number of devices."""
    named = _library(rng, roles, staleness)
    if named and rng.random() < 0.7:
        return rng.choice(named), 2 if single and rng.random() < 0.7 else rng.choice([2, 3, 4, 5, 7, 8])
    first = tuple(rng.sample(range(DEVICES), rng.choice([1, 2, 3])))
    if rng.random() < 0.5:
        second = (
            *first[: rng.randint(1, len(first))],
            *rng.sample([d for d in range(8) if d not in first], 1),
        )
        groups = [first, second]
    else:
        rest = [d for d in range(DEVICES) if d not in first]
        groups = [first, tuple(rng.sample(rest, rng.choice([1, 2, 4, 5])))]
    return Scattered(_scatter(rng, roles, groups, single, staleness), staleness), DEVICES


def _library(rng: random.Random, roles: list[str], staleness: int) -> list[Any]:
    """Policies whose groups all have something to do."""
    found: list[Any] = []
    learners = rng.choice([1, 1, 2])
    if {"environment", "actor"} & set(roles) and "learner" in roles:
        found.append(
            policies.SingleLearnerCoarse(learners=learners if learners == 1 else 1, staleness=staleness)
        )
    if "update" in roles and {"environment", "actor", "learner", "gradient"} & set(roles):
        found += [policies.Central(staleness=staleness)] * 2
    if not staleness and "environment" in roles and {"actor", "learner"} & set(roles):
        found += [policies.SingleLearnerFine(), policies.Environments()]
    return found


def _scatter(
    rng: random.Random, roles: list[str], groups: list[tuple[int, ...]], single: set[str], staleness: int
) -> tuple[tuple[str, Group], ...]:
    """Each group has a role, and each role (nearly always) a group; who calls the host is on one device.

    With staleness each has one, and most often the actors' group is theirs alone: others make what they wait
    for.
    """
    exact = rng.random() < 0.2
    made = [Group("abc"[k], devices, exact) for k, devices in enumerate(groups)]
    order = rng.sample(roles, len(roles))
    others = made
    if staleness and "actor" in order and rng.random() < 0.8:
        order.sort(key=lambda role: role != "actor")
        others = made[1:]
    chosen: dict[str, Group] = dict(zip(order, made, strict=False))
    for role in order[len(made) :]:
        if staleness or rng.random() < 0.9:
            chosen[role] = rng.choice(others)
    if rng.random() < 0.85:
        for role in single & chosen.keys():
            group = chosen[role]
            alone = Group(group.name, group.devices[:1], group.exact)
            chosen = {r: alone if g.name == group.name else g for r, g in chosen.items()}
    return tuple(chosen.items())
