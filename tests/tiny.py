"""Tiny random models of transformers, with every weight randomised: zero biases and unit norms would hide errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from heedful.families import FAMILIES
from heedful.packed import Packed

_BERT: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.2,
    "classifier_dropout": 0.3,
}
_ROBERTA = _BERT | {"max_position_embeddings": 42, "type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 1}
TINY: dict[str, tuple[type, dict[str, Any]]] = {
    "bert": (transformers.BertConfig, _BERT),
    "roberta": (transformers.RobertaConfig, _ROBERTA),
    "xlm-roberta": (transformers.XLMRobertaConfig, _ROBERTA),
    "camembert": (transformers.CamembertConfig, _ROBERTA),
    "distilbert": (
        transformers.DistilBertConfig,
        {
            "vocab_size": 99,
            "dim": 32,
            "n_layers": 4,
            "n_heads": 4,
            "hidden_dim": 48,
            "max_position_embeddings": 40,
            "dropout": 0.1,
            "attention_dropout": 0.2,
            "seq_classif_dropout": 0.3,
            "qa_dropout": 0.4,
        },
    ),
}
MODELS = [(family, architecture) for family in TINY for architecture in FAMILIES[family].heads]
LABELS = {0: "ache", 1: "bliss", 2: "calm"}


def tiny(family: str, architecture: str, dtype: torch.dtype = torch.float32, **changed: Any) -> Any:
    """transformers' model, in eval mode, by eager attention."""
    kind, settings = TINY[family]
    if "SequenceClassification" in architecture or "TokenClassification" in architecture:
        settings = settings | {"id2label": LABELS, "label2id": {name: number for number, name in LABELS.items()}}
    torch.manual_seed(len(architecture))
    model = getattr(transformers, architecture)(kind(**settings | changed))
    randomise(model)
    model.config._attn_implementation = "eager"
    return model.to(dtype).eval()


@torch.no_grad()
def randomise(model: torch.nn.Module) -> None:
    """Every weight normal with deviation 0.2, those of norms around 1; padding rows stay zero."""
    padding = {id(part.weight): part.padding_idx for part in model.modules() if isinstance(part, torch.nn.Embedding)}
    for name, parameter in model.named_parameters():
        parameter.normal_(1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0, 0.2)
        if padding.get(id(parameter)) is not None:
            parameter[padding[id(parameter)]] = 0.0


def save_tiny(folder: Path, family: str, architecture: str, dtype: torch.dtype = torch.float32, **changed: Any) -> Any:
    """The same, saved to the folder by transformers."""
    model = tiny(family, architecture, dtype, **changed)
    model.save_pretrained(folder)
    return model


LENGTHS = (7, 23, 1, 12)


def sequences(family: str, lengths: tuple[int, ...] = LENGTHS) -> tuple[list[list[int]], list[list[int]]]:
    """Random ids past the special ones, and types: two segments where the family has them."""
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(5, 99, (length,), generator=generator).tolist() for length in lengths]
    two = TINY[family][1].get("type_vocab_size", 2) == 2 and family != "distilbert"
    return ids, [[int(two and place >= length // 2) for place in range(length)] for length in lengths]


def packed(family: str, lengths: tuple[int, ...] = LENGTHS) -> Packed:
    """The same as a batch."""
    return Packed.of(*sequences(family, lengths))


def their_inputs(family: str, ids: list[int], types: list[int]) -> dict[str, torch.Tensor]:
    """One sequence as transformers takes it."""
    given = {"input_ids": torch.tensor([ids])}
    return given if family == "distilbert" else given | {"token_type_ids": torch.tensor([types])}


def their_outputs(model: Any, family: str, ids: list[list[int]], types: list[list[int]]) -> list[torch.Tensor]:
    """What transformers' head gives for sequences one at a time, laid out as ours: one tensor for each output."""
    choice = "MultipleChoice" in type(model).__name__
    found: list[list[torch.Tensor]] = []
    for each_ids, each_types in zip(ids, types, strict=True):
        given = their_inputs(family, each_ids, each_types)
        if choice:
            given = {name: tensor[None] for name, tensor in given.items()}
        out = model(**given)
        if "start_logits" in out:
            found.append([torch.stack([out.start_logits[0], out.end_logits[0]], -1)])
        elif "prediction_logits" in out:
            found.append([out.prediction_logits[0], out.seq_relationship_logits])
        elif "last_hidden_state" in out:
            pooled = out.get("pooler_output")
            found.append([out.last_hidden_state[0] if pooled is None else pooled])
        elif choice:
            found.append([out.logits[0]])
        else:
            found.append([out.logits if out.logits.ndim == 2 else out.logits[0]])
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


def as_list(outputs: Any) -> list[torch.Tensor]:
    """Our head's outputs as a list of tensors."""
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
