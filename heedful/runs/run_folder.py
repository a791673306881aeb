"""A run's folder: what is written at its beginning, and whether a run that is there is the same one."""

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
from typing import Any, Literal

import torch
from safetensors import SafetensorError

import heedful
from heedful.atomic_io import put, remove, sweep, whole
from heedful.data import SetAside, Source, escape_cell
from heedful.data.labelled.class_folders import LAYOUTS, Layout
from heedful.device import CPU, device_of, fast_bfloat16
from heedful.errors import HeedfulError, HeedfulWarning
from heedful.runs.card.baseline import BEFORE
from heedful.runs.finetune.settings import flatten_settings
from heedful.runs.pretrain.settings import PretrainSettings
from heedful.runs.results import JOURNAL, RESULTS
from heedful.settings import from_file, load_mapping, to_mapping, to_toml
from heedful.train.checkpoint import LOCK
from heedful.train.journal import read_journal
from heedful.train.ranks import Ranks
from heedful.train.settings import TrainSettings
from heedful.train.trainer import DivergedError

SETTINGS, DATA, ENVIRONMENT, BAD_ROWS = "settings.toml", "data.json", "environment.json", "bad-rows.jsonl"
Precision = Literal["float32", "bfloat16"]
START_MODEL = "start"  # the model that training starts from, where it was made for the run
TOKENIZER, CORPUS = "tokenizer", "corpus"  # of a text, made for a run that pre-trains
CORPUS_FOLDERS = {TOKENIZER, CORPUS}
INITIAL_FILES = {
    SETTINGS,
    DATA,
    ENVIRONMENT,
    BAD_ROWS,
    LOCK,
    START_MODEL,
    BEFORE,
    JOURNAL,
} | CORPUS_FOLDERS  # all that is there before a checkpoint


@contextmanager
def translate_io_errors(folder: Path) -> Iterator[None]:
    """What the disk says, in words."""
    try:
        yield
    except DivergedError as error:
        if _names(folder) <= INITIAL_FILES:  # other settings are taken there
            raise
        more = f"{folder} resumes with its own settings: for others give another folder with --output"
        raise DivergedError(f"{error}. {more}", error.step) from error
    except (OSError, SafetensorError) as error:
        what, where = getattr(error, "strerror", None) or error, getattr(error, "filename", None)
        raise HeedfulError(
            f"{folder}: the run stopped, since a file could not be written or read: {what}"
            + (f" ({where})" if where else "")
            + ". Fix that and give the same command: it resumes from its newest checkpoint"
        ) from error


def visible_names(folder: Path) -> set[str]:
    """The names of what a folder holds, without hidden files; one that cannot be read is an error."""
    try:
        return _names(folder) if folder.exists() else set()
    except OSError as error:
        raise HeedfulError(f"{folder} cannot be used: {error.strerror}: give another folder with --output") from None


def check_run_folder(folder: Path) -> None:
    """A folder that is neither a run nor free is an error; hidden files do not count."""
    names = visible_names(folder)
    is_run, is_begun = {LOCK, SETTINGS} <= names, LOCK in names and names <= INITIAL_FILES - CORPUS_FOLDERS
    if names and not is_run and not is_begun:
        inside, missing = sorted(names), " and ".join(sorted({LOCK, SETTINGS} - names))
        raise HeedfulError(
            f"{folder} is no run: it holds {', '.join(inside[:3])}{' and more' if inside[3:] else ''}, but no "
            f"{missing}; give another folder with --output"
        )


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def resolve_precision(train: TrainSettings, folder: Path, ranks: Ranks, log: Callable[[str], None]) -> TrainSettings:
    """With the precision that "auto" is: that of a run which goes on in the folder, on whatever machine it began; else
    bfloat16 where the devices of all ranks, which have to be there, have instructions for it. All ranks come here.
    """
    fast = fast_bfloat16(CPU if train.device is None else device_of(train.device))
    told = ranks.gather((fast, _begun_with(folder) if ranks.first else None))
    if train.precision != "auto":
        return train
    usual: Precision = "bfloat16" if all(each for each, _ in told) else "float32"
    begun: Precision | None = told[0][1]
    if begun not in (None, usual):
        slow = ", which is slow where there are no instructions for it" if begun == "bfloat16" else ""
        log(f"{folder} began with train.precision={begun}, and resumes with it{slow}")
    return replace(train, precision=begun or usual)


