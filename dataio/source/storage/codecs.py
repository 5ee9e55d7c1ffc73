"""By what bytes are compressed, as their first ones say: names lie, or say nothing. Pure."""

HEAD_BYTES = 12
"""Enough of the first bytes for any codec."""
_MAGIC = {
    **{b"\x1f\x8b\x08": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bz2", b"\xfd7zXZ\0": "xz"},
    **{b"PK\3\4": "zip", b"\4\x22\x4d\x18": "lz4"},
}
_SKIPPED_BY_ZSTD = b"\x2a\x4d\x18"
"""Behind a first byte of 0x50 to 0x5f: a frame that holds no data."""


def codec_of(begin: bytes) -> str | None:
    """Name the codec that a file begins with: gzip, zlib, zstd, bz2, xz, zip or lz4, or None.

    Args:
        begin: Its first `HEAD_BYTES`, fewer if it is shorter.
    """
    for magic, codec in _MAGIC.items():
        if begin.startswith(magic):
            return codec
    if begin[1:4] == _SKIPPED_BY_ZSTD and begin[0] >> 4 == 5:
        return "zstd"
    # Deflate with a window of 32 KiB; the two bytes are a multiple of 31.
    is_zlib = begin[:1] == b"\x78" and int.from_bytes(begin[:2], "big") % 31 == 0
    return "zlib" if is_zlib else None
