"""`fdg.plan --lengths`: predicts how a stream (`fdg.stream`) of responses with given lengths behaves.

A simulation runs the stream's clock without tokens. It gives the share of busy slots, the age of tokens, and
the setting that limits both. The clock counts ticks, not seconds, so the results do not depend on devices.
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

from algos.rlhf import streaming
from fdg.arguments import quoted
from fdg.commands.flags import Flag
from fdg.costs.hardware import Cluster
from fdg.costs.prediction import predict
from fdg.errors import FdgError
from fdg.placing.plans import Plan
from fdg.running.xla_options import jit
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
    f"With {FLAG.option}: the share of a stream's slots that is busy, and the age of its tokens."
    f" {FLAG.option}: {FLAG.help}."
)
_LAST_ITERATIONS = 20  # response lengths come from this many last iterations of a run
_NUM_AGES = 32  # the simulation counts the tokens of this many ages, 0, 1, ... iterations
_LONGEST_STEPS = 256  # the longest response is simulated in about this many steps
_NUM_LENGTHS = 4099  # size of the sample of lengths, which responses take in turn
_FULL_SHARE = 0.9  # fraction of busy slots above which more slots help
_NORMAL_QUANTILE = 3.09  # 99.9th percentile of the standard normal distribution
_DISTRIBUTIONS = "lognormal:MEAN,LONGEST, uniform:SHORTEST,LONGEST or constant:LENGTH"


@dataclasses.dataclass(frozen=True)
class Lengths:
    """A sample of response lengths."""

    tokens: np.ndarray  # lengths in tokens, `[_NUM_LENGTHS]` int32
    source: str  # a description of the lengths

    @property
    def ticks_per_step(self) -> int:
        """Number of ticks in one simulated step. Long steps save time and hardly change the results."""
        return -(-int(np.max(self.tokens)) // _LONGEST_STEPS)

    @property
    def num_steps(self) -> np.ndarray:
        """Number of simulated steps of each response in a slot; its first token is sampled at the start."""
        return np.maximum(-(-(self.tokens - 1) // self.ticks_per_step), 1)


def parse_lengths(text: str) -> Lengths:
    """Parses a distribution of lengths.

    `lognormal:MEAN,LONGEST` (one in a thousand responses would be longer and is truncated),
    `uniform:SHORTEST,LONGEST` or `constant:LENGTH`.

    >>> constant = parse_lengths("constant:7")
    >>> set(constant.tokens.tolist()), set(constant.num_steps.tolist()), constant.source
    ({7}, {6}, '7 tokens, 7 at most')
    """
    match = re.fullmatch(r"(lognormal|uniform|constant):(\d{1,9})(?:,(\d{1,9}))?", text.strip())
    error = FdgError(f"lengths {quoted(text)}: give {_DISTRIBUTIONS}, in tokens, or the directory of a run")
    if match is None or (match[1] == "constant") != (match[3] is None):
        raise error
    low, high = int(match[2]), int(match[3] or match[2])
    if low > high >= 1:
        what = "mean" if match[1] == "lognormal" else "shortest"
        raise FdgError(
            f"lengths {quoted(text)}: the {what} {low} is above the longest {high}: did you mean"
            f" {match[1]}:{high},{low}?"
        )
    if not 1 <= low <= high <= 1 << 20:
        raise error
    quantiles = (np.random.default_rng(0).permutation(_NUM_LENGTHS) + 0.5) / _NUM_LENGTHS
    if match[1] == "lognormal" and low < high:
        tokens = np.minimum(np.ceil(_lognormal_quantiles(low, high, quantiles)), high)
    else:
        tokens = np.floor(low + quantiles * (high - low + 1))
    tokens = np.maximum(tokens, 1).astype(np.int32)
    return Lengths(tokens, f"{np.mean(tokens):,.0f} tokens, {np.max(tokens):,} at most")


def lengths_of_run(rows: Sequence[Mapping[str, Any]], name: str) -> Lengths:
    """Lognormal lengths with the mean and the longest of a run's last iterations."""
    pairs = [(row.get("response_length"), row.get("response_length_max")) for row in rows[-_LAST_ITERATIONS:]]
    lengths = [(mean, longest) for mean, longest in pairs if mean and longest]
    if not lengths:
        raise FdgError(f"lengths {quoted(name)}: this run has no response_length: give {_DISTRIBUTIONS}")
    mean = sum(mean for mean, _ in lengths) / len(lengths)
    longest = max(mean, *(longest for _, longest in lengths))
    return parse_lengths(f"lognormal:{max(round(mean), 1)},{max(round(longest), 1)}")


