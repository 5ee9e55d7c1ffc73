"""What a run remembers: snapshots, scores, reports, metrics."""
