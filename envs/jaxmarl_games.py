"""JaxMARL 0.2's other environments (Rutherford et al. 2024, arXiv 2311.10090): games of several agents.

SMAX (`HeuristicEnemySMAX?map=3m`), Overcooked and its second version (`overcooked?layout=coord_ring`),
Hanabi, Storm, the coin game, JaxNav and the switch riddle. `envs/from_jaxmarl.py` has the particles (MPE),
`envs/jaxmarl_brax.py` the bodies (MABrax). Differences from JaxMARL:

- Mappings from agent to array become arrays with an axis of agents. Observations that are all images of one
size stay images; others become vectors of concatenated parts, zero-padded to the longest.
- Invalid actions are masked, in SMAX and Hanabi. An agent without any valid action (dead, or the game is
over) may do anything.
- `agent_identity` appends each agent's one-hot index to its observation: by default in SMAX.
- A game that reaches its `max_steps` is truncated, unless it ended by itself. SMAX is made without a limit,
which `vectorize` applies, so a battle won in the last step is terminated.
- Overcooked rewards only soups, too rarely to learn from: `shaping` (1) is the weight of the shaped rewards
that JaxMARL trains with (`shaped_reward`). They count in the episode's return; `overcooked?shaping=0` is the
plain game.
"""

import dataclasses
import functools
import importlib
import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from envs.adapters import check_count, check_names, converting_errors, hashable_parameters, importing
from envs.environment import MaskedObservation, Observation, Vectorized, vectorize
from envs.literals import replace_arrays, replace_module_arrays
from envs.quiet import quietly, relaxed_checks
from envs.spaces import Box, Discrete, Space
from fdg.arguments import check_options
from fdg.errors import FdgError, unknown_name

Scalar: TypeAlias = "bool | int | float | str"

_NO_LIMIT = 2**30  # steps


@dataclasses.dataclass(frozen=True)
class Kind:
    """How one of JaxMARL's games is made, and where it differs from the others."""

    module: str  # module of the class, below `jaxmarl.environments`
    constructor: str
    # arguments whose product is the time limit; none for no limit
    limit: tuple[str, ...] = ()
    knows_limit: bool = True  # False: made without a limit, which `vectorize` applies
    mask_method: str | None = None  # name of the method that returns valid actions
    identity: bool = False  # True: each agent sees its index by default
    choices: tuple[str, str, str] | None = None  # argument with values by name; their module and mapping
    as_array: bool = False  # actions are passed as one array, not as a mapping


_STORM_LIMITS = ("num_inner_steps", "num_outer_steps")
_SMAX_MAPS = ("map", "smax.smax_env", "MAP_NAME_TO_SCENARIO")
KINDS: dict[str, Kind] = {
    "HeuristicEnemySMAX": Kind(
        "smax.heuristic_enemy_smax_env", "HeuristicEnemySMAX", ("max_steps",), False,
        "get_avail_actions", True, _SMAX_MAPS,
    ),
    "SMAX": Kind("smax.smax_env", "SMAX", ("max_steps",), False, "get_avail_actions", True, _SMAX_MAPS),
    "overcooked": Kind(
        "overcooked.overcooked", "Overcooked", ("max_steps",),
        choices=("layout", "overcooked.layouts", "overcooked_layouts"),
    ),
    "overcooked_v2": Kind(
        "overcooked_v2.overcooked", "OvercookedV2", ("max_steps",),
        choices=("layout", "overcooked_v2.layouts", "overcooked_v2_layouts"),
    ),
    "hanabi": Kind("hanabi.hanabi", "HanabiEnv", mask_method="get_legal_moves"),
    "storm": Kind("storm.storm_env", "InTheGrid", _STORM_LIMITS, as_array=True),
    "storm_2p": Kind("storm.storm_2p", "InTheGrid_2p", _STORM_LIMITS, as_array=True),
    "storm_np": Kind("storm.storm", "InTheMatrix", _STORM_LIMITS, as_array=True),
    "coin_game": Kind("coin_game.coin_game", "CoinGame", _STORM_LIMITS),
    "jaxnav": Kind("jaxnav.jaxnav_env", "JaxNav", ("max_steps",)),
    "switch_riddle": Kind("switch_riddle.switch_riddle", "SwitchRiddle"),
}  # fmt: skip

_SHAPED_GAMES = ("overcooked", "overcooked_v2")


