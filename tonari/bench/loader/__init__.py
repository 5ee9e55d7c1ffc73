"""How many samples a second: ours, other loaders, and what no loader can pass."""
