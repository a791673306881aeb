"""Classic models against plain loops; packed and alone; what is frozen; what learns."""

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


def mixed(queries: QueryPooler, rows: list[Tensor], scale: float = 1.0) -> list[Tensor]:
    """One vector for each query: a = softmax(scale q k), the sum of a v."""
    keys, values = [queries.key(x) for x in rows], [queries.value(x) for x in rows]
    keys = [k.tanh() for k in keys] if queries.tanh else keys
    contexts = []
    for q in queries.queries:
        weights = softmax([scale * (q * k).sum() for k in keys])
        contexts.append(sum((a * v for a, v in zip(weights, values, strict=True)), torch.zeros(()).double()))
    return contexts


def by_loops(loaded: ModelBundle, ids: list[int], ends: tuple[int, ...] = (END,)) -> Tensor:
    """The scores of one text, word by word, from the papers' formulas."""
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
            like = rows / rows.norm(dim=-1, keepdim=True) if over.score == "cosine" else rows
            weights = [softmax([(x * y).sum() for y in like]) for x in like]
            if ids:
                rows = torch.stack(
                    [sum((a * y for a, y in zip(weight, rows, strict=True)), empty) for weight in weights]
                )
    match reader:
        case BagPooling(how=how):
            total = sum(rows, empty)
            vectors = [total / len(ids) if how == "mean" and ids else total]
        case HierarchicalPooling():
            parts: list[list[Tensor]] = []
            for number, row in enumerate(rows):
                if number == 0 or (ids[number - 1] in ends and ids[number] not in ends):
                    parts.append([])
                parts[-1].append(row)
            word_vectors = [mixed(head.hierarchy.words, part)[0] for part in parts]
            if head.hierarchy.over is not None and word_vectors:
                word_vectors = list(run_recurrent(head.hierarchy.over.cells, torch.stack(word_vectors)))
            vectors = (
                mixed(head.hierarchy.sentences, word_vectors)
                if word_vectors
                else [torch.zeros(head.hierarchy.width).double()]
            )
        case _:
            scale = 1 / math.sqrt(width) if isinstance(reader, AttentionPooling) and reader.scaled else 1.0
            count = len(head.queries.queries)
            vectors = mixed(head.queries, list(rows), scale) if ids else [empty] * count
    weight, bias = head.out.weight, head.out.bias
    if isinstance(reader, AttentionPooling) and reader.queries == "classes":
        return torch.stack([(w * h).sum() + b for w, h, b in zip(weight, vectors, bias, strict=True)])
    flat = torch.cat(vectors)
    if isinstance(reader, StructuredPooling) and reader.hidden:
        flat = (head.hidden.weight @ flat + head.hidden.bias).relu()
    scores = weight @ flat + bias
    if reader.binary == "sigmoid":
        assert len(scores) == 1
        share = torch.cat([1 - scores.sigmoid(), scores.sigmoid()])
        return share.log() - share.log()[0]
    return scores


@pytest.mark.parametrize("name", READERS)
def test_each_model_is_its_formula_packed_and_alone(name: str) -> None:
    loaded = make_classic(name)
    with torch.no_grad():
        together = loaded(Packed.of(BATCH))
        for ids, scores in zip(BATCH, together, strict=True):
            assert torch.allclose(scores, by_loops(loaded, ids), atol=1e-12), ids
            assert torch.allclose(scores, loaded(Packed.of([ids]))[0], atol=1e-12), ids
        assert loaded(Packed.of([])).shape == (0, 2) and loaded(Packed.of([[], []])).shape == (2, 2)


@pytest.mark.parametrize("bag", [BagPooling(), BagPooling(how="sum")])
def test_a_bag_in_bfloat16_is_rounded_once(bag: BagPooling) -> None:
    rows = (torch.rand(2000, 4, generator=torch.Generator().manual_seed(1)) + 0.5).bfloat16()
    reader, batch = BagPooler(bag), Packed.of([[1] * 1331, [], [1] * 669])
    exact = reader(rows.double(), batch)
    assert torch.equal(reader(rows, batch), exact.bfloat16()) and not exact[1].any()


def gradient(loaded: ModelBundle, sequences: list[list[int]]) -> list[Tensor]:
    loaded.zero_grad()
    scores = loaded(Packed.of(sequences))
    (scores * torch.arange(1.0, 3.0)).sum().backward()
    return [
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for parameter in loaded.parameters()
    ]


@pytest.mark.parametrize("name", ["structured", "hierarchical", "keys and values"])
def test_the_gradient_of_a_batch_is_the_sum_of_those_of_its_texts(name: str) -> None:
    loaded = make_classic(name)
    alone = [gradient(loaded, [ids]) for ids in BATCH]
    for packed, *single in zip(gradient(loaded, BATCH), *alone, strict=True):
        assert torch.allclose(packed, sum(single, torch.zeros_like(packed)), atol=1e-12)


def test_sentences_end_once_and_pairs_begin_anew() -> None:
    assert sentence_bounds(Packed.of(BATCH), (END,)) == ((0, 6, 10, 12, 13, 14, 17, 20), (0, 3, 3, 4, 6, 7))
    assert sentence_bounds(Packed.of([[1, 2, 3, 4]], [[0, 0, 1, 1]]), (END,)) == ((0, 2, 4), (0, 2))
    assert sentence_bounds(Packed.of([[], []]), (END,)) == ((0,), (0, 0, 0))


