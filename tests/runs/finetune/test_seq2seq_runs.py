"""Seq2seq runs with encoder-decoders and with decoders alone: training, evaluation, card, command line and plots."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import transformers

import heedful
from heedful.checkpoint import BundleConfig, ModelBundle, create, load
from heedful.checkpoint.new_head import with_head
from heedful.cli import main
from heedful.data import DataSettings
from heedful.errors import HeedfulError, HeedfulWarning
from heedful.families import FAMILIES
from heedful.families import heedful as heedful_family
from heedful.model.config import NextToken
from heedful.model.decode import Sampling, stream
from heedful.model.initialise import skip_init
from heedful.packed import Packed
from heedful.runs import evaluate as evaluation
from heedful.runs.evaluate import Evaluated, evaluate
from heedful.runs.finetune import settings
from heedful.runs.finetune.build import build_task, encoding_notes, initial_model
from heedful.runs.finetune.init_settings import Positions, TransformerInit
from heedful.runs.finetune.plan import plan_finetune
from heedful.runs.finetune.run import finetune
from heedful.runs.finetune.seq2seq import transformer_config
from heedful.runs.plots.alignments import MAX_TOKENS, SPACE, _token_labels, compute_alignment, plot_run_alignments
from heedful.runs.plots.figures import draw_run_plots
from heedful.runs.results import RunResult
from heedful.tasks.generation import GenerationConfig
from heedful.tasks.specs import seq2seq
from heedful.tasks.specs.seq2seq import Seq2SeqSettings
from heedful.tokenizer import TokenizerSettings, train_tokenizer
from heedful.train.fit import Reporter
from tests.support.reporters import Messages

SUBJECTS = ("ada", "ben", "eva", "dan")
OBJECTS = ("a cat", "the dog", "a tree", "birds", "the sea", "him")
PAIRS = [  # source text and target text
    (f"{subject} sees {thing} today", f"yesterday {subject} saw {thing}") for subject in SUBJECTS for thing in OBJECTS
]
ALL_TEXTS = [text for pair in PAIRS for text in pair]
TRAINING = ("train.epochs=3", "train.optimizer.lr=5e-3", "task.max_new_tokens=12")


def write_pairs(path: Path, pairs: Iterable[tuple[str, str]]) -> None:
    """Write pairs of source and target texts to a CSV file."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("source", "target"), *pairs])


def write_predictions(path: Path, pairs: Iterable[tuple[str, str]]) -> None:
    """Write pairs of an input and a predicted text to a file of predictions."""
    lines = [
        json.dumps({"id": number, "input": text, "prediction": prediction})
        for number, (text, prediction) in enumerate(pairs)
    ]
    path.write_text("\n".join(lines))


