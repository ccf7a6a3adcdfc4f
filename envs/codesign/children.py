"""Trains many networks of a space (children) at once as one masked network.

Results equal those of separate training; `envs.codesign.accuracy` uses them.

A mapped convolution with different kernels per child is slow on a CPU. Here it is a batched matrix product of
patches and kernels. A child with fewer filters is the widest network with its other filters multiplied by 0,
so all children of a space share one program.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from envs.codesign.images import Images
from envs.codesign.space import ResNet9, Task, UNet
from fdg.errors import FdgError


class Settings(NamedTuple):
    """Training settings of children."""

    steps: int = 40  # optimiser steps
    batch: int = 32  # images per step
    learning_rate: float = 0.01  # of Adam (Kingma and Ba, 2015), with cosine decay to 0


class Kernel(NamedTuple):
    """Parameters of a convolution or product, as wide as the widest child."""

    weights: jax.Array  # [taps, in, out] float32
    bias: jax.Array  # [out] float32


Sizes = dict[str, tuple[int, Any, Any]]  # by a kernel's name: taps, input channels, output channels


class Network(NamedTuple):
    """The masked network of all children of a space."""

    sizes: Sizes  # of the kernels, as wide as the widest child's
    # (choice [decisions] int32, the chosen options) -> the sizes of the kernels that the child uses
    used: Callable[[jax.Array], Sizes]
    # (kernels, choice, images [N, rows, columns, channels]) -> logits [N, classes] or [N, rows, columns]
    apply: Callable[[dict[str, Kernel], jax.Array, jax.Array], jax.Array]


def patches(images: jax.Array, stride: int) -> jax.Array:
    """Input patches of a 3 x 3 convolution, padded by a pixel.

    `[N, P, Q, 9 * channels]` for P x Q outputs: all channels of the first tap, then of the second.
    """
    rows, columns = images.shape[1:3]
    padded = jnp.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    down, across = rows - (rows - 1) % stride, columns - (columns - 1) % stride
    taps = [padded[:, i : i + down : stride, j : j + across : stride] for i in range(3) for j in range(3)]
    return jnp.concatenate(taps, -1)


def convolve(images: jax.Array, kernel: Kernel, stride: int = 1) -> jax.Array:
    """A 3 x 3 convolution, padded by a pixel, as a matrix product; one pixel needs only the middle tap."""
    weights = kernel.weights
    if images.shape[1:3] == (1, 1):
        inputs, weights = images, weights[4:5]
    else:
        inputs = patches(images, stride)
    flat = inputs.reshape(-1, inputs.shape[-1]) @ weights.reshape(-1, weights.shape[-1])
    return (flat + kernel.bias[None]).reshape(*inputs.shape[:3], -1)


def _pointwise(images: jax.Array, kernel: Kernel) -> jax.Array:
    """A 1 x 1 convolution."""
    flat = images.reshape(-1, images.shape[-1]) @ kernel.weights[0] + kernel.bias[None]
    return flat.reshape(*images.shape[:-1], -1)


def _upsample(images: jax.Array, kernel: Kernel) -> jax.Array:
    """A transposed convolution, 2 x 2 with stride 2: each pixel becomes four."""
    num_images, rows, columns, channels = images.shape
    flat = images.reshape(-1, channels)
    pixels = jnp.stack([flat @ tap for tap in kernel.weights], 1) + kernel.bias[None, None]
    pixels = pixels.reshape(num_images, rows, columns, 2, 2, -1).transpose(0, 1, 3, 2, 4, 5)
    return pixels.reshape(num_images, 2 * rows, 2 * columns, -1)


def _leaky(images: jax.Array) -> jax.Array:
    """A leaky ReLU with slope 0.1: at full size there may be only two filters, which must not both die."""
    return jax.nn.leaky_relu(images, 0.1)


def _mask_filters(width: jax.Array, images: jax.Array) -> jax.Array:
    """Zeroes the feature maps of the filters from index `width` on."""
    return images * (jnp.arange(images.shape[-1]) < width)[None, None, None]


def _resnet9(task: Task, space: ResNet9) -> Network:
    """The masked network of `ResNet9`: filters beyond a child's are 0, as are its missing residual pairs."""

    def used(choice: Any) -> Sizes:
        filters = [choice[0], choice[1], choice[3], choice[5]]
        sizes: Sizes = {"first": (9, space.channels, filters[0])}
        for stage in (1, 2, 3):
            sizes[f"down {stage}"] = 9, filters[stage - 1], filters[stage]
            sizes |= {f"pair {stage} {i}": (9, filters[stage], filters[stage]) for i in (0, 1)}
        return {**sizes, "last": (1, filters[3], space.classes)}

    def apply(kernels: dict[str, Kernel], choice: jax.Array, images: jax.Array) -> jax.Array:
        features = _mask_filters(choice[0], jax.nn.relu(convolve(images, kernels["first"])))
        for stage in (1, 2, 3):
            width, residuals = choice[2 * stage - 1], choice[2 * stage]
            features = _mask_filters(width, jax.nn.relu(convolve(features, kernels[f"down {stage}"], 2)))
            residual = jax.nn.relu(convolve(features, kernels[f"pair {stage} 0"]))
            residual = convolve(_mask_filters(width, residual), kernels[f"pair {stage} 1"])
            features = _mask_filters(width, jax.nn.relu(features + residuals * residual))
        return features.mean((1, 2)) @ kernels["last"].weights[0] + kernels["last"].bias[None]

    return Network(used([max(decision.options) for decision in task.decisions]), used, apply)


