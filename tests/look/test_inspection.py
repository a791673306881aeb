"""`Inspection` and the page's answers: attention as in transformers, block steps, positions, comparisons, decoding."""

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
from heedful.tokenizer.words import word_tokenizer
from tests.support.classic_models import READERS, make_classic, make_classic_encoder
from tests.support.look_pages import TEXT, WORDS, with_special_tokens
from tests.support.model_folders import make_model_dir
from tests.support.tiny_models import ENCODER_DECODER, TINY, save_tiny

QUICK_FAMILIES = ("t5", "xlnet")  # families that are not only tested with --slow
DECODER_ONLY = ("gpt2", "llama", "qwen3")


def numbers(encoded: dict[str, Any]) -> np.ndarray:
    """Decode a tensor from the JSON that the page gets (see `encode_tensor`)."""
    raw = np.frombuffer(base64.b64decode(encoded["data"]), dtype="<" + encoded["kind"])
    value_of_one = {"f4": 1, "f2": 1, "u2": 65535, "u1": 255}[encoded["kind"]]
    return raw.reshape(encoded["shape"]).astype(np.float64) / value_of_one


def tiny_inspection(folder: Path, family: str) -> tuple[Any, Inspection]:
    """Return a tiny random model of transformers, and the inspection of TEXT in the same model."""
    reference = save_tiny(folder, family, next(iter(FAMILIES[family].heads)))
    loaded = heedful.load(folder)
    loaded.tokenizer = word_tokenizer(WORDS)
    return reference, Inspection(loaded, TEXT)


def reference_attention(reference: Any, family: str, ids: list[int]) -> dict[str, Any]:
    """Return the attention weights of transformers by part, for each layer [1, heads, rows, keys]."""
    inputs = {"input_ids": torch.tensor([ids])}
    if family in ENCODER_DECODER:
        inputs["decoder_input_ids"] = torch.tensor([[reference.config.decoder_start_token_id, *ids[:-1]]])
    with torch.no_grad():
        out = reference(**inputs, output_attentions=True)
    if family in ENCODER_DECODER:
        return {"encoder": out.encoder_attentions, "decoder": out.decoder_attentions, "cross": out.cross_attentions}
    return {"decoder" if family in DECODER_ONLY else "encoder": out.attentions}


def check_attention_of_family(folder: Path, family: str) -> None:
    """Compare all that the page shows of the attention of one head in each layer with transformers."""
    reference, inspection = tiny_inspection(folder, family)
    inspection = Inspection(inspection.loaded.train(), TEXT)  # an inspection uses eval mode, and restores the mode
    assert inspection.loaded.training
    api = PageAPI([inspection])
    expected = reference_attention(reference, family, list(inspection.encoded.ids))
    assert {view.part for view in inspection.views} == set(expected)
    for part, layers in expected.items():
        assert inspection.view(part).layers == len(layers)
        for layer, layer_weights in enumerate(layers):
            last_head = layer_weights.shape[1] - 1
            check_head(api, part, layer, last_head, layer_weights[0, last_head].numpy())


def check_head(api: PageAPI, part: str, layer: int, head: int, expected: np.ndarray) -> None:
    """Compare the weights, the scores and the thumbnail of a head with its expected weights, [rows, keys]."""
    params = {"part": part, "layer": str(layer), "head": str(head)}
    weights = numbers(api("weights", params)["weights"])
    assert np.abs(weights.sum(-1) - 1).max() < 1e-3
    assert np.abs(weights - expected).max() < 1e-5
    answer = api("neuron", params)
    q, k, scores = (numbers(answer[name]) for name in ("q", "k", "scores"))
    visible = scores > -np.inf
    if not answer["biased"]:
        assert np.abs((answer["scale"] * q @ k.T - scores)[visible]).max() < 1e-4
    exponentials = np.exp(scores - scores.max(-1, keepdims=True))
    softmax = exponentials / exponentials.sum(-1, keepdims=True)
    assert np.abs(softmax - expected).max() < 1e-5
    thumbnail = numbers(api("thumbnails", params)["heads"])[head]
    assert np.abs(thumbnail - expected).max() < 3e-3, "it is rounded to 8 bits"


