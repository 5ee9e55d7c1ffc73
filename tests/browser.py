"""Pages in a headless browser."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next((found for name in NAMES if (found := shutil.which(name))), None)

needs_browser = pytest.mark.skipif(BROWSER is None, reason=f"no {', '.join(NAMES)} is installed")


MEASURE = """<script>
addEventListener('load', () => {
  document.documentElement.style.width = 'WIDTHpx';
  const cut = [...document.body.querySelectorAll('*')].filter(e =>
    !e.parentElement.closest('.scroll, svg') && e.getBoundingClientRect().right > WIDTH + 1);
  document.body.setAttribute('data-cut', cut.map(e => e.tagName + ' ' + e.className).join('; '));
  document.body.setAttribute('data-images',
    [...document.images].filter(e => e.naturalWidth > 100 && e.naturalHeight > 50).length
    + [...document.querySelectorAll('svg')].filter(e => e.clientHeight > 50).length);
});
</script>"""


def look(page: Path, *, width: int) -> tuple[list[str], int]:
    """Lay a page out in a width, which may be less than a window's.

    What scrolls by itself is not cut. Pages have no script of their own: this is of a copy.

    Args:
        page: The page.
        width: In CSS pixels.

    Returns:
        Elements that reach over the edge, and how many pictures were loaded.
    """
    copy = page.with_name(f"{page.stem}-{width}.html")
    script = MEASURE.replace("WIDTH", str(width))
    copy.write_text(page.read_text().replace("</body>", f"{script}</body>"))
    shown = browse(copy, "--dump-dom", f"--window-size={max(width, 500)},900")
    cut, images = (re.search(f'data-{name}="([^"]*)"', shown) for name in ("cut", "images"))
    assert cut and images, "the script ran"  # noqa: PT018
    return cut[1].split("; ") if cut[1] else [], int(images[1])


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
