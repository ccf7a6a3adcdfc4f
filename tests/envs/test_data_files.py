"""Data files with TRL's columns in JSON lines, JSON and CSV: random rows, and errors."""

import csv
import dataclasses
import json
import math
import random
from typing import ClassVar

import jax
import jax.numpy as jnp
import pytest

import envs
import fdg
from envs.text import columns, files
from envs.text.characters import to_string
from tests.refusing import refuses

WORDS = [
    "1+1=",
    " 2 ",
    "naïve",
    "日本語",
    "a\u2028b",
    "x\x85y",
    "🙂 ok",
    'say "hi", then\nleave',
    "\\u",
    "٣",
    "Ω\t",
]
PROMPTS, ANSWERS = ("prompt", "problem", "question"), ("completion", "answer", "solution", "response")
USER = [{"role": "user", "content": "1+1=?"}]
REPLY = [{"role": "assistant", "content": "2"}]
OTHER_REPLY = [{"role": "assistant", "content": "3"}]


def text(rng):
    return "".join(rng.choices(WORDS, k=rng.randint(1, 3)))


def write_jsonl(path, rows, rng):
    lines = [json.dumps(row, ensure_ascii=rng.random() < 0.5) for row in rows]
    blank = [line + "\n" * rng.randint(1, 3) + rng.choice(["", "  \n"]) for line in lines]
    path.write_bytes(rng.choice([b"", b"\xef\xbb\xbf"]) + "".join(blank).encode())


def write_json(path, rows, rng):
    path.write_text(json.dumps(rows, indent=rng.choice([None, 2]), ensure_ascii=False), encoding="utf-8")


def write_csv(path, rows, rng):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


@pytest.mark.parametrize("seed", range(12))
def test_random_rows_round_trip(seed, tmp_path):
    """Names and orders of columns, non-ASCII text, blank lines, duplicate rows, missing answers."""
    rng = random.Random(seed)
    write, ending = rng.choice([(write_jsonl, "jsonl"), (write_json, "json"), (write_csv, "csv")])
    prompt, answer = rng.choice(PROMPTS), rng.choice(ANSWERS)
    others = [f"{text(rng)}{i}" for i in range(rng.randint(0, 3))]
    rows = []
    for _ in range(rng.randint(2, 9)):
        row = {prompt: text(rng), answer: text(rng), **{name: text(rng) for name in others}}
        if write is not write_csv:
            row = dict(rng.sample(list(row.items()), len(row)))
            if rng.random() < 0.2:
                row.pop(answer)
        rows += [row] * rng.choice([1, 1, 2])
    path = tmp_path / f"a b.{ending}"
    write(path, rows, rng)
    found = [columns.row(one) for one in files.read(str(path))]
    assert [(row.prompt, row.answer) for row in found] == [(row[prompt], row.get(answer)) for row in rows]
    assert [dict(row.columns) for row in found] == rows


def test_long_texts_in_csv(tmp_path):
    """By default, the csv module refuses fields of more than 131,072 characters."""
    path, limit = tmp_path / "a.csv", csv.field_size_limit()
    rows = [{"prompt": "1+1=" * 40_000, "answer": "2"}]
    write_csv(path, rows, None)
    assert [record.columns for record in files.read(str(path))] == rows
    assert csv.field_size_limit() == limit


def test_one_long_answer_does_not_lengthen_all(tmp_path):
    """The memory for answers is that of the file, not the longest answer for each row."""
    path, answers = tmp_path / "a.jsonl", ["1", "é" * 50_000, "", *map(str, range(300))]
    write_jsonl(
        path, [{"prompt": f"{i}=", "answer": answer} for i, answer in enumerate(answers)], random.Random(0)
    )
    problem = envs.make("text:file", path=str(path)).problem
    constants = jax.make_jaxpr(problem.solution)(jnp.array([0])).consts
    assert sum(array.nbytes for array in constants) < 2 * path.stat().st_size
    assert [to_string(problem.solution(jnp.array([i]))) for i in range(4)] == answers[:4]


def test_splits_are_disjoint_and_not_empty(tmp_path):
    for seed in range(5):
        rng = random.Random(seed)
        path = tmp_path / f"{seed}.jsonl"
        rows = [{"prompt": f"{rng.randint(0, 9 + seed)}", "answer": "1"} for _ in range(12)]
        write_jsonl(path, [*rows, {"prompt": "a", "answer": "1"}], rng)
        problem = envs.make("text:file", path=str(path)).problem
        by_split = [{row.text for row, out in zip(problem.rows, problem.held_out, strict=True) if out == test}
                    for test in (False, True)]  # fmt: skip
        assert all(by_split) and not by_split[0] & by_split[1]


