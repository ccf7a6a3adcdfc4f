"""Samples responses to prompts: prefill, cached decoding, continuous batching.

A static batch waits for its longest response. With fewer slots than prompts, a slot whose response has ended
takes the next prompt (Orca, Yu et al., OSDI'22). The random key of a token depends only on its sample and
position, so a sample does not depend on its slot, on other rows or on timing.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from algos.language.decoder import Cache, Decoder
from algos.language.layers import Weights
from envs.text.prompts import Prompts
from fdg.arguments import check_fields, checked_names, quoted
from fdg.errors import FdgError
from fdg.kinds import matches
from fdg.rowwise import rowwise
from fdg.stream import Now, Stream, zeros


@checked_names
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are sampled, and when a sample ends.

    Attributes:
      max_new_tokens: R, the largest number of tokens of a sample.
      temperature: logits are divided by it; 0 takes the most likely token.
      top_k: keep the k most likely tokens; 0 keeps all.
      top_p: keep the most likely tokens up to this total probability, at least one (arXiv 1904.09751).
      stop_tokens: the first of these ends a sample, and belongs to it.
      pad_token: fills the columns after the end.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_tokens: tuple[int, ...] = ()
    pad_token: int = 0

    def __post_init__(self) -> None:
        check_fields(self, "max_new_tokens", "temperature", "top_k", "top_p")
        are_tokens = np.iterable(self.stop_tokens) and all(matches(x, int) for x in self.stop_tokens)
        if are_tokens:
            object.__setattr__(self, "stop_tokens", tuple(map(int, self.stop_tokens)))
        bounds = (
            (
                are_tokens,
                f"stop_tokens={quoted(self.stop_tokens)}: give a tuple of tokens, which are integers",
            ),
            (self.max_new_tokens >= 1, f"max_new_tokens={self.max_new_tokens}: it must be 1 or more"),
            (self.temperature >= 0, f"temperature={self.temperature}: it must be 0 or more"),
            (self.top_k >= 0, f"top_k={self.top_k}: it must be zero (all) or above"),
            (0 < self.top_p <= 1, f"top_p={self.top_p}: it must be above 0, and at most 1"),
        )
        for holds, message in bounds:
            if not holds:
                raise FdgError(f"Sampling: {message}")

    @property
    def has_filters(self) -> bool:
        """True if top-k or top-p excludes tokens."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)

    @property
    def is_tempered(self) -> bool:
        """True if the temperature scales logits."""
        return self.temperature != 1


