"""transformers' side of `bench.language_oracle`, in an environment of its own: torch, and no jax.

<venv>/bin/python bench/language_reference.py logits CASES.json OUT.npz   logits and gradients of each case
<venv>/bin/python bench/language_reference.py greedy DIRECTORY OUT.npz    tokens of an exported directory
<venv>/bin/python bench/language_reference.py gguf FILE.gguf OUT.npz      tokens and logits of a GGUF file
"""

import json
import pathlib
import sys

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()


def numbers(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    """A network's parameters: NumPy's, in the order of their names, the same on both sides."""
    draw = np.random.default_rng(seed)
    made = {}
    for name in sorted(shapes):
        x = draw.normal(size=shapes[name])
        norm = "norm" in name
        made[name] = (1 + 0.2 * x if norm else 0.2 * x).astype(np.float32)
    return made


def inputs(vocabulary: int, seed: int, padded: bool) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and mask [3, 12], left-padded by 0, 3 and 7 if `padded`."""
    draw = np.random.default_rng(1000 + seed)
    tokens = draw.integers(0, vocabulary, (3, 12))
    padding = np.array([0, 3, 7]) if padded else np.zeros(3, int)
    return tokens, np.arange(12)[None] >= padding[:, None]


def projections(gradient: np.ndarray, name: str) -> np.ndarray:
    """What is kept of a gradient: its norm, and its products with three random directions of norm 1."""
    draw = np.random.default_rng(sum(map(ord, name)))
    flat = np.asarray(gradient, np.float64).ravel()
    directions = draw.normal(size=(3, flat.size))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    return np.concatenate([[np.linalg.norm(flat)], directions @ flat])


def logits(cases: list[dict]) -> dict[str, np.ndarray]:
    found = {}
    for case in cases:
        config = AutoConfig.for_model(**case["config"])
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
        state = {k: v for k, v in model.state_dict().items() if not (k == "lm_head.weight" and case["tied"])}
        made = numbers({k: tuple(v.shape) for k, v in state.items()}, case["seed"])
        with torch.no_grad():
            for name, value in state.items():
                value.copy_(torch.from_numpy(made[name]))
        for padded in (False, True):
            tokens, mask = inputs(config.vocab_size, case["seed"], padded)
            positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
            out = model(
                torch.from_numpy(tokens), attention_mask=torch.from_numpy(mask.astype(np.int64)),
                position_ids=torch.from_numpy(positions),
            ).logits  # fmt: skip
            key = f"{case['name']}{' padded' if padded else ''}"
            found[key] = np.where(mask[..., None], out.detach().numpy(), 0)
            if padded:
                chances = torch.log_softmax(out[:, :-1], dim=-1)
                chosen = chances.gather(-1, torch.from_numpy(tokens[:, 1:, None]))[..., 0]
                goes_on = torch.from_numpy(mask[:, :-1])
                model.zero_grad()
                (-(chosen * goes_on).sum() / goes_on.sum()).backward()
                for name, parameter in model.named_parameters():
                    found[f"{key} gradient {name}"] = projections(parameter.grad.numpy(), name)
    return found


def greedy(directory: str) -> dict[str, np.ndarray]:
    model = AutoModelForCausalLM.from_pretrained(directory).float()
    tokens = torch.from_numpy(inputs(model.config.vocab_size, 0, False)[0])
    with torch.no_grad():
        out = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=64, min_new_tokens=64,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip
    return {"tokens": out[:, tokens.shape[1] :].numpy()}


def gguf(file: str) -> dict[str, np.ndarray]:
    path = pathlib.Path(file)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (1, 32))
    with torch.no_grad():
        out = model.generate(
            torch.from_numpy(tokens), attention_mask=torch.ones((1, 32), dtype=torch.int64),
            max_new_tokens=256, min_new_tokens=256, do_sample=False, pad_token_id=0,
        )  # fmt: skip
        found = model(out).logits[0]
    return {"tokens": out.numpy(), "best": found.argmax(-1).numpy(), "logits": found[-1].numpy()}


if __name__ == "__main__":
    what, given, out = sys.argv[1:]
    if what == "logits":
        result = logits(json.loads(pathlib.Path(given).read_text()))
    else:
        result = {"greedy": greedy, "gguf": gguf}[what](given)
    np.savez_compressed(out, **result)