@pytest.mark.parametrize("family", QUICK_FAMILIES)
def test_page_data_equals_attention_of_transformers(tmp_path: Path, family: str) -> None:
    check_attention_of_family(tmp_path, family)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(TINY.keys() - set(QUICK_FAMILIES)))
def test_page_data_equals_attention_of_transformers_in_other_families(tmp_path: Path, family: str) -> None:
    check_attention_of_family(tmp_path, family)


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
def test_relative_sinusoids_are_those_that_attention_uses(causal: bool) -> None:
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


def test_an_execution_plan_does_not_change_the_shown_positions(tmp_path: Path) -> None:
    save_tiny(tmp_path, "deberta-v2", "DebertaV2Model")
    loaded = heedful.load(tmp_path)
    (before,) = positions_view(loaded)
    apply_plan(loaded, ExecutionPlan(precision="float32"))  # which adds the projected distances of each layer
    (after,) = positions_view(loaded)
    assert torch.equal(after.tensors["vectors"], before.tensors["vectors"])


@pytest.mark.parametrize("family", ["bert", "t5", "gpt2"])
def test_steps_end_where_the_next_block_begins(tmp_path: Path, family: str) -> None:
    _, inspection = tiny_inspection(tmp_path, family)
    for part in {view.part for view in inspection.views} - {"cross"}:
        states, layers = inspection.hidden_states(part), inspection.view(part).layers
        for layer in (0, layers - 2):
            steps = block_steps(inspection, part, layer, 3, 4)
            assert torch.allclose(steps[-1].vectors["x"], states[layer + 1][4], atol=1e-5)
            by_name = {step.name: step for step in steps}
            assert torch.allclose(by_name[f"Into block {layer}"].vectors["x"], states[layer][4], atol=1e-6)
            head_output, weights = by_name["Weighted sum"].vectors["z"], by_name["Softmax"].vectors["w"]
            assert torch.isclose(weights.sum(), torch.tensor(1.0), atol=1e-5)
            attention = inspection.attention(part, layer, ("v",), heads=[3])
            assert attention.v is not None
            assert torch.allclose(weights @ attention.v[:, 0], head_output, atol=1e-5)


def test_fused_models_are_inspected_layer_by_layer(tmp_path: Path) -> None:
    """A fused kernel would compute a block without calling the modules whose outputs are shown and gated."""
    loaded = heedful.load(make_model_dir(tmp_path / "bare", "bare"))
    assert loaded.model.encoder is not None
    expected_steps = block_steps(Inspection(loaded, TEXT), "encoder", 1, 3, 4)
    gates = open_gates(loaded.model)
    gates["encoder"][0, 2] = 0.0
    batch = Packed.of([[1, 2, 3]])
    with torch.no_grad(), gated_heads(loaded.model, gates):
        masked = loaded.model(batch)

    def wrong_kernel(
        block: Block, x: torch.Tensor, context: AttentionContext, layer: LayerContext
    ) -> torch.Tensor | None:
        return None if context.trace is not None else torch.zeros_like(x)

    loaded.model.execution = ExecutionOptions(fused_block=wrong_kernel)
    steps = block_steps(Inspection(loaded, TEXT), "encoder", 1, 3, 4)
    assert [step.vectors.keys() for step in steps] == [step.vectors.keys() for step in expected_steps]
    with torch.no_grad(), gated_heads(loaded.model, gates):
        assert torch.equal(loaded.model(batch), masked)
    assert loaded.model.execution.fused_block is wrong_kernel


@pytest.mark.parametrize(
    ("name", "text"),
    [("single", "the cat sat on the mat"), ("masked", "the [MASK] sat"), ("tag", "ada lives in paris")],
)
def test_attributions_sum_to_the_difference_of_the_scores(tmp_path: Path, name: str, text: str) -> None:
    inspection = Inspection(heedful.load(make_model_dir(tmp_path / name, name)), text)
    explained = explained_score(inspection)
    attribution = integrated_gradients(inspection, explained.score, explained.name, steps=200)
    difference = abs(attribution.at_text - attribution.at_baseline)
    assert abs(attribution.missing) < 2e-2 * max(1.0, difference)
    assert float(attribution.values[0].abs()) < 1e-6, "[CLS] is the same in the baseline"
    with torch.no_grad():
        outputs = inspection.loaded(inspection.source)
    assert float((outputs - attribution.at_text).abs().min()) < 1e-5, "the score is one of the model's outputs"
    assert all(parameter.requires_grad for parameter in inspection.loaded.parameters())


