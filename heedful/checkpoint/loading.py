"""Reads a model folder in Hugging Face's format."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heedful.bundled import bundled_model
from heedful.checkpoint import hub, sentence_transformers
from heedful.checkpoint.bundle import ModelBundle, assign
from heedful.checkpoint.config import BundleConfig, read_config
from heedful.checkpoint.folder_json import read_json
from heedful.checkpoint.safetensors_files import WEIGHTS, Slot, find_tensors, read_tensors
from heedful.checkpoint.saving import FACTS, NOTES
from heedful.checkpoint.training_steps import is_training_checkpoint, with_checkpoint_weights
from heedful.checkpoint.validate import check_depth, check_names, warn_if_padding_ends_texts
from heedful.device import resolve_device
from heedful.errors import HeedfulError, HeedfulWarning, quoted
from heedful.families import FAMILIES
from heedful.families.config_reader import ConfigReader
from heedful.families.names import NameTable, claims, load_names, modern_name, save_names
from heedful.model.config import ModelConfig, Pooled, SentenceEmbedding
from heedful.model.initialise import skip_init
from heedful.tokenizer import Tokenizer
from heedful.tokenizer.sentencepiece_model import NAMES as PIECES

RUN_MODEL = "model"  # the model's folder in a run's


def load(
    name: str | Path,
    *,
    revision: str | None = None,
    head: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    ignore: Iterable[str] = (),
) -> ModelBundle:
    """Read a model folder, a run's folder, one of its checkpoints, what ships, or NAME[@REVISION] on the hub.

    `head` is the kind of head to load instead of the one in config.json: "masked_lm", "sequence_classification", ...
    Raises HeedfulError on unknown config keys (unless listed in `ignore`), on missing, unexpected or misshapen
    tensors, on pickles, and on a tokenizer that does not fit the model. The model is in eval mode.
    """
    place, folder = resolve_device(device), folder_of(name, revision)
    ignore = tuple(ignore)
    values = read_json(folder / "config.json")
    config = read_config(values, str(folder / "config.json"), head=head, ignore=ignore)
    slots: dict[str, Slot] = {}
    for key, slot in find_tensors(folder).items():
        if modern_name(key) in slots:
            raise HeedfulError(f"{folder} holds {slots[modern_name(key)].key} and {key}, two names of one tensor")
        slots[modern_name(key)] = slot
    check_depth(config.model, slots, values, folder)
    if _differ([slots[each] for each in FAMILIES[config.family].untied_tensors(values) if each in slots], dtype):
        values |= {"tie_word_embeddings": False}
        config = read_config(values, str(folder / "config.json"), head=head, ignore=ignore)
    every = slots
    config, slots, unused = _fit(config, slots, folder, chosen=head is not None)
    loaded = _empty(config, folder)
    family = FAMILIES[config.family]
    table = family.table(config.model, config.head)
    for copied, name in table.copied.items():  # transformers 4 saves the first name of what it shares
        if name not in slots and copied in slots:
            slots[name] = slots[copied]
    check_names(table, to_hf_names(table, loaded.named_tensors()), slots, values, folder)
    assign(loaded, _load_tensors(table, slots, dtype, folder), place)
    loaded.tokenizer = _load_tokenizer(folder, config.family, config.model)
    if isinstance(config.head, SentenceEmbedding):
        sentence_transformers.check_case(folder, loaded.tokenizer)
    loaded.thresholds, loaded.label_scaling, loaded.text_suffix, loaded.pairs = (_fact(folder, name) for name in FACTS)
    asked = hub.name_and_revision(name)[0]
    loaded.source = asked if os.path.isdir(name) or bundled_model(asked) else f"{asked}@{folder.name}"
    loaded.unused_tensors = unused
    if unused:
        loaded.other_head_tensors = _spare(config, every, unused, folder, dtype)
    warn_if_padding_ends_texts(config.head, loaded.tokenizer, config.hf_config, folder)
    stacks = [stack for stack in (config.model.encoder, config.model.decoder) if stack is not None]
    if dtype == torch.float16 and any(stack.norm == "rms" and stack.score_scale == 1.0 for stack in stacks):
        told = "the published models of this kind overflow in float16: load it in bfloat16 or float32"
        warnings.warn(f"{folder}: {told}", HeedfulWarning, stacklevel=2)
    if unused and head is None and not isinstance(config.head, SentenceEmbedding):
        warnings.warn(
            f"{folder}: {len(unused)} tensors belong to other heads than the one that config.json names and were not "
            f'loaded: {", ".join(unused[:4])}; load(..., head="...") takes one of {", ".join(family.kinds())}, and '
            "attach, by which fine-tuning begins, takes what its head has of them",
            HeedfulWarning,
            stacklevel=2,
        )
    loaded = with_checkpoint_weights(loaded, Path(name)) if is_training_checkpoint(Path(name)) else loaded
    return loaded.eval()


def config_of(name: str | Path, *, revision: str | None = None) -> BundleConfig:
    """What `load` would read of that folder or name, without its weights."""
    folder = folder_of(name, revision)
    return read_config(read_json(folder / "config.json"), str(folder / "config.json"))


def folder_of(name: str | Path, revision: str | None) -> Path:
    """Where the model lies, fetched if need be; a revision may stand in its name, NAME[@REVISION]."""
    folder = Path(name)
    if os.path.isfile(name):
        raise HeedfulError(f"{name} is a file; expected the folder that holds config.json and {WEIGHTS}")
    if is_training_checkpoint(folder):
        return folder_of(folder.parent.parent, revision)
    if not os.path.isdir(name):
        asked, said = hub.name_and_revision(name) if revision is None else (str(name), revision)
        return bundled_model(asked) or hub.fetch(asked, said)
    if not (folder / "config.json").exists() and (folder / RUN_MODEL / "config.json").exists():
        return folder / RUN_MODEL
    return folder


def _fit(
    config: BundleConfig, slots: dict[str, Slot], folder: Path, *, chosen: bool
) -> tuple[BundleConfig, dict[str, Slot], tuple[str, ...]]:
    """Names with the family's prefix; the head that the tensors and modules.json allow; tensors of other heads."""
    family = FAMILIES[config.family]
    bare = not any(name.startswith(family.prefix) for name in slots)
    slots = {family.inner_name(name, bare): slot for name, slot in slots.items()}
    if not chosen and (folder / sentence_transformers.MODULES).exists():
        config = replace(config, head=sentence_transformers.read_modules(folder, keeps_pooler=_has_pooler(config, slots)))
    elif (
        isinstance(config.head, Pooled) and family.architecture(config.model, config.head) == family.bare and not chosen
    ):
        config = config if _has_pooler(config, slots) else replace(config, head=None)  # saved without its pooler
    mine = family.table(config.model, config.head)
    left = slots.keys() - _claimed(mine, slots)
    unused = tuple(
        sorted({name for table in _others(config, folder) for name in left if claims(table, name)} if left else ())
    )
    return config, {name: slot for name, slot in slots.items() if name not in unused}, unused


