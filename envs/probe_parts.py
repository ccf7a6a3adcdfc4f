"""Probes with observations in parts, or with agents that differ; see `envs/probe.py`."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from envs.adapters import check_count
from envs.composite import Dict, ObservationSpace, Tuple
from envs.spaces import Box, Discrete, Space


def check_positive(probe: Any, field: str) -> None:
    """Raises an `FdgError` unless a field is an integer of at least 1."""
    check_count(f"environment '{probe.name}'", field, getattr(probe, field))


@dataclasses.dataclass(frozen=True)
class Parts:
    """Two actions, one step (or `length` equal ones), observations in parts.

    An image is lit on its left or right; a category says which way to go. `side = ±1` is the lit side, `flip`
    0 or 1, and `target = side * (1 - 2 flip)`. The reward is `target * (2 action - 1) + bonus`, or `bonus -
    (action - target)^2` for continuous actions, where only critics see the random `bonus = ±1`. Learning
    fails if a part of the observation is lost, or if the actor sees privileged parts. The value is
    `optimal_return`, plus `bonus` if the critic sees it.
    """

    continuous: bool = False
    length: int = 1
    name: ClassVar[str] = "probe:parts"
    observation_space: ClassVar[ObservationSpace] = Dict(
        {
            "picture": Box(0.0, 255.0, (4, 4, 1), "uint8"),
            "told": Tuple((Discrete(2), Box(-1.0, 1.0, (1,)))),  # flip; and noise
            "bonus": Box(-1.0, 1.0, (1,)),
        },
        privileged=("bonus",),
    )
    max_episode_steps: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        check_positive(self, "length")

    @property
    def action_space(self) -> Space:
        """`[1]` in `[-1, 1]`, or two actions."""
        return Box(-1.0, 1.0, (1,)) if self.continuous else Discrete(2)

    @property
    def optimal_return(self) -> float:
        """0 for continuous actions, else 1 for each step."""
        return 0.0 if self.continuous else float(self.length)

    def reset(self, key: jax.Array) -> tuple[dict[str, jax.Array], dict[str, Any]]:
        """Observation: `picture [4, 4, 1]`, `told ([], [1])`, `bonus [1]`."""
        side, flip, bonus = jax.random.bernoulli(key, shape=(3,))
        noise = jax.random.uniform(jax.random.fold_in(key, 1), (1,), minval=-1.0, maxval=1.0)
        state = {"side": 2.0 * side - 1.0, "flip": flip, "bonus": 2.0 * bonus - 1.0, "noise": noise}
        state["time"] = jnp.int32(0)
        return state, self._observe(state)

    def step(self, key: jax.Array, state: dict[str, jax.Array], action: jax.Array) -> Any:
        """The action's reward; terminated after the last step."""
        target = state["side"] * jnp.where(state["flip"], -1.0, 1.0)
        gain = -jnp.square(action[0] - target) if self.continuous else target * (2.0 * action - 1.0)
        state = {**state, "time": state["time"] + 1}
        is_over = state["time"] >= self.length
        return state, self._observe(state), gain + state["bonus"], is_over, jnp.bool_(False)

    def _observe(self, state: dict[str, jax.Array]) -> dict[str, Any]:
        lit = (jnp.arange(4) >= 2) == (state["side"] > 0)
        picture = jnp.where(jnp.broadcast_to(lit[None, :, None], (4, 4, 1)), 255, 0)
        return {"picture": picture, "told": (state["flip"], state["noise"]), "bonus": state["bonus"][None]}


