"""Attribution of predictions to tokens: the scores are those of the model, and the values of tokens sum to them."""

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
from tests.look.test_inspection import numbers
from tests.support.classic_models import make_classic, make_classic_encoder
from tests.support.look_pages import TEXT, WORDS, with_special_tokens
from tests.support.model_folders import load_reference, make_model_dir

PROMPT, CHOICES = "the cat sat on the mat", ["a dog ran", "she lives in france", "the program"]


def test_each_candidate_is_explained(tmp_path: Path) -> None:
    folder = make_model_dir(tmp_path / "choice", "choice")
    loaded = heedful.load(folder)
    api = PageAPI(inspect_choices(loaded, PROMPT, CHOICES))
    model, tokenizer = load_reference(folder)
    batch = tokenizer([PROMPT] * 3, CHOICES, return_tensors="pt", padding=True)
    with torch.no_grad():
        logits = model(**{name: tensor[None] for name, tensor in batch.items()}).logits[0]
    for side, logit in enumerate(logits.tolist()):
        answer = api("prediction", {"side": str(side)})
        assert np.allclose(answer["answer"]["probabilities"], logits.softmax(0).numpy(), atol=1e-5)
        attribution = answer["attribution"]
        assert attribution["at_text"] == pytest.approx(logit, abs=1e-5)
        total = numbers(attribution["values"]).sum() + attribution["missing"]
        assert total == pytest.approx(attribution["at_text"] - attribution["at_baseline"], abs=1e-5)


def test_a_candidate_is_replaced_in_all_inspections(tmp_path: Path) -> None:
    loaded = heedful.load(make_model_dir(tmp_path / "choice", "choice"))
    api = PageAPI(inspect_choices(loaded, PROMPT, CHOICES))
    api("look", {"side": "1", "text": PROMPT, "pair": "love"})
    assert [inspection.choices[1] for inspection in api.inspections] == ["love"] * 3
    assert api.inspections[2].item[1] == CHOICES[2]


def test_candidates_need_each_other(tmp_path: Path) -> None:
    loaded = heedful.load(make_model_dir(tmp_path / "choice", "choice"))
    assert len(make_page_api(loaded, [{"prompt": PROMPT, "choices": CHOICES}]).inspections) == 3
    one_candidate = PageAPI([Inspection(loaded, (PROMPT, CHOICES[0]))])("prediction", {})
    assert "each with --choice" in one_candidate["told"] and one_candidate["attribution"]
    with pytest.raises(HeedfulError, match="give two or more"):
        inspect_choices(loaded, PROMPT, ["one"])


def test_the_answer_span_is_explained(tmp_path: Path) -> None:
    """A span of more than 30 tokens is not an answer, even if its start and its end have the highest scores."""
    letters = [*string.ascii_lowercase, *string.digits]
    inspection = Inspection(heedful.load(make_model_dir(tmp_path / "span", "span")), ("who", " ".join(letters)))
    first = inspection.encoded.segments.index(1)
    outputs = torch.zeros(len(inspection.encoded), 2)
    outputs[first + 1, 0] = outputs[first + 35, 1] = 9.0
    outputs[first + 4, 1] = 5.0
    assert '"b" as the start and "e" as the end' in span_score(inspection, outputs).name
    answer = PageAPI([inspection])("prediction", {})
    start, end = answer["answer"]["answer"][0], answer["answer"]["answer"][-1]
    assert f'"{start}" as the start and "{end}" as the end' in answer["attribution"]["score"]


def test_similarity_is_attributed_to_both_texts(tmp_path: Path) -> None:
    bare = heedful.load(make_model_dir(tmp_path / "bare", "bare"))
    config = BundleConfig(family=bare.config.family, model=bare.config.model, head=SentenceEmbedding())
    loaded = create(config, bare.tokenizer, seed=3).eval()
    pair = ("the cat sat on the mat", "a dog ran to paris")
    rows = [Inspection(loaded, text).last_hidden_state.double().mean(0).numpy() for text in pair]
    cosine = rows[0] @ rows[1] / np.linalg.norm(rows[0]) / np.linalg.norm(rows[1])
    two_texts, one_pair = [Inspection(loaded, text) for text in pair], [Inspection(loaded, pair)]
    for inspections in (two_texts, one_pair):
        answer = PageAPI(inspections)("prediction", {})
        assert answer["answer"]["similarity"] == pytest.approx(cosine, abs=1e-5) and answer["attention"] is None
        for explanation, text in zip(answer["texts"], pair, strict=True):
            attribution = explanation["attribution"]
            assert explanation["item"] == text and attribution["at_text"] == pytest.approx(cosine, abs=1e-5)
            values = numbers(attribution["values"])
            assert len(values) == len(explanation["tokens"])
            assert abs(values[0]) < 1e-6, "[CLS] is the same in the baseline"
            assert abs(attribution["missing"]) < 0.02
    assert "give a second text" in PageAPI([Inspection(loaded, pair[0])])("prediction", {})["why"]


CLASSIC_TEXT = "the film was not good . the end . very bad"


