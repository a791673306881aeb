"""How a decoder writes: each step's distribution over the vocabulary, greedily beside beams."""

from __future__ import annotations

from typing import Any

from heedful.errors import HeedfulError
from heedful.look.inspection import Inspection, token_records
from heedful.model.decode import Beam, Greedy, search, stream
from heedful.packed import Packed
from heedful.tasks.seq2seq import sequence_ends

MOST = 48  # tokens
CANDIDATES = 10


def decoding_report(inside: Inspection, *, num_beams: int = 4, max_new_tokens: int = MOST) -> dict[str, Any]:
    """{"steps": [{"token", "candidates"}], "greedy", "beams"}: what is written, token by token and by beams."""
    loaded = inside.loaded
    if loaded.head is None or loaded.config.head is None or loaded.config.head.kind != "language_model":
        raise HeedfulError("this model has no head that writes")
    mark = sequence_ends(loaded.config.model, inside.tokenizer)
    prompt, source = inside.source, None
    if mark.start is not None:
        prompt, source = Packed.of([[mark.start]]), inside.source
    shared: dict[str, Any] = {"max_new_tokens": max_new_tokens, "stop": [mark.stop], "source": source}
    steps: list[dict[str, Any]] = []
    ids: list[int] = []
    total = 0.0
    for step in stream(loaded.model, loaded.head, prompt, Greedy(), distribution=True, **shared):
        assert step.distribution is not None
        best = step.distribution[0].topk(min(CANDIDATES, step.distribution.shape[1]))
        names = token_records(best.indices.tolist(), inside.tokenizer)
        shares = best.values.exp().tolist()
        entropy = float(-(step.distribution[0].exp() * step.distribution[0].clamp(min=-80)).sum())
        steps.append(
            {
                "token": token_records([step.tokens[0]], inside.tokenizer)[0]["text"],
                "entropy": entropy,
                "candidates": [
                    {"text": name["text"], "probability": share} for name, share in zip(names, shares, strict=True)
                ],
            }
        )
        ids.append(step.tokens[0])
        total += step.log_probabilities[0]
    found = search(loaded.model, loaded.head, prompt, Beam(width=num_beams, best=num_beams, penalty="none"), **shared)[
        0
    ]

    def text(written: list[int]) -> str:
        """Without what ends it; an embedding may have more rows than there are tokens."""
        return inside.tokenizer.decode([id for id in written if id != mark.stop and id < inside.tokenizer.size]).strip()

    return {
        "steps": steps,
        "greedy": {"text": text(ids), "log_probability": total, "tokens": len(ids)},
        "beams": [
            {
                "text": text(each.tokens),
                "log_probability": each.log_probability,
                "tokens": len(each.tokens) + each.complete,
            }
            for each in found
        ],
    }
