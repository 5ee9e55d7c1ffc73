"""A certificate is found again from its run, and refused where either was changed."""

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dataio.base.lines import checked_line
from dataio.rowlog.files import pack_place, read_place
from dataio.rowlog.reading import read_log
from tests.dataio.rowlog.played import EPOCHS, draw, play
from tests.importance.hidden import SHUFFLES
from tests.trainer.digits import write_config, write_shard
from tonari import cli, rows
from tonari.certify.claims import exactly_once
from tonari.certify.seal import seal

Root = Path
Document = dict[str, Any]

EXCLUDED = range(10, 20)
HIDDEN_SHARE = "importance.fraction=0.2"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Root:
    """A run that hid, excluded and skipped rows, its certificates, and a copy of all to go back."""
    root = tmp_path_factory.mktemp("certify")
    here = root / "now"
    here.mkdir()
    config = write_config(here)
    write_shard(here / "train-0.tar")
    (here / "out.csv").write_text("sample_id\n" + "\n".join(map(str, EXCLUDED)) + "\n")
    given = [
        "train", str(config), f"data.train={here / 'train-0.tar'}", f"run.directory={here / 'run'}",
        "run.epochs=2", "run.checkpoint_steps=4", "importance.kind=random", HIDDEN_SHARE,
        f"data.exclude={here / 'out.csv'}", "--skip-steps", "3:4",
    ]  # fmt: skip
    assert cli.main(given) == 0
    (here / "keys.txt").write_text("000012\n000019\nnobody\n")
    (here / "key").write_bytes(b"0123456789abcdef")
    claims = ("--never", here / "keys.txt", "--exactly-once")
    assert certify(newest(here), *claims, "--out", here / "plain.json") == 0
    assert certify(here / "run", *claims, "--contents", "--out", here / "contents.json") == 0
    signed = ("--key", here / "key", "--out", here / "signed.json")
    assert certify(here / "run", *claims, *signed) == 0
    shutil.copytree(here, root / "kept")
    return root


@pytest.fixture
def here(made: Root) -> Root:
    """The same, as it was made."""
    for path in sorted(made.glob("kept/**/*")):
        copy = made / "now" / path.relative_to(made / "kept")
        if path.is_file():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)
    return made / "now"


def newest(here: Root) -> Path:
    return max((here / "run" / "checkpoints").glob("step-????????"))


def certify(*argv: object) -> int:
    return cli.main(["certify", *map(str, argv)])


def test_a_certificate_is_found_again_and_names_what_holds(here, tmp_path, capsys) -> None:
    for name in ("plain", "contents"):
        assert certify("--check", here / f"{name}.json") == 0
    assert certify("--check", here / "signed.json", "--key", here / "key") == 0
    assert "signed by the key" in capsys.readouterr().out
    assert certify("--check", here / "signed.json") == 0
    assert "signed, not checked: give --key" in capsys.readouterr().out
    shutil.copytree(here / "run", tmp_path / "moved")
    assert certify("--check", here / "contents.json", tmp_path / "moved") == 0
    document = json.loads((here / "plain.json").read_text())
    assert [one["trained"] for one in document["claims"]["never"]["found"]] == [0, 0, 0]
    assert document["claims"]["never"]["found"][2]["sample_id"] is None
    answered = rows.open(newest(here))
    for one in document["claims"]["exactly_once"]["epochs"]:
        table = answered.at(epoch=one["epoch"])
        trained = [row for row in table.to_pylist() if row["what"] == "trained"]
        assert one["trained_once"] == len({row["sample_id"] for row in trained}) == len(trained)
        assert one["finished"]
        assert one["excluded"] == len(EXCLUDED)
        assert one["trained_once"] + one["hidden"] + one["excluded"] + one["skipped"] == 100
        assert (one["skipped"] > 0) == (one["epoch"] == 0)


@pytest.mark.parametrize("seed", [0, 3, 11])
def test_counts_are_those_of_what_ranks_trained(tmp_path, seed) -> None:
    history = draw(seed)
    kept, _ = play(tmp_path, history)
    run = rows.open(tmp_path / "rows", shuffle=SHUFFLES[history.shuffle]())
    found = exactly_once(run)["epochs"]
    assert [one["epoch"] for one in found] == list(range(EPOCHS))
    for one in found:
        times = Counter[int]()
        for row, count in kept.items():
            times[row[5]] += count * (row[0] == one["epoch"])
        counts = [*times.values()]
        assert one["trained_once"] == counts.count(1)
        assert one["trained_more_often"] == sum(count > 1 for count in counts)
        reasons = ("hidden", "excluded", "left out", "skipped", "not reached", "unknown")
        missing = one["samples"] - one["trained_once"] - one["trained_more_often"]
        assert sum(one[reason] for reason in reasons) == missing
        assert one["unknown"] == 0


