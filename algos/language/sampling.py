"""Drawing a token from logits: temperature, top-k, top-p; each row by its own key."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from fdg.errors import FdgError


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, and when a sample ends.

    Attributes:
      max_new_tokens: R, after which a sample ends in any case.
      temperature: logits are divided by it; 0 takes the most likely token.
      top_k: only so many of the most likely; 0 for all.
      top_p: only the most likely that together have this probability, one at least (arXiv 1904.09751).
      stop_tokens: a sample ends with the first of these, which is part of it.
      pad_token: what stands after the end.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_tokens: tuple[int, ...] = ()
    pad_token: int = 0

    def __post_init__(self) -> None:
        bounds = (
            (self.max_new_tokens >= 1, f"max_new_tokens={self.max_new_tokens}: it must be 1 or more"),
            (self.temperature >= 0, f"temperature={self.temperature}: it must be zero or above"),
            (self.top_k >= 0, f"top_k={self.top_k}: it must be zero (all) or above"),
            (0 < self.top_p <= 1, f"top_p={self.top_p}: it must be above 0, and 1 at most"),
        )
        for holds, message in bounds:
            if not holds:
                raise FdgError(f"Sampling: {message}")

    @property
    def filters(self) -> bool:
        """Whether some tokens are left out of what is drawn from."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)

    @property
    def is_tempered(self) -> bool:
        """Whether logits are scaled."""
        return self.temperature != 1


def filtered(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Logits [..., V] of the distribution that is drawn from at a temperature above 0, with minus infinities.

    In this order: temperature, top-k, top-p; tokens as likely as the last that is kept are kept.

    >>> logits = jnp.log(jnp.array([0.1, 0.2, 0.3, 0.4]))
    >>> [f"{x:.2f}" for x in filtered(logits, Sampling(1, top_k=3, top_p=0.7))]
    ['-inf', '-inf', '-1.20', '-0.92']
    """
    logits = logits / sampling.temperature
    vocabulary = logits.shape[-1]
    k = min(sampling.top_k or vocabulary, vocabulary)
    if k == vocabulary and sampling.top_p >= 1:
        return logits
    best = jax.lax.top_k(logits, k)[0]
    kept = best[..., -1:]
    if sampling.top_p < 1:
        chances = jax.nn.softmax(best, axis=-1)
        ahead = jnp.cumsum(chances, axis=-1) - chances
        kept = jnp.min(jnp.where(ahead < sampling.top_p, best, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits < kept, -jnp.inf, logits)


def draw(logits: jax.Array, keys: jax.Array, sampling: Sampling) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One token of each row, by its own key.

    Args:
      logits: [N, V] float32.
      keys: [N].
      sampling: how.

    Returns:
      Tokens [N] int32; their log-probabilities [N] in the distribution that was drawn from (0 at temperature
      0); and those [N] without temperature, top-k and top-p.
    """
    if sampling.temperature == 0:
        tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return tokens, jnp.zeros(tokens.shape, logits.dtype), log_prob(logits, tokens)
    left = filtered(logits, sampling)
    # Gumbel's trick (arXiv 1411.0030): the largest of logits with such noise is a draw from their softmax.
    noise = jax.vmap(functools.partial(jax.random.gumbel, shape=logits.shape[1:], dtype=logits.dtype))(keys)
    tokens = jnp.argmax(left + noise, axis=-1).astype(jnp.int32)
    plain = log_prob(logits, tokens)
    return tokens, log_prob(left, tokens) if sampling.filters or sampling.is_tempered else plain, plain


def log_prob(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Of tokens [N], each in the softmax of its logits [N, V]: [N]."""
    # Without a gather, which would have to be split.
    chosen = jnp.arange(logits.shape[-1])[None] == tokens[:, None]
    return jnp.sum(jnp.where(chosen, jax.nn.log_softmax(logits, axis=-1), 0.0), axis=-1)
