"""Supervised fine-tuning: a decoder imitates demonstrations.

Shapes: `B` demonstrations of an iteration, `R` tokens of a response, `n` demonstrations of a micro-batch.
"""

import dataclasses
import warnings
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp

import fdg
from algos.rlhf.language_agent import LanguageAgent, State
from algos.rlhf.objective import Aggregation, token_weights
from algos.rlhf.responses import Responses, response_log_probs
from algos.rlhf.updates import run_updates
from envs.text import Prompts
from fdg.arguments import quoted
from fdg.settings.fields import hyperparameter, require


class Minibatch(NamedTuple):
    """Demonstrations and the weights of their tokens."""

    text: Responses  # [n]
    weight: Any = ()  # [n, R] float32, in the loss; () until the minibatch is known
    share: Any = ()  # [n, R] float32, in means over tokens; likewise


@dataclasses.dataclass(frozen=True)
class SFT(LanguageAgent, presets="SFT"):
    """Supervised fine-tuning: the loss is the cross-entropy of the answers' tokens given their prompts.

    With `loss_on="assistant"` the loss includes the assistant's earlier turns, which are in the prompts, like
    TRL's `assistant_only_loss`.

    Raises:
      FdgError: at construction, if a field is out of range, or a size does not divide another.

    >>> import envs
    >>> SFT(env=envs.make("text:addition"), total_steps=640).num_iterations
    20
    """

    steps_are: ClassVar[str] = "demonstrations"
    _imitates: ClassVar[bool] = True

    total_steps: int = hyperparameter(32_000, "total demonstrations")
    temperature: float = hyperparameter(
        1.0, "divides logits, in sampling only", structural="how tokens are drawn"
    )
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
                f"packing={quoted(self.packing)} is deprecated since 0.3: write remove_padding=True"
                " (--remove-padding true) instead, as it is read; that leaves no demonstration out",
                fdg.FdgWarning,
                stacklevel=3,
            )
            object.__setattr__(self, "remove_padding", True)
        super().__post_init__()
        has_demonstrations = callable(getattr(self.env, "demonstration", None))
        require(self, has_demonstrations, f"'{self.env.name}' has no demonstrations: use GRPO or PPORLHF")

    def init(self, key: jax.Array) -> State:
        """The initial state."""
        return self._initial_state(key, 0, has_reference=False)

    def iterate(self, state: State) -> tuple[State, dict[str, jax.Array]]:
        """Draws demonstrations, and makes all updates on them."""
        responses = self.demonstrations(*self._problem_keys(state, self.num_prompts))
        trained, optimizer_state, metrics = self.learn(
            state.parameters, state.optimizer_state, responses, self._iteration_key(state, 2)
        )
        return self._next_state(state, trained, optimizer_state), metrics

    # --- fragments; `gradient` and `update` are inherited from `LanguageAgent` ---

    @fdg.fragment("environment")
    def demonstrations(self, keys, numbers=()):
        """`keys [B]`, and row numbers for a file, -> `Responses [B]`: answers to imitate."""
        if self.loss_on == "answer":
            prompts, tokens, mask = self.env.demonstration(keys, "train", *numbers)
            return Responses(prompts, tokens, mask, mask)
        content = self.env.draw(keys, "train", *numbers)
        prompts, (tokens, mask) = self.env.prompts(content), self.env.solutions(content)
        imitated = jnp.concatenate([self.env.said_before(content), mask], axis=1)
        tokens, mask = (jnp.concatenate(x, axis=1) for x in ((prompts.tokens, tokens), (prompts.mask, mask)))
        # The text is represented as a response to its first token, as in a game.
        return Responses(Prompts(tokens[:, :1], mask[:, :1]), tokens[:, 1:], mask[:, 1:], imitated[:, 1:])

    @fdg.fragment("learner", in_axes=(None, None, 0, None), out_axes=None)
    def learn(self, parameters, optimizer_state, responses, key):
        """All updates on demonstrations `[B]`: trained parameters, optimiser state, metrics."""
        longest = self.env.response_length

        def add_weights(minibatch):
            imitated = minibatch.text.policy_mask
            return minibatch._replace(
                weight=token_weights(imitated, self.aggregation, longest, count_empty=False),
                share=token_weights(imitated, "token_mean", longest),
            )

        trained, optimizer_state, metrics = run_updates(
            self, add_weights, parameters, optimizer_state, Minibatch(responses), key, marks_first=False
        )
        return trained, optimizer_state, {**self._lengths(responses), **metrics}

    def _loss(self, parameters, is_first, minibatch):
        log_prob, entropy = response_log_probs(self.network, parameters, minibatch.text, 1.0)
        loss = -jnp.sum(minibatch.weight * log_prob)
        return loss, {
            "loss": loss,
            "log_prob": jnp.sum(minibatch.share * log_prob),
            "entropy": jnp.sum(minibatch.share * entropy),
        }
