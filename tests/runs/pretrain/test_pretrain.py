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
from contextlib import nullcontext
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
from heedful.runs.pretrain import run as module
from heedful.runs.pretrain.build import build_model, build_objectives, build_samples, config_of_size
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
MODELS = {  # transformers' class, and how it calls what our head gives
    "mlm": ("BertForMaskedLM", ("logits",)),
    "mlm+nsp": ("BertForPreTraining", ("prediction_logits", "seq_relationship_logits")),
    "mlm+sop": ("AlbertForPreTraining", ("prediction_logits", "sop_logits")),
    "plm": ("XLNetLMHeadModel", ("logits",)),
    "span_corruption": ("T5ForConditionalGeneration", ("logits",)),
    "clm": ("GPT2LMHeadModel", ("logits",)),
    "rtd": ("ElectraForPreTraining", ("logits",)),
    "distillation": ("BertForMaskedLM", ("logits",)),
}
TERMS = {
    "mlm+nsp": ["mlm", "nsp"],
    "mlm+sop": ["mlm", "sop"],
    "clm": ["clm"],
    "rtd": ["generator", "rtd"],
    "distillation": ["mlm", "hidden_states"],
}
NAMES = {"distillation": "mlm+hidden_states"}  # what results call an objective, where that is not its kind
ALWAYS = {
    *("settings.toml", "environment.json", "journal.jsonl", "results.csv", "results.json", "run.lock"),
    *("model", "corpus", "tokenizer", "report.html"),
}
TIMES = {"latency": {"16": {"p50": 1.0, "p99": 1.0}}, "throughput": 1}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No timing, but where a test undoes it; one thread, so that equal runs are equal."""
    monkeypatch.setattr("heedful.runs.run.measure_latency", lambda loaded: TIMES)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 documents."""
    return write_documents(tmp_path_factory.mktemp("text") / "text.txt", make_documents(120, seed=1))


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tokenizer of the text, so that not every run has to train one."""
    folder = tmp_path_factory.mktemp("known")
    train_on(make_documents(120, seed=1), vocab_size=400).save(folder)
    return folder


class Seen(Reporter):
    """Every step; asks for a stop after the one of that number."""

    def __init__(self, stop: int = 0) -> None:
        self.stop = stop
        self.steps: list[Step] = []
        self.stages: list[tuple[int, int]] = []  # the stage, and the longest sequence of its first row
        self.sentences: list[str] = []

    def step(self, step: Step, trainer: Trainer) -> None:
        self.steps.append(step)
        row = trainer.samples[0]
        longest = max(stop - start for start, stop in pairwise(row.bounds))
        self.stages.append((trainer.stage, longest))
        if step.number == self.stop:
            trainer.stop_requested = True

    def message(self, text: str) -> None:
        self.sentences.append(text)


def asked(data: Any, kind: str = "mlm", more: dict[str, Any] | None = None, **named: Any) -> PretrainSettings:
    """SMALL settings but for those that would change nothing, with some that go over them."""
    more, has_corpus = more or {}, isinstance(data, Path) and contains_corpus(data)
    start = named.get("model") or more.get("model.init_from")
    tokenizer = named.get("tokenizer") or more.get("tokenizer.path")
    unused = [("model.", start), ("tokenizer.", start or tokenizer or has_corpus), ("corpus.", has_corpus)]
    gone = tuple(part for part, why in unused if why)
    gone += ("train.max_steps",) if "train.time_budget" in more else ()
    small = {name: value for name, value in SMALL.items() if not name.startswith(gone)}
    settings_args = [f"{name}={value}" for name, value in (small | more).items() if value is not None]
    return resolve_pretrain(
        data if isinstance(data, list) else [data], objective=kind, assignments=settings_args, **named
    )


def go(data: Any, out: Path, kind: str = "mlm", more: dict[str, Any] | None = None, **how: Any) -> RunResult:
    """A run of them."""
    named = {name: how.pop(name) for name in ("tokenizer", "model", "recipe") if name in how}
    return pretrain_with(asked(data, kind, more, **named), out, **how)


def lines(folder: Path) -> list[dict[str, Any]]:
    """The journal."""
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]


def left(folder: Path) -> dict[str, Any]:
    """All that has to be the same in equal runs: model, journal, and the newest checkpoint but for times."""
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
    """A random model with a tokenizer of its own."""
    return make_teacher(tmp_path_factory.mktemp("teacher"), width=24)


@pytest.mark.parametrize("kind", MODELS)
def test_a_run_is_complete(kind: str, tmp_path: Path, text: Path, teacher: Path) -> None:
    folder, seen = tmp_path / "run", Seen()
    more = {"objective.teacher": teacher} if kind == "distillation" else {}
    done = go(text, folder, kind, more | {"fit.keep_checkpoints": None}, reporter=seen)
    assert done.status == "completed" and done.output_dir == folder
    steps = {name: each["step"] for name, each in done.results["checkpoints"].items() if name != "model"}
    beside = {"rtd": {"generator"}, "distillation": {"teacher"}}.get(kind, set())
    beside |= {"checkpoints"} if steps["best"] != steps["last"] else set()
    assert {path.name for path in folder.iterdir()} == ALWAYS | beside
    assert from_file(PretrainSettings, folder / "settings.toml").objective.kind == kind
    results = json.loads((folder / "results.json").read_text())
    assert done.results == results
    assert (results["task"], results["objective"], results["steps"]) == ("pretrain", NAMES.get(kind, kind), 5)
    assert results["tokens"] == sum(step.tokens for step in seen.steps) > 5 * 8 * 50, "rows of up to 64 tokens"
    assert results["epochs"] == seen.steps[-1].epoch
    assert results["corpus"]["counts"]["documents"] == 120
    check_numbers(kind, folder, results)
    loaded = heedful.load(folder)
    assert results["model"]["parameters"] == loaded.count() and loaded.max_length in (32, None)
    card = (folder / "model" / "README.md").read_text()
    assert f"objective `{NAMES.get(kind, kind)}`" in card and "120 documents" in card
    check_model(kind, folder / "model")
    if kind in ("span_corruption", "clm"):
        check_writing(kind, folder / "model")


def check_numbers(kind: str, folder: Path, results: dict[str, Any]) -> None:
    numbers = results["splits"]["validation"]["numbers"]
    terms = TERMS.get(kind, [kind])
    losses = [f"{name}_loss" for name in terms]
    accuracies = [f"{name}_accuracy" for name in terms if name != "hidden_states"]
    assert set(numbers) == {"loss", "perplexity", "count", *losses, *accuracies}
    assert all(0 <= numbers[name] <= 1 for name in accuracies) and results["metric"] == accuracies[0]
    weights = {"rtd": 50.0, "hidden_states": 10.0}
    total = sum(weights.get(name, 1.0) * numbers[f"{name}_loss"] for name in terms)
    assert numbers["loss"] == pytest.approx(total)
    assert 4 < numbers[losses[0]] < 8, "hardly anything was learned"
    written = lines(folder)
    assert [line["step"] for line in written if "loss" in line] == [1, 2, 3, 4, 5]
    looks = {line["step"]: line for line in written if "dev" in line}
    assert list(looks) == [3, 5] and looks[5]["dev"] == numbers and looks[5]["metric_value"] == numbers[accuracies[0]]
    assert all(line["grad_norm"] > 0 for line in written if "loss" in line)


def check_model(kind: str, folder: Path) -> None:
    """transformers reads it and computes the same."""
    name, outputs = MODELS[kind]
    assert json.loads((folder / "config.json").read_text())["architectures"] == [name]
    ours = heedful.load(folder).eval()
    theirs, loading_info = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    assert not loading_info["missing_keys"] and not loading_info["unexpected_keys"]
    assert ours.tokenizer is not None and ours.head is not None
    assert theirs.config.eos_token_id in (None, ours.tokenizer.special.eos_or_sep)
    own = transformers.AutoTokenizer.from_pretrained(folder)
    words = ("In the garden a rose falls today.", "In the mill a wheel turns.")
    inputs: Any = words if kind in ("mlm+nsp", "mlm+sop") else words[0]
    batch, encoded = (
        ours.tokenizer.pack([inputs]),
        own(*([[each] for each in words] if inputs is words else [[inputs]])),
    )
    assert encoded["input_ids"] == [batch.tokens.tolist()]
    ids: dict[str, Tensor] = {"input_ids": batch.tokens[None]}
    with torch.no_grad():
        if kind == "span_corruption":
            target = ours.tokenizer.pack([words[1]])
            scores = ours.head(ours.hidden_states(batch, target), target)
            ids["decoder_input_ids"] = target.tokens[None]
        else:
            if kind != "clm":
                ids["token_type_ids"] = batch.types[None]
            scores = ours.head(ours.hidden_states(batch), batch)
        expected = theirs.eval()(**ids)
    for mine, output in zip(scores if isinstance(scores, tuple) else (scores,), outputs, strict=True):
        assert torch.allclose(mine, getattr(expected, output).reshape(mine.shape), atol=1e-5)


def check_writing(kind: str, folder: Path) -> None:
    """transformers' generate knows where a text ends and what fills up, without being told."""
    ours, theirs = heedful.load(folder), getattr(transformers, MODELS[kind][0]).from_pretrained(folder).eval()
    assert ours.tokenizer is not None
    special, config = ours.tokenizer.special, theirs.generation_config
    assert (config.eos_token_id, config.pad_token_id) == (special.eos_or_sep, special.pad)
    ids = ours.tokenizer.pack(["In the garden"]).tokens[None]
    read = ids[:, :-1] if kind == "clm" else ids
    written = theirs.generate(read, max_new_tokens=6, do_sample=False)[0]
    (answer,) = heedful.Engine(folder, writing=GenerationConfig(max_new_tokens=6))(["In the garden"])
    new = written[read.shape[1] :] if kind == "clm" else written[1:]
    assert answer["text"] == ours.tokenizer.decode(new.tolist()).strip()


