"""Where the time of an iteration goes, fragment by fragment, beside what the machine could do."""
