"""`heedful look --analogy` and `--positions` print tables, or JSON, without serving a page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from heedful.cli import main
from tests.support.model_folders import make_model_dir


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return what `heedful look` prints to standard output; it must succeed."""
    with pytest.raises(SystemExit) as exit_info:
        main(["look", *arguments])
    assert not exit_info.value.code
    return capsys.readouterr().out


def test_an_analogy_lists_the_nearest_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "heedful-mini-en", "--analogy", "king", "man", "woman").splitlines()
    assert lines[0] == "king - man + woman" and "queen" in [line.split()[0] for line in lines[1:4]]
    nearest = json.loads(printed(capsys, "heedful-mini-en", "--analogy", "king", "man", "woman", "--json"))
    assert [line.split()[0] for line in lines[1:]] == [token["text"] for token in nearest]
    assert f"{nearest[0]['cosine']:.3f}" == lines[1].split()[1]


def test_positions_of_a_learned_table(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "heedful-mini-en", "--positions")
    assert "Learned table" in text and "A trained vector for each of 512 positions" in text
    (view,) = json.loads(printed(capsys, "heedful-mini-en", "--positions", "--json"))
    assert view["similarity_by_distance"][0] == pytest.approx(1.0) and len(view["similarity"]) == 128
    row = next(line.split() for line in text.splitlines() if line.split()[:1] == ["8"])
    assert row[1] == f"{view['similarity_by_distance'][8]:+.3f}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--positions", "--port", "8000"], "--port was given: --analogy and --positions take a RUN"),
        (["--positions", "--part", "decoder"], "--part was given: --analogy and --positions take a RUN"),
        (["--positions", "--no-browser"], "--no-browser was given: --analogy and --positions take a RUN"),
        (["--positions", "--analogy", "a", "b", "c"], "--analogy was given: --analogy and --positions take a RUN"),
        (["the cat", "--positions"], 'the text "the cat" was given: --analogy and --positions take no text'),
        (["--analogy", "cat", " ", "dog"], "has no tokens: give a word"),
    ],
)
def test_they_cannot_be_combined_with_other_options(
    tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["look", str(make_model_dir(tmp_path / "run", "single")), *arguments])
    assert exit_info.value.code == 2 and message in capsys.readouterr().err
