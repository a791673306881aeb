"""Self-attention without weights: each word becomes the mean of the words of its text, weighted by similarity.

Idea: in "the bank of the river", softmax(cos(X, X)) X and softmax(X X) X turn static word vectors into vectors that
depend on the context. Three things are missing: nothing is trained, two words have the same score in every context, and
the order of the words does not count.
Code: `SelfAttentionMean` in heedful/model/classic.py; the embedding table of the bundled encoder.
Expect: "bank" has one vector in the table and two different ones after attention; cos(bank, the) is the same number in
both texts; a text read backwards gives the same rows in reverse order.
"""

import torch

import heedful
from heedful.model.classic import SelfAttentionMean
from heedful.model.classic_config import UntrainedSelfAttention
from heedful.nn.scores import cosine

TEXTS = ("he sat on the bank of the river", "she took the money to the bank")


def main() -> dict[str, float]:
    """Return the cosines of the two banks, of bank and the in each text, and the change when a text is reversed."""
    model = heedful.load("heedful-mini-en")
    table, tokenizer = model.model.embedding.tokens.weight.detach(), model.tokenizer
    attend = SelfAttentionMean(UntrainedSelfAttention(score="cosine"))
    before, after, similarities, backwards = [], [], [], 0.0
    for text in TEXTS:
        encoded = tokenizer.encode(text)
        word_ids = [token_id for token_id, special in zip(encoded.ids, encoded.special, strict=True) if not special]
        names = [tokenizer.name(token_id) for token_id in word_ids]
        rows = table[torch.tensor(word_ids)]
        mixed = attend(rows, (0, len(rows)))
        bank, the = names.index("bank"), names.index("the")
        before.append(rows[bank])
        after.append(mixed[bank])
        similarities.append(float(cosine(rows, rows)[bank, the]))
        reversed_rows = attend(rows.flip(0), (0, len(rows))).flip(0)
        backwards = max(backwards, float((reversed_rows - mixed).abs().max()))
    return {
        "bank and bank, from the table": float(cosine(before[0][None], before[1][None])),
        "bank and bank, after attention": float(cosine(after[0][None], after[1][None])),
        "bank and the, in the first text": similarities[0],
        "bank and the, in the second": similarities[1],
        "largest change when read backwards": backwards,
    }


if __name__ == "__main__":
    for name, value in main().items():
        print(f"{name:36}{value:12.6f}")
