"""Exports models, and compares how fdg, Transformers and PEFT read them: logits, token ids and adapters.

    python -m venv build/venvs/transformers
    build/venvs/transformers/bin/pip install torch==2.14.1 transformers==5.24.0 peft==0.21.2
    python -m bench.exports --python build/venvs/transformers/bin/python

Each network shape is exported once into a folder, with random parameters and a tokenizer, whose kinds take
turns. Then fdg and Transformers (`bench/exports_reference.py`) read the folder.
"""

import json
import pathlib
import random
import subprocess
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from algos.language import Decoder, DecoderConfig, peft, weights
from algos.rlhf.checkpoints import save
from bench.harness import ROOT, interpreter, parser
from envs.text import CharacterTokenizer, HuggingFaceTokenizer
from envs.text.tokenizer_folders import tokenizer_of

TOLERANCE = 1e-5  # largest accepted difference of logits, float32

# Fields of `DecoderConfig` that the shapes share, unless `SHAPES` has another value.
_SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_layers": 3, "num_heads": 4, "max_positions": 64}


def _rope(kind: str, **values: Any) -> dict[str, Any]:
    """The field of `DecoderConfig` for scaled rotary positions; Hugging Face's format has the same keys."""
    return {"rope_scaling": tuple(sorted({"rope_type": kind, **values}.items()))}


def _longrope(original_length: int) -> dict[str, Any]:
    """LongRoPE with factors for 8 frequencies; texts longer than `original_length` use the long factors."""
    short, long = tuple(1 + i / 20 for i in range(8)), tuple(1.5 + i for i in range(8))
    lengths = {"factor": 4.0, "original_max_position_embeddings": original_length}
    return _rope("longrope", **lengths, short_factor=short, long_factor=long)


SHAPES: dict[str, dict[str, Any]] = {
    "qwen2": {"qkv_bias": True},
    "llama tied, as SmolLM2": {"num_kv_heads": 1},
    "llama with biases": {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "mistral, window 5": {"sliding_window": 5, "tie_embeddings": False},
    "qwen3": {"qk_norm": True, "head_dim": 32, "tie_embeddings": False},
    "llama": {"tie_embeddings": False},
    "qwen2, window 5 of later layers": {"qkv_bias": True, "sliding_window": 5, "first_sliding_layer": 1},
    "llama, width no multiple of heads": {"num_heads": 6, "num_kv_heads": 3, "head_dim": 12},
    "llama linear": _rope("linear", factor=2.0),
    "llama dynamic, beyond its context": {**_rope("dynamic", factor=4.0), "max_positions": 9},
    "llama llama3": _rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
    ),
    "qwen2 yarn": {"qkv_bias": True, **_rope("yarn", factor=4.0, original_max_position_embeddings=16)},
    "llama longrope, long": _longrope(9),
    "llama longrope, short": _longrope(32),
}
_ASCII = [chr(i) for i in range(33, 127)]  # printable, without the space
SPECIAL = ("<unk>", "<s>", "</s>", "<pad>")
CHAT_TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] | trim }}</s>{% endfor %}<s>"
WORDS = "the quick brown fox sums 12 and 345, then jumps over été naïve größe 東京 дом x=y+z? no!".split()


def _trained(tokenizer: Tokenizer, trainer: Any, alphabet: list[str], **options: Any) -> Tokenizer:
    """Trains a tokenizer on random words; its vocabulary always has `alphabet` and `SPECIAL`.

    `trainer` is a class of `tokenizers.trainers`, `options` are its arguments.
    """
    rng = random.Random(0)
    texts = [" ".join(rng.choices(WORDS, k=12)) for _ in range(300)]
    options |= {"initial_alphabet": alphabet, "special_tokens": list(SPECIAL), "show_progress": False}
    tokenizer.train_from_iterator(texts, trainer(**options))
    return tokenizer


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    # Qwen2's pattern: Transformers 5 always uses it for a Qwen2, and ignores the one in tokenizer.json.
    pattern = Regex(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    )
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return _trained(tokenizer, trainers.BpeTrainer, pre_tokenizers.ByteLevel.alphabet(), vocab_size=420)


