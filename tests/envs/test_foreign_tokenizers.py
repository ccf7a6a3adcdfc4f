"""Untrusted tokenizers and chat templates: expensive ones are refused within bounded time and memory."""

import json

import pytest

from fdg.errors import FdgError
from tests.hostile import driver, model_folders, payloads, valid_models
from tests.refusing import refuses

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from envs.text import HuggingFaceTokenizer, templates

CALL = {"name": "f", "arguments": {"a": 1, "b": [1, 2.5, None]}}
VALUES = {
    "messages": [
        {"role": "system", "content": "be nice"},
        {"role": "user", "content": "a<b & 'q'\nline"},
        {"role": "assistant", "content": "<think>no</think>x", "tool_calls": [CALL]},
    ],
    "tools": [{"type": "function", "function": CALL}],
    "bos_token": "<s>",
}
PLAIN = [
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m['content'] | trim }}{% endfor %}",
    # As Qwen3's: finds the last question, omits thoughts, prints tool calls as JSON.
    """{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}
    {%- set ns = namespace(last=messages | length - 1) %}{% for m in messages[::-1] %}
    {%- set i = (messages | length - 1) - loop.index0 %}
    {%- if m.role == 'user' and m.content is string and not m.content.startswith('<t') %}
    {%- set ns.last = i %}{% endif %}{% endfor %}{{ ns.last }}{% for m in messages %}
    {%- if '</think>' in m.content %}{{ m.content.split('</think>')[-1].lstrip('\n') ~ '|' }}{% endif %}
    {%- for call in m.tool_calls %}{{ call.name }}{{ call.arguments | tojson(indent=2) }}{% endfor %}
    {%- endfor %}""",
    """{% macro show(x, n=2) %}[{{ x.role | upper | center(12) }}:{{ n }}]{% endmacro %}
    {% for i in range(messages | length) %}{% set m = messages[i] %}{{ show(m, n=i * 2) }}
    {{ '%s-%02d' % (m.role, i) }}{{ '{:>4}|{}'.format(i, m.role) }}
    {{ m.content.replace('a', 'bb').split() | join(', ') }}
    {% for k, v in m.items() %}{{ k }}={{ v | string | indent(2) }}{% if not loop.last %}, {% endif %}
    {% endfor %}{% endfor %}""",
    """{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list }}
    {{ {'a': 1, 'b': (2, 3)} }}{% set x %}block {{ bos_token }}{% endset %}{{ x }}{{ dict(a=1).get('a') }}
    {{ 'x' in ['x', 'y'] }}{{ 7 // 2 ** 2 % 3 }}{{ [1, 2] + [3] }}{{ 'abc'[::-1] }}
    {{ [3, 1, 2] | sort | sum }}{{ '<b>' | e }}{{ 'a' * 3 }}{{ 3.7 | round | int }}""",
    """{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}
    {{ m | tojson(sort_keys=true) }}
    {%- if loop.index > 1 %}{% break %}{% endif %}{% endfor %}{{ "é<&'" | tojson(ensure_ascii=True) }}
    {{ messages | tojson(indent=1, separators=(',', ': ')) }}{{ tools | tojson(indent='\t') }}""",
    """{% for one in messages | groupby('role') %}{{ one.grouper }}{{ one.list | length }}{% endfor %}
    {{ messages[0].keys() }}{{ messages[0].copy() }}{{ [1].copy() }}{{ 'a'.isidentifier() }}
    {{ 7 .bit_length() }}{{ 2.5.is_integer() }}{{ '{0.real}'.format(3) }}{{ loop is defined }}""",
]


@pytest.mark.parametrize("source", PLAIN)
def test_templates_match_jinja_sandbox(source):
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    plain.filters["tojson"] = lambda value, **how: json.dumps(value, **{"ensure_ascii": False, **how})
    assert templates.Template(source).render(**VALUES) == plain.from_string(source).render(**VALUES) != ""


def test_many_tools_with_indents():
    """As Llama 3.1 lists tools."""
    parameter = {"type": "string", "description": "The city, for example Zurich.", "enum": ["a", "b"]}
    tool = {"name": "weather", "parameters": {"properties": {f"x{i}": parameter for i in range(6)}}}
    source = "{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}"
    text = templates.Template(source).render(tools=[{"type": "function", "function": tool}] * 150)
    assert text == json.dumps({"type": "function", "function": tool}, indent=4) * 150


@pytest.mark.parametrize("attribute", ["encode", "expandtabs", "translate", "maketrans", "denominator"])
def test_unsupported_attributes_are_refused(attribute):
    value = "3" if attribute == "denominator" else "'a'"
    with pytest.raises(SecurityError, match=attribute):
        templates.Template(f"{{% set x = {value} %}}{{{{ x.{attribute} }}}}").render()


