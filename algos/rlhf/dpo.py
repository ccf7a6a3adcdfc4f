"""Direct preference optimisation from pairs (DPO; Rafailov et al. 2023, arXiv 2305.18290).

Letters in shapes: `B` prompts, and pairs; `G` responses to each prompt, of which the best and the worst are a
pair; `N = B * G`; `R` tokens of a response; `n` pairs of a micro-batch.
"""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

import fdg
from algos.hyperparameters import hyperparameter, require, require_positive
from algos.rlhf import losses, updates
from algos.rlhf.language_agent import LanguageAgent
from algos.rlhf.losses import Preference
from algos.rlhf.responses import Responses, scores


class State(NamedTuple):
    """All that the next iteration needs."""

    parameters: Any
    reference: Any  # parameters that the policy is kept near to; () where it has adapters
    optimizer_state: Any
    key: jax.Array  # of the whole run
    iteration: jax.Array  # int32


class Pairs(NamedTuple):
    """Two responses to each prompt, one of them preferred."""

    chosen: Responses  # [B]
    rejected: Responses  # [B]
    differ: jax.Array  # [B] bool: whether one is better at all


class Minibatch(NamedTuple):
    """Pairs, with what the reference says of them, and what each counts for."""

    pairs: Pairs  # [n]
    reference: tuple[jax.Array, jax.Array]  # log-probabilities [n, R] float32 of chosen and of rejected
    weight: jax.Array  # [n] float32


