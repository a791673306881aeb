"""The routes that use a model: their handlers, and the types of their request and response bodies.

The first line of a handler's docstring is the summary of its route in /openapi.json.
"""

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

# kinds of models that routes can use, see `head_kinds`
EMBEDDING = ("embedding",)
CLASSES = ("sequence_classification",)
RANKS = ("rank", "embedding")
ZERO_SHOT = ("zero_shot", "embedding")
RERANK_BATCH = 10  # passages that a reranker scores together: few enough for limits.max_request_tokens

T = TypeVar("T")
Handler = Callable[[RequestContext, Any], Awaitable[object]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """A route that uses a model."""

    path: str
    handler: Handler
    body: type[Struct]  # type of the request body
    answer: object  # type of the response body
    kinds: tuple[str, ...] | None = None  # kinds of models that it can use, see `head_kinds`; None for all models
    example: dict[str, object] = field(default_factory=dict)  # example of a request body, for OpenAPI

    @property
    def summary(self) -> str:
        """The summary for OpenAPI: the first line of the handler's docstring."""
        return (self.handler.__doc__ or "").strip().partition("\n")[0]


def as_list(value: T | list[T]) -> list[T]:
    """Return a list unchanged, and a single value as a list of one element."""
    return value if isinstance(value, list) else [value]


def match_input(value: object, answers: list[T]) -> T | list[T]:
    """Return the answers as a list if the input was a list; otherwise return the only answer."""
    return answers if isinstance(value, list) else answers[0]


# -- sentence embeddings ----------------------------------------------------------------------------------------


async def vectors(
    context: RequestContext,
    model_queue: ModelQueue[BundleEngine],
    texts: list[str],
    *,
    truncate: bool | None = True,
    dimensions: int | None = None,
    normalize: bool = True,
    prompt: str | None = None,
) -> np.ndarray:
    """Return an embedding for each text, [texts, dimensions].

    Args:
        context: The request.
        model_queue: Queue of a sentence embedding model.
        texts: The texts.
        truncate: If False, texts that are longer than the model's limit are refused; otherwise they are truncated.
        dimensions: Number of leading dimensions to return. If None, all dimensions.
        normalize: Whether to scale the embeddings to length 1.
        prompt: Prefix of each text. If None, the model's default prompt.
    """
    limit = getattr(model_queue.engine, "limit", None)
    max_characters = None if limit is None or truncate is False else CHARACTERS_PER_TOKEN * limit
    beginnings = [text[:max_characters] for text in texts]
    context.set_texts(*beginnings)

    def encode(engine: BundleEngine) -> Turns:
        encoded_inputs = yield from context.tokenize_beginnings(engine, texts, prompt)
        if truncate is False and any(encoded_input.dropped for encoded_input in encoded_inputs):
            raise TooLongError(
                f"a text has more tokens than the {engine.limit} this model reads, and truncate is false"
            )
        return encoded_inputs

    answers = await context.predict(model_queue, texts, encode=encode, sizes=[len(text) for text in beginnings])
    if not answers:
        return np.zeros((0, 0))
    embeddings = np.array([answer["vector"] for answer in answers])
    if dimensions is not None and dimensions > embeddings.shape[1]:
        raise HeedfulError(f"dimensions is {dimensions}, and this model's vectors have {embeddings.shape[1]}")
    embeddings = np.ascontiguousarray(embeddings[:, :dimensions])
    return embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True).clip(1e-12) if normalize else embeddings


async def embed(context: RequestContext, body: requests.EmbedBody) -> np.ndarray:
    """Return a vector for each text."""
    _, model_queue = context.select_model(body.model, EMBEDDING)
    return await vectors(
        context,
        model_queue,
        as_list(body.inputs),
        truncate=body.truncate,
        dimensions=body.dimensions,
        normalize=body.normalize,
        prompt=_named_prompt(model_queue, body.prompt_name),
    )


def _named_prompt(model_queue: ModelQueue[BundleEngine], name: str | None) -> str | None:
    """Return the model's prompt with this name; None if `name` is None. An unknown name raises a HeedfulError."""
    if name is None or model_queue.engine is None:
        return None
    head = model_queue.engine.loaded.config.head
    prompts = dict(head.prompts) if isinstance(head, SentenceEmbedding) else {}
    if name not in prompts:
        raise HeedfulError(f"prompt_name is {quoted(name)}, and this model has {', '.join(prompts) or 'no prompts'}")
    return prompts[name]


