"""Plans as people see them: golden texts, the width of a terminal, and drawings that are whole."""

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
from tests.showing.golden_drawings import Scattered
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
    """Every policy on both algorithms, on few and many devices."""
    chosen = [*EVERY_POLICY, Scattered()]
    return [fdg.place(g, p, n) for g, p, n in itertools.product(graphs, chosen, (8, 64))]


def test_a_stale_plan_as_a_user_sees_it(graphs):
    policy = policies.SingleLearnerCoarse(actors=4, learners=1, staleness=1)
    assert str(fdg.place(graphs[0], policy, 8)) == STALE


STALE = """\
SingleLearnerCoarse(actors=4, learners=1, staleness=1) places Walker on 8 devices

  fragment    role             group     devices  calls  batch/device
  act         actor            actors    0-3          6             4
  step        environment      actors    0-3          6             4
  act.2       actor            actors    0-3          1             2
  judge       critic_of_taste  actors    0-3          1             4
  learn       learner          learners  4            1            16
    gradient  gradient         learners  4            3            96
    update    update           learners  4            3             -

  each iteration                          where               bytes/crossing  crossings  bytes/iteration
  run act+step+act.2+judge                actors
    all-gather (between fragments)        actors                       192 B          1            192 B
    all-reduce (between fragments)        actors                        12 B          1             12 B
  move act, step, judge -> learn          actors -> learners         1.54 kB          1          1.54 kB
  run learn                               learners
  move learn -> history (next iteration)  learners -> actors            48 B          1             48 B
  1.58 kB an iteration move between groups and 204 B within them; 3.91 kB stay on their devices
  memory per device, about: actors 4.35 kB, learners 3.49 kB
  staleness 1: in iteration t, act and act.2 read weight (12 B) as at the start of iteration t-1
  idle: 5-7 (SingleLearnerCoarse places nothing there)"""


def test_a_plan_whose_groups_share_their_device_in_spite_of_staleness(graphs):
    stale = policies.SingleLearnerCoarse(staleness=1)
    said = "staleness 1: actors and learners share the one device, and never work at the same time: give"
    assert said in str(fdg.place(graphs[0], stale, 1))
    assert said not in str(fdg.place(graphs[0], stale, 2))


def test_a_plan_that_crosses_every_step(graphs):
    assert str(fdg.place(graphs[0], policies.SingleLearnerFine(), 8)) == FINE


FINE = """\
SingleLearnerFine(workers=None, learners=1) places Walker on 8 devices

  fragment    role             group     devices  calls  batch/device
  act         actor            learners  7            6            16
  step        environment      workers   0-3          6             4
  act.2       actor            learners  7            1             8
  judge       critic_of_taste  workers   0-3          1             4
  learn       learner          learners  7            1            16
    gradient  gradient         learners  7            3            96
    update    update           learners  7            3             -

  each iteration                    where                bytes/crossing  crossings  bytes/iteration
  run before act                    learners
  run before step                   workers
  for 6 steps:
    run act                         learners
    move act -> step                learners -> workers            64 B          6            384 B
    run step                        workers
    move step -> act (next step)    workers -> learners           192 B          6          1.15 kB
  run judge                         workers
    all-reduce (between fragments)  workers                         8 B          1              8 B
  move judge -> learn               workers -> learners           384 B          1            384 B
  run act.2+learn                   learners
  1.92 kB an iteration move between groups and 8 B within them; 2.21 kB stay on their devices
  memory per device, about: learners 5.3 kB, workers 416 B
  idle: 4-6 (workers: a batch of 16 divides over 4 of 7 devices)"""


def test_a_plan_whose_learner_is_split(graphs):
    """`learn` is no program of its own: the loop inside it says where its parts are."""
    assert str(fdg.place(graphs[0], policies.Central(), 5)) == CENTRAL


CENTRAL = """\
Central(workers=None, servers=1, staleness=0) places Walker on 5 devices

  fragment    role             group    devices  calls  batch/device
  act         actor            workers  0-3          6             4
  step        environment      workers  0-3          6             4
  act.2       actor            workers  0-3          1             2
  judge       critic_of_taste  workers  0-3          1             4
  learn       learner          workers  0-3          1             4
    gradient  gradient         workers  0-3          3            24
    update    update           servers  4            3             -

  each iteration                         where               bytes/crossing  crossings  bytes/iteration
  run act+step+act.2+judge               workers
    all-gather (between fragments)       workers                      192 B          1            192 B
    all-reduce (between fragments)       workers                       12 B          1             12 B
  for 3 steps of learn:
    run gradient                         workers
      all-reduce of gradient             workers                       12 B          3             36 B
    move gradient -> update              workers -> servers            12 B          3             36 B
    run update                           servers
    move update -> gradient (next step)  servers -> workers            48 B          3            144 B
  180 B an iteration move between groups and 240 B within them; 5.4 kB stay on their devices
  memory per device, about: workers 4.34 kB, servers 60 B"""


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


def test_programs_have_names_of_their_own(plans):
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
            ["idle: 3-4 (SingleLearnerFine places nothing there)"],
        ),
        (policies.SingleLearnerFine(), 5, []),
        (policies.SingleLearnerFine(), 8, ["idle: 4-6 (workers: a batch of 16 divides over 4 of 7 devices)"]),
        (
            Scattered(),
            18,
            [
                "idle: 8 (environments_of_the_simulation_cluster: a batch of 16 divides over 4 of 5 devices)",
                "idle: 16 (gradients: a batch of 96 divides over 6 of 7 devices)",
                "idle: 1, 3, 5, 7 (Scattered places nothing there)",
            ],
        ),
    ],
)
def test_idle_devices_and_why(graphs, policy, devices, reasons):
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
    """By an estimate of their width: the drawing's own, with some air."""
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


def test_names_of_a_user_cannot_break_a_drawing():
    class Odd:
        def init(self, key):
            return jnp.zeros(8)

        def iterate(self, state):
            return fdg.fragment("a<b>\"&'#")(jnp.negative)(state), {}

    plan = fdg.place(Odd(), policies.GPUOnly(), 2)
    ET.fromstring(plan._repr_svg_())
    assert "<b>" not in plan.to_mermaid() and '"&' not in plan.to_mermaid()


def test_notes_of_other_passes_are_printed_at_the_end(graphs):
    """Such as what could not be predicted; long ones are wrapped."""
    plan = fdg.place(graphs[0], policies.GPUOnly(), 4)
    assert plan.notes == ()
    notes = ("no rule for 'eigh' in fragment 'learn': gathered and run whole on every device", "known " * 30)
    noted = dataclasses.replace(plan, notes=notes)
    assert str(noted).startswith(str(plan)) and notes[0] in str(noted).splitlines()[-3]
    assert max(map(len, str(noted).splitlines())) <= 110
    assert "eigh" in noted._repr_svg_()


def test_a_plan_for_machines_that_are_not_there(capsys):
    assert plan_main("--devices 64 --policy central --num-envs 96".split()) == 0
    text = capsys.readouterr().out
    assert "FDG of PPO" in text
    assert "Central(workers=None, servers=1, staleness=0) places PPO on 64 devices" in text
    assert "for 16 steps of learn:" in text and "workers -> servers" in text
