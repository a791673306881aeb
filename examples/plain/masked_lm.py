"""Masked language modelling: hide some tokens, predict them from both sides.

15 % of the tokens are selected. Of these 80 % become [MASK], 10 % a random token and 10 % stay; the loss is on
selected positions only (Devlin et al. 2019, section 3.1 and appendix A.1).
"""

import random

import torch
from torch.nn import functional as F

import heedful

TEXT = "The library lends saws, drills and ladders to its members for two weeks."


def mask(
    ids: list[int], special: set[int], mask_id: int, size: int, draw: random.Random
) -> tuple[list[int], list[int]]:
    """Return the corrupted ids and the selected positions."""
    corrupted, selected = list(ids), []
    for position, token in enumerate(ids):
        if token in special or draw.random() >= 0.15:
            continue
        selected.append(position)
        chance = draw.random()
        if chance < 0.8:
            corrupted[position] = mask_id
        elif chance < 0.9:
            corrupted[position] = draw.randrange(size)
    return corrupted, selected


def main() -> float:
    """Return the loss of the bundled encoder on the selected tokens; compare it with PyTorch's cross-entropy."""
    model = heedful.load("heedful-mini-en", head="masked_lm").eval()
    tokenizer = model.tokenizer
    ids = list(tokenizer.encode(TEXT).ids)
    mask_id = tokenizer.special.mask
    special = {ids[0], ids[-1]}
    corrupted, selected = mask(ids, special, mask_id, tokenizer.size, random.Random(4))
    assert selected
    batch = heedful.Packed.of([corrupted])
    with torch.no_grad():
        logits = model.head(model.model(batch), batch)[selected]  # [selected, vocabulary]
    targets = torch.tensor(ids)[selected]
    by_hand = -(logits.exp() / logits.exp().sum(-1, keepdim=True))[range(len(selected)), targets].log().mean()
    assert torch.allclose(by_hand, F.cross_entropy(logits, targets), atol=1e-5)
    return float(by_hand)


if __name__ == "__main__":
    print(f"loss {main():.3f}; ln(vocabulary) = {torch.tensor(16_000.0).log():.3f} would be a uniform guess")
