"""Trace: what it gives is what transformers computes eagerly; taking it changes nothing; only what was asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import heedful
from heedful.model import trace as trace_module
from heedful.model.decode import Greedy, generate
from heedful.model.trace import Trace
from heedful.packed import Packed
from tests.support.tiny_models import (
    ENCODER_DECODER,
    TINY,
    Float64Mode,
    decoder_input,
    hf_inputs,
    random_batch,
    random_sequences,
    save_tiny,
)

EVERYTHING = ("q", "k", "v", "scores", "weights", "states")
BARE = {family: next(iter(heedful.families.FAMILIES[family].heads)) for family in TINY}


def loaded_of(folder: Path, family: str) -> tuple[Any, heedful.ModelBundle]:
    reference = save_tiny(folder, family, BARE[family], torch.float64)
    return reference, heedful.load(folder, dtype=torch.float64)


@pytest.mark.parametrize("family", TINY)
def test_weights_and_states_equal_transformers(tmp_path: Path, family: str) -> None:
    reference, bundle = loaded_of(tmp_path, family)
    ids, types = random_sequences(family)
    batch, trace = random_batch(family), Trace(what=EVERYTHING)
    with torch.no_grad():
        bundle.model(batch, decoder_input(bundle, batch), trace=trace)
        for number in range(len(batch)):
            inputs = hf_inputs(family, ids[number], types[number])
            if family in ENCODER_DECODER:
                inputs["decoder_input_ids"] = torch.tensor(
                    [[reference.config.decoder_start_token_id, *ids[number][:-1]]]
                )
            with Float64Mode(torch.float64):
                out = reference(**inputs, output_attentions=True, output_hidden_states=True)
            if family in ENCODER_DECODER:
                sides = {
                    "encoder": out.encoder_attentions,
                    "decoder": out.decoder_attentions,
                    "cross": out.cross_attentions,
                }
                states = {"encoder": out.encoder_hidden_states, "decoder": out.decoder_hidden_states}
            else:
                part = "encoder" if bundle.model.encoder is not None else "decoder"
                sides, states = {part: out.attentions}, {part: out.hidden_states}
            for part, layers in sides.items():
                assert {key[1] for key in trace.attention if key[0] == part} == set(range(len(layers)))
                for layer, expected in enumerate(layers):
                    weights = trace.attention[part, layer, number].weights  # type: ignore[index]
                    assert weights is not None and (weights - expected[0]).abs().max() < 1e-12
            for part, state in states.items():
                for layer, expected in enumerate(state[:-1]):
                    assert (trace.states[part, layer, number] - expected[0]).abs().max() < 1e-12  # type: ignore[index]


@pytest.mark.parametrize("family", TINY)
def test_scores_are_products_and_weights_their_softmax(tmp_path: Path, family: str) -> None:
    """The weights and the values give the input of the next layer."""
    _, bundle = loaded_of(tmp_path, family)
    batch, trace = random_batch(family), Trace(what=EVERYTHING)
    with torch.no_grad():
        rows = bundle.model(batch, decoder_input(bundle, batch), trace=trace)
    assert trace.attention
    biased = False
    for attention in trace.attention.values():
        assert attention.q is not None and attention.k is not None and attention.v is not None
        assert attention.scores is not None and attention.weights is not None
        products = attention.scale * torch.einsum("ihd,jhd->hij", attention.q, attention.k)
        seen = attention.scores > -torch.inf
        biased = biased or not torch.allclose(products[seen], attention.scores[seen], atol=1e-12)
        assert (attention.scores.softmax(-1) - attention.weights).abs().max() < 1e-12
        assert (attention.weights.sum(-1) - 1).abs().max() < 1e-12
    assert biased == (family in ("deberta-v2", "mpnet", "t5", "xlnet"))
    last = "decoder" if bundle.model.decoder is not None else "encoder"
    ends = [trace.states[last, 3 if family in ENCODER_DECODER else 4, number] for number in range(len(batch))]  # type: ignore[index]
    assert torch.equal(torch.cat(ends), rows)


@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tracing_changes_no_output(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    save_tiny(tmp_path, family, BARE[family])
    bundle, batch = heedful.load(tmp_path, dtype=dtype), random_batch(family)
    with torch.no_grad():
        before = bundle.model(batch, decoder_input(bundle, batch))
        trace = Trace(what=EVERYTHING)
        assert torch.equal(bundle.model(batch, decoder_input(bundle, batch), trace=trace), before)
    assert {key[2] for key in trace.attention} == set(range(len(batch)))


def test_only_what_was_asked_for_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, bundle = loaded_of(tmp_path, "t5")
    batch, whole = random_batch("t5"), Trace(what=EVERYTHING)
    bundle.model(batch, decoder_input(bundle, batch), trace=whole)
    calls = []
    attention_logits = trace_module.attention_logits

    def counted(*arguments: Any, **more: Any) -> Any:
        calls.append((arguments[3], more["rows"].tolist(), more["heads"].tolist()))
        return attention_logits(*arguments, **more)

    monkeypatch.setattr(trace_module, "attention_logits", counted)
    trace = Trace(what=["scores"], parts=["cross"], layers=[1], heads=[2, 0], sequences=[1, 3], rows=[4, 20])
    bundle.model(batch, decoder_input(bundle, batch), trace=trace)
    assert calls == [(1, [4, 20], [2, 0]), (3, [4], [2, 0])]  # sequence 3 has 12 rows
    assert list(trace.attention) == [("cross", 1, 1), ("cross", 1, 3)] and not trace.states
    attention, expected = trace.attention["cross", 1, 1], whole.attention["cross", 1, 1]
    assert (
        attention.weights is None
        and attention.q is None
        and attention.scores is not None
        and expected.scores is not None
    )
    assert (attention.scores - expected.scores[[2, 0]][:, [4, 20]]).abs().max() < 1e-12

    calls.clear()
    some = Trace(what=["q", "states"], layers=[0])
    bundle.model(batch, decoder_input(bundle, batch), trace=some)
    assert not calls and {key[:2] for key in some.states} == {("encoder", 0), ("decoder", 0)}
    with pytest.raises(heedful.HeedfulError, match=r"trace: heads \[4\] do not exist; give numbers from 0 to 3"):
        bundle.model(batch, decoder_input(bundle, batch), trace=Trace(heads=[4]))
    with pytest.raises(heedful.HeedfulError, match=r"trace: layers \[4, -1\] do not exist; give numbers from 0 to 3"):
        bundle.model(batch, decoder_input(bundle, batch), trace=Trace(layers=[0, 4, -1]))
    last = Trace(what=["states"], layers=[4])  # what comes out of the last block
    bundle.model(batch, decoder_input(bundle, batch), trace=last)
    assert set(last.states) == {("encoder", 4, number) for number in range(len(batch))}  # the decoder has fewer


def test_a_trace_during_generation(tmp_path: Path) -> None:
    """The weights of a step are the last rows of those of the whole, cross-attention too."""
    reference = save_tiny(tmp_path, "t5", "T5ForConditionalGeneration", torch.float64)
    del reference
    bundle, source = heedful.load(tmp_path, dtype=torch.float64), Packed.of([[5, 6, 7, 8], [9, 10]])
    assert bundle.head is not None
    written = generate(
        bundle.model, bundle.head, Packed.of([[0], [0]]), Greedy(), max_new_tokens=4, stop=[], source=source
    )
    tokens = [[0, *output[0].tokens[:-1]] for output in written]
    whole = Trace()
    bundle.model(source, Packed.of(tokens), trace=whole)
    cache = bundle.model.init_cache(source)
    for step in range(4):
        trace = Trace()
        bundle.model.decode_step(Packed.of([[token[step]] for token in tokens]), cache, trace=trace)
        for key, attention in trace.attention.items():
            expected = whole.attention[key].weights
            assert attention.weights is not None and expected is not None
            seen = step + 1 if key[0] == "decoder" else expected.shape[-1]
            assert (attention.weights[:, 0] - expected[:, step, :seen]).abs().max() < 1e-12
