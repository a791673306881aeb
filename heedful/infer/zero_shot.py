"""Zero-shot classification: a model chooses among labels that it was not trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from heedful.errors import HeedfulError
from heedful.infer.bundle_engine import BundleEngine
from heedful.infer.engine_options import check_confidence_range
from heedful.model.config import Classes, Head, SentenceEmbedding
from heedful.tasks.answering import Answer, AnswerContext, AnswerHead, Window, read_text
from heedful.tasks.label_answers import THRESHOLD
from heedful.tasks.multiple_choice import prompt_windows
from heedful.tasks.predictions import Classification, MultiLabelClassification, Prediction
from heedful.tokenizer import TokenizerInput

ENTAILMENT_TEMPLATE = "This example is {}."  # default template of models that read pairs of texts
PLAIN_TEMPLATE = "{}"  # default template of sentence embedding models
VECTOR_SCALE = 20.0  # factor of cosine similarities before the softmax, as in training with in-batch negatives

EngineType = TypeVar("EngineType", bound=BundleEngine)


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateLabels:
    """Labels to choose from, and the text that describes each of them to the model."""

    descriptions: Mapping[str, str]  # descriptions by label
    template: str | None = None  # text with {} in place of the description, or None for the default
    multi_label: bool = False  # True: predict each label independently of the others

    @classmethod
    def of(
        cls, labels: Sequence[str] | Mapping[str, str], template: str | None = None, multi_label: bool = False
    ) -> CandidateLabels:
        """Check labels and template, and return them as candidate labels.

        Args:
            labels: The labels, which are then their own descriptions; or a mapping from labels to descriptions.
            template: Text with {} in place of the description. If None, the default for the kind of model.
            multi_label: If true, predict each label independently of the others.

        Raises:
            HeedfulError: If there are fewer than two labels (fewer than one, if multi_label), two labels are equal, a
                label or a description is empty, or the template does not contain {} exactly once.
        """
        descriptions = dict(labels) if isinstance(labels, Mapping) else {label: label for label in labels}
        if len(descriptions) < len(labels) or not all(map(str.strip, descriptions)):
            raise HeedfulError(f"candidate_labels is {list(labels)}; expected different labels that are not empty")
        for label, description in descriptions.items():
            if not description.strip():
                raise HeedfulError(f"the description of the candidate label {label!r} is empty; expected a text")
        if len(descriptions) < 2 - multi_label:
            count, minimum = len(descriptions), 2 - multi_label
            raise HeedfulError(f"candidate_labels has {count} label{'s' * (count != 1)}; expected {minimum} or more")
        if template is not None and template.count("{}") != 1:
            raise HeedfulError(
                f"template is {template!r}; expected a text with {{}} once, like {ENTAILMENT_TEMPLATE!r}"
            )
        return cls(descriptions=descriptions, template=template, multi_label=multi_label)

    def hypotheses(self, default: str) -> list[str]:
        """Return the text that describes each label: the template, or the default, with the description in it."""
        template = default if self.template is None else self.template
        return [template.replace("{}", description) for description in self.descriptions.values()]


def zero_shot_engine(engine: EngineType, candidates: CandidateLabels, vectors: Tensor | None = None) -> EngineType:
    """Return an engine for the same model that classifies texts into candidate labels.

    A model with a label "entailment", or a cross-encoder with one score, reads pairs of a text and a hypothesis, namely
    the template with a label (Yin et al. 2019). The probabilities are the softmax of the entailment logits over the
    labels; with multi_label, the softmax of entailment against contradiction for each label. A sentence embedding model
    compares the vectors of texts and hypotheses. The probabilities are the softmax of `VECTOR_SCALE` times the cosine
    similarities; with multi_label, the similarities themselves, with negative ones set to 0.

    Args:
        engine: An engine with one of these heads.
        candidates: The labels.
        vectors: Vectors of the hypotheses, [labels, width], for a sentence embedding model. If None, they are computed.

    Raises:
        HeedfulError: If the model has a head of another kind or was trained on single texts, or if the engine's
            `min_confidence` is no probability or is positive with multi_label, which it does not affect.
    """
    check_confidence_range(engine.min_confidence)
    if engine.min_confidence and candidates.multi_label:
        raise HeedfulError("min_confidence and multi_label exclude each other: give one of them")
    if engine.kind == "embedding":
        if vectors is None:
            vectors = torch.from_numpy(engine.encode(candidates.hypotheses(PLAIN_TEMPLATE)))
        return _with_head(engine, _vector_head(candidates, vectors), candidates)
    head = engine.loaded.config.head
    score = _pair_score(head, candidates.multi_label)
    if score is not None and engine.loaded.pairs is False:
        raise HeedfulError(
            "candidate labels were given, but this model was trained on single texts, and it would have to read pairs "
            "of a text and a label; expected a model trained on pairs, or a sentence embedding model"
        )
    if score is None:
        has = f"the labels {', '.join(head.labels[:5])}" if isinstance(head, Classes) else f"a {engine.kind} head"
        raise HeedfulError(
            f"candidate labels were given, but this model has {has}; expected a label entailment (and contradiction, "
            "for multi_label), a cross-encoder with one score, or a sentence embedding model"
        )
    return _with_head(engine, _pair_head(candidates, score), candidates)


def can_classify_zero_shot(head: Head | None, pairs: bool | None = None) -> bool:
    """Return whether a model with this head can choose among labels that it was not trained on.

    Args:
        head: The head of the model.
        pairs: Whether the model was trained on pairs of texts, or None if that is unknown.
    """
    reads_pairs = pairs is not False and _pair_score(head, multi_label=False) is not None
    return isinstance(head, SentenceEmbedding) or reads_pairs


def _with_head(engine: EngineType, head: AnswerHead, candidates: CandidateLabels) -> EngineType:
    """Return an engine with the same model and another answer head."""
    changed = engine.without_early_stages()
    changed._answer_heads, changed.candidates = (head,), candidates
    return changed


def _pair_score(head: Head | None, multi_label: bool) -> Callable[[Tensor], Tensor] | None:
    """Return a function that maps the logits of pairs, [pairs, classes], to their entailment logits, [pairs].

    It returns None if the head has no such logits.
    """
    if isinstance(head, Classes) and head.problem_type == "regression" and len(head.labels) == 1:
        return lambda scores: scores[:, 0]
    if isinstance(head, Classes) and head.problem_type == "single_label_classification":
        lower_names = [label.casefold() for label in head.labels]
        entailment = [index for index, name in enumerate(lower_names) if name.startswith("entail")]
        contradiction = [index for index, name in enumerate(lower_names) if name.startswith(("contra", "not"))]
        if entailment and not multi_label:
            return lambda scores: scores[:, entailment[0]]
        if entailment and contradiction:
            return lambda scores: scores[:, entailment[0]] - scores[:, contradiction[0]]
    return None


def _pair_head(candidates: CandidateLabels, score: Callable[[Tensor], Tensor]) -> AnswerHead:
    """Return the answer head of a model that reads each text as a pair with each hypothesis."""
    hypotheses = candidates.hypotheses(ENTAILMENT_TEMPLATE)

    def inputs(engine_input: object) -> list[TokenizerInput] | None:
        return [(engine_input, hypothesis) for hypothesis in hypotheses] if isinstance(engine_input, str) else None

    def answer(engine_input: object, windows: list[Window], context: AnswerContext) -> Answer:
        scores = score(torch.stack([window.scores for window in windows])).view(len(hypotheses), -1)
        probabilities = (scores.sigmoid() if candidates.multi_label else scores.softmax(0)).mean(1)
        return _answer(candidates, probabilities, context) | {"windows": scores.shape[1]}

    return AnswerHead(
        expects='texts, like ["a text"]',
        tokenizer_inputs=inputs,
        windows=prompt_windows,
        answer=answer,
        prediction=_prediction,
        columns=lambda bundle, generation: _columns(candidates) | {"windows": int},
        pairs=False,
    )


def _vector_head(candidates: CandidateLabels, vectors: Tensor) -> AnswerHead:
    """Return the answer head of a model that compares the vector of each text with the vectors of the hypotheses."""
    directions = torch.nn.functional.normalize(vectors.double(), dim=-1)

    def answer(engine_input: object, windows: list[Window], context: AnswerContext) -> Answer:
        (window,) = windows
        cosines = directions @ torch.nn.functional.normalize(window.scores.double(), dim=-1)
        probabilities = cosines.clamp(0, 1) if candidates.multi_label else (VECTOR_SCALE * cosines).softmax(0)
        return _answer(candidates, probabilities, context) | {"truncated_tokens": window.encoded.dropped}

    return AnswerHead(
        expects='texts, like ["a text"]',
        tokenizer_inputs=read_text,
        answer=answer,
        long_inputs="truncate",
        prediction=_prediction,
        columns=lambda bundle, generation: _columns(candidates) | {"truncated_tokens": int},
        pairs=False,
    )


def _answer(candidates: CandidateLabels, probabilities: Tensor, context: AnswerContext) -> Answer:
    """Return the answer for the probabilities of the labels, [labels]."""
    by_label = dict(zip(candidates.descriptions, probabilities.tolist(), strict=True))
    if candidates.multi_label:
        return {"labels": [label for label, p in by_label.items() if p >= THRESHOLD], "probabilities": by_label}
    top_label = max(by_label, key=by_label.__getitem__)
    label = top_label if by_label[top_label] >= context.min_confidence else ""
    return {"label": label, "probability": by_label[top_label], "probabilities": by_label}


def _prediction(answer: Answer) -> Prediction:
    if "labels" in answer:
        return MultiLabelClassification.from_answer({**answer, "labels": tuple(answer["labels"])})
    return Classification.from_answer(answer)


def _columns(candidates: CandidateLabels) -> dict[str, object]:
    probabilities: dict[str, object] = {"probabilities": dict.fromkeys(candidates.descriptions, float)}
    if candidates.multi_label:
        return {"labels": [str]} | probabilities
    return {"label": str, "probability": float} | probabilities