@pytest.mark.parametrize(
    ("row", "prompt", "answer"),
    [
        ({"prompt": "1+1=", "completion": "2"}, "1+1=", "2"),
        ({"prompt": USER, "completion": REPLY}, tuple(USER), "2"),
        ({"messages": [*USER, *REPLY]}, tuple(USER), "2"),
        ({"messages": [{"role": "system", "content": "Add."}, *USER]}, None, None),
        ({"prompt": "x", "answer": 2.5, "completion": None}, "x", None),
        ({"question": 7, "answer": True}, "7", "true"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "text", "text": x} for x in ("hi", None)]}]},
            ({"role": "user", "content": "hi"},),
            None,
        ),
    ],
)
def test_trl_columns(row, prompt, answer):
    found = columns.row(files.Record("x", row))
    assert found.answer == answer and (prompt is None or found.prompt == prompt)


def test_text_after_a_list_of_rows_is_refused(tmp_path):
    (tmp_path / "a.json").write_text('[{"prompt": "1", "answer": "2"}], "x": 1')
    with refuses("a.json: is not JSON: a comma follows the list of rows: end the file with its ]"):
        files.read(str(tmp_path / "a.json"))


PAIRS = [
    ({"prompt": "p", "chosen": "a", "rejected": "b"}, ("p", "a", "b")),
    ({"chosen": "Hi. Yes", "rejected": "Hi. No"}, ("Hi.", " Yes", " No")),
    ({"chosen": "abX", "rejected": "abY"}, ("ab", "X", "Y")),
    ({"prompt": USER, "chosen": REPLY, "rejected": OTHER_REPLY}, (tuple(USER), "2", "3")),
    ({"prompt": "1+1=?", "chosen": [*USER, *REPLY], "rejected": [*USER, *OTHER_REPLY]},
     (tuple(USER), "2", "3")),
]  # fmt: skip


@pytest.mark.parametrize(("row", "expected"), PAIRS)
def test_preference_pairs_match_trl(row, expected):
    """Results of `extract_prompt` and `maybe_extract_prompt` in TRL 1.16's `data_utils.py`, by hand."""
    chosen, rejected = columns.pair(files.Record("x", row))
    assert (chosen.prompt, chosen.answer, rejected.answer) == expected and rejected.prompt == chosen.prompt


GOOD = {"prompt": "1+1=", "answer": "2"}
CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add"}}]}
MISTAKES = [
    ("{", "line 3: is not JSON"),
    ("3", "line 3: does not contain a JSON object: write one in braces"),
    ('{"prompt": "a", "prompt": "b"}', "line 3: 'prompt' occurs twice"),
    ({"text": "x"}, "line 3: has no column 'prompt' (or problem, question, messages), only 'text'"),
    ({"prompt": None}, "line 3: 'prompt' is null"),
    ({"prompt": ""}, "line 3: 'prompt' is empty"),
    ({"prompt": {"a": 1}}, "line 3: 'prompt' is {\"a\": 1}"),
    ({"prompt": "x", "answer": ["a"]}, "line 3: message 1 of 'answer' is \"a\", without a role"),
    ({"prompt": [{"role": "user"}]}, "line 3: message 1 of 'prompt' has content null"),
    ({"prompt": "x", "completion": USER}, "line 3: 'completion' has messages of user"),
    ({"messages": REPLY}, "line 3: 'messages' has only an answer"),
    (
        {"messages": [*USER, {**CALL, "content": "x"}]},
        "line 3: the last of 'messages' calls tools (tool_calls)",
    ),
    (
        {"prompt": "x", "completion": [CALL]},
        "line 3: 'completion' calls tools (tool_calls), but only its content is",
    ),
    ({"prompt": "p", "chosen": "a", "rejected": "b"}, "line 3: has preferences ('chosen' and 'rejected')"),
    ({"prompt": "x", "answer": math.nan}, "line 3: 'answer' is nan: write it in quotes"),
    ({"prompt": "x", "answer": 10**29}, "line 3: 'answer' is 1e+29: write it in quotes"),
]


def test_columns_that_are_not_used_may_have_any_number(tmp_path):
    """`json.dumps` writes NaN for a missing score; identifiers may have more than 64 bits."""
    rows = [{**GOOD, "score": math.nan, "id": 2**100}, {"prompt": "1+2=", "answer": 3, "score": -math.inf}]
    for name, content in {"a.jsonl": "\n".join(map(json.dumps, rows)), "a.json": json.dumps(rows)}.items():
        (tmp_path / name).write_text(content)
        task = envs.make("text:file", path=str(tmp_path / name)).problem
        assert [(row.text, row.answer) for row in task.rows] == [("1+1=", "2"), ("1+2=", "3")]


def test_csv_of_spreadsheets(tmp_path):
    """They write empty lines, and separators for empty columns, which have no names."""
    (tmp_path / "a.csv").write_text("\nprompt,answer,,\n\n1+1=,2,,\n1+2=,3,,\n")
    rows = envs.make("text:file", path=str(tmp_path / "a.csv")).problem.rows
    assert [(row.prompt, row.answer) for row in rows] == [("1+1=", "2"), ("1+2=", "3")]


