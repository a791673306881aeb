"""Layer 4: a Hugging Face folder in and out, exactly: config, tensors, tokenizer, heads and sentence embeddings."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from heedful.checkpoint import hub, sentences
from heedful.checkpoint.belonging import check_depth, check_names, warn_of_end_as_padding
from heedful.checkpoint.files import WEIGHTS, Slot, find_tensors, read_json, read_tensors, whole_folder
from heedful.checkpoint.steps import at_step, is_step
from heedful.device import device_of
from heedful.errors import HeedfulError, HeedfulWarning, did_you_mean, quoted
from heedful.families import FAMILIES
from heedful.families.table import Family, Keys, Table, claims, load_names, modern_name, save_names
from heedful.model.config import Head, Learned, ModelConfig, NextToken, Pooled, SentenceEmbedding
from heedful.model.heads import make_head, read_of
from heedful.model.initialise import initialise, undrawn
from heedful.model.recurrent import make_model
from heedful.model.trace import Trace
from heedful.nn.linear import Laid, Panels, Rounded
from heedful.packed import Packed
from heedful.shipped import shipped
from heedful.tokenizer import Tokenizer
from heedful.tokenizer.pieces import NAMES as PIECES

RUN_MODEL = "model"  # the model's folder in a run's
NOTES = "heedful.json"  # what transformers has no place for: the tokenizer's fingerprint, and what FACTS are
FACTS = ("thresholds", "label_scaling", "text_suffix", "pairs")  # of Loaded
UNSET: tuple[Any, ...] = ({}, "", None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """What a folder says: its model_type, our model and head, and config.json as it was read."""

    family: str
    model: ModelConfig
    head: Head | None = None
    origin: Mapping[str, Any] = field(default_factory=dict)


class Loaded(nn.Module):
    """A model, the head that its folder names, and its tokenizer."""

    def __init__(self, config: Config, tokenizer: Tokenizer | None = None, source: str = "") -> None:
        super().__init__()
        self.config, self.tokenizer, self.source = config, tokenizer, source
        self.unused: tuple[str, ...] = ()  # tensors of the folder that belong to other heads
        self.spare: dict[str, Tensor] = {}  # of these, what other heads have, by published names: for `attach`
        self.thresholds: dict[str, float] = {}  # of answers: calibrated by label, or "no_answer"; "most" tokens
        self.label_scaling: dict[str, float] = {}  # "mean" and "std" of numbers, "low" and "high" of scores of pairs
        self.text_suffix = ""  # appended to a text that a decoder continues
        self.pairs: bool | None = None  # whether the texts that a classifier learned were pairs; None: not known
        model = config.model
        self.model = make_model(model)
        self.head = None if config.head is None else make_head(config.head, self.model)
        self.settle: Callable[[], None] = _nothing  # while it is trained: all weights become those of the last step

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the weights of the last step."""
        self.settle()
        return self.__dict__.copy()

    def forward(self, batch: Packed, target: Packed | None = None, *, trace: Trace | None = None) -> Any:
        """The head's outputs, or the last hidden states where there is no head."""
        return self.rows(batch, target, trace=trace) if self.head is None else self.said(batch, target, trace=trace)

    def said(
        self, batch: Packed, target: Packed | None = None, *, trace: Trace | None = None, wanted: Tensor | None = None
    ) -> Any:
        """The head's outputs; of the wanted rows alone, where it scores rows. No more is computed than it reads."""
        assert self.head is not None
        read = batch if target is None else target
        if wanted is None:
            wanted, read = read_of(self.head, read)
        return self.head(self.rows(batch, target, trace=trace, wanted=wanted), read)

    def rows(
        self, batch: Packed, target: Packed | None = None, *, trace: Trace | None = None, wanted: Tensor | None = None
    ) -> Tensor:
        """The last hidden states, all or the wanted; a decoder whose head reads the encoder's text reads it shifted."""
        start = self.config.model.start
        if target is None and start is not None and not self.needs_target:
            target = batch.shifted(start)
        last: Tensor = self.model(batch, target, trace=trace, wanted=wanted)
        return last

    @property
    def needs_target(self) -> bool:
        """Whether there is a decoder beside the encoder that reads a text of its own; else it reads the same one."""
        head, model = self.config.head, self.config.model
        both = model.reads and model.writes
        return both and (model.start is None or head is None or isinstance(head, NextToken))

    def count(self) -> int:
        """How many parameters there are; what is shared counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def limit(self) -> int | None:
        """How many tokens the model reads at once; None: any number."""
        limits = (self.limit_written, self.config.model.looks_at)
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def limit_written(self) -> int | None:
        """How many tokens a text may have that the model writes, or learns to; None: any number."""
        place, head = self.config.model.embedding.positions, self.config.head
        limits = [
            self.tokenizer.max_length if self.tokenizer else None,
            place.count - place.offset if isinstance(place, Learned) else None,
            head.max_length if isinstance(head, SentenceEmbedding) else None,
        ]
        return min((limit for limit in limits if limit is not None), default=None)

    def named(self) -> dict[str, Tensor]:
        """Parameters by the names that families' tables use; what is shared stands once.

        Also those of layers that were exchanged to answer: as they were loaded, or in whole numbers and their scales.
        """
        self.settle()
        exchanged = ((name, each) for name, each in self.named_modules() if isinstance(each, Laid | Panels | Rounded))
        parts = {f"{name}.{part}": each for name, layer in exchanged for part, each in layer.parts().items()}
        return {name.removeprefix("model."): each for name, each in [*self.named_parameters(), *parts.items()]}


def _nothing() -> None:
    pass


def create(config: Config, tokenizer: Tokenizer | None = None, *, seed: int = 0) -> Loaded:
    """A model with fresh weights, drawn by config.model.initialisation from the seed."""
    loaded = Loaded(config, tokenizer, source="created")
    initialise(loaded, config.model.initialisation, torch.Generator().manual_seed(seed))
    return loaded


def load(
    name: str | Path,
    *,
    revision: str | None = None,
    head: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    ignore: Iterable[str] = (),
) -> Loaded:
    """Read a model folder, a run's folder, one of its checkpoints, what ships, or NAME[@REVISION] on the hub.

    `head` is the kind of head to load instead of the one in config.json: "masked_lm", "sequence_classification", ...
    Raises HeedfulError on unknown config keys (unless listed in `ignore`), on missing, unexpected or misshapen
    tensors, on pickles, and on a tokenizer that does not fit the model. The model is in eval mode.
    """
    place, folder = device_of(device), folder_of(name, revision)
    ignore = tuple(ignore)
    values = read_json(folder / "config.json")
    config = read_config(values, str(folder / "config.json"), head=head, ignore=ignore)
    slots: dict[str, Slot] = {}
    for key, slot in find_tensors(folder).items():
        if modern_name(key) in slots:
            raise HeedfulError(f"{folder} holds {slots[modern_name(key)].key} and {key}, two names of one tensor")
        slots[modern_name(key)] = slot
    check_depth(config.model, slots, values, folder)
    if _differ([slots[each] for each in FAMILIES[config.family].apart(values) if each in slots], dtype):
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
    check_names(table, save_names(table, loaded.named()), slots, values, folder)
    assign(loaded, _load_tensors(table, slots, dtype, folder), place)
    loaded.tokenizer = _load_tokenizer(folder, config.family, config.model)
    if isinstance(config.head, SentenceEmbedding):
        sentences.check_case(folder, loaded.tokenizer)
    loaded.thresholds, loaded.label_scaling, loaded.text_suffix, loaded.pairs = (_fact(folder, name) for name in FACTS)
    asked = hub.name_and_revision(name)[0]
    loaded.source = asked if os.path.isdir(name) or shipped(asked) else f"{asked}@{folder.name}"
    loaded.unused = unused
    if unused:
        loaded.spare = _spare(config, every, unused, folder, dtype)
    warn_of_end_as_padding(config.head, loaded.tokenizer, config.origin, folder)
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
    loaded = at_step(loaded, Path(name)) if is_step(Path(name)) else loaded
    return loaded.eval()


def config_of(name: str | Path, *, revision: str | None = None) -> Config:
    """What `load` would read of that folder or name, without its weights."""
    folder = folder_of(name, revision)
    return read_config(read_json(folder / "config.json"), str(folder / "config.json"))


def folder_of(name: str | Path, revision: str | None) -> Path:
    """Where the model lies, fetched if need be; a revision may stand in its name, NAME[@REVISION]."""
    folder = Path(name)
    if os.path.isfile(name):
        raise HeedfulError(f"{name} is a file; expected the folder that holds config.json and {WEIGHTS}")
    if is_step(folder):
        return folder_of(folder.parent.parent, revision)
    if not os.path.isdir(name):
        asked, said = hub.name_and_revision(name) if revision is None else (str(name), revision)
        return shipped(asked) or hub.fetch(asked, said)
    if not (folder / "config.json").exists() and (folder / RUN_MODEL / "config.json").exists():
        return folder / RUN_MODEL
    return folder


def read_config(
    values: Mapping[str, Any], source: str, *, head: str | None = None, ignore: Iterable[str] = ()
) -> Config:
    """Their config.json as ours; every key is read, known not to matter, or refused."""
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        close = did_you_mean(kind, list(FAMILIES)) if isinstance(kind, str) else ""
        raise HeedfulError(f"{source}: model_type is {quoted(kind)}{close}; Heedful reads {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    keys = Keys(values, source)
    whole = family.read(keys)
    entry = family.heads[_architecture(family, values, source, head)]
    model = entry.part(whole)
    return Config(family=kind, model=model, head=entry.read(keys, model), origin=keys.done(family.irrelevant, ignore))


def _architecture(family: Family, values: Mapping[str, Any], source: str, head: str | None) -> str:
    if head is not None:
        if head not in family.kinds():
            raise HeedfulError(
                f"{source}: there is no head {head!r}{did_you_mean(head, list(family.kinds()))}; "
                f"this family has {', '.join(family.kinds())}"
            )
        chosen: str = family.kinds()[head]
        return chosen
    given = values.get("architectures") or [family.bare]
    if not isinstance(given, list) or len(given) != 1 or given[0] not in list(family.heads):
        raise HeedfulError(f"{source}: architectures is {quoted(given)}; expected one of {', '.join(family.heads)}")
    return str(given[0])


def _fit(
    config: Config, slots: dict[str, Slot], folder: Path, *, chosen: bool
) -> tuple[Config, dict[str, Slot], tuple[str, ...]]:
    """Names with the family's prefix; the head that the tensors and modules.json allow; tensors of other heads."""
    family = FAMILIES[config.family]
    bare = not any(name.startswith(family.prefix) for name in slots)
    slots = {family.inner_name(name, bare): slot for name, slot in slots.items()}
    if not chosen and (folder / sentences.MODULES).exists():
        config = replace(config, head=sentences.read(folder, keeps_pooler=_has_pooler(config, slots)))
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


