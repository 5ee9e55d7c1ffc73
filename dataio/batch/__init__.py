"""From rows to batches: read, decode, transform, deliver."""
