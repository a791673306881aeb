"""The routes that call a model: handlers, request and response types."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from msgspec import Struct

from heedful.errors import HeedfulError, quoted
from heedful.infer.bundle_engine import BundleEngine
from heedful.infer.engine_options import check_min_confidence, check_prediction_set
from heedful.infer.scheduling.errors import TooLongError
from heedful.infer.scheduling.scheduler import ModelQueue
from heedful.infer.zero_shot import ENTAILMENT_TEMPLATE, PLAIN_TEMPLATE, CandidateLabels, zero_shot_engine
from heedful.model.config import SentenceEmbedding
from heedful.search.rerank import has_sigmoid, relevance
from heedful.serve import requests, responses
from heedful.serve.context import CHARACTERS_PER_TOKEN, RequestContext, Turns, tokenize_in_turns
from heedful.serve.text_pairs import parse_sequences
from heedful.serve.token_estimate import group_in_turns
from heedful.tasks.answering import Answer
from heedful.tasks.generation import GenerationConfig
from heedful.tasks.metrics.conformal import least_probability
from heedful.tasks.spec import resolve
from heedful.tasks.specs import SPECS
from heedful.tokenizer import Encoding

if TYPE_CHECKING:
    from heedful.serve.attention import AttentionWeights

EMBEDDING, CLASSES, RANKS = ("embedding",), ("sequence_classification",), ("rank", "embedding")
ZERO_SHOT = ("zero_shot", "embedding")
RERANKED_TOGETHER = 10  # passages that are scored at a time, which limits.max_request_tokens allows

T = TypeVar("T")
Handler = Callable[[RequestContext, Any], Awaitable[object]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """A route that asks a model something."""

    path: str
    handler: Handler
    body: type[Struct]
    answer: object  # its type
    kinds: tuple[str, ...] | None = None  # of heads; None: all
    example: dict[str, object] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """The summary for OpenAPI: the first line of the handler's docstring."""
        return (self.handler.__doc__ or "").strip().partition("\n")[0]


def as_list(value: T | list[T]) -> list[T]:
    """A list, whether one or several were given."""
    return value if isinstance(value, list) else [value]


def match_input(value: object, answers: list[T]) -> T | list[T]:
    """One answer to one, a list to a list."""
    return answers if isinstance(value, list) else answers[0]


# -- sentence embeddings ----------------------------------------------------------------------------------------


async def vectors(
    call: RequestContext,
    model_queue: ModelQueue[BundleEngine],
    texts: list[str],
    *,
    truncate: bool | None = True,
    dimensions: int | None = None,
    unit: bool = True,
    prompt: str | None = None,
) -> np.ndarray:
    """A vector for each text, [texts, dimensions], of length 1 if asked; behind the default prompt, or another one."""
    limit = getattr(model_queue.engine, "limit", None)
    longest = None if limit is None or truncate is False else CHARACTERS_PER_TOKEN * limit
    cut = [text[:longest] for text in texts]
    call.texts(*cut)

    def encode(engine: BundleEngine) -> Turns:
        asked = yield from call.beginnings(engine, texts, prompt)
        if truncate is False and any(encoded.dropped for encoded in asked):
            raise TooLongError(
                f"a text has more tokens than the {engine.limit} this model reads, and truncate is false"
            )
        return asked

    answers = await call.ask(model_queue, texts, encode=encode, sizes=[len(text) for text in cut])
    if not answers:
        return np.zeros((0, 0))
    rows = np.array([answer["vector"] for answer in answers])
    if dimensions is not None and dimensions > rows.shape[1]:
        raise HeedfulError(f"dimensions is {dimensions}, and this model's vectors have {rows.shape[1]}")
    rows = np.ascontiguousarray(rows[:, :dimensions])
    return rows / np.linalg.norm(rows, axis=1, keepdims=True).clip(1e-12) if unit else rows


async def embed(call: RequestContext, body: requests.EmbedBody) -> np.ndarray:
    """A vector for each text."""
    _, model_queue = call.select_model(body.model, EMBEDDING)
    return await vectors(
        call,
        model_queue,
        as_list(body.inputs),
        truncate=body.truncate,
        dimensions=body.dimensions,
        unit=body.normalize,
        prompt=_named_prompt(model_queue, body.prompt_name),
    )


def _named_prompt(model_queue: ModelQueue[BundleEngine], name: str | None) -> str | None:
    """Return the model's prompt of that name."""
    if name is None or model_queue.engine is None:
        return None
    head = model_queue.engine.loaded.config.head
    prompts = dict(head.prompts) if isinstance(head, SentenceEmbedding) else {}
    if name not in prompts:
        raise HeedfulError(f"prompt_name is {quoted(name)}, and this model has {', '.join(prompts) or 'no prompts'}")
    return prompts[name]


