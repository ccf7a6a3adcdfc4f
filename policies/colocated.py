"""`Colocated`: all models of RLHF on all devices, resharded between generation and training."""

import dataclasses
from collections.abc import Mapping, Sequence

from fdg.errors import PlanError
from fdg.placing.policy import Group
from policies.groups import divide
from policies.parameters import ShardsParameters, generating

LEARNING = ("reference", "critic", "learner", "buffer")


@dataclasses.dataclass(frozen=True, repr=False)
class Colocated(ShardsParameters):
    """Every role on every device.

    The layout of DeepSpeed-Chat (Yao et al., arXiv 2308.01320) and, with `generation_parallel`, of
    HybridFlow's hybrid engine (Sheng et al., arXiv 2409.19256, section 5): parameters are split over fewer
    devices for generation than for training. Each device's training shard lies within its generation shard,
    so parameters are all-gathered in small groups, leaf by leaf, and sliced back without communication.

    Attributes:
      generation_parallel: devices that share the parameters in generation, a divisor of `model_parallel`;
        None for as many as in training, in one program.
      rewards: number of devices, from the front, for the role `reward` (a reward on the host needs one); None
        for all.
    """

    generation_parallel: int | None = dataclasses.field(
        default=None,
        metadata={"help": "devices that split parameters to generate, fewer than to train; None: as many"},
    )
    rewards: int | None = dataclasses.field(
        default=None, metadata={"help": "devices of the reward alone, 1 for one on the host; None: all"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        wide, narrow = self.model_parallel, self.generation_parallel
        if narrow is not None and (not isinstance(narrow, int) or narrow < 1 or wide % narrow):
            raise PlanError(
                f"Colocated: generation_parallel={narrow!r} is no divisor of model_parallel={wide}: each"
                f" device's part to train has to lie within its part to generate"
            )

    def place(self, devices: Sequence[str]) -> Mapping[str, Group]:
        """One group; or two on the same devices, with different sharding of parameters."""
        everyone = self.sharded(Group("all", tuple(range(len(devices)))))
        learning, acting = everyone, everyone
        if self.generation_parallel is not None and len(devices) > 1:
            learning = dataclasses.replace(everyone, name="training")
            acting = generating(everyone, "generation", self.generation_parallel)
        judging = acting
        if self.rewards is not None and len(devices) > 1:
            judging, _ = divide(self, devices, rewards=self.rewards, others=None)
        return {
            "environment": acting,
            "actor": acting,
            "reward": judging,
            **dict.fromkeys(LEARNING, learning),
        }
