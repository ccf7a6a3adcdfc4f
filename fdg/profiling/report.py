"""The result of `fdg.profile` as plain values, and its text."""

import dataclasses
from collections.abc import Iterator, Sequence

from fdg.jaxprs.count import Product
from fdg.profiling.work import Work
from fdg.showing.words import clip, duration, quantity, table

_MAX_PRODUCTS = 12  # rows of products in the text


@dataclasses.dataclass(frozen=True)
class FragmentProfile:
    """The time of a fragment, alone."""

    name: str
    role: str
    parent: str | None  # the enclosing fragment, or None
    depth: int  # the number of enclosing fragments
    group: str
    calls: int  # per iteration
    exact: bool  # False if the number of calls depends on the data
    flops: int  # per call, on all devices and for all agents
    work: Work  # per call, on one device
    # per call, alone, with nested fragments; None if the fragment cannot run alone, since it is split over
    # groups or in other processes
    seconds: float | None
    products_s: float  # per call, of the fragment's products at the best rates of their shapes
    memory_s: float  # per call, of the fragment's inputs and outputs at the rate of memory

    @property
    def limit_s(self) -> float:
        """The lower bound on a call's time: its products, or memory if that takes longer."""
        return max(self.products_s, self.memory_s)

    @property
    def roofline(self) -> float | None:
        """The lower bound divided by the time; at most 1."""
        return None if not self.seconds else self.limit_s / self.seconds

    @property
    def per_iteration(self) -> float | None:
        """Seconds of all calls of an iteration."""
        return None if self.seconds is None else self.seconds * self.calls


@dataclasses.dataclass(frozen=True)
class ProductProfile:
    """Products of one shape on a group's devices."""

    product: Product
    group: str
    calls: int  # per iteration on each device
    seconds: float | None  # per product while all devices work; None if not measured
    layout: str  # the fastest of `rates.LAYOUTS`; "" if not measured
    devices: int  # number of devices of the group

    @property
    def rate(self) -> float | None:
        """Floating-point operations per second of all devices."""
        return None if not self.seconds else self.product.flops * self.devices / self.seconds


@dataclasses.dataclass(frozen=True)
class GroupProfile:
    """The time of a group per iteration."""

    name: str
    devices: int
    # seconds in which its devices ran programs or received inputs; None for a single group
    busy_s: float | None
    fragments_s: float  # seconds of its outermost fragments, timed alone


@dataclasses.dataclass(frozen=True)
class Profile:
    """The time of an iteration by fragment; `print` it.

    Attributes:
      agents: the number of agents; None if the algorithm has no agents.
      iteration_s: seconds per iteration, the shortest of `rounds`. All times are the shortest measured, since
        other load only makes them longer.
      usual_s: the median over rounds of seconds per iteration.
      memory_rate: bytes per second that all devices of the first group read and write.
    """

    algorithm: str
    policy: str
    num_devices: int
    agents: int | None
    iteration_s: float
    usual_s: float
    rounds: int
    fragments: tuple[FragmentProfile, ...]
    products: tuple[ProductProfile, ...]
    groups: tuple[GroupProfile, ...]
    memory_rate: float
    notes: tuple[str, ...] = ()

    def fragment(self, name: str) -> FragmentProfile:
        """The fragment with this name."""
        return next(f for f in self.fragments if f.name == name)

    def own_s(self, name: str) -> float | None:
        """Seconds per iteration in a fragment, without its nested fragments; None if any was not timed."""
        nested_seconds = [f.per_iteration for f in self.fragments if f.parent == name]
        total = self.fragment(name).per_iteration
        if total is None or None in nested_seconds:
            return None
        return max(0.0, total - sum(seconds for seconds in nested_seconds if seconds is not None))

    @property
    def fragments_s(self) -> float:
        """Seconds of the outermost fragments, timed alone."""
        return sum(group.fragments_s for group in self.groups)

    def __str__(self) -> str:
        return "\n".join(_text_lines(self))


def _percent(part: float | None, whole: float = 1.0) -> str:
    """A share as text.

    >>> _percent(1.0, 3.0), _percent(None), _percent(1.0, 0.0)
    ('33%', '-', '-')
    """
    return "-" if part is None or not whole else f"{100 * part / whole:.0f}%"


