"""QuestionAnswering: target tokens, losses as in transformers, metrics of SQuAD and the threshold for no answer."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from heedful.checkpoint import ModelBundle, create, read_config
from heedful.checkpoint.new_head import with_head
from heedful.data import AnswerSpan, QuestionExample
from heedful.infer.engine import Engine
from heedful.packed import Packed
from heedful.tasks.answering import AnswerContext
from heedful.tasks.qa import NO_ANSWER, QA_HEAD, QuestionAnswering, answer_tokens, no_answer_position
from heedful.tasks.task import evaluate_task
from heedful.tokenizer import Tokenizer, TokenizerSettings, train_tokenizer
from heedful.tokenizer.encoding import pair_windows
from tests.support.model_folders import LIMIT, long_text
from tests.support.task_parity import (
    SHORT,
    assert_same_gradients,
    backward_all,
    example_windows,
    load_both,
    sequence_text,
    tokenizer,
)


def question(text: str, context: str, *answers: str, at: int | None = None) -> QuestionExample:
    """A question whose answers begin at `at`, or else at their first occurrence in the context."""
    spans = tuple(AnswerSpan(answer, context.index(answer) if at is None else at) for answer in answers)
    return QuestionExample(id=text, question=text, context=context, answers=spans, impossible=not answers)


ADA = "In Paris, Ada wrote the first program ."
EXAMPLES = [
    question("who wrote it ?", ADA, "Ada", "Ada wrote"),
    question("where ?", ADA, "Paris"),
    question("what ?", "the dog ran", "dog ran"),
]
LONG = question("who ?", long_text(60), "first program", at=long_text(60).rindex("first program"))


def task(**changes: Any) -> QuestionAnswering:
    """A task for the tiny model."""
    return QuestionAnswering(**{"tokenizer": tokenizer(), "limit": LIMIT, "has_unanswerable": False} | changes)


# -- samples ------------------------------------------------------------------------------------------------------


def target_tokens(sample: Any) -> list[str]:
    """The tokens from the first to the last target position of a sample."""
    first, last = sample.target
    return sequence_text(sample).split()[first : last + 1]


def test_targets_are_the_tokens_of_the_first_answer() -> None:
    encoded = task().encode_split(EXAMPLES)
    assert [target_tokens(sample) for sample in encoded.samples] == [["ada"], ["paris"], ["dog", "ran"]]
    last = encoded.samples[2]
    assert sequence_text(last) == "[CLS] w ##h ##a ##t ? [SEP] the dog ran [SEP]"
    assert last.target == (8, 9)
    assert last.types.tolist() == [0] * 7 + [1] * 4
    assert [sample.weight for sample in encoded.samples] == [1.0] * 3
    assert encoded.skipped == 0


def test_windows_without_the_whole_answer_are_left_out() -> None:
    qa_task = task(limit=SHORT)
    (windows,) = example_windows(qa_task, LONG)
    encoded = qa_task.encode_split([LONG])
    start, stop = LONG.answers[0].start, LONG.answers[0].start + len("first program")

    def has_answer(window: Any) -> bool:
        offsets = [offset for offset, segment in zip(window.offsets, window.segments, strict=True) if segment == 1]
        return any(low == start for low, _ in offsets) and any(high == stop for _, high in offsets)

    windows_with_answer = [window for window in windows if has_answer(window)]
    assert 0 < len(windows_with_answer) < len(windows)
    assert encoded.windowed == 1
    ids_of_samples = [tuple(sample.tokens.tolist()) for sample in encoded.samples]
    assert ids_of_samples == [window.ids for window in windows_with_answer]
    assert {sample.weight for sample in encoded.samples} == {1 / len(windows_with_answer)}
    for sample in encoded.samples:
        assert target_tokens(sample) == ["first", "program"]


def test_windows_without_the_answer_learn_no_answer_if_some_questions_have_none() -> None:
    qa_task = task(limit=SHORT, has_unanswerable=True)
    (windows,) = example_windows(qa_task, LONG)
    samples = qa_task.encode_split([LONG]).samples
    assert len(samples) == len(windows)
    assert {sample.weight for sample in samples} == {1 / len(windows)}
    with_answer = task(limit=SHORT).encode_split([LONG]).samples
    assert 0 < len(with_answer) < len(windows)
    targets = [sample.target for sample in samples if sample.target != (0, 0)]
    assert targets == [sample.target for sample in with_answer]
    (unanswerable,) = qa_task.encode_split([question("why ?", "the cat sat")]).samples
    assert (unanswerable.target, unanswerable.weight) == ((0, 0), 1.0)


@cache
def decoder() -> ModelBundle:
    """A tiny GPT-2 for question answering."""
    tiny = {"n_embd": 32, "n_layer": 2, "n_head": 2, "activation_function": "gelu_new", "n_positions": LIMIT}
    values = {"model_type": "gpt2", "architectures": ["GPT2ForQuestionAnswering"], "vocab_size": tokenizer().size}
    return create(read_config(values | tiny, "config.json"), tokenizer(), seed=1).eval()


def test_a_decoder_scores_no_answer_at_its_last_token() -> None:
    """Only the last token sees the question and the whole context."""
    inputs = [
        {"question": "who wrote it ?", "context": ADA},
        {"question": "who ran ?", "context": "the dog ran"},
    ]
    engine = Engine(decoder())
    first, second = engine(inputs)
    assert abs(first["no_answer_score"] - second["no_answer_score"]) > 1e-3
    ids = tokenizer().encode((inputs[1]["question"], inputs[1]["context"])).ids
    with torch.no_grad():
        scores = decoder()(Packed.of([list(ids)]))
    assert abs(second["no_answer_score"] - float(scores[-1].sum())) < 1e-5
    qa_task = task(has_unanswerable=True, null_position=no_answer_position(decoder().config.head))
    (sample,) = qa_task.encode_split([question("why ?", "the cat sat")]).samples
    assert sample.target == (len(sample) - 1, len(sample) - 1)


@pytest.mark.parametrize("family", ["gpt2", "heedful"])
def test_a_new_head_of_a_decoder_scores_no_answer_at_its_last_token(family: str) -> None:
    config = replace(decoder().config, family=family, hf_config={}, head=None)
    head = with_head(create(config, tokenizer()), "question_answering").config.head
    assert no_answer_position(head) == -1
    assert no_answer_position(load_both("span").model.config.head) == 0


def test_answers_without_tokens_are_left_out_and_counted() -> None:
    without_tokens = question("what ?", "the \u200b cat sat", "\u200b")
    too_long = question("what ?", long_text(60), long_text(40))
    for has_unanswerable in (False, True):  # they must not be learned as questions without an answer either
        qa_task = task(limit=SHORT, has_unanswerable=has_unanswerable)
        encoded = qa_task.encode_split([without_tokens, too_long, EXAMPLES[2]])
        assert (encoded.examples, encoded.skipped, len(encoded.samples)) == (3, 2, 1)


def test_answers_longer_than_max_answer_tokens_are_counted() -> None:
    words = "a b c d e f g h i j k l m n o p"
    examples = [question("what ?", words, words[:size]) for size in (9, 11, 31)]  # 5, 6 and 16 tokens
    for max_tokens, count in ((16, 0), (15, 1), (5, 2), (4, 3)):
        remark = f"have an answer that is longer than task.max_answer_tokens={max_tokens}"
        assert task(max_answer_tokens=max_tokens).encode_split(examples).remarks == ({remark: count} if count else {})
    assert task(max_answer_tokens=1).encode_split([question("why ?", words), *EXAMPLES[:2]]).remarks == {}


@pytest.mark.parametrize(
    ("context", "answer", "expected"),
    [
        ("the cat sat", " cat ", ["cat"]),  # white space has no tokens
        ("the cats sat", "cat", ["cat"]),
        ("the abcat sat", "cat", ["##c", "##a", "##t"]),
        ("the cat sat", "at sa", ["cat", "sat"]),  # an answer that begins inside a token has the whole token
        ("the \u200bcat sat", "\u200bcat", ["cat"]),  # characters without tokens are ignored
        ("the cat\u200b sat", "cat\u200b", ["cat"]),
        ("e\u0301 the x", "e\u0301", ["e"]),
    ],
)
def test_targets_are_all_tokens_that_overlap_the_answer(context: str, answer: str, expected: list[str]) -> None:
    for has_unanswerable in (False, True):
        (sample,) = task(has_unanswerable=has_unanswerable).encode_split([question("who ?", context, answer)]).samples
        assert target_tokens(sample) == expected


def test_answers_in_the_truncated_part_are_left_out() -> None:
    words = long_text(60)
    qa_task = task(long_inputs="truncate", limit=SHORT)
    start, stop = tokenizer().encode(("who ?", words)).offsets[SHORT - 2]  # offsets of the last token that is left
    inside = question("who ?", words, words[start:stop], at=start)
    across = question("who ?", words, words[start : stop + 4], at=start)
    after = question("who ?", words, words[stop + 1 : stop + 3], at=stop + 1)
    encoded = qa_task.encode_split([inside, across, after])
    assert (len(encoded.samples), encoded.skipped, encoded.truncated, encoded.windowed) == (1, 2, 3, 0)
    assert encoded.samples[0].target == (SHORT - 2, SHORT - 2)


TEXTS = ["the cat sat on the mat, the dog ran to Paris and zoos", "über 🦊 naïve étude 東京 don't"]
TOKENIZERS: dict[str, Tokenizer] = {
    kind: train_tokenizer(
        TEXTS, TokenizerSettings(algorithm=kind, vocab_size=320 if kind == "bpe" else 90, min_frequency=1)
    )  # type: ignore[arg-type]
    for kind in ("wordpiece", "bpe", "unigram")
}


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(st.text(st.sampled_from("acdehmnoprst  .,'éü🦊東"), min_size=1, max_size=60), st.data())
def test_spans_map_back_to_the_answer(kind: str, context: str, data: st.DataObject) -> None:
    """The target is the fewest tokens whose characters include the answer, with every kind of tokenizer."""
    start = data.draw(st.integers(0, len(context) - 1))
    stop = data.draw(st.integers(start + 1, len(context)))
    limit = data.draw(st.integers(12, 60))
    assume(context[start:stop].strip())
    qa_task = QuestionAnswering(tokenizer=TOKENIZERS[kind], limit=limit, has_unanswerable=False)
    example = question("a", context, context[start:stop], at=start)
    (windows,) = example_windows(qa_task, example)
    whole = qa_task.tokenizer.encode(("a", context))
    span_by_window = answer_tokens(windows, context, example.answers[0])
    (whole_span,) = answer_tokens([whole], context, example.answers[0])
    assert whole_span is not None
    first, last = whole_span
    answer_start = stop - len(context[start:stop].lstrip())  # without white space around the answer
    answer_stop = len(context[:stop].rstrip())
    first_offsets, last_offsets = whole.offsets[first], whole.offsets[last]
    assert first_offsets[0] <= answer_start and last_offsets[1] >= answer_stop
    assert first_offsets[1] > answer_start and last_offsets[0] < answer_stop, "no token is superfluous"
    for window, span in zip(windows, span_by_window, strict=True):
        window_position = {
            window.start + position: position for position, segment in enumerate(window.segments) if segment == 1
        }
        if first in window_position and last in window_position:
            assert span == (window_position[first], window_position[last])
        else:
            assert span is None
    assert len(qa_task.encode_split([example]).samples) == sum(span is not None for span in span_by_window)


# -- losses -------------------------------------------------------------------------------------------------------


def reference_loss(model: Any, sample: Any) -> torch.Tensor:
    """The loss of one sequence in transformers; in a padded batch, its softmax would include the padding."""
    loss: torch.Tensor = model(
        input_ids=torch.from_numpy(sample.tokens).long()[None],
        token_type_ids=torch.from_numpy(sample.types).long()[None],
        start_positions=torch.tensor([sample.target[0]]),
        end_positions=torch.tensor([sample.target[1]]),
    ).loss
    return loss


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_loss_and_gradient(dtype: torch.dtype, tolerance: float) -> None:
    pair, qa_task = load_both("span", dtype), task(has_unanswerable=True)
    examples = [*EXAMPLES, question("why ?", "the cat sat")]
    samples = qa_task.encode_split(examples).samples
    expected = torch.stack([reference_loss(pair.reference, sample) for sample in samples]).mean()
    for parts in (1, 3):
        loss = backward_all(qa_task, pair.model, examples, parts)
        assert loss.count == 4
        assert float(loss.sum) / 4 == pytest.approx(float(expected.detach()), abs=1e-6)
    assert_same_gradients(pair.reference, expected, pair.model, 4, tolerance)


def test_the_loss_of_windows_counts_as_one_question() -> None:
    pair, qa_task = load_both("span"), task(limit=SHORT, has_unanswerable=True)
    with torch.no_grad():
        window_losses = [
            float(reference_loss(pair.reference, sample)) for sample in qa_task.encode_split([LONG]).samples
        ]
    loss = backward_all(qa_task, pair.model, [LONG])
    assert loss.count == pytest.approx(1, abs=1e-6)
    assert float(loss.sum) == pytest.approx(sum(window_losses) / len(window_losses), abs=1e-6)


# -- evaluation ---------------------------------------------------------------------------------------------------


def engine_answer(text: str, score: float | None = 1.0, no_answer_score: float = 0.0, **fields: Any) -> dict[str, Any]:
    """The engine's answer with these scores."""
    return {"answer": text, "score": score, "no_answer_score": no_answer_score} | fields


