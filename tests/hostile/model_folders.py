"""`python -m tests.hostile.model_folders --folders 600 --packages 400`: malformed checkpoints and packages.

Changes tiny valid ones (five kinds of decoders, four of tokenizers, safetensors in one file or several, GGUF;
exported policies) at random places, and passes them to every reader under the audit hook and limits of
`driver`: 10 seconds each, 1 GB plus twenty times the file's size. Exit status 1 if a reader raises anything
but FdgError. OUT/models.jsonl has one line per case, and an interrupted run resumes from it.
"""

import argparse
import contextlib
import copy
import functools
import importlib
import io
import json
import os
import random
import shutil
import socket
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import fdg
from algos.language import gguf, peft, weights
from envs.text import HuggingFaceTokenizer, Row, codec
from fdg.commands.cli import plan_main
from tests.hostile import driver
from tests.hostile.payloads import TEMPLATES
from tests.hostile.valid_models import FAMILIES, TOKENIZERS, valid_folder, valid_gguf, valid_package

with contextlib.suppress(ImportError):  # before the audit hook is active
    importlib.import_module("gguf.quants")

SECONDS = 10.0
# -- changes

_DEEP = object()
_VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 7, 2**31, 10**9, 10**18, 10**30, 0.0, -0.5, 1.5, 1e300, float("nan"),
    float("inf"), "", "x", "128", "\ud800", "../../x", "/dev/zero", "a\0b", "x" * 100_000, [], {}, [[]],
    [1, "a"], {"a": 1}, [0] * 1000, {"type": "Sequence"}, _DEEP,
]  # fmt: skip


def _nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def _dumped(value: Any) -> str:
    return json.dumps(value, default=lambda _: "<deep>").replace('"<deep>"', _nested(100_000))


def changed_json(draw: random.Random, content: bytes) -> tuple[bytes, str]:
    """JSON with a value replaced, removed or repeated, or content that is no longer JSON."""
    found = json.loads(content)
    places = sorted(driver.places(found), key=len)
    near = [place for place in places if len(place) < 3] or [()]
    at = draw.choice(near if draw.random() < 0.8 else places or [()])
    how = draw.choice(["set", "set", "set", "set", "remove", "twice", "cut", "flip", "bytes", "other"])
    if how in ("set", "remove") and at:
        inner = found
        for key in at[:-1]:
            inner = inner[key]
        value = draw.choice(_VALUES)
        if how == "set":
            inner[at[-1]] = copy.deepcopy(value) if value is not _DEEP else value
        else:
            del inner[at[-1]]
        return _dumped(found).encode("utf-8", "surrogatepass"), f"{how} {at} {value!r:.40}"
    match how:
        case "cut":
            return content[: draw.randrange(len(content))], how
        case "flip":
            return _flipped(draw, content)
        case "twice":
            return b'{"' + str(at[0] if at else "a").encode() + b'": 1,' + content.lstrip()[1:], how
        case "bytes":
            extra = draw.choice([b"\xef\xbb\xbf", b"\xff\xfe", b"\x00", b"\xc3", b"[1]"])
            return (extra + content if draw.random() < 0.5 else content + extra), f"{how} {extra!r}"
    return draw.choice([b"", b"[]", b"1", b"null", b"{}", _nested(100_000).encode()]), how


def _flipped(
    draw: random.Random, content: bytes, first: int = 0, last: int | None = None
) -> tuple[bytes, str]:
    flipped = bytearray(content)
    for _ in range(draw.choice([1, 1, 3, 20])):
        at = draw.randrange(first, max(first + 1, min(last or len(content), len(content))))
        flipped[at] ^= 1 << draw.randrange(8)
    return bytes(flipped), "flip"