def _others(config: BundleConfig, folder: Path) -> Iterator[NameTable]:
    """The names of the same model with each head that its family publishes."""
    family = FAMILIES[config.family]
    for entry in family.heads.values():
        keys = ConfigReader(config.hf_config, str(folder / "config.json"))
        model = entry.used_config(family.read(keys))
        yield family.table(model, entry.read(keys, model))


def _spare(
    config: BundleConfig, slots: Mapping[str, Slot], unused: Sequence[str], folder: Path, dtype: torch.dtype
) -> dict[str, Tensor]:
    """What heads that were not asked for have in this folder; parts of a body that they need beside it are left out."""
    family = FAMILIES[config.family]
    bare = not any(name.startswith(family.prefix) for name in slots)
    known = {family.inner_name(name, bare): slot for name, slot in slots.items()}
    named = {row for each in _others(config, folder) for row in each.rows if row.ours.startswith("head.")}
    heads = NameTable(rows=tuple(named))
    return read_tensors({name: known[name] for name in unused if claims(heads, name)}, dtype)


def _has_pooler(config: BundleConfig, slots: Mapping[str, Slot]) -> bool:
    family = FAMILIES[config.family]
    if family.heads[family.bare].head is not Pooled:
        return False
    return bool(_claimed(family.heads[family.bare].table(Pooled()), slots))


