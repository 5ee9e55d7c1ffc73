"""Sizes in bytes as people write them."""

import re

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(text: str) -> int:
    """Read a size such as ``"64MiB"``, ``"1.5 GB"`` or ``"4096"``.

    Raises:
        ValueError: If it is not one, or below one byte.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    factor = UNITS.get(match[2].upper()) if match else None
    if match is None or factor is None or float(match[1]) * factor < 1:
        raise ValueError(
            f"found {text!r}, expected a size of at least 1 byte, such as 64MiB or 1.5GB"
        )
    return int(float(match[1]) * factor)


def format_bytes(num_bytes: int) -> str:
    """Write a size with three digits, in units of 1000."""
    value = float(num_bytes)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.3g} TB" if value < 999.5 else f"{value:,.0f} TB"
