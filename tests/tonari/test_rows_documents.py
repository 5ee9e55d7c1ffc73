"""Of a run on packed text, documents are named by number and line, shown, and left out."""

import html
import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.browser import browse, needs_browser
from tests.tonari.test_hardest_page import held
from tests.trainer.packed_text import TOML, WORDS
from tonari import cli
from tonari.trainer.config.config import Config, load_config
from tonari.trainer.run.loop import train

JUNK = (13, 55)
"""Documents of other letters. An empty one is before them, which is not packed."""

SPIKES = ("--spikes", "2")
"""Finds the first of them."""


@dataclass(frozen=True)
class JunkRun:
    """A run on text of which some is junk."""

    config: Path
    corpus: Path

    @property
    def directory(self) -> Path:
        return self.config.parent / "run"

    def settings(self, *more: str) -> Config:
        given = (
            f"run.directory={self.directory}", f"data.cache={self.config.parent}/cache",
            "data.batch_size=4", "optimizer.lr=0.1", "importance.kind=full",
            'importance.columns=["loss", "loss_mean", "history"]',
        )  # fmt: skip
        return load_config(self.config, (*given, *more))

    def place(self, document: int) -> str:
        return f"{self.corpus} line {document + 2}"


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory: pytest.TempPathFactory) -> JunkRun:
    """Train on documents of words, and two of which no other has a letter."""
    root = tmp_path_factory.mktemp("junk")
    rng = np.random.default_rng(4)
    texts = [" ".join(rng.choice(WORDS, count)) for count in rng.integers(1, 4, 90)]
    for number in JUNK:
        texts[number] = "".join(map(chr, rng.integers(65, 91, 12)))
    corpus = root / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in ["", *texts]))
    assert cli.main(["pack", str(corpus), str(root / "train"), "--tokenizer", "bytes"]) == 0
    config = root / "run.toml"
    config.write_text(TOML.format(train=root / "train", test=""))
    run = JunkRun(config, corpus)
    train(run.settings("run.epochs=3"), quiet=True)
    return run


def ask(run: JunkRun, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert cli.main(["rows", str(run.directory), *options]) == 0
    return capsys.readouterr().out


def test_spikes_name_the_document_and_its_line(
    spoiled: JunkRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, page = tmp_path / "found.parquet", tmp_path / "page.html"
    shown = ask(spoiled, capsys, *SPIKES, "--parquet", str(found), "--show", str(page))
    table = pq.read_table(found)
    assert table["document"].to_pylist() == [JUNK[0]]
    assert spoiled.place(JUNK[0]) in shown
    document = held(page.read_text())
    assert document["columns"] == ["document", "place"]
    cards = {card["document"]: card for card in document["rows"]}
    for row in table.to_pylist():
        assert row["place"] == spoiled.place(row["document"])
        assert row["document"] in row["documents"]
        card = cards[row["document"]]
        assert (card["class"], card["title"]) == ("stands out", f"document {row['document']}")
        assert f"share {row['share']:.4g}" in card["words"]
        assert card["where"] == f"in sample {row['sample_id']}, {row['place']}"
        assert re.fullmatch("[A-Z]{12}", card["facts"]["text"])
        for other in set(row["documents"]) - {row["document"]}:
            assert cards[other]["class"] == "beside it"


def test_a_sample_s_documents_are_named_and_older_packs_say_that_they_have_no_lines(
    spoiled: JunkRun, capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = [
        row
        for row in json.loads(ask(spoiled, capsys, "--epoch", "0", "--json"))["rows"]
        if JUNK[0] in row["documents"]
    ]
    options = ("--sample", str(row["sample_id"]))
    assert spoiled.place(JUNK[0]) in ask(spoiled, capsys, *options)
    (kept,) = (spoiled.config.parent / "train").glob("*.lines")
    moved = kept.rename(kept.with_suffix(".away"))
    try:
        shown = ask(spoiled, capsys, *options)
    finally:
        moved.rename(kept)
    assert f"{JUNK[0]} has the most unusual tokens: no file and line, as the pack has none" in shown


def test_hardest_lists_documents_of_packed_text(
    spoiled: JunkRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["hardest", str(spoiled.directory), "--out", str(tmp_path / "out"), "--top", "3"]
    for given in ([], ["--source", str(spoiled.config.parent / "train")]):
        assert cli.main([*line, *given]) == 0
        shown = capsys.readouterr().out
        assert "picture" not in shown
        for number in JUNK:
            assert f"document {number} in sample" in shown
    text = (tmp_path / "out/hardest.csv").read_text()
    assert spoiled.place(JUNK[1]) in text
    assert "picture" not in re.sub(
        r"(?s)<script>.*", "", (tmp_path / "out/hardest.html").read_text()
    )
    assert cli.main(["hardest", str(tmp_path), "--out", str(tmp_path / "out")]) == 1


def test_the_listed_documents_are_left_out_where_a_run_goes_on(
    spoiled: JunkRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, batch = tmp_path / "found.parquet", tmp_path / "batch.npz"
    ask(spoiled, capsys, *SPIKES, "--parquet", str(found))
    assert train(spoiled.settings("run.epochs=4", f"data.exclude={found}")).finished
    assert " documents excluded), 4 a step, 4 epochs" in capsys.readouterr().err
    listed = json.loads(ask(spoiled, capsys, "--epoch", "3", "--json"))["rows"]
    assert len(listed) == len(json.loads(ask(spoiled, capsys, "--epoch", "0", "--json"))["rows"])
    (row,) = [row for row in listed if JUNK[0] in row["documents"]]
    ask(spoiled, capsys, "--step", str(row["run_step"]), "--replay", str(batch))
    with np.load(batch) as arrays:
        tokens, documents = (arrays[name][row["position"]] for name in ("tokens", "document"))
    is_junk = (tokens >= 65) & (tokens < 91)
    assert is_junk.sum() == 12, "the tokens stay where they are"
    assert not documents[is_junk].any()
    assert (documents > 0).any(), "and the other documents of the row are trained"


CLICKS = """
at("class").value = "stands out";
at("class").dispatchEvent(new Event("change"));
at("all").click();
document.body.setAttribute("data-seen", JSON.stringify(list()));
"""


@needs_browser
def test_documents_that_stand_out_are_marked_at_once_and_saved_as_a_list(
    spoiled: JunkRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    ask(spoiled, capsys, *SPIKES, "--show", str(page))
    page.write_text(page.read_text().replace("</body>", f"<script>{CLICKS}</script></body>"))
    found = re.search(r'data-seen="([^"]*)"', browse(page, "--dump-dom"))
    assert found is not None
    saved = json.loads(html.unescape(found[1])).splitlines()
    assert saved[0] == "document,place"
    assert saved[1:] == [f"{JUNK[0]},{spoiled.place(JUNK[0])}"]
