"""Give a model another head, for fine-tuning and distillation.

Weights that the old and the new model have in common are kept, and the others are initialised from a seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import fields, replace

import torch
from torch import Tensor, nn

from heedful.checkpoint.bundle import ModelBundle, assign
from heedful.checkpoint.config import BundleConfig
from heedful.errors import ModelError, SettingError, did_you_mean
from heedful.families import FAMILIES
from heedful.families.config_reader import ConfigReader
from heedful.families.head_maps import CROSS_ENCODER_KEYS
from heedful.families.names import NameTable, to_hf_names, to_our_names
from heedful.model.config import (
    Classes,
    Head,
    ModelConfig,
    NextSentenceScores,
    Pooled,
    Pretraining,
    ProblemType,
    SentenceEmbedding,
    TokenClasses,
)
from heedful.model.heads import ClassesHead
from heedful.model.initialise import initialise, skip_init
from heedful.model.pooling import PooledClassesHead
from heedful.model.token_pruning import cannot_prune

HEAD, LAST_LAYER = "head.", "head.out."  # prefixes of our names for tensors of a head, and of its last layer


def with_head(
    bundle: ModelBundle,
    kind: str,
    *,
    labels: Sequence[str] = (),
    problem_type: ProblemType = "single_label_classification",
    seed: int = 0,
    reinit_layers: int = 0,
) -> ModelBundle:
    """Return a copy of the model with another head, in its dtype and on its device.

    The model without its head is kept, and so are tensors that both heads have under the same HF name, such as a
    pooler. The last layer is kept only if it predicts the same labels. Other tensors are initialised from the seed.
    Token pruning is kept if tokens can be pruned with the new head.

    Args:
        bundle: The model.
        kind: Kind of the new head.
        labels: Labels of a classifier.
        problem_type: Problem type of a sequence classifier.
        seed: Seed of the initialisation.
        reinit_layers: How many upper blocks to initialise again, with the whole head (Zhang et al. 2021, section 5).

    Raises:
        ModelError: If the family publishes no such head, or the head needs a decoder that the model lacks.
        SettingError: If labels or `reinit_layers` do not fit the head and the model.
    """
    head = make_head_config(bundle.config, kind, labels, problem_type)
    config = replace(bundle.config, model=_used_model(bundle.config, kind), head=head)
    FAMILIES[config.family].architecture(config.model, head)  # raises ModelError if the model lacks a decoder
    with skip_init():
        new = ModelBundle(config, bundle.tokenizer, bundle.source)
    empty = {name: torch.empty(tensor.shape, dtype=torch.float32) for name, tensor in new.named_tensors().items()}
    assign(new, empty, "cpu")
    blocks = _top_blocks(new, reinit_layers)
    generator = torch.Generator().manual_seed(seed)
    assert new.head is not None
    for module in (new.head, *blocks):
        initialise(module, config.model.initialisation, generator)
    initialised = {id(parameter) for block in blocks for parameter in block.parameters()}
    old_tensors = bundle.named_tensors()
    kept_tensors = {
        name: old_tensors[name]
        for name, tensor in new.named_tensors().items()
        if not name.startswith(HEAD) and id(tensor) not in initialised
    }
    if not reinit_layers:
        kept_tensors |= _shared_head_tensors(bundle, new)
    like = next(bundle.parameters())
    tensors = {
        name: (kept_tensors[name].detach().clone() if name in kept_tensors else tensor.detach().to(like))
        for name, tensor in new.named_tensors().items()
    }
    assign(new, tensors, like.device)
    if not cannot_prune(config.model, head):
        new.prune_tokens(bundle.token_pruning)
    return new.train(bundle.training)


def rescaled(bundle: ModelBundle, scale: float, shift: float) -> ModelBundle:
    """Return a model whose head outputs scale * score + shift; it shares all other layers with `bundle`."""
    if (scale, shift) == (1.0, 0.0):
        return bundle
    new, head = copy(bundle), copy(bundle.head)
    assert isinstance(head, ClassesHead | PooledClassesHead)
    # the copies get their own dicts of modules, so that the changes below do not reach `bundle`
    new._modules, head._modules = {**bundle._modules, "head": head}, dict(head._modules)
    old = head.out
    out = type(old)(old.in_features, old.out_features, device="meta")
    bias = old.weight.new_zeros(old.out_features) if old.bias is None else old.bias.detach()
    out.weight = nn.Parameter((old.weight.detach().double() * scale).to(old.weight))
    out.bias = nn.Parameter((bias.double() * scale + shift).to(bias)) if old.bias is not None or shift else None
    head.out = out
    return new


def _used_model(config: BundleConfig, kind: str) -> ModelConfig:
    """Return the part of the model that a head uses."""
    family = FAMILIES[config.family]
    if kind == "embedding":
        uses_encoder_only = config.model.encoder is not None and not family.needs_decoder
        return replace(config.model, decoder=None, start=None) if uses_encoder_only else config.model
    return family.heads[family.kinds()[kind]].used_config(config.model)


def make_head_config(
    config: BundleConfig,
    kind: str,
    labels: Sequence[str] = (),
    problem_type: ProblemType = "single_label_classification",
) -> Head:
    """Return the configuration of a head, with the dropout and the activation of the model's family.

    Raises:
        ModelError: If the family publishes no head of this kind.
        SettingError: If the labels of a classifier are missing, or one occurs twice.
    """
    family = FAMILIES[config.family]
    is_decoder = config.model.encoder is None and config.model.decoder is not None
    if kind == "embedding":
        if isinstance(config.head, SentenceEmbedding):
            return config.head
        publishes_pooler = family.heads[family.bare].head is Pooled
        return SentenceEmbedding(
            pooling=("last" if is_decoder else "mean",),  # in a decoder, only the last token attends to all others
            keeps_pooler=publishes_pooler and isinstance(config.head, Pooled),
        )
    kinds = {name: hf_name for name, hf_name in family.kinds().items() if family.heads[hf_name].head is not type(None)}
    if kind not in kinds:
        known = [*kinds, "embedding"]
        raise ModelError(f'this family has no head "{kind}"{did_you_mean(kind, known)}; it has {", ".join(known)}')
    head_map = family.heads[kinds[kind]]
    if head_map.head in (Classes, TokenClasses) and (not labels or len(set(labels)) < len(labels)):
        listed = ", ".join(f'"{label}"' for label in labels[:20]) or "none"
        raise SettingError(f'labels are {listed}; a "{kind}" head needs one or more, each once')
    # the values of a config.json with this head, from which the family reads its configuration
    values: dict[str, object] = dict(config.hf_config or family.write(config.model))
    for key in CROSS_ENCODER_KEYS & values.keys():  # keys of the old head
        del values[key]
    values |= {
        "id2label": {str(index): label for index, label in enumerate(labels)},
        "label2id": {label: index for index, label in enumerate(labels)},
        "num_labels": len(labels) or 2,
        "problem_type": problem_type,
    }
    # the key "head" is read in Heedful's own formats only
    settings = {
        "kind": kind,
        "labels": list(labels),
        "problem_type": problem_type,
        "dropout": config.model.embedding.dropout,
        "no_answer": "last" if is_decoder else "first",
    }
    field_names = {head_field.name for head_field in fields(head_map.head)}
    values["head"] = {name: value for name, value in settings.items() if name in field_names}
    head = head_map.read(ConfigReader(values, "the model"), config.model)
    assert head is not None
    return head


def _top_blocks(bundle: ModelBundle, count: int) -> list[nn.Module]:
    """Return the upper `count` blocks; raises SettingError if there are fewer, or if layers share blocks."""
    stack = bundle.model.decoder or bundle.model.encoder
    blocks = list(stack.blocks) if stack is not None else []
    if not 0 <= count <= len(blocks):
        raise SettingError(
            f"reinit_layers is {count}, but this model has {len(blocks)} blocks: give 0 to {len(blocks)}"
        )
    if count and stack is not None and len(blocks) < stack.config.layers:
        raise SettingError(
            f"reinit_layers is {count}, but the {stack.config.layers} layers of this model share the weights of "
            f"{len(blocks)} blocks, so that lower ones would be initialised again too: leave it out"
        )
    return blocks[len(blocks) - count :]


def _shared_head_tensors(bundle: ModelBundle, new: ModelBundle) -> dict[str, Tensor]:
    """Return the tensors of the new head that the old head, or another head in the folder, has too, by our names.

    Tensors are the same if they have the same HF name and shape, and, in a last layer, the same predictions.
    """
    old_table, new_table = (
        FAMILIES[config.family].table(config.model, config.head) for config in (bundle.config, new.config)
    )
    old_tensors = _hf_tensors(old_table, bundle, HEAD)
    new_tensors = _hf_tensors(new_table, new, HEAD)
    other_tensors = bundle.other_head_tensors
    names = _names_of_same_shape(old_tensors, new_tensors)
    other_names = _names_of_same_shape(other_tensors, new_tensors) - old_tensors.keys()
    if _predictions(bundle.config.head) != _predictions(new.config.head):
        names -= _hf_tensors(old_table, bundle, LAST_LAYER).keys()
    # the predictions of the last layer of another head are unknown
    other_names -= _hf_tensors(new_table, new, LAST_LAYER).keys()
    tensors = {name: old_tensors[name] for name in names} | {name: other_tensors[name] for name in other_names}
    return to_our_names(new_table, tensors)


def _names_of_same_shape(tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> set[str]:
    """Return the names of the tensors that are in both mappings with the same shape."""
    return {name for name in tensors.keys() & like.keys() if tensors[name].shape == like[name].shape}


def _predictions(head: Head | None) -> tuple[object, ...]:
    """Return a description of what the last layer of a head predicts, for comparisons."""
    match head:
        case Classes(labels=labels, problem_type=problem_type):
            return ("sequence_classification", labels, problem_type)
        case TokenClasses(labels=labels):
            return ("token_classification", labels)
        case NextSentenceScores() | Pretraining():
            return ("next_sentence",)
    return (type(head),)


def _hf_tensors(table: NameTable, bundle: ModelBundle, prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names in Heedful begin with the prefix, by their HF names."""
    tensors = {name: tensor for name, tensor in bundle.named_tensors().items() if name.startswith(prefix)}
    return to_hf_names(replace(table, copied={}), tensors)
