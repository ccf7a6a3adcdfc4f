"""What a distribution policy is: a small value that says which group of devices each role lives on."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import jax


@dataclasses.dataclass(frozen=True)
class Group:
    """Devices that hold the same fragments, the batch split over them.

    Attributes:
      name: what the policy calls it ("workers", "learners").
      devices: positions in the list of devices given to the engine.
      exact: whether a user asked for this number of devices; if so, the batch has to divide by it.
    """

    name: str
    devices: tuple[int, ...]
    exact: bool = False

    def __len__(self) -> int:
        return len(self.devices)


class Policy(Protocol):
    """A distribution policy: a frozen, hashable dataclass.

    A field `staleness`, if there is one, says how many iterations old the parameters are that actors use. A
    class attribute `uses_host = True` asks for the host's CPU beside the accelerators (see `with_host`).
    """

    def place(self, devices: Sequence[str]) -> Mapping[str, Group]:
        """The group of each role that the policy names; other roles follow their data.

        Args:
          devices: the platform of each device, such as "cpu" or "gpu".

        Raises:
          PlanError: what the policy asks for cannot be had on these devices.
        """


def with_host(policy: Policy, devices: Sequence[jax.Device]) -> list[jax.Device]:
    """Adds the host's CPU to accelerators, in front of them, if the policy makes use of it.

    In one process only: of several, each would have to name its own.
    """
    accelerators = bool(devices) and devices[0].platform != "cpu"
    if not (getattr(policy, "uses_host", False) and accelerators and jax.process_count() == 1):
        return list(devices)
    return [*jax.local_devices(backend="cpu")[:1], *devices]
