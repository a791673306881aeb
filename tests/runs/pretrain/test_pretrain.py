"""pretrain from text to a run folder: every objective, resume, phases, ranks, and what is refused or warned about."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

import heedful
from heedful.data.corpus.build import Corpus, contains_corpus
from heedful.errors import HeedfulError, HeedfulWarning
from heedful.model.config import Normal, TruncatedNormal
from heedful.objectives.causal_lm import CausalLM
from heedful.objectives.masked_lm import MaskedLM
from heedful.objectives.packing import held_out
from heedful.runs.card.baseline import baseline_lines
from heedful.runs.card.markdown import escape_markdown
from heedful.runs.card.pretrained import corpus_notes
from heedful.runs.finetune.settings import FinetuneSettings
from heedful.runs.pretrain import run as pretrain_module
from heedful.runs.pretrain.build import build_model, build_samples, config_of_size
from heedful.runs.pretrain.components import sample_documents
from heedful.runs.pretrain.objective_builder import Components
from heedful.runs.pretrain.run import pretrain_with
from heedful.runs.pretrain.settings import Phase, PretrainSettings, resolve_pretrain
from heedful.runs.pretrain.specs.distillation import DistillationSettings
from heedful.runs.recipes import copy_asset, list_assets
from heedful.runs.results import RunResult
from heedful.runs.run_folder import INITIAL_FILES, can_resume, check_run_folder
from heedful.settings import from_file, to_toml
from heedful.tasks.generation import GenerationConfig
from heedful.tasks.specs.classify import ClassifySettings
from heedful.tokenizer import Tokenizer
from heedful.tokenizer.words import word_tokenizer
from heedful.train.fit import Reporter
from heedful.train.trainer import DivergedError, Step, Trainer
from tests.support.corpora import Document, make_corpus, make_documents, train_on, write_documents
from tests.support.tiny_models import save_tiny
from tests.support.tiny_teacher import make_teacher

ROOT = Path(__file__).parents[3]
SMALL = {
    "model.layers": 1,
    "model.width": 32,
    "model.heads": 2,
    "train.max_steps": 5,
    "train.batch_size": 8,
    "train.precision": "float32",
    "max_seq_length": 32,
    "pack_length": 64,
    "eval_fraction": 0.1,
    "eval_every_steps": 3,
    "fit.keep_checkpoints": "true",
    "tokenizer.vocab_size": 400,
    "corpus.sample_by": "paragraph",
}
TRANSFORMERS = {  # class of transformers for each objective, and names of its outputs that our head computes
    "mlm": ("BertForMaskedLM", ("logits",)),
    "mlm+nsp": ("BertForPreTraining", ("prediction_logits", "seq_relationship_logits")),
    "mlm+sop": ("AlbertForPreTraining", ("prediction_logits", "sop_logits")),
    "plm": ("XLNetLMHeadModel", ("logits",)),
    "span_corruption": ("T5ForConditionalGeneration", ("logits",)),
    "clm": ("GPT2LMHeadModel", ("logits",)),
    "rtd": ("ElectraForPreTraining", ("logits",)),
    "distillation": ("BertForMaskedLM", ("logits",)),
}
TERMS = {  # loss terms of each objective, if they are not the objective itself
    "mlm+nsp": ["mlm", "nsp"],
    "mlm+sop": ["mlm", "sop"],
    "clm": ["clm"],
    "rtd": ["generator", "rtd"],
    "distillation": ["mlm", "hidden_states"],
}
TERM_WEIGHTS = {"rtd": 50.0, "hidden_states": 10.0}  # others are 1
NAMES = {"distillation": "mlm+hidden_states"}  # name of an objective in results, if it is not its kind
RUN_FILES = {  # files and folders of every finished run
    *("settings.toml", "environment.json", "journal.jsonl", "results.csv", "results.json", "run.lock"),
    *("model", "corpus", "tokenizer", "report.html"),
}
MORE_FILES = {"rtd": {"generator"}, "distillation": {"teacher"}}  # further folders of a finished run, by objective
LATENCY = {"latency": {"16": {"p50": 1.0, "p99": 1.0}}, "throughput": 1}  # replaces measurements


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No timing, unless a test undoes this; one thread, so that equal runs have equal results."""
    monkeypatch.setattr("heedful.runs.run.measure_latency", lambda loaded: LATENCY)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with 120 documents."""
    return write_documents(tmp_path_factory.mktemp("text") / "text.txt", make_documents(120, seed=1))


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tokenizer that was trained on `text`, so that not every run has to train one."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_on(make_documents(120, seed=1), vocab_size=400).save(folder)
    return folder


class Recorder(Reporter):
    """Records the steps and the messages of a run, and may stop it after a step."""

    def __init__(self, stop_after: int = 0) -> None:
        self.stop_after = stop_after  # number of a step; 0: the run is not stopped
        self.steps: list[Step] = []
        self.stages: list[tuple[int, int]] = []  # for each step: index of the phase, longest sequence of its first row
        self.messages: list[str] = []

    def step(self, step: Step, trainer: Trainer) -> None:
        self.steps.append(step)
        first_row = trainer.samples[0]
        longest = max(stop - start for start, stop in pairwise(first_row.bounds))
        self.stages.append((trainer.stage, longest))
        if step.number == self.stop_after:
            trainer.stop_requested = True

    def message(self, text: str) -> None:
        self.messages.append(text)


def small_settings(
    data: Any, kind: str = "mlm", overrides: dict[str, Any] | None = None, **options: Any
) -> PretrainSettings:
    """Return the settings of a small run: SMALL, without settings that would be refused because they change nothing.

    Args:
        data: A file, a folder, or a list of files.
        kind: The objective.
        overrides: Settings by path that override SMALL. None means the default of Heedful.
        options: Arguments of `resolve_pretrain`: tokenizer, model or recipe.
    """
    overrides = overrides or {}
    is_corpus = isinstance(data, Path) and contains_corpus(data)
    init_from = options.get("model") or overrides.get("model.init_from")
    has_tokenizer = is_corpus or init_from or options.get("tokenizer") or overrides.get("tokenizer.path")
    unused: list[str] = []  # beginnings of paths
    if init_from:
        unused.append("model.")
    if has_tokenizer:
        unused.append("tokenizer.")
    if is_corpus:
        unused.append("corpus.")
    if "train.time_budget" in overrides:
        unused.append("train.max_steps")
    settings = {path: value for path, value in SMALL.items() if not path.startswith(tuple(unused))} | overrides
    assignments = [f"{path}={value}" for path, value in settings.items() if value is not None]
    paths = data if isinstance(data, list) else [data]
    return resolve_pretrain(paths, objective=kind, assignments=assignments, **options)


def pretrain_small(
    data: Any, output_dir: Path, kind: str = "mlm", overrides: dict[str, Any] | None = None, **options: Any
) -> RunResult:
    """Run `pretrain` with small settings. The arguments are those of `small_settings` and of `pretrain_with`."""
    names = ("tokenizer", "model", "recipe")
    settings_options = {name: options.pop(name) for name in names if name in options}
    return pretrain_with(small_settings(data, kind, overrides, **settings_options), output_dir, **options)


def read_journal_records(folder: Path) -> list[dict[str, Any]]:
    """Read the journal of a run."""
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]


def resumable_content(folder: Path) -> dict[str, Any]:
    """Return what equal runs have in common: model, journal, and the newest checkpoint without times."""
    newest = max((folder / "state").glob("step-*"))
    values = json.loads((newest / "values.json").read_text())
    del values["seconds"]
    content: dict[str, Any] = {"values": values, "journal": (folder / "journal.jsonl").read_bytes()}
    for path in (newest / "tensors.safetensors", *sorted((folder / "model").glob("*"))):
        if path.name != "README.md":
            content[path.name] = path.read_bytes()
    return content


# -- every objective ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an encoder with random weights and its tokenizer."""
    return make_teacher(tmp_path_factory.mktemp("teacher"), width=24)