def filter_logits(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Logits [..., V] after temperature (above 0), top-k and top-p, in this order; excluded tokens get -inf.

    Tokens tied with the least likely kept token are kept.

    >>> logits = jnp.log(jnp.array([0.1, 0.2, 0.3, 0.4]))
    >>> [f"{x:.2f}" for x in filter_logits(logits, Sampling(1, top_k=3, top_p=0.7))]
    ['-inf', '-inf', '-1.20', '-0.92']
    """
    logits = logits / sampling.temperature
    vocabulary = logits.shape[-1]
    k = min(sampling.top_k or vocabulary, vocabulary)
    if k == vocabulary and sampling.top_p >= 1:
        return logits
    best = jax.lax.top_k(logits, k)[0]
    lowest_kept = best[..., -1:]
    if sampling.top_p < 1:
        probabilities = jax.nn.softmax(best, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities  # the sum over more likely tokens
        lowest_kept = jnp.min(jnp.where(before < sampling.top_p, best, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits < lowest_kept, -jnp.inf, logits)


def draw(logits: jax.Array, keys: jax.Array, sampling: Sampling) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Samples one token for each row, with the row's own key.

    Takes `logits` [N, V] float32 and `keys` [N]. Returns tokens [N] int32; their log-probabilities [N] in the
    sampling distribution (0 at temperature 0); and those [N] in the unfiltered distribution at temperature 1.
    """
    if sampling.temperature == 0:
        tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return tokens, jnp.zeros(tokens.shape, logits.dtype), log_prob(logits, tokens)
    sampling_logits = filter_logits(logits, sampling)
    # Gumbel-max (arXiv 1411.0030): the argmax of logits plus Gumbel noise is a sample of their softmax.
    noise = jax.vmap(functools.partial(jax.random.gumbel, shape=logits.shape[1:], dtype=logits.dtype))(keys)
    tokens = jnp.argmax(sampling_logits + noise, axis=-1).astype(jnp.int32)
    policy_log_prob = log_prob(logits, tokens)
    if not (sampling.has_filters or sampling.is_tempered):
        return tokens, policy_log_prob, policy_log_prob
    return tokens, log_prob(sampling_logits, tokens), policy_log_prob


def log_prob(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Log-probabilities [N] of tokens [N] under logits [N, V]."""
    # A one-hot sum instead of a gather, which would have to be partitioned over devices.
    chosen = jnp.arange(logits.shape[-1])[None] == tokens[:, None]
    return jnp.sum(jnp.where(chosen, jax.nn.log_softmax(logits, axis=-1), 0.0), axis=-1)


class Samples(NamedTuple):
    """Sampled responses."""

    tokens: jax.Array  # [N, R] int32, right-padded
    mask: jax.Array  # [N, R] bool, True up to and including the stop token
    # [N, R] float32, log-probability of each token in the sampling distribution; 0 in padding
    log_probs: jax.Array
    policy_log_probs: jax.Array  # [N, R] float32, at temperature 1, unfiltered
    # [N, R] float32, with temperature, unfiltered: ratios and importance weights divide by these, because a
    # learner computes log-probabilities in the same way
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
    """Samples responses; they do not depend on the number of slots.

    Args:
      decoder: the model.
      parameters: as returned by `decoder.init`.
      prompts: N prompts.
      key: one key, or keys [N], one for each sample; use keys in a fragment whose batch is split over
        devices.
      sampling: how tokens are drawn and when a sample ends.
      slots: responses generated at a time, over all devices; None for all. Fewer slots need less memory, and
        less time where lengths vary: a free slot takes the next prompt.

    Returns:
      Samples with R = `sampling.max_new_tokens` columns.

    Raises:
      FdgError: misshaped prompts; prompt plus response exceed the decoder's context; a token outside its
        vocabulary (checked only for concrete prompts).
    """
    _check(decoder, prompts, sampling, slots)
    keys = key if key.ndim else sample_keys(key, prompts.tokens.shape[0])
    rows = functools.partial(_generate_rows, decoder, sampling, slots, prompts.tokens.shape[0])
    return rowwise(rows, in_axes=(None, 0, 0))(parameters, prompts, keys)


def sample_keys(key: jax.Array, count: int) -> jax.Array:
    """Keys of samples [count]; key i does not depend on `count`."""
    return jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(count))


def _check(decoder: Decoder, prompts: Prompts, sampling: Sampling, slots: int | None) -> None:
    """Raises the errors of `generate`."""
    c, shape = decoder.config, tuple(prompts.tokens.shape)
    if len(shape) != 2 or tuple(prompts.mask.shape) != shape or 0 in shape:
        raise FdgError(
            f"generate: prompts have tokens {list(shape)} and a mask {list(prompts.mask.shape)}: both are"
            " [N, P], N and P above zero"
        )
    if slots is not None and slots < 1:
        raise FdgError(f"generate: slots={slots}: give at least 1, or None for one per prompt")
    longest = shape[1] + sampling.max_new_tokens
    if longest > c.max_positions:
        raise FdgError(
            f"generate: prompts of {shape[1]} tokens and max_new_tokens={sampling.max_new_tokens} are"
            f" {longest}, and the decoder's context ends at max_positions={c.max_positions}: shorten one"
        )
    wrong = [token for token in sampling.stop_tokens if not 0 <= token < c.vocab_size]
    if wrong:
        raise FdgError(f"generate: stop_tokens={wrong}: tokens of the vocabulary are 0 to {c.vocab_size - 1}")
    if not any(isinstance(x, jax.core.Tracer) for x in prompts):
        check_tokens(c.vocab_size, prompts.tokens, prompts.mask)


def check_tokens(vocab_size: int, tokens: Any, mask: Any, what: str = "prompt") -> None:
    """Checks on the host that tokens [N, P] are in the vocabulary where `mask` [N, P] is set."""
    tokens = np.asarray(tokens)
    outside = np.asarray(mask) & ((tokens < 0) | (tokens >= vocab_size))
    if outside.any():
        row, column = (int(indices[0]) for indices in np.nonzero(outside))
        raise FdgError(
            f"{what} {row} has token {int(tokens[row, column])} at {column}, and the vocabulary has 0 to"
            f" {vocab_size - 1}: is it from another tokenizer?"
        )


def _generate_rows(
    decoder: Decoder,
    sampling: Sampling,
    slots: int | None,
    count: int,
    parameters: Weights,
    prompts: Prompts,
    keys: jax.Array,
) -> Samples:
    """The samples of one device's prompts; all devices together have `count` prompts."""
    n = prompts.tokens.shape[0]
    device_slots = n if slots is None else min(max(1, slots * n // count), n)
    dtype = decoder.logits_dtype(parameters)
    answers = Answers(decoder, sampling, prompts, keys, dtype=dtype, together=device_slots == n)
    stream = Stream(answers, device_slots, n)
    return stream.take(decoder.cast(parameters), jnp.int32(0), stream.init(keys))[0]


class SlotState(NamedTuple):
    """The state of `S` slots, each with one response; `C` is the maximum length."""

    asked: Any  # leaves [S, ...]: a pair, the `Prompts` and `Answers.extra`
    keys: jax.Array  # [S], one for each sample
    token: jax.Array  # [S] int32, the last token
    length: jax.Array  # [S] int32, tokens so far
    first: jax.Array  # [S] int32, the tick of the first token
    done: jax.Array  # [S] bool
    # Ring buffers of tokens, of log-probabilities (unfiltered ones, and ones at temperature 1, only if they
    # differ), and of versions if recorded. All slots write the same column in a tick.
    written: tuple[jax.Array, ...]  # [S, C] each


class Recorded(NamedTuple):
    """Responses with their prompts, and when each token was sampled."""

    samples: Samples
    asked: Any  # as in `SlotState`
    version: jax.Array  # [N, R] int32, of the parameters that sampled each token; 0 in padding
    tick: jax.Array  # [N, R] int32, of the stream's clock; 0 in padding


@dataclasses.dataclass(frozen=True)
class Answers:
    """Generates answers to prompts, as a `fdg.stream.Source`: a tick samples one token in each slot."""

    decoder: Decoder  # as in `generate`; parameters are in the compute dtype
    sampling: Sampling
    prompts: Prompts  # the prompts of all responses, `group` responses each
    keys: jax.Array  # one for each response
    extra: Any = ()  # a pytree that accompanies the prompts, such as their correct answers
    group: int = 1  # responses to a prompt
    first: Any = 0  # index of the first response in the run
    records: bool = False  # rows are `Recorded` if True, else `Samples`
    dtype: Any = jnp.float32  # of log-probabilities: `decoder.logits_dtype`
    # True if all responses begin in the first tick and are read after the last one; then no gathers are
    # needed
    together: bool = False

    @property
    def width(self) -> int:
        """`C`, the maximum length of a response."""
        return self.sampling.max_new_tokens

    @property
    def most_ticks(self) -> int:
        """Ticks after the first token."""
        return self.width - 1

    def idle(self, slots: int) -> SlotState:
        """Empty slots."""
        num_log_probs = 1 + bool(self.sampling.has_filters) + bool(self.sampling.is_tempered)
        dtypes = (jnp.int32, *[self.dtype] * num_log_probs, *[jnp.int32] * self.records)
        zero = jnp.zeros(slots, jnp.int32)
        return SlotState(
            asked=jax.tree.map(lambda x: zeros((slots, *x.shape[1:]), x.dtype), (self.prompts, self.extra)),
            keys=zeros((slots,), self.keys.dtype),
            token=zero,
            length=zero,
            first=zero,
            done=jnp.ones(slots, bool),
            written=tuple(jnp.zeros((slots, self.width), dtype) for dtype in dtypes),
        )

    def begin(
        self, parameters: Weights, key: jax.Array, index: jax.Array, now: Now
    ) -> tuple[SlotState, Cache]:
        """Prefills prompts and samples the first tokens; caches cover the prompts only."""
        asked, keys = (self.prompts, self.extra), self.keys
        if not self.together:
            response = index - self.first
            asked, keys = jax.tree.map(lambda x: x[response // self.group], asked), keys[response]
        prompts: Prompts = asked[0]
        logits, cache = self.decoder.prefill(
            parameters, prompts.tokens, prompts.mask.astype(jnp.int32), max(self.width - 1, 1)
        )
        token, *more = self.draw(logits, keys, jnp.zeros(keys.shape, jnp.int32), now)
        one = jnp.ones_like(token)
        column = now.tick % self.width

        def write_first(x: jax.Array) -> jax.Array:
            row = jnp.zeros((len(x), self.width), x.dtype)
            return jax.lax.dynamic_update_slice_in_dim(row, x[:, None], column, axis=1)

        written = tuple(map(write_first, (token, *more)))
        kept = SlotState(asked, keys, token, one, one * now.tick, self.ended(token, one), written)
        width = prompts.tokens.shape[1]
        prompt_keys, values = (tuple(x[:, :, :width] for x in pair) for pair in (cache.keys, cache.values))
        return kept, _without_step(cache._replace(keys=prompt_keys, values=values))

    def tick(self, parameters: Weights, kept: SlotState, cache: Cache, now: Now) -> tuple[SlotState, Cache]:
        """Samples one more token in each slot."""
        logits, cache = self.decoder.decode(parameters, cache._replace(step=now.tick), kept.token)
        drawn = self.draw(logits, kept.keys, kept.length, now)
        column = (now.tick + 1) % self.width

        def write(x: jax.Array, y: jax.Array) -> jax.Array:
            # A finished slot keeps its tokens until they are read.
            if not self.together:
                y = jnp.where(kept.done, jax.lax.dynamic_slice_in_dim(x, column, 1, axis=1)[:, 0], y)
            return jax.lax.dynamic_update_slice_in_dim(x, y[:, None], column, axis=1)

        length = kept.length + ~kept.done
        kept = kept._replace(
            token=drawn[0],
            length=length,
            done=kept.done | self.ended(drawn[0], length),
            written=tuple(write(x, y) for x, y in zip(kept.written, drawn, strict=True)),
        )
        return kept, _without_step(cache)

    def done(self, kept: SlotState) -> jax.Array:
        """True for finished slots."""
        return kept.done

    def refresh(self, parameters: Weights, kept: SlotState) -> Cache:
        """Recomputes the caches, for prompts and all tokens but the last one, which the next tick reads."""
        tokens = self.in_order(kept, kept.written[0])[:, : max(self.width - 1, 1)]
        prompts: Prompts = kept.asked[0]
        cache = self.decoder.recompute_cache(
            parameters, prompts.tokens, prompts.mask, tokens, kept.length - 1, kept.first
        )
        return _without_step(cache)

    def row(self, kept: SlotState) -> Samples | Recorded:
        """The responses, with their tokens in order."""
        positions = jnp.arange(self.width)[None]
        mask = positions < kept.length[:, None]
        written = [jnp.where(mask, self.in_order(kept, x), 0) for x in kept.written]
        log_probs = written[1:-1] if self.records else written[1:]
        tempered = log_probs[1 if self.sampling.has_filters else 0]
        policy_log_probs = log_probs[-1] if self.sampling.is_tempered else tempered
        tokens = jnp.where(mask, written[0], self.sampling.pad_token)
        samples = Samples(tokens, mask, log_probs[0], policy_log_probs, tempered)
        if not self.records:
            return samples
        tick = kept.first[:, None] + jnp.maximum(positions - 1, 0)
        return Recorded(samples, kept.asked, written[-1], jnp.where(mask, tick, 0))

    def in_order(self, kept: SlotState, x: jax.Array) -> jax.Array:
        """Reorders a ring buffer `[S, C]` from the first token on."""
        if self.together:
            return x
        return jnp.take_along_axis(
            x, (kept.first[:, None] + jnp.arange(self.width)[None]) % self.width, axis=1
        )

    def draw(
        self, logits: jax.Array, keys: jax.Array, position: jax.Array, now: Now
    ) -> tuple[jax.Array, ...]:
        """Samples tokens [S] at `position`; returns the values for `SlotState.written`."""
        sampling = self.sampling
        tokens, sampled, policy = draw(logits, jax.vmap(jax.random.fold_in)(keys, position), sampling)
        drawn = [tokens, sampled]
        if sampling.has_filters:
            tempered = log_prob(logits / sampling.temperature, tokens) if sampling.is_tempered else policy
            drawn.append(tempered)
        if sampling.is_tempered:
            drawn.append(policy)
        return (*drawn, jnp.full_like(tokens, now.version)) if self.records else tuple(drawn)

    def ended(self, token: jax.Array, length: jax.Array) -> jax.Array:
        """True where a sample [S] of this `length` ends with this token."""
        stops = jnp.asarray(self.sampling.stop_tokens, jnp.int32)
        return jnp.any(token[:, None] == stops[None], axis=1) | (length >= self.width)


def _without_step(cache: Cache) -> Cache:
    """A cache without its step, which the stream's clock gives; then every leaf has an axis of rows."""
    return cache._replace(step=())  # type: ignore[arg-type]
