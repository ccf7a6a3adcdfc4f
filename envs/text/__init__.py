"""Text tasks: problems generated in traced code, tokenizers, rewards.

`envs.make("text:countdown")` returns a `TextTask`; `TextTask(problem)` makes one from your own problem.
"""

import warnings
from typing import Any

from envs.text.characters import Text
from envs.text.game import Message, Reply, TextGame, Transcript, is_game, is_text, play
from envs.text.games import Calculator, Guess
from envs.text.host_reward import HostReward
from envs.text.prompts import Prompts
from envs.text.registry import FILES, PREFIX, files_of, make, names, trust_reason
from envs.text.rows import Row
from envs.text.task import Demonstration, Problem, Reward, TextProblem, TextTask, exact
from envs.text.tokenizers import CharacterTokenizer, HuggingFaceTokenizer, Tokenizer

__all__ = [
    "FILES",
    "PREFIX",
    "Calculator",
    "CharacterTokenizer",
    "Demonstration",
    "Guess",
    "HostReward",
    "HuggingFaceTokenizer",
    "Message",
    "Problem",
    "Prompts",
    "Reply",
    "Reward",
    "Row",
    "Text",
    "TextGame",
    "TextProblem",
    "TextTask",
    "Tokenizer",
    "Transcript",
    "exact",
    "files_of",
    "is_game",
    "is_text",
    "make",
    "names",
    "play",
    "trust_reason",
]


def __getattr__(name: str) -> Any:
    if name == "Said":
        warnings.warn("envs.text.Said is deprecated: write envs.text.Message", DeprecationWarning, 2)
        return Message
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
