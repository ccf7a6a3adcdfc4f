"""`fdg collect`: records what trained agents do as data sets, for offline algorithms (algos/offline)."""

import contextlib
import io
import itertools
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
from algos.distributions import stretched
from algos.offline import minari, minari_spaces
from algos.offline.minari import DataSet
from algos.replay import Step
from algos.rollout import Actor
from algos.sequences import Sequences
from envs import features_and_mask, num_agents
from fdg import files
from fdg.arguments import check_at_least, checked
from fdg.errors import FdgError, host_errors
from fdg.running.xla_options import jit
from fdg.training.evaluation import require_actor
from fdg.training.run import Run

_CHUNK_STEPS = 1_000  # steps of each environment per compiled call


@checked
def collect(
    run: Run,
    out: str | Path,
    steps: int,
    *,
    greedy: bool = False,
    seed: int = 0,
    num_envs: int = 8,
    agent: int = 0,
    labels: Run | None = None,
) -> str:
    """Runs a trained agent and writes its episodes as a data set in Minari's format.

    The last episode of each environment ends with the last step, and is marked as truncated.

    Args:
      run: the run whose agent acts, in its environment.
      out: the folder, new or empty, or a data set with the same spaces to append to.
      steps: total steps of all environments, rounded up to a multiple of `num_envs`.
      greedy: take the most probable actions, else sample them as in training.
      seed: the seed of the episodes.
      num_envs: number of environments, which step in one batch.
      agent: the index of the agent.
      labels: a run whose most probable actions are written instead of the executed ones: a step of DAgger
        (Ross, Gordon and Bagnell 2011, arXiv 1011.0686), in which a teacher labels a student's observations.

    Returns:
      A line that describes the data set.

    Raises:
      FdgError: a number is below 1, the environment has several agents, or `out` is a data set with other
        spaces, or neither empty nor a data set.
    """
    check_at_least(1, steps=steps, num_envs=num_envs)
    require_actor(run.algorithm, "act")
    env = run.algorithm.env
    if num_agents(env) is not None:
        raise FdgError(f"'{env.name}' is a multi-agent environment: collect from a single-agent one")
    actor, teacher, name = run.actor(agent), None, type(run.algorithm).__name__
    if labels is not None:
        require_actor(labels.algorithm, "act")
        teacher_env = labels.algorithm.env
        # The spaces include privileged parts, because a teacher may see parts that its student does not see.
        teacher_spaces, student_spaces = (
            [minari.description(space) for space in (x.observation_space, x.action_space)]
            for x in (teacher_env, env)
        )
        if teacher_spaces != student_spaces:
            raise FdgError(
                f"labels: {teacher_env.name} has different spaces from {env.name}: give a run in {env.name}"
            )
        teacher, name = labels.actor(), f"{type(labels.algorithm).__name__} of states of {name}"
    with host_errors(), _open_writer(Path(out), env, name) as writer:
        num_earlier = writer.num_episodes
        returns = _run_episodes(env, actor, teacher, writer, -(-steps // num_envs), num_envs, greedy, seed)
        num_written = writer.num_episodes - num_earlier
        mean = f", mean return {np.mean(returns):,.1f} of the {len(returns):,} that ended" if returns else ""
        return f"{out}: {writer.num_steps:,} steps of {env.name} written, in {num_written:,} episodes{mean}"


def collect_replay(run: Run, out: str | Path, *, agent: int = 0) -> str:
    """Writes the steps in a run's replay buffer as a data set: what the agent did during training.

    The oldest and the newest episode of each environment may be incomplete. Arguments, result and errors are
    as for `collect`; also raises `FdgError` if the run has no replay buffer of steps.
    """
    env, name = run.algorithm.env, type(run.algorithm).__name__
    if num_agents(env) is not None:
        raise FdgError(f"'{env.name}' is a multi-agent environment: collect from a single-agent one")
    rings = getattr(getattr(run._state_of(agent), "replay", None), "rings", None)
    stored = getattr(rings, "experience", None)
    steps = stored.steps if isinstance(stored, Sequences) else stored
    if rings is None or not isinstance(steps, Step):
        raise FdgError(f"replay: {name} has no replay of steps: leave out replay, so that the agent acts")
    index, is_full, steps = jax.device_get((rings.current_index, rings.is_full, steps))
    length = steps.reward.shape[2]  # of [environments, 1, length, ...]: steps, or sequences of steps
    with _open_writer(Path(out), env, f"replay of {name}") as writer:
        num_earlier = writer.num_episodes
        for i in range(len(index)):
            order = np.roll(np.arange(length), -index[i]) if is_full[i] else np.arange(index[i])
            rows = jax.tree.map(lambda x, i=i, order=order: x[i, 0, order], steps)
            if isinstance(stored, Sequences):
                rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)
            # The replay buffer has bounded actions scaled to [-1, 1].
            rows = rows._replace(action=np.asarray(stretched(jnp.asarray(rows.action), env.action_space)))
            _write_steps(writer, rows)
        num_written = writer.num_episodes - num_earlier
        return f"{out}: {writer.num_steps:,} steps of {env.name} written, in {num_written:,} episodes"


def _run_episodes(
    env: Any,
    actor: Actor,
    teacher: Actor | None,
    writer: minari.Writer,
    num_steps: int,
    num_envs: int,
    greedy: bool,
    seed: int,
) -> list[float]:
    """Writes `num_steps` steps of each environment; returns the return of each episode that ended."""
    reset_key, run_key = jax.random.split(jax.random.key(seed))
    env_state, observation = jit(env.reset)(jax.random.split(reset_key, num_envs))
    memories = actor.memory(num_envs), () if teacher is None else teacher.memory(num_envs)
    carry: Any = (env_state, observation, memories, jnp.ones(num_envs, bool))

    def one_step(carry: Any, time: Any) -> Any:
        env_state, observation, (memory, teacher_memory), starts = carry
        keys = jax.random.split(jax.random.fold_in(run_key, time), (2, num_envs))
        action, memory = actor.act(memory, observation, starts, keys[0], greedy)
        label = action
        if teacher is not None:
            label, teacher_memory = teacher.act(teacher_memory, observation, starts, keys[0], True)
        env_state, step = env.step(keys[1], env_state, action)
        features = [features_and_mask(x)[0] for x in (observation, step.final_observation)]
        row = Step(features[0], label, step.reward, step.terminated, step.truncated, features[1])
        return (env_state, step.observation, (memory, teacher_memory), step.done), (row, step.episode_return)

    run_chunk: Callable[..., Any] = jit(
        lambda carry, offset, size: jax.lax.scan(one_step, carry, offset + jnp.arange(size)), static_argnums=2
    )
    parts: list[list[Step]] = [[] for _ in range(num_envs)]  # parts of each environment's current episode
    returns: list[float] = []
    for offset in range(0, num_steps, _CHUNK_STEPS):
        size = min(_CHUNK_STEPS, num_steps - offset)
        carry, outputs = run_chunk(carry, offset, size)
        steps, episode_returns = jax.device_get(outputs)
        is_last = steps.terminated | steps.truncated
        returns += episode_returns[is_last].tolist()
        for i in range(num_envs):
            start = 0
            for end in [*(np.flatnonzero(is_last[:, i]) + 1), size]:
                parts[i].append(jax.tree.map(lambda x, i=i, a=start, b=end: x[a:b, i], steps))
                if end > start and (is_last[end - 1, i] or offset + end == num_steps):
                    _write_episode(writer, parts[i])
                    parts[i] = []
                start = end
    return returns


def _write_steps(writer: minari.Writer, steps: Step) -> None:
    """Writes consecutive steps of an environment as episodes."""
    ends = [*(np.flatnonzero(steps.terminated | steps.truncated) + 1), len(steps.reward)]
    for start, end in itertools.pairwise([0, *ends]):
        if end > start:
            _write_episode(writer, [jax.tree.map(lambda x, a=start, b=end: x[a:b], steps)])


def _write_episode(writer: minari.Writer, parts: list[Step]) -> None:
    """Writes an episode from its consecutive parts."""
    steps = jax.tree.map(lambda *x: np.concatenate(x), *parts)
    steps.truncated[-1] |= not steps.terminated[-1]
    observations = jax.tree.map(
        lambda x, final: np.concatenate([x, final[-1:]]), steps.observation, steps.final_observation
    )
    writer.add(observations, steps)


class _Target(io.FileIO):
    """A file whose writes do not raise, since HDF5 crashes then; `check` raises the first error."""

    _error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self._error = self._error or error
            return len(data)

    def check(self) -> None:
        if self._error is not None:
            raise self._error


@contextlib.contextmanager
def _open_writer(out: Path, env: Any, algorithm: str) -> Iterator[minari.Writer]:
    """Yields a writer to a copy of the data set's arrays; then replaces the arrays, and last the metadata."""
    data = DataSet(str(out))
    observations = minari_spaces.stored_observation(env.observation_space)
    actions = minari_spaces.stored_action(env)
    for kind, stored in (("observations", observations), ("actions", actions)):
        minari.check_names(stored, kind, env.name)
    exists = os.path.lexists(data.folder / minari.METADATA)
    if exists:
        data.check_spaces(env.observation_space, env.action_space, env.name)
        data.check_appendable(observations, actions)
    elif not files.is_free(out):
        raise FdgError(f"{out}: is neither a data set nor empty: give a new folder, or a data set to add to")
    metadata = minari.make_metadata(
        env.name,
        env.observation_space,
        actions.description,
        algorithm,
        author=f"fdg {fdg.__version__}",
    )
    if (size := len(json.dumps(metadata))) > (limit := minari.MAX_METADATA_BYTES):
        raise FdgError(
            f"{env.name}: {minari.METADATA} with the bounds of each element of its spaces has"
            f" {size >> 20} MiB, but at most {limit >> 20} MiB are read: give smaller observations"
        )
    h5py = minari.import_h5py()
    with files.explain_os_errors(out), contextlib.ExitStack() as stack:
        folder = data.folder if exists else stack.enter_context(files.filling(out)) / "data"
        files.make_folder(folder)
        arrays = folder / minari.ARRAYS
        for name in (minari.ARRAYS, minari.METADATA):
            files.check_own(folder / name)
        with files.replacing(arrays) as copy:
            if exists:
                with open(arrays, "rb") as original:
                    shutil.copyfileobj(original, copy)
                copy.flush()
            episodes, steps = (data.num_episodes, data.num_steps) if exists else (0, 0)
            target = _Target(copy.fileno(), "r+b", closefd=False)
            with io.BufferedRandom(target) as buffer, h5py.File(buffer, "r+" if exists else "w") as file:
                yield (writer := minari.Writer(file, episodes, env.observation_space, actions, target.check))
            target.check()
        metadata |= data.metadata if exists else {}  # such as Minari's env_spec and dataset_id
        metadata |= {"total_episodes": writer.num_episodes, "total_steps": steps + writer.num_steps}
        files.write(folder / minari.METADATA, json.dumps(metadata, indent=1).encode())
