"""Inside: weights are transformers' own; q k makes the score; steps end in the next state; attributions sum up."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import heedful
from heedful.checkpoint import BundleConfig, create
from heedful.errors import HeedfulError
from heedful.families import FAMILIES
from heedful.infer.tuning.execution_plan import ExecutionPlan, apply_plan
from heedful.look.attribution import explained_score, integrated_gradients
from heedful.look.block_steps import block_steps
from heedful.look.compare import align_tokens, hidden_state_similarity
from heedful.look.decoding import decoding_report
from heedful.look.head_masking import gated_heads, open_gates
from heedful.look.inspection import Inspection
from heedful.look.page import collect_answers
from heedful.look.page_api import PageAPI
from heedful.look.positions_view import positions_view
from heedful.look.qk_spectrum import qk_spectrum, spectrum_of
from heedful.look.word_vectors import analogy, contextual_similarity
from heedful.model.attention import AttentionContext, ExecutionOptions, LayerContext
from heedful.model.classic_config import ClassicConfig, RecurrentSeq2Seq
from heedful.model.config import (
    EmbeddingConfig,
    Learned,
    ModelConfig,
    NextToken,
    Sinusoidal,
    StackConfig,
    TransformerXl,
)
from heedful.model.stack import Block
from heedful.nn.inference_linear import Int8Linear, OneDnnLinear, cannot_use_onednn
from heedful.nn.positions import TransformerXlPosition
from heedful.packed import Packed
from heedful.tasks.generation import GenerationConfig
from heedful.tokenizer import SpecialIds
from heedful.tokenizer.words import word_tokenizer
from tests.support.classic_models import READERS, make_classic, make_classic_encoder
from tests.support.model_folders import make_model_dir
from tests.support.tiny_models import ENCODER_DECODER, TINY, save_tiny

QUICK = ("t5", "xlnet")
WORDS = [f"w{chr(97 + n // 26)}{chr(97 + n % 26)}" for n in range(95)]
TEXT = " ".join(WORDS[n] for n in (7, 3, 50, 3, 21, 90, 11, 64, 5, 33, 8, 2))


def numbers(sent: dict[str, Any]) -> np.ndarray:
    """Return the numbers that a page reads."""
    raw = np.frombuffer(base64.b64decode(sent["data"]), dtype="<" + sent["kind"])
    most = {"f4": 1, "f2": 1, "u2": 65535, "u1": 255}[sent["kind"]]
    return raw.reshape(sent["shape"]).astype(np.float64) / most


def ending(words: Any) -> Any:
    """Return the tokenizer with tokens that begin and end a text."""
    words.special = SpecialIds(pad=0, unknown=0, bos_or_cls=2, eos_or_sep=1, mask=None)
    return words


def inside_of(folder: Path, family: str) -> tuple[Any, Inspection]:
    reference = save_tiny(folder, family, next(iter(FAMILIES[family].heads)))
    loaded = heedful.load(folder)
    loaded.tokenizer = word_tokenizer(WORDS)
    return reference, Inspection(loaded, TEXT)


def their_attention(reference: Any, family: str, ids: list[int]) -> dict[str, Any]:
    inputs = {"input_ids": torch.tensor([ids])}
    if family in ENCODER_DECODER:
        inputs["decoder_input_ids"] = torch.tensor([[reference.config.decoder_start_token_id, *ids[:-1]]])
    with torch.no_grad():
        out = reference(**inputs, output_attentions=True)
    if family in ENCODER_DECODER:
        return {"encoder": out.encoder_attentions, "decoder": out.decoder_attentions, "cross": out.cross_attentions}
    return {"decoder" if family == "gpt2" else "encoder": out.attentions}


def _check_family(folder: Path, family: str) -> None:
    reference, inside = inside_of(folder, family)
    inside = Inspection(inside.loaded.train(), TEXT)  # nothing is dropped, and afterwards it trains as before
    assert inside.loaded.training
    ask = PageAPI([inside])
    expected = their_attention(reference, family, list(inside.encoded.ids))
    assert {view.part for view in inside.views} == set(expected)
    for part, layers in expected.items():
        assert inside.view(part).layers == len(layers)
        for layer, weights in enumerate(layers):
            place = {"part": part, "layer": str(layer), "head": "2"}
            shown = numbers(ask("weights", place)["weights"])
            assert np.abs(shown.sum(-1) - 1).max() < 1e-3
            assert np.abs(shown - weights[0, 2].numpy()).max() < 1e-5  # rows look, columns are looked at
            answer = ask("neuron", place)
            q, k, scores = (numbers(answer[name]) for name in ("q", "k", "scores"))
            seen = scores > -np.inf
            if not answer["biased"]:
                assert np.abs((answer["scale"] * q @ k.T - scores)[seen]).max() < 1e-4
            soft = np.exp(scores - scores.max(-1, keepdims=True))
            assert np.abs(soft / soft.sum(-1, keepdims=True) - weights[0, 2].numpy()).max() < 1e-5
            small = numbers(ask("thumbnails", place)["heads"])
            assert np.abs(small[2] - weights[0, 2].numpy()).max() < 3e-3


@pytest.mark.parametrize("family", QUICK)
def test_page_data_equals_attention_of_transformers(tmp_path: Path, family: str) -> None:
    _check_family(tmp_path, family)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(TINY.keys() - set(QUICK)))
def test_page_data_equals_attention_of_transformers_in_other_families(tmp_path: Path, family: str) -> None:
    _check_family(tmp_path, family)


@pytest.mark.parametrize("family", sorted(TINY))
def test_every_family_shows_its_positions(tmp_path: Path, family: str) -> None:
    reference = save_tiny(tmp_path, family, next(iter(FAMILIES[family].heads)))
    views = positions_view(heedful.load(tmp_path))
    assert views and all(tensor.isfinite().all() for view in views for tensor in view.tensors.values())
    if family == "deberta-v2":
        (view,) = views
        distances, table = view.tensors["distances"], reference.base_model.encoder.get_rel_embedding()
        near = distances.abs() <= 4  # half of the 8 buckets are single distances
        assert torch.allclose(view.tensors["vectors"][near], table[8 - distances[near]], atol=1e-6)
    if family == "bart":  # encoder and decoder have tables of their own
        assert [view.name for view in views] == ["Encoder: learned table", "Decoder: learned table"]
        for view, part in zip(views, (reference.base_model.encoder, reference.base_model.decoder), strict=True):
            assert torch.equal(view.tensors["vectors"], part.embed_positions.weight[2:])


def transformer(positions: Learned | Sinusoidal | None = None, **stack: Any) -> heedful.ModelBundle:
    """Return a model with one stack of one layer: a decoder if it is causal."""
    embedding = EmbeddingConfig(vocabulary=9, width=6, positions=positions)
    config = StackConfig(width=6, layers=1, heads=2, head_width=4, inner_width=8, **stack)
    stacks = {"decoder" if config.causal else "encoder": config}
    return create(BundleConfig(family="heedful", model=ModelConfig(embedding=embedding, **stacks)), seed=1)


@pytest.mark.parametrize("causal", [False, True])
def test_relative_sinusoids_are_those_that_attention_reads(causal: bool) -> None:
    loaded = transformer(relation=TransformerXl(reach=5), causal=causal)
    (relation,) = (part for part in loaded.model.modules() if isinstance(part, TransformerXlPosition))
    _, waves = relation.prepare(Packed.of([[7] * 9]), torch.zeros(1, dtype=torch.float64), cache_bias=True)
    (view,) = positions_view(loaded)
    distances = view.tensors["distances"]
    assert int(distances.min()) == -64 and int(distances.max()) == (0 if causal else 64)
    near = distances.abs() <= 8
    assert torch.equal(view.tensors["vectors"][near], waves[distances[near] + 8])


@pytest.mark.parametrize(
    ("positions", "count"),
    [(Learned(count=9, join="concatenate", width=4), 9), (Sinusoidal(join="concatenate", width=4), 128)],
)
def test_concatenated_positions_are_not_described_as_added(positions: Learned | Sinusoidal, count: int) -> None:
    (view,) = positions_view(transformer(positions))
    assert "concatenated with the token's vector" in view.description
    assert view.tensors["vectors"].shape == (count, 4)


def test_positions_of_a_model_that_is_prepared_for_inference(tmp_path: Path) -> None:
    save_tiny(tmp_path, "deberta-v2", "DebertaV2Model")
    loaded = heedful.load(tmp_path)
    (before,) = positions_view(loaded)
    apply_plan(loaded, ExecutionPlan(precision="float32"))  # which adds the projected distances of each layer
    (after,) = positions_view(loaded)
    assert torch.equal(after.tensors["vectors"], before.tensors["vectors"])


@pytest.mark.parametrize("family", ["bert", "t5", "gpt2"])
def test_steps_end_where_the_next_block_begins(tmp_path: Path, family: str) -> None:
    _, inside = inside_of(tmp_path, family)
    for part in {view.part for view in inside.views} - {"cross"}:
        states, layers = inside.hidden_states(part), inside.view(part).layers
        for layer in (0, layers - 2):
            steps = block_steps(inside, part, layer, 3, 4)
            assert torch.allclose(steps[-1].vectors["x"], states[layer + 1][4], atol=1e-5)
            named = {step.name: step for step in steps}
            assert torch.allclose(named[f"Into block {layer}"].vectors["x"], states[layer][4], atol=1e-6)
            head_output, weights = named["Weighted sum"].vectors["z"], named["Softmax"].vectors["w"]
            assert torch.isclose(weights.sum(), torch.tensor(1.0), atol=1e-5)
            attention = inside.attention(part, layer, ("v",), heads=[3])
            assert attention.v is not None
            assert torch.allclose(weights @ attention.v[:, 0], head_output, atol=1e-5)


def test_fused_models_are_inspected_layer_by_layer(tmp_path: Path) -> None:
    """A prepared engine computes blocks at once, past the modules that are looked at."""
    loaded = heedful.load(make_model_dir(tmp_path / "bare", "bare"))
    assert loaded.model.encoder is not None
    plain = block_steps(Inspection(loaded, TEXT), "encoder", 1, 3, 4)
    gates = open_gates(loaded.model)
    gates["encoder"][0, 2] = 0.0
    batch = Packed.of([[1, 2, 3]])
    with torch.no_grad(), gated_heads(loaded.model, gates):
        masked = loaded.model(batch)

    def at_once(block: Block, x: torch.Tensor, sight: AttentionContext, placed: LayerContext) -> torch.Tensor | None:
        return None if sight.trace is not None else torch.zeros_like(x)

    loaded.model.execution = ExecutionOptions(fused_block=at_once)
    for step, expected in zip(plain, block_steps(Inspection(loaded, TEXT), "encoder", 1, 3, 4), strict=True):
        assert step.vectors.keys() == expected.vectors.keys()
    with torch.no_grad(), gated_heads(loaded.model, gates):
        assert torch.equal(loaded.model(batch), masked)
    assert loaded.model.execution.fused_block is at_once


def test_attributions_sum_to_the_difference(tmp_path: Path) -> None:
    for name, text in (
        ("single", "the cat sat on the mat"),
        ("masked", "the [MASK] sat"),
        ("tag", "ada lives in paris"),
    ):
        inside = Inspection(heedful.load(make_model_dir(tmp_path / name, name)), text)
        score, what, *_ = explained_score(inside)
        attribution = integrated_gradients(inside, score, what, steps=200)
        assert abs(attribution.missing) < 2e-2 * max(1.0, abs(attribution.at_text - attribution.at_baseline)), name
        assert float(attribution.values[0].abs()) < 1e-6  # [CLS] is the same in the baseline
        with torch.no_grad():
            out = inside.loaded(inside.source)
        assert any(abs(attribution.at_text - float(score_value)) < 1e-5 for score_value in out.flatten())
        assert all(parameter.requires_grad for parameter in inside.loaded.parameters())
    pair = Inspection(
        heedful.load(make_model_dir(tmp_path / "span", "span")), ("who wrote it", "ada wrote the program")
    )
    assert "answer" in explained_score(pair)[1] and set(PageAPI([pair])("prediction", {})) >= {"answer", "attribution"}


def test_classic_models_show_what_they_look_at() -> None:
    text = "the film was not good . the end . very bad"
    for name in (
        "plain attention",
        "a query for each class",
        "structured",
        "hierarchical",
        "bag of sums",
        "recurrent",
        "dot products",
    ):
        loaded = make_classic(name)
        inside = Inspection(loaded, text)
        for view in inside.views:
            weights = inside.weights(view.part, 0)
            assert weights.shape[1:] == (len(inside.sides[view.rows]), len(inside.sides["source"]))
            sums = weights.sum(-1)
            if name == "hierarchical":  # the last one is what a word counts in the text; the first two do so in part
                assert torch.allclose(sums[2], torch.ones(1).double())
            else:
                assert torch.allclose(sums, torch.ones_like(sums))
    vectors = loaded.hidden_states(inside.source)  # of the last one: softmax(X X) X
    x = loaded.model.embedding(inside.source)
    assert torch.allclose(inside.weights("over", 0)[0] @ x, vectors)
    with pytest.raises(HeedfulError, match="no attention"):
        Inspection(make_classic_encoder(READERS["plain attention"]), text)
    assert set(READERS) >= {"structured"}


@pytest.mark.parametrize("name", ["bag of means", "bag of sums"])
def test_a_bag_rests_on_each_word_alike(name: str) -> None:
    """The share of each word is exact: the score is linear in the word vectors."""
    inside = Inspection(make_classic(name), "the film was not good")
    message = PageAPI([inside])("prediction", {"label": "1"})
    assert numbers(message["attention"]).tolist() == pytest.approx([0.2] * 5, abs=1e-4)
    assert message["attribution"]["missing"] == pytest.approx(0, abs=1e-12)


def test_compared_words_and_similarity(tmp_path: Path) -> None:
    assert align_tokens(["a", "b", "c", "d"], ["a", "x", "c"]) == [(0, 0), (1, 1), (2, 2)]
    loaded = heedful.load(make_model_dir(tmp_path / "bare", "bare"))
    cat, dog = Inspection(loaded, "the cat sat on the mat"), Inspection(loaded, "the dog sat on the mat")
    comparison = PageAPI([cat, dog])("compare", {"part": "encoder", "layer": "1", "head": "2", "other_head": "2"})
    expected = dog.weights("encoder", 1)[2] - cat.weights("encoder", 1)[2]
    assert np.abs(numbers(comparison["difference"]) - expected.numpy()).max() < 1e-6
    save_tiny(tmp_path / "deep", "bert", "BertModel", vocab_size=loaded.config.model.embedding.vocabulary)
    deep = heedful.load(tmp_path / "deep")
    deep.tokenizer = loaded.tokenizer
    student = PageAPI([Inspection(deep, "the cat sat"), Inspection(loaded, "the cat sat")])  # four layers beside two
    comparison = student("compare", {"part": "encoder", "layer": "3", "other_layer": "1"})
    means = [
        inspection.weights("encoder", layer).mean(0)
        for inspection, layer in zip(student.inspections, (3, 1), strict=True)
    ]
    assert np.abs(numbers(comparison["difference"]) - (means[1] - means[0]).numpy()).max() < 1e-6
    assert "different shapes" in comparison["apart"]
    answers = collect_answers(student, layers=[3], heads=[0]).answers  # beside layer 3 of four is the last of two
    assert "difference" in answers["compare?head=mean&layer=3&other_head=mean&other_layer=1&part=encoder"]
    similarity = contextual_similarity([cat, dog], "mat")
    assert len(similarity.occurrences) == 2 and torch.allclose(similarity.layers[1].diagonal(), torch.ones(2))
    row = cat.hidden_states("encoder")[2][6]
    again = torch.nn.functional.cosine_similarity(row, dog.hidden_states("encoder")[2][6], dim=0)
    assert torch.isclose(similarity.layers[2][0, 1], again, atol=1e-6)
    pair = contextual_similarity([Inspection(loaded, ("The cat sat", "on the mat"))], "the")
    assert [(occurrence["text"], occurrence["start"], occurrence["stop"]) for occurrence in pair.occurrences] == [
        ("The cat sat", 0, 3),
        ("on the mat", 3, 6),
    ]

    head = qk_spectrum(loaded, "encoder", 1, 3)
    weight = loaded.model.encoder.blocks[1].attention.qkv.weight.detach().double()
    m = weight[24:32].T @ weight[32 + 24 : 32 + 32]
    assert torch.allclose(head.singular_values, torch.linalg.svdvals(m)[:8], atol=1e-9)
    exact = torch.linalg.eigvalsh((m + m.T) / 2).flip(0)
    assert torch.allclose(head.eigenvalues[:8], exact[:8], atol=1e-9) and head.summary.startswith("No metric")
    assert spectrum_of(torch.eye(3).double(), torch.eye(3).double()).summary.startswith("Symmetric and positive")


def test_spectrum_of_heads_that_share_keys(tmp_path: Path) -> None:
    save_tiny(tmp_path / "shared", "llama", "LlamaModel", num_key_value_heads=2)
    loaded = heedful.load(tmp_path / "shared")
    assert loaded.model.decoder is not None
    weight = loaded.model.decoder.blocks[1].attention.qkv.weight.detach().double()
    spectrum = qk_spectrum(loaded, "decoder", 1, 3)
    m = weight[24:32].T @ weight[32 + 8 : 32 + 16]  # of its query and of the second key head
    assert torch.allclose(spectrum.singular_values, torch.linalg.svdvals(m)[:8], atol=1e-9)
    save_tiny(tmp_path / "normed", "qwen3", "Qwen3Model")
    with pytest.raises(HeedfulError, match="queries and keys of this model are normalised"):
        qk_spectrum(heedful.load(tmp_path / "normed"), "decoder", 1, 3)


@pytest.mark.parametrize(("kind", "error"), [(OneDnnLinear, 1e-12), (Int8Linear, 0.02)])
def test_similarity_of_an_engine_that_was_prepared(
    tmp_path: Path, kind: type[OneDnnLinear | Int8Linear], error: float
) -> None:
    """Layers that were exchanged to answer hold their weights otherwise."""
    if kind is OneDnnLinear and (why := cannot_use_onednn(torch.float32)):
        pytest.skip(why)
    loaded = heedful.load(make_model_dir(tmp_path / "bare", "bare"))
    plain = qk_spectrum(loaded, "encoder", 1, 3)
    assert loaded.model.encoder is not None
    attention = loaded.model.encoder.blocks[1].attention
    attention.add_module("qkv", kind(attention.qkv))
    spectrum = qk_spectrum(loaded, "encoder", 1, 3)
    assert torch.allclose(
        spectrum.singular_values, plain.singular_values, rtol=0, atol=error * float(plain.singular_values[0])
    )


def test_the_decoder_writes_as_the_engine_does(tmp_path: Path) -> None:
    save_tiny(tmp_path, "t5", "T5ForConditionalGeneration", vocab_size=96)
    loaded = heedful.load(tmp_path)
    loaded.tokenizer = ending(word_tokenizer(WORDS))
    inside = Inspection(loaded, TEXT, target=TEXT[:11])
    assert not inside.target_is_generated and [view.part for view in inside.views] == ["encoder", "decoder", "cross"]
    report = decoding_report(inside, max_new_tokens=6, num_beams=2)
    assert report["steps"] and report["steps"][0]["candidates"][0]["text"] == report["steps"][0]["token"]
    (answer,) = heedful.Engine(loaded, writing=GenerationConfig(max_new_tokens=6))([TEXT])
    assert abs(report["greedy"]["log_probability"] - answer["log_probability"]) < 1e-4
    assert report["greedy"]["text"] == answer["text"] and len(report["beams"]) == 2
    assert inside.weights("cross", 1).shape == (4, len(inside.sides["target"]), len(inside.sides["source"]))
    shorter = Inspection(loaded, TEXT, target=TEXT[:7])
    moved = hidden_state_similarity(inside, shorter, "cross")  # what looks across are the decoder's rows
    assert len(moved.tokens) == len(shorter.sides["target"]) < len(inside.sides["target"])
    assert torch.allclose(moved.cosines[0], torch.ones(len(moved.tokens)), atol=1e-6)


@pytest.mark.parametrize("setting", ["eos_token_id", "max_length"])
def test_the_decoder_obeys_the_generation_settings_of_the_folder(tmp_path: Path, setting: str) -> None:
    save_tiny(tmp_path, "t5", "T5ForConditionalGeneration", vocab_size=96)
    loaded = heedful.load(tmp_path)
    loaded.tokenizer = ending(word_tokenizer(WORDS))
    free = Inspection(loaded, TEXT).sides["target"][1:]
    assert len(free) > 8 and loaded.config.generation is not None
    value = {"eos_token_id": [1, free[4]["id"]], "max_length": 5}[setting]
    loaded.config = replace(loaded.config, generation=loaded.config.generation | {setting: value})
    (answer,) = heedful.Engine(loaded)([TEXT])
    assert answer["tokens"] < 8
    inside = Inspection(loaded, TEXT)
    report = decoding_report(inside)
    assert report["greedy"]["text"] == answer["text"]
    assert report["greedy"]["num_tokens"] == len(report["steps"]) == answer["tokens"] + answer["complete"]
    assert report["greedy"]["log_probability"] == pytest.approx(answer["log_probability"], abs=1e-4)
    assert len(inside.sides["target"]) == 1 + answer["tokens"]


def test_decoding_leaves_a_model_in_training_mode(tmp_path: Path) -> None:
    save_tiny(tmp_path, "t5", "T5ForConditionalGeneration", vocab_size=96)
    loaded = heedful.load(tmp_path)
    loaded.tokenizer = ending(word_tokenizer(WORDS))
    expected = decoding_report(Inspection(loaded, TEXT), max_new_tokens=4, num_beams=2)
    loaded.train()
    assert decoding_report(Inspection(loaded, TEXT), max_new_tokens=4, num_beams=2) == expected and loaded.training


def test_static_vectors_have_analogies_and_neighbours() -> None:
    """With vectors written by hand, of which it is known what they make; a net over them is the context."""
    plain, net = make_classic("plain attention"), make_classic("structured")
    with torch.no_grad():
        table = plain.model.embedding.tokens.weight
        table.zero_()
        vectors = {"good": (1, 0, 1, 0), "bad": (1, 0, 0, 1), "very": (0, 1, 1, 0), "not": (0, 1, 0, 1)}
        for word, vector in vectors.items():
            table[plain.tokenizer.id(word)] = torch.tensor(vector).double()
    (best, *_) = analogy(plain, "good", "bad", "very")
    assert best["text"] == "not" and best["cosine"] == pytest.approx(1.0)
    with pytest.raises(HeedfulError, match='"king" is not in the vocabulary'):
        analogy(plain, "good", "king", "very")
    for loaded, names in ((plain, ["in the embeddings"]), (net, ["in the embeddings", "after the recurrent network"])):
        inside = Inspection(loaded, "the film was good . the end was not good")
        similarity = contextual_similarity([inside], "good")
        assert similarity.layer_names == names and len(similarity.occurrences) == 2 and not similarity.static_error
        rows = loaded.hidden_states(inside.source) if loaded is net else loaded.model.embedding(inside.source)
        cosine = torch.nn.functional.cosine_similarity(rows[3], rows[9], dim=0).detach()
        assert torch.isclose(similarity.layers[-1][0, 1], cosine)
    assert similarity.layers[0][0, 1] == pytest.approx(1.0) and abs(float(cosine)) < 0.999


def test_recurrent_nets_show_what_they_looked_at() -> None:
    """Each state's weights give what it saw, which with the state gives its row."""
    words = word_tokenizer(WORDS)
    look = ClassicConfig(
        embedding=EmbeddingConfig(vocabulary=words.size, width=6), reader=RecurrentSeq2Seq(width=8, feed=False)
    )
    loaded = create(BundleConfig(family="heedful-classic", model=look, head=NextToken()), words, seed=1).double().eval()
    loaded.tokenizer = ending(words)
    inside = Inspection(loaded, TEXT, target=TEXT[:15])
    assert [(view.part, view.rows, view.keys) for view in inside.views] == [("cross", "target", "source")]
    model: Any = loaded.model
    weights = inside.weights("cross", 0)[0]
    with torch.no_grad():
        read = model.reading(model.embedding(inside.source), inside.source.bounds)
        states, _ = model.writing(
            model.embedding(inside.target), model._first_state(read, inside.source.bounds)[0][:, 0]
        )
        rows = model.mix(torch.cat([weights @ read, states], -1)).tanh()
    assert torch.allclose(rows, inside.last_hidden_state, atol=1e-12) and torch.allclose(
        weights.sum(-1), torch.ones(5).double()
    )


