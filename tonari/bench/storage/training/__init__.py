"""Training with an emulated step, and what was predicted of it."""
