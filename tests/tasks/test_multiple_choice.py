"""Choosing learns from prompts with any number of candidates, long prompts included, as transformers does."""

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


def task(**more: Any) -> MultipleChoiceTask:
    """For the tiny model."""
    return MultipleChoiceTask(**{"tokenizer": tokenizer(), "limit": LIMIT} | more)


# -- samples ------------------------------------------------------------------------------------------------------


def test_a_sample_is_a_prompt_beside_each_candidate() -> None:
    read = task().encode_split(EXAMPLES)
    assert [len(sample.bounds) - 1 for sample in read.samples] == [3, 2, 4]
    assert [sample.target for sample in read.samples] == [1, 0, 3] and {sample.weight for sample in read.samples} == {
        1.0
    }
    backend = load_both("choice").tokenizer
    for example, sample in zip(EXAMPLES, read.samples, strict=True):
        for number, candidate in enumerate(example.candidates):
            expected = backend([example.prompt], [candidate])
            part = slice(*sample.bounds[number : number + 2])
            assert sample.tokens[part].tolist() == expected["input_ids"][0]
            assert sample.types[part].tolist() == expected["token_type_ids"][0]


def test_a_batch_knows_whose_candidates_stand_where() -> None:
    """Prompts have different numbers of candidates, which stand end to end."""
    choice_task = task()
    batch = choice_task.batch(choice_task.encode_split(EXAMPLES).samples, [0] * 3)
    assert batch.groups == (3, 2, 4) and batch.targets.tolist() == [1, 3, 8]
    assert len(batch.packed) == 9 and batch.weights.tolist() == [1.0] * 3


