"""Supervised fine-tuning: a decoder imitates demonstrations.

Shapes: `B` demonstrations of an iteration, `R` tokens of a response, `n` demonstrations of a micro-batch.
"""

import dataclasses
import warnings
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp

import fdg
from algos.rlhf import losses, updates
from algos.rlhf.language_agent import LanguageAgent
from algos.rlhf.losses import Aggregation
from algos.rlhf.responses import Responses, scores
from envs.text import Prompts
from fdg.settings.fields import hyperparameter, require


class State(NamedTuple):
    """The state of supervised fine-tuning."""

    parameters: Any
    optimizer_state: Any
    key: jax.Array  # of the whole run
    iteration: jax.Array  # int32


class Minibatch(NamedTuple):
    """Demonstrations and the weights of their tokens."""

    text: Responses  # [n]
    lengths: jax.Array  # [n, R] float32: of each token's response
    weight: jax.Array  # [n, R] float32, in the loss
    share: jax.Array  # [n, R] float32, in means over tokens


@dataclasses.dataclass(frozen=True)
class SFT(LanguageAgent, presets="SFT"):
    """Cross-entropy of the answers' tokens given their prompts; with `loss_on="assistant"` also of the
    assistant's earlier turns in the prompts (TRL's `assistant_only_loss`).

    Raises:
      FdgError: (construction) a field is out of range, or sizes do not divide.

    >>> import envs
    >>> SFT(env=envs.make("text:addition"), total_steps=640).num_iterations
    20
    """

    steps_are: ClassVar[str] = "demonstrations"
    _imitates: ClassVar[bool] = True

    total_steps: int = hyperparameter(32_000, "total demonstrations")
    temperature: float = hyperparameter(1.0, "divides logits, in sampling only")
    aggregation: Aggregation = hyperparameter("token_mean", "aggregation of tokens to a loss")
    loss_on: Literal["answer", "assistant"] = hyperparameter(
        "answer", "train on the last answer of a conversation, or on all the assistant's turns"
    )
    packing: int | None = hyperparameter(None, "deprecated: remove_padding leaves no demonstration out")
    packed_length: int | None = hyperparameter(
        None, "deprecated: with remove_padding packed rows are as long as the longest", only_with="packing"
    )

    def __post_init__(self) -> None:
        if self.packing is not None:
            warnings.warn(
                f"packing={self.packing} is deprecated since 0.3: write remove_padding=True (--remove-padding"
                " true), which leaves no demonstration out, and which it is read as",
                fdg.FdgWarning,
                stacklevel=3,
            )
            object.__setattr__(self, "remove_padding", True)
        super().__post_init__()
        shown = callable(getattr(self.env, "demonstration", None))
        require(self, shown, f"'{self.env.name}' has no demonstrations: use GRPO or PPORLHF")

    def init(self, key: jax.Array) -> State:
        """The initial state."""
        parameter_key, key = jax.random.split(key)
        parameters = self._first_parameters(parameter_key)
        optimizer_state = self._optimizer.init(self._trained(parameters))
        return State(parameters, optimizer_state, key, jnp.int32(0))

    def iterate(self, state: State) -> tuple[State, dict[str, jax.Array]]:
        """All updates on new demonstrations."""
        responses = self.demonstrations(*self._problem_keys(state, self.num_prompts))
        trained, optimizer_state, metrics = self.learn(
            state.parameters, state.optimizer_state, responses, self._iteration_key(state, 2)
        )
        parameters = self._with_trained(state.parameters, trained)
        return State(parameters, optimizer_state, state.key, state.iteration + 1), metrics

    # --- fragments; `update` is inherited from `LanguageAgent` ---

    @fdg.fragment("environment")
    def demonstrations(self, keys, numbers=()):
        """`keys [B]`, and row numbers for a file, -> `Responses [B]`: answers to imitate."""
        if self.loss_on == "answer":
            prompts, tokens, mask = self.env.demonstration(keys, "train", *numbers)
            return Responses(prompts, tokens, mask, mask)
        content = self.env.draw(keys, "train", *numbers)
        prompts, (tokens, mask) = self.env.prompts(content), self.env.solutions(content)
        own = jnp.concatenate([self.env.said_before(content), mask], axis=1)
        tokens, there = (jnp.concatenate(x, axis=1) for x in ((prompts.tokens, tokens), (prompts.mask, mask)))
        # A response to the first token, as in a game.
        return Responses(Prompts(tokens[:, :1], there[:, :1]), tokens[:, 1:], there[:, 1:], own[:, 1:])

    @fdg.fragment("learner", in_axes=(None, None, 0, None), out_axes=None)
    def learn(self, parameters, optimizer_state, responses, key):
        """All updates on demonstrations `[B]`: trained parameters, optimiser state, metrics."""
        samples, longest = self._samples(responses), self.env.response_length

        def weighed(minibatch):
            own, lengths = minibatch.text.own, minibatch.lengths
            count = jnp.round(jnp.sum(jnp.where(own, 1.0 / jnp.maximum(lengths, 1), 0.0)))
            count = jnp.maximum(count, 1)
            return minibatch._replace(
                weight=losses.weights_among(own, lengths, count, self.aggregation, longest),
                share=losses.token_weights(own, "token_mean", longest),
            )

        def gradient(parameters, is_first, minibatch):
            return self.gradient(parameters, minibatch)

        groups = self.rows_of(vars(self)).groups
        trained, optimizer_state, measures = updates.run_updates(
            self, gradient, weighed, parameters, optimizer_state, samples, key, groups
        )
        return trained, optimizer_state, {**self._lengths(responses), **measures}

    @fdg.fragment("gradient", in_axes=(None, 0), out_axes=None)
    def gradient(self, parameters, minibatch):
        """The contribution of a minibatch of demonstrations `[n]` to the gradient and metrics."""

        def loss(trained):
            found = self._with_trained(parameters, trained)
            log_prob, entropy = scores(self.network, found, minibatch.text, 1.0)
            loss = -jnp.sum(minibatch.weight * log_prob)
            return loss, {
                "loss": loss,
                "log_prob": jnp.sum(minibatch.share * log_prob),
                "entropy": jnp.sum(minibatch.share * entropy),
            }

        return jax.grad(loss, has_aux=True)(self._trained(parameters))

    def _samples(self, responses: Responses) -> Minibatch:
        own = responses.own
        lengths = jnp.broadcast_to(jnp.sum(own, axis=1, keepdims=True, dtype=jnp.float32), own.shape)
        nothing = jnp.zeros(own.shape)
        return Minibatch(responses, lengths, nothing, nothing)
