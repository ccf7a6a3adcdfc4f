"""Chooses what a job leaves open: the policy, the lag, the devices, and the threads of host devices.

The choice replaces `auto` in the job and in its `config.json`.

The default policy is `auto`, chosen by predictions alone. The choice for a job on a machine is cached with
its compiled programs, so a second start looks it up.
"""

import contextlib
import dataclasses
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

import fdg
import policies
from fdg import costs, files, jaxprs
from fdg.cores import usable_cores
from fdg.costs.candidate_times import choose_by_timing
from fdg.costs.choosing import TIE, Choice, lags
from fdg.costs.machine import cluster_for
from fdg.errors import FdgError, listed
from fdg.lowering.host_calls import calls_host
from fdg.placing.policy import with_host
from fdg.placing.staleness import micro_batches
from fdg.processes import distributed
from fdg.running.host_devices import make_host_devices, restart_cpu_backend, threads_for
from fdg.running.program_cache import kept_in
from fdg.tracing.trace import side_by_side
from fdg.training.description import describe_policy, rebuild_policy
from fdg.training.job import Job
from fdg.training.name_resolver import CALLER
from fdg.training.settings import AUTO_LAG, nearest_multiples
from fdg.training.sweep import without_sweep

ONE_THREAD_FLOPS = 12_000_000  # a largest operation with fewer FLOPs gains nothing from a second thread


def devices_of(job: Job, graph: fdg.FDG) -> tuple[list[jax.Device], str]:
    """A job's devices, and the reason for their number if `--devices` is absent (else "").

    Host devices share one thread pool. It is sized here, before anything is compiled
    (`running.host_devices`).
    """
    devices, count, why = available_devices(job.devices), job.devices_chosen or job.devices, ""
    on_cpu = devices[0].platform == "cpu"
    if count is None and job.cores is not None and on_cpu:
        count, why = quickest_count(job, graph, devices[: job.cores])
    if count is not None and on_cpu and distributed.count() == 1:
        if threads := threads_of(side_by_side(graph, job.agents), job.policy, count):
            restart_cpu_backend(count, threads)
        devices = available_devices(None)
    return with_host(job.policy, devices[:count]), why


def quickest_count(job: Job, graph: fdg.FDG, devices: Sequence[jax.Device]) -> tuple[int, str]:
    """The number of host devices that is predicted to be fastest, and the reason."""
    if calls_host(jaxprs.open_jaxpr(graph.jaxpr).eqns):
        return 1, "1: a program that calls Python functions on the host runs on one device"
    choice = policies.auto(
        job.algorithm, devices, policies=[job.policy], num_seeds=job.agents, graph=graph, further=False
    )
    return choice.devices, choice.reason


def threads_of(graph: fdg.FDG, policy: Any, devices: int) -> int | None:
    """Size of XLA's thread pool for a job on host devices; None to leave the pool as it is.

    A program of one group is lowered so that each device waits in one collective at a time
    (`lowering.ordering`); then one thread for each device is enough.

    A single device with small operations gets one thread: passing operations between threads takes longer
    than running them in parallel saves. Milliseconds of an iteration of PPO on CartPole-v1, with one thread
    and with four: 1.9 and 2.4 with 4 environments, 10.5 and 12.2 with 32, 22 and 20 with 64.
    """
    jaxpr = jaxprs.open_jaxpr(graph.jaxpr)
    if calls_host(jaxpr.eqns):
        return None
    if devices > 1:
        placed = {} if graph.agents is not None else policy.place(["cpu"] * devices)
        groups = {placed[f.role] for f in graph.fragments if f.role in placed}
        # Collectives of several programs are unordered; with sharded parameters, their order is unknown.
        in_order = len(groups) <= 1 and not any(group.shards for group in groups)
        return threads_for(devices, in_order)
    return 1 if (graph.agents or 1) * jaxprs.largest_cost(jaxpr) < ONE_THREAD_FLOPS else usable_cores()


