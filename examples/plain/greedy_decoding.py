"""Teacher forcing and greedy decoding: an encoder-decoder learns to write four tokens backwards.

In training the decoder reads the true previous tokens, so all positions are predicted at once. To write, it starts from
one token, takes the most probable next one, appends it and repeats. A cache of keys and values gives the same tokens
without computing the prefix again at each step.
"""

import torch
from torch.nn import functional as F

from heedful import Packed
from heedful.checkpoint import BundleConfig, ModelBundle, create
from heedful.model.config import NextToken
from heedful.model.decode import Greedy, generate
from heedful.runs.finetune.init_settings import TransformerInit
from heedful.runs.finetune.seq2seq import transformer_config

START, STOP, LETTERS, LENGTH = 1, 2, 5, 4  # letters are the tokens from 3


def scores(model: ModelBundle, sources: list[list[int]], prefixes: list[list[int]]) -> torch.Tensor:
    """Return the scores of the next token at each position of each prefix, [rows, vocabulary]."""
    assert model.head is not None
    batch = Packed.of(prefixes)
    return model.head(model.model(Packed.of(sources), batch), batch)


def train(steps: int) -> ModelBundle:
    """Learn to reverse by teacher forcing: the input is [START, y1 ... y4], the target [y1 ... y4, STOP]."""
    torch.manual_seed(0)
    shape = TransformerInit(layers=1, width=32, heads=2, inner=64, dropout=0.0, norm_at="pre")
    config = BundleConfig(family="heedful", model=transformer_config(shape, 3 + LETTERS), head=NextToken())
    model = create(config, seed=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(steps):
        sources = torch.randint(3, 3 + LETTERS, (16, LENGTH))
        answers = sources.flip(1).tolist()
        logits = scores(model, sources.tolist(), [[START, *answer] for answer in answers])
        loss = F.cross_entropy(logits, torch.tensor([[*answer, STOP] for answer in answers]).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def main(steps: int = 200) -> list[int]:
    """Return what the decoder writes for the source [3, 4, 5, 6]; compare the loop with the library."""
    model, source, written = train(steps), [3, 4, 5, 6], [START]
    with torch.no_grad():
        while len(written) <= 2 * LENGTH:
            probabilities = scores(model, [source], [written])[-1].softmax(-1)  # after the last token
            if (token := int(probabilities.argmax())) == STOP:
                break
            written.append(token)
    more = {"max_new_tokens": 2 * LENGTH, "stop": [STOP], "source": Packed.of([source])}
    ((library,),) = generate(model.model, model.head, Packed.of([[START]]), Greedy(), **more)
    assert written[1:] == library.tokens == source[::-1]
    return library.tokens


if __name__ == "__main__":
    print(main())
