"""Options of XLA's compiler: a preset for each platform, and those that a user names.

They go along with each program of a plan, not into `XLA_FLAGS`, where a flag that the installed XLA does not
know would end the process. What the user's own `XLA_FLAGS` say is left alone.
"""

import contextlib
import functools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from fdg.errors import FdgError

# Used unless something else is said. Loops over vectors of 512 bits take 8 to 10% less of a core's time (PPO
# on CartPole-v1, on Breakout-MinAtar 8%, on Pendulum-v1 nothing) where a core has them in full. Where they
# slowed the whole core down, in the first that had them, LLVM's 256 stay.
_WIDE = {"xla_cpu_prefer_vector_width": 512}

# LLVM's first level of three: programs compile in a tenth to a third less of a core's time, and are no slower
# (docs/decisions/062). Below it is code that rounds otherwise.
_QUICK_TO_COMPILE = {"xla_backend_optimization_level": 1}

# None is used unless it is asked for (`--xla-options preset`): no GPU was at hand to measure them on.
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "gpu": {
            # Loops are WHILE loops, whose every trip the host would launch: into CUDA graphs with them. The
            # kinds that are there by default are named too, since a list replaces the one before.
            "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,WHILE",
            "xla_gpu_command_buffer_unroll_loops": True,
            "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT_REGIONS",
            "xla_gpu_graph_min_graph_size": 2,
            "xla_gpu_triton_gemm_any": True,  # another order of sums than cuBLAS's
        },
        "cpu": {},
        "tpu": {},
    }
)
PRESET, NONE = "preset", "none"
_chosen: dict[str, Any] = {}


def choose_xla_options(text: str | None) -> None:
    """Says which options programs are compiled with from here on.

    Args:
      text: None for those that are always good here, "preset" for those of the platform in `PRESETS` beside
        them, "none" for none, or `NAME=VALUE,NAME=VALUE` and no other (a list within a value is separated by
        `+`).

    Raises:
      FdgError: none of these.
    """
    _chosen.clear()
    if text is None:
        return
    if text in (PRESET, NONE):
        _chosen[text] = True
    else:
        _chosen.update(_named(str(text)))


def xla_options(platform: str) -> dict[str, Any]:
    """The options to compile a program with, on "cpu", "gpu" or "tpu".

    Args:
      platform: of its devices.

    Of a preset those that the installed XLA knows and that the user's `XLA_FLAGS` do not set.

    Raises:
      FdgError: an option that the user named, and that XLA does not know, or not with this value.
    """
    kind = "gpu" if platform in ("cuda", "rocm") else platform
    if NONE in _chosen:
        return {}
    if _chosen and PRESET not in _chosen:
        for name, value in _chosen.items():
            if refusal := _refusal(name, value):
                raise FdgError(
                    f"--xla-options {name}={value}: XLA of jaxlib {jax.lib.__version__}: {refusal}"
                )
        return dict(_chosen)
    own = set(re.findall(r"--(xla_\w+)", os.environ.get("XLA_FLAGS", "")))
    options = {
        **(_QUICK_TO_COMPILE if kind == "cpu" else {}),
        **(_WIDE if kind == "cpu" and has_wide_vectors() else {}),
        **(PRESETS.get(kind, {}) if PRESET in _chosen else {}),
    }
    return {n: value for n, value in options.items() if n not in own and not _refusal(n, value)}


def options_of_older_loops(platform: str) -> dict[str, Any]:
    """Those of the generator of loops that XLA's CPU compiler had before; none where it is gone."""
    name, value = "xla_cpu_use_fusion_emitters", False
    return {name: value} if platform == "cpu" and not _refusal(name, value) else {}


@functools.cache
def has_wide_vectors() -> bool:
    """Whether this machine's cores have vectors of 512 bits, of the second generation or later."""
    with contextlib.suppress(OSError):  # not Linux
        return "avx512_vbmi2" in Path("/proc/cpuinfo").read_text()
    return False


def _named(text: str) -> dict[str, Any]:
    """
    >>> _named("xla_gpu_triton_gemm_any=true,xla_gpu_enable_command_buffer=FUSION+WHILE")
    {'xla_gpu_triton_gemm_any': True, 'xla_gpu_enable_command_buffer': 'FUSION,WHILE'}
    """
    options: dict[str, Any] = {}
    for word in text.split(","):
        name, equals, value = word.strip().partition("=")
        name = name.removeprefix("--")
        if not (name.startswith("xla_") and equals and value):
            raise FdgError(
                f"--xla-options {text}: '{word}' is not NAME=VALUE: use '{PRESET}', '{NONE}' or such pairs"
            )
        lower = value.lower()
        number = int(value) if re.fullmatch(r"-?\d+", value) else value.replace("+", ",")
        options[name] = lower == "true" if lower in ("true", "false") else number
    return options


@functools.cache
def _refusal(name: str, value: Any) -> str:
    """What XLA says of an option that it does not take; empty for one that it does."""
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options={name: value})
    except jax.errors.JaxRuntimeError as error:
        return str(error).splitlines()[0].partition(": ")[2]
    return ""
