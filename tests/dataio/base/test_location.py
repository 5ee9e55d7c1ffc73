"""What is shown of a location holds none of its secrets, and names what it is."""

import pytest

from dataio.base.errors import SourceError
from dataio.base.location import bare, bare_within, explained, shown


@pytest.mark.parametrize(
    ("location", "name"),
    [
        ("http://h/a.tar?X-Amz-Expires=9&X-Amz-Signature=KEEP", "http://h/a.tar"),
        ("https://user:KEEP@h:8080/a.tar", "https://h:8080/a.tar"),
        ("https://KEEP@h/a b.tar?KEEP", "https://h/a b.tar"),
        ("https://user:KE/EP@h/a.tar", "https://h/a.tar"),
        ("https://user:K@EP@h/a@2x.tar", "https://h/a@2x.tar"),
        ("ftp://u:KEEP@[::1]:21/a@b.tar", "ftp://[::1]:21/a@b.tar"),
        ("s3://u:KEEP@bucket/a.tar", "s3://bucket/a.tar"),
        ("s3://bucket/a.tar?secret_key=KEEP", "s3://bucket/a.tar"),
        ("s3://region=eu-west-3@bucket/a.tar", "s3://region=eu-west-3@bucket/a.tar"),
        ("s3://bucket/a.tar?region=eu&scheme=http", "s3://bucket/a.tar?region=eu&scheme=http"),
        ("s3://bucket/a.tar?region=eu&token=KEEP", "s3://bucket/a.tar"),
        ("s3://endpoint_override=http:%2F%2Fu:KEEP%40h@bucket/a.tar", "s3://bucket/a.tar"),
        ("az://box/a.tar?sv=1&sig=KEEP%3D", "az://box/a.tar"),
        ("abfs://box@account.dfs/a.tar", "abfs://box@account.dfs/a.tar"),
        ("hf://datasets/a/b@main/x.parquet", "hf://datasets/a/b@main/x.parquet"),
        ("memory://d/train-?.tar", "memory://d/train-?.tar"),
        ("simplecache::https://u:KEEP@h/a.tar?sig=KEEP", "simplecache::https://h/a.tar"),
        ("zip://a.tar::https://u:KEEP@h/a.zip", "zip://a.tar::https://h/a.zip"),
        ("/shards/a?b=c@d{0..3}.tar", "/shards/a?b=c@d{0..3}.tar"),
    ],
)
def test_a_name_is_a_location_without_its_secrets(location: str, name: str) -> None:
    assert bare(location) == bare(name) == name
    written = location.replace(" ", "%20")
    assert "KEEP" not in str(SourceError(f"source: ({written}), '{written}': found; check."))
    assert bare_within({"a": [location, 1], "b": (location,)}) == {"a": [name, 1], "b": [name]}


def test_a_text_keeps_what_stands_around_its_urls() -> None:
    text = "http://h/a?x=1: see ('http://u:p@h/b?y=2', http://h/c); or 10:30 a@b?c=d"
    assert shown(text) == "http://h/a: see ('http://h/b', http://h/c); or 10:30 a@b?c=d"


@pytest.mark.parametrize(
    "said",
    [
        "Cannot reach url='https://h/a.tar?sig=KEEPER%3D'",
        "400, message='bad', query_string='sig=KEEPER='",
        "refused KEEPER%3D",
        "headers={'Authorization': 'Bearer KEEPER'}",
        "Authorization: Basic KEEPER==",
        "account_key=KEEPER;x-ms-token: KEEPER",
        '{"aws_secret_access_key": "KEEPER"}',
    ],
)
def test_what_a_library_says_is_shown_without_secrets(said: str) -> None:
    text = explained(ValueError(said), "https://me:KEEPER@h/a.tar?sig=KEEPER%3D")
    assert text.startswith("ValueError: ")
    assert "KEEPER" not in text
