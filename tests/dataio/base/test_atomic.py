"""A damaged record is named, and its bytes are not shown."""

from pathlib import Path

import pytest

from dataio.base.atomic import read_record, write_record
from dataio.base.errors import DamagedFileError


@pytest.mark.parametrize(
    "data", [b"", bytes(5000), b"\xff" * 5000, b"[1]", b"{}", b'{"checksum": 1}', b"{" * 100_000]
)
def test_a_record_that_is_none_is_named_in_a_short_message(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "meta.json"
    write_record(path, {"a": 1})
    assert read_record(path) == {"a": 1}
    path.write_bytes(data)
    with pytest.raises(DamagedFileError, match=r"meta\.json: damaged: of \d+ bytes") as caught:
        read_record(path)
    assert len(str(caught.value)) < 400
