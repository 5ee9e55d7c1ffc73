"""Rows from a pipeline of webdataset: its own decoders, maps and filters, run shard by shard.

webdataset is not imported for their sake: who has such a pipeline has imported it.
"""

import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import FunctionType, ModuleType
from typing import Any, Protocol, TypeGuard

import numpy as np
import xxhash
from numpy.typing import NDArray

from dataio.base.errors import DataioError, SourceError
from dataio.rows.fields import Field
from dataio.rows.rows import Rows
from dataio.source.base import SampleCounts, Shard, ShardFormat
from dataio.source.row_block import RowBlock
from dataio.source.storage.file_object import FileObject
from dataio.source.storage.files import Storage, StorageFile
from dataio.source.values import fields_of, named_values
from dataio.source.wrap.function_hash import describe_function, describe_value

READ_BYTES = 1 << 20


class WebDatasetPipeline(Protocol):
    """What `webdataset.WebDataset` and `webdataset.DataPipeline` are."""

    pipeline: list[Any]
    repetitions: int
    nsamples: int

    def invoke(self, stage: Any, /, *args: Any) -> Any: ...


def is_pipeline(source: object) -> TypeGuard[WebDatasetPipeline]:
    """Whether this is a pipeline of webdataset."""
    webdataset = sys.modules.get("webdataset")
    return webdataset is not None and isinstance(source, webdataset.DataPipeline)


class PipelineFormat(ShardFormat):
    """Shards as a pipeline of webdataset reads them; every shard passes through it alone.

    Which shard comes when, and who reads it, is the loader's to decide: stages that shuffle, that
    divide shards among nodes and workers, or that cache, are passed over.

    Args:
        pipeline: Begins with a list of shards; all that follows gives the same samples of a shard
            each time.
        version: Whatever changes when functions that the pipeline's own functions call do.

    Attributes:
        urls: Of the shards, in their order.
        fingerprint: Changes when the code of the pipeline's functions does.

    Raises:
        SourceError: If a stage has no place in a loader, such as one that draws samples at random.
    """

    def __init__(self, pipeline: WebDatasetPipeline, *, version: str = "") -> None:
        webdataset = sys.modules["webdataset"]
        first, *stages = pipeline.pipeline
        if not isinstance(first, webdataset.shardlists.SimpleShardList):
            raise SourceError(
                f"webdataset: the pipeline begins with {_name(first)}, expected a list of shards; "
                "make it of names: wds.WebDataset(urls, shardshuffle=False), without resampled=True"
            )
        if pipeline.repetitions != 1 or pipeline.nsamples > 0:
            raise SourceError(
                "webdataset: the pipeline repeats its samples (with_epoch, repeat), expected each "
                "once; take that out, for the loader counts epochs"
            )
        self.urls: list[str] = list(first.urls)
        self._pipeline = pipeline
        self._stages = _kept(webdataset, stages)
        marks = [version, *(describe_stage(stage) for stage in self._stages)]
        self.fingerprint = xxhash.xxh3_64_hexdigest("\n".join(marks).encode())

    def count(self, storage: Storage, path: str) -> SampleCounts:
        """Run the pipeline over a shard, and count what comes."""
        return SampleCounts([sum(1 for _ in self._samples(storage, path))])

    def read(
        self,
        storage: Storage,
        shard: Shard,
        numbers: NDArray[np.int64],
        fields: Mapping[str, Field],
    ) -> Iterator[Rows]:
        """Read samples; the pipeline runs from the shard's beginning up to the last of them."""
        block, wanted = RowBlock(fields), iter(numbers.tolist())
        number = next(wanted, None)
        for i, sample in enumerate(self._samples(storage, shard.path)):
            if number is None:
                break
            if i != number:
                continue
            where = f"{shard.path}: sample {i}"
            block.add(shard.first + i, fields_of(named_values(sample), fields, where), where)
            number = next(wanted, None)
            if block.full:
                yield block.take()
        if number is not None:
            raise SourceError(
                f"{shard.path}: the pipeline gave fewer than the {shard.num_samples} samples that "
                "were counted before, expected the same each time; take out what is random, or "
                "that skips samples on errors"
            )
        if len(block):
            yield block.take()

    def _samples(self, storage: Storage, path: str) -> Iterator[object]:
        """Run a shard through the stages."""
        number = 0
        with storage.open(path) as file:
            stream = _Stream(file)
            samples: Any = iter([{"url": path, "stream": io.BufferedReader(stream, READ_BYTES)}])
            try:
                for stage in self._stages:
                    samples = self._pipeline.invoke(stage, samples)
                for sample in samples:
                    yield sample
                    number += 1
            except DataioError:
                raise
            except Exception as error:
                raise SourceError(
                    f"{path}: sample {number} failed in the pipeline "
                    f"({type(error).__name__}: {error}), expected it to pass; repair the shard or "
                    "the stage, or leave such samples out with .select()"
                ) from (stream.error or error)
            # A handler of the pipeline may have passed over what the storage said.
            if stream.error is not None:
                raise stream.error


