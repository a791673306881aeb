"""Every task with every model family: supported heads can be trained and used, the others are refused."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

import heedful
from heedful.checkpoint.new_head import with_head
from heedful.data import (
    AnswerSpan,
    ChoiceExample,
    LabelledExample,
    PairExample,
    QuestionExample,
    RankExample,
    Seq2SeqExample,
    TaggedExample,
)
from heedful.data.labelled.statistics import DatasetStats
from heedful.errors import HeedfulError
from heedful.families import FAMILIES
from heedful.tasks.classify import Classify
from heedful.tasks.embed import Embed
from heedful.tasks.generation import GenerationConfig, sequence_ends
from heedful.tasks.multiple_choice import MultipleChoiceTask
from heedful.tasks.qa import QuestionAnswering
from heedful.tasks.rank import Rank
from heedful.tasks.seq2seq import Seq2Seq
from heedful.tasks.specs import spec_of_head
from heedful.tasks.specs.rank import RankSettings
from heedful.tasks.tag import Tag
from heedful.tasks.task import TaskSetup, evaluate_task
from tests.support.model_folders import VOCABULARY
from tests.support.tiny_models import ENCODER_DECODER, TINY, save_tiny

EXAMPLES: dict[str, tuple[type, list[Any], dict[str, Any]]] = {  # kind of head -> task, examples, options of the task
    "sequence_classification": (
        Classify,
        [LabelledExample(text="the cat sat on the mat", label="up"), LabelledExample(text="a dog", label="down")],
        {"labels": ("up", "down")},
    ),
    "token_classification": (
        Tag,
        [TaggedExample(words=("ada", "lives", "in", "paris"), tags=("A", "O", "O", "A"))],
        {"labels": ("A", "O")},
    ),
    "question_answering": (
        QuestionAnswering,
        [QuestionExample(id="1", question="who?", context="ada wrote it", answers=(AnswerSpan("ada", 0),))],
        {"has_unanswerable": False},
    ),
    "multiple_choice": (
        MultipleChoiceTask,
        [ChoiceExample(prompt="the cat", candidates=("sat", "ran to paris"), answer=0)],
        {},
    ),
    "embedding": (
        Embed,
        [
            PairExample(anchor="the cat sat", positive="a cat", score=1.0),
            PairExample(anchor="the dog", positive="paris is in france", score=0.0),
        ],
        {"scored": True},
    ),
    "language_model": (
        Seq2Seq,
        [Seq2SeqExample(text="the cat", rewritten="a cat"), Seq2SeqExample(text="he", rewritten="she")],
        {},
    ),
}
EMPTY = DatasetStats(counts={"train": 1}, labels=Counter())
SUPPORTED = [
    (family, kind) for family in TINY for kind in EXAMPLES if kind == "embedding" or kind in FAMILIES[family].kinds()
]
UNSUPPORTED = [
    ("t5", "encoder"),
    *((family, kind) for family in TINY for kind in EXAMPLES if (family, kind) not in SUPPORTED),
]


@cache
def loaded(family: str) -> heedful.ModelBundle:
    """A tiny model of a family without a head, with the tokenizer of the tests."""
    folder = Path(mkdtemp())
    with_types = (
        "bert" in family and family not in ("distilbert", "modernbert", "eurobert")
    ) or family == "jina_embeddings_v3"
    types = {"type_vocab_size": 2} if with_types else {}
    save_tiny(folder, family, FAMILIES[family].bare, vocab_size=len(VOCABULARY), **types)
    names_in_mpnet = (
        {"[CLS]": "<s>", "[SEP]": "</s>", "[PAD]": "<pad>", "[MASK]": "<mask>"} if family == "mpnet" else {}
    )
    vocabulary = [names_in_mpnet.get(token, token) for token in VOCABULARY]
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in vocabulary), encoding="utf-8")
    config = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 36}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return heedful.load(folder)


def test_which_families_support_which_heads() -> None:
    decoders = {"gpt2", "llama", "qwen3"}
    assert {family for family, kind in SUPPORTED if kind == "language_model"} == {*decoders, *ENCODER_DECODER}
    without_choice = {*decoders, *ENCODER_DECODER, "gte", "nomic_bert", "jina_embeddings_v3", "eurobert"}
    assert {family for family, kind in UNSUPPORTED if kind == "multiple_choice"} == without_choice
    without_answers = {"gte", "nomic_bert", "eurobert", "marian"}
    assert {family for family, kind in UNSUPPORTED if kind == "question_answering"} == without_answers
    assert {family for family, kind in UNSUPPORTED if kind == "token_classification"} == {"bart", "mbart", "marian"}
    assert {family for family, kind in UNSUPPORTED if kind == "sequence_classification"} == {"marian"}
    assert all((family, "embedding") in SUPPORTED for family in TINY)


@pytest.mark.parametrize(("family", "kind"), SUPPORTED)
def test_learn_and_answer(family: str, kind: str) -> None:
    task_class, examples, options = EXAMPLES[kind]
    new_model = with_head(loaded(family), kind, labels=options.get("labels", ()), seed=1)
    assert new_model.tokenizer is not None
    if task_class is Seq2Seq:
        options = {"ends": sequence_ends(new_model.config.model, new_model.tokenizer)}
    task = task_class(tokenizer=new_model.tokenizer, limit=new_model.max_length, **options)
    samples = task.encode_split(examples).samples
    assert len(samples) == len(examples)
    loss = task.loss(new_model.train(), task.batch(samples, list(range(len(samples)))))
    loss.sum.backward()
    with_gradient = {
        name
        for name, tensor in new_model.named_tensors().items()
        if tensor.grad is not None and tensor.grad.abs().sum() > 0
    }
    assert any("blocks" in name for name in with_gradient)
    assert "embedding.tokens.weight" in with_gradient
    assert all(
        bool(tensor.grad.isfinite().all()) for tensor in new_model.named_tensors().values() if tensor.grad is not None
    )
    engine = heedful.Engine(new_model.eval(), writing=GenerationConfig(max_new_tokens=5))
    metrics = task.compute_metrics(evaluate_task(task, engine, examples))
    assert 0 <= abs(metrics[task.metric]) <= 1
    inputs = [task.engine_input(example) for example in examples]
    alone = [engine([text])[0] for text in inputs]
    assert json.dumps(engine(inputs)[0].get("label")) == json.dumps(alone[0].get("label"))


@pytest.mark.parametrize(("family", "kind"), UNSUPPORTED)
def test_unsupported_heads_are_refused(family: str, kind: str) -> None:
    with pytest.raises(HeedfulError, match=f'this family has no head "{kind}".*; it has .*embedding'):
        with_head(loaded(family), kind, labels=("a", "b"))


@pytest.mark.parametrize("family", ["xlnet", "t5", "modernbert"])
def test_long_texts_of_models_without_a_position_table(family: str) -> None:
    """Their maximum length is that of the tokenizer; longer texts are split into windows."""
    model = with_head(loaded(family), "sequence_classification", labels=("a", "b"), seed=1)
    (answer,) = heedful.Engine(model)(["the cat sat on the mat " * 30])
    assert answer["windows"] > 5
    torch.testing.assert_close(sum(answer["probabilities"].values()), 1.0)


@pytest.mark.parametrize("family", [family for family, kind in SUPPORTED if kind == "sequence_classification"])
def test_the_loss_in_bfloat16_is_near_that_in_float32(family: str) -> None:
    """Weights stay in float32, and only products are computed in bfloat16, as in mixed-precision training."""
    task_class, examples, options = EXAMPLES["sequence_classification"]
    model = with_head(loaded(family), "sequence_classification", labels=options["labels"], seed=1)
    task = task_class(tokenizer=model.tokenizer, limit=model.max_length, **options)
    batch = task.batch(task.encode_split(examples).samples, [0, 1])
    exact = float(task.loss(model, batch).sum.detach())
    with torch.autocast("cpu", torch.bfloat16):
        loss = task.loss(model, batch)
    loss.sum.backward()
    assert abs(float(loss.sum.detach()) - exact) < 0.05 * max(1.0, exact)
    model.train()
    with torch.autocast("cpu", torch.bfloat16):  # with dropout, another attention kernel is used
        task.loss(model, batch).sum.backward()
    assert all(
        bool(tensor.grad.isfinite().all()) for tensor in model.named_tensors().values() if tensor.grad is not None
    )


@pytest.mark.parametrize("family", [family for family, kind in SUPPORTED if kind == "sequence_classification"])
def test_a_reranker_is_saved_as_one(family: str, tmp_path: Path) -> None:
    setup = TaskSetup(settings=RankSettings(), loaded=loaded(family), labels=(), stats=EMPTY)
    task, model = Rank.create(setup)
    (sample,) = task.encode_split(
        [RankExample(query="who ?", documents=("ada wrote it", "a cat"), relevance=(1.0, 0.0))]
    ).samples
    task.loss(model, task.batch([sample], [0])).sum.backward()
    heedful.save(model, tmp_path / "model")
    again = heedful.load(tmp_path / "model")
    spec = spec_of_head(again.config.head)
    assert spec is not None and spec.name == "rank"
    inputs = [{"query": "who ?", "texts": ["ada", "x"]}]
    (before,) = heedful.Engine(model.eval())(inputs)
    (after,) = heedful.Engine(again.eval())(inputs)
    assert before["scores"] == pytest.approx(after["scores"], abs=1e-6)
    assert len(before["scores"]) == 2
