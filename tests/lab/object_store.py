"""A store of objects on a machine of a lab: what S3 answers to who reads, from a directory.

Arguments: directory, port. ``GET`` and ``HEAD`` of ``/bucket/key``, parts too, are answered from
``directory/key``, and so is a list; nobody is asked who they are.
"""

import email.utils
import os
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

MISSING = b"<Error><Code>NoSuchKey</Code><Message>no such key</Message></Error>"


class Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    protocol_version = "HTTP/1.1"
    directory = Path()

    def do_HEAD(self) -> None:
        """Say how long an object is."""
        self._answer(with_body=False)

    def do_GET(self) -> None:
        """Send an object, or a part of it."""
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        asked = urlsplit(self.path)
        key, query = asked.path.lstrip("/").partition("/")[2], parse_qs(asked.query)
        path = self.directory / key
        if not key and "list-type" in query:
            return self._answer_text(200, self._listed(query.get("prefix", [""])[0]))
        if not key or not path.is_file():
            return self._answer_text(404, MISSING if with_body else b"")
        status = path.stat()
        start, stop = 0, status.st_size
        part = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if part is not None:
            start = int(part[1])
            stop = min(int(part[2]) + 1, stop) if part[2] else stop
        self.send_response(200 if part is None else 206)
        if part is not None:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{status.st_size}")
        self.send_header("Content-Length", str(stop - start))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Last-Modified", email.utils.formatdate(status.st_mtime, usegmt=True))
        self.send_header("ETag", f'"{status.st_mtime_ns:x}-{status.st_size:x}"')
        self.end_headers()
        if with_body:
            self.wfile.flush()
            with path.open("rb") as file:
                while start < stop:
                    start += os.sendfile(
                        self.connection.fileno(), file.fileno(), start, stop - start
                    )

    def _listed(self, prefix: str) -> bytes:
        """List the objects whose names begin so."""
        found = [p for p in sorted(self.directory.iterdir()) if p.name.startswith(prefix)]
        entries = [
            f"<Contents><Key>{path.name}</Key><Size>{path.stat().st_size}</Size></Contents>"
            for path in found
        ]
        counted = f"<KeyCount>{len(found)}</KeyCount><IsTruncated>false</IsTruncated>"
        return f"<ListBucketResult>{counted}{''.join(entries)}</ListBucketResult>".encode()

    def _answer_text(self, status: int, text: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def main() -> None:
    """Serve until the machine ends."""
    Handler.directory = Path(sys.argv[1])
    ThreadingHTTPServer(("", int(sys.argv[2])), Handler).serve_forever()


if __name__ == "__main__":
    main()
