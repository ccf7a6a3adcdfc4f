"""The hardware that the cost model predicts for, as plain data: kinds of devices, links and clusters.

Every rate is a `Figure`: a number with its source and spread. A kind of device is a name, a platform and
figures by name, so published tables, calibrations and cluster files all have the same form.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from fdg.costs.overheads import OVERHEADS, Overheads
from fdg.errors import FdgError, PlanError, unknown_name


class Figure(NamedTuple):
    """A value with its relative spread (0.1: 10% up or down; 0: unknown) and its source."""

    value: float
    spread: float = 0.0
    source: str = ""


class Rate(NamedTuple):
    """What a figure of a kind of device means, and its values where nothing was measured or published."""

    meaning: str  # its unit, then what it measures
    # for CPUs without a calibration: measured on a core of a server of 2026 (`bench/machines/intel-xeon-*`),
    # except those of float64, linear algebra and host calls, which are assumed; None if they lack the figure
    core: float | None = None
    # for kinds that lack the figure; None to use the rate of memory (for products: that of another product)
    default: float | None = None
    gpu: float | None = None  # the defaults of GPUs and TPUs, where they differ from `default`
    tpu: float | None = None

    @property
    def unit(self) -> str:
        """The unit: "FLOP/s", "B/s", "B" or "s"; another word if it is a share, from 0 to 1."""
        return self.meaning.split()[0]


RATES: Mapping[str, Rate] = {  # each with its meaning, `core` and `default`
    "product/float32": Rate("FLOP/s of large products of float32 matrices", 1.5e11),
    "product/bfloat16": Rate("FLOP/s of large products of bfloat16 matrices"),
    "product/float16": Rate("FLOP/s of large products of float16 matrices"),
    "product/float64": Rate("FLOP/s of large products of float64 matrices", 7.5e10),
    "product_bytes": Rate("B/s at which a product reads and writes its matrices", 1.9e10),
    "product_call": Rate("s of overhead per matrix product", 2.5e-7, 0.0),
    "convolution": Rate("share of the rate of products that convolutions reach", None, 0.5),
    "memory": Rate("B/s read and written, arrays larger than the cache", 2.2e10),
    "cache": Rate("B/s read and written, arrays that fit into the cache", 2.6e10),
    "cache_bytes": Rate("B that an operation can read and write at the rate of the cache", 2**21, 1.0),
    "elementwise": Rate("B/s of additions and similar operations", 2.5e10),
    "transcendental": Rate("B/s of tanh and similar functions", 2.1e10),
    "special": Rate("B/s of sine, powers, remainders and similar functions", 2.9e9),
    "reduction": Rate("B/s of sums and other reductions", 1.3e10),
    "random": Rate("B/s of random bits", 2.3e8),
    "sort": Rate("B/s of sorts", 3.5e7),
    "movement": Rate("B/s of gathers and scatters, counting whole cache lines", 2e11),
    "copy": Rate("B/s of slices, transpositions and other copies", 4.7e10),
    "linear algebra": Rate("B/s of factorisations and other linear algebra", 1e9),
    "host": Rate("B/s to and from functions on the host", 3.4e9),
    "host_call": Rate("s per call of a function on the host", 3e-5, 2e-5),
    # On GPUs: a kernel takes about 4 us to start, as measured. Without a command buffer, each trip of an XLA
    # loop waits until the host decides to continue.
    "operation": Rate("s to start an operation within a program", 1.7e-8, 1e-7, gpu=4e-6, tpu=1e-6),
    "trip": Rate("s per trip of a loop within a program, in addition to its operations",
                 1e-8, 1e-6, gpu=1.2e-5, tpu=2e-6),
    "dispatch": Rate("s of the host to start a program", 3.2e-6, 5e-5, tpu=1e-4),
    "argument": Rate("s of the host per argument or result of a program", 6e-7, 1e-6),
    "transfer": Rate("s of the host to start moving an array between groups", 5.9e-6, 2e-5),
    "parallel": Rate("speedup that each additional core adds to a large operation, 0 to 1", 1.0, 0.0),
    "parallel_bytes": Rate("B from which an operation is divided among several cores", 1e5, 1e5),
    "memory_bytes": Rate("B of memory on a device", None, 1e18),
}  # fmt: skip
"""The figures that a kind of device may have."""


def _in_unit(*units: str) -> frozenset[str]:
    """The figures in these units."""
    return frozenset(name for name, rate in RATES.items() if rate.unit in units)


SHARES, SIZES = _in_unit("share", "speedup"), _in_unit("B")  # figures from 0 to 1; figures in bytes
TIMES = _in_unit("s")  # the smaller, the better
PLATFORMS = ("cpu", "gpu", "tpu")  # JAX's names


@dataclasses.dataclass(frozen=True)
class DeviceKind:
    """A kind of device, with what the cost model knows about it."""

    name: str  # such as "H100"
    platform: str  # as in JAX: "cpu", "gpu" or "tpu"
    # figures by their names in `RATES`; `rate` derives missing ones from others
    figures: Mapping[str, Figure]
    # for each class of operations, the time after XLA's fusion as a fraction of the time without it; None for
    # the values of the platform (`program_time.SHARES_AFTER_FUSION`)
    shares_after_fusion: Mapping[str, float] | None = None
    # overheads of programs and transfers; None for those of the platform (`effective_overheads`)
    overheads: Overheads | None = None

    def __post_init__(self) -> None:
        if self.platform not in PLATFORMS:
            raise FdgError(
                f"device kind {self.name}: platform {self.platform!r} must be one of {', '.join(PLATFORMS)}"
            )
        for name, figure in self.figures.items():
            if name not in RATES:
                raise unknown_name(f"rate of device kind {self.name}", name, RATES)
            where = f"device kind {self.name}: {name}"
            may_be_zero = name in TIMES or name == "parallel"
            _check_number(where, figure.value, f"{RATES[name].meaning}, a number", may_be_zero)
            if name in SHARES:
                _check_share(where, figure.value)
        for name, value in vars(self.overheads).items() if self.overheads else ():
            where = f"device kind {self.name}: overhead {name}"
            _check_number(where, value, may_be_zero=name not in ("shared", "meetings"))
        for name, value in (self.shares_after_fusion or {}).items():
            _check_number(f"device kind {self.name}: share of {name} after fusion ('joined')", value)
        if not any(name.startswith("product/") for name in self.figures) or "memory" not in self.figures:
            raise FdgError(
                f"device kind {self.name} lacks figures: give 'memory' ({RATES['memory'].meaning}) and at"
                f" least one product rate, such as 'product/float32'"
            )

    @property
    def effective_overheads(self) -> Overheads:
        """The overheads of this kind if it has its own, else those of its platform."""
        return self.overheads or OVERHEADS[self.platform]

    def rate(self, name: str) -> float:
        """The value of a figure. A figure that this kind lacks is derived from others, or has a default."""
        if name in self.figures:
            return self.figures[name].value
        if name.startswith("product/"):
            return self._product_rate(name.removeprefix("product/"))
        if name not in RATES:
            raise unknown_name("rate", name, RATES)
        rate = RATES[name]
        own = {"gpu": rate.gpu, "tpu": rate.tpu}.get(self.platform)
        default = rate.default if own is None else own
        return self.figures["memory"].value if default is None else default

    def _product_rate(self, dtype: str) -> float:
        """FLOP/s for a dtype without a figure: the next wider dtype's, else scaled from the widest."""
        num_bytes = _DTYPE_BYTES.get(dtype, 4)
        rates = {
            _DTYPE_BYTES[name.removeprefix("product/")]: figure.value
            for name, figure in self.figures.items()
            if name.startswith("product/")
        }
        wider = [size for size in rates if size >= num_bytes]
        return rates[min(wider)] if wider else rates[max(rates)] * max(rates) / num_bytes


