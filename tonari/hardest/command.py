"""`tonari hardest`: the rows that never become easy, as a table and a picture."""

import json as json_module
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from numpy.typing import NDArray

from dataio import Bytes, DataioError, Field, Source, open_source
from dataio.base.atomic import write_file
from dataio.plan.history import Scores
from dataio.rowlog.reading import find_log
from dataio.source.names import find_name, read_field
from dataio.state.snapshot import load_scores
from tonari.errors import CommandError
from tonari.hardest.duplicates import Look, read_embeddings, write_duplicates
from tonari.hardest.page import page
from tonari.hardest.picture import draw_tiles, to_png
from tonari.hardest.rank import (
    Measure,
    hardest_of_each,
    hardest_rows,
    hardness,
    reported_rows,
    within_classes,
)
from tonari.hardest.samples import find_image, find_label, find_places, name_classes
from tonari.hardest.saved import choose_measure, find_saved
from tonari.hardest.table import Described, Row, make_table, rows_csv, to_tiles, words
from tonari.hardest.texts import BESIDE, with_texts
from tonari.outputs import check_page, make_directory
from tonari.trainer.config.config import Config
from tonari.trainer.config.saved import find_settings
from tonari.trainer.run.build import training_source

MOST_PICTURES = 500
"""More make a picture that no viewer opens quickly; the table has them all."""

MOST_DRAWN = 20
"""Rows whose losses are drawn on the terminal, where the column history was kept."""


@dataclass(frozen=True, kw_only=True)
class Hardest:
    """List the rows that never become easy: wrong labels, broken samples, or just hard ones.

    With --duplicates it lists groups of near duplicates instead. Reads the scores that loader.save
    or tonari train left. Writes hardest.csv, hardest.html to look through the rows and save a list
    of those to leave out, and, where the source has images, hardest.png. Scores are there if
    importance went by them, or was importance.Full(columns=("loss", "loss_mean")), which leaves no
    row out.
    """

    saved: tyro.conf.Positional[Annotated[Path | None, tyro.conf.arg(metavar="SAVED")]] = None
    """What loader.save wrote, or a checkpoint of tonari train, or its run.directory (newest). Not
    with --duplicates."""
    source: str = ""
    """The shards that were trained on, as the loader was given them; by default those that the run
    of tonari train, or the log of rows beside SAVED, names."""
    out: Path
    """Directory for the results; made if need be."""
    image: str | None = None
    """Extension or column of the image; by default a usual one, such as jpg, if it is there."""
    label: str | None = None
    """Extension or column of the label; by default cls or label, if it is there."""
    classes: str | None = None
    """Names of the labels 0, 1 ...: with commas between them, or a file: .json with a list, else a
    name a line. An image folder has its own."""
    by: Measure | None = None
    """What makes a row hard: exponential mean of losses; last loss; never right, or often right
    and then wrong; how sure the model was of something else; how often it was wrong. By default
    the first one saved."""
    top: int = 100
    """How many rows."""
    per_class: int | None = None
    """How many rows of each label, in place of --top: else hard classes hide the wrong labels of
    others."""
    within_classes: bool = False
    """Rank each row among those of its label: so hard classes do not fill the list, and each has
    its part of it."""
    duplicates: bool = False
    """Find groups of near duplicates instead, without a model: duplicates.csv, duplicates.html, and
    exclude.csv with all but one of each group."""
    content: str | None = None
    """With --duplicates: extension or column whose equal bytes make equal samples, such as a text;
    pictures are not compared then."""
    embeddings: Path | None = None
    """With --duplicates: an .npy of float[samples, width] whose cosines are compared, in place of
    pictures."""
    similar: float | None = None
    """With --duplicates: least similarity; by default 0.85 of pictures, 0.95 of embeddings."""
    json: bool = False
    """Print one JSON document and nothing else on stdout."""

    def __post_init__(self) -> None:
        for flag, count in (("--top", self.top), ("--per-class", self.per_class)):
            if count is not None and count < 1:
                raise ValueError(f"{flag} is {count}, must be >= 1")
        if (self.saved is None) != self.duplicates:
            raise ValueError(
                "give SAVED, of which the scores are read, or --duplicates, which needs none; "
                f"found {'both' if self.duplicates else 'neither'}"
            )
        if self.duplicates and not self.source:
            raise ValueError("--duplicates looks through a dataset: give --source too")
        if self.similar is not None and not 0 < self.similar <= 1:
            raise ValueError(f"--similar is {self.similar}, must be in (0, 1]")
        if self.within_classes and self.per_class is not None:
            raise ValueError("give --within-classes or --per-class, not both")