@dataclasses.dataclass(frozen=True)
class Reach:
    """A point moves to a goal, with reward -1 per step, 0 at the goal.

    Position and goal are in `[-1, 1]^dimensions`; a step moves each coordinate by at most 0.2, and the goal
    is reached if all coordinates are within 0.1 of it. An episode has 25 steps and starts in the middle.
    Observations are parts as in Gymnasium-Robotics: `observation` (the position), `achieved_goal` (the same)
    and `desired_goal`. Random actions in four dimensions rarely reach a goal, so learners fail without
    hindsight (`algos.buffers.hindsight`).
    """

    dimensions: int = 4
    name: ClassVar[str] = "probe:reach"
    max_episode_steps: ClassVar[int | None] = 25

    def __post_init__(self) -> None:
        check_positive(self, "dimensions")

    @property
    def observation_space(self) -> ObservationSpace:
        """Three parts, each `[dimensions]`."""
        part = Box(-1.0, 1.0, (self.dimensions,))
        return Dict({"observation": part, "achieved_goal": part, "desired_goal": part})

    @property
    def action_space(self) -> Space:
        """Velocities: `[dimensions]` in `[-1, 1]`."""
        return Box(-1.0, 1.0, (self.dimensions,))

    @property
    def optimal_return(self) -> float:
        """Minus the mean number of steps before the goal: k - 1 if the farthest coordinate takes k moves."""
        # The probability that `moves` moves of 0.2 come within 0.1 of a goal that is uniform in [-1, 1].
        p_reached = [min(0.1 + 0.2 * moves, 1.0) ** self.dimensions for moves in range(6)]
        return -sum(1.0 - p_reached[moves] for moves in range(1, 6))

    def reset(self, key: jax.Array) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Position 0, a uniformly random goal."""
        goal = jax.random.uniform(key, (self.dimensions,), minval=-1.0, maxval=1.0)
        state = {"position": jnp.zeros(self.dimensions), "goal": goal}
        return state, self._observe(state)

    def step(self, key: jax.Array, state: dict[str, jax.Array], action: jax.Array) -> Any:
        """Reward by `compute_reward`; never terminated."""
        position = jnp.clip(state["position"] + 0.2 * jnp.clip(action, -1.0, 1.0), -1.0, 1.0)
        state = {**state, "position": position}
        reward = self.compute_reward(position, state["goal"])
        return state, self._observe(state), reward, jnp.bool_(False), jnp.bool_(False)

    def compute_reward(self, achieved_goal: jax.Array, desired_goal: jax.Array) -> jax.Array:
        """0 if the goal is reached, else -1, for goals `[dimensions]`."""
        return jnp.where(jnp.max(jnp.abs(achieved_goal - desired_goal)) <= 0.1, 0.0, -1.0)

    def _observe(self, state: dict[str, jax.Array]) -> dict[str, jax.Array]:
        position = state["position"]
        return {"observation": position, "achieved_goal": position, "desired_goal": state["goal"]}


@dataclasses.dataclass(frozen=True)
class Unlike:
    """Two agents that differ, one step. Each reward depends only on the agent's own action.

    The first sees one of three categories, and must name it. Its reward is 1 if right; for continuous actions
    in [0, 2], minus the squared distance. The second sees two numbers, and must say whether the first number
    is positive. Its reward is 1 if right; for two components in [-1, 1], minus their mean squared distance to
    the numbers. Learning fails if an agent does not know its index, or gets another agent's actions.
    """

    continuous: bool = False
    name: ClassVar[str] = "probe:unlike"
    num_agents: ClassVar[int] = 2
    observation_space: ClassVar[Tuple] = Tuple((Discrete(3), Box(-1.0, 1.0, (2,))))
    max_episode_steps: ClassVar[int | None] = None

    @property
    def action_space(self) -> Tuple:
        """Three and two choices, or one and two components."""
        if self.continuous:
            return Tuple((Box(0.0, 2.0, (1,)), Box(-1.0, 1.0, (2,))))
        return Tuple((Discrete(3), Discrete(2)))

    @property
    def optimal_return(self) -> float:
        """0 for continuous actions, else 1."""
        return 0.0 if self.continuous else 1.0

    def reset(self, key: jax.Array) -> tuple[Any, Any]:
        """Observations: `[]` int32 and `[2]` float32."""
        keys = jax.random.split(key)
        state = jax.random.randint(keys[0], (), 0, 3), jax.random.uniform(keys[1], (2,), minval=-1.0)
        return state, state

    def step(self, key: jax.Array, state: Any, action: Any) -> Any:
        """Gives each agent its reward; terminated."""
        category, numbers = state
        if self.continuous:
            first = -jnp.square(action[0][0] - category)
            second = -jnp.mean(jnp.square(action[1] - numbers))
        else:
            first, second = action[0] == category, action[1] == (numbers[0] > 0)
        return state, state, (first, second), jnp.bool_(True), jnp.bool_(False)
