"""Runs of language models' algorithms: from a checkpoint, swept, broken off by a reward, made again."""

import json

import jax
import pytest

import algos
import envs
import policies
from algos.language import Decoder, DecoderConfig, weights
from fdg.errors import FdgError
from fdg.training.description import describe, rebuild_algorithm
from fdg.training.name_resolver import CALLER
from tests.conformance.comparison import assert_same
from tests.rlhf.small import SMALL, made


def test_a_checkpoint_on_disk_is_what_learning_begins_with(tmp_path):
    decoder = Decoder(DecoderConfig.tiny(56, hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=1))
    parameters = jax.jit(decoder.init)(jax.random.key(3))
    weights.save(tmp_path, decoder, parameters)
    algorithm = made("sft", model=str(tmp_path), tokenizer="characters")
    assert algorithm.network == decoder
    assert_same(parameters, algorithm._initial_parameters(jax.random.key(0)), 0)
    with pytest.raises(FdgError, match="give one"):
        made("sft", model=str(tmp_path), decoder=decoder)
    (tmp_path / "model.safetensors").unlink()  # after it was looked at
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"HostError: {tmp_path}: it has neither"):
        jax.block_until_ready(algorithm._initial_parameters(jax.random.key(0)))


@pytest.mark.parametrize(
    "env", ["text:addition", "text:addition?digits=1&max_response=7", "text:countdown?count=4"]
)
def test_a_run_from_python_can_be_made_again_from_its_file(env):
    name, parameters = envs.parse(env)
    algorithm = algos.GRPO(env=envs.make(name, **parameters), **SMALL, variant="dapo", clip_low=0.1)
    said = json.loads(json.dumps(describe(algorithm, policies.GPUOnly())))
    assert "rebuilds" not in said
    assert rebuild_algorithm(said, CALLER) == algorithm
