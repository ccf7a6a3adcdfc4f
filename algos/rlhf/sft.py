"""Supervised fine-tuning: a decoder imitates demonstrations.

Letters in shapes: `B` demonstrations of an iteration, `R` tokens of a response, `n` demonstrations of a
micro-batch, or rows of `L` tokens that they are packed into.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

import fdg
from algos.language.packing import pack_rows
from algos.rlhf import losses, updates
from algos.rlhf.following import Rows
from algos.rlhf.language_agent import LanguageAgent
from algos.rlhf.losses import Aggregation
from algos.rlhf.responses import Responses, scores, sequences
from envs.text import Prompts
from fdg.settings.fields import hyperparameter, require, require_positive


class State(NamedTuple):
    """All that the next iteration needs."""

    parameters: Any
    optimizer_state: Any
    key: jax.Array  # of the whole run
    iteration: jax.Array  # int32


class Packed(NamedTuple):
    """Demonstrations in rows, several in each."""

    tokens: jax.Array  # [n, L] int32
    segments: jax.Array  # [n, L] int32


class Minibatch(NamedTuple):
    """Demonstrations and the weights of their tokens: `T` is `R` (padded), or `L` (packed rows)."""

    text: Responses | Packed  # [n]
    own: jax.Array  # [n, T] bool: tokens of responses
    lengths: jax.Array  # [n, T] float32: of the response that each is of
    weight: jax.Array  # [n, T] float32, in the loss
    share: jax.Array  # [n, T] float32, in means over tokens


@dataclasses.dataclass(frozen=True)
class SFT(LanguageAgent):
    """Cross-entropy of the tokens of right answers, given their prompts, whose own tokens do not count; with
    `loss_on="assistant"` the assistant's earlier turns in them do (TRL's `assistant_only_loss`).

    Frozen and hashable.

    Raises:
      FdgError: (construction) a field out of range, or sizes that do not divide.

    >>> import envs
    >>> SFT(env=envs.make("text:addition"), total_steps=640).num_iterations
    20
    """

    presets_of: ClassVar[str] = "SFT"
    steps_are: ClassVar[str] = "demonstrations"
    _imitates: ClassVar[bool] = True

    total_steps: int = hyperparameter(32_000, "demonstrations of the whole run")
    temperature: float = hyperparameter(1.0, "logits are divided by it, in sampling; learning has none")
    aggregation: Aggregation = hyperparameter("token_mean", "how tokens make a loss")
    loss_on: Literal["answer", "assistant"] = hyperparameter(
        "answer", "learn the last answer of a conversation, or all that the assistant says in it"
    )
    packing: int | None = hyperparameter(
        None,
        "rows that the demonstrations of an iteration are packed into; micro_batch counts them, and what no"
        " row has room for is left out (None: each has its own)",
    )
    packed_length: int | None = hyperparameter(
        None,
        "tokens of such a row (None: four times the longest prompt with its response)",
        only_with="packing",
    )

    def __post_init__(self) -> None:
        if self.packing is not None:
            require_positive(self, "packing")
        super().__post_init__()
        longest, length = self.env.prompt_length + self.env.response_length, self.packed_length
        require(
            self,
            length is None or length >= longest,
            f"packed_length={length}: the longest prompt with its response has {longest} tokens",
        )
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
        responses = self.demonstrations(*self._problem_keys(state, self.num_prompts))
        trained, optimizer_state, metrics = self.learn(
            state.parameters, state.optimizer_state, responses, self._iteration_key(state, 2)
        )
        parameters = self._with_trained(state.parameters, trained)
        return State(parameters, optimizer_state, state.key, state.iteration + 1), metrics

    @classmethod
    def rows_of(cls, values: Mapping[str, Any]) -> Rows:
        """Packed rows, where demonstrations are packed."""
        packed = values.get("packing")
        return super().rows_of(values) if packed is None else Rows(packed, packed, "packed rows")

    # --- fragments; `update` is that of every `LanguageAgent` ---

    @fdg.fragment("environment")
    def demonstrations(self, keys, numbers=()):
        """`keys [B]`, and numbers of rows if given, -> `Responses [B]`: answers to imitate."""
        if self.loss_on == "answer":
            prompts, tokens, mask = self.env.demonstration(keys, "train", *numbers)
            return Responses(prompts, tokens, mask, mask)
        content = self.env.draw(keys, "train", *numbers)
        prompts, (tokens, mask) = self.env.prompts(content), self.env.solutions(content)
        own = jnp.concatenate([self.env.said_before(content), mask], axis=1)
        tokens, there = (jnp.concatenate(x, axis=1) for x in ((prompts.tokens, tokens), (prompts.mask, mask)))
        # A response to the first token, as that of a game is.
        return Responses(Prompts(tokens[:, :1], there[:, :1]), tokens[:, 1:], there[:, 1:], own[:, 1:])

    @fdg.fragment("learner", in_axes=(None, None, 0, None), out_axes=None)
    def learn(self, parameters, optimizer_state, responses, key):
        """All updates on demonstrations `[B]`: what is trained, the optimiser's state, metrics."""
        samples, left_out = self._samples(responses)
        longest = self.env.response_length

        def step(carry, minibatch, is_first):
            trained, optimizer_state = carry
            own, lengths = minibatch.own, minibatch.lengths
            count = jnp.round(jnp.sum(jnp.where(own, 1.0 / jnp.maximum(lengths, 1), 0.0)))
            count = jnp.maximum(count, 1)
            minibatch = minibatch._replace(
                weight=losses.weights_among(own, lengths, count, self.aggregation, longest),
                share=losses.token_weights(own, "token_mean", longest),
            )
            slope = functools.partial(self.gradient, self._with_trained(parameters, trained))
            gradient, measures = updates.accumulated(slope, minibatch, self.at_once)
            trained, optimizer_state = self.update(gradient, optimizer_state, trained)
            return (trained, optimizer_state), {**measures, "gradient_norm": optax.tree.norm(gradient)}

        (trained, optimizer_state), measures = updates.epochs(
            step,
            (self._trained(parameters), optimizer_state),
            samples,
            key,
            self.num_epochs,
            self.num_minibatches,
            self.rows_of(vars(self)).groups,
        )
        return trained, optimizer_state, {**self._lengths(responses), **left_out, **measures}

    @fdg.fragment("gradient", in_axes=(None, 0), out_axes=None)
    def gradient(self, parameters, minibatch):
        """Share of the gradient, and of the measures, that these demonstrations `[n]` of a minibatch have."""

        def loss(trained):
            found = self._with_trained(parameters, trained)
            log_prob, entropy = self._scores(found, minibatch.text)
            loss = -jnp.sum(minibatch.weight * log_prob)
            return loss, {
                "loss": loss,
                "log_prob": jnp.sum(minibatch.share * log_prob),
                "entropy": jnp.sum(minibatch.share * entropy),
            }

        return jax.grad(loss, has_aux=True)(self._trained(parameters))

    # --- parts ---

    def _scores(self, parameters, text):
        """Log-probabilities and entropies of tokens, `[n, T]` float32."""
        if isinstance(text, Responses):
            return scores(self.network, parameters, text, 1.0)
        hidden = self.network.hidden(parameters, text.tokens, text.segments)
        return self.network.token_log_probs(parameters, hidden, text.tokens, text.segments)

    def _samples(self, responses: Responses) -> tuple[Minibatch, dict[str, jax.Array]]:
        """Demonstrations `[B]` as rows to learn from, and metrics of how they are packed."""
        own = responses.own
        lengths = jnp.broadcast_to(jnp.sum(own, axis=1, keepdims=True, dtype=jnp.float32), own.shape)
        if self.packing is None:
            nothing = jnp.zeros(own.shape)
            return Minibatch(responses, own, lengths, nothing, nothing), {}
        tokens, segments = sequences(responses)
        of_prompts = ((0, 0), (responses.prompts.tokens.shape[1], 0))
        length = self.packed_length or 4 * tokens.shape[1]
        rows = pack_rows(tokens, segments > 0, self.packing, length, self.env.tokenizer.pad)
        own, lengths = (rows.moved(jnp.pad(x, of_prompts)) for x in (own, lengths))
        nothing = jnp.zeros(own.shape)
        samples = Minibatch(Packed(rows.tokens, rows.segments), own, lengths, nothing, nothing)
        return samples, {
            "left_out": jnp.mean(~rows.fits, dtype=jnp.float32),
            "filled": jnp.mean(rows.segments > 0, dtype=jnp.float32),
        }
