"""A few malformed checkpoints and packages; `python -m tests.hostile.model_folders` tries more."""

import json
import random
import shutil
from pathlib import Path

import pytest

from algos.language import weights
from envs.text.tokenizer_folders import tokenizer_of
from fdg.errors import FdgError
from tests.hostile import driver, model_folders, valid_models


@pytest.mark.parametrize(
    ("kind", "number"),
    [*(("folders", i) for i in range(1000, 1007)), *(("packages", i) for i in range(1000, 1004))],
)
def test_malformed_input_is_refused_in_one_line(kind, number):
    row = model_folders.attempt(kind, number, seed=1)
    assert not [found["faults"] for found in row["tries"].values() if found["faults"]], row


def test_driver_finds_faults(monkeypatch):
    def careless(folder):
        raise KeyError("num_hidden_layers")

    monkeypatch.setattr(weights, "check", careless)
    monkeypatch.setattr(weights, "load", lambda folder, lora_rank: bytearray(1 << 28).find(1))
    monkeypatch.setattr(driver, "MEMORY", 1 << 26)
    tries = model_folders.attempt("folders", 0, seed=1)["tries"]
    assert "traceback: KeyError" in tries["check"]["faults"][0] and "took 0.2" in tries["load"]["faults"][0]


HUGE = ("1000000000000000019884624838656", "Infinity", "-1" + "0" * 400, "1e999", "NaN")
# What Transformers 4 and 5 write for no limit, no value, or custom model code.
UNUSED = {
    "tokenizer_config.json": (
        '"model_max_length": HUGE, "extra_special_tokens": ["<s>"], "use_default_system_prompt": null',
        '"max_length": HUGE, "extra_special_tokens": {"image_token": "<s>"}, "auto_map": {"a": [null, "b"]}',
        '"added_tokens_decoder": {"0": {"content": "<unk>", "lstrip": false}}, "stride": HUGE',
    ),
    "generation_config.json": ('"max_length": HUGE, "temperature": 1e-06', '"max_time": HUGE, "top_p": HUGE'),
    "config.json": ('"seq_length": HUGE, "rms_norm_eps": 1e-06', '"max_length": HUGE, "dtype": null'),
    "special_tokens_map.json": ('"pad_token": "<unk>", "limit": HUGE',),
}
USED = (
    ("config.json", "vocab_size"), ("config.json", "max_position_embeddings"), ("config.json", "rope_theta"),
    ("generation_config.json", "eos_token_id"), ("tokenizer_config.json", "eos_token"),
)  # fmt: skip


def _with(folder, name, more):
    """Adds keys in front of a folder's JSON object; existing keys of the same name are removed."""
    file = folder / name
    own = json.loads(file.read_text()) if file.exists() else {}
    own = {key: value for key, value in own.items() if f'"{key}":' not in more}
    file.write_text("{" + more + ("," if own else "") + json.dumps(own)[1:])


def _read(folder):
    tokenizer = tokenizer_of(folder)
    weights.check(folder)
    return tokenizer.stops, tokenizer.special_tokens


@pytest.mark.parametrize("seed", range(3))
def test_unused_numbers_may_have_any_size(seed, tmp_path):
    draw = random.Random(seed)
    family, kind = draw.choice(list(valid_models.FAMILIES)), draw.choice(valid_models.TOKENIZERS)
    valid_models.valid_folder(tmp_path / "valid", family, kind, sharded=False, dtype="float32")
    stops = _read(tmp_path / "valid")[0]

    def copy(number):
        return Path(shutil.copytree(tmp_path / "valid", tmp_path / str(number)))

    changes = [(name, more) for name, ways in UNUSED.items() for more in ways]
    for i, (name, more) in enumerate(changes):
        _with(copy(i), name, more.replace("HUGE", draw.choice(HUGE)))
        assert _read(tmp_path / str(i))[0] == stops
    for i, (name, key) in enumerate(USED, len(changes)):
        _with(copy(i), name, f'"{key}": {draw.choice(HUGE[:3])}')
        with pytest.raises(FdgError, match=key):
            _read(tmp_path / str(i))
