"""Runs that rewrite: with encoder and decoder, or a decoder alone; their folder, their card, the command line."""

from __future__ import annotations

import csv
import json
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
from heedful.train.trainer import Step, Trainer

ROWS = [(f"{who} sees {what} today", f"yesterday {who} saw {what}") for who in ("ada", "ben", "eva", "dan") for what in
        ("a cat", "the dog", "a tree", "birds", "the sea", "him")]  # fmt: skip
SETTINGS = ("train.epochs=3", "train.optimizer.lr=5e-3", "task.max_new_tokens=12")


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """data.csv, and two tiny models with a tokenizer of the same texts."""
    folder = tmp_path_factory.mktemp("labelled")
    with (folder / "data.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("source", "target"), *ROWS])
    words = train_tokenizer(
        [text for row in ROWS for text in row], TokenizerSettings(algorithm="unigram", vocab_size=90, max_length=48)
    )
    ends = {"pad_token_id": words.special.pad, "eos_token_id": words.special.eos_or_sep}
    sizes: dict[str, Any] = {"vocab_size": words.size, **ends}
    torch.manual_seed(0)
    both = transformers.T5Config(
        **sizes, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, decoder_start_token_id=words.special.pad
    )
    alone = transformers.GPT2Config(**sizes, n_positions=48, n_embd=32, n_layer=1, n_head=4, bos_token_id=0)
    for name, model in (
        ("both", transformers.T5ForConditionalGeneration(both)),
        ("alone", transformers.GPT2LMHeadModel(alone)),
        (
            "encoder",
            transformers.BertModel(
                transformers.BertConfig(
                    vocab_size=words.size,
                    hidden_size=32,
                    num_hidden_layers=1,
                    num_attention_heads=4,
                    intermediate_size=48,
                )
            ),
        ),
    ):
        model.save_pretrained(folder / name)
        words.save(folder / name)
    return folder


def test_a_token_that_is_a_space_is_shown_as_one() -> None:
    """Trap: bytes of what was never seen follow a token that is a space alone, which was drawn as its number."""
    words = train_tokenizer(["a cat"] * 3, TokenizerSettings(algorithm="bpe", vocab_size=264))
    encoded = words.encode("a \N{GRINNING FACE}")
    token_labels = _token_labels(encoded, "a \N{GRINNING FACE}", words)
    labels = [label for label, is_special in zip(token_labels, encoded.special, strict=True) if not is_special]
    assert labels == ["a", SPACE, *["\N{GRINNING FACE}"] * 4]


@pytest.mark.parametrize("name", ["both", "alone"])
def test_a_run(labelled: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    done = finetune(
        "seq2seq", labelled / "data.csv", output_dir=tmp_path / "run", model=labelled / name, assignments=SETTINGS
    )
    assert done.status == "completed" and done.results["metric"] == "f1"
    numbers = done.results["splits"]["dev"]["numbers"]
    assert numbers.keys() == {"exact", "f1", "count", "bleu", "signature", "notes"} and numbers["count"] > 0
    lines = [json.loads(line) for line in (tmp_path / "run/predictions-dev.jsonl").read_text().splitlines()]
    assert len(lines) == numbers["count"] and {"label", "prediction", "correct"} <= lines[0].keys()
    assert max(line["answer"]["tokens"] for line in lines) <= 12
    card = (tmp_path / "run/model/README.md").read_text()
    assert ("AutoModelForSeq2SeqLM" in card) == (name == "both") and ("AutoModelForCausalLM" in card) == (
        name == "alone"
    )
    assert "one pass over a text, all tokens at once" in card
    assert load(tmp_path / "run").text_suffix == ("" if name == "both" else "\n")
    again = evaluate(tmp_path / "run", labelled / "data.csv", split="train")
    assert again.numbers["count"] == len(ROWS)

    class_ = transformers.T5ForConditionalGeneration if name == "both" else transformers.GPT2LMHeadModel
    _, report = class_.from_pretrained(tmp_path / "run/model", output_loading_info=True)
    assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), report

    def predict(*more: str) -> str:
        with pytest.raises(SystemExit) as stop:
            main(["predict", str(tmp_path / "run"), "ada sees the cat today", "--max-new-tokens", "5", *more])
        assert not stop.value.code
        return capsys.readouterr().out

    assert len(predict().splitlines()) == 3
    (beams,) = map(json.loads, predict("--num-beams", "3", "--json").splitlines())
    assert len(beams["alternatives"]) == 2 and beams["tokens"] <= 5
    assert len({predict("--temperature", "2", "--seed", seed) for seed in "123456"}) > 1


def test_evaluate_writes_as_the_run_did(labelled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beams, tokens and metric are those of the run; F1 replaces BLEU where sacrebleu is not installed."""
    monkeypatch.setattr("heedful.runs.run.measure_latency", lambda loaded: {})
    run, wishes = tmp_path / "run", (*SETTINGS, "task.num_beams=3", "task.metric=bleu")
    done = finetune("seq2seq", labelled / "data.csv", output_dir=run, model=labelled / "both", assignments=wishes)

    def again(name: str) -> Evaluated:
        how: dict[str, Any] = {"split": "dev", "settings": DataSettings(), "predictions": tmp_path / name}
        return evaluate(run, labelled / "data.csv", **how)

    predictions = again("dev.jsonl")
    assert predictions.metric == done.results["metric"] == "bleu"
    assert json.loads(json.dumps(predictions.numbers)) == done.results["splits"]["dev"]["numbers"]
    assert (tmp_path / "dev.jsonl").read_bytes() == (run / "predictions-dev.jsonl").read_bytes()
    whole = evaluate(
        load(run),
        labelled / "data.csv",
        split="dev",
        settings=DataSettings(),
        generation=evaluation.run_generation(run),
    )
    assert whole.numbers == predictions.numbers, "as bench measures it"
    monkeypatch.setattr(evaluation, "has_bleu", lambda: False)
    with pytest.warns(HeedfulWarning, match=r"run ranked models by BLEU, but sacrebleu is not installed: F1 is"):
        assert again("other.jsonl").metric == "f1"


def test_what_leads_is_known_before_the_work(labelled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without sacrebleu a model from random weights is compared by F1, and BLEU that is asked for is refused."""
    for each in (settings, seq2seq):
        monkeypatch.setattr(each, "has_bleu", lambda: False)
    wishes = ("init.kind=transformer",)
    plan = plan_finetune("seq2seq", labelled / "data.csv", assignments=wishes)
    assert isinstance(plan.settings.task, Seq2SeqSettings) and plan.settings.task.metric == "f1"
    assert "compared by F1 of words, since sacrebleu, for BLEU, is not installed" in plan.why
    with pytest.raises(HeedfulError, match=r"^task.metric is bleu, which needs sacrebleu, and that is not installed"):
        plan_finetune("seq2seq", labelled / "none.csv", assignments=(*wishes, "task.metric=bleu"))


@pytest.mark.parametrize(
    ("targets", "leads", "words", "why"),
    [
        (["rot", "eine rote Katze"], "bleu", "char", "BLEU of characters, since most targets have fewer than 4 words"),
        (["我爱北京天安门", "他在学校里读书。"], "bleu", "char", "BLEU of characters, since most"),
        (["7", "ja"], "f1", "13a", "F1 of words, since most targets have fewer than 4 characters"),
        (["eine rote Katze schläft", "ja"], "bleu", "13a", ""),
    ],
)
def test_bleu_leads_only_where_it_can(tmp_path: Path, targets: list[str], leads: str, words: str, why: str) -> None:
    """Where most targets of dev have four of what it counts; else it is 0, or a matter of few texts."""
    rows = [json.dumps({"source": f"text {number}", "target": text}) for number, text in enumerate(targets)]
    for split in ("train", "dev"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(rows), encoding="utf-8")

    def planned(*wishes: str) -> tuple[Seq2SeqSettings, str]:
        plan = plan_finetune("seq2seq", tmp_path, assignments=("init.kind=transformer", *wishes))
        assert isinstance(plan.settings.task, Seq2SeqSettings)
        return plan.settings.task, plan.why

    task, notes = planned()
    assert (task.metric, task.bleu) == (leads, words) and why in notes and ("compared by" in notes) == bool(why)
    assert planned("task.metric=f1")[0].metric == "f1"
    if not why:
        return
    with pytest.raises(
        HeedfulError, match=r"^task.metric is bleu, .* most targets have fewer words with task.bleu=13a"
    ):
        planned("task.metric=bleu", "task.bleu=13a")
    if "我" in targets[0]:
        assert planned("task.bleu=zh")[0] == replace(task, bleu="zh")


@pytest.mark.parametrize(
    ("wishes", "changed", "case"),
    [((), 0, "mixed"), (("algorithm=wordpiece",), 1, "mixed"), (("algorithm=wordpiece", "lower_case=true"), 2, "lc")],
)
def test_pieces_that_do_not_give_texts_back(tmp_path: Path, wishes: tuple[str, ...], changed: int, case: str) -> None:
    """How many rewritings come back otherwise is told; BLEU is in lower case where nothing else can be written."""
    rows = [("he is known", "He is known."), ("he is well known", "he is well-known."), ("it is a cat", "it is a cat.")]
    with (tmp_path / "data.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("source", "target"), *rows])
    small = ("init.kind=transformer", "init.layers=1", "init.width=16", "init.heads=2", "data.dev_fraction=0")
    pieces = (
        *small,
        "init.tokenizer.vocab_size=300",
        *(f"init.tokenizer.{wish}" for wish in wishes),
        "task.max_new_tokens=3",
    )
    plan = plan_finetune("seq2seq", tmp_path / "data.csv", assignments=pieces)
    base = initial_model(plan.settings.init, plan.source, plan.stats.counts, 0, None, lambda text: None)
    task, _ = build_task(plan.settings, plan.source, plan.stats, base)
    notes = encoding_notes(task.encode_split(plan.source.examples("train")))
    assert "3 training examples have targets that are longer than evaluations generate (task.max_new_tokens=3)" in notes
    assert sum(int(note.split()[0]) for note in notes if "the tokenizer does not decode exactly" in note) == changed
    right = [{"text": text} for _, text in rows]
    metrics = task.compute_metrics(
        task.update_metrics(task.new_metrics(), list(plan.source.examples("train")), right, range(3))
    )
    assert f"|case:{case}|" in metrics["signature"]


TWO, LOOK = ("init.kind=recurrent",), "init.rnn.look={kind = 'hard', longest = 64}"
FRESH = {
    "recurrent": ("init.kind=recurrent", "init.rnn.width=16", "init.rnn.dropout=0.1"),
    "transformer": (
        *("init.kind=transformer", "init.layers=1", "init.width=16", "init.heads=2"),
        *("init.inner=16", "init.norm_at=pre", "init.positions=learned"),
    ),
}


@pytest.mark.parametrize("name", ["both", "alone", *FRESH])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(
    labelled: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("heedful.runs.run.measure_latency", lambda loaded: {})
    how: dict[str, Any] = {"model": labelled / name} if name not in FRESH else {}
    assignments = (
        *SETTINGS,
        "fit.eval_every_epochs=3",
        *FRESH.get(name, ()),
        *(() if how else ("init.tokenizer.vocab_size=300",)),
    )

    class Stop(Reporter):
        """Asks for a stop after the second step."""

        def step(self, step: Step, trainer: Trainer) -> None:
            trainer.stop_requested = step.number == 2

    def run(folder: str, reporter: Reporter | None = None) -> RunResult:
        return finetune(
            "seq2seq", labelled / "data.csv", tmp_path / folder, assignments=assignments, reporter=reporter, **how
        )

    assert run("parted", Stop()).status == "interrupted"
    parted, whole = run("parted"), run("whole")
    one, other = ((tmp_path / folder / "model/model.safetensors").read_bytes() for folder in ("parted", "whole"))
    assert one == other and parted.results["splits"] == whole.results["splits"]
    if name not in FRESH:
        return
    assert whole.results["metric"] == "bleu"
    signature = whole.results["splits"]["dev"]["numbers"]["signature"]
    assert signature.startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    assert signature in (tmp_path / "whole/model/README.md").read_text().replace("\\", "")
    loaded = load(tmp_path / "whole")
    for line in (tmp_path / "whole/predictions-dev.jsonl").read_text().splitlines():
        (again,) = heedful.Engine(loaded, writing=GenerationConfig(max_new_tokens=12))([json.loads(line)["input"]])
        assert again["text"] == json.loads(line)["prediction"]

    attention = compute_alignment(loaded, *ROWS[0])
    assert attention is not None and loaded.tokenizer is not None and loaded.tokenizer.special.eos_or_sep is not None
    assert (
        attention.source[1] == "ada"[: len(attention.source[1])]
        and attention.target[0] == "yesterday"[: len(attention.target[0])]
    )
    assert attention.target[-1] == loaded.tokenizer.name(loaded.tokenizer.special.eos_or_sep)
    assert attention.weights.shape == (len(attention.target), len(attention.source))
    assert attention.weights.sum(1) == pytest.approx(1, abs=1e-5)
    lines = [
        json.dumps({"id": n, "input": text, "prediction": predictions})
        for n, (text, predictions) in enumerate(ROWS[:3])
    ]
    (tmp_path / "whole/predictions-dev.jsonl").write_text("\n".join(lines))
    assert tmp_path / "whole/plots/alignments.png" in draw_run_plots(tmp_path / "whole")


@pytest.mark.parametrize(("positions", "norm_at"), [("sine", "post"), *((each, "pre") for each in get_args(Positions))])
@torch.no_grad()
def test_each_transformer_writes_what_it_was_trained_to(positions: Any, norm_at: Any) -> None:
    """With remembered rows as without, whatever its positions are."""
    settings = TransformerInit(layers=2, width=16, heads=2, inner=24, norm_at=norm_at, positions=positions)
    config = BundleConfig(family="heedful", model=transformer_config(settings, 30), head=NextToken())
    loaded, source = create(config, seed=2).double().eval(), [[5, 6, 7, 8], [9]]
    assert loaded.head is not None
    texts, reads = [[1], [1]], {"prompts": Packed.of([[1], [1]]), "source": Packed.of(source)}
    how = Sampling(temperature=2.0)
    for at in stream(loaded.model, loaded.head, method=how, max_new_tokens=4, stop=[], distribution=True, **reads):
        assert at.distribution is not None
        for row, number in enumerate(at.sequences):
            whole = loaded(Packed.of([source[number]]), Packed.of([texts[number]]))[-1].log_softmax(-1)
            assert torch.allclose(at.distribution[row], whole, atol=1e-10)
            texts[number].append(at.tokens[row])


@pytest.mark.parametrize(("size", "count"), [("base", 63_082_496), ("big", 214_245_376)])
def test_sizes_are_those_of_the_paper(size: Any, count: int) -> None:
    """With a vocabulary of 37,000 (CORRECTNESS, B.1); pre-norm has a norm more at the end of each stack."""
    usual = transformer_config(TransformerInit(size=size), 37_000)
    assert heedful_family.write(usual) == FAMILIES["heedful"].sizes[f"transformer-{size}"]
    for norm_at, more in (("post", 0), ("pre", 4)):
        settings = TransformerInit(size=size, norm_at=norm_at)  # type: ignore[arg-type]
        model = transformer_config(settings, 37_000)
        with skip_init():
            new_model = ModelBundle(BundleConfig(family="heedful", model=model, head=NextToken()))
        assert new_model.count() == count + more * model.width


def test_location_scores_bound_what_is_read_and_not_what_is_written(tmp_path: Path) -> None:
    """A longer text is refused, or cut; its rewriting is learned and written whole."""
    rows = [("one two", "twenty one words " * 6), ("three", "and a few more " * 5)] * 4
    look = "init.rnn.look={kind = 'global', score = 'location', longest = 6}"
    wishes = (*SETTINGS, *TWO, "init.rnn.width=16", "init.tokenizer.vocab_size=300", look, "data.dev_fraction=0")
    data = tmp_path / "data.csv"

    def write_rows() -> None:
        with data.open("w", newline="") as file:
            csv.writer(file).writerows([("source", "target"), *rows])

    write_rows()
    finetune("seq2seq", data, tmp_path / "run", assignments=wishes)
    loaded = load(tmp_path / "run")
    assert loaded.max_length == 6 and loaded.max_target_length is None
    (answer,) = heedful.Engine(loaded, writing=GenerationConfig(max_new_tokens=40))(["one two"])
    assert answer["tokens"] == 40 or answer["complete"]
    assert evaluate(tmp_path / "run", data, split="train").numbers["f1"] >= 0
    rows.append(("one two " * 6, "twenty one words " * 6))
    write_rows()
    with pytest.raises(HeedfulError, match=r"data.csv:10: .* but this model reads 6 at once: .* set long_inputs"):
        finetune("seq2seq", data, tmp_path / "refused", assignments=wishes)
    plan = plan_finetune("seq2seq", data, assignments=(*wishes, "long_inputs=truncate"))
    base = initial_model(plan.settings.init, plan.source, plan.stats.counts, 0, None, lambda text: None)
    learned = build_task(plan.settings, plan.source, plan.stats, base)[0].encode_split(plan.source.examples("train"))
    first, last = learned.samples[0], learned.samples[-1]
    assert learned.truncated == 1 and last.bounds[1] == 6 and len(last.target) == len(first.target) > 6
    with pytest.raises(HeedfulError, match=r"it has .* tokens, but this model reads 6, and its answer needs all"):
        heedful.Engine(loaded)(["one two " * 6])
    loaded.tokenizer = loaded.tokenizer and loaded.tokenizer.limited(4)  # as max_length=4 does
    assert loaded.max_length == loaded.max_target_length == 4


def test_a_picture_passes_over_what_the_model_does_not_read(tmp_path: Path) -> None:
    """As predictions of a run that cuts long texts are: whole."""
    words = train_tokenizer(
        [text for row in ROWS for text in row], TokenizerSettings(algorithm="unigram", vocab_size=90, max_length=12)
    )
    sizes: dict[str, Any] = {"layers": 1, "width": 16, "heads": 2, "inner": 16, "positions": "learned", "longest": 12}
    new_model = create(
        BundleConfig(family="heedful", model=transformer_config(TransformerInit(**sizes), words.size)), words, seed=0
    )
    heedful.save(with_head(new_model, "language_model", seed=0), tmp_path / "model")
    short, long = "ada sees him", "ada sees the sea today him"
    assert len(words.encode(short)) < 12 < len(words.encode(long)) <= MAX_TOKENS
    for texts, shown in (((short, long), True), ((long,), False)):
        lines = [json.dumps({"id": n, "input": text, "prediction": "him"}) for n, text in enumerate(texts)]
        (tmp_path / "predictions-dev.jsonl").write_text("\n".join(lines))
        assert (plot_run_alignments(tmp_path, "dev") is not None) == shown


def test_what_cannot_run(labelled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(HeedfulError, match="no model was given, and seq2seq needs one with a decoder"):
        finetune("seq2seq", labelled / "data.csv", output_dir=tmp_path / "a")
    with pytest.raises(HeedfulError, match="this model has no decoder, so it cannot generate text"):
        finetune("seq2seq", labelled / "data.csv", output_dir=tmp_path / "b", model=labelled / "encoder")
    for task, model, wishes, message in (
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
        ("seq2seq", "", (*TWO, "init.rnn.look=none", "init.rnn.feed=false"), "feed is false, .* rnn.look is none"),
        ("seq2seq", "", (*TWO, LOOK), "longest is for location scores, but look.score"),
        (
            "seq2seq",
            "",
            ("init.kind=transformer", "reinit_layers=2"),
            'init.reinit_layers is for init.kind = "pretrained"',
        ),
    ):
        named = labelled / model if model else ""
        with pytest.raises(HeedfulError, match=message):
            finetune(task, labelled / "data.csv", output_dir=tmp_path / "c", model=named, assignments=wishes)
    for arguments, expected_message in (
        (
            ["predict", str(labelled / "both"), "a", "--num-beams", "2", "--temperature", "1"],
            "beam search does not sample",
        ),
        (
            ["predict", str(labelled / "both"), "a", "--pair", "b"],
            "--pair cannot be used with this model: its language_model head",
        ),
    ):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code and expected_message in capsys.readouterr().err
