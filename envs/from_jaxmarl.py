"""The multi-particle environments (MPE) of JaxMARL 0.2 (github.com/FLAIROX/JaxMARL), behind our interface.

What is made uniform:

- JaxMARL's mappings from agent to array become arrays with an axis of agents, in the order of its `agents`.
- Agents see observations of one length: shorter ones are padded with zeros at their end. Where agents are
  not alike, by size or by JaxMARL's classes of agents, each one's number follows one-hot, as JaxMARL's own
  wrapper for shared parameters (`CTRolloutManager`) has it; `agent_identity` says otherwise.
- Agents choose among equally many actions: those that an agent does not have are never allowed by its mask.
  Continuous actions are padded, and what an agent does not have is ignored.
- An episode ends by its time limit only: a truncation, where JaxMARL says no more than `done`. It reads the
  clock before it moves it, so that `max_steps=25` makes episodes of 26 steps.

What stays JaxMARL's own: in `MPE_simple_facmac*` the prey has actions, and rewards, but moves by itself.

The keys of one step are split as JaxMARL splits them (step, then reset), so for equal keys the numbers are
those of its own `step`. It is imported at first use, and its constants are held as NumPy arrays that enter a
program as literals.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from envs.adapters import accepting, check_count, check_names, importing, plain
from envs.environment import MaskedObservation, Observation, Vectorized, vectorize
from envs.literals import hold_pytrees, literals
from envs.rendering import captured, drawing
from envs.spaces import Box, Discrete, Space
from fdg.arguments import check_options
from fdg.errors import FdgError

# Written out, and compared with JaxMARL's registry in a test, because importing JaxMARL takes seconds.
NAMES = (
    "MPE_simple_v3",
    "MPE_simple_tag_v3",
    "MPE_simple_world_comm_v3",
    "MPE_simple_spread_v3",
    "MPE_simple_crypto_v3",
    "MPE_simple_speaker_listener_v4",
    "MPE_simple_push_v3",
    "MPE_simple_adversary_v3",
    "MPE_simple_reference_v3",
    "MPE_simple_facmac_v1",
    "MPE_simple_facmac_3a_v1",
    "MPE_simple_facmac_6a_v1",
    "MPE_simple_facmac_9a_v1",
)

Scalar: TypeAlias = "bool | int | float | str"

# Arguments of the class that all of MPE derives from which a user may give: numbers, and no names or colours.
_COMMON_ARGUMENTS = ("max_steps", "dt", "damping", "contact_force", "contact_margin")


@dataclasses.dataclass(frozen=True)
class ParticleEnvironment:
    """A `SingleEnvironment` of several agents: JaxMARL's name for it, and what differs from its defaults."""

    name: str
    agent_identity: bool | None = None  # one-hot behind the observation; None: where agents are not alike
    overrides: tuple[tuple[str, Scalar], ...] = ()  # of the constructor's arguments

    @property
    def num_agents(self) -> int:
        """Agents, adversaries and all."""
        return len(self._facts.agents)

    @property
    def observation_space(self) -> Space:
        """Unbounded, of the longest observation, and the agent's number where that is given."""
        return Box(float("-inf"), float("inf"), (self._length + self._identities,))

    @property
    def action_space(self) -> Space:
        """`Discrete`, or a `Box` from 0 to 1, of the agent that has most actions."""
        most = max(self._facts.action_sizes)
        return Discrete(most) if self._facts.discrete else Box(0.0, 1.0, (most,))

    @property
    def max_episode_steps(self) -> int:
        """One more than JaxMARL's `max_steps`, as its episodes have."""
        return self._facts.env.max_steps + 1

    def reset(self, key: jax.Array) -> tuple[Any, Observation]:
        """Start an episode."""
        with jax.numpy_rank_promotion("allow"):  # JaxMARL is written for it
            observation, state = self._facts.env.reset(key)
        return state, self._observe(observation)

    def step(
        self, key: jax.Array, state: Any, action: jax.Array
    ) -> tuple[Any, Observation, jax.Array, jax.Array, jax.Array]:
        """Take one step, without reset; `action [A]` or `[A, n]`."""
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
        """Pictures of states, `[H, W, 3]` uint8 each: a circle for each agent and each landmark."""
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
            yield captured(figure)

    def _observe(self, observation: dict[str, jax.Array]) -> Observation:
        facts = self._facts
        rows = [observation[agent] for agent in facts.agents]
        padded = jnp.stack([jnp.pad(row, (0, self._length - row.size)) for row in rows])
        if self._identities:
            padded = jnp.concatenate([padded, jnp.eye(self.num_agents)], axis=1)
        if not facts.discrete or len(set(facts.action_sizes)) == 1:
            return padded
        sizes = np.array(facts.action_sizes)
        return MaskedObservation(padded, jnp.asarray(np.arange(sizes.max()) < sizes[:, None]))

    @property
    def _length(self) -> int:
        """Of the longest observation."""
        return max(self._facts.observation_sizes)

    @property
    def _identities(self) -> int:
        """How many numbers name the agent: `A` or none."""
        facts = self._facts
        kinds = len(facts.env.classes), len(set(facts.observation_sizes)), len(set(facts.action_sizes))
        alike = kinds == (1, 1, 1)
        wanted = not alike if self.agent_identity is None else self.agent_identity
        return self.num_agents if wanted else 0

    @property
    def _facts(self) -> "_Facts":
        return _facts(self.name, self.overrides)