def test_scores_are_over_all_gold_answers() -> None:
    qa_task = task()
    answers = [engine_answer("wrote Ada"), engine_answer("The Paris!"), engine_answer("the dog")]
    measure = qa_task.update_metrics(qa_task.new_metrics(), 10 * EXAMPLES, 10 * answers, range(30))
    metrics = qa_task.compute_metrics(measure)
    # the words of "Ada wrote" in another order; "Paris" without article and mark; "dog" of "dog ran"
    f1 = (1.0, 1.0, 2 / 3)
    assert metrics["exact"] == 1 / 3 and metrics["f1"] == pytest.approx(sum(f1) / 3)
    assert metrics["version"] == "1.1"
    assert metrics["count"] == 30
    assert "best_f1" not in metrics
    assert metrics[qa_task.metric] == metrics["f1"]
    intervals = measure.intervals()
    for name in ("exact", "f1"):
        assert 0 < intervals[name]["low"] < metrics[name] < intervals[name]["high"] < 1, name


def test_the_best_thresholds_for_no_answer() -> None:
    qa_task = task(has_unanswerable=True)
    examples = [*EXAMPLES[:2], question("why ?", ADA), question("how ?", ADA)]
    answers = [  # the comments have the score of no answer minus that of the answer; the answers are for threshold 0
        engine_answer("Ada", 5.0, 3.0, best_answer="Ada"),  # -2
        engine_answer("", 1.0, 2.0, best_answer="Paris"),  # 1: with threshold 1 this would be right
        engine_answer("", 1.0, 4.0, best_answer="Ada"),  # 3
        engine_answer("", None, 2.0, best_answer=""),
    ]
    metrics = qa_task.compute_metrics(qa_task.update_metrics(qa_task.new_metrics(), examples, answers, range(4)))
    assert (metrics["exact"], metrics["answerable_exact"], metrics["unanswerable_exact"]) == (0.75, 0.5, 1.0)
    assert (metrics["best_exact"], metrics["best_exact_threshold"]) == (1.0, 1.0)
    assert (metrics["best_f1"], metrics["best_f1_threshold"], metrics["version"]) == (1.0, 1.0, "2.0")
    without_threshold = [{name: value for name, value in answer.items() if name != "best_answer"} for answer in answers]
    measure = qa_task.update_metrics(qa_task.new_metrics(), examples, without_threshold, range(4))
    assert qa_task.compute_metrics(measure)["exact"] == 0.75


