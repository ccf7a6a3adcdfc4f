"""`compile`: an algorithm and a policy to an `Engine`, which initialises and runs it on devices."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fdg import lowering
from fdg.errors import FdgError, PlanError
from fdg.hlo import Collective, read_collectives
from fdg.placement import Plan, Policy, place
from fdg.tracing import trace


@dataclasses.dataclass(frozen=True)
class Program:
    """One XLA program of an engine.

    Attributes:
      fragments: the names of the fragments in it.
      devices: what it runs on.
    """

    name: str
    fragments: tuple[str, ...]
    devices: tuple[jax.Device, ...]
    _engine: "Engine" = dataclasses.field(repr=False, compare=False)

    def hlo(self) -> str:
        """The optimised HLO as text, of the loop over iterations (compiled for one if it has not run)."""
        return self._engine._any_compiled().as_text() or ""

    def collectives(self) -> tuple[Collective, ...]:
        """What the devices of this program exchange, read from its HLO."""
        return read_collectives(self.hlo())

    def cost(self) -> dict[str, float]:
        """What XLA says of one device's share, 0 where it says nothing.

        `flops` and `bytes_accessed` count each loop's body once; of memory: `argument_bytes`,
        `output_bytes`, `temporary_bytes`, `code_bytes`.
        """
        compiled = self._engine._any_compiled()
        analysis = compiled.cost_analysis() or {}
        analysis = analysis[0] if isinstance(analysis, list) else analysis
        memory = compiled.memory_analysis()
        return {
            "flops": float(analysis.get("flops", 0)),
            "bytes_accessed": float(analysis.get("bytes accessed", 0)),
            "argument_bytes": float(getattr(memory, "argument_size_in_bytes", 0)),
            "output_bytes": float(getattr(memory, "output_size_in_bytes", 0)),
            "temporary_bytes": float(getattr(memory, "temp_size_in_bytes", 0)),
            "code_bytes": float(getattr(memory, "generated_code_size_in_bytes", 0)),
        }


class Engine:
    """A compiled algorithm. `state = init(seed)`, then `state, metrics = run(state, iterations)`.

    Attributes:
      plan: which fragment runs where, and what moves; `print` it.
      programs: the XLA programs.
      devices: the devices given, idle ones included.
      state_shape: the state's pytree, of `jax.ShapeDtypeStruct` with shardings: what to restore to.
    """

    def __init__(self, algorithm: Any, plan: Plan, devices: Sequence[jax.Device]):
        self.algorithm, self.plan, self.devices = algorithm, plan, tuple(devices)
        graph = plan.graph
        if len(plan.groups) > 1:
            names = ", ".join(f"{group.name} ({len(group)} devices)" for group in plan.groups)
            raise PlanError(
                f"{plan.policy} places {graph.name} on several groups, {names}: this version compiles only "
                f"policies whose fragments share their devices, such as policies.GPUOnly()"
            )
        lower = lowering.lower_shared if plan.num_seeds is None else lowering.lower_seeds
        self._lowered = lower(graph, plan, self.devices)
        leaves, self._structure = jax.tree.flatten(graph.state)
        lead = () if plan.num_seeds is None else (plan.num_seeds,)
        self._shapes = [
            jax.ShapeDtypeStruct(lead + leaf.shape, leaf.dtype, sharding=sharding)
            for leaf, sharding in zip(leaves, self._lowered.shardings, strict=True)
        ]
        self.state_shape = jax.tree.unflatten(self._structure, self._shapes)
        self._init = jax.jit(self._init_leaves, out_shardings=self._lowered.shardings)
        self._compiled: dict[int, jax.stages.Compiled] = {}
        group = plan.groups[0]
        used = tuple(self.devices[i] for i in group.devices)
        self.programs = (Program("train", tuple(f.name for f in graph.fragments), used, self),)

    def init(self, seed: int = 0) -> Any:
        """The state that `algorithm.init(jax.random.key(seed))` gives, laid out on the devices.

        With `num_seeds`, every leaf has a leading axis of that length; agent i starts from `seed + i`.
        """
        count = self.plan.num_seeds
        key = (
            jax.random.key(seed)
            if count is None
            else jnp.stack([jax.random.key(seed + i) for i in range(count)])
        )
        return jax.tree.unflatten(self._structure, self._init(key))

    def run(self, state: Any, iterations: int = 1) -> tuple[Any, dict[str, jax.Array]]:
        """Trains for a number of iterations, as one executable.

        The first call with a given number compiles it; later ones compile nothing.

        Args:
          state: from `init` or an earlier `run`. Donated: its arrays cannot be used afterwards.
          iterations: at least 1.

        Returns:
          The new state, and metrics: `[iterations]` each, with `num_seeds` `[iterations, num_seeds]`.

        Raises:
          FdgError: a state of another algorithm, or one that was already donated.
        """
        compiled = self.compile(iterations)
        leaves, metrics = compiled(self._check(state))
        return jax.tree.unflatten(self._structure, leaves), jax.tree.unflatten(
            self._metrics_structure, metrics
        )

    def compile(self, iterations: int) -> jax.stages.Compiled:
        """Compiles `run(_, iterations)` ahead of its first call."""
        if not isinstance(iterations, int) or iterations < 1:
            raise FdgError(f"iterations={iterations!r}: give an integer of at least 1")
        if iterations not in self._compiled:

            def train(leaves):
                return self._lowered.loop(leaves, iterations=iterations)

            loop = jax.jit(
                train,
                donate_argnums=0,
                out_shardings=(self._lowered.shardings, self._lowered.metrics_sharding),
            )
            self._compiled[iterations] = loop.lower(self._shapes).compile()
        return self._compiled[iterations]

    @property
    def _metrics_structure(self):
        return jax.tree.structure(self.plan.graph.metrics)

    def _any_compiled(self) -> jax.stages.Compiled:
        return next(iter(self._compiled.values()), None) or self.compile(1)

    def _init_leaves(self, key):
        init = lambda key: jax.tree.map(jnp.asarray, self.algorithm.init(key))  # noqa: E731
        # Agents one after the other: LAPACK's batched QR, which orthogonal initialisers would become under
        # vmap, can wait for itself for ever in XLA's CPU thread pool (jaxlib 0.10.2, two cores).
        state = init(key) if self.plan.num_seeds is None else jax.lax.map(init, key)
        # Strongly typed, so that the first run and the later ones are the same executable.
        return [
            leaf
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            else jax.lax.convert_element_type(leaf, leaf.dtype)
            for leaf in jax.tree.leaves(state)
        ]

    def _check(self, state: Any) -> list[jax.Array]:
        leaves, structure = jax.tree.flatten(state)
        if structure != self._structure:  # type: ignore[operator]
            raise FdgError(
                f"this state is not of {self.plan.graph.name}: it is {structure}, not {self._structure}"
            )
        placed = []
        for leaf, shape in zip(leaves, self._shapes, strict=True):
            if not isinstance(leaf, jax.Array):
                leaf = jnp.asarray(leaf)
            if leaf.is_deleted():
                raise FdgError(
                    "this state was donated to an earlier run: go on from the state that run returned"
                )
            if leaf.shape != shape.shape or leaf.dtype != shape.dtype:
                raise FdgError(
                    f"this state is not of {self.plan.graph.name}: a leaf is {leaf.dtype}{list(leaf.shape)}, "
                    f"not {shape.dtype}{list(shape.shape)}"
                )
            is_placed = leaf.sharding.is_equivalent_to(shape.sharding, leaf.ndim)
            placed.append(leaf if is_placed else jax.device_put(leaf, shape.sharding))
        return placed

    def __repr__(self) -> str:
        return f"<Engine {self.plan.graph.name} under {self.plan.policy} on {len(self.devices)} devices>"


def compile(
    algorithm: Any,
    policy: Policy,
    devices: Sequence[jax.Device] | None = None,
    num_seeds: int | None = None,
) -> Engine:
    """Compiles an algorithm under a distribution policy.

    Args:
      algorithm: any object with `init(key) -> state` and `iterate(state) -> (state, metrics)`.
      policy: a value of `policies`, such as `policies.GPUOnly()`.
      devices: all of JAX's if None.
      num_seeds: independent agents in one program, spread over the devices; None for a single one.

    Raises:
      GraphError: the algorithm's graph is not well formed.
      PlanError: the policy cannot be carried out on these devices.
    """
    devices = jax.devices() if devices is None else devices
    if isinstance(devices, int):
        raise PlanError(f"devices={devices}: give a list, such as jax.devices()[:{devices}]")
    return Engine(algorithm, place(trace(algorithm), policy, list(devices), num_seeds), list(devices))
