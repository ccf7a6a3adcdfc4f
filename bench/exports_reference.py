"""Computes the results of Transformers and PEFT for `bench.exports`, in an environment without JAX.

<venv>/bin/python bench/exports_reference.py JOBS.json OUT.npz

A job has a model's `folder`. It may have `tokens` (for logits), `texts` (to encode and decode), `messages` of
a chat, `adapters` (a folder to load), and `make_adapters` (a folder; random adapters are written there).
JOBS.json has the jobs by name. OUT.npz has an array "NAME KEY" for each key of `results_of`.
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


def write_adapters(model, folder: str) -> None:
    """Writes random adapters with PEFT; changes `model`."""
    settings = peft.LoraConfig(
        r=3, lora_alpha=5, use_rslora=True, target_modules=["q_proj", "v_proj", "down_proj"],
        layers_to_transform=[1], task_type="CAUSAL_LM",
    )  # fmt: skip
    adapted = peft.get_peft_model(model, settings)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.1)
    adapted.save_pretrained(folder)


def logits(model, tokens: list[list[int]]) -> np.ndarray:
    """Logits row by row: some kinds of rotary positions depend on the longest row of a batch."""
    with torch.no_grad():
        return np.stack([model(torch.tensor([row])).logits[0].numpy() for row in tokens])


def results_of(job: dict) -> dict:
    """The libraries' results for a job, as arrays; lists of tokens and texts are JSON.

    With `tokens`: `logits` [rows, length, vocabulary] and `eos` (tokens). With `texts`: `ids` and `decoded`
    for each text, `chat` (the messages as a prompt) and `special` (begin, end, padding; -1 if there is none).
    """
    result: dict = {}
    if "tokens" in job:
        model = AutoModelForCausalLM.from_pretrained(job["folder"], dtype=torch.float32)
        if "make_adapters" in job:
            write_adapters(model, job["make_adapters"])
            model = AutoModelForCausalLM.from_pretrained(job["folder"], dtype=torch.float32)
        if "adapters" in job:
            model = peft.PeftModel.from_pretrained(model, job["adapters"])
        result["logits"] = logits(model.eval(), job["tokens"])
        end_tokens = model.generation_config.eos_token_id
        result["eos"] = np.array(end_tokens if isinstance(end_tokens, list) else [end_tokens])
    if "texts" in job:
        tokenizer = AutoTokenizer.from_pretrained(job["folder"])
        ids = [tokenizer(text, add_special_tokens=False).input_ids for text in job["texts"]]
        result["ids"] = np.array([json.dumps(tokens) for tokens in ids])
        result["decoded"] = np.array(
            [json.dumps(tokenizer.decode(tokens, skip_special_tokens=True)) for tokens in ids]
        )
        result["chat"] = np.array(
            tokenizer.apply_chat_template(job["messages"], tokenize=False, add_generation_prompt=True)
        )
        special = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
        result["special"] = np.array([-1 if token is None else token for token in special])
    return result


if __name__ == "__main__":
    path, out = sys.argv[1:]
    jobs = json.loads(pathlib.Path(path).read_text())
    np.savez(out, **{f"{name} {key}": x for name, job in jobs.items() for key, x in results_of(job).items()})
