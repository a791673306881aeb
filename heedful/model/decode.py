"""Writing, token by token: greedy, sampled, or by beams; packed, with what came earlier remembered."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.errors import HeedfulError
from heedful.model.config import Learned
from heedful.model.kv_cache import KVCache
from heedful.model.stack import Transformer
from heedful.packed import Packed

MAX_LENGTH_PENALTY = 10.0  # of a beam's penalty, which is a power
MIN_TEMPERATURE = 1e-6  # of sampling; scores divided by much less overflow
Score = Callable[[Tensor, Packed], Tensor]  # rows and their batch -> [rows, vocabulary], a vocabulary head


@dataclass(frozen=True, kw_only=True, slots=True)
class Greedy:
    """The most probable token each time."""

    kind: Literal["greedy"] = "greedy"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """A token drawn from softmax(scores / temperature), cut to the top_k best and to the best that reach top_p.

    top_p is nucleus sampling (Holtzman et al. 2020). What is drawn depends on the seed and on what is read, not
    on the company: the same prompt is answered the same, and another seed gives another answer.
    """

    kind: Literal["sample"] = "sample"
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not self.temperature >= MIN_TEMPERATURE:
            raise HeedfulError(
                f"temperature is {self.temperature}; give a number from {MIN_TEMPERATURE:g}, or write greedily, "
                "without a temperature"
            )
        if self.top_k is not None and self.top_k < 1:
            raise HeedfulError(f"top_k is {self.top_k}; expected a whole number from 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise HeedfulError(f"top_p is {self.top_p}; expected more than 0, up to 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class BeamSearch:
    """The `width` most probable beginnings are followed; the `best` complete ones come out, best first.

    Complete ones are compared by log p / penalty, n tokens with the last: "none" 1; "power" n^strength; "gnmt"
    ((5 + n) / 6)^strength (Wu et al. 2016, section 7). A search ends when no beginning is expected to improve on
    them: "likely" takes the present length for its penalty, "sure" the largest one, "full" ends with `width` of them.
    """

    kind: Literal["beam"] = "beam"
    num_beams: int = 4
    num_return_sequences: int = 1
    normalization: Literal["none", "power", "gnmt"] = "power"
    length_penalty: float = 1.0
    early_stopping: Literal["likely", "sure", "full"] = "likely"

    def __post_init__(self) -> None:
        if not 1 <= self.num_return_sequences <= self.num_beams:
            raise HeedfulError(
                f"best is {self.num_return_sequences} of {self.num_beams} beams; expected 1 to the width"
            )
        if not -MAX_LENGTH_PENALTY <= self.length_penalty <= MAX_LENGTH_PENALTY:
            raise HeedfulError(
                f"strength is {self.length_penalty}; expected a number from -{MAX_LENGTH_PENALTY:g} to {MAX_LENGTH_PENALTY:g}"
            )

    def divisor(self, tokens: int) -> float:
        """By which the log-probability of so many tokens is divided."""
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
    """One token more for each sequence that is not complete; `sequences` are their numbers in the batch."""

    sequences: tuple[int, ...]
    tokens: tuple[int, ...]
    log_probabilities: tuple[float, ...]  # of these tokens, as the model gives them, whatever was cut for drawing
    distribution: Float[Tensor, "sequences vocabulary"] | None  # log-probabilities of all tokens, where asked for


@dataclass(kw_only=True, slots=True, eq=False)
class GeneratedTokens:
    """What was written after a prompt; the token that stopped it is not part of it."""

    tokens: list[int] = field(default_factory=list)
    log_probability: float = 0.0  # of all tokens, the stopping one included
    score: float = 0.0  # the same, or divided by the penalty of beams
    complete: bool = False  # a stopping token came before there was no room left


class Decoding(ABC):
    """Resumable text generation for one batch: all its state (cache, beams, generators) is kept between steps.

    Each `step` writes one more token for every open sequence. Steps may lie any time apart, and what is written does
    not depend on that: `run` takes all of them at once.
    """

    def __init__(self, count: int, max_new_tokens: int) -> None:
        self.count, self.max_new_tokens = count, max_new_tokens  # sequences; maximum number of steps
        self.steps = 0  # taken so far
        self.done = max_new_tokens < 1 or not count
        self._dropped: set[int] = set()

    @abstractmethod
    def _advance(self) -> dict[int, list[GeneratedTokens]]:
        """One step: the finished sequences by number, with their texts, best first; sets `done` after the last."""

    def step(self) -> dict[int, list[GeneratedTokens]]:
        """Write one token more; returns the sequences, by number, that this finished, with their texts, best first."""
        with torch.inference_mode():
            finished = self._advance()
        self.steps += 1
        return {number: texts for number, texts in finished.items() if number not in self._dropped}

    def cancel(self, sequences: Iterable[int]) -> None:
        """Give up these sequences: they leave the batch with the next step, and are never returned."""
        self._dropped.update(sequences)
        self.done = self.done or len(self._dropped) == self.count

    def run(self) -> list[list[GeneratedTokens]]:
        """Take all remaining steps; returns the texts of each sequence, best first."""
        finished: dict[int, list[GeneratedTokens]] = {}
        while not self.done:
            finished.update(self.step())
        return [finished.get(number, [GeneratedTokens()]) for number in range(self.count)]


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
) -> Decoding:
    """Prepare generation after each prompt; the encoder reads `source`, and no step is taken yet."""
    if isinstance(method, BeamSearch):
        return _BeamSearch(model, score, prompts, method, max_new_tokens=max_new_tokens, stop=stop, source=source)
    return _Tokens(model, score, prompts, method, max_new_tokens=max_new_tokens, stop=stop, source=source, seed=seed)


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
) -> list[list[GeneratedTokens]]:
    """The text generated after each prompt: a single one, or the best of its beams."""
    return decode(
        model, score, prompts, method, max_new_tokens=max_new_tokens, stop=stop, source=source, seed=seed
    ).run()


# -- one token at a time ----------------------------------------------------------------------------------------


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
    distribution: bool = False,
) -> Iterator[DecodingStep]:
    """Yield steps until a token of `stop`, `max_new_tokens` steps or the model's last position."""
    decoding = _Tokens(
        model, score, prompts, method, max_new_tokens=max_new_tokens, stop=stop, source=source, seed=seed
    )
    while not decoding.done:
        with torch.inference_mode():
            step = decoding.next_step(distribution)
        yield step