def test_blanks_after_the_separators_of_csv(tmp_path):
    """They are left out if the column names have them; otherwise, they belong to the fields."""
    for names, answer in {"prompt, answer": "2, or 3", "prompt,answer": " 2"}.items():
        field = '"2, or 3"' if answer == "2, or 3" else "2"
        (tmp_path / "a.csv").write_text(f"{names}\n1+1=, {field}\n1+2=, 3\n")
        task = envs.make("text:file", path=str(tmp_path / "a.csv")).problem
        assert task.rows[0].answer == answer


@pytest.mark.parametrize(("line", "message"), MISTAKES)
def test_errors_name_file_line_column_and_fix(line, message, tmp_path):
    path = tmp_path / "data.jsonl"
    bad = line if isinstance(line, str) else json.dumps(line)
    path.write_text(f"{json.dumps(GOOD)}\n\n{bad}\n")
    with pytest.raises(fdg.FdgError) as error:
        envs.make("text:file", path=str(path))
    text_of_error = str(error.value)
    assert f"task 'text:file': {path}, {message}" in text_of_error and "\n" not in text_of_error
    assert any(verb in text_of_error for verb in ("write", "rename", "put", "add", "remove", "use"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "prompt,answer\n1,2,3\n", "line 2: has 3 fields, and the first line names 2"),
        ("a.csv", 'prompt,answer\n"1,2\n', "is not CSV"),
        ("a.parquet", "PAR1", "Parquet is not read: convert it"),
        ("a.jsonl", "\n \n", "has no rows"),
        *((f"a.{ending}", f"prompt{mark}answer\n1{mark}2\n", f"separated by {mark!r}: use {right!r}")
          for ending, right in (("csv", ","), ("tsv", "\t")) for mark in ",;|\t" if mark != right),
        *((f"a.{ending}", content.encode(encoding), "save it as UTF-8")
          for ending, content in (("csv", "prompt,answer\n1+1=,\u00fc\n"), ("jsonl", '{"prompt": "\u00fc"}'),
                                  ("json", '[{"prompt": "\u00fc"}]'))
          for encoding in ("latin-1", "cp1252", "mac_roman", "utf-16", "utf-16-be", "utf-16-le", "utf-32")),
        ("a.json", "[1]", "row 1: is 1, not an object"),
        ("a.jsonl", json.dumps(GOOD), "too few to hold some out: give more of them, or a file"),
    ],
)  # fmt: skip
def test_invalid_files_are_refused(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with refuses(message):
        envs.make("text:file", path=str(tmp_path / name))


def test_task_depends_on_file_content(tmp_path, monkeypatch):
    """A relative and an absolute path give equal tasks; other content gives another task."""
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({**GOOD, "prompt": str(i)}) + "\n" for i in range(4)))
    monkeypatch.chdir(tmp_path)
    first = envs.make("text:file", path="data.jsonl")
    assert first == envs.make("text:file", path=str(path)) and first.problem.path == str(path)
    path.write_text(path.read_text() + json.dumps(GOOD) + "\n")
    second = envs.make("text:file", path="data.jsonl")
    assert second != first and len(second.problem.rows) == 5 and len(first.problem.rows) == 4
    assert (
        envs.absolute("text:file?path=data.jsonl&max_response=9") == f"text:file?path={path}&max_response=9"
    )


@dataclasses.dataclass(frozen=True)
class Reader:
    task: object
    traces: ClassVar[list] = []

    @fdg.fragment("actor", in_axes=(0,))
    def read(self, x):
        self.traces.append(self.task)
        return x


def test_equal_tasks_share_traces(tmp_path):
    """Also when other files have been read since, and the rows of the first are read again."""
    for i in range(20):
        rows = [GOOD, {**GOOD, "prompt": str(i)}]
        (tmp_path / f"{i}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for i in (*range(20), 0):
        Reader(envs.make("text:file", path=str(tmp_path / f"{i}.jsonl"))).read(jnp.zeros(1))
    assert len(Reader.traces) == 20


def test_rows_that_move_to_the_held_out_file(tmp_path):
    """The files' joined bytes are the same for every split."""
    rows = [json.dumps({**GOOD, "prompt": str(i)}) + "\n" for i in range(6)]
    paths = {name: str(tmp_path / f"{name}.jsonl") for name in ("path", "test_path")}

    def split(count):
        for path, part in zip(paths.values(), (rows[:count], rows[count:]), strict=True):
            with open(path, "w") as file:
                file.writelines(part)
        return envs.make("text:file", **paths)

    first, second = split(5), split(2)
    assert first != second
    assert [(task.num_rows, task.num_held_out) for task in (first, second)] == [(5, 1), (2, 4)]
