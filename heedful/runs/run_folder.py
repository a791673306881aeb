"""A run folder: what is written when a run begins, and whether the run in it may be resumed."""

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
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
from safetensors import SafetensorError

from heedful._version import __version__
from heedful.atomic_io import atomic_path, remove, remove_stale, write_synced
from heedful.data import Dataset, Quarantine, check, escape_cell
from heedful.data.examples import Example
from heedful.data.labelled.class_folders import LAYOUTS, Layout
from heedful.device import device_name, has_fast_bfloat16, has_gpu, resolve_device
from heedful.errors import HeedfulError, HeedfulWarning, RunError
from heedful.runs.overrides import flatten_settings
from heedful.runs.pretrain.settings import PretrainSettings
from heedful.runs.results import BEFORE, JOURNAL, RESULTS, JsonObject
from heedful.settings import from_file, load_mapping, to_mapping, to_toml
from heedful.train.journal import read_journal
from heedful.train.ranks import Ranks
from heedful.train.run_lock import LOCK
from heedful.train.settings import TrainSettings
from heedful.train.trainer import DivergedError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SETTINGS, DATA, ENVIRONMENT, BAD_ROWS = "settings.toml", "data.json", "environment.json", "bad-rows.jsonl"
MAX_CHECKED = 100_000  # examples up to which the data of a run is checked for problems
Precision = Literal["float32", "bfloat16"]
Settings = TypeVar("Settings", bound="DataclassInstance")
METHOD = "method.json"  # scores of methods on held-out examples, and the method that was chosen
START_MODEL = "start"  # folder of the initial model, if it was made for the run
TOKENIZER, CORPUS = "tokenizer", "corpus"  # folders that pre-training makes from text
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
        if _names(folder) <= INITIAL_FILES:  # without a checkpoint the run takes other settings
            raise
        advice = f"{folder} resumes with its own settings: for others give another folder with --output"
        raise DivergedError(f"{error}. {advice}", error.step) from error
    except (OSError, SafetensorError) as error:
        reason, path = getattr(error, "strerror", None) or error, getattr(error, "filename", None)
        raise RunError(
            f"{folder}: the run stopped, since a file could not be written or read: {reason}"
            + (f" ({path})" if path else "")
            + ". Fix that and give the same command: it resumes from its newest checkpoint"
        ) from error


# -- is it a run, and the same one ------------------------------------------------------------------------------------


def visible_names(folder: Path) -> set[str]:
    """The names of files and folders in a folder, without hidden ones; empty if it is missing.

    Raises:
        RunError: If the folder cannot be read.
    """
    try:
        return _names(folder) if folder.exists() else set()
    except OSError as error:
        raise RunError(f"{folder} cannot be used: {error.strerror}: give another folder with --output") from None


def check_run_folder(folder: Path) -> None:
    """Refuse a folder that is neither a run nor empty nor missing; hidden files do not count."""
    names = visible_names(folder)
    is_run, is_begun = {LOCK, SETTINGS} <= names, LOCK in names and names <= INITIAL_FILES - CORPUS_FOLDERS
    if names and not is_run and not is_begun:
        listed, missing = sorted(names), " and ".join(sorted({LOCK, SETTINGS} - names))
        held = f"{', '.join(listed[:3])}{' and more' if listed[3:] else ''}"
        raise RunError(
            f"{folder} is not a run folder: it holds {held}, but no {missing}; give another folder with --output"
        )


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def resolve_auto(train: TrainSettings, folder: Path, ranks: Ranks, log: Callable[[str], None]) -> TrainSettings:
    """Replace "auto" as device and precision by what they are here, and say which GPU is used. All ranks call this.

    If the folder holds a run with a checkpoint, they are those of that run, on whatever machine it began. Otherwise the
    device is a GPU if there is one for each rank, and the precision bfloat16 if all devices have instructions for it.
    """
    gathered = ranks.all_gather_object((has_gpu(), _auto_of_run(folder) if ranks.is_main else (None, None)))
    begun_device, begun_precision = gathered[0][1]
    device = train.device
    if device == "auto":
        device = begun_device or ("cuda" if all(there for there, _ in gathered) else "cpu")
    place = resolve_device(device)
    fast = all(ranks.all_gather_object(has_fast_bfloat16(place)))
    precision = train.precision
    if precision == "auto":
        fastest: Precision = "bfloat16" if fast else "float32"
        precision = begun_precision or fastest
        if precision != fastest:
            slow = ", which is slow where there are no instructions for it" if precision == "bfloat16" else ""
            log(f"{folder} began with train.precision={precision}, and resumes with it{slow}")
    if place.type == "cuda":
        log(f"training on {device_name(place)} in {precision}")
    return replace(train, device=device, precision=precision)


