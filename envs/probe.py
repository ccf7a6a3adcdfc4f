"""Probe environments: each tests one ability of an agent, with a solution in closed form.

An agent that fails a probe has a bug in the part that it tests; training on a probe takes seconds. The idea
is from Andy Jones, "Debugging RL, Without the Agonizing Pain" (2021), section "Probe environments".

`γ` is the discount; `optimal_return` is the expected undiscounted return of the best policy.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from envs.adapters import check_count, check_names
from envs.environment import MaskedObservation, Observation, Vectorized, vectorize
from envs.probe_parts import Parts, Reach, Unlike, check_positive
from envs.spaces import Box, Discrete, MultiDiscrete, Space
from envs.unlike import Alike
from fdg.arguments import check_options

# What `step` of a single environment returns: state, observation, reward, terminated, truncated.
Step = tuple[Any, Observation, jax.Array, jax.Array, jax.Array]


class _Probe:
    """Base class of most probes: an episode ends by itself, and the best return is 1."""

    max_episode_steps: ClassVar[Any] = None
    optimal_return: ClassVar[Any] = 1.0


class _Constant(_Probe):
    """A probe with a single observation."""

    observation_space: ClassVar[Space] = Box(1.0, 1.0, (1,))

    def reset(self, key: jax.Array) -> tuple[Any, jax.Array]:
        """Observation: `[1]`."""
        return (), jnp.ones(1)


class _Sign(_Probe):
    """A probe with a random observation `x = ±1`."""

    observation_space: ClassVar[Space] = Box(-1.0, 1.0, (1,))

    def reset(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Observation: `[x]`."""
        x = _random_sign(key)
        return x, x[None]


@dataclasses.dataclass(frozen=True)
class Value(_Constant):
    """One action, one step, reward 1. The value of the only observation is 1.

    An agent fails if its value loss or its optimiser is wrong.
    """

    name: ClassVar[str] = "probe:value"
    action_space: ClassVar[Space] = Discrete(1)

    def step(self, key: jax.Array, state: Any, action: jax.Array) -> Step:
        """Ends the episode with reward 1."""
        return (), jnp.ones(1), jnp.float32(1), jnp.bool_(True), jnp.bool_(False)


@dataclasses.dataclass(frozen=True)
class ValueOfObservation(_Sign):
    """One action, one step, observation `x = ±1` at random, reward `x`. The value of `x` is `x`.

    An agent that passes `probe:value` fails here if its value does not depend on the observation (no
    gradients in the network, observations of another step).
    """

    name: ClassVar[str] = "probe:value_of_observation"
    action_space: ClassVar[Space] = Discrete(1)
    optimal_return: ClassVar[float] = 0.0

    def step(self, key: jax.Array, state: jax.Array, action: jax.Array) -> Step:
        """Ends the episode with reward `x`, the observation."""
        return state, state[None], state, jnp.bool_(True), jnp.bool_(False)


