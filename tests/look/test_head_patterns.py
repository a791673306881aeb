"""Patterns: a model with known heads is named right in each, and one with random weights in none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import heedful
from heedful.checkpoint import BundleConfig, create
from heedful.cli import main
from heedful.errors import HeedfulError
from heedful.look import head_patterns
from heedful.look.head_masking import gated_heads, open_gates
from heedful.look.head_patterns import telling_heads
from heedful.look.head_report import head_importance, head_report
from heedful.look.inspection import Inspection
from heedful.model.config import EmbeddingConfig, Learned, ModelConfig, StackConfig
from heedful.packed import Packed
from tests.support.classic_models import make_classic
from tests.support.known_heads import HEAD_PATTERNS, MAX_POSITIONS, model_with_known_heads, sentence_pairs, tokenizer
from tests.support.model_folders import make_model_dir


def test_known_heads_are_named(tmp_path: Path) -> None:
    patterns = head_patterns.find_head_patterns(model_with_known_heads(tmp_path), sentence_pairs(40))
    assert tuple(head.name for head in patterns) == HEAD_PATTERNS
    for head in patterns:
        best = head.patterns[head.name]
        assert best.score > 0.9 and 0 < best.lift <= 1 + 1e-6
        assert head.name == "broad" or best.z > head_patterns.MIN_Z
    nothing = patterns[-1]  # all scores are equal: exactly what chance says, in every pattern
    for name, pattern in nothing.patterns.items():
        assert name == "broad" or abs(pattern.score - pattern.chance) < 1e-6
    assert head_patterns.name_table(patterns, "encoder").shape == (1, 8)


def test_random_heads_are_not_named(tmp_path: Path) -> None:
    """Heads with random weights, flat or sharp, get no name."""
    words = tokenizer(tmp_path)
    places = Learned(count=MAX_POSITIONS)
    embedding = EmbeddingConfig(vocabulary=words.size, width=32, positions=places, types=2, norm="layer")
    for scale, most in ((0.5, 0), (200.0, 2)):
        stack = StackConfig(width=32, layers=2, heads=8, head_width=4, inner_width=8, score_scale=scale)
        config = BundleConfig(family="heedful", model=ModelConfig(embedding=embedding, encoder=stack))
        patterns = head_patterns.find_head_patterns(
            create(config, words, seed=1).eval(), sentence_pairs(8), related=False
        )
        assert sum(head.name not in ("mixed", "broad") for head in patterns) <= most
    with pytest.raises(HeedfulError, match="no texts were given"):
        head_patterns.find_head_patterns(model_with_known_heads(tmp_path), [])


def test_head_gates_and_importance(tmp_path: Path) -> None:
    """Closed gates are zeros in W_O; importance is the gradient; effects are differences of losses."""
    words = tokenizer(tmp_path)
    embedding = EmbeddingConfig(vocabulary=words.size, width=16, positions=Learned(count=MAX_POSITIONS))
    stack = StackConfig(width=16, layers=4, blocks=2, heads=4, head_width=4, inner_width=8)
    config = BundleConfig(family="heedful", model=ModelConfig(embedding=embedding, encoder=stack))
    model = create(config, words, seed=2).double().eval()
    assert model.model.encoder is not None
    batch = Packed.of([[5, 6, 7, 8], [9, 10]])
    with torch.no_grad():
        before = model.model(batch)
        gates = open_gates(model.model)
        gates["encoder"][:2, 1] = 0.0  # block 0 is layers 0 and 1
        with gated_heads(model.model, gates):
            masked = model.model(batch)
        assert torch.equal(model.model(batch), before)
        model.model.encoder.blocks[0].attention.out.weight[:, 4:8] = 0.0
        assert torch.allclose(model.model(batch), masked, atol=1e-12) and not torch.allclose(before, masked)

    def loss() -> torch.Tensor:
        return model.model(batch).pow(3).sum()

    model.requires_grad_(False)
    importance = head_importance(model, [loss], [1.0], "loss")
    step = 1e-5
    for place in ((0, 0), (2, 3)):
        sides = []
        for sign in (1, -1):
            moved = open_gates(model.model)
            moved["encoder"] = moved["encoder"].double()
            moved["encoder"][place] += sign * step
            with gated_heads(model.model, moved):
                sides.append(float(loss()))
        slope = (sides[0] - sides[1]) / (2 * step)
        assert abs(abs(slope) - float(importance.importance["encoder"][place])) < 1e-3 * max(1.0, abs(slope))
    assert abs(float(importance.effect["encoder"][0, 1])) < 1e-9 and len(importance.order) == 16
    assert importance.pruning_losses[0] == pytest.approx(importance.loss) and importance.masked_counts[-1] == 16


def test_a_model_without_heads_says_so(tmp_path: Path) -> None:
    with pytest.raises(HeedfulError, match="no self-attention heads"):
        head_report(make_classic("bag of means"), tmp_path / "is not read.csv")


def test_a_text_that_is_too_long_is_refused_before_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_model_dir(tmp_path / "run", "single")
    with pytest.raises(SystemExit, match="2"):
        main(["look", str(run), "cat " * 60, "--heads", str(tmp_path / "is not read.csv")])
    assert "the text has 62 tokens, and this model reads 1 to 48 at once: give a shorter one" in capsys.readouterr().err


def test_labels_that_the_model_does_not_know_leave_heads_unweighed(tmp_path: Path) -> None:
    loaded = heedful.load(make_model_dir(tmp_path / "run", "single"))
    data = tmp_path / "data.csv"
    data.write_text("text,label\nthe cat sat,strange\nthe dog ran,odd\n")
    report = head_report(loaded, data)
    assert report["price"] is None
    assert "was not measured, since it needs the loss of labelled data: the data has the labels" in report["summary"]
    assert report["summary"].endswith("Rename them in the data")
    data.write_text("text,label\nthe cat sat,good\nthe dog ran,odd\na dog,bad\nthe cat,strange\n")
    report = head_report(loaded, data)
    assert report["texts"] == 2 and report["measure"] == "loss on 2 examples"
    assert ' 2 rows were left out; line 3: the label "odd" is not one that the model knows: ' in report["summary"]


def test_the_report_reads_as_the_run_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model_dir(tmp_path / "run" / "model", "single")
    (tmp_path / "run" / "settings.toml").write_text('[data.columns]\ntext = "b"\n')
    (tmp_path / "data.csv").write_text("text,b,label\n" + "x,the cat sat,good\n" * 3)
    with pytest.raises(SystemExit, match="0"):
        main(
            [
                "look",
                str(tmp_path / "run"),
                "--heads",
                str(tmp_path / "data.csv"),
                "--output",
                str(tmp_path / "o"),
                "--json",
            ]
        )
    assert json.loads(capsys.readouterr().out)["example"] == "the cat sat"


def test_the_report_weighs_heads_where_there_is_a_loss(tmp_path: Path) -> None:
    """The effect of a masked head is the difference of the task's own losses."""
    loaded = heedful.load(make_model_dir(tmp_path / "run", "single"))
    data = tmp_path / "data.csv"
    words = ["cat", "dog", "mat", "program"] * 3
    rows = [f"the {word} sat here.,{'good' if number % 2 else 'bad'}" for number, word in enumerate(words)]
    data.write_text("\n".join(["text,label", *rows, ""]))
    report = head_report(loaded, data)
    assert len(report["heads"]) == 8 and report["texts"] == 12 and report["example"].startswith("the ")
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    texts = [row.split(",")[0] for row in rows]
    wanted = torch.tensor([{"bad": 0, "good": 2}[row.split(",")[1]] for row in rows])
    assert loaded.tokenizer is not None

    def loss() -> float:
        with torch.no_grad():
            scores = loaded(loaded.tokenizer.pack(texts))
        return float(torch.nn.functional.cross_entropy(scores, wanted))

    gates = open_gates(loaded.model)
    gates["encoder"][1, 2] = 0.0
    whole = loss()
    with gated_heads(loaded.model, gates):
        masked = loss()
    head = next(entry for entry in report["heads"] if (entry["layer"], entry["head"]) == (1, 2))
    assert head["effect"] == pytest.approx(masked - whole, abs=1e-5)
    assert report["price"]["values"][0] == pytest.approx(whole, abs=1e-5)


