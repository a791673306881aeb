"""A model with its head and its tokenizer: what a model folder holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from heedful.checkpoint.config import BundleConfig
from heedful.model.config import Learned, NextToken, SentenceEmbedding
from heedful.model.heads import make_head, pooled_row
from heedful.model.initialise import initialise
from heedful.model.recurrent_seq2seq import make_model
from heedful.model.trace import Trace
from heedful.nn.inference_linear import Int8Linear, NativeLinear, OneDnnLinear
from heedful.packed import Packed
from heedful.tokenizer import Tokenizer


class ModelBundle(nn.Module):
    """A model, the head that its folder names, and its tokenizer."""

    def __init__(self, config: BundleConfig, tokenizer: Tokenizer | None = None, source: str = "") -> None:
        super().__init__()
        self.config, self.tokenizer, self.source = config, tokenizer, source
        self.unused_tensors: tuple[str, ...] = ()  # tensors of the folder that belong to other heads
        self.other_head_tensors: dict[
            str, Tensor
        ] = {}  # of these, what other heads have, by published names: for `attach`
        self.thresholds: dict[str, float] = {}  # of answers: calibrated by label, or "no_answer"; "most" tokens
        self.label_scaling: dict[str, float] = {}  # "mean" and "std" of numbers, "low" and "high" of scores of pairs
        self.text_suffix = ""  # appended to a text that a decoder continues
        self.pairs: bool | None = None  # whether the texts that a classifier learned were pairs; None: not known
        model = config.model
        self.model = make_model(model)
        self.head = None if config.head is None else make_head(config.head, self.model)
        self.flush: Callable[[], None] = _nothing  # while it is trained: all weights become those of the last step

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the weights of the last step."""
        self.flush()
        return self.__dict__.copy()

    def forward(self, batch: Packed, target: Packed | None = None, *, trace: Trace | None = None) -> Any:
        """The head's outputs, or the last hidden states where there is no head."""
        return (
            self.hidden_states(batch, target, trace=trace)
            if self.head is None
            else self.head_outputs(batch, target, trace=trace)
        )

    def head_outputs(
        self,
        batch: Packed,
        target: Packed | None = None,
        *,
        trace: Trace | None = None,
        output_rows: Tensor | None = None,
    ) -> Any:
        """The head's outputs; of the wanted rows alone, where it scores rows. No more is computed than it reads."""
        assert self.head is not None
        read = batch if target is None else target
        if output_rows is None:
            output_rows, read = pooled_row(self.head, read)
        return self.head(self.hidden_states(batch, target, trace=trace, output_rows=output_rows), read)

    def hidden_states(
        self,
        batch: Packed,
        target: Packed | None = None,
        *,
        trace: Trace | None = None,
        output_rows: Tensor | None = None,
    ) -> Tensor:
        """The last hidden states, all or the wanted; a decoder whose head reads the encoder's text reads it shifted."""
        start = self.config.model.start
        if target is None and start is not None and not self.needs_target:
            target = batch.shift_right(start)
        last: Tensor = self.model(batch, target, trace=trace, wanted=output_rows)
        return last

    @property
    def needs_target(self) -> bool:
        """Whether there is a decoder beside the encoder that reads a text of its own; else it reads the same one."""
        head, model = self.config.head, self.config.model
        both = model.has_encoder and model.has_decoder
        return both and (model.start is None or head is None or isinstance(head, NextToken))

    def count(self) -> int:
        """How many parameters there are; what is shared counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def max_length(self) -> int | None:
        """How many tokens the model reads at once; None: any number."""
        limits = (self.max_target_length, self.config.model.max_source_positions)
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def max_target_length(self) -> int | None:
        """How many tokens a text may have that the model writes, or learns to; None: any number."""
        place, head = self.config.model.embedding.positions, self.config.head
        limits = [
            self.tokenizer.max_length if self.tokenizer else None,
            place.count - place.offset if isinstance(place, Learned) else None,
            head.max_length if isinstance(head, SentenceEmbedding) else None,
        ]
        return min((limit for limit in limits if limit is not None), default=None)

    def named_tensors(self) -> dict[str, Tensor]:
        """Parameters by the names that families' tables use; what is shared stands once.

        Also those of layers that were exchanged to answer: as they were loaded, or in whole numbers and their scales.
        """
        self.flush()
        exchanged = (
            (name, each)
            for name, each in self.named_modules()
            if isinstance(each, OneDnnLinear | NativeLinear | Int8Linear)
        )
        parts = {f"{name}.{part}": each for name, layer in exchanged for part, each in layer.parts().items()}
        return {name.removeprefix("model."): each for name, each in [*self.named_parameters(), *parts.items()]}


def _nothing() -> None:
    pass


def create(config: BundleConfig, tokenizer: Tokenizer | None = None, *, seed: int = 0) -> ModelBundle:
    """A model with fresh weights, drawn by config.model.initialisation from the seed."""
    loaded = ModelBundle(config, tokenizer, source="created")
    initialise(loaded, config.model.initialisation, torch.Generator().manual_seed(seed))
    return loaded


def assign(loaded: ModelBundle, tensors: Mapping[str, Tensor], device: torch.device | str) -> None:
    """Put the tensors in the place of parameters, in every module that shares them."""
    given = loaded.named_tensors()
    assert tensors.keys() == given.keys(), tensors.keys() ^ given.keys()
    fresh = {
        id(given[name]): nn.Parameter(tensor.to(device), requires_grad=given[name].requires_grad)
        for name, tensor in tensors.items()
    }
    for module in loaded.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                setattr(module, name, fresh[id(parameter)])  # recurrent nets keep a list of theirs, too
