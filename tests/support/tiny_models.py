"""Tiny random models of transformers; no weight is 0 or 1, which would hide errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.overrides import TorchFunctionMode
from transformers.core_model_loading import revert_weight_conversion

from heedful.families import FAMILIES
from heedful.packed import Packed

_BERT: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.2,
    "classifier_dropout": 0.3,
}
_ROBERTA = _BERT | {"max_position_embeddings": 42, "type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 1}
TINY: dict[str, tuple[type, dict[str, Any]]] = {
    "bert": (transformers.BertConfig, _BERT),
    "roberta": (transformers.RobertaConfig, _ROBERTA),
    "xlm-roberta": (transformers.XLMRobertaConfig, _ROBERTA),
    "camembert": (transformers.CamembertConfig, _ROBERTA),
    "distilbert": (
        transformers.DistilBertConfig,
        {
            "vocab_size": 99,
            "dim": 32,
            "n_layers": 4,
            "n_heads": 4,
            "hidden_dim": 48,
            "max_position_embeddings": 40,
            "dropout": 0.1,
            "attention_dropout": 0.2,
            "seq_classif_dropout": 0.3,
            "qa_dropout": 0.4,
        },
    ),
}
_MPNET = {name: value for name, value in _ROBERTA.items() if name not in ("type_vocab_size", "classifier_dropout")}
TINY["mpnet"] = (transformers.MPNetConfig, _MPNET)
_ROTARY = {"attention_probs_dropout_prob": 0.2, "hidden_dropout_prob": 0.15, "type_vocab_size": 2}
TINY |= {
    "nomic_bert": (transformers.NomicBertConfig, _BERT | _ROTARY),
    "gte": (transformers.GteConfig, _BERT | _ROTARY),
    "jina_embeddings_v3": (transformers.JinaEmbeddingsV3Config, _ROBERTA),
}
_DEBERTA = {name: value for name, value in _BERT.items() if name != "classifier_dropout"}
TINY["deberta-v2"] = (
    transformers.DebertaV2Config,
    _DEBERTA
    | {
        "relative_attention": True,
        "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 8,
        "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
        "type_vocab_size": 0,
        "pooler_dropout": 0.15,
        "cls_dropout": 0.3,
        "legacy": False,
    },
)
TINY |= {
    "albert": (
        transformers.AlbertConfig,
        _BERT | {"embedding_size": 16, "hidden_act": "gelu_new", "num_hidden_groups": 2},
    ),
    "electra": (transformers.ElectraConfig, _BERT | {"embedding_size": 16, "summary_last_dropout": 0.25}),
    "xlnet": (
        transformers.XLNetConfig,
        {
            "vocab_size": 99,
            "d_model": 32,
            "n_layer": 4,
            "n_head": 4,
            "d_inner": 48,
            "dropout": 0.1,
            "summary_last_dropout": 0.25,
            "use_mems_eval": False,
        },
    ),
    "gpt2": (
        transformers.GPT2Config,
        {
            "vocab_size": 99,
            "n_positions": 40,
            "n_embd": 32,
            "n_layer": 4,
            "n_head": 4,
            "n_inner": 48,
            "embd_pdrop": 0.15,
            "attn_pdrop": 0.2,
            "classifier_dropout": 0.3,
            "bos_token_id": 98,
            "eos_token_id": 98,
        },
    ),
    "modernbert": (
        transformers.ModernBertConfig,
        {
            "vocab_size": 99,
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "local_attention": 8,
            "max_position_embeddings": 40,
            "embedding_dropout": 0.1,
            "attention_dropout": 0.2,
            "mlp_dropout": 0.15,
            "classifier_dropout": 0.3,
            "norm_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "classifier_bias": True,
            **{f"{token}_token_id": 0 for token in ("pad", "bos", "eos", "cls", "sep")},
        },
    ),
    "t5": (
        transformers.T5Config,
        {
            "vocab_size": 99,
            "d_model": 32,
            "d_kv": 12,
            "d_ff": 48,
            "num_layers": 4,
            "num_decoder_layers": 3,
            "num_heads": 4,
            "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 14,
            "classifier_dropout": 0.3,
            "decoder_start_token_id": 0,
        },
    ),
}
_BART: dict[str, Any] = {
    "vocab_size": 99,
    "d_model": 32,
    "encoder_layers": 4,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": 40,
    "attention_dropout": 0.2,
    "activation_dropout": 0.15,
    "classifier_dropout": 0.3,
    "scale_embedding": True,
}
TINY["bart"] = (transformers.BartConfig, _BART)
_LLAMA: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "attention_dropout": 0.2,
    "attention_bias": True,
    **{f"{token}_token_id": 0 for token in ("pad", "bos", "eos")},
}
TINY |= {
    "eurobert": (transformers.EuroBertConfig, _LLAMA | {"mlp_bias": True, "mask_token_id": 4}),
    "llama": (transformers.LlamaConfig, _LLAMA | {"mlp_bias": True, "num_key_value_heads": 1}),
    "qwen3": (transformers.Qwen3Config, _LLAMA | {"head_dim": 12}),
}
_MARIAN = _BART | {"eos_token_id": 0, "pad_token_id": 98, "decoder_start_token_id": 98, "activation_function": "swish"}
del _MARIAN["classifier_dropout"]
TINY["marian"] = (transformers.MarianConfig, _MARIAN)
TINY["mbart"] = (transformers.MBartConfig, _BART | {"decoder_start_token_id": 7})
ENCODER_DECODER = {"t5": 1, "bart": 2, "mbart": 2, "marian": 0}  # id of the end token, by family
WITHOUT_TYPES = {"distilbert", "gpt2", "modernbert", "mpnet", "eurobert", "llama", "qwen3", *ENCODER_DECODER}
MODELS = [(family, architecture) for family in TINY for architecture in FAMILIES[family].heads]
_COMMON_HEADS = ("SequenceClassification", "TokenClassification", "MultipleChoice", "QuestionAnswering")
MODELS_WITH_OWN_HEADS = [  # common heads of families other than BERT are slow, since they share their code
    pytest.param(
        family,
        architecture,
        marks=pytest.mark.slow if family != "bert" and architecture.endswith(_COMMON_HEADS) else (),
    )
    for family, architecture in MODELS
]
LABELS = {0: "ache", 1: "bliss", 2: "calm"}


@contextmanager
def transformers_in_float64() -> Iterator[None]:
    """Context without gradients in which transformers computes its forward pass in float64, rotary angles included."""
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad(), Float64Mode(torch.float64):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


class Float64Mode(TorchFunctionMode):
    """With float64, replaces the float32 in which transformers computes sinusoids, norms and softmax by float64.

    With another dtype, nothing changes.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.dtype is torch.float64:
            func = torch.Tensor.double if func is torch.Tensor.float else func
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            kwargs = {name: torch.float64 if arg is torch.float32 else arg for name, arg in kwargs.items()}
        return func(*args, **kwargs)


