"""Start, stop, hangs, times, memory."""
