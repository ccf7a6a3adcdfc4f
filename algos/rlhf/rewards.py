"""Reward models: a decoder with a scalar head for whole responses.

The reward is linear in the hidden state of the last token, as in `...ForSequenceClassification` with one
label. Parameters are `{"network": those of a decoder, "score": [D, 1]}`.

Letters in shapes: `N` responses, `D` width of the network.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from algos.language.decoder import Decoder
from algos.rlhf.responses import Responses, sequences


def first(network: Decoder, parameters: Any) -> Any:
    """A reward model with a network's weights, and reward zero for all responses."""
    return {"network": parameters, "score": jnp.zeros((network.config.hidden_size, 1))}


def score(network: Decoder, parameters: Any, responses: Responses) -> jax.Array:
    """The rewards of `Responses [N]` by a reward model: `[N]` float32."""
    tokens, segments = sequences(responses)
    hidden = network.per_token(functools.partial(network.hidden, parameters["network"]), tokens, segments)
    places = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    last = jnp.max(jnp.where(segments > 0, places, 0), axis=1)
    held = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    at_least = jnp.promote_types(held.dtype, jnp.float32)
    return (held.astype(at_least) @ parameters["score"].astype(at_least))[:, 0]


def preference_loss(margin: jax.Array) -> jax.Array:
    """The loss of a margin `[N]` between the preferred and the other response: `[N]` float32.

    The negative log-likelihood of Bradley and Terry (1952), as in Ouyang et al. 2022 (arXiv 2203.02155),
    equation 1.

    >>> [f"{x:.4f}" for x in preference_loss(jnp.array([0.0, 2.0, -2.0]))]
    ['0.6931', '0.1269', '2.1269']
    """
    return -jax.nn.log_sigmoid(margin)
