"""A job whose policy chooses itself: what was chosen takes the place of `auto`, in the job and its config."""

import dataclasses
from typing import Any

import fdg
import policies
from fdg.costs.measuring import measured
from fdg.processes import distributed
from fdg.training.devices import available_devices
from fdg.training.job import Job


@dataclasses.dataclass(frozen=True)
class Settled:
    """A job with a policy of its own.

    Attributes:
      job: as it was, with policy, devices and algorithm as chosen.
      graph: of its algorithm.
      table: what it was chosen among, to be printed.
    """

    job: Job
    graph: fdg.FDG
    table: str


def settle(job: Job, graph: fdg.FDG, plans_only: bool = False) -> Settled:
    """Chooses the policy of a job; one that has a policy stays as it is.

    Of several processes, all have to call it, and all get what the first one chose.

    Args:
      plans_only: whether nothing is to run, so that the devices of `--devices` need not exist.

    Raises:
      FdgError: nothing can be chosen.
    """
    asked = job.policy
    if not isinstance(asked, policies.Auto):
        return Settled(job, graph, "")
    devices: Any = job.devices
    if not plans_only or devices is None:
        devices = available_devices(job.devices)
        if job.devices is None and job.cores is not None:
            devices = devices[: job.cores]
    choice = policies.auto(
        job.algorithm,
        devices,
        max_staleness=asked.max_staleness,
        may_change=asked.changeable,
        num_seeds=job.agents,
        graph=graph,
        all_devices=job.devices is not None or distributed.count() > 1,
    )
    if asked.measure and not plans_only:
        choice = measured(choice, devices, num_seeds=job.agents)
    picked = distributed.exchange((choice.policy, choice.devices, choice.algorithm))[0]
    policy, count, algorithm = (
        picked if distributed.count() > 1 else (choice.policy, choice.devices, choice.algorithm)
    )
    fields = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}
    staleness = fields.pop("staleness", 0)
    hyperparameters = {
        name: getattr(algorithm, name) if name in asked.changeable else value
        for name, value in job.config["hyperparameters"].items()
    }
    config = {
        **job.config,
        "policy": next(name for name in policies.names() if policies.get(name) is type(policy)),
        "policy_asked": job.config["policy"],
        "policy_fields": fields,
        "staleness": staleness,
        "hyperparameters": hyperparameters,
    }
    if job.devices is None and distributed.count() == 1:
        config["devices_chosen"] = count
    job = dataclasses.replace(job, algorithm=algorithm, policy=policy, chosen=count, config=config)
    return Settled(job, choice.graph if algorithm == choice.algorithm else fdg.trace(algorithm), choice.table)