def make_tiny(family: str, architecture: str, dtype: torch.dtype = torch.float32, **changed: Any) -> Any:
    """Return a tiny model of transformers in eval mode, with eager attention; `changed` overrides its config."""
    kind, settings = TINY[family]
    if "SequenceClassification" in architecture or "TokenClassification" in architecture:
        settings = settings | {"id2label": LABELS, "label2id": {name: number for number, name in LABELS.items()}}
    torch.manual_seed(len(architecture))
    with Float64Mode(dtype):
        model = getattr(transformers, architecture)(kind(**settings | changed)).to(dtype)
    for part in model.modules():
        if type(part).__name__.endswith("SinusoidalPositionalEmbedding") and dtype is torch.float64:
            count, width = part.weight.shape  # those of transformers are rounded to float32
            angles = torch.arange(count)[:, None] / 10_000 ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
            part.weight.data = torch.cat([angles.sin(), angles.cos()], -1)
    randomise(model)
    for part in model.modules() if family == "t5" else ():
        if hasattr(part, "EncDecAttention") or hasattr(part, "SelfAttention"):
            attention = getattr(part, "EncDecAttention", None) or part.SelfAttention
            attention.q.weight.data *= attention.key_value_proj_dim**-0.5  # T5 does not scale attention scores
    return use_eager_attention(model).eval()


def use_eager_attention(model: Any) -> Any:
    """Set eager attention in every module of a model that has a config, and return the model."""
    for part in model.modules():
        if hasattr(part, "config"):
            part.config._attn_implementation = "eager"
    return model


@torch.no_grad()
def randomise(model: torch.nn.Module) -> None:
    """Draw every weight from a normal distribution with standard deviation 0.2; its mean is 1 for norms, otherwise 0.

    Embeddings of the padding token stay zero.
    """
    padding = {id(part.weight): part.padding_idx for part in model.modules() if isinstance(part, torch.nn.Embedding)}
    if hasattr(model, "final_logits_bias"):  # a buffer
        model.final_logits_bias.normal_(0.0, 0.2)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:  # sinusoids
            continue
        parameter.normal_(1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0, 0.2)
        if padding.get(id(parameter)) is not None:
            parameter[padding[id(parameter)]] = 0.0


