"""Measures a decoder of half a billion parameters: tokens per second, and the cost of GRPO."""

import dataclasses
import statistics
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import algos
import envs
import fdg
import policies
from algos.language import Decoder, DecoderConfig, Prompts, Sampling, generate, sample_keys
from bench.gpu.measuring import Figures, Measurement, Settings
from bench.gpu.training import memory_of
from bench.harness import repeated, seconds
from bench.peers.serve import Stopwatch
from envs.text import CharacterTokenizer

# Qwen2.5-0.5B's config.json, with fewer positions; measurements use random weights.
HALF_A_BILLION = DecoderConfig(
    vocab_size=151_936,
    hidden_size=896,
    intermediate_size=4864,
    num_layers=24,
    num_heads=14,
    num_kv_heads=2,
    rope_theta=1e6,
    qkv_bias=True,
    max_positions=4096,
    dtype="bfloat16",
    remat=True,
)


@dataclasses.dataclass(frozen=True)
class PaddedTokenizer(CharacterTokenizer):
    """A tokenizer of characters, padded by tokens without text to the vocabulary size of a model."""

    size: int = 0

    @property
    def vocab_size(self) -> int:
        return self.size

    def decode(self, ids: Sequence[int]) -> str:
        return super().decode([i for i in ids if int(i) < super(PaddedTokenizer, self).vocab_size])


def measurements(settings: Settings) -> list[Measurement]:
    small = DecoderConfig.tiny(64, num_layers=1, max_positions=64, dtype="bfloat16")
    config = settings.full_or_tiny(HALF_A_BILLION, small)
    sizes = settings.full_or_tiny((64, 256, 16), (2,))
    tokens = settings.full_or_tiny(128, 4)
    time_rows = partial(time_generation, config)
    grpo_sizes = settings.full_or_tiny((16, 8, 64, 32), (2, 2, 4, 4))  # prompts, group, response, micro_batch
    measure_grpo = partial(time_grpo, config, *grpo_sizes)
    by_size = [
        Measurement(
            "Generation", f"{rows} rows", partial(time_rows, rows, tokens), seconds=40, limit=150, alone=True
        )
        for rows in sizes
    ]
    by_peer = [
        Measurement(
            "Generation by Transformers",
            f"{rows} rows, {cache} cache",
            partial(time_transformers, config, rows, tokens, cache),
            seconds=25,
            limit=120,
            alone=True,
        )
        for rows, cache in settings.full_or_tiny(
            ((64, "dynamic"), (256, "dynamic"), (64, "static")), ((2, "dynamic"),)
        )
    ]
    grpo = Measurement("GRPO", "an iteration", measure_grpo, seconds=90, limit=300, alone=True)
    return [by_size[0], by_peer[0], grpo, *by_size[1:], *by_peer[1:]]


def time_generation(config: DecoderConfig, rows: int, tokens: int) -> Figures:
    """Samples `tokens` tokens for each of `rows` prompts of 64 tokens, at temperature 1."""
    decoder = Decoder(config)
    parameters = jax.jit(decoder.init)(jax.random.key(0))
    length = min(64, config.max_positions // 2)
    ids = np.random.default_rng(0).integers(3, config.vocab_size, (rows, length))
    prompts = Prompts(jnp.asarray(ids, jnp.int32), jnp.ones(ids.shape, bool))
    keys = sample_keys(jax.random.key(1), rows)
    sampling = Sampling(tokens, stop_tokens=())
    with Stopwatch() as watch:
        run = jax.jit(lambda p: generate(decoder, p, prompts, keys, sampling)).lower(parameters).compile()
    median = statistics.median([seconds(lambda: run(parameters)) for _ in range(4)][1:])
    return {
        "parameters": config.num_parameters,
        "tokens/s": rows * tokens / median,
        "ms a token of all rows": 1e3 * median / tokens,
        "compile s": watch.seconds,
        "allocated MiB": peak_mib(),
    }


def time_transformers(config: DecoderConfig, rows: int, tokens: int, cache: str) -> Figures:
    """Generates with Hugging Face's Transformers on PyTorch, with an equal network and equal lengths.

    With the static cache Transformers compiles a decoding step, if the device allows it.
    """
    import torch
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = transformers.Qwen2Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        max_position_embeddings=config.max_positions,
        rope_theta=config.rope_theta,
        tie_word_embeddings=config.tie_embeddings,
    )
    model = transformers.Qwen2ForCausalLM(settings).to(device, torch.bfloat16).eval()
    length = min(64, config.max_positions // 2)
    prompts = torch.randint(3, config.vocab_size, (rows, length), device=device)
    cache_options = {"cache_implementation": "static"} if cache == "static" else {}
    options = {
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "pad_token_id": 0,
        **cache_options,
    }
    options |= {"max_new_tokens": tokens, "min_new_tokens": tokens, "eos_token_id": None}
    with torch.inference_mode():
        first, *times = (seconds(lambda: model.generate(prompts, **options).cpu()) for _ in range(4))
    median = statistics.median(times)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens/s": rows * tokens / median,
        "ms a token of all rows": 1e3 * median / tokens,
        "first s": first,
        "allocated MiB": torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else None,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def time_grpo(config: DecoderConfig, prompts: int, group: int, response: int, micro_batch: int) -> Figures:
    """Times GRPO on the task of adding numbers: the shorter of its second and third iteration.

    An iteration has `prompts` prompts with `group` responses of at most `response` tokens; a gradient is
    computed for `micro_batch` responses at a time.
    """
    algorithm = algos.GRPO(
        env=envs.make("text:addition").with_tokenizer(PaddedTokenizer(size=config.vocab_size)),
        decoder=Decoder(config),
        num_prompts=prompts,
        group_size=group,
        max_response=response,
        micro_batch=micro_batch,
        learning_rate=1e-6,
    )
    engine = fdg.compile(algorithm, policies.GPUOnly(), jax.devices()[:1])
    with Stopwatch() as watch:
        engine.compile()
    iterate = repeated(lambda state: engine.run(state, 1), engine.init(0))
    return {
        "responses": prompts * group,
        "s an iteration": min([seconds(iterate) for _ in range(3)][1:]),
        "compile s": watch.seconds,
        **memory_of(engine),
        "allocated MiB": peak_mib(),
        "config": dataclasses.asdict(config),
    }


def peak_mib() -> float | None:
    """This process's peak memory on the device; None if JAX does not report it."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats["peak_bytes_in_use"] / 2**20 if "peak_bytes_in_use" in stats else None
