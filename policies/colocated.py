"""`Colocated`: all models of RLHF on all devices, resharded between generation and training."""

import dataclasses
from collections.abc import Mapping, Sequence

from fdg.arguments import quoted
from fdg.errors import PlanError
from fdg.placing.policy import Group
from policies.groups import divide
from policies.parameters import ShardsParameters, device_count, generation_group

LEARNING_ROLES = ("reference", "critic", "learner", "buffer")  # roles of the devices that train


@dataclasses.dataclass(frozen=True, repr=False)
class Colocated(ShardsParameters):
    """Every role on every device.

    The layout of DeepSpeed-Chat (Yao et al., arXiv 2308.01320) and, with `generation_parallel`, of
    HybridFlow's hybrid engine (Sheng et al., arXiv 2409.19256, section 5): parameters are split over fewer
    devices for generation than for training. Each device's training shard lies within its generation shard,
    so parameters are all-gathered in small groups, leaf by leaf, and sliced back without communication.

    Attributes:
      generation_parallel: number of devices over which parameters are split in generation, a divisor of
        `model_parallel`; None: as many as in training, in one program.
      rewards: number of devices, counted from the first, for the role `reward`; None: all. Use 1 for a reward
        on the host.
    """

    generation_parallel: int | None = device_count(
        None,
        "devices over which parameters are split in generation, fewer than in training; None: as many",
    )
    rewards: int | None = device_count(
        None, "devices that compute rewards; None: all; use 1 for a reward on the host"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        training, generation = self.model_parallel, self.generation_parallel
        if generation is not None and (
            not isinstance(generation, int) or generation < 1 or training % generation
        ):
            raise PlanError(
                f"Colocated: generation_parallel={quoted(generation)} is not a divisor of model_parallel="
                f"{training}: each device's shard for training must lie within its shard for generation"
            )

    def place(self, devices: Sequence[str]) -> Mapping[str, Group]:
        """One group, or two on the same devices with different sharding; one more for `rewards`, if set."""
        all_devices = self.with_sharding(Group("all", tuple(range(len(devices)))))
        learning, generation = all_devices, all_devices
        if self.generation_parallel is not None and len(devices) > 1:
            learning = dataclasses.replace(all_devices, name="training")
            generation = generation_group(all_devices, "generation", self.generation_parallel)
        rewards = generation
        if self.rewards is not None and len(devices) > 1:
            rewards, _ = divide(self, devices, rewards=self.rewards, others=None)
        return {
            "environment": generation,
            "actor": generation,
            "reward": rewards,
            **dict.fromkeys(LEARNING_ROLES, learning),
        }