async def openai_embeddings(context: RequestContext, body: requests.EmbeddingsBody) -> dict[str, object]:
    """Return a vector for each text, in OpenAI's form."""
    name, model_queue = context.select_model(body.model, EMBEDDING)
    arrays = await vectors(context, model_queue, as_list(body.input), dimensions=body.dimensions)
    embeddings: Iterable[object] = arrays
    if body.encoding_format == "base64":
        from base64 import b64encode

        embeddings = [b64encode(vector.astype("<f4").tobytes()).decode() for vector in arrays]
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": embedding}
            for index, embedding in enumerate(embeddings)
        ],
        "model": name,
        "usage": {"prompt_tokens": context.record.tokens, "total_tokens": context.record.tokens},
    }


async def compare_sentences(context: RequestContext, body: requests.SimilarityBody) -> list[float]:
    """Return the cosine similarity of a sentence to each of the others."""
    _, model_queue = context.select_model(body.model, EMBEDDING)
    truncate = None if body.parameters is None else body.parameters.truncate
    comparison = body.inputs
    return _cosines(
        await vectors(context, model_queue, [comparison.source_sentence, *comparison.sentences], truncate=truncate)
    )


def _cosines(unit_vectors: np.ndarray) -> list[float]:
    """Return the cosines between the first unit vector and each of the others."""
    cosines: list[float] = (unit_vectors[1:] @ unit_vectors[0]).clip(-1, 1).tolist()
    return cosines


async def rerank(context: RequestContext, body: requests.RerankBody) -> list[dict[str, object]]:
    """Return texts by relevance to a query, best first, by a cross-encoder or by the cosine of sentence embeddings."""
    _, model_queue = context.select_model(body.model, RANKS)
    if getattr(model_queue.engine, "kind", "") == "embedding":
        scores = _cosines(await vectors(context, model_queue, [body.query, *body.texts], truncate=body.truncate))
    else:
        context.set_texts(*(body.query + text for text in body.texts))
        scores = await _pair_scores(context, model_queue, body.query, body.texts, raw=body.raw_scores)
    ranked = sorted(range(len(scores)), key=lambda index: -scores[index])
    hits: list[dict[str, object]] = [{"index": index, "score": scores[index]} for index in ranked]
    if body.return_text:
        hits = [hit | {"text": body.texts[index]} for hit, index in zip(hits, ranked, strict=True)]
    return hits


async def _pair_scores(
    context: RequestContext,
    model_queue: ModelQueue[BundleEngine],
    query: str,
    texts: Sequence[str],
    *,
    raw: bool = False,
) -> list[float]:
    """Return the relevance of each text to a query by a cross-encoder: between 0 and 1 unless `raw` is true."""
    answers = await context.predict(model_queue, [(query, text) for text in texts])
    sigmoid = has_sigmoid(getattr(model_queue.engine, "loaded", None))
    if sigmoid and raw:
        raise HeedfulError("this model's scores are between 0 and 1: raw_scores has to be false")
    return [relevance(answer, raw=raw or sigmoid) for answer in answers]


async def search_documents(context: RequestContext, body: requests.SearchBody) -> list[dict[str, object]]:
    """Return the best documents of an index for a query, each with its best passage."""
    from heedful.search.index import RERANKED, SearchIndex, rescored

    reranker = None if body.reranker is None else context.select_model(body.reranker, ("rank",))[1]
    _, model_queue = context.select_model(body.model, ("search",))
    engine = model_queue.engine
    assert engine is not None and isinstance(engine.search_index, SearchIndex)
    index = engine.search_index
    vector = None
    if body.method == "words":
        context.set_texts(body.query)
    elif body.query.strip():
        (vector,) = await vectors(context, model_queue, [body.query], prompt=engine.prompt("query"))
    depth = body.top_k if reranker is None else max(body.top_k, RERANKED)
    hits = await asyncio.to_thread(partial(index.search, body.query, depth, method=body.method, vector=vector))
    if reranker is not None and hits:
        scores: list[float] = []
        for start in range(0, len(hits), RERANK_BATCH):
            passages = [hit.passage for hit in hits[start : start + RERANK_BATCH]]
            scores += await _pair_scores(context, reranker, body.query, passages)
        hits = rescored(hits, scores)[: body.top_k]
    if not body.highlight:
        return [hit.to_dict() for hit in hits]
    return [{**hit.to_dict(), "highlights": index.matches(body.query, hit.passage)} for hit in hits]


# -- heads ------------------------------------------------------------------------------------------------------


