"""What tests on a GPU share."""

import warnings

import torch


class no_synchronisation:
    """Make CUDA refuse whatever would wait for the device."""

    def __enter__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is a prototype, it says
            torch.cuda.set_sync_debug_mode("error")

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_sync_debug_mode("default")
