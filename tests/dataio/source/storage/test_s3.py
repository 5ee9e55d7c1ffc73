"""Shards in S3: a real server, and a network between that cuts and stalls."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from dataio import Bytes, Int, Loader, Reports, Workers
from dataio.base.errors import SourceError
from dataio.rows.fields import Field
from dataio.source import Retry, Storage, expand, open_source, write_index
from dataio.source.storage.s3 import locate
from dataio.world import single_world
from tests.dataio.source.shards import ids, numbered, read_all, rows_of, write_tar
from tests.dataio.source.storage.tcp_proxy import TcpProxy, Way, cut_after, stall, unavailable

needs_server = pytest.mark.slow

FIELDS: dict[str, Field] = {"data": Bytes("bin"), "label": Int("cls")}
BUCKET = "shards"
SERVER = "from moto.server import main; import sys; main(sys.argv[1:])"


@contextlib.contextmanager
def serve(**environment: str) -> Iterator[int]:
    """Start an S3 server in a process of its own, and name its port."""
    pytest.importorskip("moto", reason="moto[server] is not installed: pip install tonari[s3-test]")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **environment},
    )  # fmt: skip
    try:
        _wait_for(port, process)
        yield port
    finally:
        process.kill()
        process.wait(60)


def _wait_for(port: int, process: "subprocess.Popen[bytes]") -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
    pytest.fail(f"the S3 server did not start (status {process.poll()})")


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "reader")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tar and Parquet shards; one tar has an index."""
    directory = tmp_path_factory.mktemp("shards")
    for i in range(4):
        members = numbered(16, num_bytes=60_000, first=16 * i)
        write_tar(directory / f"train-{i:03d}.tar", members)
    write_index(directory / "train-002.tar")
    data = [bytes([i]) * 50_000 for i in range(40)]
    table = pa.table({"bin": pa.array(data, pa.binary()), "cls": list(range(40))})
    pq.write_table(table, directory / "a.parquet", row_group_size=8)
    return directory


@pytest.fixture(scope="module")
def server(shards: Path) -> Iterator[int]:
    """A server that holds the shards under ``train/``; its port."""
    with serve() as port:
        system = fs.S3FileSystem(
            access_key="x", secret_key="y", region="us-east-1", scheme="http",
            endpoint_override=f"127.0.0.1:{port}", allow_bucket_creation=True,
        )  # fmt: skip
        system.create_dir(BUCKET)
        for path in shards.iterdir():
            with system.open_output_stream(f"{BUCKET}/train/{path.name}") as stream:
                stream.write(path.read_bytes())
        yield port


