"""`AutogradContext`: the type of the first argument (`ctx`) of autograd functions, which PyTorch leaves untyped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    class AutogradContext(Protocol):
        """The `ctx` of an autograd function's `forward` and `backward`, which may set further attributes on it."""

        needs_input_grad: tuple[bool, ...]
        saved_tensors: tuple[Tensor, ...]

        def save_for_backward(self, *tensors: Tensor | None) -> None:
            """Save tensors for `backward`, which reads them as `saved_tensors`."""

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: object) -> None: ...

else:
    AutogradContext = object
