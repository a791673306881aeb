"""The code for vector databases in docs/searching.md: Qdrant's runs in memory, OpenSearch's with a fake server."""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from numpy.typing import ArrayLike

import heedful
from heedful.cli import main
from heedful.data.retrieval.documents import Document

PAGE = (Path(__file__).parents[1] / "docs" / "searching.md").read_text(encoding="utf-8")
NOTES = {
    "opening.md": "The shop is open from nine to six. On Sunday it is closed.",
    "saw.md": "A saw costs eight euros.",
    "drill.md": "You may return the drill within fourteen days.",
    "van.md": "A van can be rented with the ladder.",
}


def snippet(first_import: str) -> str:
    """Return the indented block of the page that begins with an import."""
    (block,) = re.findall(rf"\n\n((?:    {first_import})(?:.|\n)*?)\n\n(?=\S)", PAGE)
    return textwrap.dedent(str(block))


def cosine(a: ArrayLike, b: ArrayLike) -> float:
    return float(np.dot(a, b) / np.linalg.norm(a) / np.linalg.norm(b))


def nearest_two(names: dict[str, Any]) -> list[tuple[str, float]]:
    """Return the ids of the two notes that are nearest to the page's query, with their cosines."""
    rows = [row for batch in names["batches"]("vectors") for row in batch]
    scores = {row["input"]["id"]: cosine(row["vector"], names["query"]) for row in rows}
    return sorted(scores.items(), key=lambda item: -item[1])[:2]


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that the code of the page defines, such as `query` and `batches`; one row of its files has no text."""
    monkeypatch.chdir(tmp_path)
    rows: list[dict[str, str | None]] = [{"id": name, "text": text} for name, text in NOTES.items()]
    rows_by_file = {"a.jsonl": rows[:2], "b.jsonl": [*rows[2:], {"id": "empty.md", "text": None}]}
    for name, file_rows in rows_by_file.items():
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in file_rows))
    with pytest.raises(SystemExit) as stop:
        main(["predict", "heedful-mini-en", "--file", "a.jsonl", "b.jsonl", "--output", "vectors"])
    assert not stop.value.code
    values: dict[str, Any] = {}
    (block,) = (block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "def batches" in block)
    exec(block, values)
    return values


def test_qdrant(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("qdrant_client")
    capsys.readouterr()
    exec(snippet("import uuid"), names)
    expected = [f"{name} {round(score, 2)}" for name, score in nearest_two(names)]
    assert capsys.readouterr().out.splitlines() == expected and expected[0].startswith("opening.md")


def test_qdrant_ranks_as_an_exact_index(names: dict[str, Any]) -> None:
    pytest.importorskip("qdrant_client")
    exec(snippet("import uuid"), names)
    index = heedful.SearchIndex.create("shop", vectors="float32")
    index.add([Document(id=name, text=text) for name, text in NOTES.items()])
    for question in ("when do you open on weekends?", "how much is the saw?", "how do I carry a ladder?"):
        vector = names["engine"].encode_query(question).tolist()
        points = names["client"].query_points("shop", query=vector, limit=10).points
        hits = index.search(question, method="vectors")
        assert [point.payload["id"] for point in points] == [hit.id for hit in hits]
        assert [point.score for point in points] == pytest.approx([hit.score for hit in hits], abs=1e-5)
        assert {hit.id for hit in hits} == set(NOTES)


def test_opensearch(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("opensearchpy")
    capsys.readouterr()
    with opensearch() as (url, index):
        exec(snippet("from opensearchpy").replace("http://localhost:9200", url), names)
    assert {name: document["text"] for name, document in index["documents"].items()} == NOTES
    mapping = index["body"]["mappings"]["properties"]["vector"]
    assert mapping["dimension"] == len(names["query"]) == len(index["documents"]["saw.md"]["vector"])
    assert mapping["method"]["space_type"] == "cosinesimil"
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    expected = nearest_two(names)
    assert [line[0] for line in lines] == [name for name, _ in expected]
    assert [float(line[1]) for line in lines] == pytest.approx([(1 + score) / 2 for _, score in expected])


def test_the_lines_for_pgvector_are_python() -> None:
    imports = [node for node in ast.walk(ast.parse(snippet("import pgvector"))) if isinstance(node, ast.ImportFrom)]
    assert [node.module for node in imports] == ["pgvector.psycopg"]


@contextmanager
def opensearch() -> Iterator[tuple[str, dict[str, Any]]]:
    """Serve the requests for an index, bulk and nearest neighbours as OpenSearch's documentation describes them."""
    index: dict[str, Any] = {"documents": {}}

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            data = self.rfile.read(int(self.headers.get("content-length") or 0))
            path = self.path.partition("?")[0]
            if self.command == "PUT" and path == "/shop":
                index["body"] = json.loads(data)
                return self.reply({"acknowledged": True, "index": "shop"})
            if path == "/_bulk":
                lines = [json.loads(line) for line in data.splitlines()]
                for action, document in zip(lines[::2], lines[1::2], strict=True):
                    assert action["index"]["_index"] == "shop"
                    index["documents"][action["index"]["_id"]] = document
                items = [{"index": {**action["index"], "status": 201}} for action in lines[::2]]
                return self.reply({"errors": False, "items": items})
            assert path == "/shop/_search", self.path
            knn = json.loads(data)["query"]["knn"]["vector"]
            scores = {
                name: (1 + cosine(document["vector"], knn["vector"])) / 2  # the score of Lucene's `cosinesimil`
                for name, document in index["documents"].items()
            }
            best = sorted(scores, key=scores.__getitem__, reverse=True)[: knn["k"]]
            return self.reply({"hits": {"hits": [{"_id": name, "_score": scores[name]} for name in best]}})

        def do_PUT(self) -> None:
            self.answer()

        def do_POST(self) -> None:
            self.answer()

        def reply(self, body: object) -> None:
            content = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", index
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
