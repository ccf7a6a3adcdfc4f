"""What an iteration costs before it runs, on any cluster: seconds, idle time, bytes by link, memory."""
