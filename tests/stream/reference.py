"""The clock of streams in plain integers, from docs/streaming.md alone: what begins, ends and is taken when.

Written apart from `fdg.stream`, which has to agree with it on every tick. Nothing here is quick.
"""

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Sizes:
    """As the page names them: G, B, M, S, a, F, `order`, `late`."""

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
        """Of a micro-batch: b."""
        return self.batch // self.micro_batches

    @property
    def at_once(self) -> int:
        """Responses that begin at once: F."""
        if self.prefills is not None:
            return self.prefills
        whole = self.ahead == 0 and self.slots == self.units * self.group
        return self.slots if whole else max(1, self.slots // 8)


@dataclasses.dataclass
class Live:
    """A unit that has begun and is not taken."""

    begun: int
    missing: int
    finished: int | None = None


@dataclasses.dataclass(frozen=True)
class Tick:
    """One tick: the response in each slot after *Begin* (None: free), and those that were done in it."""

    slots: tuple[int | None, ...]
    done: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Take:
    """What a take did: its ticks, and the responses of its micro-batch in order.

    `drawn` has of each of these responses the (tick, version) of every tick that it was in a slot.
    """

    ticks: tuple[Tick, ...]
    responses: tuple[int, ...]
    drawn: tuple[tuple[tuple[int, int], ...], ...]


class Clock:
    """A run of the clock; `length(r)` is how many ticks response r takes."""

    def __init__(self, sizes: Sizes, length: Callable[[int], int]):
        self.sizes, self.length = sizes, length
        self.n = self.t = self.r = self.busy = 0
        self.slots: list[int | None] = [None] * sizes.slots
        self.since: dict[int, int] = {}  # the tick in which a response began
        self.live: dict[int, Live] = {}
        self.drawn: dict[int, list[tuple[int, int]]] = {}

    def take(self, version: int) -> Take:
        """Micro-batch n, under parameters of this version."""
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
        """Admitted responses into free slots, F at a time."""
        sizes = self.sizes
        limit = ((self.n + 1) * sizes.units + sizes.ahead * sizes.batch) * sizes.group
        while True:
            left = limit - self.r
            free = [i for i, response in enumerate(self.slots) if response is None]
            count = min(sizes.at_once, left)
            if left == 0 or len(free) < count:
                return
            for slot in free[:count]:
                if self.r % sizes.group == 0:
                    self.live[self.r // sizes.group] = Live(self.n // sizes.micro_batches, sizes.group)
                self.slots[slot] = self.r
                self.since[self.r] = self.t
                self.drawn[self.r] = []
                self.r += 1

    def tick(self, version: int) -> Tick:
        """Every response in a slot moves on; what is done leaves its slot."""
        held = tuple(self.slots)
        done = []
        for slot, response in enumerate(held):
            if response is None:
                continue
            self.busy += 1
            self.drawn[response].append((self.t, version))
            if self.since[response] + self.length(response) - 1 == self.t:
                done.append(response)
                del self.since[response]
                self.slots[slot] = None
                unit = self.live[response // self.sizes.group]
                unit.missing -= 1
                if unit.missing == 0:
                    unit.finished = self.t
        self.t += 1
        return Tick(held, tuple(sorted(done)))

    def finished(self) -> list[int]:
        """Live units that have finished, in the order in which they are taken under `finished`."""
        ended = {unit: one for unit, one in self.live.items() if one.finished is not None}
        return sorted(ended, key=lambda unit: (ended[unit].begun, ended[unit].finished, unit))

    def is_ready(self) -> bool:
        """Whether micro-batch n can be taken."""
        sizes, finished = self.sizes, self.finished()
        if sizes.order == "prompt":
            return set(self._prompt()) <= set(finished)
        if len(finished) < sizes.units:
            return False
        return sizes.late == "mask" or all(map(self._has_collectives, range(sizes.ahead)))

    def chosen(self) -> list[int]:
        """The units of micro-batch n, ascending."""
        if self.sizes.order == "prompt":
            return self._prompt()
        return sorted(self.finished()[: self.sizes.units])

    def counts(self) -> dict[str, int]:
        """What is counted."""
        queued = len(self.finished())
        return {
            "ticks": self.t,
            "busy": self.busy,
            "started": -(-self.r // self.sizes.group),
            "trained": self.n * self.sizes.units,
            "queued": queued,
            "running": len(self.live) - queued,
        }

    def _prompt(self) -> list[int]:
        return list(range(self.n * self.sizes.units, (self.n + 1) * self.sizes.units))

    def _has_collectives(self, k: int) -> bool:
        """Whether, of the units due by the end of iteration i + k, no more are left than there are places."""
        sizes = self.sizes
        i = self.n // sizes.micro_batches
        due = [unit for unit in self.live.values() if unit.begun + sizes.ahead <= i + k]
        done = sum(unit.finished is not None for unit in due)
        places = (sizes.micro_batches - 1 - self.n % sizes.micro_batches) * sizes.units + k * sizes.batch
        return len(due) - min(sizes.units, done) <= places
