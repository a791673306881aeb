"""`RequestContext`, the first argument of handlers: the limits of a request, and predictions within these limits."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

from heedful.infer.bundle_engine import BundleEngine
from heedful.infer.encoded_input import EncodedInput, with_prompt
from heedful.infer.scheduling.errors import TooLongError
from heedful.infer.scheduling.scheduler import ModelQueue
from heedful.serve.middleware import RequestLog
from heedful.serve.service import Service
from heedful.serve.token_estimate import check_token_estimate, count_characters, group_in_turns
from heedful.tasks.answering import Answer
from heedful.tasks.generation import GenerationConfig

CHARACTERS_PER_TOKEN = 16  # characters of a text to tokenize first, per token of the model's limit
Turns = Generator[None, None, list[EncodedInput]]  # tokenizes in turns: other requests may run whenever it yields
MASK_HEADS = ("masked_lm", "pretraining")  # heads whose answers list tokens for each mask


@dataclass(kw_only=True, slots=True)
class RequestContext:
    """A request that is being handled."""

    service: Service
    record: RequestLog
    texts: tuple[str, ...] = ()  # all texts of the request, see `set_texts`
    model: str = ""  # name of the selected model

    def select_model(self, name: str | None, kinds: Sequence[str] | None) -> tuple[str, ModelQueue[BundleEngine]]:
        """Select the model of the request; see `Service.select_model`."""
        self.model, model_queue = self.service.select_model(name, kinds)
        return self.model, model_queue

    def set_texts(self, *texts: str) -> None:
        """Set and check the texts of the request, before they are tokenized.

        Raises:
            TooLongError: If there are more texts or characters than a request may have.
        """
        limits = self.service.settings.limits
        if len(texts) > limits.max_client_batch_size:
            raise TooLongError(f"the request has {len(texts)} texts, and may have {limits.max_client_batch_size}")
        if (count := sum(map(len, texts))) > limits.max_request_characters:
            raise TooLongError(
                f"the texts have {count} characters, and those of a request may have {limits.max_request_characters}"
            )
        self.texts = texts
        if self.service.settings.log_text:
            self.record.text = [text[:1000] for text in texts[:10]]

    def check_tokens(
        self, engine: BundleEngine, *, max_tokens: int | None = None, counts_truncated: bool = False
    ) -> Iterator[None]:
        """Refuse texts with far more tokens than a request may have; see `check_token_estimate`.

        Texts with no more characters than the limit has tokens are not tokenized for this check.

        Args:
            engine: The engine, whose tokenizer is used.
            max_tokens: A limit below limits.max_request_tokens. If None, it is limits.max_request_tokens.
            counts_truncated: Whether to count the tokens that an embedding model truncates.
        """
        limit = self.service.settings.limits.max_request_tokens
        max_tokens = limit if max_tokens is None else min(max_tokens, limit)
        if sum(map(len, self.texts)) > max_tokens:
            yield from check_token_estimate(engine, self.texts, max_tokens, counts_truncated=counts_truncated)

    async def predict(
        self,
        model_queue: ModelQueue[BundleEngine],
        inputs: Sequence[object],
        *,
        encode: Callable[[BundleEngine], Turns] | None = None,
        sizes: Sequence[int] | None = None,
        top_k: int = 5,
        writing: GenerationConfig | None = None,
    ) -> list[Answer]:
        """Return the answers of a model.

        Args:
            model_queue: Queue of the model.
            inputs: The inputs.
            encode: Function of the engine that tokenizes the inputs in turns. If None, the engine tokenizes them.
            sizes: Number of characters to tokenize of each input. If None, all characters.
            top_k: Number of candidates to list for each mask.
            writing: Generation settings. If None, those of the model.

        Raises:
            RequestRefusedError: If the request is too long, its deadline passes, or the queue is full.
            HeedfulError: If an input is invalid.
        """
        is_counted = False

        def tokenize(engine: BundleEngine, inputs: Sequence[object]) -> Turns:
            nonlocal is_counted
            yield from self.check_tokens(engine)
            encoded_inputs = yield from tokenize_in_turns(engine, inputs) if encode is None else encode(engine)
            if engine.kind in MASK_HEADS:
                masks = sum(len(chunk.positions) for encoded in encoded_inputs for chunk in encoded.chunks)
                self._check_candidates(top_k * masks)
            if not is_counted:  # later stages of a cascade tokenize some texts again
                self._count_tokens(engine, encoded_inputs)
            is_counted = True
            return encoded_inputs

        characters = [count_characters(input_value) for input_value in inputs] if sizes is None else sizes
        answers, tokens = await model_queue.ask(
            inputs,
            deadline=self.record.deadline,
            is_disconnected=self.record.is_disconnected,
            encode=tokenize,
            top_k=top_k,
            writing=writing,
            sizes=characters,
            in_stages=encode is None,
        )
        self.record.tokens += tokens
        return answers

    def _count_tokens(self, engine: BundleEngine, encoded_inputs: Sequence[EncodedInput]) -> None:
        """Count the tokens and the unknown tokens of inputs in the metrics."""
        unknown_id = engine.tokenizer.special.unknown
        tokens = [encoded.tokens for encoded in encoded_inputs]
        window_ids = (chunk.encoded.ids for encoded in encoded_inputs for chunk in encoded.chunks)
        unknown = 0 if unknown_id is None else sum(ids.count(unknown_id) for ids in window_ids)
        self.service.metrics.count_inputs(self.model, tokens, unknown)

    def tokenize_beginnings(self, engine: BundleEngine, texts: Sequence[str], prompt: str | None = None) -> Turns:
        """Tokenize only the beginnings of texts, for a model that truncates texts.

        At first, CHARACTERS_PER_TOKEN characters per token of the model's limit are tokenized. Texts whose beginnings
        have fewer tokens than the limit, such as texts with much white space, are tokenized further.

        Args:
            engine: The engine.
            texts: The texts.
            prompt: Prefix of each text. If None, the model's default prompt.

        Raises:
            TooLongError: If more characters would be tokenized than a request may have.
        """
        max_characters = self.service.settings.limits.max_request_characters
        characters = max_characters if engine.limit is None else CHARACTERS_PER_TOKEN * engine.limit

        def with_prompts(texts: list[str]) -> list[object]:
            return list(texts) if prompt is None else with_prompt(prompt, texts)

        beginnings = with_prompts([text[:characters] for text in texts])
        encoded_inputs: list[EncodedInput] = yield from tokenize_in_turns(engine, beginnings)
        while characters < max_characters:
            incomplete = [
                index
                for index, encoded_input in enumerate(encoded_inputs)
                if len(texts[index]) > characters and not encoded_input.dropped
            ]
            if not incomplete:
                break
            characters = min(max_characters, CHARACTERS_PER_TOKEN * characters)
            longer = [texts[index][:characters] for index in incomplete]
            if (count := sum(map(len, longer))) > max_characters:
                raise TooLongError(
                    f"{len(longer)} texts have few tokens in {count} characters, and {max_characters} may be read"
                )
            yield
            for index, encoded_input in zip(incomplete, engine.tokenize(with_prompts(longer)), strict=True):
                encoded_inputs[index] = encoded_input
        return encoded_inputs

    def _check_candidates(self, count: int) -> None:
        """Raise a TooLongError if a response would list more candidates for masks than the limit."""
        if count > (limit := self.service.settings.limits.max_fill_mask_candidates):
            raise TooLongError(f"the masks ask for {count} tokens, and an answer lists at most {limit}")


def tokenize_in_turns(engine: BundleEngine, inputs: Sequence[object]) -> Turns:
    """Tokenize inputs like `engine.tokenize`, but yield between groups of inputs."""
    encoded_inputs: list[EncodedInput] = []
    for first, group in group_in_turns(inputs):
        if first:
            yield
        encoded_inputs += engine.tokenize(group, first=first) if first else engine.tokenize(group)
    return encoded_inputs