async def openai_embeddings(call: RequestContext, body: requests.EmbeddingsBody) -> dict[str, object]:
    """A vector for each text, in OpenAI's form."""
    name, model_queue = call.select_model(body.model, EMBEDDING)
    rows = await vectors(call, model_queue, as_list(body.input), dimensions=body.dimensions)
    embeddings: Iterable[object] = rows
    if body.encoding_format == "base64":
        from base64 import b64encode

        embeddings = [b64encode(vector.astype("<f4").tobytes()).decode() for vector in rows]
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": number, "embedding": embedding}
            for number, embedding in enumerate(embeddings)
        ],
        "model": name,
        "usage": {"prompt_tokens": call.record.tokens, "total_tokens": call.record.tokens},
    }


async def compare_sentences(call: RequestContext, body: requests.SimilarityBody) -> list[float]:
    """The cosine of a sentence's vector and that of each of the others."""
    _, model_queue = call.select_model(body.model, EMBEDDING)
    truncate = None if body.parameters is None else body.parameters.truncate
    comparison = body.inputs
    return _cosines(
        await vectors(call, model_queue, [comparison.source_sentence, *comparison.sentences], truncate=truncate)
    )


def _cosines(rows: np.ndarray) -> list[float]:
    """Return the cosines of the first vector with each other one."""
    cosines: list[float] = (rows[1:] @ rows[0]).clip(-1, 1).tolist()
    return cosines


async def rerank(call: RequestContext, body: requests.RerankBody) -> list[dict[str, object]]:
    """Texts by what they have to do with the query, best first: by a model of pairs, else by the cosine of vectors."""
    _, model_queue = call.select_model(body.model, RANKS)
    if getattr(model_queue.engine, "kind", "") == "embedding":
        scores = _cosines(await vectors(call, model_queue, [body.query, *body.texts], truncate=body.truncate))
    else:
        call.texts(*(body.query + text for text in body.texts))
        scores = await _pair_scores(call, model_queue, body.query, body.texts, raw=body.raw_scores)
    ranked = sorted(range(len(scores)), key=lambda number: -scores[number])
    shown = {number: {"text": body.texts[number]} if body.return_text else {} for number in ranked}
    return [{"index": number, "score": scores[number], **shown[number]} for number in ranked]


async def _pair_scores(
    call: RequestContext, model_queue: ModelQueue[BundleEngine], query: str, texts: Sequence[str], *, raw: bool = False
) -> list[float]:
    """Return the relevance of each text to a query by a cross-encoder, between 0 and 1 unless raw."""
    answers = await call.ask(model_queue, [(query, text) for text in texts])
    sigmoid = has_sigmoid(getattr(model_queue.engine, "loaded", None))
    if sigmoid and raw:
        raise HeedfulError("this model's scores are between 0 and 1: raw_scores has to be false")
    return [relevance(answer, raw=raw or sigmoid) for answer in answers]


async def search_documents(call: RequestContext, body: requests.SearchBody) -> list[dict[str, object]]:
    """The documents of the index that fit a query best, each with its best passage."""
    from heedful.search.index import RERANKED, SearchIndex, rescored

    reranker = None if body.reranker is None else call.select_model(body.reranker, ("rank",))[1]
    _, model_queue = call.select_model(body.model, ("search",))
    engine = model_queue.engine
    assert engine is not None and isinstance(engine.search_index, SearchIndex)
    index, vector = engine.search_index, None
    if body.method == "words":
        call.texts(body.query)
    elif body.query.strip():
        (vector,) = await vectors(call, model_queue, [body.query], prompt=engine.prompt("query"))
    depth = body.top_k if reranker is None else max(body.top_k, RERANKED)
    hits = await asyncio.to_thread(partial(index.search, body.query, depth, method=body.method, vector=vector))
    if reranker is not None and hits:
        scores: list[float] = []
        for start in range(0, len(hits), RERANKED_TOGETHER):
            passages = [hit.passage for hit in hits[start : start + RERANKED_TOGETHER]]
            scores += await _pair_scores(call, reranker, body.query, passages)
        hits = rescored(hits, scores)[: body.top_k]
    if not body.highlight:
        return [hit.to_dict() for hit in hits]
    return [{**hit.to_dict(), "highlights": index.matches(body.query, hit.passage)} for hit in hits]


# -- heads ------------------------------------------------------------------------------------------------------


