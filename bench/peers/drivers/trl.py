"""TRL's `GRPOTrainer` (trl 1.16, torch) on a checkpoint and on problems that the configuration names.

Its `train` is one call; here a round is so many of its iterations (one generation and the updates on it): the
call runs in a thread of its own, and a callback waits for the next round.

Configuration: `{"model": folder, "alphabet": characters, "problems": file, "iterations": of a round,
"rounds": at most, "trl": fields of GRPOConfig}`. In the file `problems` is a list of `[prompt, answer]`.
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
