"""Rates and times with their units, in three digits."""


def rate(bytes_per_s: float) -> str:
    """Write a bandwidth with its unit."""
    return _scaled(bytes_per_s, ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "B/s")))


def duration(seconds: float) -> str:
    """Write a time with its unit."""
    return _scaled(seconds, ((1.0, "s"), (1e-3, "ms"), (1e-6, "\N{MICRO SIGN}s"), (1e-9, "ns")))


def span(seconds: float) -> str:
    """Write a time in the largest unit, up to days, of which it has one."""
    if seconds < 60:
        return duration(seconds)
    return _scaled(seconds, ((86400.0, "d"), (3600.0, "h"), (60.0, "min")))


def _scaled(value: float, units: tuple[tuple[float, str], ...]) -> str:
    for scale, name in units:
        if value >= scale * 0.9995:
            is_large = value >= 999.5 * scale
            return f"{value / scale:{',.0f' if is_large else '.3g'}} {name}"
    return f"0 {units[-1][1]}"