def _claimed(table: NameTable, slots: Mapping[str, Slot]) -> set[str]:
    return {name for name in slots if claims(table, name)}


def _empty(config: BundleConfig, folder: Path) -> ModelBundle:
    """The model without memory for its parameters."""
    try:
        with skip_init():
            return ModelBundle(config)
    except (ArithmeticError, AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise HeedfulError(f"{folder / 'config.json'} describes a model that cannot be built: {error}") from error


def _differ(slots: Sequence[Slot], dtype: torch.dtype) -> bool:
    """Whether both are there and are not the same."""
    return len(slots) == 2 and not torch.equal(*read_tensors({slot.key: slot for slot in slots}, dtype).values())


def _load_tensors(table: NameTable, slots: Mapping[str, Slot], dtype: torch.dtype, folder: Path) -> dict[str, Tensor]:
    wanted = {name: slot for name, slot in slots.items() if not table.skips(name)}
    tensors = read_tensors(wanted, dtype)
    for second, first in table.tied.items():
        if second in tensors and first in tensors and not torch.equal(tensors[second], tensors[first]):
            raise HeedfulError(
                f"{folder}: {second} and {first} should be one tensor, but they differ; "
                'if they were trained apart, say "tie_word_embeddings": false in config.json'
            )
    return to_our_names(table, tensors)


def _load_tokenizer(folder: Path, family: str, model: ModelConfig) -> Tokenizer | None:
    """The folder's tokenizer, if it has one; it must be the one that the model was saved with."""
    names = ("tokenizer.json", "vocab.txt", "vocab.json", *PIECES)
    if not any((folder / file).exists() for file in names):
        return None
    tokenizer = Tokenizer.load(folder, FAMILIES[family].sentencepiece_format)
    if tokenizer.size > model.embedding.vocabulary:
        raise HeedfulError(
            f"{folder}: the tokenizer has ids up to {tokenizer.size - 1}, but the model knows "
            f"{model.embedding.vocabulary} tokens: this is another model's tokenizer"
        )
    if (folder / NOTES).exists():
        expected = read_json(folder / NOTES).get("tokenizer")
        if expected is not None and expected != tokenizer.fingerprint:
            raise HeedfulError(
                f"{folder}: the model was saved with the tokenizer {quoted(expected)}, but the files here make "
                f"{tokenizer.fingerprint}: put the right tokenizer back, or remove {NOTES} if you changed it on purpose"
            )
    return tokenizer


def _fact(folder: Path, name: str) -> Any:
    known = read_json(folder / NOTES) if (folder / NOTES).exists() else {}
    if name == "pairs" and type(found := known.get(name)) in (bool, type(None)):
        return found
    match known.get(name, "" if name == "text_suffix" else {}):
        case str(text) if name == "text_suffix":
            return text
        case dict(found) if name not in ("text_suffix", "pairs") and all(
            type(value) in (int, float) for value in found.values()
        ):
            return {key: float(value) for key, value in found.items()}
        case other:
            kinds = {"text_suffix": "a text", "pairs": "true or false"}
            expected = kinds.get(name, "names with a number each")
            raise HeedfulError(f"{folder / NOTES}: {name} is {other!r:.80}; expected {expected}")
