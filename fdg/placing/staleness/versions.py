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

    def _define(self, value: Versioned, version: Version) -> Any:
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
            self._retrace(eqn, inner, need)

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
                results = [self._define(v, versions[v]) if v in need else core.Var(v.aval) for v in values]
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

    def _retrace(self, eqn: core.JaxprEqn, blocks: list[Block], need: ReadersByValue) -> None:
        """Retraces an equation whose bodies read several versions, with one operand per version."""
        kind, body, body_block = kind_of_control(eqn), jaxprs.bodies(eqn)[-1], blocks[-1]
        operands, results, inside = self.block.of(eqn.invars), self.block.of(eqn.outvars), body_block.fragment
        if FragmentMark.of(eqn) is not None:
            need = {v: {inside} if readers else set() for v, readers in need.items()}
        elif kind in ("cond", "while") and inside is None:
            self.readers.check_control(eqn, operands[0] if kind == "cond" else blocks[0].outputs[0], need)

        # Find the readers of each value in the bodies. A loop carries all versions that its body reads and
        # all versions that its results need.
        outside = {v: operands[j] for j, v in zip(body.operands, body_block.inputs, strict=True)}
        carried = {k: body_block.inputs[i] for i, k in body.carry if body_block.inputs[i].equal is None}
        # For each carried position: the value whose version becomes the result.
        source = {k: v if kind == "while" else body_block.outputs[k] for k, v in carried.items()}
        # Slicing and stacking of rows belongs to the fragment around the loop, if there is one.
        code_readers: set[Reader] | None = {inside} if inside is not None else None
        carry_readers: dict[int, set[Reader]] = {k: set() for k in carried}
        version = self.readers.version
        while True:
            end_readers = [need.get(v, set()) | carry_readers.get(k, set()) for k, v in enumerate(results)]
            end_readers = [
                code_readers if code_readers and users and k in body.stacked else users
                for k, users in enumerate(end_readers)
            ]
            test_readers: list[set[Reader]] = [{inside}]
            rewriters = [
                BlockRewriter(
                    block,
                    test_readers if kind == "while" and block is not body_block else end_readers,
                    self.readers,
                )
                for block in blocks
            ]
            inner_readers: dict[Versioned, set[Reader]] = {}
            for rewriter in rewriters:
                for v in (v for v, v_version in rewriter.vars if (v, v_version) not in rewriter.computed):
                    inner_readers[v] = inner_readers.get(v, set()) | rewriter.need[v]
            new_carry_readers = {
                k: carry_readers[k] | inner_readers.get(v, set()) for k, v in carried.items()
            }
            for k, readers_of_carry in new_carry_readers.items():
                present_versions = {version(source[k], reader) for reader in readers_of_carry}
                readers_of_carry |= {
                    reader
                    for reader in need.get(results[k], ())
                    if version(source[k], reader) not in present_versions
                }
            if new_carry_readers == carry_readers:
                break
            carry_readers = new_carry_readers
        for k, v in carried.items():
            self.readers.check_loop_updates(outside[v], body_block.outputs[k], inner_readers.get(v, set()))
            inner_readers[v] = carry_readers[k]

        rows = [body_block.inputs[i] for i in sorted(body.sliced)]
        inputs: dict[Pair, Any] = {}
        if kind == "cond":
            inputs[operands[0], version(operands[0], inside)] = self.read(operands[0], [inside])
        bounds = []
        for values in (
            [v for v in inner_readers if v not in (*carried.values(), *rows)],
            carried.values(),
            rows,
        ):
            for v in values:
                for v_version, users in self.readers.by_version(v, inner_readers.get(v, ())).items():
                    inputs[v, v_version] = self.read(
                        outside.get(v, v), code_readers if code_readers and v in rows else users
                    )
            bounds.append(len(inputs))
        outputs: list[tuple[int, Reader, Any]] = []  # the bodies' outputs: position, a reader, the result
        for k, v in enumerate(results):
            needed = self.readers.by_version(v, need.get(v, ()))
            versions = {
                version(source.get(k, v), readers[0]): v_version for v_version, readers in needed.items()
            }
            readers_by_version = self.readers.by_version(
                carried.get(k, v), carry_readers.get(k, end_readers[k])
            )
            for reader, *_ in readers_by_version.values():
                match = versions.get(version(source.get(k, v), reader))
                outputs.append((k, reader, core.Var(v.aval) if match is None else self._define(v, match)))

        def run_bodies(*operands: Any) -> Any:
            functions = []
            for rewriter in rewriters:
                is_test = kind == "while" and rewriter is not rewriters[-1]
                users = [(0, inside)] if is_test else [(k, reader) for k, reader, _ in outputs]
                ends = [rewriter.read(rewriter.block.outputs[k], [reader]) for k, reader in users]
                function = core.jaxpr_as_fun(rewriter.build(inputs, ends))
                functions.append(lambda values, function=function: function(*values))
            start, end = bounds[:2]
            return jaxprs.control_flow(eqn, functions, operands[:start], operands[start:end], operands[end:])

        run_bodies.__name__ = run_bodies.__qualname__ = str(eqn.params.get("name", kind))
        function = jax.jit(run_bodies) if kind == "call" else run_bodies
        self._equations.append((function, list(inputs.values()), [v for *_, v in outputs]))