@dataclass(frozen=True)
class FoundRows:
    """The hardest rows.

    Attributes:
        by: What they were ranked by.
        sample_ids: int64[n], in the order of the table.
        ranks: From 1; with --per-class anew for each label.
        num_samples: Of the source.
        num_reported: Rows that were looked at.
        median: Of these, by the same measure; nan where there is none.
    """

    by: Measure
    sample_ids: NDArray[np.int64]
    ranks: Sequence[int]
    num_samples: int
    num_reported: int
    median: float


def main(argv: list[str]) -> int:
    """Run the command.

    Raises:
        CommandError: If nothing fitting was saved, or the results could not be written.
        DataioError: If what was saved or the source cannot be read, or lacks a field.
    """
    options = tyro.cli(
        Hardest, args=argv, prog="tonari hardest", config=(tyro.conf.FlagCreatePairsOff,)
    )
    make_directory("--out", options.out)
    check_page("--out", options.out / "hardest.html")
    if options.saved is None:
        return _find_duplicates(options)
    saved = find_saved(options.saved)
    scores = load_scores(saved)
    by = choose_measure(scores, options.by, saved)
    source, config = _open(options.saved, options.source)
    if source.num_samples != len(scores):
        raise CommandError(
            f"--source {source.name}: holds {source.num_samples:,} samples, expected "
            f"{len(scores):,} as when {saved} was written; give the source that was trained on"
        )
    classes = name_classes(source, options.classes)
    image, label = find_image(source, options.image), find_label(source, options.label)
    found = find_hardest(scores, source, label, by=by, top=options.top, each=options.per_class,
        within=options.within_classes,
    )  # fmt: skip
    described = _ask(source, found.sample_ids, label)
    table = make_table(found.sample_ids, found.ranks, scores, described, classes)
    images = None
    if image is not None and table:
        images = read_field(source, found.sample_ids[:MOST_PICTURES], image).tolist()
    cards = with_texts(table, source, config) if image is None else table
    write_file(options.out / "hardest.csv", rows_csv(cards).encode())
    shown = page(cards, images, by=found.by, title=_headline(options, found))
    write_file(options.out / "hardest.html", shown.encode())
    picture = options.out / "hardest.png"
    # One of an earlier call would show other rows
    picture.unlink(missing_ok=True)
    if images is not None:
        write_file(picture, _draw(options, found, table, images))
    _report(options, found, cards, picture if picture.exists() else None)
    return 0


def _open(saved: Path, given: str) -> tuple[Source, Config | None]:
    """Open what was trained on; text by the settings of the run, which are returned too."""
    config = find_settings(saved)
    if given and (config is None or config.data.kind != "text"):
        return open_source(given), None
    if config is None:
        try:
            return open_source(find_log(saved, log=None).attempts[-1].setup.source), None
        except DataioError as error:
            raise CommandError(f"{error}; or give --source") from error
    data = replace(config.data, train=given or config.data.train)
    return training_source(replace(config, data=data)), config