@pytest.mark.parametrize("kind", TRANSFORMERS)
def test_a_run_is_complete(kind: str, tmp_path: Path, text: Path, teacher: Path) -> None:
    folder, recorder = tmp_path / "run", Recorder()
    overrides: dict[str, Any] = {"fit.keep_checkpoints": None}
    if kind == "distillation":
        overrides["objective.teacher"] = teacher
    result = pretrain_small(text, folder, kind, overrides, reporter=recorder)
    assert result.status == "completed"
    assert result.output_dir == folder
    results = json.loads((folder / "results.json").read_text())
    assert result.results == results
    files = RUN_FILES | MORE_FILES.get(kind, set())
    if results["checkpoints"]["best"]["step"] != results["checkpoints"]["last"]["step"]:
        files |= {"checkpoints"}
    assert {path.name for path in folder.iterdir()} == files
    assert from_file(PretrainSettings, folder / "settings.toml").objective.kind == kind
    assert (results["task"], results["objective"], results["steps"]) == ("pretrain", NAMES.get(kind, kind), 5)
    assert results["tokens"] == sum(step.tokens for step in recorder.steps)
    assert results["tokens"] > 5 * 8 * 50, "5 steps of 8 rows of up to 64 tokens"
    assert results["epochs"] == recorder.steps[-1].epoch
    assert results["corpus"]["counts"]["documents"] == 120
    check_metrics(kind, folder, results)
    loaded = heedful.load(folder)
    assert results["model"]["parameters"] == loaded.count()
    assert loaded.max_length in (32, None)
    card = (folder / "model" / "README.md").read_text()
    assert f"objective `{NAMES.get(kind, kind)}`" in card
    assert "120 documents" in card
    check_model(kind, folder / "model")
    if kind in ("span_corruption", "clm"):
        check_generation(kind, folder / "model")


def check_metrics(kind: str, folder: Path, results: dict[str, Any]) -> None:
    """Check the metrics on validation in results.json and in the journal."""
    metrics = results["splits"]["validation"]["numbers"]
    terms = TERMS.get(kind, [kind])
    losses = {term: metrics[f"{term}_loss"] for term in terms}
    accuracy_names = [f"{term}_accuracy" for term in terms if term != "hidden_states"]
    loss_names = [f"{term}_loss" for term in terms]
    assert set(metrics) == {"loss", "perplexity", "count", *loss_names, *accuracy_names}
    assert all(0 <= metrics[name] <= 1 for name in accuracy_names)
    assert results["metric"] == accuracy_names[0]
    assert metrics["loss"] == pytest.approx(sum(TERM_WEIGHTS.get(term, 1.0) * loss for term, loss in losses.items()))
    assert 4 < losses[terms[0]] < 8, "hardly anything was learned"
    records = read_journal_records(folder)
    updates = [record for record in records if "loss" in record]
    assert [record["step"] for record in updates] == [1, 2, 3, 4, 5]
    assert all(record["grad_norm"] > 0 for record in updates)
    evaluations = [record for record in records if "dev" in record]
    assert [record["step"] for record in evaluations] == [3, 5]
    assert evaluations[-1]["dev"] == metrics
    assert evaluations[-1]["metric_value"] == metrics[accuracy_names[0]]


def check_model(kind: str, folder: Path) -> None:
    """Check that transformers loads model and tokenizer from the folder, and computes the same outputs."""
    class_name, output_names = TRANSFORMERS[kind]
    assert json.loads((folder / "config.json").read_text())["architectures"] == [class_name]
    bundle = heedful.load(folder).eval()
    assert bundle.tokenizer is not None
    assert bundle.head is not None
    hf_class = getattr(transformers, class_name)
    hf_model, loading_info = hf_class.from_pretrained(folder, output_loading_info=True)
    assert not loading_info["missing_keys"]
    assert not loading_info["unexpected_keys"]
    assert hf_model.config.eos_token_id in (None, bundle.tokenizer.special.eos_or_sep)
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    first, second = "In the garden a rose falls today.", "In the mill a wheel turns."
    if kind in ("mlm+nsp", "mlm+sop"):
        batch, encoded = bundle.tokenizer.pack([(first, second)]), hf_tokenizer([first], [second])
    else:
        batch, encoded = bundle.tokenizer.pack([first]), hf_tokenizer([first])
    assert encoded["input_ids"] == [batch.tokens.tolist()]
    hf_inputs: dict[str, Tensor] = {"input_ids": batch.tokens[None]}
    with torch.no_grad():
        if kind == "span_corruption":
            target = bundle.tokenizer.pack([second])
            outputs = bundle.head(bundle.hidden_states(batch, target), target)
            hf_inputs["decoder_input_ids"] = target.tokens[None]
        else:
            outputs = bundle.head(bundle.hidden_states(batch), batch)
            if kind != "clm":
                hf_inputs["token_type_ids"] = batch.types[None]
        hf_outputs = hf_model.eval()(**hf_inputs)
    for output, name in zip(outputs if isinstance(outputs, tuple) else (outputs,), output_names, strict=True):
        assert torch.allclose(output, getattr(hf_outputs, name).reshape(output.shape), atol=1e-5)


def check_generation(kind: str, folder: Path) -> None:
    """Check that `generate` of transformers knows the end token and the padding token, and generates the same text."""
    bundle = heedful.load(folder)
    assert bundle.tokenizer is not None
    hf_model = getattr(transformers, TRANSFORMERS[kind][0]).from_pretrained(folder).eval()
    special, hf_config = bundle.tokenizer.special, hf_model.generation_config
    assert (hf_config.eos_token_id, hf_config.pad_token_id) == (special.eos_or_sep, special.pad)
    prompt = "In the garden"
    ids = bundle.tokenizer.pack([prompt]).tokens[None]
    if kind == "clm":
        ids = ids[:, :-1]  # without the end token
    (generated,) = hf_model.generate(ids, max_new_tokens=6, do_sample=False)
    num_given = ids.shape[1] if kind == "clm" else 1  # tokens that are not new: the prompt, or the start token
    (answer,) = heedful.Engine(folder, writing=GenerationConfig(max_new_tokens=6))([prompt])
    assert answer["text"] == bundle.tokenizer.decode(generated[num_given:].tolist()).strip()


