"""Places operations on groups, and decides which groups keep each carried value.

The policy places fragments; other operations follow the data. An example with `act` on actors, `learn` on
learners, and a carried key and weight:

    key, k = split(key)      # actors and learners: both use the key, and split is exact, so both keep it
    a = act(weight, k)       # actors, by the policy; so actors keep the weight
    b = normalise(a)         # learners: code between fragments is placed where its results are used
    weight = learn(weight, b, split(k))    # learners, which keep it too; the new weight is sent to the actors

The backward pass places code between fragments on the groups that use its results: on all of them if it is
cheap and exact; otherwise one group computes it and sends the results. The forward pass places operations
whose results no fragment uses where their inputs are. The groups that read a carried value keep it; copies on
several groups must stay equal (`is_exact`).
"""

import collections
from collections.abc import Iterable, Mapping, Sequence

import jax.numpy as jnp
from jax.extend import core

from fdg import jaxprs
from fdg.placing.regions.region import Loop, Opened, Operation, Region

CHEAP_FLOPS = 1_000_000  # up to this cost, each group that uses the results of an operation computes them

GroupsOf = dict[core.Var, set[str]]  # the groups that use each variable, or hold it without a transfer


class Placement:
    """The groups that run each operation of an opened iteration, and that hold the carried values of loops.

    `order` are the policy's groups; the first gets operations that no rule places. Without `platforms`, all
    groups are on the same platform.
    """

    def __init__(self, opened: Opened, order: Sequence[str], platforms: Mapping[str, str] | None = None):
        """Repeats the backward and forward passes until every operation has groups."""
        self.opened, self.region, self.order = opened, opened.region, order
        self.groups: dict[Operation, frozenset[str]] = {}
        self.carry_groups: dict[Region, list[set[str]]] = {}  # groups that hold each carried value
        self._platforms = platforms or {}
        self._fixed: dict[Operation, str] = {}  # the group of each operation that may run on one group only
        self._requested: dict[Loop, list[set[str]]] = {}  # the groups that use each result of a loop
        self._is_exact = {op: op.group is not None or is_exact(op.eqn) for op in self.region.operations()}
        self._flops = {op: jaxprs.equation_flops(op.eqn) for op in self._is_exact if op.group is None}
        while True:
            self._backward_all()
            placed = self._choose_one_producer() or self._forward(self.region, self._initial_holders(), {})
            if not (placed or self._place_next_on_first()):
                break
        self._place_unused_leaves()

    def ordered(self, groups: Iterable[str]) -> list[str]:
        """Sorts groups in the policy's order."""
        group_set = set(groups)
        return [group for group in self.order if group in group_set]

    def fragments_reading(self, region: Region, variable: core.Var, group: str) -> tuple[str, ...]:
        """The fragments of a group that read a variable, directly or through code between fragments."""
        names: dict[str, None] = {}
        variables = {variable}
        for item in region.items:
            if isinstance(item, Operation):
                if group in self.groups[item] and not variables.isdisjoint(item.inputs):
                    names.update(dict.fromkeys(item.fragments))
                    variables.update(item.outputs if not item.fragments else ())
                continue
            for inner, outer in item.entering:
                if outer in variables:
                    names.update(dict.fromkeys(self.fragments_reading(item.body, inner, group)))
        return tuple(names)

    # --- backward pass: the groups that use a value ---

    def _backward_all(self) -> None:
        """Repeats the backward pass until the groups that keep each leaf no longer change."""
        leaves: list[set[str]] = [set() for _ in self.region.inputs]
        while True:
            needed = self._backward(self.region, leaves)
            new_leaves = [old | needed[v] for old, v in zip(leaves, self.region.inputs, strict=True)]
            if new_leaves == leaves:
                break
            leaves = new_leaves
        self.carry_groups[self.region] = leaves

    def _backward(self, region: Region, requested: Sequence[set[str]]) -> GroupsOf:
        """Places operations by their results' users; returns the groups that use each variable.

        `requested` are the groups that use each carried output.
        """
        users_of: GroupsOf = collections.defaultdict(set)
        for variable, groups in zip(region.outputs, requested, strict=False):
            users_of[variable] |= groups
        for item in reversed(region.items):
            if isinstance(item, Operation):
                users = set().union(*(users_of[v] for v in item.outputs if not _is_token(item, v)))
                self.groups[item] = frozenset(self._groups_for(item, users))
                for v in item.inputs:
                    users_of[v] |= self.groups[item]
                continue
            self._requested[item] = [set(users_of[v]) for v in item.outputs]
            holders: list[set[str]] = [set() for _ in item.starts]
            while True:
                inner = self._backward(item.body, holders)
                grown = [old | inner[v] for old, v in zip(holders, item.body.inputs, strict=True)]
                if grown == holders and not self._place_permuted(item, grown):
                    break
                holders = grown
            self.carry_groups[item.body] = holders
            for v in item.body.free:
                users_of[v] |= inner[v]
            for v, groups in zip(item.starts, holders, strict=True):
                users_of[v] |= groups
        return users_of

    def _place_permuted(self, loop: Loop, holders: list[set[str]]) -> bool:
        """Places one carried value that the loop only carries or permutes; returns whether there was one."""
        users: dict[int, set[str]] = {}
        for end, groups in zip(loop.body.outputs, self._requested[loop], strict=True):
            for i, v in enumerate(loop.body.inputs):
                if end is v and not holders[i]:
                    users[i] = users.get(i, set()) | groups
        if users:
            position = max(users, key=lambda i: bool(users[i]))
            holders[position] = users[position] or {self.order[0]}
        return bool(users)

    def _groups_for(self, operation: Operation, users: set[str]) -> set[str]:
        if operation.group is not None:
            return {operation.group}
        if operation in self._fixed:
            return {self._fixed[operation]}
        if operation.row is not None:
            return set()  # wait until the row's groups are known
        if len(users) > 1 and not self._may_run_on_several(operation, users):
            return {self.ordered(users)[0]}
        return users

    def _may_run_on_several(self, operation: Operation, users: set[str]) -> bool:
        """Whether several groups may run an operation: it is cheap, has no effects, and results are equal."""
        same_result = len({self._platforms.get(group) for group in users}) == 1 or self._is_exact[operation]
        return same_result and not operation.eqn.effects and self._flops[operation] <= CHEAP_FLOPS

    # --- copies of a value on several groups must stay equal ---

    def _choose_one_producer(self) -> bool:
        """Lets only one group compute a carried value that several groups keep, if results may be rounded.

        The groups' programs may round differently, so copies would drift apart from trip to trip. Returns
        whether an operation was placed.
        """
        producers = {v: op for op in self.region.operations() for v in op.outputs}
        sources: dict[core.Var, list[core.Var]] = collections.defaultdict(list)
        ends = list(zip(self.region.outputs, self.carry_groups[self.region], strict=False))
        for loop in self.region.loops():
            for inner, outer in loop.entering:
                sources[inner].append(outer)
            for result, end in zip(loop.outputs, loop.body.outputs, strict=True):
                sources[result].append(end)
            ends += zip(loop.body.outputs, self.carry_groups[loop.body], strict=True)
        has_placed = False
        for end, groups in ends:
            visited, pending = set(), [end] if len(groups) > 1 else []
            while pending:
                v = pending.pop()
                if v in visited:
                    continue
                visited.add(v)
                pending += sources.get(v, ())
                producer = producers.get(v)
                if producer is None or len(self.groups[producer]) < 2:
                    continue
                if self._is_exact[producer]:
                    pending += producer.inputs
                else:
                    self._fixed[producer] = self.ordered(self.groups[producer])[0]
                    has_placed = True
        return has_placed

    # --- forward pass: operations without users are placed where their inputs are ---

    def _initial_holders(self) -> GroupsOf:
        carried = zip(self.region.inputs, self.carry_groups[self.region], strict=True)
        return {**{v: set() for v in self.region.free}, **{v: set(groups) for v, groups in carried}}

    def _forward(self, region: Region, holders_of: GroupsOf, preferred: Mapping[Operation, set[str]]) -> bool:
        """Places operations that have no group yet by their inputs; returns whether it placed any.

        Adds the region's variables to `holders_of`. `preferred` maps operations whose result leaves the loop
        to the groups that use the result.
        """
        has_placed = False
        for item in region.items:
            if isinstance(item, Operation):
                if not self.groups[item]:
                    choice = self._nearest_group(item, holders_of, preferred.get(item, set()))
                    if choice is not None:
                        self._fixed[item] = choice
                        self.groups[item] = frozenset({choice})
                        has_placed = True
                holders_of.update((v, set(self.groups[item])) for v in item.outputs)
                continue
            inner_holders_of = {inner: set(holders_of[outer]) for inner, outer in item.entering}
            inner_holders_of.update(
                (v, groups)
                for v, groups in zip(item.body.inputs, self.carry_groups[item.body], strict=True)
                if groups
            )
            writers = {v: op for op in item.body.items if isinstance(op, Operation) for v in op.outputs}
            ends = zip(item.body.outputs, self._requested[item], strict=True)
            users = {writers[end]: requested for end, requested in ends if end in writers}
            has_placed |= self._forward(item.body, inner_holders_of, users)
            for result, end, holders in zip(
                item.outputs, item.body.outputs, self.carry_groups[item.body], strict=True
            ):
                holders_of[result] = inner_holders_of[end] | holders
        return has_placed

    def _nearest_group(self, operation: Operation, holders_of: GroupsOf, preferred: set[str]) -> str | None:
        """The group that holds the most bytes of an operation's inputs; None if no group holds any.

        An operation that writes a row of a stacked result is placed by the row only, if possible on a group
        in `preferred`.
        """
        inputs = [v for v in operation.inputs if not _is_token(operation, v)]
        inputs = inputs if operation.row is None else [operation.row]
        weight: collections.Counter[str] = collections.Counter()
        for v in inputs:
            for group in holders_of[v]:
                weight[group] += 1 + jaxprs.bytes_of(v.aval)
        if operation.row is not None:
            weight = collections.Counter({g: w for g, w in weight.items() if g in preferred}) or weight
        return max(self.order, key=lambda g: weight[g]) if weight else None

    def _place_next_on_first(self) -> bool:
        """Places the first operation that has no group yet on the first group."""
        for operation in self.region.operations():
            if not self.groups[operation]:
                self._fixed[operation] = self.order[0]
                return True
        return False

    # --- leaves that no group uses ---

    def _place_unused_leaves(self) -> None:
        """Keeps each leaf that no group uses where its next value is, if a group has it."""
        leaves, holders_of = self.carry_groups[self.region], self._initial_holders()
        self._forward(self.region, holders_of, {})
        for i, (variable, end) in enumerate(zip(self.region.inputs, self.region.outputs, strict=False)):
            if not leaves[i]:
                leaves[i] = {next((g for g in self.order if g in holders_of[end]), self.order[0])}
                holders_of[variable] = leaves[i]


