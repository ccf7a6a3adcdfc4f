"""Advantage actor-critic: `A2C`, and its asynchronous form `A3C` (Mnih et al. 2016, arXiv 1602.01783).

A2C takes one gradient step after each rollout, so learning is on-policy. A3C runs on a deterministic
schedule: each of `W` workers acts, and computes gradients, with its own parameters. The learner applies the
workers' gradients to the shared parameters one after another; worker w continues with the shared parameters
right after its own update. So `W - 1` other updates come between computing a gradient and applying it, as in
an asynchronous run with equally fast workers. The order is the same in every run, on any number of devices.

Shapes: `T` steps of a rollout, `B` environments, `N` rows; `W` workers, each with `E` environments.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

import fdg
from algos import on_policy, one_update, optimizers
from algos.agent import Agent, Rollouts
from algos.losses import Advantages, values_after
from algos.normalize import normalize_rollout
from algos.on_policy import LEARNED, PolicyLayers, Trajectory
from algos.one_update import WeightedLoss
from algos.rollout import episode_metrics
from algos.values import NETWORK, AnyNetwork, ClippedOptimizer, Normalizers, Transforming
from envs import Box, Discrete, Environment, MultiDiscrete, Observation
from fdg.settings.fields import hyperparameter, require, require_divides, require_positive


@dataclasses.dataclass(frozen=True)
class A2C(Agent, driver=one_update, presets="A2C"):
    """A2C for discrete, multi-discrete and continuous actions.

    Defaults are those of OpenAI's baselines (`baselines/a2c`, Dhariwal et al. 2017) and of Stable-Baselines3.

    >>> import envs
    >>> A2C(env=envs.make("CartPole-v1")).steps_per_iteration
    80
    """

    action_spaces: ClassVar[tuple[type, ...]] = (Discrete, MultiDiscrete, Box)

    env: Environment
    rollouts = Rollouts(num_envs=16, num_steps=5, total_steps=1_000_000)
    optimizer_settings = ClippedOptimizer(learning_rate=7e-4, anneal_learning_rate=True, max_grad_norm=0.5)
    advantages = Advantages(gae_lambda=1.0)  # as in the paper
    objective = WeightedLoss()
    normalizers = Normalizers()
    layers = PolicyLayers()
    network: AnyNetwork | None = dataclasses.field(default=None, metadata=NETWORK)
    transforming = Transforming()

    _default_optimizer = property(optimizers.rmsprop_of)

    # --- fragments; `step` and `update` are inherited from `Agent` ---

    @fdg.fragment("actor", in_axes=(None, None, 0, 0))
    def act(self, parameters, statistics, observation, keys):
        """`observation [B, *obs]`, `keys [B]` -> `action [B, *action]`, and None.

        Learning needs no log-probability. If the network has a memory, the observations are an
        `algos.sequences.ObservedSequences`.
        """
        policy, _ = self.policy_and_value(parameters, self.normalizers.seen(statistics, observation))
        return policy.sample(keys), None

    def loss(self, parameters: Any, trajectory: Trajectory) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss over a rollout `[T, B]`, and its terms."""
        policy, value = one_update.over_time(
            lambda rows: self.policy_and_value(parameters, rows), trajectory.observation
        )
        time_step = trajectory.time_step
        fixed_parameters, fixed_value = jax.lax.stop_gradient((parameters, value))
        # With lambda 1, returns are as long as the rollout allows (algorithm S3 of the paper). A smaller
        # lambda averages them with shorter returns.
        advantage, target = self.advantages.of(
            time_step.reward,
            fixed_value,
            values_after(
                fixed_value, time_step, lambda final: self.policy_and_value(fixed_parameters, final)[1]
            ),
            time_step,
        )
        # The policy loss and the entropy term are those of section 4 of the paper ("Asynchronous advantage
        # actor-critic"); the value loss is that of algorithm S3. The paper sums losses over the rollout; here
        # they are means.
        policy_loss = -jnp.mean(policy.log_prob(trajectory.action) * advantage)
        value_loss = jnp.mean(jnp.square(target - value))
        return self.objective.of(policy_loss, value_loss, jnp.mean(policy.entropy()))


class State(NamedTuple):
    """The state of A3C."""

    parameters: Any  # shared by all workers
    optimizer_state: Any  # shared by all workers
    worker_parameters: Any  # of each worker: leading axis W
    observation_statistics: Any  # from all workers' observations; None if they are not normalised
    return_statistics: Any  # from the discounted returns, whose deviation divides rewards; or None
    running_return: jax.Array | None  # [W, E] float32, the discounted return so far
    env_state: Any  # leading axes W, E
    observation: Observation  # [W, E, *obs]
    key: jax.Array
    iteration: jax.Array  # int32
    bonus: Any = None  # the state of `Agent.bonus`


