"""Extraction learns spans that map back to the answer; evaluations count every gold answer, and thresholds."""

from __future__ import annotations

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
    """Answers where they stand first in the context."""
    spans = tuple(AnswerSpan(answer, context.index(answer) if at is None else at) for answer in answers)
    return QuestionExample(id=text, question=text, context=context, answers=spans, impossible=not answers)


ADA = "In Paris, Ada wrote the first program ."
EXAMPLES = [
    question("who wrote it ?", ADA, "Ada", "Ada wrote"),
    question("where ?", ADA, "Paris"),
    question("what ?", "the dog ran", "dog ran"),
]
LONG = question("who ?", long_text(60), "first program", at=long_text(60).rindex("first program"))


def task(**more: Any) -> QuestionAnswering:
    """For the tiny model."""
    return QuestionAnswering(**{"tokenizer": tokenizer(), "limit": LIMIT, "has_unanswerable": False} | more)


# -- samples ------------------------------------------------------------------------------------------------------


def test_targets_are_the_tokens_of_the_first_answer() -> None:
    read = task().encode_split(EXAMPLES)
    answers = [sequence_text(sample).split()[sample.target[0] : sample.target[1] + 1] for sample in read.samples]
    assert answers == [["ada"], ["paris"], ["dog", "ran"]]
    assert sequence_text(read.samples[2]) == "[CLS] w ##h ##a ##t ? [SEP] the dog ran [SEP]"
    assert read.samples[2].target == (8, 9) and read.samples[2].types.tolist() == [0] * 7 + [1] * 4
    assert [sample.weight for sample in read.samples] == [1.0] * 3 and read.skipped == 0


def test_windows_with_the_whole_answer_are_kept() -> None:
    qa_task = task(limit=SHORT)
    (windows,) = example_windows(qa_task, LONG)
    read = qa_task.encode_split([LONG])
    start, stop = LONG.answers[0].start, LONG.answers[0].start + len("first program")
    holding = [
        window
        for window in windows
        if any(low == start for low, _ in context(window)) and any(high == stop for _, high in context(window))
    ]
    assert 0 < len(holding) == len(read.samples) < len(windows) and read.windowed == 1
    assert [tuple(sample.tokens.tolist()) for sample in read.samples] == [window.ids for window in holding]
    assert {sample.weight for sample in read.samples} == {1 / len(holding)}
    for sample in read.samples:
        assert sequence_text(sample).split()[sample.target[0] : sample.target[1] + 1] == ["first", "program"]


def context(window: Any) -> list[tuple[int, int]]:
    """The offsets of its tokens of the context."""
    return [offset for offset, segment in zip(window.offsets, window.segments, strict=True) if segment == 1]


def test_windows_without_the_answer_point_at_the_first_token_where_some_questions_have_none() -> None:
    qa_task = task(limit=SHORT, has_unanswerable=True)
    (windows,) = example_windows(qa_task, LONG)
    samples = qa_task.encode_split([LONG]).samples
    assert len(samples) == len(windows) and {sample.weight for sample in samples} == {1 / len(windows)}
    empty = [sample for sample in samples if sample.target == (0, 0)]
    kept = task(limit=SHORT).encode_split([LONG]).samples
    assert len(empty) == len(windows) - len(kept) > 0
    assert [window.target for window in samples if window.target != (0, 0)] == [window.target for window in kept]
    (none,) = qa_task.encode_split([question("why ?", "the cat sat")]).samples
    assert (none.target, none.weight) == ((0, 0), 1.0)


@cache
def decoder() -> ModelBundle:
    """A tiny decoder alone."""
    tiny = {"n_embd": 32, "n_layer": 2, "n_head": 2, "activation_function": "gelu_new", "n_positions": LIMIT}
    values = {"model_type": "gpt2", "architectures": ["GPT2ForQuestionAnswering"], "vocab_size": tokenizer().size}
    return create(read_config(values | tiny, "config.json"), tokenizer(), seed=1).eval()


def test_a_decoder_scores_no_answer_at_its_last_token_which_sees_all() -> None:
    asked = [
        {"question": "who wrote it ?", "context": ADA},
        {"question": "who ran ?", "context": "the dog ran"},
    ]
    engine = Engine(decoder())
    first, second = engine(asked)
    assert abs(first["no_answer_score"] - second["no_answer_score"]) > 1e-3
    ids = tokenizer().encode((asked[1]["question"], asked[1]["context"])).ids
    with torch.no_grad():
        rows = decoder()(Packed.of([list(ids)]))
    assert abs(second["no_answer_score"] - float(rows[-1].sum())) < 1e-5
    qa_task = task(has_unanswerable=True, null_position=no_answer_position(decoder().config.head))
    (sample,) = qa_task.encode_split([question("why ?", "the cat sat")]).samples
    assert sample.target == (len(sample) - 1, len(sample) - 1)


