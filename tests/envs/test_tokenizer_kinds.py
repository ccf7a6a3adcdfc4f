"""Tokenizers of each kind on random texts: encoding and decoding match the `tokenizers` library."""

import functools
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import algos
import envs
import fdg
import policies
from envs.text import CharacterTokenizer, HuggingFaceTokenizer, Row, codec
from envs.text.characters import to_string
from fdg.errors import FdgError
from tests.refusing import refuses

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from tokenizers import decoders  # noqa: E402

from tests.envs.tokenizer_kinds import KINDS, SPECIAL, write_checkpoint  # noqa: E402

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
jit = functools.partial(jax.jit, compiler_options=QUICK)
PIECES = [
    *"0123456789+-=abZz ,.!?\n\t'<>",
    "the ",
    " of",
    "Zürich",
    "北京",
    "é",
    "😀",
    "  ",
    "\n\n",
    "<think>",
]
TEXTS = st.lists(st.sampled_from([*PIECES, "<0x31>", "▁", "##a", "日本", " n't"]), max_size=12).map("".join)
SETTINGS = settings(
    max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
WIDTH = 64


@pytest.fixture(scope="module", params=KINDS)
def kind(request, tmp_path_factory):
    """The library's tokenizer, fdg's of the same file, and fdg's decoding under jit."""
    library = KINDS[request.param]()
    ours = HuggingFaceTokenizer(str(write_checkpoint(tmp_path_factory.mktemp("kind"), library)))
    return library, ours, jit(jax.vmap(lambda tokens, mask: codec.decode(ours, tokens, mask)[0]))


def padded(lists):
    rows, mask = np.zeros((len(lists), WIDTH), np.int32), np.zeros((len(lists), WIDTH), bool)
    for i, ids in enumerate(lists):
        rows[i, : len(ids)], mask[i, : len(ids)] = ids, True
    return jnp.asarray(rows), jnp.asarray(mask)


def test_encode_and_decode_match_library(kind):
    library, ours, read = kind

    @SETTINGS
    @given(st.lists(TEXTS, min_size=8, max_size=8))
    def compare(texts):
        ids = [library.encode(text, add_special_tokens=False).ids for text in texts]
        assert [ours.encode(text) for text in texts] == ids
        ids = [one[:WIDTH] for one in ids]
        decoded = jax.tree.map(np.asarray, read(*padded(ids)))
        found = [to_string(jax.tree.map(lambda leaf, i=i: leaf[i], decoded)) for i in range(8)]
        # A character that is cut at the end has no text.
        assert [x.rstrip("\ufffd") for x in found] == [library.decode(one).rstrip("\ufffd") for one in ids]

    compare()


def test_text_that_begins_within_a_word(kind):
    """Each token as the first one, before others: WordPiece keeps the mark `##` there."""
    library, ours, read = kind
    rest = library.encode("the sum", add_special_tokens=False).ids
    tokens = [i for word, i in library.get_vocab().items() if word.isascii() and not word.startswith("<")]
    for after in (rest, []):
        ids = [[token, *after] for token in tokens]
        found = jax.tree.map(np.asarray, read(*padded(ids)))
        for i, one in enumerate(ids):
            text = to_string(jax.tree.map(lambda leaf, i=i: leaf[i], found))
            assert text == library.decode(one) == ours.decode(one)


WORDS = [
    *["a", "b", " ", "  ", "▁", "▁▁", "▁a", "a▁", "▁a▁b", "##a", "##", "a</w>", "</w>", "Ġa", "Ã", "©"],
    *["<0xC3>", "<0xA9>", "<0x31>", "n't", ".", "日本", "\x00", "ก", "ำ", "|"],
]
FUSED = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
DECODERS = {
    "none": None,
    "metaspace": decoders.Metaspace(prepend_scheme="first"),
    "metaspace without prefix space": decoders.Metaspace(prepend_scheme="never"),
    "word pieces": decoders.WordPiece(cleanup=True),
    "marked ends": decoders.BPEDecoder(),
    "byte level": decoders.ByteLevel(),
    "fused": decoders.Sequence([*FUSED, decoders.Strip(" ", 1, 0)]),
    "two blanks of each token": decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 2, 0)]),
}


def words_checkpoint(folder, decoder):
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(SPECIAL + WORDS)}))
    library.add_special_tokens(SPECIAL)
    library.decoder = decoder
    return library, HuggingFaceTokenizer(str(write_checkpoint(folder, library)))


