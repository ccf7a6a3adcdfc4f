"""Reference for streams: the specification "The clock" of docs/streaming.md in plain Python.

Independent of `fdg.stream`, which has to agree with it on every tick. Slow.
"""

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of docs/streaming.md: B, S, G, M, a, F, `order`, `late`."""

    batch: int
    slots: int
    group: int = 1
    micro_batches: int = 1
    ahead: int = 0
    prefills: int | None = None
    order: str = "finished"
    late: str = "wait"

    @property
    def units(self) -> int:
        """Units per micro-batch: b."""
        return self.batch // self.micro_batches

    @property
    def prefill_size(self) -> int:
        """Responses started at once: F."""
        if self.prefills is not None:
            return self.prefills
        fills_all = self.ahead == 0 and self.slots == self.units * self.group
        return self.slots if fills_all else max(1, self.slots // 8)


@dataclasses.dataclass
class Live:
    """A unit that has begun and is not taken yet."""

    begun: int
    missing: int
    finished: int | None = None


@dataclasses.dataclass(frozen=True)
class Tick:
    """The response in each slot after *Begin* (None: free), and the responses that finish in this tick."""

    slots: tuple[int | None, ...]
    done: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Take:
    """The ticks of a take, and the responses of its micro-batch in order.

    `drawn` has the (tick, version) pairs of each of these responses, one per tick in a slot.
    """

    ticks: tuple[Tick, ...]
    responses: tuple[int, ...]
    drawn: tuple[tuple[tuple[int, int], ...], ...]


class Clock:
    """Simulates a stream; `length(r)` is the number of ticks of response r."""

    def __init__(self, sizes: Sizes, length: Callable[[int], int]):
        self.sizes, self.length = sizes, length
        self.n = self.t = self.r = self.busy = 0
        self.slots: list[int | None] = [None] * sizes.slots
        self.started_at: dict[int, int] = {}  # first tick of each response
        self.live: dict[int, Live] = {}
        self.drawn: dict[int, list[tuple[int, int]]] = {}

    def take(self, version: int) -> Take:
        """Takes micro-batch n, with parameters of this version."""
        ticks = []
        while not self.is_ready():
            self.begin()
            ticks.append(self.tick(version))
        units = self.chosen()
        for unit in units:
            del self.live[unit]
        responses = [u * self.sizes.group + k for u in units for k in range(self.sizes.group)]
        drawn = tuple(tuple(self.drawn.pop(response)) for response in responses)
        self.n += 1
        return Take(tuple(ticks), tuple(responses), drawn)

    def begin(self) -> None:
        """Starts admitted responses in free slots, F at a time."""
        sizes = self.sizes
        limit = ((self.n + 1) * sizes.units + sizes.ahead * sizes.batch) * sizes.group
        while True:
            left = limit - self.r
            free = [i for i, response in enumerate(self.slots) if response is None]
            count = min(sizes.prefill_size, left)
            if left == 0 or len(free) < count:
                return
            for slot in free[:count]:
                if self.r % sizes.group == 0:
                    self.live[self.r // sizes.group] = Live(self.n // sizes.micro_batches, sizes.group)
                self.slots[slot] = self.r
                self.started_at[self.r] = self.t
                self.drawn[self.r] = []
                self.r += 1

    def tick(self, version: int) -> Tick:
        """Advances every response in a slot; finished ones leave their slots."""
        occupied = tuple(self.slots)
        done = []
        for slot, response in enumerate(occupied):
            if response is None:
                continue
            self.busy += 1
            self.drawn[response].append((self.t, version))
            if self.started_at[response] + self.length(response) - 1 == self.t:
                done.append(response)
                del self.started_at[response]
                self.slots[slot] = None
                unit = self.live[response // self.sizes.group]
                unit.missing -= 1
                if unit.missing == 0:
                    unit.finished = self.t
        self.t += 1
        return Tick(occupied, tuple(sorted(done)))

    def finished(self) -> list[int]:
        """Finished live units, in the order of `order="finished"`."""
        found = {unit: one for unit, one in self.live.items() if one.finished is not None}
        return sorted(found, key=lambda unit: (found[unit].begun, found[unit].finished, unit))

    def is_ready(self) -> bool:
        """True if micro-batch n can be taken."""
        sizes, finished = self.sizes, self.finished()
        if sizes.order == "prompt":
            return set(self._next_prompts()) <= set(finished)
        if len(finished) < sizes.units:
            return False
        return sizes.late == "mask" or all(map(self._has_capacity, range(sizes.ahead)))

    def chosen(self) -> list[int]:
        """The units of micro-batch n, ascending."""
        if self.sizes.order == "prompt":
            return self._next_prompts()
        return sorted(self.finished()[: self.sizes.units])

    def counts(self) -> dict[str, int]:
        """The counters of the specification."""
        queued = len(self.finished())
        return {
            "ticks": self.t,
            "busy": self.busy,
            "started": -(-self.r // self.sizes.group),
            "trained": self.n * self.sizes.units,
            "queued": queued,
            "running": len(self.live) - queued,
        }

    def _next_prompts(self) -> list[int]:
        return list(range(self.n * self.sizes.units, (self.n + 1) * self.sizes.units))

    def _has_capacity(self, k: int) -> bool:
        """True if the units due by the end of iteration i + k fit into the micro-batches left until then."""
        sizes = self.sizes
        i = self.n // sizes.micro_batches
        due = [unit for unit in self.live.values() if unit.begun + sizes.ahead <= i + k]
        done = sum(unit.finished is not None for unit in due)
        places = (sizes.micro_batches - 1 - self.n % sizes.micro_batches) * sizes.units + k * sizes.batch
        return len(due) - min(sizes.units, done) <= places
