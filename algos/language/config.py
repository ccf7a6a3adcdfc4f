"""Configurations of decoders (Llama, Qwen2, Qwen3), and their `config.json`."""

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from algos.language.config_keys import check_config_keys
from fdg.arguments import checked_names, quoted
from fdg.errors import FdgError
from fdg.kinds import make_fields_python

LINEAR = ("query", "key", "value", "output", "gate", "up", "down")
"""The linear layers of a block, by their names in the parameters."""

# Keys of config.json: the context length, and that of training before RoPE scaling. Values of `layer_types`.
_CONTEXT, _TRAINED = "max_position_embeddings", "original_max_position_embeddings"
_FULL, _SLIDING = "full_attention", "sliding_attention"

_ROPE_TYPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # type -> (required keys, optional keys)
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), (_TRAINED,)),
    "yarn": (
        ("factor",),
        (
            _TRAINED, "attention_factor", "beta_fast", "beta_slow", "mscale",
            "mscale_all_dim", "truncate",
        ),
    ),
    "longrope": (("factor", "short_factor", "long_factor"), (_TRAINED, "attention_factor")),
}  # fmt: skip
_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclasses.dataclass(frozen=True)
class _Kind:
    """A kind of value: how messages describe it, and a function that tests a value."""

    description: str
    holds: Callable[[Any], bool]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 31


