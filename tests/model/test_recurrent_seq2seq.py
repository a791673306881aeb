"""The recurrent encoder and decoder against plain loops; packed, alone, token by token; beam search by trial."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from heedful.checkpoint import BundleConfig, ModelBundle, create
from heedful.checkpoint.new_head import with_head
from heedful.errors import HeedfulError
from heedful.model.classic_config import ClassicConfig, GlobalAttention, HardAttention, LocalM, LocalP, RecurrentSeq2Seq
from heedful.model.config import EmbeddingConfig, NextToken, StackConfig
from heedful.model.decode import BeamSearch, Sampling, generate, stream
from heedful.model.trace import Trace
from heedful.packed import Packed
from tests.support.classic_models import recurrent_step, run_recurrent

SOURCE = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15, 16], [], [17, 18]]
TARGET = [[1, 5, 6], [1, 3, 4, 5, 6, 7, 8], [1], [1, 9], [1, 2]]
GRU, LSTM = {"cell": "gru", "width": 8}, {"cell": "lstm", "width": 8, "layers": 2}
WRITERS: dict[str, RecurrentSeq2Seq] = {
    "plain": RecurrentSeq2Seq(**LSTM, look=None),
    "cosine": RecurrentSeq2Seq(**GRU, look=GlobalAttention(score="cosine")),
    "additive": RecurrentSeq2Seq(**LSTM),
    "location": RecurrentSeq2Seq(**GRU, look=GlobalAttention(score="location", longest=9)),
    "general, not fed": RecurrentSeq2Seq(**LSTM, look=GlobalAttention(score="general"), feed=False),
    "dot": RecurrentSeq2Seq(**GRU, look=GlobalAttention(score="dot")),
    "scaled dot, not fed": RecurrentSeq2Seq(**GRU, look=GlobalAttention(score="scaled_dot"), feed=False),
    "hard": RecurrentSeq2Seq(**GRU, look=HardAttention(score="general")),
    "local-m": RecurrentSeq2Seq(**LSTM, look=LocalM(score="dot", radius=1)),
    "local-m, not fed": RecurrentSeq2Seq(**GRU, look=LocalM(score="additive", radius=2), feed=False),
    "local-p": RecurrentSeq2Seq(**GRU, look=LocalP(score="additive", radius=2)),
    "local-p, not fed": RecurrentSeq2Seq(**GRU, look=LocalP(score="general", radius=2), feed=False),
}
NAMES = pytest.mark.parametrize("name", WRITERS)


def make_bundle(writer: RecurrentSeq2Seq, vocabulary: int = 20, **more: Any) -> ModelBundle:
    """A tiny one in float64."""
    words = EmbeddingConfig(vocabulary=vocabulary, width=6, scale=2.0)
    config = BundleConfig(
        family="heedful-classic", model=ClassicConfig(embedding=words, reader=writer), head=NextToken()
    )
    return create(config, seed=3, **more).double().eval()


def looked(look: Any, h: Tensor, rows: Tensor, t: int) -> Tensor:
    """The weights of a state at step t over the rows, by the formulas."""
    score, config, (n, width) = look.score, look.config, rows.shape
    match config.score:
        case "cosine":
            cosines = [h @ k / (h.norm() * k.norm()) for k in rows]
        case "dot" | "scaled_dot":
            cosines = [h @ k / (width**0.5 if config.score == "scaled_dot" else 1) for k in rows]
        case "general":
            cosines = [h @ score.weight.weight @ k for k in rows]
        case "additive":
            w, u, v = (getattr(score, part).weight for part in ("query", "key", "out"))
            cosines = [(v @ (w @ h + u @ k).tanh())[0] for k in rows]
        case _:
            cosines = list(score.weight.weight @ h)[:n]
    at = torch.stack(cosines)
    match config:
        case HardAttention():
            return torch.eye(n).double()[at.argmax()]
        case LocalM(radius=radius):
            centre, near = float(t), [s for s in range(n) if abs(s - t) <= radius]
        case LocalP(radius=radius):
            p = n * (look.local.out.weight @ (look.local.inner.weight @ h).tanh()).sigmoid()
            centre, near = float(p), [s for s in range(n) if abs(s - float(p)) <= radius]
        case _:
            return at.softmax(-1)
    weights = torch.zeros(n).double()
    if near:
        weights[near] = at[near].softmax(-1)
    if isinstance(config, LocalP):
        weights = weights * torch.tensor([-((s - centre) ** 2) / (2 * (radius / 2) ** 2) for s in range(n)]).exp()
    return weights


def by_loops(loaded: ModelBundle, source: list[int], target: list[int]) -> tuple[Tensor, list[Tensor]]:
    """Rows of the target and what each looked at, one token after another (Luong et al. 2015, equations 5 to 10)."""
    body: Any = loaded.model
    half, layers, width = body.recurrent.width // 2, body.recurrent.layers, body.recurrent.width
    words = body.embedding.tokens.weight * 2.0
    rows, ends = torch.zeros(0, width).double(), torch.zeros(width).double()
    if source:
        rows = run_recurrent(body.reading.cells, words[source])
        ends = torch.cat([rows[-1, :half], rows[0, half:]])
    start = (body.bridge.weight @ ends + body.bridge.bias).view(-1, layers, width)
    h = [start[0, layer].tanh() for layer in range(layers)]
    c = [start[1, layer] if len(start) > 1 else start[0, layer] for layer in range(layers)]
    fed, outputs, seen = torch.zeros(6).double(), [], []
    for t, token in enumerate(target):
        x = torch.cat([words[token], fed]) if body.feeds_output else words[token]
        for layer in range(layers):
            h[layer], c[layer] = recurrent_step(body.writing, x, h[layer], c[layer], f"l{layer}")
            x = h[layer]
        if body.look is not None:
            weights = looked(body.look, x, rows, t) if source else torch.zeros(0).double()
            seen.append(weights)
            x = torch.cat([weights @ rows, x])
        fed = (body.mix.weight @ x + body.mix.bias).tanh()
        outputs.append(fed)
    return torch.stack(outputs), seen


@NAMES
@torch.no_grad()
def test_each_is_its_formulas_packed_and_alone(name: str) -> None:
    loaded, trace = make_bundle(WRITERS[name]), Trace(what=("weights",) if WRITERS[name].look else ())
    together = Packed.of(TARGET).unpack(loaded.model(Packed.of(SOURCE), Packed.of(TARGET), trace=trace))
    for number, (source, target) in enumerate(zip(SOURCE, TARGET, strict=True)):
        rows, seen = by_loops(loaded, source, target)
        assert torch.allclose(together[number], rows, atol=1e-12), number
        assert torch.allclose(loaded.model(Packed.of([source]), Packed.of([target])), rows, atol=1e-12)
        if seen:
            weights = trace.attention["cross", 0, number].weights
            assert weights is not None and torch.allclose(weights[0], torch.stack(seen), atol=1e-12)
            some = Trace(rows=[0, 2], sequences=[number])
            loaded.model(Packed.of(SOURCE), Packed.of(TARGET), trace=some)
            alignment = some.attention["cross", 0, number].weights
            assert alignment is not None and torch.equal(
                alignment, weights[:, [row for row in (0, 2) if row < len(target)]]
            )
    assert loaded.model(Packed.of([]), Packed.of([])).shape == (0, 6)


@NAMES
@torch.no_grad()
def test_token_by_token_is_all_at_once(name: str) -> None:
    """Each step's distribution is that of the whole text, told the tokens before it; some texts end sooner."""
    loaded, seen = make_bundle(WRITERS[name]), 0
    assert loaded.head is not None
    texts = [[1] for _ in SOURCE]
    reads = {"prompts": Packed.of(texts), "source": Packed.of(SOURCE)}
    how = Sampling(temperature=2.0)
    for at in stream(
        loaded.model, loaded.head, method=how, max_new_tokens=6, stop=[2, 3, 4], distribution=True, seed=5, **reads
    ):
        assert at.distribution is not None
        for row, number in enumerate(at.sequences):
            whole = loaded(Packed.of([SOURCE[number]]), Packed.of([texts[number]]))[-1].log_softmax(-1)
            assert torch.allclose(at.distribution[row], whole, atol=1e-12)
            texts[number].append(at.tokens[row])
            seen += 1
    assert len(SOURCE) < seen
    prompts = [[1, 5, 6], [1], [1, 2], [1, 7, 8], [1]]  # several tokens at once, and then one
    cache = loaded.model.init_cache(Packed.of(SOURCE))
    loaded.model.decode_step(Packed.of(prompts), cache)
    cache.reorder([2, 0, 0, 4])
    last = loaded.model.decode_step(Packed.of([[9]] * 4), cache)
    for row, number in zip(last, [2, 0, 0, 4], strict=True):
        whole = loaded.model(Packed.of([SOURCE[number]]), Packed.of([[*prompts[number], 9]]))
        assert torch.allclose(row, whole[-1], atol=1e-12)


