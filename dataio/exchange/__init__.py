"""Rows on their way between nodes."""
