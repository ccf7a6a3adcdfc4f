"""Starts the processes of a run on a Ray cluster, one on each node, and waits for them."""

import contextlib
import dataclasses
import math
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fdg import ctrl_c, ray_cluster
from fdg.addresses import join_address
from fdg.errors import FdgError, RunError, one_line
from fdg.launching import ray_host
from fdg.launching.here import join_flags
from fdg.launching.restarting import REFUSED, STOP_SECONDS, Ending, Process, ending_of
from fdg.process_exit import LAUNCHER_PIPE
from fdg.processes import lines, ports

_FOLLOW_SECONDS = 1.0  # the duration of one request for a host's output
_SILENT_SECONDS = 40.0  # a host that does not answer for this time counts as lost
_RESERVE_SECONDS = 15.0  # time limit of a reservation, which may wait in vain for a node that is lost
_RETRY_SECONDS = 150.0  # time limit of a restart to find nodes
_STOPPED_SECONDS = 10.0  # time limit for killed actors to end
_NODE_LOST = "its node was lost"  # `Process.how`
_ACCELERATORS = ("GPU", "TPU")  # Ray's names


@dataclasses.dataclass
class _StartedProcess:
    """A process of the run, and the actor that watches it."""

    index: int
    actor: Any
    node: str  # Ray's ID of the node
    host: str
    pid: int = 0
    silent: float = 0.0  # seconds without an answer of the actor, while the launcher was not suspended

    @property
    def who(self) -> str:
        return f"process {self.index} (host {self.host}, pid {self.pid})"


