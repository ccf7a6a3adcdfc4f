"""Options of XLA's compiler: a preset for each platform, and those that a user names.

They go along with each program of a plan, not into `XLA_FLAGS`, where a flag that the installed XLA does not
know would end the process. What the user's own `XLA_FLAGS` say is left alone.
"""

import functools
import os
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax

from fdg.errors import FdgError

# None is used unless it is asked for (`--xla-options preset`): no GPU was at hand to measure them on, and
# nothing on a CPU was quicker with an option than without.
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
      text: "preset" for those of the platform in `PRESETS`, "none" or None for none, or
        `NAME=VALUE,NAME=VALUE` (a list within a value is separated by `+`).

    Raises:
      FdgError: none of these.
    """
    _chosen.clear()
    if text == PRESET:
        _chosen[PRESET] = True
    elif text not in (None, NONE):
        _chosen.update(_named(str(text)))


def xla_options(platform: str) -> dict[str, Any]:
    """The options to compile a program with, on "cpu", "gpu" or "tpu".

    Of a preset those that the installed XLA knows and that the user's `XLA_FLAGS` do not set.

    Raises:
      FdgError: an option that the user named, and that XLA does not know, or not with this value.
    """
    kind = "gpu" if platform in ("cuda", "rocm") else platform
    if PRESET not in _chosen:
        for name, value in _chosen.items():
            if refusal := _refusal(name, value):
                raise FdgError(
                    f"--xla-options {name}={value}: XLA of jaxlib {jax.lib.__version__}: {refusal}"
                )
        return dict(_chosen)
    own = set(re.findall(r"--(xla_\w+)", os.environ.get("XLA_FLAGS", "")))
    return {
        name: value
        for name, value in PRESETS.get(kind, {}).items()
        if name not in own and not _refusal(name, value)
    }


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
