"""Greedy decoding, sampling and beam search, compared with transformers and with the same model without a cache."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import heedful
from heedful.checkpoint import BundleConfig, create
from heedful.model.config import EmbeddingConfig, ModelConfig, NextToken, Rotary, Shaw, StackConfig
from heedful.model.decode import (
    BeamSearch,
    DecodingMethod,
    GeneratedTokens,
    Greedy,
    Sampling,
    beam_search,
    decode,
    generate,
    sample_next,
    stream,
)
from heedful.model.vaswani import VaswaniSize, vaswani_config
from heedful.packed import Packed
from tests.support.tiny_models import Float64Mode, save_tiny

MAX_NEW_TOKENS = 12
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15, 16], [17, 18]]
FAMILIES = {"gpt2": "GPT2LMHeadModel", "t5": "T5ForConditionalGeneration", "qwen3": "Qwen3ForCausalLM"}


def load_reference(folder: Path, family: str) -> tuple[Any, heedful.ModelBundle, int]:
    """Save a tiny model of transformers, and load it.

    Returns:
        The model of transformers, our model, and a stopping token: one that is generated after some prompts, but not
        after all of them.
    """
    reference = save_tiny(folder, family, FAMILIES[family], torch.float64)
    bundle = heedful.load(folder, dtype=torch.float64)
    assert bundle.head is not None
    generated = [
        set(output[0].tokens[1:])
        for output in generate(
            bundle.model,
            bundle.head,
            method=Greedy(),
            max_new_tokens=MAX_NEW_TOKENS,
            stop=[],
            **decoding_inputs(family),
        )
    ]
    prompt_counts = Counter(token for tokens in generated for token in tokens)
    return reference, bundle, min(token for token, count in prompt_counts.items() if count < len(PROMPTS))


def decoding_inputs(family: str, prompts: list[list[int]] = PROMPTS) -> dict[str, Packed]:
    """Return the inputs of `generate`; an encoder-decoder model reads the prompts as source."""
    if family != "t5":
        return {"prompts": Packed.of(prompts)}
    return {"prompts": Packed.of([[0]] * len(prompts)), "source": Packed.of(prompts)}


def reference_generate(reference: Any, family: str, prompt: list[int], stop: int, **settings: Any) -> Any:
    """Generate text after one prompt by transformers."""
    with torch.no_grad(), Float64Mode(torch.float64):
        return reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=MAX_NEW_TOKENS,
            eos_token_id=stop,
            pad_token_id=97,
            return_dict_in_generate=True,
            output_scores=True,
            **settings,
        )


def new_tokens(tokens: list[int], family: str, prompt: list[int], stop: int) -> list[int]:
    """Return the generated tokens in the output of transformers, without prompt, padding and stopping token."""
    generated = tokens[1 if family == "t5" else len(prompt) :]
    generated = [token for token in generated if token != 97]
    return generated[: generated.index(stop)] if stop in generated else generated


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_decoding_equals_transformers(tmp_path: Path, family: str) -> None:
    reference, bundle, stop = load_reference(tmp_path, family)
    assert bundle.head is not None
    outputs = generate(
        bundle.model,
        bundle.head,
        method=Greedy(),
        max_new_tokens=MAX_NEW_TOKENS,
        stop=[stop],
        **decoding_inputs(family),
    )
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = reference_generate(reference, family, prompt, stop, do_sample=False).sequences[0].tolist()
        assert output[0].tokens == new_tokens(expected, family, prompt, stop)
    assert any(output[0].complete for output in outputs)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("method", "reference_settings"),
    [
        (BeamSearch(num_beams=3, num_return_sequences=3), {}),
        (BeamSearch(num_beams=4, num_return_sequences=2, length_penalty=0.4), {"length_penalty": 0.4}),
        (BeamSearch(num_beams=2, num_return_sequences=2, early_stopping=True), {"early_stopping": True}),
        (
            BeamSearch(num_beams=3, num_return_sequences=3, early_stopping="never", length_penalty=2.0),
            {"early_stopping": "never", "length_penalty": 2.0},
        ),
        (
            BeamSearch(num_beams=3, num_return_sequences=3, normalization="none", early_stopping="never"),
            {"early_stopping": "never", "length_penalty": 0.0},
        ),
    ],
)
def test_beam_search_equals_transformers(
    tmp_path: Path, family: str, method: BeamSearch, reference_settings: dict[str, Any]
) -> None:
    reference, bundle, stop = load_reference(tmp_path, family)
    assert bundle.head is not None
    outputs = beam_search(
        bundle.model, bundle.head, method=method, max_new_tokens=MAX_NEW_TOKENS, stop=[stop], **decoding_inputs(family)
    )
    for prompt, beams in zip(PROMPTS, outputs, strict=True):
        expected = reference_generate(
            reference,
            family,
            prompt,
            stop,
            num_beams=method.num_beams,
            num_return_sequences=method.num_return_sequences,
            do_sample=False,
            **reference_settings,
        )
        for beam, tokens in zip(beams, expected.sequences.tolist(), strict=True):
            assert beam.tokens == new_tokens(tokens, family, prompt, stop)
        for beam, score in zip(beams, expected.sequences_scores.tolist(), strict=True):
            assert abs(beam.score - score) < 1e-5  # transformers sums in float32


@pytest.mark.parametrize("family", FAMILIES)
def test_one_beam_equals_greedy_decoding(tmp_path: Path, family: str) -> None:
    _, bundle, stop = load_reference(tmp_path, family)
    assert bundle.head is not None
    greedy = generate(
        bundle.model,
        bundle.head,
        method=Greedy(),
        max_new_tokens=MAX_NEW_TOKENS,
        stop=[stop],
        **decoding_inputs(family),
    )
    beam = generate(
        bundle.model,
        bundle.head,
        method=BeamSearch(num_beams=1),
        max_new_tokens=MAX_NEW_TOKENS,
        stop=[stop],
        **decoding_inputs(family),
    )
    assert [output[0].tokens for output in greedy] == [output[0].tokens for output in beam]
    for from_greedy, from_beam in zip(greedy, beam, strict=True):
        assert abs(from_greedy[0].log_probability - from_beam[0].log_probability) < 1e-9


@pytest.mark.parametrize("family", FAMILIES)
def test_one_beam_equals_greedy_decoding_if_tokens_are_equally_likely(tmp_path: Path, family: str) -> None:
    """Beam search and greedy decoding choose the smallest id, with equal scores and with rounded ones."""
    _, bundle, _ = load_reference(tmp_path, family)
    assert bundle.head is not None
    head: Any = bundle.head
    for scores in (lambda rows, batch: head(rows, batch) * 0, lambda rows, batch: head(rows, batch).round()):
        arguments: dict[str, Any] = {"max_new_tokens": MAX_NEW_TOKENS, "stop": [], **decoding_inputs(family)}
        greedy = generate(bundle.model, scores, method=Greedy(), **arguments)
        beam = generate(bundle.model, scores, method=BeamSearch(num_beams=1), **arguments)
        assert [output[0].tokens for output in greedy] == [output[0].tokens for output in beam]


STACK: dict[str, Any] = {"width": 16, "layers": 2, "heads": 2, "head_width": 8, "inner_width": 24, "causal": True}
OTHER_MODELS: dict[str, ModelConfig] = {
    "rotary, window": ModelConfig(
        embedding=EmbeddingConfig(vocabulary=40, width=16),
        decoder=StackConfig(**STACK, relation=Rotary(local_base=50.0), window=4, global_every=2, norm_at="pre"),
    ),
    "shaw": ModelConfig(
        embedding=EmbeddingConfig(vocabulary=40, width=16), decoder=StackConfig(**STACK, relation=Shaw(reach=3))
    ),
}


def make_bundle(name: str, folder: Path) -> tuple[heedful.ModelBundle, int]:
    """Return a tiny model, and a stopping token."""
    if name in FAMILIES:
        _, bundle, stop = load_reference(folder, name)
        return bundle, stop
    if name == "transformer":
        model = vaswani_config(VaswaniSize(layers=6, width=16, heads=2, inner=24, dropout=0.1), 37_000)
    else:
        model = OTHER_MODELS[name]
    return create(BundleConfig(family="heedful", model=model, head=NextToken()), seed=3).double().eval(), 1


@pytest.mark.parametrize("name", [*FAMILIES, "transformer", *OTHER_MODELS])
def test_the_cache_changes_no_distribution(tmp_path: Path, name: str) -> None:
    """The distribution in each step equals that of the whole sequence, computed alone and without a cache."""
    bundle, stop = make_bundle(name, tmp_path)
    assert bundle.head is not None
    inputs = decoding_inputs("t5" if bundle.model.encoder is not None else "gpt2")
    texts = [list(prompt) for prompt in ([[0]] * len(PROMPTS) if "source" in inputs else PROMPTS)]
    compared = 0
    for step in stream(
        bundle.model,
        bundle.head,
        method=Sampling(temperature=2.0),
        max_new_tokens=9,
        stop=[stop],
        distribution=True,
        seed=5,
        **inputs,
    ):
        assert step.distribution is not None
        for row, sequence in enumerate(step.sequences):
            alone = Packed.of([texts[sequence]])
            with torch.no_grad():
                outputs = bundle(Packed.of([PROMPTS[sequence]]), alone) if "source" in inputs else bundle(alone)
            expected = outputs[-1].log_softmax(-1)
            assert (step.distribution[row] - expected).abs().max() < 1e-10
            texts[sequence].append(step.tokens[row])
            assert abs(step.log_probabilities[row] - expected[step.tokens[row]]) < 1e-10
            compared += 1
    assert compared > 20


@pytest.mark.parametrize(
    "method", [Greedy(), Sampling(temperature=1.5, top_k=20), BeamSearch(num_beams=3, num_return_sequences=2)]
)
def test_generated_text_depends_on_its_prompt_and_the_seed_only(tmp_path: Path, method: DecodingMethod) -> None:
    bundle, stop = make_bundle("gpt2", tmp_path)
    head = bundle.head
    assert head is not None

    def generated_tokens(prompts: list[list[int]], seed: int = 1) -> list[list[list[int]]]:
        """Return the tokens of each text after each prompt."""
        outputs = generate(
            bundle.model, head, Packed.of(prompts), method, max_new_tokens=MAX_NEW_TOKENS, stop=[stop], seed=seed
        )
        return [[text.tokens for text in texts] for texts in outputs]

    tokens = generated_tokens(PROMPTS)
    assert generated_tokens(PROMPTS) == tokens
    assert generated_tokens(PROMPTS[:2]) == tokens[:2]
    assert generated_tokens(PROMPTS[::-1]) == tokens[::-1]
    depends_on_seed = generated_tokens(PROMPTS, seed=2) != tokens
    assert depends_on_seed == isinstance(method, Sampling)


METHODS: list[DecodingMethod] = [
    Greedy(),
    Sampling(temperature=1.5),
    Sampling(temperature=0.8, top_k=20, top_p=0.9),
    BeamSearch(num_beams=3, num_return_sequences=3),
    BeamSearch(num_beams=2, num_return_sequences=2, early_stopping=True),
    BeamSearch(num_beams=4, early_stopping="never", length_penalty=2.0),
]


def as_tuples(texts: list[GeneratedTokens]) -> list[tuple[list[int], float, float, bool]]:
    """Return all attributes of texts, for exact comparison."""
    return [(text.tokens, text.log_probability, text.score, text.complete) for text in texts]


@pytest.mark.parametrize("name", ["gpt2", "t5", "transformer"])
def test_decodings_that_take_turns_write_what_each_writes_alone(tmp_path: Path, name: str) -> None:
    """Decodings of one model, by all methods and to several lengths, take steps in turn, with bitwise equal results."""
    bundle, stop = make_bundle(name, tmp_path)
    assert bundle.head is not None
    batches = {
        (seed, max_new_tokens): {
            "method": method,
            "max_new_tokens": max_new_tokens,
            "stop": [stop],
            "seed": seed,
            **decoding_inputs("gpt2" if name == "gpt2" else "t5"),
        }
        for seed, method in enumerate(METHODS)
        for max_new_tokens in (1, 4, 11)
    }
    alone = {key: generate(bundle.model, bundle.head, **batch) for key, batch in batches.items()}
    decodings = {key: decode(bundle.model, bundle.head, **batch) for key, batch in batches.items()}
    outputs: dict[tuple[int, int], dict[int, list[GeneratedTokens]]] = {key: {} for key in batches}
    early = turns = 0  # early: how often a sequence was finished before the others of its batch
    while running := [key for key, decoding in decodings.items() if not decoding.done]:
        for key in running[turns % 2 :: 2]:
            finished = decodings[key].step()
            early += bool(finished) and not decodings[key].done
            assert not set(finished) & set(outputs[key])
            outputs[key] |= finished
        turns += 1
    for key, expected in alone.items():
        for sequence, texts in enumerate(expected):
            assert as_tuples(outputs[key][sequence]) == as_tuples(texts)
        assert decodings[key].steps <= batches[key]["max_new_tokens"]
    assert (early or name == "transformer") and turns > 11


@pytest.mark.parametrize(
    "method", [Greedy(), Sampling(temperature=1.5), BeamSearch(num_beams=3, num_return_sequences=2)]
)
def test_cancelled_sequences_leave_the_batch_and_do_not_change_the_others(
    tmp_path: Path, method: DecodingMethod
) -> None:
    bundle, stop = make_bundle("gpt2", tmp_path)
    assert bundle.head is not None
    row_counts: list[int] = []  # rows that are scored in each step

    def score(states: torch.Tensor, batch: Packed) -> torch.Tensor:
        row_counts.append(len(states))
        scores: torch.Tensor = bundle.head(states, batch)  # type: ignore[misc]
        return scores

    prompts = Packed.of(PROMPTS)
    alone = generate(bundle.model, bundle.head, prompts, method, max_new_tokens=MAX_NEW_TOKENS, stop=[stop], seed=1)
    decoding = decode(bundle.model, score, prompts, method, max_new_tokens=MAX_NEW_TOKENS, stop=[stop], seed=1)
    outputs = {}
    for step in range(MAX_NEW_TOKENS):
        if step == 2:
            decoding.cancel([0, 2])
        if not decoding.done:
            outputs |= decoding.step()
    assert set(outputs) <= {1, 3}
    for sequence, texts in outputs.items():
        assert [text.tokens for text in texts] == [text.tokens for text in alone[sequence]]
    assert max(row_counts[3:], default=0) <= 2 * (method.num_beams if isinstance(method, BeamSearch) else 1)
    decoding = decode(bundle.model, score, prompts, method, max_new_tokens=MAX_NEW_TOKENS, stop=[stop])
    decoding.cancel(range(4))
    assert decoding.done


@pytest.mark.parametrize(
    "method",
    [
        Sampling(temperature=0.7),
        Sampling(top_k=5),
        Sampling(top_p=0.6),
        Sampling(temperature=1.4, top_k=7, top_p=0.9),
        Sampling(top_k=500),
    ],
)
def test_sampled_tokens_have_the_distribution_of_transformers(method: Sampling) -> None:
    """Logits warpers of transformers define each token's probability; of a fine grid of numbers, it gets that share."""
    from transformers.generation import logits_process

    torch.manual_seed(0)
    log_p = (torch.randn(1, 30, dtype=torch.float64) * 2).log_softmax(-1)
    warped = log_p / method.temperature
    if method.top_k is not None:
        warped = logits_process.TopKLogitsWarper(method.top_k)(None, warped)  # type: ignore[arg-type]
    if method.top_p is not None:
        warped = logits_process.TopPLogitsWarper(method.top_p)(None, warped)  # type: ignore[arg-type]
    count = 20_000
    uniform = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    sampled = sample_next(log_p.expand(count, -1), method, uniform)
    shares = torch.bincount(sampled, minlength=30) / count
    assert (shares - warped.softmax(-1)[0]).abs().max() < 2e-4