def _lognormal_quantiles(mean: float, longest: float, quantiles: np.ndarray) -> np.ndarray:
    """Quantiles of the lognormal distribution with this mean and the 99.9th percentile `longest`."""
    from statistics import NormalDist

    log_ratio = math.log(longest / mean)
    if 2 * log_ratio >= _NORMAL_QUANTILE**2:
        raise FdgError(
            f"lengths: the longest, {longest:,}, is {longest / mean:.0f} times the mean; lognormal lengths"
            f" allow at most {math.exp(_NORMAL_QUANTILE**2 / 2):.0f} times: give a longer mean"
        )
    sigma = _NORMAL_QUANTILE - math.sqrt(_NORMAL_QUANTILE**2 - 2 * log_ratio)
    normal = np.array([NormalDist().inv_cdf(q) for q in quantiles])
    return np.exp(math.log(mean) - sigma**2 / 2 + sigma * normal)


class _AgeCounter:
    """A `fdg.stream.Source` without tokens: counts the tokens of each age that it would have sampled."""

    def __init__(self, num_steps: np.ndarray):
        self._steps = jnp.asarray(num_steps, jnp.int32)

    def idle(self, slots: int) -> Any:
        # Per slot: steps until the response ends, version of the parameters at its start, and the number of
        # tokens sampled 0, 1, ... versions later.
        return {
            "left": zeros((slots,), jnp.int32),
            "first": zeros((slots,), jnp.int32),
            "drawn": zeros((slots, _NUM_AGES), jnp.int32),
        }

    def begin(self, parameters: Any, key: Any, index: Any, now: Any) -> tuple[Any, Any]:
        empty = self.idle(index.shape[0])
        first_version = jnp.broadcast_to(now.version, index.shape).astype(jnp.int32)
        return {**empty, "left": self._steps[index % len(self._steps)], "first": first_version}, empty["left"]

    def tick(self, parameters: Any, state: Any, cache: Any, now: Any) -> tuple[Any, Any]:
        is_busy = state["left"] > 0
        age = jnp.minimum(now.version - state["first"], _NUM_AGES - 1)
        num_sampled = (is_busy[:, None] & (jnp.arange(_NUM_AGES)[None] == age[:, None])).astype(jnp.int32)
        return {**state, "left": state["left"] - is_busy, "drawn": state["drawn"] + num_sampled}, cache

    def done(self, state: Any) -> Any:
        return state["left"] == 0

    def refresh(self, parameters: Any, state: Any) -> Any:
        return state["left"]

    def row(self, state: Any) -> Any:
        return state


@dataclasses.dataclass(frozen=True)
class StreamFigures:
    """The results of a simulated stream in its steady state."""

    ticks: float  # per iteration
    busy: float  # mean share of busy slots
    mean_age: float  # mean age of tokens in iterations
    oldest: int  # the largest age in iterations
    masked: float  # share of tokens to which `late="mask"` gives weight 0
    rate: float  # trained tokens per tick