async def predict(
    call: RequestContext, body: requests.PredictBody
) -> list[dict[str, object]] | list[list[dict[str, object]]]:
    """The labels of each text or pair with their scores, best first."""
    _, model_queue = call.select_model(body.model, CLASSES)
    if body.raw_scores:
        raise HeedfulError("raw_scores is true, and this server gives probabilities, or a regression's numbers")
    loaded = getattr(model_queue.engine, "loaded", None)
    sequences, alone = parse_sequences(body.inputs, getattr(loaded, "pairs", None))
    call.texts(
        *(
            text
            for sequence in sequences
            for text in as_list(list(sequence) if isinstance(sequence, tuple) else sequence)
        )
    )
    least = body.min_confidence
    if least is not None:
        check_min_confidence(least, None if loaded is None else loaded.config.head)
    floor = least
    if body.prediction_set is not None and loaded is not None:
        if least is not None:
            raise HeedfulError("min_confidence and prediction_set exclude each other: give one of them")
        check_prediction_set(body.prediction_set, loaded)
        floor = least_probability(loaded.calibration, body.prediction_set)
    answers = await call.ask(model_queue, sequences)
    call.service.metrics.classified(call.model, answers)
    labels = [labels_of(answer, floor, as_set=body.prediction_set is not None) for answer in answers]
    return labels[0] if alone else labels


async def classify_zero_shot(
    call: RequestContext, body: requests.ZeroShotBody
) -> list[dict[str, object]] | list[list[dict[str, object]]]:
    """The candidate labels of each text with their scores, best first."""
    _, model_queue = call.select_model(body.model, ZERO_SHOT)
    asked = body.parameters
    candidates = CandidateLabels.of(asked.candidate_labels, asked.hypothesis_template, asked.multi_label)
    texts, label_vectors = as_list(body.inputs), None
    if getattr(model_queue.engine, "kind", "") == "embedding":
        hypotheses = candidates.hypotheses(PLAIN_TEMPLATE)
        label_vectors = torch.from_numpy(await vectors(call, model_queue, hypotheses))
        call.texts(*texts)
        sizes = list(map(len, texts))
    else:
        hypotheses = candidates.hypotheses(ENTAILMENT_TEMPLATE)
        call.texts(*(text + hypothesis for text in texts for hypothesis in hypotheses))
        sizes = [sum(len(text) + len(hypothesis) for hypothesis in hypotheses) for text in texts]

    def encode(engine: BundleEngine) -> Turns:
        return tokenize_in_turns(zero_shot_engine(engine, candidates, label_vectors), texts)

    answers = await call.ask(model_queue, texts, encode=encode, sizes=sizes)
    labels = [labels_of(answer) for answer in answers]
    return labels[0] if isinstance(body.inputs, str) else labels


def labels_of(answer: Answer, floor: float | None = None, *, as_set: bool = False) -> list[dict[str, object]]:
    """Return the labels with their scores, best first.

    Args:
        answer: Of a classifier.
        floor: Probability from which labels are "predicted": the most probable one, or in a set all of them.
        as_set: Predict all labels from `floor` on, and always the most probable one.
    """
    scores: dict[str, float] = answer.get("probabilities") or answer["values"]
    chosen = answer.get("labels")
    if floor is not None:
        chosen = [answer["label"]] if answer["probability"] >= floor else []
    if floor is not None and as_set:
        chosen = [label for label, score in scores.items() if score >= floor or label == answer["label"]]
    best_first = sorted(scores.items(), key=lambda pair: -pair[1])
    return [
        {"label": label, "score": score} | ({} if chosen is None else {"predicted": label in chosen})
        for label, score in best_first
    ]


async def classify_tokens(call: RequestContext, body: requests.TokenClassificationBody) -> Answer | list[Answer]:
    """A label for each word, and the entities that they make."""
    _, model_queue = call.select_model(body.model, ("token_classification",))
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    words = [[text] if isinstance(text, str) else text for text in texts]
    if len(texts) > call.service.settings.limits.max_client_batch_size:
        raise TooLongError(
            f"the request has {len(texts)} texts, and may have {call.service.settings.limits.max_client_batch_size}"
        )
    call.texts(*(" ".join(sentence) for sentence in words))
    return match_input(body.inputs, await call.ask(model_queue, texts))


async def answer_questions(call: RequestContext, body: requests.QuestionAnsweringBody) -> Answer | list[Answer]:
    """The answer to each question, as it is in its context."""
    _, model_queue = call.select_model(body.model, ("question_answering",))
    questions = as_list(body.inputs)
    call.texts(*(question.question + question.context for question in questions))
    inputs = [{"question": question.question, "context": question.context} for question in questions]
    return match_input(body.inputs, await call.ask(model_queue, inputs))


