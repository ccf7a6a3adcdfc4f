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
from algos.rlhf.preferences import Compared, PreferenceAgent, ranked_right
from algos.rlhf.responses import has_reward, rollouts, scores, staleness
from algos.rlhf.updates import map_micro_batches
from fdg.settings.fields import hyperparameter, require, require_positive


@dataclasses.dataclass(frozen=True)
class DPO(PreferenceAgent, presets="DPO"):
    """DPO on pairs of a file (`text:preferences`), or of the network's own responses, ranked by their reward.

    The best and the worst of `group_size` responses form a pair; prompts with equal rewards do not count. As
    in the paper, the reference generates; with `respondent="policy"` the trained network does (online DPO,
    arXiv 2402.04792). An evaluation on a file is the fraction of held-out pairs with a positive margin.
    Frozen and hashable.

    Raises:
      FdgError: (construction) a field is out of range, or sizes do not divide.
    """

    reward_settings = registry.option("reward model").Judge()
    stream_settings = registry.option("stream").Streams()
    compared = Compared()
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
            self.late == "wait",
            "late='mask': a loss of pairs has no weights of tokens: use late='wait'",
        )

    def init(self, key: jax.Array) -> State:
        """The initial state."""
        return self._first_state(key, 0 if self._reads else self.num_prompts)

    def iterate(self, state: State) -> tuple[State, dict[str, jax.Array]]:
        """Responses to new prompts, pairs of them, and all updates."""
        reference = self._reference_parameters(state)
        respondent = reference if self.respondent == "reference" else state.parameters
        stream = state.stream
        if self._reads:
            pairs = self.read(*self._problem_keys(state, self.num_prompts))
            known, facts = self.refer(reference, pairs), self._lengths(pairs.chosen)
        else:

            def judged(rollout):
                pairs = self._paired(rollout)
                return rollout, pairs, self.refer(reference, pairs)

            speaking = state._replace(parameters=respondent)
            (rollout, pairs, known), stream, _ = rollouts(self, speaking, self.num_prompts, judged)
            responses, reward = rollout.responses, rollout.reward
            facts = self._said(responses, reward, has_reward(responses))
            facts |= registry.option("stream").measures(self, state.stream, stream)
            if self.respondent == "policy":
                facts |= staleness(rollout.version, state.iteration, rollout.responses.own)
        trained, optimizer_state, metrics = self.learn(
            state.parameters, state.optimizer_state, (pairs, known), self._iteration_key(state, 2)
        )
        return self._next_state(state, trained, optimizer_state, stream=stream), {**metrics, **facts}

    def evaluate(
        self, state: Any, key: jax.Array, episodes: int, greedy: bool = True
    ) -> dict[str, jax.Array]:
        """As `LanguageAgent.evaluate`; on pairs of a file, the fraction with a positive margin."""
        if not self._reads:
            return super().evaluate(state, key, episodes, greedy)
        pairs = self._held_out_pairs(key, episodes)
        gains = self._gains(state.parameters, pairs, self.refer(self._reference_parameters(state), pairs))
        return {"return": ranked_right(pairs, gains[0] - gains[1])}

    # --- fragments; `problems`, `respond`, `score` and `update` are inherited from `LanguageAgent` ---

    @fdg.fragment("reference", in_axes=(None, 0))
    def refer(self, parameters, pairs):
        """Log-probabilities `[B, R]` of the chosen and the rejected responses under the reference."""
        return map_micro_batches(lambda some: self._scores(parameters, some), pairs, self.at_once)

    def _version(self, state: Any) -> jax.Array:
        if self.respondent == "policy":
            return LanguageAgent._version(self, state)
        return super()._version(state)

    def _loss(self, parameters, is_first, minibatch):
        weight = minibatch.weight
        grown = self._gains(parameters, minibatch.pairs, minibatch.known)
        margin = grown[0] - grown[1]
        each = registry.option("losses").preference_loss(
            margin, self.beta, self.preference, self.label_smoothing
        )
        loss = jnp.sum(weight * each)
        return loss, {
            "loss": loss,
            "preference_accuracy": jnp.sum(weight * (margin > 0)),
            "margin": jnp.sum(weight * margin),
            "chosen_reward": self.beta * jnp.sum(weight * grown[0]),
            "rejected_reward": self.beta * jnp.sum(weight * grown[1]),
        }

    def _gains(self, parameters, pairs, known):
        """Log-probabilities of the chosen and the rejected response minus the reference's: `[n]` each."""
        gains = []
        both = zip((pairs.chosen, pairs.rejected), self._scores(parameters, pairs), known, strict=True)
        for responses, log_prob, reference in both:
            gain = jnp.sum(jnp.where(responses.own, log_prob - reference, 0.0), axis=1)
            if self.preference == "ipo":  # over means, as the authors state for their experiments
                gain = gain / jnp.maximum(jnp.sum(responses.own, axis=1, dtype=jnp.float32), 1)
            gains.append(gain)
        return gains

    def _scores(self, parameters, pairs):
        return tuple(
            scores(self.network, parameters, responses, self.temperature)[0]
            for responses in (pairs.chosen, pairs.rejected)
        )