@pytest.mark.parametrize("family", ["gpt2", "heedful"])
def test_a_new_head_of_a_decoder_scores_no_answer_at_its_last_token(family: str) -> None:
    config = replace(decoder().config, family=family, hf_config={}, head=None)
    head = with_head(create(config, tokenizer()), "question_answering").config.head
    assert no_answer_position(head) == -1 and no_answer_position(load_both("span").model.config.head) == 0


def test_answers_that_no_tokens_match_are_left_out_and_counted() -> None:
    lost = question("what ?", "the \u200b cat sat", "\u200b")
    wide = question("what ?", long_text(60), long_text(40))
    for impossible in (False, True):  # it is no question without an answer
        read = task(limit=SHORT, has_unanswerable=impossible).encode_split([lost, wide, EXAMPLES[2]])
        assert (read.examples, read.skipped, len(read.samples)) == (3, 2, 1)


def test_answers_that_are_too_long_to_be_given_are_counted() -> None:
    words = "a b c d e f g h i j k l m n o p"
    examples = [question("what ?", words, words[:size]) for size in (9, 11, 31)]  # 5, 6 and 16 tokens
    for most, count in ((16, 0), (15, 1), (5, 2), (4, 3)):
        remark = f"have an answer that is longer than task.max_answer_tokens={most}"
        assert task(max_answer_tokens=most).encode_split(examples).remarks == ({remark: count} if count else {})
    assert task(max_answer_tokens=1).encode_split([question("why ?", words), *EXAMPLES[:2]]).remarks == {}


@pytest.mark.parametrize(
    ("context", "answer", "expected"),
    [
        ("the cat sat", " cat ", ["cat"]),  # white space has no tokens
        ("the cats sat", "cat", ["cat", "##s"][:1]),
        ("the abcat sat", "cat", ["##c", "##a", "##t"]),
        ("the cat sat", "at sa", ["cat", "sat"]),  # whole tokens, where the answer begins inside one
        ("the \u200bcat sat", "\u200bcat", ["cat"]),  # what the tokenizer drops is not missed
        ("the cat\u200b sat", "cat\u200b", ["cat"]),
        ("e\u0301 the x", "e\u0301", ["e"]),
    ],
)
def test_targets_are_all_tokens_that_the_answer_touches(context: str, answer: str, expected: list[str]) -> None:
    for impossible in (False, True):
        (sample,) = task(has_unanswerable=impossible).encode_split([question("who ?", context, answer)]).samples
        assert sequence_text(sample).split()[sample.target[0] : sample.target[1] + 1] == expected


def test_answers_in_what_is_cut_off_are_left_out() -> None:
    words = long_text(60)
    qa_task = task(long_inputs="truncate", limit=SHORT)
    tokens = tokenizer().encode(("who ?", words)).offsets[4 : SHORT - 1]
    last, stop = tokens[-1]
    inside = question("who ?", words, words[last:stop], at=last)
    over = question("who ?", words, words[last : stop + 4], at=last)
    after = question("who ?", words, words[stop + 1 : stop + 3], at=stop + 1)
    read = qa_task.encode_split([inside, over, after])
    assert (len(read.samples), read.skipped, read.truncated, read.windowed) == (1, 2, 3, 0)
    assert read.samples[0].target == (SHORT - 2, SHORT - 2)


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
    """By offsets in characters, whatever the tokenizer; and as few tokens as hold it."""
    start = data.draw(st.integers(0, len(context) - 1))
    stop = data.draw(st.integers(start + 1, len(context)))
    limit = data.draw(st.integers(12, 60))
    assume(context[start:stop].strip())
    qa_task = QuestionAnswering(tokenizer=TOKENIZERS[kind], limit=limit, has_unanswerable=False)
    example = question("a", context, context[start:stop], at=start)
    (windows,) = example_windows(qa_task, example)
    whole = qa_task.tokenizer.encode(("a", context))
    span = answer_tokens(windows, context, example.answers[0])
    (place,) = answer_tokens([whole], context, example.answers[0])
    assert place is not None
    low, high = (start + len(context[start:stop]) - len(context[start:stop].lstrip()), len(context[:stop].rstrip()))
    spans = whole.offsets[place[0] : place[1] + 1]
    assert spans[0][0] <= low and spans[-1][1] >= high
    assert spans[0][1] > low and spans[-1][0] < high  # without its first or its last token it would be less
    for window, bounds in zip(windows, span, strict=True):
        shifted = {window.start + at: at for at, segment in enumerate(window.segments) if segment == 1}
        expected = (shifted.get(place[0]), shifted.get(place[1]))
        assert bounds == (None if None in expected else expected)
    assert len(qa_task.encode_split([example]).samples) == sum(bounds is not None for bounds in span)