@pytest.fixture(scope="module")
def data_and_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data.csv and with tiny models: both (encoder and decoder), alone (a decoder) and encoder."""
    folder = tmp_path_factory.mktemp("data_and_models")
    write_pairs(folder / "data.csv", PAIRS)
    tokenizer = train_tokenizer(ALL_TEXTS, TokenizerSettings(algorithm="unigram", vocab_size=90, max_length=48))
    pad = tokenizer.special.pad
    vocabulary: dict[str, Any] = {
        "vocab_size": tokenizer.size,
        "pad_token_id": pad,
        "eos_token_id": tokenizer.special.eos_or_sep,
    }
    torch.manual_seed(0)
    t5 = transformers.T5Config(
        **vocabulary, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, decoder_start_token_id=pad
    )
    gpt2 = transformers.GPT2Config(**vocabulary, n_positions=48, n_embd=32, n_layer=1, n_head=4, bos_token_id=0)
    bert = transformers.BertConfig(
        vocab_size=tokenizer.size,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=48,
    )
    models = {
        "both": transformers.T5ForConditionalGeneration(t5),
        "alone": transformers.GPT2LMHeadModel(gpt2),
        "encoder": transformers.BertModel(bert),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tokenizer.save(folder / name)
    return folder


def test_a_token_that_is_a_space_is_shown_as_one() -> None:
    """In the labels of a plot, a space has a sign, and each byte of an emoji has the whole emoji."""
    emoji = "\N{GRINNING FACE}"
    tokenizer = train_tokenizer(["a cat"] * 3, TokenizerSettings(algorithm="bpe", vocab_size=264))
    encoding = tokenizer.encode(f"a {emoji}")
    all_labels = _token_labels(encoding, f"a {emoji}", tokenizer)
    labels = [label for label, is_special in zip(all_labels, encoding.special, strict=True) if not is_special]
    assert labels == ["a", SPACE, *[emoji] * 4]


@pytest.mark.parametrize("name", ["both", "alone"])
def test_a_run(data_and_models: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Check the results, predictions and model folder of a run, and the commands that use the model."""
    data, run = data_and_models / "data.csv", tmp_path / "run"
    has_encoder = name == "both"
    result = finetune("seq2seq", data, output_dir=run, model=data_and_models / name, assignments=TRAINING)

    assert result.status == "completed"
    assert result.results["metric"] == "f1"
    scores = result.results["splits"]["dev"]["numbers"]
    assert scores.keys() == {"exact", "f1", "count", "bleu", "signature", "notes"}
    assert scores["count"] > 0
    predictions = [json.loads(line) for line in (run / "predictions-dev.jsonl").read_text().splitlines()]
    assert len(predictions) == scores["count"]
    assert {"label", "prediction", "correct"} <= predictions[0].keys()
    assert max(prediction["answer"]["tokens"] for prediction in predictions) <= 12

    card = (run / "model/README.md").read_text()
    assert ("AutoModelForSeq2SeqLM" in card) == has_encoder
    assert ("AutoModelForCausalLM" in card) == (not has_encoder)
    assert "one pass over a text, all tokens at once" in card
    assert load(run).text_suffix == ("" if has_encoder else "\n")
    assert evaluate(run, data, split="train").numbers["count"] == len(PAIRS)

    model_class = transformers.T5ForConditionalGeneration if has_encoder else transformers.GPT2LMHeadModel
    _, report = model_class.from_pretrained(run / "model", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]

    def predict(*options: str) -> str:
        """Return what the predict command prints for one text."""
        with pytest.raises(SystemExit) as stop:
            main(["predict", str(run), "ada sees the cat today", "--max-new-tokens", "5", *options])
        assert not stop.value.code
        return capsys.readouterr().out

    assert len(predict().splitlines()) == 3
    (best,) = map(json.loads, predict("--num-beams", "3", "--json").splitlines())
    assert len(best["alternatives"]) == 2
    assert best["tokens"] <= 5
    sampled = {predict("--temperature", "2", "--seed", seed) for seed in "123456"}
    assert len(sampled) > 1


