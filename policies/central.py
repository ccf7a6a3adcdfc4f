"""`Central`: workers act and compute gradients; servers hold the parameters and update them."""

import dataclasses
from collections.abc import Mapping, Sequence

from fdg.placing.policy import Group
from policies.groups import divide
from policies.parameters import Lags, group_size


@dataclasses.dataclass(frozen=True, repr=False)
class Central(Lags):
    """Workers send gradients to parameter servers and receive parameters, once per update.

    The layout of parameter servers (Li et al., OSDI 2014) and, with `staleness`, of A3C (Mnih et al., arXiv
    1602.01783).

    Attributes:
      workers: devices that act and compute gradients; None for all remaining devices.
      servers: devices that update, each with a copy of the parameters.
      staleness: age of the workers' parameters in iterations; 0 is synchronous.

    `lag` (`Lags`) is the staleness in micro-batches. `model_parallel` and `parameters` (`ShardsParameters`)
    apply to the servers; workers hold whole parameters.
    """

    workers: int | None = group_size(None, "devices that act and compute gradients; None: the rest")
    servers: int = group_size(1, "devices that update")
    staleness: int = 0

    def place(self, devices: Sequence[str]) -> Mapping[str, Group]:
        """Puts only the update on the servers."""
        workers, servers = divide(self, devices, workers=self.workers, servers=self.servers)
        servers = self.with_sharding(servers)
        roles = ("environment", "actor", "buffer", "learner", "gradient")
        return {**dict.fromkeys(roles, workers), "update": servers}