@dataclasses.dataclass(frozen=True)
class JaxmarlGame:
    """A `SingleEnvironment` of several agents: JaxMARL's name and overrides."""

    game: str
    agent_identity: bool
    shaping: float = 0.0
    overrides: tuple[tuple[str, Scalar], ...] = ()

    @property
    def name(self) -> str:
        """JaxMARL's name."""
        return self.game

    @property
    def num_agents(self) -> int:
        """Number of controlled agents."""
        return len(_facts(self).agents)

    @property
    def observation_space(self) -> Box:
        """An image, or a vector as long as the longest observation plus the agent's one-hot index, if any."""
        return Box(float("-inf"), float("inf"), _facts(self).shape)

    @property
    def action_space(self) -> Space:
        """`Discrete`, or a bounded `Box`, as large as the agent with most actions needs."""
        return _facts(self).action_space

    @property
    def max_episode_steps(self) -> int | None:
        """JaxMARL's limit, if any."""
        return _facts(self).limit

    def reset(self, key: jax.Array) -> tuple[Any, Observation]:
        """Starts an episode."""
        env = _jaxmarl_environment(self)
        with relaxed_checks():
            observation, state = env.reset(key)
            return _arrays(state), self._observe(env, state, observation)

    def step(
        self, key: jax.Array, state: Any, action: jax.Array
    ) -> tuple[Any, Observation, jax.Array, jax.Array, jax.Array]:
        """Takes one step, without reset; `action [A]` or `[A, n]`."""
        env, facts, kind = _jaxmarl_environment(self), _facts(self), KINDS[self.game]
        actions: Any = action
        if not kind.as_array:
            actions = {agent: action[i] for i, agent in enumerate(facts.agents)}
        with relaxed_checks():
            observation, next_state, reward, done, info = env.step_env(key, state, actions)
            rewards = jnp.stack(_by_agent(reward, facts.agents)).astype(jnp.float32).reshape(-1)
            if self.shaping:
                shaped = jnp.stack(_by_agent(info["shaped_reward"], facts.agents))
                rewards += self.shaping * shaped.reshape(-1)
            next_state = jax.tree.map(
                lambda next_state, old: next_state.astype(old.dtype), _arrays(next_state), _arrays(state)
            )
            next_observation = self._observe(env, next_state, observation)
        is_over = jnp.asarray(done["__all__"], bool).reshape(())
        # A game that knows its limit is truncated there, and terminated if it ends earlier.
        at_limit = jnp.bool_(False)
        if kind.knows_limit and kind.limit:  # repeated games, with two limits, end only at their limits
            at_limit = next_state.step >= facts.limit if len(kind.limit) == 1 else is_over
        return next_state, next_observation, rewards, is_over & ~at_limit, is_over & at_limit

    def _observe(self, env: Any, state: Any, observation: Any) -> Observation:
        """The agents' observations, `[A, ...]`, with their valid actions if the game has a mask."""
        facts, kind = _facts(self), KINDS[self.game]
        rows = [_features(part, facts.is_image) for part in _by_agent(observation, facts.agents)]
        if not facts.is_image:
            length = facts.shape[0] - (len(rows) if self.agent_identity else 0)
            rows = [jnp.pad(row, (0, length - row.size)) for row in rows]
        features = jnp.stack(rows)
        if self.agent_identity:
            features = jnp.concatenate([features, jnp.eye(len(rows))], axis=1)
        if kind.mask_method is None:
            return features
        allowed = getattr(env, kind.mask_method)(state)
        mask = jnp.stack([jnp.asarray(allowed[agent], bool) for agent in facts.agents])
        return MaskedObservation(features, mask | ~mask.any(-1, keepdims=True))


def _arrays(state: Any) -> Any:
    return jax.tree.map(jnp.asarray, state)


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


def factories() -> dict[str, Callable[..., Vectorized]]:
    """Factories of games by name, for the registry."""
    return {game: functools.partial(_make, game) for game in KINDS}


def _make(
    game: str, *, agent_identity: bool | None = None, shaping: float | None = None, **overrides: Any
) -> Vectorized:
    where, kind = f"environment '{game}'", KINDS[game]
    check_options(where, _make, {"agent_identity": agent_identity, "shaping": shaping})
    if shaping is not None and (game not in _SHAPED_GAMES or not isinstance(shaping, int | float)):
        raise FdgError(f"{where}: shaping={shaping!r} must be a number, for {' or '.join(_SHAPED_GAMES)}")
    known = _overridable_arguments(game) if overrides else {}
    ours = ("agent_identity", "shaping") if game in _SHAPED_GAMES else ("agent_identity",)
    check_names(where, overrides, sorted((*known, *ours)))
    for argument, value in hashable_parameters(where, overrides, bool | int | float | str).items():
        if kind.choices and argument == kind.choices[0] and value not in (names := _named_values(game)):
            raise unknown_name(f"{argument} of {game}", str(value), names)
        if argument in kind.limit:
            check_count(where, argument, value)
    check_options(where, known, overrides)
    weight = (1.0 if game in _SHAPED_GAMES else 0.0) if shaping is None else float(shaping)
    identity = kind.identity if agent_identity is None else bool(agent_identity)
    return vectorize(JaxmarlGame(game, identity, weight, tuple(sorted(overrides.items()))))


