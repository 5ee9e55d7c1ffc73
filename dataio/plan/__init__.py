"""Which rows, where and when: decided by arithmetic, the same on every rank."""
