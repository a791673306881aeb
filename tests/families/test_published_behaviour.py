"""Details of published models that implementations often get wrong, one test each."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import heedful
from heedful.checkpoint import create, read_config
from heedful.families import FAMILIES
from heedful.model.config import DynamicNtk, Learned, Normal, Rotary, Yarn
from heedful.packed import Packed
from tests.support.tiny_models import (
    TINY,
    Float64Mode,
    hf_outputs,
    make_tiny,
    our_outputs,
    random_batch,
    random_sequences,
    save_tiny,
    scaled_error,
    transformers_in_float64,
)


def _values(family: str, architecture: str, **changed: object) -> dict[str, object]:
    """Return the complete config.json of a tiny model, as transformers writes it, with changed values."""
    return json.loads(make_tiny(family, architecture).config.to_json_string(use_diff=False)) | {
        "architectures": [architecture],
        **changed,
    }


@pytest.mark.parametrize(
    ("hf_name", "our_name"),
    [("gelu", "gelu"), ("gelu_new", "gelu_tanh"), ("gelu_pytorch_tanh", "gelu_tanh"), ("relu", "relu")],
)
def test_the_activation_is_the_files_own(tmp_path: Path, hf_name: str, our_name: str) -> None:
    reference = save_tiny(tmp_path, "bert", "BertForMaskedLM", torch.float64, hidden_act=hf_name)
    loaded = heedful.load(tmp_path, dtype=torch.float64)
    assert loaded.config.model.encoder is not None and loaded.config.model.encoder.activation == our_name
    batch = random_batch("bert", (9,))
    with torch.no_grad():
        expected = reference(batch.tokens[None], token_type_ids=batch.types[None]).logits[0]
        assert (loaded(batch) - expected).abs().max() < 1e-12 * expected.abs().max()


def test_an_unknown_activation_is_named() -> None:
    with pytest.raises(heedful.HeedfulError, match=r"hidden_act is 'nope'; expected one of gelu, gelu_new"):
        read_config(_values("bert", "BertModel", hidden_act="nope"), "config.json")


def test_eps_of_norms(tmp_path: Path) -> None:
    """1e-12 for BERT and DistilBERT, whose config.json does not say it, and 1e-5 for RoBERTa."""
    for family, architecture, eps in (
        ("bert", "BertModel", 1e-12),
        ("distilbert", "DistilBertModel", 1e-12),
        ("roberta", "RobertaModel", 1e-5),
    ):
        save_tiny(tmp_path / family, family, architecture)
        loaded = heedful.load(tmp_path / family)
        norms = [module for module in loaded.modules() if isinstance(module, torch.nn.LayerNorm)]
        assert norms and all(norm.eps == eps for norm in norms)


def test_class_defaults_are_not_the_published_values() -> None:
    """RobertaConfig() has eps 1e-12, 512 positions and 2 types; roberta-base has 1e-5, 514 and 1.

    So no default replaces a key that config.json lacks: reading it fails.
    """
    default = transformers.RobertaConfig()
    assert (default.layer_norm_eps, default.max_position_embeddings, default.type_vocab_size) == (1e-12, 512, 2)
    values = _values("roberta", "RobertaModel")
    for key in ("layer_norm_eps", "max_position_embeddings", "type_vocab_size", "pad_token_id", "vocab_size"):
        with pytest.raises(heedful.HeedfulError, match=f"{key} is missing"):
            read_config({name: value for name, value in values.items() if name != key}, "config.json")


def test_positions_start_after_the_padding_id(tmp_path: Path) -> None:
    """[0, 5, 6, 2, 1, 1] has the positions [2, 3, 4, 5, 1, 1]; in a pack every sequence starts at 2 again."""
    embeddings = transformers.models.roberta.modeling_roberta.RobertaEmbeddings
    ids = torch.tensor([[0, 5, 6, 2, 1, 1]])
    assert embeddings.create_position_ids_from_input_ids(ids, 1).tolist() == [[2, 3, 4, 5, 1, 1]]
    reference = save_tiny(tmp_path, "roberta", "RobertaModel", torch.float64)
    loaded = heedful.load(tmp_path, dtype=torch.float64)
    learned = loaded.config.model.embedding.positions
    assert isinstance(learned, Learned) and (learned.offset, learned.count) == (2, 42)
    batch = Packed.of([[0, 5, 6, 2], [0, 9, 2]])
    assert (batch.positions + learned.offset).tolist() == [2, 3, 4, 5, 2, 3, 4]
    with torch.no_grad():
        expected = reference(ids, attention_mask=torch.tensor([[1, 1, 1, 1, 0, 0]])).last_hidden_state[0, :4]
        assert (loaded.model(batch)[:4] - expected).abs().max() < 1e-12 * expected.abs().max()
    with pytest.raises(heedful.HeedfulError, match="has 41 tokens, but the model has positions for 40"):
        loaded.model(Packed.of([[5] * 41]))


def test_another_padding_id_shortens_the_length(tmp_path: Path) -> None:
    save_tiny(tmp_path, "roberta", "RobertaModel", pad_token_id=3)
    loaded = heedful.load(tmp_path)
    with pytest.raises(heedful.HeedfulError, match="has 39 tokens, but the model has positions for 38"):
        loaded.model(Packed.of([[5] * 39]))


def test_no_types_no_pooler_and_relu(tmp_path: Path) -> None:
    """DistilBERT ignores the token types of a batch that a BERT model reads; it has no pooler, and a ReLU in its head.

    The two share a batch where one is distilled into the other.
    """
    save_tiny(tmp_path / "student", "distilbert", "DistilBertForSequenceClassification")
    save_tiny(tmp_path / "teacher", "bert", "BertForSequenceClassification")
    student, teacher = heedful.load(tmp_path / "student"), heedful.load(tmp_path / "teacher")
    ids = [[5, 6, 7, 8], [9, 10]]
    typed, untyped = Packed.of(ids, [[0, 0, 1, 1], [0, 1]]), Packed.of(ids)
    with torch.no_grad():
        assert torch.equal(student(typed), student(untyped))
        assert (teacher(typed) - teacher(untyped)).abs().max() > 1e-3
    assert student.config.head is not None and student.config.head.activation == "relu"  # type: ignore[union-attr]
    assert not any("types" in name or "pooler" in name for name in student.named_tensors())


def test_zero_means_the_next_sentence(tmp_path: Path) -> None:
    """Label 0 of next-sentence prediction is "the second text follows": its loss is that of our logit 0."""
    reference = save_tiny(tmp_path, "bert", "BertForNextSentencePrediction")
    batch = random_batch("bert", (9,))
    with torch.no_grad():
        logits = heedful.load(tmp_path)(batch)
        loss = reference(batch.tokens[None], token_type_ids=batch.types[None], labels=torch.tensor([0])).loss
        assert torch.allclose(-logits.log_softmax(-1)[0, 0], loss, atol=1e-6)


def test_the_pooler_is_tanh_of_the_first_row(tmp_path: Path) -> None:
    save_tiny(tmp_path, "bert", "BertModel", torch.float64)
    loaded = heedful.load(tmp_path, dtype=torch.float64)
    batch = random_batch("bert")
    with torch.no_grad():
        hidden_states = batch.unpack(loaded.model(batch))
        dense = loaded.head.first.dense  # type: ignore[union-attr]
        for pooled, sequence in zip(loaded(batch), hidden_states, strict=True):
            expected = torch.tanh(dense.weight @ sequence[0] + dense.bias)
            assert (pooled - expected).abs().max() < 1e-12


def test_one_block_for_all_layers_and_narrow_embeddings(tmp_path: Path) -> None:
    """ALBERT: six layers are one block; embeddings and vocabulary head are 16 wide, the model is 32 wide."""
    save_tiny(tmp_path, "albert", "AlbertForMaskedLM", num_hidden_groups=1, num_hidden_layers=6)
    loaded = heedful.load(tmp_path)
    in_blocks = [name for name in loaded.named_tensors() if name.startswith("encoder.blocks")]
    assert in_blocks and all(name.startswith("encoder.blocks.0.") for name in in_blocks)
    assert loaded.model.encoder is not None and loaded.model.encoder.config.layers == 6
    assert loaded.named_tensors()["embedding.project.weight"].shape == (32, 16)
    assert loaded.named_tensors()["head.dense.weight"].shape == (16, 32)
    assert loaded.head.decoder.weight is loaded.model.embedding.tokens.weight  # type: ignore[union-attr]
    config = json.loads((tmp_path / "config.json").read_text())
    for key, value in (("inner_group_num", 2), ("net_structure_type", 1)):
        with pytest.raises(heedful.HeedfulError, match=f"{key} is {value}; only"):
            read_config(config | {key: value}, "config.json")


@pytest.mark.parametrize("architecture", ["AlbertModel", "AlbertForMaskedLM", "AlbertForQuestionAnswering"])
def test_albert_projects_embeddings_as_wide_as_the_model(tmp_path: Path, architecture: str) -> None:
    """transformers always has `embedding_hidden_mapping_in`: loading, saving and creating agree with it."""
    reference = save_tiny(tmp_path / "theirs", "albert", architecture, torch.float64, embedding_size=32)
    loaded = heedful.load(tmp_path / "theirs", dtype=torch.float64)
    created = create(read_config(json.loads((tmp_path / "theirs/config.json").read_text()), "config.json"), seed=3)
    heedful.save(created, tmp_path / "created")
    created_in_hf, report = type(reference).from_pretrained(tmp_path / "created", output_loading_info=True)
    assert not any(report.values())
    batch, (ids, types) = random_batch("albert"), random_sequences("albert")
    pairs = ((loaded, reference, 1e-12), (created.eval(), created_in_hf.eval(), 1e-5))
    for our_model, hf_model, tolerance in pairs:
        with torch.no_grad():
            outputs, expected_outputs = our_outputs(our_model, batch), hf_outputs(hf_model, "albert", ids, types)
        for actual, expected in zip(outputs, expected_outputs, strict=True):
            assert (actual - expected).abs().max() <= tolerance


def test_the_summary_is_the_last_row_and_mems_are_refused(tmp_path: Path) -> None:
    """XLNet's batches are padded on the left, so that the summary is the last row with and without padding."""
    reference = save_tiny(tmp_path, "xlnet", "XLNetForSequenceClassification", torch.float64)
    loaded, batch = heedful.load(tmp_path, dtype=torch.float64), random_batch("xlnet", (5, 9))
    ids, types = batch.unpack(batch.tokens), batch.unpack(batch.types)
    inputs = {
        "input_ids": torch.stack([torch.cat([torch.full((4,), 5), ids[0]]), ids[1]]),
        "token_type_ids": torch.stack([torch.cat([torch.full((4,), 3), types[0]]), types[1]]),
        "attention_mask": torch.tensor([[0] * 4 + [1] * 5, [1] * 9]),
    }
    with torch.no_grad(), Float64Mode(torch.float64):
        assert (loaded(batch) - reference(**inputs).logits).abs().max() < 1e-12
    config = json.loads((tmp_path / "config.json").read_text())
    for key, value in (("attn_type", "uni"), ("bi_data", True), ("same_length", True), ("untie_r", False)):
        with pytest.raises(heedful.HeedfulError, match=f"{key} is {value!r}; only"):
            read_config(config | {key: value}, "config.json")
    with pytest.raises(heedful.HeedfulError, match=r"architectures is .'XLNetForQuestionAnswering'.; expected one of"):
        read_config(config | {"architectures": ["XLNetForQuestionAnswering"]}, "config.json")


