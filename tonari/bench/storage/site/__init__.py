"""What lies under a directory, and what its counters and caches show."""
