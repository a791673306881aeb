"""Greedy decoding by recorded steps, tested on a CPU: equal tokens, and no copies between host and GPU in a step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import heedful
from heedful.model import decode, recorded_decoding
from heedful.model.decode import Greedy, generate
from heedful.model.decode_step import init_cache, next_log_probabilities, sorted_candidates, top_candidates
from heedful.model.kv_cache import GROWTH
from heedful.model.recorded_decoding import RecordedSteps, can_record_steps, worth_recording
from heedful.packed import Packed
from tests.infer.test_cuda_graphs import Crossings
from tests.support.tiny_models import save_tiny

FAMILIES = {"gpt2": "GPT2LMHeadModel", "t5": "T5ForConditionalGeneration", "qwen3": "Qwen3ForCausalLM"}
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15, 16], [17, 18]]


def loaded(folder: Path, family: str) -> heedful.ModelBundle:
    save_tiny(folder, family, FAMILIES[family], torch.float64)
    return heedful.load(folder, dtype=torch.float64).eval()


def inputs(family: str) -> dict[str, Packed]:
    """Return the inputs of `generate`; an encoder-decoder model reads the prompts as source."""
    if family != "t5":
        return {"prompts": Packed.of(PROMPTS)}
    return {"prompts": Packed.of([[0]] * len(PROMPTS)), "source": Packed.of(PROMPTS)}


def steps_after_prompts(bundle: heedful.ModelBundle, batches: dict[str, Packed], steps: int) -> RecordedSteps:
    """Decode the first token after each prompt, and return the recorded steps for the next ones."""
    assert bundle.head is not None
    cache = init_cache(bundle.model, batches["prompts"], batches.get("source"))
    log_p = next_log_probabilities(bundle.model, bundle.head, batches["prompts"], cache)
    return RecordedSteps(bundle.model, bundle.head, cache, log_p.argmax(-1), steps)


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_choose_the_tokens_of_decoding(family: str, tmp_path: Path) -> None:
    bundle, max_new_tokens = loaded(tmp_path, family), 20
    assert bundle.head is not None and can_record_steps(bundle.model)
    expected = generate(
        bundle.model, bundle.head, method=Greedy(), max_new_tokens=max_new_tokens, stop=[], **inputs(family)
    )
    steps = steps_after_prompts(bundle, inputs(family), max_new_tokens - 1)
    tokens_of_steps = [steps.tokens.tolist()]
    for _ in range(max_new_tokens - 1):
        with torch.inference_mode():
            tokens, log_probabilities = steps.run().tolist()
        tokens_of_steps.append([int(token) for token in tokens])
        assert all(log_p < 0 for log_p in log_probabilities)
    texts = [list(tokens) for tokens in zip(*tokens_of_steps, strict=True)]
    assert texts == [outputs[0].tokens for outputs in expected]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_copies_nothing_between_host_and_device(family: str, tmp_path: Path) -> None:
    bundle = loaded(tmp_path, family)
    bundle.to("meta", torch.bfloat16)  # in place of CUDA: another device than the host
    steps = steps_after_prompts(bundle, {name: batch.to("meta") for name, batch in inputs(family).items()}, 50)
    with torch.inference_mode():
        steps.run()
        with Crossings() as crossings:
            result = steps.run()
    assert result.shape == (2, len(PROMPTS)) and not crossings.operators, crossings.operators


@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_decoding_generates_the_same_texts(
    family: str, stop: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is recorded after 2 tokens, after each 7 steps, and when half of the sequences are finished."""
    bundle, max_new_tokens = loaded(tmp_path, family), 24
    head, recorded_sequences = bundle.head, list[int]()
    assert head is not None

    def generated(stopping: list[int]) -> list[tuple[list[int], bool, float]]:
        texts = generate(
            bundle.model, head, method=Greedy(), max_new_tokens=max_new_tokens, stop=stopping, **inputs(family)
        )
        return [(text.tokens, text.complete, pytest.approx(text.log_probability, abs=1e-9)) for (text,) in texts]

    def record(steps: RecordedSteps) -> None:
        recorded_sequences.append(len(steps.tokens))
        steps._graph = SimpleNamespace(replay=lambda: steps._result.copy_(steps.run()))  # type: ignore[assignment]

    tokens = [text_tokens for text_tokens, *_ in generated([])]
    stopping = [tokens[0][5], tokens[2][9], tokens[3][15]] if stop else []
    expected = generated(stopping)
    monkeypatch.setattr(RecordedSteps, "record", record)
    monkeypatch.setattr(decode, "worth_recording", lambda device, steps, generated: generated >= 2)
    monkeypatch.setattr(recorded_decoding, "MAX_STEPS", 7)
    assert generated(stopping) == expected
    assert len(recorded_sequences) >= (1 if stop else 3) and recorded_sequences[0] <= len(PROMPTS)


def test_when_a_step_is_recorded(tmp_path: Path) -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert worth_recording(cuda, 100, 8) and not worth_recording(cpu, 100, 8)
    assert not worth_recording(cuda, 31, 8) and not worth_recording(cuda, 100, 7)
    save_tiny(tmp_path, "xlnet", "XLNetLMHeadModel", torch.float32)
    assert not can_record_steps(heedful.load(tmp_path).model)


def test_candidates_by_a_sort_are_the_same() -> None:
    rows = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)).round(decimals=1).double()
    rows[1, 7], rows[2] = torch.nan, 0.5
    for count in (1, 6, 40):
        by_sort, by_top_k = (
            [repr(candidates) for candidates in find(rows, count)] for find in (sorted_candidates, top_candidates)
        )
        assert by_sort == by_top_k


def test_the_cache_grows_rarely(tmp_path: Path) -> None:
    bundle = loaded(tmp_path, "qwen3")
    cache = init_cache(bundle.model, Packed.of([[5]]), None)
    slots = []
    with torch.inference_mode():
        for _ in range(4 * GROWTH):
            bundle.model.decode_step(Packed.of([[5]]), cache)
            slots.append(cache._self_attention[0].keys.shape[1])
    assert sorted(set(slots)) == [64, 128, 192, 320] and cache.lengths == [256]
    assert cache.lengths_on(torch.device("cpu")).tolist() == [256]
