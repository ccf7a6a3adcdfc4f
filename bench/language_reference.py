"""Computes the results of transformers for `bench.language_oracle`, in an environment without JAX.

<venv>/bin/python -m bench.language_reference logits CASES.json OUT.npz   logits and gradients of each case
<venv>/bin/python -m bench.language_reference gguf FILE.gguf OUT.npz      tokens and logits of a GGUF file
"""

import json
import pathlib
import sys

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from bench.language_numbers import inputs, projections, random_parameters

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()


def logits(file: str) -> dict[str, np.ndarray]:
    """Logits of each case in the file, without and with padding, and digests of gradients."""
    results = {}
    for case in json.loads(pathlib.Path(file).read_text()):
        config = AutoConfig.for_model(**case["config"])
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
        state = {k: v for k, v in model.state_dict().items() if not (k == "lm_head.weight" and case["tied"])}
        parameters = random_parameters({k: tuple(v.shape) for k, v in state.items()}, case["seed"])
        with torch.no_grad():
            for name, value in state.items():
                value.copy_(torch.from_numpy(parameters[name]))
        for padded in (False, True):
            tokens, mask = inputs(config.vocab_size, case["seed"], padded)
            positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
            output = model(
                torch.from_numpy(tokens), attention_mask=torch.from_numpy(mask.astype(np.int64)),
                position_ids=torch.from_numpy(positions),
            ).logits  # fmt: skip
            key = f"{case['name']}{' padded' if padded else ''}"
            results[key] = np.where(mask[..., None], output.detach().numpy(), 0)
            if padded:
                log_probs = torch.log_softmax(output[:, :-1], dim=-1)
                log_probs = log_probs.gather(-1, torch.from_numpy(tokens[:, 1:, None]))[..., 0]
                has_next = torch.from_numpy(mask[:, :-1])  # padding is on the left
                model.zero_grad()
                (-(log_probs * has_next).sum() / has_next.sum()).backward()
                for name, parameter in model.named_parameters():
                    results[f"{key} gradient {name}"] = projections(parameter.grad.numpy(), name)
    return results


def gguf(file: str) -> dict[str, np.ndarray]:
    """A random prompt with 256 greedy tokens; the best token at each position; the last logits."""
    path = pathlib.Path(file)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (1, 32))
    with torch.no_grad():
        output = model.generate(
            torch.from_numpy(tokens), attention_mask=torch.ones((1, 32), dtype=torch.int64),
            max_new_tokens=256, min_new_tokens=256, do_sample=False, pad_token_id=0,
        )  # fmt: skip
        token_logits = model(output).logits[0]
    return {
        "tokens": output.numpy(),
        "best": token_logits.argmax(-1).numpy(),
        "logits": token_logits[-1].numpy(),
    }


if __name__ == "__main__":
    what, path, out = sys.argv[1:]
    np.savez_compressed(out, **{"logits": logits, "gguf": gguf}[what](path))