def _begun_with(folder: Path) -> Any:
    """The precision of a run that has more than its beginning; None: there is none."""
    with suppress(OSError, HeedfulError):
        if not _names(folder) <= INITIAL_FILES:
            found = dict(flatten_settings(load_mapping(folder / SETTINGS))).get("train.precision")
            return found if found in ("float32", "bfloat16") else None
    return None


def can_resume(folder: Path, settings: Any) -> bool:
    """Whether the folder holds a run already, which has to have the same settings; what has nothing yet is cleared.

    What was made of a text goes where another run of the same kind begins there with other settings of the text alone,
    and that is warned of.
    """
    for each, _, _ in os.walk(folder):
        sweep(Path(each))
    names, before = _names(folder), _before(folder, settings)
    of_text = isinstance(before, PretrainSettings)
    if (
        names <= INITIAL_FILES
        and (of_text or not names & CORPUS_FOLDERS)
        and (before != settings or JOURNAL not in names)
    ):
        kept = {LOCK}
        if of_text and before.text == settings.text:
            kept |= {BAD_ROWS, *CORPUS_FOLDERS}
        elif CORPUS in names:
            said = f"{folder / CORPUS} was made with other settings of the text, and is made anew"
            warnings.warn(said, HeedfulWarning, stacklevel=2)
        for name in sorted(names - kept, key=SETTINGS.__eq__):  # they go last, as they say what the others are
            remove(folder / name)
    if not (folder / SETTINGS).exists():
        return False
    before = read_settings(folder, type(settings))
    if before != settings:
        more = ""
        if (folder / RESULTS).exists():
            more = f". To train its model further, give --model {folder} and another --output"
        raise HeedfulError(
            f"{folder} holds a run with other settings: {_differences(before, settings)}. Give another folder with "
            f"--output, the same settings to resume it, or --overwrite to replace it{more}"
        )
    return True


def read_settings(folder: Path, kind: type[Any], name: str = SETTINGS) -> Any:
    """The settings of the run in a folder, which has to be of that kind."""
    try:
        return from_file(kind, folder / name)
    except HeedfulError as error:
        first = str(error).splitlines()[0]
        raise HeedfulError(
            f"{folder} holds a run of another kind, or of another version of Heedful ({first}). Give another folder "
            "with --output"
        ) from None


def _before(folder: Path, settings: Any) -> Any:
    """The settings of the same kind that were begun with; None: there are none."""
    try:
        return from_file(type(settings), folder / SETTINGS)
    except HeedfulError:
        return None


def init_run_folder(folder: Path, settings: Any) -> None:
    """The same for a run that says itself whether its data is the same."""
    if not can_resume(folder, settings):
        write_file(folder / ENVIRONMENT, environment())
        write_file(folder / SETTINGS, to_toml(settings))


def init_labelled_run(
    folder: Path,
    settings: Any,
    source: Source[Any],
    counts: Mapping[str, int],
    reopen: Callable[[SetAside], Source[Any]],
) -> None:
    """Write what the run is, or see that the one which is there is the same; one that has nothing yet is begun anew.

    `counts` are the examples of each split. `reopened` gives the source again, so that its bad rows, if it has any,
    can be set aside in the folder.
    """
    if can_resume(folder, settings):
        hashes, known = _hashes(source), read_json(folder / DATA)["files"]
        if changed := sorted(name for name in {*hashes, *known} if hashes.get(name) != known.get(name)):
            more = f" and {len(changed) - 5} more" if changed[5:] else ""
            raise HeedfulError(
                f"{folder} holds a run on other data: {', '.join(changed[:5])}{more} changed. Give another folder with "
                "--output, or put the data back to resume it"
            )
        return
    if source.sieve.bad:
        again = reopen(SetAside(file=folder / BAD_ROWS))
        for split in again.splits:
            deque(again.examples(split), maxlen=0)
    write_file(folder / ENVIRONMENT, environment())
    shorts = {
        place: name
        for split, places in source.places.items()
        for place, name in zip(places, _shorts(source, split), strict=True)
    }
    about = {
        "stated": list(source.stated),
        "splits": {split: {"examples": count} for split, count in counts.items()},
        "files": _hashes(source),
        **({"layout": source.layout} if source.layout else {}),
        "columns": {role: list(names) for role, names in source.columns.items()},
        "trained_on": _shorts(source, "train"),
        "made_dev": source.made_dev,
        "bad_rows": {shorts.get(file, Path(file).name): count for file, count in source.sieve.bad.items()},
    }
    write_file(folder / DATA, about)
    write_file(folder / SETTINGS, to_toml(settings))  # last: a run has all of them


