"""Preference learning from pairs (chosen, rejected) of responses, which are sampled or read from a file.

Shapes: `B` prompts and pairs; `G` responses per prompt, of which the best and the worst form a pair; `N = B *
G`; `R` tokens of a response; `n` pairs of a micro-batch.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

import fdg
from algos import registry
from algos.rlhf.language_agent import LanguageAgent
from algos.rlhf.objective import informative
from algos.rlhf.responses import Responses, Rollout, has_reward
from algos.rlhf.updates import Rows, run_updates
from fdg.settings.fields import hyperparameter, require, require_positive
from fdg.settings.parts import Part


class Pairs(NamedTuple):
    """Two responses to each prompt, one of them preferred."""

    chosen: Responses  # [B]
    rejected: Responses  # [B]
    differ: jax.Array  # [B] bool: False for a tie


class Minibatch(NamedTuple):
    """Pairs, with what else the loss needs."""

    pairs: Pairs  # [n]
    other_inputs: Any  # of the loss, such as the reference's log-probabilities: a pytree of [n, ...]
    weight: Any = ()  # [n] float32; () until the minibatch is known


def best_and_worst(responses: Responses, reward: jax.Array, group: int) -> Pairs:
    """The best and the worst response of each `group` of `Responses [N]`; of equal rewards the first."""
    is_rewarded = has_reward(responses).reshape(-1, group)
    grouped = reward.reshape(-1, group)

    def take(index: jax.Array) -> Responses:
        def take_of_groups(x: jax.Array) -> jax.Array:
            by_prompt = x.reshape(-1, group, *x.shape[1:])
            return jax.vmap(lambda rows, i: rows[i])(by_prompt, index)

        return jax.tree.map(take_of_groups, responses)

    best = jnp.argmax(jnp.where(is_rewarded, grouped, -jnp.inf), axis=1)
    worst = jnp.argmin(jnp.where(is_rewarded, grouped, jnp.inf), axis=1)
    return Pairs(take(best), take(worst), informative(reward, group, has_reward(responses)))


def ranking_accuracy(pairs: Pairs, margin: jax.Array) -> jax.Array:
    """Accuracy `[]`: the fraction of untied pairs with a margin `[B]` above zero; NaN if all are tied."""
    return jnp.sum((margin > 0) & pairs.differ) / jnp.sum(pairs.differ)


@dataclasses.dataclass(frozen=True)
class GroupSize(Part):
    """The number of responses to a prompt that are compared."""

    group_size: int = hyperparameter(4, "responses per prompt; the best and the worst are a pair")


@dataclasses.dataclass(frozen=True)
class PreferenceAgent(LanguageAgent):
    """Base of the algorithms that learn from the best and the worst of several responses to a prompt.

    A subclass has the part `GroupSize`, and two methods: `_scores(parameters, pairs, other_inputs)` gives a
    score of each chosen and of each rejected response, and `_pair_losses(chosen, rejected)` the losses of
    such scores; all are `[n]` float32. Prompts whose responses all have the same reward do not count. If the
    task has pairs (`text:preferences`) and no reward is set, the pairs are read from the task, and no
    responses are sampled.
    """

    learning_rate: float = hyperparameter(3e-4, "AdamW's step size")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "group_size")
        require(
            self, self.group_size >= 2, f"group_size={self.group_size}: a pair takes at least 2 responses"
        )

    @classmethod
    def rows_of(cls, values: Mapping[str, Any]) -> Rows:
        """The rows of an iteration's updates: one pair for each prompt."""
        return Rows(values["num_prompts"], values["num_prompts"], "pairs")

    @property
    def responses_per_prompt(self) -> int:
        """`G`, or two if pairs are read from a file."""
        return 2 if self._reads_pairs else self.group_size

    def example_rows(self, examples: dict[str, Any]) -> list[dict[str, Any]]:
        """Like `LanguageAgent.example_rows`, but without the task's reward if pairs are read."""
        rows = super().example_rows(examples)
        return (
            [{k: v for k, v in row.items() if k != "reward"} for row in rows] if self._reads_pairs else rows
        )

    @fdg.fragment("environment")
    def read(self, keys, numbers=()):
        """`keys [B]`, and row numbers for a file, -> `Pairs [B]` to train on."""
        return self._read(keys, "train", *numbers)

    @fdg.fragment("learner", in_axes=(None, None, 0, None), out_axes=None)
    def learn(self, parameters, optimizer_state, batch, key):
        """All updates on pairs `[B]`, with `other_inputs`: trained parameters, optimiser state, metrics."""
        pairs, other_inputs = batch

        def add_weights(minibatch):
            counts = minibatch.pairs.differ.astype(jnp.float32)
            return minibatch._replace(weight=counts / jnp.maximum(jnp.sum(counts), 1))

        samples = Minibatch(pairs, other_inputs)
        trained, optimizer_state, metrics = run_updates(
            self, add_weights, parameters, optimizer_state, samples, key, marks_first=False
        )
        metrics["informative"] = jnp.mean(pairs.differ, dtype=jnp.float32)
        return trained, optimizer_state, metrics

    def _loss(self, parameters, is_first, minibatch):
        weight = minibatch.weight
        chosen, rejected = self._scores(parameters, minibatch.pairs, minibatch.other_inputs)
        loss = jnp.sum(weight * self._pair_losses(chosen, rejected))
        margin = chosen - rejected
        return loss, {
            "loss": loss,
            "preference_accuracy": jnp.sum(weight * (margin > 0)),
            "margin": jnp.sum(weight * margin),
            "chosen_reward": self._score_scale * jnp.sum(weight * chosen),
            "rejected_reward": self._score_scale * jnp.sum(weight * rejected),
        }

    @property
    def _score_scale(self) -> float:
        """The reward of a score of one, in metrics."""
        return 1.0

    @property
    def _reads_pairs(self) -> bool:
        """True if pairs are read from the task: it has pairs, and no reward is set."""
        other_reward = getattr(self.env, "host_reward", None) or getattr(self, "reward_model", None)
        return other_reward is None and hasattr(getattr(self.env, "problem", None), "sides")

    def _read(self, keys: jax.Array, split: Literal["train", "test"], *numbers: jax.Array) -> Pairs:
        """Pairs of the task's file, by `keys [B]` and row `numbers [B]`."""
        chosen, rejected = (
            Responses(prompts, tokens, mask, mask)
            for prompts, tokens, mask in (
                dataclasses.replace(self.env, problem=side).demonstration(keys, split, *numbers)
                for side in self.env.problem.sides
            )
        )
        return Pairs(chosen, rejected, jnp.any(chosen.tokens != rejected.tokens, axis=1))

    def _pairs_of(self, rollout: Rollout) -> Pairs:
        return best_and_worst(rollout.responses, rollout.reward.total, self.group_size)

    def _held_out_pairs(self, key: jax.Array, count: int) -> Pairs:
        numbers = registry.option("speaker").held_out_numbers(self.env, count)
        return self._read(jax.random.split(key, count), "test", *numbers)

    def _version(self, state: Any) -> jax.Array:
        """The iteration: the network that responds is constant, so no count of updates is needed."""
        return state.iteration