class OnRay:
    """A `restarting.Launcher` that starts a process on each node of a Ray cluster.

    `nodes` is the number of nodes; None: all nodes with room for a process. Ray reserves `cpus` CPUs for each
    process.
    """

    def __init__(self, address: str | None = None, nodes: int | None = None, cpus: float = 1.0):
        self._ray = ray_cluster.connect(address)
        self._cpus, self._group, self.count = cpus, None, 0
        self._bundle: dict[str, float] = {}
        usable = self._usable_nodes()
        if nodes is not None and nodes > len(usable):
            needed, texts = self._process_resources(), []
            for node in self._alive_nodes():
                amounts = ", ".join(f"{node['Resources'].get(name, 0):g} {name}" for name in needed)
                texts.append(f"{node.get('NodeManagerHostname') or node['NodeID'][:8]}: {amounts}")
            resources = ", ".join(texts) or "no nodes"
            fewer = f"use --nodes {len(usable)}, or " if usable else ""
            raise FdgError(
                f"--nodes {nodes}: {len(usable)} nodes of the Ray cluster at {self.address} have room (it has"
                f" {resources}): {fewer}add nodes with `ray start --address {self.address}`"
            )
        if not usable:
            raise FdgError(
                f"no node of the Ray cluster at {self.address} has {cpus:g} CPUs: give fewer --cpus-per-node"
            )
        self._max_nodes = nodes or len(usable)

    @property
    def address(self) -> str:
        """The cluster's address."""
        return self._ray.get_runtime_context().gcs_address

    def reserve(self, first: bool) -> int:
        """Reserves resources for a process on each node; later calls use the nodes that are left."""
        from ray.util.placement_group import placement_group, remove_placement_group

        self._release()
        deadline = time.monotonic() + (0.0 if first else _RETRY_SECONDS)
        while True:
            bundle = self._bundle = self._process_resources()
            count = min(self._max_nodes, len(self._usable_nodes()))
            if count:
                group = placement_group([bundle] * count, strategy="STRICT_SPREAD")
                if group.wait(_RESERVE_SECONDS):
                    self._group, self.count = group, count
                    return count
                remove_placement_group(group)
            if time.monotonic() >= deadline:
                break
            time.sleep(1)
        resources = " and ".join(f"{amount:g} {name}" for name, amount in bundle.items())
        if first:
            needed = count or self._max_nodes
            raise FdgError(
                f"the nodes of the Ray cluster at {self.address} are busy: the run needs {needed} nodes"
                f" with {resources} free on each: see `ray status`, or use fewer --nodes"
            )
        raise RunError(
            f"no node of the Ray cluster at {self.address} has {resources} free, so the run cannot restart"
        )

    def run(self, words: Sequence[str]) -> Ending:
        """Starts `fdg.train` on each reserved node and forwards its output until all processes have ended."""
        # `_follow` forwards the first two signals, and the processes save before they end.
        with ctrl_c.collected_signals(lambda number: os._exit(128 + number), 2) as signals:
            started: list[_StartedProcess] = []
            try:
                started, first_host = self._start_actors()
                failed_process = self._start(started, first_host, words)
                ended_processes = [failed_process] if failed_process else self._follow(started, signals)
            except self._ray.exceptions.RayError as error:
                ended_processes = [Process("the Ray cluster", None, one_line(error))]
            finally:
                self._stop(started)
                self._release()
            return ending_of(ended_processes, bool(signals))

    def close(self) -> None:
        """Disconnects from the cluster."""
        self._release()
        self._ray.shutdown()

    def _start_actors(self) -> tuple[list[_StartedProcess], Mapping[str, Any]]:
        """Starts an actor on each reserved node.

        Returns the processes, and `ray_host.Host.describe` of the first host, where process 0 listens.
        """
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actor_class = self._ray.remote(ray_host.Host)
        self._ray.cloudpickle.register_pickle_by_value(ray_host)
        options = {
            "num_cpus": self._bundle["CPU"],
            "num_gpus": self._bundle.get("GPU", 0),
            "resources": {"TPU": self._bundle["TPU"]} if "TPU" in self._bundle else None,
            "max_concurrency": 4,
            "max_restarts": 0,
        }
        strategies = [PlacementGroupSchedulingStrategy(self._group, i) for i in range(self.count)]
        actors = [actor_class.options(**options, scheduling_strategy=s).remote() for s in strategies]
        places = self._ray.get([actor.describe.remote() for actor in actors])
        started = [
            _StartedProcess(i, actor, place["node"], place["host"])
            for i, (actor, place) in enumerate(zip(actors, places, strict=True))
        ]
        return started, places[0]

    def _start(
        self, started: Sequence[_StartedProcess], first_host: Mapping[str, Any], words: Sequence[str]
    ) -> Process | None:
        """Starts all processes; returns a process that could not be started, or None."""
        host = "localhost" if ports.is_local(first_host["ip"]) else first_host["ip"]
        address = join_address(host, first_host["port"])
        environment = {
            **ray_cluster.inherited_variables(os.environ),
            lines.KEY_VARIABLE: secrets.token_hex(32),
            LAUNCHER_PIPE: "1",
            "RAY_ADDRESS": first_host["address"],  # for fleets of environments
        }
        replies = []
        for process in started:
            flags = join_flags(address, len(started), process.index) if len(started) > 1 else []
            command = ["-m", "fdg.train", *words, *flags]
            replies.append(process.actor.start.remote(command, environment, os.getcwd()))
        for process, reply in zip(started, replies, strict=True):
            process.pid, refusal = self._ray.get(reply)
            if refusal:
                return Process(f"process {process.index} (host {process.host})", REFUSED, refusal)
        return None

    def _follow(self, started: Sequence[_StartedProcess], signals: Sequence[int]) -> list[Process]:
        """Forwards the output until all processes have ended; returns how they ended, in order of time."""
        ended_processes: list[Process] = []
        waiting = {_request_output(process): process for process in started}
        deadline, num_sent, last_poll = math.inf, 0, time.monotonic()
        while waiting and time.monotonic() < deadline:
            ready, _ = self._ray.wait(list(waiting), timeout=_FOLLOW_SECONDS)
            last_poll, elapsed = time.monotonic(), time.monotonic() - last_poll
            for signal_number in signals[num_sent:]:
                num_sent += 1
                for process in waiting.values():
                    process.actor.signal.remote(signal_number)
            for request in ready:
                process = waiting.pop(request)
                process_end = self._print_output(process, request)
                if process_end is None:
                    waiting[_request_output(process)] = process
                else:
                    ended_processes.append(process_end)
            for request, process in list(waiting.items()):
                # Answers do not arrive while this process is suspended.
                process.silent += min(elapsed, 2 * _FOLLOW_SECONDS)
                if process.silent >= _SILENT_SECONDS:
                    del waiting[request]
                    how = f"its node has not answered for {_SILENT_SECONDS:.0f} s"
                    ended_processes.append(Process(process.who, None, how))
            if deadline == math.inf and any(process_end.status != 0 for process_end in ended_processes):
                deadline = time.monotonic() + STOP_SECONDS
        # Processes that do not end in time are killed later. If an actor does not answer, its process has
        # probably caused the failure, so it is returned too.
        silent = [process for process in waiting.values() if process.silent > STOP_SECONDS / 2]
        ended_processes += [Process(process.who, None, "its node does not answer") for process in silent]
        # Ray notices the loss of an actor shortly before it notices the loss of the node.
        alive = {node["NodeID"] for node in self._alive_nodes()}
        lost = {process.who for process in started if process.node not in alive}
        return [
            dataclasses.replace(process, how=_NODE_LOST) if process.who in lost else process
            for process in ended_processes
        ]

    def _stop(self, started: Sequence[_StartedProcess]) -> None:
        """Kills the remaining processes, which hold the lock of the run directory."""
        stopping = [process.actor.stop.remote() for process in started]
        self._ray.wait(stopping, num_returns=len(stopping), timeout=_STOPPED_SECONDS)
        for process in started:
            self._ray.kill(process.actor)

    def _print_output(self, process: _StartedProcess, request: Any) -> Process | None:
        """Prints a process's output; returns how it ended, or None if it runs."""
        try:
            output, status = self._ray.get(request)
        except self._ray.exceptions.RayError as error:
            how = _NODE_LOST if "node has died" in str(error) else "its Ray actor was killed"
            return Process(process.who, None, how)
        process.silent = 0.0
        for stream, line in output:
            target = sys.stdout if stream == "out" else sys.stderr
            print(f"[{process.host} {process.index}] {line}", file=target, flush=True)
        return None if status is None else Process(process.who, status)

    def _alive_nodes(self) -> list[Mapping[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _process_resources(self) -> dict[str, float]:
        """The resources of a process: CPUs, and as many accelerators as every node with accelerators has.

        If the cluster has several kinds of accelerators, only the kind that most nodes have counts.
        """
        nodes = [node["Resources"] for node in self._alive_nodes()]
        amounts = {name: [has[name] for has in nodes if has.get(name)] for name in _ACCELERATORS}
        kind = max(amounts, key=lambda name: len(amounts[name]))
        return {"CPU": self._cpus, **({kind: min(amounts[kind])} if amounts[kind] else {})}

    def _usable_nodes(self) -> list[Mapping[str, Any]]:
        """The nodes with room for a process, whether or not others use them now."""
        needed = self._process_resources().items()
        nodes = [(node, node["Resources"]) for node in self._alive_nodes()]
        return [node for node, has in nodes if all(has.get(name, 0) >= amount for name, amount in needed)]

    def _release(self) -> None:
        from ray.util.placement_group import remove_placement_group

        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(Exception):  # the group may be lost with its node
                remove_placement_group(group)


def _request_output(process: _StartedProcess) -> Any:
    """Asks for the next output of a process; returns Ray's reference to the answer."""
    return process.actor.follow.remote(_FOLLOW_SECONDS)
