"""Converts functions of arrays to ONNX models with jax2onnx."""

import contextlib
import importlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import batching

from fdg import jaxprs
from fdg.errors import FdgError, one_line

# Calls, and the parameter with each one's body, including calls with custom gradients.
_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr"}
_CALLS |= {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}


class Output(NamedTuple):
    """A result of a model."""

    name: str
    dtype: str  # that it is to have
    program_dtype: str  # that the function gives it
    low: Any = None  # bounds in `dtype`, numbers or nested lists, None for none: what the function's dtype
    high: Any = None  # cannot hold of them is theirs again


def to_onnx(
    function: Callable[..., Any],
    arguments: Sequence[jax.ShapeDtypeStruct],
    name: str,
    inputs: Sequence[tuple[str, str]] = (),
    outputs: Sequence[Output] = (),
    said: Mapping[str, str] = MappingProxyType({}),
) -> bytes:
    """Converts a function to a serialised ONNX model.

    `inputs` are names and dtypes; they may have 64 bits where the function's arguments have 32.
    """
    with _cumsum_restored():
        within = list(zip(inputs, arguments, strict=True)) if inputs else []
        try:
            converter = importlib.import_module("jax2onnx")
        except ImportError as error:
            raise FdgError(
                f"ONNX needs jax2onnx, which is not installed ({error}): pip install 'fdg[onnx]'"
            ) from error
        try:
            with _what_the_converter_misses(), _without_its_log():
                model = converter.to_onnx(
                    lambda *given: tuple(_evaluated(jax.make_jaxpr(function)(*given), given)),
                    list(arguments),
                    model_name=name,
                    input_names=[_inner(key, dtype, str(one.dtype)) for (key, dtype), one in within] or None,
                    output_names=[_inner(one.name, one.dtype, one.program_dtype) for one in outputs] or None,
                )
                _cast(model, [(key, dtype, str(one.dtype)) for (key, dtype), one in within], outputs)
                importlib.import_module("onnx").helper.set_model_props(model, dict(said))
                content = model.SerializeToString()
        except Exception as error:  # the converter may raise anything for unknown operations
            raise FdgError(f"{name} cannot be written as ONNX: {one_line(error)}") from error
    return content


def _inner(name: str, dtype: str, program_dtype: str) -> str:
    """The internal name of a model's input or output that has another dtype inside."""
    return name if dtype == program_dtype else f"{name} as {program_dtype}"


def _cast(model: Any, inputs: Sequence[tuple[str, str, str]], outputs: Sequence[Output]) -> None:
    """Casts a model's inputs and outputs to their declared dtypes; changes the model."""
    onnx = importlib.import_module("onnx")
    node, graph = onnx.helper.make_node, model.graph
    kinds = onnx.TensorProto.DataType
    words = {"float64": "DOUBLE", "float32": "FLOAT"}

    def kind(dtype: str) -> int:
        return kinds.Value(words.get(dtype, dtype.upper()))

    first, last = [], []
    for there, (name, dtype, program_dtype) in zip(graph.input, inputs, strict=False):
        if dtype != program_dtype:
            first.append(node("Cast", [name], [there.name], to=kind(program_dtype)))
            there.name, there.type.tensor_type.elem_type = name, kind(dtype)
    for there, (name, dtype, program_dtype, low, high) in zip(graph.output, outputs, strict=False):
        if dtype == program_dtype:
            continue
        ends = [np.array(end, np.float64) for end in (low, high)] if dtype == "float64" else []
        value, target = there.name, f"{name} as {dtype}" if ends else name
        last.append(node("Cast", [value], [target], to=kind(dtype)))
        for side, end in enumerate(ends):
            value, target = target, name if side else f"{name} above"
            bound, seen, at = (f"{name} {word} {side}" for word in ("bound", "nearest", "at"))
            for key, array in ((bound, end), (seen, end.astype(np.float32).astype(np.float64))):
                graph.initializer.append(onnx.numpy_helper.from_array(array, key))
            last += [node("Equal", [value, seen], [at]), node("Where", [at, bound, value], [target])]
        there.name, there.type.tensor_type.elem_type = name, kind(dtype)
    nodes = [*first, *graph.node, *last]
    del graph.node[:]
    graph.node.extend(nodes)


@contextlib.contextmanager
def _without_its_log() -> Iterator[None]:
    """Silences jax2onnx's line for every value without a type."""
    logger, root = logging.getLogger("onnx_ir"), logging.getLogger()
    level, handlers = logger.level, list(root.handlers)
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        root.handlers[:] = handlers  # jax2onnx may have added a handler that prints everything


_LIBRARIES = ("jax", "flax", "optax", "equinox")


@contextlib.contextmanager
def _cumsum_restored() -> Iterator[None]:
    """Restores `jax.numpy.cumsum`, which jax2onnx replaces by one that does not accept `cumsum(x, 0)`."""
    before = {
        module: {key: value for key, value in vars(module).items() if callable(value)}
        for name, module in list(sys.modules.items())
        if name.split(".")[0] in _LIBRARIES and "_src" not in name and module is not None
    }
    try:
        yield
    finally:
        for module, functions in before.items():
            for key, value in functions.items():
                if vars(module).get(key) is not value:
                    setattr(module, key, value)


def _evaluated(closed: Any, values: Sequence[Any]) -> list[Any]:
    """Evaluates a jaxpr, with the bodies of calls and of loops with one trip inlined.

    jax2onnx 0.13 supports no loops, and only simple operations in functions with custom gradients.
    """
    return jaxprs.evaluate_jaxpr(jaxprs.open_jaxpr(closed), jaxprs.constants_of(closed), values, _equation)


def _equation(eqn: core.JaxprEqn, operands: list[Any]) -> list[Any]:
    if eqn.primitive.name in _CALLS:
        return _evaluated(eqn.params[_CALLS[eqn.primitive.name]], operands)
    if eqn.primitive.name != "scan" or eqn.params["length"] != 1:
        return jaxprs.bind(eqn, operands)
    constants, carried = jaxprs.scan_sizes(eqn.params)
    rows = [jnp.squeeze(rows, axis=0) for rows in operands[constants + carried :]]
    results = _evaluated(eqn.params["jaxpr"], [*operands[: constants + carried], *rows])
    return [*results[:carried], *(jnp.expand_dims(row, 0) for row in results[carried:])]


@contextlib.contextmanager
def _what_the_converter_misses() -> Iterator[None]:
    """Adds a name that jax2onnx 0.13 uses in its `vmap` rules and JAX 0.10 has removed."""
    missing = not hasattr(batching, "not_mapped")
    if missing:
        setattr(batching, "not_mapped", None)  # noqa: B010 - the type checker knows that it is not there
    try:
        yield
    finally:
        if missing:
            delattr(batching, "not_mapped")
