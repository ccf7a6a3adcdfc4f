"""Runs of several processes: joining them, detecting that one died, arrays that they share."""
