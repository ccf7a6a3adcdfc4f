"""All differences between JAX versions, and all private names of JAX that fdg uses."""

import importlib
from typing import TYPE_CHECKING, Any

import jax
from jax.extend import core
from jax.interpreters import partial_eval

from fdg.errors import FdgError, GraphError

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr
else:
    ClosedJaxpr = getattr(core, "ClosedJaxpr", core.Jaxpr)

_types: tuple[Any, Any] = (ClosedJaxpr, core.Jaxpr)  # `Any`: for a type checker these are never the same
CLOSED_JAXPR_IS_JAXPR: bool = _types[0] is _types[1]
"""True from JAX 0.11 on, where a jaxpr holds its own constants and `ClosedJaxpr` is an alias."""


def internal(module: str, name: str, purpose: str) -> Any:
    """A value from `jax._src` without a public name; `purpose` completes "which fdg needs to" in errors."""
    try:
        return getattr(importlib.import_module(f"jax._src.{module}"), name)
    except (ImportError, AttributeError):
        raise FdgError(
            f"JAX {jax.__version__} has no jax._src.{module}.{name}, which fdg needs to {purpose}:"
            f" update fdg, or install a version of JAX that fdg supports"
        ) from None


HIGH_LEVEL_PRIMITIVES = ("call_hi_primitive", "call_hi_primitive_linearized")
"""Primitives that lower to others, like that of `jnp.searchsorted` (from JAX 0.12) and users' `HiPrim`s."""


def check_jax_settings() -> None:
    """Raises a `GraphError` if a JAX option is set with which fdg cannot read jaxprs."""
    for option, effect in (
        ("jax_scan3", "makes jax.lax.scan a loop that cannot be split into fragments"),
        (
            "jax_disable_jit",
            "unrolls loops and leaves out fragments; only algorithm.iterate(state) itself works",
        ),
    ):
        if getattr(jax.config, option, False):
            fix = f"unset it, or call jax.config.update('{option}', False)"
            raise GraphError(f"{option.upper()}=1 {effect}: {fix}")


def lower_high_level(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """The jaxpr with each high-level operation replaced by the operations that it lowers to."""
    lower = getattr(partial_eval, "lower_jaxpr2", None)  # public in JAX 0.11 and later
    lower = lower or internal("interpreters.partial_eval", "lower_jaxpr2", "read high-level operations")
    return lower(jaxpr)
