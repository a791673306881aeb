"""Run folders: writing their files when a run begins, and checking whether the run in a folder can be resumed.

`Run` and the commands call these functions.
"""

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

SETTINGS = "settings.toml"  # settings of the run
DATA = "data.json"  # facts about the data, with hashes of its files
ENVIRONMENT = "environment.json"  # facts about the machine, and versions of libraries
BAD_ROWS = "bad-rows.jsonl"  # rows of the data that could not be read
MAX_CHECKED = 100_000  # maximum examples of data that is checked for problems when a run begins
Precision = Literal["float32", "bfloat16", "float16"]
Settings = TypeVar("Settings", bound="DataclassInstance")
METHOD = "method.json"  # scores of fine-tuning methods on held-out examples, and the chosen method
START_MODEL = "start"  # folder of the initial model, if it was created for the run
TOKENIZER = "tokenizer"  # folder of the tokenizer that pre-training trains
CORPUS = "corpus"  # folder of the corpus that pre-training builds
CORPUS_FOLDERS = {TOKENIZER, CORPUS}
INITIAL_FILES = {  # files and folders that a run may have before it saves its first checkpoint
    *(SETTINGS, DATA, ENVIRONMENT, BAD_ROWS, LOCK, METHOD, START_MODEL, BEFORE, JOURNAL),
    *CORPUS_FOLDERS,
}


@contextmanager
def translate_io_errors(folder: Path) -> Iterator[None]:
    """Re-raise I/O errors, and diverged training, as HeedfulErrors that say how to resume."""
    try:
        yield
    except DivergedError as error:
        if _list_names(folder) <= INITIAL_FILES:  # no checkpoint: the run may begin again with other settings
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
    """Replace "auto" as device and precision by the values to train with. All ranks call this.

    If the folder has a run with a checkpoint, device and precision of that run are used, even on another machine. The
    device of a finished run need not exist here, since nothing trains on it any more. Otherwise the device is a GPU if
    each rank has one of its own, and the precision is the fastest one if it is the same on the devices of all ranks,
    else float32.

    Args:
        train: Settings of the training.
        folder: The run folder.
        ranks: The processes that train together.
        log: Receives a message if the device is the CPU although a rank has a GPU, and a warning if the run resumes
            with a precision that is not the fastest one on this machine.

    Raises:
        SettingError: If the device cannot be used, or is a GPU that ranks share.
    """
    own_gpu = gpu_identity() if ranks.size > 1 else "a GPU" * has_gpu()
    gathered = ranks.all_gather_object((own_gpu, _run_device(folder) if ranks.is_main else (None, None, False)))
    gpus = [gpu for gpu, _ in gathered]  # "" of a rank without a GPU
    sharing = ranks_sharing_gpus(gpus)
    _, (run_device, run_precision, is_finished) = gathered[0]  # as the first rank read them from the folder
    if is_finished and run_device and run_precision and (train.device, train.precision) == ("auto", "auto"):
        return replace(train, device=run_device, precision=run_precision)
    device = train.device
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
        prepare_determinism()  # must be called before a tensor is on the GPU
    fastest_by_rank = set(ranks.all_gather_object(auto_precision(resolved_device)))
    precision = train.precision
    if precision == "auto":
        fastest: Precision = fastest_by_rank.pop() if len(fastest_by_rank) == 1 else "float32"
        precision = run_precision or fastest
        if precision != fastest:
            warning = ", which is slow where there are no instructions for it" if precision == "bfloat16" else ""
            log(f"{folder} began with train.precision={precision}, and resumes with it{warning}")
    return replace(train, device=device, precision=precision)


def _run_device(folder: Path) -> tuple[str | None, Precision | None, bool]:
    """Return device and precision of a run with a checkpoint, or None, and whether the run is finished."""
    with suppress(OSError, HeedfulError):
        if not _list_names(folder) <= INITIAL_FILES:
            values = dict(flatten_settings(load_mapping(folder / SETTINGS)))
            device, saved_precision = values.get("train.device"), values.get("train.precision")
            known: tuple[Precision, ...] = get_args(Precision)
            precision = next((name for name in known if name == saved_precision), None)
            return str(device) if device else "cpu", precision, (folder / RESULTS).exists()
    return None, None, False


def can_resume(folder: Path, settings: DataclassInstance) -> bool:
    """Prepare a folder for a run with these settings, and return whether the folder has such a run already.

    A run that has no checkpoint yet is removed, unless it has these settings and has begun to train. Its tokenizer and
    its corpus stay if the settings that they depend on are the same; otherwise a warning says that they are made anew.

    Raises:
        RunError: If the folder has a run with a checkpoint and other settings.
    """
    for path, _, _ in os.walk(folder):
        remove_stale(Path(path))
    _remove_run_without_checkpoint(folder, settings)
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


