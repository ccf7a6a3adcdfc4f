"""Multi-turn text games with scripted models; tokenizers of checkpoints; problems from files."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

import envs
import fdg
from envs.text import CharacterTokenizer, Guess, HuggingFaceTokenizer, Message, codec, play
from tests.refusing import refuses

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
jit = functools.partial(jax.jit, compiler_options=QUICK)


def message_of(texts, game):
    """A `Message` of these texts, each with an end token: tokens, mask, and one number per token."""
    rows = np.zeros((len(texts), game.response_length), np.int32)
    for row, text in zip(rows, texts, strict=True):
        ids = [*game.tokenizer.encode(text), game.tokenizer.eos]
        row[: len(ids)] = ids
    return Message(jnp.asarray(rows), jnp.asarray(rows > 0), jnp.asarray(rows) * 0.5)


def play_script(game, problem, replies):
    """The transcript of a model that gives these replies, and its context at each turn."""

    @jit
    def run(problem):
        contexts = []

        def speak(context, turn):
            contexts.append(context)
            return message_of(replies[turn], game)

        return play(game, problem, speak), contexts

    return run(problem)


def decoded(tokenizer, tokens, mask):
    return [
        tokenizer.decode(row[shown]) for row, shown in zip(np.asarray(tokens), np.asarray(mask), strict=True)
    ]


def test_guess_by_hand():
    """Three numbers to guess: found at the second guess, at the first, and never."""
    game = Guess(largest=99, turns=3)
    problem = jit(game.sample)(jax.random.split(jax.random.key(0), 3))._replace(answer=jnp.array([7, 50, 99]))
    replies = [["50", "50", "50"], ["7", "1", "x"], ["7", "1", "98"]]
    script, contexts = play_script(game, problem, replies)
    decoded_contexts = [decoded(game.tokenizer, *context) for context in contexts]
    assert decoded_contexts[1] == ["0-99?50less,", "0-99?50", "0-99?50more,"]
    assert decoded_contexts[2] == ["0-99?50less,7", "0-99?50", "0-99?50more,xmore,"]
    assert decoded(game.tokenizer, script.tokens, script.mask) == [
        "0-99?50less,7", "0-99?50", "0-99?50more,xmore,98more,"
    ]  # fmt: skip
    # The loss covers the model's tokens, including end tokens, and no tokens of the game.
    assert decoded(game.tokenizer, script.tokens, script.said) == ["507", "50", "50x98"]
    assert np.sum(script.said, axis=1).tolist() == [5, 3, 8]
    np.testing.assert_array_equal(script.about, np.where(script.said, np.asarray(script.tokens) * 0.5, 0))
    assert (np.diff(np.asarray(script.mask).astype(int), axis=1) >= 0).all() and script.mask[:, -1].all()
    assert script.reward.total.tolist() == [1, 1, 0] and script.turns.tolist() == [2, 1, 3]
    assert {name: part.tolist() for name, part in script.reward.parts.items()} == {
        "turn 1": [0, 1, 0], "turn 2": [1, 0, 0], "turn 3": [0, 0, 0]
    }  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A Hugging Face checkpoint directory with a byte-level tokenizer that merges some digits."""
    path = tmp_path_factory.mktemp("checkpoint")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>", "<|user|>", "<|model|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["12 12 123 1234 46 46 46 the number alone", "Ünïcode"], trainer)
    made.save(str(path / "tokenizer.json"))
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|model|>"
    config = {"eos_token": "<|end|>", "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_byte_tables_match_decode(checkpoint):
    tokenizer = HuggingFaceTokenizer(str(checkpoint))
    codes, counts = tokenizer.codes_of_tokens()
    assert len(counts) == tokenizer.vocab_size
    for token in range(3, tokenizer.vocab_size):
        text = bytes(codes[token, : counts[token]]).decode(errors="replace")
        assert text == tokenizer.decode([token]), token
    assert (counts[:3] == 0).all()
    table = codec.token_of_code(tokenizer)
    assert all(tokenizer.decode([table[ord(c)]]) == c for c in CharacterTokenizer().alphabet)


def test_broken_checkpoints_are_refused(tmp_path, checkpoint):
    def refused(make, *names):
        with refuses(*names):
            make()

    for name in ("none", "a" * 300):  # the second is too long for a file
        refused(lambda name=name: HuggingFaceTokenizer(tmp_path / name), "there is no file tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{")
    refused(lambda: HuggingFaceTokenizer(str(tmp_path)), "tokenizer.json", "is not JSON")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "tokenizer.json").write_text((checkpoint / "tokenizer.json").read_text())
    bare = HuggingFaceTokenizer(str(tmp_path / "bare"))
    refused(lambda: bare.stops, "eos token")
    refused(lambda: bare.chat([]), "no chat_template")
    (tmp_path / "bare" / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|end|>", "chat_template": "{{ raise_exception('no system') }}"})
    )
    other = tmp_path / "other"
    (tmp_path / "bare").rename(other)
    refused(lambda: HuggingFaceTokenizer(str(other)).chat([]), "its chat template raised", "no system")
    refused(lambda: HuggingFaceTokenizer(str(checkpoint)).decode([10**6]), "token 1000000 at 0")


def test_text_task_is_not_an_environment():
    with pytest.raises(fdg.FdgError, match="env=text:addition is a text task"):
        envs.check_spec(envs.make("text:addition"))
    assert envs.make("text:addition", digits=3).overrides == (("digits", 3),)
    assert envs.make("text:addition", digits=2, max_response=9).overrides == (("max_response", 9),)


def test_problems_from_a_file(tmp_path):
    file = tmp_path / "sums.jsonl"
    lines = [{"question": f"{i} & {i}?", "answer": 2 * i} for i in range(80)]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    task = envs.make("text:file", path=str(file))
    assert task.name == "text:file" and task.overrides == (("path", str(file)),)
    assert task.tokenizer.alphabet == CharacterTokenizer().alphabet + "&"

    @jit
    def run(keys):
        shown = task.demonstration(keys)
        answer = task.draw(keys)
        return shown, task.reward(answer, shown.responses, shown.mask), task.sample(keys, "test").prompts

    shown, reward, held_out = run(jax.random.split(jax.random.key(0), 64))
    prompts, responses = task.texts(*shown.prompts), task.texts(shown.responses, shown.mask)
    assert all(int(s) == 2 * int(a.split()[0]) for a, s in zip(prompts, responses, strict=True))
    assert reward.total.tolist() == [1] * 64 and not set(prompts) & set(task.texts(*held_out))


@pytest.mark.parametrize(
    ("content", "messages"),
    [
        ('{"problem": "1", "answer": "1"}\n' * 3, ["only 1 such problems", "give more"]),
        ("x\n", ["line 1: is not JSON", "write one object a line"]),
        (None, ["problems.jsonl: there is no such file"]),
    ],
)
def test_invalid_files_are_refused(content, messages, tmp_path):
    file = tmp_path / "problems.jsonl"
    if content is not None:
        file.write_text(content)
    with refuses(*messages):
        envs.make("text:file", path=str(file))