def _text_lines(profile: Profile) -> Iterator[str]:
    plural = "s" if profile.num_devices > 1 else ""
    agents = f", {profile.agents} agents" if profile.agents is not None else ""
    yield (
        f"{profile.algorithm} under {profile.policy} on {profile.num_devices} device{plural}{agents}: an"
        f" iteration takes {duration(profile.iteration_s)} (the shortest of {profile.rounds} rounds, as all"
        f" times here; their median: {duration(profile.usual_s)})"
    )
    yield ""
    header = (
        "fragment", "role", "calls", "a call", "an iteration", "share", "own", "flops", "flops/s",
        "products", "memory", "roofline",
    )  # fmt: skip
    yield from table(header, [_fragment_row(profile, f) for f in profile.fragments], range(2, 12))
    if len(profile.groups) == 1:
        rest = profile.iteration_s - profile.fragments_s
        yield (
            f"  fragments by themselves {duration(profile.fragments_s)};"
            f" {'' if rest >= 0 else '-'}{duration(abs(rest))} is between them, or saved by running together"
        )
    yield ""
    yield from _group_lines(profile)
    yield from _product_lines(profile.products)
    yield f"  memory: {quantity(profile.memory_rate, 'B')}/s"
    for note in profile.notes:
        yield f"  {note}"
    yield "  share, own: of the iteration's time, with and without the fragments nested in it"
    yield (
        "  products, memory: a call's products at the best rate of their shapes, its inputs and outputs at"
        " memory's"
    )
    yield "  roofline: the longer of the two over the time of a call; 100% is the machine's limit"


def _fragment_row(profile: Profile, fragment: FragmentProfile) -> tuple[str, ...]:
    all_calls = fragment.flops * fragment.calls
    rate = None if not fragment.per_iteration else all_calls / fragment.per_iteration
    return (
        clip("  " * fragment.depth + fragment.name, 26),
        clip(fragment.role, 14),
        f"{'' if fragment.exact else '~'}{fragment.calls}",
        duration(fragment.seconds),
        duration(fragment.per_iteration),
        _percent(fragment.per_iteration, profile.iteration_s),
        _percent(profile.own_s(fragment.name), profile.iteration_s),
        quantity(all_calls),
        "-" if rate is None else quantity(rate),
        duration(fragment.products_s) if fragment.products_s else "-",
        duration(fragment.memory_s) if fragment.memory_s else "-",
        _percent(fragment.roofline),
    )


def _group_lines(profile: Profile) -> Iterator[str]:
    if len(profile.groups) < 2:
        return
    rows = [
        (
            clip(group.name, 24),
            str(group.devices),
            duration(group.busy_s),
            duration(None if group.busy_s is None else max(0.0, profile.iteration_s - group.busy_s)),
            _percent(group.busy_s, profile.iteration_s),
            duration(group.fragments_s),
        )
        for group in profile.groups
    ]
    header = ("group", "devices", "busy", "idle", "busy share", "fragments by themselves")
    yield from table(header, rows, range(1, 6))
    yield ""


def _product_lines(products: Sequence[ProductProfile]) -> Iterator[str]:
    if not products:
        return
    largest = sorted(products, key=lambda p: p.product.flops * p.calls, reverse=True)[:_MAX_PRODUCTS]
    total_flops = sum(p.product.flops * p.calls * p.devices for p in products)
    rows = [
        (
            str(p.product),
            p.product.dtype,
            clip(p.group, 24),
            str(p.calls),
            _percent(p.product.flops * p.calls * p.devices, total_flops),
            duration(p.seconds),
            "-" if p.rate is None else quantity(p.rate),
            p.layout,
        )
        for p in largest
    ]
    header = (
        "product (m x k x n)", "dtype", "group", "calls", "of flops", "one by itself", "flops/s", "best as"
    )  # fmt: skip
    yield from table(header, rows, range(3, 7))
    if len(products) > len(largest):
        yield f"  and {len(products) - len(largest)} other shapes"