def available_devices(count: int | None) -> list[jax.Device]:
    """The first `count` devices, or all; with several processes, the same number from each.

    On a CPU, configures that many host devices, unless JAX has started already.
    """
    processes = distributed.count()
    if count is not None:
        make_host_devices(count // processes)
    devices = jax.devices()
    if count is None:
        return devices
    if count > len(devices):
        kind = devices[0].platform
        fix = "" if kind == "cpu" else ", or set JAX_PLATFORMS=cpu for host devices"
        raise FdgError(
            f"--devices {count}: there {'is' if len(devices) == 1 else 'are'} {len(devices)} of kind {kind}:"
            f" use --devices {len(devices)}{fix}"
        )
    if processes == 1:
        return devices[:count]
    each = [[d for d in devices if d.process_index == i][: count // processes] for i in range(processes)]
    if min(map(len, each)) < count // processes:
        raise FdgError(
            f"--devices {count}: that is {count // processes} in each of {processes} processes,"
            f" and one has only {min(map(len, each))}"
        )
    return [device for some in each for device in some]


def too_small_micro_batch(algorithm: Any, plan: fdg.Plan) -> str | None:
    """A message if a micro-batch smaller than its group idles devices, and a size that does not."""
    algorithm = without_sweep(algorithm)
    micro = getattr(algorithm, "micro_batch", None)
    if micro is None:
        return None
    for name, left in plan.unfit:
        group = next(one for one in plan.groups if one.name == name)
        asked = len(group) + len(left)
        rows = asked // group.model
        here = [f for f in plan.graph.fragments if f.batch_size and plan.group_of(f.name) == group]
        narrow = [f"`{f.name}`" for f in here if f.batch_size == micro]
        if not (left and narrow and micro % rows):
            continue
        wanted = -(-micro // rows) * rows
        try:
            dataclasses.replace(algorithm, micro_batch=wanted)
            fits = all(f.batch_size % rows == 0 for f in here if f.batch_size not in (None, micro))
        except FdgError:
            fits = False
        more = "" if fits else f", and a number of prompts (--num-prompts) whose batches divide by {wanted}"
        return (
            f"{len(group)} of {asked} devices work in {listed(narrow, 'and')}, whose batch is the micro-batch"
            f" of {micro}: give --micro-batch {wanted}{more}"
        )
    return None


def check_all_busy(job: Job, plan: fdg.Plan, devices: Sequence[jax.Device]) -> None:
    """Raises an `FdgError` if a device of an explicit `--devices` would be idle; suggests other numbers."""
    if not plan.idle or (job.devices is None and distributed.count() == 1):
        return  # with several processes, an idle device is an error even without --devices
    there = plan.num_devices
    busy = there - len(plan.idle)
    if job.agents is not None and plan.graph.agents is not None:
        nearest = nearest_multiples(job.agents, there)
        raise FdgError(
            f"--num-seeds {job.agents} does not divide by --devices {there}:"
            f" use --num-seeds {nearest}, or --devices {busy}"
        )
    if len(plan.groups) > 1:  # a group may use fewer devices so that its batch divides; the plan shows it
        if (process := plan.idle_process(devices)) is not None:
            raise FdgError(
                f"{job.policy} leaves process {process} without work: it uses {busy} of {there} devices;"
                f" use other numbers of devices, or --num-envs that divide by them"
            )
        return
    if line := too_small_micro_batch(job.algorithm, plan):
        raise FdgError(f"{line}, or --devices {busy}")
    num_envs = getattr(job.algorithm, "num_envs", None)
    if num_envs is None or num_envs % there == 0:
        raise FdgError(f"{job.policy} uses {busy} of {there} devices: use --devices {busy}")
    raise FdgError(
        f"--num-envs {num_envs} does not divide by --devices {there} under {job.policy}:"
        f" use --num-envs {nearest_multiples(num_envs, there)}, or --devices {busy}"
    )


_Found = tuple[Any, int, str]  # policy, number of devices, reason
_ChoiceJson = dict[str, Any]  # as JSON: the entries of `describe_policy`, "devices", "reason"


@dataclasses.dataclass(frozen=True)
class Settled:
    """A job whose policy is chosen, and its devices (`ready`)."""

    job: Job  # the job with the chosen policy, devices and algorithm
    graph: fdg.FDG  # its algorithm's graph
    said: str  # the candidates or the reason, to print; "" if nothing was chosen
    devices: Any = ()  # the devices, or a number of devices that need not exist
    why: str = ""  # the reason for their number, to print; "" if it was given


def ready(job: Job, devices: Sequence[jax.Device] | None = None, plans_only: bool = False) -> Settled:
    """Traces a job's algorithm and chooses all that the job leaves open. A collective.

    `devices` are given ones. With `plans_only`, the devices of `--devices` need not exist.
    """
    settled, why = settle(job, fdg.trace(job.algorithm), plans_only), ""
    job, said = settled.job, settled.said
    found: Any = job.devices if devices is None and plans_only else devices
    if found is None:
        found, why = devices_of(job, settled.graph)
    if why:  # stored, so that a resumed run uses the same number
        job = dataclasses.replace(job, devices_chosen=len(found))
    if job.described.get("lag") == AUTO_LAG:
        job, said = _with_lag(job, settled.graph, found)
    return Settled(job, settled.graph, said, found, why)


def settle(job: Job, graph: fdg.FDG, plans_only: bool = False) -> Settled:
    """Chooses a job's policy if it is `auto`. A collective: process 0 chooses for all.

    With `plans_only`, the devices of `--devices` need not exist.
    """
    if not isinstance(job.policy, policies.Auto):
        return Settled(job, graph, "")
    devices: Any = job.devices if plans_only and job.devices else available_devices(job.devices)
    if job.devices is None and job.cores is not None:
        devices = devices[: job.cores]
    if not job.explains:
        return _by_default(job, graph, devices)
    all_devices = job.devices is not None or distributed.count() > 1
    choice = choose_within(job.policy, job.algorithm, graph, devices, job.agents, all_devices=all_devices)
    if job.policy.measure and not plans_only:
        choice = choose_by_timing(choice, devices, num_seeds=job.agents)
    changes = {name: getattr(choice.algorithm, name) for name in job.policy.changeable}
    said, changes = distributed.exchange([_choice_json(choice.policy, choice.devices, ""), changes])[0]
    is_other = any(getattr(job.algorithm, name) != value for name, value in changes.items())
    algorithm = dataclasses.replace(job.algorithm, **changes) if is_other else None
    job = _with_policy(job, rebuild_policy(said, CALLER), said["devices"], algorithm)
    same = job.algorithm == choice.algorithm
    return Settled(job, choice.graph if same else fdg.trace(job.algorithm), choice.table)


def _with_lag(job: Job, graph: fdg.FDG, devices: Any) -> tuple[Job, str]:
    """The job with the smallest lag within 5% of the best prediction, and the candidates to print.

    Process 0 chooses for all.
    """
    if job.policy.staleness:
        raise FdgError(
            f"--lag {AUTO_LAG} and --staleness {job.policy.staleness}: both say how old actors' parameters"
            " are: give one of them"
        )
    choice = with_quickest_lag(job.policy, job.algorithm, graph, devices, job.agents)
    lag, said = distributed.exchange([choice.policy.lag, choice.table])[0]
    said += (
        f"\nlag: {lag} of {micro_batches(graph)} micro-batches an iteration, the smallest within"
        f" {TIE - 1:.0%} of the best prediction"
    )
    return job.changed(policy=dataclasses.replace(job.policy, lag=lag)), said


def choose_within(
    policy: Any, algorithm: Any, graph: fdg.FDG, devices: Any, agents: int | None, **how: Any
) -> Choice:
    """`policies.auto` within the limits of an `Auto` (the default ones, if `policy` is another)."""
    limits = policy if isinstance(policy, policies.Auto) else policies.Auto()
    how |= {"max_staleness": limits.max_staleness, "may_change": limits.changeable}
    return policies.auto(algorithm, devices, num_seeds=agents, graph=graph, **how)


def with_quickest_lag(
    policy: Any, algorithm: Any, graph: fdg.FDG, devices: Any, agents: int | None
) -> Choice:
    """Chooses the lag of a policy."""
    among = lags(graph, policy)
    return policies.auto(
        algorithm, devices, policies=among, num_seeds=agents, graph=graph, all_devices=True, further=False
    )


def _by_default(job: Job, graph: fdg.FDG, devices: Any) -> Settled:
    """Chooses the policy of a job without `--policy`: `GPUOnly`, unless another one is predicted to be `GAIN`
    times as fast on the same devices. `GPUOnly` too if nothing can be predicted.
    """
    plain = Settled(_with_policy(job, policies.GPUOnly(), None), graph, "")
    if calls_host(jaxprs.open_jaxpr(graph.jaxpr).eqns):  # times of host functions are unknown
        return plain
    if devices == 1 or (not isinstance(devices, int) and len(devices) == 1):
        return plain
    found = distributed.exchange(_found(job, graph, devices))[0]
    if found is None:
        return plain
    policy = rebuild_policy(found, CALLER)
    # `GPUOnly` uses all accelerators, also when a run is resumed on another machine.
    on_host = not isinstance(devices, int) and devices[0].platform == "cpu"
    count = found["devices"] if on_host or not isinstance(policy, policies.GPUOnly) else None
    return Settled(_with_policy(job, policy, count), graph, f"policy: {found['reason']}")


def _found(job: Job, graph: fdg.FDG, devices: Any) -> _ChoiceJson | None:
    """The cached or new choice; None if nothing can be predicted."""
    try:
        cached = _cache_file(job, graph, devices)
        found = _read(cached)
        if found is None:
            found = _choice_json(*_quickest(job, graph, devices))
            _write(cached, found)
    except FdgError:  # such as a kind of device without known rates
        return None
    return found


def _quickest(job: Job, graph: fdg.FDG, devices: Any) -> _Found:
    """`GPUOnly` on its fastest number of devices, or a policy that is much faster on as many."""
    if job.devices is None and job.cores is not None and devices[0].platform == "cpu":
        plain = policies.GPUOnly()
        count, why = quickest_count(dataclasses.replace(job, policy=plain), graph, devices)
        if count == 1:
            return plain, count, why
        devices = devices[:count]
    how = {"all_devices": True, "further": False}
    return _worth_it(choose_within(job.policy, job.algorithm, graph, devices, job.agents, **how))


GAIN = 1.3  # predicted speed-up that another policy needs: above the predictions' usual error


def _worth_it(choice: Choice) -> _Found:
    """The fastest candidate, or `GPUOnly` if that is not much slower."""
    rows = [row for row in choice.rows if row.prediction is not None]
    plain = next((row for row in rows if isinstance(row.candidate.policy, policies.GPUOnly)), None)
    if plain is None or plain.seconds > GAIN * choice.seconds:
        return choice.policy, choice.devices, choice.reason
    one = plain.candidate
    other = next((row for row in rows if row is not plain), None)
    why = "nothing else can be carried out"
    if other is not None and other.seconds > plain.seconds:
        ratio = other.seconds / plain.seconds
        why = f"predicted to be {ratio:.2f} times as quick as {other.candidate}, the next"
    elif other is not None:
        why = f"no other is predicted to be {GAIN} times as quick"
    return one.policy, one.devices, f"{one.policy}: {why}"


def _with_policy(job: Job, policy: Any, count: int | None, algorithm: Any = None) -> Job:
    """The job with the chosen policy and `count` devices (None: the number is chosen later)."""
    is_chosen = count is not None and job.devices is None and distributed.count() == 1
    chosen = count if is_chosen else job.devices_chosen
    return job.changed(algorithm, policy, {"policy_asked": job.described["policy"]}, devices_chosen=chosen)


# --- cached choices ---

_ADDRESS = re.compile(r"0x[0-9a-f]+")


def _cache_file(job: Job, graph: fdg.FDG, devices: int | Sequence[jax.Device]) -> Path | None:
    """The cache file for this job, machine and version of the cost model; None without a cache."""
    directory = kept_in()
    if directory is None:
        return None
    rates = dataclasses.replace(cluster_for(devices), note="")  # the note depends on the current load
    words = [_ADDRESS.sub("", str(graph.jaxpr)), repr(rates), repr(devices), repr(job.policy)]
    words += [repr(job.agents), repr(job.devices), jax.__version__]
    known = hashlib.sha256("\n".join(words).encode())
    for file in sorted(Path(costs.__file__).parent.glob("*.py")):  # a changed cost model chooses again
        known.update(file.read_bytes())
    return directory / "choices" / f"{known.hexdigest()[:32]}.json"


def _read(file: Path | None) -> _ChoiceJson | None:
    """The cached choice; None if there is none, or the file is invalid."""
    if file is None:
        return None
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, FdgError):
        said = json.loads(file.read_text())
        return _choice_json(rebuild_policy(said, CALLER), int(said["devices"]), str(said["reason"]))
    return None


def _write(file: Path | None, said: _ChoiceJson) -> None:
    if file is None or not distributed.is_first():
        return
    with contextlib.suppress(OSError):
        file.parent.mkdir(mode=0o700, exist_ok=True)
        files.write(file, json.dumps(said).encode())


def _choice_json(policy: Any, devices: int, reason: str) -> _ChoiceJson:
    return {**describe_policy(policy), "devices": devices, "reason": reason}
