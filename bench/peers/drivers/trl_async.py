"""Drives TRL's `AsyncGRPOTrainer` (trl 1.16); a process generates in place of vLLM, which needs a GPU.

The process implements TRL's `RolloutWorkerProtocol` and `WeightTransferProtocol`. Batch n is generated with
parameters after at least n - `lag` updates. Torch's masked attention replaces FlashAttention 3, a kernel for
GPUs. Each process has one thread. Configuration: that of `trl.py`, and `"lag"`.
"""

import itertools
import time
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from bench.peers.drivers import trl
from bench.peers.drivers.characters import tokenizer_of


def attend(
    module, query, key, value, mask, *, tree_kv_index, tree_cu_seqlens_q, tree_cu_seqlens_k, **options
):
    """Attention over packed sequences: TRL stores equal prefixes once, as a tree; tokens see ancestors.

    Elements i and i + 1 of `tree_cu_seqlens_q` are the first query of branch i, and the first after it. The
    branch sees the positions in `tree_kv_index` between elements i and i + 1 of `tree_cu_seqlens_k`, if they
    are not later than the query.
    """
    index = torch.arange(query.shape[2])
    visible = torch.zeros(len(index), len(index), dtype=torch.bool)
    bounds = zip(itertools.pairwise(tree_cu_seqlens_q), itertools.pairwise(tree_cu_seqlens_k), strict=True)
    for (begin, end), (first, last) in bounds:
        path = tree_kv_index[first:last]
        visible[begin:end, path] = path <= index[begin:end, None]
    attention = torch.nn.functional.scaled_dot_product_attention
    out = attention(query, key, value, visible, scale=options["scaling"], enable_gqa=True)
    return out.transpose(1, 2), None


class Worker:
    """The generation process, as the trainer's rollout worker and weight transfer.

    The process waits for `version`, the trainer's number of updates plus 1, and reads `weights` under `lock`.
    """

    def __init__(self, config: dict[str, Any]):
        context = torch.multiprocessing.get_context("spawn")
        self.rollout_buffer, self.metrics_queue = context.Queue(), context.Queue()
        self.version, self.lock = context.Value("i", 0), context.Lock()
        self.weights = {name: x.detach().share_memory_() for name, x in load_model(config).named_parameters()}
        arguments = (config, self.weights, self.lock, self.version, self.rollout_buffer)
        process = context.Process(target=generate, args=arguments, daemon=True)
        self.start, self.stop, self.alive = process.start, process.kill, process.is_alive

    def update_model_version(self, model_version: int) -> None:
        self.version.value = model_version

    def check_health(self, stale_after_s: float) -> None:
        if not self.alive():
            raise RuntimeError("the process that generates responses has ended: its error is above")

    def send_weights(self, iterator: Any) -> None:
        with self.lock:
            for name, tensor in iterator:
                self.weights[name].copy_(tensor)

    def init_weight_transfer(self) -> None:
        """Does nothing, like `pause`, `resume`, `destroy`: a lock protects the parameters."""

    pause = resume = destroy = init_weight_transfer


def load_model(config: dict[str, Any]) -> Any:
    return AutoModelForCausalLM.from_pretrained(config["model"], dtype=torch.float32)


@torch.no_grad()
def generate(config: dict[str, Any], weights: Any, lock: Any, version: Any, buffer: Any) -> None:
    """Puts batches of samples into `buffer` while the trainer lives; runs in a process of its own.

    Before each batch, waits until the trainer's `version` is recent enough (`config["lag"]`), and copies the
    trainer's `weights` while it holds `lock`.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer, settings, model = tokenizer_of(config["alphabet"]), config["trl"], load_model(config)
    parameters, group_size = dict(model.named_parameters()), settings["num_generations"]
    options = {"do_sample": True, "top_k": 0, "return_dict_in_generate": True, "output_scores": True}
    options |= {"num_return_sequences": group_size, "max_new_tokens": settings["max_completion_length"]}
    options |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    problems, trainer = itertools.cycle(config["problems"]), torch.multiprocessing.parent_process()
    for batch in itertools.count():
        while version.value + config["lag"] <= batch:  # the version before the first update is 1
            time.sleep(1e-3)
            if not trainer.is_alive():
                return
        with lock:
            model_version = version.value
            for name, tensor in weights.items():
                parameters[name].copy_(tensor)
        rows = list(itertools.islice(problems, settings["per_device_train_batch_size"] // group_size))
        inputs = tokenizer([f"<bos>{prompt}" for prompt, _ in rows], return_tensors="pt", padding=True)
        generated = model.generate(inputs.input_ids, attention_mask=inputs.attention_mask, **options)
        sequences = generated.sequences
        log_probs = model.compute_transition_scores(sequences, generated.scores, normalize_logits=True)
        width = inputs.input_ids.shape[1]
        texts = tokenizer.batch_decode(sequences[:, width:], skip_special_tokens=True)
        rewards = torch.tensor(trl.reward(texts, [answer for _, answer in rows for _ in range(group_size)]))
        grouped = rewards.view(-1, group_size)
        advantages = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
        for i, (sequence, advantage) in enumerate(zip(sequences, advantages.flatten(), strict=True)):
            prompt_mask = inputs.attention_mask[i // group_size].bool()
            prompt, response = sequence[:width][prompt_mask], sequence[width:]
            length = min(int((response != tokenizer.eos_token_id).cumprod(0).sum()) + 1, len(response))
            zeros = torch.zeros(len(prompt))
            sample = RolloutSample(
                prompt=[], completion=[],
                input_ids=torch.cat([prompt, response[:length]]).numpy(),
                completion_mask=torch.cat([zeros, zeros.new_ones(length)]).numpy(),
                old_log_probs=torch.cat([zeros, log_probs[i, :length]]).numpy(),
                advantage=float(advantage),
                model_version=model_version,
                group_id=batch * len(rows) + i // group_size,
                metrics={"reward": float(rewards[i])},
            )  # fmt: skip
            buffer.put(sample)


def prepare(config: dict[str, Any]):
    """Builds the trainer, and trains to the end of the first round; returns as `trl.train`."""
    torch.set_num_threads(1)
    torch.cuda.get_device_name = lambda *_: "CPU"  # the trainer assumes a GPU, whose peak rate it looks up

    def build(
        config: dict[str, Any], common_arguments: dict[str, Any], **further_arguments: Any
    ) -> AsyncGRPOTrainer:
        worker = Worker(config)
        arguments = AsyncGRPOConfig(token_budget=0, max_staleness=config["lag"], **common_arguments)
        further_arguments |= {"rollout_worker": worker, "weight_transfer": worker}
        trainer = AsyncGRPOTrainer(model=config["model"], args=arguments, **further_arguments)
        AttentionInterface.register("tree_fa3", attend)
        return trainer

    return trl.train(config, build)
