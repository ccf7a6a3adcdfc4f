"""`Run`: a finished or unfinished training run; its agents can act, be evaluated and be exported."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from algos.rollout import Actor
from envs import Box
from fdg.arguments import check_at_least, checked, explain_attributes, quoted
from fdg.errors import Elsewhere, FdgError, host_errors
from fdg.training import evaluation, exporting, playing
from fdg.training.deployed import Acting
from fdg.training.evaluation import Evaluation
from fdg.training.finite import failed_agents
from fdg.training.run_directory import read_metrics, read_summary
from fdg.training.sweep import Sweep, replace_fields
from fdg.training.sweep_results import best_agents


class Run:
    """A run: trained agents and their run directory. `fdg.fit` and `fdg.load` return it.

    Attributes:
      algorithm: the algorithm, with its hyperparameters and environment.
      state: the algorithm's state, with a leading axis of agents if there are several.
      iteration: completed iterations.
      path: the run directory, or None.
      config: the content of `config.json`.
      seed: the seed of the first agent; agent i has `seed + i` (in a sweep, agent i of each point).
      agents: the number of agents; None if `state` has no axis of agents.
      finished: whether all iterations are done.
      stopped: why an unfinished run ended, or None.
    """

    # Names of other libraries: their use raises an error that says what to write instead.
    predict = Elsewhere("run.policy(observation)")
    act = Elsewhere("run.policy(observation)")
    learn = Elsewhere("fdg.fit(run.algorithm, total_steps=N, out=run.path, resume=True)")
    train = Elsewhere("fdg.fit(run.algorithm, total_steps=N, out=run.path, resume=True)")
    fit = Elsewhere("fdg.fit(run.algorithm, total_steps=N, out=run.path, resume=True)")
    load = Elsewhere("fdg.load(path)")
    save = Elsewhere(
        "fdg.load(run.path), for runs are saved as they train, or run.export(path) for the policy"
    )
    pack = Elsewhere("fdg.training.packing.pack(run.path, DIRECTORY), or fdg pack RUN in a shell")
    collect = Elsewhere("fdg.training.collecting.collect(run, DIRECTORY, steps=N)")
    plot = Elsewhere("fdg.training.curves.plot_runs([run.path])")
    compare = Elsewhere("fdg.compare([run.path, ...])")
    diff = Elsewhere("fdg.diff(run.path, another)")

    def __init__(
        self,
        algorithm: Any,
        state: Any,
        iteration: int,
        *,
        path: Path | None = None,
        config: Mapping[str, Any] | None = None,
        seed: int = 0,
        agents: int | None = None,
        finished: bool = True,
        stopped: str | None = None,
        last_evaluation: Evaluation | None = None,
        failed: Sequence[int] | None = None,
    ):
        self.algorithm, self.state, self.iteration = algorithm, state, iteration
        # Absolute: metrics are read when they are needed, maybe from another current folder.
        self.path, self.config = path and path.absolute(), dict(config or {})
        self.seed, self.agents = seed, agents
        self._history: Any = None  # older parameters from the checkpoint of a run with staleness
        self.finished, self.stopped = finished, stopped
        self.last_evaluation = last_evaluation  # the evaluation after training, or None
        self._failed = failed  # None: read from the metrics when needed

    # --- acting ---

    @checked
    def actor(self, agent: int = 0) -> Actor:
        """An agent as pure functions for use in your own programs: see `algos.Actor`.

        Raises:
          FdgError: the algorithm has no method `actor`, or there is no such agent.
        """
        evaluation.require_actor(self.algorithm, "act")
        return self.algorithm.actor(self._state_of(agent))

    @functools.cached_property
    def policy(self) -> Acting:
        """The first agent: `run.policy(observation)` is its most probable action, `greedy=False` samples.

        Compiled once, with the agent's normalisers and memory; see `Acting`.

        Raises:
          FdgError: the algorithm has no method `actor`.
        """
        return self.acting()

    @checked
    def acting(self, agent: int = 0, greedy: bool = True, seed: int = 0) -> Acting:
        """An agent with its own memory and random key. `run.policy` is `run.acting()`.

        Raises:
          FdgError: the algorithm has no method `actor`, or there is no such agent.
        """
        evaluation.require_actor(self.algorithm, "act")
        return Acting(self.algorithm, self._state_of(agent), greedy, seed)

    @checked
    def evaluate(
        self,
        episodes: int | None = None,
        *,
        greedy: bool = True,
        seed: int | None = None,
        env: Any = None,
    ) -> Evaluation:
        """Plays whole episodes with every agent.

        Without arguments this repeats the evaluation after training: `.mean` equals `eval_return` of
        `summary.json` exactly.

        Args:
          episodes: episodes of each agent; None: the number after training.
          greedy: take the most probable actions, else sample them as in training.
          seed: the seed of the first agent's episodes (other agents as in training); None: as after training.
          env: another environment to play in, such as `envs.make("CartPole-v1", gravity=20.0)`.

        Raises:
          FdgError: `episodes` is below 1, the algorithm has no method `actor`, or `env` has other spaces.
        """
        check_at_least(1, episodes=episodes)
        algorithm = self.algorithm if env is None else _replace_env(self.algorithm, env)
        requested = self.config.get("eval_episodes") or None if episodes is None else episodes
        episodes = evaluation.episode_count(algorithm, requested)
        if not evaluation.can_evaluate(algorithm, greedy):
            evaluation.require_actor(algorithm, "be evaluated")
        first_seed = self.seed if seed is None else seed
        keys = evaluation.evaluation_keys(first_seed, self.agents, algorithm=algorithm)
        with host_errors():
            arguments: Any = (greedy, self.seed, self.agents, self.failed)
            return evaluation.evaluate(algorithm, self.state, keys, episodes, *arguments)

    @checked
    def answer(
        self,
        prompts: Sequence[Any],
        *,
        temperature: float = 0.0,
        max_new_tokens: int | None = None,
        system: str | None = None,
        seed: int = 0,
        agent: int = 0,
    ) -> list[str]:
        """Answers prompts with the language model.

        Args:
          prompts: a list of texts, or of lists of messages (`[{"role": "user", "content": "1+1="}]`).
          temperature: divides the logits; 0 takes the most likely tokens.
          max_new_tokens: maximum number of tokens per answer; None: the limit in training.
          system: the system message; None: the system message in training.
          seed: the seed for sampling.
          agent: the index of the agent.

        Raises:
          FdgError: the algorithm trains no generative language model, or a prompt is too long.
        """
        options: Any = {"temperature": temperature, "max_new_tokens": max_new_tokens, "system": system}
        if isinstance(self.algorithm, Sweep):
            return self.member(agent).answer(prompts, seed=seed, **options)
        if not callable(getattr(self.algorithm, "answer", None)):
            raise FdgError(
                f"{type(self.algorithm).__name__} acts in an environment and answers no prompts: use"
                " run.policy(observation), or fdg evaluate RUN"
            )
        return list(self.algorithm.answer(self._state_of(agent), prompts, seed, **options))

    @property
    def eval_episodes(self) -> int:
        """The number of episodes of the evaluation after training."""
        return evaluation.episode_count(self.algorithm, self.config.get("eval_episodes") or None)

    @checked
    def play(
        self,
        path: str | Path = "video.mp4",
        *,
        episodes: int = 1,
        agent: int = 0,
        greedy: bool = True,
        seed: int = 0,
        fps: int = 30,
        max_steps: int = playing.MAX_STEPS,
    ) -> Path:
        """Plays episodes and writes a video that shows them side by side.

        Args:
          path: `.mp4`, `.gif` or `.html` (brax's interactive viewer; a page with a gif for others).
          episodes: the number of episodes.
          agent: the index of the agent.
          greedy: take the most probable actions, else sample them as in training.
          seed: the seed of the episodes.
          fps: frames per second.
          max_steps: maximum steps per episode; longer episodes are truncated.

        Returns:
          The path of the video.

        Raises:
          FdgError: the algorithm has no method `actor`, or its environment cannot be rendered.
        """
        evaluation.require_actor(self.algorithm, "play")
        state = self._state_of(agent)
        options: Any = {"greedy": greedy, "seed": seed, "fps": fps, "max_steps": max_steps}
        return playing.play(self.algorithm, state, Path(path), episodes=episodes, **options)

    @checked
    def export(
        self,
        path: str | Path = "policy.jax",
        *,
        format: str | None = None,
        agent: int = 0,
        greedy: bool = True,
    ) -> Path:
        """Writes the policy to a file that can be used without this run's code: see `fdg.load_exported`.

        Inputs and outputs have the format of the environment's library, as in `policy`. A `.json` file of the
        same name describes them in order: names, shapes, dtypes and bounds.

        Args:
          path: `.onnx` for ONNX, `.jax` for a serialised JAX function. Algorithms with a method
            `export(state, path)` (language models, in Hugging Face's format) write a folder.
          format: `jax` or `onnx`, instead of the suffix; `peft` for only the adapters of a language model.
          agent: the index of the agent.
          greedy: export the most probable action, else an action sampled from a seed (not in ONNX).

        Returns:
          The path of the file or folder.

        Raises:
          FdgError: the algorithm has no method `actor`, the suffix is unknown, the format cannot express the
            network, or the description would replace another file.
        """
        if isinstance(self.algorithm, Sweep):
            return self.member(agent).export(path, format=format, greedy=greedy)
        if callable(getattr(self.algorithm, "export", None)):
            return exporting.export_folder(self.algorithm, self._state_of(agent), Path(path), format)
        evaluation.require_actor(self.algorithm, "be exported")
        state = self._state_of(agent)
        return exporting.export(self.algorithm, state, Path(path), format, greedy, self.config.get("id"))

    # --- agents of a sweep ---

    @property
    def num_seeds(self) -> int | None:
        """The number of seeds (in a sweep, per point); None if the state has no axis of agents."""
        return self.algorithm.num_seeds if isinstance(self.algorithm, Sweep) else self.agents

    @checked
    def member(
        self, agent: int | Literal["best"] | None = None, *, seed: int | None = None, **values: float
    ) -> "Run":
        """Agents of one point of a sweep as a separate run, with the point's hyperparameters.

        Args:
          agent: the index of a single agent; "best": the agents of the best point, as `run.best`.
          seed: the seed of a single agent of the point; None: all agents of the point.
          values: swept hyperparameters that select the point.

        Raises:
          FdgError: the run is not a sweep, or no point, several points or no agent match.

        Example::

            run.member(learning_rate=1e-3).evaluate()
        """
        if isinstance(agent, str):
            if seed is not None or values:
                raise FdgError(
                    "member('best') selects all agents of the best point: leave out the other arguments"
                )
            return self.best
        agents = self._sweep.chosen(agent, seed, values, self.seed)
        return self._select_agents(agents)

    @property
    def best(self) -> "Run":
        """The agents of the sweep's best point, as named in `sweep.json`.

        Raises:
          FdgError: the run is not a sweep, or has not ended.
        """
        if self.path is None:
            raise FdgError("this run has no files, so its best point is unknown: give values or an agent")
        return self._select_agents(best_agents(self.path, self._sweep.agents))

    @property
    def _sweep(self) -> Sweep:
        if not isinstance(self.algorithm, Sweep):
            raise FdgError(f"{self!r} is not a sweep: leave out --member (run.member, run.best)")
        return self.algorithm

    def _select_agents(self, agents: Sequence[int]) -> "Run":
        """A separate run with some agents, which have equal hyperparameters."""
        sweep, rows = self._sweep, list(agents)
        is_single = len(rows) == 1
        state = jax.tree.map(lambda x: x[rows[0]] if is_single else x[np.array(rows)], self.state)
        return Run(
            sweep.of(state),
            state.state,
            self.iteration,
            config=self.config,
            seed=sweep.seeds(self.seed)[rows[0]],
            agents=None if is_single else len(rows),
            finished=self.finished,
            stopped=self.stopped,
            failed=[i for i, row in enumerate(rows) if row in self.failed],
        )

    # --- recorded results ---

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of `metrics.jsonl`, one per iteration."""
        return [] if self.path is None else list(read_metrics(self.path / "metrics.jsonl"))

    @property
    def failed(self) -> list[int]:
        """Indices of the agents whose losses were not finite at iteration `self.iteration`.

        Means over agents exclude these agents.
        """
        if self._failed is not None:
            return list(self._failed)
        rows = [row for row in self.metrics if row["iteration"] <= self.iteration]
        return failed_agents(rows[-1] if rows else None, self.config, self.agents)

    @property
    def summary(self) -> dict[str, Any] | None:
        """The content of `summary.json`; None before the run has ended."""
        return None if self.path is None else read_summary(self.path)

    def _state_of(self, agent: int) -> Any:
        if self.agents is None:
            if agent != 0:
                raise FdgError(f"agent={agent}: this run has one agent: give agent=0")
            return self.state
        if not 0 <= agent < self.agents:
            raise FdgError(f"agent={agent}: this run has {self.agents} agents, 0 to {self.agents - 1}")
        return jax.tree.map(lambda x: x[agent], self.state)

    def __repr__(self) -> str:
        is_sweep = isinstance(self.algorithm, Sweep)
        algorithm = self._sweep.algorithm if is_sweep else self.algorithm
        name = f"{'sweep of ' if is_sweep else ''}{type(algorithm).__name__}"
        env = getattr(getattr(self.algorithm, "env", None), "name", None)
        agents = "" if self.agents is None else f", {self.agents} agents"
        path = "" if self.path is None else f", {self.path}"
        return f"<Run {name}{f' on {env}' if env else ''}, iteration {self.iteration:,}{agents}{path}>"


explain_attributes(Run)


def _replace_env(algorithm: Any, env: Any) -> Any:
    """The algorithm in another environment with the same spaces, or another task with the same tokenizer."""
    if not (hasattr(env, "observation_space") or hasattr(env, "tokenizer")):
        raise FdgError(f"env={quoted(env)}: give an environment, such as envs.make('CartPole-v1')")
    tokenizer = getattr(algorithm.env, "tokenizer", None)
    if tokenizer is not None or hasattr(env, "tokenizer"):
        replaced = algorithm if tokenizer is None else dataclasses.replace(algorithm, env=env)
        if tokenizer != replaced.env.tokenizer:  # a task without a tokenizer got this one
            raise FdgError(
                f"env {env.name}: its tokenizer differs from the one of {algorithm.env.name} in training:"
                " write env.with_tokenizer(run.algorithm.env.tokenizer)"
            )
        return replaced
    for field in ("observation_space", "action_space"):
        old, new = getattr(algorithm.env, field), getattr(env, field)
        is_box = isinstance(old, Box) and isinstance(new, Box) and old.shape == new.shape
        if not is_box and old != new:
            raise FdgError(
                f"env {env.name}: its {field} is {new}, but these agents were trained with {old}: give an"
                f" environment with the spaces of {algorithm.env.name}"
            )
    return replace_fields(algorithm, {"env": env})
