"""Text generation: greedy, beam search and sampling against transformers' generate, and without a KV cache."""

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

MOST = 12
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15, 16], [17, 18]]
FAMILIES = {"gpt2": "GPT2LMHeadModel", "t5": "T5ForConditionalGeneration", "qwen3": "Qwen3ForCausalLM"}


def both(folder: Path, family: str) -> tuple[Any, heedful.ModelBundle, int]:
    """Their model, ours, and a token that stops some of the prompts: one that not all of them would write."""
    reference = save_tiny(folder, family, FAMILIES[family], torch.float64)
    bundle = heedful.load(folder, dtype=torch.float64)
    assert bundle.head is not None
    free = [
        set(output[0].tokens[1:])
        for output in generate(
            bundle.model, bundle.head, method=Greedy(), max_new_tokens=MOST, stop=[], **decoding_inputs(family)
        )
    ]
    often = Counter(token for tokens in free for token in tokens)
    return reference, bundle, min(token for token, count in often.items() if count < len(PROMPTS))


def decoding_inputs(family: str, prompts: list[list[int]] = PROMPTS) -> dict[str, Packed]:
    if family != "t5":
        return {"prompts": Packed.of(prompts)}
    return {"prompts": Packed.of([[0]] * len(prompts)), "source": Packed.of(prompts)}


def theirs_writes(reference: Any, family: str, prompt: list[int], stop: int, **how: Any) -> Any:
    with torch.no_grad(), Float64Mode(torch.float64):
        return reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=MOST,
            eos_token_id=stop,
            pad_token_id=97,
            return_dict_in_generate=True,
            output_scores=True,
            **how,
        )


def stripped(tokens: list[int], family: str, prompt: list[int], stop: int) -> list[int]:
    written = tokens[1 if family == "t5" else len(prompt) :]
    written = [token for token in written if token != 97]
    return written[: written.index(stop)] if stop in written else written


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_decoding_equals_transformers(tmp_path: Path, family: str) -> None:
    reference, bundle, stop = both(tmp_path, family)
    assert bundle.head is not None
    outputs = generate(
        bundle.model, bundle.head, method=Greedy(), max_new_tokens=MOST, stop=[stop], **decoding_inputs(family)
    )
    expected = [
        stripped(
            theirs_writes(reference, family, prompt, stop, do_sample=False).sequences[0].tolist(), family, prompt, stop
        )
        for prompt in PROMPTS
    ]
    assert [output[0].tokens for output in outputs] == expected
    assert any(output[0].complete for output in outputs)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("how", "their_own"),
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
    tmp_path: Path, family: str, how: BeamSearch, their_own: dict[str, Any]
) -> None:
    reference, bundle, stop = both(tmp_path, family)
    assert bundle.head is not None
    outputs = beam_search(
        bundle.model, bundle.head, method=how, max_new_tokens=MOST, stop=[stop], **decoding_inputs(family)
    )
    for prompt, written in zip(PROMPTS, outputs, strict=True):
        out = theirs_writes(
            reference,
            family,
            prompt,
            stop,
            num_beams=how.num_beams,
            num_return_sequences=how.num_return_sequences,
            do_sample=False,
            **their_own,
        )
        assert [beam.tokens for beam in written] == [
            stripped(tokens, family, prompt, stop) for tokens in out.sequences.tolist()
        ]
        for beam, score in zip(written, out.sequences_scores.tolist(), strict=True):
            assert abs(beam.score - score) < 1e-5  # theirs sums in float32


@pytest.mark.parametrize("family", FAMILIES)
def test_one_beam_is_greedy(tmp_path: Path, family: str) -> None:
    _, bundle, stop = both(tmp_path, family)
    assert bundle.head is not None
    greedy = generate(
        bundle.model, bundle.head, method=Greedy(), max_new_tokens=MOST, stop=[stop], **decoding_inputs(family)
    )
    beam = generate(
        bundle.model,
        bundle.head,
        method=BeamSearch(num_beams=1),
        max_new_tokens=MOST,
        stop=[stop],
        **decoding_inputs(family),
    )
    assert [output[0].tokens for output in greedy] == [output[0].tokens for output in beam]
    for from_greedy, from_beam in zip(greedy, beam, strict=True):
        assert abs(from_greedy[0].log_probability - from_beam[0].log_probability) < 1e-9


