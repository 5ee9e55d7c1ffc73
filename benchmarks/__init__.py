"""Measurements: one file, one question."""
