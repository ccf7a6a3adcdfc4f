"""Rewrites an iteration so that each reader gets its version of each value; drops unread values.

    w -> scan(act(w, x), step(x, a)), learn(w, ys)      `act` and `step` on actors, `learn` on learners

If the actors' `w` is older, the scan gets the older `w`, and `learn` gets the newest. Equations are rewritten
from the last to the first, so that all readers of a value are known when the equation that computes it is
rewritten.
"""

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import jax
from jax.extend import core

from fdg import jaxprs
from fdg.fragment import FragmentMark, fragments_in
from fdg.placing.staleness.readers import Reader, Readers, ReadersByValue, Version
from fdg.placing.staleness.values import Block, Versioned, kind_of_control

Pair: TypeAlias = tuple[Versioned, Version]  # one version of a value


class BlockRewriter:
    """Rewrites a block, from its last equation to its first; `build` returns the new jaxpr."""

    def __init__(self, block: Block, output_readers: Iterable[set[Reader]], readers: Readers):
        """Takes the readers of each of the block's results (`output_readers`)."""
        self.block, self.readers = block, readers
        self.need: dict[Versioned, set[Reader]] = {}  # the readers of each value
        self.vars: dict[Pair, Any] = {}  # the variable of each version that is read
        self.computed: set[Pair] = set()  # the versions that the block computes; others are inputs
        # Rewritten equations, the last first. A tuple (function, operands, results) is traced by `build`.
        self._equations: list[Any] = []
        for value, value_readers in zip(block.outputs, output_readers, strict=True):
            self.read(value, value_readers)
        for eqn, inner in reversed(list(zip(block.jaxpr.eqns, block.inner_blocks, strict=True))):
            self._write(eqn, inner)

    def read(self, value: Versioned, readers: Iterable[Reader]) -> Any:
        """Adds readers of a value, which all read the same version; returns the version's variable."""
        variable = value.literal
        for reader in readers if variable is None else ():
            self.need.setdefault(value, set()).add(reader)
            variable = self.vars.setdefault(
                (value, self.readers.version(value, reader)), core.Var(value.aval)
            )
        return variable

    def build(self, inputs: Iterable[Pair], outputs: Sequence[Any], checked: bool = False) -> Any:
        """The closed jaxpr of the rewritten equations."""
        equations: list[core.JaxprEqn] = []
        traced: dict[Any, Any] = {}  # results of traced equations, by placeholder
        variables = [self.vars.get(pair) or core.Var(pair[0].aval) for pair in inputs]
        constants = [
            (v, x.constant)
            for (x, _), v in self.vars.items()
            if x.constant is not None and v not in variables
        ]
        for equation in reversed(self._equations):
            if not isinstance(equation, tuple):
                equations.append(equation.replace(invars=jaxprs.renamed(equation.invars, traced)))
                continue
            function, operands, results = equation
            new_equations, ends = jaxprs.traced(function, jaxprs.renamed(operands, traced))
            equations += new_equations
            traced.update(zip(results, ends, strict=True))
        names, arrays = zip(*constants, strict=True) if constants else ((), ())
        ends = jaxprs.renamed(outputs, traced)
        return jaxprs.build(variables, ends, equations, names, arrays, checked)

    def define(self, value: Versioned, version: Version) -> Any:
        """The variable of a version that an equation computes; a new variable if nothing reads it."""
        pair = value, version
        if pair not in self.vars or pair in self.computed:
            return core.Var(value.aval)
        self.computed.add(pair)
        return self.vars[pair]

    def _write(self, eqn: core.JaxprEqn, inner: list[Block]) -> None:
        """Writes an equation once for each version of its results that is read."""
        operands, fragments, mark = self.block.of(eqn.invars), fragments_in([eqn]), FragmentMark.of(eqn)
        results = [v for v in self.block.of(eqn.outvars) if v.literal is None and v not in operands]
        need = {v: self.need.get(v, set()) for v in results}
        if not (fragments or eqn.effects or any(need.values())):
            return
        if mark is not None:
            self.readers.check_one_version(mark.name, need)
        if not fragments or not self.readers.delayed_leaves(operands):
            self._copy(eqn, need, self.block.fragment)
        elif mark is not None and self.readers.nested_read_same_versions(mark.name, operands):
            self._copy(eqn, need, mark.name)
        elif kind_of_control(eqn) is None:
            self.readers.check_unknown(eqn, operands, self.block.fragment, need)
            self._copy(eqn, need, self.block.fragment)
        else:
            self._equations.append(_ControlFlow(self, eqn, inner, need).retrace())

    def _copy(self, eqn: core.JaxprEqn, need: ReadersByValue, inside: Reader) -> None:
        """Writes an equation once per version of its results; code inside a fragment only once."""
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
                v for v in need if (v, versions[v]) in self.vars and (v, versions[v]) not in self.computed
            }
            pruned = self._without_unread(eqn, missing, reader)
            operands = [self.read(v, [reader]) for v in self.block.of(pruned.invars)]
            if missing or not count:
                values = self.block.of(pruned.outvars)
                results = [self.define(v, versions[v]) if v in need else core.Var(v.aval) for v in values]
                self._equations.append(pruned.replace(invars=operands, outvars=results))

    def _without_unread(self, eqn: core.JaxprEqn, read: set[Versioned], reader: Reader) -> core.JaxprEqn:
        """Removes results that are not in `read` from an equation, if the others need no older values."""
        values = self.block.of
        old = {v for v in values(eqn.invars) if self.readers.version(v, reader)}
        outputs = [v for v, value in zip(eqn.outvars, values(eqn.outvars), strict=True) if value in read]
        if (
            not old
            or not outputs
            or eqn.effects
            or len(outputs) == len(eqn.outvars)
            or not jaxprs.bodies(eqn)
        ):
            return eqn
        inputs = list(dict.fromkeys(jaxprs.variables(eqn.invars)))
        live = jaxprs.without_dead_code(jaxprs.build(inputs, outputs, [eqn], checked=False))
        (pruned,) = jaxprs.open_jaxpr(live).eqns
        return eqn if old <= set(values(pruned.invars)) else pruned


