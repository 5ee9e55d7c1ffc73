"""`tonari rows`: which rows a run trained at some steps, and when a sample was trained."""

import json as json_module
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import tyro

from dataio import DataioError
from dataio.rowlog.answers import State
from tonari.errors import CommandError
from tonari.outputs import check_output, check_page
from tonari.report.tables import Table
from tonari.rows.documents import document_words, find_documents, with_suspects
from tonari.rows.losses import loss_words
from tonari.rows.run import RunRows
from tonari.rows.settings import find_fields, open_run
from tonari.rows.show import write_batch, write_page
from tonari.rows.spike_words import plain_rows, spike_document, spike_words, suspect_words
from tonari.rows.spikes import find_suspects, read_losses
from tonari.terminal import room, show
from tonari.trainer.config.saved import find_settings
from tonari.trainer.watch.spikes import Spike, find_spikes

SHOWN = 40
"""Rows of a table on the terminal."""

MOST_NAMED = 10_000
"""Samples whose keys are read without being asked for."""


@dataclass(frozen=True, kw_only=True)
class RowsOptions:
    """List which rows a run trained when: of an epoch's steps, of an optimizer step, of a sample.

    From the run's seed and its log, not from the data. Rows of steps that were thrown away, as the
    run went on from an earlier checkpoint, have kept = no. One of --epoch, --step, --sample,
    --key, --shard and --spikes is to be given.
    """

    run: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RUN")]]
    """The run.directory of tonari train, or what Reports(rows=...) was given; or a checkpoint, or
    what loader.save wrote: then up to there."""
    epoch: int | None = None
    """Rows of an epoch, from 0 on; with --steps of some of its batches."""
    steps: str | None = None
    """With --epoch: its batches from A up to and without B, as A:B, A: or :B, the first being 0; or
    one batch."""
    what: State | None = None
    """With --epoch: all samples of which that became, trained or not, such as hidden."""
    step: int | None = None
    """Rows of an optimizer step of the run, from 1 on, as metrics.jsonl has it."""
    sample: int | None = None
    """Each time that a sample was trained, by its number in the dataset; or why an epoch did not
    train it. Its losses are drawn where importance kept the column history."""
    key: str | None = None
    """Likewise, by its key; reads all keys of the dataset."""
    shard: str | None = None
    """Likewise, of all samples in a file of the dataset."""
    spikes: float | None = None
    """Steps whose loss, in metrics.jsonl, is so many times the spread of those around above their
    median (10 is usual), and the rows that were in one each time that they were trained; --parquet
    writes these rows as a list that exclude takes. Metrics of each step (run.log_steps=1) know
    best. Where importance kept the column history, each row's share of the rise is listed, and only
    rows of more than an even share."""
    discarded: bool = False
    """With --epoch or --step: rows of steps that were thrown away too."""
    source: tuple[str, ...] = ()
    """The dataset, for shards and keys; by default the one that the run names, where it opens."""
    log: Path | None = None
    """Directory of the log, where it does not lie beside RUN."""
    parquet: Path | None = None
    """Write all rows into this file."""
    show: Path | None = None
    """Write a page of the rows, with their pictures or texts where the dataset has some:
    FILE.html."""
    image: str | None = None
    """With --show: extension or column of the picture; by default a usual one."""
    replay: Path | None = None
    """With --step: make that step's first batch of --replica again, as tonari train read it, crops
    and flips included, and write its arrays: FILE.npz."""
    replica: int = 0
    """With --replay: whose batch."""
    json: bool = False
    """Print one JSON document with all rows and nothing else on stdout."""

    def __post_init__(self) -> None:
        asked = [self.epoch, self.step, self.sample, self.key, self.shard, self.spikes]
        if len(asked) - asked.count(None) != 1:
            raise ValueError(
                "give one of --epoch, --step, --sample, --key, --shard and --spikes; found "
                f"{len(asked) - asked.count(None)}"
            )
        if self.steps is not None and self.epoch is None:
            raise ValueError("--steps is of an epoch's batches: give --epoch too")
        if self.what is not None and (self.epoch is None or self.steps is not None):
            raise ValueError("--what is of a whole epoch: give --epoch, and no --steps")
        if self.replay is not None and self.step is None:
            raise ValueError("--replay makes a step's batch again: give --step too")

    @property
    def is_of_samples(self) -> bool:
        """Whether it is asked what became of samples, not of steps."""
        return self.epoch is None and self.step is None and self.spikes is None