async def predict(
    context: RequestContext, body: requests.PredictBody
) -> list[dict[str, object]] | list[list[dict[str, object]]]:
    """Return the labels of each text or pair with their scores, best first."""
    _, model_queue = context.select_model(body.model, CLASSES)
    if body.raw_scores:
        raise HeedfulError("raw_scores is true, and this server gives probabilities, or a regression's numbers")
    bundle = getattr(model_queue.engine, "loaded", None)
    sequences, is_single = parse_sequences(body.inputs, getattr(bundle, "pairs", None))
    texts: list[str] = []
    for sequence in sequences:
        texts += [sequence] if isinstance(sequence, str) else sequence
    context.set_texts(*texts)
    min_probability = body.min_confidence
    if min_probability is not None:
        check_min_confidence(min_probability, None if bundle is None else bundle.config.head)
    if body.prediction_set is not None and bundle is not None:
        if min_probability is not None:
            raise HeedfulError("min_confidence and prediction_set exclude each other: give one of them")
        check_prediction_set(body.prediction_set, bundle)
        min_probability = least_probability(bundle.calibration, body.prediction_set)
    answers = await context.predict(model_queue, sequences)
    context.service.metrics.count_predictions(context.model, answers)
    labels = [labels_of(answer, min_probability, as_set=body.prediction_set is not None) for answer in answers]
    return labels[0] if is_single else labels


async def classify_zero_shot(
    context: RequestContext, body: requests.ZeroShotBody
) -> list[dict[str, object]] | list[list[dict[str, object]]]:
    """Return the candidate labels of each text with their scores, best first."""
    _, model_queue = context.select_model(body.model, ZERO_SHOT)
    parameters = body.parameters
    candidates = CandidateLabels.of(parameters.candidate_labels, parameters.hypothesis_template, parameters.multi_label)
    texts = as_list(body.inputs)
    label_vectors = None
    if getattr(model_queue.engine, "kind", "") == "embedding":
        hypotheses = candidates.hypotheses(PLAIN_TEMPLATE)
        label_vectors = torch.from_numpy(await vectors(context, model_queue, hypotheses))
        context.set_texts(*texts)
        sizes = list(map(len, texts))
    else:
        hypotheses = candidates.hypotheses(ENTAILMENT_TEMPLATE)
        context.set_texts(*(text + hypothesis for text in texts for hypothesis in hypotheses))
        sizes = [sum(len(text) + len(hypothesis) for hypothesis in hypotheses) for text in texts]

    def encode(engine: BundleEngine) -> Turns:
        return tokenize_in_turns(zero_shot_engine(engine, candidates, label_vectors), texts)

    answers = await context.predict(model_queue, texts, encode=encode, sizes=sizes)
    labels = [labels_of(answer) for answer in answers]
    return labels[0] if isinstance(body.inputs, str) else labels


def labels_of(answer: Answer, min_probability: float | None = None, *, as_set: bool = False) -> list[dict[str, object]]:
    """Return the labels of an answer with their scores, best first.

    Args:
        answer: The answer of a classifier.
        min_probability: Minimum probability with which the most probable label is "predicted". If None, only labels of
            multi-label models are "predicted".
        as_set: Whether all labels with at least `min_probability` are "predicted", and always the most probable one.
    """
    scores: dict[str, float] = answer.get("probabilities") or answer["values"]
    predicted = answer.get("labels")
    if min_probability is not None and as_set:
        predicted = [label for label, score in scores.items() if score >= min_probability or label == answer["label"]]
    elif min_probability is not None:
        predicted = [answer["label"]] if answer["probability"] >= min_probability else []
    best_first = sorted(scores.items(), key=lambda pair: -pair[1])
    labels: list[dict[str, object]] = [{"label": label, "score": score} for label, score in best_first]
    if predicted is None:
        return labels
    return [label | {"predicted": label["label"] in predicted} for label in labels]


async def classify_tokens(context: RequestContext, body: requests.TokenClassificationBody) -> Answer | list[Answer]:
    """Return a label for each word, and the entities that they make."""
    _, model_queue = context.select_model(body.model, ("token_classification",))
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    words = [[text] if isinstance(text, str) else text for text in texts]
    if len(texts) > context.service.settings.limits.max_client_batch_size:
        raise TooLongError(
            f"the request has {len(texts)} texts, and may have {context.service.settings.limits.max_client_batch_size}"
        )
    context.set_texts(*(" ".join(sentence) for sentence in words))
    return match_input(body.inputs, await context.predict(model_queue, texts))


async def answer_questions(context: RequestContext, body: requests.QuestionAnsweringBody) -> Answer | list[Answer]:
    """Return the answer to each question, as a part of its context."""
    _, model_queue = context.select_model(body.model, ("question_answering",))
    questions = as_list(body.inputs)
    context.set_texts(*(question.question + question.context for question in questions))
    inputs = [{"question": question.question, "context": question.context} for question in questions]
    return match_input(body.inputs, await context.predict(model_queue, inputs))


