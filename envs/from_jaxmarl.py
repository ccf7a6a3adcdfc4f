"""The multi-particle environments (MPE) of JaxMARL 0.2 (github.com/FLAIROX/JaxMARL).

Differences from JaxMARL:

- Mappings from agent to array become arrays with an axis of agents, in the order of JaxMARL's `agents`.
- Observations are zero-padded to one length. If agents differ in sizes or in JaxMARL's classes of agents,
each observation ends with the agent's one-hot index, as in JaxMARL's wrapper for shared parameters
(`CTRolloutManager`); `agent_identity` overrides this.
- All agents have the same number of actions, and a mask forbids actions that an agent lacks. Continuous
actions are padded, and extra components are ignored.
- Episodes end only by the time limit: a truncation, where JaxMARL only has `done`. JaxMARL compares
its step count with the limit before it increments the count, so `max_steps=25` makes episodes of 26 steps.

As in JaxMARL, the prey of `MPE_simple_facmac*` has actions and rewards, but moves by itself.

Keys are split as in JaxMARL (step, then reset), so for equal keys, results equal those of JaxMARL's `step`.
JaxMARL is imported on first use. Its constants are converted to NumPy arrays: literals of a program.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from envs.adapters import check_count, check_names, converting_errors, hashable_parameters, importing
from envs.environment import MaskedObservation, Observation, Vectorized, vectorize
from envs.literals import literals, replace_pytree_arrays
from envs.rendering import drawing, figure_image
from envs.spaces import Box, Discrete, Space
from fdg.arguments import check_options
from fdg.errors import FdgError

# Copied from JaxMARL's registry, and compared with it in a test, because importing JaxMARL takes seconds.
NAMES = (
    "MPE_simple_v3", "MPE_simple_tag_v3", "MPE_simple_world_comm_v3", "MPE_simple_spread_v3",
    "MPE_simple_crypto_v3", "MPE_simple_speaker_listener_v4", "MPE_simple_push_v3", "MPE_simple_adversary_v3",
    "MPE_simple_reference_v3", "MPE_simple_facmac_v1", "MPE_simple_facmac_3a_v1", "MPE_simple_facmac_6a_v1",
    "MPE_simple_facmac_9a_v1",
)  # fmt: skip

Scalar: TypeAlias = "bool | int | float | str"

# Numeric arguments of MPE's base class that a user may set.
_COMMON_ARGUMENTS = ("max_steps", "dt", "damping", "contact_force", "contact_margin")


@dataclasses.dataclass(frozen=True)
class ParticleEnvironment:
    """A `SingleEnvironment` with several agents, by JaxMARL's name and overrides of its constructor."""

    name: str
    agent_identity: bool | None = None  # append the agent's one-hot index; None: only if agents differ
    overrides: tuple[tuple[str, Scalar], ...] = ()  # of the constructor's arguments

    @property
    def num_agents(self) -> int:
        """All agents, adversaries included."""
        return len(self._facts.agents)

    @property
    def observation_space(self) -> Space:
        """Unbounded, as long as the longest observation, plus the agent's one-hot index if there is one."""
        return Box(float("-inf"), float("inf"), (self._observation_length + self._index_length,))

    @property
    def action_space(self) -> Space:
        """`Discrete`, or a `Box` from 0 to 1, as large as the agent with most actions needs."""
        max_size = max(self._facts.action_sizes)
        return Discrete(max_size) if self._facts.discrete else Box(0.0, 1.0, (max_size,))

    @property
    def max_episode_steps(self) -> int:
        """JaxMARL's `max_steps` plus one, the length of its episodes."""
        return self._facts.env.max_steps + 1

    def reset(self, key: jax.Array) -> tuple[Any, Observation]:
        """Starts an episode."""
        with jax.numpy_rank_promotion("allow"):  # JaxMARL needs rank promotion
            observation, state = self._facts.env.reset(key)
        return state, self._observe(observation)

    def step(
        self, key: jax.Array, state: Any, action: jax.Array
    ) -> tuple[Any, Observation, jax.Array, jax.Array, jax.Array]:
        """Takes one step, without reset; `action [A]` or `[A, n]`."""
        facts = self._facts
        actions = {
            agent: action[i] if facts.discrete else action[i, :size]
            for i, (agent, size) in enumerate(zip(facts.agents, facts.action_sizes, strict=True))
        }
        with jax.numpy_rank_promotion("allow"):
            observation, state, reward, done, _ = facts.env.step_env(key, state, actions)
        rewards = jnp.stack([reward[agent] for agent in facts.agents])
        return state, self._observe(observation), rewards, jnp.bool_(False), done["__all__"]

    def frames(self, states: Sequence[Any]) -> Iterator[np.ndarray]:
        """Images of states, `[H, W, 3]` uint8 each: a circle for each agent and each landmark."""
        from matplotlib.patches import Circle

        env = self._facts.env
        figure, axes = drawing()
        reach = max(2.0, 1.1 * max(float(np.abs(state.p_pos).max()) for state in states))
        axes.set(xlim=(-reach, reach), ylim=(-reach, reach), xticks=[], yticks=[], aspect="equal")
        circles = [
            axes.add_patch(
                Circle((0.0, 0.0), float(env.rad[i]), color=[c / 255 for c in np.asarray(env.colour[i])])
            )
            for i in range(env.num_entities)
        ]
        for state in states:
            for circle, position in zip(circles, np.asarray(state.p_pos), strict=True):
                circle.center = tuple(position)
            yield figure_image(figure)

    def _observe(self, observation: dict[str, jax.Array]) -> Observation:
        """The agents' observations as `[A, n]`, padded, with indices and a mask where they are needed."""
        facts = self._facts
        rows = [observation[agent] for agent in facts.agents]
        padded = jnp.stack([jnp.pad(row, (0, self._observation_length - row.size)) for row in rows])
        if self._index_length:
            padded = jnp.concatenate([padded, jnp.eye(self.num_agents)], axis=1)
        if not facts.discrete or len(set(facts.action_sizes)) == 1:
            return padded
        sizes = np.array(facts.action_sizes)
        return MaskedObservation(padded, jnp.asarray(np.arange(sizes.max()) < sizes[:, None]))

    @property
    def _observation_length(self) -> int:
        """The length of the longest observation."""
        return max(self._facts.observation_sizes)

    @property
    def _index_length(self) -> int:
        """The length of the one-hot index: `A` or 0."""
        facts = self._facts
        kinds = len(facts.env.classes), len(set(facts.observation_sizes)), len(set(facts.action_sizes))
        agents_agree = kinds == (1, 1, 1)
        has_index = not agents_agree if self.agent_identity is None else self.agent_identity
        return self.num_agents if has_index else 0

    @property
    def _facts(self) -> "_Facts":
        return _facts(self.name, self.overrides)


