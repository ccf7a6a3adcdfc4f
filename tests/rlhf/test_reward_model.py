"""Reward models: the Bradley-Terry loss (arXiv 2203.02155, equation 1), checkpoints, and training with them.

Checkpoints are `...ForSequenceClassification` with one label: `score.weight` [1, D] for the last token.
"""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
import fdg
import policies
from algos.language import weights
from algos.rlhf import reward_model
from algos.rlhf.checkpoints import config_of
from algos.rlhf.preferences import Minibatch, Pairs
from algos.rlhf.responses import Responses
from algos.rlhf.reward_models import model_reward
from envs.text import Prompts
from fdg.errors import FdgError
from tests.conformance.comparison import assert_same

SMALL = {"num_prompts": 4, "hidden_size": 8, "num_layers": 1, "num_heads": 2}
PROMPTS = Prompts(jnp.array([[0, 1, 4], [1, 5, 6]]), jnp.array([[False, True, True], [True, True, True]]))


def make(name, **fields):
    return algos.get(name)(env=envs.make("text:addition", digits=1), **{**SMALL, **fields})


def responses(*rows):
    width = max(map(len, rows))
    mask = jnp.array([[i < len(row) for i in range(width)] for row in rows])
    return Responses(PROMPTS, jnp.array([[*row, *[0] * (width - len(row))] for row in rows]), mask, mask)


@pytest.fixture(scope="module")
def scorer():
    """A reward model with a random score head: the algorithm, and a state."""
    algorithm = make("reward_model", group_size=2)
    state = jax.jit(algorithm.init)(jax.random.key(0))
    score = jax.random.normal(jax.random.key(7), (8, 1))
    return algorithm, state._replace(parameters={**state.parameters, "score": score})


@pytest.fixture(scope="module")
def exported(scorer, tmp_path_factory):
    """A directory with the exported reward model."""
    path = tmp_path_factory.mktemp("judge") / "model"
    algorithm, state = scorer
    algorithm.export(state, path)
    return path


def test_reward_is_read_at_the_last_token(scorer):
    algorithm, state = scorer
    given = responses([7, 2], [8, 9, 2])
    found = jax.jit(lambda p: model_reward(algorithm.network, p, given))(state.parameters)
    hidden = jax.jit(algorithm.network.hidden)
    for i, text in enumerate(([1, 4, 7, 2], [1, 5, 6, 8, 9, 2])):
        row = jnp.array([text])
        states = hidden(state.parameters["network"], row, jnp.ones_like(row))[0]
        reward = states @ state.parameters["score"][:, 0]
        np.testing.assert_allclose(found[i], reward[-1], atol=1e-5)
        assert abs(found[i] - reward[-2]) > 1e-3  # differs from the token before


def test_pair_loss_by_hand(scorer, monkeypatch):
    """Pairs with rewards 2 and 1, and -1 and 1; a third, uninformative pair has weight 0."""
    algorithm = scorer[0]
    rewards = iter([jnp.array([2.0, -1.0, 5.0]), jnp.array([1.0, 1.0, 0.0])])
    monkeypatch.setattr(reward_model, "model_reward", lambda *_: next(rewards))
    pairs = Pairs(None, None, None)
    loss, measures = algorithm._loss({}, (), Minibatch(pairs, (), jnp.array([0.5, 0.5, 0.0])))
    by_hand = 0.5 * (math.log(1 + math.exp(-1)) + math.log(1 + math.exp(2))) + 0.01 * 0.5 * (9 + 0)
    np.testing.assert_allclose(loss, by_hand, rtol=1e-6)
    assert measures["preference_accuracy"] == 0.5
    assert (measures["chosen_reward"], measures["rejected_reward"], measures["margin"]) == (0.5, 1.0, -0.5)


def test_update_increases_the_margin(scorer):
    algorithm, state = scorer
    first = responses([7, 2], [8, 9, 2])
    pairs = Pairs(
        *(
            jax.tree.map(lambda x: jnp.tile(x, (2,) + (1,) * (x.ndim - 1)), each)
            for each in (
                first,
                jax.tree.map(lambda x: x[::-1], first._replace(prompts=Prompts(*(x[::-1] for x in PROMPTS)))),
            )
        ),
        jnp.array([True, False, True, False]),
    )  # in row 0, the first response is preferred
    margin = jax.jit(lambda parameters: jnp.subtract(*algorithm._scores(parameters, pairs, ())))
    learn = jax.jit(algorithm.learn)
    trained_parts, _, measures = learn(state.parameters, state.optimizer_state, (pairs, ()), state.key)
    after = algorithm._with_trained(state.parameters, trained_parts)
    assert margin(after)[0] > margin(state.parameters)[0]
    assert measures["informative"] == 0.5


