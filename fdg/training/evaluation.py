"""Evaluation: trained agents play whole episodes in separate environments.

Every algorithm with a method `actor` (see `algos.rollout`) can be evaluated. A method
`evaluate(state, key, episodes)` takes precedence; it has a fourth argument `greedy` if it can also sample. It
returns at least `{"return": mean}`.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import envs
from algos.evaluation import evaluate as play_episodes
from algos.rollout import Actor, empty_memory
from fdg.errors import FdgError, listed
from fdg.fragment import unseen_by_cache
from fdg.lowering.host_calls import calls_host
from fdg.running.xla_options import jit
from fdg.training.statistics import estimate_text, format_numbers, interval
from fdg.training.sweep import agent_seeds

# Returns at which Gymnasium's registry calls an environment solved (`reward_threshold`).
SOLVED = {
    "Acrobot-v1": -100.0,
    "CartPole-v1": 475.0,
    "MountainCar-v0": -110.0,
    "MountainCarContinuous-v0": 90.0,
}
_NUM_EPISODES = 128  # episodes of the evaluation after training
_EVALUATION_STREAM = 2**31 - 1  # folded into keys, so that evaluation and training draw different numbers


@dataclasses.dataclass(frozen=True, repr=False)
class Evaluation:
    """The results of an evaluation.

    Attributes:
      greedy: whether actions were the most probable ones, or sampled as in training.
      means: `[agents]` float32, the mean return of each agent.
      episodes: episodes of each agent.
      returns: `[agents, episodes]` float32; None if the algorithm's method `evaluate` gives no returns.
      lengths: `[agents, episodes]` int32, environment steps; None if that method gives no lengths.
      several: whether the run has an axis of agents.
      infos: `[agents, episodes]` float32 by name: episode metrics that the environment reports in `info`.
      failed: indices of agents whose losses are not finite; means over agents exclude them.
      seeds: the seed of each agent.
    """

    greedy: bool
    means: np.ndarray
    episodes: int
    returns: np.ndarray | None = None
    lengths: np.ndarray | None = None
    several: bool = False
    infos: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    failed: Sequence[int] = ()
    seeds: Sequence[int] = ()

    @property
    def mean(self) -> float:
        """Mean return over agents and episodes (`eval_return` in `summary.json`); NaN if all failed."""
        means = self._without_failed(self.means)
        return float(means.mean()) if means.size else math.nan

    @property
    def actions(self) -> str:
        """`greedy` or `sampled`."""
        return "greedy" if self.greedy else "sampled"

    @property
    def interval(self) -> tuple[float, float] | None:
        """95% bootstrap confidence interval of the mean: over agents, or over the episodes of a single agent.
        None for a single agent with a single episode."""
        values = self.means if self.several and len(self.means) > 1 else self.returns
        values = None if values is None else self._without_failed(values)
        return None if values is None or np.size(values) < 2 else interval(np.ravel(values))

    @property
    def reported(self) -> dict[str, float]:
        """The mean of each of `infos` over finished episodes; NaN if no episode has finished."""
        infos = {name: self._without_failed(values) for name, values in self.infos.items()}
        finite = {name: values[np.isfinite(values)] for name, values in infos.items()}
        return {name: float(values.mean()) if values.size else math.nan for name, values in finite.items()}

    @property
    def agents_text(self) -> str:
        """The range of agents' returns and the failed agents, as text; "" for one agent without failure."""
        text, means = "", self._without_failed(self.means)
        if self.several:
            low, high = format_numbers(means.min(), means.max()) if means.size else ("nan", "nan")
            text = f" of each of {len(means)} agents (from {low} to {high})" if len(self.means) > 1 else ""
        if self.failed:
            seeds = listed([str(self.seeds[i]) for i in self.failed], "and")
            names = f"{'seed' if len(self.failed) == 1 else 'seeds'} {seeds}"
            text += f", without {names}, which failed" if self.several else f", of {names}, which failed"
        return text

    def _without_failed(self, values: np.ndarray) -> np.ndarray:
        """The rows of `[agents, ...]` whose agents have not failed; all rows if the run has one agent."""
        return np.delete(values, self.failed, axis=0) if self.several and self.failed else values

    @property
    def _infos_text(self) -> str:
        return "".join(f", {name} {format_numbers(value)[0]}" for name, value in self.reported.items())

    def rows(self) -> list[dict[str, Any]]:
        """One row per episode: `actions`, `agent`, `episode`, `return`, `length`, and each of `infos`."""
        if self.returns is None:
            return []
        return [
            {
                "actions": self.actions,
                "agent": agent,
                "episode": episode,
                "return": self.returns[agent, episode],
                **({} if self.lengths is None else {"length": int(self.lengths[agent, episode])}),
                **{name: values[agent, episode] for name, values in self.infos.items()},
            }
            for agent in range(self.returns.shape[0])
            for episode in range(self.returns.shape[1])
        ]

    def __repr__(self) -> str:
        return f"<Evaluation {self}>"

    def __str__(self) -> str:
        mean = estimate_text(self.mean, self.interval, " (95% interval {} to {})")
        text = f"{self.actions}: return {mean} over {self.episodes:,} episodes{self.agents_text}"
        if self.lengths is not None and (lengths := self._without_failed(self.lengths)).size:
            text += f", {lengths.mean():,.1f} steps long on average"
        return text + self._infos_text


