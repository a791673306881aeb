"""Generation of a text for the page of `heedful look`: greedy decoding step by step, and the texts of beam search."""

from __future__ import annotations

from dataclasses import replace
from typing import TypedDict

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.errors import RequestError
from heedful.look.inspection import Inspection, eval_mode, greedy_settings, token_records
from heedful.model.decode import BeamSearch, GeneratedTokens, Greedy, stream
from heedful.tasks.generation import generation_inputs, start_generation
from heedful.tokenizer import Tokenizer

MAX_NEW_TOKENS = 48  # default maximum of generated tokens, few enough to show every step
NUM_CANDIDATES = 10  # number of tokens that are reported at each step


class CandidateRecord(TypedDict):
    """A token that could be generated at a step."""

    text: str
    probability: float  # probability of the token at this step


class StepRecord(TypedDict):
    """One step of greedy decoding."""

    token: str  # the generated token
    entropy: float  # entropy of the distribution over the vocabulary, in nats
    candidates: list[CandidateRecord]  # the NUM_CANDIDATES most probable tokens, the most probable first


class GeneratedSequence(TypedDict):
    """A generated text."""

    text: str
    log_probability: float  # sum over all generated tokens, the end token included
    num_tokens: int  # number of generated tokens, the end token included


class DecodingReport(TypedDict):
    """Greedy decoding step by step, and the texts that greedy decoding and beam search generate."""

    steps: list[StepRecord]
    greedy: GeneratedSequence
    beams: list[GeneratedSequence]  # texts of beam search, the most probable first


def decoding_report(
    inspection: Inspection, *, num_beams: int = 4, max_new_tokens: int = MAX_NEW_TOKENS
) -> DecodingReport:
    """Generate a text by greedy decoding and several texts by beam search.

    Other settings of generation, such as banned tokens, are those of the model folder.

    Args:
        inspection: The model and the text.
        num_beams: Number of beams. The text of each beam is returned.
        max_new_tokens: Maximum number of generated tokens. The settings of the model folder may allow fewer.

    Raises:
        RequestError: If the model has no language modelling head.
    """
    bundle, tokenizer, source = inspection.loaded, inspection.tokenizer, inspection.source
    if bundle.head is None or bundle.config.head is None or bundle.config.head.kind != "language_model":
        raise RequestError("this model has no language modelling head: give a model that generates text")
    settings = greedy_settings(bundle, max_new_tokens)
    inputs = generation_inputs(bundle, tokenizer, source, settings)
    steps: list[StepRecord] = []
    greedy = GeneratedTokens()
    with eval_mode(bundle):
        for step in stream(
            bundle.model,
            bundle.head,
            inputs.prompts,
            Greedy(),
            distribution=True,
            max_new_tokens=settings.max_new_tokens,
            stop=inputs.stop,
            source=inputs.source,
            constraints=inputs.constraints,
        ):
            assert step.distribution is not None  # requested above
            token = step.tokens[0]  # the batch has one text
            steps.append(_step_record(token, step.distribution[0], tokenizer))
            greedy.log_probability += step.log_probabilities[0]
            greedy.complete = token in inputs.stop
            if not greedy.complete:  # the end token is not part of the text
                greedy.tokens.append(token)
        # without a length penalty, beams are ranked by the log-probability that the page compares with greedy decoding
        method = BeamSearch(num_beams=num_beams, num_return_sequences=num_beams, normalization="none")
        (beams,) = start_generation(bundle, tokenizer, source, replace(settings, how=method)).run()
    return {
        "steps": steps,
        "greedy": _sequence_record(greedy, tokenizer),
        "beams": [_sequence_record(generated, tokenizer) for generated in beams],
    }


def _step_record(token: int, log_probabilities: Float[Tensor, " vocabulary"], tokenizer: Tokenizer) -> StepRecord:
    """Return the record of a step at which `token` was generated."""
    top = log_probabilities.topk(min(NUM_CANDIDATES, len(log_probabilities)))
    generated, *records = token_records([token, *top.indices.tolist()], tokenizer)
    candidates: list[CandidateRecord] = [
        {"text": record["text"], "probability": probability}
        for record, probability in zip(records, top.values.exp().tolist(), strict=True)
    ]
    entropy = torch.special.entr(log_probabilities.exp()).sum()
    return {"token": generated["text"], "entropy": float(entropy), "candidates": candidates}


def _sequence_record(generated: GeneratedTokens, tokenizer: Tokenizer) -> GeneratedSequence:
    """Return the record of a generated text."""
    # the scores of some models are padded beyond the tokenizer's vocabulary; such an id has no text
    ids = [id for id in generated.tokens if id < tokenizer.size]
    return {
        "text": tokenizer.decode(ids).strip(),
        "log_probability": generated.log_probability,
        "num_tokens": len(generated.tokens) + generated.complete,
    }