# Bytes of an element, for the dtypes that figures or programs name.
_DTYPE_BYTES = {"float8": 1, "int8": 1, "bfloat16": 2, "float16": 2, "float32": 4, "int32": 4, "float64": 8}
BY_BYTES = (  # the classes of operations whose rates are bytes per second
    "elementwise", "transcendental", "special", "reduction", "random", "sort", "movement", "copy",
    "linear algebra", "host",
)  # fmt: skip


def _check_number(where: str, value: Any, noun: str = "a number", may_be_zero: bool = True) -> None:
    """Raises `FdgError` if a value is not a finite number, is negative, or is zero although it may not be.

    The message begins with `where`, and asks for a `noun`.
    """
    is_number = isinstance(value, int | float) and math.isfinite(value)
    if not is_number or value < (0 if may_be_zero else 1e-30):
        raise FdgError(f"{where} = {value!r}: give {noun} {'of at least' if may_be_zero else 'above'} 0")


def _check_share(where: str, value: float) -> None:
    """Raises `FdgError` for a share above 1, which may be a percentage."""
    if value > 1:
        fix = f"for {value:g}% write {value / 100:g}"
        raise FdgError(f"{where} = {value!r}: give a share, from 0 to 1; {fix}")


_ZERO = Figure(0.0)


