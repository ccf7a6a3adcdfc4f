"""A whole training run: its job, its loop, and what it leaves on disk and on the screen."""