@pytest.mark.parametrize("family", FAMILIES)
def test_one_beam_is_greedy_where_tokens_are_equally_likely(tmp_path: Path, family: str) -> None:
    """The first of them is taken, as where scores are rounded to a few different ones."""
    _, bundle, _ = both(tmp_path, family)
    assert bundle.head is not None
    head: Any = bundle.head
    for scores in (lambda rows, batch: head(rows, batch) * 0, lambda rows, batch: head(rows, batch).round()):
        how: dict[str, Any] = {"max_new_tokens": MOST, "stop": [], **decoding_inputs(family)}
        greedy = generate(bundle.model, scores, method=Greedy(), **how)
        beam = generate(bundle.model, scores, method=BeamSearch(num_beams=1), **how)
        assert [output[0].tokens for output in greedy] == [output[0].tokens for output in beam]


SIDE: dict[str, Any] = {"width": 16, "layers": 2, "heads": 2, "head_width": 8, "inner_width": 24, "causal": True}
OTHERS: dict[str, ModelConfig] = {
    "rotary, window": ModelConfig(
        embedding=EmbeddingConfig(vocabulary=40, width=16),
        decoder=StackConfig(**SIDE, relation=Rotary(local_base=50.0), window=4, global_every=2, norm_at="pre"),
    ),
    "shaw": ModelConfig(
        embedding=EmbeddingConfig(vocabulary=40, width=16), decoder=StackConfig(**SIDE, relation=Shaw(reach=3))
    ),
}


def make_bundle(name: str, folder: Path) -> tuple[heedful.ModelBundle, int]:
    if name in FAMILIES:
        _, bundle, stop = both(folder, name)
        return bundle, stop
    if name == "transformer":
        model = vaswani_config(VaswaniSize(layers=6, width=16, heads=2, inner=24, dropout=0.1), 37_000)
    else:
        model = OTHERS[name]
    return create(BundleConfig(family="heedful", model=model, head=NextToken()), seed=3).double().eval(), 1


@pytest.mark.parametrize("name", [*FAMILIES, "transformer", *OTHERS])
def test_the_cache_changes_no_token(tmp_path: Path, name: str) -> None:
    """Each step's distribution is that of the whole sequence computed anew, alone."""
    bundle, stop = make_bundle(name, tmp_path)
    assert bundle.head is not None
    reads = decoding_inputs("t5" if bundle.model.encoder is not None else "gpt2")
    texts = [list(prompt) for prompt in ([[0]] * len(PROMPTS) if "source" in reads else PROMPTS)]
    seen = 0
    for step in stream(
        bundle.model,
        bundle.head,
        method=Sampling(temperature=2.0),
        max_new_tokens=9,
        stop=[stop],
        distribution=True,
        seed=5,
        **reads,
    ):
        assert step.distribution is not None
        for row, number in enumerate(step.sequences):
            alone = Packed.of([texts[number]])
            with torch.no_grad():
                outputs = bundle(Packed.of([PROMPTS[number]]), alone) if "source" in reads else bundle(alone)
            expected = outputs[-1].log_softmax(-1)
            assert (step.distribution[row] - expected).abs().max() < 1e-10
            texts[number].append(step.tokens[row])
            assert abs(step.log_probabilities[row] - expected[step.tokens[row]]) < 1e-10
            seen += 1
    assert seen > 20


