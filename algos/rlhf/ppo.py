"""PPO on tokens with a critic and a reference (Ziegler et al. 2019, arXiv 1909.08593; Ouyang et al. 2022).

Every token is an action. A response gets its reward at the last token, and a KL penalty at each token. The
critic is another decoder with a value head; it predicts the value before each token.

Shapes: `B` prompts, `G` responses to each, `N = B * G`; `R` tokens of a response; `n` responses of
a minibatch or a micro-batch.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import fdg
from algos import registry
from algos.rlhf import updates
from algos.rlhf.language_agent import LanguageAgent
from algos.rlhf.objective import Correction, Estimator, clipped, divergence, log_ratio, masked_mean, surrogate
from algos.rlhf.responses import (
    Responses,
    has_reward,
    loss_mask,
    response_log_probs,
    rollouts,
    sequences,
    staleness,
)
from algos.values import Discount
from fdg.settings.fields import (
    hyperparameter,
    require,
    require_not_negative,
    require_positive,
    require_within,
)


class State(NamedTuple):
    """The state of PPO for language models."""

    parameters: Any
    reference: Any  # parameters of the KL reference; () with adapters
    reward_model: Any  # () if the task gives rewards
    critic: Any  # {"network": parameters of a decoder, "value": [D]}
    optimizer_state: Any
    critic_optimizer_state: Any
    key: jax.Array  # of the whole run
    iteration: jax.Array  # int32
    stream: Any = ()  # unfinished responses; () if ahead=0


class Judgement(NamedTuple):
    """Values, advantages and value targets of responses, `[N, R]` float32 each."""

    value: jax.Array  # before each token
    advantage: jax.Array
    target: jax.Array  # of the value


class Minibatch(NamedTuple):
    """Responses for an update of the policy or the critic."""

    responses: Responses  # [n]
    old_log_prob: Any  # [n, R] float32, of the learner before its first update; () for the critic
    reference_log_prob: Any  # [n, R] float32; () for the critic
    judgement: Judgement  # [n]; advantages whitened, for the policy
    share: Any = ()  # [n, R] float32, of each token in means over the minibatch's tokens
    counted: Any = ()  # [n, R] bool, the tokens that count in the policy's loss
    weight: Any = ()  # [n, R] float32, importance weight; () without a correction


@dataclasses.dataclass(frozen=True)
class PPORLHF(LanguageAgent, presets="PPORLHF"):
    """PPO for language models; a KL penalty for each token is part of the reward.

    Raises:
      FdgError: at construction, if a field is out of range, or a size does not divide another.
    """

    reward_settings = registry.option("reward model").Judge()
    stream_settings = registry.option("stream").Streams()
    token_entropy = registry.option("losses").TokenEntropy()
    num_prompts: int = hyperparameter(64, "prompts per iteration")
    group_size: int = hyperparameter(1, "responses per prompt")
    num_epochs: int = hyperparameter(2, "passes over each batch of responses")
    num_minibatches: int = hyperparameter(2, "updates per pass")
    critic_learning_rate: float = hyperparameter(
        1e-3, "the critic's step size; annealed and warmed up like the actor's"
    )
    clip_low: float = hyperparameter(0.2, "lower bound of the ratio is 1 minus this")
    clip_high: float = hyperparameter(0.2, "upper bound of the ratio is 1 plus this")
    clip_value: float | None = hyperparameter(0.2, "clip range of values in their loss (None: no clipping)")
    kl_coefficient: float = hyperparameter(0.05, "beta: weight of the KL to the reference, per token")
    kl_estimator: Estimator = hyperparameter("k1", "estimator of the KL")
    correction: Correction = hyperparameter("none", "importance weights of actor against learner")
    correction_cap: float = hyperparameter(2.0, "upper bound of these weights", only_with="correction")
    discounting = Discount(discount=1.0)
    gae_lambda: float = hyperparameter(0.95, "lambda of the advantages")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "group_size", "critic_learning_rate")
        require_within(self, 0, 1, "discount", "gae_lambda")
        require_not_negative(self, "clip_low", "clip_high", "kl_coefficient")
        cap = self.correction_cap
        require(self, cap >= 1, f"correction_cap={cap}: it must be one or above")
        clip = self.clip_value
        require(self, clip is None or clip > 0, f"clip_value={clip}: it must be above zero, or None")

    def init(self, key: jax.Array) -> State:
        """The initial state; the critic starts from the policy's weights, with value zero."""
        state = self._initial_state(key, self.num_prompts)
        network = jax.tree.map(jnp.copy, state.parameters.get("base", state.parameters))
        critic = {"network": network, "value": jnp.zeros(self.network.config.hidden_size)}
        critic_optimizer_state = self._critic_optimizer.init(critic)
        return State(**state._asdict(), critic=critic, critic_optimizer_state=critic_optimizer_state)

    def iterate(self, state: State) -> tuple[State, dict[str, jax.Array]]:
        """Samples responses to new prompts with rewards, and makes all updates of policy and critic."""

        def score_rollout(rollout):
            old = self.assess(state.parameters, rollout.responses)
            reference = self.refer(self._reference_parameters(state), rollout.responses)
            judgement = self.judge(state.critic, rollout.responses, old, reference, rollout.reward.total)
            return rollout, loss_mask(self, rollout), old, reference, judgement

        (rollout, counted, old, reference, judgement), stream, _ = rollouts(
            self, state, self.num_prompts, score_rollout
        )
        responses, sampled, version, reward, _ = rollout
        trained, optimizer_state, metrics = self.learn(
            state.parameters,
            state.optimizer_state,
            (responses, counted, sampled, old, reference, judgement),
            self._iteration_key(state, 2),
        )
        critic, critic_optimizer_state, critic_metrics = self.fit(
            state.critic, state.critic_optimizer_state, (responses, judgement), self._iteration_key(state, 3)
        )
        metrics = {
            **self._response_metrics(responses, reward, has_reward(responses)),
            **staleness(version, state.iteration, responses.policy_mask),
            **self._log_prob_differences(old, sampled, responses.policy_mask),
            **metrics,
            **critic_metrics,
            **registry.option("stream").metrics(self, state.stream, stream),
        }
        critics = {"critic": critic, "critic_optimizer_state": critic_optimizer_state}
        return self._next_state(state, trained, optimizer_state, stream=stream, **critics), metrics

    # --- fragments; `problems`, `respond`, `score`, `refer`, `gradient` and `update` are inherited ---

    @fdg.fragment("learner", in_axes=(None, 0))
    def assess(self, parameters, responses):
        """Log-probabilities `[N, R]` of `Responses [N]` under the policy before its updates."""
        return self._log_probs(parameters, responses)

    @fdg.fragment("critic", in_axes=(None, 0, 0, 0, 0))
    def judge(self, critic, responses, log_prob, reference_log_prob, reward):
        """A `Judgement [N]` of responses with rewards `[N]`."""
        mask = responses.policy_mask
        kl = divergence(log_prob, reference_log_prob, self.kl_estimator)
        variants = registry.option("variants")
        rewards = variants.reward_at_end(reward, mask) - self.kl_coefficient * jnp.where(mask, kl, 0.0)
        size = self.rows_per_micro_batch
        value = updates.map_micro_batches(lambda part: self._values(critic, part), responses, size)
        value = jnp.where(mask, value, 0.0)
        advantage, target = variants.token_advantages(rewards, value, mask, self.discount, self.gae_lambda)
        return Judgement(value, advantage, target)

    @fdg.fragment("learner", in_axes=(None, None, 0, None), out_axes=None)
    def learn(self, parameters, optimizer_state, batch, key):
        """All updates of the policy: trained parameters, optimiser state, metrics."""
        responses, counted, sampled, old, reference, judgement = batch
        advantage = registry.option("variants").whiten(judgement.advantage, counted)
        judgement = judgement._replace(advantage=advantage)
        weight: Any = ()
        if self.correction != "none":
            weight = registry.option("losses").correction(
                sampled, old, counted, self.correction, self.correction_cap
            )
        samples = Minibatch(responses, old, reference, judgement, counted=counted, weight=weight)

        def add_shares(minibatch):
            return minibatch._replace(share=self._shares(minibatch.counted))

        return updates.run_updates(self, add_shares, parameters, optimizer_state, samples, key)

    @fdg.fragment("critic", in_axes=(None, None, 0, None), out_axes=None)
    def fit(self, critic, optimizer_state, batch, key):
        """All updates of the critic: its parameters, optimiser state, metrics."""
        responses, judgement = batch
        mask = responses.policy_mask

        def step(carry, minibatch, is_first):
            critic, optimizer_state = carry
            minibatch = minibatch._replace(share=self._shares(minibatch.responses.policy_mask))
            gradient_of = functools.partial(self.value_gradient, critic)
            size = self.rows_per_micro_batch
            gradient, measures = updates.accumulate_gradient(gradient_of, minibatch, size)
            return self.value_update(gradient, optimizer_state, critic), measures

        samples = Minibatch(responses, (), (), judgement)
        sizes = self.num_epochs, self.num_minibatches, self.num_prompts
        carry, metrics = updates.epochs(step, (critic, optimizer_state), samples, key, *sizes)
        critic, optimizer_state = carry
        target, error = judgement.target, judgement.target - judgement.value
        target_variance = masked_mean(jnp.square(target - masked_mean(target, mask)), mask)
        error_variance = masked_mean(jnp.square(error - masked_mean(error, mask)), mask)
        metrics["explained_variance"] = 1.0 - error_variance / (target_variance + 1e-8)
        return critic, optimizer_state, metrics

    @fdg.fragment("gradient", in_axes=(None, 0), out_axes=None)
    def value_gradient(self, critic, minibatch):
        """The contribution of a minibatch of responses `[n]` to the critic's gradient and loss."""

        def loss(critic):
            value, old = self._values(critic, minibatch.responses), minibatch.judgement
            error = registry.option("losses").value_error(value, old.value, old.target, self.clip_value)
            loss = jnp.sum(minibatch.share * error)
            return loss, {"value_loss": loss}

        return jax.grad(loss, has_aux=True)(critic)

    @fdg.fragment("update", in_axes=None, out_axes=None)
    def value_update(self, gradient, optimizer_state, critic):
        """One step of the critic's optimiser: new parameters and optimiser state."""
        steps, optimizer_state = self._critic_optimizer.update(gradient, optimizer_state, critic)
        return optax.apply_updates(critic, steps), optimizer_state

    def _loss(self, parameters, is_first, minibatch):
        mask, share = minibatch.counted, minibatch.share
        log_prob, entropy = response_log_probs(
            self.network, parameters, minibatch.responses, self.temperature
        )
        # Before the first update, both policies of the ratio are equal. This makes the ratio exactly 1.
        old = jnp.where(is_first, jax.lax.stop_gradient(log_prob), minibatch.old_log_prob)
        ratios = log_ratio(log_prob, old, mask, "token")
        advantage = minibatch.judgement.advantage
        cost = surrogate(ratios, advantage, self.clip_low, self.clip_high)
        if self.correction != "none":
            cost = cost * minibatch.weight
        policy_loss = jnp.sum(share * cost)
        loss = self.token_entropy.subtract_bonus(policy_loss, share, entropy)
        ratio = jnp.where(mask, jnp.exp(jax.lax.stop_gradient(ratios)), 1.0)
        means = {
            "entropy": entropy,
            "approx_kl": divergence(log_prob, old, "k3"),
            "kl": divergence(log_prob, minibatch.reference_log_prob, "k3"),
            "clip_fraction": clipped(ratios, advantage, self.clip_low, self.clip_high),
        }
        return loss, {
            "loss": loss,
            "policy_loss": policy_loss,
            **{name: jnp.sum(share * x) for name, x in means.items()},
            "ratio_max": jnp.max(ratio),
            "first_ratio_error_max": jnp.max(jnp.where(is_first, jnp.abs(ratio - 1.0), 0.0)),
        }

    def _values(self, critic, responses):
        """Values `[n, R]` before each token: linear functions of the hidden state at the token before."""
        tokens, segments = sequences(responses)
        last, network = responses.prompts.tokens.shape[1] - 1, self._critic_network
        hidden_of = functools.partial(network.hidden, critic["network"])
        hidden = network.on_packed_rows(hidden_of, tokens, segments)[:, last:-1]
        return hidden.astype(jnp.float32) @ critic["value"]

    @property
    def _critic_network(self) -> Any:
        network = self.network
        return dataclasses.replace(network, config=dataclasses.replace(network.config, lora_rank=0))

    @property
    def _critic_optimizer(self) -> optax.GradientTransformation:
        return self.changed(learning_rate=self.critic_learning_rate)._optimizer