class _Tokens(Decoding):
    """Greedy decoding or sampling."""

    def __init__(
        self,
        model: Transformer,
        score: Score,
        prompts: Packed,
        how: Greedy | Sampling,
        *,
        max_new_tokens: int,
        stop: Sequence[int],
        source: Packed | None,
        seed: int,
    ) -> None:
        super().__init__(len(prompts), max_new_tokens)
        self._model, self._score, self._how, self._stop = model, score, how, stop
        self._room = _room(model, prompts, max_new_tokens)
        self._cache = _begin(model, prompts, source)
        self._generators = _generators(seed, prompts, source) if isinstance(how, Sampling) else []
        self._open = list(range(len(prompts)))  # numbers of the sequences in the batch
        self._batch = prompts
        self._written = [GeneratedTokens() for _ in range(len(prompts))]

    def next_step(self, distribution: bool = False) -> DecodingStep:
        """Choose one token for each open sequence, and close those that end with it."""
        log_p = _next(self._model, self._score, self._batch, self._cache)
        if isinstance(self._how, Greedy):
            chosen = log_p.argmax(-1)
        else:
            numbers = [torch.rand(1, generator=self._generators[each], dtype=torch.float64) for each in self._open]
            chosen = sample_next(log_p, self._how, torch.cat(numbers).to(log_p.device))
        found = log_p.gather(-1, chosen[:, None])[:, 0]
        tokens = chosen.tolist()
        step = DecodingStep(
            sequences=tuple(self._open),
            tokens=tuple(tokens),
            log_probabilities=tuple(found.tolist()),
            distribution=log_p if distribution else None,
        )
        for number in self._open:
            self._room[number] -= 1
        kept = [place for place, token in enumerate(tokens) if self._goes_on(self._open[place], token)]
        self._open = [self._open[place] for place in kept]
        self.done = not kept
        if kept:
            self._cache.reorder(kept)
            self._batch = Packed.of([[tokens[place]] for place in kept]).to(log_p.device)
        return step

    def _goes_on(self, number: int, token: int) -> bool:
        return token not in self._stop and self._room[number] > 0 and number not in self._dropped

    def _advance(self) -> dict[int, list[GeneratedTokens]]:
        step = self.next_step()
        for number, token, log_p in zip(step.sequences, step.tokens, step.log_probabilities, strict=True):
            written = self._written[number]
            written.log_probability += log_p
            written.score = written.log_probability
            written.complete = token in self._stop
            if not written.complete:
                written.tokens.append(token)
        return {number: [self._written[number]] for number in step.sequences if number not in self._open}


