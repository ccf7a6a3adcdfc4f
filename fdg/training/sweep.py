"""A sweep: agents with different float hyperparameters, trained by one program.

A float hyperparameter may be a traced array (`fdg.settings.fields`), so the state has each agent's values.
A `Sweep` is an algorithm like any other:

    point 0: learning_rate=0.001, entropy_coefficient=0.0    agents 0 to 15, of seeds 0 to 15
    point 1: learning_rate=0.001, entropy_coefficient=0.01   agents 16 to 31, of seeds 0 to 15
    ...

For the engine, checkpoints, evaluation and plans, a sweep is a number of agents (points times seeds). Each
agent computes the same numbers as a separate run.
"""

import dataclasses
import functools
import operator
import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core.primitives import convert_element_type_p

from fdg.arguments import quoted
from fdg.errors import FdgError, unknown_name
from fdg.fragment import with_numbers
from fdg.settings.fields import structural
from fdg.training.population import Population
from fdg.training.settings import MOST_AGENTS
from fdg.training.space import (
    Grid,
    grid_text,
    make_grid,
    parse_grid,
    point_text,
    points_of,
    use_search_instead,
)

_MAX_CHECKED = 256  # with more points than this, only some are checked
_STATE_METHODS = ("actor", "evaluate", "examples")  # methods whose first argument is the algorithm's state


class SweptState(NamedTuple):
    """One agent's state."""

    hyperparameters: dict[str, jax.Array]  # by name, [] float32 (float64 if it is enabled)
    state: Any  # the algorithm's state
    membership: Any = ()  # the `population.Membership` of an agent in a population


