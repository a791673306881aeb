"""Text generation, token by token: greedy decoding, sampling and beam search over packed batches with a KV cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import compress
from math import inf
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.errors import SettingError
from heedful.model.decode_step import Score, init_cache, next_log_probabilities, token_limits, top_candidates
from heedful.model.recorded_decoding import RecordedSteps, can_record_steps, worth_recording
from heedful.model.stack import Transformer
from heedful.model.token_constraints import SequenceSoFar, TokenConstraints
from heedful.packed import Packed, send

MAX_LENGTH_PENALTY = 10.0  # largest exponent of a text's length
MIN_TEMPERATURE = 1e-6  # scores divided by a much smaller number would overflow
UNCONSTRAINED = TokenConstraints()


@dataclass(frozen=True, kw_only=True, slots=True)
class Greedy:
    """Greedy decoding: the most probable token in each step."""

    kind: Literal["greedy"] = "greedy"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Sampling from softmax(scores / temperature), limited to the best tokens by top_k and top_p.

    top_p is nucleus sampling (Holtzman et al. 2020). The result depends on the seed, the prompt and the source, not on
    the rest of the batch.
    """

    kind: Literal["sample"] = "sample"
    temperature: float = 1.0
    top_k: int | None = None  # how many of the best tokens to sample from (default: all)
    top_p: float | None = None  # total probability that the best tokens must reach (default: 1)

    def __post_init__(self) -> None:
        if not self.temperature >= MIN_TEMPERATURE:
            raise SettingError(
                f"temperature is {self.temperature}; give a number from {MIN_TEMPERATURE:g}, or decode greedily, "
                "without a temperature"
            )
        if self.top_k is not None and self.top_k < 1:
            raise SettingError(f"top_k is {self.top_k}; expected a whole number from 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise SettingError(f"top_p is {self.top_p}; expected more than 0, up to 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class BeamSearch:
    """Beam search: in each step, the `num_beams` most probable unfinished texts are continued.

    Complete texts of n tokens, stopping token included, are compared by log p / divisor.

    Args:
        num_return_sequences: How many complete texts to return, best first.
        normalization: The divisor: 1 for "none", n^length_penalty for "power", ((5 + n) / 6)^length_penalty for "gnmt"
            (Wu et al. 2016, section 7).
        early_stopping: When a search ends. If True, it ends with `num_beams` complete texts. If False, it ends when no
            unfinished text, at its present length, is better than these. If "never", it ends when no unfinished text
            could be better at any length.
    """

    kind: Literal["beam"] = "beam"
    num_beams: int = 4
    num_return_sequences: int = 1
    normalization: Literal["none", "power", "gnmt"] = "power"
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        if not 1 <= self.num_return_sequences <= self.num_beams:
            raise SettingError(
                f"num_return_sequences is {self.num_return_sequences}; expected 1 to num_beams, {self.num_beams}"
            )
        if not -MAX_LENGTH_PENALTY <= self.length_penalty <= MAX_LENGTH_PENALTY:
            raise SettingError(
                f"length_penalty is {self.length_penalty}; expected a number from -{MAX_LENGTH_PENALTY:g} to "
                f"{MAX_LENGTH_PENALTY:g}"
            )

    def divisor(self, tokens: int) -> float:
        """Return the divisor of the log-probability of a text with that many tokens."""
        match self.normalization:
            case "none":
                return 1.0
            case "power":
                return float(max(tokens, 1) ** self.length_penalty)
            case "gnmt":
                return float(((5 + tokens) / 6) ** self.length_penalty)


DecodingMethod = Greedy | Sampling | BeamSearch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DecodingStep:
    """The result of one step: a new token for each unfinished sequence."""

    sequences: tuple[int, ...]  # indices of the unfinished sequences in the batch
    tokens: tuple[int, ...]
    log_probabilities: tuple[float, ...]  # log-probabilities of `tokens`, before temperature, top_k and top_p
    distribution: Float[Tensor, "sequences vocabulary"] | None  # log-probabilities of all tokens, if requested


@dataclass(kw_only=True, slots=True, eq=False)
class GeneratedTokens:
    """A generated text, without the stopping token."""

    tokens: list[int] = field(default_factory=list)
    log_probability: float = 0.0  # log-probability of all tokens, stopping token included
    score: float = 0.0  # log_probability; in a beam search, divided by `BeamSearch.divisor`
    complete: bool = False  # whether a stopping token ended the text


class Decoding(ABC):
    """Text generation for one batch, step by step.

    `step` generates one more token for every unfinished sequence, and `run` takes all remaining steps. The result does
    not depend on when steps are taken.
    """

    def __init__(self, count: int, max_new_tokens: int) -> None:
        self.count = count  # sequences of the batch
        self.max_new_tokens = max_new_tokens  # maximum number of steps
        self.steps = 0  # steps taken so far
        self.done = max_new_tokens < 1 or not count
        self._cancelled: set[int] = set()

    @abstractmethod
    def _advance(self) -> dict[int, list[GeneratedTokens]]:
        """Take a step, and set `done` after the last one; returns finished texts as `step` does."""

    def step(self) -> dict[int, list[GeneratedTokens]]:
        """Generate one more token for each unfinished sequence.

        Returns:
            The texts of finished sequences, best first, by the index of the sequence in the batch.
        """
        with torch.inference_mode():
            finished = self._advance()
        self.steps += 1
        return {sequence: texts for sequence, texts in finished.items() if sequence not in self._cancelled}

    def cancel(self, sequences: Iterable[int]) -> None:
        """Cancel sequences: they leave the batch with the next step, and are never returned."""
        self._cancelled.update(sequences)
        self.done = self.done or len(self._cancelled) == self.count

    def run(self) -> list[list[GeneratedTokens]]:
        """Take all remaining steps; returns the texts of each sequence, best first."""
        finished: dict[int, list[GeneratedTokens]] = {}
        while not self.done:
            finished.update(self.step())
        return [finished.get(sequence, [GeneratedTokens()]) for sequence in range(self.count)]


def decode(
    model: Transformer,
    score: Score,
    prompts: Packed,
    method: DecodingMethod,
    *,
    max_new_tokens: int,
    stop: Sequence[int],
    source: Packed | None = None,
    seed: int = 0,
    constraints: TokenConstraints = UNCONSTRAINED,
) -> Decoding:
    """Prepare text generation after each prompt. The encoder computes `source`, but no step is taken yet.

    Args:
        score: The vocabulary head of the model.
        max_new_tokens: Maximum number of tokens after each prompt.
        stop: Tokens that end a text.
        source: Texts for the encoder, one for each prompt. None for a model without an encoder.
        seed: Seed for sampling.
        constraints: Tokens that are forced or banned.
    """
    if isinstance(method, BeamSearch):
        return _BeamDecoding(
            model,
            score,
            prompts,
            method,
            max_new_tokens=max_new_tokens,
            stop=stop,
            source=source,
            constraints=constraints,
        )
    return _TokenDecoding(
        model,
        score,
        prompts,
        method,
        max_new_tokens=max_new_tokens,
        stop=stop,
        source=source,
        seed=seed,
        constraints=constraints,
    )


def generate(
    model: Transformer,
    score: Score,
    prompts: Packed,
    method: DecodingMethod,
    *,
    max_new_tokens: int,
    stop: Sequence[int],
    source: Packed | None = None,
    seed: int = 0,
    constraints: TokenConstraints = UNCONSTRAINED,
) -> list[list[GeneratedTokens]]:
    """Generate text after each prompt; returns a list of texts for each prompt, best first.

    The list has one text, or `num_return_sequences` of a beam search. Arguments are those of `decode`.
    """
    decoding = decode(
        model,
        score,
        prompts,
        method,
        max_new_tokens=max_new_tokens,
        stop=stop,
        source=source,
        seed=seed,
        constraints=constraints,
    )
    return decoding.run()


# -- greedy decoding and sampling -------------------------------------------------------------------------------


def stream(
    model: Transformer,
    score: Score,
    prompts: Packed,
    method: Greedy | Sampling,
    *,
    max_new_tokens: int,
    stop: Sequence[int],
    source: Packed | None = None,
    seed: int = 0,
    constraints: TokenConstraints = UNCONSTRAINED,
    distribution: bool = False,
) -> Iterator[DecodingStep]:
    """Yield steps until each sequence is ended by a token of `stop`, `max_new_tokens` or the model's last position.

    The other arguments are those of `decode`.

    Args:
        distribution: Whether steps include the log-probabilities of all tokens.
    """
    decoding = _TokenDecoding(
        model,
        score,
        prompts,
        method,
        max_new_tokens=max_new_tokens,
        stop=stop,
        source=source,
        seed=seed,
        constraints=constraints,
    )
    while not decoding.done:
        with torch.inference_mode():
            step = decoding.next_step(distribution)
        yield step


class _TokenDecoding(Decoding):
    """Greedy decoding or sampling."""

    def __init__(
        self,
        model: Transformer,
        score: Score,
        prompts: Packed,
        method: Greedy | Sampling,
        *,
        max_new_tokens: int,
        stop: Sequence[int],
        source: Packed | None,
        seed: int,
        constraints: TokenConstraints,
    ) -> None:
        super().__init__(len(prompts), max_new_tokens)
        self._model, self._score, self._method, self._stop = model, score, method, stop
        self._constrain = _Constrain(constraints, prompts, stop)
        self._tokens_left = token_limits(model, prompts, max_new_tokens, constraints)  # by sequence
        self._cache = init_cache(model, prompts, source)
        self._generators = _make_generators(seed, prompts, source) if isinstance(method, Sampling) else []
        self._open = list(range(len(prompts)))  # indices of the unfinished sequences
        self._open_lines = list(self._open)  # their lines in the cache, which may have finished sequences too
        self._batch = prompts  # input of the next step, for all sequences in the cache
        self._generated: list[list[int]] = [[] for _ in range(len(prompts))]  # stopping tokens included
        self._texts = [GeneratedTokens() for _ in range(len(prompts))]
        is_unconstrained = replace(constraints, max_length=None) == UNCONSTRAINED
        self._is_recordable = isinstance(method, Greedy) and is_unconstrained and can_record_steps(model)
        self._recorded: RecordedSteps | None = None  # a step as a CUDA graph, while one is used

    def next_step(self, distribution: bool = False) -> DecodingStep:
        """Choose one token for each unfinished sequence, and drop sequences that end with it from the batch."""
        if self._recorded is None and not distribution:
            self._recorded = self._record()
        log_p: Tensor | None = None
        if self._recorded is not None:
            line_tokens, line_log_p = self._recorded.step()
            next_tokens = self._recorded.tokens
        else:
            next_tokens, log_p = self._choose_tokens()
            next_log_p = log_p.gather(-1, next_tokens[:, None])[:, 0]
            # the only time in a step that the host waits for the device
            line_tokens, line_log_p = torch.stack([next_tokens.double(), next_log_p.double()]).tolist()
        tokens = [int(line_tokens[line]) for line in self._open_lines]
        step = DecodingStep(
            sequences=tuple(self._open),
            tokens=tuple(tokens),
            log_probabilities=tuple(line_log_p[line] for line in self._open_lines),
            distribution=log_p if distribution else None,
        )
        for sequence, token in zip(self._open, tokens, strict=True):
            self._tokens_left[sequence] -= 1
            self._generated[sequence].append(token)
        stays = [self._stays_open(sequence, token) for sequence, token in zip(self._open, tokens, strict=True)]
        self._open, self._open_lines = (list(compress(values, stays)) for values in (self._open, self._open_lines))
        self.done = not self._open
        if not self.done:
            self._continue_with(next_tokens)
        return step

    def _choose_tokens(self) -> tuple[Tensor, Tensor]:
        """Return the next token of each sequence, and the log-probabilities of all tokens."""
        log_p = next_log_probabilities(self._model, self._score, self._batch, self._cache)
        texts = ((sequence, self._generated[sequence], self._tokens_left[sequence] == 1) for sequence in self._open)
        log_p = self._constrain(log_p, texts)
        if isinstance(self._method, Greedy):
            return log_p.argmax(-1), log_p
        uniform = [torch.rand(1, generator=self._generators[sequence], dtype=torch.float64) for sequence in self._open]
        return sample_next(log_p, self._method, torch.cat(uniform).to(log_p.device, non_blocking=True)), log_p

    def _record(self) -> RecordedSteps | None:
        """Record a step for the sequences in the cache; returns None if that is impossible, or saves no time."""
        max_steps, tokens = max(self._tokens_left[sequence] for sequence in self._open), self._batch.tokens
        generated = len(self._generated[self._open[0]])
        if not (self._is_recordable and worth_recording(tokens.device, max_steps, generated)):
            return None
        recorded = RecordedSteps(self._model, self._score, self._cache, tokens, max_steps)
        recorded.record()
        return recorded

    def _continue_with(self, next_tokens: Tensor) -> None:
        """Make the input of the next step; the lines of finished sequences leave the cache, unless it is recorded.

        Args:
            next_tokens: The last token of each sequence in the cache.
        """
        if self._recorded is not None:
            if self._recorded.steps_left and 2 * len(self._open) > len(next_tokens):
                return  # a recorded step computes finished sequences too
            self._recorded.finish()
            self._recorded = None
        if len(self._open) < len(next_tokens):
            self._cache.reorder(self._open_lines)
            next_tokens = next_tokens[send(self._open_lines, next_tokens.device)]
            self._open_lines = list(range(len(self._open)))
        last_tokens, zeros = [self._generated[sequence][-1] for sequence in self._open], torch.zeros_like(next_tokens)
        self._batch = Packed(
            tokens=next_tokens,
            positions=zeros,
            types=zeros,
            bounds=tuple(range(len(self._open) + 1)),
            extremes=((min(last_tokens), max(last_tokens)), (0, 0)),
        )

    def _stays_open(self, sequence: int, token: int) -> bool:
        """Return whether a sequence is unfinished after a token."""
        return token not in self._stop and self._tokens_left[sequence] > 0 and sequence not in self._cancelled

    def _advance(self) -> dict[int, list[GeneratedTokens]]:
        step = self.next_step()
        for sequence, token, log_p in zip(step.sequences, step.tokens, step.log_probabilities, strict=True):
            text = self._texts[sequence]
            text.log_probability += log_p
            text.score = text.log_probability
            text.complete = token in self._stop
            if not text.complete:
                text.tokens.append(token)
        return {sequence: [self._texts[sequence]] for sequence in step.sequences if sequence not in self._open}


def _make_generators(seed: int, prompts: Packed, source: Packed | None) -> list[torch.Generator]:
    """Return a random generator for each sequence, seeded by `seed`, its prompt and its source."""
    inputs = [batch.unpack(batch.tokens.cpu()) for batch in (prompts, source) if batch is not None]
    generators = []
    for texts in zip(*inputs, strict=True):
        key = repr((seed, [tokens.tolist() for tokens in texts])).encode()
        sequence_seed = int.from_bytes(blake2b(key, digest_size=8).digest(), "little")
        generators.append(torch.Generator().manual_seed(sequence_seed))
    return generators


def sample_next(log_p: Float[Tensor, "rows vocabulary"], method: Sampling, uniform: Float[Tensor, " rows"]) -> Tensor:
    """Choose one token for each row: the first one, best first, whose cumulative probability exceeds `uniform`.

    Args:
        uniform: A random number from 0 to below 1 for each row.
    """
    scaled, order = (log_p.double() / method.temperature).sort(stable=True, dim=-1, descending=True)
    if method.top_k is not None:
        scaled = scaled[:, : method.top_k]
    cumulative = scaled.softmax(-1).cumsum(-1)
    total = cumulative[:, -1:]
    if method.top_p is not None:  # the first token that reaches top_p is the last one that can be chosen
        last = (cumulative < method.top_p).sum(-1, keepdim=True).clamp(max=cumulative.shape[1] - 1)
        total = cumulative.gather(-1, last)
    rank = (cumulative <= uniform[:, None] * total).sum(-1, keepdim=True).clamp(max=cumulative.shape[1] - 1)
    tokens: Tensor = order.gather(-1, rank)[:, 0]
    return tokens


# -- beam search --------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True, eq=False)
class _Beams:
    """The unfinished and the complete texts of one prompt, both best first."""

    max_new_tokens: int
    open: list[GeneratedTokens]  # unfinished texts
    complete: list[GeneratedTokens] = field(default_factory=list)


def beam_search(
    model: Transformer,
    score: Score,
    prompts: Packed,
    method: BeamSearch,
    *,
    max_new_tokens: int,
    stop: Sequence[int],
    source: Packed | None = None,
    constraints: TokenConstraints = UNCONSTRAINED,
) -> list[list[GeneratedTokens]]:
    """Return the best complete texts after each prompt by beam search; `decode` has the same arguments."""
    decoding = _BeamDecoding(
        model, score, prompts, method, max_new_tokens=max_new_tokens, stop=stop, source=source, constraints=constraints
    )
    return decoding.run()


class _BeamDecoding(Decoding):
    """Beam search; a sequence is a prompt with all its beams."""

    def __init__(
        self,
        model: Transformer,
        score: Score,
        prompts: Packed,
        method: BeamSearch,
        *,
        max_new_tokens: int,
        stop: Sequence[int],
        source: Packed | None,
        constraints: TokenConstraints,
    ) -> None:
        super().__init__(len(prompts), max_new_tokens)
        self._model, self._score, self._method, self._stop = model, score, method, stop
        self._constrain = _Constrain(constraints, prompts, stop)
        limits = token_limits(model, prompts, max_new_tokens, constraints)
        self._beams = {
            sequence: _Beams(max_new_tokens=limit, open=[GeneratedTokens()]) for sequence, limit in limits.items()
        }
        self._batch, self._cache = prompts, init_cache(model, prompts, source)
        # candidates for each prompt: enough for num_beams unfinished texts if each beam has all stopping tokens
        self._candidates = max(2, 1 + len(stop)) * method.num_beams

    def _advance(self) -> dict[int, list[GeneratedTokens]]:
        length = self.steps + 1  # generated tokens of each text after this step
        log_p, ranked_continuations = self._rank_continuations(length)
        still_open: dict[int, _Beams] = {}
        parents: list[int] = []  # for each remaining text, the row of the text that it continues
        first_row = 0  # row of the prompt's first text
        for (sequence, beams), ranked in zip(self._beams.items(), ranked_continuations, strict=True):
            count = len(beams.open)
            candidates = [(value, *divmod(index, log_p.shape[-1])) for value, index in ranked]
            is_last = length == beams.max_new_tokens
            beam_parents = _extend(beams, candidates, self._method, self._stop, last=is_last)
            if not is_last and sequence not in self._cancelled and _can_improve(beams, self._method, length):
                still_open[sequence] = beams
                parents += [first_row + parent for parent in beam_parents]
            first_row += count
        finished = {
            sequence: beams.complete[: self._method.num_return_sequences]
            for sequence, beams in self._beams.items()
            if sequence not in still_open
        }
        self._beams = still_open
        self.done = not still_open
        if still_open:
            self._cache.reorder(parents)
            tokens = [[text.tokens[-1]] for beams in still_open.values() for text in beams.open]
            self._batch = Packed.of(tokens).to(log_p.device)
        return finished

    def _rank_continuations(self, length: int) -> tuple[Tensor, Iterator[list[tuple[float, int]]]]:
        """Compute the log-probabilities of all next tokens, [texts, vocabulary], and rank the texts of each prompt.

        The best continuations of a prompt are yielded as (log-probability of the text, index of the continued text *
        vocabulary size + token). `length` is the number of generated tokens after this step.
        """
        log_p = next_log_probabilities(self._model, self._score, self._batch, self._cache)
        texts = [(sequence, beams, text) for sequence, beams in self._beams.items() for text in beams.open]
        constrained = ((sequence, text.tokens, length == beams.max_new_tokens) for sequence, beams, text in texts)
        log_p = self._constrain(log_p, constrained)
        offsets = torch.tensor([text.log_probability for *_, text in texts], dtype=torch.float64)  # float32 makes ties
        offsets = offsets.to(log_p.device, non_blocking=True)
        summed = (log_p + offsets[:, None]).unflatten(0, (len(self._beams), -1)).flatten(1)
        return log_p, top_candidates(summed, min(self._candidates, summed.shape[1]))


def _extend(
    beams: _Beams,
    candidates: list[tuple[float, int, int]],
    method: BeamSearch,
    stop: Sequence[int],
    *,
    last: bool,
) -> list[int]:
    """Replace the unfinished texts by their best continuations; returns the index of the text that each continues.

    Args:
        candidates: Log-probability, index of the continued text, and new token of each continuation, best first.
        last: Whether this is the last step, after which every text is complete.
    """
    new_open: list[GeneratedTokens] = []
    parents, old_open = [], beams.open
    for rank, (log_p, parent, token) in enumerate(candidates):
        stops = token in stop
        tokens = old_open[parent].tokens if stops else [*old_open[parent].tokens, token]
        count = len(old_open[parent].tokens) + 1
        score = log_p / method.divisor(count)
        text = GeneratedTokens(tokens=list(tokens), log_probability=log_p, score=score, complete=stops)
        if (stops or last) and rank < method.num_beams and log_p != -inf:
            beams.complete.append(text)
        elif not stops and len(new_open) < method.num_beams:
            new_open.append(text)
            parents.append(parent)
    beams.complete.sort(key=lambda text: -text.score)
    del beams.complete[method.num_beams :]
    beams.open = new_open
    return parents


def _can_improve(beams: _Beams, method: BeamSearch, length: int) -> bool:
    """Return whether an unfinished text, of `length` tokens now, may become better than the worst complete text."""
    if len(beams.complete) < method.num_beams:
        return bool(beams.open)
    if method.early_stopping is True or not beams.open:
        return False
    at_any_length = method.early_stopping == "never" and method.length_penalty > 0
    tokens = beams.max_new_tokens if at_any_length else length
    return beams.open[0].log_probability / method.divisor(tokens) > beams.complete[-1].score


class _Constrain:
    """Applies token constraints to the log-probabilities of next tokens."""

    def __init__(self, constraints: TokenConstraints, prompts: Packed, stop: Sequence[int]) -> None:
        self._constraints, self._stop = constraints, stop
        self._prompts = [tokens.tolist() for tokens in prompts.unpack(prompts.tokens.cpu())]

    def __call__(self, log_p: Tensor, texts: Iterable[tuple[int, list[int], bool]]) -> Tensor:
        """Return log-probabilities in which those of banned and forced tokens are set.

        Args:
            texts: Index of the prompt, generated tokens, and whether the next token is the last one, for each row.
        """
        if self._constraints == UNCONSTRAINED:
            return log_p
        sequences = [
            SequenceSoFar(prompt=self._prompts[sequence], generated=tokens, next_is_last=last)
            for sequence, tokens, last in texts
        ]
        return self._constraints.apply(log_p, sequences, self._stop)
