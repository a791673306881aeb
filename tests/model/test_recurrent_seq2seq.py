"""The recurrent encoder and decoder, compared with plain loops, in batches, alone and token by token; beam search."""

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
MODELS: dict[str, RecurrentSeq2Seq] = {
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
NAMES = pytest.mark.parametrize("name", MODELS)


def make_bundle(writer: RecurrentSeq2Seq, vocabulary: int = 20, **more: Any) -> ModelBundle:
    """Return a tiny model in float64."""
    words = EmbeddingConfig(vocabulary=vocabulary, width=6, scale=2.0)
    config = BundleConfig(
        family="heedful-classic", model=ClassicConfig(embedding=words, reader=writer), head=NextToken()
    )
    return create(config, seed=3, **more).double().eval()


def attention_by_loops(look: Any, h: Tensor, rows: Tensor, t: int) -> Tensor:
    """Return the attention weights of a decoder state h at step t over the source's rows, by the papers' formulas."""
    score, config, (n, width) = look.score, look.config, rows.shape
    match config.score:
        case "cosine":
            scores = [h @ k / (h.norm() * k.norm()) for k in rows]
        case "dot" | "scaled_dot":
            scores = [h @ k / (width**0.5 if config.score == "scaled_dot" else 1) for k in rows]
        case "general":
            scores = [h @ score.weight.weight @ k for k in rows]
        case "additive":
            w, u, v = (getattr(score, part).weight for part in ("query", "key", "out"))
            scores = [(v @ (w @ h + u @ k).tanh())[0] for k in rows]
        case _:
            scores = list(score.weight.weight @ h)[:n]
    logits = torch.stack(scores)
    match config:
        case HardAttention():
            return torch.eye(n).double()[logits.argmax()]
        case LocalM(radius=radius):
            centre, near = float(t), [s for s in range(n) if abs(s - t) <= radius]
        case LocalP(radius=radius):
            p = n * (look.local.out.weight @ (look.local.inner.weight @ h).tanh()).sigmoid()
            centre, near = float(p), [s for s in range(n) if abs(s - float(p)) <= radius]
        case _:
            return logits.softmax(-1)
    weights = torch.zeros(n).double()
    if near:
        weights[near] = logits[near].softmax(-1)
    if isinstance(config, LocalP):
        weights = weights * torch.tensor([-((s - centre) ** 2) / (2 * (radius / 2) ** 2) for s in range(n)]).exp()
    return weights


def rows_by_loops(loaded: ModelBundle, source: list[int], target: list[int]) -> tuple[Tensor, list[Tensor]]:
    """Decode a target token by token (Luong et al. 2015, equations 5 to 10).

    Returns:
        The output rows, and the attention weights of each row.
    """
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
    fed, outputs, all_weights = torch.zeros(6).double(), [], []
    for t, token in enumerate(target):
        x = torch.cat([words[token], fed]) if body.feeds_output else words[token]
        for layer in range(layers):
            h[layer], c[layer] = recurrent_step(body.writing, x, h[layer], c[layer], f"l{layer}")
            x = h[layer]
        if body.look is not None:
            weights = attention_by_loops(body.look, x, rows, t) if source else torch.zeros(0).double()
            all_weights.append(weights)
            x = torch.cat([weights @ rows, x])
        fed = (body.mix.weight @ x + body.mix.bias).tanh()
        outputs.append(fed)
    return torch.stack(outputs), all_weights


@NAMES
@torch.no_grad()
def test_rows_and_weights_equal_the_formulas_in_a_batch_and_alone(name: str) -> None:
    loaded, trace = make_bundle(MODELS[name]), Trace(what=("weights",) if MODELS[name].look else ())
    batch_rows = Packed.of(TARGET).unpack(loaded.model(Packed.of(SOURCE), Packed.of(TARGET), trace=trace))
    for sequence, (source, target) in enumerate(zip(SOURCE, TARGET, strict=True)):
        expected, expected_weights = rows_by_loops(loaded, source, target)
        assert torch.allclose(batch_rows[sequence], expected, atol=1e-12), sequence
        assert torch.allclose(loaded.model(Packed.of([source]), Packed.of([target])), expected, atol=1e-12)
        if expected_weights:
            weights = trace.attention["cross", 0, sequence].weights
            assert weights is not None and torch.allclose(weights[0], torch.stack(expected_weights), atol=1e-12)
            trace_of_rows = Trace(rows=[0, 2], sequences=[sequence])
            loaded.model(Packed.of(SOURCE), Packed.of(TARGET), trace=trace_of_rows)
            weights_of_rows = trace_of_rows.attention["cross", 0, sequence].weights
            existing_rows = [row for row in (0, 2) if row < len(target)]
            assert weights_of_rows is not None and torch.equal(weights_of_rows, weights[:, existing_rows])
    assert loaded.model(Packed.of([]), Packed.of([])).shape == (0, 6)


@NAMES
@torch.no_grad()
def test_decoding_token_by_token_equals_decoding_whole_texts(name: str) -> None:
    """The next token has the same distribution, also after several tokens in one step and a reordering of the cache."""
    loaded, compared = make_bundle(MODELS[name]), 0
    assert loaded.head is not None
    texts = [[1] for _ in SOURCE]
    inputs = {"prompts": Packed.of(texts), "source": Packed.of(SOURCE)}
    method = Sampling(temperature=2.0)
    for step in stream(
        loaded.model, loaded.head, method=method, max_new_tokens=6, stop=[2, 3, 4], distribution=True, seed=5, **inputs
    ):
        assert step.distribution is not None
        for row, sequence in enumerate(step.sequences):
            whole = loaded(Packed.of([SOURCE[sequence]]), Packed.of([texts[sequence]]))[-1].log_softmax(-1)
            assert torch.allclose(step.distribution[row], whole, atol=1e-12)
            texts[sequence].append(step.tokens[row])
            compared += 1
    assert len(SOURCE) < compared
    prompts = [[1, 5, 6], [1], [1, 2], [1, 7, 8], [1]]  # several tokens at once, and then one
    cache = loaded.model.init_cache(Packed.of(SOURCE))
    loaded.model.decode_step(Packed.of(prompts), cache)
    cache.reorder([2, 0, 0, 4])
    last = loaded.model.decode_step(Packed.of([[9]] * 4), cache)
    for row, sequence in zip(last, [2, 0, 0, 4], strict=True):
        whole = loaded.model(Packed.of([SOURCE[sequence]]), Packed.of([[*prompts[sequence], 9]]))
        assert torch.allclose(row, whole[-1], atol=1e-12)


@pytest.mark.parametrize("name", ["additive", "hard", "local-p, not fed"])
def test_the_gradient_of_a_batch_is_the_sum_over_its_texts(name: str) -> None:
    loaded = make_bundle(MODELS[name])

    def gradient(source: list[list[int]], target: list[list[int]]) -> list[Tensor]:
        loaded.zero_grad()
        loaded(Packed.of(source), Packed.of(target)).log_softmax(-1)[:, 2].sum().backward()
        return [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for parameter in loaded.parameters()
        ]

    text_gradients = [gradient([s], [t]) for s, t in zip(SOURCE, TARGET, strict=True)]
    for of_batch, *of_texts in zip(gradient(SOURCE, TARGET), *text_gradients, strict=True):
        assert torch.allclose(of_batch, sum(of_texts, torch.zeros_like(of_batch)), atol=1e-12)
    # hard attention passes a gradient too
    assert all(float(of_parameter.abs().sum()) > 0 for of_parameter in gradient(SOURCE, TARGET))


@torch.no_grad()
def test_a_window_as_wide_as_the_text_is_global_attention() -> None:
    """In training, sampled hard attention depends on the seed; in eval mode, it does not."""
    everywhere = make_bundle(RecurrentSeq2Seq(**GRU, look=GlobalAttention(score="additive")))
    near = make_bundle(RecurrentSeq2Seq(**GRU, look=LocalM(score="additive", radius=9)))
    assert near.named_tensors().keys() == everywhere.named_tensors().keys()
    batches = (Packed.of(SOURCE), Packed.of(TARGET))
    assert torch.allclose(everywhere(*batches), near(*batches), atol=1e-12)
    sampling = make_bundle(RecurrentSeq2Seq(**GRU, look=HardAttention(score="dot", how="drawn")))
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(sampling.train()(*batches))
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])
    assert torch.equal(sampling.eval()(*batches), sampling(*batches))


