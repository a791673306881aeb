"""Shapes and types of arguments and results, checked while the tests run.

`checked` takes the place of `jaxtyping.jaxtyped`, which checks every call of a function, and takes as much time as a
tiny model. Here a check that has passed is not repeated for the next call whose arguments and result have the same
types, shapes and dtypes, since it would pass again.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from types import FunctionType
from typing import Any

import jaxtyping
import numpy as np
from beartype import BeartypeConf
from beartype.door import is_bearable
from jaxtyping import jaxtyped
from torch import Tensor

CONF = BeartypeConf(is_pep484_tower=True)  # an int is a float, as for a type checker
MAX_ITEMS = 4  # of a tuple or list, of which all types are compared; of a longer one, only that of the first item
RESULT = "return"


class _Signature:
    """The annotations of a function, and the calls that agree with them."""

    def __init__(self, function: FunctionType) -> None:
        self.name = f"{function.__module__}.{function.__qualname__}"
        self.code = function.__code__  # as long as it is here, no other code has its identity
        self.signature = inspect.signature(function)
        self.parameters = self.signature.parameters
        annotations = {name: parameter.annotation for name, parameter in self.parameters.items()}
        annotations[RESULT] = self.signature.return_annotation
        self.hints = {name: _resolve(annotation, function) for name, annotation in annotations.items()}
        self.by_value = any("Literal" in repr(hint) for hint in self.hints.values())
        self.passed: set[object] = set()

    def kind(self, value: object) -> object:
        """Return what the check of a value depends on."""
        if isinstance(value, Tensor):
            return value.shape, value.dtype
        cls = type(value)
        if isinstance(value, np.ndarray):
            return value.shape, value.dtype
        if cls is tuple or cls is list:
            items: Any = value
            if len(items) > MAX_ITEMS:
                return cls, "more", self.kind(items[0])
            return cls, *map(self.kind, items)
        if cls is dict:
            pairs: Any = value
            return cls, *map(self.kind, next(iter(pairs.items()), ()))
        return (cls, value) if self.by_value and cls in (str, int, bool) else cls

    def check(self, arguments: tuple[Any, ...], keywords: dict[str, Any], **result: Any) -> None:
        """Compare arguments, and a result if there is one, with their annotations.

        Raises:
            jaxtyping.TypeCheckError: If one of them has another type, shape or dtype.
        """
        with jaxtyped("context"):
            for name, value in (self.signature.bind(*arguments, **keywords).arguments | result).items():
                several = name in self.parameters and self.parameters[name].kind
                values: Any = (value,)
                if several is inspect.Parameter.VAR_POSITIONAL:
                    values = value
                elif several is inspect.Parameter.VAR_KEYWORD:
                    values = value.values()
                for each in values:
                    if not is_bearable(each, self.hints[name], conf=CONF):
                        raise jaxtyping.TypeCheckError(f"{self.name}: {name} is {each!r}; expected {self.hints[name]}")


def _resolve(annotation: object, function: FunctionType) -> Any:
    """Return the type of an annotation, or Any without one, or if it names what the module has not defined yet."""

    def holder() -> None: ...

    if annotation is inspect.Signature.empty:
        return Any
    holder.__annotations__ = {RESULT: annotation}
    try:
        return typing.get_type_hints(holder, function.__globals__, include_extras=True)[RESULT]
    except Exception:
        return Any


# By the identity of the code, which a function within a function has at each call of the outer one. Code that is equal
# is not enough, since dataclasses with fields of the same names have it.
_SIGNATURES: dict[int, _Signature] = {}


def checked(*, typechecker: object = None) -> Callable[[Any], Any]:
    """Return the decorator of a function, or of a dataclass, of which the arguments are checked."""
    return _decorated


def _decorated(decorated: Any) -> Any:
    if isinstance(decorated, type):
        if dataclasses.is_dataclass(decorated) and "__init__" in vars(decorated):
            decorated.__init__ = _decorated(decorated.__init__)  # type: ignore[misc]
        return decorated
    if id(decorated.__code__) not in _SIGNATURES:
        _SIGNATURES[id(decorated.__code__)] = _Signature(decorated)
    signature = _SIGNATURES[id(decorated.__code__)]
    passed, kind = signature.passed, signature.kind

    @functools.wraps(decorated)
    def call(*arguments: Any, **keywords: Any) -> Any:
        __tracebackhide__ = True
        if jaxtyping.config.jaxtyping_disable:
            return decorated(*arguments, **keywords)
        kinds = (*map(kind, arguments), *keywords, *map(kind, keywords.values()))
        if kinds not in passed:
            signature.check(arguments, keywords)
            passed.add(kinds)
        result = decorated(*arguments, **keywords)
        if (kinds, of_result := kind(result)) not in passed:
            signature.check(arguments, keywords, **{RESULT: result})
            passed.add((kinds, of_result))
        return result

    return call
