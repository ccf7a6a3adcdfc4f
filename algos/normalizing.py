"""Agents that normalise what they see, and what they are paid: the flags, and what stands behind them.

The statistics themselves are `algos/normalize.py`. They are part of what is learned: the actor reads them as
it reads parameters, so under a distribution policy with staleness they are as old as these.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import fdg
from algos import normalize
from algos.agent import Agent
from algos.hyperparameters import hyperparameter, require
from algos.normalize import RunningStatistics
from algos.parts import Part
from envs import TimeStep, features_and_mask, map_features


@dataclasses.dataclass(frozen=True)
class ObservationNormalizer(Part):
    """Whether observations are normalised."""

    normalize_observation: bool = hyperparameter(False, "normalise observations by running mean and variance")


@dataclasses.dataclass(frozen=True)
class Normalizers(ObservationNormalizer):
    """Whether observations and rewards are normalised."""

    normalize_reward: bool = hyperparameter(
        False, "divide rewards by the running standard deviation of the discounted return"
    )


class NormalizedAgent(Agent):
    """Base of agents with `normalizers`: an `ObservationNormalizer`, or on policy `Normalizers`."""

    # --- a fragment, of those that learn from replay; others observe where they learn ---

    @fdg.fragment("learner", in_axes=(None, 1), out_axes=None)
    def observe(self, statistics, observation):
        """The statistics after the observations `[T, B, *obs]` too."""
        return self._with_observed(statistics, observation)

    # --- parts ---

    def _first_statistics(self) -> Any:
        """Those of no observations; None where they are not normalised."""
        return normalize.init_observations(self.env.observation_space) if self.normalize_observation else None

    def _seen(self, statistics: Any, observation: Any) -> Any:
        """Observations `[..., *obs]` as the networks see them."""
        if not self.normalize_observation:
            return observation
        return map_features(lambda seen: normalize.normalize_observations(statistics, seen), observation)

    def _with_observed(self, statistics: Any, observation: Any) -> Any:
        """The statistics after the observations `[T, B, *obs]` too."""
        if not self.normalize_observation:
            return statistics
        return normalize.update_observations(statistics, features_and_mask(observation)[0])

    def _first_returns(self, shape: tuple[int, ...]) -> tuple[RunningStatistics | None, jax.Array | None]:
        """Statistics of no returns, and the returns so far, of environments `shape`; None if not needed."""
        return (normalize.init(()), jnp.zeros(shape)) if self.normalize_reward else (None, None)

    def _reward(self, time_step: TimeStep, running_return: Any, return_statistics: Any) -> tuple:
        """Rewards `[T, B]` that are learned from; and, where they are scaled, what their scale comes from."""
        if not self.normalize_reward:
            return time_step.reward, running_return, return_statistics
        running_return, returns = normalize.accumulate_returns(
            running_return, time_step.reward, time_step.done, self.discount
        )
        return_statistics = normalize.update(return_statistics, returns)
        return normalize.scale(return_statistics, time_step.reward), running_return, return_statistics

    def _normalized(self, statistics: Any, running_return: Any, trajectory: Any) -> tuple:
        """A rollout as the loss sees it; the returns so far, and both statistics, after it.

        `trajectory` is a named tuple with an `observation [T, B, *obs]` and a `time_step [T, B]`.
        """
        observation_statistics, return_statistics = statistics
        time_step = trajectory.time_step
        reward, running_return, return_statistics = self._reward(time_step, running_return, return_statistics)
        final = self._seen(observation_statistics, time_step.final_observation)
        seen = trajectory._replace(
            observation=self._seen(observation_statistics, trajectory.observation),
            time_step=time_step._replace(reward=reward, final_observation=final),
        )
        observation_statistics = self._with_observed(observation_statistics, trajectory.observation)
        return seen, running_return, (observation_statistics, return_statistics)

    def _check_common(self) -> None:
        super()._check_common()
        seen = self.env.observation_space
        require(
            self,
            normalize.has_statistics(seen) or not self.normalize_observation,
            f"normalize_observation=True: {seen} has no mean or variance; leave it False",
        )
