"""`fdg COMMAND`, or `python -m fdg COMMAND`."""

import io
import sys

from fdg.__main__ import main
from fdg.training.loading import StoredRun


def test_help_lists_commands(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in ("train", "plan", "launch", "evaluate", "play", "plot"))
    assert "trains an algorithm" in text
    assert main([]) == 2 and main(["--version"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("fdg ")


def test_commands_receive_their_arguments(capsys):
    assert main(["plan", "--env", "CartPole-v2"]) == 2
    assert "did you mean 'CartPole-v1'?" in capsys.readouterr().err
    assert main(["trian"]) == 2
    assert capsys.readouterr().err.startswith("error: unknown command 'trian': did you mean 'train'?")
    assert main(["sweep"]) == 2
    assert capsys.readouterr().err.startswith("error: unknown command 'sweep': write fdg train --sweep ")


class _Echo:
    """A run whose language model repeats its prompts."""

    def restore(self, checkpoint):
        return self

    def answer(self, prompts, **settings):
        return map(repr, prompts)


def test_prompts_of_standard_input_end_at_newlines(monkeypatch, capsys):
    prompts = ["1\u2028+1=", "a\fb\rc\x85d", "", "é"]
    monkeypatch.setattr(StoredRun, "open", lambda *args, **kwargs: _Echo())
    for end in ("", "\n", "\r\n"):
        content = ((end or "\n").join(prompts) + end).encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), "utf-8"))
        assert main(["answer", "RUN"]) == 0
        assert capsys.readouterr().out.splitlines() == [*map(repr, prompts)]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(), "utf-8"))
    assert main(["answer", "RUN"]) == 2 and "no prompt was given" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"1+\xff"), "utf-8"))
    assert main(["answer", "RUN"]) == 2
    assert "standard input is not utf-8: invalid start byte at byte 2" in capsys.readouterr().err
