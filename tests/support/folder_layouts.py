"""Steps that write a folder in a published layout: a tiny model with its vocabulary, then changes to the files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import decoders, models, pre_tokenizers, processors

import heedful
from heedful.checkpoint.unpickle import convert_pickles
from heedful.errors import HeedfulError
from tests.checkpoint.test_lora import CONFIG as ADAPTER
from tests.support.sentencepiece_models import train_sentencepiece
from tests.support.tiny_models import save_tiny
from tests.support.tokenizer_folders import wordpieces, write_byte_level, write_wordpiece

Step = Callable[[Path], object]  # changes a folder


def save_with_wordpieces(
    family: str, architecture: str, tokenizer_class: str = "BertTokenizer", **changed: Any
) -> Step:
    """Write a model with a vocabulary of word pieces."""

    def write(folder: Path) -> None:
        entries, special = wordpieces(), ("<pad>", "[UNK]", "<s>", "</s>", "<mask>")
        if tokenizer_class == "MPNetTokenizer":
            entries[: len(special)] = special
        save_tiny(folder, family, architecture, vocab_size=len(entries), **changed)
        values = {"tokenizer_class": tokenizer_class, "do_lower_case": True, "model_max_length": 36}
        write_wordpiece(folder, entries, json.dumps(values))

    return write


def write_tokenizer_json(folder: Path) -> None:
    """Replace vocab.txt by tokenizer.json, without a tokenizer class of the model."""
    hf_tokenizer = transformers.BertTokenizer.from_pretrained(folder)
    (folder / "vocab.txt").unlink()
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    backend = hf_tokenizer.backend_tokenizer
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=36, **special)
    fast.save_pretrained(folder)


def save_with_byte_pairs(
    family: str, architecture: str, tokenizer_class: str, special: list[str], **changed: Any
) -> Step:
    """Write a model with vocab.json and merges.txt."""

    def write(folder: Path) -> None:
        save_tiny(folder, family, architecture, vocab_size=280, **changed)
        write_byte_level(folder, special, json.dumps({"tokenizer_class": tokenizer_class}))

    return write


def save_with_sentencepiece(
    family: str, architecture: str, file: str, settings: dict[str, Any], **changed: Any
) -> Step:
    """Write a model whose tokenizer is only a SentencePiece model, without JSON files."""

    def write(folder: Path) -> None:
        save_tiny(folder, family, architecture, **{"vocab_size": 460} | changed)
        (folder / file).write_bytes(train_sentencepiece(**settings))

    return write


def save_with_end_token(folder: Path) -> None:
    """Write a Qwen3 with a tokenizer of bytes that appends an end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    save_tiny(
        folder, "qwen3", "Qwen3Model", vocab_size=len(alphabet) + 1, pad_token_id=None, max_position_embeddings=90
    )
    backend = tokenizers.Tokenizer(models.BPE(vocab={token: n for n, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    backend.add_special_tokens(["<end>"])
    backend.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="$A <end>", pair="$A <end> $B <end>", special_tokens=[("<end>", len(alphabet))]
    )
    fast = transformers.PreTrainedTokenizerFast
    fast(
        tokenizer_object=backend, pad_token="<end>", eos_token="<end>", model_max_length=80, padding_side="left"
    ).save_pretrained(folder)


def edit_json(name: str, **changed: Any) -> Step:
    """Change keys of a JSON file; those set to None are removed."""

    def edit(folder: Path) -> None:
        path = folder / name
        values = (json.loads(path.read_text()) if path.exists() else {}) | changed
        path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))

    return edit


def edit_config(**changed: Any) -> Step:
    """Change keys of config.json."""
    return edit_json("config.json", **changed)


