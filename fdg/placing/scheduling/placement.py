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
from fdg.placing.regions.region import Crossing, Opened, Operation, Region

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
        self.carry_groups: GroupsOf = {}  # the groups that hold each carried value
        self._platforms = platforms or {}
        self._fixed: dict[Operation, str] = {}  # the group of each operation that may run on one group only
        # for each value that leaves a loop, the groups that use it after the loop
        self._users_after_loop: GroupsOf = {}
        self._is_exact = {op: op.group is not None or is_exact(op.eqn) for op in self.region.operations()}
        self._flops = {op: jaxprs.equation_flops(op.eqn) for op in self._is_exact if op.group is None}
        while True:
            self._backward(self.region)
            placed = self._choose_one_producer() or self._forward()[0]
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
        for step in region.walk():
            if isinstance(step, Operation):
                if group in self.groups[step] and not variables.isdisjoint(step.inputs):
                    names.update(dict.fromkeys(step.fragments))
                    variables.update(step.outputs if not step.fragments else ())
            elif step.is_start:
                variables.update(inner for outer, inner in step.pairs if outer in variables)
        return tuple(names)

    # --- backward pass: the groups that use a value ---

    def _backward(self, region: Region) -> GroupsOf:
        """Places operations by their results' users; returns the groups that use each variable.

        Repeats this until the groups that hold the carried values no longer change.
        """
        self.carry_groups.update((v, set()) for v in region.inputs)
        while True:
            users_of: GroupsOf = collections.defaultdict(set)
            for end, v in region.carry:
                users_of[end] |= self.carry_groups[v]
            for item in reversed(region.items):
                if isinstance(item, Operation):
                    users = set().union(*(users_of[v] for v in item.outputs if not _is_token(item, v)))
                    self.groups[item] = frozenset(self._groups_for(item, users))
                    for v in item.inputs:
                        users_of[v] |= self.groups[item]
                    continue
                self._users_after_loop.update((end, users_of[result]) for end, result in item.leaving)
                users_in_body = self._backward(item.body)
                for outer, v in item.entering:
                    users_of[outer] |= users_in_body[v]
            holders = {v: self.carry_groups[v] | users_of[v] for v in region.inputs}
            if all(groups == self.carry_groups[v] for v, groups in holders.items()):
                if not self._place_permuted(region):
                    return users_of | holders
            else:
                self.carry_groups.update(holders)

    def _place_permuted(self, body: Region) -> bool:
        """Places one carried value that a loop only carries or permutes; returns whether there was one."""
        ends = [v for v in body.outputs if v in self._users_after_loop]  # none for the iteration
        unplaced = [v for v in ends if v in self.carry_groups and not self.carry_groups[v]]
        if unplaced:
            chosen = max(unplaced, key=lambda v: bool(self._users_after_loop[v]))
            self.carry_groups[chosen] = self._users_after_loop[chosen] or {self.order[0]}
        return bool(unplaced)

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
        equal = self._ends_on_several(self.region)  # variables whose copies must stay equal
        has_placed = False
        for step in reversed(list(self.region.walk())):
            if isinstance(step, Crossing):
                equal.update(v for v, after in step.pairs if after in equal)
                equal |= set() if step.is_start else self._ends_on_several(step.loop.body)
            elif len(self.groups[step]) > 1 and not equal.isdisjoint(step.outputs):
                if self._is_exact[step]:
                    equal.update(step.inputs)
                else:
                    self._fixed[step] = self.ordered(self.groups[step])[0]
                    has_placed = True
        return has_placed

    def _ends_on_several(self, region: Region) -> set[core.Var]:
        """The next values of carried values that several groups keep."""
        return {end for end, v in region.carry if len(self.carry_groups[v]) > 1}

    # --- forward pass: operations without users are placed where their inputs are ---

    def _forward(self) -> tuple[bool, GroupsOf]:
        """Places operations that have no group yet by their inputs.

        Returns whether it placed any, and the groups that hold each variable.
        """
        has_placed = False
        holders_of: GroupsOf = collections.defaultdict(set, self.carry_groups)
        for step in self.region.walk():
            if isinstance(step, Operation):
                if not self.groups[step]:
                    choice = self._nearest_group(step, holders_of)
                    if choice is not None:
                        self._fixed[step] = choice
                        self.groups[step] = frozenset({choice})
                        has_placed = True
                holders_of.update((v, set(self.groups[step])) for v in step.outputs)
            elif step.is_start:
                holders_of.update((v, holders_of[v] or holders_of[outer]) for outer, v in step.pairs)
            else:
                loop = step.loop
                for (end, v), result in zip(loop.body.carry, loop.outputs, strict=True):
                    holders_of[result] = holders_of[end] | self.carry_groups[v]
        return has_placed, holders_of

    def _nearest_group(self, operation: Operation, holders_of: GroupsOf) -> str | None:
        """The group that holds the most bytes of an operation's inputs; None if no group holds any.

        An operation that writes a row of a stacked result is placed by the row only, if possible on a group
        that uses the stack after the loop.
        """
        inputs = [v for v in operation.inputs if not _is_token(operation, v)]
        inputs = inputs if operation.row is None else [operation.row]
        weight: collections.Counter[str] = collections.Counter()
        for v in inputs:
            for group in holders_of[v]:
                weight[group] += 1 + jaxprs.bytes_of(v.aval)
        if operation.row is not None:
            users = self._users_after_loop[operation.outputs[0]]
            weight = collections.Counter({g: w for g, w in weight.items() if g in users}) or weight
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
        _, holders_of = self._forward()
        for end, variable in self.region.carry:
            if not self.carry_groups[variable]:
                holder = next((g for g in self.order if g in holders_of[end]), self.order[0])
                self.carry_groups[variable] = holders_of[variable] = {holder}


_EXACT_OPERATIONS = frozenset(  # on floats, in addition to moves
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
