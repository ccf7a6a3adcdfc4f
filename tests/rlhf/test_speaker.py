"""What an evaluation of a language model says, from responses given by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
import fdg
from algos.rlhf.responses import Responses
from algos.rlhf.speaker import return_metrics
from envs.text import CharacterTokenizer, Prompts, Reward
from envs.text.tokenizers import COMMON
from fdg.errors import FdgError


def test_an_evaluation_counts_what_the_model_said_itself():
    own = jnp.array([[True, True, False], [True, False, False]])
    there = jnp.ones((2, 3), bool)  # the last tokens are a tool's
    prompts = Prompts(jnp.zeros((2, 1), jnp.int32), jnp.ones((2, 1), bool))
    found = return_metrics(
        Responses(prompts, jnp.zeros((2, 3), jnp.int32), there, own), Reward(jnp.array([1.0, 0.5]), {})
    )
    np.testing.assert_array_equal(found["lengths"], [2, 1])
    np.testing.assert_array_equal(found["returns"], [1.0, 0.5])
    assert float(found["return"]) == 0.75


def test_a_run_is_evaluated_by_another_reward_than_it_learned_from():
    """What the task says is right, of a network that a reward of one's own has trained."""
    task = envs.make("text:comparison")
    always = task.with_reward(lambda prompts, responses, answers: [3.0] * len(prompts))
    learner = algos.SFT(env=always, hidden_size=8, num_layers=1, num_heads=2)
    run = fdg.Run(learner, jax.jit(learner.init)(jax.random.key(0)), 0)
    assert set(run.evaluate(4, env=task).returns.ravel().tolist()) <= {0.0, 1.0}
    with pytest.raises(FdgError, match="its tokenizer differs from the one of text:comparison"):
        run.evaluate(4, env=task.with_tokenizer(CharacterTokenizer(COMMON + "#")))
