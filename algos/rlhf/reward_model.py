"""Training a reward model from preferences (Christiano et al. 2017, arXiv 1706.03741; Ouyang et al. 2022).

Shapes: `B` prompts and pairs; `G` responses per prompt, of which the best and the worst form a pair; `N = B *
G`; `n` pairs of a micro-batch.
"""

import dataclasses
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from algos import registry
from algos.language.layers import merge_adapters
from algos.rlhf.checkpoints import save
from algos.rlhf.preferences import GroupSize, PreferenceAgent, best_and_worst, ranking_accuracy
from algos.rlhf.responses import Responses, has_reward
from algos.rlhf.reward_models import model_reward, with_head
from envs.text import Prompts
from fdg.errors import Elsewhere
from fdg.settings.fields import hyperparameter, require, require_not_negative


class State(NamedTuple):
    """The state of a reward model's training."""

    parameters: Any  # {"network": parameters of a decoder, "score": [D, 1]}
    respondent: Any  # of the responding network: all its parameters, or only its adapters
    optimizer_state: Any
    key: jax.Array  # of the whole run
    iteration: jax.Array  # int32


@dataclasses.dataclass(frozen=True)
class RewardModel(PreferenceAgent, presets="RewardModel"):
    """Trains a decoder with a scalar head to rank two responses.

    Pairs come from a file (`text:preferences`), or are responses of the frozen initial network, ranked by the
    task's reward. The loss is that of Bradley and Terry (arXiv 2203.02155, equation 1). `GRPO`, `PPORLHF` and
    `DPO` take the exported model as `reward_model`. An evaluation is the fraction of held-out pairs that are
    ranked correctly. Frozen and hashable.

    Raises:
      FdgError: at construction, if a field is out of range, or a size does not divide another.

    >>> import envs
    >>> RewardModel(env=envs.make("text:addition"), num_prompts=8).steps_per_iteration
    32
    """

    iterations_without_rewards: ClassVar[int | None] = None  # None: no hint when all rewards are equal
    advice_without_rewards: ClassVar[str | None] = None
    answer: ClassVar[Any] = Elsewhere("GRPO(reward_model=FOLDER), with the FOLDER of run.export(FOLDER)")

    # As in `algos.rlhf.speaker`: leaves of the state, each with the leaves of another run that may initialise
    # it. The initial policy responds. The trained model starts with the policy's weights, without the head.
    weight_sources: ClassVar[dict[str, tuple[str, ...]]] = {
        ".respondent": (".respondent", ".parameters['adapters']", ".parameters"),
        ".parameters['network']['base']": (
            *(".parameters['network']['base']", ".parameters['network']"),
            *(".parameters['base']", ".parameters"),
        ),
        ".parameters['network']": (".parameters['network']", ".parameters"),
    }

    compared = GroupSize()
    centre_coefficient: float = hyperparameter(
        0.01, "weight of a pair's squared sum, which keeps rewards about zero (arXiv 2312.09244, section 2)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_not_negative(self, "centre_coefficient")

    def init(self, key: jax.Array) -> State:
        """The initial state: all responses have reward zero."""
        parameter_key, key = jax.random.split(key)
        network = self._initial_parameters(parameter_key)
        parameters = with_head(self.network, network)
        return State(
            parameters=parameters,
            respondent=jax.tree.map(jnp.copy, super()._trained(network)),
            optimizer_state=self._optimizer.init(self._trained(parameters)),
            key=key,
            iteration=jnp.int32(0),
        )

    def iterate(self, state: State) -> tuple[State, dict[str, jax.Array]]:
        """Samples or reads pairs of responses to new prompts, and makes all updates on them."""
        problem_keys = self._problem_keys(state, self.num_prompts)
        if self._reads_pairs:
            pairs = self.read(*problem_keys)
            response_metrics = self._lengths(pairs.chosen)
        else:
            responding = state._replace(parameters=self._responding_parameters(state))
            rollout = self._rollout(responding, self.num_prompts)
            pairs, responses = self._pairs_of(rollout), rollout.responses
            response_metrics = self._response_metrics(responses, rollout.reward, has_reward(responses))
        trained, optimizer_state, metrics = self.learn(
            state.parameters, state.optimizer_state, (pairs, ()), self._iteration_key(state, 2)
        )
        return self._next_state(state, trained, optimizer_state), {**metrics, **response_metrics}

    def evaluate(
        self, state: Any, key: jax.Array, episodes: int, greedy: bool = True
    ) -> dict[str, jax.Array]:
        """Ranks pairs of responses to held-out problems.

        Returns:
          `return` `[]`: the fraction of pairs that the model ranks correctly, among pairs with different
          rewards by the task. Equal scores are not correct. NaN if the rewards of all pairs are equal.
        """
        if self._reads_pairs:
            pairs = self._held_out_pairs(key, episodes)
        else:
            parameters = self._responding_parameters(state)
            responses, reward = registry.option("speaker").held_out(
                self, parameters, key, episodes, greedy=False, per_problem=self.group_size
            )
            pairs = best_and_worst(responses, reward.total, self.group_size)
        chosen, rejected = self._scores(state.parameters, pairs, ())
        return {"return": ranking_accuracy(pairs, chosen - rejected)}

    def worth(self, state: Any, prompts: list[str], responses: list[str]) -> list[float]:
        """The model's rewards of responses to the user's prompts, one response to each.

        Raises:
          FdgError: the numbers of prompts and responses differ, or a text is too long or has a character
            outside the vocabulary.
        """
        require(
            self,
            len(prompts) == len(responses) > 0,
            f"worth of {len(responses)} responses to {len(prompts)} prompts: give one to each",
        )
        encoded = self.env.prompts_of(list(prompts))
        tokens, mask = self.env.responses_of(list(responses), list(prompts))
        rewards = model_reward(self.network, state.parameters, Responses(encoded, tokens, mask, mask))
        return rewards.tolist()

    def examples(self, state: Any, key: jax.Array, count: int) -> dict[str, jax.Array]:
        """Held-out problems and sampled responses, with the rewards of the task and of the model."""
        arrays = super().examples(state, key, count)
        prompts = Prompts(arrays["prompt"], arrays["prompt_mask"])
        mask = arrays["response_mask"]
        responses = Responses(prompts, arrays["response"], mask, mask)
        return {**arrays, "reward_model": model_reward(self.network, state.parameters, responses)}

    def export(self, state: Any, path: Path) -> None:
        """Writes the reward model in Hugging Face's format: see `LanguageAgent.export`."""
        network = merge_adapters(self.network.config, state.parameters["network"])
        save(path, self.network, {**network, "score": state.parameters["score"]}, self.env.tokenizer)

    def _pair_losses(self, chosen, rejected):
        centring = self.centre_coefficient * jnp.square(chosen + rejected)
        # Bradley and Terry, as in Ouyang et al. 2022 (arXiv 2203.02155), equation 1.
        return -jax.nn.log_sigmoid(chosen - rejected) + centring

    def _scores(self, parameters, pairs, other_inputs):
        """The model's rewards of the chosen and of the rejected responses."""
        return [model_reward(self.network, parameters, side) for side in (pairs.chosen, pairs.rejected)]

    def _responding_parameters(self, state: Any) -> Any:
        network = state.parameters["network"]
        return super()._with_trained(network, state.respondent)

    def _trained(self, parameters: Any) -> Any:
        return {**parameters, "network": super()._trained(parameters["network"])}

    def _with_trained(self, parameters: Any, trained: Any) -> Any:
        network = super()._with_trained(parameters["network"], trained["network"])
        return {**trained, "network": network}
