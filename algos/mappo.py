"""PPO for several agents: `MAPPO`, whose critic sees all agents' observations, and `IPPO`.

MAPPO: Yu et al. 2022, "The Surprising Effectiveness of PPO in Cooperative Multi-Agent Games", arXiv
2103.01955. IPPO: de Witt et al. 2020, "Is Independent Learning All You Need in the StarCraft Multi-Agent
Challenge?", arXiv 2011.09533.

MAPPO and IPPO differ in the critic's input and in their defaults. Agents share parameters; each has its own
observation, memory, reward, advantage and value. The loss treats the `A` agents of an environment as `A`
samples. All else is as in `algos/recurrent_ppo.py`, with one more axis: `[T, B, A]`, not `[T, B]`.
"""

import dataclasses
from typing import ClassVar

from algos.checks import check_types
from algos.recurrent_ppo import RecurrentPPO
from fdg.settings.fields import hyperparameter, require


@dataclasses.dataclass(frozen=True)
class MultiAgentPPO(RecurrentPPO):
    """PPO with shared parameters, feed-forward or recurrent, for discrete and continuous actions.

    `central_value`: if True, the critic sees all agents' observations, else each agent's own one.
    `total_steps` counts steps of the environment, in each of which all agents act.
    """

    several_agents: ClassVar[bool] = True
    default_env: ClassVar[str] = "MPE_simple_spread_v3"

    num_envs: int = hyperparameter(16, "environments stepped together, each with all its agents")
    recurrent: bool = hyperparameter(False, "actor and critic have a memory, as in RecurrentPPO")

    def __post_init__(self):
        check_types(self)
        require(
            self,
            self._has_memory or (self.sequence_length is None and self.burn_in == 0),
            f"sequence_length={self.sequence_length}, burn_in={self.burn_in}: without a memory there are no"
            " sequences; set recurrent=True or memory, or leave them out",
        )
        super().__post_init__()

    _has_memory = property(lambda self: self.recurrent or self.memory is not None)


@dataclasses.dataclass(frozen=True)
class IPPO(MultiAgentPPO, presets="IPPO"):
    """IPPO with shared parameters, feed-forward or recurrent, for discrete and continuous actions.

    Defaults are those of JaxMARL's `ippo_ff_mpe.py` (Rutherford et al. 2024, arXiv 2311.10090).

    >>> import envs
    >>> IPPO(env=envs.make("probe:agents")).steps_per_iteration
    2048
    """


@dataclasses.dataclass(frozen=True)
class MAPPO(MultiAgentPPO, presets="MAPPO"):
    """MAPPO with shared parameters, recurrent or feed-forward, for discrete and continuous actions.

    The central critic takes the concatenated observations of all agents (section 4 of the paper, as in
    JaxMARL's `mappo_rnn_mpe.py`) and returns a value for each agent.

    >>> import envs
    >>> MAPPO(env=envs.make("probe:agents"), total_steps=10_000).num_iterations
    4
    """

    central_value: ClassVar[bool] = True

    recurrent: bool = hyperparameter(True, "actor and critic have a memory, as in RecurrentPPO")