def test_the_answer_to_a_question_is_explained(tmp_path: Path) -> None:
    loaded = heedful.load(make_model_dir(tmp_path / "span", "span"))
    inspection = Inspection(loaded, ("who wrote it", "ada wrote the program"))
    assert "answer" in explained_score(inspection).name
    assert set(PageAPI([inspection])("prediction", {})) >= {"answer", "attribution"}


CLASSIC_TEXT = "the film was not good . the end . very bad"


@pytest.mark.parametrize(
    "name",
    [
        *("plain attention", "a query for each class", "structured", "hierarchical"),
        *("bag of sums", "recurrent", "dot products"),
    ],
)
def test_attention_weights_of_classic_models_sum_to_one(name: str) -> None:
    inspection = Inspection(make_classic(name), CLASSIC_TEXT)
    for view in inspection.views:
        weights = inspection.weights(view.part, 0)
        assert weights.shape[1:] == (len(inspection.sides[view.rows]), len(inspection.sides["source"]))
        sums = weights.sum(-1)
        if name == "hierarchical":  # "word in the text"; the other two heads have the weights of its factors
            sums = sums[2]
        assert torch.allclose(sums, torch.ones_like(sums))


def test_the_output_of_untrained_self_attention_is_its_weights_times_the_word_vectors() -> None:
    loaded = make_classic("dot products")
    inspection = Inspection(loaded, CLASSIC_TEXT)
    word_vectors = loaded.model.embedding(inspection.source)
    output = loaded.hidden_states(inspection.source)
    assert torch.allclose(inspection.weights("over", 0)[0] @ word_vectors, output)


def test_a_classic_encoder_without_a_head_has_no_attention() -> None:
    with pytest.raises(HeedfulError, match="no attention"):
        Inspection(make_classic_encoder(READERS["plain attention"]), CLASSIC_TEXT)


@pytest.mark.parametrize("name", ["bag of means", "bag of sums"])
def test_a_bag_of_words_attends_equally_to_all_words(name: str) -> None:
    inspection = Inspection(make_classic(name), "the film was not good")
    answer = PageAPI([inspection])("prediction", {"label": "1"})
    assert numbers(answer["attention"]).tolist() == pytest.approx([0.2] * 5, abs=1e-4)
    missing = answer["attribution"]["missing"]
    assert missing == pytest.approx(0, abs=1e-12), "the score is linear in the word vectors, so attribution is exact"


# -- comparisons ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> heedful.ModelBundle:
    """An encoder of two layers without a head."""
    return heedful.load(make_model_dir(tmp_path_factory.mktemp("bare"), "bare"))


@pytest.fixture(scope="module")
def cat(bare: heedful.ModelBundle) -> Inspection:
    return Inspection(bare, "the cat sat on the mat")


@pytest.fixture(scope="module")
def dog(bare: heedful.ModelBundle) -> Inspection:
    return Inspection(bare, "the dog sat on the mat")


def test_two_texts_are_compared_token_by_token(cat: Inspection, dog: Inspection) -> None:
    assert align_tokens(["a", "b", "c", "d"], ["a", "x", "c"]) == [(0, 0), (1, 1), (2, 2)]
    comparison = PageAPI([cat, dog])("compare", {"part": "encoder", "layer": "1", "head": "2", "other_head": "2"})
    expected = dog.weights("encoder", 1)[2] - cat.weights("encoder", 1)[2]
    assert np.abs(numbers(comparison["difference"]) - expected.numpy()).max() < 1e-6


def test_models_with_different_numbers_of_layers_are_compared(tmp_path: Path, bare: heedful.ModelBundle) -> None:
    save_tiny(tmp_path / "deep", "bert", "BertModel", vocab_size=bare.config.model.embedding.vocabulary)
    deep = heedful.load(tmp_path / "deep")  # four layers
    deep.tokenizer = bare.tokenizer
    first, second = Inspection(deep, "the cat sat"), Inspection(bare, "the cat sat")
    api = PageAPI([first, second])
    comparison = api("compare", {"part": "encoder", "layer": "3", "other_layer": "1"})
    expected = second.weights("encoder", 1).mean(0) - first.weights("encoder", 3).mean(0)
    assert np.abs(numbers(comparison["difference"]) - expected.numpy()).max() < 1e-6
    assert "different shapes" in comparison["apart"], "hidden states are not compared"
    answers = collect_answers(api, layers=[3], heads=[0]).answers  # layer 3 is compared with the last of two layers
    assert "difference" in answers["compare?head=mean&layer=3&other_head=mean&other_layer=1&part=encoder"]