def test_the_engine_answers_nothing_above_the_threshold() -> None:
    model, qa_task = load_both("span").model, task(has_unanswerable=True)
    engine = Engine(model)
    inputs = [qa_task.engine_input(example) for example in (*EXAMPLES, LONG)]
    answers = engine(inputs)
    assert all("best_answer" not in answer and answer["answer"] for answer in answers)
    gaps = sorted(answer["no_answer_score"] - answer["score"] for answer in answers)
    try:
        for threshold in (gaps[0] - 1, gaps[1], (gaps[1] + gaps[2]) / 2, gaps[3]):
            model.thresholds = {NO_ANSWER: threshold}
            for answer, before in zip(engine(inputs), answers, strict=True):
                assert answer["best_answer"] == before["answer"]
                assert answer["score"] == before["score"]
                assert answer["no_answer_score"] == before["no_answer_score"]
                expected = {"answer": "", "start": 0, "end": 0}
                if before["no_answer_score"] - before["score"] <= threshold:
                    expected = {name: before[name] for name in expected}
                assert {name: answer[name] for name in expected} == expected
        model.thresholds = {NO_ANSWER: 1e9}
        (empty,) = engine([{"question": "who ?", "context": ""}])
        assert (empty["answer"], empty["best_answer"], empty["score"]) == ("", "", None)
    finally:
        model.thresholds = {}


