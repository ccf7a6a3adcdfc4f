"""Runs of language models' algorithms: from a checkpoint, swept, broken off by a reward, made again."""

import dataclasses
import json

import jax
import pytest

import algos
import envs
import fdg
import policies
from algos.language import Decoder, DecoderConfig, weights
from fdg.errors import FdgError, FdgWarning
from fdg.training.description import describe, rebuild
from fdg.training.name_resolver import CALLER
from tests.conformance.comparison import assert_same
from tests.rlhf.small import SMALL, TASK, made


def test_a_checkpoint_on_disk_is_what_learning_begins_with(tmp_path):
    decoder = Decoder(DecoderConfig.tiny(56, hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=1))
    parameters = jax.jit(decoder.init)(jax.random.key(3))
    weights.save(tmp_path, decoder, parameters)
    algorithm = made("sft", model=str(tmp_path), tokenizer="characters")
    assert algorithm.network == decoder
    assert_same(parameters, algorithm._first_parameters(jax.random.key(0)), 0)
    with pytest.raises(FdgError, match="give one"):
        made("sft", model=str(tmp_path), decoder=decoder)
    (tmp_path / "model.safetensors").unlink()  # after it was looked at
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"HostError: {tmp_path}: it has neither"):
        jax.block_until_ready(algorithm._first_parameters(jax.random.key(0)))


def test_a_reward_that_raises_is_named_and_the_run_goes_on_where_it_was(tmp_path):
    """As if it had never happened: the checkpoint of the iteration before is there.

    Rewards that are all the same are said, with samples.
    """
    calls = []

    def judge(prompts, responses, answers):
        if len(prompts) == 4:  # of training, and not of a table of samples
            calls.append(prompts)
            if len(calls) == 3:
                raise ValueError("the judge is asleep")
        return [0.25] * len(responses)

    algorithm = dataclasses.replace(
        made("grpo", group_size=2, num_prompts=2), env=envs.make(TASK).with_reward(judge)
    )
    settings = {
        "total_steps": 4 * 8,
        "devices": 1,
        "eval_episodes": 0,
        "progress": False,
        "checkpoint_every": 1,
    }
    with pytest.raises(
        FdgError, match="reward 'judge' of task 'text:addition' raised ValueError: the judge"
    ) as e:
        fdg.fit(algorithm, out=tmp_path, **settings)
    assert "\n" not in str(e.value)
    first = (tmp_path / "metrics.jsonl").read_text()
    assert first.count("\n") == 2
    with pytest.warns(FdgWarning) as caught:
        run = fdg.fit(algorithm, out=tmp_path, resume=True, **settings)
    (line, *samples) = str(caught[0].message).splitlines()
    assert len(caught) == 1 and "after 20 steps every episode has returned 0.25" in line
    assert len(samples) == 3 and all("->" in line and line.endswith("(reward 0.25)") for line in samples)
    assert (tmp_path / "metrics.jsonl").read_text().startswith(first)
    # The third iteration asked again what it had asked.
    assert run.state.iteration == 8 and calls[3] == calls[2] and calls[2] != calls[1]


@pytest.mark.parametrize(
    "env", ["text:addition", "text:addition?digits=1&max_response=7", "text:countdown?count=4"]
)
def test_a_run_from_python_can_be_made_again_from_its_file(env):
    name, parameters = envs.parse(env)
    algorithm = algos.GRPO(env=envs.make(name, **parameters), **SMALL, variant="dapo", clip_low=0.1)
    said = json.loads(json.dumps(describe(algorithm, policies.GPUOnly())))
    assert "rebuilds" not in said
    assert rebuild(said, CALLER)[0] == algorithm