def test_a_word_is_compared_in_two_texts(cat: Inspection, dog: Inspection) -> None:
    similarity = contextual_similarity([cat, dog], "mat")
    assert len(similarity.occurrences) == 2
    assert torch.allclose(similarity.layers[1].diagonal(), torch.ones(2))
    last_states = [inspection.hidden_states("encoder")[2][6] for inspection in (cat, dog)]
    expected = torch.nn.functional.cosine_similarity(*last_states, dim=0)
    assert torch.isclose(similarity.layers[2][0, 1], expected, atol=1e-6)


def test_a_word_is_found_in_both_texts_of_a_pair(bare: heedful.ModelBundle) -> None:
    similarity = contextual_similarity([Inspection(bare, ("The cat sat", "on the mat"))], "the")
    first, second = similarity.occurrences
    assert first == {"text": "The cat sat", "start": 0, "stop": 3}
    assert second == {"text": "on the mat", "start": 3, "stop": 6}


# -- spectrum of a head ---------------------------------------------------------------------------------------------


def test_spectrum_equals_that_of_the_full_matrix(bare: heedful.ModelBundle) -> None:
    assert bare.model.encoder is not None
    spectrum = qk_spectrum(bare, "encoder", 1, 3)
    qkv = bare.model.encoder.blocks[1].attention.qkv.weight.detach().double()
    m = qkv[24:32].T @ qkv[32 + 24 : 32 + 32]  # rows of head 3: 8 of the 32 of all queries, and of all keys
    assert torch.allclose(spectrum.singular_values, torch.linalg.svdvals(m)[:8], atol=1e-9)
    eigenvalues = torch.linalg.eigvalsh((m + m.T) / 2).flip(0)
    assert torch.allclose(spectrum.eigenvalues[:8], eigenvalues[:8], atol=1e-9)
    assert spectrum.summary.startswith("No metric")
    identity = spectrum_of(torch.eye(3).double(), torch.eye(3).double())
    assert identity.summary.startswith("Symmetric and positive")


def test_spectrum_of_heads_that_share_keys(tmp_path: Path) -> None:
    save_tiny(tmp_path / "shared", "llama", "LlamaModel", num_key_value_heads=2)
    loaded = heedful.load(tmp_path / "shared")
    assert loaded.model.decoder is not None
    weight = loaded.model.decoder.blocks[1].attention.qkv.weight.detach().double()
    spectrum = qk_spectrum(loaded, "decoder", 1, 3)
    m = weight[24:32].T @ weight[32 + 8 : 32 + 16]  # query head 3 uses key head 1
    assert torch.allclose(spectrum.singular_values, torch.linalg.svdvals(m)[:8], atol=1e-9)
    save_tiny(tmp_path / "normed", "qwen3", "Qwen3Model")
    with pytest.raises(HeedfulError, match="queries and keys of this model are normalised"):
        qk_spectrum(heedful.load(tmp_path / "normed"), "decoder", 1, 3)


@pytest.mark.parametrize(("kind", "error"), [(OneDnnLinear, 1e-12), (Int8Linear, 0.02)])
def test_spectrum_of_layers_that_were_converted_for_inference(
    tmp_path: Path, kind: type[OneDnnLinear | Int8Linear], error: float
) -> None:
    """Such layers store their weights in another form."""
    if kind is OneDnnLinear and (reason := cannot_use_onednn(torch.float32)):
        pytest.skip(reason)
    loaded = heedful.load(make_model_dir(tmp_path / "bare", "bare"))
    plain = qk_spectrum(loaded, "encoder", 1, 3)
    assert loaded.model.encoder is not None
    attention = loaded.model.encoder.blocks[1].attention
    attention.add_module("qkv", kind(attention.qkv))
    converted = qk_spectrum(loaded, "encoder", 1, 3)
    tolerance = error * float(plain.singular_values[0])
    assert torch.allclose(converted.singular_values, plain.singular_values, rtol=0, atol=tolerance)


