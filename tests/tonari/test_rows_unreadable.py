"""A row that did not decode, and so was padding, is listed as that and not as trained."""

from dataclasses import dataclass
from typing import Any

import pyarrow.compute as pc
import pytest

import shuffle
from dataio import FieldError, Int, Loader, Reports, StateError, Workers
from dataio.world import World, run_threads, thread_worlds
from tests.dataio.source.shards import write_tar
from tonari import rows
from tonari.certify.claims import exactly_once, never

NUM_SAMPLES, BAD = 26, (5, 17)


@dataclass(frozen=True)
class Picky:
    """A field of which some samples do not decode."""

    key: str

    def column(self, name: str) -> None:
        return None

    def encode(self, raw: Any, where: str) -> bytes:
        return bytes(raw)

    def decode(self, data: memoryview, where: str) -> object:
        if bytes(data) == b"bad":
            raise FieldError(f"{where}: is bad")
        return float(bytes(data))


@pytest.mark.parametrize("layout", [[1], [2, 1]])
def test_a_row_that_became_padding_is_listed_as_unreadable(tmp_path, layout) -> None:
    members = [
        member
        for i in range(NUM_SAMPLES)
        for member in (
            (f"s{i:02d}.value", b"bad" if i in BAD else b"1.5"), (f"s{i:02d}.cls", b"%d" % i)
        )
    ]  # fmt: skip
    shard = str(write_tar(tmp_path / "t.tar", members))

    def train(world: World) -> list[tuple[int, int]]:
        with Loader(
            shard, batch_size=3, fields={"label": Int("cls"), "value": Picky("value")},
            cache=tmp_path / "cache", world=world, on_error="skip", shuffle=shuffle.Partial(0.4),
            reports=Reports(progress=False, rows=tmp_path / "rows"), workers=Workers(threads=0),
        ) as loader:  # fmt: skip
            return [
                (sample, epoch)
                for epoch in loader.epochs(3)
                for batch in loader
                for sample, slot in zip(
                    batch["sample_id"].tolist(), batch["slot"].tolist(), strict=True
                )
                if slot >= 0
            ]

    trained = sorted(row for part in run_threads(thread_worlds(layout), train) for row in part)
    run = rows.open(tmp_path / "rows", source=shard)
    for table in (
        run.of(sample_id=range(NUM_SAMPLES)),
        run.at(epoch=0, discarded=True),
    ):
        listed = table.filter(pc.equal(table["what"], "trained"))
        places = (listed[name].to_pylist() for name in ("sample_id", "epoch"))
        found = sorted(zip(*places, strict=True))
        assert found == [row for row in trained if row[1] in table["epoch"].to_pylist()]
        bad = table.filter(pc.equal(table["what"], "unreadable"))
        epochs = set(table["epoch"].to_pylist())
        assert sorted(bad["sample_id"].to_pylist()) == sorted([*BAD] * len(epochs))
        assert set(bad["weight"].to_pylist()) == {0.0}
        assert min(listed["weight"].to_pylist()) > 0
    claim = exactly_once(run)
    assert claim["holds"]
    assert [epoch["unreadable"] for epoch in claim["epochs"]] == [len(BAD)] * 3
    (found,) = never(run, ["s05"])["found"]
    assert (found["trained"], found["epochs_without"]) == (0, {"unreadable": 3})


def test_what_a_changed_byte_makes_of_the_note_is_refused(tmp_path) -> None:
    test_a_row_that_became_padding_is_listed_as_unreadable(tmp_path, [1])
    path = tmp_path / "rows" / "padded-0.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"step"', b'"stop"', 1))
    with pytest.raises(Exception, match="line 2 does not match its checksum"):
        rows.open(tmp_path / "rows")


@pytest.mark.parametrize("layout", [[1], [2, 1]])
def test_notes_that_are_missing_are_no_trained_rows(tmp_path, layout) -> None:
    test_a_row_that_became_padding_is_listed_as_unreadable(tmp_path, layout)
    for path in (tmp_path / "rows").glob("padded-*.jsonl"):
        whole = path.read_bytes()
        path.write_bytes(whole[: whole.rstrip().rfind(b"\n")])
        with pytest.raises(StateError, match=r"of attempt \d they list \d rows .* counts \d"):
            rows.open(tmp_path / "rows")
        path.unlink()
        with pytest.raises(StateError, match=r"padded-.*is damaged: of attempt \d they list"):
            rows.open(tmp_path / "rows")
        path.write_bytes(whole)
    rows.open(tmp_path / "rows")
