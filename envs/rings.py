"""Steps of environments in two halves, so that a program can act for some environments while others step.

An environment may also have its `step` in two halves: `send(keys, state, action) -> sent` starts it, and
`recv(sent) -> (state, TimeStep)` waits for it. Host environments have them; every leaf of `sent` has the
leading axis `B`. For other environments, `begin_step` is the whole step, which accelerators run
asynchronously. An environment with `ready(sent [R, ...], waiting [R]) -> int32` waits for one of R batches
and returns its index.
"""

from typing import Any

import jax

from envs.environment import TimeStep


def begin_step(env: Any, keys: jax.Array, state: Any, action: jax.Array) -> Any:
    """Starts one step of a batch, by `env.send` if it exists; returns the argument of `end_step`."""
    if hasattr(env, "send"):
        return env.send(keys, state, action)
    return env.step(keys, state, action)


def end_step(env: Any, sent: Any) -> tuple[Any, TimeStep]:
    """Waits for the step; returns what `env.step` returns."""
    return env.recv(sent) if hasattr(env, "send") else sent