async def choose_candidates(context: RequestContext, body: requests.MultipleChoiceBody) -> Answer | list[Answer]:
    """Return the most probable candidate for each prompt."""
    _, model_queue = context.select_model(body.model, ("multiple_choice",))
    prompts = as_list(body.inputs)
    context.set_texts(*(prompt.prompt + choice for prompt in prompts for choice in prompt.choices))
    inputs = [{"prompt": prompt.prompt, "choices": prompt.choices} for prompt in prompts]
    return match_input(body.inputs, await context.predict(model_queue, inputs))


async def predict_next_sentence(context: RequestContext, body: requests.NextSentenceBody) -> list[Answer]:
    """Return the probability that the second text of each pair follows the first."""
    _, model_queue = context.select_model(body.model, ("next_sentence", "pretraining"))
    context.set_texts(*(text for pair in body.inputs for text in pair))
    return await context.predict(model_queue, [tuple(pair) for pair in body.inputs])


async def fill_masks(context: RequestContext, body: requests.FillMaskBody) -> Answer | list[Answer]:
    """Return the most probable tokens for each mask of each text."""
    _, model_queue = context.select_model(body.model, ("masked_lm", "pretraining"))
    context.set_texts(*as_list(body.inputs))
    return match_input(body.inputs, await context.predict(model_queue, as_list(body.inputs), top_k=body.top_k))


async def generate(context: RequestContext, body: requests.GenerateBody) -> Answer | list[Answer]:
    """Return a generated text for each text: a translation, summary or continuation, as the model was trained."""
    _, model_queue = context.select_model(body.model, ("language_model",))
    context.set_texts(*as_list(body.inputs))
    limit = context.service.settings.limits.max_new_tokens
    requested = body.max_new_tokens
    if requested is not None and requested > limit:
        raise TooLongError(
            f"max_new_tokens is {requested}, and the limit of this server is {limit}: ask for fewer tokens"
        )
    if body.num_beams is not None and body.temperature is not None:
        raise HeedfulError("num_beams and temperature were both given: beam search does not sample; give one of them")
    defaults = GenerationConfig() if model_queue.engine is None else model_queue.engine.writing
    writing = defaults.with_choices(
        num_beams=body.num_beams,
        num_return_sequences=body.num_beams,
        temperature=body.temperature,
        max_new_tokens=requested,
        seed=body.seed,
    )
    writing = replace(writing, max_new_tokens=min(writing.max_new_tokens, limit))
    return match_input(body.inputs, await context.predict(model_queue, as_list(body.inputs), writing=writing))


# -- attention and tokens -----------------------------------------------------------------------------------------


async def show_attention(context: RequestContext, body: requests.AttentionBody) -> AttentionWeights:
    """Return the attention weights of a text in the chosen layers and heads."""
    _, model_queue = context.select_model(body.model, None)
    limits = context.service.settings.limits
    record = context.record
    texts = as_list(body.inputs)
    tokenizer_input = body.inputs if isinstance(body.inputs, str) else (body.inputs[0], body.inputs[1])
    context.set_texts(*texts)

    def compute(engine: BundleEngine) -> AttentionWeights:
        from heedful.serve.attention import attention_response

        for _ in context.check_tokens(engine, max_tokens=engine.limit, counts_truncated=True):
            pass
        return attention_response(engine, tokenizer_input, body.layers, body.heads, limits.max_attention_weights)

    max_tokens = min(1 + sum(map(len, texts)), limits.max_request_tokens)  # a text has at most one token per character
    attention = await model_queue.call(
        compute, tokens=max_tokens, deadline=record.deadline, is_disconnected=record.is_disconnected
    )
    record.tokens += len(attention["tokens"])
    return attention


async def tokenize(context: RequestContext, body: requests.TokenizeBody) -> list[list[dict[str, object]]]:
    """Return the tokens of each text, as the model reads it."""
    _, model_queue = context.select_model(body.model, None)
    texts = as_list(body.inputs)
    context.set_texts(*texts)
    max_tokens = context.service.settings.limits.max_request_tokens

    def tokenize_texts(engine: BundleEngine) -> Generator[None, None, list[list[dict[str, object]]]]:
        from heedful.serve.attention import token_infos

        yield from context.check_tokens(engine, counts_truncated=True)
        encodings: list[Encoding] = []
        for _, group in group_in_turns(texts):
            encodings += engine.tokenizer.encode_batch(group)
            yield
        if (count := sum(map(len, encodings))) > max_tokens:
            raise TooLongError(f"the texts have {count} tokens, and an answer has at most {max_tokens}")
        return [token_infos(encoding, engine.tokenizer, special=body.add_special_tokens) for encoding in encodings]

    record = context.record
    return await model_queue.tokenize(
        tokenize_texts,
        deadline=record.deadline,
        is_disconnected=record.is_disconnected,
        sizes=[len(text) for text in texts],
    )


def endpoints() -> tuple[Endpoint, ...]:
    """Return all routes that use a model. The routes of registered tasks come last."""
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