def test_examples_that_are_too_long_are_skipped(tmp_path: Path) -> None:
    """In the report, in what it says, and in the examples whose loss is taken."""
    loaded = heedful.load(make_model_dir(tmp_path / "run", "single"))
    data = tmp_path / "data.csv"
    rows = [f"the {word} sat here.,good" for word in ("cat", "dog", "mat")]
    data.write_text("\n".join(["text,label", *rows, "cat " * 60 + ",bad", ""]))
    report = head_report(loaded, data)
    assert (report["texts"], report["passed_over"]) == (3, 1)
    assert report["summary"].startswith(
        f"3 texts of {data} (1 more was skipped: empty, or too long to be read at once): "
    )
    assert report["measure"] == "loss on 3 examples"
    short = tmp_path / "short.csv"
    short.write_text("\n".join(["text,label", *rows, ""]))
    assert [head["patterns"] for head in head_report(loaded, short)["heads"]] == [
        head["patterns"] for head in report["heads"]
    ]
    assert head_report(loaded, short)["summary"].startswith(f"3 texts of {short}: ")
    with pytest.raises(HeedfulError, match="none of the 2 texts fits the model"):
        head_patterns.find_head_patterns(loaded, ["cat " * 60, "dog " * 60])


def test_the_heads_that_one_text_tells_apart() -> None:
    """Shares and chances are those of the weights; the head that ships for the next token is the first to be shown."""
    inspection = Inspection(heedful.load("heedful-mini-en"), "The cat sat on the mat because it was tired.")
    heads = telling_heads(inspection)
    assert heads and all(head["share"] > head["chance"] for head in heads)
    first = heads[0]
    assert first["name"] in ("next", "previous")
    weights = inspection.weights("encoder", first["layer"], [first["head"]])[0]
    gap = 1 if first["name"] == "next" else -1
    n = len(weights)
    rows = [row for row in range(1, n - 1) if 0 <= row + gap < n]  # without [CLS] and [SEP]
    share = sum(float(weights[row, row + gap]) for row in rows) / len(rows)
    assert first["share"] == pytest.approx(share, abs=1e-5) and first["chance"] == pytest.approx(1 / n)


def test_a_short_text_and_a_model_without_structure_name_no_head() -> None:
    loaded = heedful.load("heedful-mini-en")
    assert telling_heads(Inspection(loaded, "rain")) == []
    for parameter in loaded.model.parameters():
        torch.nn.init.normal_(parameter, std=0.002)
    assert telling_heads(Inspection(loaded, "The cat sat on the mat because it was tired.")) == []
