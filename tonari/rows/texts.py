"""The texts of samples: a field of text, or the tokens of a run of `tonari train` turned back."""

import numpy as np
from numpy.typing import NDArray

from dataio import FieldError, Source, Text
from dataio.source.names import read_field
from dataio.source.text.tokenizer import BYTES, open_tokenizer
from tonari.trainer.config.config import Config
from tonari.trainer.run.build import make_fields
from tonari.trainer.run.own import own_of
from tonari.trainer.run.packed import packed_info

TEXT_KEYS = ("txt", "text", "caption", "content")
"""Under which one of these a text may stand; the first that is there is taken."""

TOKENS, DOCUMENT = "tokens", "document"

MOST_CHARACTERS = 4000
"""Of a text that is shown."""


def read_texts(
    source: Source, sample_id: NDArray[np.int64], config: Config | None
) -> list[str] | None:
    """Read the texts of samples, cut to what is shown; None: they have none.

    Args:
        source: Where they are.
        sample_id: int64[n], distinct.
        config: Settings of the run, whose tokens are turned back into text; None: not known.

    Raises:
        DataioError: If the source cannot be read, or the tokenizer is not at hand.
    """
    if config is not None and config.data.kind == "text":
        return [text[:MOST_CHARACTERS] for text in _decoded(source, sample_id, config)]
    for key in TEXT_KEYS:
        try:
            values = read_field(source, sample_id, Text(key)).tolist()
        except FieldError:
            continue
        return [str(text)[:MOST_CHARACTERS] for text in values]
    return None


def _decoded(source: Source, sample_id: NDArray[np.int64], config: Config) -> list[str]:
    tokenizer = open_tokenizer(_tokenizer_of(config))
    # With the fields' columns: of packed documents the number of each token's, 0 for padding
    fields = make_fields(config, own_of(config))
    order = np.argsort(sample_id, kind="stable")
    texts = np.empty(len(sample_id), object)
    done = 0
    for rows in source.read(sample_id[order], fields):
        columns = {
            column.name: np.ascontiguousarray(part).view(column.dtype).reshape(len(rows), -1)
            for column, part in zip(rows.schema.fixed, rows.fixed, strict=True)
        }
        for number, tokens in enumerate(columns[TOKENS]):
            held = tokens[columns[DOCUMENT][number] > 0] if DOCUMENT in columns else tokens
            texts[order[done + number]] = tokenizer.decode(held.astype(np.int64))
        done += len(rows)
    return [str(text) for text in texts]


def _tokenizer_of(config: Config) -> str:
    if not config.text.is_packed or packed_info(config).tokenizer == BYTES:
        return BYTES
    train = config.data.train
    return train if isinstance(train, str) else train[0]
