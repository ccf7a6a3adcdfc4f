"""Commands of installed packages. A package here is a module with the metadata that installers write."""

import importlib
import sys

import pytest

from fdg.__main__ import main

_MODULE = """
import pathlib
pathlib.Path(__file__).with_suffix(".imported").touch()
def main(words):
    print("greeted", *words)
    return 4
def silent(words): pass
def wrong(words): return "fine"
def leaves(words): raise SystemExit("no such greeting")
def refuses(words):
    from fdg.errors import FdgError
    raise FdgError("greeting 'x': say hello")
nothing = 3
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a package whose commands are given as NAME = "MODULE:FUNCTION"."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])

    def add(package, source=_MODULE, **commands):
        (tmp_path / f"{package}.py").write_text(source)
        folder = tmp_path / f"{package}-1.5.dist-info"
        folder.mkdir()
        lines = [f"{name} = {value}" for name, value in commands.items()]
        (folder / "entry_points.txt").write_text("\n".join(["[fdg.commands]", *lines]) + "\n")
        about = f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.5\nSummary: Greets from {package}.\n"
        (folder / "METADATA").write_text(about)
        importlib.invalidate_caches()
        return tmp_path / f"{package}.imported"

    yield add
    for name in ("greeter", "other"):
        sys.modules.pop(name, None)


def test_package_command_is_imported_lazily(install, capsys):
    imported = install("greeter", greet="greeter:main", hush="greeter:silent")
    assert main(["--help"]) == 0
    assert "  greet      of greeter 1.5: Greets from greeter.\n" in capsys.readouterr().out
    assert main(["gret"]) == 2
    assert "did you mean 'greet'?" in capsys.readouterr().err
    assert main(["--version"]) == 0 and main(["plan", "--env", "CartPole-v2"]) == 2
    assert not imported.exists()
    capsys.readouterr()
    assert main(["greet", "--loud", "2"]) == 4
    assert capsys.readouterr().out == "greeted --loud 2\n"
    assert imported.exists() and main(["hush"]) == 0


def test_package_command_may_replace_a_hint(install, capsys):
    install("greeter", search="greeter:main")
    assert main(["search"]) == 4 and "greeted" in capsys.readouterr().out


def test_one_line_errors(install, capsys):
    commands = {
        "absent": "greeter:missing",
        "number": "greeter:nothing",
        "wrong": "greeter:wrong",
        "refuses": "greeter:refuses",
        "leaves": "greeter:leaves",
        "module": "greeter_of_yore:main",
        "train": "greeter:main",
        "twice": "greeter:main",
    }
    install("greeter", **commands)
    install("other", "import sys; sys.exit('bye')", twice="other:main", ends="other:main")
    err = {}
    for name in [*commands, "ends"]:
        if name != "train":
            assert main([name]) == (1 if name == "leaves" else 2)
            err[name] = capsys.readouterr().err
    assert all(text.count("\n") == 1 for text in err.values())
    start = "error: command '{}' of greeter 1.5: importing {} fails ("
    assert err["absent"].startswith(start.format("absent", "greeter:missing") + "AttributeError: ")
    assert err["module"].startswith(start.format("module", "greeter_of_yore:main") + "ModuleNotFoundError")
    assert "greeter:nothing is int, not a function" in err["number"]
    assert "it returned 'fine': a command returns its exit status" in err["wrong"]
    assert err["refuses"] == "error: greeting 'x': say hello\n" and err["leaves"] == "no such greeting\n"
    assert "by greeter 1.5 and other 1.5: uninstall all of them but one" in err["twice"]
    assert "importing other:main fails (SystemExit: bye): install what it needs" in err["ends"]
    main(["--help"])
    text = capsys.readouterr().out
    assert "train      of greeter 1.5: not used, since fdg has a command of this name" in text
    assert "twice      of greeter 1.5 and other 1.5: not used, since they have the same name" in text
    assert main(["train", "--env", "CartPole-v2"]) == 2
    assert "unknown environment" in capsys.readouterr().err
