"""Hugging Face checkpoint directories: saved, loaded, and refused if invalid."""

import dataclasses
import json

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from algos.language import Decoder, DecoderConfig, weights
from algos.language.packing import pack_rows
from fdg.errors import FdgError
from tests.language.test_generation import TINY
from tests.refusing import refuses

FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True, "tie_embeddings": False},
}


def random_network(**options):
    config = DecoderConfig.tiny(11, **TINY, **options)
    shapes = jax.eval_shape(Decoder(config).init, jax.random.key(0))
    draw = np.random.default_rng(0)
    parameters = jax.tree.map(lambda x: draw.normal(size=x.shape).astype(np.float32), shapes)
    return Decoder(config), parameters


@pytest.mark.parametrize("name", [".", "", "../here"])
def test_save_to_the_current_folder(tmp_path, monkeypatch, name):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    decoder, parameters = random_network()
    weights.save(name, decoder, parameters)
    assert weights.load(tmp_path / "here")[0] == decoder
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_failed_save_leaves_no_files(tmp_path):
    (tmp_path / "file").write_text("mine")
    for name in ("file", "null\0"):
        with pytest.raises(FdgError, match="the checkpoint cannot be written"):
            weights.save(tmp_path / name, *random_network())
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("family", FAMILIES)
def test_save_and_load(tmp_path, family):
    decoder, parameters = random_network(**FAMILIES[family])
    for shard_bytes, files in ((1 << 30, 1), (4000, 4)):
        weights.save(tmp_path / "model", decoder, parameters, shard_bytes=shard_bytes)
        assert len(list((tmp_path / "model").glob("*.safetensors"))) >= files
        assert json.loads((tmp_path / "model/config.json").read_text())["model_type"] == family
        again, found = weights.load(tmp_path / "model")
        assert again == decoder
        jax.tree.map(np.testing.assert_array_equal, found, parameters)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_half_precision_is_read_as_float32(tmp_path):
    decoder, parameters = random_network()
    for dtype in ("bfloat16", "float16"):
        weights.save(tmp_path, decoder, parameters, dtype=dtype)
        found = weights.load(tmp_path)[1]
        assert found["embedding"].dtype == np.float32
        np.testing.assert_allclose(found["embedding"], parameters["embedding"], rtol=1e-2)


def test_adapters_on_a_loaded_checkpoint(tmp_path):
    decoder, parameters = random_network()
    weights.save(tmp_path, decoder, parameters)
    adapted, found = weights.load(tmp_path, lora_rank=2, remat=True)
    assert adapted.config.remat and found["adapters"]["layers"]["1"]["mlp"]["up"]["a"].shape == (16, 2)
    jax.tree.map(np.testing.assert_array_equal, found["base"], parameters)
    weights.save(tmp_path / "merged", adapted, found)  # initial adapters change nothing
    jax.tree.map(np.testing.assert_array_equal, weights.load(tmp_path / "merged")[1], parameters)


def test_new_adapters_do_not_depend_on_the_order_of_tensors(tmp_path):
    decoder, parameters = random_network()
    weights.save(tmp_path / "one", decoder, parameters)
    weights.save(tmp_path / "shards", decoder, parameters, shard_bytes=4000)
    adapted, expected = weights.load(tmp_path / "one", lora_rank=2)
    compiled = jax.jit(adapted.with_adapters)(parameters, jax.random.key(0))
    for found in (weights.load(tmp_path / "shards", lora_rank=2)[1], compiled):
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_config_of_transformers_5():
    config = DecoderConfig.tiny(11, rope_theta=5e5)
    written = config.to_hugging_face()
    del written["rope_scaling"]
    written["rope_parameters"] = {"rope_type": "default", "rope_theta": written.pop("rope_theta")}
    assert DecoderConfig.from_hugging_face(written) == config


def make_invalid(folder, fault):
    """Introduces a fault; returns the directory to read, and the expected error message."""
    config = json.loads((folder / "config.json").read_text())
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    match fault:
        case "no directory":
            return folder / "none", "no such directory: give a directory with config.json and *.safetensors"
        case "no config":
            (folder / "config.json").unlink()
            return folder, "it has no config.json"
        case "a run":
            (folder / "config.json").write_text('{"algo": "sft", "hyperparameters": {}}')
            return folder, f"{folder} is a run, not a checkpoint: fdg export {folder} --out DIR, and give DIR"
        case "config is not JSON":
            (folder / "config.json").write_text("{")
            return folder, "config.json: is not JSON"
        case "unknown model_type":
            (folder / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
            return folder, "model_type='gpt2' is not a supported decoder: supported are llama, mistral"
        case "unknown activation":
            (folder / "config.json").write_text(json.dumps({**config, "hidden_act": "gelu"}))
            return folder, "hidden_act='gelu'"
        case "wrong architecture":
            (folder / "config.json").write_text(json.dumps({**config, "model_type": "qwen3"}))
            return folder, "holds 'model.layers.0.self_attn.k_proj.bias', which the qwen3 of its"
        case "missing biases":
            changed = {**config, "model_type": "llama", "attention_bias": True}
            (folder / "config.json").write_text(json.dumps(changed))
            return folder, "'model.layers.0.self_attn.o_proj.bias' is missing, and 1 more, which the llama"
        case "wrong vocab_size":
            (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 12}))
            return (
                folder,
                "'model.embed_tokens.weight' is [11, 16], but by its config.json it must be [12, 16]",
            )
        case "missing shard":
            shard = sorted(folder.glob("*.safetensors"))[1]
            shard.unlink()
            count = sum(file == shard.name for file in index["weight_map"].values())
            return folder, f"shard {shard.name} is missing, with {count} of the 26"
        case "truncated shard":
            shard = sorted(folder.glob("*.safetensors"))[0]
            shard.write_bytes(shard.read_bytes()[:-10])
            return folder, f"{shard.name}: is truncated: its header says"
    (folder / "model.safetensors.index.json").unlink()
    return folder, "it has neither model.safetensors nor model.safetensors.index.json"


