"""`compile`: an algorithm and a policy to an `Engine`, which initialises and runs it on devices."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fdg import keys
from fdg.batch.follow import Communication
from fdg.errors import FdgError, PlanError
from fdg.placing.place import added_up, place
from fdg.placing.plan import BETWEEN, Movement, Plan
from fdg.placing.policy import Policy, with_host
from fdg.processes.arrays import put
from fdg.running.execution import Stepped, Whole
from fdg.running.hlo import Collective, unexplained
from fdg.tracing.trace import trace


class Engine:
    """A compiled algorithm. `state = init(seed)`, then `state, metrics = run(state, iterations)`.

    Attributes:
      plan: which fragment runs where, and what moves; `print` it. Where parameters are sharded, `compile`
        (and the first `run`) enters the collectives.
      programs: the XLA programs.
      devices: the devices given, idle ones included.
      state_shape: the state's pytree, of `jax.ShapeDtypeStruct` with shardings: what to restore to.
    """

    def __init__(self, algorithm: Any, plan: Plan, devices: Sequence[jax.Device]):
        self.algorithm, self.plan, self.devices = algorithm, plan, tuple(devices)
        run_as = Whole if plan.schedule is None else Stepped
        self._execution = run_as(plan.graph, plan, self.devices)
        self.programs = self._execution.programs
        self._shapes = self._execution.shapes
        self._structure = jax.tree.structure(plan.graph.state)
        self.state_shape = jax.tree.unflatten(self._structure, self._shapes)
        self._shardings = [shape.sharding for shape in self._shapes]
        # One program can only lay out its results on its own devices.
        whole = plan.schedule is None
        self._init = jax.jit(self._init_leaves, out_shardings=self._shardings if whole else None)

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
        leaves = self._init(key)
        if self.plan.schedule is not None:
            leaves = [put(x, shape) for x, shape in zip(leaves, self._shapes, strict=True)]
        return jax.tree.unflatten(self._structure, leaves)

    def run(self, state: Any, iterations: int = 1) -> tuple[Any, dict[str, jax.Array]]:
        """Trains for a number of iterations, and returns before they are done.

        The first call with a given number compiles it; later ones compile nothing. Where all fragments
        share their devices it is one executable; otherwise the host starts the plan's programs in turn.

        Args:
          state: from `init` or an earlier `run`. Donated: its arrays cannot be used afterwards.
          iterations: at least 1.

        Returns:
          The new state, and metrics: `[iterations]` each, with `num_seeds` `[iterations, num_seeds]`.

        Raises:
          FdgError: a state of another algorithm, or one that was already donated.
        """
        self.compile(iterations)
        leaves, metrics = self._execution.run(self._check(state), iterations)
        return jax.tree.unflatten(self._structure, leaves), jax.tree.unflatten(
            self._metrics_structure, metrics
        )

    def compile(self, iterations: int) -> None:
        """Compiles all that `run(_, iterations)` needs ahead of its first call."""
        if not isinstance(iterations, int) or iterations < 1:
            raise FdgError(f"iterations={iterations!r}: give an integer of at least 1")
        self._execution.compile(iterations)
        self._read_collectives()

    def _read_collectives(self) -> None:
        """Enters into the plan what could not be predicted: the collectives of groups that shard parameters.

        From the programs of this process; what others alone compile stays unknown here.
        """
        unread = {p.name: p for p in self.plan.programs if p.group in self.plan.unpredicted}
        compiled = [p for p in self.programs if p.name in unread and p.is_here]
        if not compiled:
            return
        found = [
            Movement(where, where, c.kind, c.bytes, c.calls * program.calls_per_iteration, "",
                     unread[program.name].group, program.name, True)
            for program in compiled
            for c in program.collectives()
            for where in [c.fragments[-1] if c.fragments else BETWEEN]
        ]  # fmt: skip
        read = {unread[program.name].group for program in compiled}
        self.plan = dataclasses.replace(
            self.plan,
            movements=(*self.plan.movements, *added_up(found)),
            unpredicted=tuple(group for group in self.plan.unpredicted if group not in read),
        )

    def algorithm_state(self, state: Any) -> Any:
        """The algorithm's own state: what `algorithm.evaluate` takes. Under staleness, `state` holds more."""
        return state.state if self.plan.delayed is not None else state

    def unexplained(self) -> tuple[tuple[str, Collective], ...]:
        """Collectives of the compiled programs that the plan does not name: (program, collective).

        Looks at the programs with devices of this process. There should be none.
        """
        predicted: dict[str, list[Communication]] = {program.name: [] for program in self.plan.programs}
        for m in self.plan.movements:
            if m.program in predicted:
                fragment = None if m.source == BETWEEN else m.source
                predicted[m.program].append(
                    Communication(fragment, m.how, m.bytes_per_crossing, m.crossings_per_iteration)
                )
        return tuple(
            (program.name, collective)
            for program in self.programs
            if program.is_here and not program.exchanges
            for collective in unexplained(program.collectives(), predicted.get(program.name, ()))
        )

    @property
    def moved_bytes(self) -> int:
        """Bytes moved between groups by all calls of `run` so far; collectives do not count."""
        return getattr(self._execution, "moved_bytes", 0)

    def busy_seconds(self) -> dict[str, float]:
        """How long each group's devices have run programs; waits for those that run. Empty for one group."""
        timeline = self._execution.timeline
        return {} if timeline is None else timeline.settle()

    @property
    def _metrics_structure(self):
        return jax.tree.structure(self.plan.graph.metrics)

    def _init_leaves(self, key):
        def init(key):
            state = jax.tree.map(jnp.asarray, self.algorithm.init(key))
            return state if self.plan.delayed is None else self.plan.delayed.start(state)

        # Agents one after the other: LAPACK's batched QR, which orthogonal initialisers would become under
        # vmap, can wait for itself for ever in XLA's CPU thread pool (jaxlib 0.10.2, two cores).
        state = init(key) if self.plan.num_seeds is None else jax.lax.map(init, key)
        # Strongly typed, so that the first run and the later ones are the same executable.
        return [
            leaf if keys.is_key(leaf.dtype) else jax.lax.convert_element_type(leaf, leaf.dtype)
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
      devices: all of JAX's if None, for some policies with the host's CPU (`placement.with_host`).
      num_seeds: independent agents in one program, spread over the devices; None for a single one.

    Raises:
      GraphError: the algorithm's graph is not well formed.
      PlanError: the policy cannot be carried out on these devices.
    """
    devices = with_host(policy, jax.devices()) if devices is None else devices
    if isinstance(devices, int):
        raise PlanError(f"devices={devices}: give a list, such as jax.devices()[:{devices}]")
    return Engine(algorithm, place(trace(algorithm), policy, list(devices), num_seeds), list(devices))
