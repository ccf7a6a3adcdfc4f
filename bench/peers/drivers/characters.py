"""fdg's tokenizer of characters as a tokenizer of `transformers`, for drivers of language models."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_SPECIAL = ("<pad>", "<bos>", "<eos>")  # 0, 1, 2, as in fdg


def tokenizer_of(alphabet: str) -> PreTrainedTokenizerFast:
    """A tokenizer with three special tokens, then a token for each character."""
    vocabulary = {token: i for i, token in enumerate((*_SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()  # without it, decoded text has spaces between characters
    pad, bos, eos = _SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos, padding_side="left"
    )


def share_of_answer(response: str, answer: str) -> float:
    """The share of the answer's characters that a response has in their places.

    Unlike exact matches, random networks get some, so that their parameters change.
    """
    return sum(a == b for a, b in zip(response.strip(), answer, strict=False)) / len(answer)
