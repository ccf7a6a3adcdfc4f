"""Gumbel AlphaZero: self-play by tree search (Silver et al. 2017, arXiv 1712.01815), improved as in Danihelka
et al. 2022, "Policy improvement by planning with Gumbel" (ICLR, openreview.net/forum?id=bERaNdoegnO).

The agent plays both sides. A tree search with the game's rules and the network chooses each move; the network
learns the search's policy and the outcome of the game. `search` is a fragment of the actor, `learn` of the
learner.

Shapes: `T` moves of a rollout, `B` games, `N` samples of a minibatch, `n` possible moves.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

import fdg
from algos import networks
from algos.agent import Agent, Rollouts
from algos.checks import check_actor_critic, check_divides
from algos.losses import Distribution, value_error, values_after
from algos.on_policy import Epochs, environment_major, without_memory
from algos.returns import lambda_returns
from algos.rollout import Actor, episode_metrics, rollout
from algos.search import Search, SearchPlayer, SearchSettings, gumbel_search
from algos.values import NETWORK, ClippedOptimizer, Discount, Layers, Network
from envs import (
    Discrete,
    Environment,
    MaskedObservation,
    Observation,
    TimeStep,
    Vectorized,
    features_and_mask,
    vectorize,
)
from envs.games import Against, Game, Turns
from fdg.settings.fields import hyperparameter, require, require_within

_MAX_RANDOM_MOVES = 32  # moves are traced one by one, so more would take long to compile


class State(NamedTuple):
    """The state between iterations."""

    parameters: Any
    optimizer_state: Any
    env_state: Any  # leading axis B
    observation: Observation  # [B, *obs], of the player to move
    key: jax.Array
    iteration: jax.Array  # int32


class Sample(NamedTuple):
    """Training samples of the network."""

    observation: MaskedObservation  # [N, *obs], with the mask of legal moves [N, n]
    policy: jax.Array  # [N, n] float32, the search's policy
    target: jax.Array  # [N] float32, the value's target


@dataclasses.dataclass(frozen=True)
class AlphaZero(Agent, presets="AlphaZero"):
    """Gumbel AlphaZero, for two-player games of perfect information with alternating moves.

    `env` is a game against an opponent (`envs.games.Against`). The agent learns by self-play. Only
    evaluations play against the opponent; they use the network without search. `player(state)` searches.

    >>> import envs
    >>> AlphaZero(env=envs.make("game:tic_tac_toe")).steps_per_iteration
    1024
    """

    action_spaces: ClassVar[tuple[type, ...]] = (Discrete,)
    default_env: ClassVar[str] = "game:connect_four"

    env: Environment
    rollouts = Rollouts(num_envs=64, num_steps=16, total_steps=500_000)
    epochs = Epochs(num_epochs=1, num_minibatches=4)
    optimizer_settings = ClippedOptimizer(learning_rate=1e-3, anneal_learning_rate=True, max_grad_norm=1.0)
    discounting = Discount(discount=1.0)
    searching = SearchSettings()
    value_lambda: float = hyperparameter(
        1.0, "lambda of value targets; 1: the outcome of the game, 0: the search's value of the next position"
    )
    random_moves: int = hyperparameter(
        4, "games begin after 0 to this many random moves, for more varied positions"
    )
    layers = Layers(activation="relu")
    network: Network | None = dataclasses.field(default=None, metadata=NETWORK)

    def __post_init__(self):
        self._check()
        require(
            self,
            isinstance(getattr(self.env, "single", None), Against),
            f"'{self.env.name}' is not a two-player game with rules that a search can use: give"
            " envs.make('game:connect_four'), or envs.vectorize(envs.games.Against(game, opponent))",
        )
        setting = "rnd=True" if self.rnd else "bonus"
        require(self, not self._adds_bonus, f"{setting}: a search values only how a game ends; leave it out")
        require(self, self.rings == 1, f"rings={self.rings}: all games move together; leave it out")
        require(
            self,
            0 <= self.random_moves <= _MAX_RANDOM_MOVES,
            f"random_moves={self.random_moves}: give a number from 0 to {_MAX_RANDOM_MOVES}",
        )
        require_within(self, 0, 1, "value_lambda")
        check_divides(self, self.num_steps)

    @classmethod
    def can_act_in(cls, env: Environment) -> bool:
        """True for an environment of a game."""
        return super().can_act_in(env) and isinstance(getattr(env, "single", None), Against)

    def init(self, key: jax.Array) -> State:
        """The state before the first iteration."""
        parameter_key, env_key, key = jax.random.split(key, 3)
        env_state, observation = self._self_play_env.reset(jax.random.split(env_key, self.num_envs))
        parameters = self._network.init(parameter_key, features_and_mask(observation)[0])
        optimizer_state = self._optimizer.init(parameters)
        return State(parameters, optimizer_state, env_state, observation, key, jnp.int32(0))

    def iterate(self, state: State) -> tuple[State, dict[str, jax.Array]]:
        """`num_steps` moves in all games, then all updates on them."""
        key, rollout_key, learn_key = jax.random.split(state.key, 3)

        def act(observation_and_position, keys):
            result = self.search(state.parameters, observation_and_position[1], keys)
            return result.action, result

        def step(keys, env_state, action):
            env_state, time_step = self.step(keys, env_state, action)
            return env_state, time_step._replace(observation=(time_step.observation, env_state.inner))

        env_state, (observation, _), (((observations, _), _), searches, time_steps) = rollout(
            act,
            step,
            rollout_key,
            state.env_state,
            (state.observation, state.env_state.inner),
            self.num_steps,
        )
        (parameters, optimizer_state), metrics = self.learn(
            (state.parameters, state.optimizer_state), (observations, searches, time_steps), learn_key
        )
        return State(parameters, optimizer_state, env_state, observation, key, state.iteration + 1), metrics

    updates_per_iteration = property(lambda self: self.epochs.updates)

    def actor(self, state: State) -> Actor:
        """Acts by the network without search, because an actor sees observations, not positions."""
        return without_memory(
            lambda observation: self._policy(state.parameters, observation), self._for_environment
        )

    def player(self, state: State, simulations: int | None = None) -> SearchPlayer:
        """An `envs.games.Player` that searches, by default with `num_simulations`."""
        return SearchPlayer(
            self._game,
            self._evaluate,
            state.parameters,
            simulations or self.num_simulations,
            self.max_considered,
            discount=self.discount,
        )

    # --- fragments; `update` is inherited from `Agent` ---

    @fdg.fragment("environment")
    def step(self, keys, env_state, action):
        """`keys [B]`, `action [B]` -> the games' next state and a `TimeStep [B]`."""
        return self._self_play_env.step(keys, env_state, action)

    @fdg.fragment("actor", in_axes=(None, 0, 0))
    def search(self, parameters, position, keys):
        """Positions `[B, ...]`, `keys [B]` -> `Search [B]`; rows are searched independently."""
        scale_and_discount = self.gumbel_scale, self.discount  # passed as arguments: a sweep traces them
        search = fdg.rowwise(self._search, in_axes=(None, None, 0, 0))
        return search(scale_and_discount, parameters, position, keys)

    @fdg.fragment("learner", in_axes=(None, 1, None), out_axes=None)
    def learn(self, learned, trajectory, key):
        """Minibatch updates of parameters and optimiser state on a rollout `[T, B]`."""
        observation, searches, time_step = trajectory
        parameters, optimizer_state = learned
        target = self.targets(parameters, searches.value, time_step)
        samples = jax.tree.map(environment_major, Sample(observation, searches.policy, target))
        parameters, optimizer_state, losses = self.epochs.learn(
            key, samples, self.num_envs, parameters, optimizer_state, self.gradient, self.update
        )
        metrics = episode_metrics(time_step)
        # In self-play, an episode's return is the winner's: 1, or 0 for a draw. So its mean is the share of
        # games with a winner.
        metrics["decided"] = metrics.pop("episode_return")
        return (parameters, optimizer_state), {**metrics, **losses}

    @fdg.fragment("gradient", in_axes=(None, 0), out_axes=None)
    def gradient(self, parameters, sample):
        """Gradient of the loss over a minibatch `[N]`, and the terms of the loss."""
        return jax.grad(self.loss, has_aux=True)(parameters, sample)

    def targets(self, parameters: Any, value: jax.Array, time_step: TimeStep) -> jax.Array:
        """The value targets `[T, B]` float32, for the player of each move.

        With `value_lambda` 1, a target is the game's outcome, or the value of the last position if the game
        did not end in the rollout; below 1, values of the positions in between count too. A target is a
        lambda-return with a negative discount, since the player changes with each move. `value [T, B]` is the
        search's value of each position.
        """
        next_value = values_after(
            value, time_step, lambda final: self._evaluate_batch(parameters, features_and_mask(final)[0])[1]
        )
        return lambda_returns(
            time_step.reward, next_value, time_step.terminated, time_step.truncated,
            -self.discount, self.value_lambda,
        )  # fmt: skip

    def loss(self, parameters: Any, sample: Sample) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Cross-entropy to the search's policy, plus the value error (arXiv 1712.01815, equation 1)."""
        features, mask = sample.observation
        logits, value = self._evaluate_batch(parameters, features)
        log_policy = jax.nn.log_softmax(jnp.where(mask, logits, -1e9))
        policy_loss = -jnp.mean(jnp.sum(sample.policy * log_policy, axis=-1))
        value_loss = value_error(value, sample.target)
        entropy = -jnp.mean(jnp.sum(jax.scipy.special.xlogy(sample.policy, sample.policy), axis=-1))
        loss = policy_loss + self.value_coefficient * value_loss
        terms = {"loss": loss, "policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
        return loss, terms

    def _search(self, scale_and_discount: Any, parameters: Any, position: Any, keys: jax.Array) -> Search:
        """Searches each of the positions `[B, ...]` with its own key."""
        scale, discount = scale_and_discount

        def search_one(key, position):
            return gumbel_search(
                self._game, self._evaluate, parameters, key, position,
                self.num_simulations, self.max_considered, scale, discount,
            )  # fmt: skip

        return jax.vmap(search_one)(keys, position)

    def _evaluate(self, parameters: Any, key: jax.Array, position: Any) -> tuple[jax.Array, jax.Array]:
        """Logits `[n]` and value `[]` of one position."""
        features = jax.tree.map(lambda x: x[None], self._game.observe(position))
        logits, value = self._evaluate_batch(parameters, features)
        return logits[0], value[0]

    def _evaluate_batch(self, parameters: Any, features: Any) -> tuple[jax.Array, jax.Array]:
        """Logits `[N, n]` and values `[N]` of observations `[N, *obs]` without masks.

        `tanh` keeps values within the range of outcomes: otherwise an unvisited position could seem worse
        than a loss.
        """
        logits, value = self._network.apply(parameters, features)
        return logits, jnp.tanh(value)

    def _policy(self, parameters: Any, observation: Observation) -> Distribution:
        """The network's distribution over legal moves, without search."""
        return networks.policy_and_value(self._network, parameters, observation, self.env.action_space)[0]

    def check_when_traced(self, state: State) -> None:
        """Refuses a network whose results do not fit the action space."""
        check_actor_critic(self, self._network, state.parameters)

    @property
    def _network(self) -> Network:
        return networks.actor_critic_of(self)

    @property
    def _game(self) -> Game:
        env: Any = self.env
        return env.single.game

    @property
    def _self_play_env(self) -> Vectorized:
        return vectorize(Turns(self._game, self.random_moves))
