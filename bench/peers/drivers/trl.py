"""TRL's `GRPOTrainer` (trl 1.16, torch) on a checkpoint and on problems that the configuration names.

Its `train` is one call; here a round is so many of its iterations (one generation and the updates on it): the
call runs in a thread of its own, and a callback waits for the next round.

Configuration: `{"model": folder, "alphabet": characters, "problems": file, "iterations": of a round,
"rounds": at most, "trl": fields of GRPOConfig}`. In the file `problems` and `held_out` are lists of
`[prompt, answer]`; of those held out, if any, a round says what share is right, with the most likely tokens.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from bench.peers.drivers.characters import tokenizer_of
from bench.peers.serve import Rounds, Stopwatch


def prepare(config: dict[str, Any]):
    """Builds the trainer, and trains up to the end of its first round."""
    torch.manual_seed(0)
    config |= json.loads(Path(config["problems"]).read_text())
    tokenizer = tokenizer_of(config["alphabet"])
    model = AutoModelForCausalLM.from_pretrained(config["model"], dtype=torch.float32)
    updates = config["trl"]["steps_per_generation"]
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        max_steps=updates * config["iterations"] * config["rounds"],
        beta=0.0,
        loss_type="grpo",
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        **config["trl"],
    )
    rounds = Rounds()
    responses = arguments.per_device_train_batch_size * updates * config["iterations"]
    rewards: list[float] = []

    def right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        found = [float(said.strip() == wanted) for said, wanted in zip(completions, answer, strict=True)]
        rewards.extend(found)
        return found

    class InRounds(TrainerCallback):
        """Tells of a round, and waits for the next."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.watch = Stopwatch().__enter__()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % (updates * config["iterations"]):
                return
            self.watch.__exit__()
            said = {"steps": responses, "seconds": self.watch.seconds, "return": sum(rewards) / len(rewards)}
            rewards.clear()
            if config["held_out"]:
                said["held_out"] = share_right(model, tokenizer, config["held_out"], arguments)
            rounds.end(said)
            if state.global_step < state.max_steps:
                rounds.wait()
                self.watch = Stopwatch().__enter__()

    rows = [{"prompt": f"<bos>{prompt}", "answer": answer} for prompt, answer in config["problems"]]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=right,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[InRounds()],
    )

    first = rounds.start(trainer.train)

    return rounds.next, {"compile_seconds": first["seconds"], "first": first}


def share_right(model: Any, tokenizer: Any, problems: list[list[str]], arguments: Any) -> float:
    """Of problems with an answer each, with the most likely tokens."""
    texts = tokenizer([f"<bos>{prompt}" for prompt, _ in problems], padding=True, return_tensors="pt")
    with torch.no_grad():
        tokens = model.generate(
            input_ids=texts["input_ids"],
            attention_mask=texts["attention_mask"],
            do_sample=False,
            max_new_tokens=arguments.max_completion_length,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    said = tokens[:, texts["input_ids"].shape[1] :]
    ended = (said == tokenizer.eos_token_id).any(dim=1).tolist()
    texts = ["".join(text.split()) for text in tokenizer.batch_decode(said, skip_special_tokens=True)]
    return sum(e and t == a for e, t, (_, a) in zip(ended, texts, problems, strict=True)) / len(problems)
