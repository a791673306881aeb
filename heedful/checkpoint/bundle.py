"""`ModelBundle`: the contents of a model folder, which are a model, its head and its tokenizer.

`load` and `create` return one; training, inference and export use it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from heedful.checkpoint.config import BundleConfig
from heedful.checkpoint.notes import TrainingVectors
from heedful.errors import ModelError
from heedful.model.build import make_model
from heedful.model.config import Classes, NextToken, SentenceEmbedding
from heedful.model.heads import HeadOutputs, make_head, pooled_row
from heedful.model.initialise import initialise
from heedful.model.token_pruning import TokenPruning, cannot_prune
from heedful.model.trace import Trace
from heedful.nn.inference_linear import Int8Linear, NativeLinear, OneDnnLinear
from heedful.packed import Packed
from heedful.tokenizer import Tokenizer


class ModelBundle(nn.Module):
    """A model, its head and its tokenizer. `load` returns one.

    During training, the trainer sets `flush` to a function that applies pending lazy updates of embeddings; it must be
    called before the weights are read.
    """

    def __init__(self, config: BundleConfig, tokenizer: Tokenizer | None = None, source: str = "") -> None:
        super().__init__()
        self.config, self.tokenizer, self.source = config, tokenizer, source
        self.unused_tensors: tuple[str, ...] = ()  # HF names of the folder's tensors that belong to other heads
        self.other_head_tensors: dict[str, Tensor] = {}  # tensors of other heads by HF name, for `with_head`
        # tuned thresholds by label, or under "no_answer"; and limits in tokens, under "max_answer_tokens" and "most"
        self.thresholds: dict[str, float] = {}
        self.label_scaling: dict[str, float] = {}  # "mean" and "std" of regression labels, "low" and "high" of scores
        self.calibration: tuple[float, ...] = ()  # probabilities of gold labels on dev, for prediction sets
        self.training_vectors: TrainingVectors | None = None  # vectors of training texts, to recognize other texts
        self.text_suffix = ""  # text appended to a text that a decoder continues
        self.pairs: bool | None = None  # whether a classifier was trained on pairs of texts, or None if unknown
        self.early_stages: tuple[EarlyStage, ...] = ()  # earlier stages of a cascade that ends with this model
        self.model = make_model(config.model)
        self.head = None if config.head is None else make_head(config.head, self.model)
        self.flush: Callable[[], None] = _do_nothing

    def __getstate__(self) -> dict[str, object]:
        """Return the state with up-to-date weights, for copies and pickles."""
        self.flush()
        return self.__dict__.copy()

    def forward(self, batch: Packed, target: Packed | None = None, *, trace: Trace | None = None) -> HeadOutputs:
        """Return the outputs of the head, or the last hidden states if there is no head."""
        if self.head is None:
            return self.hidden_states(batch, target, trace=trace)
        return self.head_outputs(batch, target, trace=trace)

    def head_outputs(
        self,
        batch: Packed,
        target: Packed | None = None,
        *,
        trace: Trace | None = None,
        output_rows: Tensor | None = None,
    ) -> HeadOutputs:
        """Return the outputs of the head; only the hidden states that the head reads are computed.

        Args:
            batch: Input of the encoder, or of a decoder without encoder.
            target: Input of the decoder, in a model with both that needs one (`needs_target`).
            trace: Records attention and hidden states.
            output_rows: Indices of the rows to score, for a head that scores rows. If None, all rows.
        """
        assert self.head is not None
        head_batch = batch if target is None else target
        if output_rows is None:
            output_rows, head_batch = pooled_row(self.head, head_batch)
        target = self._decoder_inputs(batch, target)
        outputs: HeadOutputs = self.head(self.model(batch, target, trace=trace, output_rows=output_rows), head_batch)
        return outputs

    def hidden_states(
        self,
        batch: Packed,
        target: Packed | None = None,
        *,
        trace: Trace | None = None,
        output_rows: Tensor | None = None,
    ) -> Tensor:
        """Return the last hidden states, [rows, hidden size].

        Args:
            batch: Input of the encoder, or of a decoder without encoder.
            target: Input of the decoder, in a model with both that needs one (`needs_target`).
            trace: Records attention and hidden states.
            output_rows: Indices of the rows to return, in this order. If None, all rows.
        """
        target = self._decoder_inputs(batch, target)
        rows: Tensor = self.model(batch, target, trace=trace, output_rows=output_rows)
        return rows

    def _decoder_inputs(self, batch: Packed, target: Packed | None) -> Packed | None:
        """Return the inputs of the decoder: the target, or the source shifted right if the decoder needs no target."""
        model = self.config.model
        if target is not None or self.needs_target or not (model.has_encoder and model.has_decoder):
            return target
        return batch.shift_right(None if model.starts_with_last else model.start)

    @property
    def needs_target(self) -> bool:
        """Whether a model with encoder and decoder needs a text for the decoder."""
        head, model = self.config.head, self.config.model
        has_both = model.has_encoder and model.has_decoder
        has_start = model.starts_with_last or model.start is not None
        return has_both and (not has_start or head is None or isinstance(head, NextToken))

    @property
    def token_pruning(self) -> TokenPruning | None:
        """Which tokens the upper layers compute, or None for all; an execution option of the model."""
        pruning: TokenPruning | None = self.model.execution.token_pruning
        return pruning

    def prune_tokens(self, pruning: TokenPruning | None) -> None:
        """Set `token_pruning`.

        Raises:
            ModelError: If tokens of this model cannot be pruned, or if it has too few layers.
        """
        if pruning is not None:
            if reason := cannot_prune(self.config.model, self.config.head):
                raise ModelError(
                    f"{self.source}: tokens cannot be pruned: {reason}; expected an encoder with absolute positions "
                    "that classifies or scores texts by their first token"
                )
            assert self.config.model.encoder is not None
            layers = self.config.model.encoder.layers
            if pruning.layer >= layers:
                raise ModelError(f"{self.source}: layer is {pruning.layer}, of {layers} layers: give 1 to {layers - 1}")
        self.model.execution = replace(self.model.execution, token_pruning=pruning)

    def count(self) -> int:
        """Return how many parameters there are; shared parameters are counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def max_length(self) -> int | None:
        """Maximum number of tokens in a text that the model reads, or None if unlimited."""
        limits = (self.max_target_length, self.config.model.max_source_positions)
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def max_target_length(self) -> int | None:
        """Maximum number of tokens in a text that the model generates or learns to generate, or None if unlimited."""
        positions, head = self.config.model.embedding.positions, self.config.head
        limits = [
            self.tokenizer.max_length if self.tokenizer else None,
            None if positions is None else positions.limit,
            head.max_length if isinstance(head, SentenceEmbedding) else None,
        ]
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def default_prompt(self) -> str:
        """Text that is put before each text to embed, unless the caller names another prompt; it may be empty."""
        head = self.config.head
        return head.prompt() if isinstance(head, SentenceEmbedding) else ""

    def named_tensors(self) -> dict[str, Tensor]:
        """Return parameters by our names, as in the tables of families; shared parameters occur once.

        Linear layers that were replaced for inference have their loaded weights, or int8 weights and their scales.
        """
        self.flush()
        tensors: dict[str, Tensor] = dict(self.named_parameters())
        for layer_name, layer in self.named_modules():
            if isinstance(layer, OneDnnLinear | NativeLinear | Int8Linear):
                tensors |= {f"{layer_name}.{name}": tensor for name, tensor in layer.parts().items()}
        return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}

    def weights_digest(self) -> str:
        """Return the SHA-256 of the names and bytes of all parameters, in hexadecimal."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.named_tensors().items()):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()


def _do_nothing() -> None:
    """Apply no updates: the `flush` of a model that is not in training."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EarlyStage:
    """A stage of a cascade before the last one: a cheaper classifier, which answers if it is confident enough.

    Attributes:
        bundle: The classifier.
        threshold: Minimum probability of the most probable label for this stage to answer.
    """

    bundle: ModelBundle
    threshold: float


