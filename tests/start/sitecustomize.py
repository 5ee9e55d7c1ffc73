"""Run by Python at the start of every rank of a test: as in tests/conftest.py."""

import gc

gc.set_threshold(10_000, 10, 10)
