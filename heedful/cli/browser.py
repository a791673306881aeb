"""Opening a page in the browser of the person who started the command."""

from __future__ import annotations

import os
import sys
import tempfile
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path

REMOTE = ("SSH_CONNECTION", "SSH_CLIENT", "SSH_TTY")
DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY")  # on systems where not every session has a screen
REDIRECT = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="referrer" content="no-referrer"><title>heedful look</title>
<meta http-equiv="refresh" content="0; url={url}"></head><body><a href="{url}">heedful look</a></body></html>
"""


def has_screen() -> bool:
    """Return whether the command runs in a terminal on a machine with a screen; not over SSH, not in CI."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("CI"):
        return False
    if any(os.environ.get(name) for name in REMOTE):
        return False
    return sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in DISPLAYS)


@contextmanager
def opened(url: str | None) -> Iterator[bool]:
    """Context in which a page is open in the browser.

    The browser gets a file that leads to the address, since other users of the machine can see its arguments, and the
    address has the token of the page.

    Args:
        url: The address; None: open nothing.

    Yields:
        Whether a browser was started.
    """
    if url is None:
        yield False
        return
    with tempfile.TemporaryDirectory(prefix="heedful-look-") as folder:  # for this user alone
        page = Path(folder, "look.html")
        page.write_text(REDIRECT.format(url=escape(url)), encoding="utf-8")
        try:
            opened = webbrowser.open(page.as_uri())
        except (webbrowser.Error, OSError):
            opened = False
        yield opened
