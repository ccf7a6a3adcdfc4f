"""Converts functions of arrays to ONNX models with jax2onnx."""

import contextlib
import importlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import batching

from fdg import jaxprs
from fdg.errors import FdgError, one_line

# Primitives that call a jaxpr (also those with custom gradients), and the parameter that holds the jaxpr.
_CALL_BODIES = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr"}
_CALL_BODIES |= {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}


class Output(NamedTuple):
    """An output of a model."""

    name: str
    dtype: str  # the dtype of the model's output
    program_dtype: str  # the dtype of the function's result
    # Bounds in `dtype`, numbers or nested lists; None: unbounded. A float64 output that equals a bound
    # rounded to float32 becomes the exact bound.
    low: Any = None
    high: Any = None


def to_onnx(
    function: Callable[..., Any],
    arguments: Sequence[jax.ShapeDtypeStruct],
    name: str,
    inputs: Sequence[tuple[str, str]],
    outputs: Sequence[Output],
    metadata: Mapping[str, str],
) -> bytes:
    """Converts a function to a serialised ONNX model.

    `inputs` are names and dtypes, which may have 64 bits where the function's arguments have 32. The model
    stores `metadata`.
    """
    with _undo_patches():
        typed_inputs = [(*pair, str(x.dtype)) for pair, x in zip(inputs, arguments, strict=True)]
        try:
            converter = importlib.import_module("jax2onnx")
        except ImportError as error:
            raise FdgError(
                f"ONNX needs jax2onnx, which is not installed ({error}): pip install 'fdg[onnx]'"
            ) from error
        try:
            with _provide_not_mapped(), _silence_logs():
                model = converter.to_onnx(
                    lambda *args: tuple(_evaluate_inlined(jax.make_jaxpr(function)(*args), args)),
                    list(arguments),
                    model_name=name,
                    input_names=[_inner_name(*x) for x in typed_inputs],
                    output_names=[_inner_name(x.name, x.dtype, x.program_dtype) for x in outputs],
                )
                _insert_casts(model, typed_inputs, outputs)
                importlib.import_module("onnx").helper.set_model_props(model, dict(metadata))
                content = model.SerializeToString()
        except Exception as error:  # the converter may raise anything for unknown operations
            raise FdgError(f"{name} cannot be written as ONNX: {one_line(error)}: use a .jax file") from error
    return content


def _inner_name(name: str, dtype: str, program_dtype: str) -> str:
    """The name of an input or output inside the model; it differs from `name` if the dtypes differ."""
    return name if dtype == program_dtype else f"{name} as {program_dtype}"


def _insert_casts(model: Any, inputs: Sequence[tuple[str, str, str]], outputs: Sequence[Output]) -> None:
    """Inserts casts of a model's inputs and outputs from and to their declared dtypes, in place.

    `inputs` are triples: name, dtype of the model's input, dtype of the function's argument.
    """
    onnx = importlib.import_module("onnx")
    node, graph = onnx.helper.make_node, model.graph
    data_types = onnx.TensorProto.DataType
    float_names = {"float64": "DOUBLE", "float32": "FLOAT"}

    def type_code(dtype: str) -> int:
        return data_types.Value(float_names.get(dtype, dtype.upper()))

    input_casts, output_casts = [], []
    for tensor, (name, dtype, program_dtype) in zip(graph.input, inputs, strict=False):
        if dtype != program_dtype:
            input_casts.append(node("Cast", [name], [tensor.name], to=type_code(program_dtype)))
            tensor.name, tensor.type.tensor_type.elem_type = name, type_code(dtype)
    for tensor, (name, dtype, program_dtype, low, high) in zip(graph.output, outputs, strict=False):
        if dtype == program_dtype:
            continue
        bounds = [np.array(end, np.float64) for end in (low, high)] if dtype == "float64" else []
        value, target = tensor.name, f"{name} as {dtype}" if bounds else name
        output_casts.append(node("Cast", [value], [target], to=type_code(dtype)))
        for side, end in enumerate(bounds):  # replaces a value at the rounded bound by the exact bound
            value, target = target, name if side else f"{name} above"
            bound, rounded, equal = (f"{name} {word} {side}" for word in ("bound", "nearest", "at"))
            for key, array in ((bound, end), (rounded, end.astype(np.float32).astype(np.float64))):
                graph.initializer.append(onnx.numpy_helper.from_array(array, key))
            output_casts.append(node("Equal", [value, rounded], [equal]))
            output_casts.append(node("Where", [equal, bound, value], [target]))
        tensor.name, tensor.type.tensor_type.elem_type = name, type_code(dtype)
    nodes = [*input_casts, *graph.node, *output_casts]
    del graph.node[:]
    graph.node.extend(nodes)


@contextlib.contextmanager
def _silence_logs() -> Iterator[None]:
    """Silences jax2onnx's log messages about values without a type."""
    logger, root = logging.getLogger("onnx_ir"), logging.getLogger()
    level, handlers = logger.level, list(root.handlers)
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        root.handlers[:] = handlers  # removes a handler of jax2onnx that prints everything


# Libraries whose functions jax2onnx replaces.
_LIBRARIES = ("jax", "flax", "optax", "equinox")


@contextlib.contextmanager
def _undo_patches() -> Iterator[None]:
    """Undoes jax2onnx's patches of libraries, such as a `cumsum` that does not accept `cumsum(x, 0)`."""
    originals = {
        module: {key: value for key, value in vars(module).items() if callable(value)}
        for name, module in list(sys.modules.items())
        if name.split(".")[0] in _LIBRARIES and "_src" not in name and module is not None
    }
    try:
        yield
    finally:
        for module, functions in originals.items():
            for key, value in functions.items():
                if vars(module).get(key) is not value:
                    setattr(module, key, value)


def _evaluate_inlined(closed: Any, values: Sequence[Any]) -> list[Any]:
    """Evaluates a jaxpr, with the bodies of calls and of loops with one trip inlined.

    jax2onnx 0.13 supports no loops, and only simple operations in functions with custom gradients.
    """
    return jaxprs.evaluate_jaxpr(jaxprs.open_jaxpr(closed), jaxprs.constants_of(closed), values, _eval_eqn)


def _eval_eqn(eqn: core.JaxprEqn, operands: list[Any]) -> list[Any]:
    if eqn.primitive.name in _CALL_BODIES:
        return _evaluate_inlined(eqn.params[_CALL_BODIES[eqn.primitive.name]], operands)
    if eqn.primitive.name != "scan" or eqn.params["length"] != 1:
        return jaxprs.bind(eqn, operands)
    num_constants, num_carried = jaxprs.scan_sizes(eqn.params)
    rows = [jnp.squeeze(rows, axis=0) for rows in operands[num_constants + num_carried :]]
    results = _evaluate_inlined(eqn.params["jaxpr"], [*operands[: num_constants + num_carried], *rows])
    return [*results[:num_carried], *(jnp.expand_dims(row, 0) for row in results[num_carried:])]


@contextlib.contextmanager
def _provide_not_mapped() -> Iterator[None]:
    """Adds `batching.not_mapped`, which jax2onnx 0.13 uses in its `vmap` rules and JAX 0.10 has removed."""
    missing = not hasattr(batching, "not_mapped")
    if missing:
        setattr(batching, "not_mapped", None)  # noqa: B010 - JAX's types lack this name
    try:
        yield
    finally:
        if missing:
            delattr(batching, "not_mapped")
