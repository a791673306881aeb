"""Estimate pre-training on 64 GPUs: communication beside compute, tokens of a step, hours and dollars.

    python benchmarks/scale.py        # the tables of docs/scale.md

Nothing here was measured by us on 64 GPUs. All inputs of the estimate are constants below; docs/scale.md names their
sources.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from report import grid

GPUS, PER_HOST = 64, 8
MATRIX, COPY = 790e12, 4.3e12  # FLOP/s in bf16 and bytes/s of one H200, as they were measured
CHOSEN = 0.15  # share of the positions for which the head computes scores of the vocabulary
GRADIENT, UPDATE = 2, 28  # bytes a parameter: reduced in bf16; AdamW reads p, m, v, g and writes p, m, v in float32
LATENCY = 30e-6  # seconds of a reduction of zero bytes
BACKWARD = 2 / 3  # share of the compute that is the backward pass
STEPS = (2_048, 8_192, 16_384, 65_536)  # tokens of a GPU in a step
CORPUS = 38e9  # tokens in 160 GB of text: 36 to 40 billion
BYTES = 2  # of a token id on disk
PRICES = (2.49, 12.29)  # dollars for a GPU and an hour


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The shape of an encoder."""

    name: str
    layers: int
    width: int  # hidden size
    vocabulary: int
    places: int  # position embeddings
    types: int  # token type embeddings
    share: float  # of the matrix rate; we assume that the encoder reaches it on a single GPU

    @property
    def embedding(self) -> int:
        """Parameters of the token embedding, which the head shares: their gradient is ready last."""
        return self.vocabulary * self.width

    @property
    def block(self) -> int:
        """Parameters of one block: 12 d^2 in its four kinds of products, 13 d in biases and norms."""
        return 12 * self.width**2 + 13 * self.width

    @property
    def parameters(self) -> int:
        """Number of parameters, with positions, types, their norm, and a head of one product, a norm and biases."""
        rest = (self.places + self.types + 2) * self.width + self.width**2 + 3 * self.width + self.vocabulary
        return self.embedding + self.layers * self.block + rest

    def flop(self, length: int) -> float:
        """Return the operations of a token, forward and backward: 3 (L (24 d^2 + 4 s d) + m (2 d^2 + 2 d V))."""
        d = self.width
        return 3 * (self.layers * (24 * d * d + 4 * length * d) + CHOSEN * (2 * d * d + 2 * d * self.vocabulary))

    def seconds(self, tokens: float, length: int) -> float:
        """Return the seconds of a step's matrix products on one GPU."""
        return tokens * self.flop(length) / (self.share * MATRIX)


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """A network that reduces gradients in a ring over all GPUs."""

    name: str
    rate: float  # bytes a second that each GPU sends while it receives

    def reduce(self, parameters: float) -> float:
        """Return the seconds until all GPUs have the sum: latency + 2 (n - 1) / n * bytes / rate."""
        return LATENCY + 2 * (GPUS - 1) / GPUS * GRADIENT * parameters / self.rate


