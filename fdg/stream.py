"""Continuous batching: slots generate responses, and a micro-batch does not wait for the longest response.

A `Stream` is a value, and its state is a pytree; both are pure JAX, independent of the engine. Counters in
the state (the clock, specified in docs/streaming.md) determine which response starts when, under which
version of the parameters, and which rows form a micro-batch.

Shapes: `S` slots; `F` responses that start at once; `B` units per batch, `b` units per micro-batch, `G`
responses per unit; `a` batches ahead; `W = b + a B`, the largest number of live units. A unit is a group of
responses that are taken together, such as all responses to one prompt.
"""

import dataclasses
import math
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from fdg.arguments import check_fields, check_members, checked_names, quoted
from fdg.errors import FdgError, kind_of, structure_of
from fdg.fragment import split_rows
from fdg.keys import zeros
from fdg.loops import expect_trips
from fdg.settings.fields import nearest_divisors

# Values of the fields `order` and `late` of `Stream`.
Order = Literal["prompt", "finished"]
Late = Literal["wait", "mask"]

_PREFILL_DIVISOR = 8  # by default a prefill starts an eighth of the slots at once


class Now(NamedTuple):
    """The version of the parameters and the tick at which tokens are sampled."""

    version: jax.Array  # [] int32, of the parameters
    tick: jax.Array  # [] int32, of the stream's clock


class Source(Protocol):
    """The computation of a slot, as pure functions. All arguments and results have slots as axis 0.

    A slot has two parts: its state `kept` (tokens, keys, versions; part of the stream's state), and a cache,
    which `refresh` computes from that state and the parameters.

    Attributes:
      most_ticks: optional; the largest number of ticks after `begin` until a slot is done, for predictions of
        time: with it, they assume that every response is as long as it may be.
    """

    def idle(self, slots: int) -> Any:
        """The state of `slots` empty slots."""

    def begin(self, parameters: Any, key: jax.Array, index: jax.Array, now: Now) -> tuple[Any, Any]:
        """The states and caches of slots that start the responses `index [F]` of the run.

        `key` is the random key of the run, the same in every call: fold the index into it.

        Leaves may be smaller than the slots' leaves along axes other than the first; they are written at the
        start of these axes. The rest of a state is as in `idle`; the rest of a cache is undefined.
        """

    def tick(self, parameters: Any, kept: Any, cache: Any, now: Now) -> tuple[Any, Any]:
        """State and cache after one more tick; finished slots keep their results for `row`."""

    def done(self, kept: Any) -> jax.Array:
        """Which slots have finished, `[S]` bool; arbitrary for idle slots."""

    def refresh(self, parameters: Any, kept: Any) -> Any:
        """The caches of slots under these parameters."""

    def row(self, kept: Any) -> Any:
        """The rows of finished slots."""


class Clock(NamedTuple):
    """The counters of a stream, all int32 except `occupied`."""

    micro_batch: jax.Array  # [] number of micro-batches taken
    tick: jax.Array  # [] number of ticks
    next: jax.Array  # [] index of the next response to start
    busy: jax.Array  # [] occupied slots, summed over ticks
    occupied: jax.Array  # [S] bool
    place: jax.Array  # [S] row of each slot's response among the rows of live units; W G if none
    unit: jax.Array  # [W] index of each live unit; -1 if none
    begun: jax.Array  # [W] the iteration in which each unit started
    missing: jax.Array  # [W] number of unfinished responses of each unit
    finished: jax.Array  # [W] the tick in which each unit's last response finished


class StreamState(NamedTuple):
    """The state of a stream."""

    key: jax.Array  # the random key of the run
    clock: Clock
    kept: Any  # [S, ...] the states of the slots
    rows: Any  # [W G, ...] the rows of live units


