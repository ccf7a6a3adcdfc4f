"""From an opened iteration to a schedule: pure passes over plain values, each of which prints."""
