"""LoRA adapters in PEFT's format: saved, loaded, and refused if invalid."""

import dataclasses
import json
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from algos.language import Decoder, DecoderConfig, peft, weights
from fdg.errors import FdgError
from tests.language.test_generation import TINY
from tests.refusing import refuses

TOKENS = jnp.arange(12).reshape(2, 6) % 11


@pytest.fixture(scope="module")
def adapted():
    decoder = Decoder(DecoderConfig.tiny(11, **TINY, qkv_bias=True, lora_rank=3, lora_alpha=5.0))
    shapes = jax.eval_shape(decoder.init, jax.random.key(0))
    draw = np.random.default_rng(0)
    return decoder, jax.tree.map(lambda x: draw.normal(size=x.shape).astype(np.float32), shapes)


@pytest.fixture
def folder(adapted, tmp_path):
    peft.save(tmp_path / "adapters", *adapted, base="where/it/is", files={"tokenizer.json": b"{}"})
    return tmp_path / "adapters"


def base_of(decoder):
    return DecoderConfig(**{**vars(decoder.config), "lora_rank": 0})


def change_config(folder, **changes):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_save_and_load(adapted, folder):
    decoder, parameters = adapted
    config, adapters = peft.load(folder, base_of(decoder))
    assert config == decoder.config
    jax.tree.map(np.testing.assert_array_equal, adapters, parameters["adapters"])
    written = json.loads((folder / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == "where/it/is" and written["r"] == 3
    names = load_file(folder / "adapter_model.safetensors")
    assert names["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"].shape == (3, 24)
    assert (folder / "tokenizer.json").read_bytes() == b"{}"


def test_rslora_on_one_layer(adapted, folder):
    """By hand: kernel + alpha / sqrt(r) (B A)^T, in one layer."""
    decoder, parameters = adapted
    file = folder / "adapter_model.safetensors"
    kept = {key: x for key, x in load_file(file).items() if "layers.1.self_attn.v_proj" in key}
    save_file(kept, file)
    change_config(folder, use_rslora=True, target_modules="all-linear", init_lora_weights="gaussian")
    config, adapters = peft.load(folder, base_of(decoder))
    assert config.lora_targets == ("value",)
    a, b = (kept[f"base_model.model.model.layers.1.self_attn.v_proj.lora_{x}.weight"] for x in "AB")
    base = parameters["base"]
    by_hand = jax.tree.map(np.copy, base)
    by_hand["layers"]["1"]["attention"]["value"]["kernel"] += 5 / 3**0.5 * (b @ a).T
    segments = jnp.ones(TOKENS.shape, jnp.int32)
    both = {"base": base, "adapters": adapters}
    found = jax.jit(Decoder(config).apply)(both, TOKENS, segments)
    want = jax.jit(Decoder(base_of(decoder)).apply)(by_hand, TOKENS, segments)
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)
    gradient = jax.jit(jax.grad(lambda p: Decoder(config).apply(p, TOKENS, segments).sum()))(both)[
        "adapters"
    ]["layers"]
    assert not any(np.any(x) for x in jax.tree.leaves(gradient["0"])), "layer 0 has no adapters"
    assert all(np.any(x) for x in jax.tree.leaves(gradient["1"]))


REFUSED = {
    "peft_type": "IA3", "use_dora": True, "bias": "all", "modules_to_save": ["lm_head"],
    "fan_in_fan_out": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 2},
    "init_lora_weights": "pissa", "layer_replication": [[0, 1]], "trainable_token_indices": [1],
    "lora_bias": True, "some_new_option": 1, "r": 0, "lora_alpha": "5", "use_rslora": 1,
    "target_parameters": ["x"],
}  # fmt: skip


@pytest.mark.parametrize("key", REFUSED)
def test_unsupported_options_are_refused(adapted, folder, key):
    change_config(folder, **{key: REFUSED[key]})
    with refuses(match=f"adapter_config.json: .*{key}={REFUSED[key]!r}".replace("[", r"\[")):
        peft.read_config(folder, base_of(adapted[0]))


@pytest.mark.parametrize("alpha", ["NaN", "Infinity", "1e999"])
def test_alphas_that_are_not_finite_are_refused(adapted, folder, alpha):
    file = folder / "adapter_config.json"
    file.write_text(file.read_text().replace('"lora_alpha": 5.0', f'"lora_alpha": {alpha}'))
    with refuses(match=r"adapter_config.json: lora_alpha=(nan|inf), .*: give a number"):
        peft.read_config(folder, base_of(adapted[0]))


def test_invalid_folders(adapted, folder, tmp_path):
    config, file = base_of(adapted[0]), folder / "adapter_model.safetensors"
    valid = load_file(file)
    key = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"

    def refused(message, *reads):
        for read in reads or (peft.read_config, peft.load):
            with refuses(message):
                read(folder, config)

    without = {name: x for name, x in valid.items() if name != key}
    for changed, message in (
        (without, "layers.0.mlp.up has lora_B, but no lora_A"),
        ({**valid, key: valid[key].T.copy()}, "it must have [3, 16]"),
        (
            {**valid, "base_model.model.lm_head.lora_A.weight": valid[key]},
            "adapts no linear layer of its base",
        ),
        ({**without, key.replace("layers.0", "layers.9"): valid[key]}, "adapts no linear layer of its base"),
        ({**without, key.replace("up_proj", "up_proj.default"): valid[key]}, "adapts no linear layer"),
        ({**valid, "model.norm.lora_A.weight": valid[key]}, "adapts no linear layer of its base"),
        ({}, "holds no tensor"),
    ):
        save_file(changed, file)
        refused(message)
    save_file({**valid, key: np.full_like(valid[key], np.nan)}, file)
    refused("48 of its 48 numbers are NaN or infinite", peft.load)
    with pytest.raises(FdgError, match="num_layers=1000000000: give at most 4096"):
        peft.load(folder, dataclasses.replace(config, num_layers=10**9))
    file.rename(folder / "adapter_model.bin")
    refused("adapter_model.safetensors is missing (adapter_model.bin is of an older format")
    (folder / "adapter_config.json").unlink()
    refused("it has no adapter_config.json")
    with pytest.raises(FdgError, match="no such directory"):
        peft.load(tmp_path / "none", config)


def test_random_bytes_are_refused_in_one_line(adapted, folder):
    """After any change to the two files, `load` succeeds or fails with a one-line message."""
    config = base_of(adapted[0])
    kept = {file: file.read_bytes() for file in folder.iterdir() if file.name != "tokenizer.json"}
    draw = random.Random(0)
    for _ in range(150):
        for file, content in kept.items():
            file.write_bytes(content)
        file = draw.choice(list(kept))
        changed = bytearray(kept[file])
        for _ in range(draw.randint(1, 4)):
            changed[draw.randrange(min(len(changed), 400))] = draw.randrange(256)
        file.write_bytes(changed if draw.random() < 0.8 else changed[: draw.randrange(len(changed))])
        try:
            peft.load(folder, config)
        except FdgError as error:
            assert "\n" not in str(error)


def test_saving_without_adapters_is_refused(tmp_path):
    decoder = Decoder(DecoderConfig.tiny(11, **TINY))
    with pytest.raises(FdgError, match="the network has no adapters: train with lora_rank"):
        peft.save(tmp_path / "none", decoder, decoder.init(jax.random.key(0)))
    assert not (tmp_path / "none").exists()


def test_saving_a_checkpoint_next_to_adapters_is_refused(adapted, folder):
    with pytest.raises(FdgError, match="holds adapters, which would be added to the checkpoint"):
        weights.save(folder, *adapted)
