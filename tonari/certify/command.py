"""`tonari certify`: a document of what a run trained, and whether it can be recomputed."""

import json as json_module
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import tyro

from dataio.base.atomic import write_file
from tonari.certify.claims import Named, exactly_once, never, read_names
from tonari.certify.facts import code_facts, run_facts
from tonari.certify.seal import FORMAT, Document, differences, open_seal, read_key, seal
from tonari.errors import CommandError
from tonari.outputs import check_output
from tonari.rows.settings import open_run

BESIDE = ("made", "code", "path", "log_path")
"""Of a certificate: what is not recomputed."""

MOST_NAMED = 5


@dataclass(frozen=True, kw_only=True)
class CertifyOptions:
    """Write a certificate of what a run trained, or check one by computing all of it again.

    It holds hashes of the source, the log and, of a checkpoint, its files, the seeds, layouts and
    steps, and what is claimed. docs/certify.md names what it proves, and what it cannot.
    """

    run: tyro.conf.Positional[Annotated[Path | None, tyro.conf.arg(metavar="RUN")]] = None
    """The run.directory of tonari train, what Reports(rows=...) was given, or a checkpoint: then up
    to there. With --check optional: where the run lies now."""
    never: Path | None = None
    """Claim that none of these samples was trained: a file with a key a line, or a CSV or Parquet
    file with a column key or sample_id."""
    exactly_once: bool = False
    """Claim that each finished epoch trained each sample once, but for those that it hid, excluded,
    skipped or left out, which are counted; lists all rows of the run, which takes time."""
    contents: bool = False
    """Hash the bytes of the dataset's files too, not only their names, sizes and times."""
    key: Path | None = None
    """Sign it with the bytes of this file (HMAC-SHA256); with --check: it must be signed so."""
    out: Path = Path("certificate.json")
    """Where to write it."""
    check: Path | None = None
    """Check this certificate."""
    source: tuple[str, ...] = ()
    """The dataset; by default the one that the run names, where it opens."""
    log: Path | None = None
    """Directory of the log, where it does not lie beside RUN."""
    json: bool = False
    """Print one JSON document and nothing else on stdout."""

    def __post_init__(self) -> None:
        if self.check is None and self.run is None:
            raise ValueError("give RUN, or --check FILE")
        if self.check is not None and (self.never or self.exactly_once or self.contents):
            raise ValueError("--check computes what the certificate claims: leave claims out")


def main(argv: list[str]) -> int:
    """Run the command.

    Returns:
        1 where a claim does not hold.

    Raises:
        CommandError: If the run cannot be certified, or a certificate is not what is found.
        DataioError: If log or dataset cannot be read.
        CheckpointError: If a checkpoint is damaged.
    """
    options = tyro.cli(
        CertifyOptions, args=argv, prog="tonari certify", config=(tyro.conf.FlagCreatePairsOff,)
    )
    key = None if options.key is None else read_key(options.key)
    try:
        if options.check is not None:
            return _check(options, options.check, key)
        return _certify(options, key)
    except ValueError as error:
        raise CommandError(str(error)) from error


def _certify(options: CertifyOptions, key: bytes | None) -> int:
    assert options.run is not None, "checked by the options"
    check_output("--out", options.out)
    names = None if options.never is None else read_names(options.never)
    body = {
        "tonari_certificate": FORMAT, "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "path": str(options.run.absolute()), "code": code_facts(),
        "log_path": None if options.log is None else str(options.log.absolute()),
        **_facts(
            options.run, options, log=options.log, names=names, once=options.exactly_once,
            contents=options.contents,
        ),
    }  # fmt: skip
    document = seal(body, key)
    write_file(options.out, (json_module.dumps(document, indent=1) + "\n").encode())
    holds = all(claim["holds"] for claim in body["claims"].values())
    if options.json:
        print(json_module.dumps(document))
    else:
        signed = "not signed" if key is None else "signed"
        print("\n".join([*_words(body), f"{options.out}: {signed}"]))
    return 0 if holds else 1


def _check(options: CertifyOptions, path: Path, key: bytes | None) -> int:
    document, signature = open_seal(path, key)
    try:
        claims = document["claims"]
        names = [one["name"] for one in claims["never"]["found"]] if "never" in claims else None
        contents = any(one["sha256"] for one in document["source"]["files"])
        log = None if document["log_path"] is None else Path(document["log_path"])
        run, once, code = Path(document["path"]), "exactly_once" in claims, document["code"]
    except (KeyError, TypeError) as error:
        raise CommandError(f"{path}: lacks {error}; bring it back as it was made") from error
    found = _facts(
        options.run or run, options, log=options.log or log, names=names, once=once,
        contents=contents,
    )  # fmt: skip
    certified = {k: v for k, v in document.items() if k not in BESIDE}
    wrong = differences(certified, {"tonari_certificate": FORMAT, **found})
    if named := [*islice(wrong, MOST_NAMED + 1)]:
        more = " and more" if len(named) > MOST_NAMED else ""
        raise CommandError(
            f"{path}: is refused, {options.run or run} differs from it in "
            f"{', '.join(named[:MOST_NAMED])}{more}; bring the run, its log and its data back as "
            "they were, or certify it anew"
        )
    same = "" if code == code_facts() else "; the code that made it was another than this"
    if options.json:
        print(json_module.dumps({"certificate": certified, "signature": signature}))
    else:
        print(
            "\n".join(
                [*_words(document), f"{path}: all is found again; signature: {signature}{same}"]
            )
        )
    return 0


def _facts(
    path: Path,
    options: CertifyOptions,
    *,
    log: Path | None,
    names: Named | None,
    once: bool,
    contents: bool,
) -> Document:
    run = open_run(path, options.source, log=log)
    claims: dict[str, Any] = {}
    facts = run_facts(path, run, log=log, contents=contents)
    if names is not None:
        claims["never"] = never(run, names)
    if once:
        claims["exactly_once"] = exactly_once(run)
    # As it is read back: lists for tuples
    body: Document = json_module.loads(json_module.dumps({**facts, "claims": claims}))
    return body


def _words(body: Document) -> list[str]:
    """Name what is claimed, and whether it holds."""
    run, claims = body["run"], body["claims"]
    lines: list[str] = []
    if "never" in claims:
        found = claims["never"]["found"]
        trained = [one for one in found if one["trained"]]
        unknown = sum(one["sample_id"] is None for one in found)
        thrown = sum(bool(one["thrown_away"]) for one in found)
        lines.append(
            f"never: {'holds' if not trained else 'DOES NOT HOLD'}: of {len(found)} samples "
            f"{len(trained)} were trained; {unknown} are not in the dataset, {thrown} were in "
            "steps that were thrown away"
        )
        lines += [f"  {one['name']}: trained {one['trained']} times" for one in trained[:20]]
    if "exactly_once" in claims:
        holds, epochs = claims["exactly_once"]["holds"], claims["exactly_once"]["epochs"]
        lines.append(f"exactly once: {'holds' if holds else 'DOES NOT HOLD'} for finished epochs")
        for one in epochs:
            counts = {k: v for k, v in one.items() if isinstance(v, int) and v and k != "epoch"}
            shown = ", ".join(
                f"{k.replace('_', ' ')} {v}" for k, v in counts.items() if v is not True
            )
            lines.append(
                f"  epoch {one['epoch']}{'' if one['finished'] else ', unfinished'}: {shown}"
            )
    lines.append(f"{body['path']}: {run['steps']} optimizer steps in {run['epochs']} epochs")
    return lines
