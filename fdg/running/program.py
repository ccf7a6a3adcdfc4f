"""`Program`: one XLA program of an engine, compiled once, and what can be read off it."""

import dataclasses
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import Mesh

from fdg.batch.collective import Collective
from fdg.running.hlo import read_collectives
from fdg.running.xla_options import options_of_older_loops, xla_options


@dataclasses.dataclass(eq=False)
class Program:
    """One XLA program of an engine.

    Where all fragments share their devices there is one, "train": a loop over iterations whose number is an
    argument. Its HLO has one outer loop of unknown length, whose body is an iteration.

    Attributes:
      fragments: the names of the fragments in it.
      devices: what it runs on.
      calls_per_iteration: how often it runs in one training iteration; 1 for "train", which the host starts
        once for many iterations, and of which all figures here are those of a single iteration.
      function: the jitted function.
      arguments: what it takes, as `jax.ShapeDtypeStruct` with shardings.
      exchanges: whether it is a transfer between processes, which is a collective itself.
      roams: of a program of one device: whether its arrays are committed to none. JAX fetches such an array
        from another device when it starts the program that reads it, without coming back to Python: in 15 us
        where `jax.device_put` takes 50 to 100.
      compiled: the executable, once `compile` has made it.
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
        """Whether this process has one of its devices."""
        return any(d.process_index == jax.process_index() for d in self.devices)

    def lower(self) -> jax.stages.Lowered:
        """Traces and lowers it."""
        if not self.roams:
            return self.function.lower(*self.arguments)
        free = jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape.shape, shape.dtype), self.arguments)
        with jax.default_device(self.devices[0]):
            return self.function.lower(*free)

    def compile(self) -> jax.stages.Compiled:
        """Compiles it, unless that was done already."""
        compile_programs([self])
        return self.compiled

    def hlo(self) -> str:
        """The optimised HLO as text."""
        return self.compile().as_text() or ""

    def collectives(self) -> tuple[Collective, ...]:
        """What its devices exchange each time it runs ("train": in an iteration), read from its HLO.

        A loop within counts as often as it turns, where XLA knows that.
        """
        return read_collectives(self.hlo())

    def cost(self) -> dict[str, float]:
        """What XLA says of one device's share, 0 where it says nothing.

        `flops` and `bytes_accessed` count each loop's body once; of memory: `argument_bytes`,
        `output_bytes`, `temporary_bytes`, `code_bytes`, and `peak_bytes` of all but code, results that lie in
        the memory of arguments counted once.
        """
        compiled = self.compile()
        analysis = compiled.cost_analysis() or {}
        analysis = analysis[0] if isinstance(analysis, list) else analysis
        memory = compiled.memory_analysis()
        names = ("argument", "output", "temp", "generated_code", "alias")
        given, made, temporary, code, shared = (
            float(getattr(memory, f"{name}_size_in_bytes", 0)) for name in names
        )
        return {
            "flops": float(analysis.get("flops", 0)),
            "bytes_accessed": float(analysis.get("bytes accessed", 0)),
            "argument_bytes": given,
            "output_bytes": made,
            "temporary_bytes": temporary,
            "code_bytes": code,
            "peak_bytes": given + made - shared + temporary,
        }


def compile_programs(programs: Iterable[Program]) -> None:
    """Compiles those that are not compiled yet and have a device in this process, several at a time."""
    todo = [program for program in programs if program.is_here and program.compiled is None]
    # Tracing and lowering hold Python's lock; XLA does not.
    lowered = [program.lower() for program in todo]
    platforms = [program.devices[0].platform for program in todo]
    if len(todo) == 1:
        todo[0].compiled = compile_lowered(lowered[0], platforms[0])
        return
    with ThreadPoolExecutor() as pool:
        executables = pool.map(compile_lowered, lowered, platforms)
        for program, compiled in zip(todo, executables, strict=True):
            program.compiled = compiled


def compile_lowered(lowered: jax.stages.Lowered, platform: str) -> jax.stages.Compiled:
    """Compiles with the options that hold for a platform.

    Now and then XLA's generator of code for fused loops on the CPU fails of itself (SMAX with 4 environments
    of 4 steps, recurrent, jaxlib 0.10.2; plain JAX does too): then the older one, which is slower, where the
    installed XLA still has it.

    Raises:
      JaxRuntimeError: XLA cannot compile it.
    """
    options = xla_options(platform)
    try:
        return lowered.compile(compiler_options=options or None)
    except jax.errors.JaxRuntimeError as error:
        older = options_of_older_loops(platform)
        if "MLIR failure" not in str(error) or not older:
            raise
        return lowered.compile(compiler_options={**options, **older})


def is_here(mesh: Mesh) -> bool:
    """Whether this process has one of a mesh's devices."""
    return any(d.process_index == jax.process_index() for d in mesh.devices.flat)


def spans_processes(*meshes: Mesh) -> bool:
    """Whether the devices of some meshes, together, belong to several processes."""
    return len({d.process_index for mesh in meshes for d in mesh.devices.flat}) > 1
