"""A server behind ``fake://`` for tests of what fsspec reads: files in memory, and ways to fail.

Errors are named, and lie in modules, as those of client libraries, which need not be installed.
"""

from fnmatch import fnmatch
from typing import ClassVar

import fsspec
from fsspec.spec import AbstractFileSystem


def client_error(
    module: str, name: str, text: str, *bases: type, **attributes: object
) -> Exception:
    """Make an error as a client library has it."""
    kind = type(name, bases or (Exception,), {"__module__": module, **attributes})
    return kind(text)  # type: ignore[no-any-return]


class FakeServer(AbstractFileSystem):  # type: ignore[misc]
    """Gives out ``files`` by their URL without user and query, as long as ``fails`` is empty.

    Attributes:
        files: By URL without its query.
        fails: What the next requests raise; None: that one works.
        asked: The URLs of all requests, as they came.
        needs: What stands in each URL that is served; others are refused.
        cuts: How many bytes an answer has at most.
    """

    protocol = "fake"
    cachable = False
    files: ClassVar[dict[str, bytes]] = {}
    fails: ClassVar[list[Exception | None]] = []
    asked: ClassVar[list[str]] = []
    needs = ""
    cuts = 1 << 40

    @classmethod
    def reset(cls) -> type["FakeServer"]:
        """Begin anew, with fsspec knowing this server."""
        fsspec.register_implementation("fake", cls, clobber=True)
        cls.files, cls.fails, cls.asked, cls.needs, cls.cuts = {}, [], [], "", 1 << 40
        return cls

    @classmethod
    def _strip_protocol(cls, path):
        return path

    def unstrip_protocol(self, name):
        return name

    def _file(self, url):
        self.asked.append(url)
        failed = self.fails.pop(0) if self.fails else None
        if failed is not None:
            raise failed
        if self.needs not in url:
            refused = client_error("aiohttp", "ClientResponseError", f"403 for {url}", status=403)
            raise FileNotFoundError(url) from refused
        plain = url.partition("?")[0]
        plain = f"fake://{plain.partition('://')[2].rpartition('@')[2]}"
        if plain not in self.files:
            raise FileNotFoundError(url)
        return self.files[plain]

    def info(self, path, **kwargs):
        return {"name": path, "type": "file", "size": len(self._file(path)), "ETag": "1"}

    def cat_file(self, path, start=None, end=None, **kwargs):
        return self._file(path)[start:end][: self.cuts]

    def ls(self, path, detail=False, **kwargs):
        self.asked.append(path)
        return [
            url for url in self.files if url.rpartition("/")[0].endswith(path.rpartition("@")[2])
        ]

    def glob(self, path, **kwargs):
        self.asked.append(path)
        return [u for u in self.files if fnmatch(u.rpartition("/")[2], path.rpartition("/")[2])]
