"""The cost model: predicts seconds, idle time, bytes on links and memory of an iteration on any cluster."""