@pytest.mark.parametrize("name", ["additive", "hard", "local-p, not fed"])
def test_gradients_of_a_batch_are_the_sum_of_those_of_its_texts(name: str) -> None:
    loaded = make_bundle(WRITERS[name])

    def gradient(source: list[list[int]], target: list[list[int]]) -> list[Tensor]:
        loaded.zero_grad()
        loaded(Packed.of(source), Packed.of(target)).log_softmax(-1)[:, 2].sum().backward()
        return [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for parameter in loaded.parameters()
        ]

    alone = [gradient([s], [t]) for s, t in zip(SOURCE, TARGET, strict=True)]
    for packed, *single in zip(gradient(SOURCE, TARGET), *alone, strict=True):
        assert torch.allclose(packed, sum(single, torch.zeros_like(packed)), atol=1e-12)
    assert all(float(gradient_.abs().sum()) > 0 for gradient_ in gradient(SOURCE, TARGET))  # also through what is hard


@torch.no_grad()
def test_a_window_as_wide_as_the_text_is_global_attention() -> None:
    """A wide window equals global attention; sampling in training takes one position, the same for the same seed."""
    everywhere = make_bundle(RecurrentSeq2Seq(**GRU, look=GlobalAttention(score="additive")))
    near = make_bundle(RecurrentSeq2Seq(**GRU, look=LocalM(score="additive", radius=9)))
    assert near.named_tensors().keys() == everywhere.named_tensors().keys()
    read = (Packed.of(SOURCE), Packed.of(TARGET))
    assert torch.allclose(everywhere(*read), near(*read), atol=1e-12)
    drawing = make_bundle(RecurrentSeq2Seq(**GRU, look=HardAttention(score="dot", how="drawn")))
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(drawing.train()(*read))
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])
    assert torch.equal(drawing.eval()(*read), drawing(*read))


