"""Reads policies from files that `fdg.training.exporting` wrote, without the code that trained them.

The content of a file is checked before it is used.
"""

import hashlib
import io
import os
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fdg.arguments import checked
from fdg.errors import FdgError, one_line
from fdg.reading import json_object, read_bytes
from fdg.training.deployed import Deployed

FUNCTION, MEMORY, FACTS = "policy.jax", "memory.npz", "policy.json"  # members of a package, a zip file
CHECKSUM = "sha256:"  # a package's comment is this and the digest of all bytes before the digest
DIGITS = 64  # hexadecimal digits of the digest

_MAX_PACKAGE_BYTES = 4 << 30
_MIN_INFLATED_LIMIT = 64 << 20  # every package may inflate to this many bytes; a large one, eightfold

# Names of custom calls that a policy may contain: shape checks, random bits, linear algebra, never Python.
_ALLOWED_CALLS = re.compile(
    r"shape_assertion|Sharding|stablehlo\.dynamic_\w+|\w+_threefry2x32(_ffi)?"
    r"|(lapack|cusolver|hipsolver|cusparse)_\w+_ffi|Qr|LuDecomposition|Eigh|ApproxTopK|(mhlo\.)?topk"
)


class Exported(Deployed):
    """A policy read from a file: `policy(observation)`, like `run.policy`.

    Attributes:
      facts: the metadata in the file: arguments, results, spaces, environment, actions, versions.
    """

    def __init__(self, function: Any, memory: Sequence[np.ndarray], facts: dict[str, Any]):
        super().__init__(facts["environment"], facts["observation"], facts["action"])
        self.facts = facts
        self._function, self._initial_memory = jax.jit(function.call), list(memory)
        self._input_types = dict(zip(facts["arguments"], function.in_avals, strict=True))

    def _empty_memory(self, count: int) -> list[np.ndarray]:
        return [np.repeat(leaf, count, axis=0) for leaf in self._initial_memory]

    def __repr__(self) -> str:
        facts = self.facts
        return f"<Exported {facts['actions']} policy of {facts.get('algorithm')} on {facts['environment']}>"

    def __call__(self, observation: Any, start: Any = None, seed: int | None = None) -> Any:
        """An action for an observation, or actions for a batch of observations.

        Args:
          observation: as the environment returns it; see `run.policy`.
          start: bool, or `[N]` bools: whether an episode starts. None: only at the first call or a new `N`.
          seed: the seed of a sampled action; None: the number of previous calls.

        Raises:
          FdgError: the observation does not match the environment.
        """

        def call(arrays: Any, mask: Any, memory: Any, starts: Any) -> Any:
            arguments = [*arrays, *memory, *([starts] if self._initial_memory else [])]
            if "mask" in self._input_types:
                expected = (len(starts), *self._input_types["mask"].shape[1:])
                if mask is None or mask.shape != expected:
                    raise FdgError(
                        f"this policy needs an action mask of shape {list(expected)}: give an"
                        f" envs.MaskedObservation{'' if mask is None else f', not {list(mask.shape)}'}"
                    )
                arguments.insert(len(arrays), mask)
            if self.facts["actions"] == "sampled":
                number = self._calls if seed is None else seed
                if not 0 <= number < 2**32:
                    raise FdgError(f"seed={number}: give an integer from 0 to {2**32 - 1}")
                arguments.insert(0, np.uint32(number))
            results = self._function(*arguments)
            return results[: len(self._outputs)], list(results[len(self._outputs) :])

        return self._act(observation, start, call)


