"""JaxMARL 0.2 (Rutherford et al. 2024, arXiv 2311.10090; github.com/FLAIROX/JaxMARL): several agents.

The multi-particle environments (MPE), SMAX (`HeuristicEnemySMAX?map=3m`), Overcooked and its second version
(`overcooked?layout=coord_ring`), Hanabi, Storm, the coin game, JaxNav and the switch riddle.
`envs/jaxmarl_brax.py` has the bodies (MABrax). Differences from JaxMARL:

- Mappings from agent to array become arrays with an axis of agents, in the order of JaxMARL's `agents`.
Observations that are all images of one size stay images; others become vectors of concatenated parts,
zero-padded to the longest.
- Invalid actions are masked, in SMAX and Hanabi, and in MPE actions that an agent lacks. An agent without any
valid action (dead, or the game is over) may do anything. Continuous actions are padded, and extra components
are ignored.
- `agent_identity` appends each agent's one-hot index to its observation: by default in SMAX, and in MPE if
agents differ in sizes or in JaxMARL's classes of agents, as in JaxMARL's wrapper for shared parameters
(`CTRolloutManager`).
- A game that ends at its `max_steps` is truncated; one that ends earlier is terminated. SMAX is made without
a limit, which `vectorize` applies, so a battle won in the last step is terminated.
- MPE compares its step count with the limit before it increments the count, so `max_steps=25` makes episodes
of 26 steps.
- Overcooked rewards only soups, too rarely to learn from: `shaping` (1) is the weight of the shaped rewards
that JaxMARL trains with (`shaped_reward`). They count in the episode's return; `overcooked?shaping=0` is the
plain game.

As in JaxMARL, the prey of `MPE_simple_facmac*` has actions and rewards, but moves by itself.

Keys are split as in JaxMARL (step, then reset), so for equal keys, results equal those of JaxMARL's `step`.
JaxMARL is imported on first use. Its constants are converted to NumPy arrays: literals of a program.
"""

import dataclasses
import functools
import importlib
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs.adapters import SCALARS, Overrides, check_count, checked_overrides, converting_errors, importing
from envs.environment import MaskedObservation, Observation, Vectorized, vectorize
from envs.library import Facts, LibraryEnvironment, with_dtypes_of
from envs.literals import replace_arrays, replace_module_arrays
from envs.quiet import quietly, relaxed_checks
from envs.rendering import drawing, figure_image
from envs.spaces import Box, Discrete, Space, bound
from fdg.arguments import check_options
from fdg.errors import FdgError, unknown_name

_NO_LIMIT = 2**30  # steps


@dataclasses.dataclass(frozen=True)
class Kind:
    """How one of JaxMARL's games is made, and where it differs from the others."""

    module: str  # module of the class, below `jaxmarl.environments`
    constructor: str  # name of the class
    # arguments whose product is the time limit; none for no limit
    limit: tuple[str, ...] = ()
    knows_limit: bool = True  # False: made without a limit, which `vectorize` applies
    mask_method: str | None = None  # name of the method that returns valid actions
    identity: bool | None = False  # whether each agent sees its index by default; None: if agents differ
    choices: tuple[str, str, str] | None = None  # argument with values by name; their module and mapping
    as_array: bool = False  # actions are passed as one array, not as a mapping
    ends_at_limit: bool = False  # True: it ends only at its limit
    late_steps: int = 0  # steps after the limit until it ends


# JaxMARL's classes of the multi-particle environments, in the order of its registry. All these names, and
# those of the other games, are compared with the registry in a test, because importing JaxMARL takes seconds.
PARTICLES = {
    "MPE_simple_v3": "SimpleMPE",
    "MPE_simple_tag_v3": "SimpleTagMPE",
    "MPE_simple_world_comm_v3": "SimpleWorldCommMPE",
    "MPE_simple_spread_v3": "SimpleSpreadMPE",
    "MPE_simple_crypto_v3": "SimpleCryptoMPE",
    "MPE_simple_speaker_listener_v4": "SimpleSpeakerListenerMPE",
    "MPE_simple_push_v3": "SimplePushMPE",
    "MPE_simple_adversary_v3": "SimpleAdversaryMPE",
    "MPE_simple_reference_v3": "SimpleReferenceMPE",
    "MPE_simple_facmac_v1": "SimpleFacmacMPE",
    "MPE_simple_facmac_3a_v1": "SimpleFacmacMPE3a",
    "MPE_simple_facmac_6a_v1": "SimpleFacmacMPE6a",
    "MPE_simple_facmac_9a_v1": "SimpleFacmacMPE9a",
}
# Numeric arguments of MPE's base class that a user may set.
_PARTICLE_ARGUMENTS = ("max_steps", "dt", "damping", "contact_force", "contact_margin")