@pytest.mark.parametrize(
    "how", [Greedy(), Sampling(temperature=1.5, top_k=20), BeamSearch(num_beams=3, num_return_sequences=2)]
)
def test_what_is_written_does_not_depend_on_the_company(tmp_path: Path, how: DecodingMethod) -> None:
    bundle, stop = make_bundle("gpt2", tmp_path)
    assert bundle.head is not None
    together = generate(bundle.model, bundle.head, Packed.of(PROMPTS), how, max_new_tokens=MOST, stop=[stop], seed=1)
    fewer = generate(bundle.model, bundle.head, Packed.of(PROMPTS[:2]), how, max_new_tokens=MOST, stop=[stop], seed=1)
    assert [[sample.tokens for sample in outputs] for outputs in together[:2]] == [
        [sample.tokens for sample in outputs] for outputs in fewer
    ]
    turned = generate(
        bundle.model, bundle.head, Packed.of(PROMPTS[::-1]), how, max_new_tokens=MOST, stop=[stop], seed=1
    )[::-1]
    assert [[sample.tokens for sample in outputs] for outputs in together] == [
        [sample.tokens for sample in outputs] for outputs in turned
    ]
    again = generate(bundle.model, bundle.head, Packed.of(PROMPTS), how, max_new_tokens=MOST, stop=[stop], seed=1)
    assert [[sample.tokens for sample in outputs] for outputs in together] == [
        [sample.tokens for sample in outputs] for outputs in again
    ]
    other_seed = generate(bundle.model, bundle.head, Packed.of(PROMPTS), how, max_new_tokens=MOST, stop=[stop], seed=2)
    same = [[sample.tokens for sample in outputs] for outputs in together] == [
        [sample.tokens for sample in outputs] for outputs in other_seed
    ]
    assert same == (not isinstance(how, Sampling))


HOWS: list[DecodingMethod] = [
    Greedy(),
    Sampling(temperature=1.5),
    Sampling(temperature=0.8, top_k=20, top_p=0.9),
    BeamSearch(num_beams=3, num_return_sequences=3),
    BeamSearch(num_beams=2, num_return_sequences=2, early_stopping=True),
    BeamSearch(num_beams=4, early_stopping="never", length_penalty=2.0),
]


def bare(written: list[GeneratedTokens]) -> list[tuple[list[int], float, float, bool]]:
    """All that was written, to the bit."""
    return [(output.tokens, output.log_probability, output.score, output.complete) for output in written]


@pytest.mark.parametrize("name", ["gpt2", "t5", "transformer"])
def test_decodings_that_take_turns_write_what_each_writes_alone(tmp_path: Path, name: str) -> None:
    """Steps of many decodings of one model in any order, by every method and to several lengths: the same bits."""
    bundle, stop = make_bundle(name, tmp_path)
    assert bundle.head is not None
    batches = {
        (number, most): {"method": how, "max_new_tokens": most, "stop": [stop], "seed": number}
        | decoding_inputs("gpt2" if name == "gpt2" else "t5")
        for number, how in enumerate(HOWS)
        for most in (1, 4, 11)
    }
    alone = {key: generate(bundle.model, bundle.head, **batch) for key, batch in batches.items()}
    decodings = {key: decode(bundle.model, bundle.head, **batch) for key, batch in batches.items()}
    outputs: dict[tuple[int, int], dict[int, list[GeneratedTokens]]] = {key: {} for key in batches}
    early = turns = 0
    while running := [key for key, decoding in decodings.items() if not decoding.done]:
        for key in running[turns % 2 :: 2]:
            finished = decodings[key].step()
            early += bool(finished) and not decodings[key].done
            assert not set(finished) & set(outputs[key])
            outputs[key] |= finished
        turns += 1
    for key, texts in alone.items():
        assert [bare(outputs[key][number]) for number in range(len(texts))] == [bare(text) for text in texts]
        assert decodings[key].steps <= key[1]
    assert (early or name == "transformer") and turns > 11