def changed_bytes(draw: random.Random, content: bytes, header: int) -> tuple[bytes, str]:
    """A binary file that is truncated, extended, or has changed bytes, mostly in its header."""
    how = draw.choice(["cut", "longer", "flip", "flip", "number", "number"])
    match how:
        case "cut":
            return content[: draw.randrange(len(content))], how
        case "longer":
            return content + bytes(draw.choice([1, 8, 10_000])), how
        case "flip":
            return _flipped(draw, content, last=draw.choice([header, None]))
    at = draw.randrange(0, max(1, header - 8))
    number = draw.choice([0, 1, 2**16, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1])
    return content[:at] + struct.pack("<Q", number) + content[at + 8 :], f"{number} at {at}"


def changed_safetensors(draw: random.Random, content: bytes) -> tuple[bytes, str]:
    """A file with an inconsistent header, numbers that are not finite, or changed bytes."""
    length = int.from_bytes(content[:8], "little")
    how = draw.choice(["bytes", "header", "json", "nan"])
    if how == "bytes":
        return changed_bytes(draw, content, 8 + length)
    if how == "nan":
        at = 8 + length + 4 * draw.randrange((len(content) - 8 - length) // 4)
        value = draw.choice([b"\x00\x00\xc0\x7f", b"\x00\x00\x80\xff"])
        return content[:at] + value + content[at + 4 :], how
    header = json.loads(content[8 : 8 + length])
    if how == "json":
        new, note = changed_json(draw, content[8 : 8 + length])
    else:
        names = [name for name in header if name != "__metadata__"]
        entry, other = header[draw.choice(names)], header[draw.choice(names)]
        field = draw.choice(["dtype", "shape", "data_offsets", "data_offsets", "twice"])
        note = field
        match field:
            case "dtype":
                entry[field] = draw.choice(["F16", "I64", "F8_E4M3", "F99", "", 3])
            case "shape":
                entry[field] = draw.choice([[-1], [2**62, 2**62], [0], [], [1] * 100, [1.5], "4"])
            case "data_offsets":
                entry[field] = draw.choice([other[field], [0, 2**62], [5, 1], [-4, 4], [0], None])
            case "twice":
                header["again"] = dict(entry)
        new = json.dumps(header).encode()
    return struct.pack("<Q", len(new)) + new + content[8 + length :], f"{how} {note}"


def misplace(draw: random.Random, path: Path) -> str:
    """Replaces a file by a link, an empty file, or something that is not a regular file, or removes it."""
    kind = draw.choice(["fifo", "directory", "device", "dangling", "loop", "socket", "empty", "link", "gone"])
    kept = path.with_name("elsewhere")
    path.rename(kept)
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
        case "device":
            path.symlink_to(draw.choice(["/dev/zero", "/dev/tty", "/dev/random"]))
        case "dangling":
            path.symlink_to("nowhere")
        case "loop":
            path.symlink_to(path.name)
        case "socket":
            with socket.socket(socket.AF_UNIX) as one:
                here = os.getcwd()
                os.chdir(path.parent)  # a socket's path must be short
                one.bind(path.name)
                os.chdir(here)
        case "empty":
            path.touch()
        case "link":
            path.symlink_to(kept.name)
    return kind


def _unigram(size: int) -> dict[str, Any]:
    pieces = [[f"{random.Random(i).getrandbits(8000):x}", -1.0] for i in range(size // 2000)]
    return {"type": "Unigram", "unk_id": 0, "vocab": pieces}


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _added(i: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    return {"id": i, "content": "x" * 900 + str(i), "normalized": True, "special": True, **flags}


_LENGTH = {"direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
_SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
TOKENIZER_PARTS: list[tuple[str, Callable[[], Any]]] = [
    ("normalizer", lambda: {"type": "Sequence", "normalizers": [_replace({"String": "a"}, "b")] * 40_000}),
    ("normalizer", lambda: {"type": "Sequence", "normalizers": [_replace({"String": "a"}, "aa")] * 40}),
    ("normalizer", lambda: {"type": "Prepend", "prepend": "a" * 10_000_000}),
    ("normalizer", lambda: _replace({"Regex": "((a{999}){999}){999}"}, "")),
    ("normalizer", lambda: {"type": "Precompiled", "precompiled_charsmap": "AAQA" + "AB9x" * 400_000}),
    ("pre_tokenizer", lambda: {**_SPLIT, "pattern": {"Regex": "(" * 5000}}),
    ("decoder", lambda: {"type": "Sequence", "decoders": [_replace({"String": ""}, "x" * 60)] * 60}),
    ("padding", lambda: {"strategy": {"Fixed": 10**9}, **_LENGTH}),
    ("model", lambda: _unigram(6_000_000)),
    ("added_tokens", lambda: [_added(i) for i in range(9000)]),
]


def hostile_folder(draw: random.Random, folder: Path) -> list[str]:
    """Creates a folder with one to three faults; returns their descriptions."""
    family, kind = draw.choice(list(FAMILIES)), draw.choice(TOKENIZERS)
    sharded, dtype = draw.random() < 0.4, draw.choice(["float32", "bfloat16", "float16"])
    valid_folder(folder, family, kind, sharded, dtype, adapters=True)
    valid_gguf(folder / "model.gguf", draw.choice(["llama", "qwen2", "qwen3"]))
    done = [f"{family} {kind} {'shards' if sharded else 'one file'} {dtype}"]
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        path = draw.choice(sorted(one for one in folder.iterdir() if one.is_file()))
        if draw.random() < 0.15:
            done.append(f"{path.name}: {misplace(draw, path)}")
            continue
        content, note = path.read_bytes(), ""
        if not content:
            continue
        if path.suffix == ".gguf":
            content, note = changed_bytes(draw, content, 1500)
        elif path.suffix == ".safetensors":
            with contextlib.suppress(ValueError, LookupError):  # invalid after an earlier change
                content, note = changed_safetensors(draw, content)
        elif path.suffix == ".json":
            try:
                found = json.loads(content)
                assert isinstance(found, dict)
            except (ValueError, RecursionError, AssertionError):  # invalid after an earlier change
                continue
            special = draw.random() < 0.4
            if special and path.name == "tokenizer_config.json":
                found["chat_template"] = note = draw.choice(TEMPLATES)
            elif special and path.name == "tokenizer.json":
                note, made = draw.choice(TOKENIZER_PARTS)
                found[note] = made()
            elif special and path.name == "config.json":
                note = draw.choice(["num_hidden_layers", "vocab_size", "hidden_size", "num_attention_heads"])
                found[note] = draw.choice([10**9, 2**31 - 1, 0, -1, 10**12])
            elif special and path.name.endswith("index.json") and "weight_map" in found:
                note = draw.choice(["../../x", "/etc/passwd", "config.json", "model.gguf", "", "..", "a\0b"])
                found["weight_map"][draw.choice(list(found["weight_map"]))] = note
            if note:
                content = json.dumps(found).encode()
            else:
                content, note = changed_json(draw, content)
        path.write_bytes(content)
        done.append(f"{path.name}: {note}"[:200])
    return done


def _packed(members: dict[str, bytes], kind: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", kind) as package:
        for name, content in members.items():
            package.writestr(name, content)
    return file.getvalue()


def hostile_package(draw: random.Random, path: Path) -> list[str]:
    """Creates an exported policy with a fault; returns its description."""
    kind = draw.choice(["ppo", "memory"])
    content = valid_package(kind)
    with zipfile.ZipFile(io.BytesIO(content)) as package:
        members = {name: package.read(name) for name in package.namelist()}
    how = draw.choice(
        ["bytes", "bytes", "facts", "facts", "facts", "member", "memory", "zip", "zip", "file", "call"]
    )
    note = ""
    match how:
        case "bytes":
            content, note = changed_bytes(draw, content, len(content))
        case "facts":
            members["policy.json"], note = changed_json(draw, members["policy.json"])
            content = _packed(members)
        case "member":
            note = draw.choice(list(members))
            members[note] = changed_bytes(draw, members[note], len(members[note]))[0]
            content = _packed(members)
        case "memory":
            note = draw.choice(["shape", "pickle", "many", "empty", "huge"])
            file = io.BytesIO()
            arrays: Any = {
                "shape": [np.zeros((3, 4))], "pickle": [np.array([{}], object)], "many": [np.zeros(1)] * 500,
                "empty": [np.zeros((0, 4), np.float32)], "huge": [np.zeros(1)],
            }[note]  # fmt: skip
            np.savez(file, *arrays)
            members["memory.npz"] = (
                file.getvalue().replace(b"(1,)", b"(9" + b"9" * 12 + b",)")
                if note == "huge"
                else file.getvalue()
            )
            content = _packed(members)
        case "zip":
            note = draw.choice(
                ["bomb", "lying bomb", "encrypted", "lzma", "more", "less", "twice", "long name"]
            )
            content = _odd_zip(draw, members, note)
        case "call":
            members["policy.jax"] = _program_with_custom_call()
            content = _packed(members)
    path.write_bytes(content)
    if how == "file":
        note = misplace(draw, path)
    return [f"{kind} {how}: {note}"[:200]]


def _odd_zip(draw: random.Random, members: dict[str, bytes], how: str) -> bytes:
    name = draw.choice(list(members))
    if "bomb" in how:
        members[name] = bytes(300_000_000)
    content = _packed({**members, "more": b""} if how == "more" else members)
    match how:
        case "less":
            return _packed({key: value for key, value in members.items() if key != name})
        case "lzma":
            return _packed(members, draw.choice([zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2]))
        case "long name":
            return _packed({f"{key}{'x' * 30_000}": value for key, value in members.items()})
        case "twice":
            file = io.BytesIO(content)
            with zipfile.ZipFile(file, "a") as package:
                package.fp.seek(0, 2)
                package.NameToInfo.clear()
                package.writestr(name, b"{}")
            return file.getvalue()
    changed = bytearray(content)
    at = content.find(b"PK\x01\x02")
    while at >= 0 and how in ("encrypted", "lying bomb"):
        if how == "encrypted":
            changed[at + 8] |= 1
        else:  # claims to inflate to 1000 bytes
            changed[at + 24 : at + 28] = struct.pack("<I", 1000)
        at = content.find(b"PK\x01\x02", at + 1)
    return bytes(changed)


@functools.cache
def _program_with_custom_call() -> bytes:
    """A program that calls a function of the process by name."""
    name = "xla_ffi_python_cpu_callback"
    shape = jax.ShapeDtypeStruct((4,), np.float32)
    checks = [jax.export.DisabledSafetyCheck.custom_call(name)]
    return bytes(
        jax.export.export(jax.jit(jax.ffi.ffi_call(name, shape)), disabled_checks=checks)(shape).serialize()
    )


# -- readers


def readers(folder: Path, out: Path) -> dict[str, Callable[[], Any]]:
    """All functions that read a folder, by name."""

    def words() -> None:
        tokenizer = HuggingFaceTokenizer(str(folder))
        tokenizer.decode(tokenizer.encode("3 + 4 = seven"))
        tokenizer.codes_of_tokens(), codec.token_of_code(tokenizer)
        _ = tokenizer.pad, tokenizer.bos, tokenizer.eos, tokenizer.vocab_size
        tokenizer.encode_rows([Row("1+1=", "2")], "Answer.")
        tokenizer.chat([{"role": "user", "content": "hello"}] * 3)

    return {
        "check": lambda: weights.check(folder) and None,
        "load": lambda: weights.load(folder, lora_rank=2) and None,
        "adapters": lambda: peft.load(folder, weights.read_config(folder)) and None,
        "tokenizer": words,
        "gguf": lambda: gguf.convert(folder / "model.gguf", out / "converted"),
    }


def plan(folder: Path) -> int:
    """Runs `fdg plan`, which reads the complete folder."""
    words = f"--algo grpo --env text:addition --max-response 4 --devices 1 --model {folder}"
    return plan_main(words.split())


def load_and_act(path: Path) -> None:
    """Loads a package and, if that succeeds, acts with it."""
    policy = fdg.load_exported(path)
    shape = policy.facts["observation"]["shape"][1:]
    policy(np.zeros((2, *shape), policy.facts["observation"]["dtype"]))


def attempt(kind: str, number: int, seed: int, with_plan: bool = False) -> dict[str, Any]:
    """Passes one malformed folder or package to all its readers."""
    draw = random.Random(f"{seed} {kind} {number}")
    scratch = driver.scratch()
    try:
        at, out = scratch / "model", scratch / "out"
        out.mkdir()
        changes = hostile_folder(draw, at) if kind == "folders" else hostile_package(draw, at)
        calls = {"load_exported": lambda: load_and_act(at)} if kind == "packages" else readers(at, out)
        if with_plan and kind == "folders":
            calls["plan"] = lambda: plan(at)
        size = sum(
            one.stat().st_size for one in [at, *at.rglob("*")] if one.is_file() and not one.is_symlink()
        )
        tries = {}
        for name, call in calls.items():
            limit = 60.0 if name == "plan" else SECONDS
            writable = [out, jax.config.jax_compilation_cache_dir or out]
            found = driver.attempt(call, writable, seconds=limit, memory=driver.MEMORY + 20 * size)
            tries[name] = {**vars(found), "said": found.said[:300]}
        return {"kind": kind, "number": number, "changes": changes, "tries": tries}
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _warm(out: Path) -> Path:
    valid_folder(out / "valid", "llama", "BPE", False, "float32")
    return out / "valid"


def main() -> int:
    """Tries all cases in a worker process, restarts it after a crash, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folders", type=int, default=600)
    parser.add_argument("--packages", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plans", type=int, default=20, help="also pass each N-th folder to `fdg.plan`")
    parser.add_argument("--out", type=Path, default=Path("hostile-out"))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    results = given.out / "models.jsonl"
    wanted = [("folders", i) for i in range(given.folders)] + [("packages", i) for i in range(given.packages)]

    def rows() -> list[dict[str, Any]]:
        return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []

    def write(row: dict[str, Any]) -> None:
        with results.open("a") as file:
            file.write(json.dumps(row, default=str) + "\n")

    def left() -> list[tuple[str, int]]:
        there = {(row["kind"], row["number"]) for row in rows()}
        return [one for one in wanted if one not in there]

    if given.worker:
        weights.load(_warm(given.out), lora_rank=2)  # compiles
        for kind, number in left():
            write(attempt(kind, number, given.seed, number % given.plans == 0))
        return 0
    environment = {**os.environ, **environment_of(given.out)}
    while waiting := left():
        words = [sys.executable, "-m", "tests.hostile.model_folders", "--worker", *sys.argv[1:]]
        status = subprocess.run(words, env=environment).returncode
        if status and left():
            kind, number = left()[0]
            lost = {"faults": [f"lost: status {status}"], "seconds": 0.0, "grown": 0}
            write({"kind": kind, "number": number, "changes": [], "tries": {"process": lost}})
        assert len(left()) < len(waiting)
    return driver.report([row for row in rows() if (row["kind"], row["number"]) in set(wanted)])


def environment_of(out: Path) -> dict[str, str]:
    """Environment variables: the compilation cache, where writes are allowed, and Rust's backtraces."""
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(out.resolve() / "xla")
    return {"JAX_COMPILATION_CACHE_DIR": cache, "RUST_BACKTRACE": "0"}


if __name__ == "__main__":
    raise SystemExit(main())