def main(argv: list[str]) -> int:
    """Run the command.

    Raises:
        CommandError: If the run has no such step, sample, key or shard.
        DataioError: If there is no log, or it is damaged.
    """
    options = tyro.cli(
        RowsOptions, args=argv, prog="tonari rows", config=(tyro.conf.FlagCreatePairsOff,)
    )
    check_output("--parquet", options.parquet)
    check_page("--show", options.show)
    check_output("--replay", options.replay)
    try:
        config = find_settings(options.run)
        run = open_run(options.run, options.source, log=options.log)
        spikes, at_start = None, list[Spike]()
        if options.spikes is not None:
            spikes, at_start = find_spikes(read_losses(options.run), times=options.spikes)
            table = find_suspects(run, spikes, at_start)
        else:
            table = run.losses(_ask(run, options))
        table, why = _named(run, table, asked=bool(options.source))
        documents = {}
        if options.is_of_samples or spikes is not None:
            documents = find_documents(run, table, config, all=spikes is not None)
        if spikes is not None and documents:
            table = with_suspects(table, documents)
        if options.show is not None:
            write_page(options.show, run, _each(run, table), image=options.image, config=config)
        if options.replay is not None and options.step is not None:
            fields = find_fields(config, options.run)
            batch = run.replay(step=options.step, replica=options.replica, fields=fields)
            write_batch(options.replay, batch)
    except ValueError as error:
        raise CommandError(str(error)) from error
    if options.parquet is not None:
        try:
            pq.write_table(table, options.parquet)
        except OSError as error:
            raise CommandError(
                f"--parquet {options.parquet}: cannot be written ({error}); give a file with room"
            ) from error
    if options.json:
        document = _document(run, table) if spikes is None else spike_document(spikes, table)
        print(json_module.dumps(document))
        return 0
    first = [_summary(run, table)] if spikes is None else spike_words(spikes, at_start)
    drawn = loss_words(table) if options.is_of_samples else []
    last = [suspect_words(spikes, table)] if spikes is not None else []
    last += [*document_words(documents, all=options.is_of_samples), *drawn]
    files = _written(options, table)
    show(line for line in (*first, *_shown(table), *last, why, *files) if line)
    return 0


def _ask(run: RunRows, options: RowsOptions) -> pa.Table:
    if options.what is not None:
        table = run.of(sample_id=range(run.num_samples), epoch=options.epoch)
        return table.filter(pc.equal(table["what"], options.what))
    if options.epoch is not None or options.step is not None:
        steps = _parse_steps(options.steps)
        return run.at(
            epoch=options.epoch, steps=steps, step=options.step, discarded=options.discarded
        )
    return run.of(sample_id=options.sample, key=options.key, shard=options.shard)


def _each(run: RunRows, table: pa.Table) -> pa.Table:
    """List each time that suspects were trained, in place of them; else the rows as they are."""
    if "spikes" not in table.column_names:
        return table
    ids = table["sample_id"].to_pylist()
    listed = run.losses(run.named(run.of(sample_id=ids))).to_pylist()
    share = dict(zip(ids, table["share"].to_pylist(), strict=True))
    place = {sample: number for number, sample in enumerate(ids)}
    listed.sort(key=lambda row: place[row["sample_id"]])
    return pa.Table.from_pylist([{**row, "share": share[row["sample_id"]]} for row in listed])


def _parse_steps(text: str | None) -> slice | range | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d*):(\d*)|(\d+)", text)
    if found is None:
        raise ValueError(
            f"--steps {text}: expected A:B, of which either may be left out, or one batch, from 0 "
            "on; give for example --steps 100:110"
        )
    if found[3]:
        return range(int(found[3]), int(found[3]) + 1)
    return slice(*(int(part) if part else None for part in found.groups()[:2]))


def _named(run: RunRows, table: pa.Table, *, asked: bool) -> tuple[pa.Table, str]:
    """Add shards and keys where the dataset is at hand; else name the reason."""
    count = len(pc.unique(table["sample_id"]))
    if count > MOST_NAMED and not asked:
        return table, f"without shards and keys, as {count:,} samples are many: --source reads them"
    try:
        return run.named(table), ""
    except (ValueError, DataioError) as error:
        if asked:
            raise
        return table, f"without shards and keys: {error}"


def _document(run: RunRows, table: pa.Table) -> dict[str, object]:
    return {
        "run": run.name, "steps": run.num_steps, "epochs": run.num_epochs,
        "whole": run.is_whole, "rows": plain_rows(table),
    }  # fmt: skip


def _shown(table: pa.Table) -> list[str]:
    """Lay the first rows out in columns; those that hold nothing are left out.

    On a terminal, what all rows have in common stands in a line below.
    """
    names = [name for name in table.column_names if table.column(name).null_count < len(table)]
    # Arrow compares no lists.
    plain = [name for name in names if not pa.types.is_nested(table[name].type)]
    alike = [name for name in plain if len(pc.unique(table[name])) == 1]
    if len(table) < 2 or room() == math.inf:
        alike = []
    rows = table.slice(0, SHOWN).to_pylist()
    differ = [name for name in names if name not in alike]
    text = Table(differ, [[_word(row[name]) for name in differ] for row in rows]).text()
    if len(table) > SHOWN:
        text.append(f"... {len(table) - SHOWN:,} more: --parquet FILE has all")
    same = ", ".join(f"{name} {_word(rows[0][name])}" for name in alike)
    return [*text, *([f"of all rows: {same}"] if same else [])]


def _word(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return ", ".join(map(str, value[:4])) + ", ..." * (len(value) > 4)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _summary(run: RunRows, table: pa.Table) -> str:
    whole = "" if run.is_whole else "; what came before its log began is not known"
    trained = table.filter(pc.equal(table["what"], "trained"))
    kept = pc.sum(trained["kept"]).as_py() or 0
    thrown = f", {len(trained) - kept:,} thrown away" if len(trained) > kept else ""
    missed = f", {len(table) - len(trained):,} not trained" if len(table) > len(trained) else ""
    return (
        f"{kept:,} rows trained{thrown}{missed}; the run has {run.num_steps:,} optimizer steps in "
        f"{run.num_epochs:,} epochs{whole}"
    )


def _written(options: RowsOptions, table: pa.Table) -> list[str]:
    files = ((options.parquet, f"{len(table):,} rows"), (options.show, "a page to look at"))
    lines = [f"wrote {path}: {words}" for path, words in files if path is not None]
    if options.replay is not None:
        lines.append(f"wrote {options.replay}: the batch of replica {options.replica}")
    return lines