def test_left_padding_needs_positions_and_packing_does_not(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "gpt2", "GPT2LMHeadModel", torch.float64)
    loaded, batch = heedful.load(tmp_path, dtype=torch.float64), random_batch("gpt2", (5, 9))
    ids = batch.unpack(batch.tokens)
    mask = torch.tensor([[0] * 4 + [1] * 5, [1] * 9])
    inputs = {"input_ids": torch.stack([torch.cat([torch.zeros(4, dtype=torch.long), ids[0]]), ids[1]])}
    with torch.no_grad():
        right = reference(**inputs, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
        wrong = reference(**inputs, attention_mask=mask, position_ids=torch.arange(9).expand(2, -1)).logits
        actual = loaded(batch)
    first = actual[:5]  # the rows of the shorter text, which is padded in transformers
    assert (first - right[0, 4:]).abs().max() < 1e-12
    assert (first - wrong[0, 4:]).abs().max() > 0.01


def test_weights_of_gpt2_are_transposed(tmp_path: Path) -> None:
    save_tiny(tmp_path, "gpt2", "GPT2LMHeadModel")
    stored = load_file(tmp_path / "model.safetensors")["transformer.h.0.mlp.c_fc.weight"]
    assert torch.equal(heedful.load(tmp_path).named_tensors()["decoder.blocks.0.mlp.up.weight"], stored.T)


def test_only_the_original_and_its_heirs_scale_their_embedding() -> None:
    for kind, family in FAMILIES.items():
        for name, values in family.sizes.items():
            embedding = read_config({**values, "model_type": kind}, name).model.embedding
            scales = kind in ("heedful", "mbart", "marian")
            assert embedding.scale == (embedding.width**0.5 if scales else 1.0), name


def test_relative_positions_of_transformers_4(tmp_path: Path) -> None:
    """Compare `position_embedding_type: relative_key` with what transformers 4 computed, which is rebuilt here.

    The score of query i and key j is (q_i k_j + q_i E[i - j]) / sqrt(d). The file has a table of absolute positions
    too, which transformers 4 did not add. transformers 5 accepts the key and ignores it.
    """
    reference = save_tiny(tmp_path, "bert", "BertModel", torch.float64)
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(tmp_path / "model.safetensors")
    tables = [torch.randn(79, 8, generator=generator, dtype=torch.float64) for _ in range(4)]
    for index, table in enumerate(tables):
        tensors[f"encoder.layer.{index}.attention.self.distance_embedding.weight"] = table
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text()) | {"position_embedding_type": "relative_key"}
    (tmp_path / "config.json").write_text(json.dumps(config))

    table_of_next_layer = iter(tables)

    def version_4(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **kwargs: Any) -> Any:
        positions = torch.arange(query.shape[2])
        by_distance = next(table_of_next_layer)[positions[:, None] - positions[None, :] + 39]
        scores = torch.einsum("bhid,bhjd->bhij", query, key) + torch.einsum("bhid,ijd->bhij", query, by_distance)
        return ((scores * scaling).softmax(-1) @ value).transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("version_4", version_4)
    reference.config._attn_implementation = "version_4"
    reference.embeddings.position_embeddings.weight.data.zero_()
    loaded, batch = heedful.load(tmp_path, dtype=torch.float64), random_batch("bert", (23,))
    inputs = {"input_ids": batch.tokens[None], "token_type_ids": batch.types[None]}
    with torch.no_grad():
        expected = reference(**inputs).last_hidden_state[0]
        assert (loaded.model(batch) - expected).abs().max() < 1e-12
    heedful.save(loaded, tmp_path / "again")
    saved = load_file(tmp_path / "again/model.safetensors")
    assert saved.keys() == tensors.keys() - {"embeddings.position_embeddings.weight"}
    assert all(torch.equal(saved[name], tensors[name]) for name in saved)
    assert heedful.load(tmp_path / "again").config.model == loaded.config.model
    with pytest.raises(heedful.HeedfulError, match="position_embedding_type is 'relative_key_query'; expected one of"):
        read_config(_values("bert", "BertModel", position_embedding_type="relative_key_query"), "config.json")


