"""Co-design as an environment: an episode is a design, with all decisions in one step or one per step."""

import dataclasses
import functools
import math
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from envs.codesign import found, problem, reading
from envs.codesign.found import Designs
from envs.codesign.problem import Evaluation, Problem, Specs
from envs.environment import TimeStep, actions, check_keys, named_info
from envs.observations import MaskedObservation, Observation
from envs.spaces import Box, Discrete, MultiDiscrete, Space
from fdg.errors import FdgError, unknown_name
from fdg.rowwise import rowwise

PREFIX = "codesign:"  # of its names for `envs.make`
_NUMBER = re.compile(r"\d|=")  # occurs in numbers, but in no name of a level
# The options of parameters of `make`, which explains them.
SPECS = (*reading.LEVELS, "random", "explicit")
ORDERS = ("at_once", "sequence")
REWARDS = ("paper", "feasible_first")
INFO = ("score", "feasible", "violation", "latency_cycles", "energy_pj", "area_mm2", "best_score")
RHO, _LARGEST_RHO = 10.0, 1e4  # initial and maximum weight of the penalty
_MAX_OBSERVATION = 10.0  # the largest observed number


def make(
    name: str,
    /,
    *,
    specs: str | None = None,
    order: str = "at_once",
    reward: str = "paper",
    accuracy: str | None = None,
    subs: int | None = None,
    module: str | tuple[str, ...] = (),
    path: str = "",
    info: Any = ("score", "feasible", "best_score"),
    **limits: float,
) -> "CoDesign":
    """The environment `codesign:NAME`.

    Args:
      name: `w1`, `w2`, `w3` or the path of a TOML file.
      specs: a level of the problem's file, `tight`, `medium` or `loose`; `random` samples specs for each
        episode between tight and loose; `explicit` uses `[specs]`, or `limits`. Default: explicit ones if
        there are any, else medium.
      order: all decisions `at_once` in one step, or a `sequence` with one decision per step.
      reward: `paper`: the weighted accuracy minus a penalty for exceeding specs; `feasible_first`: the
        weighted accuracy if all specs are met, else minus the total excess.
      accuracy: the source of accuracies, in place of the file's.
      subs: maximum number of sub-accelerators, in place of the file's.
      module: `MODULE:NAME` of networks that the file names; permits their import.
      path: a copy of the file, next to copies of the files that it names, as in a run directory.
      info: names from `INFO` to report for each episode.
      **limits: `latency_ms`, `energy_uj`, `area_mm2` and other units, as in `[specs]`; each replaces the
      file's.

    Raises:
      FdgError: no such problem, or an invalid parameter.

    >>> env = make("w1", specs="tight")
    >>> env.action_space, env.max_episode_steps
    (MultiDiscrete(nvec=(4, 2, 2, 2, 2, 2, 2, 4, 4, 4, 4, 33, 3, 7, 4, 33, 3, 7, 4)), 1)
    """
    options: dict[str, tuple] = {"order": (order, ORDERS), "reward": (reward, REWARDS)}
    if specs is not None and specs not in (*SPECS,) and (not isinstance(specs, str) or _NUMBER.search(specs)):
        raise FdgError(
            f"specs of {PREFIX}{name} {specs!r:.60}: give the name of a level; numbers are given as"
            " latency_ms=0.003, energy_uj=2, area_mm2=1 (fdg codesign: --latency-ms 0.003 --energy-uj 2)"
        )
    if specs is not None:
        options["specs"] = (specs, SPECS)
    for key, (value, known) in options.items():
        if value not in known:
            raise unknown_name(f"{key} of {PREFIX}{name}", str(value), known)
    chosen_problem = reading.get(name, (module,) if isinstance(module, str) else module, path)
    if accuracy is not None:
        chosen_problem = dataclasses.replace(chosen_problem, accuracy=str(accuracy))
    if subs is not None:
        chosen_problem = dataclasses.replace(
            chosen_problem, chips=dataclasses.replace(chosen_problem.chips, subaccelerators=subs)
        )
    for key in limits:
        if key not in reading.UNITS:
            known = ("specs", "order", "reward", "accuracy", "subs", "module", "path", "info", *reading.UNITS)
            raise unknown_name(f"parameter of {PREFIX}{name}", key, known)
    if limits:
        if specs not in (None, "explicit"):
            raise FdgError(f"{PREFIX}{name}: specs={specs} and {next(iter(limits))} are given: leave one out")
        limit_specs = reading.specs(f"{PREFIX}{name}", limits, chosen_problem.technology)
        base = (
            Specs() if chosen_problem.specs in dict(chosen_problem.levels).values() else chosen_problem.specs
        )
        merged = (old if math.isinf(new) else new for old, new in zip(base, limit_specs, strict=True))
        chosen_problem = dataclasses.replace(chosen_problem, specs=Specs(*merged))
    elif specs in reading.LEVELS:
        chosen_problem = chosen_problem.at(specs)
    elif specs == "random":
        chosen_problem = chosen_problem.at("loose")
    info_names = named_info(info)
    for info_name in info_names:
        if info_name not in INFO:
            raise unknown_name(f"info of {PREFIX}{name}", info_name, INFO)
    return CoDesign(chosen_problem, order, reward, specs == "random", info_names)


