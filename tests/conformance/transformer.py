"""A small transformer trained on its own samples: an algorithm with parameters to shard.

Plain JAX, without devices. The actor (the transformer) samples tokens, the environment is a shift register,
and the learner fits the sampled tokens, weighted by reward, with Adam.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import optax

import fdg


def _dense(key, rows, columns):
    return jax.random.normal(key, (rows, columns)) / jnp.sqrt(rows)


def _norm(x, scale):
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-5) * scale[None, None]


@dataclasses.dataclass(frozen=True)
class Sequences:
    """Trained on sequences that it samples, with rewards from the environment. One layer, four heads."""

    batch: int = 16
    length: int = 4  # T
    width: int = 32  # d
    layers: int = 1
    heads: int = 4
    tokens: int = 16  # V
    steps_per_iteration: ClassVar[int] = 16

    def init(self, key):
        keys = iter(jax.random.split(key, 4 * self.layers + 4))
        d, layers = self.width, {}
        for i in range(self.layers):
            layers[f"layer{i}"] = {
                "attention": {
                    "qkv": _dense(next(keys), d, 3 * d).reshape(d, 3, self.heads, d // self.heads),
                    "out": _dense(next(keys), d, d),
                },
                "mlp": {
                    "in": _dense(next(keys), d, 4 * d),
                    "bias": jnp.zeros(4 * d),
                    "out": _dense(next(keys), 4 * d, d),
                },
                "norm": jnp.ones(d),
            }
        params = {
            "embedding": _dense(next(keys), self.tokens, d),
            "position": 0.1 * jax.random.normal(next(keys), (self.length, d)),
            **layers,
        }
        return {
            "params": params,
            "adam": self.optimizer.init(params),
            "context": jax.random.randint(next(keys), (self.batch, self.length), 0, self.tokens),
            "keys": jax.random.split(next(keys), self.batch),
        }

    @property
    def optimizer(self):
        return optax.adam(1e-3)

    def iterate(self, state):
        def one(carry, _):
            context, keys = carry
            token, keys = self.act(state["params"], context, keys)
            new, reward = self.step(context, token)
            return (new, keys), (context, token, reward)

        (context, keys), rollout = jax.lax.scan(one, (state["context"], state["keys"]), length=2)
        params, adam, loss = self.learn(state["params"], state["adam"], *rollout)
        new = {"params": params, "adam": adam, "context": context, "keys": keys}
        return new, {"loss": loss, "reward": jnp.mean(rollout[2])}

    def logits(self, params, context):
        """[B, T] tokens to [B, V]."""
        x = params["embedding"][context] + params["position"][None]
        for i in range(self.layers):
            layer = params[f"layer{i}"]
            x = x + self._attention(layer["attention"], _norm(x, layer["norm"]))
            mlp = layer["mlp"]
            x = x + jnp.tanh(_norm(x, layer["norm"]) @ mlp["in"] + mlp["bias"][None, None]) @ mlp["out"]
        return x[:, -1] @ params["embedding"].T

    def _attention(self, weights, x):
        q, k, v = jnp.einsum("btd,dchk->cbhtk", x, weights["qkv"])
        scores = jnp.einsum("bhtk,bhsk->bhts", q, k) / jnp.sqrt(q.shape[-1])
        causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        mixed = jax.nn.softmax(jnp.where(causal[None, None], scores, -1e9)) @ v
        return jnp.moveaxis(mixed, 1, 2).reshape(x.shape) @ weights["out"]

    @fdg.fragment("actor", in_axes=(None, 0, 0))
    def act(self, params, context, keys):
        keys = jax.vmap(jax.random.split)(keys)
        noise = jax.vmap(lambda key: jax.random.gumbel(key, (self.tokens,)))(keys[:, 0])
        return jnp.argmax(self.logits(params, context) + noise, axis=-1), keys[:, 1]

    @fdg.fragment("environment")
    def step(self, context, token):
        reward = jnp.cos(token - context[:, -1])
        return jnp.concatenate([context[:, 1:], token[:, None]], axis=1), reward

    @fdg.fragment("learner", in_axes=(None, None, 1, 1, 1), out_axes=None)
    def learn(self, params, adam, context, token, reward):
        def epoch(carry, _):
            params, adam = carry
            loss, gradients = self.gradient(params, context, token, reward)
            params, adam = self.update(params, adam, gradients)
            return (params, adam), loss

        (params, adam), losses = jax.lax.scan(epoch, (params, adam), length=2)
        return params, adam, jnp.mean(losses)

    @fdg.fragment("gradient", in_axes=(None, 1, 1, 1), out_axes=None)
    def gradient(self, params, context, token, reward):
        flat = jax.tree.map(
            lambda x: jnp.moveaxis(x, 1, 0).reshape(-1, *x.shape[2:]), (context, token, reward)
        )

        def loss(params):
            chosen = jax.nn.log_softmax(self.logits(params, flat[0]))
            return -jnp.mean(jnp.sum(chosen * jax.nn.one_hot(flat[1], self.tokens), axis=-1) * flat[2])

        return jax.value_and_grad(loss)(params)

    @fdg.fragment("update", in_axes=None, out_axes=None)
    def update(self, params, adam, gradients):
        updates, adam = self.optimizer.update(gradients, adam)
        return optax.apply_updates(params, updates), adam
