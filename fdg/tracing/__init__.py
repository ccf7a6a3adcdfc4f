"""From an algorithm to its dataflow graph."""
