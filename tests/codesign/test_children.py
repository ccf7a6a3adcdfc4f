import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envs.codesign import children, images, space
from envs.codesign.images import Images
from fdg.errors import FdgError
from tests.refusing import refuses

SPACES = {
    "resnet9": lambda: space.resnet9(size=8, width=2, classes=3, channels=2),
    "unet": lambda: space.unet(size=16, width=1, channels=2),
}


def assert_close(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", SPACES)
def test_trained_weights_match_the_cost_model(kind):
    task = SPACES[kind]()
    network = children.network(task)
    for choice in task.choices()[::17]:
        total = 0
        for name, (taps, inputs, outputs) in network.used(jnp.asarray(choice)).items():
            number = int(name.split()[1]) if " " in name else 0
            if kind == "resnet9":
                is_there = not name.startswith("pair") or choice[2 * number]
            else:
                is_there = number < choice[0]
            total += taps * int(inputs) * int(outputs) * bool(is_there)
        assert total == sum(layer.weight_words for layer in task.build(*choice))


def test_convolve_matches_lax():
    random = np.random.default_rng(0)
    for size, stride in ((8, 1), (8, 2), (7, 2), (2, 2), (1, 1)):
        x = jnp.asarray(random.normal(size=(2, size, size, 3)), jnp.float32)
        w = jnp.asarray(random.normal(size=(9, 3, 4)), jnp.float32)
        found = children.convolve(x, children.Kernel(w, jnp.ones(4)), stride)
        expected = jax.lax.conv_general_dilated(
            x, w.reshape(3, 3, 3, 4), (stride,) * 2, [(1, 1)] * 2, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        np.testing.assert_allclose(found, expected + 1, atol=1e-5)


def test_accuracy_and_iou_by_hand():
    network = children.Network({}, lambda _: {}, lambda kernels, choice, x: kernels * x[..., 0])
    pictures = np.asarray([[[1, -1], [1, 1]], [[-1, -1], [1, -1]]], np.float32)[..., None]
    masks = np.asarray([[[1, 0], [0, 1]], [[0, 1], [1, 0]]], np.int32)
    found = children.measure(network, 1.0, None, Images(pictures, masks, pictures, masks))
    assert found == pytest.approx(3 / 5)  # intersection 3, union 5
    classes = children.Network({}, lambda _: {}, lambda kernels, choice, x: x[:, 0, :, 0])
    labels = np.asarray([0, 1], np.int32)
    assert children.measure(classes, None, None, Images(pictures, labels, pictures, labels)) == 0.5


def test_batches_use_every_image_before_repeating():
    order = children.batches(10, children.Settings(steps=5, batch=4), jax.random.key(0))
    assert order.shape == (5, 4) and sorted(order.ravel()[:10].tolist()) == list(range(10))


def test_cells_data_set():
    found = images.get("cells")
    assert found.is_segmentation and found.train.shape[1:] == (16, 16, 1)
    foreground_share = found.train_labels.mean()
    inside = found.train[..., 0][found.train_labels == 1].mean()
    outside = found.train[..., 0][found.train_labels == 0].mean()
    assert 0.1 < foreground_share < 0.5 and inside > outside + 0.3


def test_images_from_a_file(tmp_path):
    random = np.random.default_rng(0)
    arrays = {
        "train_images": random.integers(0, 256, (6, 8, 8), np.uint8), "train_labels": np.arange(6) % 3,
        "test_images": random.integers(0, 256, (3, 8, 8), np.uint8), "test_labels": np.arange(3),
    }  # fmt: skip
    path = tmp_path / "mine.npz"

    def read(**changes):
        np.savez(path, **{k: v for k, v in {**arrays, **changes}.items() if v is not None})
        return images.get(str(path))

    found = read()
    assert (
        found.train.shape == (6, 8, 8, 1)
        and found.train.max() <= 1
        and found.test_labels.tolist() == [0, 1, 2]
    )
    children.check_images(space.resnet9(size=8, classes=3, channels=1), found)
    for task, message in (
        (space.resnet9(size=9, classes=3, channels=1), "8 x 8 with 1 channels, and its networks take 9 x 9"),
        (
            space.resnet9(size=8, classes=2, channels=1),
            "has 3 classes, and its networks 2: write classes = 3",
        ),
        (space.unet(size=16, channels=1), "8 x 8 with 1 channels"),
        (space.given("mine", []), "which fdg cannot train"),
    ):
        with pytest.raises(FdgError, match=message):
            children.check_images(task, found)
    for changes, message in (
        ({"train_labels": None}, "has no array train_labels"),
        ({"train_labels": np.arange(5)}, "train_labels is int64.5. for 6 images"),
        ({"train_images": np.zeros((6, 8))}, "train_images is float64.6, 8.; give numbers"),
        ({"test_images": np.full((3, 8, 8), np.nan)}, "test_images has NaN or infinity"),
        ({"train_labels": np.asarray(["a"] * 6)}, "train_labels is <U1"),
        (
            {"test_images": np.zeros((3, 9, 9))},
            "train_images has items of shape .8, 8, 1., and test_images of .9, 9, 1.",
        ),
        ({"train_labels": np.asarray([{}] * 6, object)}, "is not an .npz file of arrays"),
    ):
        with refuses(match=message):
            read(**changes)
    path.write_bytes(b"PK not a zip")
    with pytest.raises(FdgError, match=r"is not an \.npz file"):
        images.get(str(path))
    for name, message in (
        ("digit", "unknown images 'digit': did you mean 'digits'"),
        ("no.npz", r"no\.npz: there is no such file"),
    ):
        with pytest.raises(FdgError, match=message):
            images.get(name)


def test_digits_data_set():
    pytest.importorskip("sklearn")
    found, rotated = images.get("digits"), images.get("rotated-digits")
    assert found.train.shape == (512, 8, 8, 1) and len(found.test) == 768 and found.train_labels.max() == 9
    assert (found.train_labels == rotated.train_labels).all() and not np.allclose(found.train, rotated.train)