# Fields that several games share.
_MPE = Kind("mpe", "", ("max_steps",), identity=None, ends_at_limit=True, late_steps=1)
_SMAX = Kind(
    "smax.smax_env", "SMAX", ("max_steps",), knows_limit=False, mask_method="get_avail_actions",
    identity=True, choices=("map", "smax.smax_env", "MAP_NAME_TO_SCENARIO"),
)  # fmt: skip
_REPEATED = Kind("", "", ("num_inner_steps", "num_outer_steps"), ends_at_limit=True)
_STORM = dataclasses.replace(_REPEATED, as_array=True)
KINDS: dict[str, Kind] = {  # by JaxMARL's names of games
    **{name: dataclasses.replace(_MPE, constructor=cls) for name, cls in PARTICLES.items()},
    "HeuristicEnemySMAX": dataclasses.replace(
        _SMAX, module="smax.heuristic_enemy_smax_env", constructor="HeuristicEnemySMAX"
    ),
    "SMAX": _SMAX,
    "overcooked": Kind(
        "overcooked.overcooked", "Overcooked", ("max_steps",),
        choices=("layout", "overcooked.layouts", "overcooked_layouts"),
    ),
    "overcooked_v2": Kind(
        "overcooked_v2.overcooked", "OvercookedV2", ("max_steps",),
        choices=("layout", "overcooked_v2.layouts", "overcooked_v2_layouts"),
    ),
    "hanabi": Kind("hanabi.hanabi", "HanabiEnv", mask_method="get_legal_moves"),
    "storm": dataclasses.replace(_STORM, module="storm.storm_env", constructor="InTheGrid"),
    "storm_2p": dataclasses.replace(_STORM, module="storm.storm_2p", constructor="InTheGrid_2p"),
    "storm_np": dataclasses.replace(_STORM, module="storm.storm", constructor="InTheMatrix"),
    "coin_game": dataclasses.replace(_REPEATED, module="coin_game.coin_game", constructor="CoinGame"),
    "jaxnav": Kind("jaxnav.jaxnav_env", "JaxNav", ("max_steps",)),
    "switch_riddle": Kind("switch_riddle.switch_riddle", "SwitchRiddle"),
}  # fmt: skip

_SHAPED_GAMES = ("overcooked", "overcooked_v2")  # games whose info has `shaped_reward`


@dataclasses.dataclass(frozen=True)
class JaxmarlGame(LibraryEnvironment):
    """A `SingleEnvironment` of several agents: JaxMARL's name and overrides."""

    name: str
    agent_identity: bool | None  # append the agent's one-hot index; None: only if agents differ
    shaping: float = 0.0  # weight of the shaped rewards
    overrides: Overrides = ()

    @property
    def facts(self) -> "_Facts":
        """Its properties, from JaxMARL's action spaces and a trace of its reset."""
        return _facts(self)

    def reset(self, key: jax.Array) -> tuple[Any, Observation]:
        """Starts an episode."""
        env = _jaxmarl_environment(self)
        with relaxed_checks():
            observation, state = env.reset(key)
            state = jax.tree.map(jnp.asarray, state)
            return state, self._observe(env, state, observation)

    def step(
        self, key: jax.Array, state: Any, action: jax.Array
    ) -> tuple[Any, Observation, jax.Array, jax.Array, jax.Array]:
        """Takes one step, without reset; `action [A]` or `[A, n]`."""
        env, facts, kind = _jaxmarl_environment(self), self.facts, KINDS[self.name]
        actions: Any = action
        if not kind.as_array:
            actions = {
                agent: action[i] if action.ndim == 1 else action[i, :size]
                for i, (agent, size) in enumerate(zip(facts.agents, facts.action_sizes, strict=True))
            }
        with relaxed_checks():
            observation, next_state, reward, done, info = env.step_env(key, state, actions)
            rewards = jnp.stack(_by_agent(reward, facts.agents)).astype(jnp.float32).reshape(-1)
            if self.shaping:
                shaped = jnp.stack(_by_agent(info["shaped_reward"], facts.agents))
                rewards += self.shaping * shaped.reshape(-1)
            next_state = with_dtypes_of(next_state, state)
            next_observation = self._observe(env, next_state, observation)
        is_over = jnp.asarray(done["__all__"], bool).reshape(())
        # A game that knows its limit is truncated there, and terminated if it ends earlier.
        at_limit = jnp.bool_(False)
        if kind.ends_at_limit:
            at_limit = is_over
        elif kind.knows_limit and kind.limit:
            at_limit = next_state.step >= facts.max_episode_steps
        return next_state, next_observation, rewards, is_over & ~at_limit, is_over & at_limit

    def frames(self, states: Sequence[Any]) -> Iterator[np.ndarray] | None:
        """Images of states of MPE, `[H, W, 3]` uint8 each; None for other games."""
        is_particles = self.name in PARTICLES
        return _draw_particles(_jaxmarl_environment(self), states) if is_particles else None

    def _observe(self, env: Any, state: Any, observation: Any) -> Observation:
        """The agents' observations, `[A, ...]`, with their valid actions if some are invalid."""
        facts, kind = self.facts, KINDS[self.name]
        rows = [_features(part, facts.is_image) for part in _by_agent(observation, facts.agents)]
        if not facts.is_image:
            rows = [jnp.pad(row, (0, facts.length - row.size)) for row in rows]
        features = jnp.stack(rows)
        if facts.has_index:
            features = jnp.concatenate([features, jnp.eye(len(rows))], axis=1)
        if kind.mask_method is not None:
            allowed = getattr(env, kind.mask_method)(state)
            mask = jnp.stack([jnp.asarray(allowed[agent], bool) for agent in facts.agents])
            return MaskedObservation(features, mask | ~mask.any(-1, keepdims=True))
        sizes = np.array(facts.action_sizes)
        if isinstance(facts.action_space, Box) or (sizes == sizes[0]).all():
            return features
        return MaskedObservation(features, jnp.asarray(np.arange(sizes.max()) < sizes[:, None]))


