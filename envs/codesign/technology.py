"""Constants of the cost model: energies and areas of a process and its memories."""

import dataclasses
import math

from fdg.errors import FdgError


@dataclasses.dataclass(frozen=True)
class Technology:
    """Constants of a process.

    Access energies are relative to a multiply-accumulate: Chen et al., ISCA 2016 (Eyeriss), Table IV. The
    absolute energy is Horowitz's (ISSCC 2014, figure 1.1.9): 8 bits at 45 nm, 0.2 + 0.03 pJ. Areas are fitted
    by least squares to NVDLA's seven published configurations at 28 nm (nvdla.org, primer).
    """

    clock_hz: float = 1e9  # cycles per second
    word_bytes: int = 1  # bytes of a weight, an input or an output
    mac_pj: float = 0.23  # energy of a multiply-accumulate
    # energy of a PE's register access, relative to `mac_pj`; a multiply-accumulate makes four: two reads of
    # operands, a read and a write of the sum
    register_ratio: float = 1.0
    noc_ratio: float = 2.0  # likewise, of moving a word between the buffer and the PEs
    buffer_ratio: float = 6.0  # likewise, of accessing a word in the buffer
    dram_ratio: float = 200.0  # likewise, of accessing a word in off-chip memory
    leakage_w_per_mm2: float = 0.0  # leakage while the chip works; 0 ignores it
    pe_mm2: float = 0.00178  # area of a PE with an 8-bit multiplier; templates multiply it
    buffer_mm2_per_kb: float = 0.00325  # area of a buffer's kilobyte (1,024 bytes)
    chip_mm2: float = 0.384  # area of the chip's shared parts

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_positive = field.name in ("clock_hz", "word_bytes", "mac_pj")
            is_number = (
                isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            )
            if not is_number or value < 0 or (is_positive and value == 0):
                bound = "above 0" if is_positive else "of at least 0"
                raise FdgError(f"technology: {field.name} is {value!r}; give a number {bound}")
        if not isinstance(self.word_bytes, int):
            raise FdgError(f"technology: word_bytes is {self.word_bytes}; give a whole number of bytes")
