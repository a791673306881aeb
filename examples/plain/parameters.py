"""The parameters of BERT base, part by part, and of three models that came after it.

Every count is a product of sizes that the papers give; the sum is compared with the library's model.
"""

from heedful.checkpoint.published_sizes import published


def parts(  # the sizes of BERT base, unless given
    vocabulary: int = 30_522,
    positions: int = 512,
    segments: int = 2,
    width: int = 768,
    layers: int = 12,
    inner: int = 3_072,
    pooler: bool = True,
    narrow: int | None = None,
    blocks: int | None = None,
) -> dict[str, int]:
    """Parameters of each part.

    Args:
        narrow: Width of the embeddings, if they are narrower than the rows and then projected (ALBERT).
        blocks: Different blocks, if layers share them (ALBERT: 1).
    """
    table, different = narrow or width, blocks or layers
    return {
        "token embeddings": vocabulary * table,
        "position embeddings": positions * table,
        "segment embeddings": segments * table,
        "norm of the embeddings": 2 * table,
        "projection of the embeddings": 0 if narrow is None else narrow * width + width,
        "attention: q, k, v, output": different * 4 * (width * width + width),
        "feed-forward networks": different * ((width * inner + inner) + (inner * width + width)),
        "norms of the blocks": different * 2 * 2 * width,
        "pooler": (width * width + width) if pooler else 0,
    }


MODELS = {
    "bert-base-uncased": parts(),
    "roberta-base": parts(vocabulary=50_265, positions=514, segments=1),
    "distilbert-base-uncased": parts(segments=0, layers=6, pooler=False),
    "albert-base-v2": parts(vocabulary=30_000, narrow=128, blocks=1),
}


def main() -> dict[str, int]:
    """Return the parts of BERT base, after comparing all sums with the library's models."""
    sizes = {size.name: size.parameters for size in published()}
    for name, found in MODELS.items():
        assert sum(found.values()) == sizes[name], (name, sum(found.values()), sizes[name])
    assert sum(MODELS["bert-base-uncased"].values()) == 109_482_240
    return MODELS["bert-base-uncased"]


if __name__ == "__main__":
    for part, count in main().items():
        print(f"{part:30} {count:11,} {count / 109_482_240:6.1%}")
    for name, found in MODELS.items():
        print(f"{name:30} {sum(found.values()):11,}")
