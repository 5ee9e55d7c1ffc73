"""Pages in a headless browser."""

import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next((found for name in NAMES if (found := shutil.which(name))), None)

needs_browser = pytest.mark.skipif(BROWSER is None, reason=f"no {', '.join(NAMES)} is installed")


def browse(page: Path, *flags: str) -> str:
    """Open a page; returns what the browser writes."""
    assert BROWSER is not None, "whoever calls this is skipped without one"
    # Its sandbox is not for root, as whom containers run tests; the page is our own
    command = [
        BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
        "--disable-dev-shm-usage", "--disable-background-networking", "--hide-scrollbars",
        f"--user-data-dir={page.parent / 'profile'}", *flags, page.as_uri(),
    ]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
