"""Opening the page of `heedful look` in the user's browser."""

from __future__ import annotations

import os
import sys
import tempfile
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path

SSH_VARIABLES = ("SSH_CONNECTION", "SSH_CLIENT", "SSH_TTY")  # environment variables of a session over SSH
DISPLAY_VARIABLES = ("DISPLAY", "WAYLAND_DISPLAY")  # environment variables of a session with a screen on Linux
REDIRECT = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="referrer" content="no-referrer"><title>heedful look</title>
<meta http-equiv="refresh" content="0; url={url}"></head><body><a href="{url}">heedful look</a></body></html>
"""


def has_screen() -> bool:
    """Return whether the command runs in a terminal on a machine with a screen, and neither over SSH nor in CI."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("CI"):
        return False
    if any(os.environ.get(name) for name in SSH_VARIABLES):
        return False
    return sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in DISPLAY_VARIABLES)


@contextmanager
def open_in_browser(url: str | None) -> Iterator[bool]:
    """Open a page in the browser, for the duration of a `with` block.

    The browser opens a temporary file that redirects to the address. The address has a secret token, and must not be an
    argument of the browser's process, since other users of the machine can see such arguments.

    Args:
        url: Address of the page. If None, no browser is started.

    Yields:
        Whether a browser was started.
    """
    if url is None:
        yield False
        return
    with tempfile.TemporaryDirectory(prefix="heedful-look-") as folder:  # only this user can read it
        page = Path(folder, "look.html")
        page.write_text(REDIRECT.format(url=escape(url)), encoding="utf-8")
        try:
            was_started = webbrowser.open(page.as_uri())
        except (webbrowser.Error, OSError):
            was_started = False
        yield was_started