@pytest.mark.parametrize("name", DECODERS)
def test_any_tokens_decode_as_in_library(tmp_path, name):
    """First, last and only tokens lose blanks or gain marks; tokens beyond the tokenizer's are left out."""
    library, ours = words_checkpoint(tmp_path, DECODERS[name])
    rng = np.random.default_rng(0)
    ids = [rng.choice([0, 1, *range(4, ours.vocab_size + 2)], size=i % 6).tolist() for i in range(512)]
    found = jax.tree.map(np.asarray, jit(jax.vmap(lambda *row: codec.decode(ours, *row)[0]))(*padded(ids)))
    for i, one in enumerate(ids):
        text = to_string(jax.tree.map(lambda leaf, i=i: leaf[i], found))
        assert ours.decode([token for token in one if token < ours.vocab_size]) == library.decode(one)
        if "\ufffd" not in text:
            assert text == library.decode(one)


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (decoders.Sequence([*FUSED, decoders.Strip(" ", 2, 0)]), "together as .*, which is not the text of"),
        (decoders.CTC(), r"its decoder reads \['b', 'b'\] together as 'b', which is not"),
        (decoders.Sequence([*FUSED, decoders.Strip(" ", 1, 1)]), "is not read: a Strip with stop=1"),
    ],
)
def test_decoders_that_read_tokens_together_are_refused(tmp_path, decoder, message):
    with refuses(match=message):
        words_checkpoint(tmp_path, decoder)[1].codes_of_tokens()


def test_answer_tokens_continue_the_prompt(kind):
    library, ours, _ = kind

    @SETTINGS
    @example("a", "\n6")  # two newlines may be one token, across the boundary
    @given(TEXTS, TEXTS)
    def compare(problem, answer):
        ((prompt, ids),) = ours.encode_rows([Row(problem, answer)], "Do this.")
        prefix, text = f"Do this.\n{problem}\n", f"Do this.\n{problem}\n{answer}"
        expected = library.encode(text, add_special_tokens=False).ids
        assert prompt == library.encode(prefix, add_special_tokens=False).ids
        assert library.decode([*prompt, *ids]) == library.decode(expected)
        if expected[: len(prompt)] == prompt:
            assert [*prompt, *ids] == expected

    compare()


def test_tokens_of_characters_match_library(kind):
    library, ours, _ = kind
    table = codec.token_of_code(ours)
    for c in "0123456789+-=abc":
        if "<unk>" not in library.encode(c).tokens:
            assert table[ord(c)] == library.encode(c).ids[-1] and "<0x" not in library.id_to_token(
                int(table[ord(c)])
            )


ANSWERS = ["{}", " it is {}\n", "Zürich {}", "北京{}", "café {}+1", "\t{} \r\n"]


@pytest.fixture
def drawn(tmp_path):
    """Sampled problems with a library tokenizer."""
    tokenizer = HuggingFaceTokenizer(str(write_checkpoint(tmp_path / "drawn", KINDS["bytes as Llama 3"]())))
    return envs.make("text:addition", table_size=512).with_tokenizer(tokenizer)


def test_table_is_split_over_devices(drawn):
    """Each device samples its own rows: no gather is needed."""
    algorithm = algos.SFT(env=drawn, num_prompts=8, hidden_size=8, num_layers=1, num_heads=2)
    placed = str(fdg.place(fdg.trace(algorithm), policies.GPUOnly(), 4))
    line = next(line for line in placed.splitlines() if "demonstrations" in line)
    assert line.split()[-1] == "2" and "demonstrations" not in placed.split("moves between devices")[1], (
        placed
    )


def test_non_ascii_characters_without_library(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(
        "".join(json.dumps({"problem": f"北{i}", "answer": f" ü{i}\n"}) + "\n" for i in range(80))
    )
    task = envs.make("text:file", path=str(file))

    @jit
    def run(keys):
        content = task.draw(keys)
        responses = task.solutions(content)
        return responses, task.reward(content, *responses).total

    responses, reward = run(jax.random.split(jax.random.key(0), 8))
    assert reward.tolist() == [1] * 8
    assert {text[:2] for text in task.texts(*responses)} == {" ü"}
    assert CharacterTokenizer("aü").decode([1, 4, 3]) == "üa"


CHAT = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if enable_thinking is false %}<think>{% endif %}{% endif %}"
)


@pytest.fixture
def chat_checkpoint(tmp_path):
    more = {"chat_template": CHAT, "image_token": {"content": "<img>"}, "additional_special_tokens": ["<x>"]}
    return write_checkpoint(tmp_path / "chat", KINDS["bytes as GPT-2"](), **more)