def byte_fallback() -> Tokenizer:
    """BPE in which an unknown character becomes its bytes, as in Llama 2's tokenizer."""
    vocabulary = {word: i for i, word in enumerate(SPECIAL)}
    for piece in [*(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *_ASCII]:
        vocabulary[piece] = len(vocabulary)
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the"), ("1", "2"), ("a", "n"), ("an", "d")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    bpe.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )  # fmt: skip
    return bpe


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _trained(tokenizer, trainers.UnigramTrainer, _ASCII, vocab_size=200, unk_token="<unk>")


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return _trained(tokenizer, trainers.WordPieceTrainer, _ASCII, vocab_size=260)


TOKENIZERS = {
    "byte-level BPE": byte_level, "BPE with byte fallback": byte_fallback, "Unigram": unigram,
    "WordPiece": word_piece,
}  # fmt: skip


def make_tokenizer(kind: str, folder: pathlib.Path) -> Any:
    """Writes the files of a tokenizer of this kind into a folder, and reads them as from a checkpoint.

    The kind "characters" has no files: it is fdg's own tokenizer.
    """
    if kind == "characters":
        return CharacterTokenizer()
    folder.mkdir()
    tokenizer = TOKENIZERS[kind]()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    special_tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | special_tokens))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return HuggingFaceTokenizer(str(folder))


def random_texts(kind: str, count: int) -> list[str]:
    """Random strings for a kind of tokenizer, equal in every run.

    Strings for "characters" consist of its alphabet, all others of characters, words, blanks, numbers and
    special tokens.
    """
    rng = random.Random(f"{kind} strings")
    if kind == "characters":
        return [
            "".join(rng.choices(CharacterTokenizer().alphabet, k=rng.randint(0, 40))) for _ in range(count)
        ]

    def piece() -> str:
        match rng.randrange(8):
            case 0:
                return chr(rng.choice([rng.randrange(32, 127), rng.randrange(0xA0, 0xD800)]))
            case 1:
                return chr(rng.randrange(0x1F300, 0x1F9FF))
            case 2:
                return rng.choice([" ", "  ", "\n", "\t", " \n "])
            case 3:
                return str(rng.randrange(10**6))
            case 4:
                return rng.choice(SPECIAL) if rng.random() < 0.2 else "<"
            case _:
                return rng.choice(WORDS)

    return ["".join(piece() for _ in range(rng.randint(0, 24))) for _ in range(count)]


def random_parameters(config: DecoderConfig, seed: int) -> Any:
    """Random parameters, large enough that logits differ; arrays with one axis have mean 1, others mean 0."""
    shapes = jax.eval_shape(Decoder(config).init, jax.random.key(0))
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: (0.12 * rng.normal(size=x.shape) + (x.ndim == 1)).astype(np.float32), shapes
    )


def logits(decoder: Decoder, parameters: Any, tokens: np.ndarray) -> np.ndarray:
    return np.asarray(jax.jit(decoder.apply)(parameters, tokens, jnp.ones(tokens.shape, jnp.int32)))


def main() -> int:
    command = parser("bench.exports", __doc__)
    default = str(ROOT / "build/venvs/transformers/bin/python")
    command.add_argument("--python", type=interpreter, default=default)
    command.add_argument("--strings", type=int, default=1000)
    args = command.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        return compare(pathlib.Path(scratch), args.python, args.strings)


