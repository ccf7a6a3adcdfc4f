"""Running a plan on devices: programs, transfers, time."""
