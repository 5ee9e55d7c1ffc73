"""Near duplicates are found, shown group by group, and listed so that a loader leaves them out."""

import csv
import html
import io
import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import dataio
from dataio.base.seeding import generator, key
from dataio.world import single_world
from examples.near_duplicates import KINDS, near_copy
from tests.browser import browse, needs_browser
from tonari import cli
from tonari.hardest.groups import (
    Pairs,
    equal_pairs,
    group,
    kept_of,
    near_embeddings,
    near_hashes,
)
from tonari.hardest.page import duplicates_page
from tonari.hardest.rank import within_classes

NUM_IMAGES = 60


def pictures(num_images: int = NUM_IMAGES) -> list[bytes]:
    """Pictures of soft patches, as PNG."""
    rng = generator(key(0, "pictures"))
    made = []
    for _ in range(num_images):
        coarse = rng.integers(0, 256, (8, 8, 3)).astype(np.uint8)
        file = io.BytesIO()
        Image.fromarray(coarse).resize((40, 40), Image.Resampling.BICUBIC).save(file, "PNG")
        made.append(file.getvalue())
    return made


def write(path: Path, **columns: object) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def run(source: Path, out: Path, *flags: str) -> int:
    return cli.main(["hardest", "--duplicates", "--source", str(source), "--out", str(out), *flags])


def groups_in(out: Path) -> list[set[int]]:
    groups: dict[str, set[int]] = {}
    with open(out / "duplicates.csv", newline="") as file:
        for row in csv.DictReader(file):
            groups.setdefault(row["group"], set()).add(int(row["sample_id"]))
    return list(groups.values())


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=40))
def test_samples_that_a_chain_of_pairs_joins_are_one_group(edges: list[tuple[int, int]]) -> None:
    edges = [(min(edge), max(edge)) for edge in edges if edge[0] != edge[1]]
    first, second = np.array(edges, np.int64).reshape(-1, 2).T
    groups = group(Pairs(first, second, np.ones(len(edges), np.float32)), 31)
    of = {i: number for number, members in enumerate(groups) for i in members.tolist()}
    assert set(of) == {i for edge in edges for i in edge}
    assert all(of[one] == of[other] for one, other in edges)
    for members in groups:
        reached = {int(members[0])}
        for _ in range(31):
            reached |= {i for edge in edges for i in edge if set(edge) & reached}
        assert reached == set(members.tolist())


@given(st.lists(st.integers(0, 5), max_size=30))
def test_equal_contents_are_joined_and_no_others(contents: list[int]) -> None:
    digests = np.array([[content, 7] for content in contents], np.uint64).reshape(-1, 2)
    groups = group(equal_pairs(digests), len(contents))
    wanted = [[i for i, c in enumerate(contents) if c == value] for value in set(contents)]
    found = sorted(members.tolist() for members in groups)
    assert found == sorted(members for members in wanted if len(members) > 1)


@given(st.integers(0, 100))
def test_hashes_that_differ_in_few_bits_are_found(seed: int) -> None:
    rng = np.random.default_rng(seed)
    hashes = rng.integers(0, 1 << 63, 500, np.uint64)
    hashes[499] = hashes[17]
    for bit in rng.choice(64, 4, replace=False).tolist():
        hashes[499] ^= np.uint64(1 << bit)
    first, second = near_hashes(hashes)
    assert (17, 499) in set(zip(first.tolist(), second.tolist(), strict=True))
    assert (first < second).all()
    assert (np.bitwise_count(hashes[first] ^ hashes[second]) <= 16).all()


def test_embeddings_of_a_cosine_are_found_in_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tonari.hardest.groups.BLOCK", 7)
    rng = np.random.default_rng(0)
    embeddings = rng.normal(size=(40, 16)).astype(np.float32)
    embeddings[39], embeddings[11] = embeddings[0] * 3, embeddings[10] + 0.01
    pairs = near_embeddings(embeddings, least=0.95)
    assert set(zip(pairs.first.tolist(), pairs.second.tolist(), strict=True)) == {
        (0, 39), (10, 11)
    }  # fmt: skip


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 1.0, 2.0, np.inf]), st.integers(0, 3)), max_size=40)
)
def test_a_row_is_ranked_among_those_of_its_class(rows: list[tuple[float, int]]) -> None:
    values = np.array([row[0] for row in rows], np.float32)
    labels = np.array([row[1] for row in rows], np.int64)
    shares = within_classes(values, labels)
    for i in range(len(rows)):
        own = values[labels == labels[i]]
        wanted = ((own < values[i]).sum() + (own == values[i]).sum() / 2) / len(own)
        assert shares[i] == pytest.approx(wanted)


def test_the_first_sample_of_the_commonest_label_is_kept() -> None:
    members = np.array([4, 7, 9])
    assert kept_of(members, np.array([1, 2, 2])) == 7
    assert kept_of(members, np.array([1, 2, 3])) == 4
    assert kept_of(members, None) == 4


@pytest.fixture
def planted(tmp_path: Path) -> tuple[Path, list[set[int]]]:
    """Pictures, near copies of nine of them behind, one of these of another label."""
    images = pictures()
    rng = generator(key(0, "copies"))
    copies = [near_copy(images[i], KINDS[i % 3], rng) for i in range(9)]
    labels = np.array([i % 4 for i in range(NUM_IMAGES)] + [i % 4 for i in range(9)])
    labels[NUM_IMAGES + 5] = 3
    keys = [f"k{i}" for i in range(NUM_IMAGES + 9)]
    source = write(tmp_path / "train.parquet", key=keys, png=images + copies, cls=labels)
    return source, [{i, NUM_IMAGES + i} for i in range(9)]