@pytest.fixture
def endpoint(server: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """The server, named by the environment."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server}")
    return server


@pytest.fixture
def proxy(server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[TcpProxy]:
    """A network between the server and whoever goes by the environment."""
    with TcpProxy(server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        yield proxy


def quick(*, read_timeout_s: float = 60.0, retry_s: float = 120.0) -> Storage:
    """Storage that does not wait between tries."""
    return Storage(
        retry=Retry(read_timeout_s=read_timeout_s, retry_s=retry_s, sleep=lambda _: None)
    )


def query(port: int) -> str:
    return f"?endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"


@needs_server
def test_every_pattern_names_the_same_shards(
    endpoint: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [f"s3://{BUCKET}/train/train-{i:03d}.tar" for i in range(4)]
    for pattern in ("train/train-{000..003}.tar", "train/train-*.tar", "*/train-00?.tar"):
        assert expand(f"s3://{BUCKET}/{pattern}") == expected
    both = [f"s3://{BUCKET}/train/a.parquet", *expected]
    assert expand(f"s3://{BUCKET}/train") == expand(f"s3://{BUCKET}/train/") == both
    assert expand(expected[::-1]) == expected[::-1]
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    named = expand(f"s3://{BUCKET}/train/train-*.tar{query(endpoint)}")
    assert [url.rpartition("@")[2] for url in named] == [path[5:] for path in expected]
    assert open_source(named).num_samples == 64


@needs_server
@pytest.mark.parametrize("pattern", ["train-{000..003}.tar", "a.parquet"])
def test_shards_read_as_they_do_from_a_disk(endpoint: int, shards: Path, pattern: str) -> None:
    local = open_source(str(shards / pattern))
    source = open_source(f"s3://{BUCKET}/train/{pattern}")
    assert read_all(source, FIELDS) == read_all(local, FIELDS)
    assert source.bytes_read == local.bytes_read
    part = ids(3, 33, 37)
    assert rows_of(source.read(part, FIELDS)) == rows_of(local.read(part, FIELDS))


@needs_server
def test_threads_read_ranges_of_one_object_side_by_side(endpoint: int, shards: Path) -> None:
    data = (shards / "train-000.tar").read_bytes()
    storage = quick()
    url = f"s3://{BUCKET}/train/train-000.tar"
    with storage.open(url) as file, ThreadPoolExecutor(4) as threads:
        assert file.size == len(data)
        assert file.mtime_ns > 0
        parts = list(threads.map(lambda at: file.read_at(at, 50_000), range(0, len(data), 50_000)))
    assert b"".join(parts) == data
    assert storage.bytes_read == len(data)


@needs_server
def test_a_loader_trains_from_s3(endpoint: int, tmp_path: Path) -> None:
    with Loader(
        f"s3://{BUCKET}/train/train-{{000..003}}.tar", cache=str(tmp_path / "cache"),
        batch_size=8, fields=FIELDS, world=single_world(), reports=Reports(progress=False),
        workers=Workers(threads=0),
    ) as loader:  # fmt: skip
        for _ in loader.epochs(2):
            labels = [label for batch in loader for label in batch["label"].tolist()]
            assert sorted(labels) == list(range(64))


@needs_server
@pytest.mark.parametrize(
    "way",
    [
        pytest.param(cut_after(0), id="before"),
        pytest.param(cut_after(100), id="in the headers"),
        pytest.param(cut_after(100_000), id="in the bytes"),
        pytest.param(unavailable, id="503"),
    ],
)
def test_a_cut_connection_is_tried_again(proxy: TcpProxy, shards: Path, way: Way) -> None:
    expected = read_all(open_source(str(shards / "train-001.tar")), FIELDS)
    storage = quick()
    source = open_source(f"s3://{BUCKET}/train/train-001.tar", storage=storage)
    proxy.ways += [way] * 3
    assert read_all(source, FIELDS) == expected
    assert proxy.num_disturbed == 3
    assert storage.num_retries >= 3


@needs_server
def test_an_answer_cut_in_its_headers_is_no_empty_object(proxy: TcpProxy, shards: Path) -> None:
    proxy.verb = b"HEAD"
    proxy.ways += [cut_after(100)]
    with quick().open(f"s3://{BUCKET}/train/train-001.tar") as file:
        assert proxy.num_disturbed == 1
        assert file.size == (shards / "train-001.tar").stat().st_size


@needs_server
def test_a_server_that_stalls_once_costs_one_deadline(proxy: TcpProxy, shards: Path) -> None:
    storage = quick(read_timeout_s=1)
    source = open_source(f"s3://{BUCKET}/train/train-001.tar", storage=storage)
    proxy.ways += [stall]
    assert read_all(source, FIELDS) == read_all(open_source(str(shards / "train-001.tar")), FIELDS)
    assert (proxy.num_disturbed, storage.num_retries) == (1, 1)


@needs_server
def test_a_server_that_goes_on_stalling_is_given_up(proxy: TcpProxy) -> None:
    storage = quick(read_timeout_s=0.5, retry_s=0)
    with storage.open(f"s3://{BUCKET}/train/train-001.tar") as file:
        proxy.ways += [stall]
        with pytest.raises(SourceError) as caught:
            file.read_at(1024, 2048)
    for part in ("train-001.tar: reading 2048 bytes at 1024", "no answer in 0.5 s", "check that"):
        assert part in str(caught.value)


@needs_server
def test_an_object_that_is_written_anew_is_refused(endpoint: int) -> None:
    system = fs.S3FileSystem(
        region="us-east-1", scheme="http", endpoint_override=f"127.0.0.1:{endpoint}"
    )

    def write(data: bytes) -> None:
        with system.open_output_stream(f"{BUCKET}/changing.bin") as stream:
            stream.write(data)

    write(b"a" * 1000)
    file = quick().open(f"s3://{BUCKET}/changing.bin")
    assert file.read_at(0, 10) == b"a" * 10
    write(b"b" * 1000)
    with pytest.raises(SourceError, match=r"changing\.bin: .* when opened; expected shards that"):
        file.__exit__(None, None, None)


@needs_server
@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("shards/none.tar", "no such object in bucket 'shards', .*check its name"),
        ("shards/none/", "no such object in bucket 'shards'"),
        ("shards/none-*.tar", "the glob holds no shard"),
        ("nobucket/a.tar", "there is no bucket 'nobucket' .*check its name"),
        ("nobucket/a/", "there is no bucket 'nobucket'"),
        ("nobucket/*.tar", "there is no bucket 'nobucket'"),
    ],
)
def test_what_is_not_there_is_said_at_once(endpoint: int, pattern: str, found: str) -> None:
    storage = quick()
    with pytest.raises(SourceError, match=found) as caught:
        open_source(f"s3://{pattern}", storage=storage)
    assert "\n" not in str(caught.value)
    assert storage.num_retries == 0


@needs_server
@pytest.mark.parametrize("pattern", ["shards/a.tar", "shards/train/", "shards/*.tar"])
def test_wrong_credentials_are_one_clear_message(
    pattern: str, monkeypatch: pytest.MonkeyPatch, strict_server: int
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{strict_server}")
    storage = quick()
    with pytest.raises(SourceError, match="the server refused the credentials") as caught:
        open_source(f"s3://{pattern}", storage=storage)
    for part in (f"s3://{BUCKET}", "AWS_ACCESS_KEY_ID", "AWS_PROFILE", "on every node"):
        assert part in str(caught.value)
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)
    assert storage.num_retries == 0


@pytest.fixture(scope="module")
def strict_server() -> Iterator[int]:
    """A server that knows nobody."""
    with serve(INITIAL_NO_AUTH_ACTION_COUNT="0") as port:
        yield port


def test_a_server_that_is_away_is_tried_for_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    storage = quick(retry_s=3.0)
    with pytest.raises(SourceError, match=r"s3://bucket/a\.tar: .*failed \d+ times.*after retries"):
        storage.open("s3://bucket/a.tar")
    assert storage.num_retries >= 1


@pytest.mark.parametrize(
    ("url", "canonical"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/a/b.tar", "s3://bucket/a/b.tar"),
        ("s3://bucket/a b?.tar", "s3://bucket/a b?.tar"),
        ("s3://bucket/a.tar?region=eu-west-3", "s3://region=eu-west-3@bucket/a.tar"),
        (
            "s3://bucket/a.tar?scheme=http&endpoint_override=[::1]:9000",
            "s3://endpoint_override=%5B::1%5D:9000&scheme=http@bucket/a.tar",
        ),
        (
            "s3://bucket/a.tar?endpoint_override=http://host:9000",
            "s3://endpoint_override=http:%2F%2Fhost:9000@bucket/a.tar",
        ),
    ],
)
def test_a_url_ends_in_its_name_and_loses_nothing(url: str, canonical: str) -> None:
    assert locate(url).url == canonical
    assert locate(canonical) == locate(url)


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("s3:///a.tar", "names no bucket, expected s3://bucket/key"),
        ("s3://user:secret@bucket/a.tar", r"^s3://bucket/a\.tar: found credentials in the URL"),
        ("s3://user:se/secret@bucket/a.tar", r"^s3://bucket/a\.tar: found credentials in the URL"),
        ("s3://secret_key=secret@bucket/a.tar", r"^s3://bucket/a\.tar: found credentials"),
        ("s3://bucket/a.tar?secret_key=secret", r"^s3://bucket/a\.tar: found credentials"),
        ("s3://bucket/a.tar?X-Amz-Signature=secret", r"^s3://bucket/a\.tar: found credentials"),
        (
            "s3://bucket/a.tar?endpoint_override=http://u:secret@h",
            r"^s3://bucket/a\.tar: found cred",
        ),
        ("s3://bucket/a.tar?colour=red", "found the option 'colour', expected some of anonymous"),
    ],
)
def test_a_wrong_url_is_refused(url: str, found: str) -> None:
    with pytest.raises(SourceError, match=found) as caught:
        Storage().open(url)
    assert "secret" not in str(caught.value)
