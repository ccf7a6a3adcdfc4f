"""A trained policy as a file that needs no code of its run: JAX's serialised functions, and ONNX.

Either computes `(observation, mask, *memory, start) -> (action, *memory)`, with parameters, normalisers and
the bounds of actions in it; there is a mask only where actions can be forbidden, and a start only where there
is a memory to forget. An observation in parts is as many arguments, in the order of their names; what only
critics see is none of them. How many environments `N` there are is left open.
"""

import dataclasses
import hashlib
import io
import json
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs import MaskedObservation, composite, features_and_mask, num_agents
from fdg.arguments import checked
from fdg.errors import FdgError, one_line
from fdg.reading import json_object, read_bytes
from fdg.training.onnx import to_onnx
from fdg.training.writable import check_writable, writing

FORMATS = ("jax", "onnx")
_FUNCTION, _MEMORY, _FACTS = "policy.jax", "memory.npz", "policy.json"
_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
_PACKAGE_BYTES = 4 << 30
_ROOM = 64 << 20  # bytes that a small package may inflate to; a large one to eight times its size
_CHECKSUM = "sha256:"  # a package's comment, followed by that of all bytes before the digest
_DIGITS = 64

# What a policy may call by name: checks of shapes, random bits, linear algebra. Nothing that calls Python.
_CALLED = re.compile(
    r"shape_assertion|Sharding|stablehlo\.dynamic_\w+|\w+_threefry2x32(_ffi)?"
    r"|(lapack|cusolver|hipsolver|cusparse)_\w+_ffi|Qr|LuDecomposition|Eigh|ApproxTopK|(mhlo\.)?topk"
)


def export(algorithm: Any, state: Any, path: Path, format: str | None, greedy: bool = True) -> Path:
    """Writes the policy of one agent.

    Args:
      algorithm: how it acts, and where.
      state: its own, of one agent.
      path: the file; `.onnx` makes ONNX of it unless `format` says otherwise.
      format: `jax` or `onnx`; None: by the file's ending.
      greedy: the most probable action; else one drawn from a seed, a further argument (`jax` only).

    Raises:
      FdgError: there is no such format, its package is missing, or it cannot express this network.
    """
    kind = format or ("onnx" if path.suffix == ".onnx" else "jax")
    if kind not in FORMATS:
        raise FdgError(f"format={format!r}: it must be one of {', '.join(FORMATS)}")
    check_writable(path)
    parts = _Parts.of(algorithm, state)
    content = _jax_file(parts, greedy) if kind == "jax" else _onnx_file(parts, greedy)
    with writing(path):
        path.write_bytes(content)
    return path


def export_own_way(algorithm: Any, state: Any, path: Path, format: str | None) -> Path:
    """Writes what an algorithm's own `export(state, path)` does: a folder, such as that of a language model.

    Other formats are what it has in `export_formats`, functions of the same arguments by name.

    Raises:
      FdgError: it has no such format, or there is a file in the place of the folder.
    """
    ways = {None: algorithm.export, **getattr(algorithm, "export_formats", {})}
    if format not in ways:
        others = ", or ".join(["none", *(repr(name) for name in ways if name)])
        name = type(algorithm).__name__
        raise FdgError(f"format={format!r}: {name} is exported in its own, so give {others}")
    if path.exists() and not path.is_dir():
        raise FdgError(f"{path} is a file: {type(algorithm).__name__} is exported as a folder, so name one")
    ways[format](jax.device_get(state), path)
    return path