def _hashes(source: Source[Any]) -> dict[str, str]:
    """SHA-256 of every file that is read, and of the examples of every object that is none, by short names."""
    found = {}
    for split, places in source.places.items():
        for place, name in zip(places, _shorts(source, split), strict=True):
            if os.path.exists(place):
                found[name] = sha256_of(place)
            else:
                digest = hashlib.sha256()
                for example in source.examples(split):
                    digest.update(repr(example).encode(errors="backslashreplace"))
                found[name] = digest.hexdigest()
    return found


def _shorts(source: Source[Any], split: str) -> list[str]:
    """What the places of a split are called: files below the folder that holds all of the source's."""
    files = [Path(place).absolute() for each in source.places.values() for place in each if os.path.exists(place)]
    above = os.path.commonpath([path.parent for path in files]) if files else ""
    places = source.places.get(split, ())  # none, where it was made of another one
    return [Path(each).absolute().relative_to(above).as_posix() if os.path.exists(each) else each for each in places]


def sha256_of(place: str | Path) -> str:
    """SHA-256 of a file, or of the names and hashes of a folder's files."""
    if os.path.isdir(place):
        digest = hashlib.sha256()
        for path in sorted(path for path in Path(place).iterdir() if path.is_file()):
            digest.update(f"{path.name} {sha256_of(path)}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()
    with Path(place).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_trained_on(run: str | Path, paths: Sequence[str]) -> tuple[str, ...]:
    """Those of these files that a run learned from, wherever they lie now; none of what is no run."""
    if not (Path(run) / DATA).is_file():
        return ()
    about = read_json(Path(run) / DATA)
    learned = {about["files"][name] for name in about.get("trained_on", ())}
    return tuple(each for each in paths if learned and os.path.exists(each) and sha256_of(each) in learned)


def label_layout(run: str | Path) -> Layout | None:
    """Return in which layout a run's labels were names of files or folders; None: they were in files."""
    try:
        found = read_json(Path(run) / DATA).get("layout")
    except (OSError, ValueError, AttributeError):  # a model folder that is no run
        return None
    return next((layout for layout in LAYOUTS if layout == found), None)


def _differences(before: Any, now: Any) -> str:
    """Names of settings that differ, with both values."""
    old, new = (dict(flatten_settings(to_mapping(each))) for each in (before, now))
    names = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    each = [f"{name} was {old.get(name)!r} and is {new.get(name)!r} now" for name in names[:4]]
    return "; ".join(each) + ("; and more" if names[4:] else "")


# -- files ----------------------------------------------------------------------------------------------------


def write_file(path: Path, value: Any) -> None:
    """Text, or data as JSON; there whole or not at all."""
    text = value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    with whole(path) as part:
        put(part, [text.encode(errors="backslashreplace")])  # half a surrogate pair becomes \udxxx, as in JSON


def read_json(path: Path) -> dict[str, Any]:
    """A file that `write` made."""
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found


def journal_csv(journal: Path, more_rows: Sequence[Mapping[str, Any]] = ()) -> str:
    """The journal as CSV: a row for each update or evaluation, and after them `more` rows."""
    rows = [row | {f"dev_{name}": value for name, value in row.pop("dev", {}).items()} for row in read_journal(journal)]
    rows += map(dict, more_rows)
    names = dict.fromkeys(name for row in rows for name in row)
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(map(escape_cell, names))
    for row in rows:
        table.writerow(escape_cell(str(row.get(name, ""))) for name in names)
    return out.getvalue()


def environment() -> dict[str, Any]:
    """The machine and the versions."""
    import numpy
    import safetensors
    import tokenizers

    can = torch.cpu.get_capabilities()
    features = [name for name in ("amx_bf16", "avx512_bf16", "avx512_f", "avx2") if can.get(name)]
    name = can.get("cpu_name") or platform.processor() or platform.machine()
    return {
        "machine": f"{name}, {os.cpu_count()} cores, {' '.join(features) or 'no vector extensions known'}",
        "system": platform.platform(),
        "threads": torch.get_num_threads(),
        "versions": {
            "heedful": heedful.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "tokenizers": tokenizers.__version__,
            "safetensors": safetensors.__version__,
            "numpy": numpy.__version__,
        },
    }