@checked_names
@dataclasses.dataclass(frozen=True)
class Stream:
    """Streaming generation: a slot starts the next response as soon as it is free.

    Attributes:
      source: the computation of a slot.
      slots: responses in flight at once, on all devices together.
      batch: units per iteration.
      micro_batches: micro-batches per batch; each `take` returns one.
      ahead: batches that may be started early; the oldest token of a row is at most `ahead` iterations old.
      order: `prompt` takes units in the order of prompts; `finished` takes, among the finished units, those
        that started first.
      late: what happens to units that reach their age limit. With `wait`, `take` waits until they finish, and
        returns them in time. With `mask`, it returns them late, and the caller gives weight 0 to tokens that
        are too old.
      group: responses per unit.
      prefills: responses that start at once; None: an eighth of the slots, or all slots if `ahead` is 0 and
        there are as many slots as responses in a micro-batch.

    Raises:
      FdgError: (construction) a number is out of range.
    """

    source: Any
    slots: int
    batch: int
    micro_batches: int = 1
    ahead: int = 0
    order: Order = "finished"
    late: Late = "wait"
    group: int = 1
    prefills: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, "slots", "batch", "micro_batches", "ahead", "order", "late", "group", "prefills")
        methods = ("idle", "begin", "tick", "done", "refresh", "row")
        check_members("Stream: source", self.source, methods, "give an fdg.Source")
        for name in ("slots", "batch", "micro_batches", "group"):
            if getattr(self, name) < 1:
                raise FdgError(f"Stream: {name}={getattr(self, name)}: it must be 1 or more")
        if self.batch % self.micro_batches:
            raise FdgError(
                f"Stream: micro_batches={self.micro_batches} is not a divisor of batch={self.batch}: use"
                f" {nearest_divisors(self.batch, self.micro_batches)}"
            )
        if self.ahead < 0:
            raise FdgError(f"Stream: ahead={self.ahead}: it must be 0 or more")
        if self.slots > self.live * self.group:
            raise FdgError(
                f"Stream: slots={self.slots}, but at most {self.live * self.group} responses are generated"
                " at once: use fewer slots, fewer micro_batches or a larger ahead"
            )
        if self.prefills is not None and not 1 <= self.prefills <= self.slots:
            raise FdgError(f"Stream: prefills={self.prefills}: it must be from 1 to slots={self.slots}")

    @property
    def units(self) -> int:
        """`b`, the units of a micro-batch."""
        return self.batch // self.micro_batches

    @property
    def live(self) -> int:
        """`W`, the largest number of units that have started and are not taken."""
        return self.units + self.ahead * self.batch

    @property
    def prefill_batch(self) -> int:
        """`F`, the number of responses that start at once."""
        if self.prefills is not None:
            return self.prefills
        return self.slots if self._is_lockstep else max(1, self.slots // _PREFILL_DIVISOR)

    def init(self, key: jax.Array) -> StreamState:
        """The initial state for this key."""
        # A weakly typed leaf could change its dtype in the first tick.
        kept = jax.tree.map(_without_weak_type, self.source.idle(self.slots))
        row_shapes, rows = jax.eval_shape(self.source.row, kept), self.live * self.group
        for method, result in (("idle", kept), ("row", row_shapes)):
            if any(x.shape[:1] != (self.slots,) for x in jax.tree.leaves(result)):
                raise FdgError(
                    f"{type(self.source).__name__}.{method} returns {structure_of(result)}: axis 0 of each"
                    f" array must have the {self.slots} slots"
                )

        def counters(value: int, *shape: int) -> jax.Array:
            return jnp.full(shape, value, jnp.int32)

        clock = Clock(
            micro_batch=counters(0),
            tick=counters(0),
            next=counters(0),
            busy=counters(0),
            occupied=jnp.zeros(self.slots, bool),
            place=counters(rows, self.slots),
            unit=counters(-1, self.live),
            begun=counters(0, self.live),
            missing=counters(0, self.live),
            finished=counters(0, self.live),
        )
        return StreamState(
            key, clock, kept, jax.tree.map(lambda x: zeros((rows, *x.shape[1:]), x.dtype), row_shapes)
        )

    @checked_names
    def take(self, parameters: Any, version: jax.Array, state: StreamState) -> tuple[Any, StreamState]:
        """Generates until the next micro-batch is ready, and returns it.

        Args:
          parameters: the parameters to generate with from now on.
          version: `[]` int32, their version; passed to the source.
          state: from `init` or the last `take`.

        Returns:
          Rows `[b G, ...]` in order of their index, and the new state.

        Raises:
          FdgError: an argument is missing, or `state` is not a state of a stream of these sizes.
        """
        if not isinstance(state, StreamState):
            if isinstance(state, tuple) and any(isinstance(element, StreamState) for element in state):
                raise FdgError("this is the pair (rows, state) that take returns: give its second element")
            raise FdgError(
                f"take: {quoted(state)} is not a state: give a state from init or take as the third argument:"
                " take(parameters, version, state)"
            )
        slots, live = len(state.clock.occupied), len(state.clock.unit)
        if (slots, live) != (self.slots, self.live):
            raise FdgError(
                f"take: the state has {slots} slots and {live} live units, and this stream {self.slots} and"
                f" {self.live}: give a state from init or take of a stream with the same sizes"
            )
        version = jnp.asarray(version, jnp.int32)
        if self._is_lockstep and self.prefills in (None, self.slots):
            return self._take_all(parameters, version, state)
        # Responses with an index below `limit` may start.
        limit = ((state.clock.micro_batch + 1) * self.units + self.ahead * self.batch) * self.group
        num_starts, num_ticks = self._expected_trips

        def is_waiting(carry: Any) -> jax.Array:
            return ~self._is_ready(carry[0])

        def can_begin(carry: Any) -> jax.Array:
            remaining, num_free = limit - carry[0].next, jnp.sum(~carry[0].occupied, dtype=jnp.int32)
            return (remaining > 0) & (num_free >= jnp.minimum(self.prefill_batch, remaining))

        def start_responses(carry: Any) -> Any:
            return self._start_responses(parameters, version, limit, state.key, carry)

        def must_tick(carry: Any) -> jax.Array:
            has_ticked, carry = carry
            return ~has_ticked | (is_waiting(carry) & ~can_begin(carry))

        def tick(carry: Any) -> Any:
            _, (clock, kept, cache, rows) = carry
            kept, cache = self._tick(parameters, kept, cache, Now(version, clock.tick))
            return jnp.bool_(True), (self._clock_after_tick(clock, self._done(kept)), kept, cache, rows)

        def start_and_tick(carry: Any) -> Any:
            carry = jax.lax.while_loop(lambda x: expect_trips(can_begin(x), 1), start_responses, carry)
            ticks = lambda x: expect_trips(must_tick(x), num_ticks)  # noqa: E731
            return jax.lax.while_loop(ticks, tick, (jnp.bool_(False), carry))[1]

        carry = state.clock, state.kept, self._caches(parameters, state), state.rows
        clock, kept, _, rows = jax.lax.while_loop(
            lambda x: expect_trips(is_waiting(x), num_starts), start_and_tick, carry
        )
        rows = _write_rows(rows, jnp.where(clock.occupied, self._no_row, clock.place), self.source.row(kept))
        clock = clock._replace(place=jnp.where(clock.occupied, clock.place, self._no_row))
        places = self._next_units(clock)
        row_indices = (places[:, None] * self.group + jnp.arange(self.group, dtype=jnp.int32)[None]).reshape(
            -1
        )
        clock = clock._replace(unit=clock.unit.at[places].set(-1), micro_batch=clock.micro_batch + 1)
        return jax.tree.map(lambda x: x[row_indices], rows), StreamState(state.key, clock, kept, rows)

    @property
    def _no_row(self) -> int:
        return self.live * self.group

    @property
    def _is_lockstep(self) -> bool:
        """Whether every `take` starts all of its responses at once and waits for all of them."""
        return not self.ahead and self.slots == self.units * self.group

    @property
    def _expected_trips(self) -> tuple[int, int]:
        """Mean starts in a `take`, and mean ticks after a start, if all responses are as long as possible.

        Both are rounded, so that their product is the number of ticks.
        """
        responses, ticks = self.units * self.group, max(getattr(self.source, "most_ticks", 1), 1)
        # With `ahead`, all slots are always busy. Without it, slots are empty between two takes.
        ticks *= responses / self.slots if self.ahead else -(-responses // self.slots)
        starts = responses / self.prefill_batch
        ticks_per_start = int(ticks / starts)
        choices = [(max(1, round(ticks / n)), n) for n in (max(1, ticks_per_start), ticks_per_start + 1)]
        return min(choices, key=lambda trips: (abs(math.prod(trips) - ticks), abs(trips[0] - starts)))

    def _take_all(self, parameters: Any, version: jax.Array, state: StreamState) -> tuple[Any, StreamState]:
        """`take` if every response of a micro-batch has a slot and no response starts ahead."""
        source, clock = self.source, state.clock
        index = clock.micro_batch * self.slots + jnp.arange(self.slots, dtype=jnp.int32)
        fresh = source.begin(parameters, state.key, index, Now(version, clock.tick))
        whole = state.kept, _zeros_of(jax.eval_shape(source.refresh, parameters, state.kept))
        kept, cache = jax.tree.map(_pad_to, self._check("begin", fresh, whole, self.slots), whole)

        def tick(carry: Any) -> Any:
            kept, cache, trip, busy = carry
            num_running = jnp.sum(~self._done(kept), dtype=jnp.int32)
            busy = busy + jnp.where(trip == 0, self.slots, num_running)
            kept, cache = self._tick(parameters, kept, cache, Now(version, clock.tick + trip))
            return kept, cache, trip + 1, busy

        def is_waiting(carry: Any) -> jax.Array:
            return expect_trips(~jnp.all(self._done(carry[0])), getattr(source, "most_ticks", 1))

        carry = kept, cache, jnp.int32(0), clock.busy
        kept, _, trips, busy = jax.lax.while_loop(is_waiting, tick, carry)
        is_immediate, end = trips == 0, clock.tick + trips  # if no tick is needed, one is counted
        clock = clock._replace(
            micro_batch=clock.micro_batch + 1,
            tick=jnp.where(is_immediate, end + 1, end),
            next=clock.next + self.slots,
            busy=jnp.where(is_immediate, busy + self.slots, busy),
        )
        return source.row(kept), state._replace(clock=clock)

    def _caches(self, parameters: Any, state: StreamState) -> Any:
        """The caches of the slots, recomputed if any slot is occupied."""
        shapes = jax.eval_shape(self.source.refresh, parameters, state.kept)
        if not self.ahead:  # there are no live units between two takes
            return _zeros_of(shapes)
        refresh = lambda: self.source.refresh(parameters, state.kept)  # noqa: E731
        return jax.lax.cond(jnp.any(state.clock.occupied), refresh, lambda: _zeros_of(shapes))

    def _tick(self, parameters: Any, kept: Any, cache: Any, now: Now) -> Any:
        return self._check("tick", self.source.tick(parameters, kept, cache, now), (kept, cache))

    def _done(self, kept: Any) -> jax.Array:
        return self._check("done", self.source.done(kept), jax.ShapeDtypeStruct((self.slots,), bool))

    def _check(self, method: str, result: Any, like: Any, rows: int | None = None) -> Any:
        """A source's result; refused if its types differ from `like`, or (with `rows`) do not fit into it."""
        result = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else jnp.asarray(x), result)

        def fits(x: Any, y: Any) -> bool:
            if rows is None:
                return kind_of(x) == kind_of(y)
            is_smaller = all(size <= most for size, most in zip(x.shape[1:], y.shape[1:], strict=False))
            return (x.dtype, x.ndim, *x.shape[:1]) == (y.dtype, y.ndim, rows) and is_smaller

        structures: list[Any] = [jax.tree.structure(x) for x in (result, like)]
        if structures[0] == structures[1] and jax.tree.all(jax.tree.map(fits, result, like)):
            return result
        raise FdgError(
            f"{type(self.source).__name__}.{method} returns {structure_of(result)}: return what the"
            f" slots hold, {structure_of(like)}"
            + ("" if rows is None else f", but with {rows} rows; their other axes may be shorter")
        )

    def _start_responses(self, parameters: Any, version: Any, limit: Any, key: Any, carry: Any) -> Any:
        """Writes the rows of the first free slots, and starts the next responses in these slots.

        `carry` is `(clock, kept, cache, rows)`; `limit` is the index at which responses may not start yet.
        """
        clock, kept, cache, rows = carry
        offsets, remaining = jnp.arange(self.prefill_batch, dtype=jnp.int32), limit - clock.next
        is_started = offsets < remaining
        index = clock.next + jnp.minimum(offsets, remaining - 1)
        slot = jnp.argsort(clock.occupied, stable=True)[: self.prefill_batch].astype(jnp.int32)
        old_rows = jnp.where(is_started, clock.place[slot], self._no_row)
        rows = _write_rows(rows, old_rows, self.source.row(jax.tree.map(lambda x: x[slot], kept)))
        new_states = self.source.begin(parameters, key, split_rows(index), Now(version, clock.tick))
        new_slot_states, new_cache = self._check("begin", new_states, (kept, cache), self.prefill_batch)
        new_slot_states = jax.tree.map(
            _pad_to, new_slot_states, jax.tree.map(_without_weak_type, self.source.idle(self.prefill_batch))
        )
        # New units get the first free places; other units keep their places.
        unit = index // self.group
        is_first = is_started & (index % self.group == 0)
        free_places = jnp.argsort(clock.unit >= 0, stable=True).astype(jnp.int32)
        rank = jnp.cumsum(is_first, dtype=jnp.int32) - 1
        new_places = jnp.where(is_first, free_places[jnp.clip(rank, 0, self.live - 1)], self.live)
        units = clock.unit.at[new_places].set(unit, mode="drop")
        place = jnp.argmax(units[None] == unit[:, None], axis=1).astype(jnp.int32)
        slot_or_none = jnp.where(is_started, slot, self.slots)  # out of range where no response starts
        clock = clock._replace(
            next=clock.next + jnp.sum(is_started, dtype=jnp.int32),
            occupied=clock.occupied.at[slot_or_none].set(True, mode="drop"),
            place=clock.place.at[slot_or_none].set(place * self.group + index % self.group, mode="drop"),
            unit=units,
            begun=clock.begun.at[new_places].set(clock.micro_batch // self.micro_batches, mode="drop"),
            missing=clock.missing.at[new_places].set(self.group, mode="drop"),
        )
        source_rows = jnp.full(self.slots, -1, jnp.int32).at[slot_or_none].set(offsets, mode="drop")
        source_rows = split_rows(source_rows)
        old_slots = kept, cache
        new_slots = jax.tree.map(
            lambda x, y: _replace_rows(x, y, source_rows), old_slots, (new_slot_states, new_cache)
        )
        return clock, *self._check("begin", new_slots, old_slots), rows

    def _clock_after_tick(self, clock: Clock, done: jax.Array) -> Clock:
        """The clock after a tick in which the slots `done [S]` finish."""
        has_ended = clock.occupied & done
        places = jnp.where(has_ended, clock.place // self.group, self.live)
        missing = clock.missing.at[places].add(-1, mode="drop")
        is_complete = (missing == 0) & (clock.missing > 0)
        return clock._replace(
            tick=clock.tick + 1,
            busy=clock.busy + jnp.sum(clock.occupied, dtype=jnp.int32),
            occupied=clock.occupied & ~done,
            missing=missing,
            finished=jnp.where(is_complete, clock.tick, clock.finished),
        )

    def _is_ready(self, clock: Clock) -> jax.Array:
        """Whether the next micro-batch can be taken."""
        is_finished = (clock.unit >= 0) & (clock.missing == 0)
        if self.order == "prompt":
            return jnp.sum(is_finished & self._is_next(clock), dtype=jnp.int32) == self.units
        ready = jnp.sum(is_finished, dtype=jnp.int32) >= self.units
        if self.late == "mask" or not self.ahead:
            return ready
        # Row i has the units that must be taken by iteration `iteration + i`. The units among them that this
        # micro-batch does not take must fit into the following micro-batches.
        iteration, part = jnp.divmod(clock.micro_batch, self.micro_batches)
        iterations_ahead = jnp.arange(self.ahead, dtype=jnp.int32)
        is_due = (clock.unit >= 0)[None] & (
            (clock.begun + self.ahead)[None] <= iteration + iterations_ahead[:, None]
        )
        num_taken = jnp.minimum(jnp.sum(is_due & is_finished[None], axis=1, dtype=jnp.int32), self.units)
        room = (self.micro_batches - 1 - part) * self.units + iterations_ahead * self.batch
        return ready & jnp.all(jnp.sum(is_due, axis=1, dtype=jnp.int32) - num_taken <= room)

    def _next_units(self, clock: Clock) -> jax.Array:
        """The places `[b]` of the units of the next micro-batch, which is ready, by index of units."""
        keys: tuple[jax.Array, ...]  # for lexsort: the last one is the primary key
        if self.order == "prompt":
            keys = (clock.unit, ~self._is_next(clock))
        else:
            keys = (clock.unit, clock.finished, clock.begun, (clock.unit < 0) | (clock.missing > 0))
        places = jnp.lexsort(keys)[: self.units].astype(jnp.int32)
        return places[jnp.argsort(clock.unit[places])]

    def _is_next(self, clock: Clock) -> jax.Array:
        """Which live units `[W]` form the next micro-batch in the order of prompts."""
        return (clock.unit >= 0) & (clock.unit // self.units == clock.micro_batch)


def counts(stream: Stream, state: StreamState) -> dict[str, jax.Array]:
    """A stream's counters, each `[]` int32 (docs/streaming.md, "What is counted")."""
    clock = state.clock
    live = clock.unit >= 0
    queued = jnp.sum(live & (clock.missing == 0), dtype=jnp.int32)
    return {
        "ticks": clock.tick,
        "busy": clock.busy,
        "started": (clock.next + stream.group - 1) // stream.group,
        "trained": clock.micro_batch * stream.units,
        "queued": queued,
        "running": jnp.sum(live, dtype=jnp.int32) - queued,
    }


def _without_weak_type(x: Any) -> jax.Array:
    x = jnp.asarray(x)
    return x.astype(x.dtype) if getattr(x, "weak_type", False) else x  # keys have no such attribute


def _zeros_of(shapes: Any) -> Any:
    return jax.tree.map(lambda x: zeros(x.shape, x.dtype), shapes)


def _write_rows(rows: Any, indices: jax.Array, new_rows: Any) -> Any:
    """Replaces rows at these indices; indices beyond the last row are dropped."""
    return jax.tree.map(lambda x, y: x.at[indices].set(y, mode="drop"), rows, new_rows)


def _replace_rows(x: jax.Array, new_rows: jax.Array, source_rows: jax.Array) -> jax.Array:
    """Replaces row i of `x [S, ...]` by row `source_rows[i]` of `new_rows [F, ...]`, unless that is -1."""
    # A select instead of a scatter, so that slots that are sharded over devices stay in place.
    region = tuple(slice(0, size) for size in (len(x), *new_rows.shape[1:]))
    is_replaced = (source_rows >= 0).reshape(-1, *[1] * (x.ndim - 1))
    replaced = jnp.where(is_replaced, new_rows[jnp.maximum(source_rows, 0)], x[region])
    return _pad_to(replaced, x)


def _pad_to(x: jax.Array, whole: jax.Array) -> jax.Array:
    """`whole` with `x` written at the start of each axis."""
    region = tuple(slice(0, size) for size in x.shape)
    return x if x.shape == whole.shape else whole.at[region].set(x)
