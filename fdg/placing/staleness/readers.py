"""Decides which version of each value a fragment reads, and rejects graphs where that is ambiguous."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from jax.extend import core

from fdg.errors import PlanError
from fdg.fragment import fragments_in
from fdg.placing.staleness.lag import Ages
from fdg.placing.staleness.values import Origins, Versioned
from fdg.tracing.graph import Fragment

Reader: TypeAlias = str | None  # the innermost fragment that reads; None: the state, or a metric
Version: TypeAlias = frozenset[
    tuple[int, int]
]  # each leaf of the state that is old, and its age in iterations
Need: TypeAlias = Mapping[Versioned, set[Reader]]

NEWEST: Version = frozenset()


class Readers:
    """The versions that fragments read."""

    def __init__(
        self,
        fragments: Iterable[Fragment],
        groups: Mapping[str, str],
        ages: Ages,
        next_leaves: Sequence[Versioned],
        leaf_names: Sequence[str],
        where: str,
    ):
        """Takes each fragment's group and age, and each state leaf's next value and name.

        `where` names the policy, for errors.
        """
        self.groups, self.leaf_names, self.ages = groups, leaf_names, ages.of
        self.where, self.without, self.unit = f"{where}: {ages}", ages.without, ages.unit
        self.around = {f.name: f.parent for f in fragments}
        self.actors = {f.name for f in fragments if f.role == "actor"}
        self.waiting = {groups[name] for name in self.actors}
        self._old: dict[Reader, Version] = {None: NEWEST}
        self._versions: dict[tuple[Origins, Version], Version] = {}
        self._origins: dict[Origins, Origins] = {}
        names = [[x for x in self.origins(v) if isinstance(x, str)] for v in next_leaves]
        self.makers = [{groups[name] for name in some} for some in names]
        # Results of environments are read immediately, on any group: an actor's next observation.
        steps = {f.name for f in fragments if f.role == "environment"}
        self.awaited = [{groups[name] for name in some if name not in steps} for some in names]
        self._late = {
            i for i, made in enumerate(self.awaited) if any(made - {group} for group in self.waiting)
        }

    def old(self, reader: Reader) -> Version:
        """The version of the state that a fragment reads.

        A nested fragment reads the same versions as the fragment around it, but the newest version of what
        its own group computes.
        """
        if reader not in self._old:
            assert reader is not None
            group, outer = self.groups[reader], self.around[reader]
            waits = {i for i, made in enumerate(self.awaited) if group in self.waiting and made - {group}}
            makes = {i for i, made in enumerate(self.makers) if group in made} - waits
            own = {(i, self.ages[reader]) for i in waits} if outer is None else self.old(outer)
            self._old[reader] = frozenset((i, age) for i, age in own if age and i not in makes)
        return self._old[reader]

    def version(self, value: Versioned, reader: Reader) -> Version:
        """The version of a value for a reader: the state's version, restricted to the value's origins."""
        key = value.origins, self.old(reader)
        if key not in self._versions:
            self._versions[key] = frozenset(x for x in key[1] if x[0] in self.origins(value))
        return self._versions[key]

    def by_version(self, value: Versioned, readers: Iterable[Reader]) -> dict[Version, list[Reader]]:
        """The readers of each version of a value, in a fixed order."""
        found: dict[Version, list[Reader]] = {}
        for reader in sorted(readers, key=lambda reader: reader or ""):
            found.setdefault(self.version(value, reader), []).append(reader)
        return dict(sorted(found.items(), key=lambda item: sorted(item[0])))

    def is_alike(self, fragment: str, operands: Sequence[Versioned]) -> bool:
        """Whether all fragments nested in a fragment read the same versions of its operands as it does."""
        inner = [name for name, outer in self.around.items() if outer == fragment]
        same = (self.version(v, name) == self.version(v, fragment) for name in inner for v in operands)
        return all(same) and all(self.is_alike(name, operands) for name in inner)

    def origins(self, value: Versioned) -> Origins:
        """The leaves and fragments that a value may come from."""
        found = value.origins
        if found not in self._origins:
            parts = (self.origins(x) if isinstance(x, Versioned) else {x} for x in found)
            self._origins[found] = frozenset().union(*parts)
        return self._origins[found]

    def late(self, values: Iterable[Versioned]) -> list[int]:
        """The delayed leaves (some group reads an older version) that the values may come from."""
        return sorted(self._late.intersection(frozenset().union(*map(self.origins, values))))

    # --- unsupported delays ---

    def check_one_version(self, fragment: str, need: Need) -> None:
        """Checks values that a fragment either computes or passes through, where it is unknown which.

        Each reader of such a value must need the version that the fragment itself reads.
        """
        for value, readers in need.items():
            own = self.version(value, fragment)
            for version, (reader, *_) in self.by_version(value, readers).items():
                if version != own:
                    needed = f"the one that {self.groups[str(reader)]} reads" if version else "the newest"
                    who = f"'{reader}'" if reader else "what comes after"
                    raise PlanError(
                        f"{self.where}: fragment {self._named(fragment)} makes a {value.aval.str_short()} or"
                        f" hands {self._leaves(value)} on, and it is unknown which: it reads"
                        f" {'an older version' if own else 'the newest'}, and {who} needs {needed}; compute"
                        f" it in every case (jnp.where, not a branch or while loop), or use {self.without}"
                    )

    def check_effect(self, eqn: core.JaxprEqn, operands: Sequence[Versioned], need: Need) -> None:
        """Checks that code between fragments with a side effect need not be duplicated for an old version."""
        for value, readers in need.items():
            for reader in sorted(name for name in readers if name and self.version(value, name)):
                raise PlanError(
                    f"{self.where}: code between fragments ({eqn.primitive.name}) has an effect, and"
                    f" cannot be repeated with the older {self._leaves(*operands)} for"
                    f" {self._named(reader)}: put it into a fragment, or use {self.without}"
                )

    def check_turns(self, start: Versioned, end: Versioned, readers: Iterable[Reader]) -> None:
        """Checks that no actor in a loop uses a value that another group updates in the same loop.

        Staleness counts iterations, not trips of a loop.
        """
        order, groups = list(self.groups), self.groups
        acting = [
            x for x in self.actors.intersection(readers) if self.around[x] is None and self.version(start, x)
        ]
        for actor in sorted(acting, key=order.index):
            others = [x for x in self.origins(end) if isinstance(x, str) and groups[x] != groups[actor]]
            for other in sorted(others, key=order.index):
                while (outer := self.around[other]) is not None and groups[outer] == groups[other]:
                    other = outer
                raise PlanError(
                    f"{self.where} counts {self.unit}, but within one iteration {self._named(actor)} and"
                    f" {self._named(other)} take turns with the same parameters: use {self.without}, or let"
                    f" the loop around them end before the update"
                )

    def check_control(self, eqn: core.JaxprEqn, choice: Versioned, need: Need) -> None:
        """Checks that no reader needs an older version of the predicate of a branch or while loop.

        All groups share one predicate, so two versions of it could disagree.
        """
        after = sorted({reader for readers in need.values() for reader in readers if reader})
        for reader in (*fragments_in([eqn], outermost=True), *after):
            if self.version(choice, reader):
                kind = "branch (cond)" if eqn.primitive.name == "cond" else "while loop"
                raise PlanError(
                    f"{self.where}: a {kind} between fragments depends on {self._leaves(choice)}, of which"
                    f" {self._named(reader)} reads an older version than others, and it cannot go both ways:"
                    f" decide it in a fragment, or use {self.without}"
                )

    def check_unknown(
        self, eqn: core.JaxprEqn, operands: Sequence[Versioned], inside: Reader, need: Need
    ) -> None:
        """Checks that no older version passes through an equation of an unknown kind."""
        affected = [
            f
            for f in (*fragments_in([eqn], outermost=True), inside)
            if any(self.version(v, f) for v in operands)
        ]
        if affected or any(self.version(v, reader) for v, readers in need.items() for reader in readers):
            raise PlanError(
                f"{self.where}: {self._leaves(*operands)} cannot be followed through {eqn.primitive.name} to"
                f" {', '.join(map(repr, affected)) or 'its readers'}: use a scan, cond or while loop, or"
                f" {self.without}"
            )

    def _named(self, fragment: str) -> str:
        return f"'{fragment}' ({self.groups[fragment]})"

    def _leaves(self, *values: Versioned) -> str:
        return ", ".join(self.leaf_names[i] for i in self.late(values))