def test_invalid_inputs_and_settings_are_refused() -> None:
    bundle, _ = make_bundle("shaw", Path())
    assert bundle.head is not None
    with pytest.raises(heedful.HeedfulError, match="takes no source: only a model with an encoder reads one"):
        generate(
            bundle.model, bundle.head, Packed.of([[1]]), Greedy(), max_new_tokens=2, stop=[0], source=Packed.of([[1]])
        )
    with pytest.raises(heedful.HeedfulError, match=r"sequences \[1\] are empty"):
        generate(bundle.model, bundle.head, Packed.of([[1], []]), Greedy(), max_new_tokens=2, stop=[0])
    with pytest.raises(heedful.HeedfulError, match=r"call eval\(\) before it generates"):
        generate(bundle.train().model, bundle.head, Packed.of([[1]]), Greedy(), max_new_tokens=2, stop=[0])
    for wrong in ({"temperature": 0.0}, {"temperature": 1e-7}, {"temperature": math.nan}, {"top_k": 0}, {"top_p": 1.5}):
        with pytest.raises(heedful.HeedfulError, match=f"{next(iter(wrong))} is"):
            Sampling(**wrong)  # type: ignore[arg-type]
    for length_penalty in (float("nan"), 1e9):
        with pytest.raises(heedful.HeedfulError, match=r"length_penalty is .*; expected a number from -10 to 10"):
            BeamSearch(length_penalty=length_penalty)
    with pytest.raises(heedful.HeedfulError, match="num_return_sequences is 3"):
        BeamSearch(num_beams=2, num_return_sequences=3)


