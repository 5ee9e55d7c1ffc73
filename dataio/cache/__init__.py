"""A node's rows in files: who holds them, what they mean, where there is room."""
