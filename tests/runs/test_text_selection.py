"""Texts that a classifier is unsure about are selected, no two alike, and the written file can be trained on."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

import heedful
from heedful.checkpoint import load, save
from heedful.checkpoint.new_head import with_head
from heedful.cli import main
from heedful.data import DataSettings, LabelledExample, Skip, read
from heedful.errors import DataError, HeedfulError
from heedful.runs.text_selection import (
    CANDIDATES_PER_TEXT,
    SelectedText,
    SelectedTexts,
    label_margins,
    select_texts,
    spread,
)

NOUNS = ["cat", "dog", "horse", "cow", "sheep", "goat", "hammer", "saw", "drill", "wrench", "axe", "file"]
PLACES = ["in the barn today", "behind the house again", "near the old river", "at the market place"]
POOL = [f"the {noun} is {place}" for noun in NOUNS for place in PLACES]


@pytest.fixture(scope="module")
def engine() -> heedful.Engine:
    """The bundled encoder with a classification head with random weights, which is unsure about all texts."""
    bundle = with_head(load("heedful-mini-en"), "sequence_classification", labels=("animal", "tool", "other"), seed=1)
    return heedful.Engine(bundle)


def test_unsure_and_different_texts_are_selected(engine: heedful.Engine) -> None:
    unusable = [POOL[0].upper(), POOL[1] + "!", " ", ""]  # near duplicates of texts in the pool, and empty texts
    selected = select_texts(engine, [*POOL, *unusable], 4)
    assert selected.pool == len(POOL) + 4
    assert selected.left_out == 4
    assert len(selected.texts) == 4
    probabilities = {  # by label, by text
        text: prediction.probabilities for text, prediction in zip(POOL, engine.predict(POOL), strict=True)
    }
    for text in selected.texts:
        if text.text in probabilities:  # a near duplicate may be selected instead of the text in the pool
            first, second, _ = sorted(probabilities[text.text].values(), reverse=True)
            assert text.margin == pytest.approx(first - second)
            assert text.probability == pytest.approx(first)
    selected_margins = [text.margin for text in selected.texts]
    assert selected_margins == sorted(selected_margins)
    assert select_texts(engine, [*POOL, *unusable], 4) == selected, "the selection is deterministic"
    assert len(select_texts(engine, POOL, 100).texts) == len(POOL)
    pool_margins = label_margins(np.array([list(by_label.values()) for by_label in probabilities.values()]))
    (most_unsure,) = select_texts(engine, POOL, 1).texts
    assert most_unsure.margin <= np.sort(pool_margins)[CANDIDATES_PER_TEXT - 1]


def test_one_of_each_cluster_is_taken() -> None:
    """Four clusters of ten vectors. The vector with the largest weight of each is nearest to its weighted centre."""
    rng = np.random.default_rng(0)
    centres = np.eye(8, dtype=np.float32)[:4]
    vectors = np.repeat(centres, 10, axis=0) + rng.normal(0, 0.02, (40, 8)).astype(np.float32)
    norms = rng.uniform(1, 9, (40, 1)).astype(np.float32)  # which make no difference
    weights = np.full(40, 0.01)
    heaviest = [3, 17, 20, 39]
    weights[heaviest] = 100.0
    assert spread(vectors * norms, weights, 4, 0).tolist() == heaviest


def test_different_texts_are_selected_even_if_their_vectors_are_equal() -> None:
    indices = spread(np.ones((5, 3), np.float32), np.ones(5), 3, 0)
    assert len(set(indices.tolist())) == 3


def test_vectors_are_those_that_the_last_layer_reads(engine: heedful.Engine) -> None:
    vectors = engine.pooled_vectors(POOL[:5])
    out = engine.loaded.head.out  # type: ignore[union-attr]
    weight, bias = (value.detach().numpy() for value in (out.weight, out.bias))
    logits = vectors @ weight.T + bias
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    predictions = engine.predict(POOL[:5], heedful.Classification)
    expected = [list(prediction.probabilities.values()) for prediction in predictions]
    np.testing.assert_allclose(probabilities, expected, atol=1e-5)


def test_a_filled_in_file_is_trained_on(
    engine: heedful.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(engine.loaded, tmp_path / "model")
    pool_rows = "".join(f"{text},{index}\n" for index, text in enumerate([*POOL, "=1+1 a b"]))
    Path("pool.csv").write_text(f"review,id\n{pool_rows}")
    command = ["select", "model", "pool.csv", "-n", "6", "-o", "next.csv", "--data.columns.text=review"]
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert not ended.value.code
    with Path("next.csv").open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6
    assert list(rows[0]) == ["text", "label", "margin", "suggested_label"]
    assert {row["label"] for row in rows} == {""}, "a person fills in the labels"
    assert {row["suggested_label"] for row in rows} <= {"animal", "tool", "other"}
    with pytest.raises(HeedfulError, match="label"):
        list(read("next.csv", LabelledExample, DataSettings(dev_fraction=0.0)).examples("train"))
    source = read("next.csv", LabelledExample, DataSettings(dev_fraction=0.0), on_bad_row=Skip())
    assert list(source.examples("train")) == []
    assert sum(source.row_errors.bad.values()) == 6, "no row has a label"
    with Path("done.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(row | {"label": row["suggested_label"]} for row in rows)
    source = read("done.csv", LabelledExample, DataSettings(dev_fraction=0.0))
    assert [example.label for example in source.examples("train")] == [row["suggested_label"] for row in rows]
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 2, "next.csv is not overwritten, since a person may have edited it"


def test_texts_like_formulas_are_read_as_they_were(tmp_path: Path) -> None:
    texts = ["=1+1", "+49 30 1234", "@x", "- and", "'=1+1", "''=1+1", "'tis true", "fine"]
    selected = SelectedTexts(
        texts=tuple(
            SelectedText(text=text, text_pair=None, margin=0.1, suggested_label="+1 star", probability=0.5)
            for text in texts
        ),
        pool=len(texts),
        left_out=0,
    )
    selected.to_csv(tmp_path / "next.csv")
    with (tmp_path / "next.csv").open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    cells = [row["text"] for row in rows]
    assert cells[:5] == ["'=1+1", "'+49 30 1234", "'@x", "'- and", "''=1+1"], "a spreadsheet does not run them"
    for columns, expected in ((list(rows[0]), texts), (["text", "label"], cells)):
        with (tmp_path / "done.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(row | {"label": row["suggested_label"]} for row in rows)
        examples = list(read(tmp_path / "done.csv", LabelledExample, DataSettings(dev_fraction=0.0)).examples("train"))
        assert [example.text for example in examples] == expected, "the file is recognised by its columns"
    assert {example.label for example in examples} == {"'+1 star"}, "other files are read as they are"


@pytest.mark.parametrize("separator", [",", ";"])
def test_a_filled_in_file_is_read_beside_data_with_other_settings(tmp_path: Path, separator: str) -> None:
    """Settings of the format and the columns are those of the data, which is not written as select writes files."""
    selected = SelectedText(text="ä+b, no", text_pair=None, margin=0.1, suggested_label="x", probability=0.5)
    SelectedTexts(texts=(selected,), pool=1, left_out=0).to_csv(tmp_path / "next.csv")
    with (tmp_path / "next.csv").open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    with (tmp_path / "next.csv").open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=separator)  # as a spreadsheet may save it
        writer.writeheader()
        writer.writerows(row | {"label": "y"} for row in rows)
    (tmp_path / "named.csv").write_text("id|review|stars\n1|gut|x\n2|schön|y\n", encoding="latin-1")
    (tmp_path / "bare.csv").write_text("x|1|gut\ny|2|schön\n", encoding="latin-1")
    for name, columns, header in (
        ("named.csv", {"text": "review", "label": "stars"}, None),
        ("bare.csv", {"text": 3, "label": 1}, False),
    ):
        settings = DataSettings(
            dev_fraction=0.0, columns=columns, header=header, delimiter="|", encoding="latin-1", format="csv"
        )
        source = read({"train": [tmp_path / name, tmp_path / "next.csv"]}, LabelledExample, settings)
        examples = [(example.text, example.label) for example in source.examples("train")]
        assert examples == [("gut", "x"), ("schön", "y"), ("ä+b, no", "y")]
        assert "next.csv: settings of the format and the columns of data are not used for it" in source.stated


def test_pairs_keep_both_texts(engine: heedful.Engine, tmp_path: Path) -> None:
    pairs = [(text, f"is it {place}?") for text in POOL[:8] for place in PLACES[:2]]
    selected = select_texts(engine, pairs, 3)
    assert all((text.text, text.text_pair) in pairs for text in selected.texts)
    selected.to_csv(tmp_path / "pairs.csv")
    assert (tmp_path / "pairs.csv").read_text("utf-8-sig").startswith("text,text_pair,label,margin,suggested_label")


def test_wrong_counts_pools_and_models_are_refused(engine: heedful.Engine) -> None:
    with pytest.raises(HeedfulError, match="count is 0"):
        select_texts(engine, POOL, 0)
    with pytest.raises(DataError, match="no texts"):
        select_texts(engine, ["", " "], 2)
    with pytest.raises(HeedfulError, match="chooses one label, and this one has a head for embedding"):
        select_texts("heedful-mini-en", POOL, 2)
    with pytest.raises(HeedfulError, match="only one of them"):
        select_texts(engine, [POOL[0], Path("a.csv")], 2)