@pytest.mark.usefixtures("run_plots")
def test_a_run_as_it_is(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With plots and timing."""
    monkeypatch.undo()
    done = go(text, tmp_path / "run")
    assert (tmp_path / "run" / "plots" / "curves.png").stat().st_size > 1000
    assert done.results["latency"]["16"]["p50"] > 0 and done.results["throughput"] > 0
    header, *rows = (tmp_path / "run" / "results.csv").read_text().splitlines()
    assert header.startswith("step,epoch,loss,lr,grad_norm") and "dev_mlm_accuracy" in header and len(rows) == 7


@pytest.mark.parametrize(
    ("kind", "vocabulary", "count"), [("span_corruption", 400, 20), ("span_corruption", 3000, 100), ("clm", 400, 0)]
)
def test_the_tokenizer_that_is_trained(tmp_path: Path, text: Path, kind: str, vocabulary: int, count: int) -> None:
    seen = Seen()
    go(text, tmp_path / "run", kind, {"tokenizer.vocab_size": vocabulary, "train.max_steps": 1}, reporter=seen)
    tokenizer = Tokenizer.load(tmp_path / "run" / "model")
    sentinels = [tokenizer.id(f"<extra_id_{number}>") for number in range(count + 1)]
    assert sentinels == [*range(tokenizer.size - 1, tokenizer.size - 1 - count, -1), None]
    what = "bpe" if kind == "clm" else "wordpiece"
    assert seen.sentences[0].startswith(f"training a tokenizer on the text ({what}, up to {vocabulary:,} tokens)")
    assert tokenizer.max_length == 32 and (tokenizer.id("\u0120a") is not None) == (kind == "clm")


@pytest.mark.parametrize("name", [offer.name for offer in list_assets() if offer.name.startswith("pretrain-")])
def test_recipes_run(name: str, tmp_path: Path, text: Path, teacher: Path) -> None:
    """With a small model, few steps and short sequences; all else is theirs."""
    path, _ = copy_asset(name, tmp_path / "recipe.toml")
    published = resolve_pretrain([text], recipe=path)
    clock = published.train.time_budget is not None
    more: dict[str, Any] = {"train.time_budget": 0.005} if clock else {"train.max_steps": 2}
    if not published.model.init_from:
        more["tokenizer.vocab_size"] = 420
    if published.phases:
        more["phases"] = "[{start_fraction = 0.5, max_seq_length = 40}]"
    if isinstance(published.objective, DistillationSettings) and published.objective.neighbour_texts:
        more["objective.neighbour_texts"] = 20
    if published.tokenizer.num_sentinels:
        more["tokenizer.num_sentinels"] = 20
    if published.model.init_from:
        with pytest.raises(HeedfulError, match="'path/to/a-model' is neither a folder here nor a name"):
            pretrain_with(published, tmp_path / "run")
    named = {"model": str(teacher)} if published.model.init_from else {}
    objective = published.objective
    if isinstance(objective, DistillationSettings):
        more["objective.teacher"] = teacher
        few = more.get("objective.neighbour_texts", 0)
        objective = replace(objective, teacher=str(teacher), neighbour_texts=few)
    done = go(text, tmp_path / "run", "", more, recipe=path, **named)
    assert done.status == "completed" and done.results["objective"] == published.kind
    used = from_file(PretrainSettings, tmp_path / "run" / "settings.toml")
    assert used.objective == objective and used.train.optimizer == published.train.optimizer
    assert used.train.schedule == published.train.schedule and used.model.dropout == published.model.dropout
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert config["model_type"] == (published.model.family or "bert")
    if name == "pretrain-bert":
        optimizer = used.train.optimizer
        assert (optimizer.lr, optimizer.eps, optimizer.bias_correction) == (1e-4, 1e-6, False)
        assert (published.max_seq_length, published.phases) == (128, (Phase(start_fraction=0.9, max_seq_length=512),))


def test_a_family_by_name(tmp_path: Path, text: Path, known: Path) -> None:
    """Dropout while it trains is another than that of the model that is kept."""
    rates = []

    class Rated(Seen):
        def step(self, step: Step, trainer: Trainer) -> None:
            embedding = trainer.loaded.config.model.embedding
            rates.append(embedding.dropout)
            super().step(step, trainer)

    for number, dropout in enumerate((0.0, 0.2)):
        more = {"model.family": "roberta", "model.dropout": dropout, "train.max_steps": 1}
        go(text, tmp_path / str(number), more=more, tokenizer=str(known), reporter=Rated())
    assert rates == [0.0, 0.2]
    config = json.loads((tmp_path / "0" / "model" / "config.json").read_text())
    assert config["model_type"] == "roberta" and config["hidden_dropout_prob"] == 0.1
    assert config["max_position_embeddings"] == 33 and config["pad_token_id"] == 0, "it begins after padding"
    assert config["type_vocab_size"] == 2, "one published, but this tokenizer gives second texts another"
    model = transformers.RobertaForMaskedLM.from_pretrained(tmp_path / "0" / "model").eval()
    loaded = heedful.load(tmp_path / "0").eval()
    assert loaded.tokenizer is not None and loaded.head is not None
    batch = loaded.tokenizer.pack([("In the garden a rose falls.", "A wheel turns.")])
    with torch.no_grad():
        other = model(input_ids=batch.tokens[None], token_type_ids=batch.types[None]).logits[0]
        mine = loaded.head(loaded.hidden_states(batch), batch)
    assert torch.allclose(mine, other, atol=1e-5)


@pytest.mark.parametrize(("family", "layers"), [("gpt2", 1), ("gpt2", 24), ("modernbert", 3)])
def test_fresh_outputs_are_drawn_by_the_models_own_layers(known: Path, family: str, layers: int) -> None:
    """Radford et al. 2019, section 2.3: by 1 / sqrt(N) of the N sublayers that there are, not of those published."""
    kind = "clm" if family == "gpt2" else "mlm"
    settings = asked("a", kind, {"model.family": family, "model.layers": layers})
    scheme = config_of_size(family, settings, Tokenizer.load(known)).model.initialisation
    assert isinstance(scheme, Normal | TruncatedNormal) and scheme.outputs == pytest.approx((2 * layers) ** -0.5)


@pytest.mark.parametrize(("family", "heads", "kv_heads"), [("qwen3", 4, 2), ("llama", 6, 2), ("llama", 4, None)])
def test_fresh_models_share_keys_as_the_published_ones_do(
    known: Path, family: str, heads: int, kv_heads: int | None
) -> None:
    size = {"model.family": family, "model.layers": 1, "model.width": 8 * heads, "model.heads": heads}
    config = config_of_size(family, asked("a", "clm", size), Tokenizer.load(known))
    assert config.model.decoder is not None and config.model.decoder.kv_heads == kv_heads
    loaded = heedful.checkpoint.create(config, seed=1)
    assert loaded.model(heedful.Packed.of([[5, 6, 7]])).isfinite().all()


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_model_that_goes_on_learns_where_a_document_ends(tmp_path: Path, wrapped: bool) -> None:
    """Once for each, whatever the tokenizer puts around a text, and not where a window of a longer one does."""
    files = make_documents(40, seed=2, sentences=(5, 9))
    tokenizer = train_on(files, algorithm="bpe", vocab_size=400)
    if not wrapped:  # as published: one token for all ends, and nothing around a text
        state = json.loads(tokenizer._backend.to_str()) | {"post_processor": None}
        tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(state)), {"eos_token": "</s>"})
    corpus, settings = make_corpus(tmp_path, files, tokenizer), asked("a", "clm", {"eval_fraction": 0.2})
    (rows,), held = build_samples(Components(settings=settings, tokenizer=tokenizer, corpus=corpus, init_model=None))
    objective, end, ends, sequences = CausalLM(tokenizer=tokenizer), tokenizer.special.eos_or_sep, 0, 0
    for sample in [*(rows[number] for number in range(len(rows))), *held]:
        ends += int((objective.batch([sample], [0]).targets == end).sum())
        sequences += len(sample.bounds) - 1
        assert all(sample.tokens[start] in (tokenizer.special.bos_or_cls, end) for start in sample.bounds[:-1])
    assert ends == 40 < sequences


def test_a_tokenizer_learns_from_all_over_the_text(tmp_path: Path) -> None:
    """Files may be sorted by what they hold; and of text as a corpus has it, where no accent stands alone."""
    (tmp_path / "data").mkdir()
    for name, word in (("de", "haus"), ("fr", "e\u0301te\u0301"), ("ru", "\u0434\u043e\u043c")):
        rows = "".join(f"{word} {number}.\n" for number in range(1000))
        (tmp_path / "data" / f"{name}.txt").write_text(rows, encoding="utf-8")
    more = {
        "tokenizer.train_chars": 3000,
        "corpus.sample_by": "line",
        "tokenizer.lower_case": "false",
        "train.max_steps": 1,
    }
    done = go(tmp_path / "data", tmp_path / "run", more=more)
    assert done.results["corpus"]["counts"]["unknown"] == 0
    tokenizer = Tokenizer.load(tmp_path / "run" / "model")
    assert tokenizer.id("\u0434") is not None and tokenizer.id("\u00e9") is not None and tokenizer.id("\u0301") is None


def test_documents_that_are_drawn() -> None:
    """Of each kind, wherever it stands, and whatever stands in turn; all of them where there is room."""
    rows = [f"{number % 2}{number // 250} {number:04} {'x' * 91}" for number in range(1000)]
    files = sample_documents(((row, False) for row in rows), 10_000)
    assert 20 < len(files) <= 100 and files == [row for row in rows if row in set(files)]
    assert {each[0] for each in files} == set("01") and {each[1] for each in files} == set("0123")
    assert files == sample_documents(((row, False) for row in rows), 10_000)
    assert sample_documents(((row, False) for row in rows), 99_000) == rows
    assert sample_documents([("x" * 50, False)] * 9, 10) == ["x" * 50], "one at least"
    assert sample_documents([("cafe\u0301\n\x07 a", False), ("a\n b", True), (" ", False)], 99) == [
        "caf\u00e9 a",
        "a\nb",
    ]


def test_what_the_tokenizer_does_not_know_is_told(tmp_path: Path, text: Path, known: Path) -> None:
    (tmp_path / "strange.txt").write_text("\u0434\u043e\u043c in the mill.\n\n" * 3, encoding="utf-8")
    one, seen = {"train.max_steps": 1}, Seen()
    done = go([text, tmp_path / "strange.txt"], tmp_path / "run", more=one, tokenizer=str(known), reporter=seen)
    counts, corpus = done.results["corpus"]["counts"], Corpus.open(tmp_path / "run" / "corpus")
    unknown = Tokenizer.load(known).special.unknown
    assert counts["unknown"] == (corpus.tokens(0, corpus.count) == unknown).sum() == 3
    (notes,) = corpus_notes({"counts": {"tokens": 1000, "unknown": 13}})
    assert notes == "1.3 % of the tokens are unknown to the tokenizer, and lost"
    assert not corpus_notes({"counts": {"tokens": 10_000, "unknown": 9}}) and not corpus_notes(
        {"counts": {"tokens": 9}}
    )


@pytest.mark.parametrize("choose", ["tokens", "words"])
def test_rows_of_one_shape_keep_the_rate(tmp_path: Path, known: Path, choose: str) -> None:
    """Also those of a few short documents, which are mostly filling."""
    tokenizer = Tokenizer.load(known)
    corpus = make_corpus(tmp_path, make_documents(200, seed=3, sentences=(1, 2)), tokenizer)
    settings = asked(corpus.folder, more={"sequences_per_pack": 4, "pack_length": 128, "objective.mask_unit": choose})
    pieces = Components(settings=settings, tokenizer=tokenizer, corpus=corpus, init_model=None)
    (rows,), _ = build_samples(pieces)
    objective = build_objectives(pieces, build_model(pieces), [rows])[0]
    assert isinstance(objective, MaskedLM)
    for number in range(len(rows)):
        batch, free = objective.batch([rows[number]], [number]), int(objective.is_text_id[rows[number].tokens].sum())
        assert len(batch.targets) == round(0.15 * (128 - 4 - 2)) and len(rows[number]) == 128
        assert max(stop - start for start, stop in pairwise(rows[number].bounds)) <= settings.max_seq_length < 128
        hidden = float(batch.weights.sum())
        assert hidden == round(0.15 * free) if choose == "tokens" else 0 < hidden <= round(0.15 * free)
    assert free < 100


# -- it learns ----------------------------------------------------------------------------------------------------


def telling(count: int, seed: int = 0) -> list[Document]:
    """Documents of four subjects; the subject's two words stand in turn in every sentence."""
    draw, result = random.Random(seed), []
    for number in range(count):
        words = f"ba{'abcd'[number % 4]} du{'abcd'[number % 4]}"
        result.append([" ".join([words] * draw.randint(2, 3)) for _ in range(draw.randint(4, 9))])
    return result


@pytest.mark.slow
def test_hidden_tokens_and_what_follows_are_learned(tmp_path: Path) -> None:
    result = telling(200)
    tokenizer = train_on(result)
    aside = held_out(make_corpus(tmp_path / "all", result, tokenizer), 0.2)
    seen: set[int] = set()
    kept = []
    for number, document in enumerate(result):  # of documents that are held out one of each subject: a random part is
        if aside[number] and number % 4 in seen:  # always of another one then
            continue
        seen |= {number % 4} if aside[number] else set()
        kept.append(document)
    corpus = make_corpus(tmp_path / "some", kept, tokenizer)
    more = {
        "model.width": 48, "model.heads": 4, "max_seq_length": 40, "pack_length": 160, "eval_fraction": 0.2,
        "eval_every_steps": 200, "train.batch_size": 6, "train.optimizer.lr": 1e-2, "train.max_steps": 300,
    }  # fmt: skip
    with pytest.warns(HeedfulWarning, match="9. % of the segments of this text are repeated.*stall: clean the text"):
        numbers = go(corpus.folder, tmp_path / "run", "mlm+nsp", more).results["splits"]["validation"]["numbers"]
    assert numbers["mlm_accuracy"] >= 0.98 and numbers["nsp_accuracy"] >= 0.98, numbers


# -- going on -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "versions"), [("mlm+nsp", None), ("mlm+nsp", 2), ("rtd", None)])
def test_resuming_in_the_second_epoch_equals_an_uninterrupted_run(
    kind: str, versions: int | None, tmp_path: Path, text: Path, known: Path
) -> None:
    more = {"train.batch_size": 45, "train.max_steps": 9, "model.dropout": 0.1, "eval_every_steps": 4}
    more |= {} if versions is None else {"objective.num_static_masks": versions}
    whole, seen = Seen(), Seen(6)
    first = go(text, tmp_path / "whole", kind, more, tokenizer=str(known), reporter=whole)
    assert 1.2 < whole.steps[5].epoch < 1.9 and whole.steps[-1].epoch > 2
    assert go(text, tmp_path / "run", kind, more, tokenizer=str(known), reporter=seen).status == "interrupted"
    assert not (tmp_path / "run" / "model").exists() and seen.steps[-1].number == 6
    rest = Seen()
    done = go(text, tmp_path / "run", kind, more, tokenizer=str(known), reporter=rest)
    assert "resuming after step 6" in rest.sentences and [step.number for step in rest.steps] == [7, 8, 9]
    assert left(tmp_path / "run") == left(tmp_path / "whole")
    assert done.results["tokens"] == first.results["tokens"] == sum(step.tokens for step in whole.steps)


def test_a_loss_that_is_no_number_beside_an_accuracy_is_no_result(
    tmp_path: Path, text: Path, known: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = module.measure_share
    monkeypatch.setattr(
        module, "measure_share", lambda *arguments: measured(*arguments) | {"mlm_loss": (float("nan"), 3.0)}
    )
    for _ in range(2):  # the same command does not hide it
        with pytest.raises(DivergedError, match=r"^step \d: .* nan for mlm_loss, so the model is no result"):
            go(text, tmp_path / "run", tokenizer=str(known))
        assert not {"model", "results.json"} & {path.name for path in (tmp_path / "run").iterdir()}


def test_phases_of_other_lengths(tmp_path: Path, text: Path, known: Path) -> None:
    """And a run goes on over the switch, and after it, with the same bits."""
    more = {
        "phases": "[{start_fraction = 0.5, max_seq_length = 60}]",
        "train.max_steps": 8,
        "max_seq_length": 20,
        "train.batch_size": 8,
    }
    seen = Seen()
    done = go(text, tmp_path / "whole", "mlm+nsp", more, tokenizer=str(known), reporter=seen)
    assert [stage for stage, _ in seen.stages] == [0] * 4 + [1] * 4
    assert max(longest for stage, longest in seen.stages if stage == 0) <= 20
    assert 20 < max(longest for stage, longest in seen.stages if stage == 1) <= 60
    epochs = [step.epoch for step in seen.steps]
    assert all(one < two for one, two in pairwise(epochs)), "they go on over the switch"
    assert done.results["epochs"] == epochs[-1]
    assert heedful.load(tmp_path / "whole").max_length == 60
    for stop in (4, 6):
        out = tmp_path / str(stop)
        assert go(text, out, "mlm+nsp", more, tokenizer=str(known), reporter=Seen(stop)).status == "interrupted"
        assert go(text, out, "mlm+nsp", more, tokenizer=str(known)).status == "completed"
        assert left(out) == left(tmp_path / "whole")


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path, text: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        go(text, tmp_path / name, more={"model.dropout": 0.1, "train.seed": seed, "train.max_steps": 3})
    assert left(tmp_path / "a") == left(tmp_path / "b")
    weights = [load_file(tmp_path / name / "model" / "model.safetensors") for name in "ac"]
    assert not torch.equal(*(next(iter(each.values())) for each in weights))


def test_a_finished_run_and_other_settings(tmp_path: Path, text: Path, known: Path) -> None:
    run = tmp_path / "run"
    done = go(text, run, tokenizer=str(known))
    before, seen = left(run), Seen()
    again = go(text, run, tokenizer=str(known), reporter=seen)
    assert again.results == done.results and seen.sentences == [f"{run} is finished already"] and not seen.steps
    with pytest.raises(
        HeedfulError, match=r"other settings: train\.batch_size was 8 and is 9 now\. Give another folder"
    ):
        go(text, run, more={"train.batch_size": 9}, tokenizer=str(known))
    assert left(run) == before
    stopped = tmp_path / "stopped"
    assert go(text, stopped, tokenizer=str(known), reporter=Seen(2)).status == "interrupted"
    with pytest.raises(HeedfulError, match=r"other settings: objective\.kind was 'mlm' and is 'mlm\+nsp' now"):
        go(text, stopped, "mlm+nsp", tokenizer=str(known))
    write_documents(tmp_path / "text.txt", make_documents(40))
    with pytest.raises(HeedfulError, match="other settings: data was"):
        go(tmp_path / "text.txt", stopped, tokenizer=str(known))


def test_changed_text_is_refused(tmp_path: Path, known: Path) -> None:
    text = write_documents(tmp_path / "text.txt", make_documents(60))
    assert go(text, tmp_path / "run", tokenizer=str(known), reporter=Seen(2)).status == "interrupted"
    write_documents(text, make_documents(61))
    with pytest.raises(HeedfulError, match="holds a different corpus"):
        go(text, tmp_path / "run", tokenizer=str(known))


def test_what_is_advised_is_taken_in_the_same_folder(tmp_path: Path) -> None:
    """Nothing is trained yet; a tokenizer and a corpus stay where they are still right."""
    text, run = write_documents(tmp_path / "text.txt", make_documents(12, seed=3)), tmp_path / "run"
    files = [run / "tokenizer" / "tokenizer.json", run / "corpus" / "manifest.json"]
    few = {"eval_fraction": 0.001, "train.max_steps": 1}
    with pytest.raises(HeedfulError, match=r"different documents in 1 is too small .* or set corpus\.sample_by"):
        go(text, run, "mlm+nsp", more=few | {"corpus.sample_by": "document"})
    with (
        pytest.warns(HeedfulWarning, match="corpus was made with other settings of the text, and is made anew"),
        pytest.raises(HeedfulError, match=r"needs two documents at least, but of 12 there are 11 .* eval_fraction"),
    ):
        go(text, run, "mlm+nsp", more=few)
    before = [path.stat().st_mtime_ns for path in files]
    assert go(text, run, "mlm+nsp", more=few | {"eval_fraction": 0.3}).status == "completed"
    assert before == [path.stat().st_mtime_ns for path in files]


# -- where a model and a text come from ---------------------------------------------------------------------------


def test_a_trained_model_goes_on(tmp_path: Path, text: Path) -> None:
    go(text, tmp_path / "first", "mlm+nsp")
    other = write_documents(tmp_path / "other.txt", make_documents(80, seed=7))
    more = {"train.optimizer.lr": 1e-9, "train.max_steps": 1, "model.layers": None, "model.dropout": 0.0}
    done = go(other, tmp_path / "second", more=more, model=str(tmp_path / "first"))
    assert done.results["base"] == str(tmp_path / "first")
    assert not (tmp_path / "second" / "tokenizer").exists(), "it has its own"
    one, two = (load_file(tmp_path / each / "model" / "model.safetensors") for each in ("first", "second"))
    shared = one.keys() & two.keys()
    assert all("pooler" in name or "seq_relationship" in name for name in one.keys() - two.keys())
    assert all(torch.allclose(one[name], two[name], atol=1e-6) for name in shared) and len(shared) > 20
    configs = [json.loads((tmp_path / each / "model" / "config.json").read_text()) for each in ("first", "second")]
    assert configs[0]["hidden_dropout_prob"] == configs[1]["hidden_dropout_prob"] == 0.1
    apart = tmp_path / "apart"
    word_tokenizer(["some", "words"]).save(apart)
    with pytest.raises(HeedfulError, match="was trained with another tokenizer"):
        go(other, tmp_path / "mixed", more=more, model=str(tmp_path / "first"), tokenizer=str(apart))
    with pytest.raises(HeedfulError, match=r"max_seq_length is 64, but .*first.* reads 32 tokens"):
        go(other, tmp_path / "third", more=more | {"max_seq_length": 64}, model=str(tmp_path / "first"))


def test_the_score_before_training_stands_beside_that_after_it(tmp_path: Path, text: Path) -> None:
    first = go(text, tmp_path / "first")
    assert "baseline" not in first.results and not (tmp_path / "first" / "before.json").exists()
    more = {"model.layers": None, "train.optimizer.lr": 1e-9}
    named: dict[str, Any] = {"more": more, "model": str(tmp_path / "first")}
    whole = go(text, tmp_path / "whole", **named)
    end = whole.results["splits"]["validation"]["numbers"]
    start = whole.results["baseline"]["splits"]["validation"]["numbers"]
    assert start == pytest.approx(end, rel=1e-4) and start["mlm_loss"] > 0
    numbers = first.results["splits"]["validation"]["numbers"]
    assert start["mlm_loss"] == pytest.approx(numbers["mlm_loss"], rel=1e-4), "the same text is held out"
    (line,) = baseline_lines(whole.results)
    assert re.fullmatch(r"validation mlm_accuracy \d+\.\d %; before training \d+\.\d %", line)
    assert "| validation | before training |" in (tmp_path / "whole" / "model" / "README.md").read_text()
    last = (tmp_path / "whole" / "results.csv").read_text().splitlines()[-1]
    assert "before training" in last and str(start["mlm_loss"]) in last
    stops, goes_on = Seen(2), Seen()
    assert go(text, tmp_path / "run", reporter=stops, **named).status == "interrupted"
    done = go(text, tmp_path / "run", reporter=goes_on, **named)
    assert done.results["baseline"] == whole.results["baseline"]
    assert "the score before training" in stops.sentences and "the score before training" not in goes_on.sentences


def test_a_model_whose_loss_is_not_finite_is_no_start(tmp_path: Path, text: Path) -> None:
    go(text, tmp_path / "first")
    loaded = heedful.load(tmp_path / "first")
    assert loaded.head is not None
    with torch.no_grad():
        for each in loaded.head.parameters():
            each.fill_(3e38)
    heedful.save(loaded, tmp_path / "broken")
    with pytest.raises(HeedfulError, match="cannot start from its weights"):
        go(text, tmp_path / "run", more={"model.layers": None}, model=str(tmp_path / "broken"))


def test_what_other_heads_have_in_a_folder_goes_on(tmp_path: Path, text: Path) -> None:
    """As the published BERT: a masked language model, beside which its pooler lies, and what follows."""
    go(text, tmp_path / "first", "mlm+nsp")
    place = tmp_path / "first" / "model" / "config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"architectures": ["BertForMaskedLM"]}))
    with pytest.warns(HeedfulWarning, match="takes what its head has of them"):
        started = heedful.load(tmp_path / "first")
    assert started.tokenizer is not None
    settings = asked("a", "mlm+nsp", {"model.layers": None}, model=str(tmp_path / "first"))
    pieces = Components(settings=settings, tokenizer=started.tokenizer, corpus=None, init_model=started)  # type: ignore[arg-type]
    known, result = (
        heedful.load(tmp_path / "first", head="pretraining").named_tensors(),
        build_model(pieces).named_tensors(),
    )
    assert result.keys() == known.keys() and all(torch.equal(result[name], known[name]) for name in known)


@pytest.mark.slow
def test_a_generator_goes_on_with_its_model(tmp_path: Path, text: Path) -> None:
    """With what it learned, whether the run or its model is named; a model without one says that it is new."""
    first, more = tmp_path / "first", {"train.optimizer.lr": 1e-9, "train.max_steps": 1}
    go(text, first, "rtd", {"train.optimizer.lr": 1e-2})
    learned = load_file(first / "generator" / "model.safetensors")
    for name, start in (("run", first), ("model", first / "model")):
        seen = Seen()
        go(text, tmp_path / name, "rtd", more | {"train.seed": 5}, model=str(start), reporter=seen)
        assert f"the generator in {first / 'generator'} is trained further, too" in seen.sentences
        weights = load_file(tmp_path / name / "generator" / "model.safetensors")
        assert weights.keys() == learned.keys()
        assert all(torch.allclose(weights[each], learned[each], atol=1e-6) for each in learned)
    with pytest.raises(HeedfulError, match=r"generator is of another shape than .* = 1 \(.* differs\)"):
        go(text, tmp_path / "other", "rtd", more | {"objective.generator_size": 1.0}, model=str(first))
    shutil.rmtree(first / "generator")
    seen = Seen()
    go(text, tmp_path / "new", "rtd", more, model=str(first), reporter=seen)
    assert f"{first} has no generator beside it: a new one is trained" in seen.sentences


def test_the_usual_rate_is_that_of_the_model_that_goes_on(teacher: Path) -> None:
    """A tenth of what its width has, whatever `size` would be; a rate that is set needs no look at the model."""
    going_on, fresh = (
        resolve_pretrain(["a"], model=str(teacher)),
        resolve_pretrain(["a"], assignments=["model.width=24", "model.heads=2"]),
    )
    rates = [each.train.optimizer.lr for each in (going_on, fresh)]  # type: ignore[union-attr]
    assert rates == pytest.approx([2e-4, 2e-3])
    settings = resolve_pretrain(["a"], model="nowhere", assignments=["train.optimizer.lr=0.01"])
    assert settings.train.optimizer.lr == 0.01 and settings.model.init_from == "nowhere"  # type: ignore[union-attr]
    with pytest.raises(HeedfulError, match="'nowhere' is no folder here"):
        resolve_pretrain(["a"], model="nowhere")


def test_a_corpus_that_was_made_before(tmp_path: Path, known: Path) -> None:
    files = make_documents(120, seed=1)
    corpus = make_corpus(tmp_path, files, Tokenizer.load(known))
    go(corpus.folder, tmp_path / "from-corpus")
    go(tmp_path / "text.txt", tmp_path / "from-text", tokenizer=str(known))
    names = {path.name for path in (tmp_path / "from-corpus").iterdir()}
    assert not names & {"corpus", "tokenizer"}
    one, two = (left(tmp_path / each) for each in ("from-corpus", "from-text"))
    assert one["journal"] == two["journal"] and one["model.safetensors"] == two["model.safetensors"]
    train_on(make_documents(9)).save(tmp_path / "other")
    with pytest.raises(HeedfulError, match="was made with another tokenizer: give that one with --tokenizer"):
        go(corpus.folder, tmp_path / "run", tokenizer=str(tmp_path / "other"))
    assert {path.name for path in (tmp_path / "run").iterdir()} <= INITIAL_FILES


def test_a_manifest_of_something_else_is_a_text_like_others(tmp_path: Path, known: Path) -> None:
    write_documents(tmp_path / "texts" / "a.txt", make_documents(60, seed=4))
    (tmp_path / "texts" / "manifest.json").write_text('[{"text": "In the mill a wheel turns."}]')
    done = go(tmp_path / "texts", tmp_path / "run", more={"train.max_steps": 1}, tokenizer=str(known))
    assert [each["name"] for each in done.results["corpus"]["files"]] == ["a.txt", "manifest.json"]
    assert done.results["corpus"]["counts"]["documents"] == 61


def test_what_became_of_the_text_is_told(tmp_path: Path, known: Path) -> None:
    text = write_documents(tmp_path / "text.txt", make_documents(60, seed=4))
    text.write_text(text.read_text() + "\n" + "In the mill a wheel turns.\n" * 2 + "\nYes.\n")
    rows = [{"text": "A boat waits at the pier."}] * 2 + [{"text": 5}, {"text": " "}]
    (tmp_path / "rows_1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = {
        "corpus.dedup": "exact",
        "corpus.min_document_chars": 8,
        "corpus.sample_by": "auto",
        "train.max_steps": 1,
    }
    seen, run = Seen(), tmp_path / "run"
    done = go(
        [text, tmp_path / "rows_1.jsonl"], run, "mlm", more, tokenizer=str(known), reporter=seen, on_bad_row="skip"
    )
    notes = [
        "text.txt: lines are sentences, and blank lines separate documents",
        'rows_1.jsonl: columns: text="text"',
        "documents that are left out: 1 repeated, 1 too short, 1 without text",
        "bad rows of rows_1.jsonl that are left out: 1",
    ]
    assert seen.sentences[:5] == [*notes, f"bad rows are set aside in {run / 'bad-rows.jsonl'}"]
    card = (run / "model" / "README.md").read_text()
    assert all(f"- {escape_markdown(sentence)}\n" in card for sentence in notes)
    assert f"tokenizer.path = {known.name}\n" in card and str(tmp_path) not in card and str(known) not in card
    corpus = done.results["corpus"]
    assert corpus["left_out"] == {"exact": 1, "near": 0, "short": 1, "empty": 1} and corpus["stated"] == notes[:2]
    assert list(corpus["bad_rows"].values()) == [1] and corpus["cut"] == 0
    many = corpus_notes({"stated": [f"{number}.txt: is empty" for number in range(1000)], "cut": 1200})
    assert len(many) == 22 and many[20] == "and 980 more such sentences, which the corpus's manifest.json has"
    assert many[21] == "documents that were split because of their size: 1,200"


def test_another_corpus_in_its_place_is_refused(tmp_path: Path, known: Path) -> None:
    """Also one of as many rows; the same one that is made anew is the same."""
    tokenizer, files = Tokenizer.load(known), make_documents(60, seed=4)
    other = [*files[:4], [sentence.replace("harbour", "library") for sentence in files[4]], *files[5:]]
    for name, texts in (("one", files), ("again", files), ("other", other)):
        make_corpus(tmp_path / name, texts, tokenizer)
    place = tmp_path / "corpus"
    shutil.copytree(tmp_path / "one" / "corpus", place)
    assert go(place, tmp_path / "run", reporter=Seen(2)).status == "interrupted"
    for name, message in (("other", "holds another corpus than the one with which"), ("again", "")):
        shutil.rmtree(place)
        shutil.copytree(tmp_path / name / "corpus", place)
        with pytest.raises(HeedfulError, match=message) if message else nullcontext():
            assert go(place, tmp_path / "run").status == "completed"


def test_a_killed_tokenizer_is_trained_again(tmp_path: Path, text: Path) -> None:
    """Its folder may be there without its last file."""
    go(text, tmp_path / "run", reporter=Seen(1))
    (tmp_path / "run" / "tokenizer" / "tokenizer.json").unlink()
    assert go(text, tmp_path / "run").status == "completed"


@pytest.mark.parametrize("kind", ["mlm", "mlm+nsp", "mlm+sop"])
def test_versions_of_masks_return(
    kind: str, tmp_path: Path, text: Path, known: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same sequences with the same masks, in another order."""
    drawn: dict[str, list[list[tuple[int, ...]]]] = {}
    original = MaskedLM.batch

    def noted(self: MaskedLM, samples: Any, keys: Any) -> Any:
        batch = original(self, samples, keys)
        if len(keys) > 1:  # evaluation takes one row at a time
            drawn[name].append(sorted(tuple(each.tolist()) for each in batch.packed.unpack(batch.packed.tokens)))
        return batch

    monkeypatch.setattr(MaskedLM, "batch", noted)
    for name, versions in (("static", "2"), ("dynamic", '"none"')):
        drawn[name] = []
        more = {
            "objective.num_static_masks": versions,
            "train.max_steps": 3,
            "train.batch_size": 1000,
            "train.max_tokens_per_microbatch": 10**6,
        }
        go(text, tmp_path / name, kind, more, tokenizer=str(known))
    terms = 1 if kind == "mlm" else 2  # of several, all batches are looked at first
    one, two, three = drawn["static"][::terms]
    assert one == three != two and len(one) > 20
    first, two, three = drawn["dynamic"][::terms]
    assert first == one and first != two != three != first


def test_a_tokenizer_that_is_given(tmp_path: Path, text: Path, known: Path) -> None:
    with pytest.warns(HeedfulWarning, match=r"5\d % of the (documents|segments) of this text are repeated"):
        go([text, text.parent], tmp_path / "run", more={"train.max_steps": 1}, tokenizer=str(known))
    assert heedful.load(tmp_path / "run").config.model.embedding.vocabulary == Tokenizer.load(known).size
    assert not (tmp_path / "run" / "tokenizer").exists()
    assert json.loads((tmp_path / "run" / "results.json").read_text())["corpus"]["repeated"]["documents"] >= 0.2


def test_what_was_made_of_a_text_stays_unless_another_text_is_asked_for(tmp_path: Path, text: Path) -> None:
    def begun() -> set[str]:
        return {path.name for path in (tmp_path / "run").iterdir()}

    settings, files = asked(text, more={"train.batch_size": 8}), {"run.lock", "tokenizer", "corpus"}
    (tmp_path / "run").mkdir()
    for name in files:
        (tmp_path / "run" / name).touch()
    with pytest.raises(HeedfulError, match=r"run is not a run folder: it holds corpus, .* but no settings\.toml"):
        check_run_folder(tmp_path / "run")
    (tmp_path / "run" / "settings.toml").write_text(to_toml(settings))
    with pytest.raises(HeedfulError, match=r"settings\.toml"):
        can_resume(tmp_path / "run", FinetuneSettings(task=ClassifySettings()))  # of a run that fine-tunes
    assert begun() == files | {"settings.toml"}
    assert not can_resume(tmp_path / "run", asked(text, more={"train.batch_size": 4})) and begun() == files
    (tmp_path / "run" / "settings.toml").write_text(to_toml(settings))
    with pytest.warns(HeedfulWarning, match=r"corpus was made with other settings of the text, and is made anew"):
        assert not can_resume(tmp_path / "run", asked(text, more={"corpus.min_document_chars": 9}))
    assert begun() == {"run.lock"}


# -- what is refused and warned about -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        ("mlm", {"model.family": "brt"}, r'"brt" is no family \(did you mean "bert"\?\)'),
        ("mlm+nsp", {"model.family": "roberta"}, 'this family has no head "pretraining"'),
        ("mlm", {"model.family": "gpt2"}, 'this family has no head "masked_lm"'),
        ("distillation", {"objective.teacher": "nowhere"}, "'nowhere' is no folder here"),
        (
            "distillation",
            {"objective.teacher": "whole"},
            "whole has an encoder and a decoder, .* convert --head-kind encoder",
        ),
        ("clm", {"model.family": "t5"}, "t5 has an encoder, .* take --objective span_corruption"),
        ("span_corruption", {"model.family": "gpt2"}, "gpt2 is not an encoder-decoder, .* take --objective clm"),
        ("mlm", {"tokenizer.path": "maskless"}, "this tokenizer has no mask token"),
        ("rtd", {"tokenizer.path": "maskless"}, "this tokenizer has no mask token"),
        ("span_corruption", {"tokenizer.path": "known"}, "this tokenizer has no token <extra_id_0>"),
        ("mlm", {"tokenizer.path": "nowhere"}, "nowhere"),
        ("mlm", {"model.init_from": "nowhere"}, "'nowhere' is no folder here"),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_written(
    tmp_path: Path, text: Path, known: Path, kind: str, more: dict[str, Any], message: str
) -> None:
    if more.get("tokenizer.path") == "maskless":
        tokenizer_json = json.loads((known / "tokenizer.json").read_text())
        tokenizer_json["added_tokens"] = [
            each for each in tokenizer_json["added_tokens"] if each["content"] != "[MASK]"
        ]
        tokenizer_json["model"]["vocab"]["mask"] = tokenizer_json["model"]["vocab"].pop("[MASK]")
        (tmp_path / "maskless").mkdir()
        (tmp_path / "maskless" / "tokenizer.json").write_text(json.dumps(tokenizer_json))
        more = more | {"tokenizer.path": tmp_path / "maskless"}
    elif more.get("tokenizer.path") == "known":
        more = more | {"tokenizer.path": known}
    elif more.get("objective.teacher") == "whole":
        save_tiny(tmp_path / "whole", "t5", "T5Model")
        more = {"objective.teacher": tmp_path / "whole"}
    with pytest.raises(HeedfulError, match=message):
        go(text, tmp_path / "run", kind, more)
    written = {path.name for path in (tmp_path / "run").glob("*")}
    assert written <= INITIAL_FILES
    if written:
        assert go(text, tmp_path / "run", more={"train.max_steps": 1}).status == "completed", "the slip is mended there"


@pytest.mark.parametrize(
    ("more", "message"),
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
def test_wrong_settings(text: Path, more: dict[str, Any], message: str) -> None:
    with pytest.raises(HeedfulError, match=message):
        asked(text, more=more)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"fit.eval_every_epochs": 0.5},
            "fit.eval_every_epochs would change nothing: set eval_every_steps instead; leave it out",
        ),
        ({"tokenizer.max_length": 64}, "tokenizer.max_length would change nothing: the greatest max_seq_length"),
        (
            {"tokenizer.path": "known", "tokenizer.algorithm": "bpe"},
            "tokenizer.algorithm .* trained, --tokenizer names one",
        ),
        (
            {"tokenizer.path": "known", "tokenizer.train_chars": 9},
            "^tokenizer.train_chars would change nothing: no tokenizer is trained",
        ),
        (
            {"model.init_from": "teacher", "tokenizer.limit_alphabet": 9},
            "alphabet would .* is trained, .*teacher.* has its own",
        ),
        (
            {"model.init_from": "teacher", "model.layers": 1},
            "model.layers would .*: .*teacher.* has a shape of its own",
        ),
        ({"model.init_from": "teacher", "model.size": "base"}, "model.size would change nothing"),
        ({"data": "corpus", "corpus.dedup": "near"}, "corpus.dedup would .*: the corpus was made before"),
        ({"data": "corpus", "tokenizer.vocab_size": 99}, "tokenizer.vocab_size would .* the corpus has its own"),
    ],
)
def test_settings_that_would_change_nothing(
    tmp_path: Path, text: Path, known: Path, teacher: Path, more: dict[str, Any], message: str
) -> None:
    places = {"known": known, "teacher": teacher}
    settings = {name: places.get(value, value) for name, value in more.items() if name != "data"}
    data = make_corpus(tmp_path, make_documents(9), Tokenizer.load(known)).folder if "data" in more else text
    with pytest.raises(HeedfulError, match=message):
        go(data, tmp_path / "run", more=settings)
    assert not (tmp_path / "run").exists()


def test_wrong_names_and_times(text: Path) -> None:
    for arguments, message in (
        ({"objective": "mlmm"}, r'"mlmm" is not an objective \(did you mean "mlm"\?\): use one of mlm, mlm\+nsp'),
        ({"objective": "mlm+hidden_states"}, "objective.teacher is missing"),
        (
            {"assignments": ["train.time_budget=soon"]},
            'time_budget is "soon"; expected a duration as 45s, 10m, 2h or 1h30m',
        ),
        ({"assignments": ["train.time_budget=0h"]}, 'time_budget is "0h"; expected a duration'),
        ({"model": "there", "size": "mini"}, "model.size would change nothing: there has a shape of its own"),
        ({"size": "huge"}, r'model\.size is "huge", expected one of "tiny"'),
    ):
        with pytest.raises(HeedfulError, match=message):
            resolve_pretrain([text], **arguments)  # type: ignore[arg-type]
    with pytest.raises(HeedfulError, match="no text was given: name files or folders of text"):
        pretrain_with(PretrainSettings(), "anywhere")


@pytest.mark.parametrize(
    ("kind", "count", "message"),
    [
        ("mlm", 1, r"documents in 1 is too small to hold out a share of 0\.1: [01] would be held out\. Give more"),
        ("mlm+nsp", 12, r"needs two documents at least, but of 12 there are \d+ to learn from and 1 held out"),
    ],
)
def test_too_few_documents(tmp_path: Path, known: Path, kind: str, count: int, message: str) -> None:
    share = 0.1 if count == 1 else 1e-6  # one is held out of several
    text = write_documents(tmp_path / "text.txt", make_documents(count, seed=6))
    with pytest.raises(HeedfulError, match=message):
        go(text, tmp_path / "run", kind, {"eval_fraction": share}, tokenizer=str(known))
    assert not (tmp_path / "run" / "state").exists()


@pytest.mark.slow
def test_few_sequences_and_repeated_lines_warn(tmp_path: Path, text: Path, known: Path) -> None:
    few = {"train.batch_size": 4, "pack_length": 32, "train.max_steps": 1}
    with pytest.warns(
        HeedfulWarning, match="a step has about [4-8] sequences: with 8 or fewer.*raise train.batch_size"
    ):
        go(text, tmp_path / "few", more=few, tokenizer=str(known))
    twice = write_documents(tmp_path / "twice.txt", [*make_documents(60), *make_documents(60)])
    with pytest.warns(HeedfulWarning, match=r'5\d % of the (documents|segments) .* set corpus\.dedup = "exact"'):
        go(twice, tmp_path / "twice", more={"train.max_steps": 1}, tokenizer=str(known))
    one = {"train.max_steps": 1, "corpus.dedup": "exact"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        done = go(twice, tmp_path / "once", more=one, tokenizer=str(known))
        assert done.results["corpus"]["counts"]["documents"] == 60
        go(text, tmp_path / "sane", more={"train.max_steps": 1}, tokenizer=str(known))


# -- several processes --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_ranks_equal_one(tmp_path: Path, text: Path, known: Path) -> None:
    """With the counts of both terms over all ranks, and no dropout."""
    calm = {
        "train.optimizer.eps": 1e-2,
        "train.optimizer.lr": 2e-2,
        "train.max_tokens_per_microbatch": 100,
        "train.batch_size": 7,
    }
    settings = asked(text, "mlm+nsp", calm, tokenizer=str(known))
    assignments = [f"{name}={value}" for name, value in (SMALL | calm).items() if not name.startswith("tokenizer.")]
    words = ["pretrain", str(text), "--objective", "mlm+nsp", "--tokenizer", str(known), "--json"]
    words += ["--output", str(tmp_path / "two"), *assignments]
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--module", "heedful", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    done = pretrain_with(settings, tmp_path / "one")
    out, err = process.communicate(timeout=110)
    assert process.returncode == 0, err
    two = json.loads(out)
    assert two["tokens"] == done.results["tokens"] and two["steps"] == 5
    mine, other = (load_file(tmp_path / each / "model" / "model.safetensors") for each in ("one", "two"))
    assert mine.keys() == other.keys()
    assert max(float((mine[name] - other[name]).abs().max()) for name in mine) < 1e-6
    losses = [[line["loss"] for line in lines(tmp_path / each) if "loss" in line] for each in ("one", "two")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    numbers = [each["splits"]["validation"]["numbers"] for each in (done.results, two)]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-4)
