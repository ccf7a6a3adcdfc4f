"""Which group runs which operation of an opened iteration, and which groups keep what it carries.

Fragments have their groups from the policy. Code between fragments goes to the groups that use its results
(copied where that is cheap); what no fragment uses stays where its inputs are made; state lives with what
reads it.
"""

import collections
from collections.abc import Iterable, Mapping, Sequence

from jax.extend import core

from fdg import jaxprs
from fdg.placing.regions import Loop, Opened, Operation, Region

CHEAP_FLOPS = 1_000_000  # code between fragments up to this size is copied rather than its results moved


class Places:
    """Groups of each operation, and of what each loop (the iteration too) carries.

    Attributes:
      groups: of each operation.
      homes: for each loop, the groups that keep each carried value from trip to trip; the key None is the
        iteration itself, whose carried values are the state's leaves.
    """

    def __init__(self, opened: Opened, num_leaves: int, sizes: Mapping[str, int]):
        self.region, self.num_leaves, self.order, self.sizes = opened.region, num_leaves, list(sizes), sizes
        self.declared = opened.declared
        self.groups: dict[Operation, set[str]] = {}
        self.homes: dict[Loop | None, list[set[str]]] = {}
        self._fixed: dict[Operation, str] = {}
        self._wanted: dict[Loop, list[set[str]]] = {}
        while True:
            self._demand_all()
            if not self._settle_all() and not self._default_one():
                break
        self._keep_untouched_leaves()

    def made_in(self, region: Region, known: Mapping[core.Var, set[str]]) -> dict[core.Var, set[str]]:
        """The groups that hold each variable of a region without any move, given those of its inputs."""
        held = {v: set(groups) for v, groups in known.items()}
        for item in region.items:
            if isinstance(item, Operation):
                held.update((v, set(self.groups[item])) for v in item.outputs)
            else:
                inside = self.made_in(item.body, self.inside(item, held))
                for result, end, homes in zip(item.results, item.body.outputs, self.homes[item], strict=True):
                    held[result] = inside[end] | homes
        return held

    def inside(self, loop: Loop, held: Mapping[core.Var, set[str]]) -> dict[core.Var, set[str]]:
        """The groups that hold each input of a loop's body."""
        count = len(loop.constants)
        known = {
            v: set(held[outer]) for v, outer in zip(loop.body.inputs[:count], loop.constants, strict=True)
        }
        known.update(zip(loop.body.inputs[count:], self.homes[loop], strict=True))
        return known

    # --- backwards: who needs what ---

    def _demand_all(self) -> None:
        leaves = [set() for _ in range(self.num_leaves)]  # type: ignore[var-annotated]
        metrics = [set() for _ in self.region.outputs[self.num_leaves :]]  # type: ignore[var-annotated]
        while True:
            needed = self._demand(self.region, [*leaves, *metrics])[: self.num_leaves]
            grown = [old | new for old, new in zip(leaves, needed, strict=True)]
            if grown == leaves:
                break
            leaves = grown
        self.homes[None] = leaves

    def _demand(self, region: Region, wanted: Sequence[set[str]]) -> list[set[str]]:
        """Groups that need each input, given those that need each output."""
        need: dict[core.Var, set[str]] = collections.defaultdict(set)
        for variable, groups in zip(region.outputs, wanted, strict=True):
            need[variable] |= groups
        for item in reversed(region.items):
            if isinstance(item, Operation):
                users = set().union(*(need[v] for v in item.outputs if not _is_token(item, v)))
                self.groups[item] = self._run_where(item, users)
                for v in item.inputs:
                    need[v] |= self.groups[item]
                continue
            self._wanted[item] = [set(need[v]) for v in item.results]
            homes: list[set[str]] = [set() for _ in item.starts]
            while True:
                inner = self._demand(item.body, homes)
                grown = [h | n for h, n in zip(homes, inner[len(item.constants) :], strict=True)]
                if grown == homes:
                    break
                homes = grown
            self.homes[item] = homes
            for v, groups in zip((*item.constants, *item.starts), inner, strict=True):
                need[v] |= groups
        return [need[v] for v in region.inputs]

    def _run_where(self, operation: Operation, users: set[str]) -> set[str]:
        if operation.group is not None:
            return {operation.group}
        if operation in self._fixed:
            return {self._fixed[operation]}
        if operation.row is not None:
            return set()  # not before it is known where its row is
        if len(users) > 1 and (operation.eqn.effects or _flops(operation) > CHEAP_FLOPS):
            return {next(group for group in self.order if group in users)}
        return users

    # --- forwards: what nobody needs stays where it is made ---

    def _settle_all(self) -> bool:
        known = dict(zip(self.region.inputs, self.homes[None], strict=False))
        known.update((v, set()) for v in self.region.inputs[self.num_leaves :])
        return self._settle(self.region, known, {})

    def _settle(self, region: Region, held: dict, preferred: Mapping[Operation, set[str]]) -> bool:
        changed = False
        for item in region.items:
            if isinstance(item, Operation):
                if not self.groups[item]:
                    choice = self._nearest(item, held, preferred.get(item, set()))
                    if choice is not None:
                        self._fixed[item] = choice
                        self.groups[item] = {choice}
                        changed = True
                held.update((v, set(self.groups[item])) for v in item.outputs)
                continue
            inside = self.inside(item, held)
            for v, start, homes in zip(
                item.body.inputs[len(item.constants) :], item.starts, self.homes[item], strict=True
            ):
                inside[v] = homes or set(held[start])
            writers = {v: op for op in item.body.items if isinstance(op, Operation) for v in op.outputs}
            users = {
                writers[end]: wanted
                for end, wanted in zip(item.body.outputs, self._wanted[item], strict=True)
                if end in writers
            }
            changed |= self._settle(item.body, inside, users)
            for result, end, homes in zip(item.results, item.body.outputs, self.homes[item], strict=True):
                held[result] = inside[end] | homes
        return changed

    def _nearest(self, operation: Operation, held: Mapping, preferred: set[str]) -> str | None:
        """The group that holds most of an operation's inputs; a row is stacked where its users have it."""
        inputs = [v for v in operation.inputs if not _is_token(operation, v)]
        inputs = inputs if operation.row is None else [operation.row]
        weight: collections.Counter[str] = collections.Counter()
        for v in inputs:
            for group in held[v]:
                weight[group] += 1 + jaxprs.bytes_of(v.aval)
        if operation.row is not None:
            weight = collections.Counter({g: w for g, w in weight.items() if g in preferred}) or weight
        return max(self.order, key=lambda g: weight[g]) if weight else None

    def _default_one(self) -> bool:
        """Gives the first operation that is still without a place the first group."""
        for operation in operations_in(self.region):
            if not self.groups[operation]:
                self._fixed[operation] = self.order[0]
                return True
        return False

    def _keep_untouched_leaves(self) -> None:
        leaves = self.homes[None]
        known = dict(zip(self.region.inputs, leaves, strict=False))
        known.update((v, set()) for v in self.region.inputs[self.num_leaves :])
        held = self.made_in(self.region, known)
        for i, (variable, end) in enumerate(
            zip(self.region.inputs[: self.num_leaves], self.region.outputs, strict=False)
        ):
            if not leaves[i]:
                made = held[end]
                leaves[i] = {next((g for g in self.order if g in made), self.order[0])}
                held[variable] = leaves[i]


