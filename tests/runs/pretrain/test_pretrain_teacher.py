"""Pre-training with a teacher: all loss terms, phases, averaged weights, probes, caches, and resuming."""

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
from heedful.runs.pretrain.specs.mlm import MlmSettings
from heedful.runs.results import RunResult
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
SECOND_PHASE = (  # only masked language modelling, with longer sequences and more of them in a step
    "[{start_fraction = 0.5, max_seq_length = 64, batch_size = 16, mask_prob = 0.3, "
    "term_weights = {mlm = 2.0, hidden_states = 0.0}}]"
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No timing, and one thread, so that equal runs have equal results."""
    monkeypatch.setattr("heedful.runs.run.measure_latency", lambda loaded: {"latency": {}, "throughput": 1})
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


PROBE_FILES = {"similarity": "pairs.csv", "classify": "labels.csv", "tag": "tags.conll"}  # by kind of probe


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text, a tokenizer, a teacher and files of probes."""
    folder = tmp_path_factory.mktemp("inputs")
    write_documents(folder / "text.txt", make_documents(120, seed=1))
    train_on(make_documents(120, seed=1), vocab_size=300).save(folder / "tokenizer")
    make_teacher(folder / "teacher", width=24)
    sentences = [sentence for document in make_documents(40, seed=7) for sentence in document]
    with (folder / "pairs.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("text", "pair", "score"))
        for first, second in pairwise(sentences):
            num_shared_words = len(set(first.split()) & set(second.split()))
            writer.writerow((first, second, num_shared_words))
    with (folder / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *((text, text.split()[2]) for text in sentences)])
    with (folder / "tags.conll").open("w") as file:
        for sentence in sentences:
            for word in sentence.split():
                file.write(f"{word} {'B-X' if word[0] in 'bk' else 'B-Y'}\n")
            file.write("\n")
    return folder


def small_settings(inputs: Path, terms: str, overrides: dict[str, Any] | None = None) -> PretrainSettings:
    """Return SMALL settings with some overrides, for a distillation with these loss terms."""
    settings = SMALL | (overrides or {})
    return resolve_pretrain(
        [inputs / "text.txt"],
        objective=terms,
        teacher=str(inputs / "teacher"),
        tokenizer=str(inputs / "tokenizer"),
        assignments=[f"{path}={value}" for path, value in settings.items()],
    )


def distil_small(
    inputs: Path,
    output_dir: Path,
    terms: str,
    overrides: dict[str, Any] | None = None,
    reporter: Reporter | None = None,
) -> RunResult:
    """Pre-train with `small_settings`."""
    return pretrain_with(small_settings(inputs, terms, overrides), output_dir, reporter=reporter)


def continue_training(
    inputs: Path, run: Path, output_dir: Path, objective: str, overrides: dict[str, Any], **options: str
) -> RunResult:
    """Train the model of a run further, with SMALL settings and some overrides."""
    settings = {path: value for path, value in SMALL.items() if not path.startswith("model.")} | overrides
    assignments = [f"{path}={value}" for path, value in settings.items()]
    resolved = resolve_pretrain(
        [inputs / "text.txt"], objective=objective, model=str(run), assignments=assignments, **options
    )
    return pretrain_with(resolved, output_dir)


class StepRecorder(Reporter):
    """Records batch size, loss terms and share of masked tokens of each step, and may stop the run after a step."""

    def __init__(self, stop_after: int = 0) -> None:
        self.stop_after = stop_after  # number of a step; 0: the run is not stopped
        self.steps: list[tuple[int, tuple[str, ...], float]] = []  # (batch size, terms, mask_prob) of each step

    def step(self, step: Step, trainer: Trainer) -> None:
        objective: Any = trainer.objective
        terms = getattr(objective, "names", ())  # only a distillation has them
        self.steps.append((trainer.order.batch_size, terms, objective.mask_prob))
        trainer.stop_requested = trainer.stop_requested or step.number == self.stop_after


def all_features(inputs: Path) -> dict[str, Any]:
    """Return settings of a second phase, averaged weights, pairs of nearest neighbours and a probe of each kind."""
    probes = ", ".join(
        f'{{name = "{kind}", kind = "{kind}", data = "{inputs / file}"}}' for kind, file in PROBE_FILES.items()
    )
    return {"phases": SECOND_PHASE, "train.ema_decay": 0.9, "objective.neighbour_texts": 20, "probes": f"[{probes}]"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, inputs: Path) -> tuple[RunResult, StepRecorder]:
    """A finished run with all loss terms and all features, and the records of its steps."""
    recorder = StepRecorder()
    folder = tmp_path_factory.mktemp("whole") / "run"
    result = distil_small(inputs, folder, ALL_TERMS, all_features(inputs), recorder)
    return result, recorder


@pytest.mark.slow
def test_a_run_that_continues_another_keeps_the_basis_of_its_sentence_vectors(tmp_path: Path, inputs: Path) -> None:
    """The teacher's principal components are those of the first run, and not estimated again from other samples."""
    distil_small(inputs, tmp_path / "first", "sentence_embedding", {"train.max_steps": 1})
    other_samples = {"train.max_steps": 1, "train.seed": 5, "max_seq_length": 40}
    distil_small(inputs, tmp_path / "other", "sentence_embedding", other_samples)
    teacher = str(inputs / "teacher")
    continue_training(
        inputs, tmp_path / "first", tmp_path / "continued", "sentence_embedding", other_samples, teacher=teacher
    )

    def statistics(name: str) -> dict[str, torch.Tensor]:
        return load_file(tmp_path / name / "teacher" / "statistics.safetensors")

    first, other, continued = statistics("first"), statistics("other"), statistics("continued")
    assert all(torch.equal(first[name], continued[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_a_model_that_learned_sentence_vectors_is_an_encoder_of_sentences(tmp_path: Path, inputs: Path) -> None:
    run = tmp_path / "run"
    distil_small(inputs, run, "mlm+sentence_embedding", {"train.max_steps": 1})
    encoder = heedful.load(run)
    assert encoder.tokenizer is not None
    assert encoder.config.head is not None
    assert encoder.config.head.kind == "embedding"
    text = "bo ka do ."
    mean = encoder.hidden_states(encoder.tokenizer.pack([text])).mean(0)
    (vector,) = heedful.Engine(run).encode([text])
    assert torch.allclose(torch.from_numpy(vector), mean, atol=1e-5)
    assert "heedful.Engine" in (run / "model" / "README.md").read_text()


def test_an_encoder_of_sentences_keeps_its_masked_head_for_further_training(tmp_path: Path, inputs: Path) -> None:
    run = tmp_path / "run"
    distil_small(inputs, run, "mlm+sentence_embedding", {"train.max_steps": 1})
    overrides = {"train.max_steps": 1, "train.optimizer.lr": 1e-12}
    continue_training(inputs, run, tmp_path / "continued", "mlm", overrides)
    before, after = heedful.load(run, head="masked_lm"), heedful.load(tmp_path / "continued")
    assert after.config.head == before.config.head
    tensors = after.named_tensors()
    for name, tensor in before.named_tensors().items():
        assert torch.allclose(tensors[name], tensor, atol=1e-6), name


def test_no_sentence_vectors_without_their_term(tmp_path: Path, inputs: Path) -> None:
    run = tmp_path / "run"
    distil_small(inputs, run, "mlm+hidden_states", {"train.max_steps": 1})
    assert heedful.load(run).config.head == heedful.load(run, head="masked_lm").config.head


def test_all_terms_phases_and_probes_in_one_run(whole: tuple[RunResult, StepRecorder]) -> None:
    result, recorder = whole
    assert result.status == "completed"
    assert result.results["objective"] == ALL_TERMS
    all_terms = ("mlm", "hidden_states", "sentence_embedding", "pair_similarity")
    assert recorder.steps[0] == (12, all_terms, 0.15), "the first phase"
    assert recorder.steps[-1] == (16, ("mlm",), 0.3), "the second phase"
    journal = [json.loads(line) for line in (result.output_dir / "journal.jsonl").read_text().splitlines()]
    evaluations = [record for record in journal if "dev" in record]
    assert [record["step"] for record in evaluations] == [3, 6]
    for record in evaluations:
        metrics = record["dev"]
        for name in ("hidden_states_loss", "sentence_embedding_loss", "pair_similarity_loss", "mlm_accuracy"):
            assert name in metrics
        assert -1 <= metrics["probe_similarity"] <= 1
        assert 0 <= metrics["probe_tag"] <= 1
    final_metrics = result.results["splits"]["validation"]["numbers"]
    assert evaluations[-1]["dev"] == final_metrics, "the averaged weights are evaluated and saved"


def test_a_stopped_run_resumes_to_the_same_bits(
    tmp_path: Path, inputs: Path, whole: tuple[RunResult, StepRecorder]
) -> None:
    whole_run, run = whole[0].output_dir, tmp_path / "run"
    for last_step in (2, 4):
        stopped = distil_small(inputs, run, ALL_TERMS, all_features(inputs), StepRecorder(stop_after=last_step))
        assert stopped.status == "interrupted"
    assert distil_small(inputs, run, ALL_TERMS, all_features(inputs)).status == "completed"
    for name in ("model/model.safetensors", "journal.jsonl", "teacher/neighbours/nearest.npy"):
        assert (run / name).read_bytes() == (whole_run / name).read_bytes()


def test_vectors_are_cached_if_no_hidden_states_are_learned(tmp_path: Path, inputs: Path) -> None:
    """A resumed run does not compute them again."""
    run, terms = tmp_path / "run", "sentence_embedding+pair_similarity"
    distil_small(inputs, run, terms, reporter=StepRecorder(stop_after=2))
    cached = sorted((run / "teacher" / "phase-0").glob("*.npy"))
    assert cached
    before = [path.stat().st_mtime_ns for path in cached]
    resumed = distil_small(inputs, run, terms)
    assert resumed.status == "completed"
    assert [path.stat().st_mtime_ns for path in cached] == before
    assert resumed.results["metric"] == "loss"
    assert "perplexity" not in resumed.results["splits"]["validation"]["numbers"]


@pytest.mark.slow
def test_sentence_vectors_come_near_the_teachers(tmp_path: Path, inputs: Path) -> None:
    def final_loss(max_steps: int) -> float:
        overrides = {"train.max_steps": max_steps, "train.optimizer.lr": 5e-3, "eval_every_steps": 60}
        result = distil_small(inputs, tmp_path / str(max_steps), "sentence_embedding", overrides)
        return float(result.results["splits"]["validation"]["numbers"]["sentence_embedding_loss"])

    assert final_loss(60) < 0.6 * final_loss(1)


def test_the_average_leaves_the_training_as_it_is(tmp_path: Path, inputs: Path) -> None:
    """The losses of steps are those of a run without averaged weights. Evaluations and the saved model differ."""
    distil_small(inputs, tmp_path / "plain", "mlm+hidden_states")
    distil_small(inputs, tmp_path / "averaged", "mlm+hidden_states", {"train.ema_decay": 0.9})

    def journal_records(name: str, key: str) -> list[dict[str, Any]]:
        """Return the records of a run's journal that have a key."""
        lines = (tmp_path / name / "journal.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if key in record]

    assert journal_records("plain", "loss") == journal_records("averaged", "loss")
    assert journal_records("plain", "dev") != journal_records("averaged", "dev")
    plain, averaged = heedful.load(tmp_path / "plain"), heedful.load(tmp_path / "averaged")
    parameter_pairs = zip(plain.parameters(), averaged.parameters(), strict=True)
    assert any(not torch.equal(first, second) for first, second in parameter_pairs)


@pytest.mark.parametrize("kind", PROBE_FILES)
def test_probe_scores_do_not_depend_on_batches(inputs: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    loaded = heedful.load(inputs / "teacher")
    assert loaded.tokenizer is not None
    probe = Probe(name="x", kind=kind, data=str(inputs / PROBE_FILES[kind]))  # type: ignore[arg-type]
    probe_set = ProbeSet(probe, loaded.tokenizer)
    score = probe_set.score(loaded)
    monkeypatch.setattr("heedful.runs.pretrain.probes.BATCH_TOKENS", 64)
    assert probe_set.score(loaded) == pytest.approx(score, abs=0.02)


@pytest.mark.parametrize(
    ("kind", "file", "message"),
    [
        ("similarity", "nowhere.csv", "does not exist"),
        ("similarity", "labels.csv", "score"),
        ("tag", "labels.csv", "tags|words|column"),
    ],
)
def test_a_probe_file_that_does_not_fit_is_refused_before_training(
    kind: str, file: str, message: str, tmp_path: Path, inputs: Path
) -> None:
    overrides = {"probes": f'[{{name = "x", kind = "{kind}", data = "{inputs / file}"}}]'}
    with pytest.raises(HeedfulError, match=message):
        distil_small(inputs, tmp_path / "run", "mlm+hidden_states", overrides)
    assert not (tmp_path / "run" / "journal.jsonl").exists()


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


def test_a_phase_of_masked_tokens_has_its_own_rate(tmp_path: Path, inputs: Path) -> None:
    """Masked language modelling without a teacher may have phases too."""
    overrides = SMALL | {"phases": "[{start_fraction = 0.5, mask_prob = 0.4}]"}
    settings = resolve_pretrain(
        [inputs / "text.txt"],
        objective="mlm",
        tokenizer=str(inputs / "tokenizer"),
        assignments=[f"{path}={value}" for path, value in overrides.items()],
    )
    first_phase, second_phase = settings.objectives()
    assert isinstance(first_phase, MlmSettings)
    assert isinstance(second_phase, MlmSettings)
    assert (first_phase.mask_prob, second_phase.mask_prob) == (0.15, 0.4)
    recorder = StepRecorder()
    assert pretrain_with(settings, tmp_path / "run", reporter=recorder).status == "completed"
    assert [mask_prob for _, _, mask_prob in recorder.steps] == [0.15] * 3 + [0.4] * 3
