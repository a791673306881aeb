"""Classic models: their scores against plain loops over words, batches against single texts, frozen parts, training."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from heedful.checkpoint import BundleConfig, ModelBundle, create
from heedful.checkpoint.new_head import with_head
from heedful.data import LabelledExample
from heedful.errors import HeedfulError
from heedful.model.classic import sentence_bounds
from heedful.model.classic_config import (
    AttentionPooling,
    BagPooling,
    ClassicConfig,
    HierarchicalPooling,
    Recurrent,
    StructuredPooling,
    UntrainedSelfAttention,
)
from heedful.model.config import Classes, EmbeddingConfig, Learned, StackConfig
from heedful.model.pooling import BagPooler, PooledClassesHead, QueryPooler
from heedful.model.trace import Trace
from heedful.packed import Packed
from heedful.tasks.classify import Classify
from heedful.train.settings import AdamW
from heedful.train.trainer import Trainer, TrainSettings
from tests.support.classic_models import (
    BATCH,
    END,
    READERS,
    TOKENIZER,
    make_classic,
    make_classic_encoder,
    run_recurrent,
)


def softmax(scores: list[Tensor]) -> list[Tensor]:
    exponentials = [score.exp() for score in scores]
    return [score / sum(exponentials) for score in exponentials]


def attend_by_loops(queries: QueryPooler, rows: list[Tensor], scale: float = 1.0) -> list[Tensor]:
    """Return, for each query q, the sum over rows of a v, with the weights a = softmax(scale q k)."""
    keys, values = [queries.key(x) for x in rows], [queries.value(x) for x in rows]
    keys = [k.tanh() for k in keys] if queries.tanh else keys
    contexts = []
    for q in queries.queries:
        weights = softmax([scale * (q * k).sum() for k in keys])
        contexts.append(sum((a * v for a, v in zip(weights, values, strict=True)), torch.zeros(()).double()))
    return contexts


def scores_by_loops(loaded: ModelBundle, ids: list[int], ends: tuple[int, ...] = (END,)) -> Tensor:
    """Compute the scores of one text word by word, as the papers' formulas say."""
    head: Any = loaded.head
    body: Any = loaded.model
    reader, width = body.classic.reader, body.classic.width
    empty = torch.zeros(width, dtype=torch.float64)
    rows = body.embedding.tokens.weight[torch.tensor(ids, dtype=torch.long)]
    match reader.over:
        case Recurrent() if ids:
            rows = run_recurrent(body.over.cells, rows)
        case None | Recurrent():
            pass
        case over:
            keys = rows / rows.norm(dim=-1, keepdim=True) if over.score == "cosine" else rows
            weights = [softmax([(x * y).sum() for y in keys]) for x in keys]
            if ids:
                rows = torch.stack(
                    [sum((a * y for a, y in zip(weight, rows, strict=True)), empty) for weight in weights]
                )
    match reader:
        case BagPooling(how=how):
            total = sum(rows, empty)
            vectors = [total / len(ids) if how == "mean" and ids else total]
        case HierarchicalPooling():
            sentences: list[list[Tensor]] = []
            for position, row in enumerate(rows):
                if position == 0 or (ids[position - 1] in ends and ids[position] not in ends):
                    sentences.append([])
                sentences[-1].append(row)
            sentence_vectors = [attend_by_loops(head.hierarchy.words, sentence)[0] for sentence in sentences]
            if head.hierarchy.over is not None and sentence_vectors:
                sentence_vectors = list(run_recurrent(head.hierarchy.over.cells, torch.stack(sentence_vectors)))
            vectors = (
                attend_by_loops(head.hierarchy.sentences, sentence_vectors)
                if sentence_vectors
                else [torch.zeros(head.hierarchy.width).double()]
            )
        case _:
            scale = 1 / math.sqrt(width) if isinstance(reader, AttentionPooling) and reader.scaled else 1.0
            count = len(head.queries.queries)
            vectors = attend_by_loops(head.queries, list(rows), scale) if ids else [empty] * count
    weight, bias = head.out.weight, head.out.bias
    if isinstance(reader, AttentionPooling) and reader.queries == "classes":
        return torch.stack([(w * h).sum() + b for w, h, b in zip(weight, vectors, bias, strict=True)])
    flat = torch.cat(vectors)
    if isinstance(reader, StructuredPooling) and reader.hidden:
        flat = (head.hidden.weight @ flat + head.hidden.bias).relu()
    scores = weight @ flat + bias
    if reader.binary == "sigmoid":
        assert len(scores) == 1
        probabilities = torch.cat([1 - scores.sigmoid(), scores.sigmoid()])
        return probabilities.log() - probabilities.log()[0]
    return scores