def _is_pairs(value: Any) -> bool:
    """True for a tuple of pairs, each of a name and a hashable value."""
    return isinstance(value, tuple) and all(
        isinstance(pair, tuple)
        and len(pair) == 2
        and isinstance(pair[0], str)
        and isinstance(pair[1], Hashable)
        for pair in value
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1 << 63


_COUNT = _Kind("a whole number above zero", lambda value: _is_whole(value) and value > 0)
_WHOLE = _Kind("a whole number of at least 0", lambda value: _is_whole(value) and value >= 0)
_NUMBER = _Kind("a number of at least 0", lambda value: _is_number(value) and value >= 0)
_POSITIVE = _Kind("a number above zero", lambda value: _is_number(value) and value > 0)
_FINITE = _Kind("a finite number", _is_number)
_ABOVE_ONE = _Kind("a number above one", lambda value: _is_number(value) and value > 1)
_FLAG = _Kind("true or false", lambda value: isinstance(value, bool))

# The kinds of `DecoderConfig`'s fields, which `_check` compares with values.
_FIELDS = {
    "vocab_size": _COUNT, "hidden_size": _COUNT, "intermediate_size": _COUNT, "num_layers": _COUNT,
    "num_heads": _COUNT, "num_kv_heads": _COUNT, "head_dim": _COUNT, "rope_theta": _ABOVE_ONE,
    "rms_norm_eps": _NUMBER, "tie_embeddings": _FLAG, "qkv_bias": _FLAG, "output_bias": _FLAG,
    "mlp_bias": _FLAG, "qk_norm": _FLAG, "sliding_window": _COUNT, "first_sliding_layer": _WHOLE,
    "max_positions": _COUNT, "remat": _FLAG, "packed_rows": _COUNT, "lora_rank": _WHOLE,
    "lora_alpha": _FINITE, "initializer_range": _NUMBER,
}  # fmt: skip
_OPTIONAL = ("head_dim", "sliding_window", "packed_rows")  # fields that may be None
_FACTORS = _Kind(
    "a list of numbers above zero",
    lambda value: isinstance(value, list | tuple) and all(_is_number(x) and x > 0 for x in value),
)
# The kinds of the entries of `rope_scaling`.
_ROPE = {
    "factor": _POSITIVE, "low_freq_factor": _POSITIVE, "high_freq_factor": _POSITIVE, "beta_fast": _POSITIVE,
    "beta_slow": _POSITIVE, _TRAINED: _COUNT, "attention_factor": _POSITIVE,
    "mscale": _NUMBER, "mscale_all_dim": _NUMBER, "truncate": _FLAG, "short_factor": _FACTORS,
    "long_factor": _FACTORS,
}  # fmt: skip


@checked_names
@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes and options of a decoder-only transformer with rotary positions, RMSNorm and SwiGLU.

    Attributes:
      vocab_size, hidden_size, intermediate_size: V; D, width of the residual stream; width inside a SwiGLU.
      num_layers, num_heads: blocks; query heads.
      num_kv_heads: heads of keys and values, each shared by `num_heads / num_kv_heads` query heads (GQA,
        arXiv 2305.13245).
      head_dim: width of a head; None for `hidden_size / num_heads`.
      rope_theta: base of the rotary frequencies (arXiv 2104.09864).
      rope_scaling: scaling of the frequencies for long contexts, as sorted pairs from `config.json`:
        `rope_type` "linear", "dynamic", "llama3", "yarn" (arXiv 2309.00071) or "longrope" (arXiv 2402.13753),
        and its factors. "dynamic" and "longrope" depend on the length of each text.
      rms_norm_eps: added to the mean square.
      tie_embeddings: the head is the embedding's transpose.
      qkv_bias, output_bias, mlp_bias: which linear layers have a bias (Qwen2: only queries, keys and values).
      qk_norm: normalise each head of queries and keys (Qwen3).
      sliding_window: in layers from `first_sliding_layer` on, a token attends to this many tokens, including
        itself; None for all.
      max_positions: the longest context, in tokens.
      dtype: the compute dtype, "bfloat16", or "float32" for the parameters' dtype.
      remat: recompute blocks for the gradient.
      packed_rows: rows of packed sequences computed at once, which skips padding; None: each sequence is a
        row, with its padding. Results differ only by rounding.
      lora_rank, lora_alpha: r of low-rank adapters (arXiv 2106.09685), 0 for none; their scale is `alpha /
        r`.
      lora_targets: the linear layers that have adapters.
      initializer_range: standard deviation of initial weights.
    """

    vocab_size: int
    hidden_size: int = 576
    intermediate_size: int = 1536
    num_layers: int = 30
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int | None = None
    rope_theta: float = 10_000.0
    rope_scaling: tuple[tuple[str, Any], ...] | None = None
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    first_sliding_layer: int = 0
    max_positions: int = 2048
    dtype: str = "float32"
    remat: bool = False
    packed_rows: int | None = None
    lora_rank: int = 0
    lora_alpha: float = 16.0
    lora_targets: tuple[str, ...] = LINEAR
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        make_fields_python(self)
        for name in _FIELDS:
            if getattr(self, name) is not None or name not in _OPTIONAL:
                self._check(name, getattr(self, name), _FIELDS[name])
        if self.head_dim is None:
            self._require(
                self.hidden_size % self.num_heads == 0,
                f"hidden_size={self.hidden_size} is not divisible by num_heads={self.num_heads}:"
                " give head_dim",
            )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        self._require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads={self.num_heads} is not divisible by num_kv_heads={self.num_kv_heads}: change one",
        )
        self._require(self.width % 2 == 0, f"head_dim={self.head_dim}: rotary positions need an even width")
        self._require(
            self.dtype in ("float32", "bfloat16"), f"dtype={self.dtype!r}: it must be 'float32' or 'bfloat16'"
        )
        self._require(
            isinstance(self.lora_targets, tuple),
            f"lora_targets={quoted(self.lora_targets)}: give a tuple of names",
        )
        unknown = [name for name in self.lora_targets if name not in LINEAR]
        self._require(not unknown, f"lora_targets={unknown}: a block has {', '.join(LINEAR)}")
        self._require(
            self.rope_scaling is None or _is_pairs(self.rope_scaling),
            f"rope_scaling={quoted(self.rope_scaling)}: give pairs, tuple(sorted(...items()))",
        )
        kind, rope = self.rope_type, self.rope
        self._require(
            kind in _ROPE_TYPES,
            f"rope_type={quoted(kind)} is not supported: supported are {', '.join(_ROPE_TYPES)}",
        )
        missing = [name for name in _ROPE_TYPES[kind][0] if rope.get(name) is None]
        self._require(not missing, f"rope_type={kind!r}: {', '.join(missing)} missing, which it needs")
        for name in _ROPE.keys() & rope.keys():
            if rope[name] is not None:
                self._check(name, rope[name], _ROPE[name])
        for name in ("short_factor", "long_factor"):
            count = len(rope.get(name) or ())
            self._require(
                count in (0, self.width // 2),
                f"{name} has {count} numbers: it must have head_dim / 2, {self.width // 2}",
            )
        self._require(kind != "dynamic" or self.width > 2, "head_dim=2: rope_type='dynamic' needs 4 or more")
        self._require(
            kind != "longrope" or self.trained_positions > 1,
            f"{_TRAINED}={self.trained_positions}: rope_type='longrope' needs 2 or more",
        )
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            if rope.get(low) and rope.get(high):
                self._require(
                    rope[low] < rope[high], f"{low}={rope[low]}: it must be below {high}={rope[high]}"
                )

    def _check(self, name: str, value: Any, kind: "_Kind") -> None:
        self._require(kind.holds(value), f"{name}={quoted(value)}: it must be {kind.description}")

    def _require(self, condition: bool, message: str) -> None:
        if not condition:
            raise FdgError(f"DecoderConfig: {message}")

    @property
    def width(self) -> int:
        """The width of a head."""
        assert self.head_dim is not None
        return self.head_dim

    @property
    def rope(self) -> dict[str, Any]:
        """`rope_scaling` as a dict; empty for none."""
        return dict(self.rope_scaling or ())

    @property
    def rope_type(self) -> str:
        """The kind of scaling of rotary frequencies; "default" for none."""
        return self.rope.get("rope_type", self.rope.get("type", "default"))

    @property
    def trained_positions(self) -> int:
        """The context length of training before RoPE scaling."""
        return self.rope.get(_TRAINED) or self.max_positions

    @classmethod
    def tiny(cls, vocab_size: int, **changes: Any) -> "DecoderConfig":
        """A network for tests and small tasks: two layers of width 64, four query heads, two key-value heads.

        >>> DecoderConfig.tiny(17).head_dim
        16
        """
        sizes = {
            "hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
            "max_positions": 512,
        }  # fmt: skip
        return cls(vocab_size, **{**sizes, **changes})

    @classmethod
    def from_hugging_face(cls, config: Mapping[str, Any], **changes: Any) -> "DecoderConfig":
        """The config with the contents of a `config.json`; keyword arguments change fields.

        The `model_type` must be llama (Llama, SmolLM2, ...), mistral, qwen2 or qwen3.

        Raises:
          FdgError: another architecture, or an unknown option.
        """
        family = config.get("model_type")
        if family not in _FAMILIES:
            raise FdgError(
                f"config.json: model_type={quoted(family)} is not a supported decoder: supported are"
                f" {', '.join(_FAMILIES)}"
            )
        missing = [name for name in _SIZE_KEYS if config.get(name) is None]
        if missing:
            raise FdgError(f"config.json lacks {', '.join(missing)}, which {family} needs: add the sizes")
        check_config_keys(config, _READ | _FAMILY_KEYS[family].keys(), "config.json")
        config = {**_DEFAULTS, **_FAMILY_KEYS[family], **config}
        activation = config["hidden_act"]
        if activation not in ("silu", "swish"):
            raise FdgError(f"config.json: hidden_act={quoted(activation)}: only 'silu' is supported")

        def value(key: str, field: str, default: Any = None) -> Any:
            content = config.get(key)
            if content is None:
                return default
            if not _FIELDS[field].holds(content):
                raise FdgError(
                    f"config.json: {key}={quoted(content)}: it must be {_FIELDS[field].description}"
                )
            return content

        sizes = {name: value(key, name) for key, name in _SIZE_KEYS.items()}
        theta, rope = _rope_of(config, value)
        others = {name: value(key, name) for key, name in _OTHER_KEYS.items()}
        bias = value("attention_bias", "qkv_bias", False)
        window, first = _window_of(config, value)
        read = {
            "num_kv_heads": config["num_attention_heads"],
            "tie_embeddings": False,
            **sizes,
            **{name: content for name, content in others.items() if content is not None},
            "rope_theta": theta,
            "rope_scaling": rope,
            "qkv_bias": True if family == "qwen2" else bias,
            "output_bias": False if family == "qwen2" else bias,
            "mlp_bias": value("mlp_bias", "mlp_bias", False),
            "qk_norm": family == "qwen3",
            "sliding_window": window,
            "first_sliding_layer": first,
        }
        return cls(**{**read, **changes})

    @property
    def family(self) -> str:
        """The `model_type` of Hugging Face that has these options; an `FdgError` if there is none."""
        if self.qk_norm and not self.mlp_bias and self.qkv_bias == self.output_bias:
            return "qwen3"
        if self.qkv_bias and not (self.output_bias or self.mlp_bias or self.qk_norm):
            return "qwen2"
        is_plain = not (self.mlp_bias or self.qk_norm or self.qkv_bias or self.output_bias)
        if is_plain and self.sliding_window and not self.first_sliding_layer:
            return "mistral"
        if not (self.qk_norm or self.sliding_window) and self.qkv_bias == self.output_bias:
            # In Transformers, the width of a Llama is a multiple of the number of heads; that of a Mistral
            # need not be.
            return "mistral" if is_plain and self.hidden_size % self.num_heads else "llama"
        raise FdgError(
            f"DecoderConfig: no model of Hugging Face has qkv_bias={self.qkv_bias},"
            f" output_bias={self.output_bias}, mlp_bias={self.mlp_bias}, qk_norm={self.qk_norm} and"
            f" sliding_window={self.sliding_window} together: export a llama, mistral, qwen2 or qwen3"
        )

    def to_hugging_face(self) -> dict[str, Any]:
        """The contents of a `config.json`.

        >>> config = DecoderConfig.tiny(17, qkv_bias=True)
        >>> DecoderConfig.from_hugging_face(config.to_hugging_face()) == config
        True
        """
        family = self.family
        written = {
            "architectures": [_ARCHITECTURES[family]],
            "model_type": family,
            **{key: getattr(self, name) for key, name in (_SIZE_KEYS | _OTHER_KEYS).items()},
            "hidden_act": "silu",
            "rope_theta": self.rope_theta,
            "rope_scaling": self.rope or None,
            "attention_dropout": 0.0,
            "torch_dtype": "float32",
            "use_cache": True,
        }
        if family in ("llama", "qwen3"):
            written["attention_bias"] = self.output_bias
        if family == "llama":
            written["mlp_bias"] = self.mlp_bias
        if family != "llama":
            written["sliding_window"] = self.sliding_window
        if family in ("qwen2", "qwen3"):
            written["use_sliding_window"] = self.sliding_window is not None
            written["max_window_layers"] = self.first_sliding_layer
        return written

    @property
    def num_parameters(self) -> int:
        """The number of parameters, without adapters."""
        d = self.hidden_size
        linear = sum(outputs * (inputs + bias) for _, inputs, outputs, bias in self.linear_layers.values())
        norms = 2 * d + self.qk_norm * 2 * self.width
        embeddings = self.vocab_size * d * (1 if self.tie_embeddings else 2)
        return embeddings + d + self.num_layers * (linear + norms)

    @property
    def linear_layers(self) -> dict[str, tuple[str, int, int, bool]]:
        """The layers of `LINEAR`: part of the block, widths of input and output, whether there is a bias."""
        d, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.width, self.num_kv_heads * self.width
        return {
            "query": ("attention", d, queries, self.qkv_bias),
            "key": ("attention", d, keys, self.qkv_bias),
            "value": ("attention", d, keys, self.qkv_bias),
            "output": ("attention", queries, d, self.output_bias),
            "gate": ("mlp", d, inner, self.mlp_bias),
            "up": ("mlp", d, inner, self.mlp_bias),
            "down": ("mlp", inner, d, self.mlp_bias),
        }


# (key, field, default) -> the key's value in config.json, checked like this field of `DecoderConfig`.
_Value = Callable[..., Any]


def _rope_of(config: Mapping[str, Any], value: _Value) -> tuple[float, tuple[tuple[str, Any], ...] | None]:
    """The RoPE base and scaling, from the keys that Transformers 4 or 5 uses for them."""
    where = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(where) or {}
    if not isinstance(rope, dict) or any(isinstance(x, dict) for x in rope.values()):
        raise FdgError(f"config.json: {where}={quoted(rope)}: it must be an object of numbers and names")
    rope = {name: tuple(x) if isinstance(x, list) else x for name, x in rope.items()}
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = rope.get("rope_theta")
    if theta is None:
        theta = value("rope_theta", "rope_theta", 10_000.0)
    if not isinstance(kind, str) or kind not in _ROPE_TYPES:
        raise FdgError(
            f"config.json: rope_type={quoted(kind)} is not supported: supported are {', '.join(_ROPE_TYPES)}"
        )
    names = {name for names in _ROPE_TYPES[kind] for name in names}
    # The trained context may stand with every kind: Transformers writes it also where it is not used.
    known = names | {"rope_type", "type", "rope_theta", "finetuned", _TRAINED}
    check_config_keys(rope, known, f"config.json: {where} of {kind!r}", ())
    if _TRAINED in names:
        rope[_TRAINED] = rope.get(_TRAINED) if config.get(_TRAINED) is None else config[_TRAINED]
        if rope.get("factor") is None and all(map(_COUNT.holds, (rope[_TRAINED], config[_CONTEXT]))):
            rope["factor"] = config[_CONTEXT] / rope[_TRAINED]
    factors = {name: rope[name] for name in names if rope.get(name) is not None}
    return theta, tuple(sorted({"rope_type": kind, **factors}.items())) if kind != "default" else None


def _window_of(config: Mapping[str, Any], value: _Value) -> tuple[int | None, int]:
    """The size of the sliding window, and its first layer; None and 0 without one."""
    layers, window = config["num_hidden_layers"], value("sliding_window", "sliding_window")
    first = 0
    if "use_sliding_window" in config:
        window = window if value("use_sliding_window", "qkv_bias", False) else None
        first = min(value("max_window_layers", "first_sliding_layer", 0), layers)
    kinds = config.get("layer_types")
    if kinds is not None:
        # One entry per layer; sliding layers must come after all others.
        first = kinds.count(_FULL) if isinstance(kinds, list) else 0
        if not isinstance(kinds, list) or kinds != [_FULL] * first + [_SLIDING] * (len(kinds) - first):
            raise FdgError(
                f"config.json: layer_types={quoted(kinds)}: it must be a list, {_FULL!r} for the first layers"
                f" and {_SLIDING!r} for the rest"
            )
        if len(kinds) != layers:
            raise FdgError(
                f"config.json: layer_types has {len(kinds)} layers, and num_hidden_layers={layers}"
            )
    return (window, first) if window is not None and first < layers else (None, 0)


# Keys of config.json, and the fields of `DecoderConfig` with their values: required keys, then optional ones.
_SIZE_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
}

_OTHER_KEYS = {
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "rms_norm_eps",
    "tie_word_embeddings": "tie_embeddings",
    _CONTEXT: "max_positions",
    "initializer_range": "initializer_range",
}
_READ = {
    *_SIZE_KEYS, *_OTHER_KEYS, "model_type", "hidden_act", "rope_theta", "rope_scaling", "rope_parameters",
    _TRAINED,
}  # fmt: skip
# Defaults of Transformers 5.24: for all families, then for each, whose further keys these are.
_DEFAULTS = {"hidden_act": "silu", _CONTEXT: 2048}
_QWEN = {
    "num_key_value_heads": 32, _CONTEXT: 32_768, "use_sliding_window": False, "sliding_window": 4096,
    "max_window_layers": 28, "layer_types": None,
}  # fmt: skip
_FAMILY_KEYS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": False, "mlp_bias": False},
    "mistral": {"num_key_value_heads": 8, _CONTEXT: 131_072, "sliding_window": 4096},
    "qwen2": {**_QWEN, "attention_bias": False},  # ignored: queries, keys and values always have biases
    "qwen3": {**_QWEN, "attention_bias": False, "head_dim": 128},
}

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
