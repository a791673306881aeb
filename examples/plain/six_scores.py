"""Six ways to score a query against keys: what differs is who is compared with what.

Cosine and dot product compare directions, with or without length; the scaled dot product divides by sqrt(d); general
puts a matrix between them; additive compares in a small network; location ignores the keys (Luong et al. 2015;
Bahdanau et al. 2015).
"""

import torch

from heedful.nn import scores

WIDTH, KEYS = 6, 5


def main() -> dict[str, torch.Tensor]:
    """Return the weights of each score, after comparing its formula with the library's."""
    torch.manual_seed(0)
    q, k = torch.randn(WIDTH), torch.randn(KEYS, WIDTH)
    general = scores.General(width=WIDTH, key_width=WIDTH)
    additive = scores.Additive(width=WIDTH, key_width=WIDTH, inner_width=4)
    location = scores.Location(width=WIDTH, longest=KEYS)
    w = {name: parameter.detach() for name, parameter in additive.named_parameters()}
    pairs = {
        "cosine": (k @ q / (k.norm(dim=1) * q.norm()), scores.cosine),
        "dot": (k @ q, scores.dot),
        "scaled": (k @ q / WIDTH**0.5, scores.scaled_dot),
        "general": (k @ general.weight.weight.T @ q, general),
        "additive": ((q @ w["query.weight"].T + k @ w["key.weight"].T).tanh() @ w["out.weight"][0], additive),
        "location": (location.weight.weight @ q, location),
    }
    weights = {}
    for name, (plain, score) in pairs.items():
        with torch.no_grad():
            assert torch.allclose(plain, score(q[None], k)[0], atol=1e-6), name
        weights[name] = plain.detach().softmax(0)
    return weights


if __name__ == "__main__":
    for name, row in main().items():
        print(f"{name:10}", " ".join(f"{weight:.3f}" for weight in row))
