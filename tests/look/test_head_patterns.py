"""Patterns of heads, their importance, and the report: known heads get the right names, and random ones no name."""

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
    heads = head_patterns.find_head_patterns(model_with_known_heads(tmp_path), sentence_pairs(40))
    assert tuple(head.name for head in heads) == HEAD_PATTERNS
    for head in heads:
        strongest = head.patterns[head.name]
        assert strongest.score > 0.9 and 0 < strongest.lift <= 1 + 1e-6
        assert head.name == "broad" or strongest.z > head_patterns.MIN_Z
    uniform = heads[-1]  # its weights are equal, so its score in every pattern is that of chance
    for name, pattern in uniform.patterns.items():
        assert name == "broad" or abs(pattern.score - pattern.chance) < 1e-6
    assert head_patterns.name_table(heads, "encoder").shape == (1, 8)


@pytest.mark.parametrize(("score_scale", "max_named"), [(0.5, 0), (200.0, 2)], ids=["flat", "sharp"])
def test_random_heads_are_not_named(tmp_path: Path, score_scale: float, max_named: int) -> None:
    words = tokenizer(tmp_path)
    positions = Learned(count=MAX_POSITIONS)
    embedding = EmbeddingConfig(vocabulary=words.size, width=32, positions=positions, types=2, norm="layer")
    stack = StackConfig(width=32, layers=2, heads=8, head_width=4, inner_width=8, score_scale=score_scale)
    config = BundleConfig(family="heedful", model=ModelConfig(embedding=embedding, encoder=stack))
    loaded = create(config, words, seed=1).eval()
    heads = head_patterns.find_head_patterns(loaded, sentence_pairs(8), related=False)
    assert sum(head.name not in ("mixed", "broad") for head in heads) <= max_named


def test_patterns_need_texts(tmp_path: Path) -> None:
    with pytest.raises(HeedfulError, match="no texts were given"):
        head_patterns.find_head_patterns(model_with_known_heads(tmp_path), [])


BATCH = Packed.of([[5, 6, 7, 8], [9, 10]])


@pytest.fixture
def shared_blocks(tmp_path: Path) -> heedful.ModelBundle:
    """A random encoder in float64 with 4 layers of 4 heads; layers 0 and 1 share a block, and so do 2 and 3."""
    words = tokenizer(tmp_path)
    embedding = EmbeddingConfig(vocabulary=words.size, width=16, positions=Learned(count=MAX_POSITIONS))
    stack = StackConfig(width=16, layers=4, blocks=2, heads=4, head_width=4, inner_width=8)
    config = BundleConfig(family="heedful", model=ModelConfig(embedding=embedding, encoder=stack))
    return create(config, words, seed=2).double().eval()


def test_a_gate_of_zero_equals_zeros_in_the_output_projection(shared_blocks: heedful.ModelBundle) -> None:
    model = shared_blocks.model
    assert model.encoder is not None
    with torch.no_grad():
        unmasked = model(BATCH)
        gates = open_gates(model)
        gates["encoder"][:2, 1] = 0.0
        with gated_heads(model, gates):
            masked = model(BATCH)
        assert torch.equal(model(BATCH), unmasked), "gates are removed afterwards"
        model.encoder.blocks[0].attention.out.weight[:, 4:8] = 0.0  # the columns of head 1, in layers 0 and 1
        assert torch.allclose(model(BATCH), masked, atol=1e-12)
        assert not torch.allclose(unmasked, masked)


def test_importance_is_the_gradient_of_a_gate(shared_blocks: heedful.ModelBundle) -> None:
    model = shared_blocks.model
    assert model.encoder is not None
    with torch.no_grad():
        model.encoder.blocks[0].attention.out.weight[:, 4:8] = 0.0  # head 1 of layers 0 and 1 has no effect

    def loss() -> torch.Tensor:
        return model(BATCH).pow(3).sum()

    def loss_with_gate(layer: int, head: int, value: float) -> float:
        gates = {"encoder": open_gates(model)["encoder"].double()}
        gates["encoder"][layer, head] = value
        with gated_heads(model, gates):
            return float(loss())

    shared_blocks.requires_grad_(False)
    importance = head_importance(shared_blocks, [loss], [1.0], "loss")
    step = 1e-5
    for layer, head in ((0, 0), (2, 3)):
        difference = loss_with_gate(layer, head, 1 + step) - loss_with_gate(layer, head, 1 - step)
        slope = abs(difference / (2 * step))
        assert float(importance.importance["encoder"][layer, head]) == pytest.approx(slope, abs=1e-3 * max(1.0, slope))
    assert abs(float(importance.effect["encoder"][0, 1])) < 1e-9
    assert len(importance.order) == 16
    assert importance.masked_counts[-1] == 16, "all heads are masked at the end of the curve"
    assert importance.pruning_losses[0] == pytest.approx(importance.loss)


