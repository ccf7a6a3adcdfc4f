"""Language models: decoders (Llama, Qwen2, Qwen3) and sampling from them.

Nothing here depends on tasks, rewards or learning; `Prompts` are those of `envs.text`.
"""

from algos.language.config import DecoderConfig
from algos.language.decoder import Cache, Decoder, positions_of
from algos.language.generation import Samples, Sampling, check_tokens, generate, sample_keys
from envs.text.prompts import Prompts
from fdg.public_names import submodules

__all__ = [
    "Cache",
    "Decoder",
    "DecoderConfig",
    "Prompts",
    "Samples",
    "Sampling",
    "check_tokens",
    "generate",
    "positions_of",
    "sample_keys",
]

__getattr__ = submodules(__name__)