def compare(scratch: pathlib.Path, python: str, count: int) -> int:
    """Prints the comparison; returns exit status 1 if anything differs, except decoded text.

    `scratch` is an empty folder, `python` the interpreter of Transformers, `count` the number of strings.
    """
    kinds = [*TOKENIZERS, "characters"]
    tokenizers = {kind: make_tokenizer(kind, scratch / f"tokenizer {kind}") for kind in kinds}
    jobs: dict[str, Any] = {}  # input of `bench/exports_reference.py`
    ours: dict[str, Any] = {}  # name of a job -> fdg's logits, and the folder of the export (None: adapters)
    for i, (name, options) in enumerate(SHAPES.items()):
        kind = kinds[i % len(kinds)]
        config = DecoderConfig(tokenizers[kind].vocab_size, **{**_SIZES, "num_kv_heads": 2, **options})
        folder = scratch / name
        save(folder, Decoder(config), random_parameters(config, i), tokenizers[kind])
        tokens = np.random.default_rng(i).integers(0, config.vocab_size, (3, 24))
        decoder, parameters = weights.load(folder)
        assert decoder.config == config, (decoder.config, config)
        ours[name] = logits(decoder, parameters, tokens), folder
        jobs[name] = {"folder": str(folder), "tokens": tokens.tolist()}
        if i <= len(kinds):  # compares each kind of tokenizer once, and the first kind twice
            message = [{"role": "user", "content": "1+2="}]
            jobs[name] |= {"texts": random_texts(kind, count), "messages": message}
    base_name = "qwen2"
    tokens = np.asarray(jobs[base_name]["tokens"])
    decoder, parameters = weights.load(scratch / base_name, lora_rank=4)
    rng = np.random.default_rng(0)
    parameters["adapters"] = jax.tree.map(
        lambda x: (0.1 * rng.normal(size=x.shape)).astype(np.float32), parameters["adapters"]
    )
    peft.save(scratch / "adapters", decoder, parameters, str(scratch / base_name))
    jobs["adapters written here"] = {**jobs[base_name], "adapters": str(scratch / "adapters")}
    ours["adapters written here"] = logits(decoder, parameters, tokens), None
    peft_job = {"make_adapters": str(scratch / "made"), "adapters": str(scratch / "made")}
    jobs["adapters written by PEFT"] = {**jobs[base_name], **peft_job}

    (scratch / "jobs.json").write_text(json.dumps(jobs))
    script = str(ROOT / "bench/exports_reference.py")
    out = str(scratch / "out.npz")
    subprocess.run([python, script, str(scratch / "jobs.json"), out], check=True)
    with np.load(out) as file:
        theirs = dict(file)

    config, adapters = peft.load(scratch / "made", weights.read_config(scratch / base_name))
    parameters = {"base": weights.load(scratch / base_name)[1], "adapters": adapters}
    ours["adapters written by PEFT"] = logits(Decoder(config), parameters, tokens), None
    num_wrong = 0
    print(f"{'logits':<36}{'max |diff|':>10}")
    for name, (values, _) in ours.items():
        difference = float(np.abs(values - theirs[f"{name} logits"]).max())
        num_wrong += not difference < TOLERANCE
        print(f"{name:<36}{difference:>10.1e}")
    print(f"\n{'strings with equal':<46}{'ids':>10}{'text':>10}{'template':>10}{'tokens':>10}")
    for name, kind in zip(SHAPES, [*kinds, kinds[0]], strict=False):
        our_tokenizer, job = tokenizer_of(ours[name][1]), jobs[name]
        ids = [our_tokenizer.encode(text) for text in job["texts"]]
        equal_ids = [json.loads(x) == y for x, y in zip(theirs[f"{name} ids"], ids, strict=True)]
        decoded = [
            json.loads(x) == our_tokenizer.decode(y)
            for x, y in zip(theirs[f"{name} decoded"], ids, strict=True)
        ]
        chat = HuggingFaceTokenizer(str(ours[name][1])).chat(job["messages"])
        special = [getattr(our_tokenizer, "bos", None), our_tokenizer.stops[0], our_tokenizer.pad]
        their_tokens = theirs[f"{name} special"].tolist(), theirs[f"{name} eos"].tolist()
        same_special = their_tokens == (special, list(our_tokenizer.stops))
        same_chat = str(theirs[f"{name} chat"]) == chat
        num_wrong += sum(not x for x in equal_ids) + (not same_chat) + (not same_special)
        print(
            f"{name + ', ' + kind:<46}{sum(equal_ids):>10}{sum(decoded):>10}{same_chat!s:>10}"
            f"{same_special!s:>10}"
        )
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
