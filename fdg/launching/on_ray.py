"""Runs the processes of a run on a Ray cluster: one on each node, in a placement group."""

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
from fdg.errors import FdgError, RunError, one_line
from fdg.launching import ray_host
from fdg.launching.here import triple
from fdg.launching.restarting import REFUSED, STOP_SECONDS, Ending, Process, ending_of
from fdg.process_exit import TIED
from fdg.processes import lines, ports

_FOLLOW_SECONDS = 1.0  # of one poll of a host's output
_SILENT_SECONDS = 40.0  # after which a host that does not answer counts as gone
_RESERVE_SECONDS = 15.0  # until all nodes have made room; Ray may not know yet that one is gone
_RETRY_SECONDS = 150.0  # time limit of a restart to find nodes
_STOPPED_SECONDS = 10.0  # until killed actors are gone
_NODE_LOST = "its node was lost"
_ACCELERATORS = ("GPU", "TPU")


@dataclasses.dataclass
class _Started:
    """A process of the run, and the actor that watches it."""

    index: int
    actor: Any
    node: str  # Ray's name of the node
    host: str
    pid: int = 0
    silent: float = 0.0  # seconds without an answer of its actor, while this process was awake

    @property
    def who(self) -> str:
        return f"process {self.index} (host {self.host}, pid {self.pid})"