def test_a_model_without_heads_has_no_report(tmp_path: Path) -> None:
    with pytest.raises(HeedfulError, match="no self-attention heads"):
        head_report(make_classic("bag of means"), tmp_path / "is not read.csv")


def test_a_text_that_is_too_long_is_refused_before_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_model_dir(tmp_path / "run", "single")
    with pytest.raises(SystemExit, match="2"):
        main(["look", str(run), "cat " * 60, "--heads", str(tmp_path / "is not read.csv")])
    assert "the text has 62 tokens, and this model reads 1 to 48 at once: give a shorter one" in capsys.readouterr().err


def test_importance_is_not_measured_on_unknown_labels(tmp_path: Path) -> None:
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


def test_the_report_reads_data_with_the_settings_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, data = tmp_path / "run", tmp_path / "data.csv"
    make_model_dir(run / "model", "single")
    (run / "settings.toml").write_text('[data.columns]\ntext = "b"\n')
    data.write_text("text,b,label\n" + "x,the cat sat,good\n" * 3)
    with pytest.raises(SystemExit, match="0"):
        main(["look", str(run), "--heads", str(data), "--output", str(tmp_path / "report"), "--json"])
    assert json.loads(capsys.readouterr().out)["example"] == "the cat sat"


def test_the_effect_of_a_head_is_the_difference_of_the_loss_when_it_is_masked(tmp_path: Path) -> None:
    loaded = heedful.load(make_model_dir(tmp_path / "run", "single"))
    data = tmp_path / "data.csv"
    words = ["cat", "dog", "mat", "program"] * 3
    rows = [f"the {word} sat here.,{'good' if number % 2 else 'bad'}" for number, word in enumerate(words)]
    data.write_text("\n".join(["text,label", *rows, ""]))
    report = head_report(loaded, data)
    assert len(report["heads"]) == 8 and report["texts"] == 12 and report["example"].startswith("the ")
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    texts, labels = zip(*(row.split(",") for row in rows), strict=True)
    targets = torch.tensor([{"bad": 0, "good": 2}[label] for label in labels])
    assert loaded.tokenizer is not None

    def loss() -> float:
        with torch.no_grad():
            scores = loaded(loaded.tokenizer.pack(list(texts)))
        return float(torch.nn.functional.cross_entropy(scores, targets))

    gates = open_gates(loaded.model)
    gates["encoder"][1, 2] = 0.0
    loss_with_all_heads = loss()
    with gated_heads(loaded.model, gates):
        masked_loss = loss()
    head = next(record for record in report["heads"] if (record["layer"], record["head"]) == (1, 2))
    assert head["effect"] == pytest.approx(masked_loss - loss_with_all_heads, abs=1e-5)
    assert report["price"]["values"][0] == pytest.approx(loss_with_all_heads, abs=1e-5)


def test_examples_that_are_too_long_are_skipped(tmp_path: Path) -> None:
    """They are counted in the summary, and are used neither for patterns nor for the loss."""
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
    short_report = head_report(loaded, short)
    assert [head["patterns"] for head in short_report["heads"]] == [head["patterns"] for head in report["heads"]]
    assert short_report["summary"].startswith(f"3 texts of {short}: ")
    with pytest.raises(HeedfulError, match="none of the 2 texts fits the model"):
        head_patterns.find_head_patterns(loaded, ["cat " * 60, "dog " * 60])


def test_telling_heads_of_one_text() -> None:
    """The first one attends to the next or the previous token, with the share that follows from its weights."""
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


def test_short_texts_and_random_models_have_no_telling_heads() -> None:
    loaded = heedful.load("heedful-mini-en")
    assert telling_heads(Inspection(loaded, "rain")) == []
    for parameter in loaded.model.parameters():
        torch.nn.init.normal_(parameter, std=0.002)
    assert telling_heads(Inspection(loaded, "The cat sat on the mat because it was tired.")) == []
