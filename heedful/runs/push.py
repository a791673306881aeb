"""Upload a run's model to the Hugging Face hub: model card, safetensors and tokenizer, without texts of the data."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from heedful.errors import HeedfulError
from heedful.runs.card.finetuned import MISTAKES_HEADING
from heedful.runs.results import RESULTS

if TYPE_CHECKING:
    from huggingface_hub import HfApi

MODEL, CARD = "model", "README.md"
UPLOADED = (  # names in the model's folder
    CARD,
    "config.json",
    "generation_config.json",
    "heedful.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",  # of SentencePiece
    "*.spm",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "*_Pooling/config.json",
    "*_Normalize/config.json",
    "plots/*.png",
)
EXAMPLES = ("predictions-*.jsonl",)  # files of a run that quote texts of its data
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
NEW = {".gitattributes"}  # files of a repository that has just been made
LOGIN = "log in with `hf auth login`, or set HF_TOKEN to a token with write access"

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Upload:
    """A file to upload: its path in the repository, and its content, or where it is read from."""

    name: str
    content: bytes | Path

    @property
    def size(self) -> int:
        """Bytes."""
        return self.content.stat().st_size if isinstance(self.content, Path) else len(self.content)


@dataclass(frozen=True, kw_only=True, slots=True)
class PushPlan:
    """Files to upload, and files that are left out, with the reason."""

    repository: str
    private: bool
    files: tuple[Upload, ...]
    left_out: dict[str, str]  # reason by path in the run's folder


def plan_push(run: str | Path, repository: str, *, private: bool = True, with_examples: bool = False) -> PushPlan:
    """List what a push would upload and leave out; nothing is sent.

    Raises:
        HeedfulError: If `run` is not the folder of a finished run, or `repository` is not OWNER/NAME.
    """
    folder = Path(run)
    if not REPOSITORY.fullmatch(repository):
        raise HeedfulError(f"{repository!r} is not the name of a repository: give OWNER/NAME")
    if not (folder / RESULTS).is_file() or not (folder / MODEL / "config.json").is_file():
        raise HeedfulError(
            f"{folder} is not the folder of a finished run: it has no {RESULTS}, or no {MODEL}/config.json; give the "
            "folder that heedful finetune, distil or pretrain wrote"
        )
    files, left_out = [], dict[str, str]()
    for path in _files(folder / MODEL):
        name = path.relative_to(folder / MODEL).as_posix()
        if path.is_symlink() or not any(fnmatchcase(name, pattern) for pattern in UPLOADED):
            left_out[f"{MODEL}/{name}"] = "a link" if path.is_symlink() else "not a file of a model"
        elif name == CARD and not with_examples:
            text = path.read_text(encoding="utf-8")
            files.append(Upload(name=name, content=without_mistakes(text).encode()))
            if MISTAKES_HEADING in text:
                left_out[f"{MODEL}/{CARD}, mistakes"] = "quotes texts of the data; --with-examples uploads it"
        else:
            files.append(Upload(name=name, content=path))
    for path in sorted(folder.iterdir()):
        if path.name == MODEL or path.name.startswith("."):
            continue
        if any(fnmatchcase(path.name, pattern) for pattern in EXAMPLES) and path.is_file():
            if with_examples:
                files.append(Upload(name=path.name, content=path))
            else:
                left_out[path.name] = "quotes texts of the data; --with-examples uploads it"
        else:
            left_out[path.name + ("/" if path.is_dir() else "")] = "not part of the model"
    return PushPlan(repository=repository, private=private, files=tuple(files), left_out=left_out)


def _files(folder: Path) -> Iterator[Path]:
    """Yield files, also of folders in it, sorted; hidden ones are left out."""
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if (path.is_file() or path.is_symlink()) and not any(part.startswith(".") for part in parts):
            yield path


def without_mistakes(card: str) -> str:
    """Remove the section of a model card that quotes texts: from its heading to the next one of the same level."""
    lines, quotes = [], False
    for line in card.splitlines(keepends=True):
        if line.startswith(("# ", "## ")):
            quotes = line.strip() == MISTAKES_HEADING
        if not quotes:
            lines.append(line)
    return "".join(lines)


def push(planned: PushPlan) -> str:
    """Create the repository, upload the files in one commit, and return the address of that commit.

    An empty repository of that name is used; one with files is refused.

    Raises:
        HeedfulError: If there is no token, the repository has files or is public against the plan, or the hub fails.
    """
    from huggingface_hub import CommitOperationAdd, HfApi, get_token

    if not get_token():
        raise HeedfulError(f"there is no token for the hub: {LOGIN}")
    api = HfApi()
    _on_hub(planned, lambda: _create(api, planned))
    operations = [
        CommitOperationAdd(path_in_repo=file_path.name, path_or_fileobj=file_path.content)
        for file_path in planned.files
    ]
    commit = _on_hub(
        planned, lambda: api.create_commit(planned.repository, operations, commit_message="Upload a model of Heedful")
    )
    return str(commit.commit_url)


def _create(api: HfApi, planned: PushPlan) -> None:
    """Create the repository, or check that the one which exists is empty and as private as asked."""
    if not api.repo_exists(planned.repository):
        api.create_repo(planned.repository, private=planned.private)
        return
    known = api.model_info(planned.repository)
    if held := sorted({sibling.rfilename for sibling in known.siblings or ()} - NEW):
        raise HeedfulError(
            f"{planned.repository} exists and has files ({', '.join(held[:3])}{', ...' if held[3:] else ''}): give "
            "another name, or delete it on the hub"
        )
    if planned.private and not known.private:
        raise HeedfulError(f"{planned.repository} exists and is public: make it private on the hub, or give --public")


def _on_hub(planned: PushPlan, call: Callable[[], T]) -> T:
    """Call the hub, and raise its errors as HeedfulErrors."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        return call()
    except HeedfulError:
        raise
    except OfflineModeIsEnabled:
        raise HeedfulError("HF_HUB_OFFLINE is set, and a push needs the network: unset it") from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            what = f"the hub refused the token for {planned.repository} (HTTP {status}): {LOGIN}"
        else:
            what = f"{planned.repository} could not be uploaded: {_first(error)}; the same command tries again"
        raise HeedfulError(what) from None
    except Exception as error:  # the network's errors have no common base
        raise HeedfulError(
            f"{planned.repository} could not be uploaded: {_first(error)}; the same command tries again"
        ) from None


def _first(error: Exception) -> str:
    """The first line of an error, or its class where it has no text."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
