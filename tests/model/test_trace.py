"""Trace: recorded values equal those of transformers, no output changes, and only selected values are computed."""

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

ALL_ITEMS = ("q", "k", "v", "scores", "weights", "states")
BARE_ARCHITECTURES = {family: next(iter(heedful.families.FAMILIES[family].heads)) for family in TINY}


def reference_and_bundle(folder: Path, family: str) -> tuple[Any, heedful.ModelBundle]:
    reference = save_tiny(folder, family, BARE_ARCHITECTURES[family], torch.float64)
    return reference, heedful.load(folder, dtype=torch.float64)


@pytest.mark.parametrize("family", TINY)
def test_weights_and_states_equal_transformers(tmp_path: Path, family: str) -> None:
    reference, bundle = reference_and_bundle(tmp_path, family)
    ids, types = random_sequences(family)
    batch, trace = random_batch(family), Trace(what=ALL_ITEMS)
    with torch.no_grad():
        bundle.model(batch, decoder_input(bundle, batch), trace=trace)
        for sequence in range(len(batch)):
            inputs = hf_inputs(family, ids[sequence], types[sequence])
            if family in ENCODER_DECODER:
                inputs["decoder_input_ids"] = torch.tensor(
                    [[reference.config.decoder_start_token_id, *ids[sequence][:-1]]]
                )
            with Float64Mode(torch.float64):
                out = reference(**inputs, output_attentions=True, output_hidden_states=True)
            if family in ENCODER_DECODER:
                attentions = {
                    "encoder": out.encoder_attentions,
                    "decoder": out.decoder_attentions,
                    "cross": out.cross_attentions,
                }
                states = {"encoder": out.encoder_hidden_states, "decoder": out.decoder_hidden_states}
            else:
                stack = "encoder" if bundle.model.encoder is not None else "decoder"
                attentions, states = {stack: out.attentions}, {stack: out.hidden_states}
            for part, layers in attentions.items():
                assert {key[1] for key in trace.attention if key[0] == part} == set(range(len(layers)))
                for layer, expected in enumerate(layers):
                    weights = trace.attention[part, layer, sequence].weights  # type: ignore[index]
                    assert weights is not None and (weights - expected[0]).abs().max() < 1e-12
            for part, layer_states in states.items():
                for layer, expected in enumerate(layer_states[:-1]):
                    assert (trace.states[part, layer, sequence] - expected[0]).abs().max() < 1e-12  # type: ignore[index]


@pytest.mark.parametrize("family", TINY)
def test_scores_are_products_and_weights_their_softmax(tmp_path: Path, family: str) -> None:
    """Some families add a bias to the products. The recorded output of the last block is the model's output."""
    _, bundle = reference_and_bundle(tmp_path, family)
    batch, trace = random_batch(family), Trace(what=ALL_ITEMS)
    with torch.no_grad():
        rows = bundle.model(batch, decoder_input(bundle, batch), trace=trace)
    assert trace.attention
    has_bias = False
    for attention in trace.attention.values():
        assert attention.q is not None and attention.k is not None and attention.v is not None
        assert attention.scores is not None and attention.weights is not None
        products = attention.scale * torch.einsum("ihd,jhd->hij", attention.q, attention.k)
        visible = attention.scores > -torch.inf
        has_bias = has_bias or not torch.allclose(products[visible], attention.scores[visible], atol=1e-12)
        assert (attention.scores.softmax(-1) - attention.weights).abs().max() < 1e-12
        assert (attention.weights.sum(-1) - 1).abs().max() < 1e-12
    assert has_bias == (family in ("deberta-v2", "mpnet", "t5", "xlnet"))
    last_part: Any = "decoder" if bundle.model.decoder is not None else "encoder"
    layers = 3 if family in ENCODER_DECODER else 4
    outputs = [trace.states[last_part, layers, sequence] for sequence in range(len(batch))]
    assert torch.equal(torch.cat(outputs), rows)