@dataclasses.dataclass(frozen=True)
class Discount(_Probe):
    """One action, two steps, observations 0 then 1, reward 1 at the end.

    The value of observation 1 is 1, and the value of observation 0 is γ. An agent fails if its discount, or
    its bootstrap from the next observation, is wrong.
    """

    name: ClassVar[str] = "probe:discount"
    observation_space: ClassVar[Space] = Box(0.0, 1.0, (1,))
    action_space: ClassVar[Space] = Discrete(1)

    def reset(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Observation: `[0]`."""
        return jnp.int32(0), jnp.zeros(1)

    def step(self, key: jax.Array, state: jax.Array, action: jax.Array) -> Step:
        """Reward 0, then reward 1 and terminated."""
        is_last = state == 1
        return state + 1, jnp.ones(1), is_last.astype(jnp.float32), is_last, jnp.bool_(False)


@dataclasses.dataclass(frozen=True)
class Policy(_Constant):
    """Two actions, one step, reward 1 for action 1 and -1 for action 0.

    The best policy has `P(action 1) = 1`; the value of a policy that takes action 1 with probability `p` is
    `2p - 1`. An agent fails if its advantage or its policy loss is wrong, such as by the sign.
    """

    name: ClassVar[str] = "probe:policy"
    action_space: ClassVar[Space] = Discrete(2)

    def step(self, key: jax.Array, state: Any, action: jax.Array) -> Step:
        """Reward `2 action - 1`, terminated."""
        return (), jnp.ones(1), 2.0 * action - 1.0, jnp.bool_(True), jnp.bool_(False)


@dataclasses.dataclass(frozen=True)
class PolicyOfObservation(_Sign):
    """Two actions, one step, observation `x = ±1` at random; reward 1 if the action is `x > 0`, else -1.

    The best policy takes action 1 where `x = 1` and action 0 where `x = -1`; its value is 1 for both. An
    agent that passes `probe:policy` fails here if actions, advantages and observations of different steps or
    environments are mixed up (such as by a wrong reshape from `[T, B]`).
    """

    name: ClassVar[str] = "probe:policy_of_observation"
    action_space: ClassVar[Space] = Discrete(2)

    def step(self, key: jax.Array, state: jax.Array, action: jax.Array) -> Step:
        """Reward `x (2 action - 1)`, terminated."""
        return state, state[None], state * (2.0 * action - 1.0), jnp.bool_(True), jnp.bool_(False)


@dataclasses.dataclass(frozen=True)
class Memory(_Probe):
    """A cue `±1` is shown only at the first step; the action `delay` steps later must match it.

    The observation is `[cue, 0]` at the first step, then `[0, 0]`, and `[0, 1]` at the last of `delay + 1`
    steps. The last action has reward 1 if it matches the cue (action 1 for cue 1, action 0 for cue -1), else
    -1; a continuous action, in [-1, 1], has reward `cue * action`. With memory the return is 1 and the value
    at step `t` is `γ^(delay - t)`; without memory every policy has the expected return 0.
    """

    delay: int = 4
    continuous: bool = False
    name: ClassVar[str] = "probe:memory"
    observation_space: ClassVar[Space] = Box(-1.0, 1.0, (2,))

    def __post_init__(self) -> None:
        check_positive(self, "delay")

    @property
    def action_space(self) -> Space:
        """Two actions, or `[1]` in `[-1, 1]`."""
        return Box(-1.0, 1.0, (1,)) if self.continuous else Discrete(2)

    def reset(self, key: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        """Observation: `[cue, 0]`."""
        cue = _random_sign(key)
        return {"cue": cue, "time": jnp.int32(0)}, jnp.stack([cue, jnp.float32(0)])

    def step(self, key: jax.Array, state: dict[str, jax.Array], action: jax.Array) -> Step:
        """Reward 0, and `cue (2 action - 1)` or `cue * action` at the last of `delay + 1` steps."""
        is_last = state["time"] == self.delay
        time = state["time"] + 1
        observation = jnp.stack([jnp.float32(0), (time == self.delay).astype(jnp.float32)])
        sign = action[0] if self.continuous else 2.0 * action - 1.0
        reward = jnp.where(is_last, state["cue"] * sign, 0.0)
        return {"cue": state["cue"], "time": time}, observation, reward, is_last, jnp.bool_(False)


@dataclasses.dataclass(frozen=True)
class MultiDiscreteTarget(_Probe):
    """One step, a multi-discrete action; the observation is a random target, one-hot for each component.

    Reward: the fraction of components that equal their target. The best policy copies the target, and its
    value is 1 everywhere; a uniform policy has the value `mean(1 / nvec)`.
    """

    nvec: tuple[int, ...] = (2, 3)
    name: ClassVar[str] = "probe:multi_discrete"

    @property
    def observation_space(self) -> Space:
        """The concatenated one-hot targets: `[sum(nvec)]`."""
        return Box(0.0, 1.0, (sum(self.nvec),))

    @property
    def action_space(self) -> Space:
        """`MultiDiscrete(nvec)`."""
        return MultiDiscrete(self.nvec)

    def reset(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Observation: the target, one-hot, `[sum(nvec)]`."""
        target = self.action_space.sample(key)
        return target, self._observe(target)

    def step(self, key: jax.Array, state: jax.Array, action: jax.Array) -> Step:
        """Reward `mean(action == target)`, terminated."""
        reward = jnp.mean((action == state).astype(jnp.float32))
        return state, self._observe(state), reward, jnp.bool_(True), jnp.bool_(False)

    def _observe(self, target: jax.Array) -> jax.Array:
        return jnp.concatenate([jax.nn.one_hot(target[i], n) for i, n in enumerate(self.nvec)])


@dataclasses.dataclass(frozen=True)
class ContinuousTarget(_Probe):
    """One step, a continuous action; the observation is a random target in `[-1, 1]^size`.

    Reward: `-sum((action - target)²)`. The best policy copies the target, and its value is 0 everywhere;
    a Gaussian policy around the target with standard deviation `σ` has the value `-size σ²`.
    """

    size: int = 1
    name: ClassVar[str] = "probe:continuous"
    optimal_return: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        check_positive(self, "size")

    @property
    def observation_space(self) -> Space:
        """The target: `[size]`."""
        return Box(-1.0, 1.0, (self.size,))

    @property
    def action_space(self) -> Space:
        """`[size]`, each component in `[-1, 1]`."""
        return Box(-1.0, 1.0, (self.size,))

    def reset(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Observation: the target."""
        target = self.observation_space.sample(key)
        return target, target

    def step(self, key: jax.Array, state: jax.Array, action: jax.Array) -> Step:
        """Reward `-sum((action - target)²)`, terminated."""
        return state, state, -jnp.sum((action - state) ** 2), jnp.bool_(True), jnp.bool_(False)


@dataclasses.dataclass(frozen=True)
class Masked(_Probe):
    """Three actions, one step; the observation is the forbidden action `f`, one-hot; the mask forbids it.

    Action `f + 1` (modulo 3) has reward 1, action `f + 2` reward -1. The forbidden action has reward 1,000,
    so an agent that ignores the mask learns to take it. A mean return above 1 shows that it was taken: once
    in 500 episodes is enough. The value is 1 everywhere.
    """

    name: ClassVar[str] = "probe:masked"
    observation_space: ClassVar[Space] = Box(0.0, 1.0, (3,))
    action_space: ClassVar[Space] = Discrete(3)

    def reset(self, key: jax.Array) -> tuple[jax.Array, MaskedObservation]:
        """Observation: `f`, one-hot; the actions with a zero are allowed."""
        forbidden = self.action_space.sample(key)
        return forbidden, self._observe(forbidden)

    def step(self, key: jax.Array, state: jax.Array, action: jax.Array) -> Step:
        """Reward by `(action - f) mod 3`; terminated."""
        reward = jnp.stack([jnp.float32(1000), jnp.float32(1), jnp.float32(-1)])[(action - state) % 3]
        return state, self._observe(state), reward, jnp.bool_(True), jnp.bool_(False)

    def _observe(self, forbidden: jax.Array) -> MaskedObservation:
        one_hot = jax.nn.one_hot(forbidden, 3)
        return MaskedObservation(one_hot, one_hot == 0)


@dataclasses.dataclass(frozen=True)
class Truncation(_Constant):
    """One action, one observation, reward 1 at every step; never terminates, truncated after `steps` steps.

    The value is `1 / (1 - γ)` at every step, because the observation does not show the time. An agent that
    treats truncation as termination learns a smaller value, the mean over steps of `(1 - γ^n) / (1 - γ)` with
    `n` steps left.
    """

    steps: int = 10
    name: ClassVar[str] = "probe:truncation"
    action_space: ClassVar[Space] = Discrete(1)

    def __post_init__(self) -> None:
        check_positive(self, "steps")

    @property
    def max_episode_steps(self) -> int:
        """`steps`."""
        return self.steps

    @property
    def optimal_return(self) -> float:
        """`steps`, the only possible return."""
        return float(self.steps)

    def step(self, key: jax.Array, state: Any, action: jax.Array) -> Step:
        """Reward 1."""
        return (), jnp.ones(1), jnp.float32(1), jnp.bool_(False), jnp.bool_(False)


@dataclasses.dataclass(frozen=True)
class Agents(_Probe):
    """Several agents; each sees its own random target, and its reward depends only on its own action.

    As `probe:memory` for each agent: the observation is `[target, 0]` at the first step, then `[0, 0]`, and
    `[0, 1]` at the last, `delay` steps later (`[target, 1]` without a delay). The last action has reward 1 if
    it matches a target `±1` (action 1 for 1, action 0 for -1), else -1; for a `continuous` target in `[-1,
    1]` its reward is `-(action - target)²`. The best policy copies the target; with a delay it needs memory.
    Learning fails if agents are mixed up with each other or with environments.
    """

    num_agents: int = 2
    delay: int = 0
    continuous: bool = False
    name: ClassVar[str] = "probe:agents"
    observation_space: ClassVar[Space] = Box(-1.0, 1.0, (2,))

    def __post_init__(self) -> None:
        check_positive(self, "num_agents")
        check_count(f"environment '{self.name}'", "delay", self.delay, least=0)

    @property
    def action_space(self) -> Space:
        """`[1]` in `[-1, 1]`, or two actions."""
        return Box(-1.0, 1.0, (1,)) if self.continuous else Discrete(2)

    @property
    def optimal_return(self) -> float:
        """0 for continuous actions, else 1."""
        return 0.0 if self.continuous else 1.0

    def reset(self, key: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        """Observation: `[A, 2]`, the targets."""
        shape = (self.num_agents,)
        if self.continuous:
            target = jax.random.uniform(key, shape, minval=-1.0, maxval=1.0)
        else:
            target = jax.random.rademacher(key, shape, jnp.float32)
        state = {"target": target, "time": jnp.int32(0)}
        return state, self._observe(state)

    def step(self, key: jax.Array, state: dict[str, jax.Array], action: jax.Array) -> Step:
        """Reward: `[A]`, at the last of `delay + 1` steps."""
        is_last, target = state["time"] == self.delay, state["target"]
        error = action[:, 0] - target if self.continuous else None
        reward = target * (2.0 * action - 1.0) if error is None else -jnp.square(error)
        state = {"target": target, "time": state["time"] + 1}
        return state, self._observe(state), jnp.where(is_last, reward, 0.0), is_last, jnp.bool_(False)

    def _observe(self, state: dict[str, jax.Array]) -> jax.Array:
        target = jnp.where(state["time"] == 0, state["target"], 0.0)
        is_last = jnp.full_like(target, state["time"] == self.delay)
        return jnp.stack([target, is_last], axis=1)


@dataclasses.dataclass(frozen=True)
class Team(_Probe):
    """Several agents, one action, one step; each sees a random `x = ±1`; its reward is the next agent's `x`.

    It tests central value functions: a value function that sees only the agent's own observation can only
    predict 0; a value function that sees all observations can predict every reward.
    """

    num_agents: int = 2
    name: ClassVar[str] = "probe:team"
    observation_space: ClassVar[Space] = Box(-1.0, 1.0, (1,))
    action_space: ClassVar[Space] = Discrete(1)
    optimal_return: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        check_positive(self, "num_agents")

    def reset(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Observation: `[A, 1]`."""
        x = jax.random.rademacher(key, (self.num_agents,), jnp.float32)
        return x, x[:, None]

    def step(self, key: jax.Array, state: jax.Array, action: jax.Array) -> Step:
        """Reward: `[A]`, terminated."""
        return state, state[:, None], jnp.roll(state, -1), jnp.bool_(True), jnp.bool_(False)


PROBES: tuple[type[Any], ...] = (
    Value, ValueOfObservation, Discount, Policy, PolicyOfObservation, Memory, MultiDiscreteTarget,
    ContinuousTarget, Masked, Truncation, Agents, Team, Parts, Reach, Unlike,
)  # fmt: skip


def factories() -> dict[str, Callable[..., Vectorized]]:
    """The factory of each probe by name, for the registry."""
    return {probe().name: functools.partial(_make, probe) for probe in PROBES}


def _make(probe: type[Any], **overrides: Any) -> Vectorized:
    """Makes the environment of a probe, with other values of its fields."""
    where = f"environment '{probe().name}'"
    check_names(where, overrides, [field.name for field in dataclasses.fields(probe)])
    check_options(where, probe, overrides)
    single = probe(**overrides)
    return vectorize(Alike(single) if isinstance(single, Unlike) else single)


def _random_sign(key: jax.Array) -> jax.Array:
    """-1 or 1 with equal probability, `[] float32`."""
    return jax.random.rademacher(key, (), jnp.float32)