@pytest.mark.parametrize(
    "fault",
    [
        "no directory", "no config", "a run", "config is not JSON", "unknown model_type",
        "unknown activation", "wrong architecture", "missing biases", "wrong vocab_size", "missing shard",
        "truncated shard", "no weights",
    ],
)  # fmt: skip
def test_invalid_folders(tmp_path, fault):
    weights.save(tmp_path, *random_network(qkv_bias=True), shard_bytes=4000)
    folder, message = make_invalid(tmp_path, fault)
    for read in (weights.check, weights.load):
        with refuses(message):
            read(folder)


def test_unsupported_architecture_is_not_saved(tmp_path):
    decoder, parameters = random_network()
    unsupported = Decoder(dataclasses.replace(decoder.config, qk_norm=True, mlp_bias=True))
    with pytest.raises(FdgError, match="no model of Hugging Face has"):
        weights.save(tmp_path / "odd", unsupported, parameters)
    assert not (tmp_path / "odd").exists()


def first_fit_decreasing(lengths, width):
    """Tokens and segments of packed rows `[rows, width]`; all tokens of sequence i are i + 1."""
    rows = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        row = next((row for row in rows if len(row) + lengths[i] <= width), None)
        if row is None:
            rows.append(row := [])
        row += [(i + 1, row[-1][1] + 1 if row else 1)] * lengths[i]
    full = np.array([row + [(0, 0)] * (width - len(row)) for row in rows])
    return full[..., 0], full[..., 1]


def test_packing_is_first_fit_decreasing():
    draw = np.random.default_rng(1)
    lengths = draw.integers(1, 7, 20)
    tokens = np.zeros((20, 9), np.int32)
    for i, (row, length) in enumerate(zip(tokens, lengths, strict=True)):
        row[draw.permutation(9)[:length]] = i + 1  # padding anywhere
    want, segments = first_fit_decreasing(lengths.tolist(), 8)
    found = pack_rows(tokens, tokens > 0, len(want), 8)
    np.testing.assert_array_equal(found.tokens, want)
    np.testing.assert_array_equal(found.segments, segments)
    np.testing.assert_array_equal(found.gather(jax.numpy.asarray(tokens)), want)
    truncated = pack_rows(tokens, tokens > 0, 3, 8)
    counted = [int((truncated.tokens == i + 1).sum()) for i in range(20)]
    assert counted == list(np.where(truncated.fits, lengths, 0)) and 0 < truncated.fits.sum() < 20


def change_json(folder, file="config.json", **changes):
    config = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**config, **changes}))


def assert_refused(folder, message, *reads):
    for read in reads or (weights.check, weights.load):
        with refuses(message):
            read(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 in its config.json, but it holds only"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers=1000000000000: it must be a whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads=0: it must be a whole number above zero"),
        ({"hidden_size": "16"}, "hidden_size='16': it must be a whole number above zero"),
        ({"rms_norm_eps": None, "rope_theta": True}, "rope_theta=True: it must be a number above one"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no': it must be true or false"),
        ({"rope_scaling": {"type": "llama3", "factor": 8}}, "low_freq_factor, high_freq_factor missing"),
        ({"rope_scaling": {"type": "yarn", "factor": "8"}}, "config.json: factor='8': it must be a number"),
        ({"rope_scaling": {"type": "mrope", "factor": 2}}, "config.json: rope_type='mrope' is not supported"),
        ({"rope_scaling": ["yarn"]}, "rope_scaling=['yarn']: it must be an object"),
        ({"head_dim": 3}, "config.json: head_dim=3: rotary positions need an even width"),
    ],
)  # fmt: skip
def test_invalid_config_values(tmp_path, changes, message):
    weights.save(tmp_path, *random_network())
    change_json(tmp_path, **changes)
    assert_refused(tmp_path, message)


