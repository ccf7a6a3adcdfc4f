"""Training runs: jobs, the training loop, run directories, and terminal output."""