def _others(config: Config, folder: Path) -> Iterator[Table]:
    """The names of the same model with each head that its family publishes."""
    family = FAMILIES[config.family]
    for entry in family.heads.values():
        keys = Keys(config.origin, str(folder / "config.json"))
        model = entry.part(family.read(keys))
        yield family.table(model, entry.read(keys, model))


def _spare(
    config: Config, slots: Mapping[str, Slot], unused: Sequence[str], folder: Path, dtype: torch.dtype
) -> dict[str, Tensor]:
    """What heads that were not asked for have in this folder; parts of a body that they need beside it are left out."""
    family = FAMILIES[config.family]
    bare = not any(name.startswith(family.prefix) for name in slots)
    known = {family.inner_name(name, bare): slot for name, slot in slots.items()}
    named = {row for each in _others(config, folder) for row in each.rows if row.ours.startswith("head.")}
    heads = Table(rows=tuple(named))
    return read_tensors({name: known[name] for name in unused if claims(heads, name)}, dtype)


def _has_pooler(config: Config, slots: Mapping[str, Slot]) -> bool:
    family = FAMILIES[config.family]
    if family.heads[family.bare].head is not Pooled:
        return False
    return bool(_claimed(family.heads[family.bare].table(Pooled()), slots))


def _claimed(table: Table, slots: Mapping[str, Slot]) -> set[str]:
    return {name for name in slots if claims(table, name)}