@pytest.mark.parametrize("method", [Greedy(), BeamSearch()])
def test_sources_may_all_be_empty(tmp_path: Path, method: DecodingMethod) -> None:
    bundle, stop = make_bundle("transformer", tmp_path)
    assert bundle.head is not None
    alone = generate(
        bundle.model, bundle.head, Packed.of([[1]]), method, max_new_tokens=5, stop=[stop], source=Packed.of([[]])
    )
    beside = generate(
        bundle.model,
        bundle.head,
        Packed.of([[1], [1]]),
        method,
        max_new_tokens=5,
        stop=[stop],
        source=Packed.of([[], [5]]),
    )
    assert [output.tokens for output in alone[0]] == [output.tokens for output in beside[0]]


@pytest.mark.parametrize("method", [Greedy(), Sampling(), BeamSearch()])
def test_each_prompt_has_a_source(tmp_path: Path, method: DecodingMethod) -> None:
    bundle, _ = make_bundle("transformer", tmp_path)
    assert bundle.head is not None
    with pytest.raises(heedful.HeedfulError, match=r"^there are 2 prompts, but 1 sources: give each prompt its own$"):
        generate(
            bundle.model,
            bundle.head,
            Packed.of([[1], [1]]),
            method,
            max_new_tokens=2,
            stop=[0],
            source=Packed.of([[5]]),
        )


