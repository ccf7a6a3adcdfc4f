"""Reward models: decoders with a scalar head, `{"network": parameters, "score": [D, 1]}`.

Shapes: `N` responses, `D` width of the network.
"""

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import fdg
from algos import registry
from algos.language.decoder import Decoder
from algos.rlhf import requirements, updates
from algos.rlhf.responses import Responses, sequences
from envs.text import Reward
from envs.text.tokenizer_folders import same_tokens, tokenizer_of
from fdg.settings.fields import hyperparameter, require
from fdg.settings.parts import Part


def with_head(network: Decoder, parameters: Any) -> Any:
    """The parameters of a reward model: a network's, and a head that gives all responses reward zero."""
    return {"network": parameters, "score": jnp.zeros((network.config.hidden_size, 1))}


def model_reward(network: Decoder, parameters: Any, responses: Responses) -> jax.Array:
    """The rewards of `Responses [N]` by a reward model: `[N]` float32.

    A reward is a linear function of the hidden state at the last token, as in Transformers'
    `...ForSequenceClassification` with one label.
    """
    tokens, segments = sequences(responses)
    hidden = network.on_packed_rows(
        functools.partial(network.hidden, parameters["network"]), tokens, segments
    )
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    last = jnp.max(jnp.where(segments > 0, positions, 0), axis=1)
    last_hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    dtype = jnp.promote_types(last_hidden.dtype, jnp.float32)
    return (last_hidden.astype(dtype) @ parameters["score"].astype(dtype))[:, 0]


@dataclasses.dataclass(frozen=True)
class Judge(Part):
    """The setting of an algorithm's reward model, which is not trained.

    With a reward model, the metric `episode_return` is its reward. The components of the task's own reward
    are metrics too (such as `reward_correct`), and evaluations use the task's reward.
    """

    reward_model: str | None = hyperparameter(
        None,
        "folder with a reward model in Hugging Face's format; its scores replace the task's rewards (None:"
        " the task's rewards)",
        holds="folder",
    )

    def network(self, algorithm: Any) -> Decoder:
        """The reward model's decoder."""
        config = registry.option("model").config_of(self.reward_model, scores=True)
        return Decoder(dataclasses.replace(config, dtype=algorithm.dtype, packed_rows=algorithm._packed_rows))

    def initial_parameters(self, algorithm: Any, key: jax.Array) -> Any:
        """The reward model's parameters."""
        return registry.option("model").initial_reward_model(self.network(algorithm), self.reward_model, key)

    def with_scores(
        self, algorithm: Any, parameters: Any, responses: Responses, reward: Reward
    ) -> tuple[Responses, Reward]:
        """Responses `[N]` with the reward model's rewards in place of the task's."""
        if reward.given is not None:  # the task rewards only some responses, the model rewards all
            responses = responses._replace(policy_mask=responses.mask)
        network = self.network(algorithm)

        @fdg.fragment("reward", in_axes=(None, 0))
        def rate(parameters, responses):
            """The reward model's rewards of `Responses [N]`: `[N]` float32."""
            score = functools.partial(model_reward, network, parameters)
            return updates.map_micro_batches(score, responses, algorithm.rows_per_micro_batch)

        total = rate(parameters, responses)
        return responses, Reward(total, {**reward.parts, "model": total})

    def check_fits(self, algorithm: Any) -> None:
        """Refuses a reward model whose tokens are not those of the task, or whose context is too short."""
        if self.reward_model is None:
            return
        config, env = self.network(algorithm).config, algorithm.env
        setting = f"reward_model={self.reward_model!r}"
        require(
            algorithm,
            env.tokenizer.vocab_size <= config.vocab_size,
            f"{setting} has a vocabulary of {config.vocab_size} tokens, and task '{env.name}' one of"
            f" {env.tokenizer.vocab_size}: train one on this task's tokens",
        )
        require(
            algorithm,
            not os.path.lexists(Path(self.reward_model, "tokenizer.json"))
            or same_tokens(tokenizer_of(self.reward_model), env.tokenizer),
            f"{setting} uses a different tokenizer from task '{env.name}': train one on this task's tokens",
        )
        longest = requirements.context_length(env)
        require(
            algorithm,
            longest <= config.max_positions,
            f"{setting} has a context of {config.max_positions} tokens, and task '{env.name}' needs"
            f" {longest}: shorten the task",
        )