def cascade_refusal(source: str | Path, action: str) -> ModelError:
    """Return the error for a cascade where a single model is needed.

    Args:
        action: Participle that names what cannot be done with a cascade, such as "exported".
    """
    return ModelError(
        f"{source} is a cascade of models, and cannot be {action}: give one of its stages instead, such as "
        f"{Path(source) / 'stage-1'}, or the model that its last stage was made from"
    )


def pruned_refusal(source: str | Path, action: str) -> ModelError:
    """Return the error for a model with token pruning where all tokens are needed.

    Args:
        action: Participle that names what cannot be done with such a model, such as "exported".
    """
    return ModelError(f"{source} prunes tokens, and cannot be {action}: give the run from which it was made")


def check_stage(stage: ModelBundle, last: ModelBundle) -> None:
    """Check that a model can be a stage of a cascade that ends with the model `last`.

    Raises:
        ModelError: If one of them is a cascade, or does not choose one label, or if their labels differ.
    """
    for bundle in (last, stage):
        head = bundle.config.head
        if not isinstance(head, Classes) or head.problem_type != "single_label_classification":
            kind = "no head"
            if isinstance(head, Classes):
                kind = head.problem_type
            elif head is not None:
                kind = head.kind
            raise ModelError(
                f"{bundle.source} cannot be a stage of a cascade ({kind}): give models that choose one label, as "
                "`heedful finetune classify` trains them on data with one label for each text"
            )
        if bundle.early_stages:
            raise ModelError(f"{bundle.source} is a cascade itself: name its stages one by one instead")
    stage_labels, labels = ({*bundle.config.head.labels} for bundle in (stage, last))  # type: ignore[union-attr]
    if stage_labels != labels:
        raise ModelError(
            f"{stage.source} has the labels {', '.join(sorted(stage_labels))}, and {last.source} has "
            f"{', '.join(sorted(labels))}: all stages of a cascade need the same labels; train them on the same data"
        )


def create(config: BundleConfig, tokenizer: Tokenizer | None = None, *, seed: int = 0) -> ModelBundle:
    """Make a model with random weights, initialised by config.model.initialisation and the seed."""
    bundle = ModelBundle(config, tokenizer, source="created")
    initialise(bundle, config.model.initialisation, torch.Generator().manual_seed(seed))
    return bundle


def assign(bundle: ModelBundle, tensors: Mapping[str, Tensor], device: torch.device | str) -> None:
    """Replace all parameters by tensors, in every module that shares them.

    Args:
        tensors: Tensors by our names, one for each parameter.
        device: Device to move them to.
    """
    parameters = bundle.named_tensors()
    assert tensors.keys() == parameters.keys(), tensors.keys() ^ parameters.keys()
    fresh = {
        id(parameters[name]): nn.Parameter(tensor.to(device), requires_grad=parameters[name].requires_grad)
        for name, tensor in tensors.items()
    }
    for module in bundle.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                setattr(module, name, fresh[id(parameter)])  # also updates the weight lists of nn.LSTM and nn.GRU
