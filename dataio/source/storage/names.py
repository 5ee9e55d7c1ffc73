"""The URLs behind the names that are shown of them; in memory alone.

A name is a URL without its secrets, see `dataio.base.location`. All above the storage knows names:
no signature comes into a message, a file or a fingerprint, and one that is new at each start
changes nothing.
"""

from dataio.base.errors import SourceError
from dataio.base.location import bare, split_query, split_user


class UrlNames:
    """Finds the URL of a name. Thread-safe: entries are only added.

    Attributes:
        urls: What was named so far, by its name.
    """

    def __init__(self) -> None:
        self.urls: dict[str, str] = {}
        # Of what lies beside: by scheme and server, and by directory.
        self._users: dict[str, str] = {}
        self._signed: set[str] = set()

    def name(self, url: str) -> str:
        """Name a URL, and remember it; a path or a name is returned as it is.

        Raises:
            SourceError: If another URL has that name.
        """
        name = bare(url)
        if name != url:
            self.adopt({name: url})
        return name

    def adopt(self, urls: dict[str, str]) -> None:
        """Remember the URLs of some names, such as those that another rank listed.

        Raises:
            SourceError: If another URL has one of the names.
        """
        for name, url in urls.items():
            if self.urls.setdefault(name, url) != url:
                raise SourceError(
                    f"{name}: two URLs differ only before the @ or behind the ?, where secrets "
                    "stand, found both in one source, expected each shard once, by a path of its "
                    "own; leave one out, or open them as two sources"
                )
            plain, query = split_query(url)
            if query:
                self._signed.add(_directory(name))
            head, user, rest = split_user(plain)
            if user:
                self._users.setdefault(head + rest.partition("/")[0], user)

    def url(self, name: str) -> str:
        """Find the URL of a name, or of what lies beside a URL with a user's name in it."""
        known = self.urls.get(name)
        if known is not None or not self._users:
            return known or name
        head, _, rest = split_user(name)
        return f"{head}{self._users.get(head + rest.partition('/')[0], '')}{rest}"

    def is_out_of_reach(self, name: str) -> bool:
        """Whether it lies beside a URL that was signed for one file alone."""
        return name not in self.urls and _directory(name) in self._signed


def _directory(name: str) -> str:
    return name.rpartition("/")[0]
