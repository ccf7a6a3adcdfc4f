"""Several processes: joining them, noticing that one died, arrays that they share."""
