"""Gumbel MuZero: tree search with a learned model (Schrittwieser et al. 2020, "Mastering Atari, Go, chess and
shogi by planning with a learned model", arXiv 1911.08265), improved as in Danihelka et al. 2022, "Policy
improvement by planning with Gumbel" (ICLR, openreview.net/forum?id=bERaNdoegnO).

The model represents an observation by a latent state; its dynamics predict the next latent state from an
action. A search in this model chooses each action. The model learns to predict the search's policy, the
return and the reward for each of the next `unroll_steps` actions. MuZero is on-policy here: it learns from
each rollout in several epochs and then drops it; there is no replay buffer and no reanalysis.

Shapes: `T` steps of a rollout, `B` environments, `N` samples of a minibatch, `n` actions, `K` unrolled
steps, `D` numbers of a latent state.
"""

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

import fdg
from algos import networks, on_policy
from algos.agent import Agent, Rollouts
from algos.buffers import n_step_returns
from algos.checks import check_divides
from algos.distributions import for_space
from algos.layers import Trunk, with_widths
from algos.losses import values_after
from algos.normalize import normalize_rollout
from algos.on_policy import Epochs, State, environment_major
from algos.returns import rescaled, unrescaled
from algos.rollout import Actor, empty_memory, episode_metrics
from algos.search import Search, SearchSettings, latent_search
from algos.values import ClippedOptimizer, Discount, Layers, Normalizers, Transforming
from envs import Discrete, Environment, Observation, TimeStep, features_and_mask
from envs.composite import ObservationSpace
from fdg.settings.fields import hyperparameter, require_positive


class Sample(NamedTuple):
    """Training samples: observations, and what followed each of them."""

    observation: Observation  # [N, *obs]
    action: jax.Array  # [N, K] int32
    reward: jax.Array  # [N, K] float32
    policy: jax.Array  # [N, K + 1, n] float32, the search's policy
    value: jax.Array  # [N, K + 1] float32, the value's target
    playing: jax.Array  # [N, K + 1] bool: the episode still runs, and the rollout has this step
    known: jax.Array  # [N, K + 1] bool: `playing`, or the episode has terminated before