@dataclasses.dataclass(frozen=True)
class _Parts:
    """An actor taken apart into what a file can hold: functions of arrays, without pytrees of our own."""

    algorithm: Any
    state: Any
    parts: Sequence[tuple[str, tuple[int, ...], Any]]  # of what actors see: where, shape of one, and dtype
    agents: tuple[int, ...]  # axis of agents, if there is one
    mask: tuple[int, ...] | None  # shape of one, where the environment gives masks
    memory: Sequence[np.ndarray]  # of one environment, [1, ...] each
    structure: Any

    @classmethod
    def of(cls, algorithm: Any, state: Any) -> "_Parts":
        env = algorithm.env
        count = num_agents(env)
        agents = () if count is None else (count,)
        space = composite.public(env.observation_space)
        memory, structure = jax.tree.flatten(algorithm.actor(state).memory(1))
        return cls(
            algorithm,
            jax.device_get(state),
            [
                (where, (*agents, *part.shape), jnp.dtype(part.dtype))
                for where, part in composite.parts(space)
            ],
            agents,
            _mask_shape(env),
            [np.asarray(leaf) for leaf in memory],
            structure,
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Of the function's arguments, in order."""
        held = tuple(f"memory_{i}" for i in range(len(self.memory)))
        return (
            *self.observed,
            *(() if self.mask is None else ("mask",)),
            *held,
            *(("start",) if held else ()),
        )

    @property
    def observed(self) -> tuple[str, ...]:
        """Names of the observation's parts, `observation` if it is one array."""
        return tuple(f"observation{where}" for where, _, _ in self.parts)

    def arguments(self, count: Any) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the arguments, for `count` environments."""
        shapes = [(shape, dtype) for _, shape, dtype in self.parts]
        if self.mask is not None:
            shapes.append((self.mask, jnp.bool_))
        if self.memory:
            shapes += [(leaf.shape[1:], leaf.dtype) for leaf in self.memory]
            shapes.append(((), jnp.bool_))
        return [jax.ShapeDtypeStruct((count, *shape), dtype) for shape, dtype in shapes]

    def act(self, arguments: Sequence[Any], keys: Any, greedy: bool) -> Any:
        given = dict(zip(self.names, arguments, strict=True))
        space = self.algorithm.env.observation_space
        count = arguments[0].shape[0]
        structure = jax.tree.structure(composite.tree(composite.public(space)))
        seen = jax.tree.unflatten(structure, [given[name] for name in self.observed])
        observation = composite.with_zeros(space, seen, (count, *self.agents))
        start = given.get("start", jnp.zeros(count, bool))
        if self.mask is not None:
            observation = MaskedObservation(observation, given["mask"])
        held = jax.tree.unflatten(self.structure, [given[name] for name in self.names if "memory" in name])
        action, held = self.algorithm.actor(self.state).act(held, observation, start, keys, greedy)
        return action, *jax.tree.leaves(held)

    def greedy(self, *arguments: Any) -> Any:
        """The function of a file."""
        # Greedy actions draw nothing: these keys are never looked at.
        words = jnp.zeros((arguments[0].shape[0], 2), jnp.uint32)
        return self.act(arguments, jax.random.wrap_key_data(words, impl="threefry2x32"), True)

    def sampled(self, seed: Any, *arguments: Any) -> Any:
        """The same with actions drawn from a seed, which has to be another at every step."""
        key = jax.random.key(seed, impl="threefry2x32")
        keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(arguments[0].shape[0]))
        return self.act(arguments, keys, False)


def _mask_shape(env: Any) -> tuple[int, ...] | None:
    """Shape of the mask of one observation; None where the environment gives none. Nothing is run."""
    _, observation = jax.eval_shape(lambda: env.reset(jax.random.split(jax.random.key(0), 1)))
    _, mask = features_and_mask(observation)
    return None if mask is None else tuple(mask.shape[1:])


def _jax_file(parts: _Parts, greedy: bool) -> bytes:
    """A zip of the serialised function, the empty memory, and what a reader should know."""
    (batch,) = jax.export.symbolic_shape("N")
    arguments = parts.arguments(batch)
    if not greedy:
        arguments.insert(0, jax.ShapeDtypeStruct((), jnp.uint32))
    function = parts.greedy if greedy else parts.sampled
    try:
        exported = jax.export.export(jax.jit(function), platforms=_PLATFORMS)(*arguments)
    except Exception as error:  # whatever in a network does not lower for an open number of environments
        name = type(parts.algorithm).__name__
        raise FdgError(f"the policy of {name} cannot be exported: {one_line(error)}") from error
    facts = {
        "what": "a policy of fdg: jax.export.deserialize(policy.jax).call(...)",
        "arguments": [*([] if greedy else ["seed"]), *parts.names],
        "results": ["action", *(name for name in parts.names if "memory" in name)],
        "observation": _facts_of(composite.public(parts.algorithm.env.observation_space), parts.agents),
        "actions": "greedy" if greedy else "sampled",
        "environment": parts.algorithm.env.name,
        "algorithm": type(parts.algorithm).__name__,
        "jax": jax.__version__,
    }
    file, memory = io.BytesIO(), io.BytesIO()
    np.savez(memory, *parts.memory)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as package:
        package.writestr(_FUNCTION, exported.serialize())
        package.writestr(_MEMORY, memory.getvalue())
        package.writestr(_FACTS, json.dumps(facts, indent=2) + "\n")
        package.comment = (_CHECKSUM + _DIGITS * "0").encode()
    content = file.getvalue()[:-_DIGITS]
    return content + hashlib.sha256(content).hexdigest().encode()


def _facts_of(space: Any, agents: tuple[int, ...]) -> dict[str, Any]:
    """A space as a file describes it: shape and dtype, or parts by name or position."""
    match composite.tree(space):
        case dict(spaces):
            return {"parts": {name: _facts_of(part, agents) for name, part in spaces.items()}}
        case tuple(spaces):
            return {"parts": [_facts_of(part, agents) for part in spaces]}
    return {"shape": ["N", *agents, *space.shape], "dtype": str(jnp.dtype(space.dtype))}


def _arrays(facts: Mapping[str, Any], observation: Any, where: str = "") -> list[np.ndarray]:
    """The parts of an observation as arrays, in the order of a file's arguments.

    Raises:
      FdgError: a part is missing, or has another shape.
    """
    if "parts" not in facts:
        array, shape = np.asarray(observation, facts["dtype"]), tuple(facts["shape"][1:])
        if array.shape != shape and array.shape[1:] != shape:
            raise FdgError(
                f"an observation{where} of shape {list(array.shape)}: those of this policy are {list(shape)}"
            )
        return [array[None] if array.shape == shape else array]
    inner = facts["parts"]
    parts = inner.items() if isinstance(inner, dict) else enumerate(inner)
    arrays = []
    for name, part in parts:
        try:
            value = observation[name]
        except (KeyError, IndexError, TypeError):
            raise FdgError(
                f"an observation{where} has no part {name!r}: this policy sees {list(inner)}"
            ) from None
        arrays += _arrays(part, value, f"{where}[{name!r}]")
    return arrays


def _is_single(facts: Mapping[str, Any], observation: Any) -> bool:
    """Whether an observation is of one environment, without an axis of them; by its first part."""
    while "parts" in facts:
        name = next(iter(facts["parts"])) if isinstance(facts["parts"], dict) else 0
        facts, observation = facts["parts"][name], observation[name]
    return np.ndim(observation) == len(facts["shape"]) - 1


class Exported:
    """A policy read from a file: `policy(observation)`, as `run.policy` but for the algorithm's code.

    Attributes:
      facts: what the file says of itself: arguments, results, environment, actions.
    """

    def __init__(self, function: Callable[..., Any], memory: Sequence[np.ndarray], facts: dict[str, Any]):
        self.facts = facts
        self._function, self._empty = jax.jit(function), list(memory)
        self._memory: list[Any] | None = None
        self._calls = 0

    def __call__(self, observation: Any, start: Any = None, seed: int | None = None) -> np.ndarray:
        """An action for an observation `[*obs]`, or actions for a batch of them `[N, *obs]`.

        Args:
          observation: as the environment gives it.
          start: bool, or `[N]`: an episode begins here. None: at the first call, or if `N` changes.
          seed: of what is drawn; None for the number of calls so far.

        Raises:
          FdgError: the observation has another shape than the environment's.
        """
        given, mask = features_and_mask(observation)
        seen = _arrays(self.facts["observation"], given)
        single = _is_single(self.facts["observation"], given)
        count = len(seen[0])
        begins = np.zeros(count, bool)
        if self._memory is None or (self._memory and len(self._memory[0]) != count):
            self._memory = [np.repeat(leaf, count, axis=0) for leaf in self._empty]
            begins[:] = True
        if start is not None:
            begins |= np.broadcast_to(np.asarray(start, bool), count)
        arguments = [*seen, *self._memory, *([begins] if self._empty else [])]
        if "mask" in self.facts["arguments"]:
            if mask is None:
                raise FdgError("this policy asks which actions are allowed: give an envs.MaskedObservation")
            arguments.insert(len(seen), np.asarray(mask, bool)[None] if single else np.asarray(mask, bool))
        if self.facts["actions"] == "sampled":
            arguments.insert(0, np.uint32(self._calls if seed is None else seed))
        self._calls += 1
        action, *self._memory = self._function(*arguments)
        found = np.asarray(action)
        return found[0] if single else found

    def reset(self) -> None:
        """Forgets: the next observation begins an episode."""
        self._memory = None


@checked
def load_exported(path: str | Path) -> Exported:
    """The policy that `run.export` wrote; needs nothing of what trained it.

    What the file says is checked before it is used: its checksum, where it has one (files of earlier versions
    have none), the size that it inflates to, the functions that it calls by name, and its shapes against
    those of its program.

    Raises:
      FdgError: the file is none of those, or damaged.

    Example::

        policy = fdg.load_exported("policy.jax.zip")
        action = policy(observation)
    """
    content = read_bytes(path, _PACKAGE_BYTES)
    try:
        parts = _members(content, {_FUNCTION, _MEMORY, _FACTS})
        arrays = _members(parts[_MEMORY], None)
        memory = [np.load(io.BytesIO(arrays[name]), allow_pickle=False) for name in arrays]
        function = _checked(jax.export.deserialize(bytearray(parts[_FUNCTION])))
    except FdgError as error:
        raise FdgError(f"{path} is no exported policy: {error}") from None
    except Exception as error:  # whatever zipfile, NumPy and JAX raise of bytes that are none of theirs
        raise FdgError(f"{path} is no exported policy ({one_line(error)})") from error
    facts = json_object(parts[_FACTS], f"{path}: {_FACTS}")
    _check_facts(facts, function, memory, f"{path}: {_FACTS}")
    return Exported(function.call, memory, facts)


def _members(content: bytes, names: set[str] | None) -> dict[str, bytes]:
    """The members of a zip, read no further than its directory says, and that is bounded.

    Raises:
      FdgError: it has others than these, inflates to too much, is encrypted, or has another checksum.
    """
    most, found = max(_ROOM, 8 * len(content)), {}
    with zipfile.ZipFile(io.BytesIO(content)) as package:
        if package.comment:
            digest = hashlib.sha256(content[:-_DIGITS]).hexdigest()
            if package.comment != (_CHECKSUM + digest).encode():
                raise FdgError("it is damaged: its bytes are not those that were written")
        members = package.infolist()
        there = [one.filename for one in members]
        if len(set(there)) < len(there) or (names is not None and set(there) != names):
            raise FdgError(f"it has {', '.join(sorted(there)[:5]):.200}")
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
    """Refuses facts that are not those of the function: `Exported` relies on them."""
    parts = list(_shapes(facts.get("observation"), where))
    named = facts.get("arguments")
    drawn = facts.get("actions") == "sampled"
    expected = [*(["seed"] if drawn else []), *("observation" for _ in parts)]
    expected += ["mask"] if isinstance(named, list) and "mask" in named else []
    expected += [f"memory_{i}" for i in range(len(memory))] + (["start"] if memory else [])
    given = [str(name).partition("[")[0] for name in named] if isinstance(named, list) else None
    avals = function.in_avals
    flat = jax.tree.structure((tuple(avals), {}))
    if given != expected or len(avals) != len(expected) or function.in_tree != flat:
        raise FdgError(f"{where}: its arguments are not those of its program")
    if facts.get("actions") not in ("greedy", "sampled") or len(function.out_avals) != 1 + len(memory):
        raise FdgError(f"{where}: its actions or results are not those of its program")
    held = [(leaf.shape[1:], str(leaf.dtype)) for leaf in memory]
    first = avals[int(drawn) : int(drawn) + len(parts)]
    last = avals[len(avals) - 1 - len(memory) : -1] if memory else ()
    for (shape, dtype), aval in zip([*parts, *held], [*first, *last], strict=True):
        if tuple(shape) != tuple(aval.shape[1:]) or dtype != str(aval.dtype):
            raise FdgError(f"{where}: {dtype} {list(shape)}, where its program has {aval.str_short()}")


def _shapes(facts: Any, where: str) -> Iterator[tuple[list[int], str]]:
    """Shape of one and dtype of each part of an observation, as a file describes it: see `_facts_of`."""
    match facts:
        case {"parts": dict(parts)} if parts:
            for part in parts.values():
                yield from _shapes(part, where)
        case {"parts": list(parts)} if parts:
            for part in parts:
                yield from _shapes(part, where)
        case {"shape": ["N", *shape], "dtype": str(dtype)}:
            yield shape, dtype
        case _:
            raise FdgError(f"{where}: has no shapes and dtypes of an observation")


def _checked(exported: Any) -> Any:
    """The function, unless its program calls more than computes: a program is a file, and may say anything.

    XLA runs a custom call by its name with what the program hands it, a pointer to a Python function among
    that; `infeed` waits for ever.

    Raises:
      FdgError: names the call.
    """
    text = exported.mlir_module()
    named = re.findall(r"\bcustom_call @\"?([^\"(]+)\"?\(", text)
    other = [name for name in named if not _CALLED.fullmatch(name)]
    other += re.findall(r"stablehlo\.(infeed|outfeed|send|recv)\b", text)
    if other or len(named) != text.count("custom_call"):
        called = repr(other[0][:60]) if other else "something by a name that is hidden"
        raise FdgError(f"its program calls {called}, which no exported policy does")
    return exported


def _onnx_file(parts: _Parts, greedy: bool) -> bytes:
    if not greedy:
        raise FdgError("ONNX has no random keys: export greedy actions, or to JAX's format")
    return to_onnx(parts.greedy, parts.arguments("N"), f"{type(parts.algorithm).__name__}_policy")