# -- generation -----------------------------------------------------------------------------------------------------


def test_the_decoder_generates_the_same_text_as_the_engine(tmp_path: Path) -> None:
    save_tiny(tmp_path, "t5", "T5ForConditionalGeneration", vocab_size=96)
    loaded = heedful.load(tmp_path)
    loaded.tokenizer = with_special_tokens(word_tokenizer(WORDS))
    inspection = Inspection(loaded, TEXT, target=TEXT[:11])
    assert not inspection.target_is_generated
    assert [view.part for view in inspection.views] == ["encoder", "decoder", "cross"]
    report = decoding_report(inspection, max_new_tokens=6, num_beams=2)
    assert report["steps"] and report["steps"][0]["candidates"][0]["text"] == report["steps"][0]["token"]
    (answer,) = heedful.Engine(loaded, writing=GenerationConfig(max_new_tokens=6))([TEXT])
    assert abs(report["greedy"]["log_probability"] - answer["log_probability"]) < 1e-4
    assert report["greedy"]["text"] == answer["text"] and len(report["beams"]) == 2
    assert inspection.weights("cross", 1).shape == (4, len(inspection.sides["target"]), len(inspection.sides["source"]))
    shorter = Inspection(loaded, TEXT, target=TEXT[:7])
    similarity = hidden_state_similarity(inspection, shorter, "cross")  # of the decoder's hidden states
    assert len(similarity.tokens) == len(shorter.sides["target"]) < len(inspection.sides["target"])
    assert torch.allclose(similarity.cosines[0], torch.ones(len(similarity.tokens)), atol=1e-6)


@pytest.mark.parametrize("setting", ["eos_token_id", "max_length"])
def test_the_decoder_obeys_the_generation_settings_of_the_folder(tmp_path: Path, setting: str) -> None:
    save_tiny(tmp_path, "t5", "T5ForConditionalGeneration", vocab_size=96)
    loaded = heedful.load(tmp_path)
    loaded.tokenizer = with_special_tokens(word_tokenizer(WORDS))
    unlimited = Inspection(loaded, TEXT).sides["target"][1:]
    assert len(unlimited) > 8 and loaded.config.generation is not None
    value = {"eos_token_id": [1, unlimited[4]["id"]], "max_length": 5}[setting]
    loaded.config = replace(loaded.config, generation=loaded.config.generation | {setting: value})
    (answer,) = heedful.Engine(loaded)([TEXT])
    assert answer["tokens"] < 8
    inspection = Inspection(loaded, TEXT)
    report = decoding_report(inspection)
    assert report["greedy"]["text"] == answer["text"]
    assert report["greedy"]["num_tokens"] == len(report["steps"]) == answer["tokens"] + answer["complete"]
    assert report["greedy"]["log_probability"] == pytest.approx(answer["log_probability"], abs=1e-4)
    assert len(inspection.sides["target"]) == 1 + answer["tokens"]


def test_decoding_restores_training_mode(tmp_path: Path) -> None:
    save_tiny(tmp_path, "t5", "T5ForConditionalGeneration", vocab_size=96)
    loaded = heedful.load(tmp_path)
    loaded.tokenizer = with_special_tokens(word_tokenizer(WORDS))
    expected = decoding_report(Inspection(loaded, TEXT), max_new_tokens=4, num_beams=2)
    loaded.train()
    assert decoding_report(Inspection(loaded, TEXT), max_new_tokens=4, num_beams=2) == expected and loaded.training


# -- word vectors ---------------------------------------------------------------------------------------------------


def test_analogies_of_known_vectors() -> None:
    """The static vectors of four words are set by hand, so that "not" is exactly bad - good + very."""
    loaded = make_classic("plain attention")
    assert loaded.tokenizer is not None
    vectors = {"good": (1, 0, 1, 0), "bad": (1, 0, 0, 1), "very": (0, 1, 1, 0), "not": (0, 1, 0, 1)}
    with torch.no_grad():
        table = loaded.model.embedding.tokens.weight
        table.zero_()
        for word, vector in vectors.items():
            table[loaded.tokenizer.id(word)] = torch.tensor(vector).double()
    (nearest, *_) = analogy(loaded, "good", "bad", "very")
    assert nearest["text"] == "not" and nearest["cosine"] == pytest.approx(1.0)
    with pytest.raises(HeedfulError, match='"king" is not in the vocabulary'):
        analogy(loaded, "good", "king", "very")