def _generators(seed: int, prompts: Packed, source: Packed | None) -> list[torch.Generator]:
    """A generator for each sequence, by the seed, its prompt and its source."""
    read = [batch.unpack(batch.tokens.cpu()) for batch in (prompts, source) if batch is not None]
    keys = [repr((seed, [each.tolist() for each in one])).encode() for one in zip(*read, strict=True)]
    seeds = [int.from_bytes(blake2b(key, digest_size=8).digest(), "little") for key in keys]
    return [torch.Generator().manual_seed(each) for each in seeds]


def sample_next(log_p: Float[Tensor, "rows vocabulary"], how: Sampling, uniform: Float[Tensor, " rows"]) -> Tensor:
    """One token for each row, by a number from 0 to 1: where the summed probabilities, best first, exceed it."""
    scaled, order = (log_p.double() / how.temperature).sort(stable=True, dim=-1, descending=True)
    if how.top_k is not None:
        scaled = scaled[:, : how.top_k]
    summed = scaled.softmax(-1).cumsum(-1)
    total = summed[:, -1:]
    if how.top_p is not None:  # the first one that reaches it is the last one that counts
        last = (summed < how.top_p).sum(-1, keepdim=True).clamp(max=summed.shape[1] - 1)
        total = summed.gather(-1, last)
    place = (summed <= uniform[:, None] * total).sum(-1, keepdim=True).clamp(max=summed.shape[1] - 1)
    drawn: Tensor = order.gather(-1, place)[:, 0]
    return drawn


# -- beams ------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True, eq=False)
class _Search:
    """The beginnings of one prompt that are followed, best first, and what is complete, best first."""

    max_new_tokens: int  # tokens that there is room for
    open: list[GeneratedTokens]
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
) -> list[list[GeneratedTokens]]:
    """The best complete continuations of each prompt by beam search."""
    return _BeamSearch(model, score, prompts, method, max_new_tokens=max_new_tokens, stop=stop, source=source).run()


class _BeamSearch(Decoding):
    """Beam search; its sequences are the prompts, whatever the number of their beams."""

    def __init__(
        self,
        model: Transformer,
        score: Score,
        prompts: Packed,
        how: BeamSearch,
        *,
        max_new_tokens: int,
        stop: Sequence[int],
        source: Packed | None,
    ) -> None:
        super().__init__(len(prompts), max_new_tokens)
        self._model, self._score, self._how, self._stop = model, score, how, stop
        room = _room(model, prompts, max_new_tokens)
        self._searches = {
            number: _Search(max_new_tokens=room[number], open=[GeneratedTokens()]) for number in range(len(prompts))
        }
        self._batch, self._cache = prompts, _begin(model, prompts, source)
        self._candidates = max(2, 1 + len(stop)) * how.num_beams

    def _advance(self) -> dict[int, list[GeneratedTokens]]:
        length, running = self.steps + 1, list(self._searches.values())
        log_p = _next(self._model, self._score, self._batch, self._cache)
        sums = [each.log_probability for one in running for each in one.open]
        begun = torch.tensor(sums, dtype=torch.float64, device=log_p.device)  # long sums would be equal in float32
        summed = (log_p + begun[:, None]).unflatten(0, (len(running), -1)).flatten(1)
        best = top_candidates(summed, min(self._candidates, summed.shape[1]))
        going: dict[int, _Search] = {}
        parents: list[int] = []
        row = 0
        for (number, one), places in zip(self._searches.items(), best, strict=True):
            beams = len(one.open)
            found = [(value, *divmod(place, log_p.shape[-1])) for value, place in places]
            taken = _follow(one, found, self._how, self._stop, last=length == one.max_new_tokens)
            if length < one.max_new_tokens and number not in self._dropped and _can_improve(one, self._how, length):
                going[number] = one
                parents += [row + parent for parent in taken]
            row += beams
        finished = {
            number: one.complete[: self._how.num_return_sequences]
            for number, one in self._searches.items()
            if number not in going
        }
        self._searches = going
        self.done = not going
        if going:
            self._cache.reorder(parents)
            tokens = [[each.tokens[-1]] for one in going.values() for each in one.open]
            self._batch = Packed.of(tokens).to(log_p.device)
        return finished


