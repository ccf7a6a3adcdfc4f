"""Images for measuring accuracies: scikit-learn's digits, harder digits, synthetic cells, files.

The images are the same for all networks and seeds. They are few and small, so that training takes seconds.
"""

import functools
import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fdg.errors import FdgError, one_line, unknown_name
from fdg.reading import cached_by_stamp, open_regular


class Images(NamedTuple):
    """Images with classes or segmentation masks; NumPy arrays."""

    train: np.ndarray  # [N, rows, columns, channels] float32
    train_labels: np.ndarray  # [N] int32 classes, or [N, rows, columns] int32 of 0 and 1
    test: np.ndarray  # [M, rows, columns, channels] float32
    test_labels: np.ndarray  # [M, ...], like train_labels

    @property
    def is_segmentation(self) -> bool:
        """True if labels are masks."""
        return self.train_labels.ndim == 3


_TRAIN, _TEST = 512, 768  # numbers of images, of the 1,797 digits
_CELLS_TRAIN, _CELLS_TEST, _CELLS_SIZE = 96, 128, 16  # numbers of images, and their rows and columns


def digits(noise: float = 0.35, degrees: float = 0.0) -> Images:
    """512 training and 768 test images (8 x 8): scikit-learn's digits with normal noise and random rotations.

    `noise` is the noise's standard deviation (ink is 1), `degrees` the largest rotation in either direction.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise FdgError("the images 'digits' come with scikit-learn: pip install 'fdg[codesign]'") from None
    import scipy.ndimage

    loaded = load_digits()
    random = np.random.default_rng(0)
    order = random.permutation(len(loaded.images))[: _TRAIN + _TEST]
    images, labels = loaded.images[order] / 16, loaded.target[order].astype(np.int32)
    if degrees:
        angles = random.uniform(-degrees, degrees, len(images))
        rotated = [
            scipy.ndimage.rotate(x, angle, reshape=False, order=1)
            for x, angle in zip(images, angles, strict=True)
        ]
        images = np.stack(rotated)
    images = images + noise * random.normal(size=images.shape)
    images = (2 * images - 1).astype(np.float32)[..., None]
    return Images(images[:_TRAIN], labels[:_TRAIN], images[_TRAIN:], labels[_TRAIN:])


def draw_cells(key: jax.Array, number: int, size: int = _CELLS_SIZE, noise: float = 0.3) -> tuple:
    """Images of three soft-edged ellipses on an uneven, noisy background, and their masks.

    Returns `[number, size, size, 1] float32` and `[number, size, size] int32`, 1 within a cell.
    """
    centre_key, radius_key, angle_key, light_key, ground_key, noise_key = jax.random.split(key, 6)
    cells = 3
    centre = jax.random.uniform(centre_key, (number, cells, 2)) * size
    radii = size * jax.random.uniform(radius_key, (number, cells, 2), minval=0.08, maxval=0.24)
    angle = jax.random.uniform(angle_key, (number, cells), maxval=jnp.pi)
    light = jax.random.uniform(light_key, (number, cells), minval=0.6, maxval=1.4)
    rows, columns = jnp.mgrid[:size, :size] + 0.5
    down = rows[None, None] - centre[..., 0, None, None]
    across = columns[None, None] - centre[..., 1, None, None]
    cos, sin = jnp.cos(angle)[..., None, None], jnp.sin(angle)[..., None, None]
    along, aside = cos * down + sin * across, cos * across - sin * down
    distance = jnp.hypot(along / radii[..., 0, None, None], aside / radii[..., 1, None, None])
    shade = (light[..., None, None] * jax.nn.sigmoid(4 * (1 - distance))).max(1)
    slope = jax.random.uniform(ground_key, (number, 2, 1, 1), minval=-1, maxval=1)
    ground = slope[:, 0] * rows[None] / size + slope[:, 1] * columns[None] / size
    images = shade + ground + noise * jax.random.normal(noise_key, shade.shape)
    return images[..., None], (distance < 1).any(1).astype(jnp.int32)


def cells() -> Images:
    """96 training and 128 test images of synthetic cells, 16 x 16."""
    with jax.ensure_compile_time_eval():
        images, masks = map(np.asarray, draw_cells(jax.random.key(0), _CELLS_TRAIN + _CELLS_TEST))
    return Images(images[:_CELLS_TRAIN], masks[:_CELLS_TRAIN], images[_CELLS_TRAIN:], masks[_CELLS_TRAIN:])


_IMAGES: dict[str, Callable[[], Images]] = {
    "digits": digits,
    "rotated-digits": functools.partial(digits, noise=0.3, degrees=60.0),
    "cells": cells,
}
NAMES = tuple(_IMAGES)
_MAX_BYTES = 2**30  # maximum size of a file's arrays
_ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")  # names of a file's arrays


@cached_by_stamp
def get(name: str) -> Images:
    """The images with a name in `NAMES`, or in a file `.npz`.

    A file has `train_images` and `test_images`, [N, rows, columns] or [N, rows, columns, channels] of numbers
    (uint8 is divided by 255), and `train_labels` and `test_labels`, classes [N] or masks [N, rows, columns]
    of 0 and 1; no pickles.

    Raises:
      FdgError: unknown name; the file lacks these arrays; scikit-learn is not installed.
    """
    if name.endswith(".npz"):
        return _read_npz(Path(name))
    _check_not_empty(name)
    if name not in _IMAGES:
        raise unknown_name("images", name, (*NAMES, "FILE.npz"))
    return _IMAGES[name]()


def _check_not_empty(name: str) -> None:
    if not name:
        raise FdgError(f"a task has no images: write data = followed by one of {', '.join(NAMES)}, FILE.npz")


@cached_by_stamp
def signature(name: str) -> str:
    """A name in `NAMES`; for a file its digest, so that it may be moved."""
    if not name.endswith(".npz"):
        _check_not_empty(name)
        return name
    with open_regular(name) as file:
        return f"sha256 {hashlib.file_digest(file, 'sha256').hexdigest()}"


def _read_npz(path: Path) -> Images:
    """The images of a file; raises an `FdgError` if its arrays are missing, or do not fit together."""
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            size = sum(member.file_size for member in archive.infolist())
        if size > _MAX_BYTES:
            raise FdgError(f"{path} holds {size:,} bytes: give at most {_MAX_BYTES:,}")
        with np.load(path, allow_pickle=False) as arrays:
            missing = [name for name in _ARRAYS if name not in arrays]
            if missing:
                raise FdgError(f"{path} has no array {missing[0]}: it must have {', '.join(_ARRAYS)}")
            train, train_labels, test, test_labels = (arrays[name] for name in _ARRAYS)
    except FdgError:
        raise
    except (OSError, ValueError, zipfile.BadZipFile, EOFError, KeyError, NotImplementedError) as error:
        raise FdgError(f"{path} is not an .npz file of arrays: {one_line(error)}") from None
    parts = []
    for what, images, labels in (("train", train, train_labels), ("test", test, test_labels)):
        shape = np.shape(images)
        if images.dtype.kind not in "uif" or len(shape) not in (3, 4) or 0 in shape:
            raise FdgError(
                f"{path}: {what}_images is {images.dtype}{list(shape)}; give numbers [N, rows, columns] or"
                " [N, rows, columns, channels], none of the lengths 0"
            )
        if labels.dtype.kind not in "uib" or labels.shape not in (shape[:1], shape[:3]):
            raise FdgError(
                f"{path}: {what}_labels is {labels.dtype}{list(labels.shape)} for {shape[0]} images; give"
                " whole numbers [N], or masks [N, rows, columns]"
            )
        scaled = images.astype(np.float32) / (255 if images.dtype == np.uint8 else 1)
        if not np.isfinite(scaled).all() or labels.min() < 0:
            raise FdgError(
                f"{path}: {what}_images has NaN or infinity, or {what}_labels has numbers below 0:"
                " remove them"
            )
        parts += [scaled[..., None] if len(shape) == 3 else scaled, labels.astype(np.int32)]
    for kind, train_part, test_part in zip(("images", "labels"), parts[:2], parts[2:], strict=True):
        if train_part.shape[1:] != test_part.shape[1:]:
            raise FdgError(
                f"{path}: train_{kind} has items of shape {list(train_part.shape[1:])}, and test_{kind} of"
                f" {list(test_part.shape[1:])}: give both the same shape"
            )
    if parts[1].ndim == 3 and max(parts[1].max(), parts[3].max()) > 1:
        raise FdgError(f"{path}: masks have labels above 1: give 0 and 1")
    return Images(*parts)