@pytest.mark.parametrize("method", [Greedy(), Sampling(), BeamSearch(num_beams=3, num_return_sequences=2)])
def test_generation_ends_with_the_models_positions(tmp_path: Path, method: DecodingMethod) -> None:
    """There are 40 positions, for 3 prompt tokens and 38 generated ones; the last one is not read again."""
    bundle, _ = make_bundle("gpt2", tmp_path)
    assert bundle.head is not None
    prompts = Packed.of([[5, 6, 7], [8] * 40, [9] * 30])
    outputs = generate(bundle.model, bundle.head, prompts, method, max_new_tokens=60, stop=[])
    assert [len(output[0].tokens) for output in outputs] == [38, 1, 11]
    assert not any(output.complete for beams in outputs for output in beams)
    with pytest.raises(heedful.HeedfulError, match="has 41 tokens, but the model has positions for 40"):
        generate(bundle.model, bundle.head, Packed.of([[5] * 41]), method, max_new_tokens=60, stop=[])


def test_divisors_of_each_normalization() -> None:
    assert BeamSearch(normalization="none", length_penalty=3.0).divisor(7) == 1.0
    assert BeamSearch(normalization="power", length_penalty=0.5).divisor(9) == 3.0
    assert BeamSearch(normalization="gnmt", length_penalty=2.0).divisor(7) == 4.0  # ((5 + 7) / 6)^2


