"""Steps of environments in two halves, so that a program can act for some while others step.

An environment may have the halves of its `step`: `send(keys, state, action) -> sent`, which begins it, and
`recv(sent) -> (state, TimeStep)`, which waits for its end. Those on the host have them; every leaf of `sent`
has the leading axis `B`. Of any other environment `send` is the whole step: on an accelerator it is
dispatched without waiting. With `ready(sent [R, ...], waiting [R]) -> int32` an environment says which of R
batches has ended its step, and waits until one has.
"""

from typing import Any

import jax

from envs.environment import TimeStep


def begin_step(env: Any, keys: jax.Array, state: Any, action: jax.Array) -> Any:
    """Begins one step of a batch, by `env.send` where it has that: what `end_step` takes."""
    if hasattr(env, "send"):
        return env.send(keys, state, action)
    return env.step(keys, state, action)


def end_step(env: Any, sent: Any) -> tuple[Any, TimeStep]:
    """What `env.step` gives, of a step that `begin_step` began."""
    return env.recv(sent) if hasattr(env, "send") else sent
