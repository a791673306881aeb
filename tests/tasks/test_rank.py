"""Rank: losses equal sentence-transformers, documents get the same scores in training and in inference."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import CrossEncoder
from sentence_transformers.cross_encoder import losses as reference
from sentence_transformers.sentence_transformer.losses import CoSENTLoss

import heedful
from heedful.checkpoint import ModelBundle
from heedful.checkpoint.new_head import with_head
from heedful.data import RankExample
from heedful.data.labelled.statistics import DatasetStats
from heedful.errors import HeedfulError, SettingError
from heedful.model.config import Classes
from heedful.objectives import PerEpochSamples
from heedful.tasks.list_sampling import sampled_documents, with_documents
from heedful.tasks.predictions import Reranking
from heedful.tasks.rank import LOSSES, Rank, by_id, cosent
from heedful.tasks.specs import spec_of_head, specs_of_head
from heedful.tasks.specs.rank import RankSettings
from heedful.tasks.task import TaskSetup, evaluate_task
from tests.support.model_folders import LIMIT, long_text
from tests.support.task_parity import SHORT, assert_same_gradients, backward_all, load_both, sequence_text, tokenizer

GRADED = [
    RankExample(query="the cat", documents=("sat on the mat", "wrote it", "ran"), relevance=(2.0, 0.0, 1.0)),
    RankExample(query="who ?", documents=("ada", "the dog"), relevance=(0.0, 1.0)),
    RankExample(
        query="in paris", documents=("a", "she lives here", "in france .", "x"), relevance=(0.0, 0.0, 3.0, 1.0)
    ),
]
TAUGHT = [
    RankExample(
        query=query,
        documents=documents,
        relevance=(1.0, 0.0, 0.0),
        teacher_scores=(0.5 + number / 8, 0.25, -number / 4),
    )
    for number, (query, documents) in enumerate(
        (("the cat", ("sat on the mat", "wrote it", "ran")), ("who ?", ("ada", "the dog", "love")))
    )
]
STATS = DatasetStats(counts={"train": 3}, labels=heedful.tasks.task.Counter())


def binary_of(examples: list[RankExample]) -> list[RankExample]:
    """Examples whose graded relevance is reduced to 0 and 1."""
    return [replace(example, relevance=tuple(float(value > 0) for value in example.relevance)) for example in examples]


def task(**changes: Any) -> Rank:
    """A task for the tiny model."""
    return Rank(**{"tokenizer": tokenizer(), "limit": LIMIT} | changes)


@cache
def model(dtype: torch.dtype = torch.float64) -> ModelBundle:
    """The tiny model with the head of a cross-encoder."""
    loaded = load_both("regression", dtype).model
    _, with_rank_head = Rank.create(TaskSetup(settings=RankSettings(), loaded=loaded, labels=(), stats=STATS))
    return with_rank_head


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> CrossEncoder:
    """The test model as a CrossEncoder of sentence-transformers."""
    folder = tmp_path_factory.mktemp("peer")
    heedful.save(model(torch.float32), folder / "model")
    return CrossEncoder(str(folder / "model"), device="cpu", max_length=LIMIT).eval()


def our_loss(loss: str, examples: list[RankExample]) -> float:
    """The mean loss of a batch."""
    total = backward_all(task(ranking_loss=loss), model(torch.float32), examples)
    return float(total.sum) / total.count


# -- losses -------------------------------------------------------------------------------------------------------


def test_the_binary_loss_equals_sentence_transformers(peer: CrossEncoder) -> None:
    examples = binary_of(GRADED)
    pairs = [
        (example.query, text, value)
        for example in examples
        for text, value in zip(example.documents, example.relevance, strict=True)
    ]
    queries, texts, labels = ([*column] for column in zip(*pairs, strict=True))
    expected = reference.BinaryCrossEntropyLoss(peer)([queries, texts], torch.tensor(labels))
    assert our_loss("binary", examples) == pytest.approx(expected.item(), abs=1e-6)


def test_the_listnet_loss_equals_sentence_transformers(peer: CrossEncoder) -> None:
    inputs = [[example.query for example in GRADED], [[*example.documents] for example in GRADED]]
    expected = reference.ListNetLoss(peer)(inputs, [torch.tensor(example.relevance) for example in GRADED])
    assert our_loss("listnet", GRADED) == pytest.approx(expected.item(), abs=1e-6)


@pytest.mark.parametrize("margins", [True, False])
def test_the_margin_mse_loss_equals_sentence_transformers(peer: CrossEncoder, margins: bool) -> None:
    queries = [example.query for example in TAUGHT]
    columns = [queries, *([example.documents[index] for example in TAUGHT] for index in range(3))]
    scores = torch.tensor([example.teacher_scores for example in TAUGHT])
    labels = scores[:, :1] - scores[:, 1:] if margins else scores
    expected = reference.MarginMSELoss(peer)(columns, labels)
    assert our_loss("margin_mse", TAUGHT) == pytest.approx(expected.item(), abs=1e-6)


def test_the_cosent_loss_equals_sentence_transformers(peer: CrossEncoder) -> None:
    """sentence-transformers has this loss only for cosines: the scores of one query are passed in their place."""
    loss = CoSENTLoss(None, scale=1.0, similarity_fct=lambda scores, _: scores)  # type: ignore[arg-type]
    expected = 0.0
    for example in GRADED:
        scores = peer.predict([(example.query, text) for text in example.documents], convert_to_tensor=True)
        expected += float(loss.compute_loss_from_embeddings([scores, scores], torch.tensor(example.relevance)))
    assert our_loss("cosent", GRADED) == pytest.approx(expected / 3, abs=1e-6)
    equal = cosent(torch.tensor([3.0, 1.0]), torch.tensor([1.0, 1.0]))
    assert equal.tolist() == [0.0], "equally relevant documents have no order"


def test_the_listwise_loss_is_the_cross_entropy_of_the_relevant_document(peer: CrossEncoder) -> None:
    expected = 0.0
    for example in TAUGHT:
        scores = peer.predict([(example.query, text) for text in example.documents], convert_to_tensor=True)
        expected += float(torch.nn.functional.cross_entropy(scores[None], torch.tensor([0])))
    assert our_loss("listwise", TAUGHT) == pytest.approx(expected / 2, abs=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_micro_batches_give_equal_losses_and_gradients(loss: str) -> None:
    examples = TAUGHT if loss == "margin_mse" else binary_of(GRADED)
    rank_task, loaded = task(ranking_loss=loss), model()
    whole = backward_all(rank_task, loaded, examples)
    gradients = {
        name: tensor.grad.clone() for name, tensor in loaded.named_tensors().items() if tensor.grad is not None
    }
    parts = backward_all(rank_task, loaded, examples, parts=len(examples))
    assert parts.count == whole.count
    assert float(parts.sum) == pytest.approx(float(whole.sum), abs=1e-12)
    for name, expected in gradients.items():
        actual = loaded.named_tensors()[name].grad
        assert actual is not None and torch.allclose(actual, expected, rtol=0, atol=1e-10), name


def test_gradients_equal_transformers() -> None:
    pair, rank_task = load_both("regression"), task(ranking_loss="listwise")
    loss = backward_all(rank_task, pair.model, TAUGHT)
    expected = torch.zeros((), dtype=torch.float64)
    for example in TAUGHT:
        inputs = pair.tokenizer([example.query] * 3, [*example.documents], padding=True, return_tensors="pt")
        expected = expected - pair.reference(**inputs).logits[:, 0].log_softmax(0)[0]
    assert_same_gradients(pair.reference, expected, pair.model, 1.0)
    assert float(loss.sum) == pytest.approx(expected.item(), abs=1e-10)


# -- samples ------------------------------------------------------------------------------------------------------


def test_a_sample_is_a_query_with_all_its_documents() -> None:
    encoded = task().encode_split(GRADED)
    assert [len(sample.bounds) - 1 for sample in encoded.samples] == [3, 2, 4]
    assert not encoded.skipped
    assert sequence_text(encoded.samples[1], 0) == "[CLS] who ? [SEP] ada [SEP]"
    assert encoded.samples[1].types[:7].tolist() == [0, 0, 0, 0, 1, 1, 0]
    batch = task(ranking_loss="binary").batch(encoded.samples, [0] * 3)
    assert batch.groups == (3, 2, 4) and batch.total_weight == 9
    assert batch.targets.tolist() == [2, 0, 1, 0, 1, 0, 0, 3, 1]


def test_queries_with_equally_relevant_documents_are_left_out() -> None:
    equally_relevant = RankExample(query="x", documents=("a", "b"), relevance=(0.0, 0.0))
    for loss in LOSSES.keys() - {"margin_mse"}:
        encoded = task(ranking_loss=loss).encode_split([equally_relevant, *TAUGHT])
        skipped = 0 if loss == "binary" else 1
        assert encoded.skipped == skipped
        assert len(encoded.samples) == 3 - skipped
    assert encoded.skipped_because == "their texts are all equally relevant, or there is only one"


def test_a_teacher_can_order_documents_that_are_equally_relevant() -> None:
    """The loss margin_mse learns only from the scores of the teacher; without a second document, it has no margin."""
    example = RankExample(query="x", documents=("a", "b"), relevance=(0.0, 0.0), teacher_scores=(0.5, -1.0))
    single = RankExample(query="x", documents=("a",), relevance=(1.0,), teacher_scores=(0.5,))
    encoded = task(ranking_loss="margin_mse").encode_split([example, single])
    assert encoded.skipped == 1
    (sample,) = encoded.samples
    assert sample.target.values == (0.5, -1.0)
    (answer,) = heedful.Engine(model(torch.float32))([{"query": "x", "texts": ["a", "b"]}])
    expected = (answer["scores"][0] - answer["scores"][1] - 1.5) ** 2
    assert our_loss("margin_mse", [example]) == pytest.approx(expected, abs=1e-5)


def test_a_long_document_has_the_mean_score_of_its_windows() -> None:
    """The mean over its windows is used in training as well as in inference."""
    example = RankExample(query="who ?", documents=(long_text(60), "ada", long_text(30)), relevance=(0.0, 1.0, 0.0))
    rank_task, loaded = task(limit=SHORT), ModelBundle(model().config, tokenizer().limited(SHORT))
    loaded.load_state_dict(model().state_dict())
    loaded = loaded.double().eval()
    encoded = rank_task.encode_split([example])
    (sample,) = encoded.samples
    assert encoded.windowed == 1
    assert len(sample.bounds) - 1 == sum(sample.target.windows) > 8
    (answer,) = heedful.Engine(loaded)([rank_task.engine_input(example)])
    pairs = heedful.Engine(loaded)([(example.query, text) for text in example.documents])
    assert answer["scores"] == pytest.approx([pair["values"]["stars"] for pair in pairs], abs=1e-12)
    scores = torch.tensor(answer["scores"], dtype=torch.float64)
    loss = rank_task.loss(loaded, rank_task.batch(encoded.samples, [0]))
    assert loss.sum.item() == pytest.approx(float(-scores.log_softmax(0)[1]), abs=1e-9)
    truncated = task(limit=SHORT, long_inputs="truncate").encode_split([example])
    assert truncated.truncated == 1
    assert truncated.samples[0].target.windows == (1, 1, 1)


# -- the model ----------------------------------------------------------------------------------------------------


def test_the_saved_model_is_a_cross_encoder(peer: CrossEncoder) -> None:
    pairs = [(example.query, text) for example in GRADED for text in example.documents]
    scores = [answer["values"]["stars"] for answer in heedful.Engine(model(torch.float32))(pairs)]
    assert peer.num_labels == 1 and isinstance(peer.activation_fn, torch.nn.Identity)
    assert peer.predict(pairs).tolist() == pytest.approx(scores, abs=1e-6)


def test_the_head_of_a_cross_encoder_is_kept(tmp_path: Path, peer: CrossEncoder) -> None:
    peer.save_pretrained(str(tmp_path / "saved"))
    loaded = heedful.load(tmp_path / "saved")
    setup = TaskSetup(settings=RankSettings(), loaded=loaded, labels=(), stats=STATS, seed=7)
    rank_task, bundle = Rank.create(setup)
    assert torch.equal(bundle.named_tensors()["head.out.weight"], loaded.named_tensors()["head.out.weight"])
    _, with_new_head = Rank.create(replace(setup, loaded=load_both("bare").model))
    assert isinstance(with_new_head.config.head, Classes)
    assert with_new_head.config.head.labels == ("score",)
    assert rank_task.metric == "ndcg@10"


def test_tasks_of_a_cross_encoder() -> None:
    assert [spec.name for spec in specs_of_head(model().config.head)] == ["rank", "regress"]
    regression_spec = spec_of_head(load_both("regression").model.config.head)
    assert regression_spec is not None and regression_spec.name == "regress"


def test_predictions_are_typed() -> None:
    (prediction,) = heedful.Engine(model()).predict([{"query": "who ?", "texts": ["ada", "x"]}], Reranking)
    assert len(prediction.scores) == 2
    wrong_inputs: list[Any] = [
        {"query": "who ?", "texts": []},
        {"query": 3, "texts": ["a"]},
        {"query": "a", "texts": [1]},
    ]
    for wrong_input in wrong_inputs:
        with pytest.raises(HeedfulError, match=r"or queries with texts to rank"):
            heedful.Engine(model())([wrong_input])


# -- evaluation ---------------------------------------------------------------------------------------------------


def test_ranking_metrics() -> None:
    rank_task = task()
    scores = {"the cat": [0.1, 0.2, 0.3], "who ?": [0.0, 1.0], "in paris": [0.0, 0.0, 0.0, 0.0], "x": [1.0]}
    without_relevant = RankExample(query="x", documents=("a",), relevance=(0.0,))

    def engine(inputs: list[Any]) -> list[Any]:
        return [{"scores": scores[item["query"]]} for item in inputs]

    measure = evaluate_task(rank_task, engine, [*GRADED, without_relevant])
    metrics = rank_task.compute_metrics(measure)
    assert metrics["notes"] == ["queries without a relevant document, which are left out: 1"]
    assert metrics["count"] == 3 and {*metrics} >= {"ndcg@10", "map", "mrr"}
    assert metrics["mrr"] == pytest.approx(1.0), "of equal scores the last document comes first"
    worse = rank_task.score_answer(GRADED[0], {"scores": [0.1, 0.9, 0.3]})
    assert (worse.correct, worse.loss, worse.label) == (False, 2.0, [2.0, 0.0, 1.0])
    assert rank_task.score_answer(without_relevant, {"scores": [1.0]}).correct is None
    assert by_id([0.5, 1.0]) == {"000000000": 0.5, "000000001": 1.0}


def test_a_split_without_a_relevant_document_is_refused() -> None:
    task().check(GRADED)
    task().check([])
    with pytest.raises(HeedfulError, match=r"^dev\.csv: no query has a relevant document"):
        task().check([RankExample(query="x", documents=("a",), relevance=(0.0,), file="dev.csv")])


def test_settings_that_the_data_does_not_allow_are_refused() -> None:
    with pytest.raises(SettingError, match="data has none: add the column teacher_scores"):
        RankSettings(loss="margin_mse").check_data(STATS)
    with pytest.raises(SettingError, match=r"takes relevance from 0 to 1, and train has 3: set task\.loss=listnet"):
        RankSettings(loss="binary").check_data(replace(STATS, max_relevance=3.0))
    RankSettings(loss="margin_mse").check_data(replace(STATS, has_teacher_scores=True))


def test_a_head_with_two_numbers_is_not_a_reranker() -> None:
    numbers = with_head(
        load_both("bare").model, "sequence_classification", labels=("a", "b"), problem_type="regression", seed=1
    )
    assert spec_of_head(numbers.config.head) is None


# -- lists that are too long ------------------------------------------------------------------------------------------


def long_lists(count: int, relevant: int) -> list[RankExample]:
    """A query with 3 documents, and one with `count` different documents, `relevant` of them relevant."""
    texts = tuple(f"{'the ' * index}cat" for index in range(count))
    relevance = tuple(float(index % (count // relevant) == 0) for index in range(count))
    scores = tuple(index / 7 for index in range(count))
    return [TAUGHT[0], RankExample(query="the cat", documents=texts, relevance=relevance, teacher_scores=scores)]


@pytest.mark.parametrize("loss", LOSSES)
def test_long_lists_are_sampled_in_each_epoch(loss: str) -> None:
    examples = long_lists(20, relevant=2)
    encoded = task(ranking_loss=loss, list_size=6, seed=3).encode_split(examples)
    whole = task(ranking_loss=loss, list_size=20).encode_split(examples)
    assert isinstance(whole.samples, list) and not whole.remarks
    assert encoded.remarks == {"have more than 6 texts; 6 of them are sampled": 1}
    assert isinstance(encoded.samples, PerEpochSamples) and len(encoded.samples) == 2
    assert encoded.tokens == sum(map(len, encoded.samples.at(0))) < whole.tokens

    def sequences(sample: Any) -> list[tuple[int, ...]]:
        return [tuple(sample.tokens[start:stop]) for start, stop in pairwise(sample.bounds)]

    all_documents = sequences(whole.samples[1])
    sampled_lists = set()
    for epoch in range(5):
        short, long = encoded.samples.at(epoch)
        assert short is encoded.samples.at(0)[0]
        assert long.target.relevance.count(1.0) == 2
        indices = [all_documents.index(document) for document in sequences(long)]
        assert len(indices) == 6 and indices == sorted(set(indices))
        assert long.target.values == tuple(whole.samples[1].target.values[index] for index in indices)
        encoded_again = task(ranking_loss=loss, list_size=6, seed=3).encode_split(examples).samples
        assert isinstance(encoded_again, PerEpochSamples)
        assert list(encoded_again.at(epoch)[1].tokens) == list(long.tokens)
        sampled_lists.add(tuple(indices))
    assert len(sampled_lists) == 5


def test_sampled_documents_keep_their_windows() -> None:
    example = replace(TAUGHT[0], documents=(long_text(60), "the cat", long_text(40), "a"), relevance=(1, 0, 0, 0))
    (sample,) = task().encode_split([example]).samples
    assert max(sample.target.windows) > 1
    sampled = with_documents(sample, [0, 3])
    (expected,) = task().encode_split([replace(example, documents=example.documents[::3], relevance=(1, 0))]).samples
    assert sampled.target == expected.target
    assert sampled.bounds == expected.bounds
    assert list(sampled.tokens) == list(expected.tokens)
    assert list(sampled.types) == list(expected.types)


def test_a_sampled_list_has_at_least_one_irrelevant_document() -> None:
    for seed in range(20):
        assert sampled_documents([1, 2, 1, 0, 1, 1], 3, seed).count(3) == 1
        assert len(set(sampled_documents([1, 2, 1, 3], 3, seed))) == 3
    with pytest.raises(HeedfulError, match="list_size is 1; expected a number of texts from 2"):
        RankSettings(list_size=1)
