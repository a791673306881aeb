"""Load a model folder in Hugging Face's format as a `ModelBundle`; `config_of` reads only its configuration."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from heedful.bundled import bundled_model
from heedful.checkpoint import hub, sentence_transformers
from heedful.checkpoint.bundle import EarlyStage, ModelBundle, assign, check_stage
from heedful.checkpoint.config import GENERATION, BundleConfig, read_config
from heedful.checkpoint.folder_json import read_folder_json
from heedful.checkpoint.lora import CONFIG as ADAPTER_CONFIG
from heedful.checkpoint.lora import Adapter, read_adapter
from heedful.checkpoint.notes import NOTES, Notes, read_notes, stage_folder
from heedful.checkpoint.safetensors_files import WEIGHTS, TensorEntry, find_tensors, read_tensors
from heedful.checkpoint.training_steps import is_training_checkpoint, with_checkpoint_weights
from heedful.checkpoint.validate import (
    check_depth,
    check_names,
    warn_if_padding_ends_texts,
    warn_if_pooled_token_is_missing,
)
from heedful.device import resolve_device
from heedful.errors import HeedfulWarning, ModelError, TokenizerError, quoted
from heedful.families import FAMILIES
from heedful.families.config_reader import ConfigReader
from heedful.families.family import Family
from heedful.families.names import NameTable, claims, modern_name, to_hf_names, to_our_names
from heedful.model.config import Classes, ModelConfig, Pooled, SentenceEmbedding
from heedful.model.initialise import skip_init
from heedful.tokenizer import Tokenizer
from heedful.tokenizer.sentencepiece_model import NAMES as SENTENCEPIECE_FILES
from heedful.untrusted_files import check_name

RUN_MODEL = "model"  # name of the model folder in a run folder


def load(
    name: str | Path,
    *,
    revision: str | None = None,
    head: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    ignore: Iterable[str] = (),
    base: str | Path | None = None,
) -> ModelBundle:
    """Load a model folder, a run folder, a checkpoint of a run, a bundled model, or NAME[@REVISION] on the hub.

    The model is in eval mode. A LoRA adapter of peft is merged into its base model. For a cascade, the bundle is the
    last stage, and the others are its `early_stages`.

    Args:
        name: Folder or name of the model.
        revision: Revision on the hub. If None, the one in the name, or `main`.
        head: Kind of head to load instead of the one in config.json: "masked_lm", "sequence_classification", ...
        dtype: Dtype of the weights.
        device: Device of the weights.
        ignore: Unknown keys of config.json to ignore.
        base: Base model of an adapter. If None, the one that the adapter names.

    Raises:
        HeedfulError: On unknown config keys, on missing, unexpected or misshapen tensors, on pickles, and on a
            tokenizer that does not fit the model.
    """
    device = resolve_device(device)
    folder = folder_of(name, revision)
    adapter = read_adapter(folder)
    if adapter is None and base is not None:
        raise ModelError(f"{folder} is no adapter, so base={str(base)!r} has no use: leave it out")
    model_folder = folder if adapter is None else base_folder(adapter, base)
    contents = _FolderContents.read(model_folder, head, tuple(ignore), dtype, adapter)
    config, entries, table = contents.config, contents.entries, contents.table
    bundle = _without_weights(config, model_folder)
    expected = to_hf_names(table, bundle.named_tensors())
    check_names(table, expected, entries, contents.values, model_folder)
    zeros = {name: torch.zeros(expected[name].shape, dtype=dtype) for name in table.zero_if_missing - entries.keys()}
    assign(bundle, _load_tensors(contents, dtype, zeros), device)
    notes = read_notes(model_folder)
    bundle.tokenizer = _load_tokenizer(folder, contents.family, config.model, notes)
    if bundle.tokenizer is None and model_folder != folder:  # an adapter without a tokenizer of its own
        bundle.tokenizer = _load_tokenizer(model_folder, contents.family, config.model, notes)
    if isinstance(config.head, SentenceEmbedding):
        sentence_transformers.check_case(contents.modules_folder, bundle.tokenizer)
    _apply_notes(notes, bundle)
    if head is None and notes.training_vectors is not None:  # another head reads other hidden states
        if (count := len(notes.training_vectors.mean)) != config.model.width:
            raise ModelError(f"{model_folder}: training_vectors have {count} numbers, expected {config.model.width}")
        bundle.training_vectors = notes.training_vectors
    hub_name = hub.name_and_revision(name)[0]
    is_from_hub = not os.path.isdir(name) and not bundled_model(hub_name)
    bundle.source = f"{hub_name}@{folder.name}" if is_from_hub else hub_name  # the folder's name is the commit
    bundle.unused_tensors = contents.unused
    bundle.other_head_tensors = contents.read_other_heads(dtype)
    _warn(bundle, model_folder, dtype, head_was_chosen=head is not None or adapter is not None)
    if is_training_checkpoint(Path(name)):
        bundle = with_checkpoint_weights(bundle, Path(name))
    if isinstance(config.head, Classes):
        bundle.prune_tokens(notes.token_pruning)
        bundle.early_stages = _load_early_stages(bundle, model_folder, notes, dtype, device)
    return bundle.eval()


def _apply_notes(notes: Notes, bundle: ModelBundle) -> None:
    """Set attributes of a bundle to the values of heedful.json, except those that depend on its head."""
    bundle.thresholds, bundle.label_scaling = notes.thresholds, notes.label_scaling
    bundle.calibration, bundle.text_suffix, bundle.pairs = notes.calibration, notes.text_suffix, notes.pairs


def _load_early_stages(
    last: ModelBundle, folder: Path, notes: Notes, dtype: torch.dtype, device: torch.device
) -> tuple[EarlyStage, ...]:
    """Load the early stages of the cascade in a folder; returns () for a single model."""
    stages = []
    for index, threshold in enumerate(notes.stage_thresholds, start=1):
        check_name(folder, stage_folder(index))
        path = folder / stage_folder(index)
        if not (path / "config.json").is_file():
            raise ModelError(
                f"{folder} is a cascade, but {path}, the folder of its early stage {index}, is no model folder: copy "
                "or build the whole cascade again"
            )
        stage = load(path, dtype=dtype, device=device)
        check_stage(stage, last)
        stages.append(EarlyStage(bundle=stage, threshold=threshold))
    return tuple(stages)


def _warn(bundle: ModelBundle, folder: Path, dtype: torch.dtype, *, head_was_chosen: bool) -> None:
    """Warn if transformers computes the model differently, if it may overflow, or if the folder has unused heads."""
    config = bundle.config
    warn_if_padding_ends_texts(config.head, bundle.tokenizer, config.hf_config, folder)
    warn_if_pooled_token_is_missing(config.head, bundle.tokenizer, folder)
    if named := config.hf_config.get("auto_map"):
        warnings.warn(
            f"{folder}: config.json names code ({quoted(named)} in auto_map), which is not run: it is loaded as "
            f"{config.family}, whose keys and tensors it has",
            HeedfulWarning,
            stacklevel=3,
        )
    if dtype == torch.float16 and overflows_in_float16(config.model):
        advice = "the published models of this kind overflow in float16: load it in bfloat16 or float32"
        warnings.warn(f"{folder}: {advice}", HeedfulWarning, stacklevel=3)
    unused = bundle.unused_tensors
    if unused and not head_was_chosen and not isinstance(config.head, SentenceEmbedding):
        warnings.warn(
            f"{folder}: {len(unused)} tensors belong to other heads than the one that config.json names and were not "
            f'loaded: {", ".join(unused[:4])}; load(..., head="...") takes one of '
            f"{', '.join(FAMILIES[config.family].kinds())}, and fine-tuning takes what its head has of them",
            HeedfulWarning,
            stacklevel=3,
        )


def overflows_in_float16(model: ModelConfig) -> bool:
    """Return whether published models of this kind overflow in float16."""
    stacks = [stack for stack in (model.encoder, model.decoder) if stack is not None]
    return any(stack.norm == "rms" and stack.score_scale == 1.0 for stack in stacks)


def config_of(name: str | Path, *, revision: str | None = None, head: str | None = None) -> BundleConfig:
    """Read the configuration that `load` would read, without the weights; arguments are those of `load`."""
    folder = folder_of(name, revision)
    adapter = read_adapter(folder)
    path = (folder if adapter is None else base_folder(adapter)) / "config.json"
    return read_config(read_folder_json(path), str(path), head=head)


def weight_files(name: str | Path, *, revision: str | None = None) -> list[Path]:
    """Return the files of configuration and weights that `load` would read, those of an adapter included."""
    folder = folder_of(name, revision)
    adapter = read_adapter(folder)
    folders = [folder] if adapter is None else [folder, base_folder(adapter)]
    read_folder_json(folders[-1] / "config.json")  # raises an error if it cannot be read
    configs = [folders[-1] / "config.json", *([] if adapter is None else [folder / ADAPTER_CONFIG])]
    return [*configs, *(path for folder in folders for path in sorted(folder.glob("*.safetensors")))]


def base_folder(adapter: Adapter, base: str | Path | None = None) -> Path:
    """Return the folder of an adapter's base model.

    Args:
        base: Folder or name of the base model. If None, the one that the adapter names.
    """
    named = base if base is not None else adapter.base
    if not named:
        raise ModelError(f"{adapter.folder / ADAPTER_CONFIG} names no model: {_give_base(adapter)}")
    try:
        folder = folder_of(named, adapter.revision if base is None else None)
    except ModelError as error:
        raise ModelError(
            f"{adapter.folder} is an adapter of {str(named)!r}: {error}; or {_give_base(adapter)}"
        ) from error
    if read_adapter(folder) is not None:
        raise ModelError(f"{adapter.folder} is an adapter of {folder}, which is an adapter too: merge that one first")
    return folder


def _give_base(adapter: Adapter) -> str:
    """Return the end of an error message, which says how to name the base model."""
    return f"give it, heedful convert {adapter.folder} OUT --base MODEL, or in Python load(..., base=...)"


def folder_of(name: str | Path, revision: str | None) -> Path:
    """Return the folder of a model, fetched from the hub if necessary; `load` has the same arguments."""
    folder = Path(name)
    if os.path.isfile(name):
        raise ModelError(f"{name} is a file; expected the folder that holds config.json and {WEIGHTS}")
    if is_training_checkpoint(folder):
        return folder_of(folder.parent.parent, revision)
    if not os.path.isdir(name):
        hub_name, named_revision = hub.name_and_revision(name) if revision is None else (str(name), revision)
        return bundled_model(hub_name) or hub.fetch(hub_name, named_revision)
    if not (folder / "config.json").exists() and (folder / RUN_MODEL / "config.json").exists():
        return folder / RUN_MODEL
    return folder


@dataclass(kw_only=True, eq=False)
class _FolderContents:
    """The configuration and the tensors of a folder, matched with each other."""

    config: BundleConfig
    values: Mapping[str, object]  # values of config.json
    entries: dict[str, TensorEntry]  # tensors of the model and its head, by HF name
    other_heads: dict[str, TensorEntry]  # tensors of other heads, by HF name
    folder: Path
    adapter: Adapter | None

    @classmethod
    def read(
        cls, folder: Path, head: str | None, ignore: tuple[str, ...], dtype: torch.dtype, adapter: Adapter | None
    ) -> _FolderContents:
        """Read config.json and the headers of the weights; raises ModelError if they do not belong together."""
        values = read_folder_json(folder / "config.json")
        source = str(folder / "config.json")
        if adapter is not None:
            adapter = adapter.with_table_names(FAMILIES[read_config(values, source, ignore=ignore).family])
            values = adapter.config_values(values, source, ignore)
        config = read_config(values, source, head=head, ignore=ignore)
        entries: dict[str, TensorEntry] = {}
        for key, entry in find_tensors(folder).items():
            if modern_name(key) in entries:
                raise ModelError(f"{folder} holds {entries[modern_name(key)].key} and {key}, two names of one tensor")
            entries[modern_name(key)] = entry
        check_depth(config.model, entries, values, folder)
        family = FAMILIES[config.family]
        if _differ([entries[name] for name in family.untied_tensors(values) if name in entries], dtype):
            values |= {"tie_word_embeddings": False}
            config = read_config(values, source, head=head, ignore=ignore)
        is_bare = family.is_bare(entries)
        entries = {family.table_name(key, is_bare): entry for key, entry in entries.items()}
        if adapter is not None:
            entries |= adapter.replacements
        contents = cls(config=config, values=values, entries=entries, other_heads={}, folder=folder, adapter=adapter)
        if head is None:
            contents.config = _with_folder_head(config, entries, contents.modules_folder)
            if isinstance(contents.config.head, SentenceEmbedding) and contents.config.head.dense:
                entries |= sentence_transformers.dense_tensors(contents.modules_folder)
        if adapter is not None:
            adapter.check(entries, contents.table)
        contents._split_off_other_heads()
        if (folder / GENERATION).exists():
            contents.config = replace(contents.config, generation=read_folder_json(folder / GENERATION))
        return contents

    @property
    def family(self) -> Family:
        return FAMILIES[self.config.family]

    @property
    def modules_folder(self) -> Path:
        """Folder of modules.json: the adapter's if it has this file, otherwise the model's."""
        if self.adapter is not None and (self.adapter.folder / sentence_transformers.MODULES).exists():
            return self.adapter.folder
        return self.folder

    @cached_property
    def table(self) -> NameTable:
        """Names of the tensors of the model with its head."""
        return self.family.table(self.config.model, self.config.head)

    @cached_property
    def other_tables(self) -> list[NameTable]:
        """Names of the tensors of the model with each other head that its family publishes."""
        reader = ConfigReader(self.config.hf_config, str(self.folder / "config.json"))
        full_model = self.family.read(reader)
        models = [(head_map, head_map.used_config(full_model)) for head_map in self.family.heads.values()]
        return [self.family.table(model, head_map.read(reader, model)) for head_map, model in models]

    def _split_off_other_heads(self) -> None:
        """Move tensors of other heads to `other_heads`, and find tensors that are saved under another name only."""
        unclaimed = [name for name in self.entries if not claims(self.table, name)]
        for name in unclaimed:
            if any(claims(table, name) for table in self.other_tables):
                self.other_heads[name] = self.entries.pop(name)
        for copied, name in self.table.copied.items():  # transformers 4 saves only the first name of a shared tensor
            if name not in self.entries and copied in self.entries:
                self.entries[name] = self.entries[copied]

    @property
    def unused(self) -> tuple[str, ...]:
        """Names of tensors of other heads."""
        return tuple(sorted(self.other_heads))

    def read_other_heads(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Read the tensors of other heads, but not tensors of the body, even if only these heads use them."""
        if not self.other_heads:
            return {}
        head_rows = {row for table in self.other_tables for row in table.rows if row.name.startswith("head.")}
        head_table = NameTable(rows=tuple(head_rows))
        entries = {name: self.other_heads[name] for name in self.unused if claims(head_table, name)}
        return read_tensors(entries, dtype) | ({} if self.adapter is None else self.adapter.merge(entries, dtype))


