"""Members of a tar shard that are links, followed to the files of the same shard."""

import posixpath
from functools import cached_property

from dataio.source.formats.tar.headers import (
    BLOCK,
    HARD_LINK,
    LINKS,
    REGULAR,
    HeaderReader,
    as_shown,
    refuse,
)
from dataio.source.storage.window import File, FileWindow

CURE = (
    "write the shard again with the files in place of the links: "
    "`tar --dereference --hard-dereference -cf ...`"
)

Path = tuple[int, bytes]
"""Number of an archive in the shard, and a name there."""


class Links:
    """The links of a shard. Its headers are read once more when the first link is followed.

    Args:
        file: The shard.
        joined: As of `HeaderReader`.
    """

    def __init__(self, file: File, *, joined: bool = False) -> None:
        self._file = file
        self._joined = joined

    def extent(self, offset: int) -> tuple[int, int]:
        """Find where the bytes begin that a link leads to, and how many there are.

        Args:
            offset: Where the link's own header ends.

        Raises:
            SourceError: If it leads to no file of this shard, or the shard is read in order alone.
        """
        if self._file.in_order:
            found, expected = "a link", "files alone, as a compressed shard is read in order"
            refuse(self._file, offset - BLOCK, found, expected, CURE)
        files, links, names = self._found
        path, passed = links[names[offset]], {names[offset]}
        while path not in files:
            if path not in links or path in passed:
                shown = as_shown(names[offset][1])
                found = f"the link {shown} to {as_shown(path[1])}"
                found += ", a circle" if path in passed else ""
                refuse(self._file, offset - BLOCK, found, "one to a file of the same shard", CURE)
            passed.add(path)
            path = links[path]
        return files[path]

    @cached_property
    def _found(self) -> tuple[dict[Path, tuple[int, int]], dict[Path, Path], dict[int, Path]]:
        """Where files lie, what links lead to, and which link each offset is of."""
        files, links, names = dict[Path, tuple[int, int]](), dict[Path, Path](), dict[int, Path]()
        window = FileWindow(self._file)
        window.pace(window.skip_piece_bytes(0))
        reader = HeaderReader(window, joined=self._joined)
        while not reader.ended:
            entry = reader.entry()
            if entry is None:
                continue
            path = reader.archive, posixpath.normpath(entry.name)
            if entry.kind in REGULAR:
                files[path] = entry.offset, entry.num_bytes
            elif entry.kind in LINKS:
                # A symbolic link counts from its own directory, a hard link from the shard's.
                root = b"" if entry.kind == HARD_LINK else posixpath.dirname(path[1])
                target = posixpath.normpath(posixpath.join(root, entry.link))
                links[path] = reader.archive, target
                names[entry.offset] = path
        return files, links, names
