"""One run, from its settings to its last epoch."""
