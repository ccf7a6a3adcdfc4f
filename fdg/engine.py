"""`compile` turns an algorithm and a distribution policy into an `Engine`, which runs it on devices."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from fdg import jaxprs
from fdg.agents import Agents, checked_name, first_start, of_seeds
from fdg.arguments import check_arguments, checked_names, order_of, quoted
from fdg.batch.collective import Collective, unexplained
from fdg.errors import Elsewhere, FdgError, FdgWarning, host_errors, one_line
from fdg.garbage import infrequent_gc
from fdg.lowering import host_calls
from fdg.lowering.programs import with_sharding_constraints
from fdg.placing.digest import digests
from fdg.placing.place import place
from fdg.placing.plans import BETWEEN, Plan, SteppedPlan
from fdg.placing.policy import Policy, check_policy, checked_devices, with_host
from fdg.placing.staleness import algorithm_state
from fdg.processes import distributed
from fdg.processes.arrays import make_in_process, put
from fdg.running.interrupts import delayed_interrupt
from fdg.running.leaves import ReturnedArrays, as_array, copied, difference, typed_like, without_aliases
from fdg.running.many_programs import ManyPrograms
from fdg.running.metrics import PendingMetrics
from fdg.running.one_program import OneProgram
from fdg.running.timeline import Bar
from fdg.running.xla_options import jit
from fdg.tracing.graph import FDG
from fdg.tracing.trace import side_by_side, trace


class Engine:
    """A compiled algorithm. `state = init(seed)`, then `state, metrics = run(state, iterations)`.

    Attributes:
      algorithm: the algorithm; `Agents` if it was compiled for several agents.
      plan: the placement of fragments and the transfers between devices; `print` it. With sharded parameters,
        `compile` (or the first `run`) fills in its collectives.
      programs: the XLA programs.
      devices: the devices of `compile`, idle ones included.
      state_shape: the state's pytree of `jax.ShapeDtypeStruct` with shardings, for restoring checkpoints.
    """

    step = Elsewhere("state, metrics = engine.run(state, iterations=1)")
    learn = Elsewhere("state, metrics = engine.run(engine.init(seed=0), iterations=N)")
    train = Elsewhere("state, metrics = engine.run(engine.init(seed=0), iterations=N)")
    fit = Elsewhere("state, metrics = engine.run(engine.init(seed=0), iterations=N)")
    evaluate = Elsewhere(
        "engine.algorithm.evaluate(engine.algorithm_state(state), jax.random.key(0), episodes=N)"
    )
    predict = Elsewhere("run.policy(observation), with run = fdg.fit(algorithm, total_steps=N)")
    save = Elsewhere("fdg.fit(algorithm, total_steps=N, out=RUN), which saves the run there")

    def __init__(self, algorithm: Any, plan: Plan, devices: Sequence[jax.Device]):
        self.algorithm, self.plan, self.devices = algorithm, plan, tuple(devices)
        self._execution: OneProgram | ManyPrograms = (
            ManyPrograms(plan, self.devices)
            if isinstance(plan, SteppedPlan)
            else OneProgram(plan, self.devices)
        )
        self.programs = self._execution.programs
        self._shapes = [
            jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=shape.sharding, weak_type=leaf.weak_type)
            for shape, leaf in zip(self._execution.shapes, jax.tree.leaves(plan.graph.state), strict=True)
        ]
        self._structure = jax.tree.structure(plan.graph.state)
        self.state_shape = jax.tree.unflatten(self._structure, self._shapes)
        # A single program can only lay out its results on its own devices.
        self._is_single = isinstance(self._execution, OneProgram)
        self._jit_init = functools.partial(
            jit,
            platform=devices[0].platform if self._is_single else None,
            out_shardings=[shape.sharding for shape in self._shapes] if self._is_single else None,
        )
        self._init = self._jit_init(self._init_leaves)
        self._returned = ReturnedArrays()
        self._iterations = 0  # iterations of this engine that led to the returned state
        # The new state and the metrics to come of the last call, if Ctrl-C interrupted it; else None.
        self._interrupted: tuple[Any, PendingMetrics] | None = None

    @checked_names
    def init(self, seed: int = 0) -> Any:
        """The state `algorithm.init(jax.random.key(seed))`, laid out on the devices.

        Several agents (`fdg.agents`) start from the seeds `seed`, `seed + 1`, ...

        Raises:
          FdgError: `seed` is not an integer (it is a key, for example), or does not fit into int64.
          HostError: a function on the host has failed, for example while reading a file.
        """
        is_integer = isinstance(seed, int | np.integer) and not isinstance(seed, bool)
        if not is_integer or abs(seed) >= 2**63:
            raise FdgError(
                f"init({quoted(seed)}): give an integer below 2**63, such as init(0): a key is made from it"
            )
        with host_errors():
            leaves = self._make_leaves(first_start(self.algorithm, seed))
        if not self._is_single:
            leaves = [put(x, shape) for x, shape in zip(leaves, self._shapes, strict=True)]
        return jax.tree.unflatten(self._structure, typed_like(self._shapes, leaves))

    @checked_names
    def run(self, state: Any, iterations: int = 1) -> tuple[Any, dict[str, jax.Array]]:
        """Trains for a number of iterations, and waits for their metrics.

        Only the first call compiles; its program serves any number of iterations. To work meanwhile, such as
        logging the last metrics, call `start` instead.

        Args:
          state: from `init` or an earlier `run`, or any state of the same structure: arrays with another
            sharding are resharded, and aliased arrays are copied. It is donated: its arrays cannot be used
            afterwards.
          iterations: at least 1.

        Returns:
          The new state, and metrics: `[iterations]` each, or with several agents `[iterations, agents]`.

        Raises:
          FdgError: a state of another algorithm, or one that was already donated.
          HostError: a function on the host has failed; the message names the function and its fragment.
          KeyboardInterrupt: after Ctrl-C; `interrupted()` returns the results.
        """
        with host_errors():
            state, pending = self.start(state, iterations)
            try:
                return state, pending.result()
            except KeyboardInterrupt:
                self._interrupted = state, pending
                raise

    def start(self, state: Any, iterations: int = 1) -> tuple[Any, PendingMetrics]:
        """`run` without waiting for results: dispatches asynchronously and returns.

        If all fragments share their devices, the host dispatches a single program. Otherwise it dispatches
        the plan's programs one by one, and returns a few iterations before the devices are done. The new
        state can be passed to the next `start` at once; reading its values blocks.

        Args:
          state: as for `run`.
          iterations: at least 1.

        Returns:
          The new state, and the metrics to come: `.result()` waits, and returns what `run` does.

        Raises:
          FdgError: a state of another algorithm, or one that was already donated.
        """
        self._check_iterations(iterations, state=state)
        self.compile()
        placed = self._placed_leaves(state)
        self._count_iterations(iterations)
        self._interrupted = None
        result: tuple[Any, PendingMetrics] | None = None
        try:
            # Delay Ctrl-C: between donation and return, the caller has no usable state.
            with delayed_interrupt() as is_interrupted:
                leaves, metrics = self._execution.start(placed, iterations, is_interrupted)
                leaves = typed_like(self._shapes, leaves)
                self._returned = ReturnedArrays(leaves)
                result = jax.tree.unflatten(self._structure, leaves), metrics
        except KeyboardInterrupt:
            self._interrupted = result
            raise
        return result

    def interrupted(self) -> tuple[Any, dict[str, jax.Array]]:
        """The results of the last `run` or `start` if Ctrl-C interrupted it.

        A single program finishes all of its iterations. Programs that the host steps stop after the current
        iteration, so there may be fewer rows of metrics than requested.

        Returns:
          The state to continue from, and metrics, as `run` returns them. Waits for them.

        Raises:
          FdgError: the last call was not interrupted, or was interrupted before it donated its state.
        """
        if self._interrupted is None:
            raise FdgError(
                "no run was interrupted: continue from the state that the last run returned or, if it raised,"
                " from the state that you gave it"
            )
        state, pending = self._interrupted
        with host_errors():
            return state, pending.result()

    def compile(self, iterations: int | None = None) -> None:
        """Compiles all programs of `run` ahead of time, and connects the processes, which must all call it.

        Args:
          iterations: only validated, since one executable serves any number.

        Raises:
          FdgError: `iterations` is not a positive integer.
        """
        if iterations is not None:
            self._check_iterations(iterations)
        self._compile(lambda: None)

    def compile_and_init(self, seed: int = 0) -> Any:
        """The state of `init(seed)`; compiles the programs of `init` and of `run` at the same time."""
        return self._compile(lambda: self.init(seed))

    def _compile(self, meanwhile: Callable[[], Any]) -> Any:
        result = self._execution.compile(meanwhile)
        self._read_collectives()
        return result

    @staticmethod
    def _check_iterations(iterations: Any, **other_arguments: Any) -> None:
        is_integer = isinstance(iterations, int | np.integer) and not isinstance(iterations, bool)
        if not (is_integer and 1 <= iterations < 2**31):
            order = order_of(Engine.run, "iterations", {**other_arguments, "iterations": iterations})
            text = quoted(iterations)
            raise FdgError(f"iterations={text}: give an integer of at least 1, below 2**31{order}")

    def compile_init(self, seed: int = 0) -> None:
        """Deprecated: compiles the program of `init` without running it; write `compile_and_init`."""
        warnings.warn("Engine.compile_init is deprecated: write compile_and_init", DeprecationWarning, 2)
        traced = self._init.trace(first_start(self.algorithm, seed))
        if not host_calls.calls_host(jaxprs.open_jaxpr(traced.jaxpr).eqns):
            traced.lower().compile()

    def _read_collectives(self) -> None:
        """Adds the collectives of groups with sharded parameters, which cannot be predicted, to the plan.

        Reads them from the programs that this process compiled; other processes' collectives stay unknown.
        """
        if not self.plan.unpredicted:
            return
        compiled = {p.name: p for p in self.programs if p.is_here}
        programs = [
            dataclasses.replace(planned, collectives=compiled[planned.name].collectives(), read=True)
            if planned.group in self.plan.unpredicted and planned.name in compiled
            else planned
            for planned in self.plan.programs
        ]
        read = {planned.group for planned in programs if planned.read}
        unpredicted = tuple(group for group in self.plan.unpredicted if group not in read)
        self.plan = dataclasses.replace(self.plan, programs=tuple(programs), unpredicted=unpredicted)

    def algorithm_state(self, state: Any) -> Any:
        """The algorithm's state, for `algorithm.evaluate`: without the older parameters of staleness."""
        return algorithm_state(state)

    def unexplained(self) -> tuple[tuple[str, Collective], ...]:
        """Collectives of the compiled programs that the plan does not name, as (program, collective).

        Reads the programs with devices of this process, except those that only move data between groups. The
        result should be empty.
        """
        predicted: dict[str, list[Collective]] = {program.name: [] for program in self.plan.programs}
        for move in self.plan.movements:
            if move.program in predicted:
                fragments = () if move.source == BETWEEN else (move.source,)
                predicted[move.program].append(
                    Collective(move.how, move.bytes_per_crossing, move.crossings_per_iteration, fragments)
                )
        return tuple(
            (program.name, collective)
            for program in self.programs
            if program.is_here and not program.exchanges
            for collective in unexplained(program.collectives(), predicted.get(program.name, ()))
        )

    def is_in_order(self) -> bool:
        """Whether lowering guarantees that each device waits in at most one collective at a time.

        There is no guarantee for several programs, nor for sharded parameters, whose collectives XLA chooses.
        """
        return len(self.programs) == 1 and not any(group.shards for group in self.plan.groups)

    def memory(self) -> dict[str, int]:
        """XLA's peak bytes per device of each group, the maximum over its programs. Calls `compile`.

        Covers groups with devices of this process. `Plan.memory` estimates it without compiling.
        """
        self.compile()
        groups = {planned.name: planned.group for planned in self.plan.programs}
        peak_bytes: dict[str, int] = {}
        for program in self.programs:
            if program.is_here and (group := groups.get(program.name)):
                peak_bytes[group] = max(peak_bytes.get(group, 0), int(program.cost()["peak_bytes"]))
        return peak_bytes

    @property
    def moved_bytes(self) -> int:
        """Bytes that all calls of `run` have moved between groups; collectives do not count."""
        return self._execution.moved_bytes

    def busy_seconds(self, waits: bool = True) -> dict[str, float]:
        """Seconds for which each group's devices have run programs. Empty if there is one group.

        Many short iterations are sampled, and the total is extrapolated (`running.timeline`).

        Args:
          waits: whether to wait for running programs; otherwise only finished ones count.
        """
        timeline = self._execution.timeline
        if timeline is None:
            return {}
        return timeline.busy_at_end() if waits else timeline.busy_so_far()

    def timeline(self, state: Any, iterations: int = 4) -> list[Bar]:
        """Trains, and records when each program ran on which group. Empty if there is one group.

        All processes must call it, and each gets the bars of all processes.

        Args:
          state: as for `run`; it is copied and stays usable.
          iterations: at least 1.
        """
        timeline = self._execution.timeline
        self._check_iterations(iterations, state=state)
        self.compile()
        if timeline is None:
            return []
        state = copied(state)
        timeline.bars = []
        try:
            jax.block_until_ready(self.run(state, iterations))
        finally:
            bars = timeline.stop_recording()
        return sorted(
            (Bar(*bar) for bars in distributed.exchange(bars) for bar in bars), key=lambda bar: bar.begin
        )

    def _make_leaves(self, key: Any) -> Sequence[jax.Array]:
        """The state's leaves; host calls in `init` run in one process only."""
        traced = self._init.trace(key)
        if not host_calls.calls_host(jaxprs.open_jaxpr(traced.jaxpr).eqns):
            return self._init(key)
        jaxpr = host_calls.guard(traced.jaxpr, "init", _end_other_processes)
        init_guarded = self._jit_init(core.jaxpr_as_fun(jaxpr))
        leaves = jax.tree.leaves(key)  # in a sweep, `key` has hyperparameters too
        groups = [call.group for call, _ in self.plan.calls() if host_calls.calls_host(call.equations)]
        if distributed.count() == 1 or not groups:
            return init_guarded(*leaves)
        # Host environments are created only in the process that steps them.
        group = next(group for group in self.plan.groups if group.name == groups[0])
        device: Any = self.devices[group.devices[0]]
        return make_in_process(device.process_index, lambda: init_guarded(*leaves), self._shapes)

    def _init_leaves(self, key):
        """The leaves of the initial state, with sharding constraints."""
        leaves = functools.partial(initial_leaves, self.algorithm, self.plan)
        jaxpr = with_sharding_constraints(jax.make_jaxpr(leaves)(key), self.plan, self.devices)
        return core.jaxpr_as_fun(jaxpr)(*jax.tree.leaves(key))

    def _placed_leaves(self, state: Any) -> list[jax.Array]:
        """Checks a state, and returns its leaves with the engine's shardings and without aliases."""
        try:
            leaves, structure = jax.tree.flatten(state)
        except Exception as error:  # a user's container may raise anything
            raise self._state_error(state, f"JAX cannot flatten it ({one_line(error)})") from error
        if structure != self._structure:  # type: ignore[operator]
            raise self._state_error(state)
        placed = []
        for value, shape in zip(leaves, self._shapes, strict=True):
            if (leaf := as_array(value)) is None:
                raise self._state_error(state)
            if leaf.is_deleted():
                can_continue = self._interrupted is not None
                raise FdgError(
                    "this state was donated to an earlier run: continue from the state that it returned"
                    + (", or, since it was interrupted, from engine.interrupted()" if can_continue else "")
                )
            if leaf.shape != shape.shape or leaf.dtype != shape.dtype:
                raise self._state_error(state)
            is_placed = leaf.sharding.is_equivalent_to(shape.sharding, leaf.ndim)
            placed.append(leaf if is_placed else jax.device_put(leaf, shape.sharding))
        # Leaves that this engine returned have no aliases; checking for aliases would wait for them.
        if self._returned.matches(placed):
            return placed
        self._iterations = 0
        return without_aliases(placed)

    def _state_error(self, state: Any, reason: str | None = None) -> FdgError:
        """The error for a value that is not a state of this engine; `reason` says what differs."""
        expected: Any = jax.tree.structure((self.state_shape,))
        if reason is None and isinstance(state, tuple) and expected == jax.tree.structure(state[:1]):
            return FdgError("this is the pair (state, metrics) that run returns: give its first element")
        return FdgError(
            f"this is not a state of {self.plan.graph.name}: {reason or difference(state, self.state_shape)}:"
            f" give a state from init or run of an engine with the same algorithm and sizes"
        )

    def _count_iterations(self, iterations: int) -> None:
        """Warns once when training passes `algorithm.learns_until`, after which the step size is zero."""
        last_iteration = getattr(self.algorithm, "learns_until", None)
        previous, self._iterations = self._iterations, self._iterations + iterations
        if last_iteration is not None and previous <= last_iteration < self._iterations:
            warnings.warn(
                f"{self.plan.graph.name} learns for {last_iteration:,} iterations (its total_steps); then its"
                f" step size is zero: give more total_steps, or anneal_learning_rate=False",
                FdgWarning,
                stacklevel=5,
            )

    def __repr__(self) -> str:
        return f"<Engine {self.plan.graph.name} under {self.plan.policy} on {len(self.devices)} devices>"


