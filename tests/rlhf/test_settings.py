"""Settings: fields given by the user take precedence, others adapt; checkpoints have their own presets."""

import dataclasses
import json
import re
import shutil

import jax
import jax.numpy as jnp
import pytest

import algos
import envs
import policies
from algos import presets
from algos.language import Decoder, DecoderConfig
from algos.rlhf import requirements
from algos.rlhf.checkpoints import save
from envs.text import CharacterTokenizer
from envs.text.tokenizers import COMMON
from fdg.commands.cli import train_main
from fdg.commands.parse import parse as parse_command
from fdg.commands.preset_flags import preset_line
from fdg.errors import FdgError
from fdg.fragment import with_numbers
from fdg.settings.fields import NETWORK_FIELDS, structural
from fdg.training.fit import make_job
from fdg.training.sweep import Sweep, replace_fields
from tests.refusing import refuses
from tests.rlhf.small import make

ENV = envs.make("text:sorting")
LEARNERS = ("sft", "grpo", "dpo", "ppo_rlhf", "reward_model")


def parse(words):
    return parse_command(words.split(), "train", "").algorithm


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A directory with a small checkpoint, whose context is 40 tokens."""
    folder = tmp_path_factory.mktemp("checkpoint")
    config = DecoderConfig.tiny(
        56, hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=1, max_positions=40
    )
    decoder = Decoder(config)
    save(folder, decoder, jax.jit(decoder.init)(jax.random.key(0)), ENV.tokenizer)
    return folder


def sizes_divide(algorithm):
    """Whether micro-batches divide minibatches, and minibatches divide iterations."""
    count, groups, _ = algorithm.rows_of(vars(algorithm))
    number = algorithm.num_minibatches
    size, part = count // number, algorithm.rows_per_micro_batch or count // number
    return count % number == 0 and requirements.divides(count, groups, number) and size % part == 0


FIELDS = [
    {"group_size": 5},
    {"group_size": 7, "num_prompts": 3},
    {"num_prompts": 50},
    {"num_prompts": 7},
    {"num_minibatches": 3},
    {"num_minibatches": 5, "micro_batch": 4},
    {"micro_batch": 5},
    {"micro_batch": 1000},
    {"dataset_size": 50},
    {"dataset_size": 1},
    {"remove_padding": True, "micro_batch": 5},
    {"variant": "dapo", "dataset_size": 30},
    {"hidden_size": 50},
    {"num_heads": 3},
    {"num_kv_heads": 3},
]


@pytest.mark.parametrize("named", FIELDS, ids=lambda named: " ".join(f"{k}={v}" for k, v in named.items()))
def test_other_sizes_follow_given_fields(named):
    """For every algorithm with these fields: in Python with a preset, by flags, and without a preset."""
    for name in LEARNERS:
        cls = algos.get(name)
        if not named.keys() <= {field.name for field in dataclasses.fields(cls)}:
            continue
        with_preset = algos.make(name, ENV, **named)
        flags = " ".join(f"--{key} {value}" for key, value in named.items())
        assert with_preset == parse(f"--algo {name} --env text:sorting {flags}")
        for algorithm in (with_preset, cls(env=ENV, **named)):
            assert sizes_divide(algorithm), name
            assert {key: getattr(algorithm, key) for key in named} == named
            assert algorithm.network.config.num_parameters > 0
            assert not {*vars(algorithm)} - {field.name for field in dataclasses.fields(cls)}
        assert dataclasses.replace(with_preset) == with_preset


def test_few_fields_change():
    grpo = algos.make("grpo", ENV)
    assert dataclasses.replace(grpo, group_size=5, micro_batch=20) == algos.make("grpo", ENV, group_size=5)
    assert algos.make("grpo", ENV, num_prompts=32) == dataclasses.replace(grpo, num_prompts=32)


def test_derived_fields_are_reported(tmp_path):
    """In the line about the preset; a run from its `config.json` does not repeat them."""
    job = parse_command("--algo grpo --env text:sorting --num-minibatches 3".split(), "train", "")
    assert job.record["follows"] == {"num_prompts": 63, "micro_batch": 28}
    line = preset_line("text:*", {}, "grpo", "text:sorting", job.record["follows"])
    assert line.endswith("; num_prompts=63 follows from the flags; micro_batch=28 follows from the flags")
    assert "follows" not in parse_command("--algo grpo --env text:sorting".split(), "train", "").record
    (tmp_path / "config.json").write_text(json.dumps({**job.config, **job.record}))
    loaded = parse_command(["--config", str(tmp_path)], "train", "")
    assert loaded.algorithm == job.algorithm and "follows" not in loaded.record


@pytest.mark.parametrize(
    ("name", "named", "message"),
    [
        ("grpo", {"num_minibatches": 3, "num_prompts": 64}, "num_minibatches=3 does not divide the 512 resp"),
        ("sft", {"micro_batch": 5, "num_prompts": 16}, "micro_batch=5 does not divide the 16 responses of a"),
        (
            "dpo",
            {"micro_batch": 5, "num_prompts": 16},
            "micro_batch=5 does not divide the 16 pairs of a mini",
        ),
        ("grpo", {"dataset_size": 8, "num_prompts": 16}, "dataset_size=8 is less than the num_prompts=16"),
        ("grpo", {"micro_batch": 0}, "micro_batch=0: it must be above zero"),
        ("ppo_rlhf", {"num_prompts": 2.5}, "num_prompts=2.5: it must be an integer"),
    ],
)
def test_incompatible_fields_are_refused(name, named, message):
    with refuses(match=message):
        algos.make(name, ENV, **named)


def test_micro_batch_larger_than_a_minibatch():
    """12 responses in three minibatches, micro_batch=8: the reference is evaluated for four at a time."""
    sizes = {"num_prompts": 3, "group_size": 4, "num_minibatches": 3, "micro_batch": 8}
    small = {"hidden_size": 8, "num_layers": 1, "num_heads": 2}
    algorithm = algos.GRPO(env=ENV, **sizes, **small, kl_coefficient=0.1)
    assert algorithm.rows_per_micro_batch == 4
    state = jax.eval_shape(algorithm.init, jax.random.key(0))
    assert jax.tree.structure(jax.eval_shape(algorithm.iterate, state)[0]) == jax.tree.structure(state)


def test_replaced_fields_adapt_the_micro_batch():
    grpo = algos.make("grpo", ENV)
    changed = replace_fields(grpo, {"group_size": 5})
    job, _ = make_job(grpo, policies.GPUOnly(), total_steps=grpo.steps_per_iteration)
    job = job.changed(changed)
    fields = job.described["hyperparameters"]
    assert changed.micro_batch == fields["micro_batch"] == 20 and fields["group_size"] == 5
    swept = Sweep(grpo, (("learning_rate", (1e-3, 1e-4)),)).changed(group_size=5)
    assert swept.algorithm == changed
    with pytest.raises(FdgError, match="num_minibatches=3 does not divide"):
        replace_fields(grpo, {"num_minibatches": 3})


def test_variant_and_correction_override_the_preset():
    assert algos.make("grpo", ENV).objective.kl_coefficient == 0
    rloo = parse("--algo grpo --env text:sorting --variant rloo")
    assert rloo == algos.make("grpo", ENV, variant="rloo") and rloo.objective.kl_coefficient == 0.05
    assert algos.make("grpo", ENV, variant="rloo", kl_coefficient=0.2).objective.kl_coefficient == 0.2
    assert algos.make("grpo", ENV, correction="truncate_token").old_log_prob == "learner"
    assert algos.make("grpo", ENV, variant="grpo") == algos.make("grpo", ENV)


@pytest.mark.parametrize("name", LEARNERS)
def test_presets_of_checkpoints(name, checkpoint, capsys):
    words = ["--algo", name, "--env", "text:sorting", "--model", str(checkpoint)]
    for adapters, key in (([], "checkpoint"), (["--lora-rank", "4"], "checkpoint-lora")):
        rank = {"lora_rank": 4} if adapters else {}
        found = algos.make(name, ENV, model=str(checkpoint), **rank)
        values = presets.named(algos.get(name).__name__, key).values
        assert {field: getattr(found, field) for field in values if field != "micro_batch"} == {
            field: value for field, value in values.items() if field != "micro_batch"
        }
        assert sizes_divide(found) and found.learning_rate <= (2e-4 if adapters else 2e-5)
        assert parse(" ".join([*words, *adapters])) == found
        assert train_main([*words, *adapters, "--show-preset"]) == 0
        text = capsys.readouterr().out
        assert text.startswith(f"preset {key} of {name} for text:sorting\nfrom ") and "learning_rate" in text
    own = parse(" ".join([*words, "--learning-rate", "0.5"]))
    assert own.learning_rate == 0.5 and own.remat
    small = parse(" ".join([*words, "--preset", "text:*"]))
    assert small.learning_rate == algos.make(name, ENV).learning_rate and small.model == str(checkpoint)


class FakeTokenizer(CharacterTokenizer):
    """Replaces the tokenizer of a checkpoint."""

    def __init__(self, folder):
        object.__setattr__(self, "alphabet", COMMON[::-1])


def test_responses_fit_the_context_of_a_checkpoint(checkpoint, tmp_path, monkeypatch):
    """The default of 64 tokens is reduced to 40 minus the prompt."""
    checkpoint = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    monkeypatch.setattr("algos.rlhf.checkpoints.tokenizer_of", FakeTokenizer)
    algorithm = algos.SFT(env=ENV, model=str(checkpoint))
    assert algorithm.env.prompt_length + algorithm.env.response_length == 40
    most = algorithm.env.response_length
    with pytest.raises(FdgError, match=rf"responses of 50, .* is 40: use max_response={most}"):
        algos.SFT(env=ENV, model=str(checkpoint), max_response=50)
    given = envs.make("text:sorting", max_response=9)
    assert algos.SFT(env=given, model=str(checkpoint)).env.response_length == 9


NETWORKS = [
    ("sft", {"hidden_size": 24, "num_layers": 3}),
    ("sft", {"num_heads": 6, "num_kv_heads": 3, "hidden_size": 36}),
    ("dpo", {"intermediate_size": 40, "lora_rank": 2, "lora_alpha": 5.0}),
    ("ppo_rlhf", {"model": "CHECKPOINT"}),
    ("grpo", {"model": "CHECKPOINT", "lora_rank": 3}),
    ("sft", {"model": "CHECKPOINT", "tokenizer": "CHECKPOINT"}),
]


@pytest.mark.parametrize("seed", range(len(NETWORKS)))
def test_from_run_keeps_the_network(seed, checkpoint, tmp_path):
    """Also from a run of another algorithm, except for given fields; a checkpoint's preset applies."""
    first, fields = NETWORKS[seed]
    fields = {k: str(checkpoint) if v == "CHECKPOINT" else v for k, v in fields.items()}
    flags = " ".join(f"--{key} {value}" for key, value in fields.items())
    job = parse_command(f"--algo {first} --env text:sorting {flags}".split(), "train", "")
    (tmp_path / "config.json").write_text(json.dumps({**job.config, **job.record}))
    second = LEARNERS[(LEARNERS.index(first) + 1 + seed) % len(LEARNERS)]
    found = parse(f"--algo {second} --from {tmp_path}")
    assert found.network == job.algorithm.network and found.env.tokenizer == job.algorithm.env.tokenizer
    assert {key: getattr(found, key) for key in fields} == fields
    if "model" in fields:
        name = "checkpoint-lora" if "lora_rank" in fields else "checkpoint"
        rate = presets.named(type(found).__name__, name).values["learning_rate"]
        assert found.learning_rate == rate
    assert parse(f"--algo {second} --from {tmp_path} --micro-batch 1").network == found.network
    if "model" not in fields:
        assert parse(f"--algo {second} --from {tmp_path} --num-layers 1").num_layers == 1


