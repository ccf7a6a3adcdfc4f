"""The base of all algorithms: presets, length of a run, environment steps, parameter updates."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax

import fdg
from algos import distributions, networks, optimizers, presets, registry, rollout
from algos.layers import Architecture, projected
from algos.networks import Network
from algos.rollout import Actor, Policy, choose_actions, evaluate
from algos.values import BONUS, Bonus
from envs import Environment, Observation, TimeStep, check_spec, composite, features_and_mask, num_agents
from envs.checking import check_batch_reset, check_batch_step
from envs.host import in_parts
from envs.rings import begin_step, end_step
from fdg.arguments import checked_names
from fdg.errors import FdgError, kind_of, listed
from fdg.settings import foreign
from fdg.settings.fields import (
    hyperparameter,
    require,
    require_positive,
    require_type,
    require_types,
    require_within,
)
from fdg.settings.given import check_same
from fdg.settings.parts import Part, check_parts
from fdg.settings.presets import HasPresets


@dataclasses.dataclass(frozen=True)
class Rollouts(Part):
    """The amount of experience in one iteration and in the whole run."""

    num_envs: int = hyperparameter(4, "environments stepped together")
    num_steps: int = hyperparameter(128, "steps of each environment in one iteration")
    total_steps: int = hyperparameter(500_000, "total environment steps; annealing ends there")
    rings: int = hyperparameter(1, "groups of environments that alternate: one steps while the others act")

    def check(self, algorithm: Any) -> None:
        """Refuses counts below 1, and rings that do not divide the environments."""
        require_positive(algorithm, "num_envs", "num_steps", "total_steps", "rings")
        require(
            algorithm,
            self.num_envs % self.rings == 0,
            f"rings={self.rings} does not divide num_envs={self.num_envs}: choose a divisor",
        )
        require(
            algorithm,
            self.rings == 1 or not getattr(getattr(algorithm, "env", None), "acts", False),
            f"rings={self.rings} with acts=True: workers that act have no turns to overlap: use rings=1",
        )


PRECISION: dict[str, Any] = {
    "help": "dtype of the operands of matrix products; bfloat16 is faster on devices that support it"
}
# Type annotations of fields that take functions, or `module:name` of a function.
VALUES = ("network", "bonus", "normalizer", "explorer", "transform")


@dataclasses.dataclass(frozen=True)
class Agent(HasPresets):
    """Base of the algorithms in this package; other algorithms need no base class.

    A subclass is a frozen dataclass with at least the fields `env` and `discount`, and the parts `Rollouts`
    and `OptimizerSettings`; it defines `updates_per_iteration` and `actor`, or takes them from a driver.

    Attributes:
      action_spaces: the kinds of action spaces that it supports.
      several_agents: True for multi-agent environments.
      bonus: a bonus on rewards; its mean is the metric `bonus`.
      precision: the dtype of the operands of matrix products in networks. Parameters, optimisers, losses,
        normalisers, and networks' outputs are always float32 ([decision
        061](docs/decisions/061-precision.md)).
    """

    action_spaces: ClassVar[tuple[type, ...]]
    several_agents: ClassVar[bool] = False
    preset_table: ClassVar[Any] = presets

    precision: Literal["float32", "bfloat16"] = dataclasses.field(
        default="float32", metadata=PRECISION, kw_only=True
    )
    bonus: Bonus | None = dataclasses.field(default=None, metadata=BONUS, kw_only=True)

    def __post_init__(self) -> None:
        self._check()

    def __init_subclass__(cls, driver: Any = None, **options: Any) -> None:
        """Adds the `MEMBERS` of a driver (`algos.off_policy`) that the class does not define itself.

        The driver's settings come after the class's own.
        """
        for name, value in getattr(driver, "MEMBERS", {}).items():
            if name not in vars(cls):
                setattr(cls, name, value)
        super().__init_subclass__(**options)

    @property
    def steps_per_iteration(self) -> int:
        """Environment steps of an iteration, all environments together."""
        return self.num_envs * self.num_steps

    @property
    def updates_per_iteration(self) -> int:
        """Gradient steps in one iteration."""
        raise NotImplementedError

    @property
    def learns_until(self) -> int | None:
        """The iteration after which the step size is zero; None if it never is."""
        return self.num_iterations if self.anneal_learning_rate else None

    def actor(self, state: Any) -> Actor:
        """The actor of a state."""
        raise NotImplementedError

    @checked_names
    def evaluate(self, state: Any, key: jax.Array, episodes: int, greedy: bool = True) -> dict[str, Any]:
        """Plays whole episodes, by default with the most probable actions; see `algos.rollout.evaluate`.

        Raises:
          FdgError: `state` is not the state of one agent.
        """
        self._check_state(state)
        return evaluate(self.env, self.actor(state), key, episodes, greedy)

    def check_when_traced(self, state: Any) -> None:
        """Checks what needs the state's shapes; `fdg.trace` calls it once."""

    @fdg.fragment("environment")
    def step(self, keys, env_state, action) -> tuple[Any, TimeStep]:
        """`keys [B]`, `action [B, *action]` -> the environments' next state and a `TimeStep [B]`."""
        result = self.env.step(keys, env_state, self._for_environment(action))
        return check_batch_step(self.env, result, keys.shape[0])

    @fdg.fragment("environment")
    def send(self, keys, env_state, action):
        """Starts a step of one part of the environments; arguments as for `step`."""
        with in_parts(self.rings):
            return begin_step(self.env, keys, env_state, self._for_environment(action))

    @fdg.fragment("environment")
    def recv(self, sent):
        """Waits for the step that `send` started; returns what `step` returns."""
        result = end_step(self.env, sent)
        return check_batch_step(self.env, result, jax.tree.leaves(sent)[0].shape[0])

    @fdg.fragment("environment", in_axes=(1, None), out_axes=None)
    def ready(self, sent, waiting):
        """Waits for one of the parts that are `waiting [R]`: `sent [R, B / R]` -> its index, int32."""
        return self.env.ready(sent, waiting)

    @fdg.fragment("update", in_axes=None, out_axes=None)
    def update(self, gradient, optimizer_state, parameters):
        """One step of the optimiser: new parameters and optimiser state."""
        return self._one_update(gradient, optimizer_state, parameters)

    @fdg.fragment("learner", in_axes=(None, 1), out_axes=(None, 1, None))
    def pay(self, state, time_step):
        """The bonus's state after a rollout `[T, B]`, the rollout with the bonus, and its mean."""
        axes = time_step.terminated.ndim  # A3C has one more axis: workers
        rows = jax.tree.map(lambda x: x.reshape(len(x), -1, *x.shape[axes:]), time_step)
        before = state
        found = self._bonus.apply(state, rows)
        state, reward = distributions.check_two("apply of bonus", found, "give a pair, (state, reward)")
        check_same("apply of bonus gives state", before, state)
        check_same("apply of bonus gives reward", rows.reward, reward, dtypes=False)
        reward = reward.reshape(time_step.reward.shape)
        return state, time_step._replace(reward=time_step.reward + reward), jnp.mean(reward)

    @fdg.fragment("learner", in_axes=(None, 1), out_axes=None)
    def observe(self, statistics, observation):
        """The normaliser's statistics with the observations `[T, B, *obs]` added, for agents with replay."""
        return self.normalizers.observed(statistics, observation)

    @property
    def _bonus(self) -> Any:
        return networks.by_name("--bonus", self.bonus)

    def _first_bonus(self, observation: Observation) -> Any:
        return None if self.bonus is None else self._bonus.init(features_and_mask(observation)[0])

    def _paid(self, state: Any, time_step: TimeStep) -> tuple[Any, TimeStep, dict[str, jax.Array]]:
        """The bonus's state after a rollout `[T, B]`, the rollout with the bonus added, and metrics."""
        if self.bonus is None:
            return state, time_step, {}
        state, time_step, mean = self.pay(state, time_step)
        return state, time_step, {"bonus": mean}

    def _own(self, field: str, sees: networks.Sees = "both") -> Any:
        """The user's network in a field as functions; None without one (see `algos.networks`)."""
        spaces = self.env.observation_space, self.env.action_space
        return networks.resolved(getattr(self, field), *spaces, field, sees)

    def _computing(self, network: Any) -> Any:
        """The network with matrix products in this `precision`."""
        if self.precision == "float32":
            return network
        if hasattr(network, "unroll"):
            return network._replace(unroll=_InBfloat16(network.unroll))
        return network._replace(apply=_InBfloat16(network.apply))

    def _actor_critic(self) -> Network:
        """The field `network`, or the default actor-critic with `layers`."""
        spaces = self.env.observation_space, self.env.action_space
        return self._computing(self._own("network") or networks.actor_critic(*spaces, **vars(self.layers)))

    def _check_actor_critic(self, network: Network, parameters: Any) -> None:
        """Refuses an actor-critic whose outputs do not fit the action space."""
        features = composite.types(self.env.observation_space, (self.num_envs,))
        output = jax.eval_shape(network.apply, parameters, features)
        distributions.check_actor_and_critic(output, self.env.action_space, (self.num_envs,))

    def _reset(self, key: jax.Array) -> tuple[Any, Observation]:
        """Initial state and observation of all environments, from one key."""
        keys = jax.random.split(key, self.num_envs)
        if self.rings == 1:
            return check_batch_reset(self.env, self.env.reset(keys), self.num_envs)

        def one_part(keys):  # on the host, each part has its own pool
            with in_parts(self.rings):
                return check_batch_reset(self.env, self.env.reset(keys), self.num_envs // self.rings)

        parts = jax.lax.map(one_part, rollout.in_parts(keys, self.rings))
        return jax.tree.map(rollout.of_parts, parts)

    @property
    def _rolling(self) -> dict[str, Any]:
        """The environment arguments of `algos.rollout.rollout`."""
        halves = (self.send, self.recv, *([self.ready] if hasattr(self.env, "ready") else []))
        step = self.step if self.rings == 1 else halves
        found = {"step": step, "num_steps": self.num_steps, "rings": self.rings}
        return found | ({"segment": self._segment} if getattr(self.env, "acts", False) else {})

    def _segment(self, act: Any, keys: jax.Array, env_state: Any) -> tuple[Any, ...]:
        """A rollout in which the environments' workers call the policy: see `rollout`."""

        def to_environment(observation: Any, keys: jax.Array) -> tuple[jax.Array, Any]:
            action, extras = act(observation, keys)
            return self._for_environment(action), (action, extras)

        acting, operands = self.env.acting(to_environment, keys)
        carry_out = functools.partial(self.env.segment, acting)
        run = fdg.fragment("actor", in_axes=(None, 2, 0), out_axes=(0, 0, 1, 1), name="segment")(carry_out)
        return run(operands, keys, env_state)

    def _for_environment(self, action):
        """Converts actions to the environment's format."""
        return distributions.bounded(action, self.env.action_space)

    def _chosen(self, policy: Policy, keys: jax.Array, greedy: bool) -> jax.Array:
        return self._for_environment(choose_actions(policy, keys, greedy))

    def _one_update(self, gradient: Any, optimizer_state: Any, parameters: Any) -> tuple[Any, Any]:
        updates, optimizer_state = self._optimizer.update(gradient, optimizer_state, parameters)
        return projected(optax.apply_updates(parameters, updates)), optimizer_state

    @property
    def _optimizer(self) -> optax.GradientTransformation:
        clip = getattr(self, "max_grad_norm", None)
        return optimizers.user_optimizer(self.optimizer, self._step_size, clip) or self._default_optimizer

    @property
    def _default_optimizer(self) -> optax.GradientTransformation:
        """Adam with gradient clipping; algorithms may override it."""
        return optimizers.clipped_adam(self._step_size, self.max_grad_norm)

    @property
    def _step_size(self) -> optimizers.StepSize:
        if not self.anneal_learning_rate:
            return self.learning_rate
        return optimizers.linear_decay(self.learning_rate, self.num_iterations, self.updates_per_iteration)

    def _check(self) -> None:
        """Raises an `FdgError` if a field has the wrong type or a part is out of range."""
        self._check_types()
        check_parts(self)
        require_within(self, 0, 1, "discount")
        for name in ("hidden", "critic_hidden"):
            widths = getattr(self, name, None)
            require(self, all(width > 0 for width in widths or ()), f"{name}={widths}: widths are above zero")
        agents, space = num_agents(self.env), self.env.action_space
        if (agents is not None) != self.several_agents:
            of = "one agent" if agents is None else f"{agents} agents"
            require(self, False, f"'{self.env.name}' is an environment of {of}: use {self._others()}")
        if not isinstance(space, self.action_spaces):
            require(self, False, f"cannot act in the action space {space}: use {self._others()}")

    @classmethod
    def can_act_in(cls, env: Environment) -> bool:
        """Whether the algorithm supports an environment's actions and number of agents."""
        several = num_agents(env) is not None
        return cls.several_agents == several and isinstance(env.action_space, cls.action_spaces)

    def _others(self) -> str:
        """The algorithms that support this environment, for a message."""
        return listed(_able(lambda one: one.can_act_in(self.env)) or ["one of your own"])

    def _check_state(self, state: Any) -> None:
        """Raises an `FdgError` if a state is not that of one agent."""
        if not hasattr(state, "iteration") and hasattr(state, "state"):
            fix = "engine.algorithm_state(state)"
            raise FdgError(f"{type(self).__name__}: this state holds older parameters as well: give {fix}")
        count = getattr(getattr(state, "iteration", None), "shape", None)
        if count is None:
            name = type(self).__name__
            raise FdgError(f"{name}: {kind_of(state)} is not its state: give what init or run returned")
        if count:
            raise FdgError(
                f"{type(self).__name__}: this state is of {count[0]} agents (num_seeds): take one,"
                f" jax.tree.map(lambda x: x[0], state), or all by jax.vmap"
            )

    def _spread(self, field: str) -> None:
        """Expands the name of an architecture into its fields."""
        network = getattr(self, field, None)
        if not isinstance(network, Architecture):
            return
        settings = dict(network.settings)
        if not all(hasattr(self, name) for name in settings):
            able = _able(lambda one: all(hasattr(one, name) for name in settings))
            given = ", ".join(f"{name}={value}" for name, value in settings.items())
            require(self, False, f"{field} has {given}: use {listed(able or ['another'])}")
        for name, value in {**settings, field: None}.items():
            object.__setattr__(self, name, value)

    def _check_types(self) -> None:
        """Raises an `FdgError` if a field has the wrong type."""
        check_spec(self.env)
        holds = {field.name: field.metadata.get("holds") for field in dataclasses.fields(self)}
        values = {name: kind for name, kind in holds.items() if kind in VALUES}
        for name in ("network", "actor_network"):
            self._spread(name)
        for name in values:
            value = getattr(self, name)
            if foreign.hashable(value) is not value:
                object.__setattr__(self, name, foreign.hashable(value))
        require_types(self, {name for name in values if foreign.is_network(getattr(self, name))})
        for name, kind in values.items():  # refuses unknown names
            if kind == "network" and isinstance(getattr(self, name), str):
                self._own(name)
            elif kind != "network":
                require_type(self, name, networks.by_name(f"--{name}", getattr(self, name)))


def _able(condition: Callable[[Any], bool]) -> list[str]:
    return sorted(registry.IN_ENVIRONMENTS[name] for name in registry.able(condition))


@dataclasses.dataclass(frozen=True)
class _InBfloat16:
    """A function with bfloat16 products (`fdg.in_bfloat16`); equal functions give equal values."""

    function: Callable[..., Any]

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return fdg.in_bfloat16(self.function)(*arguments, **options)
