"""Hard negatives: the documents nearest to a query that are less similar to it than the positive, as training data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import heedful
from heedful import SearchIndex
from heedful.bundled import BUNDLED_ENCODER
from heedful.cli import main
from heedful.data import DataSettings, PairExample, RankExample, read
from heedful.data.retrieval.documents import Document
from heedful.errors import HeedfulError
from heedful.search import mining, vectors
from heedful.search.mining import mine_negatives, write_negatives
from tests.support.model_folders import make_model_dir

TEXTS = [
    "The ship left the harbour at dawn.",
    "A boat came home before dark.",
    "The captain steered the ship to the coast.",
    "Sailors sleep below the deck of a ship.",
    "Bread is baked in a hot oven.",
    "The baker made a cake with apples.",
    "Snow fell on the hills all night.",
    "The train to the coast was late.",
]
PAIRS = [
    PairExample(anchor="When did the ship leave the harbour?", positive=TEXTS[0]),
    PairExample(anchor="How is bread baked?", positive="Bread is baked in a hot oven"),
    PairExample(anchor="What has snow fallen on?", positive=TEXTS[6]),
]


def run(*arguments: str, status: int) -> None:
    """Run the command in this process; it must end with this exit code."""
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert (exit_info.value.code or 0) == status


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an index of TEXTS."""
    path = tmp_path_factory.mktemp("built") / "index"
    documents = [Document(id=str(number), text=text) for number, text in enumerate(TEXTS)]
    SearchIndex.create(path, vectors="float32").add(documents)
    return path


@pytest.fixture(scope="module")
def index(folder: Path) -> SearchIndex:
    return SearchIndex(folder)


@pytest.mark.parametrize("margin", [0.0, 0.3])
def test_negatives_are_the_nearest_texts_below_the_positive(index: SearchIndex, margin: float) -> None:
    engine = heedful.Engine(BUNDLED_ENCODER)
    mined_rows = mine_negatives(index, PAIRS, num_negatives=3, margin=margin)
    for row, pair in zip(mined_rows, PAIRS, strict=True):
        query, positive, *texts = vectors.normalized_rows(engine.encode([pair.anchor, pair.positive, *TEXTS]))
        cosines = np.stack(texts) @ query
        max_cosine = (1 - margin) * float(query @ positive)
        nearest_first = [TEXTS[n] for n in np.argsort(-cosines) if cosines[n] < max_cosine]
        expected = [text for text in nearest_first if pair.positive not in text]
        assert row.negative == expected[:3] and len(row.negative) == 3
        assert (row.query, row.positive, row.teacher_scores) == (pair.anchor, pair.positive, None)


def test_with_a_smaller_margin_there_are_more_negatives(index: SearchIndex) -> None:
    def count_negatives(margin: float) -> int:
        return sum(len(row.negative) for row in mine_negatives(index, PAIRS, num_negatives=8, margin=margin))

    assert count_negatives(0.9) < count_negatives(0.0)


def test_other_positives_of_a_query_are_not_negatives(index: SearchIndex) -> None:
    question = PAIRS[0].anchor
    pairs = [PairExample(anchor=question, positive=TEXTS[number]) for number in (0, 2)]
    for row in mine_negatives(index, pairs, num_negatives=8, margin=0.0):
        assert TEXTS[0] not in row.negative and TEXTS[2] not in row.negative


def test_negatives_do_not_depend_on_blocks_and_chunks(index: SearchIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = list(mine_negatives(index, PAIRS))
    monkeypatch.setattr(vectors, "BLOCK", 3)
    monkeypatch.setattr(mining, "QUERIES", 2)
    assert list(mine_negatives(index, PAIRS)) == expected


def test_a_teacher_scores_the_texts(index: SearchIndex, tmp_path: Path) -> None:
    teacher = heedful.Engine(make_model_dir(tmp_path / "teacher", "regression"))
    (row, *_) = mine_negatives(index, PAIRS, teacher=teacher)
    pairs = [(row.query, text) for text in (row.positive, *row.negative)]
    assert row.teacher_scores == pytest.approx([answer["values"]["stars"] for answer in teacher(pairs)], abs=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_negatives": 0}, "num_negatives is 0; expected a number from 1 to 100"),
        ({"margin": 1.0}, r"margin is 1\.0; expected a share from 0 to below 1"),
    ],
)
def test_numbers_out_of_range_are_refused(index: SearchIndex, options: dict[str, Any], message: str) -> None:
    with pytest.raises(HeedfulError, match=message):
        next(mine_negatives(index, PAIRS, **options))


def test_rows_are_read_by_both_tasks(index: SearchIndex, tmp_path: Path) -> None:
    unlike = PairExample(anchor="zzz", positive="The price of tea in another country.")
    rows = [*mine_negatives(index, PAIRS, num_negatives=2), *mine_negatives(index, [unlike], margin=0.99)]
    without = sum(not row.negative for row in rows)
    counts = write_negatives(tmp_path / "rows.jsonl", rows)
    assert (counts.pairs, counts.without) == (4, without)
    assert counts.negatives == sum(len(row.negative) for row in rows)
    settings = DataSettings(dev_fraction=0.0)
    ranked = list(read(tmp_path / "rows.jsonl", RankExample, settings).examples("train"))
    paired = list(read(tmp_path / "rows.jsonl", PairExample, settings).examples("train"))
    assert len(ranked) == len(paired) == 4 - without
    for ranking, pair, row in zip(ranked, paired, rows, strict=False):
        assert ranking.documents == (row.positive, *row.negative) and pair.negatives == (*row.negative,)


def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps({"query": pair.anchor, "positive": pair.positive}) + "\n" for pair in PAIRS))
    mined = tmp_path / "mined.jsonl"
    files = ("--mine-negatives", str(pairs), "--negatives-file", str(mined))
    run("index", "--output", str(folder), *files, "--num-negatives", "2", "--margin", "0.1", status=0)
    assert f"{mined}: 6 negatives for 3 of 3 pairs" in capsys.readouterr().out
    assert [len(json.loads(line)["negative"]) for line in mined.read_text().splitlines()] == [2, 2, 2]
    run("index", "--output", str(folder), "--margin", "0.1", status=2)
    assert "--margin is for --mine-negatives" in capsys.readouterr().err
