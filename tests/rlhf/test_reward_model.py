"""Reward models: Bradley and Terry's loss (arXiv 2203.02155, equation 1), files, and who learns from them.

Files are those of `...ForSequenceClassification` with one label: `score.weight` [1, D] of the last token.
"""

import dataclasses
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
from algos.language.decoder import Decoder
from algos.rlhf import reward_model
from algos.rlhf.checkpoints import config_of, save
from algos.rlhf.preferences import Minibatch, Pairs
from algos.rlhf.responses import Responses
from algos.rlhf.reward_models import model_reward
from envs.text import Prompts
from fdg.errors import FdgError
from tests.conformance.comparison import assert_same

SMALL = {"num_prompts": 4, "hidden_size": 8, "num_layers": 1, "num_heads": 2}
PROMPTS = Prompts(jnp.array([[0, 1, 4], [1, 5, 6]]), jnp.array([[False, True, True], [True, True, True]]))


def made(name, **fields):
    return algos.get(name)(env=envs.make("text:addition", digits=1), **{**SMALL, **fields})


def responses(*rows):
    width = max(map(len, rows))
    mask = jnp.array([[i < len(row) for i in range(width)] for row in rows])
    return Responses(PROMPTS, jnp.array([[*row, *[0] * (width - len(row))] for row in rows]), mask, mask)


@pytest.fixture(scope="module")
def trained():
    """A reward model with an opinion: the algorithm, and a state."""
    algorithm = made("reward_model", group_size=2)
    state = jax.jit(algorithm.init)(jax.random.key(0))
    opinion = jax.random.normal(jax.random.key(7), (8, 1))
    return algorithm, state._replace(parameters={**state.parameters, "score": opinion})


@pytest.fixture(scope="module")
def folder(trained, tmp_path_factory):
    """The same, exported."""
    path = tmp_path_factory.mktemp("judge") / "model"
    algorithm, state = trained
    algorithm.export(state, path)
    return path


def test_a_response_is_worth_what_is_held_at_its_last_token(trained):
    algorithm, state = trained
    said = responses([7, 2], [8, 9, 2])
    found = jax.jit(lambda p: model_reward(algorithm.network, p, said))(state.parameters)
    hidden = jax.jit(algorithm.network.hidden)
    for i, text in enumerate(([1, 4, 7, 2], [1, 5, 6, 8, 9, 2])):
        row = jnp.array([text])
        held = hidden(state.parameters["network"], row, jnp.ones_like(row))[0]
        worth = held @ state.parameters["score"][:, 0]
        np.testing.assert_allclose(found[i], worth[-1], atol=1e-5)
        assert abs(found[i] - worth[-2]) > 1e-3  # not at the token before


def test_the_loss_of_pairs_by_hand(trained, monkeypatch):
    """Pairs worth 2 and 1, and -1 and 1; a third, of equals, does not count."""
    algorithm = trained[0]
    said = iter([jnp.array([2.0, -1.0, 5.0]), jnp.array([1.0, 1.0, 0.0])])
    monkeypatch.setattr(reward_model, "model_reward", lambda *_: next(said))
    pairs = Pairs(None, None, None)
    loss, measures = algorithm._loss({}, (), Minibatch(pairs, (), jnp.array([0.5, 0.5, 0.0])))
    by_hand = 0.5 * (math.log(1 + math.exp(-1)) + math.log(1 + math.exp(2))) + 0.01 * 0.5 * (9 + 0)
    np.testing.assert_allclose(loss, by_hand, rtol=1e-6)
    assert measures["preference_accuracy"] == 0.5
    assert (measures["chosen_reward"], measures["rejected_reward"], measures["margin"]) == (0.5, 1.0, -0.5)


def test_a_step_on_pairs_moves_what_they_are_worth_apart(trained):
    algorithm, state = trained
    some = responses([7, 2], [8, 9, 2])
    pairs = Pairs(
        *(
            jax.tree.map(lambda x: jnp.tile(x, (2,) + (1,) * (x.ndim - 1)), each)
            for each in (
                some,
                jax.tree.map(lambda x: x[::-1], some._replace(prompts=Prompts(*(x[::-1] for x in PROMPTS)))),
            )
        ),
        jnp.array([True, False, True, False]),
    )  # of whose first rows the first response is the better
    margin = jax.jit(algorithm._margin)
    learn = jax.jit(algorithm.learn)
    trained_parts, _, measures = learn(state.parameters, state.optimizer_state, (pairs, ()), state.key)
    after = algorithm._with_trained(state.parameters, trained_parts)
    assert margin(after, pairs)[0] > margin(state.parameters, pairs)[0]
    assert measures["informative"] == 0.5


def test_what_is_exported_is_read_again_and_is_of_hugging_faces_shape(trained, folder):
    algorithm, state = trained
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"] and len(config["id2label"]) == 1
    decoder, read = weights.load(folder, scores=True)
    assert decoder == algorithm.network and config_of(str(folder), scores=True) == decoder.config
    np.testing.assert_array_equal(read.pop("score"), state.parameters["score"])
    assert_same(state.parameters["network"], read, 0)
    with pytest.raises(
        FdgError, match="is a reward model, which generates no text: give it as reward_model="
    ):
        weights.check(folder)