# -- losses -------------------------------------------------------------------------------------------------------


def their_loss(model: Any, sample: Any) -> torch.Tensor:
    """transformers', of one sequence: its softmax would go over padding too."""
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
    expected = torch.stack([their_loss(pair.reference, sample) for sample in samples]).mean()
    for parts in (1, 3):
        loss = backward_all(qa_task, pair.model, examples, parts)
        assert loss.count == 4
        assert float(loss.sum) / 4 == pytest.approx(float(expected.detach()), abs=1e-6)
    assert_same_gradients(pair.reference, expected, pair.model, 4, tolerance)


def test_windows_count_as_one_question() -> None:
    pair, qa_task = load_both("span"), task(limit=SHORT, has_unanswerable=True)
    with torch.no_grad():
        each = [float(their_loss(pair.reference, sample)) for sample in qa_task.encode_split([LONG]).samples]
    loss = backward_all(qa_task, pair.model, [LONG])
    assert loss.count == pytest.approx(1, abs=1e-6) and float(loss.sum) == pytest.approx(
        sum(each) / len(each), abs=1e-6
    )


# -- evaluation ---------------------------------------------------------------------------------------------------


def answered(text: str, score: float | None = 1.0, nothing: float = 0.0, **more: Any) -> dict[str, Any]:
    """As the engine answers."""
    return {"answer": text, "score": score, "no_answer_score": nothing} | more


def test_scores_are_over_all_gold_answers() -> None:
    qa_task = task()
    answers = [answered("wrote Ada"), answered("The Paris!"), answered("the dog")]
    measure = qa_task.update_metrics(qa_task.new_metrics(), 10 * EXAMPLES, 10 * answers, range(30))
    metrics = qa_task.compute_metrics(measure)
    f1 = (1.0, 1.0, 2 / 3)  # the words of "Ada wrote"; articles and points do not count; "dog" of "dog ran"
    assert metrics["exact"] == 1 / 3 and metrics["f1"] == pytest.approx(sum(f1) / 3)
    assert metrics["version"] == "1.1" and metrics["count"] == 30 and "best_f1" not in metrics
    assert metrics[qa_task.metric] == metrics["f1"]
    intervals = measure.intervals()
    for name in ("exact", "f1"):
        assert 0 < intervals[name]["low"] < metrics[name] < intervals[name]["high"] < 1, name


def test_thresholds_are_found_where_some_questions_have_no_answer() -> None:
    qa_task = task(has_unanswerable=True)
    examples = [*EXAMPLES[:2], question("why ?", ADA), question("how ?", ADA)]
    answers = [
        answered("Ada", 5.0, 3.0, best_answer="Ada"),  # no answer by -2
        answered("", 1.0, 2.0, best_answer="Paris"),  # by 1: the threshold 0 is too low
        answered("", 1.0, 4.0, best_answer="Ada"),  # by 3
        answered("", None, 2.0, best_answer=""),
    ]
    metrics = qa_task.compute_metrics(qa_task.update_metrics(qa_task.new_metrics(), examples, answers, range(4)))
    assert (metrics["exact"], metrics["answerable_exact"], metrics["unanswerable_exact"]) == (0.75, 0.5, 1.0)
    assert (metrics["best_exact"], metrics["best_exact_threshold"]) == (1.0, 1.0)
    assert (metrics["best_f1"], metrics["best_f1_threshold"], metrics["version"]) == (1.0, 1.0, "2.0")
    plain = [{name: value for name, value in answer.items() if name != "best_answer"} for answer in answers]
    assert (
        qa_task.compute_metrics(qa_task.update_metrics(qa_task.new_metrics(), examples, plain, range(4)))["exact"]
        == 0.75
    )  # never calibrated


def test_the_engine_says_nothing_above_the_threshold() -> None:
    ours, qa_task = load_both("span").model, task(has_unanswerable=True)
    engine = Engine(ours)
    inputs = [qa_task.engine_input(example) for example in (*EXAMPLES, LONG)]
    plain = engine(inputs)
    assert all("best_answer" not in answer and answer["answer"] for answer in plain)
    gaps = sorted(answer["no_answer_score"] - answer["score"] for answer in plain)
    try:
        for threshold in (gaps[0] - 1, gaps[1], (gaps[1] + gaps[2]) / 2, gaps[3]):
            ours.thresholds = {NO_ANSWER: threshold}
            for answer, before in zip(engine(inputs), plain, strict=True):
                says = before["no_answer_score"] - before["score"] <= threshold
                assert answer["best_answer"] == before["answer"]
                assert answer["answer"] == (before["answer"] if says else "")
                assert (answer["start"], answer["end"]) == ((before["start"], before["end"]) if says else (0, 0))
                assert (answer["score"], answer["no_answer_score"]) == (before["score"], before["no_answer_score"])
        ours.thresholds = {NO_ANSWER: 1e9}
        (empty,) = engine([{"question": "who ?", "context": ""}])
        assert (empty["answer"], empty["best_answer"], empty["score"]) == ("", "", None)
    finally:
        ours.thresholds = {}


