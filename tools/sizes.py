"""Counts lines and tokens of code by folder, now and at an earlier commit: `python -m tools.sizes e217e55`.

Comments, docstrings and layout are not counted as tokens. Files that are new since that commit, according to
`git diff -M30%`, have their own column.
"""

import io
import subprocess
import sys
import tokenize
from collections import defaultdict

from bench.harness import ROOT, table

_FOLDERS = ("fdg", "algos", "envs", "policies", "bench", "tools", "tests")
_LAYOUT = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
_SKIPPED = (*_LAYOUT, tokenize.NL, tokenize.COMMENT, tokenize.ENDMARKER)


def count_tokens(text: str) -> int:
    """The number of tokens in the source text of a module.

    >>> count_tokens("'Adds.' # one line" + chr(10) + "x = 1  # one")
    3
    """
    count, previous = 0, tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_docstring = token.type == tokenize.STRING and previous in _LAYOUT
        count += token.type not in _SKIPPED and not is_docstring
        if token.type not in (tokenize.NL, tokenize.COMMENT):
            previous = token.type
    return count


def main(commit: str) -> None:
    """Prints a row for each folder, and for each folder of `fdg/`."""
    status = _git("diff", "-M30%", "-l0", "--name-status", commit, "HEAD").splitlines()
    new_files = {line.partition("\t")[2] for line in status if line.startswith("A\t")}
    # By folder, for each column of the table: lines and tokens.
    sizes: dict[str, list[list[int]]] = defaultdict(lambda: [[0, 0] for _ in range(3)])
    for column, revision in ((0, commit), (1, "HEAD")):
        for path in _git("ls-tree", "-r", "--name-only", revision, "--", *_FOLDERS).splitlines():
            if path.endswith(".py"):
                text = _git("show", f"{revision}:{path}")
                is_new = revision == "HEAD" and path in new_files
                for folder in {path.split("/")[0], "/".join(path.split("/")[:2])}:
                    if folder in _FOLDERS or (folder.startswith("fdg/") and not folder.endswith(".py")):
                        size = sizes[folder][2 if is_new else column]
                        size[0] += len(text.splitlines())
                        size[1] += count_tokens(text)
    rows = [
        (folder, *(f"{lines:,} / {tokens:,}" for lines, tokens in counts))
        for folder, counts in sorted(sizes.items())
    ]
    print(table(("lines / tokens", commit, "HEAD, without new files", "new files"), rows))


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main(sys.argv[1])
