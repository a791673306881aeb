"""Text generation step by step: the decoder's distribution over the vocabulary, greedy search beside beam search."""

from __future__ import annotations

from typing import TypedDict

from heedful.errors import RequestError
from heedful.look.inspection import Inspection, token_records
from heedful.model.decode import BeamSearch, Greedy, beam_search, stream
from heedful.packed import Packed
from heedful.tasks.generation import folder_generation, sequence_ends

MAX_NEW_TOKENS = 48
CANDIDATES = 10  # tokens listed at each step


class TokenAlternative(TypedDict):
    """A token that could be generated at a step."""

    text: str
    probability: float


class DecodingView(TypedDict):
    """One step of greedy search."""

    token: str
    entropy: float  # of the distribution, in nats
    candidates: list[TokenAlternative]  # the most likely tokens, in order


class GeneratedSequence(TypedDict):
    """A generated text."""

    text: str
    log_probability: float
    tokens: int


class DecodingReport(TypedDict):
    """Greedy search step by step, and the results of both searches."""

    steps: list[DecodingView]
    greedy: GeneratedSequence
    beams: list[GeneratedSequence]  # the best first


def decoding_report(
    inspection: Inspection, *, num_beams: int = 4, max_new_tokens: int = MAX_NEW_TOKENS
) -> DecodingReport:
    """Generate by greedy search and by beam search.

    Raises:
        RequestError: If the model has no language modelling head.
    """
    loaded, tokenizer = inspection.loaded, inspection.tokenizer
    if loaded.head is None or loaded.config.head is None or loaded.config.head.kind != "language_model":
        raise RequestError("this model has no language modelling head: give a model that generates text")
    ends, folder = sequence_ends(loaded.config.model, tokenizer), folder_generation(loaded)
    prompt, source = inspection.source, None
    if ends.start is not None:
        start = ends.start if folder.start is None else folder.start
        prompt, source = Packed.of([[start]]), inspection.source
    stop = [ends.stop]
    steps: list[DecodingView] = []
    greedy_ids: list[int] = []
    log_probability = 0.0
    for step in stream(
        loaded.model,
        loaded.head,
        prompt,
        Greedy(),
        distribution=True,
        max_new_tokens=max_new_tokens,
        stop=stop,
        source=source,
        constraints=folder.constraints,
    ):
        assert step.distribution is not None
        log_probabilities = step.distribution[0]
        best = log_probabilities.topk(min(CANDIDATES, len(log_probabilities)))
        names = token_records(best.indices.tolist(), tokenizer)
        candidates: list[TokenAlternative] = [
            {"text": name["text"], "probability": probability}
            for name, probability in zip(names, best.values.exp().tolist(), strict=True)
        ]
        entropy = float(-(log_probabilities.exp() * log_probabilities.clamp(min=-80)).sum())
        token = token_records([step.tokens[0]], tokenizer)[0]["text"]
        steps.append({"token": token, "entropy": entropy, "candidates": candidates})
        greedy_ids.append(step.tokens[0])
        log_probability += step.log_probabilities[0]
    beam = BeamSearch(num_beams=num_beams, num_return_sequences=num_beams, normalization="none")
    (sequences, *_) = beam_search(
        loaded.model,
        loaded.head,
        prompt,
        beam,
        max_new_tokens=max_new_tokens,
        stop=stop,
        source=source,
        constraints=folder.constraints,
    )

    def decode(ids: list[int]) -> str:
        """Return the text without its end; an embedding may have more rows than the vocabulary has tokens."""
        return tokenizer.decode([id for id in ids if id != ends.stop and id < tokenizer.size]).strip()

    return {
        "steps": steps,
        "greedy": {"text": decode(greedy_ids), "log_probability": log_probability, "tokens": len(greedy_ids)},
        "beams": [
            {
                "text": decode(sequence.tokens),
                "log_probability": sequence.log_probability,
                "tokens": len(sequence.tokens) + sequence.complete,
            }
            for sequence in sequences
        ],
    }
