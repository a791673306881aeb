"""Masked language modelling: hide some tokens, predict them from both sides.

15 % of the tokens are selected. Of these 80 % become [MASK], 10 % a random token and 10 % stay; the loss is on
selected positions only (Devlin et al. 2019, section 3.1 and appendix A.1).
"""

import random

import torch
from torch.nn import functional as F

import heedful

TEXT = "The library lends saws, drills and ladders to its members for two weeks."
SEED = 84  # of the draws


def mask(
    ids: list[int], special: set[int], mask_id: int, size: int, draw: random.Random
) -> tuple[list[int], list[int]]:
    """The corrupted ids, and the selected positions."""
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


def main() -> list[tuple[str, str, float | None]]:
    """Return each token, what the model reads there, and the loss where there is one; compare with PyTorch."""
    model = heedful.load("heedful-mini-en", head="masked_lm").eval()
    tokenizer = model.tokenizer
    ids = list(tokenizer.encode(TEXT).ids)
    mask_id = tokenizer.special.mask
    special = {ids[0], ids[-1]}
    corrupted, selected = mask(ids, special, mask_id, tokenizer.size, random.Random(SEED))
    batch = heedful.Packed.of([corrupted])
    with torch.no_grad():
        logits = model.head(model.model(batch), batch)[selected]  # [selected, vocabulary]
    targets = torch.tensor(ids)[selected]
    losses = -(logits.exp() / logits.exp().sum(-1, keepdim=True))[range(len(selected)), targets].log()
    assert torch.allclose(losses.mean(), F.cross_entropy(logits, targets), atol=1e-5)
    shown = dict(zip(selected, losses.tolist(), strict=True))
    return [
        (tokenizer.name(old), tokenizer.name(new), shown.get(position))
        for position, (old, new) in enumerate(zip(ids, corrupted, strict=True))
    ]


if __name__ == "__main__":
    print("token        read as      loss")
    rows = main()
    for token, read, loss in rows:
        print(f"{token:12} {read:12} {'-' if loss is None else format(loss, '.3f')}")
    counted = [loss for *_, loss in rows if loss is not None]
    print(f"loss {sum(counted) / len(counted):.3f}, the mean of {len(counted)}; a uniform guess has ln(16,000) = 9.680")
