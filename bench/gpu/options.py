"""Compares runs with and without each of some XLA options, and times each fragment of an iteration."""

import functools
import statistics
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax

import fdg
from bench.gpu.measuring import ROWS, Figures, Measurement, Settings
from bench.gpu.training import compile_job, flags_of
from bench.harness import Spread, repeated, seconds, timed_in_turns
from bench.peers.serve import Stopwatch
from fdg.running.xla_options import NONE, PRESETS

_COMMAND_BUFFER = "xla_gpu_enable_command_buffer"
_LOOPS = {_COMMAND_BUFFER: PRESETS["gpu"][_COMMAND_BUFFER]}

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "loops in command buffers, unrolled": PRESETS["gpu"],
    "loops in command buffers": _LOOPS,
    "WHILE alone": {_COMMAND_BUFFER: PRESETS["gpu"][_COMMAND_BUFFER].replace(",DYNAMIC_SLICE_FUSION", "")},
    "concurrent regions": {**_LOOPS, "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT_REGIONS"},
    "no command buffers": {"xla_gpu_graph_min_graph_size": 10**6},  # more than the size of any graph
    "Triton for any product": {"xla_gpu_triton_gemm_any": True},
    "no Triton": {"xla_gpu_enable_triton_gemm": False},
    "latency hiding scheduler": {"xla_gpu_enable_latency_hiding_scheduler": True},
    "nothing": {},  # shows the noise of this measurement
}
"""XLA's options by name of a variant: fdg's preset, then parts of it and others."""


def measurements(settings: Settings) -> list[Measurement]:
    """The measurements; those of the smallest networks, which launches slow down most, come first."""
    measurements = []
    seconds, profiling_seconds = settings.full_or_tiny((22, 45), (1, 1))
    for env, num_variants in settings.full_or_tiny(  # None: all variants
        {"CartPole-v1": None, "Breakout-MinAtar": 5}, {"CartPole-v1": 2}
    ).items():
        flags = tuple(flags_of(env, settings.full_or_tiny(4096, 8)))
        profiling = partial(profile_fragments, flags, rounds=settings.full_or_tiny(5, 1))
        measurements.append(Measurement("Share of the limit", env, profiling, profiling_seconds, limit=120))
        run = partial(compare_option, flags, rounds=settings.full_or_tiny(5, 2))
        measurements += [
            Measurement("XLA's settings", f"{env}: {name}", partial(run, name), seconds, limit=90)
            for name in (*list(VARIANTS)[:num_variants], "bfloat16")
        ]
    return measurements


def _text(options: Mapping[str, Any]) -> str:
    """The options as the value of `--xla-options`, where `+` stands for a comma within an option's value."""
    return ",".join(f"{name}={str(value).replace(',', '+')}" for name, value in options.items()) or NONE


@functools.lru_cache(maxsize=1)
def _without_options(flags: tuple[str, ...]) -> tuple[Any, Any]:
    """The engine without XLA's options, and its first state; cached for the next measurement."""
    _, engine, state = compile_job((*flags, "--xla-options", NONE))
    return engine, state


def compare_option(flags: tuple[str, ...], name: str, rounds: int) -> Figures:
    """Runs iterations without and with a variant, in turns; the ratio is the median over rounds.

    `name` is in `VARIANTS`, or "bfloat16": products with bfloat16 operands, and no options.
    """
    engine, state = _without_options(flags)
    options = VARIANTS.get(name, {})
    with Stopwatch() as watch:
        precision = ("--precision", "bfloat16") if name == "bfloat16" else ()
        job, engine_with, state_with = compile_job((*flags, "--xla-options", _text(options), *precision))
    count = 1  # iterations of a round
    without = repeated(lambda state: engine.run(state, count), jax.tree.map(jax.numpy.copy, state))
    for _ in range(3):  # the first calls take longer
        count = max(1, round(0.3 * count / seconds(without)))
    calls = {"without": without, "with": repeated(lambda state: engine_with.run(state, count), state_with)}
    timed = timed_in_turns(calls, rounds)
    return {
        **{
            f"steps/s {side}": count * job.steps_per_iteration / statistics.median(times)
            for side, times in timed.items()
        },
        "ratio": Spread.ratio(timed["without"], timed["with"]).median,
        "compile s": watch.seconds,
        "options": dict(options),
    }


def profile_fragments(flags: tuple[str, ...], rounds: int) -> Figures:
    """Profiles each fragment: its share of an iteration, and its speed relative to the machine's limit."""
    engine, state = _without_options(flags)
    profile = fdg.profile(engine, state, rounds)
    # The limit of an iteration: fragments that are called by no other fragment.
    limit = sum(x.limit_s * x.calls for x in profile.fragments if x.depth == 0)
    rows = [
        {
            "fragment": x.name,
            "ms an iteration": None if x.per_iteration is None else 1e3 * x.per_iteration,
            "share": None if x.per_iteration is None else x.per_iteration / profile.iteration_s,
            "of its limit": x.roofline,
        }
        for x in profile.fragments
    ]
    whole = {"fragment": "an iteration", "ms an iteration": 1e3 * profile.iteration_s, "share": 1.0}
    return {
        ROWS: [whole | {"of its limit": limit / profile.iteration_s}, *rows],
        "printed": str(profile).split("\n"),
    }
