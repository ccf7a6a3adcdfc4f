"""Algorithms for language models that are small enough for tests."""

import algos
import envs

TASK = "text:addition"
SMALL = {"num_prompts": 4, "hidden_size": 8, "num_layers": 1, "num_heads": 2}


def made(name, **fields):
    return algos.get(name)(env=envs.make(TASK), **{**SMALL, **fields})
