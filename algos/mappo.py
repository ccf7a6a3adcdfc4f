"""Multi-agent PPO (Yu et al. 2022, "The Surprising Effectiveness of PPO in Cooperative Multi-Agent Games",
arXiv 2103.01955).

`algos/multi_agent_ppo.py` where, while learning, the value function sees what all agents see; they act on
what they see themselves. That, and that it remembers unless told otherwise, sets it apart from
`algos/ippo.py`.
"""

import dataclasses
from typing import ClassVar

from algos.multi_agent_ppo import MultiAgentPPO
from fdg.settings.fields import hyperparameter


@dataclasses.dataclass(frozen=True)
class MAPPO(MultiAgentPPO):
    """MAPPO with shared parameters, recurrent or feed-forward, for discrete and continuous actions.

    The central value function sees the observations of all agents side by side (the paper's section 4,
    "concatenation of local observations", as in JaxMARL's `mappo_rnn_mpe.py`), once for an environment, and
    gives a value for each agent, whose rewards may differ.

    Raises:
      FdgError: (construction) a field out of range, sizes that do not divide, an environment of one agent.

    >>> import envs
    >>> MAPPO(env=envs.make("probe:agents"), total_steps=10_000).num_iterations
    4
    """

    presets_of: ClassVar[str] = "MAPPO"
    central_value: ClassVar[bool] = True

    recurrent: bool = hyperparameter(True, "actor and critic have a memory, as in RecurrentPPO")
