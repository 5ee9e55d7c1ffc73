"""Sizes in bytes, and lengths of time, as people write them."""

import re

from dataio.base.sizes import UNITS, format_bytes, parse_bytes

__all__ = ["DURATIONS_S", "UNITS", "format_bytes", "parse_bytes", "parse_duration_s"]

DURATIONS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def parse_duration_s(text: str) -> float:
    """Read a length of time such as ``"7d"``, ``"12h"`` or ``"90s"`` in seconds.

    Raises:
        ValueError: If it is not one.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhdw])\s*", text)
    if match is None:
        raise ValueError(f"found {text!r}, expected a number of s, m, h, d or w, such as 7d or 12h")
    return float(match[1]) * DURATIONS_S[match[2]]
