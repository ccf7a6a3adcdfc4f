"""Sampling answers to prompts: prefill, cached decoding, slots that take the next prompt when they are free.

A static batch waits for its longest answer. With fewer slots than prompts, a row that has ended takes the
next prompt (continuous batching: Orca, Yu et al., OSDI'22), a few at a time. Each token is drawn by a key of
its own, of sample and position, so that a sample does not depend on the slot, on the other rows or on when
its turn came.
"""

import dataclasses
import functools
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from algos.language.decoder import Cache, Decoder
from algos.language.layers import Weights
from envs.text.prompts import Prompts
from fdg.arguments import checked_names
from fdg.errors import FdgError, FdgWarning
from fdg.rowwise import rowwise
from fdg.stream import Now, Stream, zeros


@checked_names
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, and when a sample ends.

    Attributes:
      max_new_tokens: R, after which a sample ends in any case.
      temperature: logits are divided by it; 0 takes the most likely token.
      top_k: sample among this many of the most likely tokens; 0 for all.
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

    `logits` are [N, V] float32, `keys` [N]. Returns tokens [N] int32; their log-probabilities [N] in the
    distribution that was drawn from (0 at temperature 0); and those [N] without temperature, top-k and top-p.
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


class Samples(NamedTuple):
    """Answers."""

    tokens: jax.Array  # [N, R] int32, right-padded
    mask: jax.Array  # [N, R] bool, where there is a token; the stop token is one
    # [N, R] float32, of each token in the distribution that it was drawn from; 0 in padding
    log_probs: jax.Array
    policy_log_probs: jax.Array  # [N, R] float32, the same at temperature 1, without top-k and top-p
    # [N, R] float32, the same without top-k and top-p alone: what a learner computes of the same
    # parameters, so what ratios and importance weights are over
    tempered_log_probs: jax.Array


