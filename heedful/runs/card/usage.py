"""The section of a model card that shows how to use the model, in Heedful and in other libraries."""

from __future__ import annotations

from collections.abc import Iterator

from heedful.tasks.specs import SPECS

WINDOWS = (
    "In Heedful, texts longer than the model's maximum length are read in windows, whose answers are merged; "
    "{} does not do this."
)
SINGLE_TEXT = '"a text"'  # the example input of tasks whose input is a text or a pair of texts


def usage(task: str, *, heedful_only: bool, pairs: bool, has_encoder: bool = True) -> Iterator[list[str]]:
    """Yield the paragraphs and code blocks of the section, each as a list of lines.

    They show the `heedful predict` command, and Python code for Heedful and for another library.

    Args:
        task: Name of the model's task.
        heedful_only: Whether no other library can load the model, since only Heedful has its architecture.
        pairs: Whether an input is a pair of texts.
        has_encoder: Whether a seq2seq model has an encoder. False for a decoder-only model.
    """
    card = SPECS[task].card
    engine_example = example = card.python_input
    arguments = card.cli_arguments
    if pairs and engine_example == SINGLE_TEXT:
        engine_example = '("a text", "another")'
        arguments = '"a text" --pair "another"'
        example = '{"text": "a text", "text_pair": "another"}'
    yield ["## How to use it"]
    yield ["```sh", f"heedful predict path/to/model {arguments}", "```"]
    yield [
        "```python",
        "import heedful",
        "",
        'engine = heedful.Engine("path/to/model")',
        f"print(engine([{engine_example}]))",
        "```",
    ]
    if heedful_only:
        yield ["The model's architecture is Heedful's own; other libraries cannot load it."]
        return
    yield [f"With {card.library}:"]
    code = card.code if has_encoder else card.decoder_code or card.code
    yield ["```python", *code.replace("{example}", example).splitlines(), "```"]
    if card.has_windows:
        yield [WINDOWS.format(card.library)]
