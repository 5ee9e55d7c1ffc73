"""The texts of samples: a field of text, or the tokens of a run of `tonari train` turned back."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataio import FieldError, Source, Text
from dataio.source.names import read_field
from dataio.source.text.dataset import document_places
from dataio.source.text.tokenizer import Tokenizer
from dataio.source.wrap.packed import SequenceSource
from tonari.hardest.table import Row
from tonari.trainer.config.config import Config
from tonari.trainer.run.build import make_fields
from tonari.trainer.run.own import own_of
from tonari.trainer.run.packed import tokenizer_of

TEXT_KEYS = ("txt", "text", "caption", "content")
"""Under which one of these a text may stand; the first that is there is taken."""

TOKENS, DOCUMENT = "tokens", "document"

BESIDE = "beside it"
"""The class of the documents of a sequence that do not stand out."""

MOST_CHARACTERS = 4000
"""Of a text that is shown."""

COMPARED = 256
"""Sequences, all over the dataset, whose tokens say how often each is used."""


class ShownDocument(NamedTuple):
    """A document's part in a sequence.

    Attributes:
        number: Of the document in the dataset; None where documents have none.
        place: The file and line that it was packed from; "" where nobody kept it.
        text: Its tokens as text, cut to what is shown.
        unusual: How much rarer its tokens are than usual, below 0 more frequent, in standard
            deviations of as many tokens by chance.
    """

    number: int | None
    place: str
    text: str
    unusual: float


def read_texts(
    source: Source, sample_id: NDArray[np.int64], config: Config | None
) -> list[str] | None:
    """Read the texts of samples, cut to what is shown; None: they have none.

    Args:
        source: Where they are, not packed.
        sample_id: int64[n], distinct.
        config: Settings of the run, whose tokens are turned back into text; None: not known.

    Raises:
        DataioError: If the source cannot be read, or the tokenizer is not at hand.
    """
    if config is not None and config.data.kind == "text":
        tokens, _ = _read(source, sample_id, config)
        return [_decoded(each, tokenizer_of(config)) for each in tokens]
    for key in TEXT_KEYS:
        try:
            values = read_field(source, sample_id, Text(key)).tolist()
        except FieldError:
            continue
        return [str(text)[:MOST_CHARACTERS] for text in values]
    return None


def read_documents(
    source: Source, sample_id: NDArray[np.int64], config: Config
) -> list[list[ShownDocument]]:
    """Read the documents of packed sequences, of each sequence the most unusual first.

    Args:
        source: Where they are.
        sample_id: int64[n], distinct.
        config: Settings of the run.

    Raises:
        DataioError: As `read_texts`.
    """
    every = np.linspace(0, source.num_samples - 1, COMPARED, dtype=np.int64)
    tokens, document = _read(source, np.unique(every), config)
    surprise, usual, spread = _expect(tokens[document > 0])
    tokens, document = _read(source, sample_id, config)
    numbered = source if isinstance(source, SequenceSource) else None
    numbers = [] if numbered is None else numbered.documents(sample_id)
    tokenizer, found = tokenizer_of(config), []
    for row, (its_tokens, its_document) in enumerate(zip(tokens, document, strict=True)):
        parts = []
        for one in range(1, int(its_document.max()) + 1):
            held = its_tokens[its_document == one]
            mean = surprise[np.minimum(held, len(surprise) - 1)].mean()
            unusual = float((mean - usual) * np.sqrt(len(held)) / spread)
            number, place = None, ""
            if numbered is not None:
                number = int(numbers[row][one - 1])
                place = _place(numbered, number)
            parts.append(ShownDocument(number, place, _decoded(held, tokenizer), unusual))
        found.append(sorted(parts, key=lambda part: -abs(part.unusual)))
    return found


def with_texts(rows: Sequence[Row], source: Source, config: Config | None) -> Sequence[Row]:
    """Add the texts of rows, where they have some; of packed text a row for each document."""
    if not rows:
        return rows
    ids = np.array([row["sample_id"] for row in rows], np.int64)
    if config is None or not config.text.is_packed:
        texts = read_texts(source, ids, config)
        if texts is None:
            return rows
        return [{**row, "text": text} for row, text in zip(rows, texts, strict=True)]
    return [
        {
            **row, "document": its.number, "place": its.place, "text": its.text,
            "class": BESIDE if place else "stands out", "unusual": round(its.unusual, 1),
            "title": f"part {place + 1}" if its.number is None else f"document {its.number}",
            "where": f"in sample {row['sample_id']}{its.place and ', ' + its.place}",
        }
        for row, documents in zip(rows, read_documents(source, ids, config), strict=True)
        for place, its in enumerate(documents)
    ]  # fmt: skip


def _expect(tokens: NDArray[np.int64]) -> tuple[NDArray[np.float64], float, float]:
    """Find the surprise of each token, float64[vocabulary + 1], in nats; its mean and spread."""
    # One more, for tokens that are not among these
    counts = np.append(np.bincount(tokens), 0)
    surprise = -np.log((counts + 1) / (counts + 1).sum())
    usual = float(np.average(surprise, weights=counts))
    spread = float(np.sqrt(np.average((surprise - usual) ** 2, weights=counts)))
    return surprise, usual, max(spread, 1e-9)


def _read(
    source: Source, sample_id: NDArray[np.int64], config: Config
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Read tokens and the numbers of their documents, int64[n, places]: all 1 where not packed."""
    fields = make_fields(config, own_of(config))
    order = np.argsort(sample_id, kind="stable")
    found: dict[str, list[NDArray[np.generic]]] = {}
    for rows in source.read(sample_id[order], fields):
        for column, part in zip(rows.schema.fixed, rows.fixed, strict=True):
            values = np.ascontiguousarray(part).view(column.dtype).reshape(len(rows), -1)
            found.setdefault(column.name, []).append(values)
    back = np.argsort(order, kind="stable")
    tokens = np.concatenate(found[TOKENS]).astype(np.int64)[back]
    if DOCUMENT not in found:
        return tokens, np.ones_like(tokens)
    return tokens, np.concatenate(found[DOCUMENT]).astype(np.int64)[back]


def _decoded(tokens: NDArray[np.int64], tokenizer: Tokenizer | None) -> str:
    text = " ".join(map(str, tokens)) if tokenizer is None else tokenizer.decode(tokens)
    return text[:MOST_CHARACTERS]


def _place(source: SequenceSource, number: int) -> str:
    shard = int(np.searchsorted(source.first_documents, number, side="right")) - 1
    own = np.array([number - source.first_documents[shard]])
    return document_places(source.shards[shard].path, own)[0]
