"""Layer 10: look inside a model. Attention and hidden states as data and as a page, and patterns of attention heads.

The module itself can be called: `heedful.look(run, text)` shows the page in a notebook.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from anywidget import AnyWidget

    from heedful.checkpoint import ModelBundle
    from heedful.look.notebook import TextInput


class _Callable(ModuleType):
    def __call__(
        self, model: str | Path | ModelBundle, *texts: TextInput, target: str | None = None, word: str = ""
    ) -> AnyWidget:
        """See `heedful.look.notebook.look`."""
        from heedful.look.notebook import look

        return look(model, *texts, target=target, word=word)


look = sys.modules[__name__]
look.__class__ = _Callable  # `heedful.look` is this module, whichever of it and its functions was imported first