def initial_leaves(algorithm: Any, plan: Plan, key: Any) -> list[jax.Array]:
    """The leaves of the state in which an algorithm starts, with the older parameters of staleness."""
    state = jax.tree.map(jnp.asarray, algorithm.init(key))
    return jax.tree.leaves(state if plan.delayed is None else plan.delayed.start(state))


def _end_other_processes(line: str, status: int) -> None:
    """Ends the other processes of the run when a host function ends this process."""
    distributed.abandon(f"error: {line}", status, f"failed: {line}")


def _graph_of(algorithm: Any, graph: FDG) -> FDG:
    """Checks a given graph, and returns it for all agents of the algorithm."""
    count = algorithm.count if isinstance(algorithm, Agents) else None
    graph = graph if graph.agents is not None else side_by_side(graph, count)
    if graph.agents != count:
        expected, actual = ("one agent" if n is None else f"{n} agents" for n in (count, graph.agents))
        raise FdgError(f"graph: it has {actual}, but the algorithm has {expected}: give fdg.trace(algorithm)")
    return graph


@checked_names
@infrequent_gc()
def compile(
    algorithm: Any,
    policy: Policy,
    devices: int | Sequence[jax.Device] | None = None,
    num_seeds: int | None = None,
    graph: FDG | None = None,
) -> Engine:
    """Compiles an algorithm under a distribution policy.

    Args:
      algorithm: any object with `init(key) -> state` and `iterate(state) -> (state, metrics)`.
      policy: a value of `policies`, such as `policies.GPUOnly()`.
      devices: the devices, or their number; None for all of JAX's, and with some policies the host's CPU too.
      num_seeds: the number of agents, distributed over the devices (`fdg.agents`); None for the algorithm as
        it is.
      graph: the algorithm's graph, if it was traced already (`fdg.trace`).

    Raises:
      GraphError: the algorithm's graph is invalid.
      PlanError: the policy cannot be carried out on these devices.
      FdgError: another process has a different graph or plan.
    """
    check_policy(policy)
    devices = with_host(policy, jax.devices()) if devices is None else checked_devices(devices)
    check_arguments(compile, {"graph": graph})
    checked_name(algorithm)
    agents = of_seeds(algorithm, num_seeds)
    graph = trace(agents) if graph is None else _graph_of(agents, side_by_side(graph, num_seeds))
    graph = dataclasses.replace(graph, jaxpr=host_calls.guard(graph.jaxpr, last_words=_end_other_processes))
    plan = place(graph, policy, list(devices))
    if distributed.count() > 1:
        distributed.check_alike(digests(plan))
    return Engine(agents, plan, list(devices))
