"""Results survive JSON whole, a schema says what is in them, damage is told with its place."""

import copy
import csv
import json

import jsonschema
import pytest
from msgspec.structs import replace

from tests.tonari.bench.storage.fabricated import make_results
from tonari.bench.errors import BenchError
from tonari.bench.storage.results.csv import write_csv
from tonari.bench.storage.results.document import (
    document_schema,
    from_document,
    read_document,
    to_document,
    write_document,
)  # fmt: skip


def as_read(results):
    """The document of some results, as a reader of its JSON gets it."""
    return json.loads(json.dumps(to_document(results)))


@pytest.fixture(scope="module")
def document():
    return as_read(make_results(repeats=2, clients=(1, 4)))


@pytest.fixture(scope="module")
def validator():
    schema = json.loads(json.dumps(document_schema()))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def put(document, place, value):
    """A copy of a document with something else, or with nothing, at a place."""
    changed = copy.deepcopy(document)
    *way, last = place
    inner = changed
    for key in way:
        inner = inner[key]
    if value is None and isinstance(inner, dict):
        del inner[last]
    else:
        inner[last] = value
    return changed


def test_results_come_back_from_a_file_as_they_were(tmp_path, document):
    path = tmp_path / "out.json"
    write_document(make_results(repeats=2, clients=(1, 4)), path)
    found = read_document(path)
    assert as_read(found) == document
    assert found.site.layout is not None
    assert found.site.layout.components[0].on_mdt
    assert found.phases[0].repeats[0].bytes_per_s > 0


def test_documents_keep_to_the_schema_with_and_without_optional_parts(document, validator):
    validator.validate(document)
    bare = replace(make_results(), phases=(), scalings=(), links=(), end_to_end=None)
    validator.validate(as_read(bare))
    assert from_document(as_read(bare)).end_to_end is None


def test_the_schema_describes_every_figure_of_a_repeat(validator):
    described = validator.schema["$defs"]["Repeat"]
    assert "seconds: From the common start" in described["description"]
    assert described["properties"]["verdict"]["$ref"] == "#/$defs/CacheVerdict"


REPEAT = ("phases", 0, "repeats", 0)
DAMAGE = [
    (("phases", 0, "threads"), "two", r"Expected `int`, got `str` - at `\$.phases\[0\].threads`"),
    ((*REPEAT, "seconds"), -1.0, r"Expected `float` >= 0.0 - at `\$.*repeats\[0\].seconds`"),
    ((*REPEAT, "seconds"), None, r"missing required field `seconds` - at `\$.*repeats\[0\]`"),
    ((*REPEAT, "speed"), 3, r"unknown field `speed` - at `\$.*repeats\[0\]`"),
    ((*REPEAT, "verdict", "state"), "tepid", r"enum value 'tepid' - at `\$.*verdict.state`"),
    (("phases",), {}, r"Expected `array`, got `object` - at `\$.phases`"),
    (("links", 0, "nodes"), ["a"], r"Expected `array` of length 2, got 1 - at .*\[0\].nodes`"),
    (("site", "is_shared"), 1, r"Expected `bool`, got `int` - at `\$.site.is_shared`"),
    (("complete",), "yes", r"a.json: Expected `bool`, got `str` - at `\$.complete`; name a file"),
    (("site", "mount"), [], r"Expected `object`, got `array` - at `\$.site.mount`"),
    (("schema_version",), 99, r"found schema_version 99; expected 1: measure again"),
    (("kind",), "fio", r'found no "kind": "tonari bench io"'),
]


@pytest.mark.parametrize(("place", "value", "message"), DAMAGE, ids=[str(one[0]) for one in DAMAGE])
def test_damage_is_told_with_its_place_and_fails_the_schema(
    document, validator, place, value, message
):
    damaged = put(document, place, value)
    with pytest.raises(BenchError, match=message):
        from_document(damaged, where="a.json")
    assert not validator.is_valid(damaged)


def test_files_that_are_no_documents_get_one_message(tmp_path):
    cut = tmp_path / "cut.json"
    cut.write_text(json.dumps({"kind": "tonari bench io"})[:-4])
    with pytest.raises(BenchError, match=r"cut.json: found no JSON .* measure again"):
        read_document(cut)
    cut.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BenchError, match="found no JSON"):
        read_document(cut)
    cut.write_text("[1, 2]")
    with pytest.raises(BenchError, match="what its --json-file wrote"):
        read_document(cut)
    with pytest.raises(BenchError, match=r"absent.json: cannot be read: No such file"):
        read_document(tmp_path / "absent.json")


def test_a_figure_that_is_no_number_is_not_written(tmp_path):
    results = make_results(repeats=1, clients=(1,))
    broken = replace(results, links=[replace(results.links[0], round_trip_s=float("nan"))])
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_document(broken, tmp_path / "out.json")


def test_the_table_has_a_line_for_each_operation_of_each_phase(tmp_path):
    results = make_results(repeats=3, clients=(2,))
    path = tmp_path / "out.csv"
    write_csv(results, path)
    with path.open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == sum(len(phase.operations) for phase in results.phases)
    first, phase = lines[0], results.phases[0]
    assert (first["pattern"], first["operation"], first["clients"]) == (phase.pattern, "read", "2")
    rates = sorted(repeat.bytes_per_s for repeat in phase.repeats)
    assert [float(first[f"bytes_per_s_{which}"]) for which in ("min", "median", "max")] == rates
    assert float(first["p99_s"]) == phase.operations[0].p99_s
    warm = next(line for line in lines if line["wanted"] == "warm")
    assert warm["verdict"] == "warm"
