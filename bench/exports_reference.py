"""Transformers' and PEFT's side of `bench.exports`, in an environment of its own: torch, and no jax.

<venv>/bin/python bench/exports_reference.py JOBS.json OUT.npz

A job has a folder, and perhaps `tokens` to compute logits of row by row, `texts` to encode and decode, a chat
of `messages`, `adapters` to load first, or `make_adapters`: a folder to write random ones into.
"""

import json
import pathlib
import sys

import numpy as np
import peft
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()


def adapters(model, folder: str) -> None:
    """Writes random adapters, as PEFT does."""
    settings = peft.LoraConfig(
        r=3, lora_alpha=5, use_rslora=True, target_modules=["q_proj", "v_proj", "down_proj"],
        layers_to_transform=[1], task_type="CAUSAL_LM",
    )  # fmt: skip
    made = peft.get_peft_model(model, settings)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.1)
    made.save_pretrained(folder)


def logits(model, tokens: list[list[int]]) -> np.ndarray:
    """Of each row by itself: rotary positions of some kinds go by the longest row of a batch."""
    with torch.no_grad():
        return np.stack([model(torch.tensor([row])).logits[0].numpy() for row in tokens])


def answers(job: dict) -> dict:
    """What the libraries make of a folder."""
    result: dict = {}
    if "tokens" in job:
        model = AutoModelForCausalLM.from_pretrained(job["folder"], dtype=torch.float32)
        if "make_adapters" in job:
            adapters(model, job["make_adapters"])
            model = AutoModelForCausalLM.from_pretrained(job["folder"], dtype=torch.float32)
        if "adapters" in job:
            model = peft.PeftModel.from_pretrained(model, job["adapters"])
        result["logits"] = logits(model.eval(), job["tokens"])
        ends = model.generation_config.eos_token_id
        result["eos"] = np.array(ends if isinstance(ends, list) else [ends])
    if "texts" in job:
        tokenizer = AutoTokenizer.from_pretrained(job["folder"])
        ids = [tokenizer(text, add_special_tokens=False).input_ids for text in job["texts"]]
        result["ids"] = np.array([json.dumps(one) for one in ids])
        result["decoded"] = np.array(
            [json.dumps(tokenizer.decode(one, skip_special_tokens=True)) for one in ids]
        )
        result["chat"] = np.array(
            tokenizer.apply_chat_template(job["messages"], tokenize=False, add_generation_prompt=True)
        )
        special = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
        result["special"] = np.array([-1 if one is None else one for one in special])
    return result


if __name__ == "__main__":
    jobs, out = sys.argv[1:]
    listed = json.loads(pathlib.Path(jobs).read_text())
    np.savez(out, **{f"{name} {key}": x for name, job in listed.items() for key, x in answers(job).items()})
