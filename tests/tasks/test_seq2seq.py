"""Rewriting: the loss is transformers' own, answers are its greedy ones, and it learns; what cannot write says so."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, processors

import heedful
from heedful.checkpoint import ModelBundle, load
from heedful.checkpoint.new_head import with_head
from heedful.data import Seq2SeqExample
from heedful.errors import HeedfulError
from heedful.look.decoding import decoding_report as written_of
from heedful.look.inspection import Inspection
from heedful.model.config import EmbeddingConfig, Learned, ModelConfig, StackConfig
from heedful.model.decode import BeamSearch, Greedy, Sampling
from heedful.tasks.generation import GenerationConfig, encode_truncated, sequence_ends
from heedful.tasks.metrics import merge_all
from heedful.tasks.seq2seq import TEXT_SUFFIX, Seq2Seq
from heedful.tasks.task import evaluate_task
from heedful.tokenizer import Tokenizer
from heedful.train.optim import AdamW
from heedful.train.trainer import Trainer, TrainSettings
from tests.support.model_folders import make_model_dir
from tests.support.tiny_models import Float64Mode, randomise, use_eager_attention

WORDS = ["red", "green", "blue", "one", "two", "three", "\n"]
VOCABULARY = ["<pad>", "</s>", "<unk>", *WORDS]
EXAMPLES = [
    Seq2SeqExample(text="red one", rewritten="one red"),
    Seq2SeqExample(text="green two blue three", rewritten="three blue two green"),
    Seq2SeqExample(text="blue", rewritten="blue"),
]


def tokenizer() -> tokenizers.Tokenizer:
    """Words; a text ends with </s>."""
    backend = tokenizers.Tokenizer(models.WordLevel({word: n for n, word in enumerate(VOCABULARY)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Split(" ", "removed")]
    )
    backend.decoder = decoders.Sequence([decoders.Fuse()])
    backend.add_special_tokens(["<pad>", "</s>", "<unk>"])
    return backend


@cache
def folder(kind: str) -> Path:
    """A tiny model with encoder and decoder, or with a decoder alone, and its tokenizer."""
    model_folder, words = Path(mkdtemp()), tokenizer()
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": len(VOCABULARY), "dropout_rate": 0.0}
    if kind == "both":
        words.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
        config: Any = transformers.T5Config(
            **sizes, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
        )
        model: Any = transformers.T5ForConditionalGeneration(config)
    else:
        config = transformers.GPT2Config(
            vocab_size=len(VOCABULARY), n_positions=24, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=1
        )
        config.embd_pdrop = config.attn_pdrop = config.resid_pdrop = 0.0
        model = transformers.GPT2LMHeadModel(config)
    randomise(model)
    model.double().save_pretrained(model_folder)
    Tokenizer(words, {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}).save(model_folder)
    return model_folder


def pair(kind: str) -> tuple[Any, ModelBundle, Seq2Seq]:
    where = folder(kind)
    class_ = transformers.T5ForConditionalGeneration if kind == "both" else transformers.GPT2LMHeadModel
    loaded = load(where, dtype=torch.float64)
    assert loaded.tokenizer is not None
    loaded.text_suffix = "" if kind == "both" else TEXT_SUFFIX
    task = Seq2Seq(
        tokenizer=loaded.tokenizer,
        limit=loaded.max_length,
        max_target_length=loaded.max_target_length,
        ends=sequence_ends(loaded.config.model, loaded.tokenizer),
        text_suffix=loaded.text_suffix,
    )
    return use_eager_attention(class_.from_pretrained(where, dtype=torch.float64)).eval(), loaded, task


def ids(text: str) -> list[int]:
    return [VOCABULARY.index(word) for word in text.split(" ")]


KINDS = pytest.mark.parametrize("kind", ["both", "alone"])


@KINDS
def test_the_loss_is_theirs(kind: str) -> None:
    theirs, loaded, task = pair(kind)
    samples = task.encode_split(EXAMPLES).samples
    losses = task.loss(loaded, task.batch(samples, [0, 0, 0]))
    total = count = 0.0
    with torch.no_grad(), Float64Mode(torch.float64):
        for example in EXAMPLES:
            target_ids = [*ids(example.rewritten), 1]
            if kind == "both":
                reference_inputs = {
                    "input_ids": torch.tensor([[*ids(example.text), 1]]),
                    "labels": torch.tensor([target_ids]),
                }
            else:
                read = [*ids(example.text), VOCABULARY.index("\n")]
                reference_inputs = {
                    "input_ids": torch.tensor([read + target_ids]),
                    "labels": torch.tensor([[-100] * len(read) + target_ids]),
                }
            total += float(theirs(**reference_inputs).loss) * len(target_ids)
            count += len(target_ids)
    assert losses.count == count and abs(float(losses.sum.detach()) - total) < 1e-9
    parts = [task.loss(loaded, task.batch([sample], [0])) for sample in samples]
    assert abs(sum(float(part.sum.detach()) for part in parts) - total) < 1e-9  # whatever is beside it


@KINDS
def test_label_smoothing_counts_tokens_alone(kind: str) -> None:
    """torch's cross_entropy over lines that are filled up, whose filling it ignores; and the formula, text by text."""
    _, loaded, task = pair(kind)
    task = replace(task, label_smoothing=0.2)
    samples = task.encode_split(EXAMPLES).samples
    batch = task.batch(samples, [0, 0, 0])
    losses = task.loss(loaded, batch)
    with torch.no_grad():
        scores = task.scores(loaded, batch)
    lengths = [len(sample.target) for sample in samples]
    lines = torch.nn.utils.rnn.pad_sequence(list(scores.split(lengths)), batch_first=True, padding_value=3.0)
    right = torch.nn.utils.rnn.pad_sequence(list(batch.targets.split(lengths)), batch_first=True, padding_value=-100)
    theirs = torch.nn.functional.cross_entropy(lines.mT, right, label_smoothing=0.2)
    assert losses.count == sum(lengths) < right.numel()
    assert float(losses.sum.detach()) / losses.count == pytest.approx(float(theirs), abs=1e-12)
    log_p = scores.log_softmax(-1)
    by_hand = -0.8 * log_p.gather(-1, batch.targets[:, None]).sum() - 0.2 * log_p.mean(-1).sum()
    assert float(losses.sum.detach()) == pytest.approx(float(by_hand), abs=1e-9)


