"""Replays iterations of a run from one agent's state, for `fdg.diff` and `fdg.record`."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

import fdg
from fdg import jaxprs, keys
from fdg.errors import FdgError, kind_of
from fdg.lowering import host_calls
from fdg.placing.staleness import DelayedState
from fdg.training.loading import StoredRun
from fdg.training.run import Run
from fdg.training.run_directory import device_count, read_summary
from fdg.training.stepping import Border, Stepper


class Replay:
    """Replays a run fragment by fragment, from one agent's state.

    With `may_place`, the run's policy places the fragments if the run's state has no axis of agents.
    Otherwise they run on one device.
    """

    def __init__(self, run: Run, agent: int, trust: bool, may_place: bool = True):
        self.notes: list[str] = []
        graph, plan, devices = fdg.trace(run.algorithm), None, list(jax.devices())
        state = run._state_of(agent)
        may_place = may_place and run.path is not None and run.agents is None
        if may_place and run.path is not None and run.config.get("policy"):
            policy = StoredRun.open(run.path, trust=trust, algorithm=run.algorithm).policy
            count = device_count(run.config, read_summary(run.path)) or len(devices)
            if count <= len(devices):
                devices = devices[:count]
                plan = fdg.place(graph, policy, devices)
                graph = plan.graph
                if plan.delayed is not None:
                    delayed = plan.delayed.start(state)
                    state = delayed if run._history is None else DelayedState(state, run._history)
            else:
                self.notes.append(
                    f"devices: {run.path} had {count}, and was replayed on one of the {len(devices)} here"
                )
        if plan is None and (run.config.get("staleness") or run.config.get("lag")):
            self.notes.append(f"staleness: {run.path or 'the run in memory'} was replayed without it")
        if host_calls.calls_host(jaxprs.open_jaxpr(graph.jaxpr).eqns):
            self.notes.append(
                "host: environments on the host begin again in a replay, which may cause differences"
            )
        graph = dataclasses.replace(graph, jaxpr=host_calls.guard(graph.jaxpr))
        plan = None if plan is None else dataclasses.replace(plan, graph=graph)
        self.leaves: list[Any] = jax.tree.leaves(state)
        self.stepper, self._shapes = Stepper(graph, plan, devices), jax.tree.leaves(graph.state)

    def borders(self, start: int, end: int) -> Iterator[Border]:
        """Yields the state after iteration `start`, and every border of the iterations up to `end`."""
        return self.stepper.borders(start, end, self.leaves)

    def replace_state(self, recorded: Border) -> None:
        """Replaces the state by a recorded one; raises `FdgError` if its arrays do not match."""
        arrays, own_arrays = recorded.arrays, self.stepper.state(recorded.iteration, self.leaves).arrays
        for name in [*arrays, *own_arrays]:
            stored, replayed = (kind_of(x[name]) if name in x else "absent" for x in (arrays, own_arrays))
            if stored != replayed:
                raise FdgError(
                    f"the recording belongs to another state: {name} is {stored} in it and {replayed} here:"
                    " give a run with the same algorithm and sizes"
                )
        recorded_leaves = zip(arrays.values(), self._shapes, strict=True)
        self.leaves = [keys.from_data(value.array, leaf) for value, leaf in recorded_leaves]