async def choose_candidates(call: RequestContext, body: requests.MultipleChoiceBody) -> Answer | list[Answer]:
    """The candidate that fits each prompt best."""
    _, model_queue = call.select_model(body.model, ("multiple_choice",))
    prompts = as_list(body.inputs)
    call.texts(*(prompt.prompt + choice for prompt in prompts for choice in prompt.choices))
    inputs = [{"prompt": prompt.prompt, "choices": prompt.choices} for prompt in prompts]
    return match_input(body.inputs, await call.ask(model_queue, inputs))


async def predict_next_sentence(call: RequestContext, body: requests.NextSentenceBody) -> list[Answer]:
    """Whether the second text of each pair follows the first."""
    _, model_queue = call.select_model(body.model, ("next_sentence", "pretraining"))
    call.texts(*(text for pair in body.inputs for text in pair))
    return await call.ask(model_queue, [tuple(pair) for pair in body.inputs])


async def fill_masks(call: RequestContext, body: requests.FillMaskBody) -> Answer | list[Answer]:
    """The likeliest tokens for each mask of each text."""
    _, model_queue = call.select_model(body.model, ("masked_lm", "pretraining"))
    call.texts(*as_list(body.inputs))
    return match_input(body.inputs, await call.ask(model_queue, as_list(body.inputs), top_k=body.top_k))


async def generate(call: RequestContext, body: requests.GenerateBody) -> Answer | list[Answer]:
    """A generated text for each text: its translation, summary or continuation, as the model was trained."""
    _, model_queue = call.select_model(body.model, ("language_model",))
    call.texts(*as_list(body.inputs))
    limit = call.service.settings.limits.max_new_tokens
    most = body.max_new_tokens
    if most is not None and most > limit:
        raise TooLongError(f"max_new_tokens is {most}, and the limit of this server is {limit}: ask for fewer tokens")
    if body.num_beams is not None and body.temperature is not None:
        raise HeedfulError("num_beams and temperature were both given: beam search does not sample; give one of them")
    defaults = GenerationConfig() if model_queue.engine is None else model_queue.engine.writing
    writing = defaults.with_choices(
        num_beams=body.num_beams,
        num_return_sequences=body.num_beams,
        temperature=body.temperature,
        max_new_tokens=most,
        seed=body.seed,
    )
    writing = replace(writing, max_new_tokens=min(writing.max_new_tokens, limit))
    return match_input(body.inputs, await call.ask(model_queue, as_list(body.inputs), writing=writing))


# -- looking inside -----------------------------------------------------------------------------------------------


async def show_attention(call: RequestContext, body: requests.AttentionBody) -> AttentionWeights:
    """Attention weights of the tokens of a text, in chosen layers and heads."""
    _, model_queue = call.select_model(body.model, None)
    item = body.inputs if isinstance(body.inputs, str) else (body.inputs[0], body.inputs[1])
    call.texts(*as_list(body.inputs))
    most = call.service.settings.limits.max_attention_weights

    def look(engine: BundleEngine) -> AttentionWeights:
        from heedful.serve.attention import attention_response

        for _ in call.count(engine, most=engine.limit, whole=True):
            pass
        return attention_response(engine, item, body.layers, body.heads, most)

    size = 1 + min(
        sum(map(len, as_list(body.inputs))), call.service.settings.limits.max_request_tokens - 1
    )  # tokens, at most
    attention = await model_queue.call(look, tokens=size, deadline=call.record.deadline, left=call.record.left)
    call.record.tokens += len(attention["tokens"])
    return attention


async def tokenize(call: RequestContext, body: requests.TokenizeBody) -> list[list[dict[str, object]]]:
    """The tokens of each text, as the model reads it."""
    _, model_queue = call.select_model(body.model, None)
    texts = as_list(body.inputs)
    call.texts(*texts)
    most = call.service.settings.limits.max_request_tokens

    def cut(engine: BundleEngine) -> Generator[None, None, list[list[dict[str, object]]]]:
        from heedful.serve.attention import token_infos

        yield from call.count(engine, whole=True)
        encodings: list[Encoding] = []
        for _, group in group_in_turns(texts):
            encodings += engine.tokenizer.encode_batch(group)
            yield
        if (count := sum(map(len, encodings))) > most:
            raise TooLongError(f"the texts have {count} tokens, and an answer has at most {most}")
        return [token_infos(encoding, engine.tokenizer, special=body.add_special_tokens) for encoding in encodings]

    record, sizes = call.record, [len(text) for text in texts]
    return await model_queue.read(cut, deadline=record.deadline, left=record.left, sizes=sizes)


