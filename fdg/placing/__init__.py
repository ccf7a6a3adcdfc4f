"""Placement: from a graph and a distribution policy to a plan of programs and transfers."""
