"""Rows of batches that processes elsewhere decode and transform for the ranks that train."""
