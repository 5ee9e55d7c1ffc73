"""Read torch's distributed checkpoints without running what a stranger may have put into them.

Their list of contents is a pickle, and so is each value that is no tensor: torch's own reader calls
what these name. Here only what a checkpoint of tensors and numbers needs is called.
"""

import io
import pickle  # noqa: TID251 (torch's list of contents is one; here it is read without calls)
from pathlib import Path

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import ReadItem

from tonari.trainer.errors import CheckpointError

PLAIN = {
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
}
"""What a list of contents may name, beside torch's descriptions of tensors and its dtypes."""

CURE = (
    "if you trust whoever wrote it as you trust a program, give run.trust_checkpoints=true to "
    "`tonari train`, or --trust to `tonari export`; else do not use it"
)


class _Unpickler(pickle.Unpickler):
    """Makes what is on the list, and calls nothing else."""

    def find_class(self, module: str, name: str) -> object:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        kind = getattr(metadata, name, None) if module == metadata.__name__ else None
        described = isinstance(kind, type) and kind.__module__ == module
        if is_dtype or described or (module, name) in PLAIN:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"names {module}.{name}")


class PlainReader(FileSystemReader):
    """Reads the files of a checkpoint.

    Args:
        path: The directory of torch's files.
        trusted: Whether to call whatever the list of contents names.
    """

    def __init__(self, path: Path, *, trusted: bool) -> None:
        super().__init__(path)
        self._list, self._trusted = path / ".metadata", trusted

    def read_metadata(self, *args: object, **kwargs: object) -> metadata.Metadata:
        """Read the list of contents.

        Raises:
            CheckpointError: If it is none, or names what no plain checkpoint has.
        """
        if not self._trusted:
            try:
                _Unpickler(io.BytesIO(self._list.read_bytes())).load()
            except Exception as error:  # a pickle may raise any
                raise CheckpointError(
                    f"{self._list}: is no list of tensors and numbers alone ({error}), and reading "
                    f"it may run code; {CURE}"
                ) from error
        return super().read_metadata(*args, **kwargs)


class PlainPlanner(DefaultLoadPlanner):
    """Takes tensors, and of other values those that torch reads without running code.

    Args:
        trusted: Whether to take all others too.
    """

    def __init__(self, *, trusted: bool) -> None:
        super().__init__()
        self._trusted = trusted

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take a value that is no tensor.

        Raises:
            CheckpointError: If reading it may run code.
        """
        if not self._trusted:
            try:
                torch.load(value, weights_only=True)
            except Exception as error:
                raise CheckpointError(
                    f"the checkpoint's {read_item.dest_index.fqn} is no number, text or tensor, "
                    f"and reading it may run code; {CURE}"
                ) from error
            value.seek(0)
        super().load_bytes(read_item, value)
