"""Evaluation of language models: metrics of given responses, and rewards of another task."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
import fdg
from algos.language import Decoder, DecoderConfig
from algos.rlhf.responses import Responses
from algos.rlhf.speaker import return_metrics
from envs.text import CharacterTokenizer, Prompts, Reward
from envs.text.tokenizers import COMMON
from fdg.errors import FdgError


def test_lengths_count_the_models_own_tokens():
    policy_mask = jnp.array([[True, True, False], [True, False, False]])
    mask = jnp.ones((2, 3), bool)  # the last tokens come from a tool
    prompts = Prompts(jnp.zeros((2, 1), jnp.int32), jnp.ones((2, 1), bool))
    found = return_metrics(
        Responses(prompts, jnp.zeros((2, 3), jnp.int32), mask, policy_mask), Reward(jnp.array([1.0, 0.5]), {})
    )
    np.testing.assert_array_equal(found["lengths"], [2, 1])
    np.testing.assert_array_equal(found["returns"], [1.0, 0.5])
    assert float(found["return"]) == 0.75


def test_evaluation_with_another_reward():
    """The algorithm has a user's reward; the evaluation uses the reward of the task."""
    task = envs.make("text:comparison")
    constant_reward = task.with_reward(lambda prompts, responses, answers: [3.0] * len(prompts))
    learner = algos.SFT(env=constant_reward, hidden_size=8, num_layers=1, num_heads=2)
    run = fdg.Run(learner, jax.jit(learner.init)(jax.random.key(0)), 0)
    assert set(run.evaluate(4, env=task).returns.ravel().tolist()) <= {0.0, 1.0}
    with pytest.raises(FdgError, match="its tokenizer differs from the one of text:comparison"):
        run.evaluate(4, env=task.with_tokenizer(CharacterTokenizer(COMMON + "#")))


def test_samples_of_a_network_with_more_tokens_than_the_tokenizer():
    """Checkpoints pad their vocabulary. Tokens without text are left out, as in rewards and answers."""
    learner = algos.SFT(
        env=envs.make("text:addition"), decoder=Decoder(DecoderConfig.tiny(200, num_layers=1))
    )
    prompt, response = np.array([[0, 1, 4]]), np.array([[4, 199, 5, 2]])
    arrays = {"prompt": prompt, "response": response, "reward": np.ones(1)}
    arrays |= {"prompt_mask": prompt > 0, "response_mask": response > 0}
    assert learner.example_rows(arrays) == [{"prompt": "1", "response": "12", "tokens": 4, "reward": 1.0}]
