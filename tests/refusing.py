"""Commands that refuse what they are given."""


def refused(capsys, words, command):
    """Runs a command that has to fail, as a user's mistake, in one line: the line."""
    capsys.readouterr()
    assert command(words.split() if isinstance(words, str) else words) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1, said
    return said.strip()
