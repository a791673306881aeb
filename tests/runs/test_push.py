"""What heedful push uploads and leaves out, against a local server in place of the hub."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import huggingface_hub.constants
import pytest
from typer.testing import CliRunner

from heedful.cli import app
from heedful.errors import HeedfulError
from heedful.runs.push import PushPlan, plan_push, push

SECRET = "my doctor called about the results"
CARD = f"""---
library_name: heedful
---

# A classifier

## The worst mistakes on dev

| text | right | said |
| --- | --- | --- |
| {SECRET} | a | b |

## Limits

- Measured on dev.
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a finished run."""
    folder = tmp_path / "run"
    (folder / "model" / "1_Pooling").mkdir(parents=True)
    (folder / "checkpoints").mkdir()
    for name, text in {
        "model/config.json": "{}",
        "model/model.safetensors": "weights",
        "model/tokenizer.json": "{}",
        "model/1_Pooling/config.json": "{}",
        "model/README.md": CARD,
        "model/notes.txt": SECRET,
        "results.json": "{}",
        "settings.toml": "",
        "predictions-dev.jsonl": SECRET,
        "bad-rows.jsonl": SECRET,
    }.items():
        (folder / name).write_text(text)
    (folder / "model" / "vocab.txt").symlink_to(folder / "bad-rows.jsonl")
    return folder


class Hub:
    """A fake of the hub's HTTP API, with the requests of a push."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, Any]] = {}  # {"private": bool, "files": {path: content}} by OWNER/NAME
        self.refused: dict[str, int] = {}  # HTTP status of requests whose path contains the key
        self.paths: list[str] = []  # paths of all requests

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        """Return the HTTP status and the JSON content of the response to a request."""
        self.paths.append(path)
        if status := next((status for part, status in self.refused.items() if part in path), 0):
            return status, {"error": "refused"}
        if path == "/api/repos/create":
            request = json.loads(body)
            name = f"{request['organization']}/{request['name']}"
            private = request.get("private") is True or request.get("visibility") == "private"
            self.repositories[name] = {"private": private, "files": {}}
            return 200, {"url": f"https://huggingface.co/{name}"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        name = "/".join(path.split("/")[3:5]).partition("?")[0]
        if name not in self.repositories:
            return 404, {"error": "Repository not found"}
        repository = self.repositories[name]
        if "/preupload/" in path:
            paths = [file["path"] for file in json.loads(body)["files"]]
            return 200, {
                "files": [{"path": file_path, "uploadMode": "regular", "shouldIgnore": False} for file_path in paths]
            }
        if "/commit/" in path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    repository["files"][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return 200, {"commitUrl": f"https://huggingface.co/{name}/commit/abc", "commitOid": "abc", "success": True}
        siblings = [{"rfilename": file_path} for file_path in (".gitattributes", *repository["files"])]
        return 200, {"id": name, "private": repository["private"], "siblings": siblings, "sha": "abc", "tags": []}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A fake hub on a local port, to which huggingface_hub sends its requests, and a token for it."""
    fake_hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            status, content = fake_hub.answer(self.path, body)
            response = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(response)))
            if content == {"error": "Repository not found"}:
                self.send_header("x-error-code", "RepoNotFound")
            self.end_headers()
            self.wfile.write(response)

        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            self._answer()

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(huggingface_hub, "HfApi", partial(huggingface_hub.HfApi, endpoint=endpoint))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_token")
    yield fake_hub
    server.shutdown()
    server.server_close()
    thread.join(5)


def uploaded_names(plan: PushPlan) -> set[str]:
    """Return the names of the files that a push uploads."""
    return {upload.name for upload in plan.files}


# names of the uploaded files of the fixture `run`
MODEL = {"config.json", "model.safetensors", "tokenizer.json", "1_Pooling/config.json", "README.md"}


def test_model_card_weights_and_tokenizer_are_uploaded_and_no_texts(run: Path, hub: Hub) -> None:
    assert push(plan_push(run, "me/model")) == "https://huggingface.co/me/model/commit/abc"
    repository = hub.repositories["me/model"]
    files = repository["files"]
    assert repository["private"]
    assert set(files) == MODEL
    assert not any(SECRET.encode() in content for content in files.values())
    card_without_mistakes = CARD[: CARD.index("## The worst")] + CARD[CARD.index("## Limits") :]
    assert files["README.md"].decode() == card_without_mistakes
    assert files["model.safetensors"] == b"weights"


def test_examples_and_a_public_repository_are_options(run: Path, hub: Hub) -> None:
    push(plan_push(run, "me/model", private=False, with_examples=True))
    repository = hub.repositories["me/model"]
    assert not repository["private"]
    assert set(repository["files"]) == MODEL | {"predictions-dev.jsonl"}
    assert repository["files"]["README.md"].decode() == CARD


def test_everything_left_out_is_listed_with_its_reason(run: Path) -> None:
    left_out = plan_push(run, "me/model").left_out
    assert left_out["model/notes.txt"] == "not a file of a model"
    assert left_out["model/vocab.txt"] == "a link"
    assert "--with-examples" in left_out["predictions-dev.jsonl"]
    for name in ("settings.toml", "bad-rows.jsonl", "checkpoints/"):
        assert left_out[name] == "not part of the model"


def test_an_empty_repository_is_used_and_one_with_files_is_refused(run: Path, hub: Hub) -> None:
    hub.repositories["me/model"] = {"private": True, "files": {}}
    push(plan_push(run, "me/model"))
    with pytest.raises(HeedfulError, match="me/model exists and has files"):
        push(plan_push(run, "me/model"))
    hub.repositories["me/open"] = {"private": False, "files": {}}
    with pytest.raises(HeedfulError, match="is public"):
        push(plan_push(run, "me/open"))
    assert not hub.repositories["me/open"]["files"]


@pytest.mark.parametrize(
    ("part", "status", "message"),
    [
        ("create", 403, "refused the token"),
        ("create", 401, "refused the token"),
        ("commit", 400, "could not be uploaded"),
    ],
)
def test_refusals_of_the_hub_teach(part: str, status: int, message: str, run: Path, hub: Hub) -> None:
    hub.refused[part] = status
    with pytest.raises(HeedfulError, match=message):
        push(plan_push(run, "me/model"))


def test_without_a_token_or_a_network_nothing_is_sent(run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(HeedfulError, match="there is no token"):
        push(plan_push(run, "me/model"))
    assert not hub.paths
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_token")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HeedfulError, match="HF_HUB_OFFLINE is set"):
        push(plan_push(run, "me/model"))
    assert not hub.paths


def test_a_folder_without_a_run_and_a_wrong_repository_name_are_refused(run: Path, tmp_path: Path) -> None:
    for folder in (tmp_path, run / "model", tmp_path / "absent"):
        with pytest.raises(HeedfulError, match="is not the folder of a finished run"):
            plan_push(folder, "me/model")
    for name in ("model", "me/", "a/b/c", "me/mo del", "me/model@main"):
        with pytest.raises(HeedfulError, match="is not the name of a repository"):
            plan_push(run, name)


def test_a_dry_run_lists_and_sends_nothing(run: Path, hub: Hub) -> None:
    json_run = CliRunner().invoke(app, ["push", str(run), "me/model", "--dry-run", "--json"])
    assert json_run.exit_code == 0
    assert not hub.paths
    content = json.loads(json_run.stdout)
    assert content["private"]
    assert content["url"] is None
    assert {file["name"] for file in content["files"]} == MODEL == uploaded_names(plan_push(run, "me/model"))
    text_run = CliRunner().invoke(app, ["push", str(run), "me/model", "--dry-run"])
    assert "would upload to me/model (private)" in text_run.stderr
    assert "predictions-dev.jsonl" in text_run.stderr