class _ControlFlow:
    """An equation whose bodies read several versions; `retrace` gives it one operand per version."""

    def __init__(self, outer: BlockRewriter, eqn: core.JaxprEqn, blocks: list[Block], need: ReadersByValue):
        self.outer, self.eqn, self.blocks, self.readers = outer, eqn, blocks, outer.readers
        self.kind, self.body, self.body_block = kind_of_control(eqn), jaxprs.bodies(eqn)[-1], blocks[-1]
        self.operands, self.results = outer.block.of(eqn.invars), outer.block.of(eqn.outvars)
        self.inside = inside = self.body_block.fragment
        if FragmentMark.of(eqn) is not None:
            need = {v: {inside} if readers else set() for v, readers in need.items()}
        elif self.kind in ("cond", "while") and inside is None:
            predicate = self.operands[0] if self.kind == "cond" else blocks[0].outputs[0]
            self.readers.check_control(eqn, predicate, need)
        self.need = need  # the readers of each result
        inputs, outputs = self.body_block.inputs, self.body_block.outputs
        self.outside = {v: self.operands[j] for j, v in zip(self.body.operands, inputs, strict=True)}
        self.carried = {k: inputs[i] for i, k in self.body.carry if inputs[i].equal is None}
        # For each carried position: the value whose version becomes the result.
        self.source = {k: v if self.kind == "while" else outputs[k] for k, v in self.carried.items()}
        # Slicing and stacking of rows belongs to the fragment around the loop, if there is one.
        self.code_readers: set[Reader] | None = {inside} if inside is not None else None

    def retrace(self) -> Any:
        """Traces the equation again. Returns the function to trace, its operands and its results."""
        self._rewrite_bodies()
        inputs, bounds = self._inputs()
        outputs = self._outputs()
        test = self.rewriters[0] if self.kind == "while" else None

        def run_bodies(*operands: Any) -> Any:
            functions = []
            for rewriter in self.rewriters:
                users = [(0, self.inside)] if rewriter is test else [(k, reader) for k, reader, _ in outputs]
                ends = [rewriter.read(rewriter.block.outputs[k], [reader]) for k, reader in users]
                function = core.jaxpr_as_fun(rewriter.build(inputs, ends))
                functions.append(lambda values, function=function: function(*values))
            start, end = bounds
            return jaxprs.control_flow(
                self.eqn, functions, operands[:start], operands[start:end], operands[end:]
            )

        run_bodies.__name__ = run_bodies.__qualname__ = str(self.eqn.params.get("name", self.kind))
        function = jax.jit(run_bodies) if self.kind == "call" else run_bodies
        return function, list(inputs.values()), [v for *_, v in outputs]

    def _rewrite_bodies(self) -> None:
        """Rewrites the bodies, and finds the readers of each value in them.

        A loop carries all versions that its body reads and all versions that its results need. What its body
        reads depends on what it carries, so this repeats until nothing changes.
        """
        carry_readers: dict[int, set[Reader]] = {k: set() for k in self.carried}
        while True:
            self.end_readers = [self._readers_of_end(k, carry_readers) for k in range(len(self.results))]
            self.rewriters = [
                BlockRewriter(
                    block,
                    [{self.inside}]
                    if self.kind == "while" and block is not self.body_block
                    else self.end_readers,
                    self.readers,
                )
                for block in self.blocks
            ]
            self.inner_readers: dict[Versioned, set[Reader]] = {}
            for rewriter in self.rewriters:
                for v in (v for v, version in rewriter.vars if (v, version) not in rewriter.computed):
                    self.inner_readers[v] = self.inner_readers.get(v, set()) | rewriter.need[v]
            new_carry_readers = {k: self._readers_of_carry(k, old) for k, old in carry_readers.items()}
            if new_carry_readers == carry_readers:
                break
            carry_readers = new_carry_readers
        self.carry_readers = carry_readers
        for k, v in self.carried.items():
            readers = self.inner_readers.get(v, set())
            self.readers.check_loop_updates(self.outside[v], self.body_block.outputs[k], readers)
            self.inner_readers[v] = carry_readers[k]

    def _readers_of_end(self, k: int, carry_readers: dict[int, set[Reader]]) -> set[Reader]:
        """The readers of the body's output `k`."""
        users = self.need.get(self.results[k], set()) | carry_readers.get(k, set())
        return self.code_readers if self.code_readers and users and k in self.body.stacked else users

    def _readers_of_carry(self, k: int, known: set[Reader]) -> set[Reader]:
        """The readers of the carried value `k`: those in the body, and of further versions of the result."""
        version, source = self.readers.version, self.source[k]
        readers = known | self.inner_readers.get(self.carried[k], set())
        versions = {version(source, reader) for reader in readers}
        needed = self.need.get(self.results[k], ())
        return readers | {reader for reader in needed if version(source, reader) not in versions}

    def _inputs(self) -> tuple[dict[Pair, Any], tuple[int, int]]:
        """The variables of all versions that the bodies read: constants, then carried values, then rows.

        Also returns the positions of the first carried value and of the first row.
        """
        rows = [self.body_block.inputs[i] for i in sorted(self.body.sliced)]
        constants = [v for v in self.inner_readers if v not in (*self.carried.values(), *rows)]
        inputs: dict[Pair, Any] = {}
        if self.kind == "cond":
            predicate = self.operands[0]
            version = self.readers.version(predicate, self.inside)
            inputs[predicate, version] = self.outer.read(predicate, [self.inside])
        bounds = []
        for values in (constants, self.carried.values(), rows):
            for v in values:
                for version, users in self.readers.by_version(v, self.inner_readers.get(v, ())).items():
                    readers = self.code_readers if self.code_readers and v in rows else users
                    inputs[v, version] = self.outer.read(self.outside.get(v, v), readers)
            bounds.append(len(inputs))
        return inputs, (bounds[0], bounds[1])

    def _outputs(self) -> list[tuple[int, Reader, Any]]:
        """The bodies' outputs: a position, a reader, and the variable of the result."""
        outputs: list[tuple[int, Reader, Any]] = []
        version = self.readers.version
        for k, v in enumerate(self.results):
            source = self.source.get(k, v)
            needed = self.readers.by_version(v, self.need.get(v, ()))
            versions = {version(source, readers[0]): v_version for v_version, readers in needed.items()}
            readers_by_version = self.readers.by_version(
                self.carried.get(k, v), self.carry_readers.get(k, self.end_readers[k])
            )
            for reader, *_ in readers_by_version.values():
                match = versions.get(version(source, reader))
                result = core.Var(v.aval) if match is None else self.outer.define(v, match)
                outputs.append((k, reader, result))
        return outputs
