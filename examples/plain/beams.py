"""Greedy decoding, beam search and sampling on one table of probabilities, in which greedy misses the best text.

"the" is the likeliest first word, but every text that begins with it is less likely than "a dog STOP".
"""

from itertools import product
from random import Random

import torch

from heedful import Packed
from heedful.checkpoint import BundleConfig, create
from heedful.model.config import NextToken
from heedful.model.decode import BeamSearch, generate
from heedful.runs.finetune.init_settings import TransformerInit
from heedful.runs.finetune.seq2seq import transformer_config

WORDS = ("START", "STOP", "the", "a", "cat", "dog", "bird")
NEXT = {  # after the last word: probabilities of the next one
    "START": {"the": 0.6, "a": 0.4},
    "the": {"cat": 0.4, "dog": 0.3, "bird": 0.3},
    "a": {"dog": 0.9, "cat": 0.1},
    **{noun: {"STOP": 1.0} for noun in ("cat", "dog", "bird")},
}
TABLE = torch.tensor([[NEXT.get(a, {"STOP": 1.0}).get(b, 1e-9) for b in WORDS] for a in WORDS])


def probability(text: tuple[str, ...]) -> float:
    """The product of the probabilities of its words, STOP among them."""
    result = 1.0
    for before, word in zip(("START", *text), (*text, "STOP"), strict=True):
        result *= NEXT[before].get(word, 0.0)
    return result


def beam(width: int) -> tuple[str, ...]:
    """The likeliest of the texts that are found when `width` beginnings are kept in each step."""
    kept: list[tuple[float, tuple[str, ...]]] = [(1.0, ("START",))]
    while any(text[-1] != "STOP" for _, text in kept):
        longer = []
        for p, text in kept:
            follows = {"": 1.0} if text[-1] == "STOP" else NEXT[text[-1]]
            longer += [(p * share, (*text, word) if word else text) for word, share in follows.items()]
        kept = sorted(longer, reverse=True)[:width]
    return kept[0][1][1:-1]


def sample(seed: int) -> tuple[str, ...]:
    """Draw each word by its probability."""
    draw, text = Random(seed), ["START"]
    while text[-1] != "STOP":
        words, shares = zip(*NEXT[text[-1]].items(), strict=True)
        text += draw.choices(words, shares)
    return tuple(text[1:-1])


def main() -> dict[str, str]:
    """Return what each method writes; the library's search is given the table in place of a model's scores."""
    best = max(product(WORDS[2:4], WORDS[4:]), key=probability)
    assert beam(1) == ("the", "cat") and beam(2) == best == ("a", "dog")
    config = transformer_config(TransformerInit(layers=1, width=8, heads=1, inner=8), len(WORDS))
    model = create(BundleConfig(family="heedful", model=config, head=NextToken())).eval().model
    for width in (1, 2):
        method = BeamSearch(num_beams=width, normalization="none")
        options = {"max_new_tokens": 3, "stop": [1], "source": Packed.of([[2]]), "seed": 0}
        (texts,) = generate(model, lambda _, batch: TABLE[batch.tokens].log(), Packed.of([[0]]), method, **options)
        assert tuple(WORDS[token] for token in texts[0].tokens) == beam(width)
    written = {"greedy": beam(1), "2 beams": beam(2)} | {f"sample {seed}": sample(seed) for seed in range(1, 6)}
    return {name: f"{' '.join(text)}, probability {probability(text):.2f}" for name, text in written.items()}


if __name__ == "__main__":
    for name, text in main().items():
        print(f"{name:10} {text}")
