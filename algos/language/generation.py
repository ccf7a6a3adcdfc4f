"""Sampling answers to prompts: prefill, cached decoding, slots that take the next prompt when they are free.

A static batch waits for its longest answer. With fewer slots than prompts, a row that has ended takes the
next prompt (continuous batching: Orca, Yu et al., OSDI'22), a few at a time. Each token is drawn by a key of
its own, of sample and position, so that a sample does not depend on the slot, on the other rows or on when
its turn came.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from algos.language.decoder import Cache, Decoder
from algos.language.layers import Weights
from algos.language.sampling import Sampling, draw
from fdg.errors import FdgError
from fdg.rowwise import rowwise

_REFILLED_AT_ONCE = 8  # a part of the slots: so many wait for each other at most


class Prompts(NamedTuple):
    """What is to be answered.

    Attributes:
      tokens: [N, P] int32, left-padded.
      mask: [N, P] bool, where there is a token.
    """

    tokens: jax.Array
    mask: jax.Array


class Samples(NamedTuple):
    """Answers.

    Attributes:
      tokens: [N, R] int32, right-padded.
      mask: [N, R] bool, where there is a token; the stop token is one.
      log_probs: [N, R] float32, of each token in the distribution that it was drawn from; 0 in padding.
      policy_log_probs: [N, R] float32, the same without temperature, top-k and top-p.
    """

    tokens: jax.Array
    mask: jax.Array
    log_probs: jax.Array
    policy_log_probs: jax.Array


class _Slots(NamedTuple):
    """The state of the loop, over `S` slots; `C` tokens is the longest answer."""

    cache: Cache
    token: jax.Array  # [S] int32, the last one of each
    keys: jax.Array  # [S], of the samples
    sample: jax.Array  # [S] int32, which one; N for none
    length: jax.Array  # [S] int32, tokens so far
    first: jax.Array  # [S] int32, the column of the first one
    done: jax.Array  # [S] bool
    next: jax.Array  # [] int32, the first prompt that nobody has taken
    column: jax.Array  # [] int32, where the last tokens were written
    written: Samples  # [S, C] each, a ring of columns
    finished: Samples | None  # [N, C] each, of samples that have left their slots, if others took these


def generate(
    decoder: Decoder,
    parameters: Weights,
    prompts: Prompts,
    key: jax.Array,
    sampling: Sampling,
    slots: int | None = None,
) -> Samples:
    """Answers to prompts, the same for every number of slots.

    Args:
      decoder: whose parameters these are.
      parameters: as `decoder.init` makes them.
      prompts: N of them.
      key: one, or one of each sample [N]: the latter in a fragment whose batch is split over devices.
      sampling: how tokens are drawn and when a sample ends.
      slots: how many are answered at a time (on each device, where rows are split); None for all. Fewer need
        less memory, and less time where lengths differ much: a slot that is free takes the next prompt.

    Returns:
      R = `sampling.max_new_tokens` columns.

    Raises:
      FdgError: prompts of another shape; prompt and answer longer than the decoder's context; a token that is
        not in its vocabulary (where prompts are known, and not traced).
    """
    _check(decoder, prompts, sampling, slots)
    keys = key if key.ndim else sample_keys(key, prompts.tokens.shape[0])
    rows = functools.partial(_rows, decoder, sampling, slots)
    return rowwise(rows, in_axes=(None, 0, 0))(parameters, prompts, keys)


def sample_keys(key: jax.Array, count: int) -> jax.Array:
    """A key of each sample [count]: that of sample i is the same however many there are."""
    return jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(count))


def _check(decoder: Decoder, prompts: Prompts, sampling: Sampling, slots: int | None) -> None:
    c, shape = decoder.config, tuple(prompts.tokens.shape)
    if len(shape) != 2 or tuple(prompts.mask.shape) != shape or 0 in shape:
        raise FdgError(
            f"generate: prompts have tokens {list(shape)} and a mask {list(prompts.mask.shape)}: both are"
            " [N, P], N and P above zero"
        )
    if slots is not None and slots < 1:
        raise FdgError(f"generate: slots={slots}: it takes one at least; None is one for each prompt")
    longest = shape[1] + sampling.max_new_tokens
    if longest > c.max_positions:
        raise FdgError(
            f"generate: prompts of {shape[1]} tokens and max_new_tokens={sampling.max_new_tokens} are"
            f" {longest}, and the decoder's context ends at max_positions={c.max_positions}: shorten one"
        )
    wrong = [token for token in sampling.stop_tokens if not 0 <= token < c.vocab_size]
    if wrong:
        raise FdgError(f"generate: stop_tokens={wrong}: the vocabulary has 0 to {c.vocab_size - 1}")
    if not any(isinstance(each, jax.core.Tracer) for each in prompts):
        check_tokens(c.vocab_size, prompts.tokens, prompts.mask)


def check_tokens(vocab_size: int, tokens: Any, mask: Any, what: str = "prompt") -> None:
    """On the host, requires that tokens [N, P] where `mask` [N, P] is set are in the vocabulary.

    Raises:
      FdgError: names the first that is not, its row and its column.
    """
    tokens = np.asarray(tokens)
    outside = np.asarray(mask) & ((tokens < 0) | (tokens >= vocab_size))
    if outside.any():
        row, column = (int(each[0]) for each in np.nonzero(outside))
        raise FdgError(
            f"{what} {row} has token {int(tokens[row, column])} at {column}, and the vocabulary has 0 to"
            f" {vocab_size - 1}: is it of another tokenizer?"
        )


def _rows(
    decoder: Decoder,
    sampling: Sampling,
    most: int | None,
    parameters: Weights,
    prompts: Prompts,
    keys: jax.Array,
) -> Samples:
    """`generate`, with a key of each sample and `most` slots."""
    n = prompts.tokens.shape[0]
    slots = min(most or n, n)
    width = sampling.max_new_tokens
    parameters = decoder.cast(parameters)
    at_once = min(max(1, slots // _REFILLED_AT_ONCE), slots)
    stops = jnp.asarray(sampling.stop_tokens, jnp.int32)

    def ended(token: jax.Array, count: jax.Array) -> jax.Array:
        return jnp.any(token[:, None] == stops[None], axis=1) | (count >= width)

    def drawn(logits: jax.Array, keys: jax.Array, count: jax.Array) -> tuple[jax.Array, ...]:
        return draw(logits, jax.vmap(jax.random.fold_in)(keys, count), sampling)

    def begun(rows: Prompts, keys: jax.Array) -> tuple[Cache, tuple[jax.Array, ...]]:
        """Caches of prompts, and their first tokens with log-probabilities."""
        logits, cache = decoder.prefill(
            parameters, rows.tokens, rows.mask.astype(jnp.int32), max(width - 1, 1)
        )
        return cache, drawn(logits, keys, jnp.zeros(keys.shape, jnp.int32))

    def columns(state: _Slots) -> Samples:
        """What was written of each slot's sample, its first token first."""
        places = jnp.arange(width)[None]
        there = places < state.length[:, None]
        if slots == n:  # all began at column 0
            rows = state.written
        else:
            at = (state.first[:, None] + places) % width
            rows = jax.tree.map(lambda x: jnp.take_along_axis(x, at, axis=1), state.written)
        return Samples(
            jnp.where(there, rows.tokens, sampling.pad_token), there,
            jnp.where(there, rows.log_probs, 0), jnp.where(there, rows.policy_log_probs, 0),
        )  # fmt: skip

    def waiting(state: _Slots) -> jax.Array:
        free = jnp.sum(state.done, dtype=jnp.int32)
        left = n - state.next
        return (left > 0) & (free >= jnp.minimum(at_once, left))

    def refill(state: _Slots) -> _Slots:
        """The first free slots hand in what they have, and take the next prompts."""
        order = jnp.argsort(~state.done, stable=True)[:at_once].astype(jnp.int32)
        prompt = state.next + jnp.arange(at_once, dtype=jnp.int32)
        taken = state.done[order] & (prompt < n)
        slot = jnp.where(taken, order, slots)  # where there is none, nothing is written
        leaving = jnp.where(taken, state.sample[order], n)
        ready = jax.tree.map(lambda x: x[order], columns(state))
        finished = jax.tree.map(lambda x, y: x.at[leaving].set(y, mode="drop"), state.finished, ready)
        which = jnp.minimum(prompt, n - 1)
        new_keys = keys[which]
        fresh, (token, *log_probs) = begun(jax.tree.map(lambda x: x[which], prompts), new_keys)
        old = state.cache

        def put(x: jax.Array, y: jax.Array) -> jax.Array:
            return x.at[slot].set(y, mode="drop")

        width_read = prompts.tokens.shape[1]

        def put_prompt(x: jax.Array, y: jax.Array) -> jax.Array:
            return x.at[slot, :, :width_read].set(y[:, :, :width_read], mode="drop")

        cache = old._replace(
            keys=jax.tree.map(put_prompt, old.keys, fresh.keys),
            values=jax.tree.map(put_prompt, old.values, fresh.values),
            prompt=put(old.prompt, fresh.prompt), position=put(old.position, fresh.position),
            generated=put(old.generated, fresh.generated),
        )  # fmt: skip
        one = jnp.ones_like(token)
        at = state.column

        def write(x: jax.Array, y: jax.Array) -> jax.Array:
            return x.at[slot, at].set(y, mode="drop")

        return state._replace(
            cache=cache, token=put(state.token, token), keys=put(state.keys, new_keys),
            sample=put(state.sample, prompt), length=put(state.length, one),
            first=put(state.first, jnp.full_like(token, at)), done=put(state.done, ended(token, one)),
            next=jnp.minimum(state.next + jnp.sum(taken, dtype=jnp.int32), n),
            written=jax.tree.map(write, state.written, Samples(token, one > 0, *log_probs)),
            finished=finished,
        )  # fmt: skip

    def step(state: _Slots) -> _Slots:
        logits, cache = decoder.decode(parameters, state.cache, state.token)
        token, *log_probs = drawn(logits, state.keys, state.length)
        column = (state.column + 1) % width
        length = state.length + ~state.done

        def write(x: jax.Array, y: jax.Array) -> jax.Array:
            # What a slot that is done has written stays, until it is handed in.
            kept = jnp.where(state.done, jax.lax.dynamic_slice_in_dim(x, column, 1, axis=1)[:, 0], y)
            return jax.lax.dynamic_update_slice_in_dim(x, kept[:, None], column, axis=1)

        state = state._replace(
            cache=cache, token=token, length=length, done=state.done | ended(token, length), column=column,
            written=jax.tree.map(write, state.written, Samples(token, token >= 0, *log_probs)),
        )  # fmt: skip
        return state if slots == n else jax.lax.while_loop(waiting, refill, state)

    cache, (token, *log_probs) = begun(jax.tree.map(lambda x: x[:slots], prompts), keys[:slots])

    def ring(first: jax.Array) -> jax.Array:
        return jnp.pad(first[:, None], ((0, 0), (0, width - 1)))

    count = jnp.ones_like(token)
    nothing = None
    if slots < n:
        nothing = Samples(*(jnp.zeros((n, width), x.dtype) for x in (token, token > 0, *log_probs)))
    state = _Slots(
        cache, token, keys[:slots], jnp.arange(slots, dtype=jnp.int32), count, jnp.zeros_like(token),
        ended(token, count), jnp.int32(slots), jnp.int32(0),
        jax.tree.map(ring, Samples(token, token >= 0, *log_probs)), nothing,
    )  # fmt: skip
    if slots < n:
        state = jax.lax.while_loop(waiting, refill, state)
    if width > 1 or slots < n:
        state = jax.lax.while_loop(lambda state: ~jnp.all(state.done), step, state)
    if slots == n:
        return columns(state)
    return jax.tree.map(lambda x, y: x.at[state.sample].set(y, mode="drop"), state.finished, columns(state))