def test_a_claim_that_does_not_hold_is_status_1(here, tmp_path, capsys) -> None:
    (tmp_path / "never.csv").write_text("sample_id\n30\n12\n")
    out = tmp_path / "out.json"
    assert certify(here / "run", "--never", tmp_path / "never.csv", "--out", out) == 1
    assert re.search(r"DOES NOT HOLD: of 2 samples 1 were trained", capsys.readouterr().out)
    found = {one["name"]: one for one in json.loads(out.read_text())["claims"]["never"]["found"]}
    assert found[12]["trained"] == 0
    assert found[12]["epochs_without"] == {"excluded": 2}
    assert found[30]["trained"] > 0


def in_log(old: str, new: str) -> Callable[[Root], None]:
    """Change the log's first line that has a text, its checksum with it."""

    def change(here: Root) -> None:
        path = here / "run/rows/log.jsonl"
        lines = path.read_text().splitlines()
        number = next(n for n, line in enumerate(lines) if old in line)
        line = json.loads(lines[number].replace(old, new, 1))
        line.pop("checksum")
        lines[number] = checked_line(line)
        path.write_text("\n".join(lines) + "\n")

    return change


def in_file(pattern: str, *, at: int, cut: bool = False) -> Callable[[Root], None]:
    """Change a byte of a file, or cut it there, and leave its times as they were."""

    def change(here: Root) -> None:
        (path,) = here.glob(pattern)
        times, data = path.stat(), bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data[:at] if cut else data)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    return change


def in_document(
    change: Callable[[Document], object], name: str = "plain", *, sealed: bool = True
) -> Callable[[Root], None]:
    """Change a certificate, and make its digest anew, as anyone can."""

    def write(here: Root) -> None:
        document = json.loads((here / f"{name}.json").read_text())
        old = document.pop("seal")
        change(document)
        document = seal(document, None) if sealed else {**document, "seal": old}
        (here / f"{name}.json").write_text(json.dumps(document))

    return write


def remove(pattern: str) -> Callable[[Root], None]:
    return lambda here: next(here.glob(pattern)).unlink()


def add_line(here: Root) -> None:
    with (here / "run/rows/log.jsonl").open("a") as file:
        file.write(checked_line({"skipped": 0, "steps": [4, 5]}) + "\n")


def come_less_far(here: Root) -> None:
    steps = here / "run/rows/steps"
    name = read_log(steps.parent).name
    place = read_place(steps, name)
    assert place is not None
    steps.write_bytes(pack_place(name, place[0], place[1] - 1))


def once(document: Document) -> Document:
    found: Document = document["claims"]["exactly_once"]["epochs"][0]
    return found


def never(document: Document) -> list[Document]:
    found: list[Document] = document["claims"]["never"]["found"]
    return found


NOT_PROVABLE = ""

