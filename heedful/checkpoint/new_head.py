"""A loaded model gets the head of a task: what is known stays, the rest is drawn from a seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import fields, replace

import torch
from torch import Tensor, nn

from heedful.checkpoint.bundle import ModelBundle, assign
from heedful.checkpoint.config import BundleConfig
from heedful.errors import HeedfulError, did_you_mean
from heedful.families import FAMILIES
from heedful.families.config_reader import ConfigReader
from heedful.families.names import NameTable, to_hf_names, to_our_names
from heedful.model.config import (
    Classes,
    Head,
    ModelConfig,
    NextSentence,
    Pooled,
    Pretraining,
    ProblemType,
    SentenceEmbedding,
    TokenClasses,
)
from heedful.model.heads import ClassesHead
from heedful.model.initialise import initialise, skip_init
from heedful.model.pooling import PooledClassesHead

HEAD, OUT = "head.", "head.out."  # before our names of a head's tensors, and of those of its last layer


def with_head(
    loaded: ModelBundle,
    kind: str,
    *,
    labels: Sequence[str] = (),
    problem_type: ProblemType = "single_label_classification",
    seed: int = 0,
    reinit_layers: int = 0,
) -> ModelBundle:
    """The same model with a head of that kind, in its dtype and on its device; the given one is left as it is.

    The body stays, and what both heads have under one published name (a pooler, say), the last layer only where it
    answers the same: the same labels. Everything else is drawn from the seed. `reinit_layers` blocks at the top, and
    then the whole head, are initialised again (Zhang et al. 2021, section 5).
    """
    head = make_head_config(loaded.config, kind, labels, problem_type)
    config = replace(loaded.config, model=_model(loaded.config, kind), head=head)
    FAMILIES[config.family].architecture(config.model, head)  # refuses a head that needs more than the model has
    with skip_init():
        made = ModelBundle(config, loaded.tokenizer, loaded.source)
    assign(
        made, {name: torch.empty(each.shape, dtype=torch.float32) for name, each in made.named_tensors().items()}, "cpu"
    )
    blocks = _top(made, reinit_layers)
    generator = torch.Generator().manual_seed(seed)
    assert made.head is not None
    for part in (made.head, *blocks):
        initialise(part, config.model.initialisation, generator)
    anew = {id(parameter) for block in blocks for parameter in block.parameters()}
    known = loaded.named_tensors()
    kept = {n: known[n] for n, each in made.named_tensors().items() if not n.startswith(HEAD) and id(each) not in anew}
    if not reinit_layers:
        kept |= _shared(loaded, made)
    like = next(loaded.parameters())
    tensors = {
        name: (kept[name].detach().clone() if name in kept else each.detach().to(like))
        for name, each in made.named_tensors().items()
    }
    assign(made, tensors, like.device)
    return made.train(loaded.training)


def rescaled(loaded: ModelBundle, scale: float, shift: float) -> ModelBundle:
    """The same model, whose head gives scale · number + shift: its last layer is another, all else is shared."""
    if (scale, shift) == (1.0, 0.0):
        return loaded
    made, head = copy(loaded), copy(loaded.head)
    assert isinstance(head, ClassesHead | PooledClassesHead)
    made._modules, head._modules = {**loaded._modules, "head": head}, dict(head._modules)
    known = head.out
    out = type(known)(known.in_features, known.out_features, device="meta")
    bias = known.weight.new_zeros(known.out_features) if known.bias is None else known.bias.detach()
    out.weight = nn.Parameter((known.weight.detach().double() * scale).to(known.weight))
    out.bias = nn.Parameter((bias.double() * scale + shift).to(bias)) if known.bias is not None or shift else None
    head.out = out
    return made


def _model(config: BundleConfig, kind: str) -> ModelConfig:
    """What that head uses of the model."""
    family = FAMILIES[config.family]
    if kind == "embedding":  # of the encoder, where there is one
        decoder = None if config.model.encoder is not None else config.model.decoder
        return replace(config.model, decoder=decoder, start=None)
    entry = family.heads[family.kinds()[kind]]
    return entry.used_config(config.model)


def make_head_config(
    config: BundleConfig,
    kind: str,
    labels: Sequence[str] = (),
    problem_type: ProblemType = "single_label_classification",
) -> Head:
    """The head that this family publishes under that name, with the family's own dropout and activation."""
    family = FAMILIES[config.family]
    if kind == "embedding":
        if isinstance(config.head, SentenceEmbedding):
            return config.head
        published = family.heads[family.bare].head is Pooled
        return SentenceEmbedding(keeps_pooler=published and isinstance(config.head, Pooled))
    kinds = {name: known for name, known in family.kinds().items() if family.heads[known].head is not type(None)}
    if kind not in kinds:
        known = [*kinds, "embedding"]
        raise HeedfulError(f'this family has no head "{kind}"{did_you_mean(kind, known)}; it has {", ".join(known)}')
    entry = family.heads[kinds[kind]]
    if entry.head in (Classes, TokenClasses) and (not labels or len(set(labels)) < len(labels)):
        given = ", ".join(f'"{label}"' for label in labels[:20]) or "none"
        raise HeedfulError(f'labels are {given}; a "{kind}" head needs one or more, each once')
    values = dict(config.hf_config or family.write(config.model))
    values |= {
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
        "num_labels": len(labels) or 2,
        "problem_type": problem_type,
    }
    ours = {
        "kind": kind,
        "labels": list(labels),
        "problem_type": problem_type,
        "dropout": config.model.embedding.dropout,
    }
    ours["no_answer"] = "last" if config.model.encoder is None and config.model.decoder is not None else "first"
    values["head"] = {field.name: ours[field.name] for field in fields(entry.head) if field.name in ours}
    found = entry.read(ConfigReader(values, "the model"), config.model)
    assert found is not None
    return found


