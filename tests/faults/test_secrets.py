"""Secrets planted in every kind of location come into no message, log, file, name or state."""

import contextlib
import io
import logging
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

import dataio
from dataio.base.errors import DataioError
from dataio.job.launch import Job
from dataio.rows.fields import Bytes, Field, Int
from dataio.world import single_world
from tests.dataio.source.shards import numbered, write_tar
from tests.dataio.source.storage.fake_server import FakeServer, client_error
from tonari.cli import main
from tonari.trainer.config.config import build_config
from tonari.trainer.config.saved import read_settings
from tonari.trainer.errors import ConfigError
from tonari.trainer.run.outputs import note_start, open_logs
from tonari.trainer.watch.plan import plan_settings

# In two parts: lines of this file stand in tracebacks.
SECRET = "S3CR" + "3T"
FIELDS: dict[str, Field] = {"number": Int("cls"), "data": Bytes("bin")}
SIGNED, USER = f"X-Amz-Credential=A%2F{SECRET}&X-Amz-Signature={SECRET}", f"me:{SECRET}@"
SOURCES = {
    "signed": f"fake://h/a-0.tar?{SIGNED}",
    "signed list": [f"fake://h/a-{n}.tar?sig={SECRET}" for n in range(2)],
    "signed braces": f"fake://h/a-{{0..1}}.tar?sv=1&sig={SECRET}%3D",
    "user": f"fake://{USER}h/a-0.tar",
    "token as user": f"fake://{SECRET}@h/a-0.tar",
    "user of a directory": f"fake://{USER}h",
    "user of a glob": f"fake://{USER}h/*.tar",
    "user and query": f"fake://{USER}h/a-{{0..1}}.tar?key={SECRET}",
}


