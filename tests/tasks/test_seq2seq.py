"""Seq2Seq: losses and greedy answers equal transformers, training learns, other models are refused."""

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
from heedful.look.decoding import decoding_report
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
    """A tokenizer of whole words and newlines, which adds no special tokens."""
    ids_of_words = {word: id for id, word in enumerate(VOCABULARY)}
    backend = tokenizers.Tokenizer(models.WordLevel(ids_of_words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Split(" ", "removed")]
    )
    backend.decoder = decoders.Sequence([decoders.Fuse()])
    backend.add_special_tokens(["<pad>", "</s>", "<unk>"])
    return backend


@cache
def folder(kind: str) -> Path:
    """The folder of a tiny model, with encoder and decoder or only a decoder, and its tokenizer."""
    model_folder, words = Path(mkdtemp()), tokenizer()
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": len(VOCABULARY), "dropout_rate": 0.0}
    if kind == "encoder_decoder":
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


def load_models(kind: str) -> tuple[Any, ModelBundle, Seq2Seq]:
    """The tiny model in transformers and in Heedful, and a task for it."""
    where = folder(kind)
    class_ = transformers.T5ForConditionalGeneration if kind == "encoder_decoder" else transformers.GPT2LMHeadModel
    loaded = load(where, dtype=torch.float64)
    assert loaded.tokenizer is not None
    loaded.text_suffix = "" if kind == "encoder_decoder" else TEXT_SUFFIX
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


KINDS = pytest.mark.parametrize("kind", ["encoder_decoder", "decoder"])


@KINDS
def test_the_loss_equals_transformers(kind: str) -> None:
    reference, loaded, task = load_models(kind)
    samples = task.encode_split(EXAMPLES).samples
    losses = task.loss(loaded, task.batch(samples, [0, 0, 0]))
    total = count = 0.0
    with torch.no_grad(), Float64Mode(torch.float64):
        for example in EXAMPLES:
            target_ids = [*ids(example.rewritten), 1]
            if kind == "encoder_decoder":
                reference_inputs = {
                    "input_ids": torch.tensor([[*ids(example.text), 1]]),
                    "labels": torch.tensor([target_ids]),
                }
            else:
                input_ids = [*ids(example.text), VOCABULARY.index("\n")]
                reference_inputs = {
                    "input_ids": torch.tensor([input_ids + target_ids]),
                    "labels": torch.tensor([[-100] * len(input_ids) + target_ids]),
                }
            total += float(reference(**reference_inputs).loss) * len(target_ids)
            count += len(target_ids)
    assert losses.count == count
    assert abs(float(losses.sum.detach()) - total) < 1e-9
    losses_alone = [task.loss(loaded, task.batch([sample], [0])) for sample in samples]
    assert abs(sum(float(loss.sum.detach()) for loss in losses_alone) - total) < 1e-9


@KINDS
def test_label_smoothing_counts_tokens_alone(kind: str) -> None:
    """The loss equals torch's cross_entropy over a padded batch, which ignores padding, and the formula itself."""
    _, loaded, task = load_models(kind)
    task = replace(task, label_smoothing=0.2)
    samples = task.encode_split(EXAMPLES).samples
    batch = task.batch(samples, [0, 0, 0])
    losses = task.loss(loaded, batch)
    with torch.no_grad():
        scores = task.scores(loaded, batch)
    lengths = [len(sample.target) for sample in samples]
    padded_scores = torch.nn.utils.rnn.pad_sequence(list(scores.split(lengths)), batch_first=True, padding_value=3.0)
    padded_targets = torch.nn.utils.rnn.pad_sequence(
        list(batch.targets.split(lengths)), batch_first=True, padding_value=-100
    )
    expected_mean = torch.nn.functional.cross_entropy(padded_scores.mT, padded_targets, label_smoothing=0.2)
    assert losses.count == sum(lengths) < padded_targets.numel()
    assert float(losses.sum.detach()) / losses.count == pytest.approx(float(expected_mean), abs=1e-12)
    log_probabilities = scores.log_softmax(-1)
    of_targets = log_probabilities.gather(-1, batch.targets[:, None]).sum()
    expected_sum = -0.8 * of_targets - 0.2 * log_probabilities.mean(-1).sum()
    assert float(losses.sum.detach()) == pytest.approx(float(expected_sum), abs=1e-9)


