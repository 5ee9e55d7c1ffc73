"""What people do with caches beside training: list, verify, prune, export."""
