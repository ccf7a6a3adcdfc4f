"""Passes that turn an opened iteration into a schedule. Each works on plain values."""
