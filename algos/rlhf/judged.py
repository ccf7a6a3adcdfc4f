"""Learning from responses that a task's own reward judges, or a reward model.

Letters in shapes: `B` prompts, `G` responses to each, `N = B * G`; `R` tokens of a response.
"""

import dataclasses
import os
from pathlib import Path
from typing import Any, ClassVar

import jax

import fdg
from algos.hyperparameters import hyperparameter, require
from algos.language.decoder import Decoder
from algos.rlhf import rewards, updates
from algos.rlhf.checkpoints import begun_reward, reward_config_of
from algos.rlhf.language_agent import LanguageAgent
from algos.rlhf.responses import Responses
from envs.text import Reward
from envs.text.tokenizer_folders import same_tokens, tokenizer_of


@dataclasses.dataclass(frozen=True)
class JudgedAgent(LanguageAgent):
    """Base of the algorithms that learn from rewards, which a reward model may give.

    Its state has a field `reward_model`, which stays as `_first_reward_model` made it. With a reward model,
    `episode_return` is what that says; the task's own reward is told by part (`reward_correct`), and is what
    evaluations are of.
    """

    # What `fdg.train` says where every response of so many iterations was worth the same.
    iterations_without_rewards: ClassVar[int] = 5
    advice_without_rewards: ClassVar[str] = (
        "look at samples of it, or begin with imitation: train --algo sft on the same --env, and give its run"
        " directory to --from"
    )

    # The reward model is the one named here, whatever an earlier run had.
    begins_as: ClassVar[dict[str, tuple[str, ...]]] = {**LanguageAgent.begins_as, ".reward_model": ()}

    reward_model: str | None = hyperparameter(
        None,
        "folder with a reward model in Hugging Face's format, which judges in place of the task (None: the"
        " task)",
        holds="folder",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reward_model is None:
            return
        config, env = reward_config_of(self.reward_model), self.env
        require(
            self,
            env.tokenizer.vocab_size <= config.vocab_size,
            f"reward_model={self.reward_model!r} has a vocabulary of {config.vocab_size} tokens, and task"
            f" '{env.name}' one of {env.tokenizer.vocab_size}: train one on this task's tokens",
        )
        if os.path.lexists(Path(self.reward_model, "tokenizer.json")):
            require(
                self,
                same_tokens(tokenizer_of(self.reward_model), env.tokenizer),
                f"reward_model={self.reward_model!r} has another tokenizer than task '{env.name}': train one"
                " on this task's tokens",
            )
        require(
            self,
            self._context <= config.max_positions,
            f"reward_model={self.reward_model!r} has a context of {config.max_positions} tokens, and task"
            f" '{env.name}' needs {self._context}: shorten the task",
        )

    @fdg.fragment("reward", in_axes=(None, 0))
    def rate(self, reward_model, responses):
        """What `Responses [N]` are worth by the reward model: `[N]` float32."""

        def score(some: Responses) -> jax.Array:
            return rewards.score(self._reward_network, reward_model, some)

        return updates.mapped(score, responses, self.at_once)

    @property
    def _needs_answers(self) -> bool:
        return self.reward_model is None and super()._needs_answers

    def _rollout(self, state: Any, count: int) -> tuple[Responses, jax.Array, jax.Array, Reward]:
        responses, log_prob, version, reward = super()._rollout(state, count)
        if self.reward_model is not None:
            if reward.given is not None:  # the task's, and the model has something to say of all
                responses = responses._replace(own=responses.mask)
            total = self.rate(state.reward_model, responses)
            reward = Reward(total, {**reward.parts, "model": total})
        return responses, log_prob, version, reward

    def _first_reward_model(self, key: jax.Array) -> Any:
        """What the state has of it: all, or nothing where the task judges."""
        if self.reward_model is None:
            return ()
        return begun_reward(self._reward_network, self.reward_model, key)

    @property
    def _reward_network(self) -> Decoder:
        assert self.reward_model is not None
        return Decoder(dataclasses.replace(reward_config_of(self.reward_model), dtype=self.dtype))