@pytest.mark.parametrize("thresholds", [{}, {NO_ANSWER: 0.0}])
def test_the_answer_of_a_question_without_windows(thresholds: dict[str, float]) -> None:
    """GPT-2's tokenizer adds no special tokens, so an empty question and context have no tokens and no windows."""
    head = load_both("span").model.config.head
    assert head is not None
    setting = AnswerContext(tokenizer=tokenizer(), head=head, top_k=1, thresholds=thresholds)
    answer = QA_HEAD.answer({"question": "", "context": ""}, [], setting)
    assert answer["answer"] == ""
    assert answer["score"] is None
    assert answer["no_answer_score"] == 0.0
    assert answer["windows"] == 0


def test_an_evaluation_with_the_best_threshold_has_the_best_f1() -> None:
    model, qa_task = load_both("span").model, task(has_unanswerable=True)
    engine = Engine(model)
    words = ["cat", "dog", "paris", "ada", "mat", "first"]
    examples = [question(f"who {word} ?", f"the {word} ran to paris", word) for word in words]
    examples += [question(f"where {word} ?", f"she wrote {word} in france") for word in words]
    try:
        model.thresholds = {NO_ANSWER: 0.0}
        metrics = qa_task.compute_metrics(evaluate_task(qa_task, engine, examples))
        model.thresholds = {NO_ANSWER: metrics["best_f1_threshold"]}
        metrics_with_threshold = qa_task.compute_metrics(evaluate_task(qa_task, engine, examples))
        assert metrics_with_threshold["f1"] == pytest.approx(metrics["best_f1"], abs=1e-12)
        assert metrics_with_threshold["f1"] >= metrics["f1"]
    finally:
        model.thresholds = {}