def _top(made: ModelBundle, count: int) -> list[nn.Module]:
    """So many of the last blocks."""
    stack = made.model.decoder or made.model.encoder
    blocks = list(stack.blocks) if stack is not None else []
    if not 0 <= count <= len(blocks):
        raise HeedfulError(f"reinit_layers is {count}, but this model has {len(blocks)} blocks: give how many, from 0")
    if count and stack is not None and len(blocks) < stack.config.layers:
        raise HeedfulError(
            f"reinit_layers is {count}, but the {stack.config.layers} layers of this model share {len(blocks)} of "
            "weights, so that lower ones would be initialised again too: leave it out"
        )
    return blocks[len(blocks) - count :]


def _shared(loaded: ModelBundle, made: ModelBundle) -> dict[str, Tensor]:
    """The tensors of the old head that the new one has under the same published name, by our names in the new one."""
    old, new = (FAMILIES[each.config.family].table(each.config.model, each.config.head) for each in (loaded, made))
    known, wanted = _published(old, loaded.named_tensors(), HEAD), _published(new, made.named_tensors(), HEAD)
    names = {name for name in known.keys() & wanted.keys() if known[name].shape == wanted[name].shape}
    spare = {
        name
        for name in loaded.other_head_tensors.keys() - known.keys() & wanted.keys()
        if _fits(loaded.other_head_tensors, wanted, name)
    }
    if _answers(loaded.config.head) != _answers(made.config.head):
        names -= _published(old, loaded.named_tensors(), OUT).keys()
    spare -= _published(
        new, made.named_tensors(), OUT
    ).keys()  # what the last layer of a head that was not read answers
    spared = {name: loaded.other_head_tensors[name] for name in spare}
    return to_our_names(new, {name: known[name] for name in names} | spared)


def _fits(given: Mapping[str, Tensor], wanted: Mapping[str, Tensor], name: str) -> bool:
    return given[name].shape == wanted[name].shape


def _answers(head: Head | None) -> tuple[object, ...]:
    """What the last layer of a head answers."""
    match head:
        case Classes(labels=labels, problem_type=problem_type):
            return ("sequence_classification", labels, problem_type)
        case TokenClasses(labels=labels):
            return ("token_classification", labels)
        case NextSentence() | Pretraining():
            return ("next_sentence",)
    return (type(head),)


def _published(table: NameTable, ours: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Their names of those of our tensors whose names begin so."""
    return to_hf_names(
        replace(table, copied={}), {name: each for name, each in ours.items() if name.startswith(prefix)}
    )