def test_evaluate_generates_as_the_run_did(
    data_and_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`evaluate` uses the run's beams, length and metric, but F1 in place of BLEU if sacrebleu is not installed."""
    monkeypatch.setattr("heedful.runs.run.measure_latency", lambda loaded: {})
    data, run = data_and_models / "data.csv", tmp_path / "run"
    assignments = (*TRAINING, "task.num_beams=3", "task.metric=bleu")
    result = finetune("seq2seq", data, output_dir=run, model=data_and_models / "both", assignments=assignments)

    def evaluate_run(predictions_file: str) -> Evaluated:
        return evaluate(run, data, split="dev", settings=DataSettings(), predictions=tmp_path / predictions_file)

    evaluated = evaluate_run("dev.jsonl")
    assert evaluated.metric == result.results["metric"] == "bleu"
    assert json.loads(json.dumps(evaluated.numbers)) == result.results["splits"]["dev"]["numbers"]
    assert (tmp_path / "dev.jsonl").read_bytes() == (run / "predictions-dev.jsonl").read_bytes()

    # A benchmark evaluates a loaded model, so it passes the run's generation settings.
    generation = evaluation.run_generation(run)
    of_loaded = evaluate(load(run), data, split="dev", settings=DataSettings(), generation=generation)
    assert of_loaded.numbers == evaluated.numbers

    monkeypatch.setattr(evaluation, "has_bleu", lambda: False)
    with pytest.warns(HeedfulWarning, match=r"run ranked models by BLEU, but sacrebleu is not installed: F1 is"):
        assert evaluate_run("other.jsonl").metric == "f1"


def test_without_sacrebleu_f1_ranks_models(
    data_and_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without sacrebleu, a plan with random weights ranks models by F1, and refuses BLEU before it reads the data."""
    for module in (settings, seq2seq):
        monkeypatch.setattr(module, "has_bleu", lambda: False)
    plan = plan_finetune("seq2seq", data_and_models / "data.csv", assignments=("init.kind=transformer",))
    assert isinstance(plan.settings.task, Seq2SeqSettings)
    assert plan.settings.task.metric == "f1"
    assert "compared by F1 of words, since sacrebleu, for BLEU, is not installed" in plan.why

    with_bleu = ("init.kind=transformer", "task.metric=bleu")
    with pytest.raises(HeedfulError, match=r"^task.metric is bleu, which needs sacrebleu, and that is not installed"):
        plan_finetune("seq2seq", tmp_path / "missing.csv", assignments=with_bleu)


@pytest.mark.parametrize(
    ("targets", "metric", "bleu_tokenizer", "reason"),
    [
        (["rot", "eine rote Katze"], "bleu", "char", "BLEU of characters, since most targets have fewer than 4 words"),
        (["我爱北京天安门", "他在学校里读书。"], "bleu", "char", "BLEU of characters, since most"),
        (["7", "ja"], "f1", "13a", "F1 of words, since most targets have fewer than 4 characters"),
        (["eine rote Katze schläft", "ja"], "bleu", "13a", ""),
    ],
)
def test_bleu_ranks_models_only_if_most_targets_are_long_enough(
    tmp_path: Path, targets: list[str], metric: str, bleu_tokenizer: str, reason: str
) -> None:
    """BLEU ranks models if most targets of dev have four words or characters: it counts sequences of up to four."""
    lines = [json.dumps({"source": f"text {number}", "target": target}) for number, target in enumerate(targets)]
    for split in ("train", "dev"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines), encoding="utf-8")

    def plan(*assignments: str) -> tuple[Seq2SeqSettings, str]:
        """Return the settings of the task, and the plan's reasons."""
        finetune_plan = plan_finetune("seq2seq", tmp_path, assignments=("init.kind=transformer", *assignments))
        assert isinstance(finetune_plan.settings.task, Seq2SeqSettings)
        return finetune_plan.settings.task, finetune_plan.why

    task, reasons = plan()
    assert task.metric == metric
    assert task.bleu == bleu_tokenizer
    assert reason in reasons
    assert ("compared by" in reasons) == bool(reason)
    assert plan("task.metric=f1")[0].metric == "f1"
    if not reason:
        return
    refusal = r"^task.metric is bleu, .* most targets have fewer words with task.bleu=13a"
    with pytest.raises(HeedfulError, match=refusal):
        plan("task.metric=bleu", "task.bleu=13a")
    if "我" in targets[0]:
        assert plan("task.bleu=zh")[0] == replace(task, bleu="zh")


@pytest.mark.parametrize(
    ("tokenizer_assignments", "inexact", "case"),
    [
        ((), 0, "mixed"),
        (("algorithm=wordpiece",), 1, "mixed"),
        (("algorithm=wordpiece", "lower_case=true"), 2, "lc"),
    ],
)
def test_targets_that_the_tokenizer_does_not_decode_exactly_are_counted(
    tmp_path: Path, tokenizer_assignments: tuple[str, ...], inexact: int, case: str
) -> None:
    """A note counts the targets that the tokenizer decodes differently, and a lower-case tokenizer changes BLEU.

    WordPiece decodes "well-known" as "well - known". A tokenizer of lower-case text cannot decode "He" either, so BLEU
    then ignores case.
    """
    pairs = [
        ("he is known", "He is known."),
        ("he is well known", "he is well-known."),
        ("it is a cat", "it is a cat."),
    ]
    write_pairs(tmp_path / "data.csv", pairs)
    assignments = (
        "init.kind=transformer",
        "init.layers=1",
        "init.width=16",
        "init.heads=2",
        "data.dev_fraction=0",
        "init.tokenizer.vocab_size=300",
        *(f"init.tokenizer.{assignment}" for assignment in tokenizer_assignments),
        "task.max_new_tokens=3",
    )
    plan = plan_finetune("seq2seq", tmp_path / "data.csv", assignments=assignments)
    new_model = initial_model(plan.settings.init, plan.source, plan.stats.counts, 0, None, lambda text: None)
    task, _ = build_task(plan.settings, plan.source, plan.stats, new_model)
    examples = list(plan.source.examples("train"))

    notes = encoding_notes(task.encode_split(examples))
    assert "3 training examples have targets that are longer than evaluations generate (task.max_new_tokens=3)" in notes
    inexact_notes = [note for note in notes if "the tokenizer does not decode exactly" in note]
    assert sum(int(note.split()[0]) for note in inexact_notes) == inexact

    correct_answers = [{"text": target} for _, target in pairs]
    metrics = task.update_metrics(task.new_metrics(), examples, correct_answers, range(3))
    assert f"|case:{case}|" in task.compute_metrics(metrics)["signature"]


RECURRENT = ("init.kind=recurrent",)
NEW_MODELS = {  # assignments of the models that start from random weights
    "recurrent": ("init.kind=recurrent", "init.rnn.width=16", "init.rnn.dropout=0.1"),
    "transformer": (
        *("init.kind=transformer", "init.layers=1", "init.width=16", "init.heads=2"),
        *("init.inner=16", "init.norm_at=pre", "init.positions=learned"),
    ),
}


@pytest.mark.parametrize("name", ["both", "alone", *NEW_MODELS])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(
    data_and_models: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is stopped after two steps and resumed ends as one that was not; new models write as they scored."""
    monkeypatch.setattr("heedful.runs.run.measure_latency", lambda loaded: {})
    is_new = name in NEW_MODELS
    model = "" if is_new else data_and_models / name
    assignments = (*TRAINING, "fit.eval_every_epochs=3")
    if is_new:
        assignments = (*assignments, *NEW_MODELS[name], "init.tokenizer.vocab_size=300")

    def run(folder: str, reporter: Reporter | None = None) -> RunResult:
        return finetune(
            "seq2seq",
            data_and_models / "data.csv",
            tmp_path / folder,
            model=model,
            assignments=assignments,
            reporter=reporter,
        )

    assert run("stopped", Messages(stop_after=2)).status == "interrupted"
    resumed = run("stopped")
    whole = run("whole")
    weights = {folder: (tmp_path / folder / "model/model.safetensors").read_bytes() for folder in ("stopped", "whole")}
    assert weights["stopped"] == weights["whole"]
    assert resumed.results["splits"] == whole.results["splits"]
    if is_new:
        check_new_model(tmp_path / "whole", whole)


def check_new_model(run: Path, result: RunResult) -> None:
    """Check the BLEU signature, the predictions, an alignment and the plots of a run from random weights."""
    assert result.results["metric"] == "bleu"
    signature = result.results["splits"]["dev"]["numbers"]["signature"]
    assert signature.startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    assert signature in (run / "model/README.md").read_text().replace("\\", "")

    loaded = load(run)
    engine = heedful.Engine(loaded, writing=GenerationConfig(max_new_tokens=12))
    for line in (run / "predictions-dev.jsonl").read_text().splitlines():
        prediction = json.loads(line)
        (answer,) = engine([prediction["input"]])
        assert answer["text"] == prediction["prediction"]

    source_text, target_text = PAIRS[0]
    alignment = compute_alignment(loaded, source_text, target_text)
    assert alignment is not None
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.special.eos_or_sep is not None
    assert "ada".startswith(alignment.source[1])
    assert "yesterday".startswith(alignment.target[0])
    assert alignment.target[-1] == loaded.tokenizer.name(loaded.tokenizer.special.eos_or_sep)
    assert alignment.weights.shape == (len(alignment.target), len(alignment.source))
    assert alignment.weights.sum(1) == pytest.approx(1, abs=1e-5)

    write_predictions(run / "predictions-dev.jsonl", PAIRS[:3])  # predictions long enough to plot
    assert run / "plots/alignments.png" in draw_run_plots(run)


@pytest.mark.parametrize(
    ("positions", "norm_at"), [("sine", "post"), *((positions, "pre") for positions in get_args(Positions))]
)
@torch.no_grad()
def test_decoding_gives_the_probabilities_of_training(positions: Any, norm_at: Any) -> None:
    """Decoding with a cache gives each next token the probability that the forward pass of training gives it."""
    settings = TransformerInit(layers=2, width=16, heads=2, inner=24, norm_at=norm_at, positions=positions)
    config = BundleConfig(family="heedful", model=transformer_config(settings, 30), head=NextToken())
    loaded = create(config, seed=2).double().eval()
    assert loaded.head is not None
    sources = [[5, 6, 7, 8], [9]]  # token ids
    generated = [[1], [1]]  # token ids, from the start token
    steps = stream(
        loaded.model,
        loaded.head,
        Packed.of([[1], [1]]),
        Sampling(temperature=2.0),
        source=Packed.of(sources),
        max_new_tokens=4,
        stop=[],
        distribution=True,
    )
    for step in steps:
        assert step.distribution is not None
        for row, number in enumerate(step.sequences):
            scores = loaded(Packed.of([sources[number]]), Packed.of([generated[number]]))
            assert torch.allclose(step.distribution[row], scores[-1].log_softmax(-1), atol=1e-10)
            generated[number].append(step.tokens[row])


@pytest.mark.parametrize(("size", "count"), [("base", 63_082_496), ("big", 214_245_376)])
def test_sizes_are_those_of_the_paper(size: Any, count: int) -> None:
    """The parameter counts are those of Vaswani et al. (2017) with a vocabulary of 37,000.

    Norms before the sublayers need a final norm in each of the two stacks: a weight and a bias of the model's width.
    """
    default = transformer_config(TransformerInit(size=size), 37_000)
    assert heedful_family.write(default) == FAMILIES["heedful"].sizes[f"transformer-{size}"]
    for norm_at, vectors_of_final_norms in (("post", 0), ("pre", 4)):
        settings = TransformerInit(size=size, norm_at=norm_at)  # type: ignore[arg-type]
        model = transformer_config(settings, 37_000)
        with skip_init():
            new_model = ModelBundle(BundleConfig(family="heedful", model=model, head=NextToken()))
        assert new_model.count() == count + vectors_of_final_norms * model.width


def test_location_scores_limit_the_source_and_not_the_target(tmp_path: Path) -> None:
    """With location scores that cover six tokens, a longer source is refused or cut, and targets may be longer."""
    pairs = [("one two", "twenty one words " * 6), ("three", "and a few more " * 5)] * 4
    data, run = tmp_path / "data.csv", tmp_path / "run"
    assignments = (
        *TRAINING,
        *RECURRENT,
        "init.rnn.width=16",
        "init.tokenizer.vocab_size=300",
        "init.rnn.look={kind = 'global', score = 'location', longest = 6}",
        "data.dev_fraction=0",
    )
    write_pairs(data, pairs)
    finetune("seq2seq", data, run, assignments=assignments)
    loaded = load(run)
    assert loaded.max_length == 6
    assert loaded.max_target_length is None
    (answer,) = heedful.Engine(loaded, writing=GenerationConfig(max_new_tokens=40))(["one two"])
    assert answer["tokens"] == 40 or answer["complete"]
    assert evaluate(run, data, split="train").numbers["f1"] >= 0

    long_source = "one two " * 6
    write_pairs(data, [*pairs, (long_source, "twenty one words " * 6)])
    with pytest.raises(HeedfulError, match=r"data.csv:10: .* but this model reads 6 at once: .* set long_inputs"):
        finetune("seq2seq", data, tmp_path / "refused", assignments=assignments)
    plan = plan_finetune("seq2seq", data, assignments=(*assignments, "long_inputs=truncate"))
    new_model = initial_model(plan.settings.init, plan.source, plan.stats.counts, 0, None, lambda text: None)
    task, _ = build_task(plan.settings, plan.source, plan.stats, new_model)
    encoded = task.encode_split(plan.source.examples("train"))
    first, last = encoded.samples[0], encoded.samples[-1]
    assert encoded.truncated == 1
    assert last.bounds[1] == 6
    assert len(last.target) == len(first.target) > 6
    with pytest.raises(HeedfulError, match=r"it has .* tokens, but this model reads 6, and its answer needs all"):
        heedful.Engine(loaded)([long_source])

    assert loaded.tokenizer is not None
    loaded.tokenizer = loaded.tokenizer.limited(4)  # what max_length=4 does when a model is loaded
    assert loaded.max_length == loaded.max_target_length == 4


def test_inputs_that_are_too_long_are_left_out_of_the_plot(tmp_path: Path) -> None:
    """Predictions whose input is too long for the model are left out of the plot of alignments."""
    tokenizer = train_tokenizer(ALL_TEXTS, TokenizerSettings(algorithm="unigram", vocab_size=90, max_length=12))
    settings = TransformerInit(layers=1, width=16, heads=2, inner=16, positions="learned", longest=12)
    config = BundleConfig(family="heedful", model=transformer_config(settings, tokenizer.size))
    new_model = create(config, tokenizer, seed=0)
    heedful.save(with_head(new_model, "language_model", seed=0), tmp_path / "model")
    short, long = "ada sees him", "ada sees the sea today him"
    assert len(tokenizer.encode(short)) < 12 < len(tokenizer.encode(long)) <= MAX_TOKENS

    write_predictions(tmp_path / "predictions-dev.jsonl", [(short, "him"), (long, "him")])
    assert plot_run_alignments(tmp_path, "dev") is not None
    write_predictions(tmp_path / "predictions-dev.jsonl", [(long, "him")])
    assert plot_run_alignments(tmp_path, "dev") is None


def test_a_model_without_a_decoder_is_refused(data_and_models: Path, tmp_path: Path) -> None:
    data = data_and_models / "data.csv"
    with pytest.raises(HeedfulError, match="no model was given, and seq2seq needs one with a decoder"):
        finetune("seq2seq", data, output_dir=tmp_path / "run")
    with pytest.raises(HeedfulError, match="this model has no decoder, so it cannot generate text"):
        finetune("seq2seq", data, output_dir=tmp_path / "run", model=data_and_models / "encoder")


HARD_LOOK_WITH_LENGTH = "init.rnn.look={kind = 'hard', longest = 64}"


@pytest.mark.parametrize(
    ("task", "model", "assignments", "message"),
    [
        ("tag", "", ("init.kind=transformer",), 'init.kind is "transformer", which is for seq2seq, not tag'),
        ("seq2seq", "", ("init.kind=classic",), 'kind is "bag", which reads texts and writes none'),
        ("seq2seq", "both", ("init.kind=transformer",), 'init.model is for init.kind = "pretrained" or'),
        (
            "seq2seq",
            "both",
            ("init.tokenizer.vocab_size=300",),
            "init.tokenizer is for init.kind = .scratch. or init.kind = .recurrent.",
        ),
        ("seq2seq", "", ("init.kind=transformer", "heads=3"), "width is 256 and heads 3; expected an even width"),
        ("seq2seq", "", ("init.kind=transformer", "init.longest=64"), 'longest is 64, .* but positions is "sine"'),
        (
            "seq2seq",
            "",
            (*RECURRENT, "init.rnn.look=none", "init.rnn.feed=false"),
            "feed is false, .* rnn.look is none",
        ),
        ("seq2seq", "", (*RECURRENT, HARD_LOOK_WITH_LENGTH), "longest is for location scores, but look.score"),
        (
            "seq2seq",
            "",
            ("init.kind=transformer", "reinit_layers=2"),
            'init.reinit_layers is for init.kind = "pretrained"',
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    data_and_models: Path, tmp_path: Path, task: str, model: str, assignments: tuple[str, ...], message: str
) -> None:
    folder = data_and_models / model if model else ""
    with pytest.raises(HeedfulError, match=message):
        finetune(task, data_and_models / "data.csv", output_dir=tmp_path / "run", model=folder, assignments=assignments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--num-beams", "2", "--temperature", "1"), "beam search does not sample"),
        (("--pair", "b"), "--pair cannot be used with this model: its language_model head"),
    ],
)
def test_options_of_predict_that_cannot_be_used_are_refused(
    data_and_models: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["predict", str(data_and_models / "both"), "a", *options])
    assert stop.value.code
    assert message in capsys.readouterr().err
