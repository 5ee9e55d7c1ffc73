"""Results as a versioned JSON document, and back.

`python -m tonari.bench.storage.results.document` prints the JSON Schema of such a document.
"""

import json
from pathlib import Path

import msgspec
import numpy as np

from tonari.bench.errors import BenchError
from tonari.bench.storage.results.results import SCHEMA_VERSION, Results

KIND = "tonari bench io"


def to_document(results: Results) -> dict[str, object]:
    """Make results ready for JSON, which has no numbers that are infinite or undefined."""
    found: dict[str, object] = msgspec.to_builtins(results, enc_hook=_plain)
    return {"kind": KIND, "schema_version": SCHEMA_VERSION, **found}


def _plain(value: object) -> object:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)


def from_document(document: object, *, where: str = "document") -> Results:
    """Make results of what was read from JSON.

    Args:
        document: What was read.
        where: Names it in messages, such as its path.

    Raises:
        BenchError: If it is something else, of another version, or damaged: with the place.
    """
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise BenchError(
            f'{where}: found no "kind": "{KIND}"; expected a document of `tonari bench io`: name '
            "what its --json-file wrote"
        )
    version = document.get("schema_version")
    if version != SCHEMA_VERSION:
        raise BenchError(
            f"{where}: found schema_version {version!r}; expected {SCHEMA_VERSION}: measure again "
            "with this version of Tonari, or read it with the one that wrote it"
        )
    rest = {k: v for k, v in document.items() if k not in ("kind", "schema_version")}
    try:
        return msgspec.convert(rest, Results)
    except msgspec.ValidationError as error:
        raise BenchError(
            f"{where}: {error}; name a file that `tonari bench io --json-file` wrote"
        ) from error


def write_document(results: Results, path: Path) -> None:
    """Write results as JSON.

    Raises:
        ValueError: If a figure is infinite or not a number: None means "not measured".
    """
    path.write_text(json.dumps(to_document(results), indent=1, allow_nan=False) + "\n")


def read_document(path: Path) -> Results:
    """Read what `write_document` wrote.

    Raises:
        BenchError: If it cannot be read, is no JSON, or as `from_document`.
    """
    try:
        document = json.loads(path.read_text())
    except OSError as error:
        raise BenchError(
            f"{path}: cannot be read: {error.strerror}; expected a JSON document of `tonari bench "
            "io`: check the name"
        ) from error
    except (ValueError, RecursionError) as error:
        raise BenchError(
            f"{path}: found no JSON ({error}); expected a document of `tonari bench io`: if it was "
            "cut short, measure again"
        ) from error
    return from_document(document, where=str(path))


def document_schema() -> dict[str, object]:
    """Make the JSON Schema of a document from the types of `Results` and their docstrings."""
    found = msgspec.json.schema(Results, ref_template="#/$defs/{name}")
    top = found["$defs"].pop("Results")
    header = {"kind": {"const": KIND}, "schema_version": {"const": SCHEMA_VERSION}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **top,
        "title": f"What `{KIND}` found",
        "properties": header | top["properties"],
        "required": [*header, *top["required"]],
        "$defs": found["$defs"],
    }


if __name__ == "__main__":
    print(json.dumps(document_schema(), indent=1))
