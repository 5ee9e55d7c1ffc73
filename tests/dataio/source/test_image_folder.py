"""Image folders read as torchvision numbers them."""

import io
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Picture

from dataio.base.errors import FieldError, SourceError
from dataio.rows.fields import Bytes, Field, Image, Int, Text
from dataio.rows.views import Resize
from dataio.source import ImageFolderSource, open_source
from dataio.world import World, run_threads, thread_worlds
from tests.dataio.source.shards import Row, ids, read_all, rows_of, write_tar

FIELDS: dict[str, Field] = {"label": Int("label"), "image": Bytes("image"), "path": Text("path")}
FILES = {
    "b/2.jpg": 1,
    "b/10.JPEG": 1,
    "b/sub/0.png": 1,
    "a/é.webp": 0,
    "a/notes.txt": None,
    "c/x.jpg": 2,
    "README.md": None,
}
ORDER = ["a/é.webp", "b/10.JPEG", "b/2.jpg", "b/sub/0.png", "c/x.jpg"]


def write(root: Path) -> str:
    for name in FILES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode() * 100)
    return str(root)


def expected(number: int) -> Row:
    name = ORDER[number]
    label = FILES[name]
    assert label is not None
    return number, [np.int64(label).tobytes(), name.encode() * 100, name.encode()]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_classes_are_numbered_by_name_and_samples_by_path(tmp_path: Path, num_ranks: int) -> None:
    write(tmp_path)

    def work(world: World) -> tuple[str, list[Row]]:
        source = open_source(f"{tmp_path}/", world=world)
        assert isinstance(source, ImageFolderSource)
        assert source.classes == ["a", "b", "c"]
        mine = np.arange(world.rank, source.num_samples, world.world_size)
        return source.fingerprint, rows_of(source.read(mine, FIELDS))

    ranks = run_threads(thread_worlds([num_ranks]), work)
    assert len({fingerprint for fingerprint, _ in ranks}) == 1
    assert sorted(row for _, rows in ranks for row in rows) == [expected(i) for i in range(5)]


def test_a_relative_directory_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert read_all(open_source("."), FIELDS) == [expected(i) for i in range(5)]


def test_every_byte_is_counted_and_only_what_is_needed_is_read(tmp_path: Path) -> None:
    source = open_source(write(tmp_path))
    assert isinstance(source, ImageFolderSource)
    assert source.bytes_read == 0
    list(source.read(ids(0, 2), FIELDS))
    assert source.bytes_read == sum(len(expected(i)[1][1]) for i in (0, 2))
    opens = source.storage.num_opens
    assert opens == 2
    list(source.read(np.arange(5), {"label": Int("label")}))
    assert source.storage.num_opens == opens


def test_the_fingerprint_tells_changed_files(tmp_path: Path) -> None:
    before = open_source(write(tmp_path)).fingerprint
    assert open_source(str(tmp_path)).fingerprint == before
    os.utime(tmp_path / "b" / "2.jpg", ns=(1, 1))
    changed = open_source(str(tmp_path)).fingerprint
    assert changed != before
    (tmp_path / "c" / "y.jpg").write_bytes(b"x")
    assert open_source(str(tmp_path)).fingerprint != changed


def test_images_decode_while_staging(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    file = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (5, 4, 3), np.uint8)
    Picture.fromarray(pixels).save(file, "PNG")
    (tmp_path / "a" / "0.png").write_bytes(file.getvalue())
    (tmp_path / "a" / "1.png").write_bytes(b"torn")
    source = open_source(str(tmp_path))
    fields: dict[str, Field] = {"image": Image("image", resize=Resize((5, 4)), decoded=True)}
    assert rows_of(source.read(ids(0), fields)) == [(0, [pixels.tobytes()])]
    with pytest.raises(FieldError, match=r"a/1\.png: sample 1, field 'image': 4 bytes .* do not"):
        read_all(source, fields)


def test_what_is_not_an_image_folder_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(
        FieldError, match="an image folder holds image, label, path, expected 'jpg'"
    ):
        read_all(open_source(str(tmp_path)), {"x": Bytes("jpg")})
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match="empty: the directory holds no image, expected each"):
        open_source(str(tmp_path))
    with pytest.raises(SourceError, match="empty: the directory holds no shard"):
        open_source(str(tmp_path / "empty"))
    # Shards are what the directory is about, whatever else lies beside them.
    write_tar(tmp_path / "0.tar", [("0.cls", b"7")])
    assert open_source(str(tmp_path)).num_samples == 1


def test_a_file_that_is_gone_is_refused(tmp_path: Path) -> None:
    source = open_source(write(tmp_path))
    (tmp_path / "b" / "2.jpg").unlink()
    with pytest.raises(SourceError, match=r"b/2\.jpg: cannot be opened"):
        read_all(source, FIELDS)
