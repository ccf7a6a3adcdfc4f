"""Tasks of text: problems generated within programs, tokenizers, rewards.

`envs.make("text:countdown")` gives a `TextTask`; `TextTask(problem)` one of a problem of your own.
"""

from envs.text.characters import Text
from envs.text.host_reward import HostReward
from envs.text.registry import PREFIX, make, names
from envs.text.task import (
    Demonstration,
    Problem,
    Prompts,
    Reward,
    TextProblem,
    TextTask,
    exact,
)
from envs.text.tokenizers import CharacterTokenizer, HuggingFaceTokenizer, Tokenizer

__all__ = [
    "PREFIX",
    "CharacterTokenizer",
    "Demonstration",
    "HostReward",
    "HuggingFaceTokenizer",
    "Problem",
    "Prompts",
    "Reward",
    "Text",
    "TextProblem",
    "TextTask",
    "Tokenizer",
    "exact",
    "make",
    "names",
]
