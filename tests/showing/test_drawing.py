"""Printed and drawn plans: width, idle devices, complete SVG and Mermaid drawings."""

import dataclasses
import itertools
import re
import xml.etree.ElementTree as ET

import jax.numpy as jnp
import pytest

import algos
import envs
import fdg
import policies
from fdg.commands.cli import plan_main
from tests.showing.plans import Scattered
from tests.user_algorithm import Walker

EVERY_POLICY = [
    policies.GPUOnly(),
    policies.MultiLearner(),
    policies.SingleLearnerCoarse(),
    policies.SingleLearnerCoarse(actors=2, learners=1, staleness=1),
    policies.SingleLearnerFine(),
    policies.Environments(),
    policies.Central(),
    policies.Central(staleness=2),
]


@pytest.fixture(scope="module")
def graphs():
    return [fdg.trace(Walker()), fdg.trace(algos.PPO(env=envs.make("CartPole-v1"), num_envs=96))]


@pytest.fixture(scope="module")
def plans(graphs):
    """Every policy with both algorithms, on 8 and on 64 devices."""
    chosen = [*EVERY_POLICY, Scattered()]
    return [fdg.place(g, p, n) for (g, n), p in itertools.product(zip(graphs, (8, 64), strict=True), chosen)]


def test_staleness_on_a_shared_device(graphs):
    stale = policies.SingleLearnerCoarse(staleness=1)
    note = "staleness 1: actors and learners share the one device, so they never run at the same time: use"
    assert note in str(fdg.place(graphs[0], stale, 1))
    assert note not in str(fdg.place(graphs[0], stale, 2))


def test_plans_fit_a_terminal(plans):
    for plan in plans:
        assert max(map(len, str(plan).splitlines())) <= 110, plan


def test_every_program_and_move_is_printed(plans):
    for plan in plans:
        text = str(plan)
        if len(plan.groups) > 1:
            assert text.count("run ") == len(plan.programs), plan
            moves = [m for m in plan.movements if m.how == "transfer"]
            assert len(re.findall(r"^ +move ", text, re.MULTILINE)) == len(moves), plan


def test_program_names_are_unique(plans):
    for plan in plans:
        names = [program.name for program in plan.programs]
        assert len(set(names)) == len(names) and all(names), names


@pytest.mark.parametrize(
    ("policy", "devices", "reasons"),
    [
        (policies.GPUOnly(), 64, ["idle: 8-63 (all: batches of 8, 16 and 96 divide over 8 of 64 devices)"]),
        (
            policies.SingleLearnerFine(workers=2, learners=1),
            5,
            ["idle: 3-4 (SingleLearnerFine places no fragment there)"],
        ),
        (policies.SingleLearnerFine(), 5, []),
        (policies.SingleLearnerFine(), 8, ["idle: 4-6 (workers: a batch of 16 divides over 4 of 7 devices)"]),
        (
            Scattered(),
            18,
            [
                "idle: 8 (environments_of_the_simulation_cluster: a batch of 16 divides over 4 of 5 devices)",
                "idle: 16 (gradients: a batch of 96 divides over 6 of 7 devices)",
                "idle: 1, 3, 5, 7 (Scattered places no fragment there)",
            ],
        ),
    ],
)
def test_idle_devices_and_reasons(graphs, policy, devices, reasons):
    lines = str(fdg.place(graphs[0], policy, devices)).splitlines()
    assert [line.strip() for line in lines if "idle:" in line] == reasons


def test_svg_is_well_formed_and_complete(plans):
    for plan in plans:
        root = ET.fromstring(plan._repr_svg_())
        width, height = float(root.attrib["width"]), float(root.attrib["height"])
        shown = " ".join(element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text"))
        for f in plan.graph.fragments:
            assert f.name in shown, (f.name, plan)
        for group in plan.groups:
            assert group.name[:8] in shown and str(group.devices[-1]) in shown
        for element in root.iter("{http://www.w3.org/2000/svg}rect"):
            if "x" in element.attrib:
                x, y, w, h = (float(element.attrib[key]) for key in ("x", "y", "width", "height"))
                assert min(x, y) >= 0 and x + w <= width and y + h <= height, plan


def test_labels_do_not_overlap(plans):
    """Uses an estimated text width."""
    for plan in plans:
        boxes = []
        for element in ET.fromstring(plan._repr_svg_()).iter("{http://www.w3.org/2000/svg}text"):
            size, x, y = (float(element.attrib[key]) for key in ("font-size", "x", "y"))
            width = 0.5 * size * len(element.text)
            left = x - width * {"middle": 0.5, "end": 1}.get(element.attrib.get("text-anchor"), 0)
            boxes.append((left, left + width, y - 0.7 * size, y, element.text))
        for a, b in itertools.combinations(boxes, 2):
            apart = a[1] <= b[0] or b[1] <= a[0] or a[3] <= b[2] or b[3] <= a[2]
            assert apart, (a, b, plan)


def test_mermaid_is_well_formed_and_complete(plans):
    for plan in plans:
        lines = plan.to_mermaid().splitlines()
        assert lines[0] == "flowchart LR"
        opened = sum(line.strip().startswith("subgraph ") for line in lines)
        assert opened == sum(line.strip() == "end" for line in lines) >= len(plan.groups)
        declared = set(re.findall(r"^ *(?:subgraph )?(\w+)[\[{]", "\n".join(lines), re.MULTILINE))
        assert len({name for name in declared if name[0] == "f"}) == len(plan.graph.fragments)
        assert len({name for name in declared if name[0] == "g"}) == len(plan.groups)
        links = [line for line in lines if "-->" in line or ".->" in line or " --- " in line]
        assert {end for line in links for end in (line.split()[0], line.split()[-1])} <= declared
        assert sum("-->" in line or ".->" in line for line in links) == sum(
            m.how == "transfer" for m in plan.movements
        )


def test_names_are_escaped_in_drawings():
    class Odd:
        def init(self, key):
            return jnp.zeros(8)

        def iterate(self, state):
            return fdg.fragment("a<b>\"&'#")(jnp.negative)(state), {}

    plan = fdg.place(Odd(), policies.GPUOnly(), 2)
    ET.fromstring(plan._repr_svg_())
    assert "<b>" not in plan.to_mermaid() and '"&' not in plan.to_mermaid()


def test_notes_are_printed_at_the_end(graphs):
    """Long notes are wrapped."""
    plan = fdg.place(graphs[0], policies.GPUOnly(), 4)
    assert plan.notes == ()
    notes = ("no rule for 'eigh' in fragment 'learn': gathered and run whole on every device", "known " * 30)
    noted = dataclasses.replace(plan, notes=notes)
    assert str(noted).startswith(str(plan)) and notes[0] in str(noted).splitlines()[-3]
    assert max(map(len, str(noted).splitlines())) <= 110
    assert "eigh" in noted._repr_svg_()


def test_plan_for_absent_devices(capsys):
    assert plan_main("--devices 64 --policy central --num-envs 96".split()) == 0
    text = capsys.readouterr().out
    assert "FDG of PPO" in text
    assert "Central(workers=None, servers=1, staleness=0) places PPO on 64 devices" in text
    assert "for 16 steps of learn:" in text and "workers -> servers" in text
