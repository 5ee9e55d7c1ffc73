"""The class that a workload of the DLIO benchmark names as its ``data_loader_classname``."""

import json
import time
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from dlio_benchmark.common.enumerations import DataLoaderType, DatasetType
from dlio_benchmark.data_loader.base_data_loader import BaseDataLoader
from dlio_benchmark.utils.utility import sleep
from PIL import Image

from dataio import Bytes, Loader, Staging, Workers, discover_world
from dataio.rows.samples import Sample
from shuffle import Partial
from tonari.dlio.files import open_files


class TonariDataLoader(BaseDataLoader):
    """Reads DLIO's files once into this node's cache, and every epoch from there.

    What DLIO's own loader does with a sample is done with each: it is read whole, a picture is
    decoded, ``preprocess_time`` passes, and DLIO's ``resized_image`` is handed on in its place.

    Attributes:
        exchange: Share of the rows that move to other nodes after each epoch; a subclass may set
            another.
    """

    exchange = 0.0

    def __init__(self, format_type: object, dataset_type: object, epoch_number: int) -> None:
        super().__init__(format_type, dataset_type, epoch_number, DataLoaderType.PYTORCH)
        self._loader: Loader | None = None
        self._order: list[str] = []
        self._opening_s = 0.0

    @property
    def _is_training(self) -> bool:
        return bool(self.dataset_type is DatasetType.TRAIN)

    def read(self) -> None:
        """Stage this node's part of the files. Collective; before the first epoch is timed."""
        args, started = self._args, time.perf_counter()
        world, threads = discover_world(), max(args.read_threads, 1)
        source, key = open_files(
            args.file_list_train if self._is_training else args.file_list_eval,
            str(self.format_type), samples_per_file=args.num_samples_per_file, world=world,
        )  # fmt: skip
        self._loader = Loader(
            source, batch_size=self.batch_size, drop_last=True, fields={"record": Bytes(key)},
            transform=self._prepare, seed=args.seed, world=world,
            shuffle=Partial(exchange=self.exchange) if self.exchange else None,
            staging=Staging(readers=threads),
            workers=Workers(threads=threads, prefetch=args.prefetch_size or 2 * threads),
        )  # fmt: skip
        self._opening_s = time.perf_counter() - started

    def next(self) -> Iterator[torch.Tensor]:
        """Yield the batches of one epoch. Collective where it begins."""
        assert self._loader is not None, "DLIO calls read first"
        # DLIO may leave an epoch before its end.
        self._loader.set_epoch(len(self._order))
        self._order.append(self._loader.order_hash())
        for batch in self._loader:
            yield batch["image"]

    def finalize(self) -> None:
        """After the last epoch, write this rank's figures and close. DLIO calls it after each."""
        if self._loader is None or len(self._order) < self._num_epochs:
            return
        kind = "train" if self._is_training else "valid"
        report = {
            "order_hashes": self._order,
            "opening_s": self._opening_s,
            **self._loader.stats(),
        }
        path = Path(self._args.output_folder) / f"{self._args.my_rank}_tonari_{kind}.json"
        path.write_text(json.dumps(report, indent=2) + "\n")
        self._loader.close()
        self._loader.world.close()
        self._loader = None

    @property
    def _num_epochs(self) -> int:
        args = self._args
        if self._is_training:
            return int(args.epochs)
        return len(range(args.eval_after_epoch, args.epochs + 1, args.epochs_between_evals))

    def _prepare(self, sample: Sample, rng: np.random.Generator) -> Mapping[str, object]:
        if str(self.format_type) in ("jpeg", "png"):
            with Image.open(BytesIO(sample["record"])) as picture:  # type: ignore[arg-type]
                np.asarray(picture)
        sleep(self._args.preprocess_time)
        return {"image": self._args.resized_image}