@pytest.mark.parametrize("name", READERS)
def test_scores_equal_the_formulas_in_a_batch_and_alone(name: str) -> None:
    loaded = make_classic(name)
    with torch.no_grad():
        batch_scores = loaded(Packed.of(BATCH))
        for ids, scores in zip(BATCH, batch_scores, strict=True):
            assert torch.allclose(scores, scores_by_loops(loaded, ids), atol=1e-12), ids
            assert torch.allclose(scores, loaded(Packed.of([ids]))[0], atol=1e-12), ids
        assert loaded(Packed.of([])).shape == (0, 2) and loaded(Packed.of([[], []])).shape == (2, 2)


@pytest.mark.parametrize("bag", [BagPooling(), BagPooling(how="sum")])
def test_a_bag_in_bfloat16_is_rounded_once(bag: BagPooling) -> None:
    rows = (torch.rand(2000, 4, generator=torch.Generator().manual_seed(1)) + 0.5).bfloat16()
    reader, batch = BagPooler(bag), Packed.of([[1] * 1331, [], [1] * 669])
    exact = reader(rows.double(), batch)
    assert torch.equal(reader(rows, batch), exact.bfloat16()) and not exact[1].any()


def gradient(loaded: ModelBundle, sequences: list[list[int]]) -> list[Tensor]:
    """Return the gradient of a weighted sum of the scores, for each parameter."""
    loaded.zero_grad()
    scores = loaded(Packed.of(sequences))
    (scores * torch.arange(1.0, 3.0)).sum().backward()
    return [
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for parameter in loaded.parameters()
    ]


@pytest.mark.parametrize("name", ["structured", "hierarchical", "keys and values"])
def test_the_gradient_of_a_batch_is_the_sum_over_its_texts(name: str) -> None:
    loaded = make_classic(name)
    text_gradients = [gradient(loaded, [ids]) for ids in BATCH]
    for of_batch, *of_texts in zip(gradient(loaded, BATCH), *text_gradients, strict=True):
        assert torch.allclose(of_batch, sum(of_texts, torch.zeros_like(of_batch)), atol=1e-12)


def test_sentences_end_after_runs_of_end_tokens_and_before_the_second_text_of_a_pair() -> None:
    assert sentence_bounds(Packed.of(BATCH), (END,)) == ((0, 6, 10, 12, 13, 14, 17, 20), (0, 3, 3, 4, 6, 7))
    assert sentence_bounds(Packed.of([[1, 2, 3, 4]], [[0, 0, 1, 1]]), (END,)) == ((0, 2, 4), (0, 2))
    assert sentence_bounds(Packed.of([[], []]), (END,)) == ((0,), (0, 0, 0))


def test_the_penalty_is_the_squared_frobenius_norm_of_a_a_minus_1() -> None:
    """The penalty is computed by hand for the weights A of two hops over two rows. The task adds it to its loss."""
    loaded = with_head(
        make_classic_encoder(StructuredPooling(over=None, hops=2, inner=5, penalty=0.5)),
        "sequence_classification",
        labels=("a", "b"),
    ).double()
    head, batch = loaded.head, Packed.of([[3, 4], [], [7]])
    assert isinstance(head, PooledClassesHead)
    rows = loaded.hidden_states(batch)
    (a11, a12), (a21, a22) = head.queries.weights(rows, batch.bounds)[0].tolist()
    upper, lower, off_diagonal = a11**2 + a12**2 - 1, a21**2 + a22**2 - 1, a11 * a21 + a12 * a22
    penalty = head.penalty(rows, batch)
    assert penalty[0].item() == pytest.approx(0.5 * (upper**2 + 2 * off_diagonal**2 + lower**2), abs=1e-12)
    assert penalty[1].item() == 0, "an empty text has no weights"
    assert penalty[2].item() == pytest.approx(0.5 * 2, abs=1e-12), "one row: A A' - 1 is [[0, 1], [1, 0]]"

    task = Classify(tokenizer=TOKENIZER, limit=None, labels=("a", "b"))
    samples = task.encode_split([LabelledExample(text="film was", label="b", file="x", line=1)] * 2).samples
    loss = task.loss(loaded, task.batch(samples, [0, 0]))
    packed = task.batch(samples, [0, 0]).packed
    cross_entropy = -2 * loaded(packed)[0].log_softmax(-1)[1].item()
    penalties = head.penalty(loaded.hidden_states(packed), packed).sum().item()
    assert loss.sum.item() == pytest.approx(cross_entropy + penalties, rel=1e-6)


TEXTS = {"the film was good": "good", "the film was bad": "bad", "not good . the end": "bad", "not bad .": "good"}


