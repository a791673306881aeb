"""`BundleEngine`: a loaded model that turns inputs into answers by tokenizing, batching and scoring them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from itertools import islice
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from heedful.checkpoint import ModelBundle
from heedful.device import check_device, device_name, tf32_products
from heedful.errors import HeedfulError, InputError
from heedful.infer.attention_report import attention_report
from heedful.infer.cascade import answer_in_stages, in_label_order
from heedful.infer.cuda_graphs import CudaGraphs
from heedful.infer.encoded_input import (
    Chunk,
    EncodedInput,
    all_windows,
    describe_value,
    scored_chunks,
    token_batches,
    unpooled_tokens,
    with_prompt,
)
from heedful.infer.engine_options import (
    check_min_confidence,
    check_prediction_set,
    check_token_budget,
    default_token_budget,
    usable_answer_heads,
)
from heedful.infer.finite import NOT_FINITE, answer_is_finite, scores_are_finite
from heedful.infer.scores import head_module, ignore_rows, to_cpu
from heedful.infer.tuning.execution_plan import ExecutionPlan, apply_plan
from heedful.model.attention import select_rows
from heedful.model.config import Classes, SentenceEmbedding
from heedful.model.decode import Decoding
from heedful.model.heads import ClassesHead, pooled_row
from heedful.model.pooling import PooledClassesHead
from heedful.model.stack import Transformer
from heedful.packed import Packed, send
from heedful.tasks.answering import Answer, AnswerContext, AnswerHead, PromptedText, Window
from heedful.tasks.generation import (
    GenerationConfig,
    decoder_prompts,
    encode_truncated,
    folder_generation,
    with_languages,
)
from heedful.tasks.metrics.conformal import least_probability
from heedful.tasks.predictions import AnyPrediction, check_prediction_type
from heedful.tokenizer import Encoding, Tokenizer, TokenizerInput

TOKENIZE_CHUNK = 1024  # inputs that are tokenized and sorted into batches together
MAX_HELD_SCORES = 1 << 24  # logits over the vocabulary in memory at once, where only the highest are returned


class _TextInput(NamedTuple):
    """An input as texts for the tokenizer, with the answer head for it."""

    answer_head: AnswerHead
    texts: list[TokenizerInput]  # including prompt and suffix
    prompt: str


class BundleEngine:
    """A loaded model that answers inputs. An answer does not depend on the other inputs of its batch.

    `Engine` loads a model by its name, with the plan that is fastest on this machine. If the model is a cascade, a call
    of the engine, `answers` and `predict` use all of its stages; the other methods use the last stage only.

    A call has three steps: `tokenize` splits inputs into windows of tokens (`Chunk`), `score` runs the model on a batch
    of windows, and `answer` converts the scores of an input's windows to its answer. The scores of a window are the
    outputs of the head: logits, a vector, or generated texts.

    Attributes:
        loaded: The model, its head and its tokenizer; for a cascade, the last stage.
        plan: Precision and kernels of the model. If None, the model is used as it was loaded.
        parameters: Number of parameters before the plan replaced layers; for a cascade, of all stages.
        precision_log: One line for each precision that was measured to choose this one.
        kind: Kind of the head.
        limit: Maximum tokens of a window. If None, there is no limit.
        max_length: Number of tokens to which inputs are truncated. If None, long inputs are split into windows.
        on_rows: Called after each batch with the hidden states that the head reads, and their number for each window;
            not called for generated texts and masks.
    """

    precision_log: tuple[str, ...] = ()

    def __init__(
        self,
        bundle: ModelBundle,
        *,
        plan: ExecutionPlan | None = None,
        token_budget: int | None = None,
        writing: GenerationConfig | None = None,
        max_length: int | None = None,
        min_confidence: float = 0.0,
        prediction_set: float | None = None,
    ) -> None:
        """Apply the plan, which replaces layers of the bundle; see `Engine` for the other arguments."""
        check_device(next(bundle.parameters()).device)
        self.loaded = bundle
        self.plan = plan
        self.parameters = bundle.count()
        if plan is not None:
            apply_plan(bundle, plan)
        self.token_budget = default_token_budget(bundle) if token_budget is None else token_budget
        check_token_budget(self.token_budget)
        self._head, self._answer_heads = usable_answer_heads(self.loaded)
        generates = any(answer_head.generate for answer_head in self._answer_heads)
        self.writing = writing or (folder_generation(bundle).defaults if generates else GenerationConfig())
        check_min_confidence(min_confidence, self._head)
        self.min_confidence = min_confidence
        check_prediction_set(prediction_set, bundle)
        self.prediction_set = prediction_set
        self.candidates: object = None  # CandidateLabels of a zero-shot engine, see zero_shot.py
        self.search_index: object = None  # SearchIndex whose queries the model encodes, on a server
        if self.loaded.tokenizer is None:
            raise HeedfulError(
                f"{self.loaded.source} has no tokenizer: put its tokenizer.json, or vocab.txt, beside config.json"
            )
        self.tokenizer: Tokenizer = self.loaded.tokenizer
        self.limit, self.max_length = self.loaded.max_length, max_length
        self.on_rows: Callable[[Tensor, Sequence[int]], None] = ignore_rows
        stack, on_cuda = self.loaded.model, next(self.loaded.parameters()).device.type == "cuda"
        has_graphs = on_cuda and not generates and isinstance(stack, Transformer)
        self._cuda_graphs = CudaGraphs(stack) if has_graphs else None
        uses_tf32 = on_cuda and not generates and plan is not None and plan.precision == "float32"
        # makes the context manager of a forward pass: matrix products in TF32, or as PyTorch is configured
        self._matmul_context: Callable[[], AbstractContextManager[None]] = tf32_products if uses_tf32 else nullcontext
        self._last_stage: BundleEngine | None = None  # for an early stage of a cascade; its options apply
        self._early_stages: list[tuple[BundleEngine, float]] = []  # (engine, confidence threshold) of a cascade
        for stage in bundle.early_stages:
            engine = BundleEngine(stage.bundle, token_budget=token_budget)
            engine._last_stage = self
            self._early_stages.append((engine, stage.threshold))
            self.parameters += engine.parameters

    @property
    def stages(self) -> list[tuple[BundleEngine, float]]:
        """The stages of a cascade as (engine, confidence threshold); only this engine, with 0, if it is no cascade."""
        return [*self._early_stages, (self, 0.0)]

    def without_early_stages(self) -> Self:
        """Return an engine that uses only the last stage of a cascade."""
        changed = copy(self)
        changed._early_stages = []
        return changed

    def set_languages(self, src_lang: str | None, tgt_lang: str | None) -> None:
        """Set the languages to translate from and into; see `heedful.tasks.generation.with_languages`."""
        self.loaded = with_languages(self.loaded, src_lang, tgt_lang)
        assert self.loaded.tokenizer is not None
        self.tokenizer = self.loaded.tokenizer

    @property
    def kind(self) -> str:
        """The kind of the head, as in `load(head=...)`: "sequence_classification", "masked_lm", "embedding", ..."""
        return self._head.kind

    @property
    def input_kind(self) -> str:
        """The key in `INPUT_SPECS` of the inputs that this head reads from rows of files."""
        is_cross_encoder = isinstance(self._head, Classes) and self._head.score_activation is not None
        return "cross_encoder" if is_cross_encoder else self.kind

    @property
    def expects(self) -> str:
        """A description of the inputs that the head accepts, for error messages."""
        return "; or ".join(answer_head.expects for answer_head in self._answer_heads)

    def __call__(self, inputs: Iterable[object], *, top_k: int = 5) -> list[Answer]:
        """Return an answer for each input, in order.

        A text that is longer than the model's limit is read in windows. Sentence embedding models truncate it and
        report the number of dropped tokens. Next-sentence heads refuse it, since they need both texts at once.

        Args:
            inputs: Inputs of the kind that `expects` describes.
            top_k: Number of tokens that fill-mask lists for each mask.

        Raises:
            HeedfulError: If an input cannot be used; its number is in the message.
        """
        input_list = self._as_list(inputs)
        if top_k < 1:
            raise HeedfulError(f"top_k is {top_k}: give how many candidates to list, from 1")
        first_stage, _ = self.stages[0]
        if self._early_stages:
            encoded_inputs = [encoded for _, chunk in first_stage._tokenize_ahead(input_list) for encoded in chunk]
            return self.answers(encoded_inputs, top_k=top_k)
        answers: list[Answer] = []
        for first, chunk in self._tokenize_ahead(input_list):
            answers += self._answer_encoded(chunk, top_k=top_k, first=first)
        return answers

    def _tokenize_ahead(self, inputs: list[object]) -> Iterator[tuple[int, list[EncodedInput]]]:
        """Yield (index of the first, tokenized inputs) for each chunk of 1,024; a thread tokenizes the next chunk."""
        if len(inputs) <= TOKENIZE_CHUNK:
            yield 0, self.tokenize(inputs)
            return
        with ThreadPoolExecutor(1) as executor:
            next_encoded = executor.submit(self.tokenize, inputs[:TOKENIZE_CHUNK])
            for start in range(0, len(inputs), TOKENIZE_CHUNK):
                encoded_inputs = next_encoded.result()
                next_start = start + TOKENIZE_CHUNK
                if next_start < len(inputs):
                    next_inputs = inputs[next_start : next_start + TOKENIZE_CHUNK]
                    next_encoded = executor.submit(self.tokenize, next_inputs, first=next_start)
                yield start, encoded_inputs

    def predict(
        self, inputs: Iterable[object], answer_type: type[AnyPrediction] | None = None, *, top_k: int = 5
    ) -> list[AnyPrediction]:
        """Return a dataclass for each input, such as Classification or TokenClassification.

        Args:
            inputs: Inputs of the kind that `expects` describes.
            answer_type: Class of the answers; with it, a type checker knows their fields.
            top_k: Number of candidates that are listed for each mask.

        Raises:
            HeedfulError: If an input cannot be used, or the answers are of another class than `answer_type`.
        """
        input_list = self._as_list(inputs)
        answers = self(input_list, top_k=top_k)
        heads = [self._text_input(number, engine_input).answer_head for number, engine_input in enumerate(input_list)]
        predictions = [head.prediction(answer) for head, answer in zip(heads, answers, strict=True)]
        return check_prediction_type(predictions, answer_type)

    def encode(self, texts: str | Iterable[str], *, prompt: str | None = None) -> NDArray[np.float32]:
        """Return the embeddings of texts, [texts, width]; [width] for a single text.

        Args:
            texts: The texts, or a single text.
            prompt: Text put before each text. If None, it is the model's default prompt, if there is one.

        Raises:
            HeedfulError: If the model's head makes no sentence embeddings.
        """
        if self.kind != "embedding":
            raise HeedfulError(f"encode needs sentence embeddings, but this model has a {self.kind} head: use predict")
        if isinstance(texts, str):
            vector: NDArray[np.float32] = self.encode([texts], prompt=prompt)[0]
            return vector
        text_list = list(texts)
        for number, text in enumerate(text_list):
            if not isinstance(text, str):
                raise HeedfulError(f"input {number} is {describe_value(text)}; expected a text")
        inputs = self._as_list(text_list) if prompt is None else with_prompt(prompt, text_list)
        head = self._head
        assert isinstance(head, SentenceEmbedding)
        vectors = np.empty((len(text_list), head.width(self.loaded.config.model)), np.float32)
        for first, encoded_inputs in self._tokenize_ahead(inputs):
            chunks = [chunk for encoded_input in encoded_inputs for chunk in encoded_input.chunks]
            assert len(chunks) == len(encoded_inputs), "texts are truncated and not read in windows"
            for indices in token_batches(chunks, self.token_budget):
                scores = self.score([chunks[index] for index in indices])
                vectors[[first + index for index in indices]] = np.stack([np.asarray(row) for row in scores])
        if np.isfinite(vectors).all():
            return vectors
        return np.array([answer["vector"] for answer in self(inputs)], np.float32)  # or an error that names the text

    def pooled_vectors(self, inputs: Iterable[object]) -> NDArray[np.float32]:
        """Return the vectors from which a classification head computes its logits, [inputs, width].

        An input with several windows gets the mean of their vectors. Other heads raise a HeedfulError.
        """
        head = self.loaded.head
        if not isinstance(head, ClassesHead | PooledClassesHead):
            raise HeedfulError(f"pooled vectors need a model that classifies, but this one has a {self.kind} head")
        encoded_inputs = self.tokenize(self._as_list(inputs))
        chunks = [chunk for encoded_input in encoded_inputs for chunk in encoded_input.chunks]
        vectors: dict[int, Tensor] = {}
        self.loaded.eval()
        with torch.inference_mode(), self._matmul_context():
            for indices in token_batches(chunks, self.token_budget):
                batch = self._pack([chunks[index] for index in indices])
                row_indices, pooled_batch = pooled_row(head, batch)
                pooled = head.vectors(self._hidden_states(batch, row_indices), pooled_batch).flatten(1)
                vectors.update(zip(indices, to_cpu(pooled), strict=True))
        vectors_in_order = (vectors[index] for index in range(len(chunks)))
        means = [
            torch.stack([next(vectors_in_order) for _ in encoded_input.chunks]).mean(0).numpy()
            for encoded_input in encoded_inputs
        ]
        return np.array(means, np.float32).reshape(len(means), -1)

    def encode_query(self, texts: str | Iterable[str]) -> NDArray[np.float32]:
        """Return the embeddings of search queries: `encode` with the model's prompt for queries, if it has one."""
        return self.encode(texts, prompt=self.prompt("query"))

    def encode_document(self, texts: str | Iterable[str]) -> NDArray[np.float32]:
        """Return the embeddings of documents: `encode` with the model's prompt for documents, if it has one."""
        return self.encode(texts, prompt=self.prompt("document", "passage", "corpus"))

    def prompt(self, *names: str) -> str:
        """Return the first of these prompts that the model has, by name; otherwise its default prompt, or ""."""
        return self._head.prompt(*names) if isinstance(self._head, SentenceEmbedding) else ""

    def answers(self, encoded_inputs: Sequence[EncodedInput], *, top_k: int = 5) -> list[Answer]:
        """Return the answers to encoded inputs: the second and the third step of a call.

        Args:
            encoded_inputs: Inputs that were tokenized by the first engine in `stages`.
            top_k: Number of candidates that are listed for each mask.

        Raises:
            InputError: If the scores of an input are not finite.
        """
        if not self._early_stages:
            return self._answer_encoded(encoded_inputs, top_k=top_k)
        first_stage, _ = self.stages[0]

        def ask(engine: BundleEngine, stage_inputs: list[EncodedInput]) -> list[Answer]:
            if engine._tokenization != first_stage._tokenization:
                stage_inputs = engine.tokenize([encoded_input.engine_input for encoded_input in stage_inputs])
            return engine._answer_encoded(stage_inputs, top_k=top_k)

        return answer_in_stages(self.stages, encoded_inputs, ask)

    def _answer_encoded(self, encoded_inputs: Sequence[EncodedInput], *, top_k: int, first: int = 0) -> list[Answer]:
        """Answer inputs with this stage only; in an InputError, the number of the first input is `first`."""
        chunks = [chunk for encoded_input in encoded_inputs for chunk in encoded_input.chunks]
        scores: dict[int, object] = {}
        for indices in token_batches(chunks, self.token_budget):
            scores.update(zip(indices, self.score([chunks[index] for index in indices], top_k=top_k), strict=True))
        scores_in_order = (scores[index] for index in range(len(chunks)))
        answers: list[Answer] = []
        for number, encoded_input in enumerate(encoded_inputs, start=first):
            chunk_scores = list(islice(scores_in_order, len(encoded_input.chunks)))
            answer = self._make_answer(encoded_input, chunk_scores, top_k)
            if not (answer_is_finite(answer) and all(map(scores_are_finite, chunk_scores))):
                if len(encoded_inputs) == 1:
                    raise InputError(NOT_FINITE, number) from FloatingPointError()
                # another input of its batch may be the cause: score this one by itself
                (answer,) = self._answer_encoded([encoded_input], top_k=top_k, first=number)
            answers.append(answer)
        return answers

    def tokenize(self, inputs: Sequence[object], *, first: int = 0) -> list[EncodedInput]:
        """Tokenize inputs into windows: the first step of a call.

        Args:
            inputs: The inputs.
            first: Number of the first input in error messages.

        Raises:
            InputError: If an input cannot be tokenized, or is too long for its head.
        """
        text_inputs = [self._text_input(number, engine_input) for number, engine_input in enumerate(inputs, first)]
        try:
            encodings = iter(self._encode([text for text_input in text_inputs for text in text_input.texts]))
        except HeedfulError:
            for number, text_input in enumerate(text_inputs, start=first):
                self._check_encodable(number, text_input.texts)
            raise
        encoded_inputs = []
        for number, (engine_input, text_input) in enumerate(zip(inputs, text_inputs, strict=True), start=first):
            answer_head, texts, prompt = text_input
            own_encodings = [next(encodings) for _ in texts]
            windows = all_windows(number, answer_head, texts, own_encodings, self.limit)
            encoded_inputs.append(
                EncodedInput(
                    engine_input=engine_input,
                    answer_head=answer_head,
                    chunks=scored_chunks(
                        answer_head, windows, unpooled_tokens(prompt, self._head, self.tokenizer), self.tokenizer
                    ),
                    dropped=sum(encoding.dropped for encoding in own_encodings),
                    windows=windows,
                )
            )
        return encoded_inputs

    @property
    def _tokenization(self) -> tuple[object, ...]:
        """Everything that `tokenize` depends on: of stages for which it is equal, one tokenizes for all."""
        bundle = self.loaded
        return self.tokenizer.fingerprint, self.limit, bundle.default_prompt, bundle.text_suffix, self._answer_heads

    def score(
        self,
        chunks: Sequence[Chunk],
        writing: GenerationConfig | None = None,
        *,
        top_k: int | None = None,
    ) -> list[object]:
        """Return the scores of each chunk of one batch, on the CPU: the second step of a call.

        Args:
            chunks: Chunks with the same answer head.
            writing: Generation settings. If None, the engine's. This method generates texts to their end; see `decode`
                for generation step by step.
            top_k: Return only the top_k best tokens at each position, if scores are over the vocabulary; `answer` then
                needs the same top_k. If None, return all scores.
        """
        assert all(chunk.answer_head is chunks[0].answer_head for chunk in chunks)
        was_training = self.loaded.training
        if was_training:  # calling eval() takes as long as the forward pass of a small model
            self.loaded.eval()
        try:
            with torch.inference_mode(), self._matmul_context():
                return self._score_batch(chunks, writing or self.writing, top_k)
        finally:
            if was_training:
                self.loaded.train()

    def decode(self, chunks: Sequence[Chunk], writing: GenerationConfig | None = None) -> Decoding:
        """Start the generation of texts for one batch, which the caller then runs step by step.

        It replaces `score` as the second step of a call, with the same texts. The model must be in eval mode.
        """
        answer_head = chunks[0].answer_head
        assert answer_head.generate is not None and all(chunk.answer_head is answer_head for chunk in chunks)
        with torch.inference_mode():
            return answer_head.generate(self.loaded, self.tokenizer, self._pack(chunks), writing or self.writing)

    def answer(self, encoded_input: EncodedInput, scores: Sequence[object], *, top_k: int = 5) -> Answer:
        """Return the answer to an input from the scores of its chunks: the third step of a call.

        Raises:
            HeedfulError: If a number in the answer is not finite.
        """
        answer = self._make_answer(encoded_input, scores, top_k)
        if not answer_is_finite(answer):
            raise HeedfulError(NOT_FINITE) from FloatingPointError()
        return answer

    def _make_answer(self, encoded_input: EncodedInput, scores: Sequence[object], top_k: int) -> Answer:
        """Return the answer to an input, without a check for numbers that are not finite."""
        windows = [
            Window(chunk.encoded, chunk.positions, chunk_scores)
            for chunk, chunk_scores in zip(encoded_input.chunks, scores, strict=True)
        ]
        context = self._answer_context(top_k, encoded_input.windows)
        answer = encoded_input.answer_head.answer(encoded_input.engine_input, windows, context)
        if self._last_stage is not None:
            answer = in_label_order(answer, self._last_stage._head)
        if self._options.max_length is None:
            return answer
        return answer | {"truncated_tokens": encoded_input.dropped}

    @property
    def _options(self) -> BundleEngine:
        """The engine whose options apply: in an early stage of a cascade, the engine of the last stage."""
        return self._last_stage or self

    def _answer_context(self, top_k: int, windows: Sequence[Encoding] = ()) -> AnswerContext:
        return AnswerContext(
            tokenizer=self.tokenizer,
            head=self._head,
            top_k=top_k,
            thresholds=self.loaded.thresholds,
            min_confidence=self._options.min_confidence,
            least_probability=self._options._min_set_probability(),
            windows=windows,
        )

    def _min_set_probability(self) -> float | None:
        """Return the minimum probability of a label in a prediction set; None if there are no sets."""
        if self.prediction_set is None:
            return None
        return least_probability(self.loaded.calibration, self.prediction_set)

    @property
    def precision(self) -> str:
        """The precision of the plan; without a plan, the dtype of the model."""
        dtype = str(next(self.loaded.parameters()).dtype).removeprefix("torch.")
        return dtype if self.plan is None else self.plan.precision

    def gpu_line(self) -> str:
        """Return GPU and precision, such as "on NVIDIA H100 80GB HBM3, bfloat16"; "" on a CPU."""
        device = next(self.loaded.parameters()).device
        return f"on {device_name(device)}, {self.precision}" if device.type == "cuda" else ""

    def prepare_graphs(self) -> None:
        """Record all CUDA graphs for small batches now; does nothing on a CPU.

        Otherwise the engine records a graph when it gets the third batch of about its size.
        """
        for engine, _ in self.stages:
            if engine._cuda_graphs is not None:
                engine.loaded.eval()
                with engine._matmul_context():
                    engine._cuda_graphs.prepare()

    def explain(self) -> str:
        """Describe how the model is computed: precision, measurements, and the attention kernel of a typical batch."""
        lines = ["as it was loaded"] if self.plan is None else [f"answers in {self.plan.precision}", *self.plan.why]
        lines += [gpu_line] if (gpu_line := self.gpu_line()) else []
        if (pruning := self.loaded.token_pruning) is not None:
            lines.append(f"tokens after layer {pruning.layer}: {100 * pruning.keep_rate:g} % of those of a text")
        attention = attention_report(self.loaded, self.plan, self.limit, self.token_budget)
        return "\n".join([*lines, *self.precision_log, *attention])

    def _as_list(self, inputs: Iterable[object]) -> list[object]:
        """Return inputs as a list; raises a HeedfulError if there is a single input instead of several."""
        if isinstance(inputs, str | dict | tuple) or not hasattr(inputs, "__iter__"):
            raise HeedfulError(
                f"inputs is {describe_value(inputs)}: give a list; this model's head expects {self.expects}"
            )
        return list(inputs)

    def columns(self, *, pairs: bool) -> dict[str, object]:
        """Return the type of each field of an answer, by name; see `AnswerHead.columns`.

        Args:
            pairs: Whether inputs are pairs of texts.
        """
        columns: dict[str, object] = {}
        for answer_head in self._answer_heads:
            if answer_head.pairs in (None, pairs):
                columns |= answer_head.columns(self.loaded, self.writing)
        if self._early_stages:
            columns["stage"] = int
        return columns if self.prediction_set is None else columns | {"prediction_set": [str]}

    def _text_input(self, number: int, engine_input: object) -> _TextInput:
        """Return an input as texts for the tokenizer; raises a HeedfulError if no answer head accepts it."""
        prompt, text_input = self.loaded.default_prompt, engine_input
        if isinstance(engine_input, PromptedText) and self.kind == "embedding":
            prompt, text_input = engine_input.prompt, engine_input.text
        suffix = self.loaded.text_suffix
        for answer_head in self._answer_heads:
            if (texts := answer_head.tokenizer_inputs(text_input)) is not None:
                with_affixes = [prompt + text + suffix if isinstance(text, str) else text for text in texts]
                return _TextInput(answer_head, with_affixes, prompt)
        raise HeedfulError(
            f"input {number} is {describe_value(engine_input)}: this model's {self.kind} head expects {self.expects}"
        )

    def _encode(self, texts: list[TokenizerInput]) -> list[Encoding]:
        """Tokenize texts, with truncation if the engine or its head requires it; a decoder-only model gets prompts."""
        max_length = self._options.max_length
        if self.limit is not None and all(answer_head.long_inputs == "truncate" for answer_head in self._answer_heads):
            max_length = self.limit if max_length is None else min(self.limit, max_length)
        if max_length is None:
            encodings = self.tokenizer.encode_batch(texts)
        else:
            encodings = encode_truncated(self.tokenizer, texts, self.loaded.text_suffix, max_length)
        return decoder_prompts(self.loaded, self.tokenizer, encodings)

    def _check_encodable(self, number: int, texts: list[TokenizerInput]) -> None:
        """Raise an InputError with the number of the input if one of its texts cannot be tokenized."""
        for text in texts:
            try:
                self._encode([text])
            except HeedfulError as error:  # its cause shows whether the text or the tokenizer is at fault
                raise InputError(str(error).replace("item 0 has", "it has", 1), number) from error.__cause__

    def _score_batch(self, chunks: Sequence[Chunk], writing: GenerationConfig, top_k: int | None) -> list[object]:
        """Return the scores of each chunk of a batch; see `score`."""
        batch, answer_head = self._pack(chunks), chunks[0].answer_head
        if answer_head.generate is not None:
            return list(answer_head.generate(self.loaded, self.tokenizer, batch, writing).run())
        head = head_module(self.loaded, answer_head)
        if answer_head.positions is None:
            row_indices, pooled_batch = pooled_row(head, batch)
            if any(chunk.unpooled for chunk in chunks):
                row_indices, pooled_batch = batch.without_first([chunk.unpooled for chunk in chunks])
            rows = self._hidden_states(batch, row_indices)
            pooled_scores = to_cpu(head(rows, pooled_batch))
            self.on_rows(rows, pooled_batch.lengths)
            return list(pooled_scores)
        scored_rows = [
            start + position for start, chunk in zip(batch.bounds, chunks, strict=False) for position in chunk.positions
        ]
        rows = self._hidden_states(batch, send(scored_rows, batch.tokens.device))
        counts = [len(chunk.positions) for chunk in chunks]
        if answer_head.summarize is None or top_k is None:
            scores = to_cpu(head(rows, batch))
            self.on_rows(rows, counts)
            return list(scores.split(counts))
        context = self._answer_context(top_k)
        summaries: list[object] = []
        for part in rows.split(max(1, MAX_HELD_SCORES // self.tokenizer.size)):
            summaries += answer_head.summarize(to_cpu(head(part, batch)), context)
        summaries_in_order = iter(summaries)
        return [list(islice(summaries_in_order, count)) for count in counts]

    def _pack(self, chunks: Sequence[Chunk]) -> Packed:
        """Return the chunks as one batch on the model's device."""
        device = next(self.loaded.parameters()).device
        return Packed.of([chunk.encoded.ids for chunk in chunks], [chunk.encoded.types for chunk in chunks]).to(device)

    def _hidden_states(self, batch: Packed, row_indices: Tensor | None) -> Tensor:
        """Return the last hidden states of a batch, [rows, width]; of these rows only, unless `row_indices` is None."""
        if self._cuda_graphs is None or self._cuda_graphs.cannot(batch):
            return self.loaded.hidden_states(batch, output_rows=row_indices)
        return select_rows(self._cuda_graphs(batch), row_indices)
