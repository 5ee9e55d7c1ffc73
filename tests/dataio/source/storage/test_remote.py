"""Shards behind URLs: signed ones, odd names, answers that are cut, and who is to blame."""

import http.server
import logging
import re
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from dataio.base.errors import SourceError
from dataio.rows.fields import Field, Int
from dataio.source import Retry, Source, Storage, open_source
from dataio.source.base import ShardedSource
from dataio.source.expand import expand
from tests.dataio.source.shards import numbered, read_all, write_tar
from tests.dataio.source.storage.fake_server import FakeServer, client_error

FIELDS: dict[str, Field] = {"label": Int("cls")}
KEY = "X-Amz-Credential=AKIA%2Feu&X-Amz-Signature=S3CR3T"


@pytest.fixture
def server() -> Iterator[type[FakeServer]]:
    yield FakeServer.reset()
    FakeServer.reset()


@pytest.fixture
def tar(tmp_path: Path) -> bytes:
    return write_tar(tmp_path / "made.tar", numbered(5)).read_bytes()


def fast(*, retry_s: float = 0.0) -> Storage:
    return Storage(retry=Retry(retry_s=retry_s))


def paths_of(source: Source) -> list[str]:
    assert isinstance(source, ShardedSource)
    return [shard.path for shard in source.shards]


def one_of(server: type[FakeServer], *names: str, tar: bytes) -> None:
    server.files |= {f"fake://h/{name}": tar for name in names}


def test_signed_urls_open_by_what_stands_before_their_query(server, tar) -> None:
    one_of(server, "a.tar", "b.tar", tar=tar)
    server.needs = "S3CR3T"
    source = open_source([f"fake://h/{name}.tar?{KEY}-{name}" for name in "ab"], storage=fast())
    assert paths_of(source) == ["fake://h/a.tar", "fake://h/b.tar"]
    assert source.name == "fake://h/a.tar and 1 more, to fake://h/b.tar"
    assert len(read_all(source, FIELDS)) == 10
    # No index was asked for: no URL of one is known.
    assert {url.rpartition("-")[0] for url in server.asked} == {
        f"fake://h/{name}.tar?{KEY}" for name in "ab"
    }


def test_a_signature_for_a_directory_holds_for_each_of_its_braces(server, tar) -> None:
    one_of(server, "a-0.tar", "a-1.tar", tar=tar)
    server.needs = "sig=S3CR3T"
    source = open_source("fake://h/a-{0..1}.tar?sv=1&sig=S3CR3T", storage=fast())
    assert paths_of(source) == ["fake://h/a-0.tar", "fake://h/a-1.tar"]
    assert source.name == "fake://h/a-{0..1}.tar"


def test_a_new_signature_is_the_same_source(server, tar, tmp_path) -> None:
    one_of(server, "a.tar", tar=tar)
    first, second = (
        open_source(f"fake://h/a.tar?{KEY}{n}", storage=fast(), index_cache=tmp_path / "indexes")
        for n in range(2)
    )
    assert (first.fingerprint, first.name) == (second.fingerprint, second.name)
    assert len(list((tmp_path / "indexes").iterdir())) == 1


def test_urls_that_differ_in_their_secrets_alone_are_refused(server, tar) -> None:
    one_of(server, "a.tar", tar=tar)
    with pytest.raises(SourceError, match=r"^fake://h/a\.tar: two URLs differ only before the @"):
        open_source([f"fake://h/a.tar?version={n}" for n in range(2)], storage=fast())


def test_what_must_be_listed_is_refused_by_its_query(server) -> None:
    for name in ("train", "*.tar"):
        with pytest.raises(SourceError, match=r"query behind '\?'.*URL of each shard"):
            open_source(f"fake://h/{name}?{KEY}", storage=fast())


def test_a_user_in_the_url_is_sent_for_all_that_lies_beside(server, tar) -> None:
    one_of(server, "d/a.tar", "d/b.tar", tar=tar)
    server.needs = "me:S3CR3T@"
    for pattern in ("fake://me:S3CR3T@h/d", "fake://me:S3CR3T@h/d/*.tar"):
        source = open_source(pattern, storage=fast())
        assert paths_of(source) == ["fake://h/d/a.tar", "fake://h/d/b.tar"]
        assert len(read_all(source, FIELDS)) == 10
    assert any(url.endswith(".idx") for url in server.asked)


