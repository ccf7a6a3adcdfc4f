"""Rewrites an iteration so that each reader gets its version of each value, without unread values.

    w -> scan(act(w, x), step(x, a)), learn(w, ys)      `act` and `step` on actors, `learn` on learners

If the actors' `w` is older, the scan gets the older one and `learn` the newest. Equations are rewritten from
the last to the first, so that all readers of a value are known.
"""

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import jax
from jax.extend import core

from fdg import jaxprs
from fdg.fragment import FragmentMark, fragments_in
from fdg.placing.staleness.readers import Need, Reader, Readers, Version
from fdg.placing.staleness.values import Block, Versioned, kind_of_control

Pair: TypeAlias = tuple[Versioned, Version]


class BlockRewriter:
    """Rewrites a block, from its last equation to its first."""

    def __init__(self, block: Block, ends: Iterable[set[Reader]], readers: Readers):
        """Takes the readers of each value at the block's end."""
        self.block, self.readers = block, readers
        self.need: dict[Versioned, set[Reader]] = {}  # the readers of each value
        self.names: dict[Pair, Any] = {}  # the variable of each version that is read
        self.made: set[Pair] = set()  # the versions that an equation here computes; others are inputs
        self._equations: list[Any] = []  # the last first; or (function, operands, results), traced when built
        for value, some in zip(block.ends, ends, strict=True):
            self.read(value, some)
        for eqn, inner in reversed(list(zip(block.jaxpr.eqns, block.inner, strict=True))):
            self._write(eqn, inner)

    def read(self, value: Versioned, readers: Iterable[Reader]) -> Any:
        """The variable of the version for a set of readers."""
        found = value.literal
        for reader in readers if found is None else ():
            self.need.setdefault(value, set()).add(reader)
            found = self.names.setdefault((value, self.readers.version(value, reader)), core.Var(value.aval))
        return found

    def build(self, inputs: Iterable[Pair], outputs: Sequence[Any], checked: bool = False) -> Any:
        """The closed jaxpr."""
        equations: list[core.JaxprEqn] = []
        same: dict[Any, Any] = {}  # results of traced equations, by placeholder
        variables = [self.names.get(pair) or core.Var(pair[0].aval) for pair in inputs]
        constants = [
            (v, x.constant)
            for (x, _), v in self.names.items()
            if x.constant is not None and v not in variables
        ]
        for equation in reversed(self._equations):
            if not isinstance(equation, tuple):
                equations.append(equation.replace(invars=jaxprs.renamed(equation.invars, same)))
                continue
            function, operands, results = equation
            made, ends = jaxprs.traced(function, jaxprs.renamed(operands, same))
            equations += made
            same.update(zip(results, ends, strict=True))
        names, arrays = zip(*constants, strict=True) if constants else ((), ())
        ends = jaxprs.renamed(outputs, same)
        return jaxprs.build(variables, ends, equations, names, arrays, checked)

    def _make(self, value: Versioned, version: Version) -> Any:
        """The variable of a version that an equation computes, possibly unread."""
        pair = value, version
        if pair not in self.names or pair in self.made:
            return core.Var(value.aval)
        self.made.add(pair)
        return self.names[pair]

    def _write(self, eqn: core.JaxprEqn, inner: list[Block]) -> None:
        operands, runs, mark = self.block.of(eqn.invars), fragments_in([eqn]), FragmentMark.of(eqn)
        results = [v for v in self.block.of(eqn.outvars) if v.literal is None and v not in operands]
        need = {v: self.need.get(v, set()) for v in results}
        if not (runs or eqn.effects or any(need.values())):
            return
        if mark is not None:
            self.readers.check_one_version(mark.name, need)
        if not runs or not self.readers.late(operands):
            self._copy(eqn, need, self.block.inside)
        elif mark is not None and self.readers.is_alike(mark.name, operands):
            self._copy(eqn, need, mark.name)
        elif kind_of_control(eqn) is None:
            self.readers.check_unknown(eqn, operands, self.block.inside, need)
            self._copy(eqn, need, self.block.inside)
        else:
            self._bodies(eqn, inner, need)

    def _copy(self, eqn: core.JaxprEqn, need: Need, inside: Reader) -> None:
        """Writes an equation for each version of its results; a fragment's own code only once."""
        readers: set[Reader] = set().union(*need.values())
        if inside is not None and not jaxprs.is_identity(eqn):
            self.readers.check_one_version(inside, need)
            readers = {inside}
        elif eqn.effects:
            self.readers.check_effect(eqn, self.block.of(eqn.invars), need)
            readers = {None}
        for count, reader in enumerate(sorted(readers or {inside}, key=lambda reader: reader or "")):
            versions = {v: self.readers.version(v, reader) for v in need}
            missing = {
                v for v in need if (v, versions[v]) in self.names and (v, versions[v]) not in self.made
            }
            one = self._without_unread(eqn, missing, reader)
            operands = [self.read(v, [reader]) for v in self.block.of(one.invars)]
            if missing or not count:
                ends = self.block.of(one.outvars)
                results = [self._make(v, versions[v]) if v in need else core.Var(v.aval) for v in ends]
                self._equations.append(one.replace(invars=operands, outvars=results))

    def _without_unread(self, eqn: core.JaxprEqn, read: set[Versioned], reader: Reader) -> core.JaxprEqn:
        """The equation without unread results, if older values would be read only for them."""
        of = self.block.of
        old = {v for v in of(eqn.invars) if self.readers.version(v, reader)}
        wanted = [v for v, value in zip(eqn.outvars, of(eqn.outvars), strict=True) if value in read]
        if not old or not wanted or eqn.effects or len(wanted) == len(eqn.outvars) or not jaxprs.bodies(eqn):
            return eqn
        inputs = list(dict.fromkeys(jaxprs.variables(eqn.invars)))
        live = jaxprs.without_dead_code(jaxprs.build(inputs, wanted, [eqn], checked=False))
        (one,) = jaxprs.open_jaxpr(live).eqns
        return eqn if old <= set(of(one.invars)) else one

    def _bodies(self, eqn: core.JaxprEqn, blocks: list[Block], need: Need) -> None:
        """Retraces an equation whose bodies read several versions, with an operand for each."""
        kind, body, last = kind_of_control(eqn), jaxprs.bodies(eqn)[-1], blocks[-1]
        operands, results, inside = self.block.of(eqn.invars), self.block.of(eqn.outvars), last.inside
        if FragmentMark.of(eqn) is not None:
            need = {v: {inside} if readers else set() for v, readers in need.items()}
        elif kind in ("cond", "while") and inside is None:
            self.readers.check_control(eqn, operands[0] if kind == "cond" else blocks[0].ends[0], need)

        # The readers of each value in the bodies. A loop carries all versions that are read there, and that
        # its results need.
        outside = {v: operands[j] for j, v in zip(body.operands, last.inputs, strict=True)}
        carried = {k: last.inputs[i] for i, k in body.carry if last.inputs[i].same is None}
        # The version that becomes the result.
        source = {k: v if kind == "while" else last.ends[k] for k, v in carried.items()}
        code: set[Reader] | None = {inside} if inside is not None else None  # slicing and stacking of rows
        carry_readers: dict[int, set[Reader]] = {k: set() for k in carried}
        version = self.readers.version
        while True:
            ends = [need.get(v, set()) | carry_readers.get(k, set()) for k, v in enumerate(results)]
            ends = [code if code and some and k in body.stacked else some for k, some in enumerate(ends)]
            of_test: list[set[Reader]] = [{inside}]
            parts = [
                BlockRewriter(block, of_test if kind == "while" and block is not last else ends, self.readers)
                for block in blocks
            ]
            within: dict[Versioned, set[Reader]] = {}
            for part in parts:
                for v in (v for v, at in part.names if (v, at) not in part.made):
                    within[v] = within.get(v, set()) | part.need[v]
            grown = {k: carry_readers[k] | within.get(v, set()) for k, v in carried.items()}
            for k, carried_for in grown.items():
                there = {version(source[k], reader) for reader in carried_for}
                carried_for |= {
                    reader for reader in need.get(results[k], ()) if version(source[k], reader) not in there
                }
            if grown == carry_readers:
                break
            carry_readers = grown
        for k, v in carried.items():
            self.readers.check_turns(outside[v], last.ends[k], within.get(v, set()))
            within[v] = carry_readers[k]

        rows = [last.inputs[i] for i in sorted(body.sliced)]
        inputs: dict[Pair, Any] = {}
        if kind == "cond":
            inputs[operands[0], version(operands[0], inside)] = self.read(operands[0], [inside])
        sizes = []
        for values in ([v for v in within if v not in (*carried.values(), *rows)], carried.values(), rows):
            for v in values:
                for at, some in self.readers.by_version(v, within.get(v, ())).items():
                    inputs[v, at] = self.read(outside.get(v, v), code if code and v in rows else some)
            sizes.append(len(inputs))
        outputs: list[tuple[int, Reader, Any]] = []  # of the bodies: position, a reader, and the result
        for k, v in enumerate(results):
            wanted = self.readers.by_version(v, need.get(v, ()))
            given = {version(source.get(k, v), readers[0]): at for at, readers in wanted.items()}
            own = self.readers.by_version(carried.get(k, v), carry_readers.get(k, ends[k]))
            for reader, *_ in own.values():
                found = given.get(version(source.get(k, v), reader))
                outputs.append((k, reader, core.Var(v.aval) if found is None else self._make(v, found)))

        def again(*operands: Any) -> Any:
            functions = []
            for part in parts:
                is_test = kind == "while" and part is not parts[-1]
                some = [(0, inside)] if is_test else [(k, reader) for k, reader, _ in outputs]
                ends = [part.read(part.block.ends[k], [reader]) for k, reader in some]
                function = core.jaxpr_as_fun(part.build(inputs, ends))
                functions.append(lambda values, function=function: function(*values))
            start, end = sizes[:2]
            return jaxprs.control_flow(eqn, functions, operands[:start], operands[start:end], operands[end:])

        again.__name__ = again.__qualname__ = str(eqn.params.get("name", kind))
        function = jax.jit(again) if kind == "call" else again
        self._equations.append((function, list(inputs.values()), [v for *_, v in outputs]))
