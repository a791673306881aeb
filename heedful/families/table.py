"""The engine behind families: their config keys read strictly, and their tensor names mapped both ways.

A family is data: how their config.json reads as ours, and rows (their name, our name[, how]). Names stand for
modules, ".weight" and ".bias" follow along; {} is a layer number; several of their names joined into one of ours
stand in a tuple. Every key is claimed by exactly one row, in both directions; nothing is matched by substring.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from heedful.errors import HeedfulError, did_you_mean
from heedful.model.config import Activation, Head, ModelConfig, ProblemType, SentenceEmbedding

# -- names ----------------------------------------------------------------------------------------------------


class How(NamedTuple):
    """A reversible way to make our tensor of theirs."""

    load: Callable[[list[Tensor]], Tensor]
    save: Callable[[Tensor, int], list[Tensor]]  # ours, and how many of theirs


SAME = How(lambda theirs: theirs[0], lambda ours, count: [ours])
JOIN = How(torch.cat, lambda ours, count: list(ours.chunk(count)))  # one below the other: q, k, v
FLIP = How(  # a matrix [in, out]; vectors stay
    lambda theirs: theirs[0].T if theirs[0].ndim == 2 else theirs[0],
    lambda ours, count: [ours.T if ours.ndim == 2 else ours],
)
REVERSE = How(lambda theirs: theirs[0].flip(0), lambda ours, count: [ours.flip(0)])  # rows from last to first
FLAT = How(lambda theirs: theirs[0].flatten(), lambda ours, count: [ours[None, None]])  # a vector as [1, 1, width]


def heads_in(heads: int) -> How:
    """Projections to heads, [width, heads, head width] each, one below the other as [heads x head width, width]."""
    return How(
        lambda theirs: torch.cat([each.flatten(1).T for each in theirs]),
        lambda ours, count: [each.T.unflatten(1, (heads, -1)) for each in ours.chunk(count)],
    )


def heads_out(heads: int) -> How:
    """A projection from heads, [width, heads, head width], as [width, heads x head width]."""
    return How(lambda theirs: theirs[0].flatten(1), lambda ours, count: [ours.unflatten(1, (heads, -1))])


class Row(NamedTuple):
    """Their name or names, our name, and how."""

    theirs: tuple[str, ...]
    ours: str
    how: How = SAME


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """The names of one model with one head."""

    rows: tuple[Row, ...]
    tied: Mapping[str, str] = field(default_factory=dict)  # a second name -> the name it always equals; not saved
    copied: Mapping[str, str] = field(default_factory=dict)  # a name nobody reads -> the name it is saved as a copy of
    ignored: frozenset[str] = frozenset()  # buffers that older versions saved; {} is a layer number here too

    def skips(self, name: str) -> bool:
        """Whether their tensor of that name is not read."""
        return name in self.copied or any(_pattern(template).fullmatch(name) for template in self.ignored)

    def joined(self, other: Table) -> Table:
        """The rows of both."""
        return Table(
            rows=self.rows + other.rows,
            tied={**self.tied, **other.tied},
            copied={**self.copied, **other.copied},
            ignored=self.ignored | other.ignored,
        )


def rows(*given: tuple[Any, ...]) -> tuple[Row, ...]:
    """Rows from plain tuples; a single name needs no tuple of its own."""
    return tuple(Row((row[0],) if isinstance(row[0], str) else row[0], *row[1:]) for row in given)


@cache
def _pattern(template: str) -> re.Pattern[str]:
    escaped = re.escape(template).replace(r"\{\}", r"(0|[1-9]\d*)").replace(r"\{any\}", "(.+?)")
    return re.compile(escaped + r"(\.weight|\.bias)?")


OLD_SUFFIXES = {".gamma": ".weight", ".beta": ".bias"}  # of norms, before 2019


def modern_name(name: str) -> str:
    """The name with .gamma and .beta written as .weight and .bias."""
    stem, dot, last = name.rpartition(".")
    return stem + OLD_SUFFIXES.get(dot + last, dot + last)


def claims(table: Table, name: str) -> bool:
    """Whether the table knows their name."""
    if name in table.tied or table.skips(name):
        return True
    return any(_pattern(template).fullmatch(name) for row in table.rows for template in row.theirs)


def load_names(table: Table, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors under our names."""
    found: dict[tuple[int, tuple[str, ...]], dict[int, Tensor]] = defaultdict(dict)
    unclaimed = []
    for name, tensor in theirs.items():
        if name in table.tied or table.skips(name):
            continue
        claims = [
            (number, part, match.groups(""))
            for number, row in enumerate(table.rows)
            for part, template in enumerate(row.theirs)
            if (match := _pattern(template).fullmatch(name))
        ]
        if len(claims) != 1:
            unclaimed.append(f"{name} (claimed {len(claims)} times)")
            continue
        number, part, groups = claims[0]
        found[number, groups][part] = tensor
    if unclaimed:
        raise HeedfulError(f"tensors that no single row of the name table claims: {_some(unclaimed)}")
    ours = {}
    for (number, (*numbers, suffix)), parts in found.items():
        row = table.rows[number]
        if missing := [name for part, name in enumerate(row.theirs) if part not in parts]:
            raise HeedfulError(f"{_fill(row.ours, numbers)}{suffix} lacks its parts {_some(missing)}")
        ours[_fill(row.ours, numbers) + suffix] = row.how.load([parts[part] for part in range(len(parts))]).contiguous()
    return ours


