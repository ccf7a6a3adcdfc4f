"""An iteration opened as far as groups differ: straight-line code and loops, effects in order."""
