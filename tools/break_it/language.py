"""A text task whose rewards differ between responses even for untrained networks.

`tools.break_it.kills` trains language models on it; tests and benchmarks use it too.
"""

from typing import Any

import jax.numpy as jnp

import envs


class _TokenCounting(envs.text.TextTask):
    def reward(self, answer: Any, tokens: Any, mask: Any) -> Any:
        total = (jnp.sum(jnp.where(mask, tokens % 5, 0), axis=1) / 7.0).astype(jnp.float32)
        return envs.text.Reward(total, {"counted": total})


def counted(max_response: int | None = None) -> envs.text.TextTask:
    """The task of adding one-digit numbers; the reward is a sum over the response's tokens."""
    task = envs.make("text:addition", digits=1, max_response=max_response)
    return _TokenCounting(task.problem, max_response=task.max_response)
