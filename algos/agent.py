"""The base class of the algorithms: settings of rollouts, environment steps, parameter updates."""

import dataclasses
from typing import Any, ClassVar, Literal

import jax

import fdg
from algos import presets, registry
from algos.rollout import choose_actions
from algos.values import Policy
from envs import Environment, Observation, TimeStep, num_agents
from envs.checking import check_batch_reset, check_batch_step
from fdg.arguments import checked_names
from fdg.keys import typed
from fdg.settings.fields import hyperparameter, own_value, require_divides, require_positive
from fdg.settings.parts import Part
from fdg.settings.presets import HasPresets


@dataclasses.dataclass(frozen=True)
class Rollouts(Part):
    """The amount of experience in one iteration and in the whole run."""

    num_envs: int = hyperparameter(4, "environments stepped together")
    num_steps: int = hyperparameter(128, "steps of each environment in one iteration")
    total_steps: int = hyperparameter(500_000, "total environment steps; annealing ends there")
    rings: int = hyperparameter(
        1, "groups of environments that alternate: one steps while actions are computed for the others"
    )

    def check(self, algorithm: Any) -> None:
        """Refuses counts below 1, and a number of rings that does not divide `num_envs`."""
        require_positive(algorithm, "num_envs", "num_steps", "total_steps", "rings")
        require_divides(algorithm, "rings", self.num_envs, f"num_envs={self.num_envs}")