@pytest.mark.parametrize("how", ["highest", "drawn"])
def test_hard_attention_learns_straight_through(how: Any) -> None:
    """The model learns to reverse six tokens; without attention, half of the tokens are right after as many steps."""
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
def test_a_wide_beam_search_finds_the_best_of_all_texts(penalty: Any) -> None:
    """All texts of up to three tokens from a vocabulary of five are scored by teacher forcing."""
    loaded, max_new_tokens, stop = make_bundle(MODELS["additive"], vocabulary=5), 3, 0
    assert loaded.head is not None
    sources = [[1, 2, 3], [4]]
    how = BeamSearch(num_beams=64, num_return_sequences=1, normalization=penalty, early_stopping=True)
    texts = [
        [*begun, end] for n in range(max_new_tokens) for begun in product(range(1, 5), repeat=n) for end in range(5)
        if end == stop or n == max_new_tokens - 1
    ]  # fmt: skip
    inputs = {"prompts": Packed.of([[1], [1]]), "source": Packed.of(sources)}
    outputs = generate(loaded.model, loaded.head, method=how, max_new_tokens=max_new_tokens, stop=[stop], **inputs)
    targets = Packed.of(texts)
    decoder_inputs = Packed.of([[1, *text[:-1]] for text in texts])
    for source, (best,) in zip(sources, outputs, strict=True):
        log_p = loaded(Packed.of([source] * len(texts)), decoder_inputs).log_softmax(-1)
        token_log_p = targets.unpack(log_p.gather(-1, targets.tokens[:, None])[:, 0])
        scores = [float(values.sum()) / how.divisor(len(text)) for values, text in zip(token_log_p, texts, strict=True)]
        expected = texts[max(range(len(texts)), key=scores.__getitem__)]
        assert best.tokens == [token for token in expected if token != stop]
        assert best.score == pytest.approx(max(scores), abs=1e-12)