@KINDS
def test_bleu_does_not_count_the_end_token(kind: str) -> None:
    _, loaded, task = load_models(kind)
    answers = heedful.Engine(loaded, writing=task.generation)([example.text for example in EXAMPLES])
    assert all("</s>" not in answer["text"] for answer in answers)
    correct_answers = [{"text": example.rewritten} for example in EXAMPLES]
    measure = task.update_metrics(task.new_metrics(), EXAMPLES, correct_answers, range(len(EXAMPLES)))
    assert task.compute_metrics(measure)["bleu"] == pytest.approx(1)
    assert measure.metrics["bleu"].sums[:2] == (7, 7), "7 words, without the end tokens"
    assert measure.intervals()["bleu"]["high"] == pytest.approx(1)


@KINDS
def test_a_beam_search_with_one_beam_is_greedy(kind: str) -> None:
    _, loaded, task = load_models(kind)
    assert isinstance(task.generation.how, Greedy)
    assert replace(task, num_beams=4).generation.how == BeamSearch(num_beams=4)
    texts = [example.text for example in EXAMPLES]
    greedy = heedful.Engine(loaded, writing=task.generation)(texts)
    one_beam = heedful.Engine(loaded, writing=GenerationConfig(how=BeamSearch(num_beams=1)))(texts)
    assert [answer["text"] for answer in greedy] == [answer["text"] for answer in one_beam]


@KINDS
def test_greedy_answers_equal_transformers(kind: str) -> None:
    reference, loaded, _ = load_models(kind)
    engine = heedful.Engine(loaded, writing=GenerationConfig(max_new_tokens=6))
    assert engine.kind == "language_model"
    for example, answer in zip(EXAMPLES, engine([example.text for example in EXAMPLES]), strict=True):
        input_ids = [*ids(example.text), 1 if kind == "encoder_decoder" else VOCABULARY.index("\n")]
        with torch.no_grad(), Float64Mode(torch.float64):
            output_ids = reference.generate(
                torch.tensor([input_ids]),
                attention_mask=torch.ones(1, len(input_ids)),
                max_new_tokens=6,
                do_sample=False,
                eos_token_id=1,
                pad_token_id=0,
            )[0].tolist()
        new_ids = output_ids[1 if kind == "encoder_decoder" else len(input_ids) :]
        is_complete = 1 in new_ids
        if is_complete:
            new_ids = new_ids[: new_ids.index(1)]
        assert answer["text"] == "".join(VOCABULARY[id] for id in new_ids if id > 2).strip()
        assert answer["tokens"] == len(new_ids)
        assert answer["complete"] == is_complete


@KINDS
def test_beams_and_samples(kind: str) -> None:
    _, loaded, _ = load_models(kind)
    beams = GenerationConfig(how=BeamSearch(num_beams=3, num_return_sequences=3), max_new_tokens=5)
    (answer,) = heedful.Engine(loaded, writing=beams)(["red one"])
    assert len(answer["alternatives"]) == 2
    assert {"text", "log_probability"} <= answer["alternatives"][0].keys()

    def sampling_engine(seed: int) -> heedful.Engine:
        sampling = GenerationConfig(how=Sampling(temperature=3.0), max_new_tokens=5, seed=seed)
        return heedful.Engine(loaded, writing=sampling)

    assert len({sampling_engine(seed)(["red"])[0]["text"] for seed in range(6)}) > 1
    engine, texts = sampling_engine(4), ["red", "green two blue", "one", "blue one two three"]
    answers_alone = [engine([text])[0]["text"] for text in texts]
    assert [answer["text"] for answer in engine(texts)] == answers_alone
    with pytest.raises(HeedfulError, match="max_new_tokens is 0"):
        GenerationConfig(max_new_tokens=0)


