"""From a graph and a distribution policy to a plan: which group runs what, in which order, and what moves."""
