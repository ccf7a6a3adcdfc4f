import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envs.codesign import accuracy, children, images, space
from envs.codesign.problem import Problem
from fdg.errors import FdgError
from tests.refusing import refuses

TASK = space.resnet9(size=8, width=2, classes=3, channels=1, data="mine")


def table(path, task=TASK, **changed):
    found = np.random.default_rng(0).integers(0, 10_001, (2, 256)).tolist()
    row = {"settings": [], "accuracy": found, **changed}
    path.write_text(json.dumps({accuracy.signature(task): row}))
    return np.asarray(found)


def test_table_lookup(tmp_path):
    path = tmp_path / "mine.json"
    found = table(path)
    problem = Problem(
        (TASK, space.given("known", TASK.build(2, 4, 0, 8, 0, 16, 0), accuracy=0.25)),
        accuracy="table",
        table=str(path),
    )
    assert np.allclose(accuracy.of_choices(TASK, "table", str(path)), found.mean(0) / 10_000)
    renamed = dataclasses.replace(TASK, name="other", weight=0.1)
    assert np.allclose(accuracy.of_choices(renamed, "table", str(path)), found.mean(0) / 10_000)
    networks = jnp.asarray([[3, 0], [255, 0]], jnp.int32)
    got = accuracy.accuracies(problem.tasks, "table", str(path), networks, jnp.ones(2, bool))
    np.testing.assert_allclose(
        got, [[found[:, 3].mean() / 1e4, 0.25], [found[:, 255].mean() / 1e4, 0.25]], rtol=1e-6
    )
    for other in (dataclasses.replace(TASK, data="others"), space.resnet9(size=9, channels=1, data="mine")):
        with pytest.raises(FdgError, match="has no accuracies of its networks on"):
            accuracy.of_choices(other, "table", str(path))


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"a": 3}', '{"a": {"accuracy": []}}', '{"a": {"accuracy": [[1.5]]}}', "[" * 9999,
     '{"a": {"accuracy": [[10001]]}}', '{"a": {"accuracy": [3]}}', '{"a": {"accuracy": [[true]]}}'],
)  # fmt: skip
def test_invalid_tables_are_refused(text, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(text)
    with refuses(match=r"mine\.json.* (is not a table of accuracies|is not JSON|a JSON object|nested)"):
        accuracy.of_choices(TASK, "table", str(path))


def test_table_of_another_space_is_refused(tmp_path):
    table(tmp_path / "mine.json", accuracy=[[1, 2]])
    with pytest.raises(FdgError, match="needs one accuracy per network"):
        accuracy.of_choices(TASK, "table", str(tmp_path / "mine.json"))


class Linear(space.ResNet9):
    """A space whose children are a single matrix product, so that training compiles quickly."""


def linear(task, build):
    def apply(kernels, choice, pictures):
        flat = pictures.reshape(len(pictures), -1)
        return flat @ kernels["last"].weights[0] * choice[0] + kernels["last"].bias[None]

    return children.Network({"last": (1, 64, 3)}, lambda choice: {"last": (1, 64, 3)}, apply)


def test_only_feasible_children_are_trained(tmp_path, monkeypatch):
    monkeypatch.setitem(children._KINDS, Linear, linear)
    random = np.random.default_rng(0)
    labels = np.arange(60) % 3
    pictures = (random.normal(size=(60, 8, 8)) + labels[:, None, None]).astype(np.float32)
    path = tmp_path / "mine.npz"
    np.savez(path, train_images=pictures, train_labels=labels, test_images=pictures, test_labels=labels)
    task = dataclasses.replace(TASK, build=Linear(8, 3, 1), data=str(path))
    is_needed = jnp.asarray([True, False, True] * 13)
    networks = jnp.arange(39, dtype=jnp.int32)[:, None] * 6
    run = jax.jit(lambda n, w: accuracy.accuracies((task,), "train", "", n, w))
    found = run(networks, is_needed)[:, 0]
    assert (found[~is_needed] == 0).all() and (found[is_needed] > 0.5).all()
    loaded = images.get(str(path))
    direct = children.train(linear(task, None), loaded, jnp.asarray(children.options(task))[networks[:, 0]],
                           0, children.settings(loaded))  # fmt: skip
    np.testing.assert_allclose(found[is_needed], direct[is_needed], atol=1e-5)
    # Independent of the rest of the batch.
    few = run(networks[36:], is_needed[36:])[:, 0]
    np.testing.assert_allclose(few, found[36:], atol=1e-5)
    shared = accuracy.of_choices(task, "supernet")
    assert shared.shape == (256,) and shared.min() > 0.3


def test_table_lookup_of_moved_images(tmp_path):
    (tmp_path / "there").mkdir()
    first, moved = tmp_path / "mine.npz", tmp_path / "there" / "yours.npz"
    first.write_bytes(b"images")
    moved.write_bytes(b"images")
    task, other = (dataclasses.replace(TASK, data=str(path)) for path in (first, moved))
    rows = {accuracy.signature(task): {"accuracy": [[7000] * len(task.choices())]}}
    (tmp_path / "mine.json").write_text(json.dumps(rows))
    assert (accuracy.of_choices(other, "table", str(tmp_path / "mine.json")) == np.float32(0.7)).all()
    changed = tmp_path / "changed.npz"
    changed.write_bytes(b"image")
    with pytest.raises(FdgError, match="has no accuracies of its networks on"):
        accuracy.of_choices(
            dataclasses.replace(TASK, data=str(changed)), "table", str(tmp_path / "mine.json")
        )
    moved.write_bytes(b"other images")  # in the same process, as in a notebook
    with pytest.raises(FdgError, match="has no accuracies of its networks on"):
        accuracy.of_choices(other, "table", str(tmp_path / "mine.json"))


def test_given_networks_cannot_be_trained():
    task = dataclasses.replace(TASK, build=space.Given(()))
    with pytest.raises(FdgError, match="cannot train"):
        children.network(task)
    assert np.isnan(accuracy.of_choices(space.given("x", []), "table")[0])


def test_shipped_table_covers_the_workloads():
    from envs.codesign import reading

    for name in reading.WORKLOADS:
        problem = reading.get(name)
        for task in problem.tasks:
            found = accuracy.of_choices(task, "table")
            # Accuracies of networks differ by more than 0.05, and by more than those of seeds.
            seeds = accuracy.by_seed(task)
            assert found.max() - found.min() > 0.05
            assert len(seeds) < 2 or found.std() > seeds.std(0, ddof=1).mean() / len(seeds) ** 0.5
