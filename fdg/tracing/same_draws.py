"""Warns about random numbers that are equal in every iteration: their key never changes."""

import functools
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from fdg import jaxprs, keys
from fdg.errors import FdgWarning, is_generated, whose_file
from fdg.tracing.mistakes import located

_DRAWS = ("random_bits", "random_gamma")
_CONSTANT, _KEPT, _NEW = range(3)  # what a value depends on: no input; inputs that never change; any other


class _Draw(NamedTuple):
    depends: int
    calls: tuple[core.JaxprEqn, ...]  # the draw, and the calls around it, outermost first


def warn_of_same_draws(name: str, jaxpr: Any, state: Any) -> None:
    """Warns about each line of user code that draws the same numbers in every iteration."""
    jaxpr = jaxprs.open_jaxpr(jaxpr)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    kept = [_source(jaxpr, out) is v for v, out in zip(jaxpr.invars, jaxpr.outvars, strict=False)]
    said = set()
    draws = _follow(jaxpr, tuple(_KEPT if one else _NEW for one in kept))[1]
    _follow.cache_clear()  # jaxprs may hold arrays
    for draw in draws:
        if (line := _line(draw.calls)) is None or line in said:
            continue
        why, fix = "a constant key", "use the key that step is given, or one of the state"
        if draw.depends == _KEPT:
            paths = [
                jax.tree_util.keystr(path)
                for (path, leaf), same in zip(leaves, kept, strict=False)
                if same and (keys.is_key(leaf.dtype) or leaf.dtype == "uint32")
            ]
            why = f"state{(paths or [''])[0]}, which it returns as it was"
            fix = "key, now = jax.random.split(key), draw from now and return the new key"
        said.add(line)
        warnings.warn(
            f"{name}.iterate{line} draws from {why}: the numbers are the same each time: {fix}",
            FdgWarning,
            stacklevel=4,
        )


def _source(jaxpr: core.Jaxpr, atom: Any) -> Any:
    """The variable that a value was before calls that return it unchanged."""
    for eqn in reversed(jaxpr.eqns):
        if atom in eqn.outvars:
            if jaxprs.is_identity(eqn):
                atom = eqn.invars[eqn.outvars.index(atom)]
                continue
            inner = jaxprs.bodies(eqn)
            if len(inner) != 1 or inner[0].carry or inner[0].sliced or inner[0].stacked:
                return atom
            (body,) = inner
            inside = _source(body.jaxpr, body.jaxpr.outvars[body.results.index(eqn.outvars.index(atom))])
            if inside not in body.jaxpr.invars:
                return atom
            atom = eqn.invars[body.operands[body.jaxpr.invars.index(inside)]]
    return atom


@functools.cache
def _follow(jaxpr: core.Jaxpr, inputs: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[_Draw, ...]]:
    """The dependencies of the outputs, and the draws that depend on no changing input."""
    known = dict(zip(jaxpr.invars, inputs, strict=True))  # a constant of the jaxpr
    draws: list[_Draw] = []

    def of(atom: Any) -> int:
        return _CONSTANT if jaxprs.is_literal(atom) else known.get(atom, _CONSTANT)

    for eqn in jaxpr.eqns:
        depends = [of(v) for v in eqn.invars]
        if eqn.primitive.name in _DRAWS and depends[0] != _NEW:
            draws.append(_Draw(depends[0], (eqn,)))
        inner = jaxprs.bodies(eqn)
        results = [max(depends, default=_CONSTANT)] * len(eqn.outvars)
        for body in inner:
            taken, found = _looped(body, tuple(depends[i] for i in body.operands))
            draws += [draw._replace(calls=(eqn, *draw.calls)) for draw in found]
            if len(inner) == 1:
                results = [taken[i] for i in body.results]
        known.update(zip(eqn.outvars, results, strict=True))
    return tuple(of(v) for v in jaxpr.outvars), tuple(draws)


def _looped(body: jaxprs.Body, inputs: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[_Draw, ...]]:
    """`_follow` for a loop's body, at the fixed point of its carry."""
    while True:
        outputs, draws = _follow(body.jaxpr, inputs)
        after = list(inputs)
        for into, out in body.carry:
            after[into] = max(after[into], outputs[out])
        if tuple(after) == inputs:
            return outputs, draws
        inputs = tuple(after)


def _line(calls: Sequence[core.JaxprEqn]) -> str | None:
    """The line of user code of an equation; None if a library, or fdg, draws.

    Library functions are traced once and cached, so their equations name the first line that called them.
    """
    last = calls[0]
    for last in calls:
        files = (getattr(body.jaxpr.debug_info, "func_filename", None) for body in jaxprs.bodies(last))
        if "library" in map(whose_file, files):
            break
    traceback: Any = last.source_info.traceback
    for frame in traceback.frames if traceback else ():
        whose = whose_file(frame.file_name)
        if whose == "user" and not is_generated(frame.file_name, frame.function_name):
            return located(frame.file_name, frame.line_num)
        if whose == "ours":
            break
    return None