def operations_in(region: Region) -> Iterable[Operation]:
    """All operations of a region, those of its loops too, in order."""
    for item in region.items:
        if isinstance(item, Operation):
            yield item
        else:
            yield from operations_in(item.body)


def _is_token(operation: Operation, variable: core.Var) -> bool:
    """Whoever performs the next effect has no say in where this one is performed."""
    return operation.token is not None and variable in operation.token


def _flops(operation: Operation) -> int:
    eqn = operation.eqn
    return jaxprs.flops_of(jaxprs.open_jaxpr(jaxprs.build(operation.inputs, operation.outputs, [eqn])))


def read_by(places: Places, region: Region, variable: core.Var, group: str) -> tuple[str, ...]:
    """Names of a group's fragments that read a variable, through code between fragments."""
    found: dict[str, None] = {}
    reached = {variable}
    for item in region.items:
        if isinstance(item, Operation):
            if group in places.groups[item] and not reached.isdisjoint(item.inputs):
                found.update(dict.fromkeys(item.fragments))
                reached.update(item.outputs if not item.fragments else ())
            continue
        for inner, outer in zip(item.body.inputs, (*item.constants, *item.starts), strict=True):
            if outer in reached:
                found.update(dict.fromkeys(read_by(places, item.body, inner, group)))
    return tuple(found)