def under_file_names(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename and convert tensors of a model as transformers does when it writes them to a file."""
    converted: dict[str, torch.Tensor] = revert_weight_conversion(model, tensors)
    return converted


def save_tiny(folder: Path, family: str, architecture: str, dtype: torch.dtype = torch.float32, **changed: Any) -> Any:
    """Make a tiny model of transformers and save it to the folder."""
    model = make_tiny(family, architecture, dtype, **changed)
    model.save_pretrained(folder)
    return model


LENGTHS = (7, 23, 1, 12)


def random_sequences(family: str, lengths: tuple[int, ...] = LENGTHS) -> tuple[list[list[int]], list[list[int]]]:
    """Return random token ids, and token types: two segments if the family has them, otherwise one."""
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(5, 98, (length,), generator=generator).tolist() for length in lengths]
    if family in ENCODER_DECODER:
        ids = [[*row_ids[:-1], ENCODER_DECODER[family]] for row_ids in ids]  # each sequence ends with </s>
    has_types = TINY[family][1].get("type_vocab_size", 2) == 2 and family not in WITHOUT_TYPES
    return ids, [[int(has_types and position >= length // 2) for position in range(length)] for length in lengths]


def random_batch(family: str, lengths: tuple[int, ...] = LENGTHS) -> Packed:
    """Return random sequences of these lengths as a batch."""
    return Packed.of(*random_sequences(family, lengths))


def scaled_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest absolute difference, divided by the largest absolute expected value where that is above 1."""
    return float((actual - expected).abs().max()) / max(1.0, float(expected.abs().max()))


def hf_inputs(family: str, ids: list[int], types: list[int]) -> dict[str, torch.Tensor]:
    """Return the inputs of transformers for one sequence."""
    inputs = {"input_ids": torch.tensor([ids])}
    return inputs if family in WITHOUT_TYPES else inputs | {"token_type_ids": torch.tensor([types])}


def hf_hidden_states(model: Any, family: str, ids: list[int], types: list[int]) -> torch.Tensor:
    """Return the last hidden states of one sequence in transformers; a decoder reads the same sequence, shifted."""
    body = getattr(model, "transformer", model) if family == "t5" else model.base_model
    with Float64Mode(model.dtype):
        if family not in ENCODER_DECODER:
            rows: torch.Tensor = body(**hf_inputs(family, ids, types)).last_hidden_state
            return rows[0]
        rows = body.encoder(input_ids=torch.tensor([ids])).last_hidden_state
        if hasattr(body, "decoder"):
            shifted = torch.tensor([[model.config.decoder_start_token_id, *ids[:-1]]])
            rows = body.decoder(input_ids=shifted, encoder_hidden_states=rows).last_hidden_state
        return rows[0]


def decoder_input(loaded: Any, batch: Packed) -> Packed | None:
    """Return the decoder input for a batch, its sequences shifted right, or None without an encoder and a decoder."""
    model = loaded.model
    return (
        batch.shift_right(loaded.config.model.start)
        if model.encoder is not None and model.decoder is not None
        else None
    )


def our_hidden_states(loaded: Any, batch: Packed) -> torch.Tensor:
    """Return the last hidden states of a batch in Heedful."""
    rows: torch.Tensor = loaded.model(batch, decoder_input(loaded, batch))
    return rows


def our_outputs(loaded: Any, batch: Packed) -> list[torch.Tensor]:
    """Return the outputs of a head for a batch in Heedful, as a list."""
    outputs = loaded(batch, decoder_input(loaded, batch) if loaded.needs_target else None)
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)


def hf_outputs(model: Any, family: str, ids: list[list[int]], types: list[list[int]]) -> list[torch.Tensor]:
    """Return the outputs of transformers' head for sequences one at a time, laid out as Heedful's."""
    is_choice = "MultipleChoice" in type(model).__name__
    name = type(model).__name__
    has_decoder_input = family in ENCODER_DECODER and (
        name == FAMILIES[family].bare or name.endswith(("ConditionalGeneration", "MTModel"))
    )
    rows_of_texts: list[list[torch.Tensor]] = []
    for row_ids, row_types in zip(ids, types, strict=True):
        inputs = hf_inputs(family, row_ids, row_types)
        if has_decoder_input:
            inputs["decoder_input_ids"] = torch.tensor([[model.config.decoder_start_token_id, *row_ids[:-1]]])
        if is_choice:
            inputs = {name: tensor[None] for name, tensor in inputs.items()}
        with Float64Mode(model.dtype):
            out = model(**inputs)
        if "start_logits" in out:
            rows_of_texts.append([torch.stack([out.start_logits[0], out.end_logits[0]], -1)])
        elif "mc_logits" in out:
            rows_of_texts.append([out.logits[0], out.mc_logits.flatten()])
        elif "sop_logits" in out:
            rows_of_texts.append([out.prediction_logits[0], out.sop_logits])
        elif "prediction_logits" in out:
            rows_of_texts.append([out.prediction_logits[0], out.seq_relationship_logits])
        elif "last_hidden_state" in out:
            pooled = out.get("pooler_output")
            rows_of_texts.append([out.last_hidden_state[0] if pooled is None else pooled])
        elif is_choice:
            rows_of_texts.append([out.logits[0]])
        else:
            is_per_token = "ForPreTraining" in type(model).__name__ or out.logits.ndim == 3
            rows_of_texts.append([out.logits[0] if is_per_token else out.logits])
    return [torch.cat(parts) for parts in zip(*rows_of_texts, strict=True)]