BASE = Shape(name="BERT-base", layers=12, width=768, vocabulary=30_522, places=512, types=2, share=0.30)
LARGE = Shape(name="BERT-large", layers=24, width=1024, vocabulary=30_522, places=512, types=2, share=0.41)
ROBERTA = (
    Shape(name="RoBERTa-base", layers=12, width=768, vocabulary=50_265, places=514, types=1, share=0.30),
    Shape(name="RoBERTa-large", layers=24, width=1024, vocabulary=50_265, places=514, types=1, share=0.41),
)
NETWORKS = (
    Network(name="fast", rate=200e9),  # eight 400 Gb/s adapters a host and NVLink inside, at half of their rate
    Network(name="slow", rate=0.9 * 100e9 / 8),  # one 100 Gb/s Ethernet a host, at nine tenths of its rate
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The seconds of one training step."""

    compute: float
    waiting: float  # for reductions after the backward pass
    update: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.compute + self.waiting + self.update

    @property
    def efficiency(self) -> float:
        """Share of a single GPU's speed: its step, which waits for nothing, over this step."""
        return (self.compute + self.update) / self.total


def step(shape: Shape, network: Network, tokens: float, length: int = 128) -> Step:
    """Simulate the reductions of one training step.

    Gradients of the blocks are ready one after another, evenly over the backward pass, the last block's first; each is
    reduced as soon as the link is free. The head shares the token embedding, so its gradient and those of all
    parameters outside the blocks are reduced after the backward pass, when no compute hides them.
    """
    compute = shape.seconds(tokens, length)
    link_free = backward_start = compute * (1 - BACKWARD)
    for index in range(shape.layers):
        ready = backward_start + (index + 1) / shape.layers * (compute - backward_start)
        link_free = max(link_free, ready) + network.reduce(shape.block)
    outside_blocks = shape.parameters - shape.layers * shape.block
    done = max(link_free, compute) + network.reduce(outside_blocks)
    return Step(compute=compute, waiting=done - compute, update=UPDATE * shape.parameters / COPY)


def needed(shape: Shape, network: Network, efficiency: float, length: int = 128) -> int:
    """Return the fewest tokens of a GPU and step, in thousands, with which a step has the efficiency."""
    thousands = 1
    while step(shape, network, 1000 * thousands, length).efficiency < efficiency:
        thousands += 1
    return 1000 * thousands


# -- published runs -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """Two logs of MLPerf Training 4.0, BERT-large, closed division, NVIDIA: sequences a second of all GPUs."""

    machine: str
    gpus: int
    log: str
    rates: tuple[float, float]  # "throughput" of tracked_stats in result_0.txt and result_1.txt
    steps: int  # of result_0.txt
    samples: int  # sequences of result_0.txt
    rows: int | None  # packed rows of 512 tokens of a GPU and step; if None, sequences are neither packed nor padded

    @property
    def rate_of_gpu(self) -> float:
        """Sequences a second of a GPU, the mean of both logs."""
        return sum(self.rates) / len(self.rates) / self.gpus

    @property
    def batch_of_gpu(self) -> float:
        """Sequences of a GPU in a step."""
        return self.samples / self.steps / self.gpus


LOGS = (
    Published(
        machine="8 H200",
        gpus=8,
        log="h200_ngc23.09_pytorch",
        rates=(7972.099, 7971.310),
        steps=3125,
        samples=2_398_552,
        rows=48,
    ),
    Published(
        machine="8 H100",
        gpus=8,
        log="eos_ngc23.04_pytorch",
        rates=(7759.983, 7759.574),
        steps=3516,
        samples=2_698_169,
        rows=48,
    ),
    Published(
        machine="64 H100",
        gpus=64,
        log="eos_n8_ngc23.04_pytorch",
        rates=(53540.834, 53185.444),
        steps=652,
        samples=3_004_416,
        rows=None,
    ),
)


def longest() -> float:
    """Return the largest possible mean length of the published sequences: that of packed rows without padding."""
    log = LOGS[1]
    assert log.rows is not None
    return 512 * log.rows / log.batch_of_gpu


def kept() -> float:
    """Return the published efficiency of 64 GPUs: the rate of a GPU among 64 over that of a GPU among 8."""
    return LOGS[2].rate_of_gpu / LOGS[1].rate_of_gpu


def rest() -> float:
    """Return the published efficiency over the one that `step` estimates for the same tokens."""
    tokens = LOGS[2].batch_of_gpu * longest()
    return kept() / step(LARGE, NETWORKS[0], tokens, round(longest())).efficiency


# -- tables -------------------------------------------------------------------------------------------------------


def communication() -> str:
    """Format compute and communication of a step as Markdown."""
    rows = []
    for shape in (BASE, LARGE):
        for network in NETWORKS:
            reduction = network.reduce(shape.parameters)
            for tokens in STEPS:
                estimate = step(shape, network, tokens)
                rows.append(
                    [
                        shape.name,
                        network.name,
                        f"{tokens:,}",
                        f"{1e3 * estimate.compute:.1f}",
                        f"{1e3 * reduction:.1f}",
                        f"{1e3 * estimate.waiting:.1f}",
                        f"{estimate.efficiency:.0%}",
                        f"{estimate.efficiency * rest():.0%}",
                    ]
                )
    columns = ["shape", "network", "tokens a GPU and step", "compute, ms", "reduction, ms", "of it waited for, ms"]
    return grid([*columns, "efficiency", "as published runs keep"], rows)


def tokens_needed() -> str:
    """Format the tokens of a GPU and step that several efficiencies need as Markdown."""
    rows = [
        [shape.name, network.name, *(f"{needed(shape, network, least):,}" for least in (0.8, 0.9, 0.95))]
        for shape in (BASE, LARGE)
        for network in NETWORKS
    ]
    return grid(["shape", "network", "for 80 %", "for 90 %", "for 95 %"], rows)


def calibration() -> str:
    """Format the rates of MLPerf's logs as Markdown."""
    rows = [
        [
            log.machine,
            log.log,
            f"{log.rates[0]:,.0f}, {log.rates[1]:,.0f}",
            f"{log.rate_of_gpu:,.0f}",
            f"{log.batch_of_gpu:.0f}" + (f" in {log.rows} rows of 512" if log.rows else ""),
            f"{log.rate_of_gpu * longest() * LARGE.flop(round(longest())) / MATRIX:.0%}",
        ]
        for log in LOGS
    ]
    columns = ["machine", "log", "sequences/s (two runs)", "of a GPU", "sequences a GPU and step"]
    return grid([*columns, "share of 790 TFLOP/s, at most"], rows)


def run(length: int = 512, tokens: int = 65_536) -> str:
    """Format hours and dollars of a RoBERTa-sized run as Markdown: one epoch, and as many tokens as in the paper."""
    passes = {"once over 160 GB": CORPUS, "500,000 steps of 8,192 × 512": 500_000 * 8_192 * 512.0}
    rows = []
    for shape in ROBERTA:
        for network in NETWORKS:
            speed = GPUS * tokens / step(shape, network, tokens, length).total * rest()
            for title, count in passes.items():
                hours = count / speed / 3600
                rows.append(
                    [
                        f"{shape.name} ({shape.parameters / 1e6:.0f} M)",
                        network.name,
                        title,
                        f"{speed / 1e6:.1f} M",
                        f"{BYTES * speed / 1e6:.0f} MB/s",
                        f"{hours:,.1f}" if hours < 100 else f"{hours:,.0f}",
                        *(f"{GPUS * hours * price:,.0f}" for price in PRICES),
                    ]
                )
    columns = ["shape", "network", "tokens", "tokens/s", "ids read", "hours on 64 GPUs"]
    return grid([*columns, *(f"dollars at {price} a GPU and hour" for price in PRICES)], rows)


TABLES: dict[str, Callable[[], str]] = {
    "Communication against compute, 64 GPUs, sequences of 128": communication,
    "Tokens of a GPU and step that are needed": tokens_needed,
    "What was published": calibration,
    "A RoBERTa-sized run, sequences of 512, 65,536 tokens a GPU and step": run,
}


def main() -> None:
    """Print all tables, and the efficiency that published runs keep."""
    for title, make in TABLES.items():
        print(f"## {title}\n\n{make()}")
    print(
        f"Of one host's speed {kept():.1%} was kept on eight; this model says {kept() / rest():.1%} there, so that "
        f"{rest():.1%} of what it says is kept in practice."
    )


if __name__ == "__main__":
    main()
