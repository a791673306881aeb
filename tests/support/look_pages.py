"""Pages of tiny models, and how tests find what such a page shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import heedful
from heedful.look.inspection import Inspection, inspect_choices
from heedful.look.page_api import PageAPI
from heedful.tokenizer import SpecialIds
from heedful.tokenizer.words import word_tokenizer
from tests.support.browser import Browser
from tests.support.classic_models import make_classic
from tests.support.model_folders import make_model_dir
from tests.support.tiny_models import save_tiny

WORDS = [f"w{chr(97 + n // 26)}{chr(97 + n % 26)}" for n in range(95)]  # waa, wab, ...
TEXT = " ".join(WORDS[n] for n in (7, 3, 50, 3, 21, 90, 11, 64, 5, 33, 8, 2))
PAIR = ("The cat sat on the mat.", "A dog ran to the mat in Paris.")
VIEWS = (  # of `page_with_report`
    "head",
    "model",
    "neuron",
    "steps",
    "prediction",
    "change",
    "positions",
    "compare",
    "words",
    "similarity",
    "heads",
)
# class names of the page
STATUS_LINE = ".told"  # the line above or below a picture that says in words what is chosen or pointed at
HEAD_SUMMARY = ".story"  # sentences about the chosen head of the head view: its pattern, and other heads with a pattern
FORMULA = ".law"  # the formula of a step of a block


def with_special_tokens(tokenizer: Any) -> Any:
    """Return a tokenizer after giving it special tokens at the beginning and at the end of a text."""
    tokenizer.special = SpecialIds(pad=0, unknown=0, bos_or_cls=2, eos_or_sep=1, mask=None)
    return tokenizer


def page_with_report(folder: Path) -> PageAPI:
    """A page of two pairs of texts in a tiny model, of a word in three texts, and of a report on heads."""
    loaded = heedful.load(make_model_dir(folder, "single"))
    second = Inspection(loaded, (PAIR[0].replace("cat", "dog"), PAIR[1]))
    report = {
        "patterns": {"next": "the token that follows", "broad": "a bag of words"},
        "heads": [
            {"part": "encoder", "layer": layer, "head": head, "name": "next" if head else "broad",
             "patterns": {"next": {"score": 0.9, "chance": 0.1, "lift": 0.89, "z": 20.0, "rows": 9}}}
            for layer in range(2) for head in range(4)
        ],
        "summary": "a summary", "measure": "", "price": None,
    }  # fmt: skip
    return PageAPI([Inspection(loaded, PAIR), second], extra=[Inspection(loaded, PAIR[0])], word="mat", report=report)


def head_weights(page_api: PageAPI, layer: int, head: int) -> np.ndarray:
    """Return the attention weights of a head of the first text, [rows, keys]."""
    weights: np.ndarray = page_api.inspections[0].weights("encoder", layer, [head])[0].numpy()
    return weights


def inspections_of_every_kind(folder: Path) -> dict[str, list[Inspection]]:
    """Tiny models of each head, classic kind and shape, with a text each; candidates where a head compares them."""
    texts: dict[str, Any] = {
        "masked": "the [MASK] sat",
        "pretraining": "the [MASK] sat",
        "tag": "ada lives in paris",
        "multiple": PAIR[0],
        "regression": PAIR[0],
        "bare": PAIR[0],
        "span": ("who wrote it", "ada wrote the program"),
        "next": PAIR,
    }
    inspections = {
        name: Inspection(heedful.load(make_model_dir(folder / name, name)), text) for name, text in texts.items()
    }
    inspections |= {
        name: Inspection(make_classic(name), "the film was not good . the end .")
        for name in ("structured", "hierarchical")
    }
    save_tiny(folder / "t5", "t5", "T5ForConditionalGeneration", vocab_size=96)
    save_tiny(folder / "gpt2", "gpt2", "GPT2LMHeadModel", vocab_size=96, bos_token_id=1, eos_token_id=1)
    for family in ("t5", "gpt2"):
        loaded = heedful.load(folder / family)
        loaded.tokenizer = with_special_tokens(word_tokenizer(WORDS))
        inspections[family] = Inspection(loaded, TEXT)
    by_kind = {name: [inspection] for name, inspection in inspections.items()}
    by_kind["choice"] = inspect_choices(
        heedful.load(make_model_dir(folder / "choice", "choice")), PAIR[0], ["the cat", "a dog", "love"]
    )
    return by_kind


def shown_view(chrome: Browser) -> str:
    """Return the name of the view that the open page shows."""
    return str(chrome.js("return document.querySelector('.body').dataset.view"))


def wait_for_view(chrome: Browser, view: str) -> None:
    """Wait until the open page shows a view."""
    chrome.until(lambda: shown_view(chrome) == view)


def open_view(chrome: Browser, view: str) -> None:
    """Click on the tab of a view, and wait until it is shown."""
    chrome.click(f'[data-view="{view}"]')
    wait_for_view(chrome, view)


def page_problems(chrome: Browser) -> str:
    """Return the error messages on the open page, "" if it has no error."""
    return str(chrome.js("return [...document.querySelectorAll('.body .problem')].map((e) => e.textContent).join('')"))
