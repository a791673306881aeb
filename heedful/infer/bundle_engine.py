"""A loaded model that turns inputs into answers: tokenization, batches, scores, answers. It measures nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from itertools import islice
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from heedful.checkpoint import ModelBundle
from heedful.errors import HeedfulError, InputError
from heedful.families import FAMILIES
from heedful.infer.attention_report import attention_report
from heedful.infer.cascade import answer_in_stages
from heedful.infer.cuda_graphs import CudaGraphs
from heedful.infer.engine_options import check_min_confidence, check_prediction_set, check_token_budget
from heedful.infer.finite import NOT_FINITE, answer_is_finite, scores_are_finite
from heedful.infer.tuning.execution_plan import ExecutionPlan, apply_plan
from heedful.model.config import Classes, Head, SentenceEmbedding
from heedful.model.decode import Decoding
from heedful.model.heads import ClassesHead, PretrainingHead, pooled_row
from heedful.model.pooling import PooledClassesHead
from heedful.model.stack import Transformer, select_rows
from heedful.packed import Packed
from heedful.tasks.answer_heads import answer_heads_of, answer_heads_of_head
from heedful.tasks.answering import (
    Answer,
    AnswerContext,
    AnswerHead,
    PromptedText,
    Window,
    group_by_window,
    input_windows,
)
from heedful.tasks.generation import (
    GenerationConfig,
    decoder_prompts,
    encode_truncated,
    folder_generation,
    with_languages,
)
from heedful.tasks.metrics.conformal import least_probability
from heedful.tasks.next_sentence import NEXT_SENTENCE_HEAD
from heedful.tasks.predictions import AnyPrediction, check_prediction_type
from heedful.tokenizer import Encoding, Tokenizer, TokenizerInput

TOKEN_BUDGET = 4096  # of a batch; benchmarks/results/forward-minilm-batches-2026-11-21.md has it beside 2048
TOKENIZE_CHUNK = 1024  # inputs of a call that are tokenized, and sorted into batches, at once
MAX_HELD_SCORES = 1 << 24  # scores over the vocabulary that are held at once, where few are kept


class Chunk(NamedTuple):
    """A window of tokens to be scored."""

    answerer: AnswerHead
    encoded: Encoding
    positions: list[int]  # of the tokens to score; empty: the whole window
    unpooled: int = 0  # tokens of a prompt at its start that are not part of the vector


class EncodedInput(NamedTuple):
    """An input that was read: what answers it, and its windows in which something is to be scored."""

    engine_input: object
    answerer: AnswerHead
    pieces: list[Chunk]
    dropped: int = 0  # tokens of its end that are in no window
    seen: Sequence[Encoding] = ()  # all its windows

    @property
    def tokens(self) -> int:
        """How many tokens are to be scored."""
        return sum(len(piece.encoded) for piece in self.pieces)


class _ReadInput(NamedTuple):
    """The answer head of an input, its texts with prompt and suffix, and the prompt."""

    answerer: AnswerHead
    texts: list[TokenizerInput]
    prompt: str


def with_prompt(prompt: str, texts: Iterable[str]) -> list[object]:
    """Return texts as inputs that are embedded behind this prompt, and not behind the model's default one."""
    return [PromptedText(prompt, text) for text in texts]


