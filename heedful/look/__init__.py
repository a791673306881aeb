"""Layer 10: look inside. What a model computes for a text, as data, as a page, and as names for its heads.

The module itself can be called: `heedful.look(run, text)` shows the page in a notebook.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *given: Any, **more: Any) -> Any:
        """See `heedful.look.notebook.look`."""
        from heedful.look.notebook import look

        return look(*given, **more)


look = sys.modules[__name__]
look.__class__ = _Callable  # so `heedful.look` is this module, whoever imported what before
