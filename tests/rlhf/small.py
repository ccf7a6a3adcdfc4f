"""Small RLHF algorithms for tests."""

import algos
import envs

TASK = "text:addition"
SMALL = {"num_prompts": 4, "hidden_size": 8, "num_layers": 1, "num_heads": 2}


def make(name, **fields):
    return algos.get(name)(env=envs.make(TASK), **{**SMALL, **fields})
