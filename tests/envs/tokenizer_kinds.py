"""Tokenizers of the kinds that checkpoints have, trained on a few lines."""

import json

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SPECIAL = ["<unk>", "<s>", "</s>", "<pad>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LINES = [
    "Say the sum of 12 and 34: it is 46.",
    "Zürich is in Switzerland; 北京 is in China. naïve café",
    "  two  blanks\n\nand lines\t tabs",
    "emoji 😀 ok, don't we've it's 0123456789+-*/=()",
]
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _trained(made, trainer, special=SPECIAL, **options):
    options |= {"special_tokens": list(special), "show_progress": False}
    made.train_from_iterator(LINES * 5, trainer(**options))
    return made


def _of_pieces(prepend):
    """As Llama 2's: blanks are pieces, and bytes stand for what is none."""
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    steps = [normalizers.Prepend("▁")] if prepend else []
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    _trained(made, trainers.BpeTrainer, SPECIAL + BYTES, vocab_size=500)
    found = json.loads(made.to_str())
    found["added_tokens"] = [one for one in found["added_tokens"] if one["content"] in SPECIAL]
    made = Tokenizer.from_str(json.dumps(found))
    end = [decoders.Strip(" ", 1, 0)] if prepend else []
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *end]
    )
    return made


def _of_bytes(split):
    """As GPT-2's, or Llama 3's: each byte is a letter."""
    made = Tokenizer(models.BPE())
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split)
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(WORDS), "isolated"), cut] if split else [cut]
    )
    made.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    _trained(made, trainers.BpeTrainer, vocab_size=400, initial_alphabet=letters)
    made.add_tokens([AddedToken("<think>", special=False), AddedToken("日本", special=False)])
    return made


def _unigram(scheme):
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    made.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return _trained(made, trainers.UnigramTrainer, vocab_size=150, unk_token="<unk>")


def _word_pieces(lowercase):
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(cleanup=lowercase)
    return _trained(made, trainers.WordPieceTrainer, vocab_size=300)


def words():
    """Whole words, written with a blank between two of them: there is no decoder."""
    made = Tokenizer(models.WordLevel(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return _trained(made, trainers.WordLevelTrainer, vocab_size=90)


KINDS = {
    "pieces": lambda: _of_pieces(False),
    "pieces behind a blank": lambda: _of_pieces(True),
    "bytes as GPT-2": lambda: _of_bytes(False),
    "bytes as Llama 3": lambda: _of_bytes(True),
    "unigram": lambda: _unigram("never"),
    "unigram behind a blank": lambda: _unigram("always"),
    "word pieces": lambda: _word_pieces(False),
    "word pieces in lower case": lambda: _word_pieces(True),
}


def written(folder, made, **config):
    """A checkpoint's folder with a tokenizer; `config` goes into its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    words = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**words, **config}))
    return folder
