"""Exports a trained policy to a file that runs without the training code: `jax.export`, or ONNX.

The exported function computes `(observation, mask, *memory, start) -> (action, *memory)`; with sampled
actions, its first argument is `seed`. Observations and actions have the format of the environment's library
(`envs.native`). Parameters, normalisers and action bounds are constants in the function. A mask is an
argument only if a JAX environment masks actions, and `start` only if the policy has a memory to reset. A
structured observation or action is several arrays, in the order of its space, without privileged parts. The
number of environments, `N`, is symbolic.

A description of arguments and results is written to a `.json` file of the same name and into the file.
"""

import hashlib
import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fdg
from envs import features_and_mask
from envs.native import Description, Native, leaves, native
from fdg.errors import FdgError, one_line
from fdg.files import check_writable, writing
from fdg.reading import read_json
from fdg.training.deployed import act_natively
from fdg.training.exported import CHECKSUM, DIGITS, FACTS, FUNCTION, MEMORY
from fdg.training.onnx import Output, to_onnx

FORMATS = ("jax", "onnx")
_DESCRIPTION_PREFIX = "a policy of fdg"  # beginning of the entry "what" of a description
_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")  # on which an exported program runs


def export(
    algorithm: Any, state: Any, path: Path, format: str | None, greedy: bool = True, run: str | None = None
) -> Path:
    """Writes the policy of one agent to `path`, and its description to a `.json` file of the same name.

    `format` is one of `FORMATS`; None: by the ending of `path`. `run` is the run's id, for the description.
    """
    kind = path.suffix.removeprefix(".") if format is None else format
    if kind not in FORMATS:
        if format is not None:
            raise FdgError(f"format={format!r}: it must be one of {', '.join(FORMATS)}")
        endings = " or ".join(f".{name}" for name in FORMATS)
        raise FdgError(f"{path}: an exported policy's file ends in {endings}: rename it, or give format")
    if (ending := path.suffix.removeprefix(".")) in FORMATS and ending != kind:
        raise FdgError(f"format={kind}: {path} has the ending of another format: leave out one of them")
    description = path.with_suffix(".json")
    check_writable(path)
    _check_description_file(path, description)
    program = _Program(algorithm, state)
    facts = program.facts(path.name, kind, greedy, run)
    content = _jax_file(program, facts, greedy) if kind == "jax" else _onnx_file(program, facts, greedy)
    with writing(path) as file:
        file.write(content)
    with writing(description) as file:
        file.write(json.dumps(facts, indent=2).encode() + b"\n")
    return path


def _check_description_file(path: Path, description: Path) -> None:
    """Checks that the description would not overwrite another file, such as a run's `config.json`."""
    if path == description:
        raise FdgError(f"{path}: this name is for the description of a policy: give another ending")
    check_writable(description)
    try:
        what = str(read_json(description).get("what"))
    except FdgError:
        what = ""
    if description.exists() and not what.startswith(_DESCRIPTION_PREFIX):
        raise FdgError(
            f"{path}: the policy's description would be written to {description}, which exists and is no such"
            " description: give the policy another name"
        )


# Endings of files, which `export_folder` refuses for a folder.
_FILE_SUFFIXES = (".onnx", ".jax", ".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt", ".json", ".zip")


def export_folder(algorithm: Any, state: Any, path: Path, format: str | None) -> Path:
    """Exports by the algorithm's method `export(state, path)`, which writes a folder, as language models do.

    The algorithm's attribute `export_formats` has functions for other formats, by name.
    """
    exporters = {None: algorithm.export, **getattr(algorithm, "export_formats", {})}
    name = type(algorithm).__name__
    if format not in exporters:
        names = ", or ".join(["none", *(repr(key) for key in exporters if key)])
        raise FdgError(f"format={format!r}: {name} is exported in its own format: give {names}")
    if path.exists() and not path.is_dir():
        raise FdgError(f"{path} is a file: {name} is exported as a folder: give the path of a folder")
    if path.suffix.lower() in _FILE_SUFFIXES:
        raise FdgError(
            f"{path} looks like a file, but {name} is exported as a folder: give {path.with_suffix('')}"
        )
    exporters[format](jax.device_get(state), path)
    return path


