"""Policies read from files that `fdg.training.exporting` wrote; the code that trained them is not needed.

The content of a file is checked before it is used.
"""

import hashlib
import io
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fdg.arguments import checked
from fdg.errors import FdgError, one_line
from fdg.reading import json_object, read_bytes
from fdg.training.deployed import Deployed

FUNCTION, MEMORY, FACTS = "policy.jax", "memory.npz", "policy.json"  # members of a package
CHECKSUM = "sha256:"  # a package's comment, followed by that of all bytes before the digest
DIGITS = 64

_PACKAGE_BYTES = 4 << 30
_ROOM = 64 << 20  # maximum inflated bytes of a small package; of a large one eight times its size

# Functions that a policy may call by name: checks of shapes, random bits, linear algebra; none call Python.
_CALLED = re.compile(
    r"shape_assertion|Sharding|stablehlo\.dynamic_\w+|\w+_threefry2x32(_ffi)?"
    r"|(lapack|cusolver|hipsolver|cusparse)_\w+_ffi|Qr|LuDecomposition|Eigh|ApproxTopK|(mhlo\.)?topk"
)


class Exported(Deployed):
    """A policy read from a file: `policy(observation)`, like `run.policy`.

    Attributes:
      facts: the file's metadata: arguments, results, spaces, environment, actions, versions.
    """

    def __init__(self, function: Callable[..., Any], memory: Sequence[np.ndarray], facts: dict[str, Any]):
        super().__init__(facts["environment"], facts["observation"], facts.get("action"))
        self.facts = facts
        self._function, self._empty = jax.jit(function), list(memory)

    def _empty_memory(self, count: int) -> list[np.ndarray]:
        return [np.repeat(leaf, count, axis=0) for leaf in self._empty]

    def __repr__(self) -> str:
        facts = self.facts
        return f"<Exported {facts['actions']} policy of {facts.get('algorithm')} on {facts['environment']}>"

    def __call__(self, observation: Any, start: Any = None, seed: int | None = None) -> Any:
        """An action for an observation, or actions for a batch of them.

        Args:
          observation: as the environment returns it; see `run.policy`.
          start: bool, or `[N]`: whether an episode starts. None: at the first call, or if `N` changes.
          seed: the seed of a sampled action; None for the number of calls so far.

        Raises:
          FdgError: the observation does not match the environment.
        """

        def call(arrays: Any, mask: Any, memory: Any, begins: Any) -> Any:
            arguments = [*arrays, *memory, *([begins] if self._empty else [])]
            if "mask" in self.facts["arguments"]:
                if mask is None:
                    raise FdgError(
                        "this policy asks which actions are allowed: give an envs.MaskedObservation"
                    )
                arguments.insert(len(arrays), mask)
            if self.facts["actions"] == "sampled":
                arguments.insert(0, np.uint32(self._calls if seed is None else seed))
            results = self._function(*arguments)
            first = len(results) - len(memory)
            return results[:first], list(results[first:])

        return self._answer(observation, start, call)


@checked
def load_exported(path: str | Path) -> Exported:
    """Loads a policy that `run.export` wrote; the code that trained it is not needed.

    The file is checked first: its checksum (if it has one; files of earlier versions have none), its inflated
    size, the functions that it calls by name, and its shapes against those of its program.

    Raises:
      FdgError: the file is not an exported policy, or is damaged.

    Example::

        policy = fdg.load_exported("policy.jax")
        action = policy(observation)
    """
    if os.path.isfile(os.path.join(path, "config.json")):
        raise FdgError(f"{path} is a run, and no exported policy: write fdg.load({str(path)!r})")
    content = read_bytes(path, _PACKAGE_BYTES)
    try:
        parts = members(content, {FUNCTION, MEMORY, FACTS})
        arrays = members(parts[MEMORY], None)
        memory = [np.load(io.BytesIO(arrays[name]), allow_pickle=False) for name in arrays]
    except FdgError as error:
        raise FdgError(f"{path} is no exported policy: {error}") from None
    except Exception as error:  # zipfile and NumPy raise various types for invalid bytes
        fix = "give the .jax file that run.export or fdg.export wrote"
        if Path(path).suffix == ".onnx":
            fix = f"onnxruntime.InferenceSession({str(path)!r}) runs an ONNX file; this reads .jax files"
        raise FdgError(f"{path} is no exported policy ({one_line(error)}): {fix}") from error
    where = f"{path}: {FACTS}"
    facts = json_object(parts[FACTS], where)
    function = _deserialized(parts[FUNCTION], facts, str(path))
    _check_facts(facts, function, memory, where)
    try:
        return Exported(function.call, memory, facts)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise FdgError(f"{where}: its spaces are none ({one_line(error)})") from error


