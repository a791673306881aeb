"""king - man + woman: differences of word vectors as relations.

The answer is the word whose vector has the largest cosine to b - a + c, where a, b and c themselves do not count
(Mikolov et al. 2013).
"""

import torch

import heedful
from heedful.look.word_vectors import analogy

QUESTION = ("man", "king", "woman")


def main() -> list[str]:
    """Return the nearest words in the embedding table of the bundled encoder, compared with the library's answer."""
    model = heedful.load("heedful-mini-en")
    tokenizer = model.tokenizer
    table = torch.nn.functional.normalize(model.model.embedding.tokens.weight.detach()[: tokenizer.size], dim=-1)
    a, b, c = (tokenizer.id(word) for word in QUESTION)
    cosines = table @ torch.nn.functional.normalize(table[b] - table[a] + table[c], dim=-1)
    cosines[[a, b, c]] = -1
    nearest = [tokenizer.name(int(number)) for number in cosines.argsort(descending=True)[:20]]
    library = [answer["text"] for answer in analogy(model, *QUESTION)]
    assert [word for word in nearest if word in library][: len(library)] == library
    return library


if __name__ == "__main__":
    print(main())