def test_initialisation_as_the_config_says() -> None:
    config = read_config(_values("bert", "BertModel", initializer_range=0.05), "config.json")
    assert config.model.initialisation == Normal(std=0.05)
    tokens = heedful.checkpoint.create(config).model.embedding.tokens.weight
    assert tokens[0].abs().max() == 0  # the padding row
    assert 0.04 < tokens[1:].std() < 0.06


@pytest.mark.parametrize("architecture", ["BertLMHeadModel", "BertGenerationDecoder", "XBert"])
def test_unknown_architectures_are_refused_by_name(architecture: str) -> None:
    with pytest.raises(
        heedful.HeedfulError, match=rf"architectures is \['{architecture}'\]; expected one of BertModel"
    ):
        read_config(_values("bert", "BertModel") | {"architectures": [architecture]}, "config.json")


@pytest.mark.parametrize("family", TINY)
def test_every_key_of_published_configs_is_known(family: str) -> None:
    """A config.json in which transformers writes every key is read without an unknown key."""
    read_config(_values(family, FAMILIES[family].bare), "config.json")


@pytest.mark.parametrize(
    ("values", "base", "global_every"),
    [
        ({"global_attn_every_n_layers": 2, "global_rope_theta": 5e4, "local_rope_theta": 1e3}, 5e4, 2),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, 160_000.0, 2),
        ({"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 7e4}}}, 7e4, 3),
    ],
)
def test_older_and_newer_keys_of_modernbert(values: dict[str, Any], base: float, global_every: int) -> None:
    """The base of rotary positions and the period of global layers, in the published keys or in transformers 5's."""
    complete = _values("modernbert", "ModernBertModel")
    neutral = {key: value for key, value in complete.items() if key != "layer_types" and not key.startswith("rope")}
    encoder = read_config(neutral | values, "config.json").model.encoder
    assert encoder is not None and isinstance(encoder.relation, Rotary)
    assert (encoder.relation.base, encoder.global_every) == (base, global_every)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"layer_types": ["sliding_attention"] * 3},
            "expected full_attention or sliding_attention for each of 4 layers",
        ),
        (
            {"layer_types": ["sliding_attention", "chunked_attention"] * 2},
            "expected full_attention or sliding_attention",
        ),
        ({"layer_types": "full_attention"}, "expected a list of full_attention and sliding_attention"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "expected objects under full_attention and sliding_attention"),
        (
            {"rope_parameters": {"full_attention": 3}},
            r"rope_parameters\.full_attention cannot be read; expected objects",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "llama3"}}}, "low_freq_factor is missing"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0}},
            "for ModernBERT, transformers reads rope_type and not type: rename",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": False}},
            "transformers would ignore truncate=F",
        ),
    ],
)
def test_other_rotary_positions_are_refused(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(heedful.HeedfulError, match=expected):
        read_config(_values("modernbert", "ModernBertModel", **values), "config.json")


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10, "beta_fast": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 10}
LLAMA3 |= {"low_freq_factor": 0.1, "high_freq_factor": 1.2}
LONGROPE = {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 10}
LONGROPE |= {"short_factor": [1.0, 1.0625, 1.5, 2.25], "long_factor": [1.0, 2.5, 8.0, 31.5]}


