"""The context of autograd functions, which torch leaves without a type."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    class AutogradContext(Protocol):
        """Passed to `forward` and `backward` of an autograd function, which may set attributes of its own."""

        needs_input_grad: tuple[bool, ...]
        saved_tensors: tuple[Tensor, ...]

        def save_for_backward(self, *tensors: Tensor | None) -> None:
            """Keep tensors for `backward`."""

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: object) -> None: ...

else:
    AutogradContext = object