@pytest.mark.parametrize("how", ["highest", "drawn"])
def test_hard_attention_learns_straight_through(how: Any) -> None:
    """To write six tokens backwards, of which nets that look at nothing write half in as many steps."""
    torch.manual_seed(0)
    words = EmbeddingConfig(vocabulary=14, width=16, scale=4.0)
    nets = RecurrentSeq2Seq(width=32, look=HardAttention(score="general", how=how), feed=False)
    config = BundleConfig(family="heedful-classic", model=ClassicConfig(embedding=words, reader=nets), head=NextToken())
    loaded = create(config, seed=0).train()
    optimizer = torch.optim.Adam(loaded.parameters(), lr=1e-2)

    def scores_and_targets(count: int) -> tuple[Tensor, Tensor]:
        source = torch.randint(2, 14, (count, 6))
        back = source.flip(1)
        target = torch.cat([torch.ones(count, 1, dtype=torch.long), back[:, :-1]], 1)
        return loaded(Packed.of(source.tolist()), Packed.of(target.tolist())), back.flatten()

    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.cross_entropy(*scores_and_targets(16)).backward()
        nn.utils.clip_grad_norm_(loaded.parameters(), 1.0)
        optimizer.step()
    loaded.eval()
    scores, right = scores_and_targets(200)
    assert (scores.argmax(-1) == right).double().mean() > 0.75


