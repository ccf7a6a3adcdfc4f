"""Reads the layers of a user's network: an ONNX file, a JAX function, or a module by name."""

import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from envs import user_code
from envs.codesign import jaxpr_layers, onnx_file
from envs.codesign.graph import Network
from fdg.arguments import quoted
from fdg.errors import FdgError, one_line


def from_onnx(path: str | Path) -> Network:
    """The layers of an ONNX file; see `onnx_file.read`."""
    return onnx_file.read(Path(path))


def from_function(network: Any, *inputs: Any) -> Network:
    """The layers of a JAX function, or of a Flax (linen or NNX) or Equinox module.

    Inputs are arrays or `jax.ShapeDtypeStruct`s, with batch 1. A linen module is initialised during tracing.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(network, nnx.Module):
        definition, state = nnx.split(network)
        apply_module = lambda state, *inputs: nnx.merge(definition, state)(*inputs)  # noqa: E731
        return jaxpr_layers.read(apply_module, *inputs, weights=state)
    if hasattr(network, "init_with_output"):  # flax.linen

        def initialize_and_apply(*inputs: Any) -> Any:
            key = jax.random.key(0)
            return network.init_with_output({"params": key, "dropout": key}, *inputs)[0]

        return jaxpr_layers.read(initialize_and_apply, *inputs)
    if not callable(network):
        raise FdgError(f"{quoted(network)} is not a network: give a function of arrays, or a module")
    return jaxpr_layers.read(network, *inputs)


def from_module(name: str, shape: Sequence[int] = ()) -> Network:
    """The layers of a network in a user's module; imports the module.

    `name`, such as `my.resnet:network`, is a network: a function of an array, or a Flax module. It may be a
    tuple of a network and example inputs, or a class or function without arguments that returns a network or
    such a tuple. `shape` is the shape of the float32 input, if there are no example inputs.
    """
    network = user_code.import_attribute("module", name)
    is_instance = hasattr(network, "init_with_output") and not inspect.isclass(network)
    if callable(network) and not is_instance and _takes_no_arguments(network):
        try:
            network = network()
        except Exception as error:
            raise FdgError(f"module '{name}': calling it fails: {one_line(error)}") from error
    network, *inputs = network if isinstance(network, tuple) else (network,)
    if not inputs and not shape:
        raise FdgError(f"module '{name}': the shape of its input is missing: input = [1, 224, 224, 3]")
    try:
        return from_function(network, *(inputs or [jax.ShapeDtypeStruct(tuple(shape), "float32")]))
    except FdgError as error:
        raise FdgError(f"module '{name}': {error}") from None


def _takes_no_arguments(function: Callable[..., Any]) -> bool:
    """True if the function can be called without arguments."""
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        return False
    return True
