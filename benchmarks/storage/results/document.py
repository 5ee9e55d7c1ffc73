"""Results as a versioned JSON document, and back; `schema.json` describes it."""

import json
from pathlib import Path

from benchmarks.errors import BenchError
from benchmarks.storage.results.results import SCHEMA_VERSION, Results
from benchmarks.storage.results.shapes import decode, encode, schema

KIND = "tonari bench io"
SCHEMA = Path(__file__).with_name("schema.json")
"""JSON Schema 2020-12 of a document, as `document_schema` makes it."""


def to_document(results: Results) -> dict[str, object]:
    """Make results ready for JSON.

    Raises:
        ValueError: If a figure is infinite or not a number.
    """
    found = encode(results)
    assert isinstance(found, dict)
    return {"kind": KIND, "schema_version": SCHEMA_VERSION, **found}


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
    rest = {name: value for name, value in document.items() if name not in _HEADER}
    return decode(Results, rest, where)


def write_document(results: Results, path: Path) -> None:
    """Write results as JSON."""
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
    """Make the JSON Schema of a document from the types of `Results`."""
    found = schema(Results)
    properties, required = found["properties"], found["required"]
    assert isinstance(properties, dict)
    assert isinstance(required, list)
    return found | {
        "title": f"What `{KIND}` found",
        "properties": {
            "kind": {"const": KIND},
            "schema_version": {"const": SCHEMA_VERSION},
            **properties,
        },
        "required": [*_HEADER, *required],
    }


_HEADER = ("kind", "schema_version")

if __name__ == "__main__":
    SCHEMA.write_text(json.dumps(document_schema(), indent=1) + "\n")