@pytest.mark.parametrize(
    "changed",
    [
        {"layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]},
        {"layer_types": ["sliding_attention"] * 4},
        {"layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention"]},
        {"rope_parameters": {"full_attention": YARN | {"rope_theta": 500.0}}},
        {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 3.0}}},
        {"rope_parameters": {"full_attention": LLAMA3 | {"rope_theta": 500.0}, "sliding_attention": LLAMA3}},
        {"rope_parameters": {"full_attention": LONGROPE | {"rope_theta": 500.0}, "sliding_attention": LONGROPE}},
        {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), YARN)},
        {"rope_parameters": {"full_attention": {"rope_type": "dynamic", "factor": 4.0}}, "max_position_embeddings": 10},
    ],
)
def test_uneven_layers_and_stretched_positions_of_modernbert(tmp_path: Path, changed: dict[str, Any]) -> None:
    reference = save_tiny(tmp_path, "modernbert", "ModernBertModel", torch.float64, **changed)
    loaded = heedful.load(tmp_path, dtype=torch.float64)
    ids = random_sequences("modernbert", (3, 9, 11, 30))[0]
    with transformers_in_float64():
        expected = torch.cat([reference(torch.tensor([row_ids])).last_hidden_state[0] for row_ids in ids])
        rows = loaded.model(random_batch("modernbert", (3, 9, 11, 30)))
        assert scaled_error(rows, expected) <= 1e-12
    values = FAMILIES["modernbert"].write(loaded.config.model) | {"model_type": "modernbert"}
    assert read_config(values, "config.json").model == loaded.config.model
    heedful.save(loaded, tmp_path / "again")
    with transformers_in_float64():
        reloaded = transformers.ModernBertModel.from_pretrained(tmp_path / "again", dtype=torch.float64).eval()
        saved_again = torch.cat([reloaded(torch.tensor([row_ids])).last_hidden_state[0] for row_ids in ids])
    assert scaled_error(saved_again, expected) <= 1e-12


