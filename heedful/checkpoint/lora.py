"""LoRA adapters (Hu et al. 2022, arXiv:2106.09685) in peft's format, merged into the weights of their base model.

A weight of the model becomes W + s B A with s = alpha / r, or s = alpha / sqrt(r) with use_rslora (Kalajdzievski 2023,
arXiv:2312.03732). Other tensors of the adapter (heads in modules_to_save, biases) replace those of the model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from heedful.checkpoint.config import read_config
from heedful.checkpoint.folder_json import read_folder_json
from heedful.checkpoint.safetensors_files import TensorEntry, find_file_tensors, read_tensors
from heedful.errors import ModelError, quoted
from heedful.families import FAMILIES
from heedful.families.config_reader import ConfigReader
from heedful.families.family import Family
from heedful.families.names import NameTable
from heedful.model.config import Classes, TokenClasses

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_KINDS = {  # task_type -> kind of head
    "SEQ_CLS": "sequence_classification",
    "TOKEN_CLS": "token_classification",
    "QUESTION_ANS": "question_answering",
    "CAUSAL_LM": "language_model",
    "SEQ_2_SEQ_LM": "language_model",
}
_NOT_PLAIN = "only plain LoRA is supported: merge the adapter with the library that made it"
_PLAIN_VALUES: dict[str, tuple[object, ...]] = {  # key -> values with which the adapter is plain LoRA
    "peft_type": ("LORA",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),  # other values change the base model's weights
    **dict.fromkeys(("use_dora", "lora_bias", "use_qalora", "use_bdlora", "ensure_weight_tying"), (False, None)),
    **dict.fromkeys(("layer_replication", "target_parameters", "trainable_token_indices"), (None, [], {})),
    **dict.fromkeys(("alora_invocation_tokens", "arrow_config", "kasa_config", "monteclora_config"), (None,)),
    **dict.fromkeys(("velora_config", "megatron_config"), (None,)),
}
_IGNORED = frozenset(  # keys about training, or whose values follow from the names of the tensors
    {
        *("auto_mapping", "bias", "corda_config", "eva_config", "exclude_modules", "inference_mode", "layers_pattern"),
        *("layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core", "modules_to_save"),
        *("peft_version", "qalora_group_size", "runtime_config", "target_modules"),
    }
)
# suffix of a tensor's name -> index of the factor: A and B of a linear layer, A and B of an embedding
_FACTORS = {"lora_A.weight": 0, "lora_B.weight": 1, "lora_embedding_A": 2, "lora_embedding_B": 3}
_MAX_RANK = 1 << 14
_MAX_ALPHA = 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """The contents of an adapter's folder; tensors have the names of the base model's folder."""

    folder: Path
    base: str | None  # base_model_name_or_path
    revision: str | None  # revision of the base model
    kind: str | None  # kind of head (default: that of the base model)
    bare: bool  # whether the adapter is for a model without a head
    factors: Mapping[str, tuple[TensorEntry, TensorEntry, float]]  # A, B and s of each changed tensor
    transposed: frozenset[str]  # names of changed tensors that are saved as (B A)', such as embeddings
    replacements: Mapping[str, TensorEntry]  # tensors that replace those of the model

    def config_values(self, values: Mapping[str, object], source: str, ignore: Iterable[str]) -> dict[str, object]:
        """Return the values of config.json with the adapter's head.

        If the adapter's last layer has another number of outputs than the head has labels, the labels are LABEL_0, ...

        Args:
            values: Values of the base model's config.json.
            source: Name of that file, for error messages.
            ignore: Unknown keys to ignore.
        """
        family = FAMILIES[read_config(values, source, ignore=ignore).family]
        kinds = family.kinds()
        if self.bare:
            return {**values, "architectures": [family.bare]}
        if self.kind is None:
            return {**values}
        if self.kind not in kinds:
            raise ModelError(f"{self.folder}: its head is {self.kind}, but this family has {', '.join(kinds)}")
        new_values = {**values, "architectures": [kinds[self.kind]]}
        config = read_config(new_values, source, ignore=ignore)
        name_table = family.table(config.model, config.head)
        last_layer_names = [name for row in name_table.rows if row.name == "head.out" for name in row.hf]
        entries = [entry for name in last_layer_names if (entry := self.replacements.get(f"{name}.weight"))]
        outputs = entries[0].shape[0] if entries else None
        if (
            outputs is not None
            and isinstance(config.head, Classes | TokenClasses)
            and outputs != len(config.head.labels)
        ):
            labels = [f"LABEL_{index}" for index in range(outputs)]
            new_values["id2label"] = {str(index): label for index, label in enumerate(labels)}
            new_values["label2id"] = {label: index for index, label in enumerate(labels)}
        return new_values

    def with_table_names(self, family: Family) -> Adapter:
        """Return the adapter with tensor names as in the family's name table."""
        is_bare = family.is_bare((*self.factors, *self.replacements))
        return replace(
            self,
            factors={family.table_name(name, is_bare): value for name, value in self.factors.items()},
            transposed=frozenset(family.table_name(name, is_bare) for name in self.transposed),
            replacements={family.table_name(name, is_bare): entry for name, entry in self.replacements.items()},
        )

    def check(self, entries: Mapping[str, TensorEntry], table: NameTable) -> None:
        """Raise ModelError unless each pair of factors has the shape of a tensor that the model uses only once.

        Args:
            entries: Tensors of the model, by the names of its table.
            table: Tensor names of the model.
        """
        tied = {name for pair in table.tied.items() for name in pair}
        if changed := sorted(tied & {*self.factors, *self.replacements}):
            raise ModelError(
                f"{self.folder}: it changes {changed[0]}, which the model uses twice, as tokens and as output, in one "
                "place alone: merge the adapter with the library that made it"
            )
        # A is [rank, width] and B [out, rank]
        for name, (a, b, _) in self.factors.items():
            out, width = b.shape[0], a.shape[1]
            shape = (width, out) if name in self.transposed else (out, width)
            if name not in entries:
                raise ModelError(f"{self.folder}: it changes {name}, which the model does not have: give its own model")
            if entries[name].shape != shape:
                raise ModelError(
                    f"{self.folder}: it changes {name} as {list(shape)}, but the model's is "
                    f"{list(entries[name].shape)}: give its own model"
                )

    def merge(self, entries: Mapping[str, TensorEntry], dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the merged tensors, W + s B A computed in float32 at least.

        Args:
            entries: Tensors of the model; the adapter may change others too.
            dtype: Dtype of the results.
        """
        compute_dtype = torch.promote_types(dtype, torch.float32)
        merged = {}
        for name, (a, b, scale) in self.factors.items():
            if name not in entries:  # a tensor of another head
                continue
            tensors = read_tensors({"W": entries[name], "A": a, "B": b}, compute_dtype)
            product = scale * (tensors["B"] @ tensors["A"])
            merged[name] = (tensors["W"] + (product.T if name in self.transposed else product)).to(dtype)
        return merged


def read_adapter(folder: Path) -> Adapter | None:
    """Read the adapter in a folder; returns None if the folder has a model or no adapter.

    Raises:
        ModelError: If the adapter is not plain LoRA, or its tensors do not fit its configuration.
    """
    if (folder / "config.json").exists() or not (folder / CONFIG).exists():
        return None
    reader = ConfigReader(read_folder_json(folder / CONFIG), str(folder / CONFIG))
    for key, accepted in _PLAIN_VALUES.items():
        reader.only(key, *accepted, why=_NOT_PLAIN)
    default_rank = reader.integer("r", 8, maximum=_MAX_RANK)
    default_alpha = reader.number("lora_alpha", 8.0, maximum=_MAX_ALPHA)
    ranks = _read_pattern(reader, "rank_pattern", int)
    alphas = _read_pattern(reader, "alpha_pattern", int, float)
    use_root = reader.flag("use_rslora", False)
    is_transposed = reader.flag("fan_in_fan_out", False)
    base, revision, task = (reader.text(key, None) for key in ("base_model_name_or_path", "revision", "task_type"))
    if task not in (None, "FEATURE_EXTRACTION", *_KINDS):
        raise ModelError(f"{reader.source}: task_type is {quoted(task)}; expected one of {', '.join(_KINDS)}")
    reader.check_all_read(_IGNORED)
    pairs, replacements = _read_tensors(folder)
    factors, transposed = {}, set()
    for module, pair in pairs.items():
        is_embedding = pair.keys() == {2, 3}
        if not is_embedding and pair.keys() != {0, 1}:
            raise ModelError(f"{folder}: {module} has one factor of two: the adapter is damaged")
        a, b = (pair[index] for index in sorted(pair))
        r = int(_match_pattern(ranks, module, default_rank))
        if len(a.shape) != 2 or len(b.shape) != 2 or not a.shape[0] == b.shape[1] == r:
            raise ModelError(f"{folder}: {module} has factors {list(a.shape)} and {list(b.shape)}, but r is {r}")
        alpha = _match_pattern(alphas, module, default_alpha)
        scale = alpha / (math.sqrt(r) if use_root else r)
        factors[f"{module}.weight"] = (a, b, scale)
        if is_embedding or is_transposed:
            transposed.add(f"{module}.weight")
    return Adapter(
        folder=folder,
        base=base,
        revision=revision,
        kind=_KINDS.get(task or ""),
        bare=task == "FEATURE_EXTRACTION",
        factors=factors,
        transposed=frozenset(transposed),
        replacements=replacements,
    )


def _read_tensors(folder: Path) -> tuple[dict[str, dict[int, TensorEntry]], dict[str, TensorEntry]]:
    """Return the factors of each module, by their index in _FACTORS, and the tensors that replace the model's."""
    pairs: dict[str, dict[int, TensorEntry]] = {}
    replacements: dict[str, TensorEntry] = {}
    for key, entry in find_file_tensors(folder, WEIGHTS).items():
        name = key.removeprefix("base_model.model.").replace(".base_layer.", ".")
        suffix = next((suffix for suffix in _FACTORS if name.endswith(f".{suffix}")), None)
        if suffix is not None:
            module = name.removesuffix(f".{suffix}")
            pairs.setdefault(module, {})[_FACTORS[suffix]] = entry
        elif "lora_" in name:
            raise ModelError(f"{folder}: {key} is no factor of plain LoRA: {_NOT_PLAIN}")
        else:
            replacements[name] = entry
    return pairs, replacements


def _read_pattern(reader: ConfigReader, key: str, *types: type) -> dict[str, float]:
    """Read an object of positive numbers of these types, whose keys are the last parts of module names."""
    value = reader.values.get(key)
    reader.only(key, value if isinstance(value, dict) else None, why=_NOT_PLAIN)
    values = value or {}
    assert isinstance(values, dict)
    maximum = _MAX_ALPHA if float in types else _MAX_RANK
    for name, value in values.items():
        if not re.fullmatch(r"[\w.]+", name) or type(value) not in types or not 0 < value <= maximum:
            raise ModelError(f"{reader.source}: {key} has {quoted(name)}: {quoted(value)}; expected names and numbers")
    return values


def _match_pattern(pattern: Mapping[str, float], module: str, default: float) -> float:
    """Return the value of the first key that a module's name ends with, or the default."""
    return next((value for name, value in pattern.items() if f".{module}".endswith(f".{name}")), default)
