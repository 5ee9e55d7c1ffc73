"""A node's rows as training sees them: staged, pulled, moved, streamed."""