@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize("name", ["plain attention", "a query for each class", "structured", "hierarchical"])
def test_pooling_weights_of_a_classic_model_are_shown(name: str, label: int) -> None:
    """They are those of the explained class, if each class has a query; else the mean over the queries.

    In a hierarchical model they are the weights of words in the text, the last of its three heads.
    """
    inspection = Inspection(make_classic(name), CLASSIC_TEXT)
    weights = inspection.weights("reader", 0)[:, 0].numpy()  # [heads, tokens]
    if name == "a query for each class":
        expected = weights[label]
    else:
        expected = weights[-1] if name == "hierarchical" else weights.mean(0)
    answer = PageAPI([inspection])("prediction", {"label": str(label)})
    assert np.abs(numbers(answer["attention"]) - expected).max() < 1e-6
    assert ("of its queries" in answer["from"]) == (name == "structured")
    label_name = ("bad", "good")[label]
    assert (f'for "{label_name}"' in answer["from"]) == (name == "a query for each class")


def test_pooling_weights_are_shown_after_self_attention() -> None:
    encoder = make_classic_encoder(AttentionPooling(over=UntrainedSelfAttention()))
    loaded = with_head(encoder, "sequence_classification", labels=("bad", "good")).eval()
    assert PageAPI([Inspection(loaded, CLASSIC_TEXT)])("prediction", {})["attention"] is not None


def test_both_labels_of_a_model_with_one_logit_are_explained() -> None:
    """The score of a label is the logit of "good" minus that of "bad", which is 0, or the negative of it."""
    encoder = make_classic_encoder(AttentionPooling(binary="sigmoid"))
    loaded = with_head(encoder, "sequence_classification", labels=("bad", "good"), seed=1).eval()
    api = PageAPI([Inspection(loaded, "the film was good")])
    bad, good = (api("prediction", {"label": label})["attribution"] for label in ("0", "1"))
    bad_values, good_values = numbers(bad["values"]), numbers(good["values"])
    assert np.abs(good_values).max() > 0 and np.allclose(bad_values, -good_values)
    assert bad["at_text"] == pytest.approx(-good["at_text"])


def recurrent_config(vocabulary: int) -> ClassicConfig:
    """Return the configuration of a recurrent sequence-to-sequence model."""
    embedding = EmbeddingConfig(vocabulary=vocabulary, width=6)
    return ClassicConfig(embedding=embedding, reader=RecurrentSeq2Seq(width=8))


def test_each_generated_token_is_explained() -> None:
    words = word_tokenizer(WORDS)
    bundle_config = BundleConfig(family="heedful-classic", model=recurrent_config(words.size), head=NextToken())
    loaded = create(bundle_config, words, seed=1).eval()
    loaded.tokenizer = with_special_tokens(words)
    inspection = Inspection(loaded, TEXT)
    generated = [token["text"] for token in inspection.sides["generated"]]
    steps = decoding_report(inspection)["steps"]
    assert generated[: len(steps)] == [step["token"] for step in steps]
    answer = PageAPI([inspection])("prediction", {"place": "2"})
    assert f'"{generated[2]}" at position 2' in answer["attribution"]["score"]
    assert np.abs(numbers(answer["attention"]) - inspection.weights("cross", 0)[0, 2].numpy()).max() < 1e-6
    choices = answer["choices"]
    assert choices["places"][2] == (2, generated[2])
    assert choices["label"] == choices["labels"][0][0], "the generated token is the most probable one"
    with_target = Inspection(loaded, TEXT, target=TEXT[:11])
    *read, _ = [token["text"] for token in with_target.sides["generated"]]
    assert read == TEXT[:11].split()
    assert PageAPI([inspection])("positions", {})["views"][0]["name"] == "Order itself"


def test_tokens_of_bytes_are_shown_as_characters() -> None:
    text = "le café, où naïve déjà vu"
    tokenizer = train_tokenizer([text] * 3, TokenizerSettings(algorithm="bpe", vocab_size=300))
    config = BundleConfig(family="heedful-classic", model=recurrent_config(tokenizer.size))
    inspection = Inspection(create(config, tokenizer), text)
    names = [token["text"] for token in inspection.sides["source"] if not token["special"]]
    assert "".join(names) == text.replace(" ", "\u2581") and "\u2581café" in names


def test_a_training_checkpoint_is_loaded_like_a_model_folder(tmp_path: Path) -> None:
    run = make_model_dir(tmp_path / "run", "single")
    final = heedful.load(run).named_tensors()
    checkpoint = {f"model/{name}": tensor + 1 for name, tensor in final.items()}
    CheckpointManager(run / "state").save(3, checkpoint, {})
    for name, tensor in heedful.load(run / "state" / "step-00000003").named_tensors().items():
        assert torch.equal(tensor, final[name] + 1), name


def test_heads_are_named_on_texts_without_a_loss(tmp_path: Path) -> None:
    loaded = heedful.load(make_model_dir(tmp_path / "run", "single"))
    plain = tmp_path / "plain.txt"
    plain.write_text("the cat sat on the mat.\n\na dog ran to paris, the capital of france.\n")
    report = head_report(loaded, plain)
    assert report["measure"] == "" and "since it needs the loss of labelled data: " in report["summary"]
    strongest_next = next(head for head in report["strongest"] if head["name"] == "next")
    largest_lift = max(head["patterns"]["next"]["lift"] for head in report["heads"])
    assert strongest_next["patterns"]["next"]["lift"] == largest_lift


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
