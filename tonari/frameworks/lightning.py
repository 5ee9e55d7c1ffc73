"""Lightning: a data module that drives epochs, refreshed rows, validation and checkpoints."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning

import dataio
from dataio.rows.samples import Batch


class _EpochBatches:
    """The running epoch's batches: an iterable with a length, as Lightning wants one.

    Lightning saves and restores a dataloader's own state, but only in the middle of an epoch and
    without scores; `DataModule` does it whole. That there is such a state stops its warning.
    """

    def __init__(self, loader: dataio.Loader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class DataModule(lightning.LightningDataModule):
    """Feeds a Lightning Trainer with ``max_epochs`` and ``reload_dataloaders_every_n_epochs=1``.

    Under an importance policy the model calls ``self.trainer.datamodule.loader.report``; its method
    ``rescore(batches)`` passes hidden rows forward and reports them. Lightning calls every hook
    here on all ranks.

    Args:
        source: The training set, as `Loader` takes it.
        saved: Directory, seen by all nodes, for the loader's state beside each checkpoint:
            ``loader-STEP``.
        val: The validation set, as `Loader.evaluation` takes it; None: there is none.
        val_options: What else `Loader.evaluation` takes.
        options: What else `Loader` takes; the device is the Trainer's.

    Attributes:
        loader: From ``setup`` on.
        evaluation: Of ``val``, from ``setup`` on.
    """

    loader: dataio.Loader
    evaluation: Any

    def __init__(
        self,
        source: Any,
        *,
        saved: str | os.PathLike[str],
        val: Any = None,
        val_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self._source, self._saved, self._options = source, Path(saved), options
        self._val, self._val_options = val, val_options or {}

    def setup(self, stage: str) -> None:
        """Make the loader: not earlier, as here Lightning has made the process group."""
        trainer = self.trainer
        if trainer.reload_dataloaders_every_n_epochs != 1:
            raise ValueError(
                "DataModule: train_dataloader begins each epoch, and Lightning calls it once; give "
                "Trainer(reload_dataloaders_every_n_epochs=1)"
            )
        self.loader = dataio.Loader(
            self._source, device=trainer.strategy.root_device, **self._options
        )
        self.evaluation = (
            [] if self._val is None else self.loader.evaluation(self._val, **self._val_options)
        )
        self._epochs = self.loader.epochs(trainer.max_epochs)
        self._begun = False

    def train_dataloader(self) -> _EpochBatches:
        """Give an epoch's batches; refresh hidden rows and begin the next one, if it is time."""
        if not self._begun:
            self._begun = next(self._epochs, None) is not None
        while self._begun and self.loader.epoch < self.trainer.current_epoch:
            # Before the next epoch begins: no checkpoint can fall between this one's end and that.
            if self._options.get("importance"):
                self.trainer.lightning_module.rescore(self.loader.refresh())
            next(self._epochs)
        return _EpochBatches(self.loader)

    def val_dataloader(self) -> Any:
        """Give the validation batches; those of ``valid`` rows hold each sample once."""
        return self.evaluation

    def state_dict(self) -> dict[str, Any]:
        """Save the loader, and say where: Lightning's checkpoint keeps the path."""
        path = self._saved / f"loader-{self.trainer.global_step}"
        self.loader.save(path)
        return {"loader": str(path)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the checkpoint was written."""
        self.loader.restore(state["loader"])

    def teardown(self, stage: str) -> None:
        """Close the loader."""
        if self._begun:
            next(self._epochs, None)  # brings the last epoch's figures together
        self.loader.close()
