"""Read config.json strictly: each key is read, known not to change the model's outputs, or an error.

`checkpoint` makes a `ConfigReader` from the file, and the `read` function of a family asks it for each value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, get_args

from heedful.errors import ModelError, did_you_mean
from heedful.model.config import Activation, ProblemType, StackConfig

_REQUIRED: Any = object()
Default = TypeVar("Default")
Word = TypeVar("Word", bound=str)

# keys that every config.json may have, and that never change the outputs of a model
IGNORED_KEYS = frozenset(
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
    sbert_ce_default_activation_function auto_map
    """.split()  # noqa: SIM905
)


_CODE = "Heedful runs no code that a folder names"
_ENCODER = "it is an encoder here"
REFUSED_KEYS: dict[str, tuple[tuple[object, ...], str]] = {  # key -> values that can be loaded, reason against others
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


class ConfigReader:
    """The values of a config.json, read key by key; `check_all_read` raises an error for keys that were not read.

    Each method raises ModelError for a missing key without default, and for a value that is not the expected one.
    """

    def __init__(self, values: Mapping[str, object], source: str) -> None:
        self.values, self.source = values, source
        self._read: set[str] = set()
        for name, (accepted, why) in REFUSED_KEYS.items():
            self.only(name, *accepted, why=why)

    def _read_value(self, name: str, default: object, expected: str, fits: Callable[[object], bool]) -> Any:
        """Return a value, or the default for a missing key.

        Args:
            expected: Description of valid values, for error messages.
            fits: Returns whether a value is valid. null is valid as well if the default is None.
        """
        self._read.add(name)
        if name not in self.values:
            if default is _REQUIRED:
                raise ModelError(f"{self.source}: {name} is missing; expected {expected}")
            return default
        value = self.values[name]
        if not fits(value) and not (value is None and default is None):
            raise ModelError(f"{self.source}: {name} is {_shortened(value)}; expected {expected}")
        return value

    def integer(
        self, name: str, default: Default = _REQUIRED, *, minimum: int = 1, maximum: int = 2**24
    ) -> int | Default:
        """Read a whole number from `minimum` to `maximum`."""
        value: int | Default = self._read_value(
            name,
            default,
            f"a whole number from {minimum} to {maximum}",
            lambda v: isinstance(v, int) and not isinstance(v, bool) and minimum <= v <= maximum,
        )
        return value

    def number(
        self, name: str, default: Default = _REQUIRED, *, minimum: float = 0.0, maximum: float = 1.0
    ) -> float | Default:
        """Read a number from `minimum` to `maximum`."""
        value: float | Default = self._read_value(
            name,
            default,
            f"a number from {minimum:g} to {maximum:g}",
            lambda v: isinstance(v, int | float) and not isinstance(v, bool) and minimum <= v <= maximum,
        )
        return float(value) if isinstance(value, int) else value

    def numbers(self, name: str, count: int, *, maximum: float) -> tuple[float, ...]:
        """Read a list of `count` positive numbers up to `maximum`."""
        values: list[float] = self._read_value(
            name,
            _REQUIRED,
            f"a list of {count} numbers above 0, up to {maximum:g}",
            lambda v: (
                isinstance(v, list)
                and len(v) == count
                and all(isinstance(x, int | float) and not isinstance(x, bool) and 0 < x <= maximum for x in v)
            ),
        )
        return tuple(map(float, values))

    def flag(self, name: str, default: Default = _REQUIRED) -> bool | Default:
        """Read true or false."""
        value: bool | Default = self._read_value(name, default, "true or false", lambda v: isinstance(v, bool))
        return value

    def choice(self, name: str, known: Mapping[str, Word], default: Default = _REQUIRED) -> Word | Default:
        """Read one of the known words.

        Args:
            known: A mapping from the words that config.json may contain to our words for them.
        """
        value: Word | Default = self._read_value(
            name, default, f"one of {', '.join(known)}", lambda v: isinstance(v, str) and v in known
        )
        return known[value] if isinstance(value, str) and value in known else value

    def text(self, name: str, default: Default = _REQUIRED) -> str | Default:
        """Read a string."""
        value: str | Default = self._read_value(name, default, "a text", lambda v: isinstance(v, str))
        return value

    def mapping(self, name: str) -> dict[str, object]:
        """Read an object."""
        value: dict[str, object] = self._read_value(name, _REQUIRED, "an object", lambda v: isinstance(v, dict))
        return value

    def divides(self, name: str, divisor: int, dividend_name: str, dividend: int) -> None:
        """Raise ModelError unless `divisor`, the value of the key `name`, divides `dividend` without a remainder."""
        if dividend % divisor:
            raise ModelError(f"{self.source}: {name} is {divisor}, which does not divide {dividend_name} {dividend}")

    def only(self, name: str, *accepted: object, why: str) -> None:
        """Raise ModelError if a key has another value than the accepted ones; the key may be missing.

        Args:
            why: Reason why other values cannot be loaded.
        """
        self._read.add(name)
        if name in self.values and self.values[name] not in accepted:
            raise ModelError(
                f"{self.source}: {name} is {_shortened(self.values[name])}; only "
                f"{', '.join(_shortened(value) for value in accepted)} can be loaded: {why}"
            )

    def labels(self) -> tuple[str, ...]:
        """Read the labels of id2label in order; without id2label, they are LABEL_0 to LABEL_{num_labels - 1}."""
        id2label = self._read_value("id2label", None, 'an object {"0": name, ...}', lambda v: isinstance(v, dict))
        # without id2label, num_labels alone could ask for any number of labels in memory
        count = self.integer("num_labels", 2, maximum=4096 if id2label is None else 10**6)
        if id2label is None:
            return tuple(f"LABEL_{index}" for index in range(count))
        if sorted(id2label) != sorted(str(index) for index in range(len(id2label))) or not id2label:
            ids = _shortened(list(id2label))
            raise ModelError(f'{self.source}: id2label has the ids {ids}; expected "0", "1", ...')
        if not all(isinstance(name, str) for name in id2label.values()):
            names = _shortened(list(id2label.values()))
            raise ModelError(f"{self.source}: id2label holds names that are not text: {names}")
        labels = tuple(id2label[str(index)] for index in range(len(id2label)))
        label2id = self._read_value("label2id", None, "an object {name: id, ...}", lambda v: isinstance(v, dict))
        inverse = {name: index for index, name in enumerate(labels)}
        if label2id is not None and label2id != inverse and len(set(labels)) == len(labels):
            raise ModelError(
                f"{self.source}: label2id {_shortened(label2id)} does not invert id2label {_shortened(id2label)}"
            )
        return labels

    def problem_type(self) -> ProblemType:
        """Read a classifier's `problem_type`; without that key, one label means regression."""
        value: ProblemType | None = self.choice("problem_type", {name: name for name in PROBLEM_TYPES}, None)
        return value or ("regression" if len(self.labels()) == 1 else "single_label_classification")

    def check_all_read(self, ignored_keys: frozenset[str], ignore: Iterable[str] = ()) -> dict[str, object]:
        """Raise ModelError for a key that was not read; returns the known keys and values, which are saved again.

        Args:
            ignored_keys: Keys that do not change the outputs of this family.
            ignore: Unknown keys that the user wants to ignore.
        """
        known = self._read | ignored_keys | IGNORED_KEYS
        if unread := [name for name in self.values if name not in known | set(ignore)]:
            first = unread[0]
            raise ModelError(
                f"{self.source}: Heedful does not know the key {_shortened(first)} (value "
                f"{_shortened(self.values[first])}){did_you_mean(first, sorted(known))} and cannot tell whether it "
                "changes what the model computes; "
                f"if it does not, remove it or pass ignore=({', '.join(map(_shortened, unread[:20]))},)"
            )
        return {name: value for name, value in self.values.items() if name in known}


def _shortened(value: object, max_chars: int = 80) -> str:
    """Return the Python notation of a value, cut off after `max_chars` characters, for error messages."""
    text = repr(value)
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"


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


def read_activation(reader: ConfigReader, name: str, default: Any = _REQUIRED) -> Activation:
    """Read the HF name of an activation, and return our name."""
    activation: Activation = reader.choice(name, _ACTIVATIONS, default)
    return activation


def activation_name(activation: Activation) -> str:
    """Return the HF name that is written for our activation."""
    return next(hf for hf, name in _ACTIVATIONS.items() if name == activation)


FULL, LOCAL = "full_attention", "sliding_attention"  # values of layer_types


def read_global_layers(reader: ConfigReader, layers: int) -> tuple[int, ...] | None:
    """Read the indices of the layers without a window from `layer_types`, or None if the key is missing or null."""
    kinds = reader.values.get("layer_types")
    if not isinstance(kinds, list):
        reader.only("layer_types", None, why=f"expected a list of {FULL} and {LOCAL}")
        return None
    if len(kinds) != layers or any(kind not in (FULL, LOCAL) for kind in kinds):
        reader.only("layer_types", None, why=f"expected {FULL} or {LOCAL} for each of {layers} layers")
    reader.only("layer_types", kinds, why="")  # marks the key as read
    return tuple(layer for layer, kind in enumerate(kinds) if kind == FULL)


def layer_types(stack: StackConfig) -> list[str]:
    """Return the values of `layer_types` for a stack."""
    return [FULL if stack.window_of(layer) is None else LOCAL for layer in range(stack.layers)]
