"""The page of rows shows the text of a run on text."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dataio import open_source
from tests.trainer.digits import write_config
from tonari import cli
from tonari.hardest.texts import MOST_CHARACTERS, read_documents, read_texts
from tonari.trainer.config.config import Config, load_config
from tonari.trainer.run.build import training_source
from tonari.trainer.run.loop import train

LETTERS = "".join(chr(97 + n % 26) for n in range(16 * 40 + 1))
GPT = (
    "data.kind=text", "data.test=", "data.sequence_length=16", "data.batch_size=4",
    "model.kind=gpt", "model.width=8", "model.depth=1", "model.heads=2", "run.epochs=1",
    "run.max_steps=2",
)  # fmt: skip


def settings(tmp_path: Path, *more: str) -> Config:
    config = write_config(tmp_path, num_samples=8)
    text = config.read_text()
    config.write_text(text.replace("num_classes = 2\nimage_size = 8\n", ""))
    return load_config(config, (*GPT, *more))


def test_the_page_shows_the_text_of_each_row(tmp_path: Path, capsys) -> None:
    (tmp_path / "letters").write_text(LETTERS)
    train(
        settings(
            tmp_path, f"data.train={tmp_path / 'letters'}", f"run.directory={tmp_path / 'run'}"
        ),
        quiet=True,
    )
    page = tmp_path / "page.html"
    argv = ["rows", str(tmp_path / "run"), "--step", "1", "--show", str(page), "--json"]
    assert cli.main(argv) == 0
    listed = json.loads(capsys.readouterr().out)["rows"]
    shown = page.read_text()
    assert len(listed) == 4
    for row in listed:
        start = 16 * row["sample_id"]
        assert f'"text": "{LETTERS[start : start + 17]}"' in shown


def test_packed_tokens_are_turned_back_into_their_documents(tmp_path: Path) -> None:
    texts = ["one ü", "two two", "three"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    packed = tmp_path / "packed"
    argv = ["pack", str(tmp_path / "a.jsonl"), str(packed), "--tokenizer", "bytes"]
    assert cli.main(argv) == 0
    config = settings(tmp_path, f"data.train={packed}", "text.packing=best_fit")
    source = training_source(config)
    found = [
        document
        for documents in read_documents(source, np.arange(source.num_samples), config)
        for document in documents
    ]
    assert {document.number: document.text for document in found} == dict(enumerate(texts))
    place = f"{tmp_path}/a.jsonl line "
    assert {document.place for document in found} == {f"{place}{line}" for line in (1, 2, 3)}


def test_a_usual_column_of_text_is_shown_cut(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a" * 9000, "b"]}), tmp_path / "t.parquet")
    source = open_source(str(tmp_path / "t.parquet"))
    assert read_texts(source, np.array([1, 0]), None) == ["b", "a" * MOST_CHARACTERS]
    pq.write_table(pa.table({"cls": [1, 2]}), tmp_path / "u.parquet")
    assert read_texts(open_source(str(tmp_path / "u.parquet")), np.array([0]), None) is None
