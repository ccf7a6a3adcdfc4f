"""Command lines: flags, their parsing to jobs, and the commands that use trained runs."""