@dataclasses.dataclass(frozen=True)
class Sweep:
    """An algorithm with some hyperparameters in its state: see the module's docstring.

    It also has all other attributes of `algorithm`.

    Attributes:
      algorithm: the algorithm, with the hyperparameters that all agents share.
      grid: values by name of float hyperparameters, as for `fdg.sweep`; every combination is a point.
      num_seeds: agents per point.
      exploit_every: None for a grid. Otherwise the agents are a population that starts from the points: every
        `exploit_every` iterations the worst agents copy from the best (population-based training).

    Raises:
      FdgError: at construction, if a name is not a float hyperparameter, if it changes the program, or if the
        algorithm raises an error for a combination.
    """

    algorithm: Any
    grid: Grid
    num_seeds: int = 1
    exploit_every: int | None = None

    def __post_init__(self):
        object.__setattr__(self, "grid", make_grid(self.grid))
        check_names(self.algorithm, [name for name, _ in self.grid])
        if isinstance(self.num_seeds, bool) or not isinstance(self.num_seeds, int) or self.num_seeds < 1:
            raise FdgError(f"num_seeds={self.num_seeds!r}: give a whole number of agents, at least one")
        if self.agents > MOST_AGENTS:
            raise FdgError(f"sweep: {self.agents:,} agents are more than {MOST_AGENTS:,}: give fewer seeds")
        for point in self._points_to_check():
            try:
                dataclasses.replace(self.algorithm, **point)
            except ValueError as error:  # an `FdgError`, or an error of a user's class
                raise FdgError(f"sweep: {point_text(point)}: {error}") from error
        if self.between_agents is not None and self.agents < 2:
            raise FdgError("exploit_every: there is only one agent: give more values, or num_seeds")

    def _points_to_check(self) -> list[dict[str, float]]:
        """All points; if they are too many, single values and corners, since allowed ranges are convex."""
        if len(self.points) <= _MAX_CHECKED:
            return self.points
        base = self.points[0]
        single_values = [{**base, name: value} for name, values in self.grid for value in values]
        # At most 2**8 corners.
        corners = points_of(tuple((name, (min(values), max(values))) for name, values in self.grid[:8]))
        return [*single_values, *({**base, **corner} for corner in corners)]

    @functools.cached_property
    def between_agents(self) -> Population | None:
        """The rule by which agents of a population copy from each other; None for a grid."""
        if self.exploit_every is None:
            return None
        bounds = tuple((name, min(values), max(values)) for name, values in self.grid)
        return Population(self.exploit_every, bounds)

    @property
    def recorded_per_agent(self) -> tuple[str, ...]:
        """Metrics to record for each agent: the hyperparameters of a population."""
        return () if self.between_agents is None else tuple(name for name, _ in self.grid)

    @property
    def points(self) -> list[dict[str, float]]:
        """Every combination of values; the last name varies fastest."""
        return points_of(self.grid)

    @property
    def agents(self) -> int:
        """The number of agents: points times seeds."""
        return len(self.points) * self.num_seeds

    def agents_of(self, point: int) -> range:
        """The indices of a point's agents."""
        return range(point * self.num_seeds, (point + 1) * self.num_seeds)

    def seeds(self, seed: int) -> list[int]:
        """The seed of each agent: `seed`, `seed + 1`, ... for every point.

        In a population all seeds differ, or an agent would draw the same numbers as the agent that it copies.
        """
        distinct = self.num_seeds if self.exploit_every is None else self.agents
        return [seed + i % distinct for i in range(self.agents)]

    def at(self, point: int) -> Any:
        """The algorithm with the values of a point, as a separate run would have it."""
        return dataclasses.replace(self.algorithm, **self.points[point])

    def of(self, state: SweptState) -> Any:
        """The algorithm of agents that have the same hyperparameters, as a separate run would have it.

        Args:
          state: the state of one agent, or of several with an axis of agents.
        """
        fields = {}
        for name, values in self.grid:
            number = np.ravel(np.asarray(state.hyperparameters[name]))[0]
            unrounded = {type(number)(value): value for value in values}
            fields[name] = unrounded.get(number, float(number))
        return dataclasses.replace(self.algorithm, **fields)

    def chosen(
        self, agent: int | None, seed: int | None, values: Mapping[str, float], first: int = 0
    ) -> list[int]:
        """Selects agents of one point; returns their indices.

        Args:
          agent: the index of a single agent; excludes `seed` and `values`.
          seed: the seed of a single agent of the point; None: all agents of the point.
          values: hyperparameters that select the point.
          first: the first seed of each point.

        Raises:
          FdgError: no point or several points match, or there is no such agent.
        """
        if agent is not None:
            if seed is not None or values:
                raise FdgError(f"agent={agent} selects one agent: leave out seed and values")
            if not 0 <= agent < self.agents:
                raise FdgError(f"agent={agent}: this run has {self.agents} agents, 0 to {self.agents - 1}")
            return [agent]
        if self.exploit_every is not None:
            raise FdgError(
                "hyperparameters of a population change during training: give agent=, 0 to"
                f" {self.agents - 1}, or best"
            )
        for name in values:
            if name not in dict(self.grid):
                raise unknown_name("hyperparameter of this sweep", name, dict(self.grid))
        points = [
            i
            for i, point in enumerate(self.points)
            if all(np.float32(point[name]) == np.float32(value) for name, value in values.items())
        ]
        if len(points) != 1:
            examples = "; ".join(point_text(self.points[i]) for i in (points or range(len(self.points)))[:4])
            found = f"{len(points)} points have" if points else "no point has"
            problem = f"{found} {point_text(values)}" if values else f"the sweep has {len(points)} points"
            raise FdgError(f"{problem}: give the values of one point, such as {examples}")
        seeds = range(first, first + self.num_seeds)
        if seed is not None and seed not in seeds:
            raise FdgError(f"no agent has seed={seed}: give one from {seeds[0]} to {seeds[-1]}")
        agents = self.agents_of(points[0])
        return list(agents) if seed is None else [agents[seed - first]]

    # --- the two functions of every algorithm, and the engine's interface to agents that differ ---

    def starts(self, seed: int, count: int) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The arguments of `init`: keys and hyperparameters, each `[agents]`.

        Raises:
          FdgError: `count` is not the number of this sweep's agents.
        """
        if count != self.agents:
            raise FdgError(
                f"this sweep has {self.agents} agents ({len(self.points)} points of {self.num_seeds}"
                f" seeds), not {count}: give num_seeds={self.agents} to fdg.compile"
            )
        values = np.repeat([list(point.values()) for point in self.points], self.num_seeds, axis=0)
        keys = jnp.stack([jax.random.key(agent_seed) for agent_seed in self.seeds(seed)])
        names = [name for name, _ in self.grid]
        return keys, {name: jnp.asarray(column, float) for name, column in zip(names, values.T, strict=True)}

    def init(self, start: Any) -> SweptState:
        """An agent's initial state from a row of `starts`, or from a key with the values of point 0."""
        first_point = {name: jnp.asarray(value, float) for name, value in self.points[0].items()}
        key, numbers = start if isinstance(start, tuple) else (start, first_point)
        membership = () if self.between_agents is None else self.between_agents.initial_membership(key)
        return SweptState(dict(numbers), self._call("init", numbers, key), membership)

    def iterate(self, state: SweptState) -> tuple[SweptState, dict[str, jax.Array]]:
        """One iteration of the algorithm with this agent's hyperparameters."""
        next_state, metrics = self._call("iterate", state.hyperparameters, state.state)
        if self.between_agents is None:
            return SweptState(state.hyperparameters, next_state), metrics
        membership = self.between_agents.add_iteration(state.membership, metrics)
        return SweptState(state.hyperparameters, next_state, membership), {**metrics, **state.hyperparameters}

    def _with(self, numbers: Mapping[str, jax.Array]) -> Any:
        """The algorithm with an agent's hyperparameters, as weakly typed as Python's floats."""
        weak = {
            name: convert_element_type_p.bind(x, new_dtype=x.dtype, weak_type=True, sharding=None)
            for name, x in numbers.items()
        }
        return with_numbers(self.algorithm, weak)

    def said(self) -> dict[str, Any]:
        """The entries of `config.json` that describe the sweep."""
        exploit = {} if self.exploit_every is None else {"exploit_every": self.exploit_every}
        return {"sweep": grid_text(self.grid), "num_seeds": self.num_seeds, **exploit}

    def changed(self, **fields: Any) -> "Sweep":
        """The same sweep of `algorithm` with changed fields."""
        return dataclasses.replace(self, algorithm=replace_fields(self.algorithm, fields))

    def with_algorithm(self, **fields: Any) -> "Sweep":
        """Deprecated name of `changed`."""
        warnings.warn("Sweep.with_algorithm is deprecated: write changed", DeprecationWarning, 2)
        return self.changed(**fields)

    def _call(self, method: str, numbers: Mapping[str, jax.Array], /, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the algorithm with an agent's hyperparameters.

        Replaces JAX's error about traced values in control flow by one that names the hyperparameter.
        """
        call = operator.methodcaller(method, *args, **kwargs)
        try:
            return call(self._with(numbers))
        except jax.errors.JAXTypeError:
            untraceable = [name for name, _ in self.grid if not self._is_traceable(name, call)]
            if not untraceable:
                raise
            raise FdgError(
                f"sweep: {type(self.algorithm).__name__} branches in Python on {', '.join(untraceable)},"
                f" which a sweep traces: use jnp.where, or {use_search_instead(*untraceable)}"
            ) from None

    def _is_traceable(self, name: str, call: Callable[[Any], Any]) -> bool:
        try:
            jax.eval_shape(lambda traced: call(with_numbers(self.at(0), {name: traced})), jnp.float32(0))
        except jax.errors.JAXTypeError:
            return False
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("algorithm", "grid", "num_seeds", "exploit_every"):
            raise AttributeError(name)
        attribute = getattr(self.algorithm, name)
        if name == "check_when_traced":
            return lambda state: attribute(state.state)
        if name not in _STATE_METHODS:
            return attribute

        @functools.wraps(attribute)
        def method(state: SweptState, *args: Any, **kwargs: Any) -> Any:
            return self._call(name, state.hyperparameters, state.state, *args, **kwargs)

        return method


def replace_fields(algorithm: Any, fields: Mapping[str, Any]) -> Any:
    """The algorithm with changed fields: by its method `changed`, else by `dataclasses.replace`."""
    change = getattr(algorithm, "changed", None)
    return change(**fields) if callable(change) else dataclasses.replace(algorithm, **fields)


def wrapper_entries(algorithm: Any) -> dict[str, Any]:
    """The entries of `config.json` for wrappers of an algorithm, which have a method `said`."""
    if not callable(getattr(type(algorithm), "said", None)):
        return {}
    return {**wrapper_entries(algorithm.algorithm), **algorithm.said()}


def restore_sweep(algorithm: Any, config: Mapping[str, Any]) -> Any:
    """Wraps an algorithm in the sweep of a run's configuration (`Sweep.said`), if it has one.

    Raises an `FdgError` for `exploit_every` without a sweep.
    """
    text, period = config.get("sweep"), config.get("exploit_every")
    if text is None and period is not None:
        raise FdgError(f"--exploit-every {period}: a population needs values to try: give them with --sweep")
    if text is None:
        return algorithm
    return Sweep(algorithm, parse_grid(str(text)), config.get("num_seeds") or 1, period)


def unwrap_sweep(algorithm: Any) -> Any:
    """The algorithm inside a sweep; any other algorithm unchanged."""
    return algorithm.algorithm if isinstance(algorithm, Sweep) else algorithm


def agent_count(algorithm: Any, num_seeds: int | None) -> int | None:
    """The number of a run's agents; None if its state has no axis of agents."""
    return algorithm.agents if isinstance(algorithm, Sweep) else num_seeds


def agent_seeds(algorithm: Any, seed: int, agents: int | None) -> list[int]:
    """The seed of each agent of a run."""
    if isinstance(algorithm, Sweep):
        return algorithm.seeds(seed)
    return [seed + i for i in range(agents or 1)]


def point_names(algorithm: Any) -> list[str]:
    """The points of a sweep as text; empty for another algorithm."""
    if not isinstance(algorithm, Sweep):
        return []
    prefix = "" if algorithm.exploit_every is None else "begun with "
    return [prefix + point_text(point) for point in algorithm.points]


def agent_names(algorithm: Any, seed: int, agents: Sequence[int]) -> str:
    """Names of agents for messages: `seeds 0, 1`, or the points of a sweep."""
    if not isinstance(algorithm, Sweep):
        return f"seeds {', '.join(str(seed + i) for i in agents)}"
    points = list(dict.fromkeys(i // algorithm.num_seeds for i in agents))
    texts = "; ".join(point_text(algorithm.points[i]) for i in points[:3])
    return f"{texts}; ..." if points[3:] else texts


def check_names(algorithm: Any, names: Sequence[str]) -> None:
    """Checks that names are float hyperparameters that can be swept."""
    if not dataclasses.is_dataclass(algorithm) or isinstance(algorithm, type):
        raise FdgError(f"sweep: {quoted(algorithm)} has no fields: give an algorithm that is a dataclass")
    cls = type(algorithm)
    fields = [field.name for field in dataclasses.fields(algorithm) if field.init]
    hints, fixed = typing.get_type_hints(cls), structural(cls)
    floats = [name for name in fields if float in (hints[name], *typing.get_args(hints[name]))]
    allowed = [name for name in floats if name not in fixed]
    for name in names:
        if name in allowed:
            continue
        if name not in fields:
            raise unknown_name(f"hyperparameter of {cls.__name__}", name, allowed)
        reason = f"decides {fixed[name]}" if name in fixed else "is not a float, and changes the program"
        raise FdgError(
            f"sweep: {name} of {cls.__name__} {reason}: {use_search_instead(name)};"
            f" a sweep can have {', '.join(allowed)}"
        )
