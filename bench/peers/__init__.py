"""fdg against other trainers, in turns on one machine: `python -m bench.peers --list`."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
