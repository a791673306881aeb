"""Chromium, and a page of a tiny model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from heedful.look.local_server import LocalServer, serve_in_background
from heedful.look.page_api import PageAPI
from tests.support.browser import Browser, browser
from tests.support.look_pages import page_with_report


@pytest.fixture(scope="module")
def module_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture
def chrome(module_browser: Browser) -> Iterator[Browser]:
    """The browser of the module; after each test its window and its colour scheme are as before."""
    yield module_browser
    module_browser.restore()


@pytest.fixture(scope="module")
def page_api(tmp_path_factory: pytest.TempPathFactory) -> PageAPI:
    """`page_with_report`; tests do not change it."""
    return page_with_report(tmp_path_factory.mktemp("single"))


@pytest.fixture(scope="module")
def server(page_api: PageAPI) -> Iterator[LocalServer]:
    with serve_in_background(page_api) as running:
        yield running
