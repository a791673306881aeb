"""A served cascade gives the answers of its engine, and counts them by stage."""

from __future__ import annotations

from pathlib import Path

import pytest

from heedful.infer.engine import Engine
from heedful.serve.run import background
from tests.support.cascades import TEXTS, make_cascade
from tests.support.http_client import ask


@pytest.fixture(scope="module")
def cascade(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a cascade of two stages."""
    return make_cascade(tmp_path_factory.mktemp("cascade"))


def test_a_served_cascade_answers_like_its_engine(cascade: Path) -> None:
    engine = Engine(cascade)
    answers = engine(TEXTS)
    assert {answer["stage"] for answer in answers} == {1, 2}
    with background({"cascade": str(cascade)}) as server:
        for first in range(0, len(TEXTS), 20):
            replies = ask(server.port, "/predict", {"inputs": [[text] for text in TEXTS[first : first + 20]]}).json
            for labels, answer in zip(replies, answers[first : first + 20], strict=True):
                scores = {label["label"]: label["score"] for label in labels}
                assert scores == pytest.approx(answer["probabilities"], abs=1e-5)
        single_response = ask(server.port, "/predict", {"inputs": TEXTS[0]}).json
        assert single_response[0]["label"] == answers[0]["label"]
        info = ask(server.port, "/info").json
        assert info["parameters"] == engine.parameters
        metrics = ask(server.port, "/metrics").body.decode()
        assert f'heedful_input_tokens_count{{model="cascade"}} {len(TEXTS) + 1}.0' in metrics
        stage_counts = [sum(answer["stage"] == stage for answer in [*answers, answers[0]]) for stage in (1, 2)]
        for stage, count in enumerate(stage_counts, start=1):
            assert f'heedful_cascade_answers_total{{model="cascade",stage="{stage}"}} {count}.0' in metrics
