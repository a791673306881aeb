"""Attributions of predictions: scores are the models' own, and the tokens' shares sum to them."""

from __future__ import annotations

import string
from pathlib import Path

import numpy as np
import pytest
import torch

import heedful
from heedful.checkpoint import BundleConfig, create
from heedful.checkpoint.new_head import with_head
from heedful.errors import HeedfulError
from heedful.look.attribution import STEPS, _baseline, _scores, explained_score, integrated_gradients, span_score
from heedful.look.decoding import decoding_report
from heedful.look.head_report import head_report
from heedful.look.inspection import Inspection, inspect_choices
from heedful.look.notebook import make_page_api
from heedful.look.page_api import PageAPI
from heedful.model.classic_config import AttentionPooling, ClassicConfig, RecurrentSeq2Seq, UntrainedSelfAttention
from heedful.model.config import EmbeddingConfig, NextToken, SentenceEmbedding
from heedful.tokenizer import TokenizerSettings, train_tokenizer
from heedful.tokenizer.words import word_tokenizer
from heedful.train.checkpoint import CheckpointManager
from tests.look.test_inspection import TEXT, WORDS, ending, numbers
from tests.support.classic_models import make_classic, make_classic_encoder
from tests.support.model_folders import load_reference, make_model_dir

PROMPT, CHOICES = "the cat sat on the mat", ["a dog ran", "she lives in france", "the program"]


def test_candidates_have_shares_and_reasons(tmp_path: Path) -> None:
    folder = make_model_dir(tmp_path / "choice", "choice")
    loaded = heedful.load(folder)
    asks = PageAPI(inspect_choices(loaded, PROMPT, CHOICES))
    model, tokenizer = load_reference(folder)
    batch = tokenizer([PROMPT] * 3, CHOICES, return_tensors="pt", padding=True)
    with torch.no_grad():
        logits = model(**{name: tensor[None] for name, tensor in batch.items()}).logits[0]
    for side, logit in enumerate(logits.tolist()):
        answer = asks("prediction", {"side": str(side)})
        assert np.allclose(answer["answer"]["probabilities"], logits.softmax(0).numpy(), atol=1e-5)
        reasons = answer["attribution"]
        assert reasons["at_text"] == pytest.approx(logit, abs=1e-5)
        total = numbers(reasons["values"]).sum() + reasons["missing"]
        assert total == pytest.approx(reasons["at_text"] - reasons["at_baseline"], abs=1e-5)
    asks("look", {"side": "1", "text": PROMPT, "pair": "love"})
    assert [inspection.choices[1] for inspection in asks.inspections] == ["love"] * 3 and asks.inspections[2].item[
        1
    ] == CHOICES[2]
    assert len(make_page_api(loaded, [{"prompt": PROMPT, "choices": CHOICES}]).inspections) == 3
    alone = PageAPI([Inspection(loaded, (PROMPT, CHOICES[0]))])("prediction", {})
    assert "each with --choice" in alone["told"] and alone["attribution"]
    with pytest.raises(HeedfulError, match="give two or more"):
        inspect_choices(loaded, PROMPT, ["one"])


def test_the_span_that_is_explained_is_the_one_that_is_answered(tmp_path: Path) -> None:
    """None of more than 30 tokens, however much its ends score."""
    letters = [*string.ascii_lowercase, *string.digits]
    inside = Inspection(heedful.load(make_model_dir(tmp_path / "span", "span")), ("who", " ".join(letters)))
    first = inside.encoded.segments.index(1)
    outputs = torch.zeros(len(inside.encoded), 2)
    outputs[first + 1, 0] = outputs[first + 35, 1] = 9.0
    outputs[first + 4, 1] = 5.0
    assert '"b" as the start and "e" as the end' in span_score(inside, outputs).name
    answer = PageAPI([inside])("prediction", {})
    start, end = answer["answer"]["answer"][0], answer["answer"]["answer"][-1]
    assert f'"{start}" as the start and "{end}" as the end' in answer["attribution"]["score"]


def test_similarity_is_attributed_to_both_texts(tmp_path: Path) -> None:
    bare = heedful.load(make_model_dir(tmp_path / "bare", "bare"))
    config = BundleConfig(family=bare.config.family, model=bare.config.model, head=SentenceEmbedding())
    loaded = create(config, bare.tokenizer, seed=3).eval()
    pair = ("the cat sat on the mat", "a dog ran to paris")
    rows = [Inspection(loaded, text).last_hidden_state.double().mean(0).numpy() for text in pair]
    cosine = rows[0] @ rows[1] / np.linalg.norm(rows[0]) / np.linalg.norm(rows[1])
    for asks in (PageAPI([Inspection(loaded, text) for text in pair]), PageAPI([Inspection(loaded, pair)])):
        answer = asks("prediction", {})
        assert answer["answer"]["similarity"] == pytest.approx(cosine, abs=1e-5) and answer["attention"] is None
        for side, text in zip(answer["texts"], pair, strict=True):
            reasons = side["attribution"]
            assert side["item"] == text and reasons["at_text"] == pytest.approx(cosine, abs=1e-5)
            values = numbers(reasons["values"])
            assert len(values) == len(side["tokens"]) and abs(values[0]) < 1e-6  # [CLS] is the same in the baseline
            assert abs(reasons["missing"]) < 0.02
    assert "give a second text" in PageAPI([Inspection(loaded, pair[0])])("prediction", {})["why"]


