"""Small data sets for tests: episodes of any steps, written as `fdg collect` writes them."""

import functools
import json
import tempfile
from pathlib import Path

import h5py
import jax
import numpy as np

import envs
from algos.offline import minari
from algos.replay import Step
from envs import composite


def episode(observations, actions, rewards, terminated=False):
    """Observations `[T + 1, ...]` and the steps between them, the last of which ends the episode."""
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
    """Writes a data set for an environment; gives the folder's name."""
    inner = Path(folder) / "data"
    inner.mkdir(parents=True)
    with h5py.File(inner / minari.ARRAYS, "w") as file:
        writer = minari.Writer(file, 0, env.observation_space)
        for observations, steps in episodes:
            writer.add(observations, steps)
    counts = {"total_episodes": writer.num_episodes, "total_steps": writer.num_steps}
    said = minari.metadata(env.name, env.observation_space, env.action_space, "by hand", **counts)
    (inner / minari.METADATA).write_text(json.dumps(said))
    return str(folder)


@functools.cache
def random_steps(name, steps=80, length=5, **options):
    """A data set of random numbers for an environment, kept while tests run."""
    env, draw = envs.make(name, **options), np.random.default_rng(0)
    action = env.action_space

    def drawn(part):
        real = np.issubdtype(part.dtype, np.floating)
        return (draw.normal(size=part.shape) if real else draw.integers(2, size=part.shape)).astype(
            part.dtype
        )

    def one(number):
        seen = jax.tree.map(drawn, composite.types(env.observation_space, (length + 1,)))
        if hasattr(action, "n"):
            done = draw.integers(action.n, size=length)
        else:
            done = draw.uniform(action.low_array, action.high_array, (length, *action.shape)).astype(
                np.float32
            )
        return episode(seen, done, draw.normal(size=length), terminated=number % 2 == 0)

    folder = Path(tempfile.mkdtemp()) / "data"
    return write(folder, env, map(one, range(steps // length)))
