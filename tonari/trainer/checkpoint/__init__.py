"""Weights and progress on disk."""
