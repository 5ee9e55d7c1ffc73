"""Which names the numbers of classes stand for, and whether two sources mean the same by them."""

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, runtime_checkable

from dataio.base.errors import SourceError
from dataio.source.base import Source
from dataio.source.formats.folder import ImageFolderSource

Classes = Literal["same", "training", "own"]
"""How an evaluation numbers its classes: as training does, which is checked; made to be as in
training, by the names of its folders; or by itself."""

NUM_SHOWN = 10


@runtime_checkable
class NamesClasses(Protocol):
    """A source that knows names for some numbers. Optional."""

    def class_names(self, key: str) -> list[str] | None:
        """Name the classes that a key's numbers stand for, by number; None: it has no names."""
        ...


def class_names(source: Source, key: str) -> list[str] | None:
    """Name the classes that a key's numbers stand for in a source; None where nobody knows."""
    return source.class_names(key) if isinstance(source, NamesClasses) else None


def with_classes(
    source: Source,
    found: Mapping[str, list[str]],
    *,
    trained: Mapping[str, list[str]],
    classes: Classes,
) -> Source:
    """Have a source that is evaluated number its classes as asked for.

    Args:
        source: What is evaluated.
        found: Names of its classes, by field, where it has any.
        trained: Those of training.
        classes: How.

    Raises:
        SourceError: If a field has other classes than in training, and none was asked for; or if
            they have no numbers in training.
    """
    if classes == "own":
        return source
    for name, names in trained.items():
        own = found.get(name, names)
        if own == names:
            continue
        if classes == "training" and isinstance(source, ImageFolderSource):
            source = source.numbered_as(names)
            continue
        cure = (
            'give classes="training" to number it as training does, or '
            if isinstance(source, ImageFolderSource) and set(own) <= set(names)
            else "make both of the same classes, or renumber them in a transform and "
        )
        raise SourceError(
            f"{source.name}: field {name!r} has other classes than in training, so that one number "
            f"stands for two of them: {_difference(own, names)}; expected the same names in the "
            f'same order; {cure}give classes="own" to evaluate by numbers of its own'
        )
    return source


def _difference(found: Sequence[str], trained: Sequence[str]) -> str:
    parts = [
        f"{what} {_shown(names)}"
        for what, names in (
            ("it lacks", [name for name in trained if name not in found]),
            ("only it has", [name for name in found if name not in trained]),
        )
        if names
    ]
    for number, (own, its) in enumerate(zip(found, trained, strict=False)):
        if own != its:
            parts.append(f"number {number} is {own!r} here and {its!r} in training")
            break
    return ", ".join(parts) or f"it has {len(found)} classes and training {len(trained)}"


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - NUM_SHOWN} more" if len(names) > NUM_SHOWN else ""
    return ", ".join(map(repr, names[:NUM_SHOWN])) + more