def test_rope_scaling_of_modernbert_is_for_both_kinds_of_layers() -> None:
    values = _values("modernbert", "ModernBertModel", rope_scaling=YARN)
    encoder = read_config(values, "config.json").model.encoder
    assert encoder is not None and isinstance(encoder.relation, Rotary)
    expected = Yarn(factor=4.0, trained=10, fast=4.0, magnitude=0.1 * math.log(4.0) + 1)
    assert encoder.relation.scaling == expected
    assert encoder.relation.local_scaling == expected


def test_a_modernbert_that_its_config_cannot_describe_is_not_saved() -> None:
    """config.json has one key for the trained length of global and local layers, and none for `truncate`."""
    model = read_config(_values("modernbert", "ModernBertModel"), "config.json").model
    encoder = model.encoder
    assert encoder is not None

    def write(scaling: DynamicNtk | Yarn | None, local_scaling: DynamicNtk | None) -> dict[str, object]:
        relation = Rotary(local_base=500.0, scaling=scaling, local_scaling=local_scaling)
        return FAMILIES["modernbert"].write(replace(model, encoder=replace(encoder, relation=relation)))

    long, short = DynamicNtk(factor=2.0, trained=20), DynamicNtk(factor=2.0, trained=10)
    for scaling, local_scaling in ((long, None), (None, long), (long, long)):
        assert write(scaling, local_scaling)["max_position_embeddings"] == 20
    message = r"global layers were trained with 20 positions and the local layers with 10 .*: give both the same number"
    with pytest.raises(heedful.HeedfulError, match=message):
        write(long, short)
    assert write(Yarn(), None)["rope_parameters"]
    with pytest.raises(heedful.HeedfulError, match="truncate=False, which transformers would ignore for this family"):
        write(Yarn(truncate=False), None)


