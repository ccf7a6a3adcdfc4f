"""A trained agent at work, one call an action: what `run.policy` is."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs import MaskedObservation, composite, features_and_mask, num_agents
from fdg.errors import FdgError


class Acting:
    """A trained agent that answers to observations: NumPy arrays in, NumPy arrays out.

    The first call compiles. What the agent remembers is kept from call to call, for as many environments as
    the last call had; `reset()`, or `start`, says that episodes begin.

    Args:
      algorithm: how it acts, and where (`actor`, `env`).
      state: the algorithm's own, of one agent.
      greedy: with the most probable action, else with one drawn as in training.
      seed: of what is drawn.
    """

    def __init__(self, algorithm: Any, state: Any, greedy: bool = True, seed: int = 0):
        self.greedy = greedy
        self._algorithm, self._state = algorithm, state
        self._act: Callable[..., Any] = jax.jit(self._act_with, static_argnames="greedy")
        self._key, self._calls = jax.random.key(seed), 0
        self.memory: Any = None  # of `N` environments; None before the first call
        self._count: int | None = None  # environments that the memory is of

    def __call__(self, observation: Any, greedy: bool | None = None, start: Any = None) -> np.ndarray:
        """An action for an observation, or actions for a batch of them.

        Args:
          observation: `[*obs]` of one environment, or `[N, *obs]`; of several agents `[A, *obs]` or
            `[N, A, *obs]`. In parts, where the environment's are (`envs.Dict`, `envs.Tuple`); what only
            critics see may be left out. Where actions can be forbidden, an `envs.MaskedObservation`; one
            without a mask allows all.
          greedy: None for what was said when this was made.
          start: bool, or `[N]` of them: an episode begins with this observation, so nothing of the last one
            is remembered. None: only if this is the first call (or the number of environments is another).

        Returns:
          The action as the environment takes it: `[*action]` or `[N, *action]` (with agents: `A` first).

        Raises:
          FdgError: the observation has another shape than the environment's, or is traced.
        """
        observation, single = self._batch(observation)
        count = jax.tree.leaves(observation)[0].shape[0]
        begins = np.zeros(count, bool)
        if count != self._count:
            self.memory = self._algorithm.actor(self._state).memory(count)
            self._count, begins = count, np.ones(count, bool)
        if start is not None:
            begins = begins | np.broadcast_to(np.asarray(start, bool), count)
        key = jax.random.fold_in(self._key, self._calls)
        self._calls += 1
        action, self.memory = self._act(
            self._state,
            self.memory,
            observation,
            begins,
            key,
            greedy=self.greedy if greedy is None else bool(greedy),
        )
        found = np.asarray(action)
        return found[0] if single else found

    def reset(self) -> None:
        """Forgets: the next observation begins an episode."""
        self.memory = self._count = None

    def _act_with(self, state, memory, observation, start, key, greedy):
        keys = jax.random.split(key, start.shape[0])
        return self._algorithm.actor(state).act(memory, observation, start, keys, greedy)

    def _batch(self, observation: Any) -> tuple[Any, bool]:
        """The observation with a leading axis of environments, and whether that had to be added."""
        env = self._algorithm.env
        space = env.observation_space
        given, mask = features_and_mask(observation)
        if isinstance(given, jax.core.Tracer):
            raise FdgError(
                "run.policy takes arrays, and this one is being traced: inside jit, use run.actor(), whose"
                " act(memory, observation, start, keys, greedy) is a pure function"
            )
        agents = () if num_agents(env) is None else (num_agents(env),)
        try:
            given = composite.public_part(space, given)
        except (KeyError, IndexError, TypeError, ValueError):
            given = None
        seen_space = composite.public(space)
        if composite.is_composite(space) and not composite.has_parts_of(seen_space, given):
            raise FdgError(
                f"an observation of {env.name} has the parts of {seen_space!r:.300}: give all of them"
            )

        def batch(part: Any, value: Any) -> tuple[np.ndarray, bool]:
            expected = (*agents, *part.shape)
            try:
                features = np.asarray(value, part.dtype)
            except (TypeError, ValueError) as error:
                raise FdgError(
                    f"an observation of {env.name} is an array {list(expected)}: {error}"
                ) from error
            if (
                features.shape[features.ndim - len(expected) :] != expected
                or features.ndim > len(expected) + 1
            ):
                raise FdgError(
                    f"an observation of shape {list(features.shape)}: those of {env.name} are"
                    f" {list(expected)}, and batches of them {['N', *expected]}".replace("'", "")
                )
            single = features.ndim == len(expected)
            return (features[None] if single else features), single

        if not composite.is_composite(space):
            array, single = batch(space, given)
            seen: Any = jnp.asarray(array)
        else:
            spaces = composite.tree(seen_space)
            both = [
                batch(part, value)
                for part, value in zip(jax.tree.leaves(spaces), jax.tree.leaves(given), strict=True)
            ]
            if len({(array.shape[0], single) for array, single in both}) != 1:
                raise FdgError(f"the parts of an observation of {env.name} are of different numbers of them")
            single = both[0][1]
            seen = jax.tree.unflatten(jax.tree.structure(spaces), [jnp.asarray(array) for array, _ in both])
            seen = composite.with_zeros(space, seen, (both[0][0].shape[0], *agents))
        if mask is None:
            return seen, single
        mask = jnp.asarray(mask, bool)
        return MaskedObservation(seen, mask[None] if single else mask), single
