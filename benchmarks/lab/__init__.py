"""Studies on the virtual cluster of `tests/lab`: what a plan says beside what happens; links."""
