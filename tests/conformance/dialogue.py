"""A small algorithm with all roles of RLHF, of the tests' own: it samples words, has them judged, and learns.

Plain JAX, with parameters of two dimensions to split. Generation draws each token by its row's key, so that
tokens do not depend on how rows are placed; the learner raises what was judged better than the critic
expected.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

import envs
import fdg

POLICIES = {"colocated", "split", "standalone"}  # that are for such algorithms

TASK = envs.make("text:copying", length=2, letters=8)


@dataclasses.dataclass(frozen=True)
class Dialogue:
    """PPO's shape: reference and critic are fragments of their own, one gradient for both models."""

    task: Any = TASK
    batch: int = 8
    width: int = 16
    steps_per_iteration: ClassVar[int] = 8
    parameter_rules: ClassVar[Any] = (
        ("embedding", ("model",)),
        ("inner", ("model", "batch")),
        (r"'outer'", ("batch", "model")),
    )

    def init(self, key):
        V, d = self.task.tokenizer.vocab_size, self.width

        def model(key, columns):
            a, b, c = jax.random.split(key, 3)
            return {
                "embedding": jax.random.normal(a, (V, d)) / 4,
                "inner": jax.random.normal(b, (d, d)) / 4,
                "outer": jax.random.normal(c, (d, columns)) / 4,
            }

        of_actor, of_critic, of_state = jax.random.split(key, 3)
        params = {"actor": model(of_actor, V), "critic": model(of_critic, d)}
        return {
            "params": params,
            "adam": self.optimizer.init(params),
            "reference": model(of_actor, V),
            "key": of_state,
        }

    @property
    def optimizer(self):
        return optax.adam(1e-2)

    def iterate(self, state):
        key, of_prompts, of_tokens = jax.random.split(state["key"], 3)
        prompts, answer = self.ask(jax.random.split(of_prompts, self.batch))
        tokens, mask, sampled = self.generate(
            state["params"]["actor"], prompts, jax.random.split(of_tokens, self.batch)
        )
        reward = self.judge(answer, tokens, mask)
        before = self.refer(state["reference"], prompts, tokens)
        value = self.criticise(state["params"]["critic"], prompts, tokens)
        params, adam, loss = self.learn(
            state["params"], state["adam"], prompts, tokens, mask, sampled, before, value, reward
        )
        new = {"params": params, "adam": adam, "reference": state["reference"], "key": key}
        return new, {"loss": loss, "reward": jnp.mean(reward), "tokens": jnp.sum(tokens * mask)}

    @fdg.fragment("environment")
    def ask(self, keys):
        problem = self.task.sample(keys)
        return problem.prompts.tokens, problem.answer

    def logits(self, params, last, memory):
        hidden = jnp.tanh((params["embedding"][last] + memory) @ params["inner"])
        return hidden @ params["outer"], hidden

    def remember(self, params, prompts):
        return jnp.mean(params["embedding"][prompts], axis=1)

    @fdg.fragment("actor", in_axes=(None, 0, 0))
    def generate(self, params, prompts, keys):
        def one(carry, t):
            last, memory, over = carry
            logits, memory = self.logits(params, last, memory)
            noise = jax.vmap(lambda key: jax.random.gumbel(jax.random.fold_in(key, t), logits.shape[1:]))(
                keys
            )
            token = jnp.where(over, 0, jnp.argmax(logits + noise, axis=-1))
            log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], 1)[:, 0]
            return (token, memory, over | (token == 2)), (token, ~over, log_prob)

        start = (prompts[:, -1], self.remember(params, prompts), prompts[:, -1] < 0)
        length = self.task.response_length
        return jax.tree.map(lambda x: x.T, jax.lax.scan(one, start, jnp.arange(length))[1])

    @fdg.fragment("reward")
    def judge(self, answer, tokens, mask):
        return self.task.reward(answer, tokens, mask).total + 0.1 * jnp.mean(tokens == 2, axis=1)

    def log_probs(self, params, prompts, tokens):
        def one(carry, token):
            logits, memory = self.logits(params, *carry)
            return (token, memory), jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], 1)[:, 0]

        return jax.lax.scan(one, (prompts[:, -1], self.remember(params, prompts)), tokens.T)[1].T

    @fdg.fragment("reference", in_axes=(None, 0, 0))
    def refer(self, params, prompts, tokens):
        return self.log_probs(params, prompts, tokens)

    def values(self, params, prompts, tokens):
        inner = jnp.tanh((self.remember(params, prompts) + self.remember(params, tokens)) @ params["inner"])
        return jnp.mean(inner @ params["outer"], axis=1)

    @fdg.fragment("critic", in_axes=(None, 0, 0))
    def criticise(self, params, prompts, tokens):
        return self.values(params, prompts, tokens)

    @fdg.fragment("learner", in_axes=(None, None, 0, 0, 0, 0, 0, 0, 0), out_axes=None)
    def learn(self, params, adam, prompts, tokens, mask, sampled, before, value, reward):
        def loss(params):
            now = self.log_probs(params["actor"], prompts, tokens)
            ratio = jnp.exp(now - sampled)
            policy = jnp.mean(jnp.sum(jnp.where(mask, ratio, 0), axis=1) * (reward - value))
            drift = jnp.mean(jnp.sum(jnp.where(mask, now - before, 0), axis=1))
            miss = jnp.mean(jnp.square(self.values(params["critic"], prompts, tokens) - reward))
            return miss + 0.01 * drift - policy

        found, slope = jax.value_and_grad(loss)(params)
        updates, adam = self.optimizer.update(slope, adam)
        return optax.apply_updates(params, updates), adam, found