def _deserialized(program: bytes, facts: Mapping[str, Any], path: str) -> Any:
    """Deserialises the program. JAX versions far from the one that wrote it cannot read it."""
    wrote, version = facts.get("jax"), facts.get("calling_convention")
    oldest = jax.export.minimum_supported_calling_convention_version
    newest = jax.export.maximum_supported_calling_convention_version
    reason = f"its calling convention is {version}, and here {oldest} to {newest} are read"
    error = None
    if not isinstance(version, int) or oldest <= version <= newest:
        try:
            return _checked(jax.export.deserialize(bytearray(program)))
        except FdgError as refused:
            raise FdgError(f"{path} is no exported policy: {refused}") from None
        except Exception as failed:  # JAX raises various types for invalid bytes
            error, reason = failed, one_line(failed)
    if wrote == jax.__version__ or not isinstance(wrote, str):
        raise FdgError(f"{path} is no exported policy ({reason})") from error
    raise FdgError(
        f"{path} was written by JAX {wrote:.40}, which JAX {jax.__version__} does not read ({reason}): it"
        " reads what JAX wrote up to six months before it, or three weeks after: export again, or use that"
    ) from error


def members(content: bytes, names: set[str] | None) -> dict[str, bytes]:
    """Reads the members of a zip, no further than the bounded sizes in its directory."""
    most, found = max(_ROOM, 8 * len(content)), {}
    with zipfile.ZipFile(io.BytesIO(content)) as package:
        if package.comment:
            digest = hashlib.sha256(content[:-DIGITS]).hexdigest()
            if package.comment != (CHECKSUM + digest).encode():
                raise FdgError("it is damaged: its bytes are not those that were written")
        members = package.infolist()
        there = [one.filename for one in members]
        if len(set(there)) < len(there) or (names is not None and set(there) != names):
            raise FdgError(f"it holds other files: {', '.join(sorted(there)[:5]):.200}")
        size = sum(one.file_size for one in members)
        if size > most:
            raise FdgError(f"it has {len(content)} bytes that inflate to {size}, and at most {most} are read")
        for one in members:
            if one.flag_bits & 1 or one.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise FdgError(f"{one.filename[:60]} is encrypted, or compressed in a way that is not read")
            with package.open(one) as opened:
                found[one.filename] = opened.read(one.file_size)
    return found


def _check_facts(facts: Mapping[str, Any], function: Any, memory: Sequence[Any], where: str) -> None:
    """Checks that the metadata matches the function: `Exported` relies on it."""
    seen = list(_arrays(facts.get("observation"), where))
    done = list(_arrays(facts.get("action", {"shape": ["N"], "dtype": ""}), where))
    named = facts.get("arguments")
    drawn = facts.get("actions") == "sampled"
    expected = [*(["seed"] if drawn else []), *(str(leaf.get("name", "observation")) for leaf in seen)]
    expected += ["mask"] if isinstance(named, list) and "mask" in named else []
    expected += [f"memory_{i}" for i in range(len(memory))] + (["start"] if memory else [])
    given = [str(name) for name in named] if isinstance(named, list) else []
    if "action" not in facts:  # an earlier version
        given = [name.partition("[")[0] for name in given]
    inputs, outputs = function.in_avals, function.out_avals
    flat = jax.tree.structure((tuple(inputs), {}))
    if given != expected or len(inputs) != len(expected) or function.in_tree != flat:
        raise FdgError(f"{where}: its arguments are not those of its program")
    if facts.get("actions") not in ("greedy", "sampled") or len(outputs) != len(done) + len(memory):
        raise FdgError(f"{where}: its actions or results do not match its program")
    held = [{"shape": ["N", *leaf.shape[1:]], "dtype": str(leaf.dtype)} for leaf in memory]
    first = inputs[int(drawn) : int(drawn) + len(seen)]
    last = inputs[len(inputs) - 1 - len(memory) : -1] if memory else ()
    pairs = zip([*seen, *held], [*first, *last], strict=True)
    results = zip(done, outputs[: len(done)], strict=True) if "action" in facts else ()
    for leaf, aval in [*pairs, *results]:
        shape, dtype = leaf["shape"][1:], leaf.get("jax_dtype", leaf["dtype"])
        if tuple(shape) != tuple(aval.shape[1:]) or dtype != str(aval.dtype):
            raise FdgError(f"{where}: {dtype} {shape}, where its program has {aval.str_short()}")


def _arrays(facts: Any, where: str) -> Iterator[Mapping[str, Any]]:
    """The arrays of a description (`envs.native`), with their shapes and dtypes."""
    match facts:
        case {"parts": dict(parts)} if parts:
            for part in parts.values():
                yield from _arrays(part, where)
        case {"parts": list(parts)} if parts:
            for part in parts:
                yield from _arrays(part, where)
        case {"shape": ["N", *_], "dtype": str()}:
            yield facts
        case _:
            raise FdgError(f"{where}: has no shapes and dtypes of an observation")


def _checked(exported: Any) -> Any:
    """Checks that a program only computes, since the file is untrusted.

    XLA runs custom calls by name with arguments from the program, such as a pointer to a Python function;
    `infeed` waits forever.
    """
    text = exported.mlir_module()
    named = re.findall(r"\bcustom_call @\"?([^\"(]+)\"?\(", text)
    other = [name for name in named if not _CALLED.fullmatch(name)]
    other += re.findall(r"stablehlo\.(infeed|outfeed|send|recv)\b", text)
    if other or len(named) != text.count("custom_call"):
        called = repr(other[0][:60]) if other else "something by a name that is hidden"
        raise FdgError(f"its program calls {called}, which no exported policy does")
    return exported