@dataclasses.dataclass(frozen=True)
class Agent(HasPresets):
    """Base of the algorithms in this package; other algorithms need no base class.

    A subclass is a frozen dataclass with at least the fields `env` and `discount`, and the parts `Rollouts`
    and `OptimizerSettings`; it defines `updates_per_iteration` and `actor`, or takes them from a `driver`, a
    module with methods that several algorithms share (such as `algos.off_policy`).

    Attributes:
      action_spaces: the supported kinds of action spaces.
      several_agents: True for multi-agent environments.
      values_novelty: True if novelty (`algos.rnd`) has its own value function; otherwise it is added to
        rewards.
      bonus: an additional reward; the metric `bonus` is the mean of all additional rewards.
      precision: the dtype of the operands of matrix products in networks. Parameters, optimisers, losses,
        normalisers, and networks' outputs are always float32 ([decision
        061](docs/decisions/061-precision.md)).

    Raises:
      FdgError: at construction, if a field is out of range, a size does not divide another, or the
        environment or data set does not fit.
    """

    action_spaces: ClassVar[tuple[type, ...]]
    several_agents: ClassVar[bool] = False
    values_novelty: ClassVar[bool] = False
    preset_table: ClassVar[Any] = presets  # the module that finds presets

    _: dataclasses.KW_ONLY
    precision: Literal["float32", "bfloat16"] = hyperparameter(
        "float32", "dtype of the operands of matrix products; bfloat16 is faster on devices that support it"
    )
    bonus: Any = own_value("module:name of an additional reward, an algos.Bonus (None: none)", "bonus")
    novelty = registry.option("rnd").RandomNetworkDistillation()

    def __post_init__(self) -> None:
        self._check()

    @property
    def steps_per_iteration(self) -> int:
        """Environment steps of an iteration, all environments together."""
        return self.num_envs * self.num_steps

    @property
    def learns_until(self) -> int | None:
        """The iteration after which the step size is zero; None if the step size is constant."""
        return self.num_iterations if self.anneal_learning_rate else None

    @checked_names
    def evaluate(self, state: Any, key: jax.Array, episodes: int, greedy: bool = True) -> dict[str, Any]:
        """Plays whole episodes, by default with the likeliest actions; see `algos.evaluation.evaluate`."""
        registry.option("checks").check_state(self, state)
        key = typed(key, f"{type(self).__name__}.evaluate")
        return registry.option("evaluation").evaluate(self.env, self.actor(state), key, episodes, greedy)

    def check_when_traced(self, state: Any) -> None:
        """Makes the checks that need the state's shapes; `fdg.trace` calls it once."""

    @fdg.fragment("environment")
    def step(self, keys, env_state, action) -> tuple[Any, TimeStep]:
        """`keys [B]`, `action [B, *action]` -> the environments' next state and a `TimeStep [B]`."""
        result = self.env.step(keys, env_state, self._for_environment(action))
        return check_batch_step(self.env, result, keys.shape[0])

    @fdg.fragment("update", in_axes=None, out_axes=None)
    def update(self, gradient, optimizer_state, parameters):
        """One step of the optimiser: new parameters and optimiser state."""
        return self._one_update(gradient, optimizer_state, parameters)

    @fdg.fragment("learner", in_axes=(None, 1), out_axes=None)
    def observe(self, statistics, observation):
        """Updates the normaliser's statistics with observations `[T, B, *obs]`; for agents with replay."""
        return self.normalizers.update(statistics, observation)

    @property
    def _reward_shape(self) -> tuple[int, ...]:
        """The shape of the rewards of one step: `(B,)`, or `(B, A)` with several agents."""
        agents = num_agents(self.env)
        return (self.num_envs,) if agents is None else (self.num_envs, agents)

    # True if rewards get a bonus: the user's, or novelty without a value function of its own.
    _adds_bonus = property(lambda self: self.bonus is not None or (self.rnd and not self.values_novelty))

    def _initial_bonus_state(self, observation: Observation, key: jax.Array) -> Any:
        """The bonus's state before the first rollout; None without a bonus."""
        return (
            registry.option("checks").initial_bonus_state(self, observation, key)
            if self._adds_bonus
            else None
        )

    def _add_bonus(self, state: Any, time_step: TimeStep) -> tuple[Any, TimeStep, dict[str, jax.Array]]:
        """The bonus's state after a rollout `[T, B]`, the rollout with the bonus added, and metrics."""
        if not self._adds_bonus:
            return state, time_step, {}
        return registry.option("checks").add_bonus(self, state, time_step)

    def _reset(self, key: jax.Array) -> tuple[Any, Observation]:
        """Initial state and observation of all environments, from one key."""
        keys = jax.random.split(key, self.num_envs)
        if self.rings > 1:
            return registry.option("rings").reset(self, keys)
        return check_batch_reset(self.env, self.env.reset(keys), self.num_envs)

    @property
    def _rollout_arguments(self) -> dict[str, Any]:
        """The arguments of `algos.rollout.rollout` that define how environments are stepped."""
        if self.rings > 1 or getattr(self.env, "acts", False):
            return {"num_steps": self.num_steps, **registry.option("rings").rollout_arguments(self)}
        return {"num_steps": self.num_steps, "step": self.step}

    def _for_environment(self, action):
        """Converts actions to the environment's format."""
        return registry.option("distributions").bounded(action, self.env.action_space)

    def _choose_actions(self, policy: Policy, keys: jax.Array, greedy: bool) -> jax.Array:
        """Actions for the environment: if `greedy` the most probable ones, else sampled."""
        return self._for_environment(choose_actions(policy, keys, greedy))

    def _one_update(self, gradient: Any, optimizer_state: Any, parameters: Any) -> tuple[Any, Any]:
        apply_update = registry.option("optimizers").apply_update
        return apply_update(self._optimizer, gradient, optimizer_state, parameters)

    @property
    def _optimizer(self) -> Any:
        """The user's optimiser, or the default: a transformation of optax."""
        return registry.option("optimizers").optimizer_of(self)

    def _check(self) -> None:
        """Raises an `FdgError` if a field has the wrong type or a part is out of range."""
        registry.option("checks").check_settings(self)

    @classmethod
    def can_act_in(cls, env: Environment) -> bool:
        """Whether the algorithm supports an environment's actions and number of agents."""
        several = num_agents(env) is not None
        return cls.several_agents == several and isinstance(env.action_space, cls.action_spaces)