@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tracing_changes_no_output(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    save_tiny(tmp_path, family, BARE_ARCHITECTURES[family])
    bundle, batch = heedful.load(tmp_path, dtype=dtype), random_batch(family)
    with torch.no_grad():
        before = bundle.model(batch, decoder_input(bundle, batch))
        trace = Trace(what=ALL_ITEMS)
        assert torch.equal(bundle.model(batch, decoder_input(bundle, batch), trace=trace), before)
    assert {key[2] for key in trace.attention} == set(range(len(batch)))


def test_only_selected_values_are_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, bundle = reference_and_bundle(tmp_path, "t5")
    batch, whole = random_batch("t5"), Trace(what=ALL_ITEMS)
    bundle.model(batch, decoder_input(bundle, batch), trace=whole)
    calls = []
    attention_logits = trace_module.attention_logits

    def record_call(*arguments: Any, **keywords: Any) -> Any:
        sequence, rows, heads = arguments[3], keywords["rows"].tolist(), keywords["heads"].tolist()
        calls.append((sequence, rows, heads))
        return attention_logits(*arguments, **keywords)

    monkeypatch.setattr(trace_module, "attention_logits", record_call)
    trace = Trace(what=["scores"], parts=["cross"], layers=[1], heads=[2, 0], sequences=[1, 3], rows=[4, 20])
    bundle.model(batch, decoder_input(bundle, batch), trace=trace)
    assert calls == [(1, [4, 20], [2, 0]), (3, [4], [2, 0])]  # sequence 3 has 12 rows
    assert list(trace.attention) == [("cross", 1, 1), ("cross", 1, 3)] and not trace.states
    attention, expected = trace.attention["cross", 1, 1], whole.attention["cross", 1, 1]
    assert attention.weights is None and attention.q is None
    assert attention.scores is not None and expected.scores is not None
    assert (attention.scores - expected.scores[[2, 0]][:, [4, 20]]).abs().max() < 1e-12

    calls.clear()
    without_scores = Trace(what=["q", "states"], layers=[0])
    bundle.model(batch, decoder_input(bundle, batch), trace=without_scores)
    assert not calls and {key[:2] for key in without_scores.states} == {("encoder", 0), ("decoder", 0)}
    with pytest.raises(heedful.HeedfulError, match=r"trace: heads \[4\] do not exist; give numbers from 0 to 3"):
        bundle.model(batch, decoder_input(bundle, batch), trace=Trace(heads=[4]))
    with pytest.raises(heedful.HeedfulError, match=r"trace: layers \[4, -1\] do not exist; give numbers from 0 to 3"):
        bundle.model(batch, decoder_input(bundle, batch), trace=Trace(layers=[0, 4, -1]))
    output = Trace(what=["states"], layers=[4])  # the output of the encoder's last block
    bundle.model(batch, decoder_input(bundle, batch), trace=output)
    assert set(output.states) == {("encoder", 4, sequence) for sequence in range(len(batch))}  # the decoder has fewer


def test_a_trace_during_generation(tmp_path: Path) -> None:
    """The weights of a step are the last row of the weights of the whole text, in cross-attention too."""
    save_tiny(tmp_path, "t5", "T5ForConditionalGeneration", torch.float64)
    bundle, source = heedful.load(tmp_path, dtype=torch.float64), Packed.of([[5, 6, 7, 8], [9, 10]])
    assert bundle.head is not None
    outputs = generate(
        bundle.model, bundle.head, Packed.of([[0], [0]]), Greedy(), max_new_tokens=4, stop=[], source=source
    )
    tokens = [[0, *texts[0].tokens[:-1]] for texts in outputs]
    whole = Trace()
    bundle.model(source, Packed.of(tokens), trace=whole)
    cache = bundle.model.init_cache(source)
    for step in range(4):
        trace = Trace()
        bundle.model.decode_step(Packed.of([[text[step]] for text in tokens]), cache, trace=trace)
        for key, attention in trace.attention.items():
            expected = whole.attention[key].weights
            assert attention.weights is not None and expected is not None
            num_keys = step + 1 if key[0] == "decoder" else expected.shape[-1]
            assert (attention.weights[:, 0] - expected[:, step, :num_keys]).abs().max() < 1e-12
