"""Packed documents as training data: their sequences, and the task of their next tokens."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

import dataio
from dataio import SourceError
from dataio.rows.samples import Batch
from dataio.source.text.dataset import TextInfo, read_infos
from dataio.source.text.tokenizer import BYTES, Tokenizer, open_tokenizer
from tonari.trainer.config.config import Config
from tonari.trainer.errors import ConfigError
from tonari.trainer.mesh.pipeline import Pipeline
from tonari.trainer.models import Adapted, StagedModel
from tonari.trainer.models.documents import positions_of
from tonari.trainer.models.given import Inputs
from tonari.trainer.run.data import VOCABULARY
from tonari.trainer.run.given_tokens import are_packed, end_of, read_given
from tonari.trainer.run.step import evaluating
from tonari.trainer.run.tasks import Columns, cross_entropy, judge

TOKENS, DOCUMENT = "tokens", "document"
NO_TARGET = -100
"""In place of a target where there is none; torch's cross-entropy leaves it out too."""


class NextTokenInDocument:
    """Each next token of a document; a sequence holds several, which do not see one another.

    A row's loss is the mean over its targets: its tokens but padding and the first of each
    document. It is as right, and as confident, as these are on average.

    Args:
        named: Whether the model takes ``input_ids`` and ``position_ids``, as Hugging Face's do,
            rather than tokens and documents.
    """

    draws = False
    columns = Columns((TOKENS, DOCUMENT), (TOKENS, DOCUMENT))

    def __init__(self, *, named: bool = False) -> None:
        self._named = named

    def input(self, batch: Batch) -> Inputs:
        """Take all tokens but the last, int64[batch, places], and what says their documents."""
        # Numbers of 16 bits have few operations.
        tokens, documents = (batch[name].long()[:, :-1].contiguous() for name in (TOKENS, DOCUMENT))
        if self._named:
            return {"input_ids": tokens, "position_ids": positions_of(documents)}
        return tokens, documents

    def target(self, batch: Batch) -> Tensor:
        """Take the next tokens, int64[batch, places]; NO_TARGET where a document ends."""
        tokens, documents = (batch[name].long() for name in (TOKENS, DOCUMENT))
        has_next = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] > 0)
        return torch.where(has_next, tokens[:, 1:], NO_TARGET)

    def losses(self, logits: Tensor, target: Tensor) -> Tensor:
        """Compute the mean cross-entropy of a row's targets: floating[batch]."""
        # floating[batch, places]
        losses = cross_entropy(logits.flatten(0, 1), target.flatten(), ignored=NO_TARGET)
        losses = losses.view(target.shape)
        return _mean(losses, target)

    def outcome(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Judge a row's targets."""
        right, confidence = judge(logits.flatten(0, 1), target.flatten())
        means = [
            _mean(values.view(target.shape).double(), target) for values in (right, confidence)
        ]
        return means[0], means[1].float()


class NextTokenOfAll(NextTokenInDocument):
    """The same, and a step descends the mean over all targets of its sequences."""

    draws = False

    def num_targets(self, batch: Batch) -> Tensor:
        """Count each sequence's targets: int64[batch]."""
        return (self.target(batch) != NO_TARGET).sum(dim=1)


def _mean(values: Tensor, target: Tensor) -> Tensor:
    has_target = target != NO_TARGET
    total = torch.where(has_target, values, 0).sum(dim=1)
    return total / has_target.sum(dim=1).clamp(min=1)


def packed_info(config: Config) -> TextInfo:
    """Read what the packed texts of a run hold together.

    Raises:
        ConfigError: If one is none or not whole, or they were made by several tokenizers.
    """
    names = [*_listed(config.data.train), *_listed(config.data.test)]
    try:
        if not are_packed(config, names):
            return read_given(config, names)
        found = read_infos(names)
        if config.text.end not in ("", found.end) and end_of(config) != found.end:
            raise ConfigError(
                f"text.end is {config.text.end!r}, but {names[0]} was packed with the token "
                f"{found.end} behind each document; leave text.end out, or pack it again with --end"
            )
        return found
    except SourceError as error:
        raise ConfigError(f"[text] packing: {error}") from error


def tokenizer_of(config: Config) -> Tokenizer | None:
    """Open the tokenizer of a run's text; None where nothing names it.

    Raises:
        SourceError: If it is not at hand.
    """
    if not config.text.is_packed or packed_info(config).tokenizer == BYTES:
        return open_tokenizer(BYTES)
    name = config.text.tokenizer
    if are_packed(config, _listed(config.data.train)):
        name = _listed(config.data.train)[0]
    return open_tokenizer(name) if name else None


def check_tokenizer(config: Config) -> None:
    """Refuse a ``text.tokenizer`` that the documents were not packed with.

    Raises:
        ConfigError: Names both.
    """
    if not config.text.tokenizer:
        return
    found, train = packed_info(config), _listed(config.data.train)
    try:
        wanted = open_tokenizer(config.text.tokenizer)
    except SourceError as error:
        raise ConfigError(f"text.tokenizer: {error}") from error
    if wanted.digest != found.digest:
        raise ConfigError(
            f"text.tokenizer is {wanted.name} ({wanted.digest}, {wanted.vocabulary} tokens), but "
            f"{train[0]} was packed with {found.tokenizer} ({found.digest}, {found.vocabulary} "
            "tokens); give that one, or pack the documents again with this one"
        )


def packed_sources(config: Config) -> tuple[dataio.Shards, dataio.Shards | None]:
    """Name the sequences to train on, and to evaluate on, if there are any."""

    def shards(directories: tuple[str, ...]) -> dataio.Shards:
        shards = read_infos(directories).shards if are_packed(config, directories) else directories
        return dataio.Shards(shards, sequences=_sequences(config))

    test = _listed(config.data.test)
    return shards(_listed(config.data.train)), shards(test) if test else None


def packed_fields(config: Config) -> dict[str, dataio.Field]:
    """Describe a sequence of a run's packed text."""
    return _sequences(config).fields(packed_info(config).dtype)


def vocabulary_of(config: Config) -> int:
    """Count the different tokens of a run's text."""
    return packed_info(config).vocabulary if config.text.is_packed else VOCABULARY


def check_vocabulary(config: Config, model: StagedModel) -> None:
    """Refuse a model that has fewer tokens than its text, where that can be known.

    Raises:
        ConfigError: Says how many both have.
    """
    if not config.text.is_packed:
        return
    found, expected = _num_tokens(model), packed_info(config)
    if found is not None and found < expected.vocabulary:
        raise ConfigError(
            f"model.vocabulary is {found}, but {_listed(config.data.train)[0]} was packed with "
            f"{expected.tokenizer}, whose tokens are in [0, {expected.vocabulary}); give a model "
            f"of {expected.vocabulary} tokens or more, or pack the documents with its tokenizer"
        )


@torch.no_grad()
def check_documents_apart(pipeline: Pipeline, config: Config) -> None:
    """Refuse a model in which a document sees the one before it, as recurrent ones do. Collective.

    Two batches that differ in a first document alone, of which no target counts, must have the same
    losses.

    Raises:
        ConfigError: On every rank.
    """
    length, rows = config.data.sequence_length, config.data.batch_size
    rng = torch.Generator().manual_seed(config.run.seed)
    vocabulary = packed_info(config).vocabulary
    tokens = torch.randint(vocabulary, (rows, length + 1), generator=rng)
    other = tokens.clone()
    other[:, : length // 2] = (other[:, : length // 2] + 1) % vocabulary
    documents = (torch.arange(length + 1) >= length // 2).long().expand(rows, -1)
    weight = torch.ones(rows)
    differs = torch.zeros((), dtype=torch.int64, device=pipeline.device)
    losses = []
    with evaluating(pipeline):
        for each in (tokens, other):
            batch = {TOKENS: each, DOCUMENT: documents, "weight": weight}
            on_device = {name: column.to(pipeline.device) for name, column in batch.items()}
            scored = pipeline.forward(on_device, outcome=False)
            losses += [] if scored is None else [scored.loss]
    if losses:
        first, second = losses
        differs += int(not torch.allclose(first, second, rtol=1e-5, atol=0, equal_nan=True))
    dist.all_reduce(differs)
    if differs:
        raise ConfigError(
            f'text.packing is "{config.text.packing}", but in {config.model.kind} a document sees '
            "the one before it in its sequence, expected none to: its attention must follow "
            "position_ids, which begin anew with each document, as that of transformers' does "
            "with use_cache=False in its config; a recurrent model cannot: give another, or "
            "text.packing=bytes"
        )


def _num_tokens(model: StagedModel) -> int | None:
    if isinstance(model, Adapted):
        embedding = getattr(model.wrapped, "get_input_embeddings", lambda: None)()
        return getattr(embedding, "num_embeddings", None)
    return getattr(model, "vocabulary", None)


def _sequences(config: Config) -> dataio.Sequences:
    packing = config.text.packing
    assert packing != "bytes", "the callers have asked"
    try:
        end = end_of(config) if packing == "stored" else None
        return dataio.Sequences(config.data.sequence_length, packing=packing, end=end)
    except ValueError as error:
        raise ConfigError(f"data.sequence_length: {error}") from error


def _listed(directories: str | Sequence[str]) -> tuple[str, ...]:
    if isinstance(directories, str):
        return (directories,) if directories else ()
    return tuple(directories)