def test_an_unknown_key_is_refused_and_can_be_ignored() -> None:
    values = _values("bert", "BertModel", hidden_sise=32)
    with pytest.raises(
        heedful.HeedfulError, match=r"does not know the key 'hidden_sise' .*did you mean \"hidden_size\""
    ):
        read_config(values, "config.json")
    assert read_config(values, "config.json", ignore=["hidden_sise"]).model.width == 32


def test_weights_on_demand_are_the_eager_ones(tmp_path: Path) -> None:
    """Each query's weights sum to 1 and are those of transformers' eager attention; hooks change no output."""
    from heedful.nn.attend import attention_weights
    from heedful.nn.layout import AttentionArgs, Layout

    reference = save_tiny(tmp_path, "bert", "BertModel", torch.float64)
    loaded = heedful.load(tmp_path, dtype=torch.float64)
    batch = random_batch("bert")
    with torch.no_grad():
        before = loaded.model(batch)
        qkv_by_layer: list[torch.Tensor] = []
        blocks = loaded.model.encoder.blocks  # type: ignore[union-attr]
        hooks = [
            block.attention.qkv.register_forward_hook(lambda _, x, qkv: qkv_by_layer.append(qkv)) for block in blocks
        ]
        assert torch.equal(loaded.model(batch), before)
        for hook in hooks:
            hook.remove()
        args = AttentionArgs(layout=Layout.of(batch.bounds), scale=8**-0.5)
        for index, span in enumerate(batch.spans()):
            inputs = {"input_ids": batch.tokens[span][None], "token_type_ids": batch.types[span][None]}
            expected = reference(**inputs, output_attentions=True).attentions
            for qkv, expected_weights in zip(qkv_by_layer, expected, strict=True):
                q, k, _ = qkv.unflatten(-1, (3, 4, 8)).unbind(1)
                actual = attention_weights(q, k, args, index)
                assert (actual.sum(-1) - 1).abs().max() < 1e-12
                assert (actual - expected_weights[0]).abs().max() < 1e-12