@pytest.mark.parametrize("how", [Greedy(), Sampling(temperature=1.5), BeamSearch(num_beams=3, num_return_sequences=2)])
def test_sequences_that_are_dropped_leave_the_others_as_they_are(tmp_path: Path, how: DecodingMethod) -> None:
    bundle, stop = make_bundle("gpt2", tmp_path)
    assert bundle.head is not None
    rows: list[int] = []

    def score(states: torch.Tensor, batch: Packed) -> torch.Tensor:
        rows.append(len(states))
        scores: torch.Tensor = bundle.head(states, batch)  # type: ignore[misc]
        return scores

    prompts = Packed.of(PROMPTS)
    alone = generate(bundle.model, bundle.head, prompts, how, max_new_tokens=MOST, stop=[stop], seed=1)
    decoding = decode(bundle.model, score, prompts, how, max_new_tokens=MOST, stop=[stop], seed=1)
    outputs = {}
    for step in range(MOST):
        if step == 2:
            decoding.cancel([0, 2])
        if not decoding.done:
            outputs |= decoding.step()
    assert set(outputs) <= {1, 3}
    for number, written in outputs.items():
        assert [output.tokens for output in written] == [output.tokens for output in alone[number]]
    assert max(rows[3:], default=0) <= 2 * (how.num_beams if isinstance(how, BeamSearch) else 1)
    decoding = decode(bundle.model, score, prompts, how, max_new_tokens=MOST, stop=[stop])
    decoding.cancel(range(4))
    assert decoding.done


@pytest.mark.parametrize(
    "how",
    [
        Sampling(temperature=0.7),
        Sampling(top_k=5),
        Sampling(top_p=0.6),
        Sampling(temperature=1.4, top_k=7, top_p=0.9),
        Sampling(top_k=500),
    ],
)
def test_draws_follow_the_distribution_that_transformers_leaves(how: Sampling) -> None:
    """Their warpers give what may be drawn and how often; a fine grid of numbers must draw each token that often."""
    from transformers.generation import logits_process

    torch.manual_seed(0)
    log_p = (torch.randn(1, 30, dtype=torch.float64) * 2).log_softmax(-1)
    left = log_p / how.temperature
    if how.top_k is not None:
        left = logits_process.TopKLogitsWarper(how.top_k)(None, left)  # type: ignore[arg-type]
    if how.top_p is not None:
        left = logits_process.TopPLogitsWarper(how.top_p)(None, left)  # type: ignore[arg-type]
    count = 20_000
    uniform = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    drawn = sample_next(log_p.expand(count, -1), how, uniform)
    shares = torch.bincount(drawn, minlength=30) / count
    assert (shares - left.softmax(-1)[0]).abs().max() < 2e-4


def test_what_cannot_be_written() -> None:
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
    for strength in (float("nan"), 1e9):
        with pytest.raises(heedful.HeedfulError, match=r"length_penalty is .*; expected a number from -10 to 10"):
            BeamSearch(length_penalty=strength)
    with pytest.raises(heedful.HeedfulError, match="num_return_sequences is 3"):
        BeamSearch(num_beams=2, num_return_sequences=3)


@pytest.mark.parametrize("how", [Greedy(), BeamSearch()])
def test_sources_may_all_be_empty(tmp_path: Path, how: DecodingMethod) -> None:
    bundle, stop = make_bundle("transformer", tmp_path)
    assert bundle.head is not None
    alone = generate(
        bundle.model, bundle.head, Packed.of([[1]]), how, max_new_tokens=5, stop=[stop], source=Packed.of([[]])
    )
    beside = generate(
        bundle.model,
        bundle.head,
        Packed.of([[1], [1]]),
        how,
        max_new_tokens=5,
        stop=[stop],
        source=Packed.of([[], [5]]),
    )
    assert [output.tokens for output in alone[0]] == [output.tokens for output in beside[0]]


