"""Traces an algorithm to its dataflow graph."""