@torch.no_grad()
@pytest.mark.parametrize("penalty", ["none", "power"])
def test_beams_that_miss_nothing_find_the_best_of_all(penalty: Any) -> None:
    """Every text of up to three of four tokens, scored by teacher forcing."""
    loaded, most, stop = make_bundle(WRITERS["additive"], vocabulary=5), 3, 0
    assert loaded.head is not None
    sources = [[1, 2, 3], [4]]
    how = BeamSearch(num_beams=64, num_return_sequences=1, normalization=penalty, early_stopping=True)
    texts = [
        [*begun, end] for n in range(most) for begun in product(range(1, 5), repeat=n) for end in range(5)
        if end == stop or n == most - 1
    ]  # fmt: skip
    reads = {"prompts": Packed.of([[1], [1]]), "source": Packed.of(sources)}
    outputs = generate(loaded.model, loaded.head, method=how, max_new_tokens=most, stop=[stop], **reads)
    for source, (best,) in zip(sources, outputs, strict=True):
        scores = loaded(Packed.of([source] * len(texts)), Packed.of([[1, *text[:-1]] for text in texts])).log_softmax(
            -1
        )
        log_probabilities = Packed.of(texts).unpack(scores.gather(-1, Packed.of(texts).tokens[:, None])[:, 0])
        totals = [
            float(log_p.sum()) / how.divisor(len(text)) for log_p, text in zip(log_probabilities, texts, strict=True)
        ]
        right = texts[max(range(len(texts)), key=totals.__getitem__)]
        assert best.tokens == [token for token in right if token != stop]
        assert best.score == pytest.approx(max(totals), abs=1e-12)


def test_cells_are_torchs_own_and_half_precision_runs() -> None:
    """The size of the published attention model's decoder; bfloat16 products leave the nets in float32."""
    loaded = make_bundle(RecurrentSeq2Seq(**LSTM)).float()
    body: Any = loaded.model
    assert isinstance(body.writing, nn.LSTM) and body.writing.input_size == 12
    with torch.autocast("cpu", torch.bfloat16):
        rows = body(Packed.of(SOURCE), Packed.of(TARGET))
        assert rows.dtype == torch.float32
        loaded.head(rows, Packed.of(TARGET)).float().sum().backward()  # type: ignore[misc]
    assert torch.allclose(rows, body(Packed.of(SOURCE), Packed.of(TARGET)))


def test_dropout_stands_between_the_layers_of_both_nets_and_biases_begin_at_0() -> None:
    loaded = make_bundle(RecurrentSeq2Seq(width=8, layers=2, dropout=0.5))
    body: Any = loaded.model
    assert body.reading.cells.dropout == body.writing.dropout == 0.5
    biases = [bias for name, bias in loaded.named_tensors().items() if "bias" in name]
    assert len(biases) > 10 and not any(bias.any() for bias in biases)


def test_what_is_refused() -> None:
    for wrong, message in (
        ({"width": 7}, "width is 7; expected an even number"),
        ({"layers": 0}, "layers is 0; expected a number from 1"),
        ({"dropout": 1.0}, "dropout is 1.0"),
    ):
        with pytest.raises(HeedfulError, match=message):
            RecurrentSeq2Seq(**wrong)
    with pytest.raises(HeedfulError, match="local_m attention compares some of them"):
        LocalM(score="location")
    with pytest.raises(HeedfulError, match="a sequence has 8 keys, but location scores know 3 positions"):
        make_bundle(RecurrentSeq2Seq(**GRU, look=GlobalAttention(score="location", longest=3))).model(
            Packed.of(SOURCE), Packed.of(TARGET)
        )
    loaded, read = make_bundle(WRITERS["additive"]), (Packed.of(SOURCE), Packed.of(TARGET))
    for trace, message in (
        (Trace(what=["q", "weights", "states"]), "trace: this model has no q, states; it has weights alone"),
        (Trace(layers=[0, 1]), r"trace: layers \[1\] do not exist; give numbers from 0 to 0"),
        (Trace(heads=[2]), r"trace: heads \[2\] do not exist; give numbers from 0 to 0"),
        (Trace(sequences=[5]), r"trace: sequences \[5\] do not exist; give numbers from 0 to 4"),
    ):
        with pytest.raises(HeedfulError, match=message):
            loaded.model(*read, trace=trace)
    loaded = make_bundle(WRITERS["plain"])
    with pytest.raises(HeedfulError, match="trace: this model has no weights"):
        loaded.model(*read, trace=Trace())
    with pytest.raises(HeedfulError, match="generates text"):
        with_head(loaded, "sequence_classification", labels=("a", "b"))
    with pytest.raises(HeedfulError, match="this model needs a target"):
        loaded.model(Packed.of(SOURCE))
    stack = StackConfig(width=6, layers=1, heads=1, head_width=6, inner_width=6)
    with pytest.raises(HeedfulError, match="train their own words"):
        ClassicConfig(embedding=EmbeddingConfig(vocabulary=9, width=6), encoder=stack, reader=RecurrentSeq2Seq())
