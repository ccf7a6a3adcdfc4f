"""Small user-defined algorithms that compile quickly; `Walk` has every kind of array in its state."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

import envs
import fdg


@dataclasses.dataclass(frozen=True)
class Walk:
    """`num_envs` random walks: no learning, and every array of the state changes."""

    num_envs: int = 8
    scale: float = dataclasses.field(default=0.1, metadata={"help": "of one step"})
    label: str = "a"
    widths: tuple[int, ...] = (2, 3)
    width: int | None = None
    drifts: bool = False
    steps_per_iteration: ClassVar[int] = 8

    def __post_init__(self):
        if self.num_envs < 1:
            raise ValueError(f"num_envs={self.num_envs} must be above zero")  # user code: no FdgError

    def init(self, key):
        return {
            "walks": jnp.zeros(self.num_envs),
            "keys": jax.random.split(key, self.num_envs),
            "count": jnp.int32(0),
            "flips": jnp.zeros(self.num_envs, bool),
            "nested": [(jnp.zeros((), jnp.bfloat16),), {}],
        }

    def iterate(self, state):
        walks, keys = self.move(state["walks"], state["keys"])
        count = state["count"] + 1
        state = {
            **state,
            "walks": walks,
            "keys": keys,
            "count": count,
            "flips": ~state["flips"],
            "nested": [(jnp.mean(walks).astype(jnp.bfloat16),), state["nested"][1]],
        }
        # Episodes end in even iterations only.
        return state, {
            "episode_return": jnp.where(count % 2 == 0, jnp.mean(walks), jnp.nan),
            "episodes": (count % 2 == 0).astype(jnp.float32),
        }

    def evaluate(self, state, key, episodes):
        return {"return": jnp.mean(state["walks"]) + 0 * jax.random.uniform(key, (episodes,)).mean()}

    @fdg.fragment("environment")
    def move(self, walks, keys):
        keys = jax.vmap(lambda key: jax.random.split(key))(keys)
        return walks + self.scale * jax.vmap(jax.random.normal)(keys[:, 0]), keys[:, 1]


@dataclasses.dataclass(frozen=True)
class Pupil:
    """Acts, learns with nested updates, and evaluates: one fragment of every role that a policy places."""

    num_envs: int = 8
    num_updates: int = 2
    steps_per_iteration: ClassVar[int] = 8

    def init(self, key):
        return {
            "weight": jnp.asarray([0.1, -0.2, 0.3]),
            "position": jax.random.normal(key, (self.num_envs, 3)),
            "keys": jax.random.split(key, self.num_envs),
            "count": jnp.int32(0),
        }

    def iterate(self, state):
        def one(carry, _):
            position, keys = carry
            action, keys = self.act(state["weight"], position, keys)
            position, reward = self.step(position, action)
            return (position, keys), (position, reward)

        (last, keys), (positions, rewards) = jax.lax.scan(one, (state["position"], state["keys"]), length=2)
        weight = self.learn(state["weight"], positions, rewards)
        count = state["count"] + 1
        state = {"weight": weight, "position": last, "keys": keys, "count": count}
        metrics = {"episode_return": jnp.mean(rewards), "episodes": count, "size": jnp.sum(weight**2)}
        return state, metrics

    def evaluate(self, state, key, episodes):
        return {"return": jnp.sum(state["weight"])}

    @fdg.fragment("actor", in_axes=(None, 0, 0))
    def act(self, weight, position, keys):
        keys = jax.vmap(jax.random.split)(keys)
        return position @ weight + 0.1 * jax.vmap(jax.random.normal)(keys[:, 0]), keys[:, 1]

    @fdg.fragment("environment")
    def step(self, position, action):
        position = 0.9 * position + 0.1 * jnp.tanh(action)[:, None]
        return position, -jnp.mean(jnp.square(position - 1.0), axis=1)

    @fdg.fragment("learner", in_axes=(None, 1, 1), out_axes=None)
    def learn(self, weight, positions, rewards):
        def one(weight, _):
            return self.update(weight, self.slope(weight, positions, rewards)), None

        return jax.lax.scan(one, weight, length=self.num_updates)[0]

    @fdg.fragment("gradient", in_axes=(None, 1, 1), out_axes=None)
    def slope(self, weight, positions, rewards):
        return jax.grad(lambda w: jnp.mean(jnp.square(positions @ w - rewards)))(weight)

    @fdg.fragment("update", in_axes=None, out_axes=None)
    def update(self, weight, slope):
        return weight - 0.1 * slope


class Silent:
    """A minimal algorithm: no dataclass, no batch axis, no metrics, no evaluation."""

    steps_per_iteration = 1

    def init(self, key):
        return jnp.float32(0)

    def iterate(self, state):
        return fdg.fragment("learner", in_axes=None, out_axes=None)(_increment)(state), {}


def _increment(x):
    return x + 1


@dataclasses.dataclass(frozen=True)
class Continuous:
    """Refuses environments with discrete actions."""

    env: Any
    action_spaces: ClassVar[tuple[type, ...]] = (envs.Box,)
    steps_per_iteration: ClassVar[int] = 1

    def init(self, key):
        return key

    def iterate(self, state):
        return state, {}


@dataclasses.dataclass(frozen=True)
class Endless:
    """Lacks `steps_per_iteration`; `rate` has no default."""

    rate: float

    def init(self, key):
        return key

    def iterate(self, state):
        return state, {}
