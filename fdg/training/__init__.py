"""Training runs: jobs, the training loop and run directories; evaluation, export, comparison and search."""
