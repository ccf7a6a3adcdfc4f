"""Scheduling passes: from an opened iteration to a schedule. Each works on plain values."""
