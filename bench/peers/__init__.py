"""Compares the speed of fdg with other trainers, in turns on one machine: `python -m bench.peers --list`."""