def _with_folder_head(config: BundleConfig, entries: Mapping[str, TensorEntry], folder: Path) -> BundleConfig:
    """Return the config with the head that modules.json describes, or without a pooler that the weights lack."""
    family = FAMILIES[config.family]
    if (folder / sentence_transformers.MODULES).exists():
        head = sentence_transformers.read_modules(folder, config.head, keeps_pooler=_has_pooler(family, entries))
        return replace(config, head=head)
    is_bare = isinstance(config.head, Pooled) and family.architecture(config.model, config.head) == family.bare
    return replace(config, head=None) if is_bare and not _has_pooler(family, entries) else config


def _has_pooler(family: Family, entries: Mapping[str, TensorEntry]) -> bool:
    """Return whether a folder has the tensors of its family's pooler."""
    head_map = family.heads[family.bare]
    if head_map.head is not Pooled:
        return False
    table = head_map.table(Pooled())
    return any(claims(table, name) for name in entries)


def _without_weights(config: BundleConfig, folder: Path) -> ModelBundle:
    """Build the model without memory for its parameters."""
    try:
        with skip_init():
            return ModelBundle(config)
    except (ArithmeticError, AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise ModelError(f"{folder / 'config.json'} describes a model that cannot be built: {error}") from error


def _differ(entries: Sequence[TensorEntry], dtype: torch.dtype) -> bool:
    """Return whether there are two entries whose tensors differ."""
    return len(entries) == 2 and not torch.equal(*read_tensors({entry.key: entry for entry in entries}, dtype).values())


def _load_tensors(contents: _FolderContents, dtype: torch.dtype, zeros: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of the model and its head, by our names.

    Args:
        zeros: Tensors for names that the folder may lack.
    """
    table, entries, folder = contents.table, contents.entries, contents.folder
    merged = {} if contents.adapter is None else contents.adapter.merge(entries, dtype)
    unchanged = {name: entry for name, entry in entries.items() if not table.skips(name) and name not in merged}
    tensors = read_tensors(unchanged, dtype) | merged
    saved_constants = read_tensors({name: entries[name] for name in table.constants if name in entries}, dtype)
    for name, tensor in saved_constants.items():
        constant = table.constants[name].to(dtype)
        if tensor.shape != constant.shape or not torch.allclose(tensor, constant, rtol=0.0, atol=1e-2):
            raise ModelError(f"{folder}: {name} is not the sinusoids of this family: other positions are not supported")
    for second, first in table.tied.items():
        if second in tensors and first in tensors and not torch.equal(tensors[second], tensors[first]):
            raise ModelError(
                f"{folder}: {second} and {first} should be one tensor, but they differ; "
                'if they were trained separately, set "tie_word_embeddings": false in config.json'
            )
    return to_our_names(table, tensors | zeros)


def _load_tokenizer(folder: Path, family: Family, model: ModelConfig, notes: Notes) -> Tokenizer | None:
    """Load the tokenizer of a folder, or return None if the folder has none.

    Raises:
        TokenizerError: If the tokenizer does not fit the model, or is not the one that the model was saved with.
    """
    names = ("tokenizer.json", "vocab.txt", "vocab.json", *SENTENCEPIECE_FILES)
    if not any((folder / file).exists() for file in names):
        return None
    tokenizer = Tokenizer.load(folder, family.tokenizer_defaults)
    if tokenizer.size > model.embedding.vocabulary:
        raise TokenizerError(
            f"{folder}: the tokenizer has ids up to {tokenizer.size - 1}, but the model knows "
            f"{model.embedding.vocabulary} tokens: this is another model's tokenizer"
        )
    if notes.tokenizer is not None and notes.tokenizer != tokenizer.fingerprint:
        raise TokenizerError(
            f"{folder}: the model was saved with the tokenizer {quoted(notes.tokenizer)}, but the files here make "
            f"{tokenizer.fingerprint}: put the right tokenizer back, or remove {NOTES} if you changed it on purpose"
        )
    return tokenizer