def save_names(table: Table, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors under their names."""
    theirs: dict[str, Tensor] = {}
    for name, tensor in ours.items():
        claims = [(row, match.groups("")) for row in table.rows if (match := _pattern(row.ours).fullmatch(name))]
        assert len(claims) == 1, f"{name} is claimed by {len(claims)} rows"
        row, (*numbers, suffix) = claims[0]
        for template, part in zip(row.theirs, row.how.save(tensor, len(row.theirs)), strict=True):
            theirs[_fill(template, numbers) + suffix] = part
    return theirs | {copy: theirs[name].clone() for copy, name in table.copied.items()}


def _fill(template: str, numbers: Iterable[str]) -> str:
    return template.replace("{any}", "{}").format(*numbers)


def _some(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


# -- config keys ----------------------------------------------------------------------------------------------

_REQUIRED: Any = object()

# what every configuration may hold and what never changes what a model computes
IRRELEVANT = frozenset(
    """
    architectures model_type transformers_version dtype torch_dtype _name_or_path name_or_path _commit_hash
    bos_token_id eos_token_id sep_token_id cls_token_id mask_token_id decoder_start_token_id forced_bos_token_id
    forced_eos_token_id tokenizer_class prefix task_specific_params use_cache output_past gradient_checkpointing
    output_attentions output_hidden_states output_scores return_dict return_dict_in_generate torchscript tf_legacy_loss
    use_bfloat16 chunk_size_feed_forward max_length min_length do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences remove_invalid_values begin_suppress_tokens
    suppress_tokens exponential_decay_length_penalty finetuning_task num_labels _num_labels label2id id2label
    problem_type is_encoder_decoder language model_max_length directionality tie_word_embeddings
    cross_attention_hidden_size _attn_implementation_autoset sentence_transformers
    """.split()  # noqa: SIM905
)


_CODE = "Heedful runs no code that a folder names"
_ENCODER = "it is an encoder here"
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {  # key -> the values that can be loaded, why no others
    "auto_map": ((None, {}), _CODE),
    "custom_pipelines": ((None, {}), _CODE),
    "trust_remote_code": ((None, False), _CODE),
    "_attn_implementation_internal": ((None, "eager", "sdpa", "flash_attention_2"), _CODE),
    "_experts_implementation_internal": ((None,), _CODE),
    "quantization_config": ((None,), "write the weights out unquantised first"),
    "pruned_heads": ((None, {}), "write the weights out at full size first"),
    "is_decoder": ((None, False), _ENCODER),
    "add_cross_attention": ((None, False), _ENCODER),
    "tie_encoder_decoder": ((None, False), _ENCODER),
}

PROBLEM_TYPES: tuple[ProblemType, ...] = get_args(ProblemType)


class Keys:
    """Their config.json, read key by key; what nobody read is refused at the end."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values, self.source = values, source
        self._read: set[str] = set()
        for name, (accepted, why) in REFUSED.items():
            self.only(name, *accepted, why=why)

    def _take(self, name: str, default: Any, expected: str, fits: Callable[[Any], bool]) -> Any:
        self._read.add(name)
        if name not in self.values:
            if default is _REQUIRED:
                raise HeedfulError(f"{self.source}: {name} is missing; expected {expected}")
            return default
        value = self.values[name]
        if not fits(value) and not (value is None and default is None):
            raise HeedfulError(f"{self.source}: {name} is {_short(value)}; expected {expected}")
        return value

    def integer(self, name: str, default: Any = _REQUIRED, *, least: int = 1, most: int = 2**24) -> Any:
        """A whole number from least to most."""
        return self._take(
            name,
            default,
            f"a whole number from {least} to {most}",
            lambda v: isinstance(v, int) and not isinstance(v, bool) and least <= v <= most,
        )

    def number(self, name: str, default: Any = _REQUIRED, *, least: float = 0.0, most: float = 1.0) -> Any:
        """A number from least to most."""
        value = self._take(
            name,
            default,
            f"a number from {least:g} to {most:g}",
            lambda v: isinstance(v, int | float) and not isinstance(v, bool) and least <= v <= most,
        )
        return None if value is None else float(value)

    def flag(self, name: str, default: Any = _REQUIRED) -> Any:
        """true or false."""
        return self._take(name, default, "true or false", lambda v: isinstance(v, bool))

    def choice(self, name: str, known: Mapping[str, str], default: Any = _REQUIRED) -> Any:
        """One of the known words, translated to ours."""
        value = self._take(name, default, f"one of {', '.join(known)}", lambda v: isinstance(v, str) and v in known)
        return known.get(value, value) if isinstance(value, str) else value

    def mapping(self, name: str) -> dict[str, Any]:
        """An object of its own."""
        found: dict[str, Any] = self._take(name, _REQUIRED, "an object", lambda v: isinstance(v, dict))
        return found

    def divides(self, name: str, divisor: int, of: str, value: int) -> None:
        """Refuse a divisor that leaves a rest."""
        if value % divisor:
            raise HeedfulError(f"{self.source}: {name} is {divisor}, which does not divide {of} {value}")

    def only(self, name: str, *accepted: Any, why: str) -> None:
        """A key that Heedful reads just to refuse every value but these."""
        self._read.add(name)
        if name in self.values and self.values[name] not in accepted:
            raise HeedfulError(
                f"{self.source}: {name} is {_short(self.values[name])}; only "
                f"{', '.join(_short(each) for each in accepted)} can be loaded: {why}"
            )

    def labels(self) -> tuple[str, ...]:
        """Their id2label in order, or LABEL_0, LABEL_1, ... for num_labels (2 where it is not given)."""
        given = self._take("id2label", None, 'an object {"0": name, ...}', lambda v: isinstance(v, dict))
        count = self.integer("num_labels", 2, most=4096 if given is None else 10**6)  # unnamed ones take memory
        if given is None:
            return tuple(f"LABEL_{number}" for number in range(count))
        if sorted(given) != sorted(str(number) for number in range(len(given))) or not given:
            raise HeedfulError(f'{self.source}: id2label has the ids {_short(list(given))}; expected "0", "1", ...')
        if not all(isinstance(name, str) for name in given.values()):
            raise HeedfulError(f"{self.source}: id2label holds names that are not text: {_short(list(given.values()))}")
        labels = tuple(given[str(number)] for number in range(len(given)))
        named = self._take("label2id", None, "an object {name: id, ...}", lambda v: isinstance(v, dict))
        if (
            named is not None
            and named != {name: number for number, name in enumerate(labels)}
            and len(set(labels)) == len(labels)
        ):
            raise HeedfulError(f"{self.source}: label2id {_short(named)} does not invert id2label {_short(given)}")
        return labels

    def problem_type(self) -> ProblemType:
        """Return a classifier's `problem_type`; without that key, one label means regression."""
        found: ProblemType | None = self.choice("problem_type", {name: name for name in PROBLEM_TYPES}, None)
        return found or ("regression" if len(self.labels()) == 1 else "single_label_classification")

    def done(self, irrelevant: frozenset[str], ignore: Iterable[str] = ()) -> dict[str, Any]:
        """Refuse keys that nobody read, but those to ignore; the others are what saving keeps."""
        known = self._read | irrelevant | IRRELEVANT
        ignored = set(ignore)
        if unread := [name for name in self.values if name not in known | ignored]:
            first = unread[0]
            raise HeedfulError(
                f"{self.source}: Heedful does not know the key {_short(first)} (value {_short(self.values[first])})"
                f"{did_you_mean(first, sorted(known))} and cannot tell whether it changes what the model computes; "
                f"if it does not, remove it or pass ignore=({', '.join(map(_short, unread[:20]))},)"
            )
        return {name: value for name, value in self.values.items() if name in known}


def _short(value: Any, most: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= most else text[: most - 1] + "…"


_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}


def read_activation(keys: Keys, name: str, default: Any = _REQUIRED) -> Activation:
    """Their name of an activation, as ours."""
    found: Activation = keys.choice(name, _ACTIVATIONS, default)
    return found


def activation_name(activation: Activation) -> str:
    """Our activation by their first name for it."""
    return next(theirs for theirs, ours in _ACTIVATIONS.items() if ours == activation)


# -- families ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadEntry:
    """One of their architectures: our head, and how its settings and tensors are called there."""

    head: type
    read: Callable[[Keys, ModelConfig], Head | None]
    write: Callable[[Any], dict[str, Any]] = lambda head: {}
    table: Callable[[Any], Table] = lambda head: Table(rows=())
    encoder_only: bool = False  # of a family with encoder and decoder: it has no decoder
    prefix: str | None = None  # before the names of the body, where it is not the family's
    name: str | None = None  # our name for it, where the head's kind is not enough

    @property
    def kind(self) -> str:
        """Our name for it."""
        if self.name or self.head is type(None):
            return self.name or "none"
        return next(str(each.default) for each in fields(self.head) if each.name == "kind")

    def part(self, model: ModelConfig) -> ModelConfig:
        """What it uses of the whole model."""
        return replace(model, decoder=None, start=None) if self.encoder_only else model


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A model_type: how its config.json reads and is written, what its tensors are called, its published sizes."""

    prefix: str  # before the names of the body, except in folders of the bare model
    read: Callable[[Keys], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]
    body: Callable[[ModelConfig], Table]
    heads: Mapping[str, HeadEntry]  # by their architecture; the first is the bare model
    irrelevant: frozenset[str] = frozenset()
    sizes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # published name -> config.json
    pieces: Mapping[str, Any] | None = None  # what its SentencePiece models do not say (see tokenizer/pieces.py)
    special: Mapping[str, str] = field(default_factory=dict)  # ids that a fresh config.json names -> what they are for
    apart: Callable[[Mapping[str, Any]], tuple[str, ...]] = lambda values: ()  # two tied tensors that may yet differ

    @property
    def bare(self) -> str:
        """Their name of the model without a task."""
        return next(iter(self.heads))

    def architecture(self, model: ModelConfig, head: Head | None) -> str:
        """Their name of the model with that head; sentence embeddings are read off the model without a task."""
        none = isinstance(head, SentenceEmbedding) or head is None
        fitting = [name for name, entry in self.heads.items() if entry.head is (type(None) if none else type(head))]
        if none and not fitting:
            return self.bare  # it has a pooler
        if not fitting:
            assert head is not None
            raise HeedfulError(f'this family has no published head "{head.kind}"; it has {", ".join(self.kinds())}')
        if any(entry.encoder_only for entry in self.heads.values()):
            fitting = [name for name in fitting if self.heads[name].encoder_only == (model.decoder is None)]
        if not fitting:
            assert head is not None
            raise HeedfulError(f'the head "{head.kind}" of this family reads the decoder, and this model has none')
        return fitting[0]

    def ids(self, special: object) -> dict[str, int]:
        """The special tokens of a fresh model, which transformers would take for the published ones' else."""
        found = {key: getattr(special, role) for key, role in self.special.items()}
        return {key: id for key, id in found.items() if id is not None}

    def kinds(self) -> dict[str, str]:
        """Our name of each head -> their architecture."""
        return {entry.kind: name for name, entry in self.heads.items()}

    def table(self, model: ModelConfig, head: Head | None) -> Table:
        """The names of the body and of that head, as in a folder with a task."""
        body = self.body(model)
        if head is None or (isinstance(head, SentenceEmbedding) and not head.keeps_pooler):
            return body
        return body.joined(self.heads[self.architecture(model, head)].table(head))

    def inner_name(self, name: str, bare: bool) -> str:
        """The name that the table has for a name in a folder; bare: none of its names has the family's prefix."""
        for entry in self.heads.values():
            if entry.prefix and name.startswith(entry.prefix):
                return name.removeprefix(entry.prefix)
        return self.prefix + name if bare else name

    def outer_names(self, model: ModelConfig, head: Head | None, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same tensors by the names that they have in a folder of that model with that head."""
        architecture = self.architecture(model, head)
        if architecture == self.bare:
            return {name.removeprefix(self.prefix): tensor for name, tensor in theirs.items()}
        prefix, body = self.heads[architecture].prefix or "", self.body(model)
        return {prefix + name if claims(body, name) else name: tensor for name, tensor in theirs.items()}


# -- what is published ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Portrait:
    """A family beside others: what cannot be read off its configurations. Results are of `best`."""

    name: str
    kind: str  # its model_type
    sizes: tuple[str, ...]  # that are shown
    objective: str
    paper: str
    best: str = ""  # the size whose results are given
    results: str = ""  # published ones; "": none that are sure
    source: str = ""  # of them
    records: tuple[str, ...] = ()  # names of recorded benchmarks that measure this kind of model
