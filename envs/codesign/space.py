"""Search spaces of networks and of chips within budgets, as hashable values."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envs.codesign import cost, templates
from envs.codesign.cost import SubAccelerators
from envs.codesign.layers import Layer, addition, convolution, gemm, transposed_convolution
from fdg.errors import FdgError


class Decision(NamedTuple):
    """A decision and its options."""

    name: str
    options: tuple


@dataclasses.dataclass(frozen=True)
class Task:
    """A search space of networks for a task, or one given network without decisions."""

    name: str  # of the task
    decisions: tuple[Decision, ...]  # in order
    # the layers of a choice, with one option per decision, in execution order; hashable
    build: Callable[..., list[Layer]]
    weight: float = 1.0  # weight of its accuracy in a design's score
    data: str = ""  # name of the images for measuring accuracies, or path of an image file
    accuracy: float | None = None  # of a network without decisions, from 0 to 1; None: measured, or unknown
    # dependencies (i, j) of a given network: layer i must end before j starts; None: a chain
    branches: tuple[tuple[int, int], ...] | None = None

    def choices(self) -> list[tuple]:
        """All choices, with the last decision changing fastest."""
        return list(itertools.product(*(decision.options for decision in self.decisions)))


@dataclasses.dataclass(frozen=True)
class Given:
    """`Task.build` of a given network."""

    layers: tuple[Layer, ...]

    def __call__(self) -> list[Layer]:
        """The layers of the network."""
        return list(self.layers)


def given(name: str, layers: list[Layer], **fields: Any) -> Task:
    """A task with a given network.

    Args:
      name: of the task.
      layers: in topological order.
      **fields: other fields of `Task`.

    >>> from envs.codesign import networks
    >>> given("classify", networks.get("resnet18")).choices()
    [()]
    """
    return Task(name, (), Given(tuple(layers)), **fields)


@dataclasses.dataclass(frozen=True)
class ResNet9:
    """A convolution, three stages that halve the image, each with 0 or 1 residual pairs, and a classifier."""

    size: int  # rows and columns of the image
    classes: int  # outputs
    channels: int  # of the image

    def __call__(self, width: int, *stages: int) -> list[Layer]:
        """The layers for these choices: filters of the first convolution, then, for each stage, its filters
        and its number of residual pairs."""
        layers, channels, rows = [convolution(self.channels, width, self.size)], width, self.size
        for width, residuals in zip(stages[::2], stages[1::2], strict=True):
            layers, rows = [*layers, convolution(channels, width, rows, stride=2)], -(-rows // 2)
            pair = [convolution(width, width, rows)] * 2
            layers, channels = [*layers, *[*pair, addition(width, rows)] * residuals], width
        return [*layers, gemm(1, self.classes, channels)]


def resnet9(
    name: str = "classify",
    *,
    size: int = 32,
    width: int = 16,
    classes: int = 10,
    channels: int = 3,
    **fields: Any,
) -> Task:
    """256 classifiers: `ResNet9` with these sizes.

    Args:
      name: of the task.
      size: rows and columns of the images.
      width: the first convolution has 0.5 to 2 times as many filters, stage i 2^i to 2^(i+1) times.
      classes: outputs.
      channels: of the images.
      **fields: other fields of `Task`.
    """
    _check_integers("resnet9", {"size": size, "classes": classes, "channels": channels}, 1)
    _check_integers("resnet9", {"width": width}, 2, even=True)
    stages = [
        (Decision(f"filters {i}", (width << i, width << (i + 1))), Decision(f"residuals {i}", (0, 1)))
        for i in (1, 2, 3)
    ]
    first = Decision("filters 0", tuple(width // 2 * i for i in (1, 2, 3, 4)))
    return Task(name, (first, *itertools.chain(*stages)), ResNet9(size, classes, channels), **fields)


@dataclasses.dataclass(frozen=True)
class UNet:
    """Levels that halve the image, then levels that double it and also read the map of their own size."""

    size: int  # rows and columns of the image, a multiple of 2^(height - 1)
    channels: int  # of the image

    def __call__(self, height: int, first: int, inner: int, last: int) -> list[Layer]:
        """The layers of `height` levels, with filters of the first, the inner and the last level."""
        widths = [first, *[inner] * (height - 2), last]
        layers = [convolution(self.channels, first, self.size)]
        for level in range(1, height):
            layers += [convolution(widths[level - 1], widths[level], self.size >> (level - 1), stride=2)]
        for level in reversed(range(height - 1)):
            rows = self.size >> (level + 1)
            layers += [transposed_convolution(widths[level + 1], widths[level], rows, kernel=2, stride=2)]
            layers += [convolution(2 * widths[level], widths[level], 2 * rows)]  # with this level's map
        return [*layers, convolution(first, 1, self.size, kernel=1)]


def unet(name: str = "segment", *, size: int = 64, width: int = 4, channels: int = 3, **fields: Any) -> Task:
    """256 U-Nets for segmentation: 2 to 5 levels, filters of the first, the inner and the last.

    Args:
      name: of the task.
      size: rows and columns of the images, a multiple of 16.
      width: the first level has 1 to 4 times as many filters, inner ones 2 to 8, the last 4 to 16.
      channels: of the images.
      **fields: other fields of `Task`.
    """
    _check_integers("unet", {"width": width, "channels": channels}, 1)
    _check_integers("unet", {"size": size}, 16)
    if size % 16:
        raise FdgError(f"unet: size is {size}, which five levels cannot halve: give a multiple of 16")
    filters = [
        Decision(f"filters {at}", tuple(width * times * i for i in (1, 2, 3, 4)))
        for at, times in (("first", 1), ("inner", 2), ("last", 4))
    ]
    return Task(name, (Decision("height", (2, 3, 4, 5)), *filters), UNet(size, channels), **fields)


def _check_integers(what: str, sizes: dict[str, Any], least: int, even: bool = False) -> None:
    """Raises an `FdgError` for a size that is not an integer from `least` to 4096."""
    for name, value in sizes.items():
        is_whole = isinstance(value, int) and not isinstance(value, bool) and least <= value <= 4096
        if not is_whole or (even and value % 2):
            kind = "an even number" if even else "a whole number"
            raise FdgError(f"{what}: {name} is {value!r}; give {kind} from {least} to 4096")


# value of the key `space` in a problem's file -> function that makes the task
SPACES: dict[str, Callable[..., Task]] = {"resnet9": resnet9, "unet": unet}


@dataclasses.dataclass(frozen=True)
class Chips:
    """Chips of one or more sub-accelerators that share budgets."""

    subaccelerators: int = 2  # maximum number
    templates: tuple[str, ...] = cost.TEMPLATES  # names
    pes: tuple[int, ...] = tuple(range(0, 4097, 512))  # numbers of PEs; 0 for an absent sub-accelerator
    noc_bytes_per_cycle: tuple[float, ...] = tuple(range(8, 57, 8))  # bandwidths between buffer and PEs
    buffer_kb: tuple[int, ...] = (64, 128, 256, 512)  # buffer sizes
    budget_pes: int = 4096  # total over sub-accelerators
    budget_noc_bytes_per_cycle: float = 64  # total over sub-accelerators
    dram_bytes_per_cycle: float = 16.0  # per sub-accelerator

    def __post_init__(self) -> None:
        count = self.subaccelerators
        if not (isinstance(count, int) and not isinstance(count, bool) and 1 <= count <= 8):
            raise FdgError(f"chips: subaccelerators is {count!r}; give 1 to 8")
        for name in ("templates", "pes", "noc_bytes_per_cycle", "buffer_kb"):
            options = getattr(self, name)
            if isinstance(options, list):
                options = tuple(options)
                object.__setattr__(self, name, options)
            if not options or len(set(options)) < len(options):
                raise FdgError(f"chips: {name} is {options}; give at least one option, each once")
        if min(self.pes) < 0:
            raise FdgError(f"chips: pes is {self.pes}; numbers of PEs are 0 or more")
        least_pes = min((x for x in self.pes if x), default=0)
        needed = self.subaccelerators * min(self.noc_bytes_per_cycle)
        if not 0 < least_pes <= self.budget_pes:
            raise FdgError(
                f"chips: no option of pes={self.pes} is in the budget of {self.budget_pes} PEs;"
                f" give one from 1 to {self.budget_pes}, or a larger budget"
            )
        if 0 not in self.pes and self.subaccelerators * least_pes > self.budget_pes:
            raise FdgError(
                f"chips: {self.subaccelerators} sub-accelerators need {self.subaccelerators * least_pes} PEs,"
                f" more than budget_pes={self.budget_pes}; give smaller options of pes,"
                " or the option 0, which is no sub-accelerator"
            )
        if needed > self.budget_noc_bytes_per_cycle:
            raise FdgError(
                f"chips: {self.subaccelerators} sub-accelerators need at least {needed} bytes a cycle, over "
                f"budget_noc_bytes_per_cycle={self.budget_noc_bytes_per_cycle}; give smaller options of"
                f" noc_bytes_per_cycle, or a larger budget"
            )
        jax.eval_shape(lambda: self._each_option(least_pes))  # checks options; no arrays at import

    def _each_option(self, least_pes: int) -> list[SubAccelerators]:
        """Sub-accelerators that together use each option."""
        template, noc, kilobytes = self.templates[0], self.noc_bytes_per_cycle[0], self.buffer_kb[0]
        kinds = [
            *((pes, option, noc, kilobytes) for option in self.templates for pes in self.pes if pes),
            *((least_pes, template, option, kilobytes) for option in self.noc_bytes_per_cycle),
            *((least_pes, template, noc, option) for option in self.buffer_kb),
        ]
        return [self._sub_accelerator(kind) for kind in kinds]

    def decisions(self) -> tuple[Decision, ...]:
        """The decisions of one sub-accelerator."""
        return (
            Decision("pes", self.pes),
            Decision("template", self.templates),
            Decision("noc_bytes_per_cycle", self.noc_bytes_per_cycle),
            Decision("buffer_kb", self.buffer_kb),
        )

    def kinds(self) -> list[tuple]:
        """Every sub-accelerator as (pes, template, noc_bytes_per_cycle, buffer_kb); the first is absent."""
        present = [tuple(x for x in self.pes if x), *(x.options for x in self.decisions()[1:])]
        return [(0, *(x.options[0] for x in self.decisions()[1:])), *itertools.product(*present)]

    def subs(self) -> SubAccelerators:
        """The sub-accelerators of `kinds` in arrays `[len(kinds)]`; the absent one has sizes of 0."""
        kinds, (first, *_) = self.kinds(), self.templates
        shapes = {(x, y): templates.get(y).shape(x) for x in self.pes if x for y in self.templates}
        shapes[0, first] = (0, 0)
        rows, columns = np.asarray([shapes[kind[:2]] for kind in kinds], np.int32).T
        is_present = rows > 0
        template_indices = np.asarray([self.templates.index(kind[1]) for kind in kinds], np.int32)
        noc, kilobytes = (np.asarray([kind[i] for kind in kinds]) * is_present for i in (2, 3))
        return SubAccelerators(
            template=jnp.asarray(template_indices),
            rows=jnp.asarray(rows),
            columns=jnp.asarray(columns),
            buffer_bytes=jnp.asarray(1024 * kilobytes, jnp.int32),
            noc_bytes_per_cycle=jnp.asarray(noc, jnp.float32),
            dram_bytes_per_cycle=jnp.asarray(is_present * self.dram_bytes_per_cycle, jnp.float32),
        )

    def _sub_accelerator(self, kind: tuple) -> SubAccelerators:
        """One of `kinds` as arrays; raises an `FdgError` if it is not valid."""
        pes, template, noc, kilobytes = kind
        rates = {"noc_bytes_per_cycle": noc, "dram_bytes_per_cycle": self.dram_bytes_per_cycle}
        return cost.sub_accelerator(
            template, pes, buffer_bytes=1024 * kilobytes, known=self.templates, **rates
        )

    def all(self) -> np.ndarray:
        """Indices in `kinds` of every chip within the budgets, without permutations: [chips,
        subaccelerators]."""
        kinds = self.kinds()
        pes = np.asarray([kind[0] for kind in kinds])
        noc = np.asarray([kind[2] if kind[0] else 0 for kind in kinds])
        positions = np.asarray(
            list(itertools.combinations_with_replacement(range(len(kinds)), self.subaccelerators))
        )
        fits = (pes[positions].sum(1) <= self.budget_pes) & (pes[positions].sum(1) > 0)
        return positions[fits & (noc[positions].sum(1) <= self.budget_noc_bytes_per_cycle)]