def factories() -> dict[str, Callable[..., Vectorized]]:
    """Factories of MPE by name, for the registry."""
    return {name: functools.partial(_make, name) for name in NAMES}


def _make(name: str, agent_identity: bool | None = None, **overrides: Any) -> Vectorized:
    """Makes the environment `name`."""
    check_options(f"environment '{name}'", _make, {"agent_identity": agent_identity})
    # Without overrides JaxMARL is not imported yet.
    if overrides:
        _check_overrides(name, overrides)
    return vectorize(ParticleEnvironment(name, agent_identity, tuple(sorted(overrides.items()))))


def _check_overrides(name: str, overrides: dict[str, Any]) -> None:
    """Raises for an override that the environment does not accept."""
    where = f"environment '{name}'"
    check_names(where, overrides, sorted((*_overridable_arguments(name), "agent_identity")))
    hashable_parameters(where, overrides, bool | int | float | str)
    parameters = inspect.signature(_constructor(name)).parameters.values()
    check_options(where, {parameter.name: parameter.default for parameter in parameters}, overrides)
    check_count(where, "max_steps", overrides.get("max_steps", 1))
    if overrides.get("action_type", "Discrete") not in ("Discrete", "Continuous"):
        value = overrides["action_type"]
        raise FdgError(f"{where}: action_type={value!r} must be 'Discrete' or 'Continuous'")


@functools.cache
def _overridable_arguments(name: str) -> tuple[str, ...]:
    """Arguments that a user may override."""
    parameters = inspect.signature(_constructor(name)).parameters.values()
    plain_types = (bool, int, float, str)
    names = [parameter.name for parameter in parameters if isinstance(parameter.default, plain_types)]
    # Arguments of the base class pass through `**kwargs`; three constructors have no parameters at all.
    return (*names, *(common for common in _COMMON_ARGUMENTS if parameters and common not in names))


def _constructor(name: str) -> Callable[..., Any]:
    """JaxMARL's class or function for a name."""
    mpe = _mpe()
    by_suffix = {"3a": mpe.SimpleFacmacMPE3a, "6a": mpe.SimpleFacmacMPE6a, "9a": mpe.SimpleFacmacMPE9a}
    words = name.split("_")[1:-1]  # without MPE and the version
    if words[-1] in by_suffix:
        return by_suffix[words[-1]]
    return getattr(mpe, "".join(word.capitalize() for word in words) + "MPE")


@functools.cache
def _mpe() -> Any:
    """JaxMARL's module of MPE; imports it, possibly during a trace."""
    with importing("environments 'MPE_...' need", "JaxMARL", "jaxmarl"):
        from jaxmarl.environments import mpe
        from jaxmarl.environments.mpe import simple_crypto
    simple_crypto.OBS_COLOUR = literals(simple_crypto.OBS_COLOUR)
    return mpe


@dataclasses.dataclass(frozen=True)
class _Facts:
    """JaxMARL's environment and its properties, known before it runs."""

    env: Any
    agents: tuple[str, ...]
    observation_sizes: tuple[int, ...]  # by agent; may differ from JaxMARL's declaration
    action_sizes: tuple[int, ...]  # by agent: number of actions, or components of a continuous one
    discrete: bool


@functools.cache
def _facts(name: str, overrides: tuple[tuple[str, Scalar], ...]) -> _Facts:
    """Makes JaxMARL's environment, and traces its reset."""
    constructor = _constructor(name)
    with jax.ensure_compile_time_eval():
        with converting_errors(f"environment '{name}'", "JaxMARL", overrides):
            env = constructor(**dict(overrides))
        replace_pytree_arrays(env)
    # In `ensure_compile_time_eval`, JaxMARL's jitted functions would capture arrays and keep them allocated.
    with jax.numpy_rank_promotion("allow"):
        observation, _ = jax.eval_shape(lambda: env.reset(jax.random.key(0)))
    spaces = [env.action_space(agent) for agent in env.agents]
    discrete = hasattr(spaces[0], "n")
    return _Facts(
        env=env,
        agents=tuple(env.agents),
        observation_sizes=tuple(observation[agent].size for agent in env.agents),
        action_sizes=tuple(space.n if discrete else space.shape[0] for space in spaces),
        discrete=discrete,
    )