def test_scores_of_beams_are_divided_by_the_divisor_and_sorted(tmp_path: Path) -> None:
    """The stopping token of a complete text counts for the divisor."""
    bundle, stop = make_bundle("gpt2", tmp_path)
    assert bundle.head is not None
    method = BeamSearch(
        num_beams=4, num_return_sequences=4, normalization="gnmt", length_penalty=1.5, early_stopping="never"
    )
    prompts = Packed.of(PROMPTS)
    for texts in generate(bundle.model, bundle.head, prompts, method, max_new_tokens=MAX_NEW_TOKENS, stop=[stop]):
        scores = [text.score for text in texts]
        assert scores == sorted(scores, reverse=True)
        for text in texts:
            length = len(text.tokens) + text.complete
            assert abs(text.score - text.log_probability / method.divisor(length)) < 1e-12


@pytest.mark.parametrize("name", [*FAMILIES, "transformer", *OTHER_MODELS])
@pytest.mark.parametrize("method", [Greedy(), BeamSearch(num_beams=2)])
def test_with_bfloat16_products(tmp_path: Path, name: str, method: DecodingMethod) -> None:
    """Float32 weights under autocast generate text, although cached keys and values may have different dtypes then."""
    bundle, stop = make_bundle(name, tmp_path)
    bundle = bundle.float()
    assert bundle.head is not None
    inputs = decoding_inputs("t5" if bundle.model.encoder is not None else "gpt2")
    with torch.autocast("cpu", torch.bfloat16):
        outputs = generate(bundle.model, bundle.head, method=method, max_new_tokens=5, stop=[stop], **inputs)
    assert len(outputs) == len(PROMPTS) and all(output[0].log_probability < 0 for output in outputs)


def test_beam_search_continues_if_all_scores_are_nan(tmp_path: Path) -> None:
    _, bundle, _ = load_reference(tmp_path, next(iter(FAMILIES)))
    assert bundle.head is not None
    head: Any = bundle.head
    arguments: dict[str, Any] = {"max_new_tokens": 3, "stop": [], **decoding_inputs(next(iter(FAMILIES)))}
    outputs = generate(
        bundle.model, lambda rows, batch: head(rows, batch) * float("nan"), method=BeamSearch(num_beams=2), **arguments
    )
    assert all(len(output[0].tokens) == 3 for output in outputs)