@dataclasses.dataclass(frozen=True)
class MuZero(Agent, presets="MuZero"):
    """Gumbel MuZero for discrete actions.

    >>> import envs
    >>> MuZero(env=envs.make("CartPole-v1")).steps_per_iteration
    1024
    """

    action_spaces: ClassVar[tuple[type, ...]] = (Discrete,)

    env: Environment
    rollouts = Rollouts(num_envs=32, num_steps=32, total_steps=200_000)
    epochs = Epochs(num_epochs=4, num_minibatches=4)
    optimizer_settings = ClippedOptimizer(learning_rate=1e-3, anneal_learning_rate=True, max_grad_norm=1.0)
    discounting = Discount()
    n_step: int = hyperparameter(10, "n of n-step returns, which end with the search's value")
    unroll_steps: int = hyperparameter(5, "K: steps for which the model is unrolled in the loss")
    searching = SearchSettings(num_simulations=8, value_coefficient=0.25)
    least_range: float = hyperparameter(
        10.0, "a search divides the values of a node's actions by their range, but at least by this"
    )
    rescale: bool = hyperparameter(
        True, "learn signed square roots of values and rewards: for rewards of unknown size"
    )
    reward_coefficient: float = hyperparameter(1.0, "weight of the reward loss")
    latent_size: int = hyperparameter(64, "width of the latent state")
    normalizers = Normalizers()
    layers = Layers(activation="relu")
    transforming = Transforming()

    def __post_init__(self):
        self._check()
        check_divides(self, self.num_steps)
        require_positive(self, "n_step", "unroll_steps", "latent_size", "least_range")

    updates_per_iteration = property(lambda self: self.epochs.updates)

    init = on_policy.begin

    def iterate(self, state: State) -> tuple[State, dict[str, jax.Array]]:
        """One rollout of all environments by search, and all updates on it."""
        return on_policy.iteration(self, state)

    def actor(self, state: State) -> Actor:
        """Acts by search; greedy: without Gumbel noise."""

        def act(memory, observation, start, keys, greedy):
            normalized = self.normalizers.seen(state.observation_statistics, observation)
            scale = 0.0 if greedy else self.gumbel_scale
            action = self._search_batch(state.parameters, normalized, keys, scale).action
            return self._for_environment(action), memory

        return Actor(empty_memory, act)

    # --- fragments; `step` and `update` are inherited from `Agent` ---

    @fdg.fragment("actor", in_axes=(None, None, 0, 0))
    def act(self, parameters, statistics, observation, keys):
        """`observation [B, *obs]`, `keys [B]` -> `action [B]`, and the `Search [B]` that chose it."""
        normalized = self.normalizers.seen(statistics, observation)
        result = self._search_batch(parameters, normalized, keys, self.gumbel_scale)
        return result.action, result

    @fdg.fragment("learner", in_axes=(None, 0, 1, None), out_axes=(None, 0, None))
    def learn(self, learned, running, trajectory, key):
        """Several epochs of minibatch updates on a rollout `[T, B]`; also updates the statistics."""
        parameters, optimizer_state, *statistics = learned
        normalized, running, statistics = normalize_rollout(
            self.normalizers, statistics, running, trajectory, self.discount
        )
        samples = jax.tree.map(environment_major, self.samples(parameters, normalized))
        parameters, optimizer_state, losses = self.epochs.learn(
            key, samples, self.num_envs, parameters, optimizer_state, self.gradient, self.update
        )
        learned = (parameters, optimizer_state, *statistics)
        return learned, running, {**episode_metrics(trajectory.time_step), **losses}

    @fdg.fragment("gradient", in_axes=(None, 0), out_axes=None)
    def gradient(self, parameters, sample):
        """Gradient of the loss over a minibatch `[N]`, and the terms of the loss."""
        return jax.grad(self.loss, has_aux=True)(parameters, sample)

    def targets(self, parameters: Any, value: jax.Array, time_step: TimeStep) -> jax.Array:
        """The value targets `[T, B]` float32: n-step returns (arXiv 1911.08265, section 3).

        `value [T, B]` is the search's value of each observation. At a truncation and at the end of the
        rollout, returns end with the model's value.
        """

        def value_of(final: Any) -> jax.Array:
            latent = self._apply("represent", parameters, features_and_mask(final)[0])
            return self._evaluate(parameters, latent)[1]

        next_value = values_after(value, time_step, value_of)
        reward, ends = time_step.reward, (time_step.terminated, time_step.truncated)
        return n_step_returns(reward, next_value, *ends, self.discount, self.n_step)

    def samples(self, parameters: Any, trajectory: Any) -> Sample:
        """The samples `[T, B]` of a rollout `[T, B]`, whose `decision` is a `Search`."""
        time_step, searches = trajectory.time_step, trajectory.decision
        steps = self.unroll_steps
        return Sample(
            observation=features_and_mask(trajectory.observation)[0],
            action=windows(trajectory.action, steps),
            reward=windows(time_step.reward, steps),
            policy=windows(searches.policy, steps + 1),
            value=windows(self.targets(parameters, searches.value, time_step), steps + 1),
            **playing_and_known(time_step.terminated, time_step.truncated, steps),
        )

    def loss(self, parameters: Any, sample: Sample) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss over a minibatch, and its terms (arXiv 1911.08265, equation 1 and appendix G).

        Each term is the loss at the observation, plus the mean loss of the unrolled steps. Each application
        of the dynamics halves the gradient. After a termination, targets of reward and value are zero, and
        there is no policy loss. Steps after a truncation, or after the end of the rollout, are not `known`:
        they have no loss.
        """
        scale = rescaled if self.rescale else lambda x: x
        count = sample.playing.shape[0]

        def policy_and_value_losses(latent, policy, value, playing, known):
            logits, estimate = self._apply("predict", parameters, latent)
            cross_entropy = -jnp.sum(policy * jax.nn.log_softmax(logits), axis=-1)
            target = scale(jnp.where(playing, value, 0.0))
            return (
                jnp.sum(jnp.where(playing, cross_entropy, 0.0)) / count,
                jnp.sum(jnp.where(known, 0.5 * jnp.square(estimate - target), 0.0)) / count,
            )

        def unroll_step(latent, row):
            (action, reward, playing, known), next_targets = row
            halved = 0.5 * (latent + jax.lax.stop_gradient(latent))  # the same latent, half its gradient
            latent, estimate = self._apply("imagine", parameters, halved, action)
            target = scale(jnp.where(playing, reward, 0.0))
            reward_loss = jnp.sum(jnp.where(known, 0.5 * jnp.square(estimate - target), 0.0)) / count
            return latent, (*policy_and_value_losses(latent, *next_targets), reward_loss)

        state_targets = sample.policy, sample.value, sample.playing, sample.known
        step_targets = sample.action, sample.reward, sample.playing[:, :-1], sample.known[:, :-1]
        rows = step_targets, tuple(x[:, 1:] for x in state_targets)
        latent = self._apply("represent", parameters, sample.observation)
        first = policy_and_value_losses(latent, *(x[:, 0] for x in state_targets))
        _, unrolled = jax.lax.scan(unroll_step, latent, jax.tree.map(lambda x: x.swapaxes(0, 1), rows))
        policy_loss, value_loss, reward_loss = (
            loss + jnp.mean(step_losses) for loss, step_losses in zip((*first, 0.0), unrolled, strict=True)
        )
        loss = policy_loss + self.value_coefficient * value_loss + self.reward_coefficient * reward_loss
        policy = sample.policy[:, 0]
        entropy = -jnp.mean(jnp.sum(jax.scipy.special.xlogy(policy, policy), axis=-1))
        terms = {"policy_loss": policy_loss, "value_loss": value_loss, "reward_loss": reward_loss}
        return loss, {"loss": loss, **terms, "entropy": entropy}

    @property
    def model(self) -> nn.Module:
        """The learned model, with the methods of `Model`; a subclass may return another."""
        space, actions = self.env.observation_space, for_space(self.env.action_space).size
        return Model(space, actions, self.latent_size, with_widths(self.layers, space))

    _network = property(lambda self: networks.of_module(self.model))

    def _apply(self, method: str, parameters: Any, *inputs: Any) -> Any:
        """Calls a method of the model with these parameters."""
        apply: Any = functools.partial(self.model.apply, method=method)
        apply = fdg.in_bfloat16(apply) if self.precision == "bfloat16" else apply
        return apply({"params": parameters}, *inputs)

    def _search_batch(self, parameters: Any, normalized: Observation, keys: jax.Array, scale: Any) -> Search:
        """Searches from observations `[B, *obs]` with `keys [B]`; each row is searched independently."""
        observation, mask = features_and_mask(normalized)
        if mask is None:
            mask = jnp.ones((keys.shape[0], for_space(self.env.action_space).size), bool)
        latent = self._apply("represent", parameters, observation)
        settings = scale, self.discount, self.least_range  # passed as arguments: a sweep traces them
        return fdg.rowwise(self._search, in_axes=(None, None, 0, 0, 0))(
            settings, parameters, latent, mask, keys
        )

    def _search(self, settings: Any, parameters: Any, latent: Any, mask: Any, keys: jax.Array) -> Search:
        def search_one(key, latent, allowed):
            return latent_search(
                self._evaluate, self._imagine, parameters, key, latent, allowed, self.num_simulations,
                self.max_considered, *settings,
            )  # fmt: skip

        return jax.vmap(search_one)(keys, latent, mask)

    def _evaluate(self, parameters: Any, latent: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`latent [N, D]` -> the policy's logits `[N, n]`, and unscaled values `[N]`."""
        logits, value = self._apply("predict", parameters, latent)
        return logits, self._unscale(value)

    def _imagine(self, parameters: Any, latent: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`latent [N, D]`, `action [N]` -> the next latent states `[N, D]`, and unscaled rewards `[N]`."""
        latent, reward = self._apply("imagine", parameters, latent, action)
        return latent, self._unscale(reward)

    def _unscale(self, x: jax.Array) -> jax.Array:
        return unrescaled(x) if self.rescale else x


# --- samples: each row of a rollout with the rows after it ---


def windows(x: jax.Array, count: int) -> jax.Array:
    """Rows `t` to `t + count - 1` of `x [T, B, ...]`, for each `t`: `[T, B, count, ...]`.

    After the last row, windows continue with the first row.

    >>> windows(jnp.array([[1], [2], [3]]), 2)[:, 0].tolist()
    [[1, 2], [2, 3], [3, 1]]
    """
    return jnp.stack([jnp.roll(x, -step, axis=0) for step in range(count)], axis=2)


def playing_and_known(terminated: jax.Array, truncated: jax.Array, steps: int) -> dict[str, jax.Array]:
    """`playing` and `known` of a `Sample`, `[T, B, steps + 1]` bool; arguments are `[T, B]` bool.

    >>> ends = jnp.array([[False], [True], [False]]), jnp.zeros((3, 1), bool)
    >>> found = playing_and_known(*ends, 2)  # the third row is the last of the rollout
    >>> found["playing"][:, 0].astype(int).tolist(), found["known"][:, 0].astype(int).tolist()
    ([[1, 1, 0], [1, 0, 0], [1, 0, 0]], [[1, 1, 1], [1, 1, 1], [1, 0, 0]])
    """
    row = jax.lax.broadcasted_iota(jnp.int32, terminated.shape, 0)
    is_last_row = row == terminated.shape[0] - 1
    playing_by_step, terminated_by_step = [jnp.ones_like(terminated)], [jnp.zeros_like(terminated)]
    for step in range(steps):
        terminates, truncates, is_last = (
            jnp.roll(x, -step, axis=0) for x in (terminated, truncated, is_last_row)
        )
        terminated_by_step.append(terminated_by_step[-1] | (playing_by_step[-1] & terminates))
        playing_by_step.append(playing_by_step[-1] & ~(terminates | truncates | is_last))
    playing, has_terminated = jnp.stack(playing_by_step, axis=2), jnp.stack(terminated_by_step, axis=2)
    return {"playing": playing, "known": playing | has_terminated}


# --- the model ---


class Model(nn.Module):
    """Dense networks for representation, dynamics and predictions; images are convolved first.

    Latent states are scaled to [0, 1] by their minimum and maximum (arXiv 1911.08265, appendix G). The
    dynamics are a residual block. With the setting `rescale`, values and rewards are on
    the scale of `algos.returns.rescaled`.
    """

    observation_space: ObservationSpace
    actions: int  # n
    size: int  # D
    layers: Layers

    def setup(self) -> None:  # noqa: D102
        for name in ("representation", "dynamics"):
            setattr(self, name, Trunk(self.layers, self.size, 1.0))
        for name, outputs in {"policy": self.actions, "value": 1, "reward": 1}.items():
            setattr(self, name, Trunk(self.layers, outputs, 0.01))

    def __call__(self, observation: Any) -> Any:
        """All outputs, for `init`."""
        latent = self.represent(observation)
        return self.predict(self.imagine(latent, jnp.zeros(latent.shape[0], jnp.int32))[0])

    def represent(self, observation: Any) -> jax.Array:
        """`observation [N, *obs]` -> latent states `[N, D]`."""
        space, convolve = self.observation_space, self.layers.convolve
        return _to_unit_range(self.representation(networks.actor_features(observation, space, convolve)))

    def imagine(self, latent: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`latent [N, D]`, `action [N]` -> the next latent states `[N, D]`, and the rewards `[N]`."""
        inputs = jnp.concatenate([latent, jax.nn.one_hot(action, self.actions, dtype=latent.dtype)], axis=-1)
        return _to_unit_range(latent + self.dynamics(inputs)), self.reward(inputs)[:, 0]

    def predict(self, latent: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`latent [N, D]` -> the policy's logits `[N, n]`, and the values `[N]`."""
        return self.policy(latent), self.value(latent)[:, 0]


def _to_unit_range(x: jax.Array) -> jax.Array:
    low, high = jnp.min(x, axis=-1, keepdims=True), jnp.max(x, axis=-1, keepdims=True)
    return (x - low) / jnp.maximum(high - low, 1e-5)