def endpoints() -> tuple[Endpoint, ...]:
    """Return all routes that ask a model something, those of registered tasks last."""
    return (*ENDPOINTS, *(resolve(route) for spec in SPECS.values() for route in spec.routes))


ENDPOINTS = (
    Endpoint(
        path="/embed",
        handler=embed,
        body=requests.EmbedBody,
        answer=list[responses.Vector],
        kinds=EMBEDDING,
        example={"inputs": ["a text", "another"]},
    ),
    Endpoint(
        path="/v1/embeddings",
        handler=openai_embeddings,
        body=requests.EmbeddingsBody,
        answer=responses.EmbeddingList,
        kinds=EMBEDDING,
        example={"input": ["a text"]},
    ),
    Endpoint(
        path="/similarity",
        handler=compare_sentences,
        body=requests.SimilarityBody,
        answer=list[float],
        kinds=EMBEDDING,
        example={"inputs": {"source_sentence": "It rains.", "sentences": ["It pours.", "I read a book."]}},
    ),
    Endpoint(
        path="/rerank",
        handler=rerank,
        body=requests.RerankBody,
        answer=list[responses.RankedText],
        kinds=RANKS,
        example={"query": "weather", "texts": ["It rains.", "I read a book."]},
    ),
    Endpoint(
        path="/search",
        handler=search_documents,
        body=requests.SearchBody,
        answer=list[responses.FoundDocument],
        kinds=("search",),
        example={"query": "weather", "top_k": 3},
    ),
    Endpoint(
        path="/predict",
        handler=predict,
        body=requests.PredictBody,
        answer=list[responses.LabelScore | list[responses.LabelScore]],
        kinds=CLASSES,
        example={"inputs": "a text"},
    ),
    Endpoint(
        path="/zero-shot-classification",
        handler=classify_zero_shot,
        body=requests.ZeroShotBody,
        answer=list[responses.LabelScore | list[responses.LabelScore]],
        kinds=ZERO_SHOT,
        example={"inputs": "It rains.", "parameters": {"candidate_labels": ["weather", "sport"]}},
    ),
    Endpoint(
        path="/token-classification",
        handler=classify_tokens,
        body=requests.TokenClassificationBody,
        answer=responses.TokenClassificationResponse | list[responses.TokenClassificationResponse],
        kinds=("token_classification",),
        example={"inputs": "Ada lives in Paris."},
    ),
    Endpoint(
        path="/question-answering",
        handler=answer_questions,
        body=requests.QuestionAnsweringBody,
        answer=responses.QuestionAnsweringResponse | list[responses.QuestionAnsweringResponse],
        kinds=("question_answering",),
        example={"inputs": {"question": "Who wrote it?", "context": "Ada wrote it."}},
    ),
    Endpoint(
        path="/multiple-choice",
        handler=choose_candidates,
        body=requests.MultipleChoiceBody,
        answer=responses.MultipleChoiceResponse | list[responses.MultipleChoiceResponse],
        kinds=("multiple_choice",),
        example={"inputs": {"prompt": "It rains.", "choices": ["Take a hat.", "Sleep."]}},
    ),
    Endpoint(
        path="/next-sentence",
        handler=predict_next_sentence,
        body=requests.NextSentenceBody,
        answer=list[responses.NextSentenceResponse],
        kinds=("next_sentence", "pretraining"),
        example={"inputs": [["It rains.", "The street is wet."]]},
    ),
    Endpoint(
        path="/fill-mask",
        handler=fill_masks,
        body=requests.FillMaskBody,
        answer=responses.FillMaskResponse | list[responses.FillMaskResponse],
        kinds=("masked_lm", "pretraining"),
        example={"inputs": "the cat [MASK] on the mat"},
    ),
    Endpoint(
        path="/generate",
        handler=generate,
        body=requests.GenerateBody,
        answer=responses.GenerateResponse | list[responses.GenerateResponse],
        kinds=("language_model",),
        example={"inputs": "a text", "max_new_tokens": 32},
    ),
    Endpoint(
        path="/attention",
        handler=show_attention,
        body=requests.AttentionBody,
        answer=responses.AttentionResponse,
        example={"inputs": "a text", "layers": [0], "heads": [0]},
    ),
    Endpoint(
        path="/tokenize",
        handler=tokenize,
        body=requests.TokenizeBody,
        answer=list[list[responses.TokenInfo]],
        example={"inputs": "a text"},
    ),
)
