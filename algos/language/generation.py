"""Sampling answers to prompts: prefill, cached decoding, slots that take the next prompt when they are free.

A static batch waits for its longest answer. With fewer slots than prompts, a row that has ended takes the
next prompt (continuous batching: Orca, Yu et al., OSDI'22), a few at a time. Each token is drawn by a key of
its own, of sample and position, so that a sample does not depend on the slot, on the other rows or on when
its turn came.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from algos.language.decoder import Cache, Decoder
from algos.language.layers import Weights
from algos.language.sampling import Sampling, draw, log_prob
from envs.text.prompts import Prompts
from fdg.errors import FdgError
from fdg.rowwise import rowwise

_REFILLED_AT_ONCE = 8  # a part of the slots: so many wait for each other at most


class Samples(NamedTuple):
    """Answers.

    Attributes:
      tokens: [N, R] int32, right-padded.
      mask: [N, R] bool, where there is a token; the stop token is one.
      log_probs: [N, R] float32, of each token in the distribution that it was drawn from; 0 in padding.
      policy_log_probs: [N, R] float32, the same at temperature 1, without top-k and top-p.
      tempered_log_probs: [N, R] float32, the same without top-k and top-p alone: what a learner computes of
        the same parameters, so what ratios and importance weights are over.
    """

    tokens: jax.Array
    mask: jax.Array
    log_probs: jax.Array
    policy_log_probs: jax.Array
    tempered_log_probs: jax.Array


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
    # Tokens, their log-probabilities, and those without filters and without temperature where they differ.
    written: tuple[jax.Array, ...]  # [S, C] each, a ring of columns
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
    loop = _Loop(decoder, sampling, decoder.cast(parameters), prompts, keys, slots)
    state = loop.start()
    if slots < n:
        state = jax.lax.while_loop(loop.refills, loop.refill, state)
    if sampling.max_new_tokens > 1:
        state = jax.lax.while_loop(lambda state: ~jnp.all(state.done), loop.step, state)
    return loop.end(state)


@dataclasses.dataclass(frozen=True)
class _Loop:
    """The parts of the loop, over prompts with a key each."""

    decoder: Decoder
    sampling: Sampling
    parameters: Weights
    prompts: Prompts
    keys: jax.Array
    slots: int

    @property
    def count(self) -> int:
        return self.prompts.tokens.shape[0]

    @property
    def width(self) -> int:
        return self.sampling.max_new_tokens

    @property
    def at_once(self) -> int:
        return max(1, self.slots // _REFILLED_AT_ONCE)

    def start(self) -> _Slots:
        """The first prompts in the slots, with their first tokens."""
        keys = self.keys[: self.slots]
        cache, made = self.begin(jax.tree.map(lambda x: x[: self.slots], self.prompts), keys)
        one, none = jnp.ones_like(made[0]), jnp.zeros_like(made[0])
        written = tuple(jnp.pad(x[:, None], ((0, 0), (0, self.width - 1))) for x in made)
        sample = jnp.arange(self.slots, dtype=jnp.int32)
        finished = None
        if self.slots < self.count:
            finished = jax.tree.map(
                lambda x: jnp.zeros((self.count, self.width), x.dtype), self.samples(written, none, none)
            )
        done = self.ended(made[0], one)
        return _Slots(
            cache,
            made[0],
            keys,
            sample,
            one,
            none,
            done,
            jnp.int32(self.slots),
            jnp.int32(0),
            written,
            finished,
        )

    def step(self, state: _Slots) -> _Slots:
        """One more token of each slot; then the slots that are free take the next prompts."""
        logits, cache = self.decoder.decode(self.parameters, state.cache, state.token)
        made = self.draw(logits, state.keys, state.length)
        column = (state.column + 1) % self.width
        length = state.length + ~state.done

        def write(x: jax.Array, y: jax.Array) -> jax.Array:
            if self.slots < self.count:  # what a slot that is done has written stays until it is handed in
                y = jnp.where(state.done, jax.lax.dynamic_slice_in_dim(x, column, 1, axis=1)[:, 0], y)
            return jax.lax.dynamic_update_slice_in_dim(x, y[:, None], column, axis=1)

        written = tuple(write(x, y) for x, y in zip(state.written, made, strict=True))
        done = state.done | self.ended(made[0], length)
        state = state._replace(
            cache=cache, token=made[0], length=length, done=done, column=column, written=written
        )
        return state if self.slots == self.count else jax.lax.while_loop(self.refills, self.refill, state)

    def refills(self, state: _Slots) -> jax.Array:
        """Whether enough slots are free to take prompts, or as many as there are prompts."""
        left = self.count - state.next
        return (left > 0) & (jnp.sum(state.done, dtype=jnp.int32) >= jnp.minimum(self.at_once, left))

    def refill(self, state: _Slots) -> _Slots:
        """The first free slots hand in what they have, and take the next prompts."""
        order = jnp.argsort(~state.done, stable=True)[: self.at_once].astype(jnp.int32)
        prompt = state.next + jnp.arange(self.at_once, dtype=jnp.int32)
        taken = state.done[order] & (prompt < self.count)
        # Where none is taken, what is written goes beyond the last row, and is dropped.
        slot = jnp.where(taken, order, self.slots)
        leaving = jnp.where(taken, state.sample[order], self.count)
        ready = self.samples(tuple(x[order] for x in state.written), state.first[order], state.length[order])
        which = jnp.minimum(prompt, self.count - 1)
        keys = self.keys[which]
        fresh, made = self.begin(jax.tree.map(lambda x: x[which], self.prompts), keys)
        one = jnp.ones_like(made[0])

        def put(x: jax.Array, y: jax.Array) -> jax.Array:
            return x.at[slot].set(y, mode="drop")

        return state._replace(
            cache=_with_prompts(state.cache, fresh, slot),
            token=put(state.token, made[0]),
            keys=put(state.keys, keys),
            sample=put(state.sample, prompt),
            length=put(state.length, one),
            first=put(state.first, jnp.full_like(one, state.column)),
            done=put(state.done, self.ended(made[0], one)),
            next=jnp.minimum(state.next + jnp.sum(taken, dtype=jnp.int32), self.count),
            written=tuple(
                x.at[slot, state.column].set(y, mode="drop") for x, y in zip(state.written, made, strict=True)
            ),
            finished=self.hand_in(state.finished, leaving, ready),
        )

    def end(self, state: _Slots) -> Samples:
        """All samples, of which the last are still in their slots."""
        last = self.samples(state.written, state.first, state.length)
        return last if state.finished is None else self.hand_in(state.finished, state.sample, last)

    def begin(self, prompts: Prompts, keys: jax.Array) -> tuple[Cache, tuple[jax.Array, ...]]:
        """Caches of prompts, and their first tokens with log-probabilities."""
        logits, cache = self.decoder.prefill(
            self.parameters, prompts.tokens, prompts.mask.astype(jnp.int32), max(self.width - 1, 1)
        )
        return cache, self.draw(logits, keys, jnp.zeros(keys.shape, jnp.int32))

    def draw(self, logits: jax.Array, keys: jax.Array, position: jax.Array) -> tuple[jax.Array, ...]:
        """Tokens [S] at these positions of their samples, with log-probabilities."""
        how = self.sampling
        tokens, drawn, plain = draw(logits, jax.vmap(jax.random.fold_in)(keys, position), how)
        found = [tokens, drawn]
        if how.filters:
            found.append(log_prob(logits / how.temperature, tokens) if how.is_tempered else plain)
        return (*found, plain) if how.is_tempered else tuple(found)

    def ended(self, token: jax.Array, length: jax.Array) -> jax.Array:
        """Whether samples [S] end with these tokens, which make them so long."""
        stops = jnp.asarray(self.sampling.stop_tokens, jnp.int32)
        return jnp.any(token[:, None] == stops[None], axis=1) | (length >= self.width)

    def samples(self, written: tuple[jax.Array, ...], first: jax.Array, length: jax.Array) -> Samples:
        """What was written of some slots' samples, the first token first."""
        places = jnp.arange(self.width)[None]
        if self.slots < self.count:  # else all began at column 0
            at = (first[:, None] + places) % self.width
            written = tuple(jnp.take_along_axis(x, at, axis=1) for x in written)
        there = places < length[:, None]
        log_probs = [jnp.where(there, each, 0) for each in written[1:]]
        tokens = jnp.where(there, written[0], self.sampling.pad_token)
        tempered = log_probs[1 if self.sampling.filters else 0]
        plain = log_probs[-1] if self.sampling.is_tempered else tempered
        return Samples(tokens, there, log_probs[0], plain, tempered)

    def hand_in(self, finished: Samples | None, sample: jax.Array, ready: Samples) -> Samples:
        """Samples [N, C] with those of these numbers."""
        return jax.tree.map(lambda x, y: x.at[sample].set(y, mode="drop"), finished, ready)


def _with_prompts(cache: Cache, fresh: Cache, slot: jax.Array) -> Cache:
    """A cache whose rows `slot` start over with other prompts."""
    read = cache.prompt.shape[1]

    def put(x: jax.Array, y: jax.Array) -> jax.Array:
        return x.at[slot].set(y, mode="drop")

    def put_prompts(x: jax.Array, y: jax.Array) -> jax.Array:
        return x.at[slot, :, :read].set(y[:, :, :read], mode="drop")

    return cache._replace(
        keys=jax.tree.map(put_prompts, cache.keys, fresh.keys),
        values=jax.tree.map(put_prompts, cache.values, fresh.values),
        prompt=put(cache.prompt, fresh.prompt),
        position=put(cache.position, fresh.position),
        generated=put(cache.generated, fresh.generated),
    )