def top_candidates(rows: Float[Tensor, "rows places"], count: int) -> Iterator[list[tuple[float, int]]]:
    """The greatest of each row with their places, best first: NaN above all, of equal ones the first, as `argmax`."""
    least = rows.topk(count, -1).values[:, -1:]
    for row, enough in zip(rows, ~(rows < least), strict=True):
        places = enough.nonzero()[:, 0]
        values, order = row[places].sort(descending=True, stable=True)
        yield list(zip(values[:count].tolist(), places[order[:count]].tolist(), strict=True))


def _follow(
    one: _Search, found: list[tuple[float, int, int]], how: BeamSearch, stop: Sequence[int], *, last: bool
) -> list[int]:
    """Follow the best candidates (log-probability, beginning, token); returns which beginning each one follows."""
    opened: list[GeneratedTokens] = []
    parents, begun = [], one.open
    for rank, (value, parent, token) in enumerate(found):
        ends = token in stop
        tokens = begun[parent].tokens if ends else [*begun[parent].tokens, token]
        count = len(begun[parent].tokens) + 1
        written = GeneratedTokens(
            tokens=list(tokens), log_probability=value, score=value / how.divisor(count), complete=ends
        )
        if (ends or last) and rank < how.num_beams:
            one.complete.append(written)
        elif not ends and len(opened) < how.num_beams:
            opened.append(written)
            parents.append(parent)
    one.complete.sort(key=lambda each: -each.score)
    del one.complete[how.num_beams :]
    one.open = opened
    return parents


def _can_improve(one: _Search, how: BeamSearch, length: int) -> bool:
    """Whether a beginning may still end better than the worst of what is complete."""
    if len(one.complete) < how.num_beams:
        return bool(one.open)
    if how.early_stopping == "full" or not one.open:
        return False
    longest = one.max_new_tokens if how.early_stopping == "sure" and how.length_penalty > 0 else length
    return one.open[0].log_probability / how.divisor(longest) > one.complete[-1].score


# -- one step ---------------------------------------------------------------------------------------------------


def _begin(model: Transformer, prompts: Packed, source: Packed | None) -> KVCache:
    """An empty cache, or one with the encoder's rows."""
    if model.training:
        raise HeedfulError("the model is in training mode: call eval() before it writes")
    prompts.first_rows()  # refuses empty prompts
    if (source is None) == model.config.has_encoder:
        need = "needs a source" if source is None else "takes no source"
        raise HeedfulError(f"this model {need}: only a model with an encoder reads one")
    if source is not None and len(source) != len(prompts):
        raise HeedfulError(f"there are {len(prompts)} prompts, but {len(source)} sources: give each prompt its own")
    with torch.inference_mode():
        return model.init_cache(len(prompts) if source is None else source)


def _room(model: Transformer, prompts: Packed, max_new_tokens: int) -> dict[int, int]:
    """How many tokens can be written after each prompt: the last one need not be read again."""
    place = model.output_embedding.config.positions
    limit = place.count - place.offset + 1 if isinstance(place, Learned) else None
    return {
        number: max_new_tokens if limit is None else min(max_new_tokens, max(1, limit - length))
        for number, length in enumerate(prompts.lengths)
    }


def _next(model: Transformer, score: Score, batch: Packed, cache: KVCache) -> Float[Tensor, "sequences vocabulary"]:
    """Log-probabilities of the token that follows each sequence; in float32 at least."""
    with torch.inference_mode():
        rows = model.decode_step(batch, cache)
        lasts = rows[torch.tensor(batch.bounds[1:], device=rows.device) - 1]
        scores = score(lasts, batch)
        return scores.to(torch.promote_types(scores.dtype, torch.float32)).log_softmax(-1)