def test_an_index_that_may_not_be_read_is_none(server, tar) -> None:
    one_of(server, "a.tar", tar=tar)
    server.needs = ".tar"
    assert open_source("fake://h/a.tar", storage=fast()).num_samples == 5


def test_an_index_of_which_the_server_never_answers_is_none(server, tar, caplog) -> None:
    one_of(server, "a.tar", "b.tar", tar=tar)
    lost = client_error("aiohttp", "ServerDisconnectedError", "lost")
    server.fails = [lost]
    source = open_source(["fake://h/a.tar", "fake://h/b.tar"], storage=fast())
    assert (source.num_samples, len(read_all(source, FIELDS))) == (10, 10)
    assert "it is taken as not there" in caplog.text
    assert sum(url.endswith(".idx") for url in server.asked) <= 1
    # What is needed is asked for as long as any other.
    server.fails = [lost]
    with pytest.raises(SourceError, match="storage is up"):
        fast().exists("fake://h/c/0.0")


@pytest.mark.parametrize("name", ["a[1].tar", "a{b}.tar", "a{0..3}.tar", "a{b,c}.tar", "{.tar"])
def test_names_with_brackets_and_braces_are_found_as_they_are(server, tar, tmp_path, name) -> None:
    one_of(server, name, tar=tar)
    directory = tmp_path / "d[0]{x,y}"
    directory.mkdir()
    (directory / name).write_bytes(tar)
    for location in (f"fake://h/{name}", str(directory / name)):
        assert expand(location) == [location]
        assert open_source(location, storage=fast()).num_samples == 5
    assert expand(f"{directory}/*") == [str(directory / name)]
    (directory / "z-0.tar").write_bytes(tar)
    (directory / "z-1.tar").write_bytes(tar)
    both = [f"{directory}/z-{n}.tar" for n in range(2)]
    assert expand(f"{directory}/z-{{0..1}}.tar") == expand(f"{directory}/z-[01].tar") == both


def test_a_short_answer_goes_on_where_it_stopped(server, tar) -> None:
    one_of(server, "a.tar", tar=tar)
    server.cuts = 1000
    storage = fast()
    assert len(read_all(open_source("fake://h/a.tar", storage=storage), FIELDS)) == 5
    assert storage.num_retries > 5


RESPONSE = "ClientResponseError"


@pytest.mark.parametrize(
    ("error", "found", "passes"),
    [
        (FileNotFoundError("fake://h/a.tar?sig=S3CR3T"), "no such file.*check the URL", False),
        (client_error("aiohttp", RESPONSE, "gone", status=410), "check the URL", False),
        (client_error("aiohttp", RESPONSE, "S3CR3T", status=401), "expected credentials", False),
        (client_error("gcsfs.retry", "HttpError", "no", code=403), "expected credentials", False),
        (PermissionError("Forbidden S3CR3T"), "expected credentials.*sign it anew", False),
        (client_error("botocore", "NoCredentialsError", "none"), "expected credentials", False),
        (client_error("ftplib", "error_perm", "530 no"), "expected credentials", False),
        (client_error("ftplib", "error_temp", "421 busy"), "storage is up", True),
        (client_error("aiohttp", RESPONSE, "S3CR3T", status=503), "storage is up", True),
        (client_error("aiohttp", RESPONSE, "slow down", status=429), "storage is up", True),
        (client_error("aiohttp", "ClientPayloadError", "cut", code=400), "storage is up", True),
        (client_error("aiohttp", "ServerDisconnectedError", "gone"), "storage is up", True),
        (client_error("http.client", "IncompleteRead", "cut"), "storage is up", True),
        (client_error("requests", "ChunkedEncodingError", "cut", OSError), "storage is up", True),
        (client_error("botocore", "ReadTimeoutError", "slow"), "storage is up", True),
        (ConnectionResetError(104, "reset S3CR3T"), "storage is up", True),
        (TimeoutError("S3CR3T took long"), "storage is up", True),
        (client_error("aiohttp", "ClientConnectorCertificateError", "bad"), "be read", False),
        (client_error("aiohttp", RESPONSE, "what", status=400), "check the URL", False),
        (ValueError("S3CR3T is odd"), "cannot be read", False),
    ],
)  # fmt: skip
def test_an_error_says_whose_it_is_and_no_secret(server, tar, caplog, error, found, passes) -> None:
    one_of(server, "a.tar", tar=tar)
    caplog.set_level(logging.DEBUG)
    url = "fake://me:S3CR3T@h/a.tar?sig=S3CR3T"
    server.fails = [error] * 50
    with pytest.raises(SourceError, match=rf"^fake://h/a\.tar: .*{found}") as caught:
        fast().open(url)
    # Nor what a debugger finds behind it.
    seen: BaseException | None = caught.value
    while seen is not None:
        assert "S3CR3T" not in f"{seen!r} {seen}"
        seen = seen.__cause__ or seen.__context__
    assert "S3CR3T" not in "".join(traceback.format_exception(caught.value)) + caplog.text
    server.fails = [error]
    if passes:
        assert fast(retry_s=60).open(url).size == len(tar)


