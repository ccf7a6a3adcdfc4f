"""All comparisons of `python -m bench.peers`: pairs by name."""

from bench.peers import checkouts, libraries

PAIRS = {pair.name: pair for pair in (*checkouts.PAIRS, *libraries.PAIRS)}