def find_hardest(
    scores: Scores,
    source: Source,
    label: Field | None,
    *,
    by: Measure,
    top: int,
    each: int | None = None,
    within: bool = False,
) -> FoundRows:
    """Rank the rows that were reported.

    Args:
        scores: Of all samples.
        source: Has the labels that ``each`` asks for.
        label: Where it does.
        by: What rows are ranked by.
        top: How many to choose of all.
        each: How many of each label, instead.
        within: Whether each row is ranked among those of its label.

    Raises:
        CommandError: If labels are asked for and there are none.
    """
    reported = reported_rows(scores, by=by)
    values = hardness(scores[reported], by=by)
    if each is None and not within:
        groups = [hardest_rows(values, top=top)]
    elif label is not None:
        labels = read_field(source, reported, label)
        if each is not None:
            groups = hardest_of_each(values, labels, top=each)
        else:
            groups = [hardest_rows(within_classes(values, labels), top=top)]
    else:
        asked = "--within-classes" if within else f"--per-class {each}"
        raise CommandError(
            f"{asked}: found no label in {source.name}, expected one of each sample; "
            "name its extension or column with --label"
        )
    return FoundRows(
        by,
        reported[np.concatenate([np.empty(0, np.int64), *groups])],
        [rank for group in groups for rank in range(1, len(group) + 1)],
        len(scores),
        len(reported),
        float(np.median(scores[by][reported])) if len(reported) else math.nan,
    )


def _find_duplicates(options: Hardest) -> int:
    source = open_source(options.source)
    embeddings = None
    if options.embeddings is not None:
        embeddings = read_embeddings(options.embeddings, source.num_samples)
    content = Bytes(options.content) if options.content is not None else None
    look = Look(source, find_image(source, options.image), content, embeddings, options.similar)
    write_duplicates(
        look,
        find_label(source, options.label),
        name_classes(source, options.classes),
        options.out,
        most_pictures=MOST_PICTURES,
        json=options.json,
    )
    return 0


def _ask(source: Source, sample_ids: NDArray[np.int64], label: Field | None) -> Described:
    unknown = [None] * len(sample_ids)
    name = find_name(source)
    return Described(
        read_field(source, sample_ids, name).tolist() if name else unknown,
        find_places(source, sample_ids),
        read_field(source, sample_ids, label).tolist() if label else unknown,
    )


def _draw(
    options: Hardest, found: FoundRows, table: Sequence[Row], images: Sequence[bytes]
) -> bytes:
    tiles = to_tiles(
        table[:MOST_PICTURES], images, by=found.by, grouped=options.per_class is not None
    )
    return to_png(draw_tiles(tiles, title=f"{_headline(options, found)}, each with its label"))


def _headline(options: Hardest, found: FoundRows) -> str:
    each = "" if options.per_class is None else f", {options.per_class} of each label"
    if options.within_classes:
        each = " within classes"
    return (
        f"hardest {len(found.sample_ids):,} of {found.num_reported:,} rows by {found.by}{each}"
        f" (median of all {found.median:.2f})"
    )


def _numbers(history: str) -> list[float | None]:
    """Read losses for JSON, which has neither nan nor infinity."""
    losses = [float(loss) for loss in history.split()]
    return [loss if math.isfinite(loss) else None for loss in losses]


def _report(options: Hardest, found: FoundRows, table: Sequence[Row], picture: Path | None) -> None:
    never = found.num_samples - found.num_reported
    written = options.out / "hardest.csv"
    if options.json:
        document = {
            "by": found.by,
            "rows": len(found.sample_ids),
            "num_samples": found.num_samples,
            "never_reported": never,
            "median": found.median if math.isfinite(found.median) else None,
            "csv": str(written),
            "html": str(options.out / "hardest.html"),
            "png": str(picture) if picture else None,
            "sample_ids": found.sample_ids.tolist(),
        }
        if any(row["history"] for row in table):
            document["losses"] = [_numbers(str(row["history"])) for row in table]
        print(json_module.dumps(document))
        return
    left_out = f"; {never:,} never reported, left out" if never else ""
    shown = f", {picture}" if picture else ", no picture, as the source has no images"
    if picture and len(table) > MOST_PICTURES:
        shown += f" (of the first {MOST_PICTURES:,})"
    is_text = any("text" in row for row in table)
    first = [row for row in table if row["class"] != BESIDE][:MOST_DRAWN]
    for row in first if is_text or any(row["history"] for row in table) else ():
        where = f"{row['title']} {row['where']}" if "where" in row else f"sample {row['sample_id']}"
        print(f"#{row['rank']}  {where}  {words(row, found.by)}")
    print(
        f"{_headline(options, found)}{left_out}: {written}{'' if is_text else shown}; to look "
        f"through them and mark those to leave out, open {options.out / 'hardest.html'}"
    )
