"""Exported checkpoints: the tokenizer is part of them, and a directory without one is refused."""

import json
import types

import jax
import numpy as np
import pytest

import algos
import envs
import fdg
from algos.language import Decoder, DecoderConfig, peft, weights
from algos.rlhf.checkpoints import save
from envs.text import CharacterTokenizer, HuggingFaceTokenizer
from envs.text.tokenizer_folders import files_of, same_tokens, tokenizer_of
from fdg.errors import FdgError
from fdg.training.job import open_run
from tests.rlhf.small import SMALL, TASK, make

tokenizers = pytest.importorskip("tokenizers")
SPECIAL = ("<unk>", "<s>", "</s>", "<pad>")


def random_network(size, **options):
    sizes = {"hidden_size": 8, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 12}
    decoder = Decoder(DecoderConfig.tiny(size, **{**sizes, **options}))
    shapes = jax.eval_shape(decoder.init, jax.random.key(0))
    draw = np.random.default_rng(0)
    return decoder, jax.tree.map(lambda x: draw.normal(size=x.shape).astype(np.float32), shapes)


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of another tool: a BPE tokenizer, a chat template, two stop tokens."""
    pieces = [*SPECIAL, *map(chr, range(32, 127)), "th", "the"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=vocabulary, merges=[("t", "h"), ("th", "e")], unk_token="<unk>")
    )
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens([tokenizers.AddedToken(word, special=True) for word in SPECIAL])
    path = tmp_path / "checkpoint"
    weights.save(path, *random_network(len(pieces)))
    tokenizer.save(str(path / "tokenizer.json"))
    words = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": {"content": "<pad>"}}
    (path / "tokenizer_config.json").write_text(json.dumps(words))
    (path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>"}))
    (path / "chat_template.jinja").write_text("<s>{{ messages[0]['content'] }}</s>")
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3], "top_p": 0.9}))
    return path


def test_export_copies_the_tokenizer(folder, tmp_path):
    algorithm = make("sft", model=str(folder))
    state, out = jax.jit(algorithm.init)(jax.random.key(0)), tmp_path / "out"
    fdg.Run(algorithm, state, 0).export(out)
    for name in (
        "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja", "generation_config.json",
    ):  # fmt: skip
        assert (out / name).read_bytes() == (folder / name).read_bytes()
    config = json.loads((out / "config.json").read_text())
    assert (config["eos_token_id"], config["bos_token_id"], config["pad_token_id"]) == ([2, 3], 1, 3)
    assert config["architectures"] == ["LlamaForCausalLM"] and config["torch_dtype"] == "float32"
    again = make("sft", model=str(out))
    assert again.env.tokenizer == HuggingFaceTokenizer(str(out)) and again._stops == (2, 3)
    assert again.env.tokenizer.encode("the + 1") == algorithm.env.tokenizer.encode("the + 1")
    jax.tree.map(np.testing.assert_array_equal, weights.load(out)[1], weights.load(folder)[1])
    fdg.Run(again, state, 0).export(out)  # into its own directory
    assert make("sft", model=str(out)).env == again.env


def test_overwritten_checkpoint_is_read_again(folder):
    assert make("sft", model=str(folder)).network.config.num_layers == 1
    weights.save(folder, *random_network(101, num_layers=2))
    algorithm = make("sft", model=str(folder))
    assert algorithm.network.config.num_layers == 2
    assert len(jax.jit(algorithm.init)(jax.random.key(0)).parameters["layers"]) == 2


def test_export_removes_the_files_of_another_tokenizer(folder, tmp_path):
    """An earlier chat template would take precedence."""
    out, network = tmp_path / "out", random_network(101)
    for tokenizer in (HuggingFaceTokenizer(str(folder)), CharacterTokenizer("ab")):
        save(out, *network, tokenizer)
        (out / "notes.json").write_text("{}")
        found = {str(file.relative_to(out)) for file in out.rglob("*") if file.is_file()}
        assert found == {"config.json", "model.safetensors", "notes.json", *files_of(tokenizer)}
    assert tokenizer_of(out) == CharacterTokenizer("ab")


def test_older_files_that_cannot_be_removed_are_named(folder):
    (folder / "merges.txt").mkdir()  # unlink does not remove a directory
    with pytest.raises(FdgError, match=r"merges.txt: not removed by export \("):
        save(folder, *random_network(13), CharacterTokenizer("ab"))


def test_missing_tokenizer_files_are_written(folder):
    for name in ("tokenizer_config.json", "generation_config.json"):
        (folder / name).unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 2}))
    files = files_of(HuggingFaceTokenizer(str(folder)))
    written = json.loads(files["tokenizer_config.json"])
    assert (written["eos_token"], written["tokenizer_class"]) == ("</s>", "PreTrainedTokenizerFast")
    assert json.loads(files["generation_config.json"])["eos_token_id"] == 2


BROKEN = {
    "missing": (lambda path: (path / "tokenizer.json").unlink(), "has no tokenizer: copy tokenizer.json"),
    "SentencePiece": (
        lambda path: (path / "tokenizer.json").rename(path / "tokenizer.model"),
        "has tokenizer.model (SentencePiece), and no tokenizer.json: make one with Transformers",
    ),
    "BPE": (
        lambda path: (path / "tokenizer.json").rename(path / "vocab.json"), "has vocab.json (BPE), and no"
    ),
    "not JSON": (lambda path: (path / "tokenizer.json").write_text("{"), "is not JSON"),
    "empty": (lambda path: (path / "tokenizer.json").write_text("{}"), "it has no model"),
    "vocab": (lambda path: (path / "tokenizer.json").write_text('{"model": {"vocab": [[1]]}}'), "tokenizer"),
    "truncated": (
        lambda path: (path / "tokenizer.json").write_text((path / "tokenizer.json").read_text()[:400]),
        "is not JSON",
    ),
    "no eos": (
        lambda path: [
            (path / f"{name}.json").unlink()
            for name in ("tokenizer_config", "generation_config", "special_tokens_map")
        ],
        "has an eos token",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN)
def test_invalid_tokenizers_are_refused(folder, fault):
    damage, message = BROKEN[fault]
    damage(folder)
    for task in (envs.make(TASK), envs.text.Guess()):
        with pytest.raises(FdgError) as error:
            algos.GRPO(env=task, **SMALL, model=str(folder))
        text = str(error.value)
        assert message in text and "set tokenizer= (--tokenizer) to" in text and "\n" not in text, text


def test_tokenizer_argument(folder, tmp_path):
    other = folder.rename(tmp_path / "moved")
    save(folder, *random_network(103), HuggingFaceTokenizer(str(other)))
    (folder / "tokenizer.json").unlink()
    assert make("sft", model=str(folder), tokenizer=str(other)).env.tokenizer.path == str(other)
    assert make("sft", model=str(folder), tokenizer="characters").env == envs.make(TASK)
    given = envs.make(TASK).with_tokenizer(HuggingFaceTokenizer(str(other)))
    assert algos.SFT(env=given, **SMALL, model=str(folder)).env == given
    fresh = make("sft", tokenizer=str(other))
    assert fresh.network.config.vocab_size == fresh.env.tokenizer.vocab_size == 101
    with pytest.raises(FdgError, match=r"no such folder: give one with tokenizer\.json"):
        make("sft", model=str(folder), tokenizer=str(tmp_path / "none"))
    save(tmp_path / "small", *random_network(100), HuggingFaceTokenizer(str(other)))
    with pytest.raises(FdgError, match="a vocabulary of 101 tokens, and the network one of 100"):
        make("sft", model=str(tmp_path / "small"))


def test_games_refuse_another_tokenizer(folder):
    with pytest.raises(FdgError, match=r"game 'guess' has a tokenizer of its own, and .* another"):
        algos.GRPO(env=envs.text.Guess(), **SMALL, model=str(folder))
    algorithm = algos.GRPO(env=envs.text.Guess(), **SMALL, model=str(folder), tokenizer="characters")
    assert algorithm.network.config.vocab_size == 101


class Words:
    """A tokenizer without a method `files`."""


def test_user_tokenizers_write_their_files():
    with pytest.raises(FdgError, match=r"Words cannot be written .* give it a method files\(\)"):
        files_of(Words())
    Words.files = lambda self: {"tokenizer.json": b"{}"}
    assert files_of(Words()) == {"tokenizer.json": b"{}"}
    assert same_tokens(CharacterTokenizer(), CharacterTokenizer())


@pytest.mark.parametrize(
    "files",
    [{"mine.json": b"{}"}, *({"tokenizer.json": text} for text in (b"{}", b"[]", b"x", b'{"model": [1]}'))],
)
def test_user_tokenizers_without_a_vocabulary_of_the_library_have_other_tokens(files):
    assert not same_tokens(CharacterTokenizer(), types.SimpleNamespace(files=lambda: files))


def test_export_and_load_adapters(folder, tmp_path):
    algorithm = make("sft", model=str(folder), lora_rank=2)
    state = jax.jit(algorithm.init)(jax.random.key(0))
    changed = jax.tree.map(lambda x: x + 0.1, state.parameters["adapters"])
    state = state._replace(parameters={**state.parameters, "adapters": changed})
    run = fdg.Run(algorithm, state, 0)
    run.export(tmp_path / "adapters", format="peft")
    run.export(tmp_path / "whole")
    assert (tmp_path / "adapters" / "tokenizer.json").exists()
    again = make("sft", model=str(folder), adapters=str(tmp_path / "adapters"))
    assert again.network.config == algorithm.network.config
    read = jax.jit(again.init)(jax.random.key(5)).parameters
    jax.tree.map(np.testing.assert_array_equal, read, state.parameters)
    assert (
        algos.make("grpo", envs.make(TASK), model=str(folder), adapters=str(tmp_path / "adapters")).lora_rank
        == 0
    )
    with pytest.raises(FdgError, match=r"adapters=\S+: adapters belong to a checkpoint: give its folder too"):
        make("sft", adapters=str(tmp_path / "adapters"))
    with pytest.raises(FdgError, match=r"they have a rank of their own: leave lora_rank=4 out"):
        make("sft", model=str(folder), adapters=str(tmp_path / "adapters"), lora_rank=4)
    expected = "format='onnx': SFT is exported in its own format: give none, or 'peft'"
    with pytest.raises(FdgError, match=expected):
        run.export(tmp_path / "x", format="onnx")
    other = {**state.parameters, "base": jax.tree.map(lambda x: x + 1, state.parameters["base"])}
    with pytest.raises(FdgError, match="the base of the adapters is not the checkpoint in"):
        fdg.Run(algorithm, state._replace(parameters=other), 0).export(tmp_path / "x", format="peft")
    plain = make("sft", lora_rank=2)
    with pytest.raises(FdgError, match="this run has no LoRA adapters"):
        fdg.Run(plain, jax.jit(plain.init)(jax.random.key(0)), 0).export(tmp_path / "x", format="peft")
    merged = weights.load(tmp_path / "whole")[1]
    config, adapters = peft.load(tmp_path / "adapters", weights.read_config(folder))
    tokens, segments = np.arange(6)[None] % 101, np.ones((1, 6), np.int32)
    np.testing.assert_allclose(
        Decoder(config).apply({"base": weights.load(folder)[1], "adapters": adapters}, tokens, segments),
        algorithm.network.apply(merged, tokens, segments), rtol=1e-4, atol=1e-4,
    )  # fmt: skip


def test_character_tokenizer_saved_by_transformers(tmp_path):
    """`save_pretrained` (5.24) adds a post-processor, which is ignored only if it adds no tokens."""
    original = CharacterTokenizer("12+=é")
    for name, content in files_of(original).items():
        (tmp_path / name).write_bytes(content)
    file = tmp_path / "tokenizer.json"
    single = [{"Sequence": {"id": "A", "type_id": 0}}]
    for bos_items, is_recognised in (([], True), ([{"SpecialToken": {"id": "⟨bos⟩", "type_id": 0}}], False)):
        bos = {"⟨bos⟩": {"id": "⟨bos⟩", "ids": [1], "tokens": ["⟨bos⟩"]}} if bos_items else {}
        pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
        after = {"single": [*bos_items, *single], "pair": pair, "special_tokens": bos}
        stored = json.loads(file.read_text())
        file.write_text(json.dumps({**stored, "post_processor": {"type": "TemplateProcessing", **after}}))
        assert (tokenizer_of(tmp_path) == original) is is_recognised


def test_resume_with_another_tokenizer_is_refused(folder, tmp_path):
    """A tokenizer may be a user's too: without a path, and with a method called `digest`."""
    config = {"algo": "sft", "policy": "gpu_only", "policy_fields": {}, "hyperparameters": {}}
    template = folder / "chat_template.jinja"
    earlier = template.read_text()

    def from_folder(text):
        template.write_text(text)
        return make("sft", model=str(folder)).env.tokenizer

    def users(digest):
        return types.SimpleNamespace(digest=digest)

    def start(out, tokenizer, resumes):
        job = types.SimpleNamespace(
            algorithm=types.SimpleNamespace(env=types.SimpleNamespace(tokenizer=tokenizer)),
            out=tmp_path / out, resumes=resumes, config=config, record={}, num_iterations=1,
        )  # fmt: skip
        open_run(job)[0].close()

    changed = from_folder("{{ messages[0]['content'] }}</s>")
    for out, make_tokenizer, others in (
        ("folder", lambda: from_folder(earlier), [changed, users("one")]),
        ("text", lambda: users("one"), [users("another"), users(print)]),
        ("method", lambda: users(print), []),
    ):
        start(out, make_tokenizer(), resumes=False)
        start(out, make_tokenizer(), resumes=True)
        for other in others:
            where = getattr(other, "path", "the task")
            message = f"{where}: its tokenizer has changed since the run in .* began: bring back its files"
            with pytest.raises(FdgError, match=message):
                start(out, other, resumes=True)