@KINDS
def test_bleu_does_not_count_the_end_token(kind: str) -> None:
    """What is measured has no end in it, and neither has what is right; greedily is one beam."""
    _, loaded, task = pair(kind)
    engine = heedful.Engine(loaded, writing=task.generation)
    assert isinstance(task.generation.how, Greedy) and replace(task, num_beams=4).generation.how == BeamSearch(
        num_beams=4
    )
    asked = [example.text for example in EXAMPLES]
    one = heedful.Engine(loaded, writing=GenerationConfig(how=BeamSearch(num_beams=1)))(asked)
    answers = engine(asked)
    assert [answer["text"] for answer in answers] == [answer["text"] for answer in one]
    assert all("</s>" not in answer["text"] for answer in answers)
    right = [{"text": example.rewritten} for example in EXAMPLES]
    measure = task.update_metrics(task.new_metrics(), EXAMPLES, right, range(len(EXAMPLES)))
    assert task.compute_metrics(measure)["bleu"] == pytest.approx(1)
    assert measure.metrics["bleu"].sums[:2] == (7, 7), "words, without ends"
    assert measure.intervals()["bleu"]["high"] == pytest.approx(1)


@KINDS
def test_answers_are_their_greedy_ones(kind: str) -> None:
    theirs, loaded, _ = pair(kind)
    engine = heedful.Engine(loaded, writing=GenerationConfig(max_new_tokens=6))
    assert engine.kind == "language_model"
    for example, answer in zip(EXAMPLES, engine([example.text for example in EXAMPLES]), strict=True):
        read = [*ids(example.text), 1 if kind == "both" else VOCABULARY.index("\n")]
        with torch.no_grad(), Float64Mode(torch.float64):
            out = theirs.generate(
                torch.tensor([read]),
                attention_mask=torch.ones(1, len(read)),
                max_new_tokens=6,
                do_sample=False,
                eos_token_id=1,
                pad_token_id=0,
            )[0].tolist()
        written = out[1 if kind == "both" else len(read) :]
        written = written[: written.index(1)] if 1 in written else written
        assert answer["text"] == "".join(VOCABULARY[id] for id in written if id > 2).strip()
        assert answer["tokens"] == len(written) and answer["complete"] == (1 in out[1:])