def test_the_model_computes_in_float32_under_autocast() -> None:
    """The model's cells compute what PyTorch's do, and gradients flow."""
    loaded = make_bundle(RecurrentSeq2Seq(**LSTM)).float()
    body: Any = loaded.model
    assert isinstance(body.writing, nn.LSTM) and body.writing.input_size == 12
    with torch.autocast("cpu", torch.bfloat16):
        rows = body(Packed.of(SOURCE), Packed.of(TARGET))
        assert rows.dtype == torch.float32
        loaded.head(rows, Packed.of(TARGET)).float().sum().backward()  # type: ignore[misc]
    assert torch.allclose(rows, body(Packed.of(SOURCE), Packed.of(TARGET)))


def test_both_networks_have_dropout_between_layers_and_biases_of_0() -> None:
    loaded = make_bundle(RecurrentSeq2Seq(width=8, layers=2, dropout=0.5))
    body: Any = loaded.model
    assert body.reading.cells.dropout == body.writing.dropout == 0.5
    biases = [bias for name, bias in loaded.named_tensors().items() if "bias" in name]
    assert len(biases) > 10 and not any(bias.any() for bias in biases)


def test_invalid_configurations_traces_and_heads_are_refused() -> None:
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
    loaded, batches = make_bundle(MODELS["additive"]), (Packed.of(SOURCE), Packed.of(TARGET))
    for trace, message in (
        (Trace(what=["q", "weights", "states"]), "trace: this model has no q, states; it has weights alone"),
        (Trace(layers=[0, 1]), r"trace: layers \[1\] do not exist; give numbers from 0 to 0"),
        (Trace(heads=[2]), r"trace: heads \[2\] do not exist; give numbers from 0 to 0"),
        (Trace(sequences=[5]), r"trace: sequences \[5\] do not exist; give numbers from 0 to 4"),
    ):
        with pytest.raises(HeedfulError, match=message):
            loaded.model(*batches, trace=trace)
    loaded = make_bundle(MODELS["plain"])
    with pytest.raises(HeedfulError, match="trace: this model has no weights"):
        loaded.model(*batches, trace=Trace())
    with pytest.raises(HeedfulError, match="generates text"):
        with_head(loaded, "sequence_classification", labels=("a", "b"))
    with pytest.raises(HeedfulError, match="this model needs a target"):
        loaded.model(Packed.of(SOURCE))
    stack = StackConfig(width=6, layers=1, heads=1, head_width=6, inner_width=6)
    with pytest.raises(HeedfulError, match="train their own words"):
        ClassicConfig(embedding=EmbeddingConfig(vocabulary=9, width=6), encoder=stack, reader=RecurrentSeq2Seq())