def edit_weights(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Step:
    """Change the weights."""

    def edit(folder: Path) -> None:
        path = folder / "model.safetensors"
        changed = {name: tensor.contiguous() for name, tensor in change(load_file(path)).items()}
        save_file(changed, path, metadata={"format": "pt"})

    return edit


def convert_weights(dtype: torch.dtype) -> Step:
    """Store the weights in another type."""
    return edit_weights(lambda weights: {name: tensor.to(dtype) for name, tensor in weights.items()})


def rename_tensors(old: str, new: str) -> Step:
    """Replace the beginning of tensors' names."""
    return edit_weights(
        lambda weights: {
            new + name.removeprefix(old) if name.startswith(old) else name: tensor for name, tensor in weights.items()
        }
    )


def replace_config(values: dict[str, Any]) -> Step:
    """Write another config.json."""
    return lambda folder: (folder / "config.json").write_text(json.dumps(values))


def copy_to_reference(folder: Path) -> None:
    """Copy the folder to `reference` beside it, where transformers reads it for the comparison."""
    shutil.copytree(folder, folder.with_name("reference"))


def remove_files(*names: str) -> Step:
    """Remove files."""

    def remove(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return remove


FLAGS = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "mean_sqrt_len_tokens": "mean_sqrt_len_tokens"}


def write_modules_2(*kinds: str, pooling: str = "mean", max_length: int | None = 30) -> Step:
    """Write modules.json and the files of its modules, as sentence-transformers 2 did."""

    def write(folder: Path) -> None:
        listed = [("", "Transformer"), *((f"{number}_{kind}", kind) for number, kind in enumerate(kinds, 1))]
        modules = [
            {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for number, (path, kind) in enumerate(listed)
        ]
        (folder / "modules.json").write_text(json.dumps(modules, indent=2))
        (folder / "1_Pooling").mkdir()
        flags = {f"pooling_mode_{flag}": name == pooling for name, flag in FLAGS.items()}
        (folder / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": 32} | flags))
        if max_length is not None:
            length = {"max_seq_length": max_length, "do_lower_case": False}
            (folder / "sentence_bert_config.json").write_text(json.dumps(length))
        versions = {"sentence_transformers": "2.0.0", "transformers": "4.6.1", "pytorch": "1.8.1"}
        (folder / "config_sentence_transformers.json").write_text(json.dumps({"__version__": versions}))

    return write


def write_modules_6(
    *modules: torch.nn.Module, pooling: Any = "mean", include_prompt: bool = True, **settings: Any
) -> Step:
    """Write the folder by sentence-transformers 6, with these modules after the pooling."""

    def write(folder: Path) -> None:
        body = folder.rename(folder.with_name("body"))
        parts = [Transformer(str(body)), Pooling(32, pooling_mode=pooling, include_prompt=include_prompt), *modules]
        SentenceTransformer(modules=parts, device="cpu", **settings).save(str(folder))

    return write


def make_dense(inputs: int, outputs: int, **settings: Any) -> Dense:
    """Make a dense layer of sentence-transformers."""
    torch.manual_seed(inputs + outputs)
    return Dense(inputs, outputs, **settings)


def write_dense_2(folder: Path) -> None:
    """Write the folder 2_Dense as sentence-transformers 2 did, but with safetensors."""
    (folder / "2_Dense").mkdir()
    values = {"in_features": 32, "out_features": 24, "bias": True}
    values["activation_function"] = "torch.nn.modules.activation.Tanh"  # type: ignore[assignment]
    (folder / "2_Dense/config.json").write_text(json.dumps(values))
    layer = torch.nn.Linear(32, 24)
    save_file({f"linear.{n}": t.detach() for n, t in layer.named_parameters()}, folder / "2_Dense/model.safetensors")


def shard_weights(folder: Path) -> None:
    """Split the weights into two shards with an index."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, weight_map = list(weights), {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def pickle_weights(folder: Path) -> None:
    """Move the weights to pytorch_model.bin, and convert it as a user would."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    convert(folder)


def pickle_shards(folder: Path) -> None:
    """Move the weights to two pickled shards with an index, and convert these."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, weight_map = list(weights), {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"pytorch_model-0000{number}-of-00002.bin"
        torch.save({name: weights[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    convert(folder)


def convert(folder: Path) -> None:
    """Convert the pickles of a folder, which `load` refuses."""
    with pytest.raises(HeedfulError, match="Heedful reads only safetensors"):
        heedful.load(folder)
    pickles = folder.rename(folder.with_name("pickles"))
    convert_pickles(pickles, folder)


def add_other_formats(folder: Path) -> None:
    """Add files that hubs have beside a model: other formats, a model card, exports."""
    (folder / "onnx").mkdir()
    for name in (
        "onnx/model.onnx",
        "tf_model.h5",
        "flax_model.msgpack",
        "rust_model.ot",
        "README.md",
        ".gitattributes",
    ):
        (folder / name).write_bytes(b"anything")
    (folder / "openvino").mkdir()
    (folder / "openvino/openvino_model.xml").write_text("<net/>")


def link_as_hub_cache(folder: Path) -> None:
    """Lay the folder out as the hub's cache: a snapshot of links into blobs."""
    blobs = folder.parent / "models--a--b/blobs"
    snapshot = folder.parent / "models--a--b/snapshots/0123"
    blobs.parent.mkdir()
    folder.rename(blobs)
    snapshot.mkdir(parents=True)
    for path in blobs.rglob("*"):
        target = snapshot / path.relative_to(blobs)
        if path.is_file():
            target.parent.mkdir(exist_ok=True)
            target.symlink_to(path)
    folder.symlink_to(snapshot, target_is_directory=True)


def make_adapter(**changed: Any) -> Step:
    """Make the model the base of an adapter of peft in the folder, and merge it as peft does for the comparison."""

    def write(folder: Path) -> None:
        base = folder.rename(folder.with_name("base"))
        folder.mkdir()
        module = "encoder.layer.1.attention.self.query"
        a, b = (torch.randn(*shape, generator=torch.Generator().manual_seed(1)) / 4 for shape in ((4, 32), (32, 4)))
        factors = {f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b}
        save_file(factors, folder / "adapter_model.safetensors")
        values = ADAPTER | {"base_model_name_or_path": str(base), "task_type": "FEATURE_EXTRACTION"} | changed
        (folder / "adapter_config.json").write_text(json.dumps(values))
        merged = folder.with_name("merged")
        shutil.copytree(base, merged)
        weights = load_file(merged / "model.safetensors")
        weights[f"{module}.weight"] += 3 * b @ a
        save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})

    return write


def gpt2_buffers(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors as the published GPT-2 has them: no prefix, and the causal masks."""
    masks = {f"h.{layer}.attn.bias": torch.ones(40, 40).tril()[None, None] for layer in range(4)}
    return {name.removeprefix("transformer."): tensor for name, tensor in weights.items()} | masks


def bert_base(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors as the published BERT has them: old names of norms, position ids, two heads, tied copies."""
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in weights.items()
    }
    old["cls.predictions.decoder.weight"] = old["bert.embeddings.word_embeddings.weight"].clone()
    return old | {"bert.embeddings.position_ids": torch.arange(40)[None]}


def t5_small(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors as the published T5 has them: a copy of the tokens on each side, and an unused bias."""
    tokens = {f"{side}.embed_tokens.weight": weights["shared.weight"].clone() for side in ("encoder", "decoder")}
    unused = {"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": torch.randn(8, 4)}
    return weights | tokens | unused
