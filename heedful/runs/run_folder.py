"""Run folders: the files that are written when a run begins, and the checks whether a run may be resumed."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import platform
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar, get_args

import torch
from safetensors import SafetensorError

from heedful._version import __version__
from heedful.atomic_io import atomic_path, remove, remove_stale, write_synced
from heedful.data import Dataset, Quarantine, check, escape_cell
from heedful.data.examples import Example
from heedful.data.labelled.class_folders import LAYOUTS, Layout
from heedful.device import auto_precision, gpu_identity, has_gpu, resolve_device
from heedful.errors import HeedfulError, HeedfulWarning, RunError
from heedful.runs.overrides import flatten_settings
from heedful.runs.pretrain.settings import PretrainSettings
from heedful.runs.results import BEFORE, JOURNAL, RESULTS, JsonObject
from heedful.settings import from_file, load_mapping, to_mapping, to_toml
from heedful.train.determinism import prepare_determinism
from heedful.train.heartbeat import format_ranks
from heedful.train.journal import read_journal
from heedful.train.ranks import Ranks, ranks_sharing_gpus, shared_gpu_error
from heedful.train.run_lock import LOCK
from heedful.train.settings import TrainSettings
from heedful.train.trainer import DivergedError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SETTINGS = "settings.toml"
DATA = "data.json"  # facts about the data, with hashes of its files
ENVIRONMENT = "environment.json"  # facts about the machine, and versions of libraries
BAD_ROWS = "bad-rows.jsonl"
MAX_CHECKED = 100_000  # examples above which data is not checked for problems when a run begins
Precision = Literal["float32", "bfloat16", "float16"]
Settings = TypeVar("Settings", bound="DataclassInstance")
METHOD = "method.json"  # scores of methods on held-out examples, and the chosen method
START_MODEL = "start"  # folder of the initial model, if it was created for the run
TOKENIZER = "tokenizer"  # folder of the tokenizer that pre-training trains
CORPUS = "corpus"  # folder of the corpus that pre-training builds
CORPUS_FOLDERS = {TOKENIZER, CORPUS}
INITIAL_FILES = {  # files and folders of a run without training state
    *(SETTINGS, DATA, ENVIRONMENT, BAD_ROWS, LOCK, METHOD, START_MODEL, BEFORE, JOURNAL),
    *CORPUS_FOLDERS,
}


@contextmanager
def translate_io_errors(folder: Path) -> Iterator[None]:
    """Re-raise I/O errors, and diverged training, as HeedfulErrors that say how to resume."""
    try:
        yield
    except DivergedError as error:
        if _list_names(folder) <= INITIAL_FILES:  # a run without a checkpoint may begin again with other settings
            raise
        advice = f"{folder} resumes with its own settings: for others give another folder with --output"
        raise DivergedError(f"{error}. {advice}", error.step) from error
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        path = getattr(error, "filename", None)
        raise RunError(
            f"{folder}: the run stopped, since a file could not be written or read: {reason}"
            + (f" ({path})" if path else "")
            + ". Fix that and give the same command: it resumes from its newest checkpoint"
        ) from error


# -- checks of the folder -----------------------------------------------------------------------------------------


def visible_names(folder: Path) -> set[str]:
    """Return the names of files and folders in a folder, without hidden ones. A missing folder has no names.

    Raises:
        RunError: If the folder cannot be read.
    """
    try:
        return _list_names(folder) if folder.exists() else set()
    except OSError as error:
        raise RunError(f"{folder} cannot be used: {error.strerror}: give another folder with --output") from None


def check_run_folder(folder: Path) -> None:
    """Raise a RunError for a folder that has files but no run. Hidden files are ignored."""
    names = visible_names(folder)
    is_run = {LOCK, SETTINGS} <= names
    is_begun = LOCK in names and names <= INITIAL_FILES - CORPUS_FOLDERS
    if names and not is_run and not is_begun:
        listed = sorted(names)
        missing = " and ".join(sorted({LOCK, SETTINGS} - names))
        content = f"{', '.join(listed[:3])}{' and more' if listed[3:] else ''}"
        raise RunError(
            f"{folder} is not a run folder: it holds {content}, but no {missing}; give another folder with --output"
        )


def _list_names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def resolve_auto(train: TrainSettings, folder: Path, ranks: Ranks, log: Callable[[str], None]) -> TrainSettings:
    """Replace "auto" as device and precision. All ranks call this.

    If the folder has a run with a checkpoint, device and precision of that run are used, even on another machine.
    Otherwise the device is a GPU if there is one for each rank, and the precision is the fastest one if it is the same
    on all devices, else float32.

    Raises:
        SettingError: If the device cannot be used, or is a GPU that ranks share.
    """
    own_gpu = gpu_identity() if ranks.size > 1 else "a GPU" * has_gpu()
    gathered = ranks.all_gather_object((own_gpu, _run_device(folder) if ranks.is_main else (None, None)))
    gpus = [gpu for gpu, _ in gathered]
    run_device, run_precision = gathered[0][1]
    device, sharing = train.device, ranks_sharing_gpus(gpus)
    if device == "auto":
        device = run_device or ("cuda" if all(gpus) and not sharing else "cpu")
        if device == "cpu" and not run_device and any(gpus):
            lacking = sharing or [rank for rank, gpu in enumerate(gpus) if not gpu]
            log(
                f"training on the CPU: there is no GPU for {format_ranks(lacking)} alone; start at most one process "
                "for each GPU"
            )
    resolved_device = resolve_device(device)
    if sharing and resolved_device.type == "cuda":
        raise shared_gpu_error(sharing)
    if train.deterministic and resolved_device.type == "cuda":
        prepare_determinism()  # before a tensor is on the GPU
    by_rank = set(ranks.all_gather_object(auto_precision(resolved_device)))
    precision = train.precision
    if precision == "auto":
        fastest: Precision = by_rank.pop() if len(by_rank) == 1 else "float32"
        precision = run_precision or fastest
        if precision != fastest:
            warning = ", which is slow where there are no instructions for it" if precision == "bfloat16" else ""
            log(f"{folder} began with train.precision={precision}, and resumes with it{warning}")
    return replace(train, device=device, precision=precision)


def _run_device(folder: Path) -> tuple[str | None, Precision | None]:
    """Return device and precision of a run with a checkpoint, or (None, None) if the folder has no such run."""
    with suppress(OSError, HeedfulError):
        if not _list_names(folder) <= INITIAL_FILES:
            values = dict(flatten_settings(load_mapping(folder / SETTINGS)))
            device, precision = values.get("train.device"), values.get("train.precision")
            known: tuple[Precision, ...] = get_args(Precision)
            return str(device) if device else "cpu", next((name for name in known if name == precision), None)
    return None, None


def can_resume(folder: Path, settings: DataclassInstance) -> bool:
    """Return whether the folder has a run with these settings, after removing the files of a run without a checkpoint.

    A tokenizer and a corpus are removed only if they depend on settings that differ. A warning then says so.

    Raises:
        RunError: If the folder has a run with a checkpoint and other settings.
    """
    for path, _, _ in os.walk(folder):
        remove_stale(Path(path))
    names = _list_names(folder)
    old_settings = _earlier_settings(folder, settings)
    is_pretraining = isinstance(old_settings, PretrainSettings)
    has_no_checkpoint = names <= INITIAL_FILES and (is_pretraining or not names & CORPUS_FOLDERS)
    if has_no_checkpoint and (old_settings != settings or JOURNAL not in names):
        reused = {LOCK}
        corpus_key = getattr(settings, "corpus_key", None)
        if isinstance(old_settings, PretrainSettings) and old_settings.corpus_key == corpus_key:
            reused |= {BAD_ROWS, *CORPUS_FOLDERS}
        elif CORPUS in names:
            message = f"{folder / CORPUS} was made with other settings of the text, and is made anew"
            warnings.warn(message, HeedfulWarning, stacklevel=2)
        # settings last, since they say which run the other files belong to
        for name in sorted(names - reused, key=lambda name: name == SETTINGS):
            remove(folder / name)
    if not (folder / SETTINGS).exists():
        return False
    old_settings = read_settings(folder, type(settings))
    if old_settings != settings:
        advice = ""
        if (folder / RESULTS).exists():
            advice = f". To train its model further, give --model {folder} and another --output"
        raise RunError(
            f"{folder} holds a run with other settings: {_differences(old_settings, settings)}. Give another folder "
            f"with --output, the same settings to resume it, or --overwrite to replace it{advice}"
        )
    return True


def read_settings(folder: Path, kind: type[Settings], name: str = SETTINGS) -> Settings:
    """Read the settings of the run in a folder.

    Args:
        folder: The run folder.
        kind: The settings class.
        name: Name of the file.

    Raises:
        RunError: If the file cannot be read as settings of this class.
    """
    try:
        return from_file(kind, folder / name)
    except HeedfulError as error:
        first = str(error).splitlines()[0]
        raise RunError(
            f"{folder} holds a run of another kind, or of another version of Heedful ({first}). Give another folder "
            "with --output"
        ) from None


def _earlier_settings(folder: Path, settings: DataclassInstance) -> DataclassInstance | None:
    """Return the settings in the folder if they are of the same class as `settings`, else None."""
    try:
        return from_file(type(settings), folder / SETTINGS)
    except HeedfulError:
        return None


def _differences(old_settings: DataclassInstance, new_settings: DataclassInstance) -> str:
    """Describe the settings that differ, at most four of them, with both values."""
    old = dict(flatten_settings(to_mapping(old_settings)))
    new = dict(flatten_settings(to_mapping(new_settings)))
    names = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    descriptions = [f"{name} was {old.get(name)!r} and is {new.get(name)!r} now" for name in names[:4]]
    return "; ".join(descriptions) + ("; and more" if names[4:] else "")


# -- begin ------------------------------------------------------------------------------------------------------------


def init_run_folder(folder: Path, settings: DataclassInstance) -> None:
    """Write settings and environment of a new run, or check that the run in the folder has the same settings.

    The data is not compared. `init_labelled_run` compares it too.
    """
    if not can_resume(folder, settings):
        write_file(folder / ENVIRONMENT, environment())
        write_file(folder / SETTINGS, to_toml(settings))


def init_labelled_run(
    folder: Path,
    settings: DataclassInstance,
    source: Dataset[Example],
    counts: Mapping[str, int],
    reopen: Callable[[Quarantine], Dataset[Example]],
) -> None:
    """Write settings, environment and facts about the data of a new run, or check that the run in the folder has them.

    Args:
        folder: The run folder, which is locked.
        settings: Settings of the run.
        source: The data.
        counts: Counts of examples by split.
        reopen: Opens the data again with a policy that writes bad rows to a file.

    Raises:
        RunError: If the folder has a run with other settings or other data.
    """
    if can_resume(folder, settings):
        _check_same_data(folder, source)
        return
    if source.row_errors.bad:
        reopened = reopen(Quarantine(file=folder / BAD_ROWS))
        for split in reopened.splits:
            deque(reopened.examples(split), maxlen=0)
    write_file(folder / ENVIRONMENT, environment())
    short_names = {
        path: name
        for split, paths in source.names_by_split.items()
        for path, name in zip(paths, _short_names(source, split), strict=True)
    }
    data_facts = {
        "stated": list(source.stated),
        "splits": {split: {"examples": count} for split, count in counts.items()},
        "files": _hash_data(source),
        "corrections": _hash_corrections(source),
        **({"layout": source.layout} if source.layout else {}),
        "columns": {role: list(names) for role, names in source.columns.items()},
        "trained_on": _short_names(source, "train"),
        "made_dev": source.has_generated_dev,
        "check": _check_data(source, sum(counts.values())),
        "bad_rows": {short_names.get(file, Path(file).name): count for file, count in source.row_errors.bad.items()},
    }
    write_file(folder / DATA, data_facts)
    write_file(folder / SETTINGS, to_toml(settings))  # last: a folder with settings has the other files too


def _check_same_data(folder: Path, source: Dataset[Example]) -> None:
    """Raise a RunError if the data, or its file of corrections, differs from the data of the run in the folder."""
    data_facts = read_run_json(folder / DATA)
    run_hashes = data_facts["files"] | data_facts.get("corrections", {})
    hashes = _hash_data(source) | _hash_corrections(source)
    if changed := sorted(name for name in {*hashes, *run_hashes} if hashes.get(name) != run_hashes.get(name)):
        more = f" and {len(changed) - 5} more" if changed[5:] else ""
        raise RunError(
            f"{folder} holds a run on other data: {', '.join(changed[:5])}{more} changed. Give another folder with "
            "--output, or put the data back to resume it"
        )


def _check_data(source: Dataset[Example], examples: int) -> JsonObject | None:
    """Return the problems of the data that `heedful check` reports, or None for more than MAX_CHECKED examples."""
    if examples > MAX_CHECKED:
        return None
    report = check(source)
    return {"verdict": report.verdict(), "problems": [problem.line() for problem in report.problems]}


def _hash_data(source: Dataset[Example]) -> dict[str, str]:
    """Return the SHA-256 of each file by its short name. For data in memory, the examples are hashed instead."""
    hashes = {}
    for split, paths in source.names_by_split.items():
        for path, name in zip(paths, _short_names(source, split), strict=True):
            if os.path.exists(path):
                hashes[name] = sha256_of(path)
            else:
                digest = hashlib.sha256()
                for example in source.examples(split):
                    digest.update(repr(example).encode(errors="backslashreplace"))
                hashes[name] = digest.hexdigest()
    return hashes


def _hash_corrections(source: Dataset[Example]) -> dict[str, str]:
    """Return the SHA-256 of the file of corrections by its path, or {} if there is no such file."""
    path = source.settings.corrections
    return {} if path is None else {path: sha256_of(path)}


def _short_names(source: Dataset[Example], split: str) -> list[str]:
    """Return the paths of the files of a split, relative to the common folder of all files of the data."""
    files = [
        Path(path).absolute() for paths in source.names_by_split.values() for path in paths if os.path.exists(path)
    ]
    parent = os.path.commonpath([path.parent for path in files]) if files else ""
    paths = source.names_by_split.get(split, ())  # a split that was generated from another one has no files
    return [Path(path).absolute().relative_to(parent).as_posix() if os.path.exists(path) else path for path in paths]


# -- training data ----------------------------------------------------------------------------------------------------


def sha256_of(path: str | Path) -> str:
    """Return the SHA-256 of a file, or of the names and hashes of the files in a folder."""
    if os.path.isdir(path):
        digest = hashlib.sha256()
        for file_path in sorted(entry for entry in Path(path).iterdir() if entry.is_file()):
            digest.update(f"{file_path.name} {sha256_of(file_path)}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_trained_on(run: str | Path, paths: Sequence[str]) -> tuple[str, ...]:
    """Return the files among `paths` that a run was trained on, matched by hash, or () if `run` is not a run folder."""
    if not (Path(run) / DATA).is_file():
        return ()
    data_facts = read_run_json(Path(run) / DATA)
    hashes = {data_facts["files"][name] for name in data_facts.get("trained_on", ())}
    return tuple(path for path in paths if hashes and os.path.exists(path) and sha256_of(path) in hashes)


def label_layout(run: str | Path) -> Layout | None:
    """Return the layout of a run's data if its labels were names of files or folders.

    The result is None if the labels were in files, or if `run` is not a run folder.
    """
    try:
        name = read_run_json(Path(run) / DATA).get("layout")
    except (OSError, ValueError, AttributeError):
        return None
    return next((layout for layout in LAYOUTS if layout == name), None)


# -- files ------------------------------------------------------------------------------------------------------------


def write_file(path: Path, value: object) -> None:
    """Write text, or plain data as JSON, atomically."""
    text = value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    with atomic_path(path) as part:
        write_synced(part, [text.encode(errors="backslashreplace")])  # half a surrogate pair becomes \udxxx, as in JSON


def read_run_json(path: Path) -> JsonObject:
    """Read a JSON file of a run."""
    table: JsonObject = json.loads(path.read_bytes())
    return table


def journal_csv(journal: Path, more_rows: Sequence[Mapping[str, object]] = ()) -> str:
    """Return the journal as CSV, with a row per update or evaluation, and then `more_rows`."""
    rows = [row | {f"dev_{name}": value for name, value in row.pop("dev", {}).items()} for row in read_journal(journal)]
    rows += map(dict, more_rows)
    names = dict.fromkeys(name for row in rows for name in row)
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(map(escape_cell, names))
    for row in rows:
        table.writerow(escape_cell(str(row.get(name, ""))) for name in names)
    return out.getvalue()


def environment() -> JsonObject:
    """Return facts about the machine, and the versions of Heedful and of the libraries that results depend on."""
    import numpy
    import safetensors
    import tokenizers

    capabilities = torch.cpu.get_capabilities()
    features = [name for name in ("amx_bf16", "avx512_bf16", "avx512_f", "avx2") if capabilities.get(name)]
    name = capabilities.get("cpu_name") or platform.processor() or platform.machine()
    return {
        "machine": f"{name}, {os.cpu_count()} cores, {' '.join(features) or 'no vector extensions known'}",
        "system": platform.platform(),
        "threads": torch.get_num_threads(),
        "versions": {
            "heedful": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "tokenizers": tokenizers.__version__,
            "safetensors": safetensors.__version__,
            "numpy": numpy.__version__,
        },
    }
