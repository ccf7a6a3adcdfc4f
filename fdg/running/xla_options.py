"""XLA compiler options: defaults, a preset per platform, and options that the user names.

Options are passed as `compiler_options` of each program, not through `XLA_FLAGS`, where a flag that the
installed XLA does not know would end the process. Flags that the user sets in `XLA_FLAGS` are not overridden.
"""

import contextlib
import functools
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from fdg.errors import FdgError

# On by default. With 512-bit vectors, PPO takes 8 to 10% less CPU time on CartPole-v1, 8% less on
# Breakout-MinAtar and the same on Pendulum-v1, on cores with full AVX-512. Cores of the first generation of
# AVX-512 run slower with 512-bit vectors, so they keep LLVM's default of 256 bits.
_WIDE_VECTORS = {"xla_cpu_prefer_vector_width": 512}

# LLVM's optimisation level 1 of 3: programs compile in 10 to 33% less CPU time, and run as fast
# (docs/decisions/062). Level 0 makes code that rounds differently.
_LOW_OPTIMIZATION = {"xla_backend_optimization_level": 1}

# Off by default; `--xla-options preset` turns them on. PPO on CartPole-v1 is 4% faster on an H200
# (docs/gpu.md).
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "gpu": {
            # WHILE puts loops into CUDA graphs, and DYNAMIC_SLICE_FUSION copies of array slices; otherwise
            # the host launches each trip. The list replaces XLA's default, so it repeats the default's kinds.
            "xla_gpu_enable_command_buffer": (
                "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,WHILE,DYNAMIC_SLICE_FUSION"
            ),
            "xla_gpu_command_buffer_unroll_loops": True,
        },
        "cpu": {},
        "tpu": {},
    }
)
PRESET, NONE = "preset", "none"  # words of --xla-options
_choice: dict[str, Any] = {}  # the options that the user named, or {PRESET: True} or {NONE: True}


def choose_xla_options(text: str | None) -> None:
    """Sets the options with which later programs are compiled.

    `text` is None for the defaults; "preset" for the defaults and the platform's `PRESETS`; "none" for no
    options; or `NAME=VALUE,NAME=VALUE` for only these options (`+` separates the items of a list value).
    """
    _choice.clear()
    if text is not None:
        _choice.update({text: True} if text in (PRESET, NONE) else _parse_options(text))


def xla_options(platform: str) -> dict[str, Any]:
    """The options with which a program is compiled on a platform ("cpu", "gpu", "cuda", "rocm" or "tpu").

    Defaults and presets leave out options that the installed XLA does not know, or that the user's
    `XLA_FLAGS` set.
    """
    preset_name = "gpu" if platform in ("cuda", "rocm") else platform
    if NONE in _choice:
        return {}
    if _choice and PRESET not in _choice:
        for name, value in _choice.items():
            if reason := _refusal_reason(name, value):
                raise FdgError(
                    f"--xla-options {name}={value}: XLA of jaxlib {jax.lib.__version__} refuses it: {reason}"
                )
        return dict(_choice)
    user_flags = set(re.findall(r"--(xla_\w+)", os.environ.get("XLA_FLAGS", "")))
    options: dict[str, Any] = {}
    if preset_name == "cpu":
        options |= _LOW_OPTIMIZATION | (_WIDE_VECTORS if has_wide_vectors() else {})
    if PRESET in _choice:
        options |= PRESETS.get(preset_name, {})
    return {n: value for n, value in options.items() if n not in user_flags and not _refusal_reason(n, value)}


class jit:
    """`jax.jit` with the XLA options of a platform; None for the platform of JAX's default devices.

    A program on which XLA's CPU fusion emitter fails is compiled with the older emitter.
    """

    def __init__(self, function: Callable[..., Any], platform: str | None = None, **arguments: Any):
        self._platform = platform or jax.default_backend()
        self._jit_with = functools.partial(jax.jit, function, **arguments)
        self._jitted = self._jit_with(compiler_options=xla_options(self._platform))

    def __call__(self, *args: Any) -> Any:
        """Runs the function."""
        try:
            return self._jitted(*args)
        except jax.errors.JaxRuntimeError as error:
            options = older_emitter_options(self._platform, error)
            if options is None:
                raise
            self._jitted = self._jit_with(compiler_options=options)
            return self._jitted(*args)

    def trace(self, *args: Any) -> Any:
        """As `jax.jit(function).trace`."""
        return self._jitted.trace(*args)


def older_emitter_options(platform: str, error: Exception) -> dict[str, Any] | None:
    """`xla_options` with the older CPU emitter; None if it does not exist or the newer has not failed."""
    name, value = "xla_cpu_use_fusion_emitters", False
    if "MLIR failure" not in str(error) or platform != "cpu" or _refusal_reason(name, value):
        return None
    return {**xla_options(platform), name: value}


@functools.cache
def has_wide_vectors() -> bool:
    """Whether the CPU has AVX-512 of the second generation or later (AVX512-VBMI2)."""
    with contextlib.suppress(OSError):  # not Linux
        return "avx512_vbmi2" in Path("/proc/cpuinfo").read_text()
    return False


def _parse_options(text: str) -> dict[str, Any]:
    """Parses NAME=VALUE pairs.

    >>> _parse_options("xla_gpu_triton_gemm_any=true,xla_gpu_enable_command_buffer=FUSION+WHILE")
    {'xla_gpu_triton_gemm_any': True, 'xla_gpu_enable_command_buffer': 'FUSION,WHILE'}
    """
    options: dict[str, Any] = {}
    for pair in text.split(","):
        name, separator, value = pair.strip().partition("=")
        name = name.removeprefix("--")
        if not (name.startswith("xla_") and separator and value):
            raise FdgError(
                f"--xla-options {text}: '{pair}' is not NAME=VALUE: give '{PRESET}', '{NONE}', or pairs"
                f" NAME=VALUE separated by commas"
            )
        if name in options:
            raise FdgError(f"--xla-options {text}: {name} is given twice: give it once")
        lower = value.lower()
        parsed = int(value) if re.fullmatch(r"-?\d+", value) else value.replace("+", ",")
        options[name] = lower == "true" if lower in ("true", "false") else parsed
    return options


@functools.cache
def _refusal_reason(name: str, value: Any) -> str:
    """XLA's error message for an option that it refuses; empty if XLA accepts the option."""
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options={name: value})
    except jax.errors.JaxRuntimeError as error:
        return str(error).splitlines()[0].partition(": ")[2]
    return ""