@pytest.mark.parametrize("name", ["plain attention", "structured"])
def test_only_a_recurrent_network_distinguishes_occurrences_of_a_word(name: str) -> None:
    """The model "structured" has a recurrent network over the word vectors; "plain attention" has none."""
    is_recurrent = name == "structured"
    loaded = make_classic(name)
    inspection = Inspection(loaded, "the film was good . the end was not good")
    similarity = contextual_similarity([inspection], "good")
    layer_names = ["in the embeddings"] + ["after the recurrent network"] * is_recurrent
    assert similarity.layer_names == layer_names
    assert len(similarity.occurrences) == 2 and not similarity.static_error
    assert similarity.layers[0][0, 1] == pytest.approx(1.0)
    rows = loaded.hidden_states(inspection.source) if is_recurrent else loaded.model.embedding(inspection.source)
    cosine = torch.nn.functional.cosine_similarity(rows[3], rows[9], dim=0).detach()
    assert torch.isclose(similarity.layers[-1][0, 1], cosine)
    assert (abs(float(cosine)) < 0.999) == is_recurrent


# -- recurrent models, and errors -----------------------------------------------------------------------------------


def test_attention_weights_of_a_recurrent_model_give_its_hidden_states() -> None:
    """The last hidden state is tanh(W [weights times encoder states, decoder state]) (Luong et al. 2015)."""
    words = word_tokenizer(WORDS)
    embedding = EmbeddingConfig(vocabulary=words.size, width=6)
    config = ClassicConfig(embedding=embedding, reader=RecurrentSeq2Seq(width=8, feed=False))
    bundle_config = BundleConfig(family="heedful-classic", model=config, head=NextToken())
    loaded = create(bundle_config, words, seed=1).double().eval()
    loaded.tokenizer = with_special_tokens(words)
    inspection = Inspection(loaded, TEXT, target=TEXT[:15])
    assert [(view.part, view.rows, view.keys) for view in inspection.views] == [("cross", "target", "source")]
    model: Any = loaded.model
    weights = inspection.weights("cross", 0)[0]
    with torch.no_grad():
        encoder_states = model.reading(model.embedding(inspection.source), inspection.source.bounds)
        first_state = model._first_state(encoder_states, inspection.source.bounds)[0][:, 0]
        decoder_states, _ = model.writing(model.embedding(inspection.target), first_state)
        expected = model.mix(torch.cat([weights @ encoder_states, decoder_states], -1)).tanh()
    assert torch.allclose(inspection.last_hidden_state, expected, atol=1e-12)
    assert torch.allclose(weights.sum(-1), torch.ones(5).double())


@pytest.mark.parametrize(
    ("question", "params", "message"),
    [
        ("weights", {"part": "cross"}, 'part "cross" does not exist: use one of encoder'),
        ("weights", {"layer": "9"}, "layer is '9'; expected a whole number from 0 to 1"),
        ("weights", {"head": "٣"}, "head is '٣'; expected a whole number from 0 to 3"),
        ("passwords", {}, '"passwords" is not a question'),
        ("compare", {}, "there is one text: give another one"),
        ("words", {"word": "dog"}, '"dog" occurs in none of the texts'),
        ("look", {"text": "cat " * 60}, "the text has 62 tokens, and this model reads 1 to 48 at once"),
    ],
)
def test_questions_without_an_answer_are_errors(
    cat: Inspection, question: str, params: dict[str, str], message: str
) -> None:
    with pytest.raises(HeedfulError) as raised:
        PageAPI([cat])(question, params)
    assert message in str(raised.value)


def test_unknown_tokens_show_their_characters() -> None:
    inspection = Inspection(heedful.load("heedful-mini-en"), ("The \u732b sat.", "A \U0001f600 dog."))
    unknown = inspection.tokenizer.special.unknown
    names = [token["text"] for token in inspection.sides["source"] if token["id"] == unknown]
    assert names == ["[UNK] \u732b", "[UNK] \U0001f600"]