def _unet(task: Task, space: UNet) -> Network:
    """The masked network of `UNet`: filters beyond a child's are 0, and its lower levels are not used."""
    heights, firsts, inners, lasts = (decision.options for decision in task.decisions)
    levels, first, inner = max(heights), max(firsts), max(inners)
    # A level's map has the inner width, or the last level's if the network ends there.
    level_widths = [
        first,
        *[max(inner if level < levels - 1 else 0, max(lasts)) for level in range(1, levels)],
    ]
    uppers = [first, *[inner] * (levels - 2)]  # of all levels but the last

    def sizes(uppers: list, lowers: list) -> Sizes:
        """The sizes of kernels, from the widths of levels.

        `uppers` are the widths of levels that have a lower level; `lowers`, of levels that have an upper one.
        """
        kernels: Sizes = {"first": (9, space.channels, uppers[0]), "end": (1, uppers[0], 1)}
        for level in range(1, levels):
            upper, lower = uppers[level - 1], lowers[level]
            kernels |= {f"down {level}": (9, upper, lower), f"up {level}": (4, lower, upper)}
            kernels[f"join {level}"] = 9, 2 * upper, upper
        return kernels

    def width(choice: jax.Array, level: int) -> jax.Array:
        height, first, inner, last = choice
        return first if level == 0 else jnp.where(level == height - 1, last, inner)

    def used(choice: jax.Array) -> Sizes:
        widths = [width(choice, level) for level in range(levels)]
        return sizes(widths, widths)

    def apply(kernels: dict[str, Kernel], choice: jax.Array, images: jax.Array) -> jax.Array:
        features = _mask_filters(choice[1], _leaky(convolve(images, kernels["first"])))
        maps = [features]
        for level in range(1, levels):
            features = _leaky(convolve(maps[-1][..., : uppers[level - 1]], kernels[f"down {level}"], 2))
            maps.append(_mask_filters(width(choice, level), features))
        for level in reversed(range(1, levels)):
            # If the network ends at this level, there is no lower level.
            features = jnp.where(level == choice[0] - 1, maps[level], jnp.pad(
                features, ((0, 0),) * 3 + ((0, level_widths[level] - features.shape[-1]),)
            ))  # fmt: skip
            upsampled = _leaky(_upsample(features, kernels[f"up {level}"]))
            upsampled = _mask_filters(width(choice, level - 1), upsampled)
            joined = jnp.concatenate([upsampled, maps[level - 1][..., : uppers[level - 1]]], -1)
            features = _mask_filters(
                width(choice, level - 1), _leaky(convolve(joined, kernels[f"join {level}"]))
            )
        return _pointwise(features, kernels["end"])[..., 0]

    return Network(sizes(uppers, level_widths), used, apply)


# type of `Task.build` -> function that makes the masked network
_KINDS: dict[type, Callable[[Task, Any], Network]] = {ResNet9: _resnet9, UNet: _unet}


def network(task: Task) -> Network:
    """The masked network of a task's space."""
    kind = _KINDS.get(type(task.build))
    if kind is None:
        raise FdgError(
            f"task '{task.name}': its networks are given as layers, which fdg cannot train: give"
            " accuracy=, or space = 'resnet9' or 'unet'"
        )
    return kind(task, task.build)