def test_a_long_prompt_has_the_same_windows_beside_each_candidate() -> None:
    choice_task = task(limit=SHORT)
    seen = example_windows(choice_task, LONG)
    samples = choice_task.encode_split([LONG]).samples
    assert len(samples) == len(seen[0]) >= 5 and {sample.weight for sample in samples} == {1 / len(samples)}
    prompts: list[list[str]] = []
    for number, sample in enumerate(samples):
        assert sample.target == 2 and len(sample.bounds) == 4
        texts = [sequence_text(sample, candidate).split() for candidate in range(3)]
        assert max(map(len, texts)) <= SHORT
        parts = [(text[1 : text.index("[SEP]")], text[text.index("[SEP]") + 1 : -1]) for text in texts]
        assert parts[0][0] == parts[1][0] == parts[2][0]
        assert [rest for _, rest in parts] == [["ada"], ["z", "##ed", "wrote", "it"], []]
        assert [pair[number].ids for pair in seen] == [
            tuple(sample.tokens[slice(*sample.bounds[c : c + 2])].tolist()) for c in range(3)
        ]
        prompts.append(parts[0][0])
    room = SHORT - 3 - 4  # of the longest candidate
    whole = prompts[0] + [token for prompt in prompts[1:] for token in prompt[room - room // 2 :]]
    assert whole == [tokenizer().name(id) for id in tokenizer().encode(LONG.prompt).ids[1:-1]]


def test_prompts_that_fit_beside_some_candidates_only_are_windowed_beside_all() -> None:
    example = ChoiceExample(prompt=long_text(12), candidates=("a", long_text(8)), answer=0)
    choice_task = task(limit=SHORT + 4)
    lengths = [len(encoding) for encoding in tokenizer().encode_batch(choice_task.tokenizer_inputs(example))]
    assert lengths[0] <= SHORT + 4 < lengths[1]
    one, other = example_windows(choice_task, example)
    assert len(one) == len(other) > 1
    assert [window.start for window in one] == [window.start for window in other]


def test_a_candidate_that_nearly_fills_the_room_leaves_half_of_it_to_the_prompt() -> None:
    room = 2 * SHORT - 3
    for words in range(1, 60):
        example = ChoiceExample(prompt=long_text(60), candidates=("a", long_text(words)), answer=0)
        encoded = tokenizer().encode_batch(task().tokenizer_inputs(example))
        seen = prompt_windows(encoded, 2 * SHORT)
        for mine in seen:
            assert min(window.segments.count(0) for window in mine[:1]) >= room // 2, words


@pytest.mark.parametrize("prompt", ["", "who", long_text(30)])
def test_a_candidate_that_alone_is_too_long_is_windowed(prompt: str) -> None:
    """Each token of the prompt beside each of every candidate; in one window all candidates see the same prompt."""
    example = ChoiceExample(prompt=prompt, candidates=("a", long_text(30), long_text(25)), answer=1)
    encoded = tokenizer().encode_batch(task().tokenizer_inputs(example))
    seen = prompt_windows(encoded, SHORT)
    assert len({len(mine) for mine in seen}) == 1 < len(seen[0])
    for whole, mine in zip(encoded, seen, strict=True):
        met = set()
        for window in mine:
            assert len(window) <= SHORT
            parts = [
                [offset for offset, of in zip(window.offsets, window.segments, strict=True) if of == s] for s in (0, 1)
            ]
            met |= {(a, b) for a in parts[0] or [None] for b in parts[1]}
        assert len(met) == max(1, whole.segments.count(0)) * whole.segments.count(1)
    read = task(limit=SHORT).encode_split([example])
    assert len(read.samples) == len(seen[0]) and {sample.target for sample in read.samples} == {1}
    engine = Engine(load_both("choice").model)
    (answer,) = engine([{"prompt": prompt, "choices": [*example.candidates, long_text(90)]}])
    assert answer["windows"] > 1 and sum(answer["probabilities"]) == pytest.approx(1)
    with pytest.raises(HeedfulError, match="this model reads 4 tokens, and 3 of them are special: that leaves no room"):
        prompt_windows(encoded, 4)


def test_the_end_is_cut_where_that_is_asked_for() -> None:
    read = task(limit=SHORT, long_inputs="truncate").encode_split([LONG])
    (sample,) = read.samples
    assert (sample.target, sample.weight, read.truncated, read.windowed) == (2, 1.0, 1, 0)
    assert [stop - start for start, stop in zip(sample.bounds, sample.bounds[1:], strict=False)] == [SHORT] * 3


# -- losses -------------------------------------------------------------------------------------------------------


def their_loss(example: ChoiceExample) -> torch.Tensor:
    """transformers' loss of one prompt."""
    pair = load_both("choice")
    rows = pair.tokenizer([example.prompt] * len(example.candidates), list(example.candidates), padding=True)
    batch = {name: torch.tensor(column)[None] for name, column in rows.items()}
    loss: torch.Tensor = pair.reference(**batch, labels=torch.tensor([example.answer])).loss
    return loss


def test_loss_and_gradient_with_different_numbers_of_candidates() -> None:
    pair = load_both("choice")
    expected = torch.stack([their_loss(example) for example in EXAMPLES]).mean()
    for parts in (1, 2, 3):
        loss = backward_all(task(), pair.model, EXAMPLES, parts)
        assert (loss.count, float(loss.sum) / 3) == (3, pytest.approx(float(expected.detach()), abs=1e-12))
    assert_same_gradients(pair.reference, expected, pair.model, 3)


def test_windows_count_as_one_prompt() -> None:
    pair, choice_task = load_both("choice"), task(limit=SHORT)
    with torch.no_grad():
        each = []
        for sample in choice_task.encode_split([LONG]).samples:
            scores = pair.model(choice_task.batch([sample], [0]).packed)
            each.append(float(-scores.log_softmax(0)[2]))
    loss = backward_all(choice_task, pair.model, [LONG, EXAMPLES[1]])
    assert loss.count == pytest.approx(2, abs=1e-6)
    assert float(loss.sum) == pytest.approx(sum(each) / len(each) + float(their_loss(EXAMPLES[1]).detach()), abs=1e-6)


# -- evaluation ---------------------------------------------------------------------------------------------------


def test_an_evaluation_agrees_with_transformers() -> None:
    choice_task = task()
    examples = [
        *EXAMPLES,
        *(
            ChoiceExample(prompt=f"the {a}", candidates=("x", "y b", "z"), answer=n % 3)
            for n, a in enumerate("abcdefgh")
        ),
    ]
    losses, right = [], []
    with torch.no_grad():
        for example in examples:
            pair = load_both("choice")
            rows = pair.tokenizer([example.prompt] * len(example.candidates), list(example.candidates), padding=True)
            logits = pair.reference(**{name: torch.tensor(column)[None] for name, column in rows.items()}).logits[0]
            losses.append(float(-logits.log_softmax(0)[example.answer]))
            right.append(int(logits.argmax()) == example.answer)
    measure = evaluate_task(choice_task, Engine(load_both("choice").model), examples)
    metrics = choice_task.compute_metrics(measure)
    assert metrics["accuracy"] == metrics[choice_task.metric] == sum(right) / len(right)
    assert metrics["loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-6)
    interval = measure.intervals()["accuracy"]
    assert interval["low"] < metrics["accuracy"] < interval["high"]


def test_long_prompts_are_answered_by_the_mean_of_their_windows() -> None:
    ours, choice_task = load_both("choice").model, task()
    long = ChoiceExample(prompt=long_text(100), candidates=("ada", "zed wrote it", ""), answer=2)
    (answer,) = Engine(ours)([choice_task.engine_input(long)])
    with torch.no_grad():
        shares = [
            ours(choice_task.batch([sample], [0]).packed).softmax(0)
            for sample in choice_task.encode_split([long]).samples
        ]
    assert answer["windows"] == len(shares) > 3
    assert answer["probabilities"] == pytest.approx(torch.stack(shares).mean(0).tolist(), abs=1e-6)
    assert answer["choice"] == long.candidates[answer["index"]]


def test_mistakes_come_in_order() -> None:
    choice_task = task()
    judged = [
        choice_task.score_answer(EXAMPLES[0], {"index": number, "probabilities": shares})
        for number, shares in ((0, [1.0, 0.0, 0.0]), (2, [0.2, 0.3, 0.5]), (1, [0.2, 0.5, 0.3]), (1, [0.0, 1.0, 0.0]))
    ]
    loss = [scored.loss for scored in judged]
    assert loss == sorted(loss, reverse=True) and loss[-1] == 0 and math.isfinite(loss[0])
    assert [scored.correct for scored in judged] == [False, False, True, True]
    assert (judged[0].label, judged[0].prediction) == (1, 0)