@functools.cache
def _overridable_arguments(game: str) -> dict[str, Any]:
    """Arguments that a user may override, with defaults: numbers, strings, and a choice by name."""
    constructor = _constructor(game)
    defaults: dict[str, Any] = {}
    for base in constructor.__mro__:
        if "__init__" in vars(base):
            for parameter in inspect.signature(base.__init__).parameters.values():
                if isinstance(parameter.default, bool | int | float | str):
                    defaults.setdefault(parameter.name, parameter.default)
    if game == "HeuristicEnemySMAX":
        defaults = {**_overridable_arguments("SMAX"), **defaults}
    choices = KINDS[game].choices
    if choices:
        defaults[choices[0]] = None
    return defaults


@functools.cache
def _named_values(game: str) -> dict[str, Any]:
    """The values, by name, of the argument in `Kind.choices`."""
    choices = KINDS[game].choices
    assert choices is not None
    return dict(getattr(_module(choices[1], game), choices[2]))


def _constructor(game: str) -> Any:
    return getattr(_module(KINDS[game].module, game), KINDS[game].constructor)


@functools.cache
def _module(name: str, game: str) -> Any:
    """A module of JaxMARL's environments; imports it, also while JAX traces."""
    with importing(f"environment '{game}' needs", "JaxMARL", "jaxmarl"):
        module = importlib.import_module(f"jaxmarl.environments.{name}")
    replace_module_arrays("jaxmarl")
    return module


@functools.cache
def _jaxmarl_environment(single: JaxmarlGame) -> Any:
    """JaxMARL's environment, with its arrays on the host."""
    kind, constructor = KINDS[single.game], _constructor(single.game)
    arguments: dict[str, Any] = dict(single.overrides)
    if kind.choices and kind.choices[0] in arguments:
        argument = "scenario" if kind.choices[0] == "map" else kind.choices[0]
        arguments[argument] = _named_values(single.game)[arguments.pop(kind.choices[0])]
    if not kind.knows_limit:
        arguments["max_steps"] = _NO_LIMIT
    if single.game == "jaxnav" and "act_type" not in arguments:
        arguments["act_type"] = "Continuous"
    with jax.ensure_compile_time_eval(), quietly(), relaxed_checks(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with converting_errors(f"environment '{single.game}'", "JaxMARL", single.overrides):
            env = constructor(**arguments)
        replace_arrays(env, "jaxmarl")
    return env


@dataclasses.dataclass(frozen=True)
class _Facts:
    """Properties of an environment, known before it runs."""

    agents: tuple[Any, ...]
    is_image: bool
    shape: tuple[int, ...]
    action_space: Space
    limit: int | None


@functools.cache
def _facts(single: JaxmarlGame) -> _Facts:
    """Facts about a game, from its action spaces and a trace of its reset."""
    env, kind = _jaxmarl_environment(single), KINDS[single.game]
    agents = tuple(env.agents)
    with relaxed_checks():
        parts = jax.eval_shape(
            lambda: [jax.tree.leaves(row) for row in _by_agent(env.reset(jax.random.key(0))[0], agents)]
        )
    rows = [tuple(part.shape for part in row) for row in parts]
    is_image = not single.agent_identity and all(len(row) == 1 and len(row[0]) == 3 for row in rows)
    is_image &= len({row[0] for row in rows}) == 1
    length = max(sum(math.prod(shape) for shape in row) for row in rows)
    shape = rows[0][0] if is_image else (length + (len(agents) if single.agent_identity else 0),)
    spaces = [_space_of(env, agent) for agent in agents]
    space = spaces[0]
    actions: Space
    if hasattr(space, "n"):
        actions = Discrete(max(int(space.n) for space in spaces))
    else:
        low, high = (
            np.broadcast_to(np.asarray(bound, float), space.shape) for bound in (space.low, space.high)
        )
        actions = Box(tuple(low.tolist()), tuple(high.tolist()), tuple(space.shape))
    defaults = _overridable_arguments(single.game)
    arguments = {**defaults, **dict(single.overrides)}
    limit = math.prod(int(arguments[name]) for name in kind.limit) if kind.limit else None
    return _Facts(agents, is_image, tuple(shape), actions, limit)


def _space_of(env: Any, agent: Any) -> Any:
    """An agent's action space, from a mapping where the environment has one, else from a method."""
    return env.action_spaces[agent] if agent in env.action_spaces else env.action_space(agent)
