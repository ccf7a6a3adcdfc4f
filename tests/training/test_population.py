"""Population-based training: agents of a sweep copy better agents and perturb their hyperparameters."""

import jax
import jax.numpy as jnp
import pytest

import fdg
from fdg.errors import FdgError
from fdg.training.population import Population
from fdg.training.space import make_grid
from fdg.training.sweep import Sweep, SweptState
from tests.training.descent import Descent


def population(**fields):
    return Population(**{"every": 2, "bounds": (("rate", 0.01, 1.0),), **fields})


def member_of(number, score, rate=0.1):
    member = population().initial_membership(jax.random.key(number))
    member = member._replace(total=jnp.float32(score), episodes=jnp.float32(1.0))
    return SweptState({"rate": jnp.float32(rate)}, {}, member)


def test_worst_agents_copy_the_best():
    """The worst fifth of ten agents (one score is NaN) copies the best fifth."""
    scores = jnp.array([5.0, 1.0, 8.0, jnp.nan, 3.0, 9.0, 4.0, 6.0, 5.5, 2.0])
    source = jax.jit(population().source)
    for key in range(5):
        sources = [int(source(scores, jnp.int32(i), member_of(key, 0.0))) for i in range(10)]
        assert [sources[i] for i in (0, 2, 4, 5, 6, 7, 8, 9)] == [0, 2, 4, 5, 6, 7, 8, 9]
        assert sources[1] in (2, 5) and sources[3] in (2, 5)
    # Without scores, or with equal ones, no agent is copied.
    for scores in (jnp.full(8, jnp.nan), jnp.zeros(8)):
        assert all(int(source(scores, jnp.int32(i), member_of(i, 0.0))) == i for i in range(8))


def test_perturbation_stays_within_bounds():
    """A copied rate is multiplied by 0.8 or 1.2 and clipped to its bounds; other agents keep theirs."""
    one, other = jnp.int32(1), jnp.int32(0)
    after = [population().after(member_of(key, 1.0, rate=0.5), one, other) for key in range(20)]
    assert {round(float(state.hyperparameters["rate"]), 5) for state in after} == {0.4, 0.6}
    edge = population().after(member_of(0, 1.0, rate=0.9), jnp.int32(1), jnp.int32(0))
    assert float(edge.hyperparameters["rate"]) in (pytest.approx(0.72), 1.0)
    kept = population().after(member_of(0, 7.0, rate=0.9), jnp.int32(0), jnp.int32(0))
    assert float(kept.hyperparameters["rate"]) == pytest.approx(0.9) and float(kept.membership.score) == 7.0
    assert int(kept.membership.iterations) == 0 and float(kept.membership.episodes) == 0.0


def test_scores_are_means_over_episodes():
    member = population().initial_membership(jax.random.key(0))
    for value, episodes in ((10.0, 1.0), (jnp.nan, 0.0), (4.0, 3.0)):
        member = population().add_iteration(member, {"episode_return": value, "episodes": episodes})
    assert int(member.iterations) == 3
    assert float(population().known(SweptState({}, {}, member))) == pytest.approx(22.0 / 4.0)


@pytest.mark.parametrize(
    "metrics",
    [
        {"episode_return": jnp.nan, "episodes": 2.0},
        {"episode_return": 9.0, "episodes": 2.0, "policy_loss": jnp.nan},
        {"episode_return": jnp.nan, "episodes": 0.0, "grad_norm": jnp.inf},
    ],
)
def test_failed_agent_has_no_score(metrics):
    """Its score from before is not used either: others would copy its weights, which are not finite."""
    healthy = {"episode_return": 9.0, "episodes": 1.0, "policy_loss": 0.5}
    member = population().initial_membership(jax.random.key(0))._replace(score=jnp.float32(400.0))
    for row in (healthy, metrics, healthy):
        member = population().add_iteration(member, row)
    assert jnp.isnan(population().known(SweptState({}, {}, member)))


def test_population_without_metrics_ends(tmp_path, capsys):
    """A run that was killed after its last checkpoint, and lost its metrics, can be resumed."""
    settings = {"num_seeds": 1, "exploit_every": 2, "total_steps": 32, "devices": 1, "out": tmp_path / "run"}
    fdg.sweep(Descent(), {"rate": [0.01, 0.5]}, **settings, progress=False)
    for name in ("metrics.jsonl", "summary.json"):
        (tmp_path / "run" / name).unlink()
    fdg.sweep(Descent(), {"rate": [0.01, 0.5]}, **settings, resume=True)
    assert "no sweep.json: " in capsys.readouterr().out
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"exploit_every": 0}, "exploit_every=0"),
        ({"exploit_every": 1.5}, "whole number"),
        ({"exploit_every": 2, "num_seeds": 1}, "there is only one agent"),
    ],
)
def test_population_errors(settings, message):
    with pytest.raises(FdgError, match=message):
        Sweep(Descent(), make_grid({"rate": 0.1}), **{"num_seeds": 2, **settings})