def _empty(config: Config, folder: Path) -> Loaded:
    """The model without memory for its parameters."""
    try:
        with undrawn():
            return Loaded(config)
    except (ArithmeticError, AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise HeedfulError(f"{folder / 'config.json'} describes a model that cannot be built: {error}") from error


def _differ(slots: Sequence[Slot], dtype: torch.dtype) -> bool:
    """Whether both are there and are not the same."""
    return len(slots) == 2 and not torch.equal(*read_tensors({slot.key: slot for slot in slots}, dtype).values())


def _load_tensors(table: Table, slots: Mapping[str, Slot], dtype: torch.dtype, folder: Path) -> dict[str, Tensor]:
    wanted = {name: slot for name, slot in slots.items() if not table.skips(name)}
    tensors = read_tensors(wanted, dtype)
    for second, first in table.tied.items():
        if second in tensors and first in tensors and not torch.equal(tensors[second], tensors[first]):
            raise HeedfulError(
                f"{folder}: {second} and {first} should be one tensor, but they differ; "
                'if they were trained apart, say "tie_word_embeddings": false in config.json'
            )
    return load_names(table, tensors)


def assign(loaded: Loaded, tensors: Mapping[str, Tensor], device: torch.device | str) -> None:
    """Put the tensors in the place of parameters, in every module that shares them."""
    given = loaded.named()
    assert tensors.keys() == given.keys(), tensors.keys() ^ given.keys()
    fresh = {
        id(given[name]): nn.Parameter(tensor.to(device), requires_grad=given[name].requires_grad)
        for name, tensor in tensors.items()
    }
    for module in loaded.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                setattr(module, name, fresh[id(parameter)])  # recurrent nets keep a list of theirs, too


def _load_tokenizer(folder: Path, family: str, model: ModelConfig) -> Tokenizer | None:
    """The folder's tokenizer, if it has one; it must be the one that the model was saved with."""
    names = ("tokenizer.json", "vocab.txt", "vocab.json", *PIECES)
    if not any((folder / file).exists() for file in names):
        return None
    tokenizer = Tokenizer.load(folder, FAMILIES[family].pieces)
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


def save(loaded: Loaded, folder: str | Path, *, overwrite: bool = False) -> None:
    """Write a Hugging Face folder that transformers (and, for sentence embeddings, sentence-transformers) loads.

    It appears whole or not at all. A model_type of "heedful" is read by Heedful alone. A model that answers in int8 is
    refused: its weights are rounded.
    """
    if any(isinstance(each, Rounded) for each in loaded.modules()):
        raise HeedfulError(f"{loaded.source} answers in int8, its weights are rounded: load it anew, and save that")
    config, family = loaded.config, FAMILIES[loaded.config.family]
    table = family.table(config.model, config.head)
    theirs = save_names(table, {name: tensor.detach() for name, tensor in loaded.named().items()})
    theirs = family.outer_names(config.model, config.head, theirs)
    dtype = next(iter(theirs.values())).dtype
    with whole_folder(Path(folder), overwrite=overwrite) as temporary:
        save_file(
            {name: tensor.cpu().contiguous() for name, tensor in theirs.items()},
            temporary / WEIGHTS,
            metadata={"format": "pt"},
        )
        ids = {} if config.origin or loaded.tokenizer is None else family.ids(loaded.tokenizer.special)
        written = ids | write_config(config) | {"dtype": str(dtype).removeprefix("torch.")}
        _write_json(temporary / "config.json", written)
        notes: dict[str, Any] = {}
        if loaded.tokenizer is not None:
            loaded.tokenizer.save(temporary, types=config.model.tells_types)
            notes["tokenizer"] = loaded.tokenizer.fingerprint
        if isinstance(config.head, SentenceEmbedding):
            sentences.write(temporary, config.head, config.model.width)
        notes |= {name: fact for name in FACTS if (fact := getattr(loaded, name)) not in UNSET}
        _write_json(temporary / NOTES, notes)


def write_config(config: Config) -> dict[str, Any]:
    """Our config as their config.json; one that was only read comes out as it went in."""
    family = FAMILIES[config.family]
    origin = {name: value for name, value in config.origin.items() if name != "torch_dtype"}
    architecture = family.architecture(config.model, config.head)
    entry = family.heads[architecture]
    if origin and (origin.get("architectures") or [family.bare]) == [architecture]:
        keys = Keys(origin, "")
        same_model = entry.part(family.read(keys)) == config.model
        no_change = isinstance(config.head, SentenceEmbedding | None) or entry.read(keys, config.model) == config.head
        if same_model and no_change:
            return origin
    written = family.write(config.model)
    if config.head is not None and not isinstance(config.head, SentenceEmbedding):
        written |= entry.write(config.head)
    stale = {"id2label", "label2id", "num_labels", "problem_type", "head"}  # of the head that was read
    kept = {name: value for name, value in origin.items() if name not in stale}
    return kept | written | {"model_type": config.family, "architectures": [architecture]}


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