@pytest.mark.usefixtures("run_plots")
def test_a_run_with_plots_and_timing(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    result = pretrain_small(text, tmp_path / "run")
    assert (tmp_path / "run" / "plots" / "curves.png").stat().st_size > 1000
    assert result.results["latency"]["16"]["p50"] > 0
    assert result.results["throughput"] > 0
    header, *rows = (tmp_path / "run" / "results.csv").read_text().splitlines()
    assert header.startswith("step,epoch,loss,lr,grad_norm")
    assert "dev_mlm_accuracy" in header
    assert len(rows) == 7, "5 updates and 2 evaluations"


@pytest.mark.parametrize(
    ("kind", "vocab_size", "num_sentinels"),
    [("span_corruption", 400, 20), ("span_corruption", 3000, 100), ("clm", 400, 0)],
)
def test_the_tokenizer_that_is_trained(
    tmp_path: Path, text: Path, kind: str, vocab_size: int, num_sentinels: int
) -> None:
    recorder = Recorder()
    overrides = {"tokenizer.vocab_size": vocab_size, "train.max_steps": 1}
    pretrain_small(text, tmp_path / "run", kind, overrides, reporter=recorder)
    tokenizer = Tokenizer.load(tmp_path / "run" / "model")
    assert tokenizer.max_length == 32
    sentinels = [tokenizer.id(f"<extra_id_{index}>") for index in range(num_sentinels)]
    last_ids = range(tokenizer.size - 1, tokenizer.size - 1 - num_sentinels, -1)
    assert sentinels == list(last_ids)
    assert tokenizer.id(f"<extra_id_{num_sentinels}>") is None
    algorithm = "bpe" if kind == "clm" else "wordpiece"
    message = f"training a tokenizer on the text ({algorithm}, up to {vocab_size:,} tokens)"
    assert recorder.messages[0].startswith(message)
    has_byte_level_tokens = tokenizer.id("\u0120a") is not None  # " a" in byte-level BPE
    assert has_byte_level_tokens == (kind == "clm")


@pytest.mark.parametrize("name", [asset.name for asset in list_assets() if asset.name.startswith("pretrain-")])
def test_recipes_run(name: str, tmp_path: Path, text: Path, teacher: Path) -> None:
    """Each recipe is run with a small model, few steps and short sequences; all other settings are the recipe's."""
    path, _ = copy_asset(name, tmp_path / "recipe.toml")
    recipe = resolve_pretrain([text], recipe=path)
    overrides: dict[str, Any] = {"train.max_steps": 2}
    if recipe.train.time_budget is not None:
        overrides = {"train.time_budget": 0.005}
    if not recipe.model.init_from:
        overrides["tokenizer.vocab_size"] = 420
    if recipe.phases:
        overrides["phases"] = "[{start_fraction = 0.5, max_seq_length = 40}]"
    if recipe.tokenizer.num_sentinels:
        overrides["tokenizer.num_sentinels"] = 20
    objective = recipe.objective
    if isinstance(objective, DistillationSettings):
        num_texts = 20 if objective.neighbour_texts else 0
        overrides["objective.teacher"] = teacher
        overrides["objective.neighbour_texts"] = num_texts
        objective = replace(objective, teacher=str(teacher), neighbour_texts=num_texts)
    options = {}
    if recipe.model.init_from:  # a placeholder
        with pytest.raises(HeedfulError, match="'path/to/a-model' is neither a folder here nor a name"):
            pretrain_with(recipe, tmp_path / "run")
        options["model"] = str(teacher)
    result = pretrain_small(text, tmp_path / "run", "", overrides, recipe=path, **options)
    assert result.status == "completed"
    assert result.results["objective"] == recipe.kind
    settings = from_file(PretrainSettings, tmp_path / "run" / "settings.toml")
    assert settings.objective == objective
    assert settings.train.optimizer == recipe.train.optimizer
    assert settings.train.schedule == recipe.train.schedule
    assert settings.model.dropout == recipe.model.dropout
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert config["model_type"] == (recipe.model.family or "bert")


def test_the_recipe_of_bert_is_that_of_the_paper(tmp_path: Path, text: Path) -> None:
    path, _ = copy_asset("pretrain-bert", tmp_path / "recipe.toml")
    recipe = resolve_pretrain([text], recipe=path)
    optimizer = recipe.train.optimizer
    assert (optimizer.lr, optimizer.eps, optimizer.bias_correction) == (1e-4, 1e-6, False)
    assert recipe.max_seq_length == 128
    assert recipe.phases == (Phase(start_fraction=0.9, max_seq_length=512),)


def test_the_dropout_of_training_is_not_saved(tmp_path: Path, text: Path, tokenizer_dir: Path) -> None:
    rates = []  # dropout of the embedding at each step

    class DropoutRecorder(Recorder):
        def step(self, step: Step, trainer: Trainer) -> None:
            rates.append(trainer.loaded.config.model.embedding.dropout)
            super().step(step, trainer)

    for dropout in (0.0, 0.2):
        overrides = {"model.family": "roberta", "model.dropout": dropout, "train.max_steps": 1}
        folder = tmp_path / str(dropout)
        pretrain_small(text, folder, overrides=overrides, tokenizer=str(tokenizer_dir), reporter=DropoutRecorder())
        config = json.loads((folder / "model" / "config.json").read_text())
        assert config["hidden_dropout_prob"] == 0.1, "the usual rate of the family"
    assert rates == [0.0, 0.2]


def test_a_family_by_name(tmp_path: Path, text: Path, tokenizer_dir: Path) -> None:
    folder = tmp_path / "run"
    overrides = {"model.family": "roberta", "train.max_steps": 1}
    pretrain_small(text, folder, overrides=overrides, tokenizer=str(tokenizer_dir))
    config = json.loads((folder / "model" / "config.json").read_text())
    assert config["model_type"] == "roberta"
    assert config["pad_token_id"] == 0
    assert config["max_position_embeddings"] == 33, "32 positions, and one for padding before them"
    assert config["type_vocab_size"] == 2, "the published model has 1, but this tokenizer has another type for pairs"
    hf_model = transformers.RobertaForMaskedLM.from_pretrained(folder / "model").eval()
    bundle = heedful.load(folder).eval()
    assert bundle.tokenizer is not None
    assert bundle.head is not None
    batch = bundle.tokenizer.pack([("In the garden a rose falls.", "A wheel turns.")])
    with torch.no_grad():
        hf_logits = hf_model(input_ids=batch.tokens[None], token_type_ids=batch.types[None]).logits[0]
        logits = bundle.head(bundle.hidden_states(batch), batch)
    assert torch.allclose(logits, hf_logits, atol=1e-5)


@pytest.mark.parametrize(("family", "layers"), [("gpt2", 1), ("gpt2", 24), ("modernbert", 3)])
def test_fresh_outputs_are_drawn_by_the_models_own_layers(tokenizer_dir: Path, family: str, layers: int) -> None:
    """Output layers are scaled by 1 / sqrt(N) for N sublayers (Radford et al. 2019, section 2.3) of this model."""
    kind = "clm" if family == "gpt2" else "mlm"
    settings = small_settings("a", kind, {"model.family": family, "model.layers": layers})
    initialisation = config_of_size(family, settings, Tokenizer.load(tokenizer_dir)).model.initialisation
    assert isinstance(initialisation, Normal | TruncatedNormal)
    num_sublayers = 2 * layers
    assert initialisation.outputs == pytest.approx(num_sublayers**-0.5)


@pytest.mark.parametrize(("family", "heads", "kv_heads"), [("qwen3", 4, 2), ("llama", 6, 2), ("llama", 4, None)])
def test_fresh_models_share_keys_as_the_published_ones_do(
    tokenizer_dir: Path, family: str, heads: int, kv_heads: int | None
) -> None:
    overrides = {"model.family": family, "model.layers": 1, "model.width": 8 * heads, "model.heads": heads}
    config = config_of_size(family, small_settings("a", "clm", overrides), Tokenizer.load(tokenizer_dir))
    assert config.model.decoder is not None
    assert config.model.decoder.kv_heads == kv_heads
    bundle = heedful.checkpoint.create(config, seed=1)
    assert bundle.model(heedful.Packed.of([[5, 6, 7]])).isfinite().all()


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_decoder_learns_where_a_document_ends(tmp_path: Path, wrapped: bool) -> None:
    """Each document has one end token as a target, although it has several sequences.

    If not `wrapped`, the tokenizer puts no special tokens around a text, as that of GPT-2.
    """
    documents = make_documents(40, seed=2, sentences=(5, 9))
    tokenizer = train_on(documents, algorithm="bpe", vocab_size=400)
    if not wrapped:
        state = json.loads(tokenizer._backend.to_str()) | {"post_processor": None}
        tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(state)), {"eos_token": "</s>"})
    settings = small_settings("a", "clm", {"eval_fraction": 0.2})
    corpus = make_corpus(tmp_path, documents, tokenizer)
    components = Components(settings=settings, tokenizer=tokenizer, corpus=corpus, init_model=None)
    (train_rows,), validation_rows = build_samples(components)
    objective = CausalLM(tokenizer=tokenizer)
    start_ids = (tokenizer.special.bos_or_cls, tokenizer.special.eos_or_sep)
    num_ends = num_sequences = 0
    for row in [*(train_rows[index] for index in range(len(train_rows))), *validation_rows]:
        targets = objective.batch([row], [0]).targets
        num_ends += int((targets == tokenizer.special.eos_or_sep).sum())
        num_sequences += len(row.bounds) - 1
        assert all(row.tokens[start] in start_ids for start in row.bounds[:-1])
    assert num_ends == len(documents)
    assert num_sequences > len(documents)


def test_a_tokenizer_is_trained_on_all_files_and_on_cleaned_text(tmp_path: Path) -> None:
    """The sample for a small tokenizer has texts of each file, and combining accents are composed as in a corpus."""
    (tmp_path / "data").mkdir()
    for name, word in (("de", "haus"), ("fr", "e\u0301te\u0301"), ("ru", "\u0434\u043e\u043c")):
        lines = "".join(f"{word} {number}.\n" for number in range(1000))
        (tmp_path / "data" / f"{name}.txt").write_text(lines, encoding="utf-8")
    overrides = {
        "tokenizer.train_chars": 3000,
        "corpus.sample_by": "line",
        "tokenizer.lower_case": "false",
        "train.max_steps": 1,
    }
    result = pretrain_small(tmp_path / "data", tmp_path / "run", overrides=overrides)
    assert result.results["corpus"]["counts"]["unknown"] == 0
    tokenizer = Tokenizer.load(tmp_path / "run" / "model")
    assert tokenizer.id("\u0434") is not None, "a Cyrillic letter"
    assert tokenizer.id("\u00e9") is not None, "a letter with its accent"
    assert tokenizer.id("\u0301") is None, "an accent alone"


