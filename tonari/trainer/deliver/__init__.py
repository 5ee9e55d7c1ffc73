"""Batches from the rank that reads them to those that need them."""
