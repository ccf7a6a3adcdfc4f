"""Warns about random numbers that are equal in every iteration: their key never changes."""

import functools
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from fdg import jaxprs, keys
from fdg.errors import FdgWarning, is_generated, whose_file
from fdg.tracing.mistakes import line_text

_DRAWS = ("random_bits", "random_gamma")  # primitives whose first operand is a key
# What a value depends on: no input; only inputs that never change; other inputs. The largest one counts.
_CONSTANT, _UNCHANGED, _NEW = range(3)


class _Draw(NamedTuple):
    """A random draw whose key never changes."""

    dependency: int  # what the key depends on: `_CONSTANT` or `_UNCHANGED`
    calls: tuple[core.JaxprEqn, ...]  # the draw, and the calls around it, outermost first


def warn_of_same_draws(name: str, jaxpr: Any, state: Any) -> None:
    """Warns about each line of user code that draws the same numbers in every iteration."""
    jaxpr = jaxprs.open_jaxpr(jaxpr)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    is_unchanged = [_origin(jaxpr, out) is v for v, out in zip(jaxpr.invars, jaxpr.outvars, strict=False)]
    reported = set()
    draws = _follow(jaxpr, tuple(_UNCHANGED if fixed else _NEW for fixed in is_unchanged))[1]
    _follow.cache_clear()  # cached jaxprs may keep arrays alive
    for draw in draws:
        if (line := _user_line(draw.calls)) is None or line in reported:
            continue
        reason, fix = "a constant key", "use the key that step is given, or a key in the state"
        if draw.dependency == _UNCHANGED:
            paths = [
                jax.tree_util.keystr(path)
                for (path, leaf), is_same in zip(leaves, is_unchanged, strict=False)
                if is_same and (keys.is_key(leaf.dtype) or leaf.dtype == "uint32")
            ]
            reason = f"state{(paths or [''])[0]}, which it returns unchanged"
            fix = "key, draw_key = jax.random.split(key), draw from draw_key and return key"
        reported.add(line)
        warnings.warn(
            f"{name}.iterate{line} draws from {reason}: the numbers are the same each time: {fix}",
            FdgWarning,
            stacklevel=4,
        )


def _origin(jaxpr: core.Jaxpr, atom: Any) -> Any:
    """The variable that a value equals, through calls that return it unchanged."""
    for eqn in reversed(jaxpr.eqns):
        if atom in eqn.outvars:
            if jaxprs.is_identity(eqn):
                atom = eqn.invars[eqn.outvars.index(atom)]
                continue
            inner = jaxprs.bodies(eqn)
            if len(inner) != 1 or inner[0].carry or inner[0].sliced or inner[0].stacked:
                return atom  # a loop or a branch, which may change the value
            (body,) = inner
            inner_variable = _origin(
                body.jaxpr, body.jaxpr.outvars[body.results.index(eqn.outvars.index(atom))]
            )
            if inner_variable not in body.jaxpr.invars:
                return atom
            atom = eqn.invars[body.operands[body.jaxpr.invars.index(inner_variable)]]
    return atom


@functools.cache
def _follow(jaxpr: core.Jaxpr, inputs: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[_Draw, ...]]:
    """What each output depends on, and the draws whose key does not depend on a changing input."""
    dependency = dict(zip(jaxpr.invars, inputs, strict=True))  # constants of the jaxpr are absent
    draws: list[_Draw] = []

    def dependency_of(atom: Any) -> int:
        return _CONSTANT if jaxprs.is_literal(atom) else dependency.get(atom, _CONSTANT)

    for eqn in jaxpr.eqns:
        dependencies = [dependency_of(v) for v in eqn.invars]
        if eqn.primitive.name in _DRAWS and dependencies[0] != _NEW:
            draws.append(_Draw(dependencies[0], (eqn,)))
        inner = jaxprs.bodies(eqn)
        results = [max(dependencies, default=_CONSTANT)] * len(eqn.outvars)
        for body in inner:
            outputs, inner_draws = _follow_body(body, tuple(dependencies[i] for i in body.operands))
            draws += [draw._replace(calls=(eqn, *draw.calls)) for draw in inner_draws]
            if len(inner) == 1:
                results = [outputs[i] for i in body.results]
        dependency.update(zip(eqn.outvars, results, strict=True))
    return tuple(dependency_of(v) for v in jaxpr.outvars), tuple(draws)


def _follow_body(body: jaxprs.Body, inputs: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[_Draw, ...]]:
    """`_follow` for an equation's body; if it is a loop's, at the fixed point of its carry."""
    while True:
        outputs, draws = _follow(body.jaxpr, inputs)
        next_inputs = list(inputs)
        for i, j in body.carry:
            next_inputs[i] = max(next_inputs[i], outputs[j])
        if tuple(next_inputs) == inputs:
            return outputs, draws
        inputs = tuple(next_inputs)


def _user_line(calls: Sequence[core.JaxprEqn]) -> str | None:
    """The line of user code that makes a draw; None if a library or fdg makes it.

    Library functions are traced once and cached, so their equations name the first line that called them.
    """
    call = calls[0]
    for call in calls:
        files = (getattr(body.jaxpr.debug_info, "func_filename", None) for body in jaxprs.bodies(call))
        if "library" in map(whose_file, files):
            break
    traceback: Any = call.source_info.traceback
    for frame in traceback.frames if traceback else ():
        owner = whose_file(frame.file_name)
        if owner == "user" and not is_generated(frame.file_name, frame.function_name):
            return line_text(frame.file_name, frame.line_num)
        if owner == "ours":
            break
    return None
