"""`Program`: one XLA program of an engine, its compilation and its cost."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh

from fdg import keys
from fdg.batch.collective import Collective
from fdg.errors import PlanError
from fdg.running.hlo import read_collectives
from fdg.running.xla_options import older_emitter_options, xla_options

T = TypeVar("T")


@dataclasses.dataclass(eq=False)
class Program:
    """One XLA program of an engine.

    If all fragments share their devices, the engine has a single program, "train": a loop whose number of
    iterations is an argument. Its HLO has one outer loop of unknown length, whose body is an iteration.

    Attributes:
      devices: the devices that run the program.
      calls_per_iteration: runs in one training iteration. It is 1 for "train", whose call runs many
        iterations, but whose collectives and cost are per iteration.
      function: the jitted function.
      arguments: shapes, dtypes and shardings of its arguments (`jax.ShapeDtypeStruct`).
      exchanges: True if the program is a transfer by collectives.
      roams: True if the arguments of this one-device program may come from any device (they are uncommitted).
        JAX copies an uncommitted argument from another device within the C++ call, in 15 us;
        `jax.device_put` takes 50 to 100 us.
      compiled: the executable; None before `compile`.
    """

    name: str
    fragments: tuple[str, ...]
    devices: tuple[jax.Device, ...]
    calls_per_iteration: int
    function: Any = dataclasses.field(repr=False)
    arguments: Sequence[Any] = dataclasses.field(repr=False)
    exchanges: bool = False
    roams: bool = False
    compiled: Any = dataclasses.field(default=None, repr=False)

    @property
    def is_here(self) -> bool:
        """Whether this process has a device of the program."""
        return is_here(self.devices)

    def __call__(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Dispatches a program with one argument, a list of arrays."""
        return self.compiled(list(arrays))

    def lower(self) -> jax.stages.Lowered:
        """Traces and lowers the program.

        Raises:
          PlanError: the program takes an array whose elements have less than 8 bits.
        """
        _check_widths(self.arguments)
        if not self.roams:
            return self.function.lower(*self.arguments)
        unsharded = jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape.shape, shape.dtype), self.arguments)
        with jax.default_device(self.devices[0]):
            return self.function.lower(*unsharded)

    def compile(self) -> jax.stages.Compiled:
        """Compiles the program at the first call."""
        compile_programs([self], lambda: None)
        return self.compiled

    def hlo(self) -> str:
        """The optimised HLO as text."""
        return self.compile().as_text() or ""

    def collectives(self) -> tuple[Collective, ...]:
        """The collectives of one run ("train": of one iteration), read from the optimised HLO.

        A collective in a loop counts once per trip, if XLA knows the trip count.
        """
        return read_collectives(self.hlo())

    def cost(self) -> dict[str, float]:
        """XLA's analysis of the program on one device; 0 where XLA gives no figure.

        Returns:
          `flops` and `bytes_accessed` (each loop's body counted once), `argument_bytes`, `output_bytes`,
          `temporary_bytes`, `code_bytes`, and `peak_bytes`: arguments, output and temporaries, where output
          that aliases an argument counts once.
        """
        compiled = self.compile()
        analysis = compiled.cost_analysis() or {}
        analysis = analysis[0] if isinstance(analysis, list) else analysis
        memory = compiled.memory_analysis()
        names = ("argument", "output", "temp", "generated_code", "alias")
        argument, output, temporary, code, aliased = (
            float(getattr(memory, f"{name}_size_in_bytes", 0)) for name in names
        )
        return {
            "flops": float(analysis.get("flops", 0)),
            "bytes_accessed": float(analysis.get("bytes accessed", 0)),
            "argument_bytes": argument,
            "output_bytes": output,
            "temporary_bytes": temporary,
            "code_bytes": code,
            "peak_bytes": argument + output - aliased + temporary,
        }


def _check_widths(arguments: Any) -> None:
    """Raises `PlanError` for elements of less than 8 bits: JAX 0.10.2 confuses the layouts of such arrays."""
    for leaf in jax.tree.leaves(arguments):
        if not keys.is_key(leaf.dtype) and jax.dtypes.itemsize_bits(leaf.dtype) < 8:
            raise PlanError(
                f"an array {leaf.dtype}{list(leaf.shape)} is in the state or passed between programs, but"
                " JAX's compiled programs do not accept elements of less than 8 bits: store it with 8 bits,"
                " and convert it where it is used"
            )


def compile_programs(programs: Iterable[Program], meanwhile: Callable[[], T]) -> T:
    """Compiles programs that have a device in this process and are not compiled yet, in parallel.

    Calls `meanwhile` in this thread while XLA compiles, and returns its result.
    """
    uncompiled = [program for program in programs if program.is_here and program.compiled is None]
    if not uncompiled:
        return meanwhile()
    # Only XLA compiles in other threads: tracing and lowering hold the GIL, and must read the JAX options of
    # this thread (`with jax.enable_x64():`).
    lowered = [program.lower() for program in uncompiled]
    platforms = [program.devices[0].platform for program in uncompiled]
    executables, result = compile_in_parallel(lowered, platforms, meanwhile)
    for program, compiled in zip(uncompiled, executables, strict=True):
        program.compiled = compiled
    return result


def compile_in_parallel(
    lowered: Sequence[jax.stages.Lowered], platforms: Sequence[str], meanwhile: Callable[[], T]
) -> tuple[list[jax.stages.Compiled], T]:
    """Compiles programs in other threads, each for its platform, and calls `meanwhile` in this thread.

    Returns the executables and the result of `meanwhile`.
    """
    with ThreadPoolExecutor() as pool:
        executables = pool.map(compile_lowered, lowered, platforms)
        result = meanwhile()
        return list(executables), result


def compile_lowered(lowered: jax.stages.Lowered, platform: str) -> jax.stages.Compiled:
    """Compiles with the platform's XLA options.

    XLA's CPU fusion emitter fails on some programs, with and without fdg (for example SMAX with a recurrent
    network, 4 environments and 4 steps, jaxlib 0.10.2). These are compiled with the older, slower emitter, if
    XLA still has it.

    Raises:
      JaxRuntimeError: XLA cannot compile the program.
    """
    try:
        return lowered.compile(compiler_options=xla_options(platform) or None)
    except jax.errors.JaxRuntimeError as error:
        options = older_emitter_options(platform, error)
        if options is None:
            raise
        return lowered.compile(compiler_options=options)


def is_here(devices: Iterable[jax.Device]) -> bool:
    """Whether this process has one of these devices."""
    return any(d.process_index == jax.process_index() for d in devices)


def spans_processes(*meshes: Mesh) -> bool:
    """Whether the devices of the meshes belong to more than one process."""
    return len({d.process_index for mesh in meshes for d in mesh.devices.flat}) > 1
