"""The loaders and limits that are measured, and how each is started."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tonari.bench.loader.sets import SetKind

PEERS = Path(__file__).parent / "peers"

Kind = Literal["ours", "peer", "limit"]


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A loader, or a limit that no loader can pass.

    Attributes:
        name: Its name on the command line and in reports.
        kind: Ratios are those of ours to a limit, and of ours to a peer.
        program: Run by the interpreter that has its packages.
        packages: What to install for it; empty: it needs what Tonari needs anyway.
        modules: Packages by the names whose versions are reported.
        nodes: Nodes that ours pretends to be on; with 2, a set of twice the samples, and the first
            node alone is measured.
        no_workers: Whether workers are of no use to it, so that it is measured once without.
        sets: The kinds of sets that it is made for.
    """

    name: str
    kind: Kind
    program: Path
    packages: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    nodes: int = 1
    no_workers: bool = False
    sets: tuple[SetKind, ...] = ("fixed", "jpeg")

    @property
    def environment(self) -> str:
        return self.name if self.packages else ""

    def suits(self, *, kind: SetKind, ranks: int, workers: int) -> bool:
        """Whether it is measured in such a case."""
        if kind not in self.sets:
            return False
        if self.nodes > 1 and ranks > 1:
            return False
        return not (self.no_workers and workers)


def _peer(
    name: str,
    *packages: str,
    modules: tuple[str, ...],
    sets: tuple[SetKind, ...] = ("fixed", "jpeg"),
) -> Contender:
    return Contender(
        name=name, kind="peer", program=PEERS / f"{name.replace('-', '_')}.py",
        packages=packages, modules=modules, sets=sets,
    )  # fmt: skip


CONTENDERS = (
    Contender(name="limit-gather", kind="limit", program=PEERS / "limit_gather.py",
              modules=("numpy",), no_workers=True, sets=("fixed",)),
    Contender(name="limit-decode", kind="limit", program=PEERS / "limit_decode.py",
              modules=("simplejpeg",), sets=("jpeg", "recipe")),
    Contender(name="tonari-exchanged", kind="ours", program=PEERS / "ours_exchanged.py", nodes=2),
    Contender(name="tonari", kind="ours", program=PEERS / "ours.py",
              sets=("fixed", "jpeg", "recipe")),
    _peer("torch-packed", modules=("torch",)),
    _peer("torch-files", modules=("torch",)),
    _peer("torchdata", "torchdata>=0.11", modules=("torchdata",)),
    _peer("webdataset", modules=("webdataset",)),
    _peer("litdata", "litdata>=0.2.76", modules=("litdata",)),
    _peer("mosaic", "mosaicml-streaming>=0.13", modules=("mosaicml-streaming",)),
    _peer("grain", "grain>=0.2.18", "array-record>=0.8", "cloudpickle",
          modules=("grain", "array-record")),
    _peer("spdl", "spdl-core>=0.8", "spdl-io>=0.8", modules=("spdl-core", "spdl-io"),
          sets=("fixed", "jpeg", "recipe")),
    _peer("torch-pillow", modules=("torch", "pillow"), sets=("recipe",)),
    _peer("dali", "nvidia-dali-cuda120>=1.40", modules=("nvidia-dali-cuda120",), sets=("recipe",)),
    _peer("hf", "datasets>=5", modules=("datasets",)),
)  # fmt: skip

HEADLINE = "tonari-exchanged"
"""Whose ratios a set is judged by."""