_EXACT_OPERATIONS = frozenset(
    "select_n max min clamp neg abs sign floor ceil round sort reduce_max reduce_min cummax cummin".split()
)


def is_exact(eqn: core.JaxprEqn) -> bool:
    """Whether an equation, with its bodies, computes the same bits in every program and on every platform.

        exact        n + 1 (integers), random.split(key), x[:4], where(done, 0, x)
        not exact    x * 0.9 + y, mean(x), tanh(x)

    Several groups may compute an exact value; otherwise one group computes it and sends the result. Results
    of floating-point arithmetic depend on how XLA compiles the program: on fusion, vectorisation and the
    order of sums. Integers, booleans, keys, and floats that are only moved or selected are exact.
    """
    bodies = jaxprs.bodies(eqn)
    if bodies:
        return all(is_exact(inner_eqn) for body in bodies for inner_eqn in body.jaxpr.eqns)
    dtypes = [getattr(v.aval, "dtype", None) for v in eqn.outvars]
    if not any(dtype is not None and jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes):
        return True
    return eqn.primitive.name in _EXACT_OPERATIONS or not jaxprs.equation_flops(eqn)


def _is_token(operation: Operation, variable: core.Var) -> bool:
    """Whether a variable is the operation's token; tokens do not influence where an operation runs."""
    return operation.token is not None and variable in operation.token
