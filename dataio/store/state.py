"""What the files of a cache mean, whatever a kill left of them. Pure; see docs/cache_format.md.

`manifest.json` is read into a `Head`; `judge` says from the head and the names that lie beside it
which files are in force, and which are litter of something that never took effect, or no longer is.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

FORMAT_VERSION = 3

State = Literal["new", "staging", "pulling", "whole", "partial", "moving"]

TABLE = re.compile(
    r"(?P<kind>base|surplus|delta|staged|given)-(?P<number>\d+)(-\d+){0,2}\.arrow(\.partial)?"
)
LITTER = re.compile(r"(manifest|meta)\.json\.partial|scores-\w+\.npy")


def base_name(serial: int) -> str:
    """Name the file of all slots' entries."""
    return f"base-{serial}.arrow"


def surplus_name(serial: int) -> str:
    """Name the file of rows that lie beside the pool."""
    return f"surplus-{serial}.arrow"


def delta_name(epoch: int, share: int) -> str:
    """Name the file of what a local rank's share of the pool holds from an epoch on."""
    return f"delta-{epoch}-{share}.arrow"


def next_deltas(head: "Head") -> frozenset[str]:
    """Name the deltas that, where all are there, say that the rows stepped back to may be gone.

    Arrivals of the epoch after may then lie in their places, see `Cache.before`.
    """
    if not head.deltas:
        return frozenset()
    return frozenset(delta_name(head.epoch + 1, share) for share in range(len(head.deltas[-1])))


def staged_prefix(serial: int, share: int | None = None) -> str:
    """Begin the name of files of staged rows: of a local rank, or of all."""
    return f"staged-{serial}-" if share is None else f"staged-{serial}-{share}-"


def given_prefix(serial: int, share: int | None = None) -> str:
    """Begin the name of files of surplus rows that are free: of a local rank, or of all."""
    return f"given-{serial}-" if share is None else f"given-{serial}-{share}-"


@dataclass(frozen=True)
class Head:
    """What `manifest.json` holds.

    Attributes:
        serial: Number of the base: of two bases the later one has the larger.
        epoch: Whose rows the base and the deltas name together.
        placement: Name of what they follow.
        rows: Slots.
        missing: Slots of the base whose rows are not there; 0 where there are deltas.
        deltas: For each epoch since the base the files of all local ranks.
        moved: Rows that the deltas name.
        has_surplus: Whether rows lie beside the pool, in a file of the base's serial.
        quota_bytes: Under which it was begun; None: under none.
        is_filled: Whether as many rows are there as the quota lets stay.
    """

    serial: int
    epoch: int
    placement: str
    rows: int
    missing: int
    deltas: tuple[tuple[str, ...], ...] = ()
    moved: int = 0
    has_surplus: bool = False
    quota_bytes: int | None = None
    is_filled: bool = False

    @property
    def base(self) -> str:
        """The base's file."""
        return base_name(self.serial)

    @property
    def surplus(self) -> str | None:
        """The surplus' file, if there is one."""
        return surplus_name(self.serial) if self.has_surplus else None

    @property
    def named(self) -> tuple[str, ...]:
        """Every file that it names."""
        surplus = (self.surplus,) if self.surplus else ()
        return (self.base, *surplus, *(name for names in self.deltas for name in names))

    def with_delta(
        self, names: tuple[str, ...], *, epoch: int, placement: str, moved: int
    ) -> "Head":
        """Go one epoch on.

        Raises:
            AssertionError: If rows of the base are missing: staged entries would then be taken for
                newer than the delta's.
        """
        assert not self.missing, "rows that are missing are committed before others move"
        deltas = (*self.deltas, names)
        moved += self.moved
        return replace(self, epoch=epoch, placement=placement, deltas=deltas, moved=moved)

    def to_record(self) -> dict[str, object]:
        """For `manifest.json`."""
        return {"format": FORMAT_VERSION, **asdict(self)}

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> "Head":
        """Read it back.

        Raises:
            KeyError, TypeError, ValueError: If it is not one.
        """
        if record["format"] != FORMAT_VERSION:
            raise ValueError(f"format {record['format']}, this version reads {FORMAT_VERSION}")
        fields = {name: value for name, value in record.items() if name != "format"}
        fields["deltas"] = tuple(tuple(map(str, names)) for names in fields["deltas"])
        return Head(**fields)


@dataclass(frozen=True)
class FilesVerdict:
    """What the files of a directory mean.

    Attributes:
        state: `new`: nothing is committed. `staging`: rows of the base are missing; the staged
            files add some. `pulling`: as `staging`, and rows lie beside the pool until other nodes
            have them. `whole`: the base is all. `partial`: the base is all,
            and rows are missing for good, by the quota. `moving`: base and deltas.
        staged: Files whose entries fill missing slots of the base.
        given: Files whose entries are surplus no more.
        absent: Files that the head names and that are not there.
        litter: Files of the cache's own that mean nothing, and may be removed by whoever holds it
            alone.
    """

    state: State
    staged: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    litter: tuple[str, ...] = ()


def judge(names: Collection[str], head: Head | None) -> FilesVerdict:
    """Say what lies in a directory.

    Deltas of the epoch after the head's are no litter where all `next_deltas` are there; nor while
    local ranks write them, which the names do not show.

    Args:
        names: Of all its files.
        head: What its `manifest.json` says; None where there is none.
    """
    ours = {name for name in names if TABLE.fullmatch(name) or LITTER.fullmatch(name)}
    if head is None:
        return FilesVerdict("new", litter=tuple(sorted(ours)))
    staged: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    if not head.deltas:
        staged = _beginning(ours, staged_prefix(head.serial))
    if head.has_surplus:
        given = _beginning(ours, given_prefix(head.serial))
    kept = {*head.named, *staged, *given}
    if next_deltas(head) <= ours:
        kept |= next_deltas(head)
    return FilesVerdict(
        _state(head),
        staged,
        given,
        absent=tuple(name for name in head.named if name not in names),
        litter=tuple(sorted(ours - kept)),
    )


def next_serial(names: Collection[str]) -> int:
    """Find a serial that no file has, where no head has the last one."""
    found = [match for name in names if (match := TABLE.fullmatch(name))]
    serials = [int(match["number"]) for match in found if match["kind"] != "delta"]
    return 1 + max(serials, default=-1)


def _beginning(names: Collection[str], prefix: str) -> tuple[str, ...]:
    return tuple(
        sorted(name for name in names if name.startswith(prefix) and name.endswith(".arrow"))
    )


def _state(head: Head) -> State:
    if head.deltas:
        return "moving"
    if head.has_surplus:
        return "pulling"
    if not head.missing:
        return "whole"
    return "partial" if head.is_filled else "staging"