@dataclasses.dataclass(frozen=True)
class Link:
    """A network link."""

    name: str  # such as "NVLink 4"
    latency: Figure  # seconds for the first byte of a message
    bandwidth: Figure  # bytes/s one way, per device (within a host) or per host (between hosts)
    call: Figure = _ZERO  # seconds of overhead per collective, in addition to its messages

    def __post_init__(self) -> None:
        for name in ("latency", "bandwidth", "call"):
            value = getattr(self, name).value
            _check_number(f"link {self.name}: {name}", value, may_be_zero=name != "bandwidth")


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedDevice:
    """A device that need not exist."""

    platform: str  # as in JAX


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Hosts with devices of one kind on one network; with `first`, hosts of two kinds."""

    kind: DeviceKind  # the kind of all devices, except those of `first`
    devices_per_host: int
    hosts: int
    inside: Link  # the link between devices of a host
    between: Link  # the link between hosts
    cores: int | None = None  # shared by a machine's CPU devices; None if each device has its own
    hosts_per_machine: int = 1  # hosts (processes) that share a machine's cores
    price: float = 0.0  # the price of a device for an hour, in any currency
    straggling: float = 0.0  # relative standard deviation of devices' times for equal work
    failures: float = 0.0  # the expected number of failures of a device in an hour
    restart: float = 300.0  # seconds from a failure until the last checkpoint is loaded
    storage: float = 1e9  # bytes/s at which all hosts together write checkpoints
    note: str = ""  # further information on these figures
    # hosts of another kind, whose devices come before those of this one; policies give them to environments
    # and actors
    first: "Cluster | None" = None

    def __post_init__(self) -> None:
        for name in ("devices_per_host", "hosts", "hosts_per_machine", "cores"):
            value = getattr(self, name)
            if (name, value) == ("cores", None):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise FdgError(f"cluster: {name} = {value!r}: give a whole number of at least 1")
        for name in ("price", "straggling", "failures", "restart"):
            _check_number(f"cluster: {name}", getattr(self, name))
        _check_share("cluster: straggling", self.straggling)
        _check_number("cluster: storage", self.storage, "bytes per second", may_be_zero=False)

    @property
    def devices_per_machine(self) -> int:
        """Number of devices of a machine, which share its cores."""
        return self.devices_per_host * min(self.hosts, self.hosts_per_machine)

    @property
    def machines(self) -> int:
        """Number of machines."""
        return -(-self.hosts // self.hosts_per_machine)

    @property
    def devices(self) -> int:
        """Number of devices, of both kinds."""
        return self._devices_before + self.hosts * self.devices_per_host

    @property
    def _devices_before(self) -> int:
        return 0 if self.first is None else self.first.devices

    @property
    def parts(self) -> tuple["Cluster", ...]:
        """The hosts of each kind, in the order of their devices."""
        return (self,) if self.first is None else (self.first, dataclasses.replace(self, first=None))

    def part_of(self, devices: Sequence[int]) -> "Cluster":
        """The hosts of one kind that have these devices; `PlanError` if the devices are of two kinds."""
        before = self._devices_before
        if min(devices) >= before:
            return self.parts[-1]
        if max(devices) < before:
            return self.parts[0]
        raise PlanError(
            f"a group has devices {min(devices)} to {max(devices)}, but those before {before} are of"
            f" another kind than {self.kind.name}: choose a policy and sizes of groups so that all"
            " devices of a group are of one kind"
        )

    def host_of(self, device: int) -> int:
        """The number of a device's host, counted over both kinds."""
        if self.first is None:
            return device // self.devices_per_host
        if device < self.first.devices:
            return device // self.first.devices_per_host
        return self.first.hosts + (device - self.first.devices) // self.devices_per_host

    def per_hour(self, name: str, devices: Collection[int]) -> float:
        """The sum of `price` or `failures` over these devices."""
        before = sum(device < self._devices_before for device in devices)
        own = getattr(self, name) * (len(devices) - before)
        return own + getattr(self.first, name) * before if before else own

    def platforms(self, devices: int) -> list[str]:
        """The platforms of the first `devices` devices, as in JAX."""
        before = [] if self.first is None else [self.first.kind.platform] * self.first.devices
        return (before + [self.kind.platform] * devices)[:devices]

    def to_place(self, devices: int) -> Any:
        """The first `devices` devices, as `fdg.place` takes them: a number if the cluster has one kind."""
        if self.first is None:
            return devices
        return [PlannedDevice(platform) for platform in self.platforms(devices)]

    def of(self, devices: int) -> "Cluster":
        """A part of the cluster with this many devices, from 1 to `self.devices`.

        Raises:
          FdgError: the devices fill more than one host, but not whole hosts.
        """
        before, per_host = self._devices_before, self.devices_per_host
        if devices <= before:
            return self.parts[0].of(devices)
        if devices - before <= per_host:
            return dataclasses.replace(self, hosts=1, devices_per_host=devices - before)
        hosts, remainder = divmod(devices - before, per_host)
        if remainder:
            fewer = devices - remainder
            raise FdgError(
                f"{devices} devices are not a whole number of hosts of {per_host}: use {fewer}"
                + (f" or {fewer + per_host}" if hosts < self.hosts else "")
            )
        return dataclasses.replace(self, hosts=hosts)
