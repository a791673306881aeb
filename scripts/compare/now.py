"""Probes of this checkout, which have the values of before.py's and follow each rename; trees.py runs them.

A section is a function that gets a folder to work in and returns the values of its probes by name. Names of probes are
those of before.py, or are mapped to them in key_map.toml.
"""

from __future__ import annotations

import io
import json
import os
import tomllib
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

os.environ["HEEDFUL_MEASURE"] = "off"

import shared
from shared import KINDS, VOCABULARY, Probes, digest, digests

BERT_WORDS = {"vocab_size": len(VOCABULARY)}
HEADS: dict[str, tuple[str, dict[str, Any]]] = {  # name of a folder -> architecture, and further entries of its config
    "masked": ("BertForMaskedLM", {}),
    "next": ("BertForNextSentencePrediction", {}),
    "pretraining": ("BertForPreTraining", {}),
    "single": ("BertForSequenceClassification", {"id2label": {"0": "bad", "1": "good"}}),
    "multiple": (
        "BertForSequenceClassification",
        {"id2label": {"0": "bad", "1": "fair", "2": "good"}, "problem_type": "multi_label_classification"},
    ),
    "regression": ("BertForSequenceClassification", {"id2label": {"0": "stars"}}),
    "tag": ("BertForTokenClassification", {"id2label": {"0": "O", "1": "B-PER", "2": "I-PER", "3": "B-LOC"}}),
    "span": ("BertForQuestionAnswering", {}),
    "choice": ("BertForMultipleChoice", {}),
    "bare": ("BertModel", {}),
}

# -- models and commands ----------------------------------------------------------------------------------------------


def make(folder: Path, family: str, architecture: str, **more: Any) -> Path:
    """Write a tiny model of a published family with random weights and without a tokenizer; return its folder."""
    from heedful.checkpoint import create, read_config, save

    shared.write_config(folder, family, architecture, **more)
    config = read_config(json.loads((folder / "config.json").read_text()), str(folder))
    save(create(config, seed=0), folder, overwrite=True)
    shared.randomise(folder)
    (folder / "heedful.json").unlink()
    return folder


def make_encoder(folder: Path, name: str) -> Path:
    """Write a tiny encoder with a vocabulary and a head of HEADS; return its folder."""
    architecture, config = HEADS[name]
    make(folder, "bert", architecture, **BERT_WORDS, **config)
    shared.write_vocabulary(folder)
    return folder


def make_embedder(folder: Path) -> Path:
    """Write a tiny encoder whose head embeds sentences; return its folder."""
    from heedful.checkpoint import load, save
    from heedful.checkpoint.new_head import with_head

    save(with_head(load(make_encoder(folder.with_name(folder.name + "-bare"), "bare")), "embedding"), folder)
    return folder