@pytest.mark.parametrize("name", ["keys and values", "structured", "hierarchical"])
def test_it_overfits_a_few_texts(name: str) -> None:
    loaded = with_head(make_classic_encoder(READERS[name], width=16), "sequence_classification", labels=("bad", "good"))
    task = Classify(tokenizer=TOKENIZER, limit=None, labels=("bad", "good"))
    examples = [LabelledExample(text=text, label=label, file="x", line=1) for text, label in TEXTS.items()]
    settings = TrainSettings(max_steps=25, batch_size=4, optimizer=AdamW(lr=0.05), precision="float32")
    steps = list(Trainer(loaded, task, task.encode_split(examples).samples, settings))
    labels = [loaded(Packed.of([TOKENIZER.encode(text).ids]))[0].argmax().item() for text in TEXTS]
    assert [("bad", "good")[label] for label in labels] == list(TEXTS.values()), steps[-1].loss


def test_a_frozen_encoder_has_no_dropout_and_is_not_trained() -> None:
    stack = StackConfig(width=4, layers=2, heads=2, head_width=2, inner_width=8, dropout=0.5)
    embedding = EmbeddingConfig(vocabulary=11, width=4, positions=Learned(count=20), dropout=0.5)
    config = ClassicConfig(embedding=embedding, encoder=stack, reader=READERS["structured"], frozen=True)
    loaded = with_head(
        create(BundleConfig(family="heedful-classic", model=config), TOKENIZER),
        "sequence_classification",
        labels=("a", "b"),
    )
    body: Any = loaded.model
    trained = {name.split(".")[0] for name, tensor in loaded.named_tensors().items() if tensor.requires_grad}
    assert trained == {"over", "head"}
    loaded.train()
    states = body.encoder(body.embedding(Packed.of(BATCH)), Packed.of(BATCH), body.execution)
    same_states = body.encoder(body.embedding(Packed.of(BATCH)), Packed.of(BATCH), body.execution)
    assert torch.equal(states, same_states), "there is no dropout"
    assert torch.allclose(body(Packed.of(BATCH))[:12], run_recurrent(body.over.cells, states[:12]), atol=1e-6)
    initial = {name: tensor.detach().clone() for name, tensor in loaded.named_tensors().items()}
    task = Classify(tokenizer=TOKENIZER, limit=20, labels=("a", "b"))
    samples = task.encode_split([LabelledExample(text="the film", label="a", file="x", line=1)]).samples
    settings = TrainSettings(max_steps=2, batch_size=1, precision="float32")
    trainer = Trainer(loaded, task, samples, settings)
    assert not [name for name in trainer.parameters if name.startswith(("embedding", "encoder"))]
    assert len(list(trainer)) == 2  # two, since the learning rate of the first step is 0
    changed = {name for name, tensor in loaded.named_tensors().items() if not torch.equal(tensor, initial[name])}
    assert changed and not [name for name in changed if name.startswith(("embedding", "encoder"))]


def test_parameter_counts() -> None:
    """A bag of words on IMDB has the published count; the counts of Lin's and Yang's models are computed by hand."""

    def count(reader: Any, vocabulary: int, width: int, labels: int) -> int:
        config = ClassicConfig(embedding=EmbeddingConfig(vocabulary=vocabulary, width=width), reader=reader)
        head = Classes(labels=tuple(map(str, range(labels))), dense=False, activation=None)
        with torch.device("meta"):
            return ModelBundle(BundleConfig(family="heedful-classic", model=config, head=head)).count()

    assert count(BagPooling(), 21_635, 300, 2) == 6_491_102
    lstm = 2 * 4 * (300 * 100 + 300 * 300 + 2 * 300)
    assert count(StructuredPooling(), 50, 100, 5) == 50 * 100 + lstm + 350 * 600 + 30 * 350 + 5 * 30 * 600 + 5
    gru = [2 * 3 * (50 * width + 50 * 50 + 2 * 50) for width in (200, 100)]
    attentions = 2 * (100 * 100 + 100 + 100)
    assert count(HierarchicalPooling(), 50, 200, 5) == 50 * 200 + sum(gru) + attentions + 5 * 100 + 5


def test_invalid_configurations_are_refused() -> None:
    with pytest.raises(HeedfulError, match='"sigmoid", which is for two labels, but there are 3: use "softmax"'):
        make_classic("bag of sums", labels=("a", "b", "c"))
    with pytest.raises(HeedfulError, match='queries is "classes", which gives each class its own score'):
        AttentionPooling(queries="classes", binary="sigmoid")
    with pytest.raises(HeedfulError, match="hops is 0; expected a number from 1"):
        StructuredPooling(hops=0)
    with pytest.raises(HeedfulError, match="reinit_layers is 1, but this model has 0 blocks"):
        with_head(make_classic_encoder(BagPooling()), "sequence_classification", labels=("a", "b"), reinit_layers=1)
    with pytest.raises(HeedfulError, match="trace: this model has no weights, q"):
        make_classic_encoder(BagPooling(over=UntrainedSelfAttention())).model(
            Packed.of([[1, 2]]), trace=Trace(what=["weights", "q"])
        )