def test_what_a_classic_model_takes_is_of_the_class_that_is_explained_or_of_all_its_queries() -> None:
    text = "the film was not good . the end . very bad"
    for name in ("plain attention", "a query for each class", "structured", "hierarchical"):
        inside = Inspection(make_classic(name), text)
        heads = inside.weights("reader", 0)[:, 0].numpy()
        for label in (0, 1):
            expected = heads[-1] if name == "hierarchical" else heads.mean(0)
            if name == "a query for each class":
                expected = heads[label]
            answer = PageAPI([inside])("prediction", {"label": str(label)})
            assert np.abs(numbers(answer["attention"]) - expected).max() < 1e-6, name
            assert ("of its queries" in answer["from"]) == (name == "structured")
            assert (f'for "{("bad", "good")[label]}"' in answer["from"]) == (name == "a query for each class")
    over = with_head(
        make_classic_encoder(AttentionPooling(over=UntrainedSelfAttention())),
        "sequence_classification",
        labels=("bad", "good"),
    ).eval()
    assert PageAPI([Inspection(over, text)])("prediction", {})["attention"] is not None


def test_of_two_labels_with_one_score_both_have_reasons() -> None:
    loaded = with_head(
        make_classic_encoder(AttentionPooling(binary="sigmoid")),
        "sequence_classification",
        labels=("bad", "good"),
        seed=1,
    ).eval()
    bad, good = (PageAPI([Inspection(loaded, "the film was good")])("prediction", {"label": str(n)}) for n in (0, 1))
    mine, negative = (numbers(attribution["attribution"]["values"]) for attribution in (bad, good))
    assert np.abs(negative).max() > 0 and np.allclose(mine, -negative)
    assert bad["attribution"]["at_text"] == pytest.approx(-good["attribution"]["at_text"])


def test_each_written_token_has_its_row_and_its_reasons() -> None:
    words = word_tokenizer(WORDS)
    nets = ClassicConfig(embedding=EmbeddingConfig(vocabulary=words.size, width=6), reader=RecurrentSeq2Seq(width=8))
    loaded = create(BundleConfig(family="heedful-classic", model=nets, head=NextToken()), words, seed=1).eval()
    loaded.tokenizer = ending(words)
    inside = Inspection(loaded, TEXT)
    side_texts = [side["text"] for side in inside.sides["generated"]]
    steps = decoding_report(inside)["steps"]
    assert side_texts[: len(steps)] == [step["token"] for step in steps]
    answer = PageAPI([inside])("prediction", {"place": "2"})
    assert f'"{side_texts[2]}" at position 2' in answer["attribution"]["score"]
    assert np.abs(numbers(answer["attention"]) - inside.weights("cross", 0)[0, 2].numpy()).max() < 1e-6
    assert (
        answer["choices"]["places"][2] == (2, side_texts[2])
        and answer["choices"]["label"] == answer["choices"]["labels"][0][0]
    )
    inspection = Inspection(loaded, TEXT, target=TEXT[:11])
    assert [side["text"] for side in inspection.sides["generated"]][:-1] == TEXT[:11].split()
    assert PageAPI([inside])("positions", {})["views"][0]["name"] == "Order itself"


def test_bytes_are_read_as_characters() -> None:
    text = "le café, où naïve déjà vu"
    words = train_tokenizer([text] * 3, TokenizerSettings(algorithm="bpe", vocab_size=300))
    nets = ClassicConfig(embedding=EmbeddingConfig(vocabulary=words.size, width=6), reader=RecurrentSeq2Seq(width=8))
    inside = Inspection(create(BundleConfig(family="heedful-classic", model=nets), words), text)
    names = [token["text"] for token in inside.sides["source"] if not token["special"]]
    assert "".join(names) == text.replace(" ", "\u2581") and "\u2581café" in names


def test_a_checkpoint_of_a_run_is_looked_at(tmp_path: Path) -> None:
    run = make_model_dir(tmp_path / "run", "single")
    final = heedful.load(run)
    CheckpointManager(run / "state").save(
        3, {f"model/{name}": tensor + 1 for name, tensor in final.named_tensors().items()}, {}
    )
    folder = run / "state" / "step-00000003"
    for name, tensor in heedful.load(folder).named_tensors().items():
        assert torch.equal(tensor, final.named_tensors()[name] + 1), name


def test_heads_are_named_on_texts_without_a_loss(tmp_path: Path) -> None:
    loaded = heedful.load(make_model_dir(tmp_path / "run", "single"))
    plain = tmp_path / "plain.txt"
    plain.write_text("the cat sat on the mat.\n\na dog ran to paris, the capital of france.\n")
    report = head_report(loaded, plain)
    assert report["measure"] == "" and "since it needs the loss of labelled data: " in report["summary"]
    best = {head["name"]: head["patterns"][head["name"]]["lift"] for head in report["strongest"]}
    assert best["next"] == max(head["patterns"]["next"]["lift"] for head in report["heads"])


def test_integrated_gradients_equal_captum(tmp_path: Path) -> None:
    """Captum takes gradients at the same points with its method riemann_middle."""
    captum = pytest.importorskip("captum.attr")
    inspection = Inspection(heedful.load(make_model_dir(tmp_path / "single", "single")), "the cat sat on the mat")
    loaded = inspection.loaded.eval()
    score = explained_score(inspection)

    def forward(embeddings: torch.Tensor) -> torch.Tensor:
        return _scores(inspection, score.score, embeddings.flatten(0, 1), len(embeddings))

    with torch.no_grad():
        x, baseline = (loaded.model.embedding(batch)[None] for batch in (inspection.source, _baseline(inspection)))
    expected = captum.IntegratedGradients(forward).attribute(x, baseline, n_steps=STEPS, method="riemann_middle")
    values = integrated_gradients(inspection, score.score, score.name).values
    assert torch.allclose(values, expected[0].sum(-1).float(), atol=1e-5) and float(values.abs().max()) > 1e-3