def write_safetensors(path, tensors, cut=0, **header):
    """Writes a safetensors file from `name: (dtype, shape, content)`; `header` overrides entries."""
    entries, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        entries[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    header_bytes = json.dumps({**entries, **header}).encode()
    path.write_bytes(len(header_bytes).to_bytes(8, "little") + header_bytes + data[: len(data) - cut])


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, "'b' begins at byte 4, but the"),
        ({"b": {"dtype": "F32", "shape": [2], "data_offsets": [8, 2**40]}}, "'b' is F32 [2], and has"),
        ({"b": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [8, 16]}}, "has 8 bytes in the file"),
        ({"b": {"dtype": "F32", "shape": [-2], "data_offsets": [8, 16]}}, "has no valid dtype, shape"),
        ({"b": {"dtype": "F99", "shape": [2], "data_offsets": [8, 16]}}, "'b' is 'F99': known are F64, F32"),
        ({"c": {"dtype": "U8", "shape": [0], "data_offsets": [16, 16]}}, "holds 'a', which the llama"),
        ({"c": {"dtype": "F32", "shape": [1], "data_offsets": [16, 20]}}, "is truncated: its header says 20"),
    ],
)  # fmt: skip
def test_invalid_headers(tmp_path, header, message):
    weights.save(tmp_path, *random_network())
    tensors = {"a": ("F32", [2], bytes(8)), "b": ("F32", [2], bytes(8))}
    write_safetensors(tmp_path / "model.safetensors", tensors, **header)
    assert_refused(tmp_path, message)
    (tmp_path / "model.safetensors").write_bytes((10**11).to_bytes(8, "little") + b"{}")
    assert_refused(tmp_path, "a header of 100000000000 bytes, in a file of 10")


def test_nonfinite_weights(tmp_path):
    decoder, parameters = random_network()
    kernel = parameters["layers"]["1"]["mlp"]["up"]["kernel"]
    kernel[2, :3] = np.nan, np.inf, -np.inf
    weights.save(tmp_path, decoder, parameters)
    assert weights.check(tmp_path) == decoder.config  # which reads headers only
    assert_refused(
        tmp_path,
        "'model.layers.1.mlp.up_proj.weight': 3 of its 384 numbers are NaN or infinite",
        weights.load,
    )
    kernel[2, :3] = 3e38, 3e38, -3e38  # finite, but their squares are not
    weights.save(tmp_path, decoder, parameters)
    np.testing.assert_array_equal(weights.load(tmp_path)[1]["layers"]["1"]["mlp"]["up"]["kernel"], kernel)


def test_invalid_indices(tmp_path):
    weights.save(tmp_path, *random_network(), shard_bytes=4000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    key, shard = next(iter(index.items()))
    for other in ("../x.safetensors", "/etc/passwd", "..", "", "a\0b", 3, None):
        change_json(tmp_path, "model.safetensors.index.json", weight_map={**index, key: other})
        assert_refused(tmp_path, "has no weight_map of tensors to files in this directory")
    (tmp_path / "copy.safetensors").write_bytes((tmp_path / shard).read_bytes())
    change_json(tmp_path, "model.safetensors.index.json", weight_map={**index, key: "copy.safetensors"})
    assert_refused(tmp_path, "is in an earlier shard too: remove one")


def test_checkpoints_of_other_tools(tmp_path):
    decoder, parameters = random_network()
    weights.save(tmp_path, decoder, parameters)
    plain = load_file(tmp_path / "model.safetensors")
    embedding = "model.embed_tokens.weight"
    float8 = {key: x.astype(ml_dtypes.float8_e4m3fn) for key, x in plain.items()}
    variants = {
        "tied head too": {**plain, "lm_head.weight": plain[embedding]},
        "tied head alone": {"lm_head.weight" if key == embedding else key: x for key, x in plain.items()},
        "compiled module, tied head too": {
            f"_orig_mod.{key}": x for key, x in {**plain, "lm_head.weight": plain[embedding]}.items()
        },
        "compiled module": {f"module._orig_mod.{key}": x for key, x in plain.items()},
        "value head": {
            **{f"pretrained_model.{key}": x for key, x in plain.items()},
            "v_head.summary.weight": np.zeros((1, 16), np.float32),
        },
    }
    for tensors in variants.values():
        save_file(tensors, tmp_path / "model.safetensors")
        jax.tree.map(np.testing.assert_array_equal, weights.load(tmp_path)[1], parameters)
    for head in ("lm_head.weight", "module.lm_head.weight"):
        save_file({**plain, head: 2 * plain[embedding]}, tmp_path / "model.safetensors")
        assert_refused(tmp_path, "'lm_head.weight' differs from the embedding, and config.json", weights.load)
    save_file(float8, tmp_path / "model.safetensors")
    found = weights.load(tmp_path)[1]["embedding"]
    np.testing.assert_array_equal(found, float8[embedding].astype(np.float32))
    # A single file takes precedence over a remaining index.
    weights.save(tmp_path / "shards", decoder, parameters, shard_bytes=4000)
    save_file({key: 0 * x for key, x in plain.items()}, tmp_path / "shards" / "model.safetensors")
    assert not weights.load(tmp_path / "shards")[1]["embedding"].any()
