"""Runs of RLHF algorithms: started from a checkpoint, and rebuilt from `config.json`."""

import json

import jax
import pytest

import algos
import envs
import policies
from algos.language import Decoder, DecoderConfig, weights
from fdg.errors import FdgError
from fdg.training.description import describe, rebuild_algorithm
from fdg.training.name_resolver import PERMIT_ALL
from tests.conformance.comparison import assert_same
from tests.rlhf.small import SMALL, make


def test_training_starts_from_a_checkpoint(tmp_path):
    decoder = Decoder(DecoderConfig.tiny(56, hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=1))
    parameters = jax.jit(decoder.init)(jax.random.key(3))
    weights.save(tmp_path, decoder, parameters)
    algorithm = make("sft", model=str(tmp_path), tokenizer="characters")
    assert algorithm.network == decoder
    assert_same(parameters, algorithm._initial_parameters(jax.random.key(0)), 0)
    with pytest.raises(FdgError, match="give one"):
        make("sft", model=str(tmp_path), decoder=decoder)
    (tmp_path / "model.safetensors").unlink()  # after it was checked
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"HostError: {tmp_path}: it has neither"):
        jax.block_until_ready(algorithm._initial_parameters(jax.random.key(0)))


@pytest.mark.parametrize(
    "env", ["text:addition", "text:addition?digits=1&max_response=7", "text:countdown?count=4"]
)
def test_algorithm_is_rebuilt_from_config_json(env):
    name, parameters = envs.parse(env)
    algorithm = algos.GRPO(env=envs.make(name, **parameters), **SMALL, variant="dapo", clip_low=0.1)
    config = json.loads(json.dumps(describe(algorithm, policies.GPUOnly())))
    assert "rebuilds" not in config
    assert rebuild_algorithm(config, PERMIT_ALL) == algorithm