class OnRay:
    """A launcher that starts a process on each node of a Ray cluster.

    `nodes=None` takes all that have room for a process; `cpus` are those that Ray reserves for one.
    """

    def __init__(self, address: str | None = None, nodes: int | None = None, cpus: float = 1.0):
        self._ray = ray_cluster.connect(address)
        self._cpus, self._group, self.count = cpus, None, 0
        self._bundle: dict[str, float] = {}
        usable = self._usable()
        if nodes is not None and nodes > len(usable):
            there = ", ".join(_described(node, self._wanted()) for node in self._alive()) or "none"
            raise FdgError(
                f"--nodes {nodes}: {len(usable)} nodes of the Ray cluster at {self.address} have room"
                f" ({there}): use --nodes {max(1, len(usable))}, or add nodes with"
                f" `ray start --address {self.address}`"
            )
        if not usable:
            raise FdgError(
                f"no node of the Ray cluster at {self.address} has {cpus:g} CPUs: see `ray status`"
            )
        self._most = nodes or len(usable)

    @property
    def address(self) -> str:
        """The cluster's address."""
        return self._ray.get_runtime_context().gcs_address

    def reserve(self, first: bool) -> int:
        """Reserves room for a process on each node; in later calls, on the remaining nodes."""
        from ray.util.placement_group import placement_group, remove_placement_group

        self._release()
        deadline = time.monotonic() + (0.0 if first else _RETRY_SECONDS)
        while True:
            bundle = self._bundle = self._wanted()
            count = min(self._most, len(self._usable()))
            if count:
                group = placement_group([bundle] * count, strategy="STRICT_SPREAD")
                if group.wait(_RESERVE_SECONDS):
                    self._group, self.count = group, count
                    return count
                remove_placement_group(group)
            if time.monotonic() >= deadline:
                break
            time.sleep(1)
        wanted = " and ".join(f"{amount:g} {name}" for name, amount in bundle.items())
        if first:
            raise FdgError(
                f"the nodes of the Ray cluster at {self.address} are busy: {count} of them with {wanted}"
                f" free each are wanted: see `ray status`, or use fewer --nodes"
            )
        raise RunError(f"no node of the Ray cluster at {self.address} has {wanted} free to go on with")

    def run(self, words: Sequence[str]) -> Ending:
        """Starts `fdg.train` on each reserved node and forwards its output until all have ended."""
        with ctrl_c.collected_signals(_end, 2) as asked:  # forwarded to the processes, which save first
            started: list[_Started] = []
            try:
                started, meeting = self._place()
                failed = self._start(started, meeting, words)
                ended = [failed] if failed else self._follow(started, asked)
            except self._ray.exceptions.RayError as error:
                ended = [Process("the Ray cluster", None, one_line(error))]
            finally:
                self._stop(started)
                self._release()
            return ending_of(ended, bool(asked))

    def close(self) -> None:
        """Disconnects from the cluster."""
        self._release()
        self._ray.shutdown()

    def _place(self) -> tuple[list[_Started], Mapping[str, Any]]:
        """An actor on each reserved node, and the address of the first one, where the processes meet."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = self._bundle
        actor_class = self._ray.remote(ray_host.Host)
        self._ray.cloudpickle.register_pickle_by_value(ray_host)
        actors = [
            actor_class.options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                resources={"TPU": bundle["TPU"]} if "TPU" in bundle else None,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, i),
                max_concurrency=4,
                max_restarts=0,
            ).remote()
            for i in range(self.count)
        ]
        places = self._ray.get([actor.describe.remote() for actor in actors])
        started = [
            _Started(i, actor, place["node"], place["host"])
            for i, (actor, place) in enumerate(zip(actors, places, strict=True))
        ]
        return started, places[0]

    def _start(
        self, started: Sequence[_Started], first: Mapping[str, Any], words: Sequence[str]
    ) -> Process | None:
        """Starts all processes; returns one that could not be started, or None."""
        host = "localhost" if ports.is_local(first["ip"]) else first["ip"]
        address = f"[{host}]:{first['port']}" if ":" in host else f"{host}:{first['port']}"
        environment = {
            **ray_cluster.inherited_variables(os.environ),
            lines.KEY_VARIABLE: secrets.token_hex(32),
            TIED: "1",
            "RAY_ADDRESS": first["address"],  # for fleets of environments
        }
        replies = []
        for one in started:
            mine = triple(address, len(started), one.index) if len(started) > 1 else []
            command = ["-m", "fdg.train", *words, *mine]
            replies.append(one.actor.start.remote(command, environment, os.getcwd()))
        for one, reply in zip(started, replies, strict=True):
            one.pid, refusal = self._ray.get(reply)
            if refusal:
                return Process(f"process {one.index} (host {one.host})", REFUSED, refusal)
        return None

    def _follow(self, started: Sequence[_Started], asked: Sequence[int]) -> list[Process]:
        """Forwards the output until all have ended; returns how each ended, in that order."""
        ended: list[Process] = []
        waiting = {self._look(one): one for one in started}
        deadline, sent, before = math.inf, 0, time.monotonic()
        while waiting and time.monotonic() < deadline:
            ready, _ = self._ray.wait(list(waiting), timeout=_FOLLOW_SECONDS)
            before, passed = time.monotonic(), time.monotonic() - before
            for number in asked[sent:]:
                sent += 1
                for one in waiting.values():
                    one.actor.signal.remote(number)
            for look in ready:
                one = waiting.pop(look)
                process = self._told(one, look)
                if process is None:
                    waiting[self._look(one)] = one
                else:
                    ended.append(process)
            for look, one in list(waiting.items()):
                # a suspended process could not receive answers
                one.silent += min(passed, 2 * _FOLLOW_SECONDS)
                if one.silent < _SILENT_SECONDS:
                    continue
                del waiting[look]
                ended.append(Process(one.who, None, f"its node has not answered for {_SILENT_SECONDS:.0f} s"))
            if deadline == math.inf and any(process.status != 0 for process in ended):
                deadline = time.monotonic() + STOP_SECONDS
        # Processes that do not end in time are killed; a silent actor's process is the likely cause.
        for one in waiting.values():
            if one.silent > STOP_SECONDS / 2:
                ended.append(Process(one.who, None, "its node does not answer"))
        # Ray notices that an actor is gone a moment before it knows that the node is.
        alive = {node["NodeID"] for node in self._alive()}
        lost = {one.who for one in started if one.node not in alive}
        return [dataclasses.replace(one, how=_NODE_LOST) if one.who in lost else one for one in ended]

    def _stop(self, started: Sequence[_Started]) -> None:
        """Kills the remaining processes, which hold the lock of the run directory."""
        stopping = [one.actor.stop.remote() for one in started]
        self._ray.wait(stopping, num_returns=len(stopping), timeout=_STOPPED_SECONDS)
        for one in started:
            self._ray.kill(one.actor)

    def _look(self, one: _Started) -> Any:
        return one.actor.follow.remote(_FOLLOW_SECONDS)

    def _told(self, one: _Started, look: Any) -> Process | None:
        """Prints a process's output; returns how it ended, or None if it is running."""
        try:
            said, status = self._ray.get(look)
        except self._ray.exceptions.RayError as error:
            how = _NODE_LOST if "node has died" in str(error) else "its Ray actor was killed"
            return Process(one.who, None, how)
        one.silent = 0.0
        for stream, line in said:
            out = sys.stdout if stream == "out" else sys.stderr
            print(f"[{one.host} {one.index}] {line}", file=out, flush=True)
        return None if status is None else Process(one.who, status)

    def _alive(self) -> list[Mapping[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _wanted(self) -> dict[str, float]:
        """The resources of a process: all accelerators of a node, or its CPUs."""
        wanted = {"CPU": self._cpus}
        for name in _ACCELERATORS:
            amounts = [node["Resources"].get(name, 0) for node in self._alive()]
            if any(amounts):
                wanted[name] = min(amount for amount in amounts if amount)
        return wanted

    def _usable(self) -> list[Mapping[str, Any]]:
        wanted = self._wanted()
        return [
            node
            for node in self._alive()
            if all(node["Resources"].get(name, 0) >= amount for name, amount in wanted.items())
        ]

    def _release(self) -> None:
        from ray.util.placement_group import remove_placement_group

        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(Exception):  # it may have gone with its node
                remove_placement_group(group)


def _described(node: Mapping[str, Any], wanted: Mapping[str, float]) -> str:
    has = ", ".join(f"{node['Resources'].get(name, 0):g} {name}" for name in wanted)
    return f"{node.get('NodeManagerHostname') or node['NodeID'][:8]}: {has}"


def _end(number: int) -> None:
    os._exit(128 + number)
