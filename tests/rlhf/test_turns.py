"""The loss on all assistant turns: token masks, compared with masks computed by hand."""

import json

import numpy as np
import pytest

import envs
import fdg
from envs.text import HuggingFaceTokenizer

tokenizers = pytest.importorskip("tokenizers")
WORDS = ["<s>", "<end>", "U:", "A:", "a", "b", "c", "d", "e", "S:", "f"]
CONVERSATION = [("user", "a b"), ("assistant", "c d"), ("user", "e"), ("assistant", "b"), ("user", "a")]
_GENERATION_PROMPT = "{% if add_generation_prompt %}A: {% endif %}"
PLAIN = (
    "{% for m in messages %}{{ 'A: ' if m.role == 'assistant' else 'U: ' }}{{ m.content }} <end> {% endfor %}"
    + _GENERATION_PROMPT
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A: {% generation %}{{ m.content }} <end>"
    "{% endgeneration %} {% else %}U: {{ m.content }} <end> {% endif %}{% endfor %}" + _GENERATION_PROMPT
)
PART = MARKED.replace(" <end>{% endgeneration", "{% endgeneration").replace("%} {% else", "%} <end> {% else")
# U: a b <end> A: c d <end> U: e <end> A: b <end> U: a <end> A:
EXPECTED = ".....ccc....cc...."


def write_tokenizer(path, template):
    words = {word: i for i, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab=words, unk_token="<s>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    path.mkdir()
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"eos_token": "<end>", **({"chat_template": template} if template else {})}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return HuggingFaceTokenizer(str(path))


def task(path, tokenizer=None, **columns):
    messages = [{"role": role, "content": text} for role, text in CONVERSATION]
    rows = [
        {"messages": [*messages, {"role": "assistant", "content": text}], **columns} for text in ("d", "e")
    ]
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "test.jsonl").write_text(json.dumps({"prompt": "f", "completion": "e"}))
    found = envs.make("text:file", path=str(path / "rows.jsonl"), test_path=str(path / "test.jsonl"))
    return found if tokenizer is None else found.with_tokenizer(tokenizer)


def assistant_mask(task, i=0):
    """True for each prompt token of the assistant; padding is removed."""
    content = np.array([i], np.int32)
    return np.asarray(task.said_before(content))[0][np.asarray(task.prompts(content).mask)[0]]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (PLAIN, EXPECTED),
        (MARKED, EXPECTED),
        (PART, ".....cc.....c....."),  # the mark ends before the last token of the turn
        (None, "..cc.c."),
    ],
)
def test_assistant_mask(tmp_path, template, expected):
    found = task(tmp_path, write_tokenizer(tmp_path / "words", template))
    np.testing.assert_array_equal(assistant_mask(found), [one == "c" for one in expected])
    assert not assistant_mask(found, 2).any()


def test_assistant_mask_with_template_arguments_that_the_template_gets_anyway(tmp_path):
    given = {"messages": [], "add_generation_prompt": True, "generation_marks": "x"}
    found = task(tmp_path, write_tokenizer(tmp_path / "words", MARKED), chat_template_kwargs=given)
    np.testing.assert_array_equal(assistant_mask(found), [one == "c" for one in EXPECTED])


def test_assistant_mask_of_characters(tmp_path):
    # BOS, then the lines "a b", "c d", "e", "b" and "a".
    expected = ".....ccc...c.."
    np.testing.assert_array_equal(assistant_mask(task(tmp_path)), [one == "c" for one in expected])


def test_template_that_rewrites_turns_is_refused(tmp_path):
    last = PLAIN.replace("{{ m.content }}", "{{ m.content if loop.last else 'f' }}")
    with pytest.raises(fdg.FdgError, match=r"message 2 of .* formats it differently .* generation"):
        assistant_mask(task(tmp_path, write_tokenizer(tmp_path / "words", last)))
