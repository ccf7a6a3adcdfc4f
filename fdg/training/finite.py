"""Detects infinite and NaN losses immediately, before they are saved in a checkpoint."""

import math
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

import envs
from fdg.errors import FdgError, FdgWarning, RunError, listed
from fdg.training.checkpoint import Checkpoints
from fdg.training.job import Job
from fdg.training.sweep import agent_names, without_sweep

_STEPS = 64  # random steps to search for rewards and observations that are not finite
_WORDS = ("loss", "grad")


def is_vital(name: str) -> bool:
    """True for metrics of losses and gradients, which must be finite."""
    return any(word in name for word in _WORDS)


def failed_agents(last: Mapping[str, Any] | None, config: Mapping[str, Any], agents: int | None) -> list[int]:
    """Positions of the agents whose losses or gradients are not finite in the last row."""
    begins = (config.get("hyperparameters") or {}).get("learning_starts")
    if last is None or last["env_steps"] <= (begins if isinstance(begins, int) else 0):
        return []
    each = [
        value if name.endswith("_per_seed") else [value] * (agents or 1)
        for name, value in last.items()
        if is_vital(name)
    ]
    bad = (i for values in each for i, one in enumerate(values) if one is None or not math.isfinite(one))
    return sorted({i for i in bad if i < (agents or 1)})


class Finite:
    """Checks the metrics of a run as they arrive.

    With several agents, training continues with a warning while at least one agent has finite losses.
    Messages name the last finite checkpoint, which is kept if training continues.
    """

    def __init__(self, job: Job, checkpoints: Checkpoints):
        self._job, self._checkpoints = job, checkpoints
        self._warned: set[int] = set()  # agents
        # There are no losses before `learning_starts`.
        starts = getattr(job.algorithm, "learning_starts", 0)
        self._silent = -(-starts // job.steps_per_iteration) if isinstance(starts, int) else 0

    def look(self, before: int, metrics: Mapping[str, np.ndarray]) -> None:
        """Checks the metrics of the iterations after `before`: `[n]` or `[n, agents]`."""
        found = {}
        for name, values in metrics.items():
            if not is_vital(name) or not np.issubdtype(values.dtype, np.floating):
                continue
            bad = ~np.isfinite(values)
            silent = max(0, self._silent - before)
            bad[:silent] &= ~np.isnan(values[:silent])
            if bad.any():
                found[name] = bad
        if found:
            self._act(before, metrics, found)

    def _act(self, before: int, metrics: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray]) -> None:
        """Stops or warns; `found` marks the values that are not finite."""
        rows = {name: int(np.argmax(bad.reshape(len(bad), -1).any(axis=1))) for name, bad in found.items()}
        row = min(rows.values())
        first = [name for name in found if rows[name] == row]
        values, bad = metrics[first[0]], found[first[0]]
        what = "infinite" if np.isinf(values[row][bad[row]]).any() else "not a number"
        which = f"{listed(first, 'and')} {'is' if len(first) == 1 else 'are'} {what}"
        said = f"iteration {before + row + 1}: {which}"
        agents = {0} if bad.ndim == 1 else {int(i) for i in np.flatnonzero(bad.any(axis=0))}
        if bad.ndim > 1:
            which = agent_names(self._job.algorithm, self._job.seed, sorted(agents))
            said += f" for {len(agents)} of {bad.shape[1]} agents ({which})"
        stops = self._job.on_nan == "stop" and bool(np.all(bad.any(axis=0)))
        if not stops and agents <= self._warned:
            return
        good = self._checkpoints.last_finite()
        kept = "there is no checkpoint from before" if good is None else f"the last good checkpoint is {good}"
        if stops:
            parts = [name for name in metrics if name.startswith("reward_")]
            odd = [name for name in parts if not np.isfinite(metrics[name][row]).all()]
            if odd:
                cause = f"so is {odd[0]}: look at what the reward says"
            elif _has_bad_returns(metrics, row):
                cause = "so is the return of episodes: mend the environment's rewards (envs.check(env) looks)"
            else:
                cause = _mistake_of(without_sweep(self._job.algorithm)) or (
                    "try a smaller --learning-rate or --max-grad-norm"
                )
            raise RunError(f"{said}: training stops, {kept}: {cause}, or --on-nan warn to go on regardless")
        if not self._warned and good is not None:
            self._checkpoints.protect(good)
            kept += ", and is kept"
        self._warned |= agents
        warnings.warn(f"{said}: training goes on, {kept}", FdgWarning, stacklevel=2)


def _mistake_of(algorithm: Any) -> str | None:
    """Checks an algorithm's environment with `envs.check`, which finds NaN in rewards, for instance."""
    inside = env = getattr(algorithm, "env", None)
    while isinstance(inside, envs.Wrapper):
        inside = inside.env
    if not isinstance(inside, envs.Vectorized):  # on the host, where workers would start, or of text
        return None
    try:
        with warnings.catch_warnings(action="ignore"):
            envs.check(env, steps=_STEPS)
    except FdgError as error:
        return f"{error}: mend that first (envs.check(env) looks again)"
    return None


def _has_bad_returns(metrics: Mapping[str, np.ndarray], row: int) -> bool:
    """Whether an episode so far had a return that is not finite."""
    episodes, returns = metrics.get("episodes"), metrics.get("episode_return")
    if episodes is None or returns is None:
        return False
    return bool(np.any((episodes[: row + 1] > 0) & ~np.isfinite(returns[: row + 1])))