def _remove_run_without_checkpoint(folder: Path, settings: DataclassInstance) -> None:
    """Remove the files of a run without a checkpoint that a run with `settings` cannot use. See `can_resume`."""
    names = _list_names(folder)
    old_settings = _earlier_settings(folder, settings)
    is_pretraining = isinstance(old_settings, PretrainSettings)
    has_checkpoint = not names <= INITIAL_FILES
    if has_checkpoint or (names & CORPUS_FOLDERS and not is_pretraining):  # a corpus may be a user's own
        return
    if old_settings == settings and JOURNAL in names:
        return
    reused = {LOCK}
    corpus_key = getattr(settings, "corpus_key", None)
    if isinstance(old_settings, PretrainSettings) and old_settings.corpus_key == corpus_key:
        reused |= {BAD_ROWS, *CORPUS_FOLDERS}
    elif CORPUS in names:
        message = f"{folder / CORPUS} was made with other settings of the text, and is made anew"
        warnings.warn(message, HeedfulWarning, stacklevel=3)
    # settings last, since they say which run the other files belong to
    for name in sorted(names - reused, key=lambda name: name == SETTINGS):
        remove(folder / name)


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

    The data is not checked. `init_labelled_run` checks that too.
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
    """Write settings, environment and facts about the data of a new run.

    If the folder has a run already, check that it has the same settings and the same data instead.

    Args:
        folder: The run folder, which is locked.
        settings: Settings of the run.
        source: The data.
        counts: Number of examples by split.
        reopen: Opens the data again with a policy for rows that cannot be read, here one that writes them to a file.

    Raises:
        RunError: If the folder has a run with other settings or other data.
    """
    if can_resume(folder, settings):
        _check_same_data(folder, source)
        return
    if source.row_errors.bad:
        reopened = reopen(Quarantine(file=folder / BAD_ROWS))
        for split in reopened.splits:
            deque(reopened.examples(split), maxlen=0)  # reads all rows, which writes the bad ones to the file
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
    old_hashes = data_facts["files"] | data_facts.get("corrections", {})
    new_hashes = _hash_data(source) | _hash_corrections(source)
    all_names = old_hashes.keys() | new_hashes.keys()
    changed = sorted(name for name in all_names if old_hashes.get(name) != new_hashes.get(name))
    if changed:
        more = f" and {len(changed) - 5} more" if changed[5:] else ""
        raise RunError(
            f"{folder} holds a run on other data: {', '.join(changed[:5])}{more} changed. Give another folder with "
            "--output, or put the data back to resume it"
        )


def _check_data(source: Dataset[Example], examples: int) -> JsonObject | None:
    """Return verdict and problems of `heedful check` for the data, or None if it has more than MAX_CHECKED examples."""
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
    """Return the paths of the files of a split, relative to the common folder of all files of the data.

    Names of data in memory are returned unchanged.
    """
    all_names = [name for names in source.names_by_split.values() for name in names]
    files = [Path(name).absolute() for name in all_names if os.path.exists(name)]
    parent = os.path.commonpath([path.parent for path in files]) if files else ""
    short_names = []
    for name in source.names_by_split.get(split, ()):  # a split that was generated from another one has no files
        if os.path.exists(name):
            short_names.append(Path(name).absolute().relative_to(parent).as_posix())
        else:
            short_names.append(name)
    return short_names


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
    """Return the files among `paths` that a run was trained on, wherever they are now, by comparing SHA-256 hashes.

    The result is () if `run` is not a run folder.
    """
    if not (Path(run) / DATA).is_file():
        return ()
    data_facts = read_run_json(Path(run) / DATA)
    hashes = {data_facts["files"][name] for name in data_facts.get("trained_on", ())}
    if not hashes:
        return ()
    return tuple(path for path in paths if os.path.exists(path) and sha256_of(path) in hashes)


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
    with atomic_path(path) as temporary:
        # an unpaired surrogate becomes \udxxx, which is its escape sequence in JSON
        write_synced(temporary, [text.encode(errors="backslashreplace")])


def read_run_json(path: Path) -> JsonObject:
    """Read a JSON file of a run."""
    table: JsonObject = json.loads(path.read_bytes())
    return table


def journal_csv(journal: Path, more_rows: Sequence[Mapping[str, object]] = ()) -> str:
    """Return a journal as CSV text.

    Args:
        journal: The journal. Each of its records, of an update or an evaluation, is a row. Metrics on dev have the
            prefix "dev_".
        more_rows: Further rows after those of the journal, with cells by column name.
    """
    rows = []
    for record in read_journal(journal):
        dev_metrics = record.pop("dev", {})
        rows.append(record | {f"dev_{name}": value for name, value in dev_metrics.items()})
    rows += map(dict, more_rows)
    columns = dict.fromkeys(name for row in rows for name in row)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(escape_cell, columns))
    for row in rows:
        writer.writerow(escape_cell(str(row.get(name, ""))) for name in columns)
    return text.getvalue()


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
