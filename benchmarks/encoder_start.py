"""Deepen an encoder of the BERT family by repeating its layers, so that training starts from its weights.

python benchmarks/encoder_start.py MODEL OUT --layers 0 1 2 3 2 3

Layers are stacked as in Gong et al. 2019 (Efficient Training of BERT by Progressively Stacking).
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

LAYER = re.compile(r"(.*encoder\.layer\.)(\d+)(\..*)")  # names of the tensors of a layer, with its index
COPIED = ("tokenizer.json", "tokenizer_config.json", "vocab.txt")


def deepen(model: Path, out: Path, layers: list[int]) -> None:
    """Write the model in float32 with the given layers, by index and in this order."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    if not layers or not all(0 <= layer < config["num_hidden_layers"] for layer in layers):
        raise SystemExit(f"--layers is {layers}; expected indices from 0 to {config['num_hidden_layers'] - 1}")
    tensors = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        match = LAYER.fullmatch(name)
        if match is None:
            tensors[name] = tensor.float()
            continue
        for new_layer, layer in enumerate(layers):
            if layer == int(match[2]):
                tensors[f"{match[1]}{new_layer}{match[3]}"] = tensor.float().clone()
    out.mkdir(parents=True)
    config |= {"num_hidden_layers": len(layers), "dtype": "float32"}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    for name in COPIED:
        if (model / name).exists():
            shutil.copy(model / name, out / name)


def main() -> None:
    """Read the arguments and write the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, nargs="+", required=True)
    arguments = parser.parse_args()
    deepen(arguments.model, arguments.out, arguments.layers)


if __name__ == "__main__":
    main()
