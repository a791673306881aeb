"""Pre-training with a teacher: all terms and phases in one run, averaged weights, probes, caches, and resuming."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import heedful
from heedful.errors import HeedfulError
from heedful.runs.pretrain.probes import ProbeSet
from heedful.runs.pretrain.run import pretrain_with
from heedful.runs.pretrain.settings import (
    Phase,
    PretrainSettings,
    Probe,
    resolve_pretrain,
)
from heedful.runs.pretrain.specs.distillation import DistillationSettings, TermWeights
from heedful.runs.results import RunResult
from heedful.tokenizer import Tokenizer
from heedful.train.fit import Reporter
from heedful.train.trainer import Step, Trainer
from tests.support.corpora import make_documents, train_on, write_documents
from tests.support.tiny_teacher import make_teacher

SMALL = {
    "model.layers": 1,
    "model.width": 16,
    "model.heads": 2,
    "train.max_steps": 6,
    "train.batch_size": 12,
    "train.precision": "float32",
    "max_seq_length": 48,
    "pack_length": 96,
    "eval_fraction": 0.1,
    "eval_every_steps": 3,
    "corpus.sample_by": "paragraph",
}
ALL_TERMS = "mlm+hidden_states+sentence_embedding+pair_similarity"
PHASES = (
    "[{start_fraction = 0.5, max_seq_length = 64, batch_size = 16, mask_prob = 0.3, "
    "term_weights = {mlm = 2.0, hidden_states = 0.0}}]"
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No timing, and one thread, so that equal runs are equal."""
    monkeypatch.setattr("heedful.runs.run.measure_latency", lambda loaded: {"latency": {}, "throughput": 1})
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text, a tokenizer, a teacher and probe files."""
    folder = tmp_path_factory.mktemp("place")
    write_documents(folder / "text.txt", make_documents(120, seed=1))
    train_on(make_documents(120, seed=1), vocab_size=300).save(folder / "words")
    make_teacher(folder / "teacher", width=24)
    sentences = [sentence for document in make_documents(40, seed=7) for sentence in document]
    with (folder / "pairs.csv").open("w", newline="") as file:
        rows = [(one, two, len(set(one.split()) & set(two.split()))) for one, two in pairwise(sentences)]
        csv.writer(file).writerows([("text", "pair", "score"), *rows])
    with (folder / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *((text, text.split()[2]) for text in sentences)])
    tagged = ["\n".join(f"{word} {'B-X' if word[0] in 'bk' else 'B-Y'}" for word in text.split()) for text in sentences]
    (folder / "tags.conll").write_text("\n\n".join(tagged) + "\n")
    return folder


def settings_of(place: Path, terms: str, more: dict[str, Any] | None = None) -> PretrainSettings:
    settings_args = [f"{name}={value}" for name, value in (SMALL | (more or {})).items()]
    return resolve_pretrain(
        [place / "text.txt"],
        objective=terms,
        teacher=str(place / "teacher"),
        tokenizer=str(place / "words"),
        assignments=settings_args,
    )


def go(place: Path, out: Path, terms: str, more: dict[str, Any] | None = None, **how: Any) -> RunResult:
    return pretrain_with(settings_of(place, terms, more), out, **how)


class StopAfter(Reporter):
    """Asks for a stop after a step; keeps what every step learned from."""

    def __init__(self, step: int = 0) -> None:
        self.at = step
        self.seen: list[tuple[int, int, tuple[str, ...], float]] = []

    def step(self, step: Step, trainer: Trainer) -> None:
        learned: Any = trainer.objective
        self.seen.append((step.number, trainer.order.batch_size, learned.names, learned.mask_prob))
        trainer.stop_requested = trainer.stop_requested or step.number == self.at


def everything(place: Path) -> dict[str, Any]:
    probes = ", ".join(
        f'{{name = "{kind}", kind = "{kind}", data = "{place / file}"}}'
        for kind, file in (("similarity", "pairs.csv"), ("classify", "labels.csv"), ("tag", "tags.conll"))
    )
    return {"phases": PHASES, "train.ema_decay": 0.9, "objective.neighbour_texts": 20, "probes": f"[{probes}]"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, place: Path) -> tuple[RunResult, StopAfter]:
    """A run of all terms to its end, and what its steps learned from."""
    reporter = StopAfter()
    return go(
        place, tmp_path_factory.mktemp("whole") / "run", ALL_TERMS, everything(place), reporter=reporter
    ), reporter


@pytest.mark.slow
def test_a_run_that_continues_another_keeps_the_basis_of_its_sentence_vectors(tmp_path: Path, place: Path) -> None:
    """The teacher's principal components are those of the first run, and not estimated anew from other rows."""
    go(place, tmp_path / "first", "sentence_embedding", {"train.max_steps": 1})
    more = {"train.max_steps": 1, "train.seed": 5, "max_seq_length": 40}
    go(place, tmp_path / "other", "sentence_embedding", more)
    assignments = [f"{name}={value}" for name, value in (SMALL | more).items() if not name.startswith("model.")]
    how = {"model": str(tmp_path / "first"), "teacher": str(place / "teacher"), "assignments": assignments}
    pretrain_with(resolve_pretrain([place / "text.txt"], objective="sentence_embedding", **how), tmp_path / "second")
    first, other, second = (
        load_file(tmp_path / name / "teacher" / "statistics.safetensors") for name in ("first", "other", "second")
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_a_model_that_learned_sentence_vectors_is_an_encoder_of_sentences(tmp_path: Path, place: Path) -> None:
    """The folder has the files of sentence-transformers; its masked head is kept, and training continues from both."""
    done = go(place, tmp_path / "run", "mlm+sentence_embedding", {"train.max_steps": 1})
    texts = ["bo ka do ."]
    vectors, masked = heedful.load(done.output_dir), heedful.load(done.output_dir, head="masked_lm")
    assert vectors.config.head is not None and vectors.config.head.kind == "embedding"
    rows = vectors.hidden_states(vectors.tokenizer.pack(texts))
    assert torch.allclose(torch.from_numpy(heedful.Engine(done.output_dir).encode(texts)[0]), rows.mean(0), atol=1e-5)
    assert "heedful.Engine" in (done.output_dir / "model" / "README.md").read_text()
    values = {**SMALL, "train.max_steps": 1, "train.optimizer.lr": 1e-12}
    settings_args = [f"{name}={value}" for name, value in values.items() if not name.startswith("model.")]
    continued = resolve_pretrain(
        [place / "text.txt"], objective="mlm", model=str(done.output_dir), assignments=settings_args
    )
    again = heedful.load(pretrain_with(continued, tmp_path / "more").output_dir)
    assert again.config.head == masked.config.head
    for name, tensor in masked.named_tensors().items():
        assert torch.allclose(again.named_tensors()[name], tensor, atol=1e-6), name


def test_no_sentence_vectors_without_their_term(tmp_path: Path, place: Path) -> None:
    done = go(place, tmp_path / "run", "mlm+hidden_states", {"train.max_steps": 1})
    assert heedful.load(done.output_dir).config.head == heedful.load(done.output_dir, head="masked_lm").config.head


def test_all_terms_phases_and_probes_in_one_run(whole: tuple[RunResult, StopAfter]) -> None:
    done, reporter = whole
    assert done.status == "completed" and done.results["objective"] == ALL_TERMS
    early, late = reporter.seen[0], reporter.seen[-1]
    assert early[1:] == (12, ("mlm", "hidden_states", "sentence_embedding", "pair_similarity"), 0.15)
    assert late[1:] == (16, ("mlm",), 0.3)
    looks = [
        line for line in map(json.loads, (done.output_dir / "journal.jsonl").read_text().splitlines()) if "dev" in line
    ]
    assert [look["step"] for look in looks] == [3, 6]
    for look in looks:
        assert {"hidden_states_loss", "sentence_embedding_loss", "pair_similarity_loss", "mlm_accuracy"} <= set(
            look["dev"]
        )
        assert -1 <= look["dev"]["probe_similarity"] <= 1 and 0 <= look["dev"]["probe_tag"] <= 1
    assert looks[-1]["dev"] == done.results["splits"]["validation"]["numbers"], "the averaged weights are saved"


def test_a_stopped_run_resumes_to_the_same_bits(
    tmp_path: Path, place: Path, whole: tuple[RunResult, StopAfter]
) -> None:
    for step in (2, 4):
        assert (
            go(place, tmp_path / "parts", ALL_TERMS, everything(place), reporter=StopAfter(step)).status
            == "interrupted"
        )
    assert go(place, tmp_path / "parts", ALL_TERMS, everything(place)).status == "completed"
    for name in ("model/model.safetensors", "journal.jsonl", "teacher/neighbours/nearest.npy"):
        assert (whole[0].output_dir / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()


def test_vectors_are_cached_where_no_hidden_states_are_learned(tmp_path: Path, place: Path) -> None:
    reporter = StopAfter(2)
    go(place, tmp_path / "run", "sentence_embedding+pair_similarity", reporter=reporter)
    cached = sorted((tmp_path / "run/teacher/phase-0").glob("*.npy"))
    before = [(path.stat().st_mtime_ns, path.name) for path in cached]
    assert before
    done = go(place, tmp_path / "run", "sentence_embedding+pair_similarity")
    assert done.status == "completed" and done.results["metric"] == "loss"
    assert [(path.stat().st_mtime_ns, path.name) for path in cached] == before, "computed once"
    assert "perplexity" not in done.results["splits"]["validation"]["numbers"]


@pytest.mark.slow
def test_sentence_vectors_come_near_the_teachers(tmp_path: Path, place: Path) -> None:
    more = {"train.max_steps": 60, "train.optimizer.lr": 5e-3, "eval_every_steps": 60}
    first = go(place, tmp_path / "short", "sentence_embedding", more | {"train.max_steps": 1})
    last = go(place, tmp_path / "long", "sentence_embedding", more)
    losses = [run.results["splits"]["validation"]["numbers"]["sentence_embedding_loss"] for run in (first, last)]
    assert losses[1] < 0.6 * losses[0]


def test_the_average_leaves_the_training_as_it_is(tmp_path: Path, place: Path) -> None:
    """Losses of steps are those without an average; only what is evaluated and saved differs."""
    go(place, tmp_path / "plain", "mlm+hidden_states")
    go(place, tmp_path / "ema", "mlm+hidden_states", {"train.ema_decay": 0.9})
    lines = [
        [json.loads(line) for line in (tmp_path / name / "journal.jsonl").read_text().splitlines()]
        for name in ("plain", "ema")
    ]
    steps = [[line for line in each if "loss" in line] for each in lines]
    assert steps[0] == steps[1]
    assert [line for line in lines[0] if "dev" in line] != [line for line in lines[1] if "dev" in line]
    models = [heedful.load(tmp_path / name) for name in ("plain", "ema")]
    assert any(not torch.equal(a, b) for a, b in zip(*(each.parameters() for each in models), strict=True))


def test_probe_scores_do_not_depend_on_batches(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = heedful.load(place / "teacher")
    assert loaded.tokenizer is not None
    for kind, file in (("similarity", "pairs.csv"), ("classify", "labels.csv"), ("tag", "tags.conll")):
        probe = ProbeSet(Probe(name="x", kind=kind, data=str(place / file)), loaded.tokenizer)  # type: ignore[arg-type]
        whole = probe.score(loaded)
        monkeypatch.setattr("heedful.runs.pretrain.probes.BATCH_TOKENS", 64)
        assert probe.score(loaded) == pytest.approx(whole, abs=0.02)
        monkeypatch.undo()


@pytest.mark.parametrize(
    ("kind", "file", "message"),
    [
        ("similarity", "nowhere.csv", "does not exist"),
        ("similarity", "labels.csv", "score"),
        ("tag", "labels.csv", "tags|words|column"),
    ],
)
def test_a_probe_file_that_does_not_fit_is_refused_before_training(
    kind: str, file: str, message: str, tmp_path: Path, place: Path
) -> None:
    more = {"probes": f'[{{name = "x", kind = "{kind}", data = "{place / file}"}}]'}
    with pytest.raises(HeedfulError, match=message):
        go(place, tmp_path / "run", "mlm+hidden_states", more)
    assert not (tmp_path / "run/journal.jsonl").exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TermWeights(mlm=-1.0), "mlm is -1.0"),
        (lambda: TermWeights(mlm=0.0, hidden_states=0.0), "all weights are 0"),
        (lambda: DistillationSettings(teacher="t", term_weights=TermWeights(pair_similarity=1.0)), "needs pairs"),
        (lambda: DistillationSettings(teacher="t", mask_prob=1.0), "mask_prob is 1.0"),
        (lambda: Phase(start_fraction=0.5, batch_size=0), "batch_size is 0"),
        (
            lambda: PretrainSettings(phases=(Phase(start_fraction=0.5, term_weights=TermWeights()),)),
            "term_weights of a phase",
        ),
        (lambda: resolve_pretrain(["t"], objective="mlm+hidden", teacher="t"), "is not an objective"),
        (lambda: resolve_pretrain(["t"], objective="mlm+hidden_states"), "objective.teacher is missing"),
        (lambda: resolve_pretrain(["t"], objective="mlm", teacher="t"), "objective.teacher is for objective.kind"),
    ],
)
def test_settings_that_cannot_work_are_refused(make: Any, message: str) -> None:
    with pytest.raises(HeedfulError, match=message):
        make()


def test_a_phase_of_masked_tokens_has_its_own_rate(tmp_path: Path, place: Path) -> None:
    settings_args = [
        f"{name}={value}" for name, value in (SMALL | {"phases": "[{start_fraction = 0.5, mask_prob = 0.4}]"}).items()
    ]
    settings = resolve_pretrain(
        [place / "text.txt"], objective="mlm", tokenizer=str(place / "words"), assignments=settings_args
    )
    assert [asked.mask_prob for asked in settings.objectives()] == [0.15, 0.4]  # type: ignore[union-attr]
    assert pretrain_with(settings, tmp_path / "run").status == "completed"
    assert isinstance(Tokenizer.load(tmp_path / "run/model"), Tokenizer)
