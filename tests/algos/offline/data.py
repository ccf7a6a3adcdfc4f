"""Small datasets for tests, in the format of `fdg collect`."""

import functools
import io
import json
import tempfile
from pathlib import Path

import h5py
import jax
import numpy as np
from PIL import Image

import envs
from algos.offline import minari
from algos.replay import Step
from envs import composite


def episode(observations, actions, rewards, terminated=False):
    """Observations `[T + 1, ...]` and the steps between them; the last step ends the episode."""
    count = len(rewards)
    last = np.arange(count) == count - 1
    steps = Step(
        None,
        np.asarray(actions),
        np.asarray(rewards, np.float32),
        last & terminated,
        last & ~np.bool_(terminated),
        None,
    )
    return observations, steps


def write(folder, env, episodes):
    """Writes a dataset for an environment and returns the folder's name."""
    inner = Path(folder) / "data"
    inner.mkdir(parents=True)
    with h5py.File(inner / minari.ARRAYS, "w") as file:
        writer = minari.Writer(file, 0, env.observation_space)
        for observations, steps in episodes:
            writer.add(observations, steps)
    counts = {"total_episodes": writer.num_episodes, "total_steps": writer.num_steps}
    metadata = minari.make_metadata(env.name, env.observation_space, env.action_space, "by hand", **counts)
    (inner / minari.METADATA).write_text(json.dumps(metadata))
    return str(folder)


@functools.cache
def random_steps(name, steps=80, length=5, **options):
    """A dataset of random values for an environment, cached."""
    env, rng = envs.make(name, **options), np.random.default_rng(0)
    action = env.action_space

    def values(part):
        real = np.issubdtype(part.dtype, np.floating)
        return (rng.normal(size=part.shape) if real else rng.integers(2, size=part.shape)).astype(part.dtype)

    def random_episode(number):
        observations = jax.tree.map(values, composite.types(env.observation_space, (length + 1,)))
        if hasattr(action, "n"):
            actions = rng.integers(action.n, size=length)
        else:
            actions = rng.uniform(action.low_array, action.high_array, (length, *action.shape)).astype(
                np.float32
            )
        return episode(observations, actions, rng.normal(size=length), terminated=number % 2 == 0)

    folder = Path(tempfile.mkdtemp()) / "data"
    return write(folder, env, map(random_episode, range(steps // length)))


def write_as_minari(folder, obs, act, observations, actions):
    """Writes one episode of Gymnasium's spaces in Minari's format and returns the folder's name."""
    inner = Path(folder) / "data"
    inner.mkdir(parents=True)
    count = len(jax.tree.leaves(actions)[0])
    with h5py.File(inner / minari.ARRAYS, "w") as file:
        group = file.create_group("episode_0")
        _add(group, "observations", observations)
        _add(group, "actions", actions)
        group["rewards"] = np.arange(count, dtype=np.float64)
        group["terminations"] = np.arange(count) == count - 1
        group["truncations"] = np.zeros(count, bool)
    spaces = {f"{what}_space": json.dumps(serialized(space)) for what, space in
              (("observation", obs), ("action", act))}  # fmt: skip
    metadata = {"total_episodes": 1, "total_steps": count, "data_format": "hdf5", **spaces}
    (inner / minari.METADATA).write_text(json.dumps(metadata))
    return str(folder)


def _add(group, name, values):
    if isinstance(values, dict):
        for key, part in values.items():
            _add(group, f"{name}/{key}", part)
    elif isinstance(values, tuple):
        _add(group, name, {f"_index_{i}": part for i, part in enumerate(values)})
    elif isinstance(values, list):  # texts
        group.create_dataset(name, data=values, dtype=h5py.string_dtype())
    elif values.dtype == np.uint8 and values.ndim > 2:
        frames = [encoded(frame, "JPEG") for frame in values]
        group.create_dataset(name, (len(frames),), h5py.vlen_dtype(np.uint8))
        for i, frame in enumerate(frames):
            group[name][i] = np.frombuffer(frame, np.uint8)
    else:
        group[name] = values


def encoded(frame, kind, **options):
    """An encoded image in one of Pillow's formats."""
    content = io.BytesIO()
    Image.fromarray(frame).save(content, kind, **options)
    return content.getvalue()


def decoded(frame):
    """An image after Minari's JPEG compression."""
    return np.asarray(Image.open(io.BytesIO(encoded(frame, "JPEG"))))


def serialized(space):
    """Minari's description of a Gymnasium space, as in its `serialization.py`."""
    kind = type(space).__name__
    match kind:
        case "Dict":
            parts = {name: serialized(part) for name, part in space.spaces.items()}
            return {"type": kind, "subspaces": parts}
        case "Tuple":
            return {"type": kind, "subspaces": [serialized(part) for part in space.spaces]}
        case "Discrete":
            return {"type": kind, "dtype": "int64", "start": int(space.start), "n": int(space.n)}
        case "MultiDiscrete":
            values = {"nvec": space.nvec.tolist(), "start": space.start.tolist()}
            return {"type": kind, "dtype": str(space.dtype), **values}
        case "MultiBinary":
            return {"type": kind, "n": space.n}
        case "Text":
            lengths = {"max_length": space.max_length, "min_length": space.min_length}
            return {"type": kind, **lengths, "charset": space.characters}
    bounds = {"low": space.low.tolist(), "high": space.high.tolist()}
    return {"type": kind, "dtype": str(space.dtype), "shape": list(space.shape), **bounds}
