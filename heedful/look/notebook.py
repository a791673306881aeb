"""`look`: the page as a widget in a notebook (Jupyter, VS Code, Colab, marimo)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from heedful.checkpoint import ModelBundle, load
from heedful.errors import HeedfulError, RequestError
from heedful.look.inspection import Inspection, inspect_choices
from heedful.look.page import STYLE, bundled_script, read_asset
from heedful.look.page_api import PageAPI

if TYPE_CHECKING:
    from anywidget import AnyWidget

TextInput: TypeAlias = str | tuple[str, str] | dict[str, object]  # a text, a pair, {"prompt": ..., "choices": [...]}


def look(model: str | Path | ModelBundle, *texts: TextInput, target: str | None = None, word: str = "") -> AnyWidget:
    """Show attention and hidden states of a model in a notebook. Needs pip install 'heedful[notebook]'.

    Args:
        model: A run, a model folder, NAME[@REVISION] on the hub, or a loaded model.
        texts: One text or pair, or two to compare; with a `word` any number; or one
            {"prompt": "It rains.", "choices": ["Take a hat.", "Sleep."]}.
        target: The decoder's input. If None, the model generates it.
        word: A word to follow through all texts.

    Returns:
        A widget of anywidget.

    Raises:
        HeedfulError: If anywidget is not installed, or the model or the texts cannot be read.
    """
    return make_widget(make_page_api(model, texts, target=target, word=word))


def make_page_api(
    model: str | Path | ModelBundle, texts: Sequence[TextInput], *, target: str | None = None, word: str = ""
) -> PageAPI:
    """Return the `PageAPI` of some texts in a model. See `look` for the arguments."""
    if not texts:
        raise RequestError("no text was given: give one after the model")
    loaded = model if isinstance(model, ModelBundle) else load(model)
    items = [text for text in texts if not isinstance(text, dict)]
    if len(items) < len(texts):
        match texts:
            case ({"prompt": str(prompt), "choices": [*choices]},):
                return PageAPI(inspect_choices(loaded, prompt, [str(choice) for choice in choices], target=target))
        raise RequestError(
            'expected texts, pairs, or one {"prompt": "It rains.", "choices": ["Take a hat.", "Sleep."]}'
        )
    inspections = [Inspection(loaded, item, target=target) for item in items]
    compared = inspections[:1] if word else inspections[:2]  # the page shows only the word in further texts
    return PageAPI(compared, extra=inspections[1:], word=word)


def make_widget(api: PageAPI) -> AnyWidget:
    """Return the page as a widget that sends its questions to this process.

    Raises:
        HeedfulError: If anywidget is not installed.
    """
    try:
        import anywidget
    except ModuleNotFoundError:
        raise HeedfulError(
            "anywidget is not installed: pip install 'heedful[notebook]', or write a file with heedful look --html"
        ) from None

    class Look(anywidget.AnyWidget):
        _esm = bundled_script() + "\nexport default { render: startWidget };\n"
        _css = read_asset(STYLE)

    widget = Look()

    def answer(_: AnyWidget, message: object, buffers: object) -> None:
        widget.send(answer_message(api, message))

    widget.on_msg(answer)
    return widget


def answer_message(api: PageAPI, message: object) -> dict[str, object]:
    """Answer a message of the widget.

    Args:
        api: Answers the questions of the page.
        message: {"number": 1, "name": NAME OF THE QUESTION, "params": {NAME: VALUE}}.

    Returns:
        {"number": 1, "answer": ...} or {"number": 1, "error": A SENTENCE}.
    """
    match message:
        case {"params": dict(values), **fields}:
            params = {str(key): str(value) for key, value in values.items()}
        case _:
            return {"number": 0, "error": "a question has a number, a name and params"}
    number = fields.get("number")
    try:
        return {"number": number, "answer": api(str(fields.get("name")), params)}
    except HeedfulError as error:
        return {"number": number, "error": str(error)}
