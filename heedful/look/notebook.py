"""The same page in a notebook: Jupyter, VS Code, Colab, marimo."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from heedful.checkpoint import Loaded, load
from heedful.errors import HeedfulError
from heedful.look import page
from heedful.look.inspection import Inspection, inspect_choices
from heedful.look.page_api import PageAPI

TextInput = str | tuple[str, str] | dict[str, Any]  # one text, a pair, or {"prompt": ..., "choices": [...]}


def make_page_api(
    model: str | Path | Loaded, texts: Sequence[TextInput], *, target: str | None = None, word: str = ""
) -> PageAPI:
    """What a page about these texts asks: the first, the second beside it, and with a `word` all of them."""
    if not texts:
        raise HeedfulError("no text was given: give one after the model")
    loaded = model if isinstance(model, Loaded) else load(model)
    if any(isinstance(text, dict) for text in texts):
        match texts:
            case ({"prompt": str(prompt), "choices": [*choices]},):
                return PageAPI(inspect_choices(loaded, prompt, [str(each) for each in choices], target=target))
        raise HeedfulError(
            'expected texts, pairs, or one {"prompt": "It rains.", "choices": ["Take a hat.", "Sleep."]}'
        )
    plain = [text for text in texts if not isinstance(text, dict)]
    first, *rest = [Inspection(loaded, text, target=target) for text in plain]
    return PageAPI([first, *([] if word else rest[:1])], extra=rest, word=word)


def look(model: str | Path | Loaded, *texts: TextInput, target: str | None = None, word: str = "") -> Any:
    """A widget that shows what the model does with the text; it needs pip install 'heedful[notebook]'."""
    return make_widget(make_page_api(model, texts, target=target, word=word))


def make_widget(asks: PageAPI) -> Any:
    """The page as an anywidget, which asks this process."""
    try:
        import anywidget
    except ModuleNotFoundError:
        raise HeedfulError(
            "anywidget is not installed: pip install 'heedful[notebook]', or write a file with heedful look --html"
        ) from None

    class Look(anywidget.AnyWidget):
        _esm = page.bundled_script() + "\nexport default { render: startWidget };\n"
        _css = page.read_asset(page.STYLE)

    made = Look()

    def answer(_: Any, told: Any, __: Any) -> None:
        made.send(answer_message(asks, told))

    made.on_msg(answer)
    return made


def answer_message(asks: PageAPI, told: Any) -> dict[str, Any]:
    """The answer to a numbered question, or why there is none."""
    if not isinstance(told, dict) or not isinstance(told.get("params"), dict):
        return {"number": 0, "error": "a question has a number, a name and params"}
    number, params = told.get("number"), {str(key): str(value) for key, value in told["params"].items()}
    try:
        return {"number": number, "answer": asks(str(told.get("name")), params)}
    except HeedfulError as error:
        return {"number": number, "error": str(error)}
