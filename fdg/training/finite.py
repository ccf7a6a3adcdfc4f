"""Detects infinite and NaN losses before they reach a checkpoint."""

import math
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

import envs
from fdg.errors import FdgError, FdgWarning, RunError, listed
from fdg.training.checkpoint import Checkpoints
from fdg.training.statistics import is_vital
from fdg.training.sweep import agent_names

_CHECK_STEPS = 64  # random steps of an environment to search for rewards or observations that are not finite
_LARGEST_RETURN = 1e18  # with a margin: squares exceed float32 from 1.8e19 on


def failed_agents(row: Mapping[str, Any] | None, config: Mapping[str, Any], agents: int | None) -> list[int]:
    """Indices of those of `agents` agents (None: one) whose losses or gradients are not finite in a row."""
    first_step = (config.get("hyperparameters") or {}).get("learning_starts")
    if row is None or row["env_steps"] <= (first_step if isinstance(first_step, int) else 0):
        return []
    vital_values = [
        value if name.endswith("_per_seed") else [value] * (agents or 1)
        for name, value in row.items()
        if is_vital(name)
    ]
    failed = (i for values in vital_values for i, x in enumerate(values) if x is None or not math.isfinite(x))
    return sorted({i for i in failed if i < (agents or 1)})


class FiniteCheck:
    """Checks the metrics of a run as they arrive.

    With several agents, training continues with a warning while at least one agent has finite losses.
    Messages name the last finite checkpoint, which is protected from removal if training continues. `seed` is
    the first agent's seed; with `only_warns`, training always continues.
    """

    def __init__(self, algorithm: Any, checkpoints: Checkpoints, seed: int, only_warns: bool):
        self._algorithm, self._checkpoints = algorithm, checkpoints
        self._seed, self._only_warns = seed, only_warns
        self._warned: set[int] = set()  # agents that a warning has named
        # There are no losses before `learning_starts`.
        starts = getattr(algorithm, "learning_starts", 0)
        self._num_unchecked = -(-starts // algorithm.steps_per_iteration) if isinstance(starts, int) else 0

    def check(self, start: int, metrics: Mapping[str, np.ndarray]) -> None:
        """Checks the metrics `[n]` or `[n, agents]` of the `n` iterations after iteration `start`."""
        masks, num_unchecked = {}, max(0, self._num_unchecked - start)
        for name in filter(is_vital, metrics):
            mask = ~np.isfinite(metrics[name])
            mask[:num_unchecked] &= ~np.isnan(metrics[name][:num_unchecked])
            if mask.any():
                masks[name] = mask
        if masks:
            self._report(start, metrics, masks)

    def _report(self, start: int, metrics: Mapping[str, np.ndarray], masks: Mapping[str, np.ndarray]) -> None:
        """Raises `RunError` or warns; `masks` marks the values that are not finite, by metric."""
        mask = np.logical_or.reduce([*masks.values()])
        row = int(np.argmax(mask.reshape(len(mask), -1).any(axis=1)))
        names = [name for name in masks if masks[name][row].any()]
        problem = "infinite" if np.isinf(metrics[names[0]][row]).any() else "not a number"
        subject = f"{listed(names, 'and')} {'is' if len(names) == 1 else 'are'} {problem}"
        message = f"iteration {start + row + 1}: {subject}"
        agents = {0} if mask.ndim == 1 else {int(i) for i in np.flatnonzero(mask.any(axis=0))}
        if mask.ndim > 1:
            agent_list = agent_names(self._algorithm, self._seed, sorted(agents))
            message += f" for {len(agents)} of {mask.shape[1]} agents ({agent_list})"
        stops = not self._only_warns and bool(np.all(mask.any(axis=0)))
        if not stops and agents <= self._warned:
            return
        good = self._checkpoints.last_finite()
        note = "there is no checkpoint from before" if good is None else f"the last good checkpoint is {good}"
        if stops:
            cause = _likely_cause(metrics, row, self._algorithm)
            raise RunError(
                f"{message}: training stops, {note}: {cause}, or continue with --on-nan warn"
                " (in Python, on_nan='warn')"
            )
        if not self._warned and good is not None:
            self._checkpoints.protect(good)
            note += ", and is kept"
        self._warned |= agents
        warnings.warn(f"{message}: training goes on, {note}", FdgWarning, stacklevel=2)


def _likely_cause(metrics: Mapping[str, np.ndarray], row: int, algorithm: Any) -> str:
    """The likely cause of losses that are not finite in a row of metrics, and what to do."""
    for name, values in metrics.items():
        if name.startswith("reward_") and not np.isfinite(values[row]).all():
            return f"{name} is not finite either: check the reward function"
    if {"episodes", "episode_return"} <= metrics.keys():
        episodes, returns = (metrics[name][: row + 1] for name in ("episodes", "episode_return"))
        if np.any((episodes > 0) & ~(np.abs(returns) < _LARGEST_RETURN)):
            problem = (
                "not finite" if not np.isfinite(returns[episodes > 0]).all() else "too large to be squared"
            )
            return f"episode returns are {problem}: fix the environment's rewards (envs.check(env) checks)"
    unwrapped_env = env = getattr(algorithm, "env", None)
    while isinstance(unwrapped_env, envs.Wrapper):
        unwrapped_env = unwrapped_env.env
    # Environments on the host, which would start workers, and text tasks are not checked.
    if isinstance(unwrapped_env, envs.Vectorized):
        try:
            with warnings.catch_warnings(action="ignore"):
                envs.check(env, steps=_CHECK_STEPS)
        except FdgError as error:
            return f"{error}: fix that first (envs.check(env) checks again)"
    flags = {"learning_rate": "--learning-rate", "max_grad_norm": "--max-grad-norm"}
    of_algorithm = [flag for name, flag in flags.items() if hasattr(algorithm, name)]
    return f"try a smaller {' or '.join(of_algorithm)}" if of_algorithm else "try smaller updates"