class ShardRequests(http.server.BaseHTTPRequestHandler):
    """Serves one file in a way that its class says."""

    data = b""
    answers: ClassVar[list[str]] = []
    asked: ClassVar[list[tuple[str, str]]] = []

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.send_error(403)  # As of a URL that is signed for GET.

    def do_GET(self) -> None:
        way = self.answers.pop(0) if self.answers else ""
        asked = self.headers.get("Range", "")
        self.asked.append((self.path, asked))
        if way.isdigit():
            return self.send_error(int(way))
        found = re.match(r"bytes=(\d+)-(\d+)", asked)
        assert found
        first, last = int(found[1]), min(int(found[2]), len(self.data) - 1)
        body = self.data[first : last + 1]
        if way == "whole":
            body = self.data
            self.send_response(200)
        elif first > last:
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(self.data)}")
        else:
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(self.data)}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if way == "cut" else body)
        if way == "cut":
            self.close_connection = True


@pytest.fixture
def web(tar) -> Iterator[str]:
    pytest.importorskip("aiohttp")
    ShardRequests.data, ShardRequests.answers, ShardRequests.asked = tar, [], []
    served = http.server.ThreadingHTTPServer(("127.0.0.1", 0), ShardRequests)
    thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"127.0.0.1:{served.server_port}"
    served.shutdown()
    thread.join()
    served.server_close()


def test_the_web_is_read_by_get_as_the_url_was_signed(web, tar, caplog) -> None:
    caplog.set_level(logging.DEBUG)
    url = f"http://me:S3CR3T@{web}/my%20train.tar?{KEY}"
    source = open_source(url, storage=fast())
    assert source.name == f"http://{web}/my%20train.tar"
    assert len(read_all(source, FIELDS)) == 5
    # As it was written: a signature holds for these letters.
    assert {path for path, _ in ShardRequests.asked} == {f"/my%20train.tar?{KEY}"}
    assert open_source(f"http://{web}/my train[1]%.tar?{KEY}", storage=fast()).num_samples == 5
    # Of a name without any encoding, only what cannot stand in a URL changes.
    assert ShardRequests.asked[-1][0] == f"/my%20train%5B1%5D%25.tar?{KEY}"
    assert "S3CR3T" not in caplog.text


def test_answers_of_the_web_that_are_cut_go_on_where_they_stopped(web, tar) -> None:
    storage = fast(retry_s=60)
    with storage.open(f"http://{web}/a.tar") as file:
        ShardRequests.answers = ["cut", "503", "cut", "429", "cut"]
        assert file.read_at(0, 8000) == tar[:8000]
    ranges = [asked for _, asked in ShardRequests.asked[1:]]
    assert ranges[0] == "bytes=0-7999"
    assert ranges[-2].startswith("bytes=7000-")
    assert storage.num_retries == 5


def test_a_server_of_the_web_that_serves_no_parts_is_refused_early(web) -> None:
    ShardRequests.data = bytes(64 << 20)
    with fast().open(f"http://{web}/a.tar") as file:
        ShardRequests.answers = ["whole"] * 9
        with pytest.raises(SourceError, match="does not serve parts of a file"):
            file.read_at(1000, 10)


@pytest.mark.parametrize(
    ("way", "found"), [("404", "check the URL"), ("403", "expected credentials"), ("500", "is up")]
)
def test_answers_of_the_web_say_whose_it_is(web, way, found) -> None:
    ShardRequests.answers = [way] * 9
    url = f"http://me:S3CR3T@{web}/a.tar?{KEY}"
    with pytest.raises(SourceError, match=found) as caught:
        open_source(url, storage=fast())
    assert "S3CR3T" not in "".join(traceback.format_exception(caught.value))