def absolute(name: str) -> str:
    """The same environment from any working directory: with the file's absolute path.

    >>> absolute("codesign:/data/mine.toml?specs=tight"), absolute("codesign:w1")
    ('codesign:/data/mine.toml?specs=tight', 'codesign:w1')
    """
    path, mark, options = name.removeprefix(PREFIX).partition("?")
    return f"{PREFIX}{os.path.abspath(path)}{mark}{options}" if path.endswith(".toml") else name


def files_of(name: str, parameters: Mapping[str, Any]) -> dict[str, str]:
    """The problem's file, by the parameter `path`, which may name a copy."""
    file = name.removeprefix(PREFIX)
    return {"path": parameters.get("path") or file} if file.endswith(".toml") else {}


def trust_reason(_: str, parameters: Mapping[str, Any]) -> str | None:
    """As `envs.trust_reason`: only the parameter `module` imports code."""
    return f"imports the module {parameters['module']}" if parameters.get("module") else None


class State(NamedTuple):
    """State of a batch of episodes, and the best designs of all episodes so far; leading axis `B`."""

    chosen: jax.Array  # [B, decisions] int32, indices of options; 0 from `at` on
    at: jax.Array  # [B] int32, the next decision
    specs: jax.Array  # [B, 3] float32, this episode's: cycles, pJ, mm2
    rho: jax.Array  # [B] float32, weight of the penalty
    leader: jax.Array  # [B, 2] float32, score and penalty of the design with the highest reward
    best: Designs  # [B]
    front: Designs  # [B, POINTS], Pareto points