@KINDS
def test_beams_and_samples(kind: str) -> None:
    _, loaded, _ = pair(kind)
    (answer,) = heedful.Engine(
        loaded, writing=GenerationConfig(how=BeamSearch(num_beams=3, num_return_sequences=3), max_new_tokens=5)
    )(["red one"])
    assert len(answer["alternatives"]) == 2 and {"text", "log_probability"} <= answer["alternatives"][0].keys()
    texts = {
        heedful.Engine(loaded, writing=GenerationConfig(how=Sampling(temperature=3.0), max_new_tokens=5, seed=seed))(
            ["red"]
        )[0]["text"]
        for seed in range(6)
    }
    assert len(texts) > 1
    engine = heedful.Engine(loaded, writing=GenerationConfig(how=Sampling(temperature=3.0), max_new_tokens=5, seed=4))
    asked = ["red", "green two blue", "one", "blue one two three"]
    assert [item["text"] for item in engine(asked)] == [engine([item])[0]["text"] for item in asked]
    with pytest.raises(HeedfulError, match="max_new_tokens is 0"):
        GenerationConfig(max_new_tokens=0)


@KINDS
def test_it_learns_to_turn_words_around(kind: str) -> None:
    _, loaded, task = pair(kind)
    learner = with_head(loaded.float(), "language_model", seed=0)
    learner.text_suffix = loaded.text_suffix
    samples = task.encode_split(EXAMPLES).samples
    settings = TrainSettings(max_steps=150, batch_size=3, optimizer=AdamW(lr=1e-2), precision="float32", seed=1)
    trainer = Trainer(learner, task, samples, settings)
    losses = [step.loss for step in trainer]
    assert losses[-1] < 0.1 * losses[0]
    engine = heedful.Engine(learner, writing=GenerationConfig(max_new_tokens=8))
    measure = evaluate_task(task, engine, EXAMPLES)
    # this toy tokenizer's decoder puts no spaces between words
    assert [answer["text"] for answer in engine([example.text for example in EXAMPLES])] == [
        example.rewritten.replace(" ", "") for example in EXAMPLES
    ]
    assert task.compute_metrics(measure)["count"] == 3 and task.compute_metrics(measure)["exact"] == pytest.approx(
        1 / 3
    )
    assert measure.intervals()["exact"]["low"] <= 1 / 3


def test_what_is_too_long_is_refused_or_cut() -> None:
    _, _, task = pair("alone")
    long = Seq2SeqExample(text=" ".join(["red"] * 30), rewritten="one", file="data.csv", line=7)
    with pytest.raises(
        HeedfulError, match=r"data\.csv:7: text and target have 31 and 2 tokens with the end token, but this model"
    ):
        task.encode_split([long])
    with pytest.raises(HeedfulError, match=r"^data\.csv:7: the text has 31 tokens, but this model reads 24 at once"):
        task.check([EXAMPLES[0], long])
    replace(task, long_inputs="truncate").check([long])
    read = replace(task, long_inputs="truncate").encode_split([long])
    assert read.truncated == 1 and max(map(len, read.samples)) <= 24


