"""User environments, one per package interface: the agent walks along a line to its end."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from envs.quiet import quietly, relaxed_checks

with quietly(), relaxed_checks():
    import brax.envs
    import chex
    import dm_env
    import gymnax
    import jumanji
    from gymnax.environments import environment
    from gymnax.wrappers import LogWrapper as LogWrapper
    from jaxmarl.environments.multi_agent_env import MultiAgentEnv
    from jumanji import specs


@struct.dataclass
class LineState(environment.EnvState):
    place: jax.Array


@struct.dataclass
class LineParams(environment.EnvParams):
    goal: float = 3.0
    max_steps_in_episode: int = 9


class Line(environment.Environment):
    """gymnax's interface."""

    def __init__(self, step_length: float = 1.0):
        self.step_length = step_length

    @property
    def default_params(self):
        return LineParams()

    def reset_env(self, key, params):
        return jnp.zeros(1), LineState(time=0, place=jnp.float32(0))

    def step_env(self, key, state, action, params):
        place = state.place + self.step_length * action
        state = LineState(time=state.time + 1, place=place)
        return place[None], state, place, place >= params.goal, {}

    def action_space(self, params=None):
        return gymnax.environments.spaces.Discrete(2)

    def observation_space(self, params=None):
        return gymnax.environments.spaces.Box(-99.0, 99.0, (1,))


@struct.dataclass
class OriginParams(LineParams):
    origin: jax.Array = struct.field(default_factory=lambda: jnp.zeros(1))


class PartedLine(Line):
    """gymnax's interface, with an array as parameter and actions with parts."""

    @property
    def default_params(self):
        return OriginParams()

    def reset_env(self, key, params):
        place, state = super().reset_env(key, params)
        return place + params.origin, state

    def step_env(self, key, state, action, params):
        place, *rest = super().step_env(key, state, action["step"], params)
        return place + params.origin, *rest

    def action_space(self, params=None):
        return gymnax.environments.spaces.Dict({"step": super().action_space(params)})


class IntegerLine(Line):
    """gymnax's interface, with integer actions that do not start at 0, and images as observations."""

    def reset_env(self, key, params):
        return self._image(super().reset_env(key, params)[1])

    def step_env(self, key, state, action, params):
        assert action.dtype == jnp.int32
        _, state, *rest = super().step_env(key, state, jnp.sum(action), params)
        return *self._image(state), *rest

    def _image(self, state):
        return jnp.full((36, 36, 3), 255, jnp.uint8), state

    def action_space(self, params=None):
        return gymnax.environments.spaces.Box(-1, 1, (1, 2), jnp.int32)

    def observation_space(self, params=None):
        return gymnax.environments.spaces.Box(0, 255, (36, 36, 3), jnp.uint8)


class OwnSpace(gymnax.environments.spaces.Space):
    """A space of one's own, of unbounded integers."""

    low, high, shape, dtype = -jnp.inf, jnp.inf, (1,), jnp.int32


class OwnLine(Line):
    """gymnax's interface, with a space of its own, and limits that are a number and an array."""

    def action_space(self, params=None):
        return gymnax.environments.spaces.Box(0.0, jnp.array([1.0, 2.0]), (2,))

    def observation_space(self, params=None):
        return OwnSpace()


def make_line():
    return Line(2.0)


def make_sized(size):
    return Line(size)


class BraxLine(brax.envs.Env):
    """brax's interface."""

    observation_size, action_size, backend = 1, 1, "none"

    def reset(self, rng):
        zero = jnp.float32(0)
        return brax.envs.State(None, jnp.zeros(1), zero, zero)

    def step(self, state, action):
        place = state.obs[0] + action[0]
        return state.replace(obs=place[None], reward=place, done=jnp.float32(place >= 3))


class Seen(NamedTuple):
    place: jax.Array


class JumanjiLine(jumanji.Environment):
    """Jumanji's interface."""

    @property
    def observation_spec(self):
        return specs.Spec(Seen, "Seen", place=specs.Array((1,), jnp.float32))

    @property
    def action_spec(self):
        return specs.DiscreteArray(2)

    def reset(self, key):
        return jnp.float32(0), jumanji.types.restart(Seen(jnp.zeros(1)))

    def step(self, state, action):
        state, end = state + action, state + action >= 3
        seen = Seen(state[None])
        steps = jumanji.types.termination(state, seen), jumanji.types.transition(state, seen)
        return state, jax.tree.map(lambda a, b: jnp.where(end, a, b), *steps)


class JumanjiSum(JumanjiLine):
    """The step is the sum of an action with bounds that are not zero, or without bounds."""

    def __init__(self, floats: bool = False, bounds: bool = True):
        self.floats, self.bounds = floats, bounds
        super().__init__()

    @property
    def action_spec(self):
        if self.floats or not self.bounds:
            return specs.Array((1, 2), jnp.float32 if self.floats else jnp.int32)
        return specs.BoundedArray((1, 2), jnp.int32, -1, 1)

    def step(self, state, action):
        return super().step(state, jnp.sum(action[0]))


@chex.dataclass
class SeenWithMask:
    place: jax.Array
    action_mask: jax.Array


class JumanjiMasked(JumanjiLine):
    """Observations are a chex dataclass, and have a mask."""

    @property
    def action_spec(self):
        return specs.Array((), jnp.int32)  # the mask gives the number of actions

    @property
    def observation_spec(self):
        place, mask = specs.Array((1,), jnp.float32), specs.BoundedArray((2,), bool, False, True)
        return specs.Spec(SeenWithMask, "SeenWithMask", place=place, action_mask=mask)

    def reset(self, key):
        return self._masked(*super().reset(key))

    def step(self, state, action):
        return self._masked(*super().step(state, action))

    def _masked(self, state, step):
        mask = jnp.array([False, True])
        return state, step.replace(observation=SeenWithMask(place=step.observation.place, action_mask=mask))


class Pair(MultiAgentEnv):
    """JaxMARL's interface."""


class Suite(dm_env.Environment):
    """dm_env's interface."""

    reset = step = observation_spec = action_spec = None
