"""Hierarchical attention: words make sentences, sentences make the document, and both steps are attention.

u = tanh(W h + b), weights = softmax(u q), s = sum of weight times h, with one trained query q for words and another for
sentences (Yang et al. 2016, section 2.2). Here no recurrent net runs over the words or the sentences.
"""

import torch
from torch import nn

from heedful import Packed
from heedful.model.classic_config import HierarchicalPooling
from heedful.model.pooling import HierarchicalPooler

WIDTH, INNER, STOP = 6, 4, 9
DOCUMENTS = [[5, 6, STOP, 7, 8, 5, STOP], [6, STOP]]  # token 9 ends a sentence


def read(rows: torch.Tensor, layer: nn.Linear, query: torch.Tensor) -> torch.Tensor:
    """Return the mean of rows [n, width], weighted by how well they match the query."""
    weights = (layer(rows).tanh() @ query).softmax(0)
    return weights @ rows


def main() -> torch.Tensor:
    """Return the vector of each document, after comparing it with the library's."""
    torch.manual_seed(0)
    reader = HierarchicalPooler(HierarchicalPooling(over=None, sentences=None, inner=INNER, ends=(STOP,)), WIDTH)
    for parameter in reader.parameters():
        nn.init.normal_(parameter)
    words, sentences = reader.words, reader.sentences
    vectors = nn.Embedding(10, WIDTH)
    document_vectors = []
    with torch.no_grad():
        for document in DOCUMENTS:
            rows, start, sentence_vectors = vectors(torch.tensor(document)), 0, []
            for end in [position + 1 for position, token in enumerate(document) if token == STOP]:
                sentence_vectors.append(read(rows[start:end], words.key, words.queries[0]))
                start = end
            document_vectors.append(read(torch.stack(sentence_vectors), sentences.key, sentences.queries[0]))
        batch = Packed.of(DOCUMENTS)
        library = reader(vectors(batch.tokens), batch)[:, 0]
    assert torch.allclose(torch.stack(document_vectors), library, atol=1e-6)
    return library


if __name__ == "__main__":
    print(main())