@dataclasses.dataclass(frozen=True)
class DPO(LanguageAgent):
    """DPO on pairs of the network's own responses, ranked by the task's reward.

    The best and the worst of `group_size` responses are a pair; prompts whose responses are all worth the
    same do not count. As in the paper the reference responds; with `respondent="policy"` the network that
    learns does (online DPO, arXiv 2402.04792). Frozen and hashable.

    Raises:
      FdgError: (construction) a field out of range, or sizes that do not divide.
    """

    learning_rate: float = hyperparameter(3e-4, "AdamW's step size")
    group_size: int = hyperparameter(
        4, "responses to each prompt, the best and the worst of which are a pair"
    )
    respondent: Literal["reference", "policy"] = hyperparameter("reference", "who responds")
    beta: float = hyperparameter(0.1, "how strongly the reference holds")
    preference: Preference = hyperparameter("sigmoid", "the loss of a pair")
    label_smoothing: float = hyperparameter(0.0, "share of pairs that are taken to be the wrong way round")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "beta")
        require(
            self, self.group_size >= 2, f"group_size={self.group_size}: a pair takes at least 2 responses"
        )
        require(
            self,
            0 <= self.label_smoothing < 0.5,
            f"label_smoothing={self.label_smoothing}: it must be from 0 to below 0.5",
        )
        count = self.num_prompts // self.num_minibatches
        require(
            self,
            self.num_prompts % self.num_minibatches == 0 and count % (self.micro_batch or count) == 0,
            f"num_prompts={self.num_prompts} pairs do not divide into num_minibatches={self.num_minibatches}"
            f" of micro_batch={self.micro_batch}",
        )

    @property
    def responses_per_prompt(self) -> int:
        """`G`."""
        return self.group_size

    # --- the two functions of every algorithm ---

    def init(self, key: jax.Array) -> State:
        """The state before the first iteration."""
        parameter_key, key = jax.random.split(key)
        parameters = self._first_parameters(parameter_key)
        return State(
            parameters=parameters,
            reference=jax.tree.map(jnp.copy, self._frozen(parameters)),
            optimizer_state=self._optimizer.init(self._trained(parameters)),
            key=key,
            iteration=jnp.int32(0),
        )

    def iterate(self, state: State) -> tuple[State, dict[str, jax.Array]]:
        """Responses to new prompts, pairs of them, and all updates on these."""
        reference = self._reference_parameters(state)
        respondent = reference if self.respondent == "reference" else state.parameters
        responses, _, _, reward = self._rollout(state._replace(parameters=respondent), self.num_prompts)
        pairs = self._paired(responses, reward.total)
        trained, optimizer_state, metrics = self.learn(
            state.parameters,
            state.optimizer_state,
            (pairs, self.refer(reference, pairs)),
            self._iteration_key(state, 2),
        )
        state = state._replace(
            parameters=self._with_trained(state.parameters, trained),
            optimizer_state=optimizer_state,
            iteration=state.iteration + 1,
        )
        metrics |= {"episode_return": jnp.mean(reward.total), **self._lengths(responses)}
        return state, metrics

    # --- fragments; `problems`, `respond`, `score` and `update` are those of every `LanguageAgent` ---

    @fdg.fragment("reference", in_axes=(None, 0))
    def refer(self, parameters, pairs):
        """Log-probabilities `[B, R]` of the chosen and the rejected responses under the reference."""
        return updates.mapped(lambda some: self._scores(parameters, some), pairs, self.micro_batch)

    @fdg.fragment("learner", in_axes=(None, None, 0, None), out_axes=None)
    def learn(self, parameters, optimizer_state, batch, key):
        """All updates on pairs `[B]` and the reference's scores: what is trained, metrics."""
        pairs, reference = batch

        def step(carry, minibatch, is_first):
            trained, optimizer_state = carry
            counted = minibatch.pairs.differ.astype(jnp.float32)
            minibatch = minibatch._replace(weight=counted / jnp.maximum(jnp.sum(counted), 1))
            slope = functools.partial(self.gradient, self._with_trained(parameters, trained))
            gradient, measures = updates.accumulated(slope, minibatch, self.micro_batch)
            trained, optimizer_state = self.update(gradient, optimizer_state, trained)
            return (trained, optimizer_state), {**measures, "gradient_norm": optax.tree.norm(gradient)}

        (trained, optimizer_state), measures = updates.epochs(
            step,
            (self._trained(parameters), optimizer_state),
            Minibatch(pairs, reference, jnp.zeros(pairs.differ.shape)),
            key,
            self.num_epochs,
            self.num_minibatches,
            self.num_prompts,
        )
        return (
            trained,
            optimizer_state,
            {**measures, "informative": jnp.mean(pairs.differ, dtype=jnp.float32)},
        )

    @fdg.fragment("gradient", in_axes=(None, 0), out_axes=None)
    def gradient(self, parameters, minibatch):
        """Share of the gradient, and of the measures, that these pairs `[n]` of a minibatch have."""

        def loss(trained):
            return self._loss(self._with_trained(parameters, trained), minibatch)

        return jax.grad(loss, has_aux=True)(self._trained(parameters))

    # --- parts ---

    def _loss(self, parameters, minibatch):
        pairs, weight = minibatch.pairs, minibatch.weight
        grown = []  # log-probability of the chosen, and of the rejected response, less the reference's: [n]
        both = zip(
            (pairs.chosen, pairs.rejected), self._scores(parameters, pairs), minibatch.reference, strict=True
        )
        for responses, log_prob, reference in both:
            change = jnp.sum(jnp.where(responses.own, log_prob - reference, 0.0), axis=1)
            if self.preference == "ipo":  # over means, as its authors say that they had it
                change = change / jnp.maximum(jnp.sum(responses.own, axis=1, dtype=jnp.float32), 1)
            grown.append(change)
        margin = grown[0] - grown[1]
        each = losses.preference_loss(margin, self.beta, self.preference, self.label_smoothing)
        loss = jnp.sum(weight * each)
        return loss, {
            "loss": loss,
            "preference_accuracy": jnp.sum(weight * (margin > 0)),
            "margin": jnp.sum(weight * margin),
            "chosen_reward": self.beta * jnp.sum(weight * grown[0]),
            "rejected_reward": self.beta * jnp.sum(weight * grown[1]),
        }

    def _scores(self, parameters, pairs):
        """Log-probabilities `[n, R]` of chosen and rejected responses."""
        return tuple(
            scores(self.network, parameters, responses, self.temperature)[0]
            for responses in (pairs.chosen, pairs.rejected)
        )

    def _paired(self, responses: Responses, reward: jax.Array) -> Pairs:
        """The best and the worst response to each prompt; the first of several alike."""
        grouped = reward.reshape(-1, self.group_size)

        def take(index: jax.Array) -> Responses:
            def of_group(x: jax.Array) -> jax.Array:
                by_prompt = x.reshape(-1, self.group_size, *x.shape[1:])
                return jax.vmap(lambda rows, i: rows[i])(by_prompt, index)

            return jax.tree.map(of_group, responses)

        best, worst = jnp.argmax(grouped, axis=1), jnp.argmin(grouped, axis=1)
        return Pairs(take(best), take(worst), jnp.max(grouped, axis=1) > jnp.min(grouped, axis=1))