def _by_agent(value: Any, agents: tuple[Any, ...]) -> list[Any]:
    """Each agent's entry in a mapping, a tuple, or arrays with an axis of agents."""
    if isinstance(value, dict) and all(agent in value for agent in agents):
        return [value[agent] for agent in agents]
    if isinstance(value, tuple | list) and len(value) == len(agents):
        return list(value)
    return [jax.tree.map(functools.partial(_agent_part, i, len(agents)), value) for i in range(len(agents))]


def _agent_part(agent: int, num_agents: int, x: jax.Array) -> jax.Array:
    """An agent's part of an array. The axis of agents is the first, or the last (in Storm's inventories)."""
    return x[agent] if x.shape[0] == num_agents else x[..., agent]


def _features(observation: Any, is_image: bool) -> jax.Array:
    """Concatenates the parts of an observation; images are unchanged."""
    parts = [jnp.asarray(part, jnp.float32) for part in jax.tree.leaves(observation)]
    return parts[0] if is_image else jnp.concatenate([part.reshape(-1) for part in parts])


def _draw_particles(env: Any, states: Sequence[Any]) -> Iterator[np.ndarray]:
    """Draws a circle for each agent and each landmark."""
    from matplotlib.patches import Circle

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


def factories() -> dict[str, Callable[..., Vectorized]]:
    """Factories of games by name, for the registry."""
    return {name: functools.partial(_make, name) for name in KINDS}


def _make(
    name: str, *, agent_identity: bool | None = None, shaping: float | None = None, **overrides: Any
) -> Vectorized:
    """Makes the environment `name`; `shaping` and `agent_identity` default to those of the game."""
    where, kind = f"environment '{name}'", KINDS[name]
    check_options(where, _make, {"agent_identity": agent_identity, "shaping": shaping})
    if shaping is not None and (name not in _SHAPED_GAMES or not isinstance(shaping, int | float)):
        raise FdgError(f"{where}: shaping={shaping!r} must be a number, for {' or '.join(_SHAPED_GAMES)}")
    for argument in overrides.keys() & set(kind.limit):
        check_count(where, argument, overrides[argument])
    ours = ("agent_identity", "shaping") if name in _SHAPED_GAMES else ("agent_identity",)
    checked = checked_overrides(where, overrides, lambda: _overridable_arguments(name), ours, SCALARS)
    choice = kind.choices[0] if kind.choices else None
    if choice in overrides and overrides[choice] not in (names := _named_values(name)):
        raise unknown_name(f"{choice} of {name}", str(overrides[choice]), names)
    if name in PARTICLES and overrides.get("action_type", "Discrete") not in ("Discrete", "Continuous"):
        value = overrides["action_type"]
        raise FdgError(f"{where}: action_type={value!r} must be 'Discrete' or 'Continuous'")
    weight = (1.0 if name in _SHAPED_GAMES else 0.0) if shaping is None else float(shaping)
    identity = kind.identity if agent_identity is None else bool(agent_identity)
    return vectorize(JaxmarlGame(name, identity, weight, checked))


@functools.cache
def _overridable_arguments(name: str) -> dict[str, Any]:
    """Arguments that a user may override, with defaults: numbers, strings, and a choice by name."""
    constructor = _constructor(name)
    if name in PARTICLES:
        own = _plain_defaults(constructor)
        # Arguments of the base class pass through `**kwargs`; three constructors have no parameters at all.
        return {**dict.fromkeys(_PARTICLE_ARGUMENTS), **own} if own else {}
    defaults: dict[str, Any] = {}
    for base in constructor.__mro__:
        if "__init__" in vars(base):
            defaults = {**_plain_defaults(base.__init__), **defaults}
    if name == "HeuristicEnemySMAX":
        defaults = {**_overridable_arguments("SMAX"), **defaults}
    if choices := KINDS[name].choices:
        defaults[choices[0]] = None
    return defaults


