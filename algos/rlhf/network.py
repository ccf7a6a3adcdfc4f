"""Settings of the network of a language-model algorithm: its sizes, a checkpoint, or any decoder."""

import dataclasses
import math
from typing import Any, Literal

import jax

from algos import registry
from algos.language.config import DecoderConfig
from algos.language.decoder import Decoder
from algos.rlhf import requirements
from envs.text import is_game
from fdg.settings.fields import hyperparameter
from fdg.settings.parts import Part


@dataclasses.dataclass(frozen=True)
class NetworkSettings(Part):
    """The settings of the trained network.

    The network is the `decoder`, or the checkpoint in the folder `model`; if both are None, it has the task's
    vocabulary and the sizes below.
    """

    decoder: Decoder | None = hyperparameter(None, "network; None: made from the fields below")
    model: str | None = hyperparameter(
        None,
        "folder of an initial checkpoint in Hugging Face's format (None: random weights)",
        holds="folder",
    )
    tokenizer: str | None = hyperparameter(
        None,
        "folder with the checkpoint's tokenizer, 'characters' for the task's own, or characters=ABC for a"
        " token for each of these (None: the checkpoint's folder, or the task's own)",
        holds="folder or characters",
    )
    adapters: str | None = hyperparameter(
        None,
        "folder of an initial LoRA adapter in PEFT's format, for the checkpoint (None: a new one)",
        holds="folder",
    )
    hidden_size: int = hyperparameter(128, "width of the network")
    num_layers: int = hyperparameter(2, "transformer blocks")
    num_heads: int = hyperparameter(4, "query heads")
    num_kv_heads: int | None = hyperparameter(None, "key-value heads (None: as many as query heads)")
    intermediate_size: int | None = hyperparameter(None, "width of the MLPs (None: three times hidden_size)")
    dtype: Literal["float32", "bfloat16"] = hyperparameter("float32", "compute dtype")
    remat: bool = hyperparameter(False, "rematerialise blocks for the gradient")
    lora_rank: int = hyperparameter(0, "rank of LoRA adapters, trained instead of the network; 0: none")
    lora_alpha: float = hyperparameter(
        16.0,
        "LoRA's alpha: adapters are scaled by alpha / rank",
        structural="the scale of adapters",
        only_with="lora_rank",
    )

    def of(self, algorithm: Any) -> Decoder:
        """The decoder of an algorithm."""
        packed_rows = algorithm._packed_rows  # rows computed at once without padding; None: with padding
        if self.decoder is not None:
            config = dataclasses.replace(self.decoder.config, packed_rows=packed_rows)
            return self.decoder if packed_rows is None else dataclasses.replace(self.decoder, config=config)
        options: dict[str, Any] = {"dtype": self.dtype, "remat": self.remat, "packed_rows": packed_rows}
        if self.adapters is None:  # else they have a rank of their own
            options |= {"lora_rank": self.lora_rank, "lora_alpha": self.lora_alpha}
        if self.model is not None:
            checkpoint = registry.option("model").config_of(self.model, adapters=self.adapters)
            return Decoder(dataclasses.replace(checkpoint, **options))
        return Decoder(
            DecoderConfig(
                vocab_size=algorithm.env.tokenizer.vocab_size,
                hidden_size=self.hidden_size,
                intermediate_size=self.intermediate_size or 3 * self.hidden_size,
                num_layers=self.num_layers,
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads or self.num_heads,
                # RoPE needs heads of even width; their total width may differ from the network's.
                head_dim=2 * max(1, round(self.hidden_size / self.num_heads / 2)),
                max_positions=requirements.context_length(algorithm.env),
                # Nguyen and Salazar 2019, arXiv 1910.05895, section 2.2: 0.08 at width 64. With 0.02, as in
                # large networks, a small network needs five times as many updates to begin to learn.
                initializer_range=math.sqrt(2 / (5 * self.hidden_size)),
                **options,
            )
        )

    def initial_parameters(self, algorithm: Any, key: jax.Array) -> Any:
        """The network's initial parameters: random, or those of the checkpoint."""
        network = algorithm.network
        if self.model is None:
            return network.init(key)
        return registry.option("model").initial_parameters(network, self.model, self.adapters, key)

    def task_with_tokenizer(self, algorithm: Any) -> Any:
        """The algorithm's task with the network's tokenizer, and with the setting `max_response`."""
        requirements.check_initial_network(algorithm)
        env, longest = algorithm.env, algorithm.max_response
        if self.model is not None:
            registry.option("model").config_of(self.model)  # raises if it cannot be read
        if self.model is not None or self.tokenizer is not None:
            env = registry.option("model").with_checkpoint_tokenizer(env, self.model, self.tokenizer, longest)
        if not is_game(env) and longest not in (None, env.max_response):
            env = dataclasses.replace(env, max_response=longest)
        return env