TAMPERINGS: dict[str, tuple[str, Callable[[Root], object], str]] = {
    # What was changed: the certificate, the change, what the message names
    "a byte of the log": (
        "plain", in_file("run/rows/log.jsonl", at=60), "log.jsonl: the log of rows is damaged"
    ),
    "a seed in the log": ("plain", in_log('"seed": 0', '"seed": 1'), r"setups\[0\].seed"),
    "a batch size in the log": (
        "plain", in_log('"batch_size": 16', '"batch_size": 15'), r"position.*batch_size"
    ),
    "a layout in the log": (
        "plain", in_log('"replicas": [[1, 1]]', '"replicas": [[2, 1]]'), "node-|replicas|log"
    ),
    "the run's beginning": ("plain", in_log('"begins": true', '"begins": false'), "in mid-run"),
    "a skipped step in the log": (
        "plain", in_log('"steps": [2, 3]', '"steps": [3, 4]'), "rows_sha256|skipped"
    ),
    "a line more in the log": ("plain", add_line, r"log\.log\.jsonl|attempts"),
    "how far the run came": ("signed", in_file("run/rows/steps", at=8), "rows/steps: .* damaged"),
    "how far the run came, forged": ("signed", come_less_far, "ends at step .* was saved at step"),
    "no word of how far the run came": ("plain", remove("run/rows/steps"), "steps: .* be read"),
    "what an epoch hid": (
        "plain", in_file("run/rows/node-0.bin", at=60), r"what epoch \d hid is not there whole"
    ),
    "what an epoch hid, cut off": (
        "plain", in_file("run/rows/node-0.bin", at=60, cut=True), "is not there whole"
    ),
    "the excluded samples": (
        "plain", in_file("run/rows/excluded-*.bin", at=12), "does not match its checksum"
    ),
    "no excluded samples": (
        "plain", remove("run/rows/excluded-*.bin"), "excluded-.*cannot be read"
    ),
    "a shard's length": ("plain", in_file("train-0.tar", at=20000, cut=True), "train-0.tar"),
    "a shard that is gone": ("plain", remove("train-0.tar"), "train-0.tar|no such"),
    "a shard's byte, its times set back, hashed": (
        "contents", in_file("train-0.tar", at=600), r"source.files\[0\].sha256"
    ),
    "a shard's byte, its times set back": (
        "plain", in_file("train-0.tar", at=600), NOT_PROVABLE
    ),
    "a checkpoint's weights": (
        "plain", in_file("run/checkpoints/step-?????*[05]/torch/*.distcp", at=900), "distcp"
    ),
    "a count, the digest kept": (
        "plain", in_document(lambda d: once(d).update(trained_once=100), sealed=False),
        "was changed: it does not match its own digest",
    ),
    "a count": (
        "plain", in_document(lambda d: once(d).update(trained_once=100)), "epochs.*trained_once"
    ),
    "how often a key was trained": (
        "plain", in_document(lambda d: never(d)[0].update(trained=3)), r"found\[0\].trained"
    ),
    "another key": (
        "plain", in_document(lambda d: never(d)[0].update(name="000030")), r"found\[0\]"
    ),
    "a seed in the certificate": (
        "plain", in_document(lambda d: d["setups"][0].update(seed=7)), r"setups\[0\].seed"
    ),
    "the fingerprint in the certificate": (
        "plain", in_document(lambda d: d["source"].update(fingerprint="0")), "source.fingerprint"
    ),
    "the steps in the certificate": (
        "plain", in_document(lambda d: d["run"].update(steps=9)), "run.steps"
    ),
    "a key taken out": ("plain", in_document(lambda d: never(d).pop()), NOT_PROVABLE),
    "the version of the code": (
        "plain", in_document(lambda d: d["code"].update(version="0")), NOT_PROVABLE
    ),
    "a key taken out of a signed one": (
        "signed", in_document(lambda d: never(d).pop(), "signed"), "is not signed, and --key asks"
    ),
    "a signed one, the signature kept": (
        "signed", in_document(lambda d: d["code"].update(version="0"), "signed", sealed=False),
        "does not match a signature by this key",
    ),
    "another key to sign": (
        "signed", lambda here: (here / "key").write_bytes(b"another key, as long"), "by this key"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TAMPERINGS)
def test_a_tampering_is_refused_by_name_or_is_not_provable(here, capsys, name) -> None:
    certificate, tamper, message = TAMPERINGS[name]
    tamper(here)
    key = ("--key", here / "key") if certificate == "signed" else ()
    status = certify("--check", here / f"{certificate}.json", *key)
    shown = capsys.readouterr()
    if message == NOT_PROVABLE:
        assert status == 0, shown.err
        return
    assert status == 1
    assert re.search(message, shown.err), shown.err
    assert shown.err.count("\n") == 1


def test_who_forges_log_and_certificate_alike_is_not_found(here, tmp_path) -> None:
    in_log('"steps": [2, 3]', '"steps": [3, 4]')(here)
    out = tmp_path / "forged.json"
    assert certify(here / "run", "--exactly-once", "--out", out) == 0
    assert certify("--check", out) == 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["RUN", "--never", "NONE"], "--never .*cannot be read .* a key a line"),
        (["RUN", "--key", "SHORT"], "has 3 bytes, expected 16 at least; make one with"),
        (["--check", "SHORT"], "is no certificate .* expected what `tonari certify` wrote"),
        (["DATA"], "found no log of rows, expected"),
    ],
)
def test_bad_input_is_one_message(here, tmp_path, capsys, argv, message) -> None:
    (tmp_path / "short").write_text("abc")
    words = {"RUN": here / "run", "SHORT": tmp_path / "short", "NONE": tmp_path / "x",
             "DATA": tmp_path}  # fmt: skip
    assert certify(*(words.get(word, word) for word in argv)) == 1
    shown = capsys.readouterr().err
    assert re.search(message, shown)
    assert shown.count("\n") == 1