def _plain_defaults(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if isinstance(p.default, bool | int | float | str)}


@functools.cache
def _named_values(name: str) -> dict[str, Any]:
    """The values, by name, of the argument in `Kind.choices`."""
    choices = KINDS[name].choices
    assert choices is not None
    return dict(getattr(_module(choices[1], name), choices[2]))


def _constructor(name: str) -> Any:
    """JaxMARL's class, or a function that makes the environment."""
    return getattr(_module(KINDS[name].module, name), KINDS[name].constructor)


@functools.cache
def _module(module: str, name: str) -> Any:
    """A module of JaxMARL's environments; imports it, also while JAX traces."""
    who_needs = "environments 'MPE_...' need" if name in PARTICLES else f"environment '{name}' needs"
    with importing(who_needs, "JaxMARL", "jaxmarl"):
        imported = importlib.import_module(f"jaxmarl.environments.{module}")
    replace_module_arrays("jaxmarl")
    return imported


@functools.cache
def _jaxmarl_environment(single: JaxmarlGame) -> Any:
    """JaxMARL's environment, with its arrays on the host."""
    kind, constructor = KINDS[single.name], _constructor(single.name)
    arguments: dict[str, Any] = dict(single.overrides)
    if kind.choices and kind.choices[0] in arguments:
        argument = "scenario" if kind.choices[0] == "map" else kind.choices[0]
        arguments[argument] = _named_values(single.name)[arguments.pop(kind.choices[0])]
    if not kind.knows_limit:
        arguments["max_steps"] = _NO_LIMIT
    if single.name == "jaxnav" and "act_type" not in arguments:
        arguments["act_type"] = "Continuous"
    with jax.ensure_compile_time_eval(), quietly(), relaxed_checks(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with converting_errors(f"environment '{single.name}'", "JaxMARL", single.overrides):
            env = constructor(**arguments)
        replace_arrays(env, "jaxmarl")
    return env


@dataclasses.dataclass(frozen=True)
class _Facts(Facts):
    num_agents: int
    agents: tuple[Any, ...]  # JaxMARL's names of agents
    action_sizes: tuple[int, ...]  # by agent: number of actions, or components of a continuous one
    is_image: bool
    length: int  # of the longest observation, if it is no image
    has_index: bool  # True: the agent's one-hot index follows


@functools.cache
def _facts(single: JaxmarlGame) -> _Facts:
    """As `JaxmarlGame.facts`; computed once."""
    env, kind = _jaxmarl_environment(single), KINDS[single.name]
    agents = tuple(env.agents)
    # In `ensure_compile_time_eval`, JaxMARL's jitted functions would capture arrays and keep them allocated.
    with relaxed_checks():
        parts = jax.eval_shape(
            lambda: [jax.tree.leaves(row) for row in _by_agent(env.reset(jax.random.key(0))[0], agents)]
        )
    rows = [tuple(part.shape for part in row) for row in parts]
    lengths = [sum(map(math.prod, row)) for row in rows]
    of_agents = env.action_spaces  # a mapping; some agents are only known to the method
    spaces = [of_agents[agent] if agent in of_agents else env.action_space(agent) for agent in agents]
    sizes = tuple(int(space.n) if hasattr(space, "n") else space.shape[0] for space in spaces)
    has_index = single.agent_identity
    if has_index is None:
        has_index = (len(env.classes), len(set(lengths)), len(set(sizes))) != (1, 1, 1)
    is_image = not has_index and len(set(rows)) == 1 and len(rows[0]) == 1 and len(rows[0][0]) == 3
    shape = rows[0][0] if is_image else (max(lengths) + (len(agents) if has_index else 0),)
    arguments = {**_overridable_arguments(single.name), **dict(single.overrides)}
    limits = [getattr(env, name) if arguments.get(name) is None else arguments[name] for name in kind.limit]
    return _Facts(
        Box(float("-inf"), float("inf"), tuple(shape)),
        _action_space(spaces[sizes.index(max(sizes))]),
        math.prod(map(int, limits)) + kind.late_steps if limits else None,
        len(agents), agents, sizes, is_image, max(lengths), has_index,
    )  # fmt: skip


def _action_space(largest: Any) -> Space:
    """`Discrete`, or a bounded `Box`, as large as the agent with most actions needs."""
    if hasattr(largest, "n"):
        return Discrete(int(largest.n))
    low, high = (
        np.broadcast_to(np.asarray(end, float), largest.shape) for end in (largest.low, largest.high)
    )
    return Box(bound(low), bound(high), tuple(largest.shape))
