"""Random placements of a program: a distribution policy, devices, and how the engine runs."""

import dataclasses
import random
from typing import Any

import policies
from fdg.placing.policy import Group
from tests.oracle.program import Program, features, fragments, parents, walk

DEVICES = 8
SPLIT = ((3, 8), (8, 3), (8,), (5,), (6, 5))  # shapes of leaves that sharding rules may split, some unevenly


@dataclasses.dataclass(frozen=True)
class Scattered:
    """A policy that assigns arbitrary groups to roles."""

    groups: tuple[tuple[str, Group], ...]
    staleness: int = 0

    def place(self, devices: Any) -> dict[str, Group]:
        return dict(self.groups)


@dataclasses.dataclass(frozen=True)
class Placement:
    """A policy on the first `devices` devices; `runs` are the iterations of each call of `run`.

    With `shares_arrays` the engine starts from the arrays of `algorithm.init`, which may be used twice; with
    `num_seeds` it runs several agents, of which a device vmaps at most `vmap_limit` (None: the engine's
    choice).
    """

    policy: Any
    devices: int
    runs: tuple[int, ...] = (3,)
    shares_arrays: bool = False
    num_seeds: int | None = None
    vmap_limit: int | None = None

    @property
    def staleness(self) -> int:
        return getattr(self.policy, "staleness", 0)

    def __str__(self) -> str:
        shared = ", from init's own arrays" if self.shares_arrays else ""
        agents = f", {self.num_seeds} agents" if self.num_seeds else ""
        agents += f", {self.vmap_limit} at a time" if self.vmap_limit else ""
        return f"{self.policy} on {self.devices} devices, runs of {self.runs}{shared}{agents}"


def groups_of(program: Program, placement: Placement) -> dict[str, str] | None:
    """Group by fragment; a role without one inherits its parent's. None if the engine has to choose one."""
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
    """Three placements: all roles together, disjoint groups, overlapping groups or a policy of `policies`.

    A third of the programs also run one of these with several agents. If leaves can be split, another
    placement shards them.
    """
    rng = random.Random(f"placements {seed}")
    staleness = rng.choice([1, 1, 2, 4]) if stale else 0
    roles = list(dict.fromkeys(fragments(program).values()))
    host_roles = {x.role for x in walk(program.lines) if x.kind == "fragment" and _calls_host(x)}
    shares = "aliased" in features(program) and rng.random() < 0.3
    iterations = staleness + 2 if staleness else 3
    runs = (iterations,) if rng.random() < 0.75 else (1, iterations - 1)
    chosen = [
        _one_group(rng, roles, host_roles, staleness),
        (_disjoint_groups(rng, roles, host_roles, staleness), DEVICES),
        _overlap(rng, roles, host_roles, staleness),
    ]
    agents = random.Random(f"agents {seed}")  # a separate generator, so that other placements do not change
    with_agents = [(*agents.choice(chosen), agents.choice([2, 3, 4, 8]))] if agents.random() < 0.35 else []
    vmap_limit = agents.choice([None, 1, 2])
    shard_rng = random.Random(f"splits {seed}")
    is_wide = any(leaf.value.shape in SPLIT for leaf in program.leaves)
    base = shard_rng.choice([(policies.GPUOnly(), shard_rng.choice([2, 4, 6, 8])), *chosen[1:]])
    sharded = [_shard(shard_rng, program, *base)] if is_wide or shard_rng.random() < 0.05 else []
    return (
        *(
            Placement(policy, devices, runs, shares and not getattr(policy, "staleness", 0))
            for policy, devices in [*chosen, *sharded]
        ),
        *(
            Placement(policy, devices, runs, num_seeds=count, vmap_limit=vmap_limit)
            for policy, devices, count in with_agents
        ),
    )


def _shard(rng: random.Random, program: Program, policy: Any, devices: int) -> tuple[Any, int]:
    """The policy with sharded state leaves, in all groups or in some."""
    named = [  # rules for dimensions that divide, or are refused
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


def _one_group(rng: random.Random, roles: list[str], host_roles: set[str], staleness: int) -> tuple[Any, int]:
    """All roles on the same devices."""
    if staleness:  # groups on one device stay separate
        return Scattered(_assign_groups(rng, roles, [(0,)] * 3, host_roles, staleness), staleness), 1
    devices = 1 if host_roles and rng.random() < 0.8 else rng.choice([1, 2, 3, 4, 5, 8])
    return rng.choice([policies.GPUOnly(), policies.GPUOnly(), policies.MultiLearner()]), devices


def _disjoint_groups(rng: random.Random, roles: list[str], host_roles: set[str], staleness: int) -> Scattered:
    sizes = [rng.choice([1, 1, 2, 3]) for _ in range(rng.choice([2, 2, 3]))]
    sizes = sizes if sum(sizes) <= DEVICES else [3, 3, 2]
    order = rng.sample(range(DEVICES), DEVICES)
    groups = [tuple(order.pop() for _ in range(size)) for size in sizes]
    if rng.random() < 0.15:
        # Inexact group: four of five devices are used.
        groups[0] = (*groups[0], *[order.pop() for _ in range(5 - len(groups[0])) if order])
    return Scattered(_assign_groups(rng, roles, groups, host_roles, staleness), staleness)


def _overlap(rng: random.Random, roles: list[str], host_roles: set[str], staleness: int) -> tuple[Any, int]:
    """Overlapping groups, or a policy of `policies` on any number of devices."""
    named = _library_policies(rng, roles, staleness)
    if named and rng.random() < 0.7:
        policy = rng.choice(named)
        devices = 2 if host_roles and rng.random() < 0.7 else rng.choice([2, 3, 4, 5, 7, 8])
        return policy, max(devices, getattr(policy, "learners", 1) + 1)
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
    return Scattered(_assign_groups(rng, roles, groups, host_roles, staleness), staleness), DEVICES


def _library_policies(rng: random.Random, roles: list[str], staleness: int) -> list[Any]:
    """Policies of `policies` whose groups all have fragments."""
    found: list[Any] = []
    learners = rng.choice([1, 1, 2])
    if {"environment", "actor"} & set(roles) and "learner" in roles:
        found.append(policies.SingleLearnerCoarse(learners=learners, staleness=staleness))
    if "update" in roles and {"environment", "actor", "learner", "gradient"} & set(roles):
        found += [policies.Central(staleness=staleness)] * 2
    if not staleness and "environment" in roles and {"actor", "learner"} & set(roles):
        found += [policies.SingleLearnerFine(), policies.Environments()]
    return found


def _assign_groups(
    rng: random.Random, roles: list[str], groups: list[tuple[int, ...]], host_roles: set[str], staleness: int
) -> tuple[tuple[str, Group], ...]:
    """Gives each group a role, and nearly every role a group; roles with host calls mostly get one device.

    With staleness every role has a group, and actors mostly have a separate one, so that other groups
    produce the parameters that actors read.
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
        for role in host_roles & chosen.keys():
            group = chosen[role]
            alone = Group(group.name, group.devices[:1], group.exact)
            chosen = {r: alone if g.name == group.name else g for r, g in chosen.items()}
    return tuple(chosen.items())