@KINDS
def test_it_learns_to_reverse_words(kind: str) -> None:
    _, loaded, task = load_models(kind)
    learner = with_head(loaded.float(), "language_model", seed=0)
    learner.text_suffix = loaded.text_suffix
    samples = task.encode_split(EXAMPLES).samples
    settings = TrainSettings(max_steps=150, batch_size=3, optimizer=AdamW(lr=1e-2), precision="float32", seed=1)
    trainer = Trainer(learner, task, samples, settings)
    losses = [step.loss for step in trainer]
    assert losses[-1] < 0.1 * losses[0]
    engine = heedful.Engine(learner, writing=GenerationConfig(max_new_tokens=8))
    answers = [answer["text"] for answer in engine([example.text for example in EXAMPLES])]
    assert answers == [example.rewritten.replace(" ", "") for example in EXAMPLES]
    measure = evaluate_task(task, engine, EXAMPLES)
    metrics = task.compute_metrics(measure)
    assert metrics["count"] == 3
    assert metrics["exact"] == pytest.approx(1 / 3), "the decoder of this tokenizer puts no spaces between words"
    assert measure.intervals()["exact"]["low"] <= 1 / 3


def test_overlong_texts_are_refused_or_truncated() -> None:
    _, _, task = load_models("decoder")
    long = Seq2SeqExample(text=" ".join(["red"] * 30), rewritten="one", file="data.csv", line=7)
    with pytest.raises(
        HeedfulError, match=r"data\.csv:7: text and target have 31 and 2 tokens with the end token, but this model"
    ):
        task.encode_split([long])
    with pytest.raises(HeedfulError, match=r"^data\.csv:7: the text has 31 tokens, but this model reads 24 at once"):
        task.check([EXAMPLES[0], long])
    replace(task, long_inputs="truncate").check([long])
    encoded = replace(task, long_inputs="truncate").encode_split([long])
    assert encoded.truncated == 1 and max(map(len, encoded.samples)) <= 24


