"""Predicts a stream's behaviour: runs its clock (`fdg.stream`) with response lengths in place of tokens.

The clock counts ticks, not seconds, so the result is independent of devices: the share of busy slots, the age
of tokens, and which size of the stream limits them.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from algos.rlhf import streaming as sizes_of
from fdg.arguments import quoted
from fdg.commands.flags import Flag
from fdg.costs.hardware import Cluster
from fdg.costs.prediction import predict
from fdg.errors import FdgError
from fdg.placing.plans import Plan
from fdg.showing.words import table
from fdg.stream import Stream, zeros
from fdg.training.run_directory import read_metrics

FLAG = Flag(
    "lengths",
    str | None,
    None,
    "lengths of responses in tokens: a run directory, or lognormal:MEAN,LONGEST, uniform:SHORTEST,LONGEST,"
    " constant:LENGTH",
)
ABOUT = (
    f"With {FLAG.option}: the share of a stream's slots that is busy, and the age of its tokens. {FLAG.help}."
)
_LAST = 20  # iterations of a run
_AGES = 32  # distinguished ages, in updates
_LONGEST = 256  # approximate ticks of a response that are simulated one by one
_DRAWN = 4099  # number of lengths, which responses use in turn
_FULL = 0.9  # fraction of busy slots from which on more slots help
_QUANTILE = 3.09  # of the standard normal: the 99.9th percentile
_KINDS = "lognormal:MEAN,LONGEST, uniform:SHORTEST,LONGEST or constant:LENGTH"


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Lengths of responses in tokens."""

    tokens: np.ndarray  # the length of each response, `[_DRAWN]`
    source: str  # the source of the lengths

    @property
    def step(self) -> int:
        """Ticks simulated as one, which saves time and preserves fractions."""
        return -(-int(np.max(self.tokens)) // _LONGEST)

    @property
    def ticks(self) -> np.ndarray:
        """Steps that each response is in a slot; its first token is sampled when it starts."""
        return np.maximum(-(-(self.tokens - 1) // self.step), 1)


def parse_lengths(text: str) -> Lengths:
    """Parses a distribution of lengths.

    `lognormal:MEAN,LONGEST` (one in a thousand responses would be longer, and is cut),
    `uniform:SHORTEST,LONGEST` or `constant:LENGTH`.

    >>> constant = parse_lengths("constant:7")
    >>> set(constant.tokens.tolist()), set(constant.ticks.tolist()), constant.source
    ({7}, {6}, '7 tokens, 7 at most')
    """
    found = re.fullmatch(r"(lognormal|uniform|constant):(\d{1,9})(?:,(\d{1,9}))?", text.strip())
    refusal = FdgError(
        f"lengths {quoted(text)}: give {_KINDS}, tokens of responses, or the directory of a run"
    )
    if found is None or (found[1] == "constant") != (found[3] is None):
        raise refusal
    low, high = int(found[2]), int(found[3] or found[2])
    if low > high >= 1:
        what = "mean" if found[1] == "lognormal" else "shortest"
        raise FdgError(
            f"lengths {quoted(text)}: the {what} {low} is above the longest {high}: {found[1]}:{high},{low}?"
        )
    if not 1 <= low <= high <= 1 << 20:
        raise refusal
    quantiles = (np.random.default_rng(0).permutation(_DRAWN) + 0.5) / _DRAWN
    if found[1] == "lognormal" and low < high:
        tokens = np.minimum(np.ceil(_lognormal(low, high, quantiles)), high)
    else:
        tokens = np.floor(low + quantiles * (high - low + 1))
    tokens = np.maximum(tokens, 1).astype(np.int32)
    return Lengths(tokens, f"{np.mean(tokens):,.0f} tokens, {np.max(tokens):,} at most")


def of_run(rows: Sequence[Mapping[str, Any]], name: str) -> Lengths:
    """Lognormal lengths with the mean and the longest of a run's last iterations."""
    found = [row for row in rows[-_LAST:] if row.get("response_length") and row.get("response_length_max")]
    if not found:
        raise FdgError(f"lengths {quoted(name)}: this run has no response_length: give {_KINDS}")
    mean = sum(row["response_length"] for row in found) / len(found)
    longest = max(mean, *(row["response_length_max"] for row in found))
    return parse_lengths(f"lognormal:{max(round(mean), 1)},{max(round(longest), 1)}")


def _lognormal(mean: float, longest: float, quantiles: np.ndarray) -> np.ndarray:
    """A lognormal sample with this mean, and a 99.9th percentile of `longest`."""
    from statistics import NormalDist

    spread = math.log(longest / mean)
    if 2 * spread >= _QUANTILE**2:
        raise FdgError(
            f"lengths: the longest, {longest:,}, is {longest / mean:.0f} times the mean, and of lognormal"
            f" lengths at most {math.exp(_QUANTILE**2 / 2):.0f} times: give a longer mean"
        )
    sigma = _QUANTILE - math.sqrt(_QUANTILE**2 - 2 * spread)
    normal = np.array([NormalDist().inv_cdf(q) for q in quantiles])
    return np.exp(math.log(mean) - sigma**2 / 2 + sigma * normal)


class _Ages:
    """A `fdg.stream.Source` without tokens: it counts how many each version would have sampled."""

    def __init__(self, ticks: np.ndarray):
        self._ticks = jnp.asarray(ticks, jnp.int32)

    def idle(self, slots: int) -> Any:
        return {
            "left": zeros((slots,), jnp.int32),
            "first": zeros((slots,), jnp.int32),
            "drawn": zeros((slots, _AGES), jnp.int32),
        }

    def begin(self, parameters: Any, key: Any, index: Any, now: Any) -> tuple[Any, Any]:
        kept = self.idle(index.shape[0])
        first = jnp.broadcast_to(now.version, index.shape).astype(jnp.int32)
        return {**kept, "left": self._ticks[index % len(self._ticks)], "first": first}, kept["left"]

    def tick(self, parameters: Any, kept: Any, cache: Any, now: Any) -> tuple[Any, Any]:
        works = kept["left"] > 0
        since = jnp.minimum(now.version - kept["first"], _AGES - 1)
        drawn = (works[:, None] & (jnp.arange(_AGES)[None] == since[:, None])).astype(jnp.int32)
        return {**kept, "left": kept["left"] - works, "drawn": kept["drawn"] + drawn}, cache

    def done(self, kept: Any) -> Any:
        return kept["left"] == 0

    def refresh(self, parameters: Any, kept: Any) -> Any:
        return kept["left"]

    def row(self, kept: Any) -> Any:
        return kept


@dataclasses.dataclass(frozen=True)
class Replay:
    """The simulated stream in its steady state."""

    ticks: float  # ticks of an iteration
    busy: float  # share of busy slots
    lag: float  # mean age of tokens in updates
    oldest: int  # the largest age
    masked: float  # share of tokens that `late="mask"` gives no weight
    rate: float  # trained tokens per tick


def replay(
    lengths: Lengths,
    sizes: dict[str, Any],
    lag: int = 0,
    max_age: int | None = None,
    iterations: int = 24,
) -> Replay:
    """Simulates a stream's clock.

    `sizes` are the fields of `fdg.stream.Stream` without its source, and `lag` is in micro-batches.
    Iterations that fill the slots are not counted among `iterations`.
    """
    stream = Stream(_Ages(lengths.ticks), **sizes)
    before = 2 * (stream.ahead + 1)
    parts = stream.micro_batches
    run = _clock(tuple(sizes.items()), before + iterations)
    counts, ticks, busy = jax.tree.map(np.asarray, run(lengths.ticks.astype(np.int32), lag))
    start = before * parts
    by_age = counts[start:].sum(axis=0).astype(float)
    passed, filled = int(ticks[-1] - ticks[start - 1]), int(busy[-1] - busy[start - 1])
    most = _AGES
    if stream.late == "mask" and stream.order == "finished":
        most = eta(stream.ahead if max_age is None else max_age, lag, parts)
    kept = by_age[: most + 1]
    return Replay(
        passed * lengths.step / iterations,
        filled / (stream.slots * max(passed, 1)),
        float(np.sum(kept * np.arange(len(kept))) / np.sum(kept)),
        int(np.max(np.flatnonzero(kept))),
        float(1 - np.sum(kept) / np.sum(by_age)),
        float(np.sum(kept) / max(passed, 1)),
    )


@functools.lru_cache(64)
def _clock(sizes: tuple[tuple[str, Any], ...], iterations: int) -> Any:
    """A function of the responses' ticks and the lag, compiled once: counts of ages, ticks and busy slots."""

    def run(ticks: Any, lag: Any) -> Any:
        stream = Stream(_Ages(ticks), **dict(sizes))
        parts = stream.micro_batches

        def one(state: Any, n: Any) -> tuple[Any, Any]:
            iteration = n // parts
            version = jnp.maximum((n - lag) // parts, 0)
            rows, state = stream.take(jnp.float32(0), version, state)
            ages = jnp.clip(iteration - rows["first"][:, None] - jnp.arange(_AGES)[None], 0, _AGES - 1)
            counts = zeros((_AGES,), jnp.int32).at[ages].add(rows["drawn"])
            return state, (counts, state.clock.tick, state.clock.busy)

        takes = jnp.arange(iterations * parts)
        return jax.lax.scan(one, stream.init(jax.random.key(0)), takes)[1]

    return jax.jit(run)


def _fitting(lengths: Lengths, sizes: dict[str, Any], lag: int, max_age: int | None) -> int | None:
    """The smallest `ahead` that keeps the slots busy, or None."""
    for more in (1, 2, 4, 8):
        one = {**sizes, "ahead": sizes["ahead"] + more}
        if replay(lengths, one, lag, max_age, iterations=12).busy >= _FULL:
            return one["ahead"]
    return None


def eta(ahead: int, lag: int, micro_batches: int) -> int:
    """The largest age of a token in updates, `ahead + ceil(lag / micro_batches)`.

    >>> eta(2, 3, 8), eta(2, 9, 8), eta(0, 0, 8)
    (3, 4, 0)
    """
    return ahead + -(-lag // micro_batches)


def stream_report(lengths: Lengths, sizes: dict[str, Any], lag: int = 0, max_age: int | None = None) -> str:
    """A table of a stream and of alternatives, with what limits it."""
    ahead, slots, parts = sizes["ahead"], sizes["slots"], sizes["micro_batches"]
    most = (sizes["batch"] // sizes["micro_batches"] + (ahead + 1) * sizes["batch"]) * sizes["group"]
    variants: dict[str, dict[str, Any]] = {"as given": sizes}
    if ahead:
        fewer = min(slots, most - (ahead + 1) * sizes["batch"] * sizes["group"])
        variants["ahead=0"] = {**sizes, "ahead": 0, "slots": fewer}
    variants[f"ahead={ahead + 1}"] = {**sizes, "ahead": ahead + 1}
    if ahead and sizes["order"] == "prompt":
        variants["order=finished"] = {**sizes, "order": "finished"}
    elif ahead and sizes["late"] == "wait":
        variants["late=mask"] = {**sizes, "late": "mask"}
    if 2 * slots <= most - sizes["batch"] * sizes["group"]:
        variants[f"slots={2 * slots}"] = {**sizes, "slots": 2 * slots}
    found = {name: replay(lengths, one, lag, max_age) for name, one in variants.items()}
    given = found["as given"]
    rows = [
        (
            name,
            f"{100 * one.busy:.0f}%",
            f"{one.lag:.1f}",
            str(one.oldest),
            f"{100 * one.masked:.1f}%",
            f"{one.ticks:,.0f}",
            f"{one.rate / given.rate:.2f}",
        )
        for name, one in found.items()
    ]
    header = ("stream", "slots busy", "lag", "oldest", "masked", "ticks", "tokens/tick")
    others = [name for name in found if name != "as given" and (given.busy > _FULL or "slots" not in name)]
    best = max(others, key=lambda name: found[name].rate)
    gain = found[best].rate / given.rate
    binds = f"{best} would give {gain:.2f} times the tokens of a tick"
    if gain < 1.05:
        binds = "the time of a tick itself: its slots are busy"
    elif not ahead:
        binds = f"the longest response of each batch: {binds}"
    elif given.busy < _FULL:
        binds = f"eta = {eta(ahead, lag, parts)}, too small for these lengths: {binds}"
    if gain >= 1.05 and given.busy < _FULL and (fits := _fitting(lengths, sizes, lag, max_age)) is not None:
        binds += f"; ahead={fits} (eta = {eta(fits, lag, parts)}) keeps {_FULL:.0%} of the slots busy"
    return "\n".join(
        [
            f"stream of {slots} slots: responses of {lengths.source}",
            f"eta = {eta(ahead, lag, parts)} = ahead {ahead} + ceil(lag {lag} / {parts} micro-batches):"
            " no token is more updates old",
            *table(header, rows, range(1, len(header))),
            f"what binds: {binds}",
        ]
    )


def take_lengths(given: dict[str, Any]) -> str | None:
    """Removes this flag from `given` and returns its value."""
    drawn = given.pop(FLAG.name, None)
    if drawn is not None and not Path(drawn).is_dir():
        parse_lengths(drawn)  # fails early, before tracing
    return drawn


def report_of(algorithm: Any, policy: Any, given: str) -> str:
    """A report of the simulated stream of an algorithm under a policy."""
    if not hasattr(algorithm, "ahead"):
        raise FdgError(
            f"--lengths {given:.60}: {type(algorithm).__name__} generates no responses: use --algo grpo,"
            " ppo_rlhf or dpo"
        )
    folder = Path(given)
    is_run = folder.is_dir()
    drawn = of_run([*read_metrics(folder / "metrics.jsonl")], given) if is_run else parse_lengths(given)
    sizes = sizes_of.sizes(algorithm, algorithm._candidates)
    parts = sizes["micro_batches"]
    lag = getattr(policy, "lag", 0) or getattr(policy, "staleness", 0) * parts
    report = stream_report(drawn, sizes, lag, algorithm.max_age)
    if 0 < lag < parts and not getattr(algorithm, "_learns_by_parts", False):
        report += (
            f"\nlag {lag} is short: learning begins after the last of {parts} micro-batches, for its loss"
            f" needs the whole batch, so generation overlaps with all of it from lag {parts} on"
        )
    return report


def idle(plan: Plan, cluster: Cluster) -> str:
    """A line about the predicted idle time of a plan's groups, and the largest part of an iteration."""
    prediction = predict(plan, cluster)
    shares = ", ".join(f"{group} {share:.0%}" for group, share in prediction.idle.items())
    return (
        f"idle: {shares} of an iteration, predicted with responses of the longest length;"
        f" most of it is {prediction.bound}"
    )
