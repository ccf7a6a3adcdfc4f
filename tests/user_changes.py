"""Changes that users make to algorithms, with public names only; docs/how-to/change.md shows the same."""

import dataclasses
from collections import namedtuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import algos
import fdg
from algos import buffers, on_policy
from algos.dqn import Exploration
from algos.losses import ProximalLoss
from algos.networks import actor_critic
from algos.ppo import Minibatch
from fdg.settings.fields import hyperparameter

# --- an auxiliary loss: predict the next observation ---

Samples = namedtuple("Samples", [*Minibatch._fields, "following"])


class Predicting(algos.PPO):
    def samples(self, see, trajectory, advantage, target):
        found = super().samples(see, trajectory, advantage, target)
        return Samples(*found, see(trajectory.time_step.final_observation))

    def loss(self, parameters, minibatch):
        loss, metrics = super().loss(parameters, minibatch)
        predicted = minibatch.observation @ parameters["forward"]
        error = jnp.mean(jnp.square(predicted - minibatch.following))
        return loss + 0.1 * error, {**metrics, "forward_error": error}


def with_forward_model(env):
    base, size = actor_critic(env.observation_space, env.action_space), env.observation_space.shape[0]
    return algos.Network(
        init=lambda key, observation: {"base": base.init(key, observation), "forward": jnp.eye(size)},
        apply=lambda parameters, observation: base.apply(parameters["base"], observation),
    )


# --- another advantage estimator: one-step TD ---


class OneStep(algos.PPO):
    def advantage(self, reward, value, next_value, time_step):
        target = reward + self.discount * jnp.where(time_step.terminated, 0.0, next_value)
        return target - value, target


# --- another optimiser: frozen critic ---


def frozen_critic(step_size):
    def label(parameters):
        return {name: "frozen" if name == "critic" else "trained" for name in parameters}

    return optax.multi_transform({"trained": optax.adam(step_size), "frozen": optax.set_to_zero()}, label)


# --- a shared trunk in NNX ---


class Shared(nnx.Module):
    def __init__(self, rngs):
        self.trunk = nnx.Linear(4, 8, rngs=rngs)
        self.policy, self.value = nnx.Linear(8, 2, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, observation):
        hidden = nnx.tanh(self.trunk(observation))
        return self.policy(hidden), self.value(hidden)[:, 0]


# --- a custom bonus for any algorithm: with and without state ---


def counted(counts, step):
    here = jax.nn.one_hot(jnp.clip(4 * step.final_observation[..., 0] + 8, 0, 15).astype(int), 16)
    counts = counts + here.sum((0, 1))
    return counts, 0.1 / jnp.sqrt(here @ counts)


by_visits = algos.Bonus(init=lambda observation: jnp.zeros(16), apply=counted)


def curious(base):
    class Curious(base):
        def step(self, keys, env_state, action):
            env_state, step = super().step(keys, env_state, action)
            bonus = 0.1 * jnp.abs(step.final_observation[:, 0])
            return env_state, step._replace(reward=step.reward + bonus)

    return Curious


# --- a custom replay buffer for any algorithm: it stores the signs of rewards ---


def signs(spec):
    kept = buffers.uniform(spec)

    def add(state, steps):
        return kept.add(state, steps._replace(reward=jnp.sign(steps.reward)))

    return kept._replace(add=add)


# --- custom exploration for any algorithm: sticky actions ---


def repeated(last, policy, start, keys, progress):
    again = jax.vmap(jax.random.bernoulli)(keys) & ~start
    action = jnp.where(again.reshape(-1, *(1,) * (last.ndim - 1)), last, policy.sample(keys))
    return action, action


sticky = algos.Explorer(init=jnp.zeros_like, apply=repeated)


# --- a custom normaliser for any algorithm: division by the largest component so far ---

by_largest = algos.Normalizer(
    init=lambda space: jnp.ones(space.shape),
    apply=lambda largest, observation: observation / largest,
    update=lambda largest, observation: jnp.maximum(
        largest, jnp.abs(observation).max(tuple(range(observation.ndim - 1)))
    ),
)


# --- a custom epsilon schedule: cosine instead of linear ---


class Cosine(Exploration):
    def epsilon(self, iteration, num_iterations):
        share = jnp.cos(0.5 * jnp.pi * jnp.minimum(iteration / num_iterations, 1.0))
        return self.epsilon_end + (self.epsilon_start - self.epsilon_end) * share


class CosineDQN(algos.DQN):
    exploration = Cosine()


# --- a histogram in the metrics ---


class Histogram(algos.PPO):
    def loss(self, parameters, minibatch):
        loss, metrics = super().loss(parameters, minibatch)
        counts, _ = jnp.histogram(minibatch.advantage, bins=4, range=(-2.0, 2.0))
        return loss, {**metrics, **{f"advantage_{i}": n.astype(float) for i, n in enumerate(counts)}}


# --- an adaptive coefficient: PPO with a KL penalty ---

State = namedtuple("State", [*on_policy.State._fields, "penalty"])
Acted = namedtuple("Acted", ["log_prob", "value", "policy", "penalty"])


@dataclasses.dataclass(frozen=True)
class PenalizedLoss(ProximalLoss):
    kl_target: float = hyperparameter(0.01, "mean KL at which the penalty stays as it is")

    def of(self, policy, value, minibatch):
        loss, metrics = super().of(policy, value, minibatch)
        acted = minibatch.decision
        kl = acted.policy.kl(policy)
        loss = loss + jnp.mean(acted.penalty * kl)
        return loss, {**metrics, "loss": loss, "kl": jnp.mean(kl)}


@dataclasses.dataclass(frozen=True)
class PenalizedPPO(algos.PPO):
    objective = PenalizedLoss(clip_ratio=1e6, clip_value=False)

    def init(self, key):
        return State(*super().init(key), penalty=jnp.float32(1.0))

    @fdg.fragment("actor", in_axes=(None, None, 0, 0))
    def act(self, parameters, statistics, observation, keys):
        seen = self.normalizers.seen(statistics, observation)
        policy, value = self.policy_and_value(parameters, seen)
        action = policy.sample(keys)
        return action, Acted(policy.log_prob(action), value, policy, jnp.zeros_like(value))

    def iterate(self, state):
        def learn(learned, running, trajectory, key):
            penalty = jnp.full_like(trajectory.decision.penalty, state.penalty)
            decision = trajectory.decision._replace(penalty=penalty)
            return self.learn(learned, running, trajectory._replace(decision=decision), key)

        state, metrics = on_policy.iteration(self, state, learn=learn)
        kl, penalty = metrics["kl"] / self.kl_target, state.penalty
        penalty = jnp.where(kl > 1.5, 2 * penalty, jnp.where(kl < 1 / 1.5, penalty / 2, penalty))
        return state._replace(penalty=jnp.clip(penalty, 1e-4, 1e4)), {**metrics, "penalty": penalty}