@dataclasses.dataclass(frozen=True)
class A3C(A2C, presets="A3C"):
    """A3C for discrete, multi-discrete and continuous actions; fields, loss and optimiser are those of `A2C`.

    The workers share RMSProp's statistics ("Shared RMSProp" in the paper). By default a worker has four
    environments (in the paper one), so there are fewer gradients, each over more samples.

    >>> import envs
    >>> A3C(env=envs.make("CartPole-v1"), num_workers=8).envs_per_worker
    2
    """

    num_workers: int = hyperparameter(
        4, "asynchronous workers, each with its own parameters and environments"
    )

    def __post_init__(self):
        super().__post_init__()
        require_positive(self, "num_workers")
        require(
            self,
            self.rings == 1,
            f"rings={self.rings}: each worker steps its environments together; use A2C, or rings=1",
        )
        setting = "network" if self.memory is None else f"memory={self.memory}"
        require(self, self._memory is None, f"{setting}: a worker of A3C has no memory: use A2C")
        require(self, self.transform is None, "transform: A3C does not transform rollouts; use A2C")
        require_divides(self, "num_workers", self.num_envs, f"num_envs={self.num_envs}")

    @property
    def envs_per_worker(self) -> int:
        """`E`, the environments of each worker."""
        return self.num_envs // self.num_workers

    @property
    def updates_per_iteration(self) -> int:
        """One update with each worker's gradient."""
        return self.num_workers

    def init(self, key: jax.Array) -> State:
        """The state before the first iteration: all workers have the same parameters."""
        start = super().init(key)
        workers = jax.tree.map(lambda x: jnp.broadcast_to(x, (self.num_workers, *x.shape)), start.parameters)
        fields = {name: getattr(start, name) for name in State._fields if name != "worker_parameters"}
        for name in ("running_return", "env_state", "observation"):
            fields[name] = self._split_by_worker(fields[name])
        return State(worker_parameters=workers, **fields)

    def iterate(self, state: State) -> tuple[State, dict[str, jax.Array]]:
        """One rollout of all workers, and one update with the gradient of each."""
        key, rollout_key = jax.random.split(state.key)
        trajectory, new_fields, bonus_metrics = on_policy.rollout_with_bonus(
            self,
            state,
            lambda observation, keys: self.act(
                state.worker_parameters, state.observation_statistics, observation, keys
            ),
            rollout_key,
        )
        learned, worker_parameters, running_return, metrics = self.learn(
            tuple(getattr(state, name) for name in LEARNED[:4]),
            state.worker_parameters,
            state.running_return,
            trajectory,
        )
        new_fields |= dict(zip(LEARNED[:4], learned, strict=True))
        new_fields |= {"worker_parameters": worker_parameters, "running_return": running_return}
        state = state._replace(key=key, iteration=state.iteration + 1, **new_fields)
        return state, {**metrics, **bonus_metrics}

    # --- fragments; their batch axis is the axis of workers ---

    @fdg.fragment("actor", in_axes=(0, None, 0, 0))
    def act(self, worker_parameters, statistics, observation, keys):
        """`observation [W, E, *obs]`, `keys [W]` -> `action [W, E, *action]`; see `A2C.act`."""

        def one_worker(parameters, observation, key):
            policy, _ = self.policy_and_value(parameters, observation)
            return policy.sample(jax.random.split(key, self.envs_per_worker))

        return jax.vmap(one_worker)(
            worker_parameters, self.normalizers.seen(statistics, observation), keys
        ), None

    @fdg.fragment("environment")
    def step(self, keys, env_state, action):
        """`keys [W]`, `action [W, E, *action]` -> the environments' next state and a `TimeStep [W, E]`."""
        keys = jax.vmap(lambda key: jax.random.split(key, self.envs_per_worker))(keys)
        keys, env_state, action = jax.tree.map(
            lambda x: x.reshape(-1, *x.shape[2:]), (keys, env_state, action)
        )
        return self._split_by_worker(self.env.step(keys, env_state, self._for_environment(action)))

    @fdg.fragment("learner", in_axes=(None, 0, 0, 1), out_axes=(None, 0, 0, None))
    def learn(self, learned, worker_parameters, running_return, trajectory):
        """Each worker's gradient over its part of the rollout `[T, W, E]`; one update with each gradient."""
        parameters, optimizer_state, *statistics = learned
        normalized, (running_return,), statistics = normalize_rollout(
            self.normalizers, statistics, (running_return,), trajectory, self.discount
        )
        gradients, losses = self.gradient(worker_parameters, normalized)
        *learned, worker_parameters = self.update(gradients, optimizer_state, parameters)
        metrics = {**episode_metrics(trajectory.time_step), **jax.tree.map(jnp.mean, losses)}
        return (*learned, *statistics), worker_parameters, running_return, metrics

    @fdg.fragment("gradient", in_axes=(0, 1))
    def gradient(self, worker_parameters, trajectory):
        """Gradients `[W, ...]` of the loss, each over one worker's rollout `[T, E]`; loss terms `[W]`."""
        return jax.vmap(jax.grad(self.loss, has_aux=True), in_axes=(0, 1))(worker_parameters, trajectory)

    @fdg.fragment("update", in_axes=(0, None, None), out_axes=(None, None, 0))
    def update(self, gradients, optimizer_state, parameters):
        """The shared parameters after all gradients `[W, ...]`, and after each gradient, `[W, ...]`."""

        def apply_gradient(carry, gradient):
            parameters, optimizer_state = carry
            parameters, optimizer_state = self._one_update(gradient, optimizer_state, parameters)
            return (parameters, optimizer_state), parameters

        learned, worker_parameters = jax.lax.scan(apply_gradient, (parameters, optimizer_state), gradients)
        return *learned, worker_parameters

    def _split_by_worker(self, tree):
        """Splits the leading axis `B` into the axes `W, E`."""
        return jax.tree.map(lambda x: x.reshape(-1, self.envs_per_worker, *x.shape[1:]), tree)
