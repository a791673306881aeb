"""Pictures that the page saves: whole files, with a caption, that look like the page."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from xml.etree.ElementTree import fromstring

import numpy as np
import pytest
from PIL import Image

from heedful.look.local_server import LocalServer
from tests.support.browser import Browser
from tests.support.look_pages import (
    PAIR,
    VIEWS,
    open_view,
)
from tests.support.page_checks import set_window

SVG = "{http://www.w3.org/2000/svg}"  # namespace
# clicks on a button that saves a picture, and passes on the bytes of the file
SAVE = """
const done = arguments[arguments.length - 1];
URL.createObjectURL = (blob) => { blob.arrayBuffer().then((b) => done([...new Uint8Array(b)])); return "data:,"; };
HTMLAnchorElement.prototype.click = () => {};
arguments[0].click();
"""


# returns the labels of the picture that a button saves
LABELS = """
const picture = arguments[0].closest(".save").parentElement;
return [...picture.querySelectorAll("bdi")].map((e) => e.textContent);
"""


@pytest.mark.slow
def test_every_figure_is_saved_as_svg_and_png(chrome: Browser, server: LocalServer) -> None:
    """Files are whole, have a caption, and the SVG shows every label of the picture; the focus stays on the button."""
    chrome.open(f"{server.url}#view=head&layer=1&head=2")
    views_with_figures = 0
    for view in VIEWS:
        open_view(chrome, view)
        buttons = chrome.js("return [...document.querySelectorAll('.body .save button')]")
        figures = chrome.js("return document.querySelectorAll('.body .save').length")
        assert [button.text for button in buttons] == ["SVG", "PNG"] * figures, view
        views_with_figures += figures > 0
        for button in buttons:
            chrome.js("arguments[0].focus()", button)
            data = bytes(chrome.driver.execute_async_script(SAVE, button))
            assert chrome.js("return document.activeElement === arguments[0]", button), view
            if button.text == "PNG":
                picture = Image.open(io.BytesIO(data))
                picture.load()  # raises an exception if the file is not whole
                assert picture.format == "PNG" and len(picture.getcolors(maxcolors=picture.width * picture.height)) > 1
            else:
                check_drawing(data.decode(), chrome.js(LABELS, button), view)
    assert views_with_figures >= len(VIEWS) - 1 and chrome.complaints() == []


def check_drawing(drawing: str, labels: list[str], view: str) -> None:
    """Check that an SVG has the text in its caption, and all labels of the picture."""
    root = fromstring(drawing)
    assert root.tag == f"{SVG}svg", view
    texts = ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]
    assert any(PAIR[0] in text for text in texts), (view, "the caption has the text")
    for label in labels:
        assert any(label[:6] in text for text in texts), (view, label)


# shows the picture that a button saves as it is saved, or as usual, and returns its place on the page
SAVING = """
const root = arguments[0].closest(".heedful");
root.classList.toggle("saving", arguments[1]);
const box = arguments[0].closest(".save").parentElement.getBoundingClientRect();
return { x: box.left + scrollX, y: box.top + scrollY, width: box.width, height: box.height, scale: 1 };
"""
# returns the background colours [red, green, blue] of the page and of panels
GROUNDS = """
const style = getComputedStyle(document.querySelector(".heedful"));
const rgb = (name) => style.getPropertyValue(name).trim().slice(1).match(/../g).map((v) => parseInt(v, 16));
return ["--ground", "--panel"].map(rgb);
"""
MARGIN = 14  # pixels around a saved picture, as in save.js
WINDOW = (1280, 3000)  # pixels; all of each view is visible
BLOCK = 8  # pixels; pictures are compared by the mean colours of blocks


def screenshot(chrome: Browser, clip: dict[str, float]) -> np.ndarray:
    """Return a part of the open page as [height, width, 3] numbers from 0 to 255."""
    data = chrome.driver.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip})["data"]
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"), dtype=float)


def mean_difference(one: np.ndarray, two: np.ndarray) -> float:
    """Return the mean difference of the colours of two pictures, from 0 to 255, in blocks of their common size."""
    rows, columns = (min(a, b) // BLOCK for a, b in zip(one.shape[:2], two.shape[:2], strict=True))
    blocks = [
        picture[: rows * BLOCK, : columns * BLOCK].reshape(rows, BLOCK, columns, BLOCK, 3).mean((1, 3))
        for picture in (one, two)
    ]
    return float(abs(blocks[0] - blocks[1]).mean())


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_saved_drawings_look_like_the_page(chrome: Browser, server: LocalServer, tmp_path: Path, dark: bool) -> None:
    """Each SVG, shown by a browser, differs from its figure by less than half as much as an empty picture does."""
    chrome.dark(dark)
    set_window(chrome, *WINDOW)
    page_tab = chrome.driver.current_window_handle
    compared = 0
    for view in VIEWS:
        chrome.open(f"{server.url}#view={view}&layer=1&head=2")
        ground, panel = map(np.array, chrome.js(GROUNDS))
        for number in range(chrome.js("return document.querySelectorAll('.body .save').length")):
            button = chrome.js(f"return document.querySelectorAll('.body .save')[{number}].querySelector('button')")
            drawing = bytes(chrome.driver.execute_async_script(SAVE, button)).decode()
            file = tmp_path / "picture.html"
            file.write_text(f'<!doctype html><meta charset="utf-8"><style>body {{ margin: 0 }}</style>{drawing}')
            root = fromstring(drawing)
            clip = chrome.js(SAVING, button, True)
            clip["width"] = min(clip["width"], float(root.attrib["width"]) - 2 * MARGIN)
            shown = screenshot(chrome, clip)
            chrome.js(SAVING, button, False)
            chrome.driver.switch_to.new_window("tab")
            try:
                set_window(chrome, *WINDOW)
                chrome.driver.get(file.as_uri())
                saved = screenshot(chrome, clip | {"x": MARGIN, "y": MARGIN})
            finally:
                chrome.driver.close()
                chrome.driver.switch_to.window(page_tab)
            expected = np.where((shown == ground).all(-1, keepdims=True), panel, shown)  # pictures are on a panel
            difference = mean_difference(expected, saved)
            empty = mean_difference(expected, np.broadcast_to(panel, expected.shape))
            assert difference < min(4, 0.5 * empty), (view, number, difference, empty)
            compared += 1
    assert compared > len(VIEWS)