def make_generator(folder: Path, family: str) -> Path:
    """Write a tiny model that generates letters, a GPT-2 or a T5; return its folder."""
    architecture = {"gpt2": "GPT2LMHeadModel", "t5": "T5ForConditionalGeneration"}[family]
    config = {
        "vocab_size": 11,
        "bos_token_id": 1,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    make(folder, family, architecture, **config)
    shared.write_letters(folder)
    return folder


def call(*words: object) -> str:
    """Run a command in this process, without plots and with little timing, and return its output."""
    from heedful.cli import main

    skip_plots_and_timing()
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main([str(word) for word in words])
        except SystemExit as stop:
            code = stop.code
    if code:
        raise RuntimeError(f"heedful {' '.join(map(str, words))} ended with {code}:\n{err.getvalue()[-3000:]}")
    return out.getvalue()


@cache
def skip_plots_and_timing() -> None:
    """Replace functions and constants that cost seconds and change no value that is compared."""
    from heedful.runs import run, timing
    from heedful.runs.distil import search as distil_search
    from heedful.runs.distil import verdict as distil_verdict

    def nothing(*arguments: Any) -> list[Any]:
        return []

    for module, name in (
        (run, "draw_run_plots"),
        (distil_verdict, "save_plot"),
        (distil_search, "save_plot"),
        (distil_verdict, "plot_verdict"),
        (distil_search, "plot_verdict"),
    ):
        getattr(module, name)  # fails if the function is renamed
        setattr(module, name, nothing)
    for module, name, value in ((timing, "ROUNDS", 2), (distil_verdict, "MAX_BATCH_SECONDS", 0.0)):
        getattr(module, name)
        setattr(module, name, value)


def settings(**values: object) -> list[str]:
    """Return settings as words of a command; two underscores mean a dot."""
    return [f"--{name.replace('__', '.')}={value}" for name, value in values.items()]


STEPS = settings(train__max_steps=30, train__batch_size=8, train__precision="float32", train__seed=3)
DURATIONS = {  # settings of this checkout, and the kinds of train.length in the other one
    "epochs": "epochs",
    "max_steps": "steps",
    "time_budget": "minutes",
}
PROSE, VOLATILE = ("notes", "stated"), ("seconds", "base")  # keys whose values are not compared


def without(value: Any, names: tuple[str, ...] = PROSE + VOLATILE) -> Any:
    """Return nested data without some keys, by default those of prose, times and paths."""
    if isinstance(value, dict):
        return {key: without(item, names) for key, item in value.items() if key not in names}
    return [without(item, names) for item in value] if isinstance(value, list) else value


def as_before(value: Any) -> Any:
    """Return settings with the duration of training as in the other checkout, a table of kind and count."""
    if not isinstance(value, dict):
        return value
    settings = {key: as_before(item) for key, item in value.items()}
    if settings.keys() >= DURATIONS.keys():
        duration = {kind: settings.pop(key) for key, kind in DURATIONS.items()}
        ((kind, count),) = ((kind, count) for kind, count in duration.items() if count not in (None, "none"))
        settings["length"] = {"kind": kind, "count": count}
    return settings


def run_of(folder: Path, *, names: bool = True) -> Probes:
    """Read the files of a finished run of finetune, pretrain or distil.

    Args:
        names: Whether the names of tensors are compared; those of Heedful's families may change.
    """
    results = json.loads((folder / "results.json").read_text())
    return {
        "journal": [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()],
        "weights": shared.weights(folder / "model" / "model.safetensors", names=names),
        "results": {key: without(results[key]) for key in ("task", "metric", "splits", "seeds") if key in results},
        "settings": as_before(tomllib.loads((folder / "settings.toml").read_text())),
        "predictions": {
            path.stem.partition("-")[2]: [json.loads(line) for line in path.read_text().splitlines()]
            for path in sorted(folder.glob("predictions-*.jsonl"))
        },
    }


# -- outputs ----------------------------------------------------------------------------------------------------------


def outputs(work: Path, quick: bool) -> Probes:
    """Probe the outputs of all families and heads in float32, bfloat16 and int8."""
    from heedful.families import FAMILIES

    probes: Probes = {}
    for family in KINDS if quick else shared.CONFIGS:
        for architecture in FAMILIES[family].heads:
            folder = make(work / f"{family}-{architecture}", family, architecture)
            probes[f"{family} {architecture}"] = precisions(folder, family)
    probes |= native_outputs(work)
    probes |= classic_outputs(work)
    return probes


def precisions(folder: Path, family: str = "") -> Probes:
    """Probe the outputs of a model in each precision, and in training mode with gradients."""
    import torch

    from heedful.checkpoint import load
    from heedful.infer.tuning.autotune import autotune
    from heedful.infer.tuning.execution_plan import activation_dtype
    from heedful.packed import Packed

    batch = Packed.of(*shared.sequences(family))
    probes: Probes = {}
    for precision in ("float32", "bfloat16", "int8"):
        loaded = load(folder, dtype=activation_dtype(precision))
        has_blocks = loaded.config.model.encoder is not None or loaded.config.model.decoder is not None
        if has_blocks or precision != "int8":
            autotune(loaded, precision)
            with torch.inference_mode():
                probes[precision] = digests(loaded(batch, batch.shift_right(0) if loaded.needs_target else None))
    trained = load(folder).train()
    torch.manual_seed(5)
    result = trained(batch, batch.shift_right(0) if trained.needs_target else None)
    tensors = result if isinstance(result, tuple) else [result]
    sum(tensor.float().square().mean() for tensor in tensors).backward()
    probes["training"] = digests(result)
    probes["gradients"] = sorted(
        digest(parameter.grad) for parameter in trained.parameters() if parameter.grad is not None
    )
    return probes


def native_outputs(work: Path) -> Probes:
    """Probe the outputs of the heads of Heedful's own family."""
    from dataclasses import replace

    from heedful.checkpoint import BundleConfig, create, save
    from heedful.checkpoint.new_head import with_head
    from heedful.families import FAMILIES
    from heedful.model.vaswani import VaswaniSize, vaswani_config

    both = vaswani_config(VaswaniSize(layers=2, width=32, heads=4, inner=48, dropout=0.1), 99)
    probes: Probes = {}
    for name, model in (("encoder", replace(both, decoder=None)), ("both", both)):
        bare = create(BundleConfig(family="heedful", model=model), seed=2)
        for kind in FAMILIES["heedful"].kinds():
            if kind == "none" or (name == "both") != (kind in ("language_model", "double_heads")):
                continue
            if kind == "permutation_lm":
                continue  # it needs two streams; the section pretraining probes it
            labels = ("x", "y", "z") if kind in ("sequence_classification", "token_classification") else ()
            save(with_head(bare, kind, labels=labels, seed=1), work / f"native-{name}-{kind}")
            probes[f"native {name} {kind}"] = precisions(work / f"native-{name}-{kind}")
    return probes


def classic_outputs(work: Path) -> Probes:
    """Probe the outputs of readers from before the Transformer, and of a recurrent sequence-to-sequence model."""
    from heedful.checkpoint import BundleConfig, create, save
    from heedful.checkpoint.new_head import with_head
    from heedful.model.classic_config import (
        AttentionPooling,
        BagPooling,
        ClassicConfig,
        HierarchicalPooling,
        Recurrent,
        RecurrentSeq2Seq,
        StructuredPooling,
        UntrainedSelfAttention,
    )
    from heedful.model.config import EmbeddingConfig

    lstm, gru = Recurrent(width=8, layers=2), Recurrent(cell="gru", width=8)
    readers: dict[str, Any] = {
        "bag": BagPooling(),
        "bag of sums": BagPooling(how="sum", binary="sigmoid"),
        "attention": AttentionPooling(keys="linear", values="linear", scaled=True),
        "queries": AttentionPooling(keys="tanh", queries="classes"),
        "structured": StructuredPooling(over=lstm, hops=3, inner=5),
        "hierarchical": HierarchicalPooling(over=gru, sentences=lstm, inner=5, ends=(10,)),
        "cosines": BagPooling(over=UntrainedSelfAttention(score="cosine")),
        "writer": RecurrentSeq2Seq(width=16),
    }
    probes: Probes = {}
    for name, reader in readers.items():
        config = ClassicConfig(embedding=EmbeddingConfig(vocabulary=99, width=32), reader=reader)
        bare = create(BundleConfig(family="heedful-classic", model=config), seed=2)
        if name == "writer":
            headed = with_head(bare, "language_model", seed=1)
        else:
            headed = with_head(bare, "sequence_classification", labels=("x", "y"), seed=1)
        save(headed, work / f"classic-{name}")
        probes[f"classic {name}"] = precisions(work / f"classic-{name}")
    return probes


# -- training ---------------------------------------------------------------------------------------------------------

TASKS: dict[str, tuple[str, str]] = {  # name of the probe -> the task and its data
    "classify": ("classify", "single"),
    "several labels": ("classify", "multiple"),
    "regress": ("regress", "scored"),
    "tag": ("tag", "tags"),
    "questions": ("qa", "questions"),
    "choices": ("multiple-choice", "choice"),
    "embed scores": ("embed", "vectors"),
    "embed pairs": ("embed", "pairs"),
}


def training(work: Path, quick: bool) -> Probes:
    """Probe thirty training steps of all tasks."""
    model = make_encoder(work / "model", "masked")
    probes: Probes = {}
    for name, (task, kind) in TASKS.items():
        if quick and name not in ("classify", "tag", "questions"):
            continue
        data = shared.write_data(work / f"data-{kind}", kind)
        options = settings(task__group_size=4) if kind == "pairs" else []
        options += [] if name == "classify" else settings(eval_baseline="false")
        out = work / f"run-{name.replace(' ', '-')}"
        call("finetune", task, data, "--model", model, "--output", out, *STEPS, *options)
        probes[name] = run_of(out)
    if not quick:
        probes |= variants(work, model)
    probes |= rewriting(work, quick)
    return probes


def variants(work: Path, model: Path) -> Probes:
    """Probe classification with other settings of the optimizer, schedules and starts."""
    data = shared.write_data(work / "data-single", "single")
    settings_by_name = {
        "cosine": settings(train__schedule__kind="cosine", train__optimizer__layer_decay=0.9, train__ema_decay=0.9),
        "published": settings(
            train__schedule__kind="bert", train__optimizer__bias_correction="false", train__optimizer__eps=1e-6
        ),
        "small batches": settings(
            train__max_tokens_per_microbatch=64,
            train__gradient_checkpointing="true",
            train__optimizer__max_grad_norm="none",
        ),
        "bfloat16": settings(train__precision="bfloat16"),
        "weights": settings(
            task__class_weight="balanced",
            init__reinit_layers=1,
            fit__eval_every_epochs=0.5,
            fit__load_best_at_end="false",
        ),
        "epochs": settings(train__epochs=2, fit__patience=1, seeds=2),
    }
    probes, no_baseline = Probes(), settings(eval_baseline="false")
    for name, values in settings_by_name.items():
        names = {word.partition("=")[0] for word in values}
        names |= {"--train.max_steps"} if "--train.epochs" in names else set()
        steps = [word for word in STEPS if word.partition("=")[0] not in names]
        out = work / f"variant-{name.replace(' ', '-')}"
        call("finetune", "classify", data, "--model", model, "--output", out, *steps, *values, *no_baseline)
        probes[f"classify, {name}"] = (
            run_of(out) if name != "epochs" else without(json.loads((out / "results.json").read_text())["seeds"])
        )
    for name, values in (
        ("bag of words", settings(init__kind="classic", init__words__width=16)),
        (
            "attention",
            settings(
                init__kind="classic",
                init__reader__kind="attention",
                init__reader__keys="tanh",
                init__skipgram_steps=5,
            ),
        ),
        (
            "scratch",
            settings(
                init__kind="scratch",
                init__layers=1,
                init__width=32,
                init__tokenizer__vocab_size=200,
                init__mlm_steps=5,
            ),
        ),
    ):
        out = work / f"start-{name.replace(' ', '-')}"
        call("finetune", "classify", data, "--output", out, *STEPS, *values, *no_baseline)
        probes[f"classify, {name}"] = run_of(out, names=False)
    return probes


def rewriting(work: Path, quick: bool) -> Probes:
    """Probe thirty training steps of sequence-to-sequence models with random weights."""
    data = shared.write_data(work / "data-texts", "texts")
    common = settings(init__tokenizer__vocab_size=300, task__max_new_tokens=8)
    small = settings(
        init__kind="transformer",
        init__layers=1,
        init__width=32,
        init__heads=2,
        init__inner=48,
    )
    starts = {"Transformer": small}
    if not quick:
        starts["beams"] = [*small, *settings(task__num_beams=3, init__positions="rotary")]
        starts["recurrent"] = settings(init__kind="recurrent", init__rnn__width=16)
    probes: Probes = {}
    for name, values in starts.items():
        out = work / f"rewrite-{name}"
        call("finetune", "seq2seq", data, "--output", out, *STEPS, *common, *values)
        probes[f"rewrite, {name}"] = run_of(out, names=False)
    return probes


SMALL = settings(
    model__layers=1,
    model__width=32,
    model__heads=2,
    train__max_steps=30,
    train__batch_size=4,
    train__precision="float32",
    max_seq_length=32,
    pack_length=64,
    eval_fraction=0.1,
    eval_every_steps=10,
    tokenizer__vocab_size=400,
    corpus__sample_by="paragraph",
)
LOSSES_BEFORE = {  # names of recipes of losses in the other checkout, which name the probes
    "logits": "soft",
    "distilbert": "triple",
    "minilm": "attention",
    "minilmv2": "relations",
    "tinybert": "layers",
}
TASKS_BEFORE = {"qa": "extract", "multiple-choice": "choose", "seq2seq": "rewrite"}  # tasks in the other checkout
KINDS_BEFORE = {  # names of objectives in the other checkout, which name the probes
    "mlm": "masked",
    "mlm+nsp": "masked+next",
    "mlm+sop": "masked+order",
    "plm": "permuted",
    "span_corruption": "spans",
    "clm": "causal",
    "rtd": "replaced",
    "distillation": "distillation",
}
OBJECTIVES: dict[str, list[str]] = {
    "masked": [],
    "masked words": settings(objective__mask_unit="words", objective__num_static_masks=2, model__dropout=0.1),
    "masked spans": settings(objective__mask_unit="spans"),
    "masked+next": settings(objective__short_seq_prob=0.3),
    "masked+order": [],
    "permuted": [],
    "spans": settings(objective__mean_noise_span_length=2.0),
    "causal": [],
    "replaced": settings(objective__disc_weight=20.0),
}


def pretraining(work: Path, quick: bool) -> Probes:
    """Probe thirty training steps of all objectives."""
    text = shared.write_text(work / "text.txt")
    probes: Probes = {}
    for name, values in OBJECTIVES.items():
        if quick and name not in ("masked words", "causal", "replaced"):
            continue
        out = work / name.replace(" ", "-")
        old_kind = name.partition(" ")[0]
        kind = next(new for new, old in KINDS_BEFORE.items() if old == old_kind)
        call("pretrain", text, "--objective", kind, "--output", out, *SMALL, *values)
        probes[name] = run_of(out)
    if not quick:
        probes["teacher"] = pretraining_with_teacher(work, text)
    return probes


def pretraining_with_teacher(work: Path, text: Path) -> Probes:
    """Probe all terms of an encoder's distillation from plain text, in two phases."""
    teacher = make_encoder(work / "teacher", "bare")
    phase = "[{start_fraction = 0.5, mask_prob = 0.3, term_weights = {mlm = 2.0, hidden_states = 0.0}}]"
    terms = "mlm+hidden_states+sentence_embedding+pair_similarity"
    flags = ["--objective", terms, "--teacher", teacher, "--tokenizer", teacher, *settings(phases=phase)]
    out = work / "taught"
    small = [word for word in SMALL if not word.startswith("--tokenizer.vocab_size")]
    call("pretrain", text, *flags, "--output", out, *small)
    return run_of(out)


def distillation(work: Path, quick: bool) -> Probes:
    """Probe thirty training steps of each recipe of losses and each kind of student."""
    data = shared.write_data(work / "data", "single")
    teacher = make_encoder(work / "teacher", "single")
    few = settings(
        seeds=1,
        verdict__precision="float32",
        verdict__texts=8,
        verdict__baseline="none",
        verdict__rounds=1,
    )
    kinds: dict[str, list[object]] = {
        old_name: ["--loss", name, "--student", "layers=1"] for name, old_name in LOSSES_BEFORE.items()
    }
    kinds["size"] = ["--student", "tiny", *settings(student__layers=1, student__width=32, student__heads=2)]
    kinds["words"] = ["--student", "bag"]
    kinds["more texts"] = [
        "--student",
        "layers=1",
        *settings(augment__copies=1),
        *settings(augment__model=work / "masked"),
    ]
    make_encoder(work / "masked", "masked")
    probes: Probes = {}
    for name, values in kinds.items():
        if quick and name != "triple":
            continue
        out = work / f"run-{name.replace(' ', '-')}"
        call("distil", teacher, data, "--output", out, *STEPS, *few, *values)
        probes[name] = run_of(out, names=name != "words")
    if not quick:
        probes["tag"] = distilled_tags(work, few)
        probes["masked"] = distilled_masks(work, few)
    return probes


def distilled_tags(work: Path, few: list[str]) -> Probes:
    """Probe the distillation of a tagger that is trained for a few steps."""
    data = shared.write_data(work / "tags", "tags")
    call("finetune", "tag", data, "--model", work / "masked", "--output", work / "tagger", *STEPS)
    call("distil", work / "tagger", data, "--student", "layers=1", "--output", work / "run-tag", *STEPS, *few)
    return run_of(work / "run-tag")


def distilled_masks(work: Path, few: list[str]) -> Probes:
    """Probe the distillation of a masked language model on plain text."""
    text = shared.write_text(work / "text.txt")
    verdict = [word for word in few if not word.startswith("--seeds=")]
    inner = [f"--pretrain.{word[2:]}" for word in SMALL if not word.startswith(("--model.", "--tokenizer.vocab_size"))]
    out = work / "run-masked"
    call("distil", work / "masked", text, "--student", "layers=1", "--output", out, *inner, *verdict)
    return run_of(out)


def ranks(work: Path, quick: bool) -> Probes:
    """Probe training on two ranks, with replicated and with sharded weights."""
    if quick:
        return {}
    text = shared.write_text(work / "text.txt")
    model, data = make_encoder(work / "model", "masked"), shared.write_data(work / "data", "single")
    tune = ["finetune", "classify", str(data), "--model", str(model), *STEPS, *settings(eval_baseline="false")]
    probes: Probes = {}
    for name, words in (
        ("classify", tune),
        ("classify, parts", [*tune, *settings(train__data_parallel_shard_degree='"all"')]),
        ("masked", ["pretrain", str(text), *SMALL]),
    ):
        out = work / name.replace(", ", "-")
        shared.run(*words, "--nproc", "2", "--output", str(out))
        probes[name] = run_of(out)
    return probes


# -- random draws -----------------------------------------------------------------------------------------------------


def drawing(work: Path, quick: bool) -> Probes:
    """Probe the order of samples, the masks and the dropout of fixed seeds."""
    import torch

    from heedful.data.sampler import BatchSampler
    from heedful.nn.dropout import dropout
    from heedful.objectives.base import Sample
    from heedful.objectives.causal_lm import CausalLM
    from heedful.objectives.masked_lm import MaskedLM
    from heedful.objectives.permutation_lm import PermutationLM
    from heedful.tokenizer import Tokenizer

    order = BatchSampler(num_samples=37, batch_size=8, seed=5)
    plans = [order.plan(step) for step in range(12)]
    probes: Probes = {"order": [[plan.epoch, plan.indices.tolist(), list(plan.keys)] for plan in plans]}
    probes["order, versions"] = [list(order.plan(step, num_static_masks=2).keys) for step in range(12)]
    work.joinpath("words").mkdir()
    shared.write_vocabulary(work / "words")
    words = Tokenizer.load(work / "words")
    ids, types = shared.sequences("bert")
    samples = [Sample.of([token_ids], [kinds]) for token_ids, kinds in zip(ids, types, strict=True)]
    for name, objective in (
        ("masked tokens", MaskedLM(tokenizer=words)),
        ("masked words", MaskedLM(tokenizer=words, mask_prob=0.3, mask_unit="words")),
        ("masked spans", MaskedLM(tokenizer=words, mask_prob=0.3, mask_unit="spans")),
        ("causal", CausalLM(tokenizer=words)),
        ("permuted", PermutationLM(tokenizer=words, share=0.3)),
    ):
        batches = [objective.batch(samples, [seed, seed + 1, seed + 2, seed + 3]) for seed in (0, 100)]
        probes[name] = [
            [digest(tensor) for tensor in (batch.packed.tokens, batch.targets, batch.rows) if tensor is not None]
            for batch in batches
        ]
    torch.manual_seed(9)
    probes["dropout"] = [digest(dropout(torch.ones(7, 33), p)) for p in (0.1, 0.5)]
    return probes


def decoding(work: Path, quick: bool) -> Probes:
    """Probe the texts and tokens of greedy decoding, beam search and sampling."""
    import torch

    from heedful.infer.engine import Engine
    from heedful.model.decode import BeamSearch, Greedy, Sampling
    from heedful.tasks.generation import GenerationConfig

    ways: dict[str, Any] = {
        "greedy": Greedy(),
        "sample": Sampling(temperature=1.3, top_k=6),
        "nucleus": Sampling(temperature=0.9, top_p=0.8),
        "beams": BeamSearch(num_beams=4, num_return_sequences=3),
        "beams, gnmt": BeamSearch(
            num_beams=3, num_return_sequences=2, normalization="gnmt", length_penalty=0.6, early_stopping=True
        ),
    }
    probes: Probes = {}
    for family in ("gpt2", "t5"):
        folder = make_generator(work / family, family)
        for precision in ("float32", "bfloat16"):
            for name, how in ways.items():
                writing = GenerationConfig(how=how, max_new_tokens=12, seed=3)
                if precision == "float32":
                    engine = Engine(folder, writing=writing)
                else:
                    engine = Engine(folder, dtype=torch.bfloat16, writing=writing)
                probes[f"{family} {name} {precision}"] = engine(["a b c", "h", "d e a a b"])
    return probes


# -- answers ----------------------------------------------------------------------------------------------------------

QUESTION = {"question": "who wrote it ?", "context": "In Paris, Ada wrote the first program ."}
CHOICE = {"prompt": "the cat", "choices": ["sat on the mat", "ran"]}
LONG = " ".join(["ada lives in paris and zed wrote the first program"] * 20)


def predictions(work: Path, quick: bool) -> Probes:
    """Probe the answers of `heedful predict` for each head."""
    texts = ["the cat sat .", LONG]
    arguments: dict[str, list[str]] = {
        "masked": ["the [MASK] sat on [MASK]", "--top-k", "3"],
        "next": ["the cat", "--pair", "ran"],
        "pretraining": ["the [MASK] sat"],
        "single": texts,
        "multiple": texts,
        "regression": texts,
        "tag": ["ada lives in paris .", LONG],
        "span": [QUESTION["context"], "--question", QUESTION["question"]],
        "choice": ["the cat", "--choice", "sat on the mat", "--choice", "ran"],
    }
    probes: Probes = {}
    for name, words in arguments.items():
        probes[name] = answers(call("predict", make_encoder(work / name, name), *words, "--json"))
    probes["embed"] = answers(call("predict", make_embedder(work / "embed"), *texts, "--json"))
    letters = make_generator(work / "gpt2", "gpt2")
    for name, words in (
        ("greedy", ["--max-new-tokens", "6"]),
        ("beams", ["--max-new-tokens", "6", "--num-beams", "3"]),
        ("sampling", ["--max-new-tokens", "6", "--temperature", "1.5", "--seed", "4"]),
    ):
        probes[name] = answers(call("predict", letters, "a b c", "d", *words, "--json"))
    data = shared.write_data(work / "data", "single") / "test.csv"
    call("predict", work / "single", "--file", data, "--output", work / "answers.jsonl", "--format", "jsonl", "--json")
    probes["file"] = answers((work / "answers.jsonl").read_text())
    probes["evaluate"] = without(json.loads(call("evaluate", work / "single", "--data", data, "--json")))
    return probes


def answers(text: str) -> list[Any]:
    """Parse lines of JSON."""
    return [json.loads(line) for line in text.splitlines()]


ROUTES: list[tuple[str, str, Any]] = [  # name of the probe, path, body
    ("embed", "/embed", {"inputs": ["the cat", "", LONG]}),
    ("embed, plain", "/embed", {"inputs": "the cat", "normalize": False, "dimensions": 5}),
    ("embeddings", "/v1/embeddings", {"input": ["the cat", "a dog"], "model": "embed"}),
    ("similarity", "/similarity", {"inputs": {"source_sentence": "the cat", "sentences": ["the cat", "she ran"]}}),
    ("rerank", "/rerank", {"query": "a cat", "texts": ["she", "the cat"], "model": "embed", "return_text": True}),
    ("rerank, pairs", "/rerank", {"query": "a cat", "texts": ["she", "the cat"], "model": "regression"}),
    ("classify", "/predict", {"inputs": "the cat sat", "model": "single"}),
    ("several labels", "/predict", {"inputs": [["the cat"], ["a", "b"]], "model": "multiple"}),
    ("tag", "/token-classification", {"inputs": ["Ada lives in Paris .", LONG]}),
    ("questions", "/question-answering", {"inputs": [QUESTION, {"question": "", "context": ""}]}),
    ("choices", "/multiple-choice", {"inputs": [CHOICE]}),
    ("follows", "/next-sentence", {"inputs": [["the cat", "ran"]], "model": "pretraining"}),
    ("fill", "/fill-mask", {"inputs": ["the [MASK] sat", "no mask"], "top_k": 3}),
    ("generate", "/generate", {"inputs": "a b", "max_new_tokens": 4}),
    ("generate, beams", "/generate", {"inputs": ["a b", "c"], "max_new_tokens": 4, "num_beams": 2}),
    ("generate, sampling", "/generate", {"inputs": ["a b", "c"], "max_new_tokens": 4, "temperature": 1.5, "seed": 3}),
    ("attention", "/attention", {"inputs": ["the cat", "a dog"], "heads": [0, 3], "model": "next"}),
    ("tokenize", "/tokenize", {"inputs": ["the cat", ""], "add_special_tokens": False}),
]


def server(work: Path, quick: bool) -> Probes:
    """Probe the replies of the server's routes."""
    from heedful.serve.run import background

    folders = {name: str(make_encoder(work / name, name)) for name in HEADS if name != "bare"}
    folders["embed"] = str(make_embedder(work / "embed"))
    folders["write"] = str(make_generator(work / "write", "gpt2"))
    with background(folders) as running:
        replies = {name: shared.post(running.port, path, body) for name, path, body in ROUTES}
        replies["info"] = shared.post(running.port, "/info?model=tag")
    return replies


# -- resuming ---------------------------------------------------------------------------------------------------------


def resuming(work: Path, quick: bool) -> Probes:
    """Probe a run that gets SIGTERM and resumes, and a run that does not; their weights must be equal."""
    if quick:
        return {}
    model, data = make_encoder(work / "model", "masked"), shared.write_data(work / "data", "single")
    options = [word.replace("max_steps=30", "max_steps=200") for word in STEPS]
    options += settings(fit__eval_every_epochs=10.0, eval_baseline="false")  # few checkpoints
    words = ["finetune", "classify", str(data), "--model", str(model), *options]
    shared.run(*words, "--output", str(work / "whole"))
    status = shared.terminate_after([*words, "--output", str(work / "killed")], work / "killed" / "journal.jsonl", 60)
    if (work / "killed" / "results.json").exists():
        raise RuntimeError("the run ended before it was to be resumed")
    shared.run(*words, "--output", str(work / "killed"))
    whole, killed = run_of(work / "whole"), run_of(work / "killed")
    for key in ("weights", "journal"):
        if whole[key] != killed[key]:
            raise RuntimeError(f"the {key} of the resumed run differ from those of the run that was not stopped")
    return {"status": status, "whole": whole, "resumed": killed}


# -- settings ---------------------------------------------------------------------------------------------------------


def defaults(work: Path, quick: bool) -> Probes:
    """Probe the default settings of all tasks, objectives and commands."""
    from heedful.runs.distil.settings import LOSS_PRESETS, DistilSettings, MaskedDistilSettings
    from heedful.runs.finetune import settings
    from heedful.runs.pretrain import settings as pretrain_settings
    from heedful.runs.pretrain import specs as pretrain_specs
    from heedful.serve.settings import Limits, Timeouts
    from heedful.settings import to_mapping
    from heedful.tasks.specs import SPECS
    from heedful.tokenizer.settings import TokenizerSettings

    probes: Probes = {}
    for name in SPECS:
        for examples in (100, 30_000):
            preset, _ = settings.finetune_defaults(name, examples, random_init=False)
            probes[f"finetune, {TASKS_BEFORE.get(name, name)}, {examples}"] = to_mapping(preset)
    for name in pretrain_specs.OBJECTIVES:
        probes[f"pretrain, {KINDS_BEFORE[name]}"] = to_mapping(
            pretrain_settings.pretrain_defaults(name, 256, continued=False)
        )
    probes["distil"] = to_mapping(DistilSettings(task=SPECS["classify"].settings(), teacher="t"))
    probes["distil, masked"] = to_mapping(MaskedDistilSettings(teacher="t"))
    probes |= {f"losses, {LOSSES_BEFORE[name]}": to_mapping(losses) for name, losses in LOSS_PRESETS.items()}
    probes["limits"] = to_mapping(Limits())
    probes["timeouts"] = to_mapping(Timeouts())
    probes["tokenizer"] = to_mapping(TokenizerSettings(vocab_size=1000))
    return {name: as_before(value) for name, value in probes.items()}


SECTIONS = {
    "outputs": outputs,
    "training": training,
    "pretraining": pretraining,
    "distillation": distillation,
    "ranks": ranks,
    "drawing": drawing,
    "decoding": decoding,
    "predictions": predictions,
    "server": server,
    "resuming": resuming,
    "defaults": defaults,
}

if __name__ == "__main__":
    shared.main(SECTIONS)