def can_evaluate(algorithm: Any, greedy: bool = True) -> bool:
    """Whether the algorithm has a method `evaluate`, or an `actor` and an `env`."""
    return _episodes_function(algorithm, greedy) is not None


def _episodes_function(algorithm: Any, greedy: bool) -> Callable[..., Mapping[str, jax.Array]] | None:
    """The function `(state, key, episodes) -> results` that plays episodes; None if there is none."""
    evaluate, env = getattr(algorithm, "evaluate", None), getattr(algorithm, "env", None)
    if callable(evaluate) and "greedy" in inspect.signature(evaluate).parameters:
        return functools.partial(evaluate, greedy=greedy)
    if callable(evaluate) and greedy:
        return evaluate
    if env is None or not callable(getattr(algorithm, "actor", None)):
        return None
    return lambda state, key, episodes: play_episodes(env, algorithm.actor(state), key, episodes, greedy)


def episode_count(algorithm: Any, requested: int | None) -> int:
    """The number of episodes of an evaluation: `requested`, by default 128.

    For a text task with a file, each episode is a held-out row: at most all rows, which is the default.
    """
    rows = getattr(getattr(algorithm, "env", None), "num_held_out", None)
    if rows is None:
        return _NUM_EPISODES if requested is None else requested
    return rows if requested is None else min(requested, rows)


def require_actor(algorithm: Any, verb: str) -> None:
    """Raises `FdgError` "NAME cannot `verb`" unless an algorithm has a method `actor` and an environment."""
    name = type(algorithm).__name__
    if not callable(getattr(algorithm, "actor", None)):
        if callable(getattr(algorithm, "examples", None)):
            raise FdgError(
                f"{name} cannot {verb}: it generates text and takes no actions: its responses are in"
                " samples/ of the run, and fdg.export writes its weights in Hugging Face's format"
            )
        raise FdgError(
            f"{name} cannot {verb}: it does not say how it acts: give it a method actor(state) that returns"
            " algos.Actor(memory, act)"
        )
    if getattr(algorithm, "env", None) is None:
        raise FdgError(f"{name} cannot {verb}: it has no environment: give it a field env")


@functools.lru_cache(maxsize=16)
def _jit_play(
    algorithm: Any, unseen: tuple[int, ...], episodes: int, greedy: bool, has_agents: bool
) -> Callable[[Any, Any], Any]:
    """The jitted evaluation, which equal algorithms share; `unseen` is `unseen_by_cache(algorithm)`."""
    play_all = _episodes_function(algorithm, greedy)
    assert play_all is not None  # callers have checked `can_evaluate`

    def play(state: Any, key: jax.Array) -> Mapping[str, jax.Array]:
        result = play_all(state, key, episodes)
        return {name: result[name] for name in ("return", "returns", "lengths", "infos") if name in result}

    def play_agents(states: Any, keys: jax.Array) -> Mapping[str, jax.Array]:
        first = jax.tree.map(lambda x: x[0], (states, keys))
        if calls_host(jax.make_jaxpr(play)(*first).eqns):  # an environment on the host serves one agent
            return jax.lax.map(lambda pair: play(*pair), (states, keys))
        return jax.vmap(play)(states, keys)

    return jit(play_agents if has_agents else play)


