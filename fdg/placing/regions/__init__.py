"""The opened iteration: straight-line code and loops around fragments of several groups, effects in order."""
