"""Direct preference optimisation from pairs (DPO; Rafailov et al. 2023, arXiv 2305.18290).

Shapes: `B` prompts and pairs; `G` responses per prompt, of which the best and the worst form a pair; `N = B *
G`; `R` tokens of a response; `n` pairs of a micro-batch.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

import fdg
from algos import registry
from algos.rlhf.language_agent import LanguageAgent, State
from algos.rlhf.objective import Preference
from algos.rlhf.preferences import GroupSize, PreferenceAgent, ranking_accuracy
from algos.rlhf.responses import has_reward, response_log_probs, rollouts, staleness
from fdg.settings.fields import hyperparameter, require, require_positive


@dataclasses.dataclass(frozen=True)
class DPO(PreferenceAgent, presets="DPO"):
    """DPO on pairs of a file (`text:preferences`), or on pairs of sampled responses, ranked by their rewards.

    The best and the worst of `group_size` responses form a pair; prompts whose responses have equal rewards
    do not count. As in the paper, the reference samples the responses; with `respondent="policy"` the trained
    network does (online DPO, arXiv 2402.04792). An evaluation on a file is the fraction of held-out pairs
    with a positive margin. Frozen and hashable.

    Raises:
      FdgError: at construction, if a field is out of range, or a size does not divide another.
    """

    reward_settings = registry.option("reward model").Judge()
    stream_settings = registry.option("stream").Streams()
    compared = GroupSize()
    respondent: Literal["reference", "policy"] = hyperparameter(
        "reference", "model that samples the responses"
    )
    beta: float = hyperparameter(0.1, "beta: weight of the KL to the reference")
    preference: Preference = hyperparameter("sigmoid", "loss of a pair")
    label_smoothing: float = hyperparameter(0.0, "assumed share of pairs with flipped labels")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "beta")
        require(
            self,
            0 <= self.label_smoothing < 0.5,
            f"label_smoothing={self.label_smoothing}: it must be from 0 to below 0.5",
        )
        require(
            self,
            not self.label_smoothing or self.preference in ("sigmoid", "robust"),
            f"label_smoothing={self.label_smoothing} has no effect with preference={self.preference!r}:"
            " leave it out",
        )
        require(
            self,
            self.late == "wait",
            "late='mask': the loss of a pair has no weights for tokens: use late='wait'",
        )

    def init(self, key: jax.Array) -> State:
        """The initial state."""
        return self._initial_state(key, 0 if self._reads_pairs else self.num_prompts)

    def iterate(self, state: State) -> tuple[State, dict[str, jax.Array]]:
        """Samples or reads pairs of responses to new prompts, and makes all updates on them."""
        reference = self._reference_parameters(state)
        respondent = reference if self.respondent == "reference" else state.parameters
        stream = state.stream
        if self._reads_pairs:
            pairs = self.read(*self._problem_keys(state, self.num_prompts))
            reference_log_probs = self.refer(reference, pairs)
            response_metrics = self._lengths(pairs.chosen)
        else:

            def score_rollout(rollout):
                pairs = self._pairs_of(rollout)
                return rollout, pairs, self.refer(reference, pairs)

            responding = state._replace(parameters=respondent)
            (rollout, pairs, reference_log_probs), stream, _ = rollouts(
                self, responding, self.num_prompts, score_rollout
            )
            responses, reward = rollout.responses, rollout.reward
            response_metrics = self._response_metrics(responses, reward, has_reward(responses))
            response_metrics |= registry.option("stream").metrics(self, state.stream, stream)
            if self.respondent == "policy":
                response_metrics |= staleness(rollout.version, state.iteration, rollout.responses.policy_mask)
        batch = pairs, reference_log_probs
        trained, optimizer_state, metrics = self.learn(
            state.parameters, state.optimizer_state, batch, self._iteration_key(state, 2)
        )
        state = self._next_state(state, trained, optimizer_state, stream=stream)
        return state, {**metrics, **response_metrics}

    def evaluate(
        self, state: Any, key: jax.Array, episodes: int, greedy: bool = True
    ) -> dict[str, jax.Array]:
        """Like `LanguageAgent.evaluate`; on pairs of a file, the fraction with a positive margin."""
        if not self._reads_pairs:
            return super().evaluate(state, key, episodes, greedy)
        pairs = self._held_out_pairs(key, episodes)
        reference_log_probs = self.refer(self._reference_parameters(state), pairs)
        chosen, rejected = self._scores(state.parameters, pairs, reference_log_probs)
        return {"return": ranking_accuracy(pairs, chosen - rejected)}

    # --- fragments; `problems`, `respond`, `score` and `update` are inherited from `LanguageAgent` ---

    @fdg.fragment("reference", in_axes=(None, 0))
    def refer(self, parameters, pairs):
        """Log-probabilities `[B, R]` of the chosen and of the rejected responses under the reference."""
        return tuple(self._log_probs(parameters, responses) for responses in (pairs.chosen, pairs.rejected))

    def _version(self, state: Any) -> jax.Array:
        if self.respondent == "policy":
            return LanguageAgent._version(self, state)
        return super()._version(state)

    @property
    def _score_scale(self) -> float:
        return self.beta

    def _pair_losses(self, chosen, rejected):
        return registry.option("losses").preference_loss(
            chosen - rejected, self.beta, self.preference, self.label_smoothing
        )

    def _scores(self, parameters, pairs, reference_log_probs):
        """Log-probabilities of the chosen and the rejected response minus the reference's: `[n]` each."""
        log_ratios = []
        for responses, reference in zip((pairs.chosen, pairs.rejected), reference_log_probs, strict=True):
            log_prob, _ = response_log_probs(self.network, parameters, responses, self.temperature)
            log_ratio = jnp.sum(jnp.where(responses.policy_mask, log_prob - reference, 0.0), axis=1)
            if self.preference == "ipo":  # means over tokens, as the authors state for their experiments
                log_ratio /= jnp.maximum(jnp.sum(responses.policy_mask, axis=1, dtype=jnp.float32), 1)
            log_ratios.append(log_ratio)
        return log_ratios
