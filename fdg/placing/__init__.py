"""Places a graph under a distribution policy: the result is a plan of programs and transfers."""