@pytest.mark.parametrize(
    ("kind", "ends", "text", "rewriting", "lengths"),
    [
        ("alone", False, 12, 11, [24]),
        ("alone", True, 12, 10, [24]),
        ("both", False, 24, 23, [24, 24]),
        ("both", True, 23, 23, [24, 24]),
    ],
)
def test_what_fits_exactly_is_learned(kind: str, ends: bool, text: int, rewriting: int, lengths: list[int]) -> None:
    """Whatever the tokenizer puts around a rewriting: its end is written, and not read."""
    _, loaded, task = pair(kind)
    words = tokenizer()
    if ends:
        words.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    known = Tokenizer(words, {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"})
    task = replace(task, tokenizer=known, limit=24, max_target_length=24)
    example = Seq2SeqExample(text=" ".join(["red"] * text), rewritten=" ".join(["one"] * rewriting))
    (sample,) = task.encode_split([example]).samples
    assert [stop - start for start, stop in pairwise(sample.bounds)] == lengths
    task.loss(loaded, task.batch([sample], [0]))
    with pytest.raises(HeedfulError, match="but this model reads 24 at once"):
        task.encode_split([replace(example, rewritten=example.rewritten + " two")])
    long = Seq2SeqExample(text=example.text * 2, rewritten=example.rewritten * 2)
    (sample,) = replace(task, long_inputs="truncate").encode_split([long]).samples
    assert max(stop - start for start, stop in pairwise(sample.bounds)) <= 24


def test_what_cannot_be_written_is_told_before_the_training() -> None:
    """What is longer than evaluations write, its end included, and what the tokenizer itself would change."""
    _, _, task = pair("both")
    examples = [Seq2SeqExample(text="red", rewritten=text) for text in ("red", " blue\n", "red two", "Red")]
    remarks = task.encode_split(examples).remarks
    assert list(remarks.values()) == [2], "a space between words, which this decoder leaves out, and a word it lacks"
    assert "the tokenizer does not decode exactly" in next(iter(remarks))
    remarks = replace(task, max_new_tokens=2).encode_split(examples[:1] + EXAMPLES).remarks
    assert remarks["have targets that are longer than evaluations generate (task.max_new_tokens=2)"] == 2


@KINDS
def test_what_was_cut_off_is_counted(kind: str) -> None:
    """In any parts; a note says how many there were."""
    _, loaded, task = pair(kind)
    task = replace(task, max_new_tokens=1)
    engine = heedful.Engine(loaded, writing=task.generation)
    answers = engine([example.text for example in EXAMPLES])
    unfinished = sum(not answer["complete"] for answer in answers)
    assert evaluate_task(task, engine, EXAMPLES).metrics["texts"].unfinished == unfinished
    answers = [answer | {"complete": number == 1} for number, answer in enumerate(answers)]
    parts = [
        task.update_metrics(task.new_metrics(), EXAMPLES[a:b], answers[a:b], range(a, b)) for a, b in ((0, 1), (1, 3))
    ]
    assert "texts cut off before their end: 2 (task.max_new_tokens=1)" in task.report(merge_all(parts))["notes"]


def test_a_copy_is_no_correction() -> None:
    """Case, signs and articles are what is learned, so they count."""
    _, _, task = pair("both")
    example = Seq2SeqExample(text="he has cat", rewritten="He has a cat.")
    answer = {"text": example.text, "complete": True}
    metrics = task.compute_metrics(task.update_metrics(task.new_metrics(), [example], [answer], [0]))
    assert metrics["exact"] == 0 and metrics["f1"] == pytest.approx(2 / 7)
    judged = task.score_answer(example, answer)
    assert judged.correct is False and judged.loss == pytest.approx(5 / 7)
    assert task.score_answer(example, {"text": " He has a cat.\n"}).correct


def test_what_is_cut_keeps_what_stands_before_the_rewriting() -> None:
    """In learning and in the engine alike; the text loses its end, and the loss is counted."""
    _, loaded, task = pair("alone")
    task = replace(task, long_inputs="truncate")
    long = Seq2SeqExample(text=" ".join(["red"] * 30), rewritten="one")
    (sample,), cut = task.encode_split([long]).samples, task.truncation_length
    assert cut == 12 and task.encode_split([long]).truncated_tokens == 19
    assert sample.tokens.tolist() == ids("red " * 11 + "\n one") and list(sample.target) == ids("one </s>")
    (asked,) = heedful.Engine(loaded, max_length=cut).tokenize([long.text])
    assert list(asked.chunks[0].encoded.ids) == ids("red " * 11 + "\n") and asked.dropped == 19
    with pytest.raises(HeedfulError, match=r"max_length 1 leaves no token of a text: 1 tokens go around it, or behind"):
        encode_truncated(task.tokenizer, ["red red" + TEXT_SUFFIX], TEXT_SUFFIX, 1)


def test_what_cannot_write_says_so(tmp_path: Path) -> None:
    encoder = load(make_model_dir(tmp_path / "masked", "masked"))
    assert encoder.tokenizer is not None
    with pytest.raises(HeedfulError, match="this model has no decoder, so it cannot generate text"):
        sequence_ends(encoder.config.model, encoder.tokenizer)
    with pytest.raises(HeedfulError, match='this family has no head "language_model"'):
        with_head(encoder, "language_model")
    model = ModelConfig(
        embedding=EmbeddingConfig(vocabulary=9, width=8, positions=Learned(count=5)),
        decoder=StackConfig(width=8, layers=1, heads=1, head_width=8, inner_width=8, causal=True),
    )
    with pytest.raises(HeedfulError, match="no token that ends a text: name it as eos_token"):
        sequence_ends(model, Tokenizer(tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))))


