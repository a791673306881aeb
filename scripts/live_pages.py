"""Write the pages of the site that contain a model: opinions, names in sentences, and the explorer.

usage: python scripts/live_pages.py FOLDER

The models are the bundled encoder, and two that this script fine-tunes in about two minutes: on opinions that
`heedful.study.toy` makes up, and on the sample data "tags". scripts/docs_pages.py calls `live_pages` for the site.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("page", "look", "study/toy", "assets", "_version.py")  # in the package; the pages depend on them
PAGES = {  # names of the files: title, and what the page does
    "sentiment.html": ("Opinions: good or bad", "Whether a sentence has a good or a bad opinion of something."),
    "tags.html": ("Names of people, places and things", "The names of people, places and things in a sentence."),
    "explorer.html": ("The explorer", "Attention, steps and predictions of the encoder that ships, for any text."),
}
TEXTS = 800  # made-up opinions for training
EXPLORED = "He opened the [MASK] and went inside."


def live_pages(cache: Path) -> dict[str, bytes]:
    """Return the pages by file name; they are written again only if their sources have changed.

    Args:
        cache: A folder for the pages and the digest of their sources.
    """
    digest, digest_file = _digest(), cache / "digest"
    has_pages = all((cache / name).is_file() for name in PAGES)
    if not has_pages or not digest_file.is_file() or digest_file.read_text() != digest:
        cache.mkdir(parents=True, exist_ok=True)
        digest_file.unlink(missing_ok=True)
        _write(cache)
        digest_file.write_text(digest)
    return {name: (cache / name).read_bytes() for name in PAGES}


def index_page() -> str:
    """Return the page of the site that links to the pages with a model."""
    rows = "\n".join(
        f'- <a href="live/{name}">{title}</a>: {about[:1].lower()}{about[1:]}' for name, (title, about) in PAGES.items()
    )
    return (
        "# Models in the browser\n\n"
        "Each page holds a model with its tokenizer, some 12 MB, and computes in your browser: nothing that you write "
        "there leaves it.\n\n"
        f"{rows}\n\n"
        "Both fine-tuned models are small examples: one learned from 800 made-up sentences on films, which "
        "`heedful study --toy` writes, the other from the 150 sentences of `heedful recipe cp tags`. A page of your "
        "own model is one command: [Export to a web page](exporting.md#export-to-a-web-page), or "
        "[the explorer with the model in it](looking.md).\n"
    )


def _digest() -> str:
    """Return a digest of all files that the pages depend on."""
    paths = [Path(__file__).resolve()]
    for source in SOURCES:
        path = ROOT / "heedful" / source
        if path.is_file():
            paths.append(path)
        else:
            paths += sorted(file for file in path.rglob("*") if file.is_file() and file.suffix != ".pyc")
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _write(folder: Path) -> None:
    """Train the models and write the pages."""
    from heedful.checkpoint import load
    from heedful.look.inspection import Inspection
    from heedful.look.page_api import PageAPI
    from heedful.look.page_with_model import render_html_with_model
    from heedful.page.html import export_page
    from heedful.runs.finetune.run import finetune
    from heedful.study.toy.files import ORDER, write_toy_files

    with TemporaryDirectory() as scratch:
        write_toy_files(Path(scratch) / "toy", train=TEXTS)
        data = {"sentiment": Path(scratch) / "toy" / ORDER, "tags": ROOT / "heedful" / "assets" / "tags"}
        for name, task in (("sentiment", "classify"), ("tags", "tag")):
            run = Path(scratch) / name
            finetune(task, data[name], run, overrides={"eval_baseline": False})
            export_page(load(run), folder / f"{name}.html", title=PAGES[f"{name}.html"][0], overwrite=True)
    encoder = load("heedful-mini-en", head="masked_lm")
    explorer = render_html_with_model(PageAPI([Inspection(encoder, EXPLORED, name="heedful-mini-en")]))
    (folder / "explorer.html").write_text(explorer, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.path.insert(0, str(ROOT))
    live_pages(Path(sys.argv[1]))
