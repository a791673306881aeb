"""One request on its way: how much it may have, and how its texts become tokens."""

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

CHARACTERS_PER_TOKEN = 16  # characters for each token that a model reads: what is beyond is cut before it is tokenised
Turns = Generator[None, None, list[EncodedInput]]  # yields where a thread may do something else in between
MASKS = ("masked_lm", "pretraining")  # heads that list tokens for each mask


@dataclass(kw_only=True, slots=True)
class RequestContext:
    """One request, on its way."""

    service: Service
    record: RequestLog
    request_texts: tuple[str, ...] = ()
    model: str = ""  # name of the model that answers

    def select_model(self, name: str | None, kinds: Sequence[str] | None) -> tuple[str, ModelQueue[BundleEngine]]:
        """The model that answers."""
        self.model, queue = self.service.select_model(name, kinds)
        return self.model, queue

    def texts(self, *texts: str) -> None:
        """Refuse more texts, or longer ones, than a request may have; nothing was tokenised yet."""
        limits = self.service.settings.limits
        if len(texts) > limits.max_client_batch_size:
            raise TooLongError(f"the request has {len(texts)} texts, and may have {limits.max_client_batch_size}")
        if (count := sum(map(len, texts))) > limits.max_request_characters:
            raise TooLongError(
                f"the texts have {count} characters, and those of a request may have {limits.max_request_characters}"
            )
        self.request_texts = texts
        if self.service.settings.log_text:
            self.record.text = [text[:1000] for text in texts[:10]]

    def count(self, engine: BundleEngine, *, most: int | None = None, whole: bool = False) -> Iterator[None]:
        """Refuse texts that may have, and do, far more tokens than a request may, or `most`; few need be counted.

        It yields between parts of them.
        """
        limit = self.service.settings.limits.max_request_tokens
        most = limit if most is None else min(most, limit)
        if sum(map(len, self.request_texts)) > most:
            yield from check_token_estimate(engine, self.request_texts, most, whole=whole)

    async def ask(
        self,
        model_queue: ModelQueue[BundleEngine],
        inputs: Sequence[object],
        *,
        encode: Callable[[BundleEngine], Turns] | None = None,
        sizes: Sequence[int] | None = None,
        top_k: int = 5,
        writing: GenerationConfig | None = None,
    ) -> list[Answer]:
        """The engine's answers.

        `encode` makes windows of the inputs, if not the engine alone; `sizes` are the characters of each that it
        tokenises, if not all of them.
        """

        counted = False

        def read(engine: BundleEngine, inputs: Sequence[object]) -> Turns:
            nonlocal counted
            yield from self.count(engine)
            asked = yield from tokenize_in_turns(engine, inputs) if encode is None else encode(engine)
            if engine.kind in MASKS:
                self._few_candidates(top_k * sum(len(chunk.positions) for encoded in asked for chunk in encoded.chunks))
            if not counted:  # later stages of a cascade read some of the texts again
                self._count_tokens(engine, asked)
            counted = True
            return asked

        characters = [count_characters(input_value) for input_value in inputs] if sizes is None else sizes
        answers, tokens = await model_queue.ask(
            inputs,
            deadline=self.record.deadline,
            left=self.record.left,
            encode=read,
            top_k=top_k,
            writing=writing,
            sizes=characters,
            in_stages=encode is None,
        )
        self.record.tokens += tokens
        return answers

    def _count_tokens(self, engine: BundleEngine, encoded_inputs: Sequence[EncodedInput]) -> None:
        """Record the number of tokens of each input, and how many the vocabulary lacks."""
        unknown, tokens = engine.tokenizer.special.unknown, [encoded.tokens for encoded in encoded_inputs]
        ids = (chunk.encoded.ids for encoded in encoded_inputs for chunk in encoded.chunks)
        count = 0 if unknown is None else sum(window.count(unknown) for window in ids)
        self.service.metrics.read(self.model, tokens, count)

    def beginnings(self, engine: BundleEngine, texts: Sequence[str], prompt: str | None = None) -> Turns:
        """Windows of texts of which the model reads the beginning alone: not all of a long one is tokenised.

        A prompt is put before each of them in place of the model's default one.

        16 characters for each token that it reads are, and more of a text with which they do not fill the model, as
        where there is much white space; up to as many as a request may have.
        """
        most = self.service.settings.limits.max_request_characters
        longest = most if engine.limit is None else CHARACTERS_PER_TOKEN * engine.limit

        def inputs(texts: list[str]) -> list[object]:
            return list(texts) if prompt is None else with_prompt(prompt, texts)

        encoded: list[EncodedInput] = yield from tokenize_in_turns(engine, inputs([text[:longest] for text in texts]))
        while longest < most and (
            unread := [
                n for n, encoded_text in enumerate(encoded) if len(texts[n]) > longest and not encoded_text.dropped
            ]
        ):
            longest = min(most, CHARACTERS_PER_TOKEN * longest)
            more = [texts[n][:longest] for n in unread]
            if (count := sum(map(len, more))) > most:
                raise TooLongError(
                    f"{len(more)} texts have few tokens in {count} characters, of which {most} may be read"
                )
            yield
            for n, encoded_text in zip(unread, engine.tokenize(inputs(more)), strict=True):
                encoded[n] = encoded_text
        return encoded

    def _few_candidates(self, count: int) -> None:
        if count > (most := self.service.settings.limits.max_fill_mask_candidates):
            raise TooLongError(f"the masks ask for {count} tokens, and an answer lists at most {most}")


def tokenize_in_turns(engine: BundleEngine, inputs: Sequence[object]) -> Turns:
    """Windows of inputs as the engine makes them of all at once; yields between groups of them."""
    encoded: list[EncodedInput] = []
    for first, group in group_in_turns(inputs):
        if first:
            yield
        encoded += engine.tokenize(group, first=first) if first else engine.tokenize(group)
    return encoded