@checked
def load_exported(path: str | Path) -> Exported:
    """Loads a policy that `run.export` wrote, without the code that trained it.

    The file is checked first: its checksum (files of earlier versions have none), its inflated size, the
    names of the functions that it calls, and whether its metadata has the shapes of its program.

    Raises:
      FdgError: the file is not an exported policy, or is damaged.

    Example::

        policy = fdg.load_exported("policy.jax")
        action = policy(observation)
    """
    if os.path.isfile(os.path.join(path, "config.json")):
        raise FdgError(f"{path} is a run, not an exported policy: write fdg.load({str(path)!r})")
    content = read_bytes(path, _MAX_PACKAGE_BYTES)
    try:
        files = read_members(content, {FUNCTION, MEMORY, FACTS})
        arrays = read_members(files[MEMORY], None)
        memory = [np.load(io.BytesIO(arrays[name]), allow_pickle=False) for name in arrays]
    except FdgError as error:
        raise FdgError(f"{path} is not an exported policy: {error}") from None
    except Exception as error:  # zipfile and NumPy raise various types for invalid bytes
        fix = "give the .jax file that run.export or fdg.export wrote"
        if Path(path).suffix == ".onnx":
            fix = f"onnxruntime.InferenceSession({str(path)!r}) runs an ONNX file; this reads .jax files"
        raise FdgError(f"{path} is not an exported policy ({one_line(error)}): {fix}") from error
    label = f"{path}: {FACTS}"
    facts = json_object(files[FACTS], label)
    function = _deserialize(files[FUNCTION], facts, str(path))
    names = facts.get("arguments")
    if "action" not in facts and isinstance(names, list) and function.out_avals:  # of an earlier version
        action = function.out_avals[0]
        facts["action"] = {"shape": ["N", *action.shape[1:]], "dtype": str(action.dtype), "kind": "Discrete"}
        facts["arguments"] = [str(name).partition("[")[0] for name in names]
    memory_avals = function.in_avals[-1 - len(memory) : -1]  # the last argument is `start`
    memory = [_restore_dtype(*pair) for pair in zip_longest(memory, memory_avals[: len(memory)])]
    _check_facts(facts, function, memory, label)
    try:
        return Exported(function, memory, facts)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise FdgError(f"{label}: its spaces are invalid ({one_line(error)})") from error


def _restore_dtype(array: np.ndarray, aval: Any) -> np.ndarray:
    """An array in the program's dtype, if NumPy's file format lacks it (bfloat16) and stored bytes."""
    dtype = getattr(aval, "dtype", None)
    if array.dtype.kind != "V" or not isinstance(dtype, np.dtype) or array.dtype.itemsize != dtype.itemsize:
        return array
    return array.view(dtype)


def _deserialize(program: bytes, facts: Mapping[str, Any], path: str) -> Any:
    """Deserialises the program; raises `FdgError` if this JAX version cannot read it."""
    jax_version, convention = facts.get("jax"), facts.get("calling_convention")
    oldest = jax.export.minimum_supported_calling_convention_version
    newest = jax.export.maximum_supported_calling_convention_version
    reason = f"its calling convention is {convention}, and here {oldest} to {newest} are read"
    error = None
    if not isinstance(convention, int) or oldest <= convention <= newest:
        try:
            return _check_program(jax.export.deserialize(bytearray(program)))
        except FdgError as refusal:
            raise FdgError(f"{path} is not an exported policy: {refusal}") from None
        except Exception as cause:  # JAX raises various types for invalid bytes
            error, reason = cause, one_line(cause)
    if jax_version == jax.__version__ or not isinstance(jax_version, str):
        raise FdgError(f"{path} is not an exported policy ({reason})") from error
    raise FdgError(
        f"{path} was written by JAX {jax_version:.40}, which JAX {jax.__version__} cannot read ({reason}):"
        " JAX reads exports of up to six months older or three weeks newer versions: export again, or use"
        " that version"
    ) from error


def read_members(content: bytes, names: set[str] | None) -> dict[str, bytes]:
    """Reads a zip file; checks that its members are `names` (None: any) and that their size is bounded."""
    limit, contents = max(_MIN_INFLATED_LIMIT, 8 * len(content)), {}
    with zipfile.ZipFile(io.BytesIO(content)) as package:
        if package.comment:
            digest = hashlib.sha256(content[:-DIGITS]).hexdigest()
            if package.comment != (CHECKSUM + digest).encode():
                raise FdgError("it is damaged: its bytes do not match its checksum")
        entries = package.infolist()
        stored = [entry.filename for entry in entries]
        if len(set(stored)) < len(stored) or (names is not None and set(stored) != names):
            raise FdgError(f"it holds other files: {', '.join(sorted(stored)[:5]):.200}")
        size = sum(entry.file_size for entry in entries)
        if size > limit:
            raise FdgError(f"it has {len(content)} bytes that inflate to {size}, but the limit is {limit}")
        for entry in entries:
            if entry.flag_bits & 1 or entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise FdgError(f"{entry.filename[:60]} is encrypted, or its compression is not supported")
            with package.open(entry) as file:
                contents[entry.filename] = file.read(entry.file_size)
    return contents


