"""Layer 10: look inside a model. Attention and hidden states as data and as a page, and patterns of attention heads.

The module itself can be called: `heedful.look(run, text)` shows the page in a notebook.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See `heedful.look.notebook.look`."""
        from heedful.look.notebook import look

        return look(*args, **kwargs)


look = sys.modules[__name__]
look.__class__ = _Callable  # `heedful.look` is this module, whichever of it and its functions was imported first
