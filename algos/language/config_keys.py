"""Checks the keys of `config.json` and `adapter_config.json`; unsupported keys are errors.

An ignored key could silently change the network. Every key must be read by the caller, be in `IGNORED`, or
have a neutral value: null, false, zero, empty, or that of `NEUTRAL`.
"""

from collections.abc import Collection, Mapping
from typing import Any

from fdg.arguments import quoted
from fdg.errors import FdgError

IGNORED = frozenset(
    # Names of the model, and how the file was made.
    "model_type architectures auto_map transformers_version torch_dtype dtype name_or_path tokenizer_class"
    " processor_class transformers.js_config is_llama_config unsloth_version unsloth_fixed"
    # Special tokens; they are read from the tokenizer and `generation_config.json`.
    " bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id"
    " decoder_start_token_id forced_bos_token_id forced_eos_token_id bos_token eos_token pad_token unk_token"
    # Sampling.
    " max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups"
    " diversity_penalty temperature top_k top_p min_p typical_p repetition_penalty length_penalty"
    " no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores"
    " return_dict_in_generate remove_invalid_values exponential_decay_length_penalty suppress_tokens"
    " begin_suppress_tokens"
    # Outputs, chunking, caches.
    " use_cache return_dict use_return_dict output_hidden_states output_attentions torchscript use_bfloat16"
    " tf_legacy_loss chunk_size_feed_forward pretraining_tp attn_implementation use_flash_attn"
    " use_flash_attention_2 gradient_checkpointing is_decoder"
    # Heads; the tensors in the checkpoint show which exist.
    " id2label label2id num_labels problem_type finetuning_task task_specific_params prefix"
    " classifier_dropout"
    # Dropout, which is not applied here.
    " attention_dropout hidden_dropout residual_dropout embedding_dropout dropout resid_pdrop embd_pdrop"
    " attn_pdrop neftune_noise_alpha"
    # Lengths for tokenizers and trainers.
    " model_max_length max_sequence_length seq_length".split()
)
"""Keys of a `config.json` that change no logits."""

NEUTRAL: Mapping[str, Any] = {
    **dict.fromkeys(
        (
            "partial_rotary_factor", "rotary_pct", "rope_ratio", "embedding_multiplier",
            "residual_multiplier", "logits_scaling", "logit_scale", "scale_emb",
        ),
        1,
    ),
    **dict.fromkeys(("is_causal", "causal", "use_rope", "use_rotary", "scale_attn_weights"), True),
}  # fmt: skip
"""Neutral values of keys for which null, false, zero and empty are not neutral."""


def check_config_keys(
    config: Mapping[str, Any],
    read: Collection[str],
    where: str,
    ignored: Collection[str] = IGNORED,
    advice: str = "take another checkpoint, or remove the key if it changes no logits",
) -> None:
    """Raises if a key is neither read nor ignored, and its value is not neutral.

    Keys that begin with `_` are ignored. `where` begins the error message, and `advice` ends it.

    >>> check_config_keys({"hidden_size": 8, "softcap": None, "dtype": "float16"}, ["hidden_size"], "x.json")
    >>> check_config_keys({"softcap": 30.0}, [], "x.json")
    Traceback (most recent call last):
    fdg.errors.FdgError: x.json: softcap=30.0 is not supported: take another checkpoint, or ...
    """
    for key, value in config.items():
        if key in read or key in ignored or key.startswith("_") or value is None:
            continue
        if value == NEUTRAL[key] if key in NEUTRAL else value in (False, "", [], {}):
            continue
        raise FdgError(f"{where}: {quoted(key)[1:-1]}={quoted(value)} is not supported: {advice}")