def _auto_of_run(folder: Path) -> tuple[str | None, Precision | None]:
    """The device and the precision of a run that has a checkpoint; None for both if the folder holds no such run."""
    with suppress(OSError, HeedfulError):
        if not _names(folder) <= INITIAL_FILES:
            values = dict(flatten_settings(load_mapping(folder / SETTINGS)))
            device, precision = values.get("train.device"), values.get("train.precision")
            return str(device) if device else "cpu", precision if precision in ("float32", "bfloat16") else None
    return None, None


def can_resume(folder: Path, settings: DataclassInstance) -> bool:
    """Tell whether the folder holds a run with these settings; files of one that has no checkpoint yet are removed.

    A tokenizer and a corpus stay if only settings that do not concern the text differ; if they are removed, a warning
    says so.

    Raises:
        RunError: If the folder holds a run with other settings.
    """
    for path, _, _ in os.walk(folder):
        remove_stale(Path(path))
    names, before = _names(folder), _earlier_settings(folder, settings)
    made_corpus = isinstance(before, PretrainSettings)
    has_no_checkpoint = names <= INITIAL_FILES and (made_corpus or not names & CORPUS_FOLDERS)
    if has_no_checkpoint and (before != settings or JOURNAL not in names):
        lasting = {LOCK}
        if isinstance(before, PretrainSettings) and before.corpus_key == getattr(settings, "corpus_key", None):
            lasting |= {BAD_ROWS, *CORPUS_FOLDERS}
        elif CORPUS in names:
            message = f"{folder / CORPUS} was made with other settings of the text, and is made anew"
            warnings.warn(message, HeedfulWarning, stacklevel=2)
        for name in sorted(names - lasting, key=SETTINGS.__eq__):  # settings last, since they say what the others are
            remove(folder / name)
    if not (folder / SETTINGS).exists():
        return False
    before = read_settings(folder, type(settings))
    if before != settings:
        advice = ""
        if (folder / RESULTS).exists():
            advice = f". To train its model further, give --model {folder} and another --output"
        raise RunError(
            f"{folder} holds a run with other settings: {_differences(before, settings)}. Give another folder with "
            f"--output, the same settings to resume it, or --overwrite to replace it{advice}"
        )
    return True


def read_settings(folder: Path, kind: type[Settings], name: str = SETTINGS) -> Settings:
    """Read the settings of the run in a folder.

    Raises:
        RunError: If they are not of this kind.
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
    """The settings in the folder if they are of the same kind, else None."""
    try:
        return from_file(type(settings), folder / SETTINGS)
    except HeedfulError:
        return None


def _differences(before: DataclassInstance, now: DataclassInstance) -> str:
    """Names of settings that differ, with both values."""
    old, new = (dict(flatten_settings(to_mapping(settings))) for settings in (before, now))
    names = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    shown = [f"{name} was {old.get(name)!r} and is {new.get(name)!r} now" for name in names[:4]]
    return "; ".join(shown) + ("; and more" if names[4:] else "")


# -- begin ------------------------------------------------------------------------------------------------------------


def init_run_folder(folder: Path, settings: DataclassInstance) -> None:
    """Write settings and environment, or check that the run in the folder has the same settings.

    For runs that compare their data themselves; see `init_labelled_run` for the others.
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
    """Write settings, environment and facts about the data, or check that the run in the folder has the same ones.

    Args:
        folder: The run folder, which is locked.
        settings: Of the run.
        source: The data.
        counts: Number of examples of each split.
        reopen: Opens the data again, to set its bad rows aside in the folder.

    Raises:
        RunError: If the folder holds a run with other settings or other data.
    """
    if can_resume(folder, settings):
        about = read_run_json(folder / DATA)
        hashes, known = _hashes(source) | _corrections(source), about["files"] | about.get("corrections", {})
        if changed := sorted(name for name in {*hashes, *known} if hashes.get(name) != known.get(name)):
            more = f" and {len(changed) - 5} more" if changed[5:] else ""
            raise RunError(
                f"{folder} holds a run on other data: {', '.join(changed[:5])}{more} changed. Give another folder with "
                "--output, or put the data back to resume it"
            )
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
    about = {
        "stated": list(source.stated),
        "splits": {split: {"examples": count} for split, count in counts.items()},
        "files": _hashes(source),
        "corrections": _corrections(source),
        **({"layout": source.layout} if source.layout else {}),
        "columns": {role: list(names) for role, names in source.columns.items()},
        "trained_on": _short_names(source, "train"),
        "made_dev": source.has_generated_dev,
        "check": _check(source, sum(counts.values())),
        "bad_rows": {short_names.get(file, Path(file).name): count for file, count in source.row_errors.bad.items()},
    }
    write_file(folder / DATA, about)
    write_file(folder / SETTINGS, to_toml(settings))  # last: a folder with settings has all of them