def test_answers_of_long_contexts_have_offsets_in_the_whole_context() -> None:
    qa_task, engine = task(), Engine(load_both("span").model)
    examples = [question("who ?", long_text(n), "ada") for n in (100, 130)]
    answers: list[dict[str, Any]] = []
    measure = evaluate_task(
        qa_task, engine, examples, on_answer=lambda number, example, answer, scored: answers.append(answer)
    )
    assert qa_task.compute_metrics(measure)["count"] == 2
    for example, answer in zip(examples, answers, strict=True):
        assert answer["windows"] > 1
        assert answer["answer"] == example.context[answer["start"] : answer["end"]] != ""


def test_worse_mistakes_have_larger_losses() -> None:
    qa_task = task(has_unanswerable=True)
    texts = ("dog", "Ada Paris x", "Ada wrote the", "ada")
    scored_answers = [qa_task.score_answer(EXAMPLES[0], engine_answer(text, best_answer=text)) for text in texts]
    assert [scored.correct for scored in scored_answers] == [False, False, True, True]
    losses = [scored.loss for scored in scored_answers]
    assert losses[0] == 1 > losses[1] > losses[2] == losses[3] == 0
    assert scored_answers[0].label == ["Ada", "Ada wrote"]
    assert scored_answers[0].prediction == "dog"
    scored_no_answer = qa_task.score_answer(question("why ?", ADA), engine_answer("", best_answer="Ada"))
    assert (scored_no_answer.label, scored_no_answer.prediction, scored_no_answer.correct) == ("", "", True)


@pytest.mark.parametrize("words", [3, 60])
def test_overlong_questions_are_windowed(words: int) -> None:
    """The question itself is split too; the answer is the best over all windows."""
    context = long_text(words)
    example = question(long_text(60), context, context.split()[1])
    qa_task = task(limit=SHORT)
    (windows,) = example_windows(qa_task, example)
    question_starts = {window.first_text_start for window in windows}
    assert len(question_starts) > 3
    samples = qa_task.encode_split([example]).samples
    assert len(samples) >= len(question_starts)
    for sample in samples:
        assert target_tokens(sample) == [context.split()[1]]
    loaded = load_both("span").model
    answer = Engine(loaded)([qa_task.engine_input(example)])[0]
    engine_windows = pair_windows(tokenizer().encode((example.question, example.context)), LIMIT)
    best = -math.inf  # the highest score of any span of up to 30 tokens
    for window in engine_windows:
        scores = loaded(Packed.of([window.ids], [window.types])).detach()
        for first in range(window.segments.index(1), len(window) - 1):
            for last in range(first, min(first + 30, len(window) - 1)):
                best = max(best, float(scores[first, 0] + scores[last, 1]))
    assert answer["windows"] == len(engine_windows)
    if words == 3:
        assert answer["score"] == pytest.approx(best, abs=1e-5)
    else:
        assert answer["score"] <= best + 1e-5
    assert evaluate_task(qa_task, Engine(loaded), [example]).metrics["squad"].compute()["count"] == 1