def simulate(
    lengths: Lengths,
    sizes: dict[str, Any],
    lag: int = 0,
    max_age: int | None = None,
    iterations: int = 24,
) -> StreamFigures:
    """Simulates a stream's clock.

    `sizes` are the fields of `fdg.stream.Stream` without its source. `lag` is in micro-batches. With
    `late="mask"`, tokens older than `max_age` iterations (None: `ahead`) have weight 0. The measured
    `iterations` follow a warm-up, which fills the slots.
    """
    stream = Stream(_AgeCounter(lengths.num_steps), **sizes)
    warm_up = 2 * (stream.ahead + 1)
    micro_batches = stream.micro_batches
    run = _compile_simulation(tuple(sizes.items()), warm_up + iterations)
    max_age = _NUM_AGES if stream.late == "wait" else stream.ahead if max_age is None else max_age
    counts = run(lengths.num_steps.astype(np.int32), lag, max_age)
    by_age, num_drawn, ticks, busy = jax.tree.map(np.asarray, counts)
    start = warm_up * micro_batches
    trained_by_age = by_age[start:].sum(axis=0).astype(float)
    num_ticks, busy_slots = int(ticks[-1] - ticks[start - 1]), int(busy[-1] - busy[start - 1])
    return StreamFigures(
        num_ticks * lengths.ticks_per_step / iterations,
        busy_slots / (stream.slots * max(num_ticks, 1)),
        float(np.sum(trained_by_age * np.arange(len(trained_by_age))) / np.sum(trained_by_age)),
        int(np.max(np.flatnonzero(trained_by_age))),
        float(1 - np.sum(trained_by_age) / np.sum(num_drawn[start:])),
        float(np.sum(trained_by_age) / max(num_ticks, 1)),
    )