@pytest.mark.parametrize("how", [Greedy(), Sampling(), BeamSearch()])
def test_each_prompt_has_a_source(tmp_path: Path, how: DecodingMethod) -> None:
    bundle, _ = make_bundle("transformer", tmp_path)
    assert bundle.head is not None
    with pytest.raises(heedful.HeedfulError, match=r"^there are 2 prompts, but 1 sources: give each prompt its own$"):
        generate(
            bundle.model, bundle.head, Packed.of([[1], [1]]), how, max_new_tokens=2, stop=[0], source=Packed.of([[5]])
        )


@pytest.mark.parametrize("how", [Greedy(), Sampling(), BeamSearch(num_beams=3, num_return_sequences=2)])
def test_writing_ends_where_positions_end(tmp_path: Path, how: DecodingMethod) -> None:
    """There are 40 positions, for 3 prompt tokens and 38 generated ones; the last one is not read again."""
    bundle, _ = make_bundle("gpt2", tmp_path)
    assert bundle.head is not None
    prompts = Packed.of([[5, 6, 7], [8] * 40, [9] * 30])
    outputs = generate(bundle.model, bundle.head, prompts, how, max_new_tokens=60, stop=[])
    assert [len(output[0].tokens) for output in outputs] == [38, 1, 11]
    assert not any(output.complete for beams in outputs for output in beams)
    with pytest.raises(heedful.HeedfulError, match="has 41 tokens, but the model has positions for 40"):
        generate(bundle.model, bundle.head, Packed.of([[5] * 41]), how, max_new_tokens=60, stop=[])


def test_penalties_are_their_formulas() -> None:
    assert BeamSearch(normalization="none", length_penalty=3.0).divisor(7) == 1.0
    assert BeamSearch(normalization="power", length_penalty=0.5).divisor(9) == 3.0
    assert BeamSearch(normalization="gnmt", length_penalty=2.0).divisor(7) == 4.0  # ((5 + 7) / 6)^2


def test_a_penalty_decides_between_short_and_long(tmp_path: Path) -> None:
    """Scores are log p over the divisor of the tokens with the last, best first."""
    bundle, stop = make_bundle("gpt2", tmp_path)
    assert bundle.head is not None
    how = BeamSearch(
        num_beams=4, num_return_sequences=4, normalization="gnmt", length_penalty=1.5, early_stopping="never"
    )
    for written in generate(bundle.model, bundle.head, Packed.of(PROMPTS), how, max_new_tokens=MOST, stop=[stop]):
        scores = [output.score for output in written]
        assert scores == sorted(scores, reverse=True)
        for output in written:
            assert (
                abs(output.score - output.log_probability / how.divisor(len(output.tokens) + output.complete)) < 1e-12
            )


@pytest.mark.parametrize("name", [*FAMILIES, "transformer", *OTHERS])
@pytest.mark.parametrize("how", [Greedy(), BeamSearch(num_beams=2)])
def test_with_bfloat16_products(tmp_path: Path, name: str, how: DecodingMethod) -> None:
    """float32 weights under autocast, as an evaluation may run; keys and values may differ in dtype then."""
    bundle, stop = make_bundle(name, tmp_path)
    bundle = bundle.float()
    assert bundle.head is not None
    reads = decoding_inputs("t5" if bundle.model.encoder is not None else "gpt2")
    with torch.autocast("cpu", torch.bfloat16):
        outputs = generate(bundle.model, bundle.head, method=how, max_new_tokens=5, stop=[stop], **reads)
    assert len(outputs) == len(PROMPTS) and all(output[0].log_probability < 0 for output in outputs)


def test_scores_that_are_not_numbers_are_written_on_as_the_greatest(tmp_path: Path) -> None:
    _, bundle, _ = both(tmp_path, next(iter(FAMILIES)))
    assert bundle.head is not None
    head: Any = bundle.head
    how: dict[str, Any] = {"max_new_tokens": 3, "stop": [], **decoding_inputs(next(iter(FAMILIES)))}
    outputs = generate(
        bundle.model, lambda rows, batch: head(rows, batch) * float("nan"), method=BeamSearch(num_beams=2), **how
    )
    assert all(len(output[0].tokens) == 3 for output in outputs)
