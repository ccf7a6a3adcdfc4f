"""Drives TRL's `GRPOTrainer` (trl 1.16, torch) with a checkpoint and problems from the configuration.

Training is one call of `train`, in its own thread. A round is some of its iterations (one generation and its
updates), after which a callback waits for the next round.

Configuration: `{"model": folder, "alphabet": characters, "problems": file, "iterations": per round,
"rounds": at most, "trl": fields of GRPOConfig}`. With `"run": folder` it resumes from a checkpoint there,
writes a checkpoint after each update, and `parameters.npy` after each round. The file has `problems`, a list
of `[prompt, answer]`.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer

from bench.peers.drivers.characters import share_of_answer, tokenizer_of
from bench.peers.serve import Rounds, Stopwatch


class InRounds(TrainerCallback):
    """Ends a round when the trainer logs, and waits for the next round.

    `responses` is their number per round. If `run` is a folder, the parameters are saved there.
    """

    def __init__(self, rounds: Rounds, responses: int, run: str | None):
        self.rounds, self.responses, self.run = rounds, responses, run

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.watch = Stopwatch().__enter__()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Any = None, model: Any = None, **_: Any
    ) -> None:
        if "reward" not in logs:  # the summary at the end of the training
            return
        self.watch.__exit__()
        if self.run:
            flat = [parameter.detach().numpy().ravel() for parameter in model.parameters()]
            np.save(Path(self.run, "parameters.npy"), np.concatenate(flat))
        figures = {"steps": self.responses, "updates": state.global_step, "seconds": self.watch.seconds}
        self.rounds.end({**figures, "return": float(logs["reward"])})
        if state.global_step < state.max_steps:
            self.rounds.wait()
            self.watch = Stopwatch().__enter__()


def train(config: dict[str, Any], build: Callable[..., Any]):
    """Builds a trainer with common arguments, and trains to the end of the first round.

    Args:
      config: the configuration of the driver.
      build: (config, common arguments of TRL's settings, **further arguments of the trainer) -> trainer.

    Returns:
      A function that trains the next round and returns its figures; facts, with the first round's figures.
    """
    torch.manual_seed(0)
    config |= json.loads(Path(config["problems"]).read_text())  # the problems replace their file's name
    run = config.get("run")
    common_arguments = {
        "output_dir": run or tempfile.mkdtemp(),
        "max_steps": config["iterations"] * config["rounds"],
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "steps" if run else "no",
        "save_steps": 1,
        "save_total_limit": 2,
        "logging_steps": config["iterations"],
        "disable_tqdm": True,
        **config["trl"],
    }
    rounds = Rounds()
    responses = config["trl"]["per_device_train_batch_size"] * config["iterations"]
    rows = [{"prompt": f"<bos>{prompt}", "answer": answer} for prompt, answer in config["problems"]]
    trainer = build(
        config,
        common_arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer_of(config["alphabet"]),
        callbacks=[InRounds(rounds, responses, run)],
    )
    last_checkpoint = get_last_checkpoint(common_arguments["output_dir"])
    first = rounds.start(lambda: trainer.train(resume_from_checkpoint=last_checkpoint))
    return rounds.next, {"compile_seconds": first["seconds"], "first": first}


def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """The share of its answer that each response has."""
    return [share_of_answer(*pair) for pair in zip(completions, answer, strict=True)]


def prepare(config: dict[str, Any]):
    """Builds the trainer, and trains to the end of the first round; returns as `train`."""

    def build(
        config: dict[str, Any], common_arguments: dict[str, Any], **further_arguments: Any
    ) -> GRPOTrainer:
        model = AutoModelForCausalLM.from_pretrained(config["model"], dtype=torch.float32)
        arguments = GRPOConfig(beta=0.0, loss_type="grpo", **common_arguments)
        return GRPOTrainer(model=model, reward_funcs=reward, args=arguments, **further_arguments)

    return train(config, build)