def test_sampled_documents_are_from_the_whole_text() -> None:
    """A document begins with its index modulo 2, and with the quarter of the text that it is in."""
    documents = [f"{index % 2}{index // 250} {index:04} {'x' * 91}" for index in range(1000)]

    def sample(max_chars: int) -> list[str]:
        return sample_documents(((document, False) for document in documents), max_chars)

    sampled = sample(10_000)
    assert 20 < len(sampled) <= 100
    assert sampled == [document for document in documents if document in set(sampled)], "in their order"
    assert {document[0] for document in sampled} == set("01")
    assert {document[1] for document in sampled} == set("0123")
    assert sampled == sample(10_000)
    assert sample(99_000) == documents, "all documents if the sample may be as large"
    assert sample_documents([("x" * 50, False)] * 9, 10) == ["x" * 50], "at least one document"


def test_sampled_documents_are_cleaned() -> None:
    documents = [("cafe\u0301\n\x07 a", False), ("a\n b", True), (" ", False)]
    assert sample_documents(documents, 99) == ["caf\u00e9 a", "a\nb"]


def test_unknown_tokens_are_counted_and_reported(tmp_path: Path, text: Path, tokenizer_dir: Path) -> None:
    (tmp_path / "strange.txt").write_text("\u0434\u043e\u043c in the mill.\n\n" * 3, encoding="utf-8")
    overrides = {"train.max_steps": 1}
    files = [text, tmp_path / "strange.txt"]
    result = pretrain_small(files, tmp_path / "run", overrides=overrides, tokenizer=str(tokenizer_dir))
    corpus = Corpus.open(tmp_path / "run" / "corpus")
    unknown_id = Tokenizer.load(tokenizer_dir).special.unknown
    assert (corpus.tokens(0, corpus.count) == unknown_id).sum() == 3
    assert result.results["corpus"]["counts"]["unknown"] == 3
    (note,) = corpus_notes({"counts": {"tokens": 1000, "unknown": 13}})
    assert note == "1.3 % of the tokens are unknown to the tokenizer, and lost"
    assert not corpus_notes({"counts": {"tokens": 10_000, "unknown": 9}}), "a share below 0.1 % is not reported"
    assert not corpus_notes({"counts": {"tokens": 9}})


@pytest.mark.parametrize("mask_unit", ["tokens", "words"])
def test_rows_of_a_fixed_shape_have_the_usual_share_of_masked_tokens(
    tmp_path: Path, tokenizer_dir: Path, mask_unit: str
) -> None:
    """This is also true of rows of a few short documents, which are mostly padding."""
    tokenizer = Tokenizer.load(tokenizer_dir)
    corpus = make_corpus(tmp_path, make_documents(200, seed=3, sentences=(1, 2)), tokenizer)
    overrides = {"sequences_per_pack": 4, "pack_length": 128, "objective.mask_unit": mask_unit}
    settings = small_settings(corpus.folder, overrides=overrides)
    components = Components(settings=settings, tokenizer=tokenizer, corpus=corpus, init_model=None)
    (rows,), _ = build_samples(components)
    (objective,) = components.builder.objectives(components, build_model(components), [rows])
    assert isinstance(objective, MaskedLM)
    for index in range(len(rows)):
        row = rows[index]
        assert len(row) == 128
        assert max(stop - start for start, stop in pairwise(row.bounds)) <= settings.max_seq_length
        batch = objective.batch([row], [index])
        assert len(batch.targets) == round(0.15 * (128 - 4 - 2)), "targets of the row with the most text"
        text_tokens = int(objective.is_text_id[row.tokens].sum())
        masked_tokens = float(batch.weights.sum())
        if mask_unit == "tokens":
            assert masked_tokens == round(0.15 * text_tokens)
        else:  # as many whole words as fit
            assert 0 < masked_tokens <= round(0.15 * text_tokens)
    assert text_tokens < 100, "the last row is padded"


# -- learning -----------------------------------------------------------------------------------------------------


def subject_documents(count: int, seed: int = 0) -> list[Document]:
    """Return documents about four subjects. All sentences of a document are repetitions of its subject's two words."""
    rng = random.Random(seed)
    documents = []
    for index in range(count):
        letter = "abcd"[index % 4]
        words = f"ba{letter} du{letter}"
        documents.append([" ".join([words] * rng.randint(2, 3)) for _ in range(rng.randint(4, 9))])
    return documents


@pytest.mark.slow
def test_masked_tokens_and_next_segments_are_learned(tmp_path: Path) -> None:
    """Validation has one document of each subject, so that a second segment of another document has other words."""
    documents = subject_documents(200)
    tokenizer = train_on(documents)
    is_held_out = held_out(make_corpus(tmp_path / "all", documents, tokenizer), 0.2)
    held_out_subjects: set[int] = set()
    selected = []
    for index, document in enumerate(documents):
        subject = index % 4
        if is_held_out[index]:
            if subject in held_out_subjects:
                continue
            held_out_subjects.add(subject)
        selected.append(document)
    corpus = make_corpus(tmp_path / "selected", selected, tokenizer)
    overrides = {
        "model.width": 48, "model.heads": 4, "max_seq_length": 40, "pack_length": 160, "eval_fraction": 0.2,
        "eval_every_steps": 200, "train.batch_size": 6, "train.optimizer.lr": 1e-2, "train.max_steps": 300,
    }  # fmt: skip
    with pytest.warns(HeedfulWarning, match="9. % of the segments of this text are repeated.*stall: clean the text"):
        result = pretrain_small(corpus.folder, tmp_path / "run", "mlm+nsp", overrides)
    metrics = result.results["splits"]["validation"]["numbers"]
    assert metrics["mlm_accuracy"] >= 0.98
    assert metrics["nsp_accuracy"] >= 0.98


# -- resuming -----------------------------------------------------------------------------------------------------


@pytest.mark.timeout(600)  # three runs, which a busy machine with all types checked may not end in the usual limit
@pytest.mark.parametrize(("kind", "versions"), [("mlm+nsp", None), ("mlm+nsp", 2), ("rtd", None)])
def test_resuming_in_the_second_epoch_equals_an_uninterrupted_run(
    kind: str, versions: int | None, tmp_path: Path, text: Path, tokenizer_dir: Path
) -> None:
    overrides = {"train.batch_size": 45, "train.max_steps": 9, "model.dropout": 0.1, "eval_every_steps": 4}
    if versions is not None:
        overrides["objective.num_static_masks"] = versions

    def pretrain(name: str, reporter: Reporter) -> RunResult:
        folder = tmp_path / name
        return pretrain_small(text, folder, kind, overrides, tokenizer=str(tokenizer_dir), reporter=reporter)

    all_steps = Recorder()
    whole = pretrain("whole", all_steps)
    assert 1.2 < all_steps.steps[5].epoch < 1.9, "step 6 is within the second epoch"
    assert all_steps.steps[-1].epoch > 2
    first_steps = Recorder(stop_after=6)
    assert pretrain("run", first_steps).status == "interrupted"
    assert first_steps.steps[-1].number == 6
    assert not (tmp_path / "run" / "model").exists()
    last_steps = Recorder()
    resumed = pretrain("run", last_steps)
    assert "resuming after step 6" in last_steps.messages
    assert [step.number for step in last_steps.steps] == [7, 8, 9]
    assert resumable_content(tmp_path / "run") == resumable_content(tmp_path / "whole")
    assert resumed.results["tokens"] == whole.results["tokens"] == sum(step.tokens for step in all_steps.steps)