ODD: list[Any] = [None, -1, 0, 1, 3, 2**31, 1e308, float("nan"), "", "x", [], {}, [1], {"a": 1}, True, False]


@pytest.mark.parametrize("family", TINY)
def test_odd_values_of_every_key(family: str) -> None:
    """For any value of a key, reading the configuration succeeds or raises HeedfulError."""
    complete = _values(family, FAMILIES[family].bare)
    refused = 0
    for key in complete:
        for value in ODD:
            try:
                read_config(complete | {key: value}, "config.json")
            except heedful.HeedfulError:
                refused += 1
    assert refused > 100


# -- MPNet ------------------------------------------------------------------------------------------------------


def test_distances_past_the_last_bucket_of_mpnet(tmp_path: Path) -> None:
    """In a text of 161 tokens, distances from 128 to 160 share a bucket; positions use rows 2 to 162 of their table."""
    reference = save_tiny(tmp_path, "mpnet", "MPNetModel", torch.float64, max_position_embeddings=163)
    ids = torch.randint(5, 98, (161,), generator=torch.Generator().manual_seed(2)).tolist()
    loaded = heedful.load(tmp_path, dtype=torch.float64)
    assert loaded.max_length == 161
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).last_hidden_state[0]
        assert scaled_error(loaded.hidden_states(Packed.of([ids])), expected) < 1e-12


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"relative_attention_num_buckets": 64}, "relative_attention_num_buckets is 64; only 32 can be loaded"),
        ({"pad_token_id": 0}, "pad_token_id is 0; expected a whole number from 1 to 1"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
    ],
)
def test_what_transformers_fixes_for_mpnet_is_refused_otherwise(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(heedful.HeedfulError, match=message):
        read_config(_values("mpnet", "MPNetModel", **changed), "config.json")


@pytest.mark.parametrize("config", [{}, {"tokenizer_class": "MPNetTokenizer", "do_lower_case": False}])
def test_vocab_txt_of_mpnet_is_read_as_transformers_reads_it(tmp_path: Path, config: dict[str, Any]) -> None:
    save_tiny(tmp_path, "mpnet", "MPNetModel")
    words = ["the", "cat", "sat", "##s", "mat", "The", "é", "e", "!"]
    (tmp_path / "vocab.txt").write_text("\n".join(["<s>", "<pad>", "</s>", "<unk>", "[UNK]", *words, "<mask>"]) + "\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True} | config))
    loaded, reference = heedful.load(tmp_path).tokenizer, transformers.MPNetTokenizer.from_pretrained(tmp_path)
    assert loaded is not None
    for text in ("The cats sat", "the <mask> sat !", "é dog", ""):
        assert list(loaded.encode(text).ids) == reference(text)["input_ids"]
    assert list(loaded.encode(("the cat", "sat")).ids) == reference("the cat", "sat")["input_ids"]
    assert set(loaded.encode(("the cat", "sat")).types) == {0}
