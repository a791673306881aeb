"""The route /search, compared with the index itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from heedful import SearchIndex
from heedful.data.retrieval.documents import Document
from heedful.errors import HeedfulError
from heedful.serve.run import RunningServer, background
from heedful.serve.service import load_models
from heedful.serve.settings import Limits, ServeSettings
from tests.search.test_index import DOCUMENTS
from tests.support.http_client import ask
from tests.support.model_folders import make_model_dir


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> SearchIndex:
    """An index of a few documents."""
    index = SearchIndex.create(tmp_path_factory.mktemp("served") / "index")
    index.add(DOCUMENTS)
    return index


@pytest.fixture(scope="module")
def server(index: SearchIndex) -> Iterator[RunningServer]:
    """A server of the index alone."""
    with background({"docs": str(index.folder)}) as running:
        yield running


def test_hits_equal_those_of_the_index(index: SearchIndex, server: RunningServer) -> None:
    for method in ("hybrid", "words", "vectors"):
        hits = ask(server.port, "/search", {"query": "a boat at sea", "top_k": 3, "method": method}).json
        expected = index.search("a boat at sea", 3, method=method)
        assert [hit["id"] for hit in hits] == [hit.id for hit in expected], method
        assert [hit["score"] for hit in hits] == pytest.approx([hit.score for hit in expected], abs=1e-4)
        assert [hit["passage"] for hit in hits] == [hit.passage for hit in expected]
    assert len(ask(server.port, "/search", {"query": "boat"}).json) == len(DOCUMENTS)


def test_the_route_is_documented(server: RunningServer) -> None:
    assert {"/search", "/embed"} <= set(ask(server.port, "/info").json["routes"])
    assert "/search" in ask(server.port, "/openapi.json").json["paths"]


def test_wrong_searches_are_refused(server: RunningServer) -> None:
    for body, message in (
        ({"query": " "}, "the query is empty"),
        ({"query": "a", "top_k": 0}, "top_k"),
        ({"query": "a", "method": "bm25"}, "method"),
    ):
        reply = ask(server.port, "/search", body)
        assert reply.status == 422 and message in str(reply.json), body


def test_hits_are_reranked_and_highlighted(index: SearchIndex, tmp_path: Path) -> None:
    ranker = str(make_model_dir(tmp_path / "ranker", "regression"))
    with background({"docs": str(index.folder), "ranker": ranker}) as server:
        body = {"query": "a boat at sea", "method": "vectors", "top_k": 3, "reranker": "ranker", "highlight": True}
        hits = ask(server.port, "/search", body).json
        expected = index.search("a boat at sea", 3, method="vectors", reranker=ranker)
        assert [hit["id"] for hit in hits] == [hit.id for hit in expected]
        assert [hit["score"] for hit in hits] == pytest.approx([hit.score for hit in expected], abs=1e-4)
        for hit in hits:
            spans = index.matches("a boat at sea", hit["passage"])
            assert hit["highlights"] == [list(span) for span in spans]
        for name, status in (("other", 404), ("docs", 422)):  # not served; the index's model cannot rank
            assert ask(server.port, "/search", body | {"reranker": name}).status == status
        assert ask(server.port, "/info?model=docs").json["index"] == {"documents": 6, "passages": 6}
        assert ask(server.port, "/info?model=ranker").json["index"] is None


def test_many_long_passages_are_reranked(tmp_path: Path) -> None:
    """The 50 passages have more tokens in total than a request may have."""
    index = SearchIndex.create(tmp_path / "index")
    index.add(Document(id=f"{number}", text=f"boat {number} " * 60) for number in range(50))
    settings = ServeSettings(limits=Limits(max_request_tokens=10_000))
    ranker = str(make_model_dir(tmp_path / "ranker", "regression"))
    with background({"docs": str(index.folder), "ranker": ranker}, settings) as server:
        reply = ask(server.port, "/search", {"query": "boat 7", "reranker": "ranker"})
        assert reply.status == 200, reply.json
        expected = index.search("boat 7", reranker=ranker)
        assert [hit["score"] for hit in reply.json] == pytest.approx([hit.score for hit in expected], abs=1e-4)


def test_an_index_is_served_in_float32(index: SearchIndex) -> None:
    with pytest.raises(HeedfulError, match="precision is int8, but the vectors of the index"):
        load_models(str(index.folder), precision="int8")