class BundleEngine:
    """A loaded model that answers by a plan; an answer is the same whatever else is in its batch.

    `Engine` opens one by the name of a run or of a model, in the plan that is fastest on this machine. A cascade
    answers in stages by a call, `answers` and `predict`; the other methods are those of its last stage.

    Attributes:
        loaded: The model, its head and its tokenizer; of a cascade, the last stage.
        plan: How the model is computed; None: as it was loaded.
        parameters: Number of parameters, before layers were replaced by the plan; of a cascade, of all stages.
        precision_log: The measurements that the precision was chosen by, a line each.
        kind: Kind of the head.
    """

    precision_log: tuple[str, ...] = ()

    def __init__(
        self,
        bundle: ModelBundle,
        *,
        plan: ExecutionPlan | None = None,
        token_budget: int = TOKEN_BUDGET,
        writing: GenerationConfig | None = None,
        max_length: int | None = None,
        min_confidence: float = 0.0,
        prediction_set: float | None = None,
    ) -> None:
        """Apply the plan, which replaces layers of the bundle; see `Engine` for the other arguments."""
        check_token_budget(token_budget)
        self.loaded = bundle
        self.plan = plan
        self.parameters = bundle.count()
        if plan is not None:
            apply_plan(bundle, plan)
        self.token_budget = token_budget
        self._head, self._answerers = _able(self.loaded)
        generates = any(answerer.generate for answerer in self._answerers)
        self.writing = writing or (folder_generation(bundle).defaults if generates else GenerationConfig())
        check_min_confidence(min_confidence, self._head)
        self.min_confidence = min_confidence
        check_prediction_set(prediction_set, bundle)
        self.prediction_set = prediction_set
        self.candidates: object = None  # labels that the model was not trained on, see zero_shot.py
        self.search_index: object = None  # the index whose queries the model encodes, on a server
        if self.loaded.tokenizer is None:
            raise HeedfulError(
                f"{self.loaded.source} has no tokenizer: put its tokenizer.json, or vocab.txt, beside config.json"
            )
        self.tokenizer: Tokenizer = self.loaded.tokenizer
        self.limit = self.loaded.max_length
        self.max_length = max_length
        stack, on_cuda = self.loaded.model, next(self.loaded.parameters()).device.type == "cuda"
        self._graphs = CudaGraphs(stack) if on_cuda and isinstance(stack, Transformer) else None
        self._last: BundleEngine | None = None  # of an early stage of a cascade, the last one, whose options hold
        self._early: list[tuple[BundleEngine, float]] = []  # early stages of a cascade, and their thresholds
        for stage in bundle.early_stages:
            engine = BundleEngine(stage.bundle, token_budget=token_budget)
            engine._last = self
            self._early.append((engine, stage.threshold))
            self.parameters += engine.parameters

    @property
    def stages(self) -> list[tuple[BundleEngine, float]]:
        """The stages of a cascade, each with the least probability with which it answers; else the engine alone."""
        return [*self._early, (self, 0.0)]

    def without_early_stages(self) -> Self:
        """Return an engine of the last stage of a cascade alone."""
        changed = copy(self)
        changed._early = []
        return changed

    def set_languages(self, src_lang: str | None, tgt_lang: str | None) -> None:
        """Translate from and into other languages, as `heedful.tasks.generation.with_languages` says."""
        self.loaded = with_languages(self.loaded, src_lang, tgt_lang)
        assert self.loaded.tokenizer is not None
        self.tokenizer = self.loaded.tokenizer

    @property
    def kind(self) -> str:
        """The kind of head, as `load(head=...)` takes it: "sequence_classification", "masked_lm", "embedding", ..."""
        return self._head.kind

    @property
    def input_kind(self) -> str:
        """The kind of inputs that rows of files make for this head, a key of `INPUT_SPECS`."""
        is_cross_encoder = isinstance(self._head, Classes) and self._head.score_activation is not None
        return "cross_encoder" if is_cross_encoder else self.kind

    @property
    def expects(self) -> str:
        """A description of the inputs that the head takes."""
        return "; or ".join(answerer.expects for answerer in self._answerers)

    def __call__(self, inputs: Iterable[object], *, top_k: int = 5) -> list[Answer]:
        """An answer for each input, in order.

        Longer texts than the model reads are windowed; refused where both texts of a pair must be seen at once (does
        the second follow?); or, by sentence embeddings, cut and counted. `top_k` is how many tokens fill-mask lists.
        """
        listed = self._listed(inputs)
        if top_k < 1:
            raise HeedfulError(f"top_k is {top_k}: give how many candidates to list, from 1")
        if self._early:
            return answer_in_stages(self.stages, listed, lambda engine, some: engine._answer_listed(some, top_k))
        return self._answer_listed(listed, top_k)

    def _answer_listed(self, listed: list[object], top_k: int) -> list[Answer]:
        """Return the answers of this stage alone."""
        if len(listed) <= TOKENIZE_CHUNK:
            return self._own_answers(self.tokenize(listed), top_k=top_k)
        parts = [(first, listed[first : first + TOKENIZE_CHUNK]) for first in range(0, len(listed), TOKENIZE_CHUNK)]
        answers: list[Answer] = []
        with ThreadPoolExecutor(1) as beside:  # tokenizes the next part while this one is computed
            coming = beside.submit(self.tokenize, parts[0][1])
            for number in range(len(parts)):
                asked = coming.result()
                if number + 1 < len(parts):
                    coming = beside.submit(self.tokenize, parts[number + 1][1], first=parts[number + 1][0])
                answers += self._own_answers(asked, top_k=top_k, first=parts[number][0])
        return answers

    def predict(
        self, inputs: Iterable[object], answer_type: type[AnyPrediction] | None = None, *, top_k: int = 5
    ) -> list[AnyPrediction]:
        """Answer each input with a dataclass of its head's kind, such as Classification or TokenClassification.

        Args:
            inputs: Texts, or whatever `expects` names.
            answer_type: The class that the answers have; a type checker then knows their fields.
            top_k: Number of candidates that are listed for each mask.

        Raises:
            HeedfulError: If an input cannot be used, or the head answers with another class than `answer_type`.
        """
        listed = self._listed(inputs)
        answers = self(listed, top_k=top_k)
        read = [self._read(number, engine_input) for number, engine_input in enumerate(listed)]
        return check_prediction_type(
            [item.answerer.prediction(answer) for item, answer in zip(read, answers, strict=True)], answer_type
        )

    def encode(self, texts: str | Iterable[str], *, prompt: str | None = None) -> NDArray[np.float32]:
        """Return the embeddings of texts, [texts, width]; [width] for a single text.

        Args:
            prompt: Put before each text; None: the model's default prompt, if it has one.

        Raises:
            HeedfulError: If the model's head makes no sentence embeddings.
        """
        if self.kind != "embedding":
            raise HeedfulError(f"encode needs sentence embeddings, but this model has a {self.kind} head: use predict")
        if isinstance(texts, str):
            single: NDArray[np.float32] = self.encode([texts], prompt=prompt)[0]
            return single
        listed = list(texts)
        if wrong := next((number for number, text in enumerate(listed) if not isinstance(text, str)), None):
            raise HeedfulError(f"input {wrong} is {_shown(listed[wrong])}; expected a text")
        vectors = [answer["vector"] for answer in self(listed if prompt is None else with_prompt(prompt, listed))]
        head = self._head
        assert isinstance(head, SentenceEmbedding)
        return np.array(vectors, np.float32).reshape(len(listed), head.width(self.loaded.config.model))

    def pooled_vectors(self, inputs: Iterable[object]) -> NDArray[np.float32]:
        """Return the vectors from which a classification head computes its scores, [inputs, width].

        The vector of an input that is read in several windows is their mean.

        Raises:
            HeedfulError: If the head is another one.
        """
        head = self.loaded.head
        if not isinstance(head, ClassesHead | PooledClassesHead):
            raise HeedfulError(f"pooled vectors need a model that classifies, but this one has a {self.kind} head")
        asked = self.tokenize(self._listed(inputs))
        pieces = [piece for encoded in asked for piece in encoded.pieces]
        vectors: dict[int, Tensor] = {}
        self.loaded.eval()
        with torch.inference_mode():
            for numbers in self._batches(pieces):
                batch = self._packed([pieces[number] for number in numbers])
                wanted, read = pooled_row(head, batch)
                pooled = _on_host(head.vectors(self._rows(batch, wanted), read).flatten(1))
                vectors.update(zip(numbers, pooled, strict=True))
        in_order = (vectors[number] for number in range(len(pieces)))
        means = [torch.stack([next(in_order) for _ in encoded.pieces]).mean(0).numpy() for encoded in asked]
        return np.array(means, np.float32).reshape(len(means), -1)

    def encode_query(self, texts: str | Iterable[str]) -> NDArray[np.float32]:
        """Return the embeddings of search queries: `encode` with the prompt that the model has for them, if any."""
        return self.encode(texts, prompt=self.prompt("query"))

    def encode_document(self, texts: str | Iterable[str]) -> NDArray[np.float32]:
        """Return the embeddings of documents: `encode` with the prompt that the model has for them, if any."""
        return self.encode(texts, prompt=self.prompt("document", "passage", "corpus"))

    def prompt(self, *names: str) -> str:
        """Return the first prompt of the model with one of these names; else its default prompt, or ""."""
        return self._head.prompt(*names) if isinstance(self._head, SentenceEmbedding) else ""

    def answers(self, asked: Sequence[EncodedInput], *, top_k: int = 5) -> list[Answer]:
        """Score encoded inputs and make their answers: the second and third step of a call.

        Args:
            asked: Inputs that the first of `stages` has tokenized.
            top_k: Number of candidates that are listed for each mask.

        Raises:
            InputError: If the numbers of an input are not finite.
        """
        if not self._early:
            return self._own_answers(asked, top_k=top_k)
        first_engine = self._early[0][0]

        def ask(engine: BundleEngine, some: list[EncodedInput]) -> list[Answer]:
            own = some if engine is first_engine else engine.tokenize([encoded.engine_input for encoded in some])
            return engine._own_answers(own, top_k=top_k)

        return answer_in_stages(self.stages, asked, ask)

    def _own_answers(self, asked: Sequence[EncodedInput], *, top_k: int, first: int = 0) -> list[Answer]:
        """Answer encoded inputs by this stage; raises InputError, which counts them from `first`."""
        pieces = [piece for encoded in asked for piece in encoded.pieces]
        scores: dict[int, object] = {}
        for numbers in self._batches(pieces):
            scores.update(zip(numbers, self.score([pieces[number] for number in numbers], top_k=top_k), strict=True))
        in_order = (scores[number] for number in range(len(pieces)))
        answers: list[Answer] = []
        for number, encoded in enumerate(asked, start=first):
            windows = list(islice(in_order, len(encoded.pieces)))
            answer = self._answer(encoded, windows, top_k)
            if not (answer_is_finite(answer) and all(map(scores_are_finite, windows))):
                if len(asked) == 1:
                    raise InputError(NOT_FINITE, number) from FloatingPointError()
                # another input may have spoilt its batch
                (answer,) = self._own_answers([encoded], top_k=top_k, first=number)
            answers.append(answer)
        return answers

    def tokenize(self, inputs: Sequence[object], *, first: int = 0) -> list[EncodedInput]:
        """Tokenize inputs into windows: the first of the three steps of a call.

        Errors count the inputs from `first`.
        """
        read = [self._read(number, engine_input) for number, engine_input in enumerate(inputs, start=first)]
        try:
            encoded = iter(self._encode([item for _, items, _ in read for item in items]))
        except HeedfulError:
            for number, (_, items, _) in enumerate(read, start=first):
                self._blame(number, items)
            raise
        asked = []
        for number, (engine_input, (answerer, items, prompt)) in enumerate(zip(inputs, read, strict=True), start=first):
            seen = [next(encoded) for _ in items]
            several = self._windows(number, answerer, items, seen)
            asked.append(
                EncodedInput(
                    engine_input,
                    answerer,
                    self._pieces(answerer, several, self._unpooled(prompt)),
                    sum(encoding.dropped for encoding in seen),
                    several,
                )
            )
        return asked

    def score(
        self,
        pieces: Sequence[Chunk],
        writing: GenerationConfig | None = None,
        *,
        top_k: int | None = None,
    ) -> list[object]:
        """Score the pieces of one batch, of one answerer, and return their scores on the host: the second step.

        With `top_k`, as in `answer`, only that number of tokens is kept at each position that has scores over the
        vocabulary. Pieces for which texts are written get all of them at once here; `decode` does it in steps.
        """
        assert all(piece.answerer is pieces[0].answerer for piece in pieces)
        training = self.loaded.training
        if training:  # setting the mode of all modules takes as long as a small model
            self.loaded.eval()
        try:
            with torch.inference_mode():
                return self._run(pieces, writing or self.writing, top_k)
        finally:
            if training:
                self.loaded.train()

    def decode(self, pieces: Sequence[Chunk], writing: GenerationConfig | None = None) -> Decoding:
        """The second step of one batch for which texts are written, as a decoding that its caller takes step by step.

        Its texts are those of `score`, whatever happens between its steps; the model has to be in eval mode.
        """
        answerer = pieces[0].answerer
        assert answerer.generate is not None and all(piece.answerer is answerer for piece in pieces)
        with torch.inference_mode():
            return answerer.generate(self.loaded, self.tokenizer, self._packed(pieces), writing or self.writing)

    def answer(self, asked: EncodedInput, scores: Sequence[object], *, top_k: int = 5) -> Answer:
        """The third step: the scores of an input's pieces become its answer, whose numbers must be finite."""
        answer = self._answer(asked, scores, top_k)
        if not answer_is_finite(answer):
            raise HeedfulError(NOT_FINITE) from FloatingPointError()
        return answer

    def _answer(self, asked: EncodedInput, scores: Sequence[object], top_k: int) -> Answer:
        windows = [
            Window(piece.encoded, piece.positions, piece_scores)
            for piece, piece_scores in zip(asked.pieces, scores, strict=True)
        ]
        answer = asked.answerer.answer(asked.engine_input, windows, self._setting(top_k, asked.seen))
        return answer if self._options.max_length is None else answer | {"truncated_tokens": asked.dropped}

    @property
    def _options(self) -> BundleEngine:
        """The engine whose options hold: of a stage of a cascade, that of the last stage."""
        return self._last or self

    def _setting(self, top_k: int, seen: Sequence[Encoding] = ()) -> AnswerContext:
        thresholds = self.loaded.thresholds
        return AnswerContext(
            tokenizer=self.tokenizer,
            head=self._head,
            top_k=top_k,
            thresholds=thresholds,
            min_confidence=self._options.min_confidence,
            least_probability=self._options._least_probability(),
            windows=seen,
        )

    def _least_probability(self) -> float | None:
        if self.prediction_set is None:
            return None
        return least_probability(self.loaded.calibration, self.prediction_set)

    def explain(self) -> str:
        """How the model is computed: the precision, what was measured, and the attention kernel of a typical batch."""
        plan = ["as it was loaded"] if self.plan is None else [f"answers in {self.plan.precision}", *self.plan.why]
        return "\n".join(
            [*plan, *self.precision_log, *attention_report(self.loaded, self.plan, self.limit, self.token_budget)]
        )

    def _listed(self, inputs: Iterable[object]) -> list[object]:
        if isinstance(inputs, str | dict | tuple) or not hasattr(inputs, "__iter__"):
            raise HeedfulError(f"inputs is {_shown(inputs)}: give a list; this model's head expects {self.expects}")
        return list(inputs)

    def columns(self, *, pairs: bool) -> dict[str, object]:
        """Return the types of the fields of answers, see `Answerer.columns`; `pairs`: inputs may be pairs of texts."""
        columns: dict[str, object] = {}
        for answerer in self._answerers:
            if answerer.pairs in (None, pairs):
                columns |= answerer.columns(self.loaded, self.writing)
        if self._early:
            columns["stage"] = int
        return columns if self.prediction_set is None else columns | {"prediction_set": [str]}

    def _read(self, number: int, engine_input: object) -> _ReadInput:
        prompt, text_input = self.loaded.default_prompt, engine_input
        if isinstance(engine_input, PromptedText) and self.kind == "embedding":
            prompt, text_input = engine_input.prompt, engine_input.text
        for answerer in self._answerers:
            if (items := answerer.tokenizer_inputs(text_input)) is not None:
                suffix = self.loaded.text_suffix
                whole = [prompt + item + suffix if isinstance(item, str) else item for item in items]
                return _ReadInput(answerer, whole, prompt)
        raise HeedfulError(
            f"input {number} is {_shown(engine_input)}: this model's {self.kind} head expects {self.expects}"
        )

    def _unpooled(self, prompt: str) -> int:
        """Return how many tokens at the start of a text are not pooled because they are its prompt's.

        They are counted as in sentence-transformers: those of the prompt alone, without a special token at its end.
        """
        if not prompt or not isinstance(self._head, SentenceEmbedding) or self._head.pools_prompt:
            return 0
        alone = self.tokenizer.encode(prompt)
        return len(alone) - int(bool(alone.special) and alone.special[-1])

    def _windows(
        self, number: int, answerer: AnswerHead, items: list[TokenizerInput], encoded: list[Encoding]
    ) -> list[Encoding]:
        try:
            return [window for seen in input_windows(answerer, items, encoded, self.limit) for window in seen]
        except HeedfulError as error:
            raise InputError(str(error), number) from None

    def _pieces(self, answerer: AnswerHead, several: list[Encoding], unpooled: int) -> list[Chunk]:
        """The windows of an input; those in which nothing is to be scored are left out."""
        if answerer.positions is None:
            return [Chunk(answerer, window, [], unpooled) for window in several]
        places = group_by_window(answerer.positions(several, self.tokenizer), len(several))
        return [Chunk(answerer, window, taken) for window, taken in zip(several, places, strict=True) if taken]

    def _encode(self, items: list[TokenizerInput]) -> list[Encoding]:
        max_length = self._options.max_length
        if self.limit is not None and all(answerer.long_inputs == "truncate" for answerer in self._answerers):
            max_length = self.limit if max_length is None else min(self.limit, max_length)
        if max_length is None:
            seen = self.tokenizer.encode_batch(items)
        else:
            seen = encode_truncated(self.tokenizer, items, self.loaded.text_suffix, max_length)
        return decoder_prompts(self.loaded, self.tokenizer, seen)

    def _blame(self, number: int, items: list[TokenizerInput]) -> None:
        """Say that it is this input that cannot be made into tokens, if so."""
        for item in items:
            try:
                self._encode([item])
            except HeedfulError as error:  # whose cause says whether a person can correct it
                raise InputError(str(error).replace("item 0 has", "it has", 1), number) from error.__cause__

    def _batches(self, pieces: Sequence[Chunk]) -> Iterator[list[int]]:
        """The numbers of the pieces of each batch: one answerer, longest first, within the budget."""
        batch: list[int] = []
        rows = 0
        order = sorted(range(len(pieces)), key=lambda n: (id(pieces[n].answerer), -len(pieces[n].encoded)))
        for number in order:
            piece = pieces[number]
            if batch and (
                rows + len(piece.encoded) > self.token_budget or piece.answerer is not pieces[batch[0]].answerer
            ):
                yield batch
                batch, rows = [], 0
            batch.append(number)
            rows += len(piece.encoded)
        if batch:
            yield batch

    def _run(self, pieces: Sequence[Chunk], writing: GenerationConfig, top_k: int | None) -> list[object]:
        batch, answerer = self._packed(pieces), pieces[0].answerer
        if answerer.generate is not None:
            return list(answerer.generate(self.loaded, self.tokenizer, batch, writing).run())
        head = self._module(answerer)
        if answerer.positions is None:
            wanted, read = pooled_row(head, batch)
            if any(piece.unpooled for piece in pieces):
                wanted, read = batch.without_first([piece.unpooled for piece in pieces])
            return list(_on_host(head(self._rows(batch, wanted), read)))
        places = [
            start + place for start, piece in zip(batch.bounds, pieces, strict=False) for place in piece.positions
        ]
        rows, counts = (
            self._rows(batch, torch.tensor(places, device=batch.tokens.device)),
            [len(piece.positions) for piece in pieces],
        )
        if answerer.summarize is None or top_k is None:
            return list(_on_host(head(rows, batch)).split(counts))
        parts, setting = rows.split(max(1, MAX_HELD_SCORES // self.tokenizer.size)), self._setting(top_k)
        brief = iter(
            [summary for part in parts for summary in answerer.summarize(_on_host(head(part, batch)), setting)]
        )
        return [list(islice(brief, count)) for count in counts]

    def _packed(self, pieces: Sequence[Chunk]) -> Packed:
        """One batch, on the model's device."""
        device = next(self.loaded.parameters()).device
        return Packed.of([piece.encoded.ids for piece in pieces], [piece.encoded.types for piece in pieces]).to(device)

    def _rows(self, batch: Packed, wanted: Tensor | None) -> Tensor:
        if self._graphs is None or self._graphs.cannot(batch):
            return self.loaded.hidden_states(batch, output_rows=wanted)
        return select_rows(self._graphs(batch), wanted)

    def _module(self, answerer: AnswerHead) -> nn.Module:
        head = self.loaded.head
        if isinstance(head, PretrainingHead):
            return head.next if answerer is NEXT_SENTENCE_HEAD else head.masked
        assert head is not None
        return head


def _on_host(scores: Tensor) -> Tensor:
    return scores.to("cpu", torch.float64 if scores.dtype == torch.float64 else torch.float32)


def _able(loaded: ModelBundle) -> tuple[Head, tuple[AnswerHead, ...]]:
    """The head and what answers with it."""
    head = loaded.config.head
    if head is not None and (answerers := answer_heads_of_head(head)):
        return head, answerers
    can = [kind for kind in FAMILIES[loaded.config.family].kinds() if answer_heads_of(kind)]
    has = "no head" if head is None else f'a "{head.kind}" head, which answers nothing by itself'
    raise HeedfulError(
        f"{loaded.source} has {has}: load it with head= (--head-kind on the command line), one of {', '.join(can)}, "
        "whose weights must be in the folder"
    )


def _shown(value: object, most: int = 80) -> str:
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) <= most else text[: most - 1] + "…"