def test_system_messages_and_template_arguments(chat_checkpoint):
    library = tokenizers.Tokenizer.from_file(str(chat_checkpoint / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizer(str(chat_checkpoint))
    options = 'table_size=64&system=Be brief.&template_arguments={"enable_thinking": false}'
    name, overrides = envs.parse(f"text:sorting?{options}")
    task = envs.make(name, **overrides).with_tokenizer(tokenizer)
    right = "<s>[system]Be brief.</s>[user]" + task.problem.instruction + "\n3,1=</s>[assistant]<think>"
    found = task.prompts_of(["3,1="])
    assert np.asarray(found.tokens)[0][np.asarray(found.mask)[0]].tolist() == library.encode(right).ids
    again = envs.make("text:sorting", **dict(task.overrides)).with_tokenizer(tokenizer)
    assert again == task and hash(again) == hash(task)
    talk = [{"role": "system", "content": "S"}, {"role": "user", "content": "3,1="}]
    ((ids, _),) = tokenizer.encode_rows([Row(tuple(talk))], system="Be brief.")
    assert ids == library.encode("<s>[system]S</s>[user]3,1=</s>[assistant]").ids
    named = {"instruction": "x", "messages": [], "system": "y", "bos_token": "!"}  # fdg sets the first 3
    ((ids, _),) = tokenizer.encode_rows([Row("3,1=")], "Sort.", arguments=named)
    assert ids == library.encode("![user]Sort.\n3,1=</s>[assistant]").ids
    with pytest.raises(
        FdgError, match="template_arguments='thinking' must be a mapping by name, or its JSON"
    ):
        envs.make("text:sorting", template_arguments="thinking")


def test_rows_with_tools_and_template_arguments(chat_checkpoint):
    library = tokenizers.Tokenizer.from_file(str(chat_checkpoint / "tokenizer.json"))
    show = "{{ tools | tojson }}" + CHAT
    (chat_checkpoint / "chat_template.jinja").write_text(show)
    rows = [{"type": "function", "function": {"name": "b", "a": 1}}, {"type": "other"}]
    cases = [
        ({"tools": rows}, json.dumps(rows), ""),
        (
            {"tools": json.dumps(rows), "chat_template_kwargs": {"enable_thinking": False}},
            json.dumps(rows),
            "<think>",
        ),
        ({"tools": None}, "null", ""),
    ]
    tokenizer = HuggingFaceTokenizer(str(chat_checkpoint))
    found = tokenizer.encode_rows([Row("1", None, columns) for columns, _, _ in cases])
    for (ids, _), (_, tools, end) in zip(found, cases, strict=True):
        assert ids == library.encode(f"{tools}<s>[user]1</s>[assistant]{end}").ids


def test_named_templates_and_special_tokens(chat_checkpoint):
    user = [{"role": "user", "content": "a<b", "name": None}]
    show = "{{ image_token }}{{ additional_special_tokens }}{{ sep_token is defined }}{{ messages | tojson }}"
    tokenizer = HuggingFaceTokenizer(str(chat_checkpoint))
    right = "<img>['<x>']False" + '[{"role": "user", "content": "a<b"}]'
    assert tokenizer.chat(user, chat_template=show) == right
    assert tokenizer.chat(user, False, eos_token="!") == "<s>[user]a<b!"
    several = [("default", "d"), ("tool_use", "{{ tools[0].name }}"), ("rag", "{{ documents[0].text }}")]
    several = [{"name": name, "template": text} for name, text in several]
    for files in (False, True):
        folder = chat_checkpoint / ("files" if files else "config")
        write_checkpoint(folder, KINDS["unigram"](), **({} if files else {"chat_template": several}))
        if files:
            (folder / "additional_chat_templates").mkdir()
            for one in several[1:]:
                (folder / "additional_chat_templates" / f"{one['name']}.jinja").write_text(one["template"])
            (folder / "chat_template.jinja").write_text("d")
        tokenizer = HuggingFaceTokenizer(str(folder))
        assert tokenizer.chat(user) == tokenizer.chat_template == "d"
        assert tokenizer.chat(user, tools=[{"name": "f"}]) == "f"
        assert tokenizer.chat(user, documents=[{"text": "t"}], chat_template="rag") == "t"
    bare = write_checkpoint(chat_checkpoint / "bare", KINDS["unigram"](), chat_template=several[1:])
    bare = HuggingFaceTokenizer(str(bare))
    no_default = "it has several chat templates and no default: give chat_template='tool_use' or 'rag'"
    for call, message in (
        (lambda: bare.chat(user), no_default),
        (lambda: bare.encode_rows([Row("1")]), no_default),
        (
            lambda: tokenizer.chat(user, tools={1}),
            r"tools is not JSON \(TypeError: Object of type set",
        ),
        (lambda: tokenizer.chat(["hello"]), "message 0 is 'hello': it must be a mapping"),
        (lambda: tokenizer.chat(user, chat_template=["d"]), "it must be the name of a template, or its text"),
        (lambda: envs.make("text:sorting", system=3), "system=3 must be a string"),
        (lambda: envs.make("text:sorting", table_size=1), "table_size=1 must be an integer from 64 to"),
    ):
        with refuses(match=message):
            call()


def test_a_folder_that_changes(chat_checkpoint):
    """A new object reads the folder's files again; an earlier one stays as it was."""
    user, before = [{"role": "user", "content": "a"}], HuggingFaceTokenizer(str(chat_checkpoint))
    assert HuggingFaceTokenizer(str(chat_checkpoint)) == before
    write_checkpoint(chat_checkpoint, KINDS["unigram"](), chat_template="{{ eos_token }}", eos_token="<pad>")
    after = HuggingFaceTokenizer(str(chat_checkpoint))
    assert before != after and before.vocab_size != after.vocab_size
    assert [each.chat(user) for each in (before, after)] == ["<s>[user]a</s>[assistant]", "<pad>"]
    assert [each.stops for each in (before, after)] == [(2,), (3,)]
    (chat_checkpoint / "chat_template.jinja").write_text("new")
    assert HuggingFaceTokenizer(str(chat_checkpoint)).chat(user) == "new" and after.chat(user) == "<pad>"


@pytest.mark.parametrize(
    "pad",
    [
        {"pad_token": "<pad>"},
        {"additional_special_tokens": ["<s>", {"content": "<pad>"}]},
        {"extra_special_tokens": ["<pad>"]},  # of Transformers 5
        {"added_tokens_decoder": {"3": {"content": "<pad>", "special": True, "rstrip": True}}},
    ],
)
def test_special_tokens_of_the_configuration(tmp_path, pad):
    """`</s>` and `<pad>` are ordinary words of the vocabulary, but special in the configuration."""
    found = json.loads(KINDS["bytes as GPT-2"]().to_str())
    found["added_tokens"] = []
    library = tokenizers.Tokenizer.from_str(json.dumps(found))
    assert len(library.encode("</s>").ids) > 1
    folder = write_checkpoint(tmp_path / "unmarked", library, **{"pad_token": None, **pad})
    tokenizer, blank = HuggingFaceTokenizer(str(folder)), library.encode(" ").ids
    after = [] if "added_tokens_decoder" in pad else blank  # `rstrip` takes the blank
    assert tokenizer.encode("a<pad> </s>") == [*library.encode("a").ids, 3, *after, tokenizer.eos]
    assert tokenizer.decode(tokenizer.encode("a<pad> </s>")) == "a" + " " * bool(after)


def test_special_tokens_keep_their_options(tmp_path):
    library = KINDS["pieces with prefix space"]()
    options = {"<s>": {"rstrip": True, "normalized": False}, "</s>": {"normalized": True}}
    library.add_special_tokens([tokenizers.AddedToken(word, **flags) for word, flags in options.items()])
    ours = HuggingFaceTokenizer(str(write_checkpoint(tmp_path, library)))
    for text in ("<s> a", "a <s>\n a", "</s> a", "a</s>"):
        assert ours.encode(text) == library.encode(text, add_special_tokens=False).ids
    assert ours.encode("<s> a")[0] == 1 and library.id_to_token(2) == "▁</s>"
    assert ours.decode([1, *ours.encode("a"), 2]) == "a"  # `</s>` too, which the normalizer lengthens


@pytest.mark.parametrize("added", [True, False, None])
def test_prefix_tokens_match_library(tmp_path, added):
    library = KINDS["bytes as GPT-2"]()
    around = tokenizers.processors.TemplateProcessing(
        single="<pad> $A </s>", special_tokens=[("<pad>", 3), ("</s>", 2)]
    )
    library.post_processor = around
    config = {} if added is None else {"add_bos_token": added}
    tokenizer = HuggingFaceTokenizer(str(write_checkpoint(tmp_path / "around", library, **config)))
    ((ids, answer),) = tokenizer.encode_rows([Row("1+1", "2")])
    expected = library.encode("1+1\n2", add_special_tokens=False).ids
    assert [*ids, *answer] == [library.token_to_id("<pad>"), *expected]


def test_prefix_tokens_of_a_vocabulary_without_small_letters(tmp_path):
    """As of models of DNA: a text of unknown characters alone has no tokens."""
    vocabulary = {word: i for i, word in enumerate(("<s>", "</s>", "<pad>", "A", "C", "G", "T", "AC"))}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("A", "C")]))
    library.decoder = tokenizers.decoders.Fuse()
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer = HuggingFaceTokenizer(str(write_checkpoint(tmp_path / "DNA", library)))
    assert tokenizer.encode_rows([Row("ACG", "T")]) == [([0, 7, 5], [6])]


