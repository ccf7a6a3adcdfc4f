"""Losses on every turn of the assistant: masks of tokens against those worked by hand."""

import json

import jax
import numpy as np
import pytest

import algos
import envs
import fdg
from envs.text import HuggingFaceTokenizer

library = pytest.importorskip("tokenizers")
WORDS = ["<s>", "<end>", "U:", "A:", "a", "b", "c", "d", "e", "S:", "f"]
CONVERSATION = [("user", "a b"), ("assistant", "c d"), ("user", "e"), ("assistant", "b"), ("user", "a")]
_ASK = "{% if add_generation_prompt %}A: {% endif %}"
PLAIN = (
    "{% for m in messages %}{{ 'A: ' if m.role == 'assistant' else 'U: ' }}{{ m.content }} <end> {% endfor %}"
    + _ASK
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A: {% generation %}{{ m.content }} <end>"
    "{% endgeneration %} {% else %}U: {{ m.content }} <end> {% endif %}{% endfor %}" + _ASK
)
HALF = MARKED.replace(" <end>{% endgeneration", "{% endgeneration").replace("%} {% else", "%} <end> {% else")
# U: a b <end> A: c d <end> U: e <end> A: b <end> U: a <end> A:
BY_HAND = ".....ccc....cc...."


def folder(path, template):
    words = {word: i for i, word in enumerate(WORDS)}
    made = library.Tokenizer(library.models.WordLevel(vocab=words, unk_token="<s>"))
    made.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
    path.mkdir()
    made.save(str(path / "tokenizer.json"))
    said = {"eos_token": "<end>", **({"chat_template": template} if template else {})}
    (path / "tokenizer_config.json").write_text(json.dumps(said))
    return HuggingFaceTokenizer(str(path))


def task(path, tokenizer=None):
    messages = [{"role": role, "content": text} for role, text in CONVERSATION]
    rows = [{"messages": [*messages, {"role": "assistant", "content": text}]} for text in ("d", "e")]
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "test.jsonl").write_text(json.dumps({"prompt": "f", "completion": "e"}))
    made = envs.make("text:file", path=str(path / "rows.jsonl"), test_path=str(path / "test.jsonl"))
    return made if tokenizer is None else made.with_tokenizer(tokenizer)


def said(task, i=0):
    """Which tokens of the prompt are the assistant's, those of padding left out."""
    content = np.array([i], np.int32)
    return np.asarray(task.said_before(content))[0][np.asarray(task.prompts(content).mask)[0]]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (PLAIN, BY_HAND),
        (MARKED, BY_HAND),
        (HALF, ".....cc.....c....."),  # the mark ends before the end of the turn
        (None, "..cc.c."),
    ],
)
def test_tokens_of_the_assistant_are_marked(tmp_path, template, expected):
    found = task(tmp_path, folder(tmp_path / "words", template))
    np.testing.assert_array_equal(said(found), [one == "c" for one in expected])
    assert not said(found, 2).any()


def test_characters_have_marks_too(tmp_path):
    # A beginning, then "a b", "c d", "e", "b" and "a", a line each.
    by_hand = ".....ccc...c.."
    np.testing.assert_array_equal(said(task(tmp_path)), [one == "c" for one in by_hand])


def test_a_template_that_rewrites_turns_is_refused(tmp_path):
    last = PLAIN.replace("{{ m.content }}", "{{ m.content if loop.last else 'f' }}")
    with pytest.raises(fdg.FdgError, match=r"message 2 of .* formats it differently .* generation"):
        said(task(tmp_path, folder(tmp_path / "words", last)))


@pytest.mark.parametrize("packs", [False, True])
def test_learning_takes_exactly_these_tokens(tmp_path, packs):
    learner = algos.SFT(
        env=task(tmp_path), loss_on="assistant", num_prompts=2, hidden_size=8, num_layers=1, num_heads=2,
        remove_padding=packs,
    )  # fmt: skip
    _, metrics = jax.jit(learner.iterate)(jax.jit(learner.init)(jax.random.key(0)))
    # 4 characters of earlier turns, the answer, and its end.
    assert float(metrics["response_length_max"]) == 6
