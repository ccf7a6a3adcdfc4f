"""How an array lies on a group of devices."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Layout:
    """An array on a group of devices: split along `axis` over `parts` of them, or (1) a copy on each."""

    shape: tuple[int, ...]
    axis: int | None
    devices: int

    @property
    def parts(self) -> int:
        """Into how many different parts it is split."""
        split = self.axis is not None and self.shape[self.axis] % self.devices == 0
        return self.devices if split else 1

    @property
    def split_axis(self) -> int:
        """The axis, of an array that has one."""
        assert self.axis is not None
        return self.axis


def moved_bytes(size: int, target: Layout) -> int:
    """Bytes that arrive: every device of the target gets its part."""
    return size * target.devices // target.parts