class _Program:
    """An actor as functions of flat lists of arrays: files can store these, but no custom pytrees.

    Attributes:
      memory: the arrays `[1, ...]` of the initial memory of one environment.
      inputs: descriptions of the function's arguments, in order.
      outputs: descriptions of the function's results, in order.
    """

    def __init__(self, algorithm: Any, state: Any):
        self.algorithm, self._state, self._native = algorithm, jax.device_get(state), native(algorithm.env)
        memory_arrays, self._structure = jax.tree.flatten(
            (self._native.initial_memory(1), algorithm.actor(state).memory(1))
        )
        self.memory = [np.asarray(leaf) for leaf in memory_arrays]
        self._memory_leaves = [
            _describe_array(f"memory_{i}", x.shape[1:], str(x.dtype)) for i, x in enumerate(self.memory)
        ]
        self._observation_leaves, action_leaves = (
            [leaf for _, leaf in leaves(x)] for x in (self._native.observation, self._native.action)
        )
        limits = np.iinfo(np.int32)
        for leaf in action_leaves:
            starts = np.ravel(leaf.get("start", 0))
            if min(starts) < limits.min or max(starts) > limits.max:
                raise FdgError(
                    f"the policy of {type(algorithm).__name__} cannot be exported: the actions of"
                    f" {algorithm.env.name} begin at {max(starts, key=abs)}, beyond int32: lower start"
                )
        self._mask_leaves = _mask_arguments(algorithm.env, self._native)
        start_leaf = [_describe_array("start", (), "bool")] if self.memory else []
        self.inputs = [*self._observation_leaves, *self._mask_leaves, *self._memory_leaves, *start_leaf]
        self.outputs = [
            *action_leaves,
            *({**leaf, "name": f"next_{leaf['name']}"} for leaf in self._memory_leaves),
        ]

    def facts(self, file: str, kind: str, greedy: bool, run: str | None) -> dict[str, Any]:
        """The content of the description."""
        reader = {"jax": "fdg.load_exported, or jax.export.deserialize", "onnx": "onnxruntime"}[kind]
        return {
            "what": f"{_DESCRIPTION_PREFIX}: {file} is read by {reader}",
            "arguments": [*([] if greedy else ["seed"]), *(leaf["name"] for leaf in self.inputs)],
            "results": [leaf["name"] for leaf in self.outputs],
            "observation": self._native.observation,
            "action": self._native.action,
            **{leaf["name"]: leaf for leaf in self._mask_leaves},
            "memory": self._memory_leaves,
            "units": "those of the environment: the program contains normalisation and bounds",
            "actions": "greedy" if greedy else "sampled",
            "environment": self.algorithm.env.name,
            "algorithm": type(self.algorithm).__name__,
            "run": run,
            "fdg": fdg.__version__,
            "jax": jax.__version__,
        }

    def arguments(self, count: Any) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the arguments, for `count` environments."""
        return [jax.ShapeDtypeStruct((count, *leaf["shape"][1:]), leaf["jax_dtype"]) for leaf in self.inputs]

    def act(self, arguments: Sequence[Any], keys: Any, greedy: bool) -> Any:
        """The results `(*action, *memory)` for arguments in the order of `inputs`."""
        num_arrays = len(self._observation_leaves)
        arrays, further_arguments = arguments[:num_arrays], list(arguments[num_arrays:])
        mask = further_arguments.pop(0) if self._mask_leaves else None
        start = further_arguments.pop() if self.memory else jnp.zeros(arguments[0].shape[0], bool)
        memory = jax.tree.unflatten(self._structure, further_arguments)
        actor = self.algorithm.actor(self._state)
        action, memory = act_natively(self._native, actor, arrays, mask, memory, start, keys, greedy)
        return *action, *jax.tree.leaves(memory)

    def act_greedily(self, *arguments: Any) -> Any:
        """The exported function with greedy actions."""
        # Greedy actions do not use these keys.
        key_data = jnp.zeros((arguments[0].shape[0], 2), jnp.uint32)
        return self.act(arguments, jax.random.wrap_key_data(key_data, impl="threefry2x32"), True)

    def act_sampled(self, seed: Any, *arguments: Any) -> Any:
        """The exported function with sampled actions; callers give a different seed at every step."""
        key = jax.random.key(seed, impl="threefry2x32")
        keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(arguments[0].shape[0]))
        return self.act(arguments, keys, False)


def _describe_array(name: str, shape: Sequence[int], dtype: str) -> Description:
    return {"name": name, "shape": ["N", *shape], "dtype": dtype, "jax_dtype": dtype}


def _mask_arguments(env: Any, spec: Native) -> list[Description]:
    """The mask as a separate argument; empty if there is no mask, or if observations contain it."""
    arrays = [
        jax.ShapeDtypeStruct((1, *leaf["shape"][1:]), leaf["jax_dtype"])
        for _, leaf in leaves(spec.observation)
    ]
    if features_and_mask(jax.eval_shape(lambda *arrays: spec.encode(arrays, None), *arrays))[1] is not None:
        return []
    _, observation = jax.eval_shape(lambda: env.reset(jax.random.split(jax.random.key(0), 1)))
    _, mask = features_and_mask(observation)
    return [] if mask is None else [_describe_array("mask", mask.shape[1:], "bool")]


def _jax_file(program: _Program, facts: dict[str, Any], greedy: bool) -> bytes:
    """A zip with the serialised function, the initial memory and the description."""
    (batch,) = jax.export.symbolic_shape("N")
    arguments = program.arguments(batch)
    if not greedy:
        arguments.insert(0, jax.ShapeDtypeStruct((), jnp.uint32))
    function = program.act_greedily if greedy else program.act_sampled
    try:
        exported = jax.export.export(jax.jit(function), platforms=_PLATFORMS)(*arguments)
    except Exception as error:  # a network may not lower for a symbolic number of environments
        name = type(program.algorithm).__name__
        raise FdgError(f"the policy of {name} cannot be exported: {one_line(error)}") from error
    facts["calling_convention"] = exported.calling_convention_version
    file, memory = io.BytesIO(), io.BytesIO()
    np.savez(memory, *program.memory)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as package:
        package.writestr(FUNCTION, exported.serialize())
        package.writestr(MEMORY, memory.getvalue())
        package.writestr(FACTS, json.dumps(facts, indent=2) + "\n")
        package.comment = (CHECKSUM + DIGITS * "0").encode()
    content = file.getvalue()[:-DIGITS]
    return content + hashlib.sha256(content).hexdigest().encode()


def _onnx_file(program: _Program, facts: Mapping[str, Any], greedy: bool) -> bytes:
    if not greedy:
        raise FdgError("ONNX has no random keys: export greedy actions, or to JAX's format")
    metadata = {name: value if isinstance(value, str) else json.dumps(value) for name, value in facts.items()}
    return to_onnx(
        program.act_greedily,
        program.arguments("N"),
        f"{type(program.algorithm).__name__}_policy",
        inputs=[(leaf["name"], leaf["dtype"]) for leaf in program.inputs],
        outputs=[
            Output(leaf["name"], leaf["dtype"], leaf["jax_dtype"], leaf.get("low"), leaf.get("high"))
            for leaf in program.outputs
        ],
        metadata=metadata,
    )
