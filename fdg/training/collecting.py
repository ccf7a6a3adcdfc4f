"""`fdg collect`: records data sets of trained agents, for offline algorithms (algos/offline)."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fdg
from algos.offline import minari
from algos.offline.minari import DataSet
from algos.replay import Step
from algos.rollout import Actor
from envs import features_and_mask, num_agents
from fdg import files
from fdg.arguments import check_at_least
from fdg.errors import FdgError, host_errors
from fdg.training.evaluation import require_actor
from fdg.training.run import Run
from fdg.training.writable import refusing

_CHUNK = 1_000  # steps of each environment between two writes
_ENVS = 8


def collect(
    run: Run,
    out: str | Path,
    steps: int,
    *,
    greedy: bool = False,
    seed: int = 0,
    num_envs: int = _ENVS,
    agent: int = 0,
    labels: Run | None = None,
) -> str:
    """Lets a trained agent act and writes its episodes as a data set in Minari's format.

    The last episode of each environment is cut when the steps end, and marked as truncated.

    Args:
      run: the run whose agent acts, in its environment.
      out: the folder, new or empty, or a data set of the same spaces to append to.
      steps: steps of all environments together, rounded up to a multiple of `num_envs`.
      greedy: take the most probable actions, else sample them as in training.
      seed: the seed of the episodes.
      num_envs: environments stepped together.
      agent: the position of the agent.
      labels: an agent whose most probable actions are written instead of the taken ones: a step of DAgger
        (Ross, Gordon and Bagnell 2011, arXiv 1011.0686), in which a teacher labels a student's observations.

    Returns:
      A line that describes the data set.

    Raises:
      FdgError: a number is below 1, the environment has several agents, or `out` has other spaces or is
        neither empty nor a data set.
    """
    check_at_least(1, steps=steps, num_envs=num_envs)
    require_actor(run.algorithm, "act")
    env = run.algorithm.env
    if num_agents(env) is not None:
        raise FdgError(f"'{env.name}' is an environment of several agents: collect from one of one agent")
    actor, teacher = run.actor(agent), None
    if labels is not None:
        require_actor(labels.algorithm, "act")
        there = labels.algorithm.env
        # Parts may be public for a teacher that are privileged here.
        if _described(there) != _described(env):
            raise FdgError(
                f"labels: {there.name} has different spaces from {env.name}: give a run in {env.name}"
            )
        teacher = labels.actor()
    of = type(run.algorithm).__name__
    name = of if labels is None else f"{type(labels.algorithm).__name__} of states of {of}"
    with host_errors(), _writer(Path(out), env, name) as writer:
        first = writer.num_episodes
        returns = _play(env, actor, teacher, writer, -(-steps // num_envs), num_envs, greedy, seed)
        written = writer.num_episodes - first
        mean = f", mean return {np.mean(returns):,.1f} of the {len(returns):,} that ended" if returns else ""
        return f"{out}: {writer.num_steps:,} steps of {env.name} written, in {written:,} episodes{mean}"


def _play(
    env: Any,
    actor: Actor,
    teacher: Actor | None,
    writer: minari.Writer,
    length: int,
    count: int,
    greedy: bool,
    seed: int,
) -> list[float]:
    """Writes `length` steps of `count` environments; returns the returns of finished episodes."""
    reset_key, run_key = jax.random.split(jax.random.key(seed))
    env_state, observation = jax.jit(env.reset)(jax.random.split(reset_key, count))
    memories = actor.memory(count), () if teacher is None else teacher.memory(count)
    carry: Any = (env_state, observation, memories, jnp.ones(count, bool))

    def one_step(carry: Any, time: Any) -> Any:
        env_state, observation, (memory, of_teacher), begins = carry
        keys = jax.random.split(jax.random.fold_in(run_key, time), (2, count))
        action, memory = actor.act(memory, observation, begins, keys[0], greedy)
        label = action
        if teacher is not None:
            label, of_teacher = teacher.act(of_teacher, observation, begins, keys[0], True)
        env_state, step = env.step(keys[1], env_state, action)
        features = [features_and_mask(x)[0] for x in (observation, step.final_observation)]
        kept = Step(features[0], label, step.reward, step.terminated, step.truncated, features[1])
        return (env_state, step.observation, (memory, of_teacher), step.done), (kept, step.episode_return)

    run: Callable[..., Any] = jax.jit(
        lambda carry, first, size: jax.lax.scan(one_step, carry, first + jnp.arange(size)), static_argnums=2
    )
    parts: list[list[Step]] = [[] for _ in range(count)]  # of the episode that each environment is in
    returns: list[float] = []
    for first in range(0, length, _CHUNK):
        size = min(_CHUNK, length - first)
        carry, found = run(carry, first, size)
        steps, totals = jax.device_get(found)
        ended = steps.terminated | steps.truncated
        returns += totals[ended].tolist()
        for i in range(count):
            begin = 0
            for end in [*(np.flatnonzero(ended[:, i]) + 1), size]:
                parts[i].append(jax.tree.map(lambda x, i=i, a=begin, b=end: x[a:b, i], steps))
                if end > begin and (ended[end - 1, i] or first + end == length):
                    _write(writer, parts[i])
                    parts[i] = []
                begin = end
    return returns


def _described(env: Any) -> list[Any]:
    """The spaces of an environment, privileged parts included."""
    return [minari.description(space) for space in (env.observation_space, env.action_space)]


def _write(writer: minari.Writer, parts: list[Step]) -> None:
    """Writes an episode from its parts in order."""
    steps = jax.tree.map(lambda *x: np.concatenate(x), *parts)
    steps.truncated[-1] |= not steps.terminated[-1]
    observations = jax.tree.map(
        lambda x, last: np.concatenate([x, last[-1:]]), steps.observation, steps.final_observation
    )
    writer.add(observations, steps)


@contextlib.contextmanager
def _writer(out: Path, env: Any, algorithm: str) -> Iterator[minari.Writer]:
    """Writes into a copy of the arrays, replaces the originals at the end, and then the metadata."""
    data = DataSet(str(out))
    there = os.path.lexists(data.folder / minari.METADATA)
    if there:
        data.check_spaces(env.observation_space, env.action_space, env.name)
    elif not files.is_free(out):
        raise FdgError(f"{out}: is no data set, and not empty: give a new folder, or a data set to add to")
    h5py = minari.import_h5py()
    with refusing(out), contextlib.ExitStack() as stack:
        folder = data.folder if there else stack.enter_context(files.filling(out)) / "data"
        files.make_folder(folder)
        arrays = folder / minari.ARRAYS
        for name in (minari.ARRAYS, minari.METADATA):
            files.check_own(folder / name)
        with files.replacing(arrays) as new:
            if there:
                with open(arrays, "rb") as old:
                    shutil.copyfileobj(old, new)
            episodes, steps = (data.num_episodes, data.num_steps) if there else (0, 0)
            with h5py.File(new, "r+" if there else "w") as file:
                writer = minari.Writer(file, episodes, env.observation_space)
                yield writer
        counts = {"total_episodes": writer.num_episodes, "total_steps": steps + writer.num_steps}
        said = minari.metadata(
            env.name, env.observation_space, env.action_space, algorithm, **counts,
            author=f"fdg {fdg.__version__}",
        )  # fmt: skip
        files.write(folder / minari.METADATA, json.dumps(said, indent=1).encode())
