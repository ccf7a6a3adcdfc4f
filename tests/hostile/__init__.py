"""Hostile files: commands must refuse them or work as usual, without side effects."""
