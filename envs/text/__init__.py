"""Tasks of text: problems generated within programs, tokenizers, rewards.

`envs.make("text:countdown")` gives a `TextTask`; `TextTask(problem)` one of a problem of your own.
"""

from envs.text.characters import Text
from envs.text.game import Reply, Said, TextGame, Transcript, is_game, is_text, play
from envs.text.games import Calculator, Guess
from envs.text.host_reward import HostReward
from envs.text.prompts import Prompts
from envs.text.registry import FILES, PREFIX, files_of, make, names
from envs.text.rows import Row
from envs.text.task import (
    Demonstration,
    Problem,
    Reward,
    TextProblem,
    TextTask,
    exact,
)
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
    "Problem",
    "Prompts",
    "Reply",
    "Reward",
    "Row",
    "Said",
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
]
