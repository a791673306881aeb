"""Self-attention without weights: each word becomes a mean of its text's words, by likeness.

Idea: "bank of the river" (D0), "the driver exceeded the speed limit" (D3): softmax(cos(X, X)) X and softmax(X X) X make
contextual vectors of static ones. Its issues (D0, "ATTENTION ISSUES?"): nothing is trained, two words always score the
same whatever stands around them, and there is no order.
Code: `SelfAttentionMean` in heedful/model/classic.py; the table of vectors of the encoder that ships.
Expect: "bank" has one vector in the table and two after attention; cos(bank, the) is the same number in both texts; and
a text read backwards gives the same rows backwards.
"""

import torch

import heedful
from heedful.model.classic import SelfAttentionMean
from heedful.model.classic_config import UntrainedSelfAttention
from heedful.nn.scores import cosine

TEXTS = ("he sat on the bank of the river", "she took the money to the bank")


def main() -> dict[str, float]:
    """Return the numbers that the example shows."""
    loaded = heedful.load("heedful-mini-en")
    table, tokenizer = loaded.model.embedding.tokens.weight.detach(), loaded.tokenizer
    attend = SelfAttentionMean(UntrainedSelfAttention(score="cosine"))
    before, after, likeness, backwards = [], [], [], 0.0
    for text in TEXTS:
        encoded = tokenizer.encode(text)
        inner = [id for id, special in zip(encoded.ids, encoded.special, strict=True) if not special]
        names = [tokenizer.name(id) for id in inner]
        rows = table[torch.tensor(inner)]
        mixed = attend(rows, (0, len(rows)))
        bank, the = names.index("bank"), names.index("the")
        before.append(rows[bank])
        after.append(mixed[bank])
        likeness.append(float(cosine(rows, rows)[bank, the]))
        turned = attend(rows.flip(0), (0, len(rows))).flip(0)
        backwards = max(backwards, float((turned - mixed).abs().max()))
    return {
        "bank and bank, from the table": float(cosine(before[0][None], before[1][None])),
        "bank and bank, after attention": float(cosine(after[0][None], after[1][None])),
        "bank and the, in the first text": likeness[0],
        "bank and the, in the second": likeness[1],
        "largest change when read backwards": backwards,
    }


if __name__ == "__main__":
    for name, value in main().items():
        print(f"{name:36}{value:12.6f}")