def options(task: Task) -> np.ndarray:
    """The options of every choice of a task, [choices, decisions] int32."""
    return np.asarray(task.choices(), np.int32)


def init(children: Network, choice: jax.Array, key: jax.Array) -> dict[str, Kernel]:
    """A child's initial parameters: normal as in He et al. (2015), for the child's own width.

    Children with the same key share random numbers, which reduces the noise between them.
    """
    used, kernels = children.used(choice), {}
    for index, (name, (taps, inputs, outputs)) in enumerate(children.sizes.items()):
        draw = jax.random.normal(jax.random.fold_in(key, index), (taps, inputs, outputs))
        num_products = used[name][1] * (1 if name.startswith("up") else taps)  # per output
        # A residual pair starts as zero, so that a deeper child starts equal to a shallower one.
        scale = jnp.where(name.startswith("pair") and name.endswith(" 1"), 0, jnp.sqrt(2 / num_products))
        kernels[name] = Kernel(scale * draw, jnp.zeros(outputs))
    return kernels


def _loss(children: Network, kernels: Any, choice: jax.Array, images: jax.Array, labels: jax.Array) -> Any:
    """Mean cross-entropy; for masks, plus one minus the overlap (Dice).

    The overlap term keeps children from predicting only background (Milletari et al., 3DV 2016, arXiv
    1606.04797).
    """
    logits = children.apply(kernels, choice, images)
    if labels.ndim > 1:
        masks, probability = jnp.asarray(labels, jnp.float32), jax.nn.sigmoid(logits)
        overlap = 2 * (masks * probability).sum() / (masks + probability).sum()
        return optax.sigmoid_binary_cross_entropy(logits, masks).mean() + 1 - overlap
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def measure(children: Network, kernels: Any, choice: jax.Array, images: Images) -> jax.Array:
    """A child's accuracy on the test images, or intersection over union of masks; float32 scalar."""
    chunk_size = 128  # images; the last chunk is padded with labels of -1
    num_images = len(images.test)
    padding = -num_images % chunk_size
    tests, labels = (
        jnp.pad(jnp.asarray(x), ((0, padding), *[(0, 0)] * (x.ndim - 1)), constant_values=fill).reshape(
            -1, chunk_size, *x.shape[1:]
        )
        for x, fill in ((images.test, 0), (images.test_labels, -1))
    )

    def count(chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """The numerator and the denominator of the accuracy."""
        logits = children.apply(kernels, choice, chunk[0])
        if chunk[1].ndim == 1:
            return (logits.argmax(-1) == chunk[1]).sum(), (chunk[1] >= 0).sum()
        mask, truth, is_test = logits > 0, chunk[1] == 1, chunk[1] >= 0
        return (mask & truth & is_test).sum(), ((mask | truth) & is_test).sum()

    correct, total = (x.sum() for x in jax.lax.map(count, (tests, labels)))
    return correct / jnp.maximum(total, 1)


def batches(number: int, settings: Settings, key: jax.Array) -> jax.Array:
    """Indices of each step's images among `number`, [steps, batch] int32: epochs without replacement."""
    epochs = -(-settings.steps * settings.batch // number)
    orders = jax.vmap(lambda key: jax.random.permutation(key, number))(jax.random.split(key, epochs))
    return orders.ravel()[: settings.steps * settings.batch].reshape(settings.steps, settings.batch)


def fit(
    children: Network, images: Images, choices: jax.Array, kernels: Any, order: jax.Array, rate: float
) -> dict[str, Kernel]:
    """Trains the kernels [E, ...] of E children, each as if alone; returns them.

    `choices` [E, decisions] int32 are the chosen options, `order` [steps, batch] int32 the image indices of
    each step, and `rate` is Adam's initial step size, with cosine decay to 0.
    """
    gradient = jax.vmap(jax.grad(functools.partial(_loss, children)), in_axes=(0, 0, None, None))
    return _run_adam(
        lambda kernels, _, *batch: gradient(kernels, choices, *batch), images, kernels, order, rate
    )


def _run_adam(
    gradient: Callable, images: Images, kernels: Any, order: jax.Array, rate: float, keys: Any = None
) -> Any:
    """Kernels after Adam's steps on `gradient(kernels, key, images, labels)`; the rest is as for `fit`.

    `keys` [steps] are random keys, one for each step, or None.
    """
    train_images, labels = jnp.asarray(images.train), jnp.asarray(images.train_labels)
    optimizer = optax.adam(optax.cosine_decay_schedule(rate, len(order)))

    def step(carry: tuple, per_step: tuple) -> tuple[tuple, None]:
        (kernels, state), (indices, key) = carry, per_step
        gradients = gradient(kernels, key, train_images[indices], labels[indices])
        change, state = optimizer.update(gradients, state, kernels)
        return (optax.apply_updates(kernels, change), state), None

    return jax.lax.scan(step, (kernels, optimizer.init(kernels)), (order, keys))[0][0]


def train(
    children: Network, images: Images, choices: jax.Array, seed: jax.Array | int, settings: Settings
) -> jax.Array:
    """Trains E children together, which share only random numbers; returns their accuracies, [E] float32.

    `choices` [E, decisions] int32 are the chosen options.
    """
    init_key, batch_key = jax.random.split(jax.random.fold_in(jax.random.key(0), seed))
    kernels = jax.vmap(lambda choice: init(children, choice, init_key))(choices)
    order = batches(len(images.train), settings, batch_key)
    kernels = fit(children, images, choices, kernels, order, settings.learning_rate)
    return jax.vmap(lambda child, choice: measure(children, child, choice, images))(kernels, choices)


def settings(images: Images) -> Settings:
    """Training settings for these images, the same in tables and within programs."""
    return Settings(60, 8, 0.01) if images.is_segmentation else Settings(80, 32, 0.0025)


def check_images(task: Task, images: Images) -> None:
    """Raises an `FdgError` if images do not fit a task's networks."""
    network(task)
    build: Any = task.build
    size, channels = build.size, build.channels
    if images.train.shape[1:] != (size, size, channels):
        rows, columns, image_channels = images.train.shape[1:]
        raise FdgError(
            f"task '{task.name}': images of '{task.data}' are {rows} x {columns} with {image_channels}"
            f" channels, and its networks take {size} x {size} with {channels}: write size = {rows},"
            f" channels = {image_channels}"
        )
    if images.is_segmentation != isinstance(build, UNet):
        labels, fits = ("masks", "unet") if images.is_segmentation else ("classes", "resnet9")
        raise FdgError(
            f"task '{task.name}': labels of '{task.data}' are {labels}, which need space = '{fits}'"
        )
    num_classes = 1 + int(max(images.train_labels.max(), images.test_labels.max()))
    if isinstance(build, ResNet9) and num_classes > build.classes:
        raise FdgError(
            f"task '{task.name}': '{task.data}' has {num_classes} classes, and its networks {build.classes}:"
            f" write classes = {num_classes}"
        )


def supernet(task: Task, images: Images, seed: int = 0, steps: int = 400) -> jax.Array:
    """Accuracies of all children with shared kernels, [choices] float32.

    A step sums gradients of the widest child, the narrowest and two random ones (the sandwich rule: Yu and
    Huang, ICCV 2019, arXiv 1903.05134); then each child is measured without further training.
    """
    children, all_choices = network(task), jnp.asarray(options(task))
    training = settings(images)._replace(steps=steps)
    init_key, batch_key, draw_key = jax.random.split(jax.random.key(seed), 3)
    ends = jnp.asarray([[max(x.options) for x in task.decisions], [min(x.options) for x in task.decisions]])

    def loss(kernels: Any, choices: jax.Array, images: jax.Array, labels: jax.Array) -> jax.Array:
        return jax.vmap(lambda choice: _loss(children, kernels, choice, images, labels))(choices).mean()

    def gradient(kernels: Any, key: jax.Array, *batch: jax.Array) -> Any:
        drawn = all_choices[jax.random.randint(key, (2,), 0, len(all_choices))]
        return jax.grad(loss)(kernels, jnp.concatenate([ends, drawn]), *batch)

    kernels = init(children, ends[0], init_key)
    order = batches(len(images.train), training, batch_key)
    keys = jax.random.split(draw_key, training.steps)
    kernels = _run_adam(gradient, images, kernels, order, training.learning_rate, keys)
    return jax.lax.map(lambda choice: measure(children, kernels, choice, images), all_choices, batch_size=16)
