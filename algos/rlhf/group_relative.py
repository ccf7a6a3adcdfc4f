"""The group-relative family: GRPO, with Dr. GRPO, DAPO, GSPO, RLOO and REINFORCE++ as settings.

Several responses to each prompt are compared with each other, without a critic. The algorithms differ in
their `Objective` (`algos/rlhf/objective.py`): `GRPO(env, variant="dapo", convention="verl", clip_high=0.3)`.

Shapes: `B` prompts, `G` responses to each, `N = B * G`; `R` tokens of a response; `n` responses of a
minibatch or micro-batch.
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
    masked_mean,
    token_weights,
    weight_sums,
)
from algos.rlhf.responses import Responses, finished, has_reward, loss_mask, rollouts, scores, staleness
from algos.rlhf.updates import accumulate_gradient, run_updates, together
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
    weight: jax.Array  # [n, R] float32, of each token in the loss
    share: jax.Array  # [n, R] float32, of each token in means over the minibatch's tokens
    age: Any = ()  # [n, R] int32, updates since a token was sampled; () if not needed


class Sums(NamedTuple):
    """Gradients and losses summed over micro-batches, not yet divided."""

    gradient: Any
    weight: jax.Array  # [] float32, the divisor: tokens, or responses
    tokens: jax.Array  # [] float32


@dataclasses.dataclass(frozen=True)
class GRPO(LanguageAgent, presets="GRPO"):
    """Group-relative policy optimisation (Shao et al. 2024, arXiv 2402.03300) and its relatives.

    `variant` selects a paper, `convention` a library's choices where papers leave room; explicit values
    override both, and None keeps them: `algorithm.objective` is the result. Frozen and hashable.

    Raises:
      FdgError: (construction) a field is out of range, or sizes do not divide.

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
    def times_drawn(cls, values: Mapping[str, Any]) -> int:
        """The oversampling factor of dynamic sampling; by default the variant's."""
        return cls.family.times_drawn(values)

    @classmethod
    def gives_way(cls, values: Mapping[str, Any]) -> frozenset[str]:
        """A variant's values override a preset; a correction needs samples of an older policy."""
        names = frozenset(cls.family.own_values(values))
        return names | {"old_log_prob"} if values.get("correction", "none") != "none" else names

    @property
    def objective(self) -> Objective:
        """The objective: variant, convention and explicit values."""
        return self.family.objective(self.choices)

    def init(self, key: jax.Array) -> State:
        """The initial state."""
        return self._first_state(key, self._candidates, self._has_reference)

    def iterate(self, state: State) -> tuple[State, dict[str, jax.Array]]:
        """Responses to new prompts, and all updates on them."""

        def judged(rollout):
            responses, sampled, version, reward, _ = rollout
            reference_log_prob = jnp.zeros(sampled.shape)
            if self._has_reference:
                reference_log_prob = self.refer(self._reference_parameters(state), responses)
            counted = loss_mask(self, rollout)
            return Batch(responses, counted, sampled, version, reference_log_prob, reward)

        def learned(sums, batch):
            return self.learn_part(state.parameters, state.iteration, sums, batch)

        if self._learns_by_parts:
            none = jax.tree.map(jnp.zeros_like, self._trained(state.parameters))
            batch, stream, rest = rollouts(
                self, state, self._candidates, judged, learned, Sums(none, jnp.float32(0), jnp.float32(0))
            )
            trained, optimizer_state, metrics = self.learn_sums(
                state.parameters, state.optimizer_state, state.iteration, batch, *rest
            )
        else:
            batch, stream, _ = rollouts(self, state, self._candidates, judged)
            trained, optimizer_state, metrics = self.learn(
                state.parameters, state.optimizer_state, state.iteration, batch, self._iteration_key(state, 2)
            )
        metrics |= registry.option("stream").measures(self, state.stream, stream)
        return self._next_state(state, trained, optimizer_state, stream=stream), metrics

    # --- fragments; `problems`, `respond`, `score`, `refer`, `gradient` and `update` are inherited ---

    @fdg.fragment("learner", in_axes=(None, None, None, 0, None), out_axes=None)
    def learn(self, parameters, optimizer_state, iteration, batch, key):
        """All updates on a `Batch [N]`: trained parameters, optimiser state, metrics."""
        metrics = self._measured(batch, iteration)
        samples = self._samples(parameters, self._chosen(batch), iteration)

        def weighed(minibatch):
            mask = minibatch.batch.weight_mask
            return minibatch._replace(weight=self._weights(mask), share=self._shares(mask))

        trained, optimizer_state, measures = run_updates(
            self, weighed, parameters, optimizer_state, samples, key, self.num_prompts
        )
        return trained, optimizer_state, {**metrics, **self._mismatch(samples), **measures}

    @fdg.fragment("learner", in_axes=(None, None, None, 0), out_axes=None)
    def learn_part(self, parameters, iteration, sums, batch):
        """Adds a micro-batch, a `Batch [n]`, to `Sums`; returns these and the metrics, both undivided."""
        samples, wanted = self._samples(parameters, self._chosen(batch), iteration), self.objective
        mask = samples.batch.weight_mask
        weight, count = weight_sums(mask, wanted.aggregation, self.longest, wanted.count_empty)
        share, tokens = weight_sums(mask, "token_mean", self.longest)
        slope = functools.partial(self.gradient, parameters, jnp.bool(True))
        gradient = accumulate_gradient(slope, samples._replace(weight=weight, share=share), self.at_once)
        return jax.tree.map(jnp.add, sums, Sums(gradient[0], count, tokens)), gradient[1]

    @fdg.fragment("learner", in_axes=(None, None, None, 0, None, None), out_axes=None)
    def learn_sums(self, parameters, optimizer_state, iteration, batch, sums, measures):
        """`learn` for a `Batch [N]` with the `Sums` of its micro-batches, and metrics `[M]`."""
        weight, tokens = jnp.maximum(sums.weight, 1), jnp.maximum(sums.tokens, 1)
        gradient = jax.tree.map(lambda x: x / weight, sums.gradient)
        trained, optimizer_state = self.update(gradient, optimizer_state, self._trained(parameters))
        whole = {
            name: x if name.endswith("_max") else x / (weight if name.endswith("loss") else tokens)
            for name, x in together(measures).items()
        }
        metrics = {**self._measured(batch, iteration), **whole, "gradient_norm": optax.tree.norm(gradient)}
        return trained, optimizer_state, metrics

    def _loss(self, parameters, is_first, minibatch):
        """A minibatch's contribution to the loss and metrics, which add up (`_max`: the maximum)."""
        wanted, batch, mask = self.objective, minibatch.batch, minibatch.batch.weight_mask
        losses = registry.option("losses")
        log_prob, entropy = scores(self.network, parameters, batch.responses, self.temperature)
        # Before the first update both policies of the ratio are equal: it is 1, regardless of rounding.
        now = jax.lax.stop_gradient(log_prob)
        old = jnp.where(is_first, now, minibatch.old_log_prob)
        if self.proximal == "interpolate":
            old = losses.interpolated(batch.sampled_log_prob, now, minibatch.age)
        behind = batch.sampled_log_prob if self.old_log_prob == "actor" else old
        ratios = log_ratio(log_prob, behind, mask, wanted.ratio_level)
        advantage = minibatch.advantage
        cost = wanted.cost(log_prob, ratios, advantage, mask)
        cost = cost * losses.correction(
            batch.sampled_log_prob, old, mask, wanted.correction, wanted.correction_cap
        )
        policy_loss = jnp.sum(minibatch.weight * cost)
        loss = self.token_entropy.subtracted(policy_loss, minibatch.weight, entropy)
        ratio = jnp.where(mask, jnp.exp(jax.lax.stop_gradient(ratios)), 1.0)
        means = {
            "entropy": entropy,
            "approx_kl": divergence(log_prob, behind, "k3"),
            "clip_fraction": wanted.clipped(ratios, advantage),
        }
        largest = {
            "ratio_max": ratio,
            "first_ratio_error_max": jnp.where(is_first, jnp.abs(ratio - 1.0), 0.0),
        }
        if not self._needs_old:  # else it is measured on the whole batch, before the updates
            away = jnp.where(mask & is_first, jnp.abs(now - batch.sampled_log_prob), 0.0)
            means["log_prob_difference"] = away * self.updates_per_iteration  # averaged over updates
            largest["log_prob_difference_max"] = away
        if self._has_reference:
            means["kl"] = divergence(log_prob, batch.reference_log_prob, "k3")
            if wanted.kl_in == "loss":
                kl = divergence(log_prob, batch.reference_log_prob, wanted.kl_estimator)
                loss = loss + wanted.kl_coefficient * jnp.sum(minibatch.weight * kl)
        return loss, {
            "loss": loss,
            "policy_loss": policy_loss,
            **{name: jnp.sum(minibatch.share * x) for name, x in means.items()},
            **{name: jnp.max(x) for name, x in largest.items()},
        }

    def _samples(self, parameters: Any, batch: Batch, iteration: Any = 0) -> Minibatch:
        """The batch with log-probabilities before the first update and with advantages."""
        wanted, mask = self.objective, batch.weight_mask
        old = batch.sampled_log_prob  # used if no other is needed
        if self._needs_old:
            old = self._log_probs(parameters, batch.responses)
        lengths = jnp.sum(batch.responses.own, axis=1, dtype=jnp.int32)
        reward = wanted.reward(batch.reward.total, lengths, self.longest)
        rated = has_reward(batch.responses)
        advantage = wanted.advantage(reward, old, batch.reference_log_prob, mask, self.group_size, rated)
        nothing = jnp.zeros_like(advantage)
        age: Any = ()
        if self.proximal == "interpolate":
            age = jnp.broadcast_to((iteration - batch.version).reshape(len(mask), -1), mask.shape)
        return Minibatch(batch, old, advantage, nothing, nothing, age)

    def _chosen(self, batch: Batch) -> Batch:
        mask = batch.weight_mask
        if self.objective.mask_truncated:
            mask = mask & finished(batch.responses, self._stops)[:, None]
        if not self.objective.dynamic_sampling:
            return batch._replace(weight_mask=mask)
        teaches = informative(batch.reward.total, self.group_size, has_reward(batch.responses))
        mask = mask & jnp.repeat(teaches, self.group_size)[:, None]
        batch = batch._replace(weight_mask=mask)
        if self._candidates == self.num_prompts:
            return batch
        first = jnp.argsort(~teaches, stable=True)[: self.num_prompts]
        rows = (first[:, None] * self.group_size + jnp.arange(self.group_size)[None]).reshape(-1)
        return jax.tree.map(lambda x: x[rows], batch)

    def _measured(self, batch: Batch, iteration: jax.Array) -> dict[str, jax.Array]:
        reward, rated = batch.reward, has_reward(batch.responses)
        differ = informative(reward.total, self.group_size, rated)
        return {
            **self._said(batch.responses, reward, rated),
            "informative": jnp.mean(differ, dtype=jnp.float32),
            **staleness(batch.version, iteration, batch.responses.own),
        }

    def _mismatch(self, samples: Minibatch) -> dict[str, jax.Array]:
        """The difference between log-probabilities at sampling and the learner's, before its updates."""
        if not self._needs_old:
            return {}
        mask = samples.batch.responses.own
        away = jnp.where(mask, jnp.abs(samples.old_log_prob - samples.batch.sampled_log_prob), 0.0)
        return {
            "log_prob_difference": masked_mean(away, mask),
            "log_prob_difference_max": jnp.max(away),
        }

    def _weights(self, mask: jax.Array) -> jax.Array:
        wanted = self.objective
        return token_weights(mask, wanted.aggregation, self.longest, wanted.count_empty)

    @property
    def _has_reference(self) -> bool:
        return self.objective.kl_coefficient > 0

    @property
    def _learns_by_parts(self) -> bool:
        """True if gradients of micro-batches add up: no term of the loss needs the whole batch."""
        whole = self.objective.scale in ("batch", "tokens") or self._candidates > self.num_prompts
        return self.micro_batches > 1 and self.updates_per_iteration == 1 and not (whole or self._needs_old)

    @property
    def _needs_old(self) -> bool:
        """True if the learner's log-probabilities before the first update are needed."""
        wanted = self.objective
        in_reward = wanted.kl_coefficient > 0 and wanted.kl_in != "loss"
        by_learner = self.old_log_prob == "learner" or wanted.correction != "none"
        in_updates = by_learner and self.proximal == "recompute"
        return in_reward or (in_updates and self.updates_per_iteration > 1)

    @property
    def _candidates(self) -> int:
        return self.num_prompts * max(1, self.objective.dynamic_sampling)