def factories() -> dict[str, Callable[..., Vectorized]]:
    """Factory of every environment of MPE by name, for the registry."""
    return {name: functools.partial(_make, name) for name in NAMES}


def _make(name: str, agent_identity: bool | None = None, **overrides: Any) -> Vectorized:
    check_options(f"environment '{name}'", _make, {"agent_identity": agent_identity})
    # Without overrides nothing is asked of JaxMARL, and so it is not imported yet.
    if overrides:
        _check(name, overrides)
    return vectorize(ParticleEnvironment(name, agent_identity, tuple(sorted(overrides.items()))))


def _check(name: str, overrides: dict[str, Any]) -> None:
    """Raise where an override is none that the environment takes."""
    where = f"environment '{name}'"
    check_names(where, overrides, sorted((*_arguments(name), "agent_identity")))
    plain(where, overrides, bool | int | float | str)
    parameters = inspect.signature(_constructor(name)).parameters.values()
    check_options(where, {one.name: one.default for one in parameters}, overrides)
    check_count(where, "max_steps", overrides.get("max_steps", 1))
    if overrides.get("action_type", "Discrete") not in ("Discrete", "Continuous"):
        given = overrides["action_type"]
        raise FdgError(f"{where}: action_type={given!r} must be 'Discrete' or 'Continuous'")


@functools.cache
def _arguments(name: str) -> tuple[str, ...]:
    """What a user may override."""
    parameters = inspect.signature(_constructor(name)).parameters.values()
    numbers = (bool, int, float, str)
    own = [parameter.name for parameter in parameters if isinstance(parameter.default, numbers)]
    # Those of the common base come through `**kwargs`; three of the environments take nothing at all.
    return (*own, *(common for common in _COMMON_ARGUMENTS if parameters and common not in own))


def _constructor(name: str) -> Callable[..., Any]:
    """JaxMARL's class, or function, behind a name."""
    mpe = _mpe()
    by_suffix = {"3a": mpe.SimpleFacmacMPE3a, "6a": mpe.SimpleFacmacMPE6a, "9a": mpe.SimpleFacmacMPE9a}
    words = name.split("_")[1:-1]  # without MPE and the version
    if words[-1] in by_suffix:
        return by_suffix[words[-1]]
    return getattr(mpe, "".join(word.capitalize() for word in words) + "MPE")


@functools.cache
def _mpe() -> Any:
    """JaxMARL's module; imports it, possibly while a program is being traced."""
    with importing("environments 'MPE_...' need", "JaxMARL", "jaxmarl"):
        from jaxmarl.environments import mpe
        from jaxmarl.environments.mpe import simple_crypto
    simple_crypto.OBS_COLOUR = literals(simple_crypto.OBS_COLOUR)
    return mpe


@dataclasses.dataclass(frozen=True)
class _Facts:
    """JaxMARL's environment, and what is known about it before it runs."""

    env: Any
    agents: tuple[str, ...]
    observation_sizes: tuple[int, ...]  # by agent; not always those that JaxMARL declares
    action_sizes: tuple[int, ...]  # by agent: number of actions, or components of a continuous one
    discrete: bool


@functools.cache
def _facts(name: str, overrides: tuple[tuple[str, Scalar], ...]) -> _Facts:
    constructor = _constructor(name)
    with jax.ensure_compile_time_eval():
        with accepting(f"environment '{name}'", "JaxMARL", overrides):
            env = constructor(**dict(overrides))
        hold_pytrees(env)
    # Not evaluated while compiling: the arrays would stay, as constants of the programs that JaxMARL keeps.
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
