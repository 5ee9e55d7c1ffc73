"""Stop, times, memory, metrics."""