@pytest.mark.parametrize(
    ("kind", "adds_end", "text_length", "target_length", "lengths"),
    [
        ("decoder", False, 12, 11, [24]),
        ("decoder", True, 12, 10, [24]),
        ("encoder_decoder", False, 24, 23, [24, 24]),
        ("encoder_decoder", True, 23, 23, [24, 24]),
    ],
)
def test_texts_of_exactly_the_maximum_length_are_learned(
    kind: str, adds_end: bool, text_length: int, target_length: int, lengths: list[int]
) -> None:
    """The target needs room for one end token, whether the tokenizer adds it or not; the decoder does not read it."""
    _, loaded, task = load_models(kind)
    backend = tokenizer()
    if adds_end:
        backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer_ = Tokenizer(backend, {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"})
    task = replace(task, tokenizer=tokenizer_, limit=24, max_target_length=24)
    example = Seq2SeqExample(text=" ".join(["red"] * text_length), rewritten=" ".join(["one"] * target_length))
    (sample,) = task.encode_split([example]).samples
    assert [stop - start for start, stop in pairwise(sample.bounds)] == lengths
    task.loss(loaded, task.batch([sample], [0]))
    with pytest.raises(HeedfulError, match="but this model reads 24 at once"):
        task.encode_split([replace(example, rewritten=example.rewritten + " two")])
    long = Seq2SeqExample(text=example.text * 2, rewritten=example.rewritten * 2)
    (sample,) = replace(task, long_inputs="truncate").encode_split([long]).samples
    assert max(stop - start for start, stop in pairwise(sample.bounds)) <= 24


def test_targets_that_cannot_be_generated_are_reported() -> None:
    """These are targets longer than max_new_tokens, and targets that the tokenizer does not decode exactly."""
    _, _, task = load_models("encoder_decoder")
    examples = [Seq2SeqExample(text="red", rewritten=text) for text in ("red", " blue\n", "red two", "Red")]
    remarks = task.encode_split(examples).remarks
    assert list(remarks.values()) == [2], '"red two", decoded without the space, and "Red", an unknown word'
    assert "the tokenizer does not decode exactly" in next(iter(remarks))
    remarks = replace(task, max_new_tokens=2).encode_split(examples[:1] + EXAMPLES).remarks
    assert remarks["have targets that are longer than evaluations generate (task.max_new_tokens=2)"] == 2


@KINDS
def test_unfinished_texts_are_counted(kind: str) -> None:
    """The counts of parts of the data are added, and a note reports their sum."""
    _, loaded, task = load_models(kind)
    task = replace(task, max_new_tokens=1)
    engine = heedful.Engine(loaded, writing=task.generation)
    answers = engine([example.text for example in EXAMPLES])
    unfinished = sum(not answer["complete"] for answer in answers)
    assert evaluate_task(task, engine, EXAMPLES).metrics["texts"].unfinished == unfinished
    answers = [answer | {"complete": index == 1} for index, answer in enumerate(answers)]
    parts = [
        task.update_metrics(task.new_metrics(), EXAMPLES[start:stop], answers[start:stop], range(start, stop))
        for start, stop in ((0, 1), (1, 3))
    ]
    assert "texts cut off before their end: 2 (task.max_new_tokens=1)" in task.report(merge_all(parts))["notes"]


def test_a_copy_of_the_text_is_a_mistake() -> None:
    """Unlike in question answering, case, punctuation and articles count, since a correction may change them."""
    _, _, task = load_models("encoder_decoder")
    example = Seq2SeqExample(text="he has cat", rewritten="He has a cat.")
    answer = {"text": example.text, "complete": True}
    metrics = task.compute_metrics(task.update_metrics(task.new_metrics(), [example], [answer], [0]))
    assert metrics["exact"] == 0 and metrics["f1"] == pytest.approx(2 / 7)
    scored = task.score_answer(example, answer)
    assert scored.correct is False and scored.loss == pytest.approx(5 / 7)
    assert task.score_answer(example, {"text": " He has a cat.\n"}).correct


def test_a_truncated_text_keeps_its_suffix() -> None:
    """The text itself loses its last tokens, which are counted, in training and in the engine."""
    _, loaded, task = load_models("decoder")
    task = replace(task, long_inputs="truncate")
    long = Seq2SeqExample(text=" ".join(["red"] * 30), rewritten="one")
    encoded, limit = task.encode_split([long]), task.truncation_length
    (sample,) = encoded.samples
    assert limit == 12
    assert encoded.truncated_tokens == 19
    assert sample.tokens.tolist() == ids("red " * 11 + "\n one")
    assert list(sample.target) == ids("one </s>")
    (tokenized,) = heedful.Engine(loaded, max_length=limit).tokenize([long.text])
    assert list(tokenized.chunks[0].encoded.ids) == ids("red " * 11 + "\n")
    assert tokenized.dropped == 19
    with pytest.raises(HeedfulError, match=r"max_length 1 leaves no token of a text: 1 tokens go around it, or behind"):
        encode_truncated(task.tokenizer, ["red red" + TEXT_SUFFIX], TEXT_SUFFIX, 1)


def test_models_that_cannot_generate_are_refused(tmp_path: Path) -> None:
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


def test_the_text_suffix_of_a_model_is_saved_and_used(tmp_path: Path) -> None:
    """The suffix separates a text from its rewriting. A model that was trained without one continues the text."""
    _, loaded, _ = load_models("decoder")
    texts = ["red one"]
    with_suffix = heedful.Engine(loaded, writing=GenerationConfig(max_new_tokens=4))(texts)
    heedful.save(loaded, tmp_path / "kept")
    assert load(tmp_path / "kept").text_suffix == TEXT_SUFFIX
    loaded.text_suffix = ""
    engine_without_suffix = heedful.Engine(loaded, writing=GenerationConfig(max_new_tokens=4))
    assert engine_without_suffix(texts) != with_suffix
    assert engine_without_suffix(["red one\n"]) == with_suffix
    heedful.save(loaded, tmp_path / "plain")
    assert load(tmp_path / "plain").text_suffix == ""
    (tmp_path / "plain/heedful.json").write_text('{"text_suffix": 3}')
    with pytest.raises(HeedfulError, match="text_suffix is 3; expected a text"):
        load(tmp_path / "plain")


def without_special_tokens() -> Tokenizer:
    """The tokenizer of the tests, without a post-processor."""
    backend = tokenizer()
    backend.post_processor = None
    return Tokenizer(backend, {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"})


def test_an_empty_text_is_continued_from_the_end_token() -> None:
    """The tokenizer adds no special tokens; transformers generates from the end token then."""
    reference, loaded, _ = load_models("decoder")
    loaded.tokenizer = without_special_tokens()
    loaded.text_suffix = ""
    with torch.no_grad():
        new = reference.generate(torch.tensor([[1]]), max_new_tokens=6, do_sample=False, eos_token_id=1, pad_token_id=0)
    engine = heedful.Engine(loaded, writing=GenerationConfig(max_new_tokens=6))
    (empty,) = engine([""])
    (red,) = engine(["red one"])
    empty_in_batch, red_in_batch = engine(["", "red one"])
    assert empty["text"] == loaded.tokenizer.decode(new[0, 1:].tolist()).strip()
    assert empty_in_batch["text"] == empty["text"]
    assert empty["log_probability"] == pytest.approx(empty_in_batch["log_probability"], rel=1e-12)
    assert red_in_batch["log_probability"] == pytest.approx(red["log_probability"])


def test_an_empty_text_is_classified_where_the_tokenizer_adds_nothing() -> None:
    _, loaded, _ = load_models("decoder")
    loaded.tokenizer = without_special_tokens()
    engine = heedful.Engine(with_head(loaded, "sequence_classification", labels=("no", "yes"), seed=1))
    (empty,) = engine([""])
    (red,) = engine(["red one"])
    empty_in_batch, red_in_batch = engine(["", "red one"])
    assert empty_in_batch == empty
    assert empty["probability"] == 0.5, "without tokens all scores are 0, since GPT-2's head has no bias"
    assert red_in_batch["probabilities"] == pytest.approx(red["probabilities"])


def test_an_untrained_decoder_does_not_read_the_closing_token() -> None:
    """The decoder continues the text like transformers; one trained to generate after the closing token reads it."""
    reference, loaded, _ = load_models("decoder")
    backend = tokenizer()
    backend.post_processor = processors.TemplateProcessing(single="</s> $A </s>", special_tokens=[("</s>", 1)])
    loaded.tokenizer = Tokenizer(backend, {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"})
    loaded.text_suffix = ""
    engine, texts = heedful.Engine(loaded, writing=GenerationConfig(max_new_tokens=6)), ["red one", "", "blue"]
    for text, answer in zip(texts, engine(texts), strict=True):
        input_ids = torch.tensor([[1, *(ids(text) if text else [])]])
        with torch.no_grad():
            generated = reference.generate(input_ids, max_new_tokens=6, do_sample=False, eos_token_id=1, pad_token_id=0)
        new = generated[0, input_ids.shape[1] :].tolist()
        assert answer["text"] == loaded.tokenizer.decode(new).strip()
        inspection = Inspection(loaded, text)
        assert inspection.source.tokens.tolist() == input_ids[0].tolist()
        assert decoding_report(inspection, max_new_tokens=6, num_beams=2)["greedy"]["text"] == answer["text"]
    (untrained,) = engine.tokenize(["red"])
    loaded.text_suffix = TEXT_SUFFIX
    (trained,) = engine.tokenize(["red"])
    assert untrained.chunks[0].encoded.ids == (1, *ids("red"))
    assert trained.chunks[0].encoded.ids == (1, *ids("red"), VOCABULARY.index("\n"), 1)