def test_the_penalty_is_the_norm_of_frobenius() -> None:
    """Two hops over two rows: A = [[a, 1 - a], [b, 1 - b]] gives four numbers of A A - 1."""
    loaded = with_head(
        make_classic_encoder(StructuredPooling(over=None, hops=2, inner=5, penalty=0.5)),
        "sequence_classification",
        labels=("a", "b"),
    ).double()
    head, batch = loaded.head, Packed.of([[3, 4], [], [7]])
    assert isinstance(head, PooledClassesHead)
    rows = loaded.hidden_states(batch)
    (first, second), (third, last) = head.queries.weights(rows, batch.bounds)[0].tolist()
    first_term, mix, two = first**2 + second**2 - 1, first * third + second * last, third**2 + last**2 - 1
    penalty = head.penalty(rows, batch)
    assert penalty[0].item() == pytest.approx(0.5 * (first_term**2 + 2 * mix**2 + two**2), abs=1e-12)
    assert penalty[1].item() == 0, "an empty text has no mixtures"
    assert penalty[2].item() == pytest.approx(0.5 * 2, abs=1e-12), "all of one row: [[1, 1], [1, 1]] less 1"

    task = Classify(tokenizer=TOKENIZER, limit=None, labels=("a", "b"))
    samples = task.encode_split([LabelledExample(text="film was", label="b", file="x", line=1)] * 2).samples
    loss = task.loss(loaded, task.batch(samples, [0, 0]))
    packed = task.batch(samples, [0, 0]).packed
    plain = -2 * loaded(packed)[0].log_softmax(-1)[1].item()
    assert loss.sum.item() == pytest.approx(
        plain + head.penalty(loaded.hidden_states(packed), packed).sum().item(), rel=1e-6
    )


TEXTS = {"the film was good": "good", "the film was bad": "bad", "not good . the end": "bad", "not bad .": "good"}


@pytest.mark.parametrize("name", ["keys and values", "structured", "hierarchical"])
def test_it_overfits_a_few_texts(name: str) -> None:
    loaded = with_head(make_classic_encoder(READERS[name], width=16), "sequence_classification", labels=("bad", "good"))
    task = Classify(tokenizer=TOKENIZER, limit=None, labels=("bad", "good"))
    examples = [LabelledExample(text=text, label=label, file="x", line=1) for text, label in TEXTS.items()]
    how = TrainSettings(max_steps=25, batch_size=4, optimizer=AdamW(lr=0.05), precision="float32")
    steps = list(Trainer(loaded, task, task.encode_split(examples).samples, how))
    labels = [loaded(Packed.of([TOKENIZER.encode(text).ids]))[0].argmax().item() for text in TEXTS]
    assert [("bad", "good")[number] for number in labels] == list(TEXTS.values()), steps[-1].loss


def test_an_encoder_that_is_frozen_gives_words_in_context() -> None:
    stack = StackConfig(width=4, layers=2, heads=2, head_width=2, inner_width=8, dropout=0.5)
    embedding = EmbeddingConfig(vocabulary=11, width=4, positions=Learned(count=20), dropout=0.5)
    config = ClassicConfig(embedding=embedding, encoder=stack, reader=READERS["structured"], frozen=True)
    loaded = with_head(
        create(BundleConfig(family="heedful-classic", model=config), TOKENIZER),
        "sequence_classification",
        labels=("a", "b"),
    )
    body: Any = loaded.model
    learning = {name.split(".")[0] for name, tensor in loaded.named_tensors().items() if tensor.requires_grad}
    assert learning == {"over", "head"}
    loaded.train()
    inner = body.encoder(body.embedding(Packed.of(BATCH)), Packed.of(BATCH), body.execution)
    again = body.encoder(body.embedding(Packed.of(BATCH)), Packed.of(BATCH), body.execution)
    assert torch.equal(inner, again), "nothing is dropped out"
    assert torch.allclose(body(Packed.of(BATCH))[:12], run_recurrent(body.over.cells, inner[:12]), atol=1e-6)
    before = {name: tensor.detach().clone() for name, tensor in loaded.named_tensors().items()}
    task = Classify(tokenizer=TOKENIZER, limit=20, labels=("a", "b"))
    samples = task.encode_split([LabelledExample(text="the film", label="a", file="x", line=1)]).samples
    how = TrainSettings(max_steps=2, batch_size=1, precision="float32")
    trainer = Trainer(loaded, task, samples, how)
    assert not [name for name in trainer.parameters if name.startswith(("embedding", "encoder"))]
    assert len(list(trainer)) == 2  # the rate of the first step is 0
    moved = {name for name, tensor in loaded.named_tensors().items() if not torch.equal(tensor, before[name])}
    assert moved and not [name for name in moved if name.startswith(("embedding", "encoder"))]


def test_counts_that_are_published() -> None:
    """Parameter counts: a bag of words on IMDB as published, and Lin's and Yang's models counted by hand."""

    def count(reader: Any, vocabulary: int, width: int, labels: int) -> int:
        config = ClassicConfig(embedding=EmbeddingConfig(vocabulary=vocabulary, width=width), reader=reader)
        head = Classes(labels=tuple(map(str, range(labels))), dense=False, activation=None)
        with torch.device("meta"):
            return ModelBundle(BundleConfig(family="heedful-classic", model=config, head=head)).count()

    assert count(BagPooling(), 21_635, 300, 2) == 6_491_102
    lstm = 2 * 4 * (300 * 100 + 300 * 300 + 2 * 300)
    assert count(StructuredPooling(), 50, 100, 5) == 50 * 100 + lstm + 350 * 600 + 30 * 350 + 5 * 30 * 600 + 5
    gru = [2 * 3 * (50 * width + 50 * 50 + 2 * 50) for width in (200, 100)]
    looks = 2 * (100 * 100 + 100 + 100)
    assert count(HierarchicalPooling(), 50, 200, 5) == 50 * 200 + sum(gru) + looks + 5 * 100 + 5


def test_what_is_refused() -> None:
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
