"""The group-relative family: GRPO, with Dr. GRPO, DAPO, GSPO, RLOO and REINFORCE++ as settings.

Several responses to each prompt are compared with each other, without a critic. The algorithms differ in
their `Objective` (`algos/rlhf/objective.py`): `GRPO(env, variant="dapo", convention="verl", clip_high=0.3)`.

Shapes: `B` prompts, `G` responses to each, `N = B * G`; `R` tokens of a response; `n` responses of a
minibatch or micro-batch; `M` micro-batches. `measures` are summands of metrics, before division.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

import fdg
from algos import registry
from algos.rlhf.language_agent import LanguageAgent, State
from algos.rlhf.objective import (
    Objective,
    divergence,
    informative,
    log_ratio,
    token_weights,
    undivided_weights,
)
from algos.rlhf.responses import (
    Responses,
    finished,
    has_reward,
    loss_mask,
    response_log_probs,
    rollouts,
    staleness,
)
from algos.rlhf.updates import accumulate_gradient, combine_measures, run_updates
from envs.text import Reward
from fdg.settings.fields import hyperparameter


class Batch(NamedTuple):
    """Responses to learn from."""

    responses: Responses  # [N]
    weight_mask: jax.Array  # [N, R] bool: the tokens in the loss
    sampled_log_prob: jax.Array  # [N, R] float32, at sampling, before top-k and top-p
    version: jax.Array  # [N] int32, iteration of the parameters that sampled them; [N, R] in a stream
    reference_log_prob: jax.Array  # [N, R] float32
    reward: Reward  # [N]


class Minibatch(NamedTuple):
    """Rows of a batch, with quantities that depend on the whole batch or minibatch."""

    batch: Batch
    old_log_prob: jax.Array  # [n, R] float32, the learner's before its first update
    advantage: jax.Array  # [n, R] float32
    weight: Any = ()  # [n, R] float32, of each token in the loss; () until the minibatch is known
    share: Any = ()  # [n, R] float32, of each token in means over the minibatch's tokens; likewise
    age: Any = ()  # [n, R] int32, iterations since a token was sampled; () if not needed


class Sums(NamedTuple):
    """Gradients summed over micro-batches, before division by their total weight."""

    gradient: Any
    weight: jax.Array  # [] float32, the divisor of gradient and loss: tokens, or responses
    tokens: jax.Array  # [] float32, the divisor of means over tokens


@dataclasses.dataclass(frozen=True)
class GRPO(LanguageAgent, presets="GRPO"):
    """Group-relative policy optimisation (Shao et al. 2024, arXiv 2402.03300) and its relatives.

    `variant` selects a paper, and `convention` a library's choices where papers leave room. Explicit values
    override both; None does not. `algorithm.objective` is the result. Frozen and hashable.

    Raises:
      FdgError: at construction, if a field is out of range, or a size does not divide another.

    >>> import envs
    >>> GRPO(env=envs.make("text:addition"), variant="dapo").objective.clip_high
    0.28
    """

    reward_settings = registry.option("reward model").Judge()
    stream_settings = registry.option("stream").Streams()
    token_entropy = registry.option("losses").TokenEntropy()
    num_prompts: int = hyperparameter(16, "prompts per iteration")
    group_size: int = hyperparameter(8, "responses per prompt, compared with each other")
    family = registry.option("variants").Family()
    old_log_prob: Literal["learner", "actor"] = hyperparameter(
        "learner",
        "denominator of ratios: the learner's log-probabilities before its updates, or those at sampling",
    )
    proximal: Literal["recompute", "interpolate"] = hyperparameter(
        "recompute",
        "the learner's log-probabilities before its updates: computed, or interpolated by age between"
        " those at sampling and now",
    )
    choices = registry.option("variants").ObjectiveChoices()

    def __post_init__(self) -> None:
        super().__post_init__()
        registry.option("variants").check(self)

    @classmethod
    def oversampling_factor(cls, values: Mapping[str, Any]) -> int:
        """The oversampling factor of dynamic sampling; by default the variant's."""
        return cls.family.oversampling_factor(values)

    @classmethod
    def superseded(cls, values: Mapping[str, Any]) -> frozenset[str]:
        """Fields to which presets do not apply: those that the chosen variant sets, and `old_log_prob` if a
        `correction` is chosen.
        """
        names = frozenset(cls.family.variant_values(values))
        return names | {"old_log_prob"} if values.get("correction", "none") != "none" else names

    @property
    def objective(self) -> Objective:
        """The objective: variant, convention and explicit values."""
        return self.family.objective(self.choices)

    def init(self, key: jax.Array) -> State:
        """The initial state."""
        return self._initial_state(key, self._candidates, self._has_reference)

    def iterate(self, state: State) -> tuple[State, dict[str, jax.Array]]:
        """Samples responses to new prompts, and makes all updates on them."""

        def batch_of(rollout):
            responses, sampled, version, reward, _ = rollout
            reference_log_prob = jnp.zeros(sampled.shape)
            if self._has_reference:
                reference_log_prob = self.refer(self._reference_parameters(state), responses)
            mask = loss_mask(self, rollout)
            return Batch(responses, mask, sampled, version, reference_log_prob, reward)

        def learn_part(sums, batch):
            return self.learn_part(state.parameters, state.iteration, sums, batch)

        if self._learns_by_parts:
            zeros = jax.tree.map(jnp.zeros_like, self._trained(state.parameters))
            sums = Sums(zeros, jnp.float32(0), jnp.float32(0))
            batch, stream, sums_and_measures = rollouts(
                self, state, self._candidates, batch_of, learn_part, sums
            )
            trained, optimizer_state, metrics = self.learn_sums(
                state.parameters, state.optimizer_state, state.iteration, batch, *sums_and_measures
            )
        else:
            batch, stream, _ = rollouts(self, state, self._candidates, batch_of)
            trained, optimizer_state, metrics = self.learn(
                state.parameters, state.optimizer_state, state.iteration, batch, self._iteration_key(state, 2)
            )
        metrics |= registry.option("stream").metrics(self, state.stream, stream)
        return self._next_state(state, trained, optimizer_state, stream=stream), metrics

    # --- fragments; `problems`, `respond`, `score`, `refer`, `gradient` and `update` are inherited ---

    @fdg.fragment("learner", in_axes=(None, None, None, 0, None), out_axes=None)
    def learn(self, parameters, optimizer_state, iteration, batch, key):
        """All updates on a `Batch [N]`: trained parameters, optimiser state, metrics."""
        metrics = self._batch_metrics(batch, iteration)
        samples = self._samples(parameters, self._select_responses(batch), iteration)

        def add_weights(minibatch):
            mask = minibatch.batch.weight_mask
            return minibatch._replace(weight=self._weights(mask), share=self._shares(mask))

        trained, optimizer_state, update_metrics = run_updates(
            self, add_weights, parameters, optimizer_state, samples, key
        )
        if self._needs_old:
            sampled, mask = samples.batch.sampled_log_prob, samples.batch.responses.policy_mask
            metrics |= self._log_prob_differences(samples.old_log_prob, sampled, mask)
        return trained, optimizer_state, {**metrics, **update_metrics}

    @fdg.fragment("learner", in_axes=(None, None, None, 0), out_axes=None)
    def learn_part(self, parameters, iteration, sums, batch):
        """Adds the gradient of a micro-batch, a `Batch [n]`, to `Sums`; also returns its measures."""
        samples = self._samples(parameters, self._select_responses(batch), iteration)
        objective, mask = self.objective, samples.batch.weight_mask
        weight, count = undivided_weights(mask, objective.aggregation, self.longest, objective.count_empty)
        share, tokens = undivided_weights(mask, "token_mean", self.longest)
        gradient_of = functools.partial(self.gradient, parameters, jnp.bool(True))
        samples = samples._replace(weight=weight, share=share)
        gradient, measures = accumulate_gradient(gradient_of, samples, self.rows_per_micro_batch)
        return jax.tree.map(jnp.add, sums, Sums(gradient, count, tokens)), measures

    @fdg.fragment("learner", in_axes=(None, None, None, 0, None, None), out_axes=None)
    def learn_sums(self, parameters, optimizer_state, iteration, batch, sums, measures):
        """`learn` for a `Batch [N]`, given the `Sums` and measures `[M]` of its micro-batches."""
        weight, tokens = jnp.maximum(sums.weight, 1), jnp.maximum(sums.tokens, 1)
        gradient = jax.tree.map(lambda x: x / weight, sums.gradient)
        trained, optimizer_state = self.update(gradient, optimizer_state, self._trained(parameters))
        update_metrics = {
            name: x if name.endswith("_max") else x / (weight if name.endswith("loss") else tokens)
            for name, x in combine_measures(measures).items()
        }
        update_metrics["gradient_norm"] = optax.tree.norm(gradient)
        return trained, optimizer_state, {**self._batch_metrics(batch, iteration), **update_metrics}

    def _loss(self, parameters, is_first, minibatch):
        """The contribution of rows to the loss and metrics of a minibatch.

        Contributions are added; of metrics whose name ends in `_max`, the largest is taken.
        """
        objective, batch, mask = self.objective, minibatch.batch, minibatch.batch.weight_mask
        losses = registry.option("losses")
        log_prob, entropy = response_log_probs(self.network, parameters, batch.responses, self.temperature)
        # Before the first update, both policies of the ratio are equal. This makes the ratio exactly 1.
        current = jax.lax.stop_gradient(log_prob)
        old = jnp.where(is_first, current, minibatch.old_log_prob)
        if self.proximal == "interpolate":
            old = losses.interpolate(batch.sampled_log_prob, current, minibatch.age)
        denominator = batch.sampled_log_prob if self.old_log_prob == "actor" else old
        log_ratios = log_ratio(log_prob, denominator, mask, objective.ratio_level)
        advantage = minibatch.advantage
        cost = objective.cost(log_prob, log_ratios, advantage, mask)
        cost = cost * losses.correction(
            batch.sampled_log_prob, old, mask, objective.correction, objective.correction_cap
        )
        policy_loss = jnp.sum(minibatch.weight * cost)
        loss = self.token_entropy.subtract_bonus(policy_loss, minibatch.weight, entropy)
        ratio = jnp.where(mask, jnp.exp(jax.lax.stop_gradient(log_ratios)), 1.0)
        token_means = {
            "entropy": entropy,
            "approx_kl": divergence(log_prob, denominator, "k3"),
            "clip_fraction": objective.clipped(log_ratios, advantage),
        }
        token_maxima = {
            "ratio_max": ratio,
            "first_ratio_error_max": jnp.where(is_first, jnp.abs(ratio - 1.0), 0.0),
        }
        if not self._needs_old:  # else `learn` computes this metric before the updates
            difference = jnp.where(mask & is_first, jnp.abs(current - batch.sampled_log_prob), 0.0)
            # Only the first update has a difference, but metrics are means over all updates.
            token_means["log_prob_difference"] = difference * self.updates_per_iteration
            token_maxima["log_prob_difference_max"] = difference
        if self._has_reference:
            token_means["kl"] = divergence(log_prob, batch.reference_log_prob, "k3")
            if objective.kl_in == "loss":
                kl = divergence(log_prob, batch.reference_log_prob, objective.kl_estimator)
                loss = loss + objective.kl_coefficient * jnp.sum(minibatch.weight * kl)
        return loss, {
            "loss": loss,
            "policy_loss": policy_loss,
            **{name: jnp.sum(minibatch.share * x) for name, x in token_means.items()},
            **{name: jnp.max(x) for name, x in token_maxima.items()},
        }

    def _samples(self, parameters: Any, batch: Batch, iteration: Any = 0) -> Minibatch:
        """The batch with log-probabilities before the first update and with advantages."""
        objective, mask = self.objective, batch.weight_mask
        old = batch.sampled_log_prob  # if the learner's are not needed
        if self._needs_old:
            old = self._log_probs(parameters, batch.responses)
        lengths = jnp.sum(batch.responses.policy_mask, axis=1, dtype=jnp.int32)
        reward = objective.reward(batch.reward.total, lengths, self.longest)
        rewarded = has_reward(batch.responses)
        advantage = objective.advantage(
            reward, old, batch.reference_log_prob, mask, self.group_size, rewarded
        )
        age: Any = ()
        if self.proximal == "interpolate":
            age = jnp.broadcast_to((iteration - batch.version).reshape(len(mask), -1), mask.shape)
        return Minibatch(batch, old, advantage, age=age)

    def _select_responses(self, batch: Batch) -> Batch:
        """Masks the responses that the objective excludes; with oversampling, keeps `num_prompts` groups."""
        mask = batch.weight_mask
        if self.objective.mask_truncated:
            mask = mask & finished(batch.responses, self._stops)[:, None]
        if not self.objective.dynamic_sampling:
            return batch._replace(weight_mask=mask)
        is_informative = informative(batch.reward.total, self.group_size, has_reward(batch.responses))
        mask = mask & jnp.repeat(is_informative, self.group_size)[:, None]
        batch = batch._replace(weight_mask=mask)
        if self._candidates == self.num_prompts:
            return batch
        groups = jnp.argsort(~is_informative, stable=True)[: self.num_prompts]
        rows = (groups[:, None] * self.group_size + jnp.arange(self.group_size)[None]).reshape(-1)
        return jax.tree.map(lambda x: x[rows], batch)

    def _batch_metrics(self, batch: Batch, iteration: jax.Array) -> dict[str, jax.Array]:
        reward, rewarded = batch.reward, has_reward(batch.responses)
        is_informative = informative(reward.total, self.group_size, rewarded)
        return {
            **self._response_metrics(batch.responses, reward, rewarded),
            "informative": jnp.mean(is_informative, dtype=jnp.float32),
            **staleness(batch.version, iteration, batch.responses.policy_mask),
        }

    def _weights(self, mask: jax.Array) -> jax.Array:
        objective = self.objective
        return token_weights(mask, objective.aggregation, self.longest, objective.count_empty)

    @property
    def _has_reference(self) -> bool:
        return self.objective.kl_coefficient > 0

    @property
    def _learns_by_parts(self) -> bool:
        """True if gradients of micro-batches can be added up: no term of the loss needs the whole batch."""
        needs_batch = self.objective.scale in ("batch", "tokens") or self._candidates > self.num_prompts
        one_update = self.updates_per_iteration == 1
        return self.micro_batches > 1 and one_update and not (needs_batch or self._needs_old)

    @property
    def _needs_old(self) -> bool:
        """True if the learner's log-probabilities before the first update are needed."""
        objective = self.objective
        for_rewards = objective.kl_coefficient > 0 and objective.kl_in != "loss"
        by_learner = self.old_log_prob == "learner" or objective.correction != "none"
        for_ratios = by_learner and self.proximal == "recompute"
        return for_rewards or (for_ratios and self.updates_per_iteration > 1)

    @property
    def _candidates(self) -> int:
        return self.num_prompts * max(1, self.objective.dynamic_sampling)
