"""Prompts with their responses, and a network's log-probabilities of them.

Letters in shapes: `N` responses, `P` tokens of a prompt (left-padded), `R` of a response (right-padded).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from algos.language.decoder import Decoder
from algos.rlhf.losses import masked_mean
from envs.text import Prompts, Transcript


class Responses(NamedTuple):
    """Responses with their prompts."""

    prompts: Prompts  # tokens [N, P] int32, mask [N, P] bool
    tokens: jax.Array  # [N, R] int32
    mask: jax.Array  # [N, R] bool: tokens that are there
    own: jax.Array  # [N, R] bool: those of them that the policy chose; others are a tool's, or a game's


def of_transcript(transcript: Transcript) -> tuple[Responses, jax.Array]:
    """A conversation as a response to its first token, with log-probabilities `[N, T - 1]` of its tokens."""
    tokens, mask, own = transcript.tokens, transcript.mask, transcript.said
    first = Prompts(tokens[:, :1], mask[:, :1])
    log_prob = jnp.where(own, transcript.about, 0.0)
    return Responses(first, tokens[:, 1:], mask[:, 1:], own[:, 1:]), log_prob[:, 1:]


def with_opening(responses: Responses) -> Responses:
    """The same tokens, with all before the policy's first one as part of the prompt.

    A conversation is a response to its first token (`of_transcript`), but readers want to see the question.
    Prompts are then as wide as the whole sequence.
    """
    opening = responses.mask & (jnp.cumsum(responses.own, axis=1) == 0)
    tokens = jnp.concatenate([responses.prompts.tokens, responses.tokens], axis=1)
    prompts = Prompts(tokens, jnp.concatenate([responses.prompts.mask, opening], axis=1))
    return responses._replace(prompts=prompts, mask=responses.mask & ~opening)


def sequences(responses: Responses) -> tuple[jax.Array, jax.Array]:
    """Tokens `[N, P + R]` int32 of prompts and responses, and segments: 0 for padding, else 1."""
    tokens = jnp.concatenate([responses.prompts.tokens, responses.tokens], axis=1)
    there = jnp.concatenate([responses.prompts.mask, responses.mask], axis=1)
    return tokens, there.astype(jnp.int32)


def scores(
    decoder: Decoder, parameters: Any, responses: Responses, temperature: float
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each token of the responses, and the entropy of its distribution.

    Both `[N, R]` float32, zero outside the mask, at this temperature, before top-k and top-p.
    """
    tokens, segments = sequences(responses)
    last = responses.prompts.tokens.shape[1] - 1  # of a prompt: the first that something is said after

    def every(tokens: jax.Array, segments: jax.Array) -> tuple[jax.Array, jax.Array]:
        start = 0 if decoder.config.packed_rows else last
        hidden = decoder.hidden(parameters, tokens, segments)[:, start:]
        tokens, segments = tokens[:, start:], segments[:, start:]
        return decoder.token_log_probs(parameters, hidden, tokens, segments, temperature)

    found = decoder.per_token(every, tokens, segments)
    width = responses.mask.shape[1]
    log_prob, entropy = (jnp.where(responses.mask, x[:, -width:], 0.0) for x in found)
    return log_prob, entropy


def hidden_before(decoder: Decoder, parameters: Any, responses: Responses) -> jax.Array:
    """The hidden state before each token of a response: `[N, R, D]`, for value heads."""
    tokens, segments = sequences(responses)
    last = responses.prompts.tokens.shape[1] - 1
    read = functools.partial(decoder.hidden, parameters)
    return decoder.per_token(read, tokens, segments)[:, last:-1]


def rewarded(responses: Responses) -> jax.Array:
    """Which responses have a reward, `[N]` bool: the others have no tokens of the policy."""
    return jnp.any(responses.own, axis=1)


def finished(responses: Responses, stop_tokens: tuple[int, ...]) -> jax.Array:
    """Whether each response ends with a stop token instead of being truncated: `[N]` bool."""
    stops = jnp.isin(responses.tokens, jnp.asarray(stop_tokens, jnp.int32)) if stop_tokens else False
    return jnp.any(responses.own & stops, axis=1)


def lengths(responses: Responses, stop_tokens: tuple[int, ...], judged: bool = False) -> dict[str, jax.Array]:
    """Metrics of response lengths; `tokens` counts all tokens but padding, prompts included.

    Args:
      responses: `N` responses.
      stop_tokens: tokens that end a response.
      judged: whether some responses may have no reward; these are counted.
    """
    own = jnp.sum(responses.own, axis=1, dtype=jnp.int32)
    counted = rewarded(responses)
    there = jnp.sum(responses.mask, dtype=jnp.int32) + jnp.sum(responses.prompts.mask, dtype=jnp.int32)
    ended = finished(responses, stop_tokens)
    return {
        "tokens": there,
        "response_length": masked_mean(own.astype(jnp.float32), counted),
        "response_length_max": jnp.max(own).astype(jnp.float32),
        "truncation_rate": masked_mean((~ended).astype(jnp.float32), counted),
        **({"no_reward_rate": jnp.mean(~counted, dtype=jnp.float32)} if judged else {}),
    }


# --- reward models: a decoder with a scalar head, `{"network": its parameters, "score": [D, 1]}` ---


def with_head(network: Decoder, parameters: Any) -> Any:
    """A reward model with a network's weights, and reward zero for all responses."""
    return {"network": parameters, "score": jnp.zeros((network.config.hidden_size, 1))}


def model_reward(network: Decoder, parameters: Any, responses: Responses) -> jax.Array:
    """The rewards of `Responses [N]` by a reward model: `[N]` float32.

    Linear in the hidden state of the last token, as in `...ForSequenceClassification` with one label.
    """
    tokens, segments = sequences(responses)
    hidden = network.per_token(functools.partial(network.hidden, parameters["network"]), tokens, segments)
    places = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    last = jnp.max(jnp.where(segments > 0, places, 0), axis=1)
    held = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    at_least = jnp.promote_types(held.dtype, jnp.float32)
    return (held.astype(at_least) @ parameters["score"].astype(at_least))[:, 0]