@functools.lru_cache(64)
def _compile_simulation(sizes: tuple[tuple[str, Any], ...], iterations: int) -> Any:
    """Compiles the simulation: a function of the responses' numbers of steps, the lag and the maximum age.

    A token has weight 0 if its age, relative to the parameters that generate its micro-batch, is above the
    maximum. The function returns for each micro-batch the numbers of tokens with a weight by age (relative to
    the newest parameters), the number of all tokens, and the ticks and busy slots so far.
    """

    def run(num_steps: Any, lag: Any, max_age: Any) -> Any:
        stream = Stream(_AgeCounter(num_steps), **dict(sizes))
        micro_batches = stream.micro_batches

        def take_micro_batch(state: Any, index: Any) -> tuple[Any, Any]:
            iteration = index // micro_batches
            version = jnp.maximum((index - lag) // micro_batches, 0)
            rows, state = stream.take(jnp.float32(0), version, state)
            versions, drawn = rows["first"][:, None] + jnp.arange(_NUM_AGES)[None], rows["drawn"]
            ages = jnp.clip(iteration - versions, 0, _NUM_AGES - 1)
            weighted = jnp.where(version - versions <= max_age, drawn, 0)
            by_age = zeros((_NUM_AGES,), jnp.int32).at[ages].add(weighted)
            return state, (by_age, jnp.sum(drawn), state.clock.tick, state.clock.busy)

        indices = jnp.arange(iterations * micro_batches)
        return jax.lax.scan(take_micro_batch, stream.init(jax.random.key(0)), indices)[1]

    return jit(run)


def stream_report(lengths: Lengths, sizes: dict[str, Any], lag: int = 0, max_age: int | None = None) -> str:
    """A table of a stream and its alternatives, with the setting that limits the stream.

    Arguments are as for `simulate`. Ages are in iterations.
    """
    ahead, slots, micro_batches = sizes["ahead"], sizes["slots"], sizes["micro_batches"]

    def eta_bound(ahead: int, lag: int = lag) -> int:
        """The largest age of a token in iterations."""
        return streaming.oldest(ahead, sizes["order"], sizes["late"], max_age) + -(-lag // micro_batches)

    oldest, masks, batch = eta_bound(ahead, lag=0), sizes["late"] == "mask", sizes["batch"] * sizes["group"]
    max_slots = (sizes["batch"] // micro_batches) * sizes["group"] + ahead * batch  # as `Stream` allows
    variants: dict[str, dict[str, Any]] = {"as given": sizes}
    if ahead:
        num_slots = min(slots, max_slots - ahead * batch)
        variants["ahead=0"] = {**sizes, "ahead": 0, "slots": num_slots}
    variants[f"ahead={ahead + 1}"] = {**sizes, "ahead": ahead + 1}
    if ahead and sizes["order"] == "prompt":
        variants["order=finished"] = {**sizes, "order": "finished"}
    elif ahead and sizes["late"] == "wait":
        variants["late=mask"] = {**sizes, "late": "mask"}
    if 2 * slots <= max_slots:
        variants[f"slots={2 * slots}"] = {**sizes, "slots": 2 * slots}
    results = {name: simulate(lengths, variant, lag, max_age) for name, variant in variants.items()}
    base = results["as given"]
    rows = [
        (
            name,
            f"{100 * result.busy:.0f}%",
            f"{result.mean_age:.1f}",
            str(result.oldest),
            f"{100 * result.masked:.1f}%",
            f"{result.ticks:,.0f}",
            f"{result.rate / base.rate:.2f}",
        )
        for name, result in results.items()
    ]
    header = ("stream", "slots busy", "mean age", "oldest", "masked", "ticks", "tokens/tick")
    others = [
        name for name in results if name != "as given" and (base.busy > _FULL_SHARE or "slots" not in name)
    ]
    best = max(others, key=lambda name: results[name].rate)
    gain = results[best].rate / base.rate
    limit = f"{best} would give {gain:.2f} times the tokens per tick"
    if gain < 1.05:
        busy = f"{base.busy:.0%} of the slots are busy, and none of these streams is 5% faster"
        limit = f"the time of a tick itself: {busy}"
    elif not ahead:
        limit = f"the longest response of each batch: {limit}"
    elif base.busy < _FULL_SHARE:
        limit = f"eta = {eta_bound(ahead)}, too small for these lengths: {limit}"
    else:
        limit = f"the number of slots: {limit}"
    for increase in (1, 2, 4, 8) if gain >= 1.05 and base.busy < _FULL_SHARE else ():
        larger_ahead = ahead + increase
        if (
            simulate(lengths, {**sizes, "ahead": larger_ahead}, lag, max_age, iterations=12).busy
            >= _FULL_SHARE
        ):
            limit += (
                f"; ahead={larger_ahead} (eta = {eta_bound(larger_ahead)}) keeps {_FULL_SHARE:.0%} of the"
                " slots busy"
            )
            break
    return "\n".join(
        [
            f"stream of {slots} slots: responses of {lengths.source}",
            f"eta = {eta_bound(ahead)} = {'ahead' if oldest == ahead else 'max_age'} {oldest} + ceil(lag"
            f" {lag} / {micro_batches} micro-batches):"
            f" no token {'with a weight ' * masks}is older, in iterations",
            *table(header, rows, range(1, len(header))),
            f"limited by: {limit}",
        ]
    )


def take_lengths(flags: dict[str, Any]) -> str | None:
    """Removes this module's flag from `flags` and returns its value."""
    lengths = flags.pop(FLAG.name, None)
    if lengths is not None and not Path(lengths).is_dir():
        parse_lengths(lengths)  # fails early, before tracing
    return lengths


def report_of(algorithm: Any, policy: Any, text: str) -> str:
    """The report on the simulated stream of an algorithm under a policy.

    `text` is the value of --lengths: a run directory or a distribution.

    Raises:
      FdgError: the algorithm generates no responses.
    """
    if not hasattr(algorithm, "ahead"):
        raise FdgError(
            f"--lengths {text:.60}: {type(algorithm).__name__} does not generate responses: use --algo grpo,"
            " ppo_rlhf or dpo"
        )
    folder = Path(text)
    is_run = folder.is_dir()
    lengths = (
        lengths_of_run([*read_metrics(folder / "metrics.jsonl")], text) if is_run else parse_lengths(text)
    )
    sizes = streaming.sizes(algorithm, algorithm._candidates)
    micro_batches = sizes["micro_batches"]
    lag = getattr(policy, "lag", 0) or getattr(policy, "staleness", 0) * micro_batches
    report = stream_report(lengths, sizes, lag, algorithm.max_age)
    if 0 < lag < micro_batches and not getattr(algorithm, "_learns_by_parts", False):
        report += (
            f"\nlag {lag} is short: learning begins after the last of {micro_batches} micro-batches, since"
            f" its loss needs the whole batch; generation overlaps with learning from lag {micro_batches} on"
        )
    return report


def idle_line(plan: Plan, cluster: Cluster) -> str:
    """A line about the predicted idle time of a plan's groups, and the largest part of an iteration."""
    prediction = predict(plan, cluster)
    shares = ", ".join(f"{group} {share:.0%}" for group, share in prediction.idle.items())
    return (
        f"idle: {shares} of an iteration, predicted for responses of the longest length;"
        f" the largest part is {prediction.largest_part}"
    )