def _check(source: Dataset[Example], examples: int) -> JsonObject | None:
    """Problems of the data as `heedful check` finds them; None if there are more than MAX_CHECKED examples."""
    if examples > MAX_CHECKED:
        return None
    report = check(source)
    return {"verdict": report.verdict(), "problems": [problem.line() for problem in report.problems]}


def _hashes(source: Dataset[Example]) -> dict[str, str]:
    """SHA-256 by short name: of each file, and of the examples of data that is not in files."""
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


def _corrections(source: Dataset[Example]) -> dict[str, str]:
    """SHA-256 of the file of corrections by its path; {} without such a file."""
    path = source.settings.corrections
    return {} if path is None else {path: sha256_of(path)}


def _short_names(source: Dataset[Example], split: str) -> list[str]:
    """The files of a split, relative to the folder that holds all files of the data."""
    files = [
        Path(path).absolute() for paths in source.names_by_split.values() for path in paths if os.path.exists(path)
    ]
    parent = os.path.commonpath([path.parent for path in files]) if files else ""
    paths = source.names_by_split.get(split, ())  # none if the split was made from another one
    return [Path(path).absolute().relative_to(parent).as_posix() if os.path.exists(path) else path for path in paths]


# -- what a run was trained on ----------------------------------------------------------------------------------------


def sha256_of(path: str | Path) -> str:
    """SHA-256 of a file, or of the names and hashes of the files in a folder."""
    if os.path.isdir(path):
        digest = hashlib.sha256()
        for file_path in sorted(entry for entry in Path(path).iterdir() if entry.is_file()):
            digest.update(f"{file_path.name} {sha256_of(file_path)}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_trained_on(run: str | Path, paths: Sequence[str]) -> tuple[str, ...]:
    """Files among `paths` that the run was trained on, matched by hash; empty if `run` is not a run folder."""
    if not (Path(run) / DATA).is_file():
        return ()
    about = read_run_json(Path(run) / DATA)
    hashes = {about["files"][name] for name in about.get("trained_on", ())}
    return tuple(path for path in paths if hashes and os.path.exists(path) and sha256_of(path) in hashes)


def label_layout(run: str | Path) -> Layout | None:
    """How the names of files or folders were a run's labels; None if its labels were in files, or `run` is no run."""
    try:
        name = read_run_json(Path(run) / DATA).get("layout")
    except (OSError, ValueError, AttributeError):
        return None
    return next((layout for layout in LAYOUTS if layout == name), None)


# -- files ------------------------------------------------------------------------------------------------------------


def write_file(path: Path, value: object) -> None:
    """Write text, or data as JSON, atomically."""
    text = value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    with atomic_path(path) as part:
        write_synced(part, [text.encode(errors="backslashreplace")])  # half a surrogate pair becomes \udxxx, as in JSON


def read_run_json(path: Path) -> JsonObject:
    """Read a JSON file of a run."""
    table: JsonObject = json.loads(path.read_bytes())
    return table


def journal_csv(journal: Path, more_rows: Sequence[Mapping[str, object]] = ()) -> str:
    """The journal as CSV: a row for each update or evaluation, and `more_rows` after them."""
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
    """The machine, and the versions of Heedful and the libraries that results depend on."""
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