def test_unavailable_views_are_explained(tmp_path: Path) -> None:
    inside = Inspection(heedful.load(make_model_dir(tmp_path / "bare", "bare")), "the cat")
    ask = PageAPI([inside])
    for name, params, why in (
        ("weights", {"part": "cross"}, 'part "cross" does not exist: use one of encoder'),
        ("weights", {"layer": "9"}, "layer is '9'; expected a whole number from 0 to 1"),
        ("weights", {"head": "٣"}, "head is '٣'; expected a whole number from 0 to 3"),
        ("passwords", {}, '"passwords" is not a question'),
        ("compare", {}, "there is one text: give another one"),
        ("words", {"word": "dog"}, '"dog" occurs in none of the texts'),
        ("look", {"text": "cat " * 60}, "the text has 62 tokens, and this model reads 1 to 48 at once"),
    ):
        with pytest.raises(HeedfulError) as raised:
            ask(name, params)
        assert why in str(raised.value)


def test_unknown_tokens_show_their_characters() -> None:
    inside = Inspection(heedful.load("heedful-mini-en"), ("The \u732b sat.", "A \U0001f600 dog."))
    unknown = inside.tokenizer.special.unknown
    names = [token["text"] for token in inside.sides["source"] if token["id"] == unknown]
    assert names == ["[UNK] \u732b", "[UNK] \U0001f600"]