def test_a_reward_model_of_an_untied_decoder_judges(trained, tmp_path):
    """Its files have a score where a decoder's have `lm_head`."""
    tied = trained[0].network.config
    network = Decoder(dataclasses.replace(tied, tie_embeddings=False))
    tokenizer = trained[0].env.tokenizer
    save(tmp_path / "model", network, jax.jit(network.init)(jax.random.key(1)), tokenizer)
    learner = made("reward_model", group_size=2, model=str(tmp_path / "model"))
    state = jax.jit(learner.init)(jax.random.key(0))
    learner.export(state, tmp_path / "judge")
    algorithm = made("grpo", group_size=2, reward_model=str(tmp_path / "judge"))
    found = jax.jit(algorithm.init)(jax.random.key(0)).reward_model
    expected = dict(state.parameters["network"])
    assert expected.pop("head").shape == (8, tied.vocab_size)
    assert_same({**state.parameters, "network": expected}, found, 0)
    said = responses([7, 2], [8, 9, 2])
    score = jax.jit(model_reward, static_argnums=0)
    np.testing.assert_allclose(
        score(algorithm.reward_settings.network(algorithm), found, said),
        score(network, state.parameters, said),
        atol=1e-6,
    )


@pytest.mark.parametrize("name", ["grpo", "ppo_rlhf", "dpo"])
def test_a_reward_model_judges_in_place_of_the_task(name, trained, folder):
    algorithm = made(name, group_size=2, reward_model=str(folder))
    state = jax.eval_shape(algorithm.init, jax.random.key(0))
    assert jax.tree.map(jnp.shape, state.reward_model) == jax.tree.map(jnp.shape, trained[1].parameters)
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
    held = sum(v.bytes for places in plan.schedule.leaves for v in places if v.group == "rewards")
    assert size <= held < 2 * size  # it is there alone, and stays there
    arriving = [each for each in plan.movements if each.where.endswith("-> rewards")]
    assert arriving and all(each.where == "actors -> rewards" for each in arriving)
    assert sum(each.bytes_per_crossing for each in arriving) < size
    if name == "grpo":
        state = jax.jit(algorithm.init)(jax.random.key(0))
        assert_same(trained[1].parameters, state.reward_model, 0)
        said, _, _, reward, _ = jax.jit(lambda state: algorithm._rollout(state, 4))(state)
        score = jax.jit(model_reward, static_argnums=0)
        found = score(algorithm.reward_settings.network(algorithm), trained[1].parameters, said)
        np.testing.assert_allclose(reward.total, found, atol=1e-6)
        assert set(reward.parts) == {"correct", "model"} and np.ptp(found) > 0


def test_runs_go_on_from_where_their_parts_are(trained, folder):
    """The first of the places in `weight_sources` that an earlier run has."""
    judge = trained[0].weight_sources
    assert judge[".respondent"] == (".respondent", ".parameters['adapters']", ".parameters")
    assert judge[".parameters['network']"] == (".parameters['network']", ".parameters")
    assert algos.GRPO.weight_sources[".reward_model"] == ()  # it is the one that is named
    assert (
        algos.GRPO.weight_sources[".reference"] == algos.DPO.weight_sources[".reference"] == (".parameters",)
    )


def test_held_out_pairs_are_ranked(trained):
    algorithm, state = trained

    class Counted(envs.text.TextTask):
        def reward(self, answer, tokens, mask):
            total = jnp.sum(jnp.where(mask, tokens % 5, 0), axis=1).astype(jnp.float32)
            return envs.text.Reward(total, {"counted": total})

    judge = dataclasses.replace(algorithm, env=Counted(algorithm.env.problem))
    evaluate = jax.jit(lambda state: judge.evaluate(state, jax.random.key(3), 16)["return"])
    turned = {**state.parameters, "score": -state.parameters["score"]}
    share, other = evaluate(state), evaluate(state._replace(parameters=turned))
    np.testing.assert_allclose(share + other, 1.0, atol=1e-6)  # the opposite opinion is right elsewhere
    assert 0 < share < 1


def test_files_are_read_in_the_precision_that_is_on(folder, trained):
    with jax.enable_x64(True):
        judged = made("grpo", group_size=2, reward_model=str(folder))
        found = judged.reward_settings.initial_parameters(judged, jax.random.key(0))
        assert found["score"].dtype == found["network"]["embedding"].dtype == jnp.float64
        np.testing.assert_array_equal(found["score"], trained[1].parameters["score"])


def test_what_texts_are_worth(trained):
    algorithm, state = trained
    one, other = algorithm.worth(state, ["1+2=", "1+2="], ["3", "4"])
    assert one != other
    for prompts, said, message in (
        (["1+2="], [], "worth of 0 responses to 1 prompts: give one to each"),
        (["1+2="], ["Ω"], "'Ω' at 0 is not in the alphabet"),
        (["1+2="], ["12345"], "response 0 '12345' has 6 tokens, and task 'text:addition' allows 4"),
    ):
        with pytest.raises(FdgError, match=message):
            algorithm.worth(state, prompts, said)


def test_what_cannot_judge_is_refused_in_one_line(folder, trained, tmp_path):
    algorithm, state = trained
    weights.save(tmp_path, algorithm.network, state.parameters["network"])
    with pytest.raises(
        FdgError, match=r"'score.weight' is missing, which the llama .* this is no reward model"
    ):
        made("grpo", reward_model=str(tmp_path))
    with pytest.raises(FdgError, match=r"reward_model=.* has a context of 9 tokens, and task 'text:addition"):
        algos.GRPO(env=envs.make("text:addition"), **SMALL, reward_model=str(folder))
    with pytest.raises(FdgError, match="no such directory"):
        made("ppo_rlhf", reward_model="/no/such/judge")
    with pytest.raises(FdgError, match=r"centre_coefficient=-1.0: it must be 0 or more"):
        made("reward_model", centre_coefficient=-1.0)
