"""All pairs: what issue or reader asks for, one line each."""

from bench.peers import checkouts, libraries

PAIRS = {pair.name: pair for pair in (*checkouts.PAIRS, *libraries.PAIRS)}