GROWING = [
    *payloads.TEMPLATES[:9],
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
    "{% set ns.x = y %}{% endfor %}",
    "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{{ ('a' * 999999) | replace('', 'b' * 999999) }}",
    "{{ ('a' * 999999) | replace(new='b' * 999999, old='a') }}",
    "{{ ('a' * 99999).join(['b'] * 99999) }}",
    "{{ ('{0}' * 99999).format('b' * 99999) }}",
    "{{ ('%(a)s' * 99999) % {'a': 'b' * 99999} }}",
    "{{ ['%900000000d'] | format(1) }}",
    "{{ messages | tojson(indent=900000000) }}",
    "{{ ([[[1]]] * 9999) | tojson(indent='a' * 99999) }}",
    "{{ ([1] * 99999) | tojson(separators=('a' * 99999, ':')) }}",
    "{{ strftime_now('%900000000d') }}",
    "{{ strftime_now('%c' * 999999) }}",
    "{% for i in range(99999) %}{% generation %}{{ i }}{% continue %}{% endgeneration %}{% endfor %}",
    "{{ [1] | batch(900000000, 'x') | list }}",
    "{{ [1] | slice(900000000) | list }}",
    "{{ ('a' * 999999) | join('b' * 999999) }}",
    "{{ range(99999) | map('string') | map('center', 99999) | join }}",
    "{{ ([[1]] * 99999) | sum(start=[]) }}",
    "{{ 'a\t'.expandtabs(900000000) }}",
    "{{ (1).to_bytes(900000000, 'big') }}",
    "{{ 'a'.translate({97: 'b' * 999999}) }}{{ 1 | round(900000000, 'ceil') }}",
    "{% for i in range(99999) %}{{ messages | tojson }}{% endfor %}",
]  # fmt: skip


@pytest.mark.parametrize("source", GROWING)
def test_growing_templates_are_refused_early(source, monkeypatch):
    monkeypatch.setattr(templates, "_BUDGET", 200_000)  # a twentieth of the default, for speed

    def render():
        with pytest.raises(Exception, match=r"."):
            templates.Template(source).render(**VALUES)

    found = driver.attempt(render, seconds=10, memory=1 << 26)
    assert not found.faults


@pytest.fixture
def folder(tmp_path):
    valid_models.valid_folder(tmp_path / "model", "llama", "BPE", False, "float32")
    return tmp_path / "model"


def modified(folder, file, **changes):
    found = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**found, **changes}))
    return HuggingFaceTokenizer(str(folder))


@pytest.mark.parametrize("kind", valid_models.TOKENIZERS)
def test_tokenizer_kinds_load(tmp_path, kind):
    valid_models.valid_folder(tmp_path / "model", "llama", kind, False, "float32")
    tokenizer = HuggingFaceTokenizer(str(tmp_path / "model"))
    ids = tokenizer.encode("3")
    assert tokenizer.decode(ids) == "3" and tokenizer.stops == (2,) and tokenizer.bos == 1


REFUSED = {
    0: "the limit is 2000 values of 16384", 1: "can make a text 1099511627776 times longer",
    2: "2000 values of 16384",
    3: "repeats more than 1000 times", 4: "its precompiled_charsmap, of", 6: "its decoder can make a text",
    8: "bytes of pieces, of 2621440 at most", 9: "added tokens of 8",
}  # fmt: skip


@pytest.mark.parametrize("i", REFUSED)
def test_oversized_parts_of_a_tokenizer_are_refused(folder, i):
    name, made = model_folders.TOKENIZER_PARTS[i]
    with pytest.raises(FdgError, match=REFUSED[i]) as error:
        modified(folder, "tokenizer.json", **{name: made()})
    assert "tokenizer.json' is not read: " in str(error.value) and len(str(error.value)) < 500


def test_padding_and_truncation_are_ignored(folder):
    (name, made), cut = model_folders.TOKENIZER_PARTS[7], {"direction": "Right", "stride": 0}
    cut |= {"max_length": 2, "strategy": "LongestFirst"}
    assert len(modified(folder, "tokenizer.json", **{name: made(), "truncation": cut}).encode("12345")) == 5


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("config.json", {"eos_token_id": "2"}, "config.json: eos_token_id='2': it must be a token's number"),
        ("generation_config.json", {"eos_token_id": [2, -1]}, "eos_token_id=[2, -1]: it must be"),
        ("tokenizer_config.json", {"eos_token": 3}, "eos_token=3: it must be a token"),
        ("tokenizer_config.json", {"added_tokens_decoder": [3]}, "added_tokens_decoder=[3]: it must be an"),
        ("tokenizer_config.json", {"chat_template": {}}, "chat_template={}: it must be a string"),
    ],
)  # fmt: skip
def test_settings_of_wrong_type_name_file_and_field(folder, file, changes, message):
    with refuses(message):
        tokenizer = modified(folder, file, **changes)
        _ = tokenizer.stops, tokenizer.chat_template


def test_numbers_in_keys_that_end_in_token_are_no_tokens(folder):
    tokenizer = modified(folder, "tokenizer_config.json", num_image_token=256, image_token="<s>")
    assert "num_image_token" not in tokenizer.special_tokens
    assert tokenizer.special_tokens["image_token"] == "<s>"


def test_named_chat_templates_as_an_object(folder):
    by_name = {"default": "a", "tool_use": "b"}
    tokenizer = modified(folder, "tokenizer_config.json", chat_template=by_name)
    assert tokenizer.chat_templates == by_name


def test_token_ids_may_have_gaps(folder):
    """`vocab_size` is the largest token id plus one, because an embedding has a row for each id."""
    found = json.loads((folder / "tokenizer.json").read_text())
    found["model"]["vocab"]["gap"] = 300
    tokenizer = modified(folder, "tokenizer.json", model=found["model"])
    assert tokenizer.vocab_size == 301 and tokenizer.decode([300]) == "gap"
    codes, counts = tokenizer.codes_of_tokens()
    assert bytes(codes[300, : counts[300]]) == b"gap" and not counts[299]
