"""A study's own training: small models, on one processor."""