@checked_names
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
      slots: how many are answered at a time, on all devices together; None for all. Fewer need less memory,
        and less time where lengths differ much: a slot that is free takes the next prompt.

    Returns:
      R = `sampling.max_new_tokens` columns.

    Raises:
      FdgError: prompts of another shape; prompt and answer longer than the decoder's context; a token that is
        not in its vocabulary (where prompts are known, and not traced).
    """
    _check(decoder, prompts, sampling, slots)
    keys = key if key.ndim else sample_keys(key, prompts.tokens.shape[0])
    rows = functools.partial(_rows, decoder, sampling, slots, prompts.tokens.shape[0])
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
    """On the host, requires that tokens [N, P] where `mask` [N, P] is set are in the vocabulary."""
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
    slots: int | None,
    count: int,
    parameters: Weights,
    prompts: Prompts,
    keys: jax.Array,
) -> Samples:
    """`generate` of some of its `count` prompts, with a key of each sample: all, or those of one device."""
    n = prompts.tokens.shape[0]
    here = n if slots is None else min(max(1, slots * n // count), n)
    if slots is not None and n < count:
        warnings.warn(
            f"slots={slots} is the number on all devices together, {here} on each of {count // n}; it was the"
            f" number on each until 0.1: write slots={slots * count // n} for {slots} on each",
            FdgWarning,
            stacklevel=2,
        )
    dtype = decoder.logits_dtype(parameters)
    answers = Answers(decoder, sampling, prompts, keys, dtype=dtype, together=here == n)
    stream = Stream(answers, here, n)
    return stream.take(decoder.cast(parameters), jnp.int32(0), stream.init(keys))[0]


class Kept(NamedTuple):
    """What a slot keeps of the response in it; `C` tokens is the longest."""

    asked: Any  # [S, ...] of each leaf: `Prompts`, and what else is carried along
    keys: jax.Array  # [S], of the samples
    token: jax.Array  # [S] int32, the last one of each
    length: jax.Array  # [S] int32, tokens so far
    first: jax.Array  # [S] int32, the tick of the first one
    done: jax.Array  # [S] bool
    # Tokens, their log-probabilities, those without filters and without temperature where they differ, and
    # versions where they are recorded: a ring of columns, of which all slots write to one in a tick.
    written: tuple[jax.Array, ...]  # [S, C] each


class Recorded(NamedTuple):
    """Answers with what they are to, and when each token was drawn."""

    samples: Samples
    asked: Any
    version: jax.Array  # [N, R] int32, of the parameters; 0 in padding
    tick: jax.Array  # [N, R] int32, of the stream's clock; 0 in padding


@dataclasses.dataclass(frozen=True)
class Answers:
    """Answers to prompts as a `fdg.stream.Source`: a tick is one token of each slot."""

    decoder: Decoder  # as of `generate`; parameters are in the dtype of the computation
    sampling: Sampling
    prompts: Prompts  # of all responses that may begin, `group` to each
    keys: jax.Array  # one of each of these responses
    also: Any = ()  # what is carried along with each prompt
    group: int = 1  # responses to a prompt
    first: Any = 0  # index of the first of these responses in the run
    records: bool = False  # whether rows are `Recorded`, or `Samples` alone
    dtype: Any = jnp.float32  # of log-probabilities: the decoder's `logits_dtype`
    # whether all begin in the first tick and are read after the last, so that nothing is gathered
    together: bool = False

    @property
    def width(self) -> int:
        """`C`."""
        return self.sampling.max_new_tokens

    @property
    def most_ticks(self) -> int:
        """Tokens after the first."""
        return self.width - 1

    def idle(self, slots: int) -> Kept:
        """Empty slots."""
        none, how = jnp.zeros(slots, jnp.int32), self.sampling
        floats = 1 + bool(how.filters) + bool(how.is_tempered)
        dtypes = (jnp.int32, *[self.dtype] * floats, *[jnp.int32] * self.records)
        return Kept(
            jax.tree.map(lambda x: zeros((slots, *x.shape[1:]), x.dtype), (self.prompts, self.also)),
            zeros((slots,), self.keys.dtype),
            none,
            none,
            none,
            jnp.ones(slots, bool),
            tuple(jnp.zeros((slots, self.width), dtype) for dtype in dtypes),
        )

    def begin(self, parameters: Weights, key: jax.Array, index: jax.Array, now: Now) -> tuple[Kept, Cache]:
        """Prompts that are read, and first tokens; of caches the part of the prompts."""
        asked, keys = (self.prompts, self.also), self.keys
        if not self.together:
            which = index - self.first
            asked, keys = jax.tree.map(lambda x: x[which // self.group], asked), keys[which]
        prompts: Prompts = asked[0]
        logits, cache = self.decoder.prefill(
            parameters, prompts.tokens, prompts.mask.astype(jnp.int32), max(self.width - 1, 1)
        )
        made = self.draw(logits, keys, jnp.zeros(keys.shape, jnp.int32), now)
        one = jnp.ones_like(made[0])
        column = now.tick % self.width

        def first(x: jax.Array) -> jax.Array:
            row = jnp.zeros((len(x), self.width), x.dtype)
            return jax.lax.dynamic_update_slice_in_dim(row, x[:, None], column, axis=1)

        written = tuple(map(first, made))
        kept = Kept(asked, keys, made[0], one, one * now.tick, self.ended(made[0], one), written)
        read = prompts.tokens.shape[1]
        keys_, values = (tuple(x[:, :, :read] for x in each) for each in (cache.keys, cache.values))
        return kept, _rowwise(cache._replace(keys=keys_, values=values))

    def tick(self, parameters: Weights, kept: Kept, cache: Cache, now: Now) -> tuple[Kept, Cache]:
        """One more token of each."""
        logits, cache = self.decoder.decode(parameters, cache._replace(step=now.tick), kept.token)
        made = self.draw(logits, kept.keys, kept.length, now)
        column = (now.tick + 1) % self.width

        def write(x: jax.Array, y: jax.Array) -> jax.Array:
            # What a slot that is done has written stays until it is handed in.
            if not self.together:
                y = jnp.where(kept.done, jax.lax.dynamic_slice_in_dim(x, column, 1, axis=1)[:, 0], y)
            return jax.lax.dynamic_update_slice_in_dim(x, y[:, None], column, axis=1)

        length = kept.length + ~kept.done
        kept = kept._replace(
            token=made[0],
            length=length,
            done=kept.done | self.ended(made[0], length),
            written=tuple(write(x, y) for x, y in zip(kept.written, made, strict=True)),
        )
        return kept, _rowwise(cache)

    def done(self, kept: Kept) -> jax.Array:
        """Which have their last token."""
        return kept.done

    def refresh(self, parameters: Weights, kept: Kept) -> Cache:
        """Caches of prompts and of all tokens but the last, which the next tick reads."""
        tokens = self.in_order(kept, kept.written[0])[:, : max(self.width - 1, 1)]
        prompts: Prompts = kept.asked[0]
        cache = self.decoder.reread(
            parameters, prompts.tokens, prompts.mask, tokens, kept.length - 1, kept.first
        )
        return _rowwise(cache)

    def row(self, kept: Kept) -> Samples | Recorded:
        """What was written, the first token first."""
        places = jnp.arange(self.width)[None]
        there = places < kept.length[:, None]
        written = [jnp.where(there, self.in_order(kept, x), 0) for x in kept.written]
        log_probs = written[1:-1] if self.records else written[1:]
        tempered = log_probs[1 if self.sampling.filters else 0]
        plain = log_probs[-1] if self.sampling.is_tempered else tempered
        tokens = jnp.where(there, written[0], self.sampling.pad_token)
        samples = Samples(tokens, there, log_probs[0], plain, tempered)
        if not self.records:
            return samples
        tick = kept.first[:, None] + jnp.maximum(places - 1, 0)
        return Recorded(samples, kept.asked, written[-1], jnp.where(there, tick, 0))

    def in_order(self, kept: Kept, x: jax.Array) -> jax.Array:
        """What was written `[S, C]`, the first token first."""
        if self.together:
            return x
        return jnp.take_along_axis(
            x, (kept.first[:, None] + jnp.arange(self.width)[None]) % self.width, axis=1
        )

    def draw(
        self, logits: jax.Array, keys: jax.Array, position: jax.Array, now: Now
    ) -> tuple[jax.Array, ...]:
        """Tokens [S] at these positions of their samples, with log-probabilities and versions."""
        how = self.sampling
        tokens, drawn, plain = draw(logits, jax.vmap(jax.random.fold_in)(keys, position), how)
        found = [tokens, drawn]
        if how.filters:
            found.append(log_prob(logits / how.temperature, tokens) if how.is_tempered else plain)
        if how.is_tempered:
            found.append(plain)
        return (*found, jnp.full_like(tokens, now.version)) if self.records else tuple(found)

    def ended(self, token: jax.Array, length: jax.Array) -> jax.Array:
        """Whether samples [S] end with these tokens, which make them so long."""
        stops = jnp.asarray(self.sampling.stop_tokens, jnp.int32)
        return jnp.any(token[:, None] == stops[None], axis=1) | (length >= self.width)


def _rowwise(cache: Cache) -> Cache:
    """A cache of which every leaf has an axis of rows: the clock says where all of them write."""
    return cache._replace(step=())  # type: ignore[arg-type]
