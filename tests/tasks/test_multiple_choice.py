"""MultipleChoiceTask: prompts with any number of candidates give the samples, losses and gradients of transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from heedful.data import ChoiceExample
from heedful.errors import HeedfulError
from heedful.infer.engine import Engine
from heedful.tasks.multiple_choice import MultipleChoiceTask, prompt_windows
from heedful.tasks.task import evaluate_task
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

EXAMPLES = [
    ChoiceExample(prompt="the cat", candidates=("sat on the mat", "wrote it", "ran"), answer=1),
    ChoiceExample(prompt="who ?", candidates=("ada", "the dog"), answer=0),
    ChoiceExample(prompt="", candidates=("a", "", "in paris .", "x"), answer=3),
]
LONG = ChoiceExample(prompt=long_text(60), candidates=("ada", "zed wrote it", ""), answer=2)


def task(**changes: Any) -> MultipleChoiceTask:
    """A task for the tiny model."""
    return MultipleChoiceTask(**{"tokenizer": tokenizer(), "limit": LIMIT} | changes)


# -- samples ------------------------------------------------------------------------------------------------------


def test_a_sample_has_the_prompt_with_every_candidate() -> None:
    encoded = task().encode_split(EXAMPLES)
    assert [len(sample.bounds) - 1 for sample in encoded.samples] == [3, 2, 4]
    assert [sample.target for sample in encoded.samples] == [1, 0, 3]
    assert {sample.weight for sample in encoded.samples} == {1.0}
    backend = load_both("choice").tokenizer
    for example, sample in zip(EXAMPLES, encoded.samples, strict=True):
        for index, candidate in enumerate(example.candidates):
            expected = backend([example.prompt], [candidate])
            sequence = slice(*sample.bounds[index : index + 2])
            assert sample.tokens[sequence].tolist() == expected["input_ids"][0]
            assert sample.types[sequence].tolist() == expected["token_type_ids"][0]


def test_a_batch_has_the_number_of_candidates_of_every_prompt() -> None:
    """The candidates of all prompts are concatenated, so a target is an index into all of them."""
    choice_task = task()
    batch = choice_task.batch(choice_task.encode_split(EXAMPLES).samples, [0] * 3)
    assert batch.groups == (3, 2, 4)
    assert batch.targets.tolist() == [1, 3 + 0, 3 + 2 + 3]
    assert len(batch.packed) == 9
    assert batch.weights.tolist() == [1.0] * 3


def test_windows_of_a_long_prompt_are_the_same_for_every_candidate() -> None:
    choice_task = task(limit=SHORT)
    windows_by_candidate = example_windows(choice_task, LONG)
    samples = choice_task.encode_split([LONG]).samples
    assert len(samples) == len(windows_by_candidate[0]) >= 5
    assert {sample.weight for sample in samples} == {1 / len(samples)}
    prompt_parts: list[list[str]] = []  # the tokens of the prompt in every window
    for index, sample in enumerate(samples):
        assert sample.target == 2 and len(sample.bounds) == 4
        prompts, candidates = [], []
        for number in range(3):
            tokens = sequence_text(sample, number).split()
            assert len(tokens) <= SHORT
            separator = tokens.index("[SEP]")
            prompts.append(tokens[1:separator])
            candidates.append(tokens[separator + 1 : -1])
            ids = tuple(sample.tokens[slice(*sample.bounds[number : number + 2])].tolist())
            assert windows_by_candidate[number][index].ids == ids
        assert prompts[0] == prompts[1] == prompts[2]
        assert candidates == [["ada"], ["z", "##ed", "wrote", "it"], []]
        prompt_parts.append(prompts[0])
    room = SHORT - 3 - 4  # tokens of the prompt beside the longest candidate, which has 4 tokens
    overlap = room - room // 2
    joined = prompt_parts[0] + [token for part in prompt_parts[1:] for token in part[overlap:]]
    assert joined == [tokenizer().name(id) for id in tokenizer().encode(LONG.prompt).ids[1:-1]]


def test_a_prompt_too_long_for_one_candidate_is_windowed_for_all() -> None:
    example = ChoiceExample(prompt=long_text(12), candidates=("a", long_text(8)), answer=0)
    choice_task = task(limit=SHORT + 4)
    lengths = [len(encoding) for encoding in tokenizer().encode_batch(choice_task.tokenizer_inputs(example))]
    assert lengths[0] <= SHORT + 4 < lengths[1]
    windows_of_first, windows_of_second = example_windows(choice_task, example)
    assert len(windows_of_first) == len(windows_of_second) > 1
    assert [window.start for window in windows_of_first] == [window.start for window in windows_of_second]


def test_the_prompt_has_at_least_half_of_the_room() -> None:
    room = 2 * SHORT - 3
    for words in range(1, 60):
        example = ChoiceExample(prompt=long_text(60), candidates=("a", long_text(words)), answer=0)
        encodings = tokenizer().encode_batch(task().tokenizer_inputs(example))
        for windows in prompt_windows(encodings, 2 * SHORT):
            prompt_tokens = windows[0].segments.count(0)
            assert prompt_tokens >= room // 2, words


@pytest.mark.parametrize("prompt", ["", "who", long_text(30)])
def test_overlong_candidates_are_windowed(prompt: str) -> None:
    """Every token of the prompt is together in some window with every token of the candidate."""
    example = ChoiceExample(prompt=prompt, candidates=("a", long_text(30), long_text(25)), answer=1)
    encodings = tokenizer().encode_batch(task().tokenizer_inputs(example))
    windows_by_candidate = prompt_windows(encodings, SHORT)
    assert len(windows_by_candidate[0]) > 1
    assert len({len(windows) for windows in windows_by_candidate}) == 1
    for whole, windows in zip(encodings, windows_by_candidate, strict=True):
        token_pairs = set()
        for window in windows:
            assert len(window) <= SHORT
            offsets_of_segment: dict[int, list[Any]] = {0: [], 1: []}
            for offset, segment in zip(window.offsets, window.segments, strict=True):
                if segment in offsets_of_segment:
                    offsets_of_segment[segment].append(offset)
            token_pairs |= {(a, b) for a in offsets_of_segment[0] or [None] for b in offsets_of_segment[1]}
        assert len(token_pairs) == max(1, whole.segments.count(0)) * whole.segments.count(1)
    samples = task(limit=SHORT).encode_split([example]).samples
    assert len(samples) == len(windows_by_candidate[0])
    assert {sample.target for sample in samples} == {1}
    engine = Engine(load_both("choice").model)
    (answer,) = engine([{"prompt": prompt, "choices": [*example.candidates, long_text(90)]}])
    assert answer["windows"] > 1 and sum(answer["probabilities"]) == pytest.approx(1)
    with pytest.raises(HeedfulError, match="this model reads 4 tokens, and 3 of them are special: that leaves no room"):
        prompt_windows(encodings, 4)


def test_long_inputs_can_be_truncated() -> None:
    encoded = task(limit=SHORT, long_inputs="truncate").encode_split([LONG])
    (sample,) = encoded.samples
    assert (sample.target, sample.weight, encoded.truncated, encoded.windowed) == (2, 1.0, 1, 0)
    assert [stop - start for start, stop in zip(sample.bounds, sample.bounds[1:], strict=False)] == [SHORT] * 3


# -- losses -------------------------------------------------------------------------------------------------------


def reference_output(example: ChoiceExample, **arguments: Any) -> Any:
    """The output of transformers for one prompt with its candidates."""
    pair = load_both("choice")
    rows = pair.tokenizer([example.prompt] * len(example.candidates), list(example.candidates), padding=True)
    batch = {name: torch.tensor(column)[None] for name, column in rows.items()}
    return pair.reference(**batch, **arguments)


def reference_loss(example: ChoiceExample) -> torch.Tensor:
    """The loss of one prompt in transformers."""
    loss: torch.Tensor = reference_output(example, labels=torch.tensor([example.answer])).loss
    return loss


def test_loss_and_gradient_with_different_numbers_of_candidates() -> None:
    pair = load_both("choice")
    expected = torch.stack([reference_loss(example) for example in EXAMPLES]).mean()
    for parts in (1, 2, 3):
        loss = backward_all(task(), pair.model, EXAMPLES, parts)
        assert (loss.count, float(loss.sum) / 3) == (3, pytest.approx(float(expected.detach()), abs=1e-12))
    assert_same_gradients(pair.reference, expected, pair.model, 3)


def test_the_loss_of_windows_counts_as_one_prompt() -> None:
    pair, choice_task = load_both("choice"), task(limit=SHORT)
    with torch.no_grad():
        window_losses = []
        for sample in choice_task.encode_split([LONG]).samples:
            scores = pair.model(choice_task.batch([sample], [0]).packed)
            window_losses.append(float(-scores.log_softmax(0)[2]))
    loss = backward_all(choice_task, pair.model, [LONG, EXAMPLES[1]])
    assert loss.count == pytest.approx(2, abs=1e-6)
    loss_of_long = sum(window_losses) / len(window_losses)
    loss_of_short = float(reference_loss(EXAMPLES[1]).detach())
    assert float(loss.sum) == pytest.approx(loss_of_long + loss_of_short, abs=1e-6)


# -- evaluation ---------------------------------------------------------------------------------------------------


def test_an_evaluation_agrees_with_transformers() -> None:
    choice_task = task()
    examples = [
        ChoiceExample(prompt=f"the {letter}", candidates=("x", "y b", "z"), answer=index % 3)
        for index, letter in enumerate("abcdefgh")
    ]
    examples += EXAMPLES
    losses, right = [], []
    with torch.no_grad():
        for example in examples:
            logits = reference_output(example).logits[0]
            losses.append(float(-logits.log_softmax(0)[example.answer]))
            right.append(int(logits.argmax()) == example.answer)
    measure = evaluate_task(choice_task, Engine(load_both("choice").model), examples)
    metrics = choice_task.compute_metrics(measure)
    assert metrics["accuracy"] == metrics[choice_task.metric] == sum(right) / len(right)
    assert metrics["loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-6)
    interval = measure.intervals()["accuracy"]
    assert interval["low"] < metrics["accuracy"] < interval["high"]


def test_answers_to_long_prompts_are_the_mean_over_their_windows() -> None:
    model, choice_task = load_both("choice").model, task()
    long = ChoiceExample(prompt=long_text(100), candidates=("ada", "zed wrote it", ""), answer=2)
    (answer,) = Engine(model)([choice_task.engine_input(long)])
    with torch.no_grad():
        probabilities = [
            model(choice_task.batch([sample], [0]).packed).softmax(0)
            for sample in choice_task.encode_split([long]).samples
        ]
    assert answer["windows"] == len(probabilities) > 3
    assert answer["probabilities"] == pytest.approx(torch.stack(probabilities).mean(0).tolist(), abs=1e-6)
    assert answer["choice"] == long.candidates[answer["index"]]


def test_worse_mistakes_have_larger_losses() -> None:
    choice_task = task()
    answers = (
        {"index": 0, "probabilities": [1.0, 0.0, 0.0]},
        {"index": 2, "probabilities": [0.2, 0.3, 0.5]},
        {"index": 1, "probabilities": [0.2, 0.5, 0.3]},
        {"index": 1, "probabilities": [0.0, 1.0, 0.0]},
    )
    scored_answers = [choice_task.score_answer(EXAMPLES[0], answer) for answer in answers]
    losses = [scored.loss for scored in scored_answers]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] == 0 and math.isfinite(losses[0])
    assert [scored.correct for scored in scored_answers] == [False, False, True, True]
    assert (scored_answers[0].label, scored_answers[0].prediction) == (1, 0)