def test_a_loss_that_is_not_finite_beside_an_accuracy_that_is_stops_the_run(
    tmp_path: Path, text: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_share = pretrain_module.measure_share

    def with_nan_loss(*arguments: Any) -> dict[str, tuple[float, float]]:
        return measure_share(*arguments) | {"mlm_loss": (float("nan"), 3.0)}

    monkeypatch.setattr(pretrain_module, "measure_share", with_nan_loss)
    for _ in range(2):  # the same command fails again
        with pytest.raises(DivergedError, match=r"^step \d: .* nan for mlm_loss, so the model is no result"):
            pretrain_small(text, tmp_path / "run", tokenizer=str(tokenizer_dir))
        assert not (tmp_path / "run" / "model").exists()
        assert not (tmp_path / "run" / "results.json").exists()


def test_phases_of_other_lengths(tmp_path: Path, text: Path, tokenizer_dir: Path) -> None:
    """A run that is interrupted at the end of the first phase, or in the second one, resumes with the same bits."""
    overrides = {
        "phases": "[{start_fraction = 0.5, max_seq_length = 60}]",
        "train.max_steps": 8,
        "max_seq_length": 20,
        "train.batch_size": 8,
    }

    def pretrain(name: str, reporter: Reporter | None = None) -> RunResult:
        folder = tmp_path / name
        return pretrain_small(text, folder, "mlm+nsp", overrides, tokenizer=str(tokenizer_dir), reporter=reporter)

    recorder = Recorder()
    whole = pretrain("whole", recorder)
    assert [stage for stage, _ in recorder.stages] == [0] * 4 + [1] * 4
    assert max(longest for stage, longest in recorder.stages if stage == 0) <= 20
    assert 20 < max(longest for stage, longest in recorder.stages if stage == 1) <= 60
    epochs = [step.epoch for step in recorder.steps]
    assert all(epoch < next_epoch for epoch, next_epoch in pairwise(epochs)), "epochs count on in the second phase"
    assert whole.results["epochs"] == epochs[-1]
    assert heedful.load(tmp_path / "whole").max_length == 60
    for last_step in (4, 6):
        name = f"stopped-after-{last_step}"
        assert pretrain(name, Recorder(stop_after=last_step)).status == "interrupted"
        assert pretrain(name).status == "completed"
        assert resumable_content(tmp_path / name) == resumable_content(tmp_path / "whole")


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path, text: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        overrides = {"model.dropout": 0.1, "train.seed": seed, "train.max_steps": 3}
        pretrain_small(text, tmp_path / name, overrides=overrides)
    assert resumable_content(tmp_path / "a") == resumable_content(tmp_path / "b")
    first, other_seed = (load_file(tmp_path / name / "model" / "model.safetensors") for name in "ac")
    name = next(iter(first))
    assert not torch.equal(first[name], other_seed[name])


def test_a_finished_run_is_not_repeated_and_keeps_its_settings(tmp_path: Path, text: Path, tokenizer_dir: Path) -> None:
    run, tokenizer = tmp_path / "run", str(tokenizer_dir)
    results = pretrain_small(text, run, tokenizer=tokenizer).results
    content = resumable_content(run)
    recorder = Recorder()
    assert pretrain_small(text, run, tokenizer=tokenizer, reporter=recorder).results == results
    assert recorder.messages == [f"{run} is finished already"]
    assert recorder.steps == []
    message = r"other settings: train\.batch_size was 8 and is 9 now\. Give another folder"
    with pytest.raises(HeedfulError, match=message):
        pretrain_small(text, run, overrides={"train.batch_size": 9}, tokenizer=tokenizer)
    assert resumable_content(run) == content


def test_a_stopped_run_keeps_its_settings(tmp_path: Path, text: Path, tokenizer_dir: Path) -> None:
    run, tokenizer = tmp_path / "run", str(tokenizer_dir)
    stopped = pretrain_small(text, run, tokenizer=tokenizer, reporter=Recorder(stop_after=2))
    assert stopped.status == "interrupted"
    with pytest.raises(HeedfulError, match=r"other settings: objective\.kind was 'mlm' and is 'mlm\+nsp' now"):
        pretrain_small(text, run, "mlm+nsp", tokenizer=tokenizer)
    other_text = write_documents(tmp_path / "text.txt", make_documents(40))
    with pytest.raises(HeedfulError, match="other settings: data was"):
        pretrain_small(other_text, run, tokenizer=tokenizer)


def test_changed_text_is_refused(tmp_path: Path, tokenizer_dir: Path) -> None:
    text, run = write_documents(tmp_path / "text.txt", make_documents(60)), tmp_path / "run"
    stopped = pretrain_small(text, run, tokenizer=str(tokenizer_dir), reporter=Recorder(stop_after=2))
    assert stopped.status == "interrupted"
    write_documents(text, make_documents(61))
    with pytest.raises(HeedfulError, match="holds a different corpus"):
        pretrain_small(text, run, tokenizer=str(tokenizer_dir))


def test_the_advice_of_errors_can_be_followed_in_the_same_folder(tmp_path: Path) -> None:
    """Settings may change until a model is trained. Tokenizer and corpus are only made anew if they depend on them."""
    text, run = write_documents(tmp_path / "text.txt", make_documents(12, seed=3)), tmp_path / "run"
    overrides = {"eval_fraction": 0.001, "train.max_steps": 1}
    with pytest.raises(HeedfulError, match=r"^there is only one document, .* or set corpus\.sample_by"):
        pretrain_small(text, run, "mlm+nsp", overrides | {"corpus.sample_by": "document"})
    with (
        pytest.warns(HeedfulWarning, match="corpus was made with other settings of the text, and is made anew"),
        pytest.raises(HeedfulError, match=r"needs two documents at least, but of 12 there are 11 .* eval_fraction"),
    ):
        pretrain_small(text, run, "mlm+nsp", overrides)
    files = (run / "tokenizer" / "tokenizer.json", run / "corpus" / "manifest.json")
    before = [path.stat().st_mtime_ns for path in files]
    assert pretrain_small(text, run, "mlm+nsp", overrides | {"eval_fraction": 0.3}).status == "completed"
    assert [path.stat().st_mtime_ns for path in files] == before


# -- the initial model, the tokenizer and the corpus --------------------------------------------------------------


def test_a_trained_model_is_trained_further(tmp_path: Path, text: Path) -> None:
    """With a tiny learning rate, the new run has the weights of the old one, without those of the nsp head."""
    first, second = tmp_path / "first", tmp_path / "second"
    pretrain_small(text, first, "mlm+nsp")
    other_text = write_documents(tmp_path / "other.txt", make_documents(80, seed=7))
    overrides = {"train.optimizer.lr": 1e-9, "train.max_steps": 1, "model.dropout": 0.0}
    result = pretrain_small(other_text, second, overrides=overrides, model=str(first))
    assert result.results["base"] == str(first)
    assert not (second / "tokenizer").exists(), "the model has a tokenizer"
    old, new = (load_file(run / "model" / "model.safetensors") for run in (first, second))
    assert all("pooler" in name or "seq_relationship" in name for name in old.keys() - new.keys())
    shared_names = old.keys() & new.keys()
    assert len(shared_names) > 20
    assert all(torch.allclose(old[name], new[name], atol=1e-6) for name in shared_names)
    for run in (first, second):
        config = json.loads((run / "model" / "config.json").read_text())
        assert config["hidden_dropout_prob"] == 0.1


def test_a_trained_model_keeps_its_tokenizer_and_its_maximum_length(tmp_path: Path, text: Path) -> None:
    first = tmp_path / "first"
    pretrain_small(text, first)
    other_tokenizer = tmp_path / "other-tokenizer"
    word_tokenizer(["some", "words"]).save(other_tokenizer)
    with pytest.raises(HeedfulError, match="was trained with another tokenizer"):
        pretrain_small(text, tmp_path / "a", model=str(first), tokenizer=str(other_tokenizer))
    with pytest.raises(HeedfulError, match=r"max_seq_length is 64, but .*first.* reads 32 tokens"):
        pretrain_small(text, tmp_path / "b", overrides={"max_seq_length": 64}, model=str(first))


def test_the_score_before_training_is_reported_beside_that_after_it(tmp_path: Path, text: Path) -> None:
    """The model hardly changes, so both scores are nearly equal, and equal to those of the run that trained it."""
    first = pretrain_small(text, tmp_path / "first")
    assert "baseline" not in first.results, "training began with random weights"
    assert not (tmp_path / "first" / "before.json").exists()
    overrides = {"train.optimizer.lr": 1e-9}

    def pretrain(name: str, reporter: Reporter | None = None) -> RunResult:
        folder = tmp_path / name
        return pretrain_small(text, folder, overrides=overrides, model=str(tmp_path / "first"), reporter=reporter)

    whole = pretrain("whole")
    after = whole.results["splits"]["validation"]["numbers"]
    before = whole.results["baseline"]["splits"]["validation"]["numbers"]
    assert before["mlm_loss"] > 0
    assert before == pytest.approx(after, rel=1e-4)
    first_loss = first.results["splits"]["validation"]["numbers"]["mlm_loss"]
    assert before["mlm_loss"] == pytest.approx(first_loss, rel=1e-4), "both runs hold out the same text"
    (line,) = baseline_lines(whole.results)
    assert re.fullmatch(r"validation mlm_accuracy \d+\.\d %; before training \d+\.\d %", line)
    assert "| validation | before training |" in (tmp_path / "whole" / "model" / "README.md").read_text()
    last_row = (tmp_path / "whole" / "results.csv").read_text().splitlines()[-1]
    assert "before training" in last_row
    assert str(before["mlm_loss"]) in last_row

    stopped, resumed = Recorder(stop_after=2), Recorder()
    assert pretrain("run", stopped).status == "interrupted"
    assert pretrain("run", resumed).results["baseline"] == whole.results["baseline"]
    assert "the score before training" in stopped.messages
    assert "the score before training" not in resumed.messages, "it is read from the run folder"


def test_a_model_whose_loss_is_not_finite_is_no_start(tmp_path: Path, text: Path) -> None:
    pretrain_small(text, tmp_path / "first")
    bundle = heedful.load(tmp_path / "first")
    assert bundle.head is not None
    with torch.no_grad():
        for parameter in bundle.head.parameters():
            parameter.fill_(3e38)
    heedful.save(bundle, tmp_path / "broken")
    with pytest.raises(HeedfulError, match="cannot start from its weights"):
        pretrain_small(text, tmp_path / "run", model=str(tmp_path / "broken"))


def test_weights_of_other_heads_in_the_folder_are_trained_further(tmp_path: Path, text: Path) -> None:
    """The folder of the published BERT is a masked language model that also has the weights of pooler and nsp head."""
    first = tmp_path / "first"
    pretrain_small(text, first, "mlm+nsp")
    config_file = first / "model" / "config.json"
    config = json.loads(config_file.read_text())
    config_file.write_text(json.dumps(config | {"architectures": ["BertForMaskedLM"]}))
    with pytest.warns(HeedfulWarning, match="takes what its head has of them"):
        init_model = heedful.load(first)
    assert init_model.tokenizer is not None
    settings = small_settings("a", "mlm+nsp", model=str(first))
    components = Components(
        settings=settings,
        tokenizer=init_model.tokenizer,
        corpus=None,
        init_model=init_model,  # type: ignore[arg-type]
    )
    tensors = build_model(components).named_tensors()
    expected = heedful.load(first, head="pretraining").named_tensors()
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_a_generator_is_trained_further_with_its_model(tmp_path: Path, text: Path) -> None:
    """The model may be named by its run or by its folder in the run."""
    first = tmp_path / "first"
    pretrain_small(text, first, "rtd", {"train.optimizer.lr": 1e-2})
    old = load_file(first / "generator" / "model.safetensors")
    overrides = {"train.optimizer.lr": 1e-9, "train.max_steps": 1}
    for name, model in (("run", first), ("model", first / "model")):
        recorder = Recorder()
        folder = tmp_path / name
        pretrain_small(text, folder, "rtd", overrides | {"train.seed": 5}, model=str(model), reporter=recorder)
        assert f"the generator in {first / 'generator'} is trained further, too" in recorder.messages
        new = load_file(folder / "generator" / "model.safetensors")
        assert new.keys() == old.keys()
        assert all(torch.allclose(new[tensor], old[tensor], atol=1e-6) for tensor in old)
    other_shape = overrides | {"objective.generator_size": 1.0}
    with pytest.raises(HeedfulError, match=r"generator is of another shape than .* = 1 \(.* differs\)"):
        pretrain_small(text, tmp_path / "other", "rtd", other_shape, model=str(first))
    shutil.rmtree(first / "generator")
    recorder = Recorder()
    pretrain_small(text, tmp_path / "new", "rtd", overrides, model=str(first), reporter=recorder)
    assert f"{first} has no generator beside it: a new one is trained" in recorder.messages


def test_the_default_learning_rate_of_a_trained_model_is_a_tenth_of_the_usual_one(teacher: Path) -> None:
    """The usual one depends on the hidden size, here 24. The model is not read if a learning rate is set."""
    trained = resolve_pretrain(["a"], model=str(teacher))
    random_weights = resolve_pretrain(["a"], assignments=["model.width=24", "model.heads=2"])
    assert trained.train.optimizer.lr == pytest.approx(2e-4)
    assert random_weights.train.optimizer.lr == pytest.approx(2e-3)
    settings = resolve_pretrain(["a"], model="nowhere", assignments=["train.optimizer.lr=0.01"])
    assert settings.train.optimizer.lr == 0.01
    assert settings.model.init_from == "nowhere"
    with pytest.raises(HeedfulError, match="'nowhere' is no folder here"):
        resolve_pretrain(["a"], model="nowhere")


def test_a_corpus_that_was_built_before(tmp_path: Path, tokenizer_dir: Path) -> None:
    corpus = make_corpus(tmp_path, make_documents(120, seed=1), Tokenizer.load(tokenizer_dir))
    from_corpus, from_text = tmp_path / "from-corpus", tmp_path / "from-text"
    pretrain_small(corpus.folder, from_corpus)
    pretrain_small(tmp_path / "text.txt", from_text, tokenizer=str(tokenizer_dir))
    assert not (from_corpus / "corpus").exists()
    assert not (from_corpus / "tokenizer").exists()
    first, second = resumable_content(from_corpus), resumable_content(from_text)
    assert first["journal"] == second["journal"]
    assert first["model.safetensors"] == second["model.safetensors"]
    train_on(make_documents(9)).save(tmp_path / "other-tokenizer")
    with pytest.raises(HeedfulError, match="was made with another tokenizer: give that one with --tokenizer"):
        pretrain_small(corpus.folder, tmp_path / "run", tokenizer=str(tmp_path / "other-tokenizer"))
    assert {path.name for path in (tmp_path / "run").iterdir()} <= INITIAL_FILES


def test_a_manifest_of_something_else_is_a_text_like_others(tmp_path: Path, tokenizer_dir: Path) -> None:
    texts = tmp_path / "texts"
    write_documents(texts / "a.txt", make_documents(60, seed=4))
    (texts / "manifest.json").write_text('[{"text": "In the mill a wheel turns."}]')
    overrides = {"train.max_steps": 1}
    result = pretrain_small(texts, tmp_path / "run", overrides=overrides, tokenizer=str(tokenizer_dir))
    corpus = result.results["corpus"]
    assert [file["name"] for file in corpus["files"]] == ["a.txt", "manifest.json"]
    assert corpus["counts"]["documents"] == 61


def test_messages_and_the_card_say_how_the_text_was_read_and_what_was_left_out(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    text = write_documents(tmp_path / "text.txt", make_documents(60, seed=4))
    text.write_text(text.read_text() + "\n" + "In the mill a wheel turns.\n" * 2 + "\nYes.\n")
    rows = [{"text": "A boat waits at the pier."}] * 2 + [{"text": 5}, {"text": " "}]
    rows_file = tmp_path / "rows_1.jsonl"
    rows_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = {
        "corpus.dedup": "exact",
        "corpus.min_document_chars": 8,
        "corpus.sample_by": "auto",
        "train.max_steps": 1,
    }
    run, recorder, tokenizer = tmp_path / "run", Recorder(), str(tokenizer_dir)
    result = pretrain_small(
        [text, rows_file], run, "mlm", overrides, tokenizer=tokenizer, reporter=recorder, on_bad_row="skip"
    )
    reading_notes = [
        "text.txt: lines are sentences, and blank lines separate documents",
        'rows_1.jsonl: columns: text="text"',
    ]
    notes = [
        *reading_notes,
        "documents that are left out: 1 repeated, 1 too short, 1 without text",
        "bad rows of rows_1.jsonl that are left out: 1",
    ]
    assert recorder.messages[:5] == [*notes, f"bad rows are set aside in {run / 'bad-rows.jsonl'}"]
    card = (run / "model" / "README.md").read_text()
    assert all(f"- {escape_markdown(note)}\n" in card for note in notes)
    assert f"tokenizer.path = {tokenizer_dir.name}\n" in card
    assert str(tmp_path) not in card
    assert str(tokenizer_dir) not in card
    corpus = result.results["corpus"]
    assert corpus["left_out"] == {"exact": 1, "near": 0, "short": 1, "empty": 1}
    assert corpus["stated"] == reading_notes
    assert list(corpus["bad_rows"].values()) == [1]
    assert corpus["cut"] == 0


def test_only_some_of_many_notes_about_a_corpus_are_listed() -> None:
    notes = corpus_notes({"stated": [f"{index}.txt: is empty" for index in range(1000)], "cut": 1200})
    assert len(notes) == 22
    assert notes[20] == "and 980 more such sentences, which the corpus's manifest.json has"
    assert notes[21] == "documents that were split because of their size: 1,200"


def test_a_resumed_run_must_have_the_same_corpus(tmp_path: Path, tokenizer_dir: Path) -> None:
    """A corpus with the same texts that was built again is the same. Another one with as many documents is not."""
    tokenizer, documents = Tokenizer.load(tokenizer_dir), make_documents(60, seed=4)
    changed_document = [sentence.replace("harbour", "library") for sentence in documents[4]]
    changed_documents = [*documents[:4], changed_document, *documents[5:]]
    make_corpus(tmp_path / "first", documents, tokenizer)
    make_corpus(tmp_path / "rebuilt", documents, tokenizer)
    make_corpus(tmp_path / "changed", changed_documents, tokenizer)
    corpus = tmp_path / "corpus"

    def put_corpus(name: str) -> None:
        shutil.rmtree(corpus, ignore_errors=True)
        shutil.copytree(tmp_path / name / "corpus", corpus)

    put_corpus("first")
    assert pretrain_small(corpus, tmp_path / "run", reporter=Recorder(stop_after=2)).status == "interrupted"
    put_corpus("changed")
    with pytest.raises(HeedfulError, match="holds another corpus than the one with which"):
        pretrain_small(corpus, tmp_path / "run")
    put_corpus("rebuilt")
    assert pretrain_small(corpus, tmp_path / "run").status == "completed"


def test_a_tokenizer_without_its_last_file_is_trained_again(tmp_path: Path, text: Path) -> None:
    """A process may have been killed while it saved the tokenizer."""
    pretrain_small(text, tmp_path / "run", reporter=Recorder(stop_after=1))
    (tmp_path / "run" / "tokenizer" / "tokenizer.json").unlink()
    assert pretrain_small(text, tmp_path / "run").status == "completed"


@pytest.mark.parametrize("kind", ["mlm", "mlm+nsp", "mlm+sop"])
def test_versions_of_masks_return(
    kind: str, tmp_path: Path, text: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two static masks, the third epoch has the masked sequences of the first one, in another order.

    A step has all rows, so that each step is an epoch.
    """
    batches: list[list[tuple[int, ...]]] = []  # token ids of all sequences of each training batch, sorted
    original = MaskedLM.batch

    def recorded_batch(self: MaskedLM, samples: Any, keys: Any) -> Any:
        batch = original(self, samples, keys)
        if len(keys) > 1:  # evaluation has one row in a batch
            sequences = batch.packed.unpack(batch.packed.tokens)
            batches.append(sorted(tuple(sequence.tolist()) for sequence in sequences))
        return batch

    def masked_sequences(num_static_masks: str) -> list[list[tuple[int, ...]]]:
        """Return the masked sequences of three epochs."""
        batches.clear()
        overrides = {
            "objective.num_static_masks": num_static_masks,
            "train.max_steps": 3,
            "train.batch_size": 1000,
            "train.max_tokens_per_microbatch": 10**6,
        }
        pretrain_small(text, tmp_path / num_static_masks, kind, overrides, tokenizer=str(tokenizer_dir))
        return list(batches)

    monkeypatch.setattr(MaskedLM, "batch", recorded_batch)
    first_static, second_static, third_static = masked_sequences("2")
    assert len(first_static) > 20
    assert first_static != second_static
    assert first_static == third_static
    first, second, third = masked_sequences("none")
    assert first == first_static
    assert len({tuple(first), tuple(second), tuple(third)}) == 3, "new masks in each epoch"


def test_a_tokenizer_that_is_given(tmp_path: Path, text: Path, tokenizer_dir: Path) -> None:
    run, overrides = tmp_path / "run", {"train.max_steps": 1}
    with pytest.warns(HeedfulWarning, match=r"5\d % of the (documents|segments) of this text are repeated"):
        result = pretrain_small([text, text.parent], run, overrides=overrides, tokenizer=str(tokenizer_dir))
    assert heedful.load(run).config.model.embedding.vocabulary == Tokenizer.load(tokenizer_dir).size
    assert not (run / "tokenizer").exists()
    assert result.results["corpus"]["repeated"]["documents"] >= 0.2


def test_tokenizer_and_corpus_of_a_run_without_a_checkpoint_are_reused_for_the_same_text(
    tmp_path: Path, text: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()

    def names() -> set[str]:
        return {path.name for path in run.iterdir()}

    reusable = {"run.lock", "tokenizer", "corpus"}
    for name in reusable:
        (run / name).touch()
    with pytest.raises(HeedfulError, match=r"run is not a run folder: it holds corpus, .* but no settings\.toml"):
        check_run_folder(run)
    settings = to_toml(small_settings(text, overrides={"train.batch_size": 8}))
    (run / "settings.toml").write_text(settings)
    with pytest.raises(HeedfulError, match=r"settings\.toml"):
        can_resume(run, FinetuneSettings(task=ClassifySettings()))  # settings of another kind of run
    assert names() == reusable | {"settings.toml"}
    assert not can_resume(run, small_settings(text, overrides={"train.batch_size": 4}))
    assert names() == reusable
    (run / "settings.toml").write_text(settings)
    with pytest.warns(HeedfulWarning, match=r"corpus was made with other settings of the text, and is made anew"):
        assert not can_resume(run, small_settings(text, overrides={"corpus.min_document_chars": 9}))
    assert names() == {"run.lock"}


# -- refusals and warnings ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def init_dirs(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path, teacher: Path) -> dict[str, Path]:
    """Folders of tokenizers and models by name: the values of settings in the tests below."""
    folder = tmp_path_factory.mktemp("folders")
    tokenizer_json = json.loads((tokenizer_dir / "tokenizer.json").read_text())
    tokenizer_json["added_tokens"] = [token for token in tokenizer_json["added_tokens"] if token["content"] != "[MASK]"]
    vocabulary = tokenizer_json["model"]["vocab"]
    vocabulary["mask"] = vocabulary.pop("[MASK]")
    (folder / "maskless").mkdir()
    (folder / "maskless" / "tokenizer.json").write_text(json.dumps(tokenizer_json))
    save_tiny(folder / "encoder-decoder", "t5", "T5Model")
    return {
        "TOKENIZER": tokenizer_dir,
        "TEACHER": teacher,
        "MASKLESS": folder / "maskless",
        "ENCODER_DECODER": folder / "encoder-decoder",
    }


@pytest.mark.parametrize(
    ("kind", "overrides", "message"),
    [
        ("mlm", {"model.family": "heedful-classic"}, '"heedful-classic" has no published sizes; use one of '),
        (
            "mlm",
            {"model.family": "modernbert", "model.dropout": 0.1},
            "model.dropout would change nothing: .* all rates of modernbert are 0",
        ),
        ("mlm", {"model.family": "brt"}, r'"brt" is no family \(did you mean "bert"\?\)'),
        ("mlm+nsp", {"model.family": "roberta"}, 'this family has no head "pretraining"'),
        ("mlm", {"model.family": "gpt2"}, 'this family has no head "masked_lm"'),
        ("distillation", {"objective.teacher": "nowhere"}, "'nowhere' is no folder here"),
        (
            "distillation",
            {"objective.teacher": "ENCODER_DECODER"},
            "encoder-decoder has an encoder and a decoder, .* convert --head-kind encoder",
        ),
        ("clm", {"model.family": "t5"}, "t5 has an encoder, .* take --objective span_corruption"),
        ("span_corruption", {"model.family": "gpt2"}, "gpt2 is not an encoder-decoder, .* take --objective clm"),
        ("mlm", {"tokenizer.path": "MASKLESS"}, "this tokenizer has no mask token"),
        ("rtd", {"tokenizer.path": "MASKLESS"}, "this tokenizer has no mask token"),
        ("span_corruption", {"tokenizer.path": "TOKENIZER"}, "this tokenizer has no token <extra_id_0>"),
        ("mlm", {"tokenizer.path": "nowhere"}, "nowhere"),
        ("mlm", {"model.init_from": "nowhere"}, "'nowhere' is no folder here"),
    ],
)
def test_models_and_tokenizers_that_do_not_fit_are_refused_before_anything_is_made(
    tmp_path: Path, text: Path, init_dirs: dict[str, Path], kind: str, overrides: dict[str, str], message: str
) -> None:
    settings = {path: init_dirs.get(value, value) for path, value in overrides.items()}
    run = tmp_path / "run"
    with pytest.raises(HeedfulError, match=message):
        pretrain_small(text, run, kind, settings)
    names = {path.name for path in run.glob("*")}
    assert names <= INITIAL_FILES
    if names:  # other settings can be used in the same folder
        assert pretrain_small(text, run, overrides={"train.max_steps": 1}).status == "completed"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"objective.mask_prob": 1.5}, "mask_prob is 1.5; expected a share between 0 and 1"),
        ({"max_seq_length": 4}, "max_seq_length is 4; expected 8 tokens or more in each phase"),
        (
            {"phases": "[{start_fraction = 1.5, max_seq_length = 60}]"},
            "start_fraction is 1.5; expected a share of the training between 0 and 1",
        ),
        (
            {"phases": "[{start_fraction = 0.5, max_seq_length = 60}, {start_fraction = 0.4, max_seq_length = 90}]"},
            "expected each phase after the one",
        ),
        ({"model.heads": 5}, "a width that the heads divide"),
        ({"objective.num_static_masks": 0}, "num_static_masks is 0; expected a whole number from 1"),
        ({"max_seq_lenght": 9}, r'max_seq_lenght is not a setting \(did you mean "max_seq_length"\?\)'),
    ],
)
def test_wrong_settings(text: Path, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(HeedfulError, match=message):
        small_settings(text, overrides=overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"fit.eval_every_epochs": 0.5},
            "fit.eval_every_epochs would change nothing: set eval_every_steps instead; leave it out",
        ),
        ({"tokenizer.max_length": 64}, "tokenizer.max_length would change nothing: the greatest max_seq_length"),
        (
            {"tokenizer.path": "TOKENIZER", "tokenizer.algorithm": "bpe"},
            "tokenizer.algorithm .* trained, tokenizer.path names one",
        ),
        (
            {"tokenizer.path": "TOKENIZER", "tokenizer.train_chars": 9},
            "^tokenizer.train_chars would change nothing: no tokenizer is trained",
        ),
        (
            {"model.init_from": "TEACHER", "tokenizer.limit_alphabet": 9},
            "alphabet would .* is trained, .*teacher.* has its own",
        ),
        (
            {"model.init_from": "TEACHER", "model.layers": 1},
            "model.layers would .*: .*teacher.* has a shape of its own",
        ),
        ({"model.init_from": "TEACHER", "model.size": "base"}, "model.size would change nothing"),
    ],
)
def test_settings_that_would_change_nothing(
    tmp_path: Path, text: Path, init_dirs: dict[str, Path], overrides: dict[str, Any], message: str
) -> None:
    settings = {path: init_dirs.get(value, value) for path, value in overrides.items()}
    with pytest.raises(HeedfulError, match=message):
        pretrain_small(text, tmp_path / "run", overrides=settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"corpus.dedup": "near"}, "corpus.dedup would .*: the corpus was made before"),
        ({"tokenizer.vocab_size": 99}, "tokenizer.vocab_size would .* the corpus has its own"),
    ],
)
def test_settings_that_would_change_nothing_with_a_corpus(
    tmp_path: Path, tokenizer_dir: Path, overrides: dict[str, Any], message: str
) -> None:
    corpus = make_corpus(tmp_path, make_documents(9), Tokenizer.load(tokenizer_dir))
    with pytest.raises(HeedfulError, match=message):
        pretrain_small(corpus.folder, tmp_path / "run", overrides=overrides)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"objective": "mlmm"}, r'"mlmm" is not an objective \(did you mean "mlm"\?\): use one of mlm, mlm\+nsp'),
        ({"objective": "mlm+hidden_states"}, "objective.teacher is missing"),
        (
            {"assignments": ["train.time_budget=soon"]},
            'time_budget is "soon"; expected a duration as 45s, 10m, 2h or 1h30m',
        ),
        ({"assignments": ["train.time_budget=0h"]}, 'time_budget is "0h"; expected a duration'),
        ({"model": "there", "size": "mini"}, "model.size would change nothing: there has a shape of its own"),
        ({"size": "huge"}, r'model\.size is "huge", expected one of "tiny"'),
    ],
)
def test_wrong_arguments(text: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(HeedfulError, match=message):
        resolve_pretrain([text], **arguments)


def test_settings_without_text_are_refused() -> None:
    with pytest.raises(HeedfulError, match="no text was given: name files or folders of text"):
        pretrain_with(PretrainSettings(), "anywhere")


@pytest.mark.parametrize(
    ("kind", "count", "eval_fraction", "message"),
    [
        (
            "mlm",
            1,
            0.1,
            "^there is only one document, so none can be held out for validation: give more documents, or set corpus",
        ),
        ("mlm+nsp", 12, 1e-6, r"needs two documents at least, but of 12 there are \d+ to learn from and 1 held out"),
    ],
)
def test_too_few_documents(
    tmp_path: Path, tokenizer_dir: Path, kind: str, count: int, eval_fraction: float, message: str
) -> None:
    text, run = write_documents(tmp_path / "text.txt", make_documents(count, seed=6)), tmp_path / "run"
    with pytest.raises(HeedfulError, match=message):
        pretrain_small(text, run, kind, {"eval_fraction": eval_fraction}, tokenizer=str(tokenizer_dir))
    assert not (run / "state").exists()


def test_equal_documents_cannot_be_held_out(tmp_path: Path, tokenizer_dir: Path) -> None:
    text = write_documents(tmp_path / "text.txt", make_documents(1, seed=6) * 5)
    with pytest.raises(HeedfulError, match=r"^all 5 documents have the same text, so none can be held out"):
        pretrain_small(text, tmp_path / "run", overrides={"eval_fraction": 0.5}, tokenizer=str(tokenizer_dir))


@pytest.mark.slow
def test_few_sequences_and_repeated_lines_warn(tmp_path: Path, text: Path, tokenizer_dir: Path) -> None:
    def pretrain(name: str, data: Path, **overrides: Any) -> RunResult:
        settings = {"train.max_steps": 1} | overrides
        return pretrain_small(data, tmp_path / name, overrides=settings, tokenizer=str(tokenizer_dir))

    few_sequences = "a step has about [4-8] sequences: with 8 or fewer.*raise train.batch_size"
    with pytest.warns(HeedfulWarning, match=few_sequences):
        pretrain("few", text, **{"train.batch_size": 4, "pack_length": 32})
    repeated_text = write_documents(tmp_path / "repeated.txt", [*make_documents(60), *make_documents(60)])
    with pytest.warns(HeedfulWarning, match=r'5\d % of the (documents|segments) .* set corpus\.dedup = "exact"'):
        pretrain("repeated", repeated_text)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        deduplicated = pretrain("deduplicated", repeated_text, **{"corpus.dedup": "exact"})
        assert deduplicated.results["corpus"]["counts"]["documents"] == 60
        pretrain("usual", text)


# -- several processes --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_ranks_equal_one(tmp_path: Path, text: Path, tokenizer_dir: Path) -> None:
    """Losses are means over the targets of all ranks, so a run with two ranks equals one with a single rank."""
    overrides = {
        "train.optimizer.eps": 1e-2,
        "train.optimizer.lr": 2e-2,
        "train.max_tokens_per_microbatch": 100,
        "train.batch_size": 7,
    }
    tokenizer = str(tokenizer_dir)
    settings = {path: value for path, value in (SMALL | overrides).items() if not path.startswith("tokenizer.")}
    command = ["pretrain", str(text), "--objective", "mlm+nsp", "--tokenizer", tokenizer, "--json"]
    command += ["--output", str(tmp_path / "two"), *(f"{path}={value}" for path, value in settings.items())]
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--module", "heedful", *command],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    one_rank = pretrain_small(text, tmp_path / "one", "mlm+nsp", overrides, tokenizer=tokenizer).results
    stdout, stderr = process.communicate(timeout=110)
    assert process.returncode == 0, stderr
    two_ranks = json.loads(stdout)
    assert two_ranks["steps"] == 5
    assert two_ranks["tokens"] == one_rank["tokens"]
    one_metrics, two_metrics = (results["splits"]["validation"]["numbers"] for results in (one_rank, two_ranks))
    assert one_metrics == pytest.approx(two_metrics, rel=1e-4)
    one_losses, two_losses = (
        [record["loss"] for record in read_journal_records(tmp_path / name) if "loss" in record]
        for name in ("one", "two")
    )
    assert one_losses == pytest.approx(two_losses, rel=1e-5)
    one_weights, two_weights = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("one", "two"))
    assert one_weights.keys() == two_weights.keys()
    for name, weights in one_weights.items():
        assert float((weights - two_weights[name]).abs().max()) < 1e-6, name