def test_user_prompts_up_to_context_length(drawn):
    short = drawn.prompts_of(["1+1="], longest=512)
    assert short.tokens.shape == (1, drawn.prompt_length)
    long = drawn.prompts_of(["1+1=" * 30], longest=512)
    assert drawn.texts(*long)[0].endswith("1+1=" * 30 + "\n") and long.tokens.shape[1] % 64 == 0
    with pytest.raises(FdgError, match=r"prompt 0 '1\+1=.* allows 64"):
        drawn.prompts_of(["1+1=" * 30], longest=64)


@pytest.mark.parametrize("system", ["Be brief.", "A & B = 'C'?", '"&"', "Don't & won't", "a&b=c\n"])
def test_text_options_round_trip(system):
    given = {"system": system, "template_arguments": '{"x": [1, "&"]}', "length": 4}
    options = "&".join(f"{name}={value!r}" for name, value in given.items())
    assert envs.parse(f"text:sorting?{options}") == ("text:sorting", given)
    task = envs.make("text:sorting", **given)
    assert dict(task.overrides) == given
    assert task == envs.make("text:sorting", **{**given, "template_arguments": {"x": [1, "&"]}})
    assert task == envs.make("text:sorting", **{**given, "template_arguments": "{'x': (1, '&')}"})


