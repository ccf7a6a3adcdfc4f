"""Supervised fine-tuning: a decoder imitates demonstrations.

Letters in shapes: `B` demonstrations of an iteration, `R` tokens of a response, `n` demonstrations of a
micro-batch.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import fdg
from algos.hyperparameters import hyperparameter, require
from algos.rlhf import losses, updates
from algos.rlhf.language_agent import LanguageAgent
from algos.rlhf.losses import Aggregation
from algos.rlhf.responses import Responses, scores


class State(NamedTuple):
    """All that the next iteration needs."""

    parameters: Any
    optimizer_state: Any
    key: jax.Array  # of the whole run
    iteration: jax.Array  # int32


class Minibatch(NamedTuple):
    """Demonstrations, and what their tokens count for."""

    responses: Responses  # [n]
    weight: jax.Array  # [n, R] float32, in the loss
    share: jax.Array  # [n, R] float32, in means over tokens


@dataclasses.dataclass(frozen=True)
class SFT(LanguageAgent):
    """Cross-entropy of the tokens of right answers, given their prompts, whose own tokens do not count.

    Frozen and hashable.

    Raises:
      FdgError: (construction) a field out of range, or sizes that do not divide.

    >>> import envs
    >>> SFT(env=envs.make("text:addition"), total_steps=640).num_iterations
    20
    """

    total_steps: int = hyperparameter(32_000, "demonstrations of the whole run")
    temperature: float = hyperparameter(1.0, "logits are divided by it, in sampling; learning has none")
    aggregation: Aggregation = hyperparameter("token_mean", "how tokens make a loss")

    def __post_init__(self) -> None:
        super().__post_init__()
        shown = callable(getattr(self.env, "demonstration", None))
        require(self, shown, f"'{self.env.name}' has no demonstrations: use GRPO or PPORLHF")

    def init(self, key: jax.Array) -> State:
        """The state before the first iteration."""
        parameter_key, key = jax.random.split(key)
        parameters = self._first_parameters(parameter_key)
        optimizer_state = self._optimizer.init(self._trained(parameters))
        return State(parameters, optimizer_state, key, jnp.int32(0))

    def iterate(self, state: State) -> tuple[State, dict[str, jax.Array]]:
        """All updates on new demonstrations."""
        responses = self.demonstrations(self._problem_keys(state, self.num_prompts))
        trained, optimizer_state, metrics = self.learn(
            state.parameters, state.optimizer_state, responses, self._iteration_key(state, 2)
        )
        parameters = self._with_trained(state.parameters, trained)
        return State(parameters, optimizer_state, state.key, state.iteration + 1), metrics

    # --- fragments; `update` is that of every `LanguageAgent` ---

    @fdg.fragment("environment")
    def demonstrations(self, keys):
        """`keys [B]` -> `Responses [B]`: problems to train on with a right answer each."""
        prompts, tokens, mask = self.env.demonstration(keys)
        return Responses(prompts, tokens, mask, mask)

    @fdg.fragment("learner", in_axes=(None, None, 0, None), out_axes=None)
    def learn(self, parameters, optimizer_state, responses, key):
        """All updates on demonstrations `[B]`: what is trained, the optimiser's state, metrics."""
        nothing = jnp.zeros(responses.mask.shape)

        def step(carry, minibatch, is_first):
            trained, optimizer_state = carry
            mask, longest = minibatch.responses.own, self.env.response_length
            minibatch = minibatch._replace(
                weight=losses.token_weights(mask, self.aggregation, longest),
                share=losses.token_weights(mask, "token_mean", longest),
            )
            slope = functools.partial(self.gradient, self._with_trained(parameters, trained))
            gradient, measures = updates.accumulated(slope, minibatch, self.micro_batch)
            trained, optimizer_state = self.update(gradient, optimizer_state, trained)
            return (trained, optimizer_state), {**measures, "gradient_norm": optax.tree.norm(gradient)}

        (trained, optimizer_state), measures = updates.epochs(
            step,
            (self._trained(parameters), optimizer_state),
            Minibatch(responses, nothing, nothing),
            key,
            self.num_epochs,
            self.num_minibatches,
            self.num_prompts,
        )
        return trained, optimizer_state, {**self._lengths(responses), **measures}

    @fdg.fragment("gradient", in_axes=(None, 0), out_axes=None)
    def gradient(self, parameters, minibatch):
        """Share of the gradient, and of the measures, that these demonstrations `[n]` of a minibatch have."""

        def loss(trained):
            found = self._with_trained(parameters, trained)
            log_prob, entropy = scores(self.network, found, minibatch.responses, 1.0)
            loss = -jnp.sum(minibatch.weight * log_prob)
            return loss, {
                "loss": loss,
                "log_prob": jnp.sum(minibatch.share * log_prob),
                "entropy": jnp.sum(minibatch.share * entropy),
            }

        return jax.grad(loss, has_aux=True)(self._trained(parameters))