@dataclasses.dataclass(frozen=True)
class CoDesign:
    """A batch of co-design episodes; see `make`.

    The best design and the Pareto points outlive episodes, so they are in the state: equal under every
    distribution policy, and saved in checkpoints. `designs` reads them.

    Attributes:
      problem: defines the specs; with random specs, the loosest ones.
      order: "at_once" or "sequence".
      reward: "paper" or "feasible_first".
      draws_specs: sample specs for each episode.
      info: names reported for each episode.
    """

    problem: Problem
    order: str = "at_once"
    reward: str = "paper"
    draws_specs: bool = False
    info: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.draws_specs:
            return
        tight, loose = (self.problem.at(level).specs for level in ("tight", "loose"))
        for what, low, high in zip(Specs._fields, tight, loose, strict=True):
            if low > high or math.isinf(low) != math.isinf(high):
                raise FdgError(
                    f"{self.name}: specs=random draws {what} between [specs.tight], {low:g}, and"
                    f" [specs.loose], {high:g}: give it in both or neither, and not larger in tight"
                )

    @property
    def name(self) -> str:
        """`codesign:` and the problem's name."""
        return f"{PREFIX}{self.problem.name}"

    @property
    def family(self) -> str:
        """The family of presets; a sequence has its own settings."""
        return "codesign" if self._at_once else "codesign-sequence"

    @property
    def num_agents(self) -> None:
        """None: there is one agent."""
        return None

    @property
    def max_episode_steps(self) -> int:
        """The length of every episode."""
        return 1 if self._at_once else len(self.problem.decisions())

    @property
    def action_space(self) -> Space:
        """An index of an option of the next decision, or one for each decision."""
        counts = [len(decision.options) for decision in self.problem.decisions()]
        return MultiDiscrete(tuple(counts)) if self._at_once else Discrete(max(counts))

    @property
    def observation_space(self) -> Box:
        """Numbers from 0 to 10, `[n] float32`.

        In a sequence: the next decision, one-hot; for each decision its chosen index, scaled to [0, 1], and
        whether it was made; fractions of the PEs and the bandwidth that are left. Always: specs relative to
        the loosest level's; and at the end of an episode (else 0) latency, energy and area relative to the
        specs, and accuracies.
        """
        sequence = 0 if self._at_once else 3 * len(self.problem.decisions()) + 2
        return Box(0.0, _MAX_OBSERVATION, (sequence + 6 + len(self.problem.tasks),))

    def reset(self, keys: jax.Array) -> tuple[State, Observation]:
        """Starts one episode per key; see `Environment.reset`."""
        check_keys(self.name, keys)
        batch_size = len(keys)
        empty_designs = found.empty(self.problem, (batch_size,))
        state = State(
            empty_designs.choices,
            jnp.zeros(batch_size, jnp.int32),
            jax.vmap(self._draw_specs)(keys),
            jnp.full(batch_size, RHO),
            jnp.full((batch_size, 2), jnp.asarray([-1e9, 0.0])),
            empty_designs,
            found.empty(self.problem, (batch_size, found.POINTS)),
        )
        return state, self._observation(state)

    def step(self, keys: jax.Array, state: State, action: jax.Array) -> tuple[State, TimeStep]:
        """Takes one decision in every episode; see `Environment.step`.

        An option beyond the budgets becomes the nearest lower one within them (`problem.repair`).
        """
        check_keys(self.name, keys)
        action = actions(self.name, action, self.action_space, keys.shape)
        return rowwise(self._step_rows)(keys, state, action)

    def designs(self, state: Any) -> found.Results:
        """The best design and the Pareto points of all instances, as NumPy arrays.

        Args:
          state: this environment's, or any pytree that contains it, such as an algorithm's state, possibly of
            several agents.

        Raises:
          FdgError: it contains no state of a co-design problem.
        """
        leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, State))
        states = [leaf for leaf in leaves if isinstance(leaf, State)]
        if len(states) != 1:
            raise FdgError(f"{self.name}: the value contains {len(states)} of its states: give one state")
        return found.merge(states[0].best, states[0].front)

    def _step_rows(self, keys: jax.Array, state: State, action: jax.Array) -> tuple[State, TimeStep]:
        """`step`, which computes each row independently."""
        if self._at_once:
            chosen = jax.vmap(functools.partial(problem.repair, self.problem))(action)
        else:
            chosen = jax.vmap(functools.partial(problem.decide, self.problem))(state.chosen, state.at, action)
        at = state.at + 1
        done = at == self.max_episode_steps
        evaluate = functools.partial(problem.evaluate, self.problem)
        empty_result = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(evaluate, chosen, state.specs)
        )
        # Usually all episodes end at the same step, so this runs once per episode. Otherwise it runs more
        # often, and the results of unfinished episodes are ignored.
        result = jax.lax.cond(done.any(), evaluate, lambda *_: empty_result, chosen, state.specs)
        penalty = jax.vmap(self._penalty)(result.excess, state.specs)
        if self.reward == "paper":
            final_reward = result.score - state.rho * penalty
        else:
            final_reward = jnp.where(
                result.feasible, result.score, -jnp.minimum(result.violation, _MAX_OBSERVATION)
            )
        reward = jnp.where(done, final_reward, 0)
        after = self._with_best_designs(state._replace(chosen=chosen, at=at), result, penalty, done)
        final = self._observation(after, result, done)
        start = after._replace(
            chosen=jnp.where(done[:, None], 0, after.chosen),
            at=jnp.where(done, 0, after.at),
            specs=jnp.where(done[:, None], jax.vmap(self._draw_specs)(keys), after.specs),
        )
        reported = {
            **{key: getattr(result, key) for key in INFO if key != "best_score"},
            "best_score": jnp.where(after.best.violation == 0, after.best.score, jnp.nan),
        }
        time_step = TimeStep(
            observation=self._observation(start),
            reward=reward,
            terminated=done,
            truncated=jnp.zeros_like(done),
            final_observation=final,
            episode_return=reward,
            episode_length=jnp.where(done, at, 0),
            episode_info={
                key: jnp.where(done, jnp.asarray(reported[key], jnp.float32), 0) for key in self.info
            },
        )
        return start, time_step

    def _with_best_designs(
        self, state: State, result: Evaluation, penalty: jax.Array, done: jax.Array
    ) -> State:
        """The state with completed designs inserted into `best` and `front`, and the penalty's new weight."""
        violation = result.violation
        if self.draws_specs:
            costs = problem.Costs(*result[:3])
            violation = jax.vmap(lambda cost: problem.over(cost, self.problem.specs).sum())(costs)
        # The first fields of an evaluation are those of a design: costs, accuracies, score.
        new = Designs(state.chosen, *result[:5], jnp.where(done, violation, jnp.inf))
        candidate = jnp.stack([result.score, penalty], 1)
        reward, leader_reward = (x[:, 0] - state.rho * x[:, 1] for x in (candidate, state.leader))
        leads = done & (reward > leader_reward)
        # If the reward prefers a design that violates a spec to one that meets all, the penalty increases.
        prefers_violation = leads & ~result.feasible & (state.best.violation == 0)
        rho = jnp.where(
            prefers_violation & (not self.draws_specs), jnp.minimum(2 * state.rho, _LARGEST_RHO), state.rho
        )
        return state._replace(
            rho=rho,
            leader=jnp.where(leads[:, None], candidate, state.leader),
            best=jax.vmap(found.better)(new, state.best),
            front=jax.vmap(found.insert)(state.front, new),
        )

    def _observation(
        self, state: State, result: Evaluation | None = None, done: jax.Array | None = None
    ) -> Observation:
        """Observations [B]. Those of finished episodes include the design's costs and accuracies."""
        loosest = dict(self.problem.levels).get("loose", self.problem.specs)
        specs = jax.vmap(lambda x: jnp.nan_to_num(x / jnp.asarray(loosest), posinf=0.0))(state.specs)
        results = jnp.zeros((len(state.at), 3 + len(self.problem.tasks)))
        if result is not None and done is not None:
            costs = jnp.stack([jnp.asarray(x, jnp.float32) for x in result[:3]], 1) / state.specs
            finished = jnp.concatenate([costs, jnp.nan_to_num(result.accuracy)], 1)
            results = jnp.where(done[:, None], finished, results)
        parts = [specs, results]
        if self._at_once:
            return jnp.clip(jnp.concatenate(parts, 1), 0, _MAX_OBSERVATION)
        at = jnp.minimum(state.at, self.max_episode_steps - 1)
        designs = jax.vmap(self._design_observation)(state.chosen, state.at)
        mask = jax.vmap(functools.partial(problem.mask, self.problem))(state.chosen, at)
        return MaskedObservation(jnp.clip(jnp.concatenate([designs, *parts], 1), 0, _MAX_OBSERVATION), mask)

    def _design_observation(self, chosen: jax.Array, at: jax.Array) -> jax.Array:
        """The observation of one incomplete design."""
        decisions, chips = self.problem.decisions(), self.problem.chips
        largest = jnp.asarray([max(1, len(decision.options) - 1) for decision in decisions], jnp.float32)
        places = jnp.arange(len(decisions))
        is_chosen = places < at
        left = problem.remaining_budget(self.problem, chosen, jnp.minimum(at, len(decisions) - 1))
        budgets = chips.budget_pes, chips.budget_noc_bytes_per_cycle
        shares = jnp.stack([x / budget for x, budget in zip(left, budgets, strict=True)])
        return jnp.concatenate([places == at, jnp.where(is_chosen, chosen / largest, 0), is_chosen, shares])

    def _draw_specs(self, key: jax.Array) -> jax.Array:
        """The specs of an episode, [3] float32: sampled, or else the problem's."""
        if not self.draws_specs:
            return jnp.asarray(self.problem.specs, jnp.float32)
        levels = dict(self.problem.levels)
        tight, loose = (jnp.asarray(levels[level], jnp.float32) for level in ("tight", "loose"))
        drawn = tight * (loose / tight) ** jax.random.uniform(key, (3,))
        return jnp.where(jnp.isfinite(loose), drawn, loose)  # a spec that neither level has stays unlimited

    def _penalty(self, excess: jax.Array, specs: jax.Array) -> jax.Array:
        """NASAIC's penalty: the excess of each spec, relative to its maximum excess.

        If the problem has no bound, the excess is relative to the spec.
        """
        bounds = jnp.asarray(self.problem.bounds, jnp.float32)
        scale = jnp.where(jnp.isfinite(bounds) & (bounds > specs), specs / (bounds - specs), 1)
        return jnp.where(jnp.isfinite(specs), excess * scale, 0).sum()

    @property
    def _at_once(self) -> bool:
        return self.order == "at_once"
