"""Which versions of each value are read, and by whom: the newest, or the older one that a group waits for.

    w -> scan(act(w, x), step(x, a)), learn(w, ys)      `act` and `step` on actors, `learn` on learners

Under a policy that delays `w` for its actors, the scan reads the actors' version of `w` and `learn` the
newest.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from jax.extend import core

from fdg import jaxprs
from fdg.errors import PlanError
from fdg.fragment import FragmentMark
from fdg.placing.staleness.flow import Block, Flow, Origins, control_flow, is_identity

ANY = ""  # a version that stands in where an operand does not matter
Version: TypeAlias = str | None  # of a group by its name; None is the newest
Reads: TypeAlias = set[tuple[Version, str | None]]  # (version, the fragment that reads it)


@dataclasses.dataclass(frozen=True)
class Question:
    """What is to be delayed, in the words of its errors.

    Attributes:
      groups: the group of each fragment, in the graph's order.
      waiting: names of the groups that wait for parameters: those in which an actor lives.
      actors: fragments of the role `actor`.
      late: for each leaf of the state by position, the waiting groups for which another group makes it.
      leaf_names: of the state's leaves, as a user would write them.
      where: the policy and its staleness, for errors.
    """

    groups: Mapping[str, str]
    waiting: frozenset[str]
    actors: frozenset[str]
    late: Mapping[int, frozenset[str]]
    leaf_names: Sequence[str]
    where: str


class Demand:
    """Goes through the blocks of an iteration backwards, and notes in `Block.need` who reads what."""

    def __init__(self, flow: Flow, question: Question):
        self.flow, self.question = flow, question
        self._late: dict[Origins, frozenset[str]] = {}

    # --- questions that the rewriting asks too ---

    def late(self, block: Block, atom: Any) -> frozenset[str]:
        """The groups for which a value may have an older version."""
        origins = block.origins_of(atom)
        if origins not in self._late:
            groups = (self.question.late.get(x, frozenset()) for x in origins)
            self._late[origins] = frozenset().union(*groups)
        return self._late[origins]

    def version(self, block: Block, atom: Any, version: Version) -> Version:
        """The version that a reader of `version` gets of a value, of which there may be no older one."""
        return version if version == ANY or version in self.late(block, atom) else None

    def versions(self, block: Block, variable: Any) -> list[Version]:
        """The versions of a variable that are read, the newest first."""
        found = {version for version, _ in block.need.get(variable, ())}
        real = sorted(found - {ANY}, key=lambda version: version or "")
        return real or ([None] if found else [])

    def kept(self, block: Block, variable: Any) -> list[Version]:
        """Versions that go in or out of a body by a variable; none of a late one that nothing reads."""
        return self.versions(block, variable) or ([] if self.late(block, variable) else [None])

    def reader(self, block: Block) -> Version:
        """The version that a block's own code reads."""
        return None if block.inside is None else self.version_of(block.inside)

    def version_of(self, fragment: str) -> Version:
        """The version that a fragment reads."""
        group = self.question.groups[fragment]
        return group if group in self.question.waiting else None

    def stays(self, block: Block, eqn: core.JaxprEqn) -> bool:
        """Whether nothing late goes into an equation, so that it stays as it is."""
        return not any(self.late(block, v) for v in eqn.invars)

    def is_live(self, block: Block, eqn: core.JaxprEqn) -> bool:
        """Whether an equation has an effect, a fragment or a reader."""
        read = any(block.need.get(v) for v in eqn.outvars)
        return read or bool(eqn.effects) or bool(self.flow.fragments(eqn))

    def is_between(self, block: Block, eqn: core.JaxprEqn) -> bool:
        """Whether an equation without fragments is repeated for each version that is read of its results."""
        return block.inside is None or is_identity(eqn)

    def handed_on(self, block: Block, eqn: core.JaxprEqn) -> list[int | None]:
        """For each result, the late operand that it certainly is: readers read that operand instead."""
        return [
            i if i is not None and self.late(block, eqn.invars[i]) else None for i in self.flow.unchanged(eqn)
        ]

    # --- backwards ---

    def run(self, block: Block, outputs: Sequence[Reads], also: Sequence[tuple[Any, Reads]] = ()) -> None:
        """Fills `need` of a block and of all within it, given who reads its outputs, and other variables."""
        block.need = {}
        for v, reads in also:
            self._read(block, v, reads)
        for v, reads in zip(block.jaxpr.outvars, outputs, strict=True):
            self._read(block, v, reads)
        for i in reversed(range(len(block.jaxpr.eqns))):
            eqn = block.jaxpr.eqns[i]
            if not self.is_live(block, eqn):
                continue
            if self.stays(block, eqn):
                for v in eqn.invars:
                    self._read(block, v, {(None, block.inside)})
            elif self.flow.fragments(eqn):
                self._through_bodies(block, i, eqn)
            elif self.is_between(block, eqn):
                self._between(block, eqn)
            else:
                self._within(block, eqn)

    def _read(self, block: Block, atom: Any, reads: Reads) -> None:
        if not jaxprs.is_literal(atom) and reads:
            found = {(self.version(block, atom, version), reader) for version, reader in reads}
            block.need.setdefault(atom, set()).update(found)

    def _between(self, block: Block, eqn: core.JaxprEqn) -> None:
        """Code between fragments."""
        for v, depends in zip(eqn.outvars, self.flow.dependence(eqn), strict=True):
            reads = block.need.get(v, set())
            for i in depends:
                self._read(block, eqn.invars[i], reads)
            older = sorted((version, reader or "") for version, reader in reads if version)
            if eqn.effects and older:
                raise PlanError(
                    f"{self.question.where}: code between fragments ({eqn.primitive.name}) has an effect, and"
                    f" cannot be repeated with the older {self._leaves(block, eqn.invars)} for"
                    f" '{older[0][1]}' ({older[0][0]}): put it into a fragment, or use staleness=0"
                )
        for operand in eqn.invars:
            self._read(block, operand, {(None if eqn.effects else ANY, None)})

    def _within(self, block: Block, eqn: core.JaxprEqn) -> None:
        """A fragment's own code, computed once from what its group reads."""
        own = (self.reader(block), block.inside)
        depend = self.flow.dependence(eqn)
        for k, i in enumerate(self.handed_on(block, eqn)):
            reads = block.need.get(eqn.outvars[k], set())
            if i is not None:
                self._read(block, eqn.invars[i], reads)
            elif reads:
                self._check_one_version(block, eqn.outvars[k], reads, block.inside)
                for j in depend[k]:
                    self._read(block, eqn.invars[j], {own})
        for v in eqn.invars:
            self._read(block, v, {own if eqn.effects else (ANY, None)})

    def _check_one_version(self, block: Block, result: Any, reads: Reads, fragment: str | None) -> None:
        """A value that a fragment may have made or handed on has the version that its own group reads."""
        own = self.version(block, result, self.version_of(fragment or ""))
        others = sorted(
            ((version or "", reader or "") for version, reader in reads if version not in (own, ANY)),
        )
        if not self.late(block, result) or not others:
            return
        version, reader = others[0]
        who = f"'{reader}'" if reader else "what comes after"
        needed = f"the one that {version} reads" if version else "the newest"
        group, seen = self.question.groups[fragment or ""], "an older version" if own else "the newest"
        raise PlanError(
            f"{self.question.where}: fragment '{fragment}' ({group}) makes a {result.aval.str_short()} or"
            f" hands {self._leaves(block, [result])} on, and it cannot be told which: it reads {seen}, and"
            f" {who} needs {needed}; compute it in every case (jnp.where, not a branch or while loop), or use"
            f" staleness=0"
        )

    def _leaves(self, block: Block, atoms: Sequence[Any]) -> str:
        origins = frozenset().union(*(block.origins_of(v) for v in atoms))
        late = sorted(x for x in origins if self.question.late.get(x))
        return ", ".join(self.question.leaf_names[i] for i in late)

    # --- into bodies ---

    def _through_bodies(self, block: Block, position: int, eqn: core.JaxprEqn) -> None:
        """An equation with fragments in it."""
        kind, inner = control_flow(eqn), block.inner.get(position, [])
        outputs: list[Reads] = [set(block.need.get(v, ())) for v in eqn.outvars]
        mark = FragmentMark.of(eqn)
        for k, i in enumerate(self.handed_on(block, eqn)):
            result, reads = eqn.outvars[k], outputs[k]
            if i is not None:
                self._read(block, eqn.invars[i], reads)
                outputs[k] = set()
            elif mark is not None:
                outputs[k] = self._of_fragment(mark.name, block, result, reads)
            elif not reads and not self.late(block, result):
                outputs[k].add((None, None))  # stays, though nothing reads it
        if kind in ("scan", "while"):
            self._through_loop(block, eqn, inner, outputs)
        elif kind in ("call", "cond"):
            if kind == "cond":
                self._check_control(block, eqn, self.late(block, eqn.invars[0]), eqn.invars[:1], block)
                self._read(block, eqn.invars[0], {(self.reader(block), block.inside)})
            for one in inner:
                self.run(one, outputs)
            if mark is not None:
                self.run(inner[0], outputs, self._unused(mark.name, eqn, inner[0]))
            for variables in zip(*(one.jaxpr.invars for one in inner), strict=True):
                self._share(list(zip(inner, variables, strict=True)))
        else:
            self._refuse_unknown(block, eqn)
        self._read_operands(block, eqn, inner)

    def _of_fragment(self, fragment: str, block: Block, result: Any, reads: Reads) -> Reads:
        self._check_one_version(block, result, reads, fragment)
        return {(self.version_of(fragment), fragment)}

    def _unused(self, fragment: str, eqn: core.JaxprEqn, body: Block) -> list[tuple[Any, Reads]]:
        """Operands that nothing in a fragment uses: it reads them all the same, but for what it hands on."""
        reads: Reads = {(self.version_of(fragment), fragment)}
        borders = {e.invars[0]: e.outvars[0] for e in body.jaxpr.eqns if is_identity(e)}
        handed_on = self.flow.unchanged(eqn)
        return [
            (borders.get(v, v), reads)
            for i, v in enumerate(body.jaxpr.invars)
            if not body.need.get(v) and i not in handed_on
        ]

    def _share(self, same: Sequence[tuple[Block, Any]]) -> None:
        """Inputs of several bodies that hold one operand have the same versions."""
        together: Reads = set().union(*(block.need.get(v, set()) for block, v in same))
        for block, v in same:
            block.need[v] = set(together)

    def _read_operands(self, block: Block, eqn: core.JaxprEqn, inner: Sequence[Block]) -> None:
        for body, one in zip(jaxprs.bodies(eqn), inner, strict=True):
            for variable, i in zip(one.jaxpr.invars, body.operands, strict=True):
                reads = one.need.get(variable, set())
                self._read(block, eqn.invars[i], reads)
                if not reads and self.kept(one, variable):
                    self._read(block, eqn.invars[i], {(None, None)})

    def _through_loop(
        self, block: Block, eqn: core.JaxprEqn, inner: Sequence[Block], outputs: Sequence[Reads]
    ) -> None:
        *tests, body = inner
        wiring = jaxprs.bodies(eqn)[-1]
        carry = {k: body.jaxpr.invars[i] for i, k in wiring.carry}
        # What is read of a carried value is read of its next one too. A result that has no older version is
        # made in the loop, whichever version it starts from.
        carried: dict[int, Reads] = {}
        for k, variable in carry.items():
            result_late = self.late(block, eqn.outvars[k])
            if outputs[k]:
                carried[k] = outputs[k] if result_late else {(ANY, None)}
            else:
                carried[k] = set() if self.late(body, variable) else {(None, None)}
        for test in tests:
            self.run(test, [{(self.reader(test), test.inside)}])
            late = self.late(test, test.jaxpr.outvars[0])
            self._check_control(block, eqn, late, test.jaxpr.outvars, test)
        while True:
            ends = [outputs[k] | self._certain(carried.get(k, set())) for k in range(len(outputs))]
            self.run(body, ends)
            grown = dict(carried)
            for place, (k, variable) in enumerate(carry.items()):
                grown[k] = carried[k] | body.need.get(variable, set())
                for test in tests:
                    of_test = test.jaxpr.invars[len(test.jaxpr.invars) - len(carry) + place]
                    grown[k] |= test.need.get(of_test, set())
            if grown == carried:
                break
            carried = grown
        for place, (k, variable) in enumerate(carry.items()):
            body.need[variable] = set(carried[k])
            for test in tests:
                test.need[test.jaxpr.invars[len(test.jaxpr.invars) - len(carry) + place]] = set(carried[k])
            start = eqn.invars[wiring.operands[body.jaxpr.invars.index(variable)]]
            self._check_turns(block, start, carried[k], body.origins_of(body.jaxpr.outvars[k]))

    def _certain(self, reads: Reads) -> Reads:
        return {(version, reader) for version, reader in reads if version != ANY}

    # --- what cannot be delayed ---

    def _check_turns(self, block: Block, start: Any, reads: Reads, next_value: Origins) -> None:
        """Within a loop, an actor may not act on what another group remakes: an iteration is no age then."""
        order = list(self.question.groups)
        for group in sorted(self.late(block, start)):
            acting = [x for version, x in reads if version == group and x and x in self.question.actors]
            makers = [x for x in next_value if isinstance(x, str) and self.question.groups[x] != group]
            if acting and makers:
                actor, other = min(acting, key=order.index), min(makers, key=order.index)
                raise PlanError(
                    f"{self.question.where} counts iterations, but within one iteration '{actor}' ({group})"
                    f" and '{other}' ({self.question.groups[other]}) take turns with the same parameters: use"
                    f" staleness=0, or let the loop around them end before the update"
                )

    def _check_control(
        self, block: Block, eqn: core.JaxprEqn, late: frozenset[str], choice: Sequence[Any], at: Block
    ) -> None:
        """Whether a loop or branch goes on is one decision, also where a group would decide otherwise."""
        if block.inside is not None:
            return
        reads = set().union(*(block.need.get(v, set()) for v in eqn.outvars))
        for group in sorted(late):
            inside = [f for f in self.flow.fragments(eqn) if self.question.groups[f] == group]
            after = [reader for version, reader in reads if version == group and reader]
            if inside or after:
                kind = "branch (cond)" if eqn.primitive.name == "cond" else "while loop"
                reader = [*inside, *sorted(after)][0]
                raise PlanError(
                    f"{self.question.where}: a {kind} between fragments depends on"
                    f" {self._leaves(at, choice)}, of which '{reader}' ({group}) reads an older version than"
                    f" others, and it cannot go both ways: decide it in a fragment, or use staleness=0"
                )

    def _refuse_unknown(self, block: Block, eqn: core.JaxprEqn) -> None:
        waiting = [f for f in self.flow.fragments(eqn) if self.question.groups[f] in self.question.waiting]
        late = frozenset().union(*(self.late(block, v) for v in eqn.invars))
        affected = [f for f in waiting if self.question.groups[f] in late]
        versions = {version for v in eqn.outvars for version, _ in block.need.get(v, ()) if version}
        if affected or versions or self.reader(block):
            raise PlanError(
                f"{self.question.where}: {self._leaves(block, eqn.invars)} cannot be followed through"
                f" {eqn.primitive.name} to {', '.join(map(repr, affected)) or 'its readers'}:"
                f" use a scan, cond or while loop, or staleness=0"
            )
        for v in eqn.invars:
            self._read(block, v, {(None, None)})