def test_a_model_that_learned_nothing_goes_on_from_the_text_itself(tmp_path: Path) -> None:
    """What stands between text and rewriting belongs to what was learned; it is kept in the folder."""
    _, loaded, _ = pair("alone")
    texts = ["red one"]
    learned = heedful.Engine(loaded, writing=GenerationConfig(max_new_tokens=4))(texts)
    heedful.save(loaded, tmp_path / "kept")
    assert load(tmp_path / "kept").text_suffix == TEXT_SUFFIX
    loaded.text_suffix = ""
    plain = heedful.Engine(loaded, writing=GenerationConfig(max_new_tokens=4))
    assert plain(texts) != learned and plain(["red one\n"]) == learned
    heedful.save(loaded, tmp_path / "plain")
    assert load(tmp_path / "plain").text_suffix == ""
    (tmp_path / "plain/heedful.json").write_text('{"text_suffix": 3}')
    with pytest.raises(HeedfulError, match="text_suffix is 3; expected a text"):
        load(tmp_path / "plain")


def test_nothing_is_gone_on_from_as_from_the_token_that_ends_a_text() -> None:
    """Where the tokenizer adds none; as transformers goes on from that token."""
    theirs, loaded, _ = pair("alone")
    bare = tokenizer()
    bare.post_processor = None
    loaded.tokenizer = Tokenizer(bare, {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"})
    loaded.text_suffix = ""
    with torch.no_grad():
        new = theirs.generate(torch.tensor([[1]]), max_new_tokens=6, do_sample=False, eos_token_id=1, pad_token_id=0)
    engine = heedful.Engine(loaded, writing=GenerationConfig(max_new_tokens=6))
    (alone,), (beside, some) = engine([""]), engine(["", "red one"])
    assert alone["text"] == beside["text"] == loaded.tokenizer.decode(new[0, 1:].tolist()).strip()
    assert alone["log_probability"] == pytest.approx(beside["log_probability"], rel=1e-12)
    assert some["log_probability"] == pytest.approx(engine(["red one"])[0]["log_probability"])


def test_an_empty_text_is_classified_where_the_tokenizer_adds_nothing() -> None:
    _, loaded, _ = pair("alone")
    bare = tokenizer()
    bare.post_processor = None
    loaded.tokenizer = Tokenizer(bare, {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"})
    engine = heedful.Engine(with_head(loaded, "sequence_classification", labels=("no", "yes"), seed=1))
    (alone,), (beside, some) = engine([""]), engine(["", "red one"])
    assert alone == beside and alone["probability"] == 0.5, "GPT-2's scores have no bias"
    assert some["probabilities"] == pytest.approx(engine(["red one"])[0]["probabilities"])


def test_a_decoder_goes_on_without_what_closes_a_text() -> None:
    """As transformers goes on from the same tokens; what learned to write behind the closing token still reads it."""
    theirs, loaded, _ = pair("alone")
    words = tokenizer()
    words.post_processor = processors.TemplateProcessing(single="</s> $A </s>", special_tokens=[("</s>", 1)])
    loaded.tokenizer = Tokenizer(words, {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"})
    loaded.text_suffix = ""
    engine, texts = heedful.Engine(loaded, writing=GenerationConfig(max_new_tokens=6)), ["red one", "", "blue"]
    for text, answer in zip(texts, engine(texts), strict=True):
        read = torch.tensor([[1, *(ids(text) if text else [])]])
        with torch.no_grad():
            all_of_it = theirs.generate(read, max_new_tokens=6, do_sample=False, eos_token_id=1, pad_token_id=0)
        new = all_of_it[0, read.shape[1] :].tolist()
        assert answer["text"] == loaded.tokenizer.decode(new).strip()
        inside = Inspection(loaded, text)
        assert inside.source.tokens.tolist() == read[0].tolist()
        assert written_of(inside, max_new_tokens=6, num_beams=2)["greedy"]["text"] == answer["text"]
    (plain,) = engine.tokenize(["red"])
    loaded.text_suffix = TEXT_SUFFIX
    (taught,) = engine.tokenize(["red"])
    assert plain.chunks[0].encoded.ids == (1, *ids("red"))
    assert taught.chunks[0].encoded.ids == (1, *ids("red"), VOCABULARY.index("\n"), 1)
