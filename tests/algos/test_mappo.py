"""Presets of MAPPO and IPPO.

MAPPO's losses L(theta) of the actor and L(phi) of the critic are those of Yu et al. 2022 (arXiv 2103.01955),
appendix A, "MAPPO details": PPO's, with its clipped value, as means over the batch and the agents
(by hand in `test_ppo.py`). The critic's input is section 4's "concatenation of local observations".
"""

import algos
import envs


def test_presets():
    env = envs.make("MPE_simple_spread_v3")
    assert algos.make("mappo", env).total_steps == 600_000 and algos.make("mappo", env).recurrent
    assert algos.make("ippo", env).total_steps == 10_000_000 and not algos.make("ippo", env).recurrent
