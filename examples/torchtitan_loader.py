"""A dataloader for torchtitan: name its Config as ``dataloader`` of a `Trainer.Config`.

    from examples.torchtitan_loader import TonariDataLoader

    config.dataloader = TonariDataLoader.Config(dataset_path="tokens/train-{000000..000001}.tar")

Each sample of the shards holds ``seq_len + 1`` tokens, int32, as ``bin``. Data parallelism alone:
ranks that share a batch (tensor, pipeline, context) each read it with torchtitan's own loader.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader

import dataio
import shuffle


class TonariDataLoader(BaseDataLoader):
    """Batches of this rank's rows, epoch after epoch without an end; torchtitan counts steps.

    Its state is a few integers, kept in torchtitan's checkpoints; another number of ranks goes on
    from it, too.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """``dataset_path`` is the pattern of the shards."""

        exchange: float = 0.1
        seed: int = 0
        cache: str = "auto"

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        **_: Any,
    ) -> None:
        if not config.dataset_path:
            raise ValueError("TonariDataLoader: dataset_path is not given; name the shards")
        self.loader = dataio.Loader(
            config.dataset_path, batch_size=local_batch_size, drop_last=True, seed=config.seed,
            fields={"tokens": dataio.Array("bin", (seq_len + 1,), "int32")}, cache=config.cache,
            shuffle=shuffle.Partial(exchange=config.exchange),
        )  # fmt: skip
        found = (self.loader.world.world_size, self.loader.world.rank)
        if found != (dp_world_size, dp_rank):
            raise ValueError(
                f"TonariDataLoader: rank {found[1]} of {found[0]} is {dp_rank} of {dp_world_size} "
                "in data parallelism, expected the same: set the other degrees to 1"
            )

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            for batch in self.loader:
                tokens = batch["tokens"].long()
                yield {"input": tokens[:, :-1]}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loader.load_state_dict(state_dict)
