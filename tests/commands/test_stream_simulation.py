"""Replay of a generation stream for given response lengths, against a reference in plain Python."""

import json
import math
import types

import numpy as np
import pytest

import fdg
import policies
from fdg.commands import stream_simulation as flag
from fdg.commands.stream_simulation import lengths_of_run, parse_lengths, simulate, stream_report
from tests.stream.reference import Clock, Sizes

SIZES = {
    "slots": 6,
    "batch": 8,
    "micro_batches": 2,
    "ahead": 1,
    "order": "finished",
    "late": "wait",
    "group": 2,
}


@pytest.mark.parametrize(
    ("more", "lag", "max_age"),
    [
        ({}, 2, None),
        ({}, 1, None),
        ({"late": "mask"}, 2, None),
        ({"late": "mask"}, 3, None),
        ({"late": "mask", "order": "prompt"}, 1, 0),
        ({"ahead": 0}, 2, None),
    ],
)
def test_simulation_matches_the_reference(more, lag, max_age):
    lengths, sizes, iterations = parse_lengths("lognormal:6,30"), {**SIZES, **more}, 6
    found = simulate(lengths, sizes, lag, max_age, iterations)
    clock = Clock(Sizes(**sizes), lambda response: int(lengths.num_steps[response % len(lengths.num_steps)]))
    before = 2 * (sizes["ahead"] + 1)
    ages, kept, limit = [], [], sizes["ahead"] if max_age is None else max_age
    for n in range((before + iterations) * 2):
        if n == before * 2:
            start = clock.counts()
        given = max(0, (n - lag) // 2)
        take = clock.take(given)
        if n >= before * 2:
            versions = [version for drawn in take.drawn for _, version in drawn]
            ages += [n // 2 - version for version in versions]
            masks = sizes["late"] == "mask"  # by the age at the take
            kept += [n // 2 - version for version in versions if not masks or given - version <= limit]
    end = clock.counts()
    ticks, busy = (end[name] - start[name] for name in ("ticks", "busy"))
    assert max(kept) <= limit + math.ceil(lag / 2)
    assert found.ticks == ticks / iterations
    assert found.busy == pytest.approx(busy / (6 * ticks))
    assert (found.mean_age, found.oldest) == (pytest.approx(np.mean(kept)), max(kept))
    assert found.masked == pytest.approx(1 - len(kept) / len(ages))
    assert found.rate == pytest.approx(len(kept) / ticks)


def test_lengths_have_the_given_mean_and_maximum():
    tokens = parse_lengths("lognormal:200,2000").tokens
    assert np.mean(tokens) == pytest.approx(200, rel=0.02) and np.max(tokens) == 2000
    assert 1 <= np.sum(tokens >= 2000) <= 2 + len(tokens) // 1000
    tokens = parse_lengths("uniform:3,7").tokens
    assert sorted(set(tokens.tolist())) == [3, 4, 5, 6, 7]
    rows = [{"response_length": 4.0, "response_length_max": 9.0}, {"loss": 1.0}]
    assert np.max(lengths_of_run(rows, "runs/x").tokens) == 9
    assert parse_lengths("constant:1").num_steps.max() == 1


@pytest.mark.parametrize(
    "given",
    ["", "normal:3", "lognormal:3", "constant:3,4", "lognormal:3,0", "uniform:0,3", "constant:9999999"],
)
def test_invalid_lengths_are_refused(given):
    with pytest.raises(fdg.FdgError, match=r"lengths .*: give lognormal:MEAN,LONGEST"):
        parse_lengths(given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("lognormal:16,5", "the mean 16 is above the longest 5: did you mean lognormal:5,16?"),
        ("uniform:7,3", "the shortest 7 is above the longest 3: did you mean uniform:3,7?"),
    ],
)
def test_swapped_lengths_are_suggested(given, message):
    with pytest.raises(fdg.FdgError) as caught:
        parse_lengths(given)
    assert str(caught.value) == f"lengths '{given}': {message}"


def test_impossible_lengths_are_refused():
    with pytest.raises(
        fdg.FdgError, match="is 1000 times the mean; lognormal lengths allow at most 118 times"
    ):
        parse_lengths("lognormal:10,10000")
    with pytest.raises(fdg.FdgError, match="this run has no response_length"):
        lengths_of_run([{"loss": 0.0}], "runs/ppo")


@pytest.mark.parametrize(
    ("more", "max_age", "message"),
    [
        (
            {"ahead": 1, "late": "mask"},
            4,
            "eta = 6 = max_age 4 + ceil(lag 3 / 2 micro-batches): no token with",
        ),
        ({"ahead": 2, "late": "mask", "order": "prompt"}, 4, "eta = 4 = ahead 2 + "),
        ({"ahead": 2, "late": "mask", "order": "prompt"}, 0, "eta = 2 = max_age 0 + "),
    ],
)
def test_eta_counts_unmasked_tokens(more, max_age, message):
    assert message in stream_report(parse_lengths("constant:3"), {**SIZES, **more}, 3, max_age)


def test_lengths_flag(tmp_path):
    """`--lengths` takes a distribution or a run; only algorithms that generate responses have it."""
    given = {"algo": "grpo", "lengths": "constant:3"}
    assert (
        flag.take_lengths(given) == "constant:3"
        and given == {"algo": "grpo"}
        and flag.take_lengths(given) is None
    )
    fields = {**SIZES, "ahead": 0, "max_age": None, "responses_per_prompt": 2, "_candidates": 8}
    algorithm = types.SimpleNamespace(**fields)
    row = {"iteration": 1, "env_steps": 8, "wall_s": 1.0, "response_length": 3.0, "response_length_max": 3.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    by_run, by_distribution = (
        flag.report_of(algorithm, None, str(tmp_path)),
        flag.report_of(algorithm, None, "constant:3"),
    )
    assert by_run == by_distribution and "stream of 6 slots: responses of 3 tokens" in by_run
    assert "eta = 0 = ahead 0 + ceil(lag 0 / 2 micro-batches)" in by_run
    for policy, lag in ((policies.Split(lag=3), "lag 3"), (policies.Split(staleness=2), "lag 4")):
        assert f"eta = 2 = ahead 0 + ceil({lag} / 2" in flag.report_of(algorithm, policy, "constant:3")
    short = "lag 1 is short: learning begins after the last of 2 micro-batches"
    assert short in flag.report_of(algorithm, policies.Split(lag=1), "constant:3")
    algorithm._learns_by_parts = True
    assert "is short" not in flag.report_of(algorithm, policies.Split(lag=1), "constant:3")
    with pytest.raises(fdg.FdgError, match="SimpleNamespace does not generate responses: use --algo grpo"):
        flag.report_of(types.SimpleNamespace(), None, "constant:3")