@pytest.mark.parametrize("name", ["ppo", "qr_dqn", "c51", "sac", "grpo"])
def test_only_network_fields_change_shapes(name):
    """Changing any other field leaves the shapes of the learned arrays unchanged."""
    cls = algos.get(name)
    env = ENV if name == "grpo" else envs.make("Pendulum-v1" if name == "sac" else "CartPole-v1")
    algorithm = cls(env=env, **({"num_envs": 8} if name != "grpo" else {"num_prompts": 4, "group_size": 2}))

    def shapes(changed):
        state = jax.eval_shape(changed.init, jax.random.key(0))
        named = [(jax.tree_util.keystr(path), x) for path, x in jax.tree_util.tree_leaves_with_path(state)]
        others = ("env", "optimizer", "observation", "buffer", "replay", "running")
        return {name: leaf.shape for name, leaf in named if not any(other in name for other in others)}

    usual, changes = shapes(algorithm), {str: "x", int: 3, float: 0.3, bool: True}
    for field in dataclasses.fields(cls):
        kind = field.type if isinstance(field.type, type) else type(field.default)
        if field.name in NETWORK_FIELDS or kind not in changes:
            continue
        value = not field.default if kind is bool else changes[kind]
        try:
            other = dataclasses.replace(algorithm, **{field.name: value})
        except FdgError:
            continue
        found = shapes(other)
        changed_ones = [one for one in found.keys() & usual.keys() if found[one] != usual[one]]
        assert not changed_ones, (field.name, changed_ones)


@pytest.mark.parametrize("name", ["sft", "reward_model"])
def test_floats_of_a_sweep_are_traced_in_training_and_in_examples(name):
    algorithm = make(name, lora_rank=2)
    fixed = structural(type(algorithm))
    floats = [
        field.name for field in dataclasses.fields(algorithm) if re.search(r"\bfloat\b", str(field.type))
    ]
    assert {"temperature", "top_p", "lora_alpha"} <= set(floats) & set(fixed)
    numbers = {field: jnp.float32(getattr(algorithm, field)) for field in floats if field not in fixed}

    def train_and_sample(numbers):
        traced = with_numbers(algorithm, numbers)
        state, _ = traced.iterate(traced.init(jax.random.key(0)))
        return traced.examples(state, jax.random.key(1), 2)

    assert jax.eval_shape(train_and_sample, numbers)["reward"].shape == (2,)


@pytest.mark.parametrize("name", ["lora_alpha", "temperature", "top_p"])
def test_floats_that_change_the_program_are_not_swept(name):
    with refuses(match=f"sweep: {name} of SFT decides .*: try its values in separate programs: fdg.search"):
        Sweep(make("sft", lora_rank=2), ((name, (0.5, 1.0)),))
