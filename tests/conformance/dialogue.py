"""A small RLHF algorithm with all roles: it samples words, scores them, and learns.

Plain JAX, with 2-D parameters that can be sharded. Each token is sampled with its row's key, so tokens do not
depend on the placement of rows. The learner increases the probability of responses with a reward above the
critic's value.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

import envs
import fdg

POLICIES = {"colocated", "split", "standalone"}  # distribution policies for RLHF

TASK = envs.make("text:copying", length=2, letters=8)


@dataclasses.dataclass(frozen=True)
class Dialogue:
    """PPO-like: reference model and critic are separate fragments; one gradient for both trained models."""

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

        actor_key, critic_key, state_key = jax.random.split(key, 3)
        params = {"actor": model(actor_key, V), "critic": model(critic_key, d)}
        return {
            "params": params,
            "adam": self.optimizer.init(params),
            "reference": model(actor_key, V),
            "key": state_key,
        }

    @property
    def optimizer(self):
        return optax.adam(1e-2)

    def iterate(self, state):
        key, prompt_key, token_key = jax.random.split(state["key"], 3)
        prompts, answer = self.ask(jax.random.split(prompt_key, self.batch))
        tokens, mask, sampled = self.generate(
            state["params"]["actor"], prompts, jax.random.split(token_key, self.batch)
        )
        reward = self.judge(answer, tokens, mask)
        reference_log_prob = self.refer(state["reference"], prompts, tokens)
        value = self.criticise(state["params"]["critic"], prompts, tokens)
        params, adam, loss = self.learn(
            state["params"], state["adam"], prompts, tokens, mask, sampled, reference_log_prob, value, reward
        )
        new = {"params": params, "adam": adam, "reference": state["reference"], "key": key}
        return new, {"loss": loss, "reward": jnp.mean(reward), "tokens": jnp.sum(tokens * mask)}

    @fdg.fragment("environment")
    def ask(self, keys):
        problem = self.task.sample(keys)
        return problem.prompts.tokens, problem.answer

    def logits(self, params, last, context):
        hidden = jnp.tanh((params["embedding"][last] + context) @ params["inner"])
        return hidden @ params["outer"], hidden

    def encode(self, params, prompts):
        return jnp.mean(params["embedding"][prompts], axis=1)

    @fdg.fragment("actor", in_axes=(None, 0, 0))
    def generate(self, params, prompts, keys):
        def one(carry, t):
            last, context, ended = carry
            logits, context = self.logits(params, last, context)
            noise = jax.vmap(lambda key: jax.random.gumbel(jax.random.fold_in(key, t), logits.shape[1:]))(
                keys
            )
            token = jnp.where(ended, 0, jnp.argmax(logits + noise, axis=-1))
            log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], 1)[:, 0]
            return (token, context, ended | (token == 2)), (token, ~ended, log_prob)

        start = (prompts[:, -1], self.encode(params, prompts), prompts[:, -1] < 0)
        length = self.task.response_length
        return jax.tree.map(lambda x: x.T, jax.lax.scan(one, start, jnp.arange(length))[1])

    @fdg.fragment("reward")
    def judge(self, answer, tokens, mask):
        return self.task.reward(answer, tokens, mask).total + 0.1 * jnp.mean(tokens == 2, axis=1)

    def log_probs(self, params, prompts, tokens):
        def one(carry, token):
            logits, context = self.logits(params, *carry)
            return (token, context), jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], 1)[:, 0]

        return jax.lax.scan(one, (prompts[:, -1], self.encode(params, prompts)), tokens.T)[1].T

    @fdg.fragment("reference", in_axes=(None, 0, 0))
    def refer(self, params, prompts, tokens):
        return self.log_probs(params, prompts, tokens)

    def values(self, params, prompts, tokens):
        inner = jnp.tanh((self.encode(params, prompts) + self.encode(params, tokens)) @ params["inner"])
        return jnp.mean(inner @ params["outer"], axis=1)

    @fdg.fragment("critic", in_axes=(None, 0, 0))
    def criticise(self, params, prompts, tokens):
        return self.values(params, prompts, tokens)

    @fdg.fragment("learner", in_axes=(None, None, 0, 0, 0, 0, 0, 0, 0), out_axes=None)
    def learn(self, params, adam, prompts, tokens, mask, sampled, reference_log_prob, value, reward):
        def loss(params):
            log_prob = self.log_probs(params["actor"], prompts, tokens)
            ratio = jnp.exp(log_prob - sampled)
            policy = jnp.mean(jnp.sum(jnp.where(mask, ratio, 0), axis=1) * (reward - value))
            kl = jnp.mean(jnp.sum(jnp.where(mask, log_prob - reference_log_prob, 0), axis=1))
            value_loss = jnp.mean(jnp.square(self.values(params["critic"], prompts, tokens) - reward))
            return value_loss + 0.01 * kl - policy

        loss_value, gradients = jax.value_and_grad(loss)(params)
        updates, adam = self.optimizer.update(gradients, adam)
        return optax.apply_updates(params, updates), adam, loss_value
