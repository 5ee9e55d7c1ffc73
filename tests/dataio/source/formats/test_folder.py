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


def put(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(os.fsencode(name))
    return root


def paths(root: Path) -> list[tuple[int, str]]:
    rows = read_all(open_source(str(root)), {"label": Int("label"), "path": Bytes("path")})
    return [(int.from_bytes(label, "little"), os.fsdecode(path)) for _, (label, path) in rows]


@pytest.mark.parametrize(
    "hidden",
    [
        ".ipynb_checkpoints/1-checkpoint.jpg",
        "__MACOSX/cat/._1.jpg",
        "@eaDir/1.jpg",
        "lost+found/1.jpg",
        "cat/._1.jpg",
        "cat/.ipynb_checkpoints/1-checkpoint.jpg",
        "cat/__MACOSX/1.jpg",
    ],
)
def test_what_is_hidden_is_no_class_and_no_image(tmp_path: Path, hidden: str) -> None:
    put(tmp_path, "cat/1.jpg", "dog/1.jpg")
    before = open_source(str(tmp_path)).fingerprint
    times = {name: (tmp_path / name).stat().st_mtime_ns for name in ("cat", "dog")}
    put(tmp_path, hidden)
    for name, time in times.items():
        os.utime(tmp_path / name, ns=(time, time))
    assert paths(tmp_path) == [(0, "cat/1.jpg"), (1, "dog/1.jpg")]
    assert open_source(str(tmp_path)).fingerprint == before
    empty = tmp_path / ".git"
    empty.mkdir()
    assert paths(tmp_path) == [(0, "cat/1.jpg"), (1, "dog/1.jpg")]


def test_links_to_images_and_directories_are_followed(tmp_path: Path) -> None:
    put(tmp_path / "else", "owl/3.jpg", "4.jpg")
    root = put(tmp_path / "root", "cat/1.jpg")
    (root / "dog").symlink_to(tmp_path / "else" / "owl")
    (root / "cat" / "2.jpg").symlink_to(tmp_path / "else" / "4.jpg")
    assert paths(root) == [(0, "cat/1.jpg"), (0, "cat/2.jpg"), (1, "dog/3.jpg")]


@pytest.mark.parametrize(
    ("name", "to", "said"),
    [
        ("cat/again", "..", r"cat/again/cat: is a link to a directory that it lies in|again: is a"),
        ("cat/self", "self", "cat/self: is a link to self, where nothing can be read"),
        ("cat/sub/up", "../../cat", "is a link to a directory that it lies in"),
        ("cat/2.jpg", "gone.jpg", r"cat/2\.jpg: is a link to gone\.jpg, where nothing can be read"),
        ("cat/more", "/gone", "cat/more: is a link to /gone, where nothing can be read"),
        ("owl", "/gone/owl", "owl: is a link to /gone/owl, where nothing can be read"),
    ],
)
def test_links_that_lose_or_repeat_images_are_refused(
    tmp_path: Path, name: str, to: str, said: str
) -> None:
    put(tmp_path, "cat/1.jpg", "dog/1.jpg")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).symlink_to(to)
    with pytest.raises(SourceError, match=said):
        open_source(str(tmp_path))


def test_directories_that_cannot_be_listed_and_images_that_are_no_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "cat/1.jpg", "cat/sub/2.jpg")
    scandir = os.scandir

    def refuse(place: str) -> object:
        if place.endswith("sub"):
            raise PermissionError(13, "Permission denied", place)
        return scandir(place)

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", refuse)
        with pytest.raises(SourceError, match=r"cat/sub: cannot be listed .*Permission denied"):
            open_source(str(tmp_path))
    os.mkfifo(tmp_path / "cat" / "3.jpg")
    with pytest.raises(SourceError, match=r"cat/3\.jpg: is neither a file nor a directory"):
        open_source(str(tmp_path))


def test_names_that_are_not_utf8_are_kept(tmp_path: Path) -> None:
    put(tmp_path, os.fsdecode(b"caf\xe9/1\xff.jpg"), "dog/1.jpg")
    source = open_source(str(tmp_path))
    assert isinstance(source, ImageFolderSource)
    assert list(map(os.fsencode, source.classes)) == [b"caf\xe9", b"dog"]
    assert [os.fsencode(path) for _, path in paths(tmp_path)] == [
        b"caf\xe9/1\xff.jpg",
        b"dog/1.jpg",
    ]
    with pytest.raises(FieldError, match="expected UTF-8"):
        read_all(source, {"path": Text("path")})


def test_images_beside_the_classes_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(tmp_path, "cat/1.jpg", "preview.png")
    assert paths(tmp_path) == [(0, "cat/1.jpg")]
    assert "1 images lie beside the directories of the classes, such as preview.png" in caplog.text


def test_files_of_classes_that_are_not_read_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = write(tmp_path)
    for name in ("a/1.jfif", "a/sub/2.jfif", "b/3.HEIC", "b/Thumbs.db", "b/.hidden", "c/notes"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    assert open_source(root).num_samples == len(ORDER)
    (said,) = [record.getMessage() for record in caplog.records if "not read" in record.message]
    assert "5 files in the directories of the classes are not read (2 .jfif, " in said
    assert all(kind in said for kind in ("1 .HEIC", "1 .txt", "1 notes", ".jpg, .jpeg"))
