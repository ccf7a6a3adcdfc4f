"""Tokenizers of the kinds that checkpoints have, trained on a few lines of text."""

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


def _trained(tokenizer, trainer, special=SPECIAL, **options):
    options |= {"special_tokens": list(special), "show_progress": False}
    tokenizer.train_from_iterator(LINES * 5, trainer(**options))
    return tokenizer


def _sentencepiece_bpe(prepend):
    """As Llama 2: spaces become `▁`, and characters outside the vocabulary become bytes."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    steps = [normalizers.Prepend("▁")] if prepend else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    _trained(tokenizer, trainers.BpeTrainer, SPECIAL + BYTES, vocab_size=500)
    found = json.loads(tokenizer.to_str())
    found["added_tokens"] = [one for one in found["added_tokens"] if one["content"] in SPECIAL]
    tokenizer = Tokenizer.from_str(json.dumps(found))
    end = [decoders.Strip(" ", 1, 0)] if prepend else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *end]
    )
    return tokenizer


def _byte_level_bpe(split):
    """As GPT-2 or, with `split`, Llama 3: byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(WORDS), "isolated"), cut] if split else [cut]
    )
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    _trained(tokenizer, trainers.BpeTrainer, vocab_size=400, initial_alphabet=letters)
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("日本", special=False)])
    return tokenizer


def _unigram(scheme):
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return _trained(tokenizer, trainers.UnigramTrainer, vocab_size=150, unk_token="<unk>")


def _word_pieces(lowercase):
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=lowercase)
    return _trained(tokenizer, trainers.WordPieceTrainer, vocab_size=300)


KINDS = {
    "pieces": lambda: _sentencepiece_bpe(False),
    "pieces with prefix space": lambda: _sentencepiece_bpe(True),
    "bytes as GPT-2": lambda: _byte_level_bpe(False),
    "bytes as Llama 3": lambda: _byte_level_bpe(True),
    "unigram": lambda: _unigram("never"),
    "unigram with prefix space": lambda: _unigram("always"),
    "word pieces": lambda: _word_pieces(False),
    "word pieces in lower case": lambda: _word_pieces(True),
}


def write_checkpoint(folder, tokenizer, **config):
    """Writes a checkpoint folder with a tokenizer; `config` extends `tokenizer_config.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**special, **config}))
    return folder
