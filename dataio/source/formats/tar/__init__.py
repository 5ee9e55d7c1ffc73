"""Samples in tar shards, as WebDataset writes them."""
