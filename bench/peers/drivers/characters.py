"""fdg's tokenizer of characters, as those of `transformers` are, for drivers of language models."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_SPECIAL = ("<pad>", "<bos>", "<eos>")  # 0, 1, 2, as fdg's has them


def tokenizer_of(alphabet: str) -> PreTrainedTokenizerFast:
    """A token for each character, after the three special ones."""
    vocabulary = {token: i for i, token in enumerate((*_SPECIAL, *alphabet))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()  # else there are spaces between characters, and no answer is right
    pad, bos, eos = _SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=pad, bos_token=bos, eos_token=eos, padding_side="left"
    )