def evaluate(
    algorithm: Any,
    state: Any,
    keys: jax.Array,
    episodes: int,
    greedy: bool,
    seed: int,
    agents: int | None,
    failed: Sequence[int],
) -> Evaluation:
    """Evaluates a run's agents.

    `keys` are from `evaluation_keys`. `seed` is the run's seed, and `agents` its number of agents (None
    without an axis of agents). Means over agents exclude the indices `failed`.
    """
    has_agents = agents is not None
    try:
        program = _jit_play(algorithm, unseen_by_cache(algorithm), episodes, greedy, has_agents)
    except TypeError:  # the algorithm is not hashable
        program = _jit_play.__wrapped__(algorithm, (), episodes, greedy, has_agents)
    results = dict(program(state, keys))
    arrays = jax.tree.map(lambda x: np.asarray(x) if has_agents else np.asarray(x)[None], results)
    means, seeds = arrays.pop("return"), tuple(agent_seeds(algorithm, seed, agents))
    return Evaluation(
        greedy, means, episodes, **arrays, several=has_agents, failed=tuple(failed), seeds=seeds
    )


def evaluation_keys(
    seed: int, agents: int | None, iteration: int | None = None, algorithm: Any = None
) -> jax.Array:
    """The random keys of an evaluation: a single key, or keys `[agents]`.

    Agents with the same seed (in a sweep) play the same episodes. `iteration` is None for the evaluation
    after training.
    """
    seeds = agent_seeds(algorithm, seed, agents)
    keys = [jax.random.fold_in(jax.random.key(agent_seed), _EVALUATION_STREAM) for agent_seed in seeds]
    if iteration is not None:
        keys = [jax.random.fold_in(key, iteration) for key in keys]
    return keys[0] if agents is None else jnp.stack(keys)


def summary_entries(evaluations: Sequence[Evaluation]) -> dict[str, Any]:
    """The entries for `summary.json` or a row of metrics; entries of sampled actions end in `_sampled`."""
    entries: dict[str, Any] = {}
    for evaluation in evaluations:
        suffix = "" if evaluation.greedy else "_sampled"
        # Python floats keep all digits of a float32, so that a repeated evaluation compares equal.
        entries[f"eval_return{suffix}"] = evaluation.mean
        if evaluation.several:
            entries[f"eval_returns{suffix}"] = evaluation.means.tolist()
        entries["eval_episodes"] = evaluation.episodes
        entries |= {f"eval_{name}{suffix}": value for name, value in evaluation.reported.items()}
    return entries


def verdict(evaluation: Evaluation, env_name: str | None) -> str:
    """A line to print: the result of an evaluation, and whether it solves the environment."""
    mean, count = format_numbers(evaluation.mean)[0], f"{evaluation.episodes:,}"
    text = f"{evaluation.actions} evaluation return {mean} over {count} episodes{evaluation.agents_text}"
    text += evaluation._infos_text
    solved = SOLVED.get(env_name or "")
    if solved is not None:
        text += f" (solved: >= {solved:g})" if evaluation.mean >= solved else f" (not solved: < {solved:g})"
    return text


def random_returns(env: Any, episodes: int) -> np.ndarray:
    """Returns of whole episodes with random actions (`env.action_space.sample`): `[episodes]` float32.

    In an environment of several agents, the mean over agents.

    >>> random_returns(envs.make("CartPole-v1"), 2).shape
    (2,)
    """
    num_agents, sample = envs.num_agents(env), env.action_space.sample

    def sample_actions(key: jax.Array) -> jax.Array:
        return sample(key) if num_agents is None else jax.vmap(sample)(jax.random.split(key, num_agents))

    def act(memory: Any, observation: Any, start: Any, keys: jax.Array, greedy: bool) -> Any:
        return jax.vmap(sample_actions)(keys), memory

    actor = Actor(empty_memory, act)
    return np.asarray(jit(lambda key: play_episodes(env, actor, key, episodes)["returns"])(jax.random.key(0)))