def _check_facts(facts: Mapping[str, Any], function: Any, memory: Sequence[Any], label: str) -> None:
    """Checks that the metadata matches the function, since `Exported` relies on it."""
    observation_leaves = list(_description_leaves(facts.get("observation"), label, "observation"))
    action_leaves = list(_description_leaves(facts.get("action"), label, "action"))
    names = facts.get("arguments")
    is_sampled = facts.get("actions") == "sampled"
    expected_names = ["seed"] if is_sampled else []
    expected_names += [str(leaf.get("name", "observation")) for leaf in observation_leaves]
    expected_names += ["mask"] if isinstance(names, list) and "mask" in names else []
    expected_names += [f"memory_{i}" for i in range(len(memory))] + (["start"] if memory else [])
    inputs, outputs = function.in_avals, function.out_avals
    structure = jax.tree.structure((tuple(inputs), {}))
    if names != expected_names or len(inputs) != len(names) or function.in_tree != structure:
        raise FdgError(f"{label}: its arguments are not those of its program")
    if facts.get("actions") not in ("greedy", "sampled") or len(outputs) != len(action_leaves) + len(memory):
        raise FdgError(f"{label}: its actions or results do not match its program")
    if wrong := [leaf.shape for leaf in memory if leaf.shape[:1] != (1,)]:
        raise FdgError(f"{label}: its memory has shape {list(wrong[0])}, expected [1, ...]: export again")
    memory_leaves = [{"shape": ["N", *leaf.shape[1:]], "dtype": str(leaf.dtype)} for leaf in memory]
    observation_avals = inputs[int(is_sampled) : int(is_sampled) + len(observation_leaves)]
    memory_avals = inputs[len(inputs) - 1 - len(memory) : -1] if memory else ()
    pairs = zip([*observation_leaves, *memory_leaves], [*observation_avals, *memory_avals], strict=True)
    results = zip([*action_leaves, *memory_leaves], outputs, strict=True)
    for leaf, aval in [*pairs, *results]:
        shape, dtype = leaf["shape"][1:], leaf.get("jax_dtype", leaf["dtype"])
        is_batch = len(aval.shape) == 1 + len(shape) and not isinstance(aval.shape[0], int)
        if not is_batch or tuple(shape) != tuple(aval.shape[1:]) or dtype != str(aval.dtype):
            raise FdgError(
                f"{label}: {dtype} {shape}, where its program has {aval.str_short()}: export the policy again"
            )


def _description_leaves(facts: Any, label: str, what: str) -> Iterator[Mapping[str, Any]]:
    """The leaves of a description (`envs.native`), each with a shape and a dtype."""
    match facts:
        case {"parts": dict() | list() as parts} if parts:
            for part in parts.values() if isinstance(parts, dict) else parts:
                yield from _description_leaves(part, label, what)
        case {"shape": ["N", *_], "dtype": str()}:
            yield facts
        case _:
            raise FdgError(
                f"{label}: the description of its {what} has {facts!r:.60} where a shape [N, ...] and a dtype"
                " are expected: export the policy again"
            )


def _check_program(exported: Any) -> Any:
    """Refuses a program that does more than compute, since the file is untrusted; else returns it.

    XLA runs custom calls by name with arguments from the program, such as a pointer to a Python function;
    `infeed` would wait forever.
    """
    text = exported.mlir_module()
    calls = re.findall(r"\bcustom_call @\"?([^\"(]+)\"?\(", text)
    forbidden = [name for name in calls if not _ALLOWED_CALLS.fullmatch(name)]
    forbidden += re.findall(r"stablehlo\.(infeed|outfeed|send|recv)\b", text)
    if forbidden or len(calls) != text.count("custom_call"):
        call = repr(forbidden[0][:60]) if forbidden else "a function whose name cannot be read"
        raise FdgError(f"its program calls {call}, which no exported policy does")
    return exported
