"""How text is read: as the bytes of files, or as packed documents of tokens."""

from dataclasses import dataclass
from typing import Literal

from tonari.trainer.config.settings import Section
from tonari.trainer.errors import ConfigError

TEST_FRACTION_CURE = (
    "leave it out, and pack the documents to evaluate on into a directory of their own: data.test"
)


@dataclass(frozen=True, kw_only=True)
class TextConfig(Section):
    """How text is read; see docs/text.md.

    Attributes:
        packing: ``"bytes"`` reads files of text, a token being a byte. With the others,
            ``data.train`` and ``data.test`` are what ``tonari pack --tokenizer`` wrote, or other
            files of tokens, and a sample is a sequence of documents that do not see one another:
            ``"concatenated"``, or ``"best_fit"``, which cuts no document that fits in a sequence.
            ``"stored"`` takes each sample's ``tokens`` as a sequence, such as of MDS shards.
        tokenizer: The one that they were packed with must be this one; empty: any.
        end: The token that ends a document of ``"stored"`` sequences, by its name in the tokenizer
            or its number; empty: each sequence is one document. Of Megatron's files it is checked.
        mean: What a step descends: the mean over its sequences' losses, each a mean over its
            targets, or, with ``"tokens"``, the mean over all their targets.
    """

    packing: Literal["bytes", "concatenated", "best_fit", "stored"] = "bytes"
    tokenizer: str = ""
    end: str | int = ""
    mean: Literal["sequences", "tokens"] = "sequences"

    @property
    def is_packed(self) -> bool:
        """Whether the text is packed documents."""
        return self.packing != "bytes"


def check_text(text: TextConfig, *, is_text: bool, test_fraction: float, cp: int) -> None:
    """Refuse what does not fit packed documents.

    Raises:
        ConfigError: Names the setting.
    """
    if text.tokenizer and not text.is_packed:
        raise ConfigError(
            f'text.tokenizer is {text.tokenizer!r}, but text.packing is "bytes", whose tokens are '
            "bytes; run `tonari pack SRC DST --tokenizer ...`, and give data.train=DST and "
            "text.packing=best_fit"
        )
    if isinstance(text.end, str) and text.end and not text.tokenizer:
        raise ConfigError(
            f"text.end is {text.end!r}, the name of a token, but there is no text.tokenizer that "
            "has it; give that too, or the token's number"
        )
    if text.mean == "tokens" and not text.is_packed:
        raise ConfigError(
            f'text.mean is "tokens", but text.packing is "{text.packing}", whose rows all have as '
            "many tokens; leave it out, or give text.packing=best_fit"
        )
    if not text.is_packed:
        return
    if not is_text:
        raise ConfigError(
            f'text.packing is "{text.packing}", but data.kind is "images"; give data.kind=text, or '
            "leave text.packing out"
        )
    if test_fraction:
        raise ConfigError(
            f"data.test_fraction is {test_fraction}, expected 0 with text.packing = "
            f'"{text.packing}", whose sequences hold parts of several documents; '
            f"{TEST_FRACTION_CURE}"
        )
    if cp > 1:
        raise ConfigError(
            f'mesh.cp is {cp}, expected 1 with text.packing = "{text.packing}": ranks that share a '
            "sequence know nothing of its documents; use mesh.tp, mesh.pp or mesh.dp_shard"
        )