def test_export_and_load(scorer, exported):
    algorithm, state = scorer
    config = json.loads((exported / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"] and len(config["id2label"]) == 1
    decoder, read = weights.load(exported, scores=True)
    assert decoder == algorithm.network and config_of(str(exported), scores=True) == decoder.config
    np.testing.assert_array_equal(read.pop("score"), state.parameters["score"])
    assert_same(state.parameters["network"], read, 0)
    with pytest.raises(
        FdgError, match="is a reward model, which generates no text: give it as reward_model="
    ):
        weights.check(exported)


@pytest.mark.parametrize("name", ["grpo", "ppo_rlhf", "dpo"])
def test_reward_model_replaces_the_task_reward(name, scorer, exported):
    algorithm = make(name, group_size=2, reward_model=str(exported))
    state = jax.eval_shape(algorithm.init, jax.random.key(0))
    assert jax.tree.map(jnp.shape, state.reward_model) == jax.tree.map(jnp.shape, scorer[1].parameters)
    traced, (after, metrics) = jax.make_jaxpr(algorithm.iterate, return_shape=True)(state)
    assert {"reward_model", "reward_correct", "episode_return"} <= set(metrics)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    ends = zip(leaves, traced.jaxpr.invars, traced.jaxpr.outvars[: len(leaves)], strict=True)
    assert all(old is new for (path, _), old, new in ends if path[0].name == "reward_model")
    graph = fdg.trace(algorithm)
    assert {each.name: each.role for each in graph.fragments}["rate"] == "reward"
    plan = fdg.place(graph, policies.Standalone(actors=1, rewards=1, references=0, learners=1), 3)
    size = sum(4 * x.size for x in jax.tree.leaves(state.reward_model))
    held_bytes = sum(v.bytes for places in plan.schedule.leaves for v in places if v.group == "rewards")
    assert size <= held_bytes < 2 * size  # its only copy, which is never transferred
    arriving = [each for each in plan.movements if each.where.endswith("-> rewards")]
    assert arriving and all(each.where == "actors -> rewards" for each in arriving)
    assert sum(each.bytes_per_crossing for each in arriving) < size
    if name == "grpo":
        state = jax.jit(algorithm.init)(jax.random.key(0))
        assert_same(scorer[1].parameters, state.reward_model, 0)
        given, _, _, reward, _ = jax.jit(lambda state: algorithm._rollout(state, 4))(state)
        score = jax.jit(model_reward, static_argnums=0)
        found = score(algorithm.reward_settings.network(algorithm), scorer[1].parameters, given)
        np.testing.assert_allclose(reward.total, found, atol=1e-6)
        assert set(reward.parts) == {"correct", "model"} and np.ptp(found) > 0


def test_weight_sources(scorer):
    """The leaves of an earlier run that `--from` reads, in order of precedence."""
    sources = scorer[0].weight_sources
    assert sources[".respondent"] == (".respondent", ".parameters['adapters']", ".parameters")
    assert sources[".parameters['network']"] == (".parameters['network']", ".parameters")
    assert algos.GRPO.weight_sources[".reward_model"] == ()  # read from the path `reward_model`
    assert (
        algos.GRPO.weight_sources[".reference"] == algos.DPO.weight_sources[".reference"] == (".parameters",)
    )


def test_checkpoints_are_read_as_float64_if_enabled(exported, scorer):
    with jax.enable_x64(True):
        algorithm = make("grpo", group_size=2, reward_model=str(exported))
        found = algorithm.reward_settings.initial_parameters(algorithm, jax.random.key(0))
        assert found["score"].dtype == found["network"]["embedding"].dtype == jnp.float64
        np.testing.assert_array_equal(found["score"], scorer[1].parameters["score"])


def test_rewards_of_texts(scorer):
    algorithm, state = scorer
    one, other = algorithm.worth(state, ["1+2=", "1+2="], ["3", "4"])
    assert one != other
    for prompts, texts, message in (
        (["1+2="], [], "worth of 0 responses to 1 prompts: give one to each"),
        (["1+2="], ["Ω"], "'Ω' at 0 is not in the alphabet"),
        (["1+2="], ["12345"], "response 0 '12345' has 6 tokens, and task 'text:addition' allows 4"),
    ):
        with pytest.raises(FdgError, match=message):
            algorithm.worth(state, prompts, texts)


def test_invalid_reward_models_are_refused(exported, scorer, tmp_path):
    algorithm, state = scorer
    weights.save(tmp_path, algorithm.network, state.parameters["network"])
    with pytest.raises(
        FdgError, match=r"'score.weight' is missing, which the llama .* this is no reward model"
    ):
        make("grpo", reward_model=str(tmp_path))
    with pytest.raises(FdgError, match=r"reward_model=.* has a context of 9 tokens, and task 'text:addition"):
        algos.GRPO(env=envs.make("text:addition"), **SMALL, reward_model=str(exported))
    with pytest.raises(FdgError, match="no such directory"):
        make("ppo_rlhf", reward_model="/no/such/judge")
    with pytest.raises(FdgError, match=r"centre_coefficient=-1.0: it must be 0 or more"):
        make("reward_model", centre_coefficient=-1.0)