def test_deeply_nested_messages_are_refused(chat_checkpoint):
    content = []
    for _ in range(2000):
        content = [content]
    tokenizer = HuggingFaceTokenizer(str(chat_checkpoint))
    for messages in ([{"role": "user", "content": content}], None):
        with pytest.raises(FdgError, match="message"):
            tokenizer.chat(messages)


def test_gap_between_token_ids_is_not_decoded(tmp_path):
    library = KINDS["bytes as GPT-2"]()
    found = json.loads(library.to_str())
    found["model"]["vocab"]["gap"] = 1_000_000
    folder = write_checkpoint(tmp_path / "gap", tokenizers.Tokenizer.from_str(json.dumps(found)))
    began = time.process_time()
    _, counts = HuggingFaceTokenizer(str(folder)).codes_of_tokens()
    assert counts[1_000_000] == 3 and not counts[999_999] and time.process_time() - began < 5


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        (
            "post_processor",
            {
                "type": "TemplateProcessing",
                "single": [
                    {"SpecialToken": {"id": "<s>", "type_id": 0}},
                    {"Sequence": {"id": "A", "type_id": 0}},
                ],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
                "special_tokens": {},
            },
            "adds '<s>', which its special_tokens lack",
        ),
        ("pre_tokenizer", {"type": "FixedLength", "length": 0}, "a FixedLength of 0"),
        (
            "decoder",
            {"type": "Strip", "content": "x", "start": 0, "stop": 2**40},
            "a Strip with stop=1099511",
        ),
        (
            "pre_tokenizer",
            {
                "type": "Split",
                "pattern": {"Regex": f"a{{{'9' * 5000}}}"},
                "behavior": "Isolated",
                "invert": False,
            },
            "repeats more than 1000 times",
        ),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_settings_that_make_the_library_panic_are_refused(tmp_path, capfd, part, value, message, nested):
    found = json.loads(KINDS["bytes as GPT-2"]().to_str())
    inside = {"post_processor": "processors", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}[part]
    found[part] = {"type": "Sequence", inside: [value]} if nested else value
    folder = tmp_path / "panics"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(found))
    with pytest.raises(FdgError, match=message):
        HuggingFaceTokenizer(str(folder)).encode("1+1")
    assert "panicked" not in capfd.readouterr().err
