"""Starts the processes of a run, on this machine or on a Ray cluster, and restarts them after a failure."""