@pytest.mark.parametrize("thresholds", [{}, {NO_ANSWER: 0.0}])
def test_where_there_is_nothing_to_read_there_is_no_answer(thresholds: dict[str, float]) -> None:
    """No tokens, and so no windows: the published GPT-2 puts nothing around a question and a context without text."""
    head = load_both("span").model.config.head
    assert head is not None
    setting = AnswerContext(tokenizer=tokenizer(), head=head, top_k=1, thresholds=thresholds)
    only_answer = QA_HEAD.answer({"question": "", "context": ""}, [], setting)
    assert (only_answer["answer"], only_answer["score"], only_answer["no_answer_score"], only_answer["windows"]) == (
        "",
        None,
        0.0,
        0,
    )


def test_a_threshold_that_was_found_gives_the_scores_that_were_promised() -> None:
    ours, qa_task = load_both("span").model, task(has_unanswerable=True)
    engine = Engine(ours)
    words = ["cat", "dog", "paris", "ada", "mat", "first"]
    examples = [question(f"who {word} ?", f"the {word} ran to paris", word) for word in words]
    examples += [question(f"where {word} ?", f"she wrote {word} in france") for word in words]
    try:
        ours.thresholds = {NO_ANSWER: 0.0}
        metrics = qa_task.compute_metrics(evaluate_task(qa_task, engine, examples))
        ours.thresholds = {NO_ANSWER: metrics["best_f1_threshold"]}
        again = qa_task.compute_metrics(evaluate_task(qa_task, engine, examples))
        assert again["f1"] == pytest.approx(metrics["best_f1"], abs=1e-12) and again["f1"] >= metrics["f1"]
    finally:
        ours.thresholds = {}


def test_answers_of_long_contexts_are_found_in_the_whole_of_them() -> None:
    qa_task, engine = task(), Engine(load_both("span").model)
    examples = [question("who ?", long_text(n), "ada") for n in (100, 130)]
    messages: list[dict[str, Any]] = []
    measure = evaluate_task(
        qa_task, engine, examples, on_answer=lambda number, example, answer, judged: messages.append(answer)
    )
    assert qa_task.compute_metrics(measure)["count"] == 2
    for example, answer in zip(examples, messages, strict=True):
        assert answer["windows"] > 1 and answer["answer"] == example.context[answer["start"] : answer["end"]] != ""


def test_mistakes_come_in_order() -> None:
    qa_task = task(has_unanswerable=True)
    texts = ("dog", "Ada Paris x", "Ada wrote the", "ada")
    judged = [qa_task.score_answer(EXAMPLES[0], answered(text, best_answer=text)) for text in texts]
    assert [scored.correct for scored in judged] == [False, False, True, True]
    loss = [scored.loss for scored in judged]
    assert loss[0] == 1 > loss[1] > loss[2] == loss[3] == 0
    assert judged[0].label == ["Ada", "Ada wrote"] and judged[0].prediction == "dog"
    none = qa_task.score_answer(question("why ?", ADA), answered("", best_answer="Ada"))
    assert (none.label, none.prediction, none.correct) == ("", "", True)


@pytest.mark.parametrize("words", [3, 60])
def test_questions_that_fill_the_window_are_windowed_too(words: int) -> None:
    """Of all questions that its windows ask, the best answer is taken."""
    context = long_text(words)
    asked = question(long_text(60), context, context.split()[1])
    qa_task = task(limit=SHORT)
    (windows,) = example_windows(qa_task, asked)
    assert len({window.first_text_start for window in windows}) > 3
    samples = qa_task.encode_split([asked]).samples
    assert len(samples) >= len({window.first_text_start for window in windows})
    for sample in samples:
        assert sequence_text(sample).split()[sample.target[0] : sample.target[1] + 1] == context.split()[1].split()
    loaded, encoded = load_both("span").model, tokenizer().encode((asked.question, asked.context))
    answer = Engine(loaded)([qa_task.engine_input(asked)])[0]
    best = max(
        float(scores[low, 0] + scores[high, 1])
        for window in pair_windows(encoded, LIMIT)
        for scores in [loaded(Packed.of([window.ids], [window.types])).detach()]
        for low in range(window.segments.index(1), len(window) - 1)
        for high in range(low, min(low + 30, len(window) - 1))
    )
    assert answer["windows"] == len(pair_windows(encoded, LIMIT))
    assert answer["score"] == pytest.approx(best, abs=1e-5) if words == 3 else answer["score"] <= best + 1e-5
    assert evaluate_task(qa_task, Engine(loaded), [asked]).metrics["squad"].compute()["count"] == 1
