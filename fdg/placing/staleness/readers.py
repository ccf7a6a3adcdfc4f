"""Decides which version of each value a fragment reads, and rejects graphs where that is ambiguous."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from jax.extend import core

from fdg.errors import PlanError
from fdg.fragment import fragments_in
from fdg.placing.staleness.lag import Ages
from fdg.placing.staleness.values import Origins, Versioned
from fdg.tracing.graph import Fragment

Reader: TypeAlias = str | None  # the innermost fragment that reads; None for the next state, or a metric
# The leaves of the state that have an older value, as pairs (position of the leaf, age in iterations).
Version: TypeAlias = frozenset[tuple[int, int]]
ReadersByValue: TypeAlias = Mapping[Versioned, set[Reader]]  # the readers of each value

NEWEST: Version = frozenset()  # no leaf has an older value


class Readers:
    """Decides which version of each value a fragment reads."""

    def __init__(
        self,
        fragments: Iterable[Fragment],
        groups: Mapping[str, str],
        ages: Ages,
        next_leaves: Sequence[Versioned],
        leaf_names: Sequence[str],
        where: str,
    ):
        """Takes each fragment's group and age, each leaf's next value and name, and the policy (`where`)."""
        self.groups, self.leaf_names, self.ages = groups, leaf_names, ages.by_fragment
        self.where, self.off_setting, self.unit = f"{where}: {ages}", ages.off_setting, ages.unit
        self.parent_of = {f.name: f.parent for f in fragments}
        self.actors = {f.name for f in fragments if f.role == "actor"}
        self._state_versions: dict[Reader, Version] = {None: NEWEST}
        self._versions: dict[tuple[Origins, Version], Version] = {}
        self._origins: dict[Origins, Origins] = {}
        names_by_leaf = [[x for x in self.origins(v) if isinstance(x, str)] for v in next_leaves]
        self.producers = [{groups[name] for name in names} for names in names_by_leaf]
        # Results of environments, such as an actor's next observation, are never read with a delay.
        environments = {f.name for f in fragments if f.role == "environment"}
        delaying_groups = [
            {groups[name] for name in names if name not in environments} for names in names_by_leaf
        ]
        self._delayed_by_group = {  # the leaves of which each group reads older versions
            group: {i for i, producers in enumerate(delaying_groups) if producers - {group}}
            for group in {groups[name] for name in self.actors}
        }
        self._delayed_leaves = set[int]().union(*self._delayed_by_group.values())

    def state_version(self, reader: Reader) -> Version:
        """The version of the state that a fragment reads.

        A nested fragment reads the same versions as the fragment around it, except that it reads the newest
        version of the leaves that its own group computes.
        """
        if reader not in self._state_versions:
            assert reader is not None
            group, parent = self.groups[reader], self.parent_of[reader]
            delayed = self._delayed_by_group.get(group, set())
            computed = {i for i, producers in enumerate(self.producers) if group in producers} - delayed
            version = (
                {(i, self.ages[reader]) for i in delayed} if parent is None else self.state_version(parent)
            )
            self._state_versions[reader] = frozenset(
                (i, age) for i, age in version if age and i not in computed
            )
        return self._state_versions[reader]

    def version(self, value: Versioned, reader: Reader) -> Version:
        """The version of a value for a reader: the state's version, restricted to the value's origins."""
        key = value.origins, self.state_version(reader)
        if key not in self._versions:
            self._versions[key] = frozenset(x for x in key[1] if x[0] in self.origins(value))
        return self._versions[key]

    def by_version(self, value: Versioned, readers: Iterable[Reader]) -> dict[Version, list[Reader]]:
        """The readers of each version of a value, in a fixed order."""
        readers_by_version: dict[Version, list[Reader]] = {}
        for reader in sorted(readers, key=lambda reader: reader or ""):
            readers_by_version.setdefault(self.version(value, reader), []).append(reader)
        return dict(sorted(readers_by_version.items(), key=lambda item: sorted(item[0])))

    def nested_read_same_versions(self, fragment: str, operands: Sequence[Versioned]) -> bool:
        """Whether fragments nested in a fragment read the same versions of its operands as the fragment."""
        nested = [name for name, parent in self.parent_of.items() if parent == fragment]
        are_equal = (self.version(v, name) == self.version(v, fragment) for name in nested for v in operands)
        return all(are_equal) and all(self.nested_read_same_versions(name, operands) for name in nested)

    def origins(self, value: Versioned) -> Origins:
        """The leaves and fragments that a value may come from."""
        value_origins = value.origins
        if value_origins not in self._origins:
            parts = (self.origins(x) if isinstance(x, Versioned) else {x} for x in value_origins)
            self._origins[value_origins] = frozenset().union(*parts)
        return self._origins[value_origins]

    def delayed_leaves(self, values: Iterable[Versioned]) -> list[int]:
        """The delayed leaves (a group reads an older version of each) that the values may come from."""
        return sorted(self._delayed_leaves.intersection(frozenset().union(*map(self.origins, values))))

    # --- unsupported delays: each check raises `PlanError` if it fails ---

    def check_one_version(self, fragment: str, need: ReadersByValue) -> None:
        """Checks the readers of results that are either new values or unchanged inputs of a fragment.

        Each of these readers must need the version that the fragment itself reads.
        """
        for value, readers in need.items():
            own_version = self.version(value, fragment)
            for version, (reader, *_) in self.by_version(value, readers).items():
                if version != own_version:
                    older = f"the version that group '{self.groups[str(reader)]}' reads"
                    needed = older if version else "the newest"
                    reader_text = f"'{reader}'" if reader else "what comes after"
                    raise PlanError(
                        f"{self.where}: fragment {self._label(fragment)} in some cases computes a new"
                        f" {value.aval.str_short()}, and in others returns {self._leaves(value)} unchanged;"
                        f" the fragment reads {'an older version' if own_version else 'the newest'}, but"
                        f" {reader_text} needs {needed}: compute a new value in every case (jnp.where, not a"
                        f" branch or while loop), or use {self.off_setting}"
                    )

    def check_effect(self, eqn: core.JaxprEqn, operands: Sequence[Versioned], need: ReadersByValue) -> None:
        """Checks that no reader needs old results of an equation between fragments with a side effect.

        The equation would have to run twice.
        """
        for value, readers in need.items():
            for reader in sorted(name for name in readers if name and self.version(value, name)):
                raise PlanError(
                    f"{self.where}: code between fragments ({eqn.primitive.name}) has an effect, and"
                    f" cannot be repeated with the older {self._leaves(*operands)} for"
                    f" {self._label(reader)}: put it into a fragment, or use {self.off_setting}"
                )

    def check_loop_updates(self, start: Versioned, end: Versioned, readers: Iterable[Reader]) -> None:
        """Checks that no actor in a loop uses a value that another group updates in the same loop.

        Staleness counts iterations, not the trips of a loop.
        """
        order, groups = list(self.groups), self.groups
        delayed_actors = [
            x
            for x in self.actors.intersection(readers)
            if self.parent_of[x] is None and self.version(start, x)
        ]
        for actor in sorted(delayed_actors, key=order.index):
            updating = [x for x in self.origins(end) if isinstance(x, str) and groups[x] != groups[actor]]
            for updater in sorted(updating, key=order.index):
                while (parent := self.parent_of[updater]) is not None and groups[parent] == groups[updater]:
                    updater = parent
                raise PlanError(
                    f"{self.where} counts {self.unit}, but in one loop of an iteration {self._label(actor)}"
                    f" reads parameters that {self._label(updater)} updates: use {self.off_setting}, or move"
                    f" the update out of the loop"
                )

    def check_control(self, eqn: core.JaxprEqn, predicate: Versioned, need: ReadersByValue) -> None:
        """Checks that no reader needs an older version of the predicate of a branch or while loop.

        All groups share one predicate, so two versions of it could disagree.
        """
        later_readers = sorted({reader for readers in need.values() for reader in readers if reader})
        for reader in (*fragments_in([eqn], outermost=True), *later_readers):
            if self.version(predicate, reader):
                kind = "branch (cond)" if eqn.primitive.name == "cond" else "while loop"
                raise PlanError(
                    f"{self.where}: a {kind} between fragments depends on {self._leaves(predicate)}."
                    f" {self._label(reader)} reads an older version of it than others, so they may disagree:"
                    f" compute the condition in a fragment, or use {self.off_setting}"
                )

    def check_unknown(
        self, eqn: core.JaxprEqn, operands: Sequence[Versioned], inside: Reader, need: ReadersByValue
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
                f" {self.off_setting}"
            )

    def _label(self, fragment: str) -> str:
        return f"'{fragment}' ({self.groups[fragment]})"

    def _leaves(self, *values: Versioned) -> str:
        return ", ".join(self.leaf_names[i] for i in self.delayed_leaves(values))
