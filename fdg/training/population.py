"""Population-based training (Jaderberg et al. 2017, arXiv 1711.09846) inside the training program.

Every `every` iterations, each of the worst agents copies weights and hyperparameters of one of the best
(*exploit*, by truncation selection: section 4.1.1) and perturbs the hyperparameters by a factor (*explore*).
Environments, replay buffers and random keys stay with the agent.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fdg.errors import FdgError
from fdg.keys import is_key
from fdg.training.statistics import is_vital

FACTORS = (0.8, 1.2)  # one of these multiplies each hyperparameter (section 4.1.1)
_SHARE = 0.2  # the fraction of the agents that is replaced; as many of the best are copied (section 4.1.1)


class Membership(NamedTuple):
    """The part of an agent's state that belongs to the population."""

    key: jax.Array  # random key of copying: chooses agents and perturbs
    iterations: jax.Array  # [] int32, iterations since agents last copied
    total: jax.Array  # [] float32, sum of episode returns since then; nan if the agent failed
    episodes: jax.Array  # [] float32, episodes since then
    score: jax.Array  # [] float32, mean return before agents last copied; nan if unknown


@dataclasses.dataclass(frozen=True)
class Population:
    """When and how agents copy from each other; implements `fdg.agents.BetweenAgents`.

    `state` is a `SweptState` of `fdg.training.sweep`: `hyperparameters`, `state`, `membership`.
    """

    every: int  # iterations from copying to copying
    bounds: tuple[tuple[str, float, float], ...]  # `(name, lowest, highest)` of each hyperparameter

    def __post_init__(self):
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise FdgError(f"exploit_every={self.every!r}: give a whole number of iterations, at least 1")

    @property
    def note(self) -> str:
        """The sentence in the printed plan."""
        period = "iteration" if self.every == 1 else f"{self.every} iterations"
        return (
            f"every {period}, the worst {_SHARE:.0%} of the agents take over what the best have learned;"
            " bytes within the group are counted for an iteration in which they copy"
        )

    def initial_membership(self, key: jax.Array) -> Membership:
        """An agent's initial membership, from its key."""
        key = jax.random.fold_in(key, 0x504254)  # a different stream than the algorithm's
        return _restart(key, jnp.float32(jnp.nan))

    def add_iteration(self, member: Membership, metrics: Mapping[str, jax.Array]) -> Membership:
        """The membership after one more iteration; the metric `episode_return` is a mean over `episodes`."""
        if "episode_return" not in metrics:
            raise FdgError(
                "exploit_every: the algorithm's metrics have no episode_return, by which agents are compared"
            )
        episode_return = jnp.asarray(metrics["episode_return"], jnp.float32)
        # Without `episodes`, a return that is not finite means that no episode ended.
        episodes = jnp.asarray(metrics.get("episodes", jnp.isfinite(episode_return)), jnp.float32)
        total = member.total + jnp.where(episodes > 0, episode_return * episodes, 0.0)
        vital = [jnp.isfinite(value) for name, value in metrics.items() if is_vital(name)]
        return member._replace(
            iterations=member.iterations + 1,
            total=jnp.where(jnp.all(jnp.array(vital, bool)), total, jnp.nan),
            episodes=member.episodes + episodes,
        )

    # --- fdg.agents.BetweenAgents ---

    def due(self, state: Any) -> jax.Array:
        """Whether agents copy after this iteration: [] bool."""
        return state.membership.iterations >= self.every

    def known(self, state: Any) -> jax.Array:
        """The mean return since agents last copied, else before; nan if the agent failed since then."""
        member = state.membership
        has_new = (member.episodes > 0) | jnp.isnan(member.total)
        return jnp.where(has_new, member.total / jnp.maximum(member.episodes, 1.0), member.score)

    def source(self, scores: jax.Array, agent: jax.Array, state: Any) -> jax.Array:
        """The agent to copy from, [] int32: for one of the worst, a better one of the best; else `agent`."""
        count = max(1, int(_SHARE * scores.shape[0]))
        ranked = jnp.where(jnp.isfinite(scores), scores, -jnp.inf)
        order = jnp.argsort(-ranked)  # stable: in a tie, the first is better
        is_bad = jnp.any(order[-count:] == agent)
        candidate = order[jax.random.randint(jax.random.fold_in(state.membership.key, 0), (), 0, count)]
        return jnp.where(is_bad & (ranked[candidate] > ranked[agent]), candidate, agent).astype(jnp.int32)

    def taken(self, state: Any, axes: Sequence[int | None]) -> list[bool]:
        """Whether each leaf is copied: all but keys, memberships and leaves with a batch axis (`axes`)."""
        may_copy = state._replace(
            hyperparameters=jax.tree.map(lambda _: True, state.hyperparameters),
            state=jax.tree.map(lambda leaf: not is_key(leaf.dtype), state.state),
            membership=jax.tree.map(lambda _: False, state.membership),
        )
        leaves = jax.tree.leaves(may_copy)
        return [shared and axis is None for shared, axis in zip(leaves, axes, strict=True)]

    def after(self, state: Any, source: jax.Array, agent: jax.Array) -> Any:
        """Perturbs the hyperparameters of an agent that has copied, and restarts its counters."""
        has_copied, key = source != agent, state.membership.key
        hyperparameters = {}
        for i, (name, low, high) in enumerate(self.bounds):
            increases = jax.random.bernoulli(jax.random.fold_in(key, i + 1))
            value = state.hyperparameters[name]
            perturbed = jnp.clip(value * jnp.where(increases, FACTORS[1], FACTORS[0]), low, high)
            hyperparameters[name] = jnp.where(has_copied, perturbed, value)
        # nan: the copied weights did not earn the old score
        score = jnp.where(has_copied, jnp.nan, self.known(state))
        member = _restart(jax.random.fold_in(key, len(self.bounds) + 1), score)
        return state._replace(hyperparameters=hyperparameters, membership=member)


def _restart(key: jax.Array, score: jax.Array) -> Membership:
    return Membership(key, jnp.int32(0), jnp.float32(0), jnp.float32(0), score)