@pytest.fixture
def server(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    found = FakeServer.reset()
    found.needs = SECRET
    for n in range(2):
        data = write_tar(tmp_path / "made.tar", numbered(6)).read_bytes()
        found.files[f"fake://h/a-{n}.tar"] = data
    (tmp_path / "made.tar").unlink()
    yield found
    FakeServer.reset()


def looked_at(directory: Path) -> int:
    """Search all files below a directory and their names; how many there are."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    for path in [directory, *directory.rglob("*")]:
        assert SECRET not in path.name
    for path in files:
        assert SECRET.encode() not in path.read_bytes(), path
    return len(files)


def everything_of(error: BaseException) -> str:
    """All that a log, a debugger or a report of errors may take of one."""
    texts, seen = ["".join(traceback.format_exception(error))], [error]
    for each in seen:
        texts += [str(each), repr(each), repr(vars(each))]
        behind = (each.__cause__, each.__context__)
        seen += [more for more in behind if more is not None and more not in seen]
    return "\n".join(texts)


def train(source, directory: Path, **options) -> dataio.Loader:
    options = {"fields": FIELDS, **options}
    return dataio.Loader(
        source, batch_size=2, cache=directory / "cache",
        reports=dataio.Reports(rows=directory / "rows", metrics=directory / "metrics.jsonl"),
        workers=dataio.Workers(threads=0), **options,
    )  # fmt: skip


@pytest.mark.parametrize("kind", SOURCES)
def test_a_run_keeps_no_secret(server, tmp_path, capsys, caplog, kind) -> None:
    source = SOURCES[kind]
    # Answers are cut, and some fail: that is logged.
    server.cuts = 3000
    server.fails = [None, client_error("aiohttp", "ClientPayloadError", f"cut {SECRET}"), None]
    with train(source, tmp_path) as loader:
        number = sum(len(batch["number"]) for _ in loader.epochs(1) for batch in loader)
        assert number in (6, 12)
        loader.save(tmp_path / "save")
        kept = repr(loader.state_dict()) + repr(loader.stats())
        exported = loader.state_dict()
    assert SECRET not in kept
    # A new start, with what another signature would be, goes on with the same cache.
    with train(source, tmp_path) as again:
        again.load_state_dict(exported)
        assert again.stats()["source_bytes"] <= 2 * len(server.files["fake://h/a-0.tar"])
    assert looked_at(tmp_path) > 10
    for command in (
        ["cache", "ls", "--sources"],
        ["cache", "inspect"],
        ["cache", "inspect", "--json"],
    ):
        assert main([*command, str(tmp_path / "cache")]) == 0
    main(["rows", str(tmp_path / "rows")])
    said = capsys.readouterr()
    assert "fake://h" in said.out
    assert SECRET not in said.out + said.err + caplog.text
    assert "asking for the rest" in caplog.text


FAILURES = {
    "away": lambda: client_error("aiohttp", "ClientConnectorError", f"no way to {SECRET}"),
    "refused": lambda: client_error("aiohttp", "ClientResponseError", f"{SECRET}", status=403),
    "missing": lambda: FileNotFoundError(f"fake://h/a?{SECRET}"),
    "headers": lambda: ValueError(f"headers={{'Authorization': 'Bearer {SECRET}{SECRET}'}}"),
    "options": lambda: ImportError(f"storage_options={{'account_key': '{SECRET}'}}"),
    "chained": lambda: _chained(),
}


def _chained() -> Exception:
    try:
        raise OSError(5, SECRET) from ConnectionResetError(SECRET)
    except OSError as error:
        return error


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("after", [0, 4])
@pytest.mark.parametrize("kind", ["signed", "user of a glob", "user and query"])
def test_an_error_shows_no_secret(server, tmp_path, caplog, kind, after, failure) -> None:
    server.fails = [*[None] * after, *(FAILURES[failure]() for _ in range(90))]
    source = dataio.Shards(SOURCES[kind], retry=dataio.Retry(retry_s=0.0))
    with pytest.raises(DataioError) as caught:
        train(source, tmp_path)
    assert SECRET not in everything_of(caught.value) + caplog.text
    looked_at(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data.replace(b"number", b"nomber", 1)[:100] + bytes(len(data) - 100),
        lambda data: b"",
        lambda data: data + b"more",
    ],
)
def test_damaged_shards_show_no_secret(server, tmp_path, caplog, damage) -> None:
    whole = server.files["fake://h/a-0.tar"]
    server.files["fake://h/a-0.tar"] = damage(whole)
    with contextlib.suppress(DataioError):  # Some damage is found later, or is none.
        train(SOURCES["signed list"], tmp_path).close()
    with pytest.raises(DataioError) as caught:
        train(SOURCES["user of a glob"], tmp_path, fields={"x": Int("bin")})
    assert SECRET not in everything_of(caught.value) + caplog.text
    looked_at(tmp_path)


WRONG = [
    f"s3://access_key=AK&secret_key={SECRET}@bucket/a.tar",
    f"s3://bucket/a.tar?secret_key={SECRET}",
    f"s3://AK:{SECRET}@bucket/a.tar",
    f"s3://AK:x/{SECRET}@bucket/a.tar",
    f"s3://bucket/a.tar?endpoint_override=http://u:{SECRET}@h",
    f"nosuch://u:{SECRET}@h/a.tar?sig={SECRET}",
    f"fake://h/a.what?{SIGNED}",
    f"fake://h/a-{{0..1.tar?{SIGNED}",
    f"fake://{USER}h/d",
    [f"fake://h/a-0.tar?sig={SECRET}", f"fake://h/a-0.tar?sig={SECRET}2"],
    [f"fake://h/a-0.tar?sig={SECRET}", ""],
    [f"fake://h/a-0.tar?sig={SECRET}", f"fake://{USER}h/b.parquet"],
    f"simplecache::fake://h/none.tar?sig={SECRET}",
]


@pytest.mark.parametrize("source", WRONG)
def test_a_wrong_source_is_refused_without_its_secret(server, tmp_path, caplog, source) -> None:
    for grows in (False, True):
        with pytest.raises((DataioError, ValueError)) as caught:
            train(dataio.Shards(source, grows=grows), tmp_path)
        assert SECRET not in everything_of(caught.value) + caplog.text
    looked_at(tmp_path)


def test_array_files_and_pipelines_keep_no_secret(server, tmp_path, caplog) -> None:
    whole = io.BytesIO()
    np.savez(whole, x=np.arange(12).reshape(6, 2))
    server.files["fake://h/a.npz"] = whole.getvalue()
    arrays = dataio.ArrayFiles(f"fake://{USER}h/a.npz?{SIGNED}", axis=0)
    with train(arrays, tmp_path, fields={"x": dataio.Array("x", (2,), "int64")}) as loader:
        assert len([batch for _ in loader.epochs(1) for batch in loader]) == 3
    with train(
        f"fake://h/a.npz?{SIGNED}", tmp_path / "b", fields={"x": dataio.Array("x", (2,), "int64")}
    ):
        pass
    webdataset = pytest.importorskip("webdataset")
    pipeline = webdataset.WebDataset([f"fake://h/a-0.tar?{SIGNED}"], shardshuffle=False).decode()
    with train(pipeline, tmp_path / "c") as loader:
        loader.save(tmp_path / "save")
    assert looked_at(tmp_path) > 10
    assert SECRET not in caplog.text


@pytest.mark.parametrize("url", [f"s3://u:{SECRET}@bucket/x", f"https://h/x.csv?sig={SECRET}"])
def test_a_url_becomes_no_name_of_a_file(tmp_path, monkeypatch, url) -> None:
    monkeypatch.chdir(tmp_path)
    data = {"x": np.arange(4)}

    def load(**options):
        options = {"cache": tmp_path / "cache", **options}
        return dataio.Loader(data, batch_size=2, fields={"x": Int("x")}, **options)

    with load() as loader:
        wrong = [
            lambda: load(cache=url), lambda: load(reports=dataio.Reports(rows=url)),
            lambda: load(reports=dataio.Reports(metrics=url)), lambda: load(exclude=url),
            lambda: load(exclude=[url]), lambda: loader.save(url), lambda: loader.restore(url),
            lambda: build_config({"data": {"train": "x"}, "run": {"directory": url}}),
        ]  # fmt: skip
        for use in wrong:
            with pytest.raises((ValueError, ConfigError, DataioError)) as caught:
                use()
            assert SECRET not in everything_of(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_arrays_and_labels_keep_no_secret(server, tmp_path, caplog) -> None:
    whole = io.BytesIO()
    np.save(whole, np.arange(4))
    server.files["fake://h/x.npy"] = whole.getvalue()
    arrays = {"x": f"fake://{USER}h/x.npy?{SIGNED}"}
    named = dataio.NumpySource({"x": np.arange(4)}, name=f"db://{USER}h/table?{SIGNED}")
    for number, source in enumerate((arrays, named)):
        with train(source, tmp_path / str(number), fields={"x": Int("x")}):
            pass
    with pytest.raises(DataioError) as caught:
        train({"x": f"fake://{USER}h/none.npy?{SIGNED}"}, tmp_path, fields={"x": Int("x")})
    assert SECRET not in everything_of(caught.value) + caplog.text
    assert looked_at(tmp_path) > 5


def test_settings_of_a_run_keep_no_secret(tmp_path) -> None:
    given = {"train": SOURCES["signed"], "test": SOURCES["signed list"]}
    config = build_config({"data": given, "run": {"directory": str(tmp_path / "run")}})
    assert SECRET not in repr(plan_settings(config))
    assert SECRET not in str(ConfigError(f"data.train is {config.data.train!r}; correct it"))
    job = cast("Job", SimpleNamespace(world=single_world()))
    with contextlib.ExitStack() as opened:
        logs = open_logs(config, job, opened, found=None, metrics_path=None, stats=dict, replica=0)
        note_start(config, job, opened, logs, done_steps=0, planned_steps=1, metrics_path=None)
    assert looked_at(tmp_path / "run") >= 4
    assert (tmp_path / "run" / "run.html").exists()
    kept = read_settings(tmp_path / "run" / "config.json").data
    assert (kept.train, kept.test) == ("fake://h/a-0.tar", ("fake://h/a-0.tar", "fake://h/a-1.tar"))
