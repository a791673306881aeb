"""`heedful push`: upload a run's model, card and tokenizer to the Hugging Face hub, without texts of the data.

`plan_push` lists what is uploaded and what is not, and `push` uploads it.
"""

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

MODEL = "model"  # folder of the model in a run folder
CARD = "README.md"  # model card in the model's folder
UPLOADED = (  # patterns of the files in the model's folder that are uploaded
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
    "*.model",  # SentencePiece models
    "*.spm",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "*_Pooling/config.json",
    "*_Normalize/config.json",
    "plots/*.png",
)
QUOTING_FILES = ("predictions-*.jsonl",)  # patterns of files in a run folder that quote texts of the data
QUOTES_TEXTS = "quotes texts of the data; --with-examples uploads it"
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
EMPTY_REPOSITORY = {".gitattributes"}  # files that a new repository on the hub has already
LOGIN_ADVICE = "log in with `hf auth login`, or set HF_TOKEN to a token with write access"

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Upload:
    """A file to upload."""

    name: str  # path in the repository
    content: bytes | Path  # the content, or a file with the content

    @property
    def size(self) -> int:
        """The size in bytes."""
        return self.content.stat().st_size if isinstance(self.content, Path) else len(self.content)


@dataclass(frozen=True, kw_only=True, slots=True)
class PushPlan:
    """Files to upload to a repository, and files that are left out."""

    repository: str  # OWNER/NAME
    private: bool
    files: tuple[Upload, ...]
    left_out: dict[str, str]  # why a file is left out, by its path in the run folder


def plan_push(run: str | Path, repository: str, *, private: bool = True, with_examples: bool = False) -> PushPlan:
    """List the files that a push uploads and leaves out. Nothing is sent.

    Args:
        run: The folder of a finished run.
        repository: OWNER/NAME on the hub.
        private: Whether the repository must be private.
        with_examples: Whether to upload the files, and the section of the model card, that quote texts of the data.

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
    model_files, model_left_out = _plan_model_folder(folder / MODEL, with_examples)
    other_files, other_left_out = _plan_other_files(folder, with_examples)
    return PushPlan(
        repository=repository,
        private=private,
        files=(*model_files, *other_files),
        left_out=model_left_out | other_left_out,
    )


def _plan_model_folder(model_folder: Path, with_examples: bool) -> tuple[list[Upload], dict[str, str]]:
    """Return the files in the model's folder to upload, and the reason for each one that is left out."""
    files, left_out = [], dict[str, str]()
    for path in _files(model_folder):
        name = path.relative_to(model_folder).as_posix()
        if path.is_symlink():
            left_out[f"{MODEL}/{name}"] = "a link"
        elif not any(fnmatchcase(name, pattern) for pattern in UPLOADED):
            left_out[f"{MODEL}/{name}"] = "not a file of a model"
        elif name == CARD and not with_examples:
            text = path.read_text(encoding="utf-8")
            files.append(Upload(name=name, content=without_mistakes(text).encode()))
            if MISTAKES_HEADING in text:
                left_out[f"{MODEL}/{CARD}, mistakes"] = QUOTES_TEXTS
        else:
            files.append(Upload(name=name, content=path))
    return files, left_out


def _plan_other_files(folder: Path, with_examples: bool) -> tuple[list[Upload], dict[str, str]]:
    """Return the files to upload that are directly in a run folder, and the reason for each one that is left out."""
    files, left_out = [], dict[str, str]()
    for path in sorted(folder.iterdir()):
        if path.name == MODEL or path.name.startswith("."):
            continue
        quotes_texts = path.is_file() and any(fnmatchcase(path.name, pattern) for pattern in QUOTING_FILES)
        if quotes_texts and with_examples:
            files.append(Upload(name=path.name, content=path))
        elif quotes_texts:
            left_out[path.name] = QUOTES_TEXTS
        else:
            left_out[path.name + ("/" if path.is_dir() else "")] = "not part of the model"
    return files, left_out


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files and links in a folder and its subfolders, sorted, without hidden ones."""
    for path in sorted(folder.rglob("*")):
        is_hidden = any(name.startswith(".") for name in path.relative_to(folder).parts)
        if (path.is_file() or path.is_symlink()) and not is_hidden:
            yield path


def without_mistakes(card: str) -> str:
    """Remove the section of a model card that quotes texts, up to the next heading of the same level."""
    lines = []
    in_mistakes = False
    for line in card.splitlines(keepends=True):
        if line.startswith(("# ", "## ")):
            in_mistakes = line.strip() == MISTAKES_HEADING
        if not in_mistakes:
            lines.append(line)
    return "".join(lines)


def push(plan: PushPlan) -> str:
    """Create the repository, upload the files in one commit, and return the URL of the commit.

    If the repository exists, it must be empty.

    Raises:
        HeedfulError: If no access token is set, if the repository has files, if it is public but the plan is private,
            or if a request to the hub fails.
    """
    from huggingface_hub import CommitOperationAdd, HfApi, get_token

    if not get_token():
        raise HeedfulError(f"there is no token for the hub: {LOGIN_ADVICE}")
    api = HfApi()
    _call_hub(plan, lambda: _create_repository(api, plan))
    operations = [CommitOperationAdd(path_in_repo=upload.name, path_or_fileobj=upload.content) for upload in plan.files]
    commit = _call_hub(
        plan, lambda: api.create_commit(plan.repository, operations, commit_message="Upload a model of Heedful")
    )
    return str(commit.commit_url)


def _create_repository(api: HfApi, plan: PushPlan) -> None:
    """Create the repository, or check that an existing one is empty, and private if the plan is private."""
    if not api.repo_exists(plan.repository):
        api.create_repo(plan.repository, private=plan.private)
        return
    existing = api.model_info(plan.repository)
    if names := sorted({sibling.rfilename for sibling in existing.siblings or ()} - EMPTY_REPOSITORY):
        raise HeedfulError(
            f"{plan.repository} exists and has files ({', '.join(names[:3])}{', ...' if names[3:] else ''}): give "
            "another name, or delete it on the hub"
        )
    if plan.private and not existing.private:
        raise HeedfulError(f"{plan.repository} exists and is public: make it private on the hub, or give --public")


def _call_hub(plan: PushPlan, call: Callable[[], T]) -> T:
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
            raise HeedfulError(
                f"the hub refused the token for {plan.repository} (HTTP {status}): {LOGIN_ADVICE}"
            ) from None
        raise _upload_error(plan, error) from None
    except Exception as error:  # errors of the network have no common base class
        raise _upload_error(plan, error) from None


def _upload_error(plan: PushPlan, error: Exception) -> HeedfulError:
    """Return the error for a failed upload, with the first line of the cause, or the class of a cause without text."""
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return HeedfulError(f"{plan.repository} could not be uploaded: {reason}; the same command tries again")
