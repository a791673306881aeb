"""`heedful look` opens a browser only on a machine with a screen, and keeps the secret address out of its arguments."""

from __future__ import annotations

import os
import stat
import sys
import webbrowser
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest

from heedful.cli.browser import DISPLAY_VARIABLES, SSH_VARIABLES, has_screen, open_in_browser


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A terminal on a machine with a screen."""
    for name in (*SSH_VARIABLES, *DISPLAY_VARIABLES, "CI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DISPLAY", ":0")
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    return monkeypatch


def test_has_screen_depends_on_the_display_and_the_system(screen: pytest.MonkeyPatch) -> None:
    assert has_screen()
    screen.delenv("DISPLAY")
    screen.setattr(sys, "platform", "linux")
    assert not has_screen()
    screen.setenv("WAYLAND_DISPLAY", "wayland-0")
    assert has_screen()
    screen.delenv("WAYLAND_DISPLAY")
    screen.setattr(sys, "platform", "darwin")
    assert has_screen()


@pytest.mark.parametrize("name", [*SSH_VARIABLES, "CI"])
def test_has_screen_is_false_over_ssh_and_in_ci(screen: pytest.MonkeyPatch, name: str) -> None:
    screen.setenv(name, "1")
    assert not has_screen()


@pytest.mark.parametrize("stream", ["stdin", "stdout"])
def test_has_screen_is_false_if_a_stream_is_not_a_terminal(screen: pytest.MonkeyPatch, stream: str) -> None:
    screen.setattr(getattr(sys, stream), "isatty", lambda: False)
    assert not has_screen()


def test_the_browser_opens_a_private_file_that_redirects_to_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: addresses.append(url) or True)
    with open_in_browser("http://127.0.0.1:8/t&o/") as was_started:
        assert was_started
        (address,) = addresses
        assert "t&o" not in address, "the token in the path of the page is secret"
        page = Path(url2pathname(urlsplit(address).path))
        assert 'content="0; url=http://127.0.0.1:8/t&amp;o/"' in page.read_text()
        assert os.name == "nt" or stat.S_IMODE(page.parent.stat().st_mode) == 0o700
    assert not page.exists()


def test_a_missing_browser_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_error(url: str) -> bool:
        raise webbrowser.Error("none")

    monkeypatch.setattr(webbrowser, "open", raise_error)
    with open_in_browser("http://127.0.0.1:8/") as was_started:
        assert not was_started
    with open_in_browser(None) as was_started:
        assert not was_started
