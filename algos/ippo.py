"""Independent PPO: each agent learns with PPO and treats the others as part of its environment.

de Witt et al. 2020, "Is Independent Learning All You Need in the StarCraft Multi-Agent Challenge?", arXiv
2011.09533. This is `algos/multi_agent_ppo.py` with value functions that see only their own agent's
observation.
"""

import dataclasses
from typing import ClassVar

from algos.multi_agent_ppo import MultiAgentPPO


@dataclasses.dataclass(frozen=True)
class IPPO(MultiAgentPPO):
    """IPPO with shared parameters, feed-forward or recurrent, for discrete and continuous actions.

    Defaults are those of JaxMARL's `ippo_ff_mpe.py` (Rutherford et al. 2024, arXiv 2311.10090).

    Raises:
      FdgError: (construction) a field out of range, sizes that do not divide, an environment of one agent.

    >>> import envs
    >>> IPPO(env=envs.make("probe:agents")).steps_per_iteration
    2048
    """

    presets_of: ClassVar[str] = "IPPO"
    central_value: ClassVar[bool] = False
