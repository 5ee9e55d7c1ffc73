"""The door for tokenizers: a file of Hugging Face's ``tokenizers``, or the bytes of the text."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from dataio.base.errors import SourceError, install_command

BYTES = "bytes"
"""Names the tokenizer whose tokens are the bytes of the text in UTF-8."""
FILE = "tokenizer.json"
UNUSED_KEYS = ("version", "truncation", "padding")
"""Of a tokenizer's file: they change no token of a whole document."""


class Tokenizer(Protocol):
    """What turns text into tokens."""

    @property
    def name(self) -> str:
        """How it was asked for."""
        ...

    @property
    def digest(self) -> str:
        """The same for two tokenizers exactly if they have the same settings and vocabulary."""
        ...

    @property
    def vocabulary(self) -> int:
        """Every token is in [0, vocabulary)."""
        ...

    @property
    def document(self) -> bytes | None:
        """The file that it was read from; None for the built-in one."""
        ...

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """Turn each text into its tokens, int64[num_tokens], on all cores where it can."""
        ...

    def decode(self, tokens: NDArray[np.int64]) -> str:
        """Turn tokens back into text, to look at."""
        ...

    def token(self, name: str) -> int:
        """Find the number of a special token.

        Raises:
            SourceError: If there is none of that name.
        """
        ...


class ByteTokenizer:
    """Takes the bytes of a text as its tokens."""

    name = digest = BYTES
    vocabulary = 256
    document = None

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """Turn each text into its bytes."""
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int64) for text in texts]

    def decode(self, tokens: NDArray[np.int64]) -> str:
        """Read the bytes as UTF-8; what is none of it is replaced."""
        return tokens.astype(np.uint8).tobytes().decode(errors="replace")

    def token(self, name: str) -> int:
        """Refuse: all bytes stand for text."""
        raise SourceError(
            f"the tokenizer {BYTES!r} has no token {name!r}, as its tokens are the 256 bytes of "
            "text; leave the token out, or give a tokenizer.json"
        )


class FileTokenizer:
    """A tokenizer of Hugging Face's library ``tokenizers``.

    Documents are encoded as the file says, with the special tokens that it puts around a text,
    and never cut or padded.

    Args:
        path: The ``tokenizer.json``.

    Raises:
        SourceError: If it is no such file, or the library is not installed.
    """

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer as Library
        except ModuleNotFoundError as error:
            raise SourceError(
                f"{path}: tokenizers is not installed, expected it to read this file; run "
                f"`{install_command('text')}`"
            ) from error
        self.name = str(path)
        try:
            self.document: bytes | None = path.read_bytes()
            self._library = Library.from_buffer(self.document)
            settings = json.loads(self.document)
        # The library raises plain Exceptions for what it cannot read.
        except Exception as error:
            raise SourceError(
                f"{path}: cannot be read as a tokenizer ({error}), expected the {FILE} of Hugging "
                "Face's tokenizers; write it again with save_pretrained or Tokenizer.save"
            ) from error
        self._library.no_truncation()
        self._library.no_padding()
        kept = {key: value for key, value in settings.items() if key not in UNUSED_KEYS}
        self.digest = xxhash.xxh3_128_hexdigest(json.dumps(kept, sort_keys=True).encode())
        # Numbers may have gaps: the largest counts.
        self.vocabulary = 1 + max(self._library.get_vocab(with_added_tokens=True).values())

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """Turn each text into its tokens, on all cores; other Python threads run meanwhile."""
        encoded = self._library.encode_batch_fast(texts)
        return [np.array(each.ids, np.int64) for each in encoded]

    def decode(self, tokens: NDArray[np.int64]) -> str:
        """Turn tokens back into text, special ones included."""
        return str(self._library.decode(tokens.tolist(), skip_special_tokens=False))

    def token(self, name: str) -> int:
        """Find the number of a special token."""
        number: int | None = self._library.token_to_id(name)
        if number is None:
            added = [str(token) for token in self._library.get_added_tokens_decoder().values()]
            raise SourceError(
                f"{self.name}: has no token {name!r}, expected one of its vocabulary, such as its "
                f"special tokens {', '.join(map(repr, added[:8])) or '(it has none)'}; name one "
                "that is there"
            )
        return number


def open_tokenizer(name: str) -> Tokenizer:
    """Open a tokenizer; nothing is downloaded.

    Args:
        name: ``"bytes"``, the path of a ``tokenizer.json``, or a local directory that holds one.

    Raises:
        SourceError: If there is none, or it cannot be read.
    """
    if name == BYTES:
        return ByteTokenizer()
    path = Path(name).expanduser()
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise SourceError(
            f"{path}: there is no tokenizer here, expected {BYTES!r}, the path of a {FILE}, or a "
            "local directory that holds one; to get one from the hub, run once where there is a "
            'network: python -c "from transformers import AutoTokenizer; '
            "AutoTokenizer.from_pretrained('NAME').save_pretrained('DIRECTORY')\""
        )
    return FileTokenizer(path)
