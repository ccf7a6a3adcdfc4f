"""Base class of RLHF algorithms whose rewards come from the task or from a reward model.

Shapes: `B` prompts, `G` responses to each, `N = B * G`; `R` tokens of a response.
"""

import dataclasses
import os
import warnings
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp

import fdg
from algos import registry
from algos.language.decoder import Decoder
from algos.rlhf import losses, streaming, updates
from algos.rlhf.language_agent import LanguageAgent
from algos.rlhf.responses import Responses, model_reward, scores
from algos.rlhf.streaming import KEPT, Rollout
from envs.text import Problem, Reward, is_game
from envs.text.tokenizer_folders import same_tokens, tokenizer_of
from fdg.settings.fields import hyperparameter, require, require_not_negative, require_positive


class State(NamedTuple):
    """The state of GRPO and DPO."""

    parameters: Any
    reference: Any  # of the KL reference; () without one, or if the policy is adapters on a frozen base
    reward_model: Any  # () if rewards come from the task
    optimizer_state: Any
    key: jax.Array  # of the whole run
    iteration: jax.Array  # int32
    stream: Any = ()  # unfinished responses; () if ahead=0


@dataclasses.dataclass(frozen=True)
class JudgedAgent(LanguageAgent):
    """Base of the algorithms that learn from rewards, possibly of a reward model.

    The state's field `reward_model` is constant. With a reward model, `episode_return` is its reward; the
    task's own reward is reported by component (`reward_correct`), and used in evaluations.
    """

    # The hint of `fdg.train` if all responses of several iterations had the same reward.
    iterations_without_rewards: ClassVar[int] = 5
    advice_without_rewards: ClassVar[str] = (
        "inspect samples of the policy, or start with supervised fine-tuning: train --algo sft on the same"
        " --env, and give its run directory to --from"
    )

    # With `--from`, the reward model is the one of this configuration, not of the earlier run.
    begins_as: ClassVar[dict[str, tuple[str, ...]]] = {**LanguageAgent.begins_as, ".reward_model": ()}

    reward_model: str | None = hyperparameter(
        None,
        "folder with a reward model in Hugging Face's format; its scores replace the task's rewards (None:"
        " the task's rewards)",
        holds="folder",
    )
    micro_batches: int = hyperparameter(
        1,
        "micro-batches of a batch, each scored as soon as its responses are complete; results do not change",
    )
    ahead: int = hyperparameter(
        0,
        "batches whose generation may start early (0: none); tokens are then up to this many updates"
        " off-policy",
    )
    order: Literal["finished", "prompt"] = hyperparameter(
        "finished",
        "which of the responses that started early form a batch; finished: those that are complete first;"
        " prompt: those of the earliest prompts",
    )
    late: Literal["wait", "mask"] = hyperparameter(
        "wait",
        "what to do about tokens that are too many updates old; wait: finish their responses before the"
        " update; mask: give these tokens no weight in the loss",
    )
    max_age: int | None = hyperparameter(
        None, "largest age of a token in updates, with late='mask' (None: the value of ahead)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_stream()
        if self.reward_model is None:
            return
        config, env = self._reward_network.config, self.env
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
                f"reward_model={self.reward_model!r} uses a different tokenizer from task '{env.name}': train"
                " one on this task's tokens",
            )
        require(
            self,
            self._context <= config.max_positions,
            f"reward_model={self.reward_model!r} has a context of {config.max_positions} tokens, and task"
            f" '{env.name}' needs {self._context}: shorten the task",
        )

    def _check_stream(self) -> None:
        require_positive(self, "micro_batches")
        count, ahead = self._candidates, self.ahead
        require(
            self,
            count % self.micro_batches == 0,
            f"micro_batches={self.micro_batches} do not divide the {count} prompts of an iteration: use a"
            " divisor",
        )
        require_not_negative(self, "ahead")
        require(
            self,
            not ahead or not is_game(self.env),
            f"ahead={ahead}: '{getattr(self.env, 'name', self.env)}' is a game, whose turns are played by all"
            " responses together: use ahead=0",
        )
        age = self.max_age
        require(
            self,
            age is None or (age >= 0 and self.late == "mask"),
            f"max_age={age}: it must be zero or above, and needs late='mask'",
        )
        if self.late == "mask" and (not ahead or self.order == "prompt"):
            why = "order='prompt', because each batch waits for its own responses: use order='finished'"
            if not ahead:
                why = "ahead=0, because no response starts early: give ahead=1 (--ahead 1)"
            warnings.warn(
                f"late='mask' has no effect with {why}, or leave late out", fdg.FdgWarning, stacklevel=2
            )

    @property
    def _candidates(self) -> int:
        """Prompts sampled in an iteration."""
        return self.num_prompts

    @fdg.fragment("reward", in_axes=(None, 0))
    def rate(self, reward_model, responses):
        """The reward model's rewards of `Responses [N]`: `[N]` float32."""

        def score(some: Responses) -> jax.Array:
            return model_reward(self._reward_network, reward_model, some)

        return updates.map_micro_batches(score, responses, self.at_once)

    def _first_state(self, key: jax.Array, count: int, refers: bool = True) -> State:
        """The initial state; an iteration samples `count` prompts."""
        parameter_key, key = jax.random.split(key)
        parameters = self._first_parameters(parameter_key)
        return State(
            parameters=parameters,
            reference=jax.tree.map(jnp.copy, self._frozen(parameters)) if refers else (),
            reward_model=self._first_reward_model(parameter_key),
            optimizer_state=self._optimizer.init(self._trained(parameters)),
            key=key,
            iteration=jnp.int32(0),
            stream=streaming.first_stream(self, count, parameters, key) if count else (),
        )

    @fdg.fragment("reference", in_axes=(None, 0))
    def refer(self, parameters, responses):
        """Log-probabilities `[N, R]` of `Responses [N]` under the reference."""
        return self._log_probs(parameters, responses)

    @fdg.fragment("gradient", in_axes=(None, None, 0), out_axes=None)
    def gradient(self, parameters, is_first, minibatch):
        """The contribution of a minibatch of responses `[n]` to the gradient and to the metrics."""

        def loss(trained):
            return self._loss(self._with_trained(parameters, trained), is_first, minibatch)

        return jax.grad(loss, has_aux=True)(self._trained(parameters))

    def _log_probs(self, parameters: Any, responses: Responses) -> jax.Array:
        score = lambda some: scores(self.network, parameters, some, self.temperature)[0]  # noqa: E731
        return updates.map_micro_batches(score, responses, self.at_once)

    def _shares(self, mask: jax.Array) -> jax.Array:
        return losses.token_weights(mask, "token_mean", self.longest)

    @property
    def _needs_answers(self) -> bool:
        return self.reward_model is None and super()._needs_answers

    @fdg.fragment("actor", in_axes=(None, None, None, None, None, KEPT), out_axes=(None, None, KEPT))
    def respond_ahead(self, parameters, version, first, problem, keys, stream):
        """Generates the next micro-batch of a stream.

        `problem` has `[(a + 1) B]` problems, `a` being `ahead`; `first` is the index of the first one.
        Returns `Recorded [b G]`; the age of each token `[b G, R]` in updates; the stream's state.
        """
        count = len(keys) // self.responses_per_prompt // (self.ahead + 1)
        source = streaming.stream_of(self, count, problem, keys, first, parameters)
        rows, stream = source.take(self.network.cast(parameters), version, stream)
        return rows, version - rows.version, stream

    def played(self, state: Any, problem: Problem, keys: jax.Array) -> Rollout:
        """As `LanguageAgent.played`, with the reward model's rewards if there is one."""
        found = super().played(state, problem, keys)
        responses, reward = self.rated(state, found.responses, found.reward)
        return found._replace(responses=responses, reward=reward)

    def rated(self, state: Any, responses: Responses, reward: Reward) -> tuple[Responses, Reward]:
        """Responses `[N]` with the task's rewards, and the reward model's if there is one."""
        if self.reward_model is None:
            return responses, reward
        if reward.given is not None:  # only some responses have one; the model rewards all
            responses = responses._replace(own=responses.mask)
        total = self.rate(state.reward_model, responses)
        return responses, Reward(total, {**reward.parts, "model": total})

    def check_files(self) -> None:
        """As `LanguageAgent.check_files`, and checks the weights of the reward model."""
        super().check_files()
        if self.reward_model is not None:
            registry.option("model").check_there(self.reward_model, scores=True)

    def _first_reward_model(self, key: jax.Array) -> Any:
        """The reward model in the state; empty without one."""
        if self.reward_model is None:
            return ()
        return registry.option("model").begun_reward(self._reward_network, self.reward_model, key)

    @property
    def _reward_network(self) -> Decoder:
        assert self.reward_model is not None
        config = registry.option("model").reward_config_of(self.reward_model)
        return Decoder(dataclasses.replace(config, dtype=self.dtype, packed_rows=self._packed_rows))