def test_near_copies_are_found_and_the_list_leaves_all_but_one_out(
    planted: tuple[Path, list[set[int]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, wanted = planted
    out = tmp_path / "out"
    assert run(source, out) == 0
    found = groups_in(out)
    assert sorted(map(sorted, found)) == sorted(map(sorted, wanted))
    assert found[0] == {5, NUM_IMAGES + 5}, "labels that disagree come first"
    assert "9 groups of near duplicates among 69 samples, 1 with labels" in capsys.readouterr().out
    with dataio.Loader(
        str(source), batch_size=10, fields={"label": dataio.Int("cls")}, cache=tmp_path / "cache",
        exclude=out / "exclude.csv", world=single_world(), reports=dataio.Reports(progress=False),
    ) as loader:  # fmt: skip
        seen = [i for batch in loader for i in batch["sample_id"].tolist() if i >= 0]
    assert sorted(seen) == list(range(NUM_IMAGES))


def test_equal_texts_are_found_by_their_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["a", "b", "a", "c", "b", "a"]
    source = write(tmp_path / "texts.parquet", text=texts)
    assert run(source, tmp_path / "out", "--content", "text", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["groups"], told["left_out"]) == (2, 3)
    assert groups_in(tmp_path / "out") == [{0, 2, 5}, {1, 4}]


def test_embeddings_stand_for_pictures(tmp_path: Path) -> None:
    source = write(tmp_path / "texts.parquet", text=[*"abcdef"])
    embeddings = np.eye(6, 8, dtype=np.float32)
    embeddings[4] = embeddings[1]
    np.save(tmp_path / "embeddings.npy", embeddings)
    assert run(source, tmp_path / "out", "--embeddings", str(tmp_path / "embeddings.npy")) == 0
    assert groups_in(tmp_path / "out") == [{1, 4}]


def test_nothing_alike_is_no_error(tmp_path: Path) -> None:
    source = write(tmp_path / "images.parquet", png=pictures(5))
    assert run(source, tmp_path / "out") == 0
    assert groups_in(tmp_path / "out") == []
    assert (tmp_path / "out" / "exclude.csv").read_text() == "sample_id,key\n"


def test_what_does_not_fit_is_said_with_the_cure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "texts.parquet", text=[*"abcdef"])
    out = tmp_path / "out"
    assert run(source, out) == 1
    assert "found no image in" in (said := capsys.readouterr().err)
    assert "--content, or give --embeddings" in said
    np.save(tmp_path / "few.npy", np.zeros((5, 2), np.float32))
    assert run(source, out, "--embeddings", str(tmp_path / "few.npy")) == 1
    assert "float32[5, 2], expected float[6, width]" in capsys.readouterr().err
    assert run(source, out, "--embeddings", str(tmp_path / "none.npy")) == 1
    assert "none.npy: cannot be read" in capsys.readouterr().err
    assert run(source, out, "--similar", "2") == 2
    assert cli.main(["hardest", "--source", str(source), "--out", str(out)]) == 2
    said = " ".join(capsys.readouterr().err.replace("\u2502", " ").split())
    assert "give SAVED, of which the scores are read, or --duplicates" in said


def rows_of_two_groups() -> list[dict[str, object]]:
    known = {"key": None, "label": 1, "class": None, "similarity": 0.9}
    return [
        {"group": 1, "sample_id": 3, "labels_disagree": True, "kept": True, **known},
        {"group": 1, "sample_id": 8, "labels_disagree": True, "kept": False, **known, "label": 2},
        {"group": 2, "sample_id": 4, "labels_disagree": False, "kept": True, **known},
        {"group": 2, "sample_id": 5, "labels_disagree": False, "kept": False, **known},
    ]


CLICKS = """
const seen = [];
const heads = () => [...document.querySelectorAll("h2")].map((head) => head.textContent);
const marked = () => [...out].sort();
const pick = (id, value) => { document.getElementById(id).value = value;
  document.getElementById(id).dispatchEvent(new Event("change")); };
seen.push(heads(), marked());
document.getElementById("none").click();
seen.push(marked());
pick("shown", "disagree");
seen.push(heads());
document.getElementById("one").click();
seen.push(marked(), list());
document.body.setAttribute("data-seen", JSON.stringify(seen));
"""


@needs_browser
def test_the_page_shows_groups_and_marks_all_but_one_of_each(tmp_path: Path) -> None:
    probe = tmp_path / "probe.html"
    text = duplicates_page(rows_of_two_groups(), None, title="2 groups")
    probe.write_text(text.replace("</body>", f"<script>{CLICKS}</script></body>"))
    found = re.search(r'data-seen="([^"]*)"', browse(probe, "--dump-dom"))
    assert found is not None
    assert json.loads(html.unescape(found[1])) == [
        ["Group 1: the labels disagree", "Group 2"],
        [5, 8],
        [],
        ["Group 1: the labels disagree"],
        [8],
        "sample_id,key\n8,\n",
    ]
