"""Inspection of models: attention and hidden states as data and as a web page, and patterns of attention heads.

The package itself can be called: `heedful.look(run, text)` shows the page in a notebook.
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


# `heedful.look` is this package and also the public function. An import of any submodule sets the attribute to the
# package, so the package is made callable.
look = sys.modules[__name__]
look.__class__ = _Callable
