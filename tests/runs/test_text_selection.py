"""Texts between two labels are selected, no two alike, and the file that is written can be trained on."""

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
from heedful.runs.text_selection import label_margins, select_texts, spread

NOUNS = ["cat", "dog", "horse", "cow", "sheep", "goat", "hammer", "saw", "drill", "wrench", "axe", "file"]
PLACES = ["in the barn today", "behind the house again", "near the old river", "at the market place"]
POOL = [f"the {noun} is {place}" for noun in NOUNS for place in PLACES]


@pytest.fixture(scope="module")
def engine() -> heedful.Engine:
    """An untrained classifier over the bundled encoder, which is unsure about everything."""
    bundle = with_head(load("heedful-mini-en"), "sequence_classification", labels=("animal", "tool", "other"), seed=1)
    return heedful.Engine(bundle)


def test_unsure_and_different_texts_are_selected(engine: heedful.Engine) -> None:
    repeats = [POOL[0].upper(), POOL[1] + "!", " ", ""]
    selected = select_texts(engine, [*POOL, *repeats], 4)
    assert (selected.pool, selected.left_out, len(selected.texts)) == (len(POOL) + 4, 4, 4)
    margins = {text: answer.probabilities for text, answer in zip(POOL, engine.predict(POOL), strict=True)}
    for text in selected.texts:
        first, second, _ = sorted(margins.get(text.text, {}).values() or (1, 0, 0), reverse=True)
        if text.text in margins:
            assert text.margin == pytest.approx(first - second) and text.probability == pytest.approx(first)
    assert [text.margin for text in selected.texts] == sorted(text.margin for text in selected.texts)
    assert select_texts(engine, [*POOL, *repeats], 4) == selected, "the same again"
    assert len(select_texts(engine, POOL, 100).texts) == len(POOL)
    least = select_texts(engine, POOL, 1).texts[0].margin
    assert least <= np.sort(label_margins(np.array([[*values.values()] for values in margins.values()])))[9]


def test_one_of_each_cluster_is_taken() -> None:
    rng = np.random.default_rng(0)
    centres = np.eye(8, dtype=np.float32)[:4]
    vectors = np.repeat(centres, 10, axis=0) + rng.normal(0, 0.02, (40, 8)).astype(np.float32)
    weights = np.full(40, 0.01)
    weights[[3, 17, 20, 39]] = 100.0
    assert spread(vectors * rng.uniform(1, 9, (40, 1)).astype(np.float32), weights, 4, 0).tolist() == [3, 17, 20, 39]
    same = spread(np.ones((5, 3), np.float32), np.ones(5), 3, 0)
    assert len(set(same.tolist())) == 3


def test_vectors_are_those_that_the_last_layer_reads(engine: heedful.Engine) -> None:
    vectors = engine.pooled_vectors(POOL[:5])
    out = engine.loaded.head.out  # type: ignore[union-attr]
    weight, bias = (value.detach().numpy() for value in (out.weight, out.bias))
    scores = vectors @ weight.T + bias
    shares = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    answers = engine.predict(POOL[:5], heedful.Classification)
    expected = [[*answer.probabilities.values()] for answer in answers]
    np.testing.assert_allclose(shares, expected, atol=1e-5)


def test_a_filled_in_file_is_trained_on(
    engine: heedful.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(engine.loaded, tmp_path / "model")
    Path("pool.csv").write_text("review,id\n" + "".join(f"{text},{n}\n" for n, text in enumerate([*POOL, "=1+1 a b"])))
    words = ["select", "model", "pool.csv", "-n", "6", "-o", "next.csv", "--data.columns.text=review"]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert not ended.value.code
    with Path("next.csv").open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6 and list(rows[0]) == ["text", "label", "margin", "suggested_label"]
    assert {row["label"] for row in rows} == {""} and {row["suggested_label"] for row in rows} <= {
        "animal",
        "tool",
        "other",
    }
    with pytest.raises(HeedfulError, match="label"):
        list(read("next.csv", LabelledExample, DataSettings(dev_fraction=0.0)).examples("train"))
    source = read("next.csv", LabelledExample, DataSettings(dev_fraction=0.0), on_bad_row=Skip())
    assert not list(source.examples("train")) and sum(source.row_errors.bad.values()) == 6
    with Path("done.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(row | {"label": row["suggested_label"]} for row in rows)
    source = read("done.csv", LabelledExample, DataSettings(dev_fraction=0.0))
    assert [example.label for example in source.examples("train")] == [row["suggested_label"] for row in rows]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2, "a person's work is not written over"


def test_pairs_keep_both_texts(engine: heedful.Engine, tmp_path: Path) -> None:
    pairs = [(text, f"is it {place}?") for text in POOL[:8] for place in PLACES[:2]]
    selected = select_texts(engine, pairs, 3)
    assert all((text.text, text.text_pair) in pairs for text in selected.texts)
    selected.to_csv(tmp_path / "pairs.csv")
    assert (tmp_path / "pairs.csv").read_text("utf-8-sig").startswith("text,text_pair,label,margin,suggested_label")


def test_what_cannot_be_selected_from_is_refused(engine: heedful.Engine) -> None:
    with pytest.raises(HeedfulError, match="count is 0"):
        select_texts(engine, POOL, 0)
    with pytest.raises(DataError, match="no texts"):
        select_texts(engine, ["", " "], 2)
    with pytest.raises(HeedfulError, match="chooses one label, and this one has a head for embedding"):
        select_texts("heedful-mini-en", POOL, 2)
    with pytest.raises(HeedfulError, match="only one of them"):
        select_texts(engine, [POOL[0], Path("a.csv")], 2)