class _Stream(FileObject):
    """A file of the source, as tar readers want it.

    Attributes:
        error: What the storage raised.
    """

    def __init__(self, file: StorageFile) -> None:
        super().__init__(file)
        self.error: Exception | None = None

    def seekable(self) -> bool:
        return False

    def _read(self, start: int, length: int) -> bytes:
        try:
            return super()._read(start, length)
        except Exception as error:
            self.error = error
            raise


def _kept(webdataset: ModuleType, stages: Sequence[Any]) -> list[Any]:
    """Find the stages that an opened shard and its samples are to pass."""
    filters, shardlists, tariterators = (
        webdataset.filters, webdataset.shardlists, webdataset.tariterators
    )  # fmt: skip
    passed_over = [
        shardlists.single_node_only, shardlists.split_by_node, shardlists.split_by_worker,
        webdataset.compat.check_empty, filters.shuffle.f,
    ]  # fmt: skip
    kinds_passed_over = (filters.detshuffle, filters.Cached, filters.LMDBCached)
    cures = {
        filters.rsample.f: "choose samples with .select(), by their keys",
        filters.batched.f: "take it out: the loader makes batches",
        filters.slice.f: "choose shards or samples by their names",
    }
    opens, kept = False, []
    for stage in stages:
        function = stage.f if isinstance(stage, filters.FilterFunction) else stage
        if any(function is one for one in passed_over) or isinstance(stage, kinds_passed_over):
            continue
        cure = next((its for one, its in cures.items() if function is one), None)
        if cure is not None:
            raise SourceError(
                f"webdataset: the pipeline has the stage {_name(stage)}, expected stages that take "
                f"one sample after the other; {cure}"
            )
        is_opener = isinstance(stage, (webdataset.cache.StreamingOpen, webdataset.cache.FileCache))
        if is_opener or function is tariterators.url_opener:
            opens = True
        elif function is tariterators.tarfile_samples:
            opens = True
            # Its settings are those of the stage that takes shards apart, in the same order.
            handler = {"handler": stage.args[0]} if stage.args else {}
            handler |= {name: its for name, its in stage.kw.items() if name == "handler"}
            kept += [
                filters.FilterFunction(tariterators.tar_file_expander, *stage.args, **stage.kw),
                filters.FilterFunction(tariterators.group_by_keys, **handler),
            ]
        else:
            kept.append(stage)
    if not opens:
        names = ", ".join(map(_name, stages)) or "none"
        raise SourceError(
            f"webdataset: no stage of the pipeline opens its shards (found {names}), expected that "
            "of wds.WebDataset or wds.tarfile_to_samples(); put one behind the list of shards"
        )
    return kept


def describe_stage(stage: Any, *, within: tuple[int, ...] = ()) -> str:
    """Describe the code of a stage, and all that it holds: decoders, functions, settings.

    Args:
        stage: The stage, or what one holds.
        within: Ids of the objects that hold it, so that a circle ends.
    """
    if id(stage) in within:
        return "itself"
    within = (*within, id(stage))
    if isinstance(stage, Mapping):
        pairs = (f"{key}:{describe_stage(its, within=within)}" for key, its in stage.items())
        return f"map({','.join(sorted(pairs))})"
    if isinstance(stage, (list, tuple)):
        return f"[{','.join(describe_stage(its, within=within) for its in stage)}]"
    if isinstance(stage, partial):
        return describe_stage([stage.func, stage.args, stage.keywords], within=within)
    if callable(stage):
        held = {} if isinstance(stage, (FunctionType, type)) else getattr(stage, "__dict__", {})
        return f"{describe_function(stage)} {describe_stage(held, within=within)}"
    return describe_value(stage)


def _name(stage: Any) -> str:
    function = getattr(stage, "f", stage)
    return str(getattr(function, "__name__", type(stage).__name__)).lstrip("_")
