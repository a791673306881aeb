"""Inputs, digests and the runner that before.py and now.py share; only `main` imports heedful, to check its path."""

from __future__ import annotations

import argparse
import csv
import hashlib
import http.client
import json
import os
import random
import signal
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Probes = dict[str, Any]
Section = Callable[[Path, bool], Probes]  # (folder to work in, whether to be quick) -> value of each probe

# -- configurations of published families ---------------------------------------------------------------------------

_BERT: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 48,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "layer_norm_eps": 1e-12,
}
_ROBERTA = _BERT | {"max_position_embeddings": 50, "type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 1}
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": _BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "distilbert": {
        "vocab_size": 99,
        "dim": 32,
        "n_layers": 2,
        "n_heads": 4,
        "hidden_dim": 48,
        "max_position_embeddings": 48,
        "activation": "gelu",
    },
    "albert": _BERT | {"embedding_size": 16, "hidden_act": "gelu_new", "num_hidden_groups": 1},
    "electra": _BERT | {"embedding_size": 16},
    "xlnet": {"vocab_size": 99, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "ff_activation": "gelu"},
    "t5": {
        "vocab_size": 99,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 14,
        "decoder_start_token_id": 0,
    },
    "gpt2": {
        "vocab_size": 99,
        "n_positions": 48,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_inner": 48,
        "activation_function": "gelu_new",
    },
    "modernbert": {
        "vocab_size": 99,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "local_attention": 8,
        "max_position_embeddings": 48,
        "hidden_activation": "gelu",
        **{f"{name}_token_id": 0 for name in ("pad", "bos", "eos", "cls", "sep")},
    },
}
KINDS = ("bert", "xlnet", "t5", "gpt2", "modernbert")  # one family for each kind of architecture
LENGTHS = (7, 23, 1, 12)  # tokens of the input sequences


def write_config(folder: Path, family: str, architecture: str, **more: Any) -> Path:
    """Write config.json of a tiny model of a published family."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {"model_type": family, "architectures": [architecture], **CONFIGS[family], **more}
    (folder / "config.json").write_text(json.dumps(values, indent=1))
    return folder


def randomise(folder: Path) -> None:
    """Replace all weights by random ones that depend only on the name and the shape of a tensor."""
    import torch
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in sorted(tensors.items()):
        generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big"))
        centre = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
        tensors[name] = torch.empty(tensor.shape).normal_(centre, 0.2, generator=generator)
    save_file(tensors, path, metadata={"format": "pt"})


def sequences(family: str) -> tuple[list[list[int]], list[list[int]]]:
    """Return random token ids without special ones, and token types, of two segments if the family has them."""
    draw = random.Random(3)
    ids = [[draw.randrange(5, 98) for _ in range(length)] for length in LENGTHS]
    if family == "t5":
        ids = [[*sequence[:-1], 1] for sequence in ids]
    has_types = CONFIGS.get(family, {}).get("type_vocab_size", 1) == 2 or family == "xlnet"
    return ids, [[int(has_types and position >= length // 2) for position in range(length)] for length in LENGTHS]


# -- vocabularies -----------------------------------------------------------------------------------------------------

_WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "sat",
    "on",
    "mat",
    "ran",
    "to",
    "paris",
    "is",
    "in",
    "france",
    "of",
    "capital",
    "he",
    "she",
    "lives",
    "here",
    "wrote",
    "it",
    "program",
    "first",
    "who",
    "where",
    "##ed",
    "##ing",
    "ada",
    "zed",
    "and",
    "love",
]
_LETTERS = [*"abcdefghijklmnopqrstuvwxyz0123456789.,?!'"]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *dict.fromkeys([*_WORDS, *_LETTERS])]
VOCABULARY += [f"##{letter}" for letter in _LETTERS[:36]]


def write_vocabulary(folder: Path) -> None:
    """Write a vocabulary of word pieces for an encoder that reads up to 48 tokens."""
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in VOCABULARY))
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 48}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_letters(folder: Path) -> None:
    """Write a vocabulary of letters for a model that generates."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    marks = ["<pad>", "</s>", "<unk>"]
    tokenizer = Tokenizer(
        models.WordLevel({token: index for index, token in enumerate([*marks, *"abcdefgh"])}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(marks)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    special_tokens = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | special_tokens))


# -- data -------------------------------------------------------------------------------------------------------------

_PLAIN = [word for word in _WORDS if word not in ("paris", "france", "ada", "zed") and not word.startswith("##")]
_NAMES = {"ada": "PER", "zed": "PER", "paris": "LOC", "france": "LOC"}
_SIZES = {"train": 48, "dev": 12, "test": 12}  # rows of each split


def _words(draw: random.Random, length: int = 6) -> list[str]:
    return draw.choices(_PLAIN, k=length)


def _classified(draw: random.Random, index: int) -> dict[str, Any]:
    label = index % 2
    words = [*_words(draw), ("ada", "love")[label]]
    draw.shuffle(words)
    return {"text": " ".join(words), "label": ("bad", "good")[label]}


def _labelled(draw: random.Random, index: int) -> dict[str, Any]:
    names = [name for name in _NAMES if draw.random() < 0.4] if index else list(_NAMES)
    return {"text": " ".join([*_words(draw), *names]), "labels": names}


def _scored(draw: random.Random, index: int) -> dict[str, Any]:
    words, shared = _words(draw), index % 6
    return {
        "text": " ".join(words),
        "pair": " ".join(words[:shared] + _words(draw, 6 - shared)),
        "score": shared,
    }


def _chosen(draw: random.Random, index: int) -> dict[str, Any]:
    choices = [" ".join(_words(draw, 3)) for _ in range(2)]
    choices[index % 2] += " " + draw.choice(list(_NAMES))
    return {"prompt": " ".join(_words(draw)), "choices": choices, "answer": index % 2}


def _rewritten(draw: random.Random, index: int) -> dict[str, Any]:
    words = _words(draw, 4)
    return {"source": " ".join(words), "target": " ".join(reversed(words))}


def _tagged(draw: random.Random) -> str:
    words = [*_words(draw), *draw.choices(list(_NAMES), k=2)]
    draw.shuffle(words)
    return "".join(f"{word} {'B-' + _NAMES[word] if word in _NAMES else 'O'}\n" for word in words) + "\n"


def _question(draw: random.Random, index: int) -> dict[str, Any]:
    name = draw.choice(list(_NAMES))
    context = " ".join([*_words(draw, 4), name, *_words(draw, 3)])
    answers = [{"text": name, "answer_start": context.index(name)}]
    question = {"id": f"q{index}-{draw.random()}", "question": "who is it ?", "answers": answers}
    return {"context": context, "qas": [question]}


_ROWS: dict[str, Callable[[random.Random, int], dict[str, Any]]] = {
    "single": _classified,
    "multiple": _labelled,
    "scored": _scored,
    "choice": _chosen,
    "texts": _rewritten,
}


def write_data(folder: Path, kind: str) -> Path:
    """Write labelled data in three splits: single, multiple, scored, choice, texts, vectors, pairs, tags, questions."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (split, count) in enumerate(_SIZES.items()):
        draw, path = random.Random(seed), folder / split
        if kind == "tags":
            path.with_suffix(".conll").write_text("".join(_tagged(draw) for _ in range(count)))
        elif kind == "questions":
            paragraphs = [_question(draw, index) for index in range(count)]
            squad = {"version": "1.1", "data": [{"title": "x", "paragraphs": paragraphs}]}
            path.with_suffix(".json").write_text(json.dumps(squad))
        elif kind in ("vectors", "pairs"):
            rows = []
            for row in (_scored(draw, index) for index in range(count)):
                score = {"score": row["score"]} if kind == "vectors" else {}
                rows.append({"a": row["text"], "b": row["pair"], **score})
            _lines(path, rows)
        elif kind in ("multiple", "choice"):
            _lines(path, [_ROWS[kind](draw, index) for index in range(count)])
        else:
            _table(path, [_ROWS[kind](draw, index) for index in range(count)])
    return folder


def _lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with path.with_suffix(".csv").open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def write_text(path: Path, documents: int = 120) -> Path:
    """Write plain text: a sentence on each line, a blank line between documents."""
    draw = random.Random(1)
    places = ["harbour", "garden", "library", "kitchen", "station", "market"]
    things = ["boat", "rose", "book", "kettle", "train"]
    verbs = ["waits", "falls", "turns", "shines", "rests", "sings"]
    times = ["today", "soon", "again", "daily", "twice"]

    def sentence() -> str:
        start = f"In the {draw.choice(places)} a {draw.choice(things)} {draw.choice(verbs)} {draw.choice(times)}"
        return start + (f", and the {draw.choice(things)} {draw.choice(verbs)}." if draw.random() < 0.7 else ".")

    stories = ["\n".join(sentence() for _ in range(draw.randint(2, 8))) for _ in range(documents)]
    path.write_text("\n\n".join(stories) + "\n")
    return path


# -- values -----------------------------------------------------------------------------------------------------------


def digest(value: Any) -> str:
    """Return a hash of a tensor's or an array's dtype, shape and bytes, and its first values to read in a report."""
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor):
        tensor = value.detach().contiguous().cpu()
        dtype, shape, first = str(tensor.dtype), tuple(tensor.shape), tensor.flatten()[:3].tolist()
        data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    else:
        array = np.ascontiguousarray(value)
        dtype, shape, first, data = f"numpy.{array.dtype}", array.shape, array.flatten()[:3].tolist(), array.tobytes()
    name = hashlib.sha256(f"{dtype} {shape} ".encode() + data).hexdigest()[:32]
    return f"{name} {dtype} {list(shape)} {first}"


def digests(value: Any) -> list[str]:
    """Return the digest of a tensor, or of each tensor of a sequence."""
    return [digest(item) for item in (value if isinstance(value, tuple | list) else [value])]


def weights(path: Path, *, names: bool = True) -> str:
    """Return a hash of the weights in a file, with their names unless `names` is false."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    parts = []
    for name, about in header.items():
        start, stop = (8 + size + offset for offset in about["data_offsets"])
        body = hashlib.sha256(data[start:stop]).hexdigest()
        parts.append(f"{name if names else ''} {about['dtype']} {about['shape']} {body}")
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()


def losses(journal: Path, loss: str = "loss") -> list[float]:
    """Return the loss of each step of a journal."""
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    return [line[loss] for line in lines if loss in line]


# -- processes --------------------------------------------------------------------------------------------------------


def command(*words: str) -> list[str]:
    """Return the command line of this interpreter's heedful."""
    return [sys.executable, "-m", "heedful", *words]


def run(*words: str, accept: tuple[int, ...] = (0,)) -> str:
    """Run heedful in another process, and return its output."""
    done = subprocess.run(command(*words), capture_output=True, text=True, timeout=300)
    if done.returncode not in accept:
        raise RuntimeError(f"heedful {' '.join(words)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


def terminate_after(words: Sequence[str], journal: Path, lines: int) -> int:
    """Start heedful, send SIGTERM when its journal has `lines` lines, and return the exit status."""
    process = subprocess.Popen(command(*words), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if journal.exists() and journal.read_bytes().count(b"\n") >= lines:
                process.send_signal(signal.SIGTERM)
                return process.wait(60)
            time.sleep(0.002)
        raise RuntimeError(f"heedful {' '.join(words)} ended, or hung, before {lines} lines of {journal}")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def post(port: int, path: str, body: Any = None) -> Any:
    """Send a request, POST if there is a body, and return the status and the JSON of the reply."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        data = None if body is None else json.dumps(body).encode()
        connection.request("GET" if body is None else "POST", path, data, {"content-type": "application/json"})
        reply = connection.getresponse()
        return {"status": reply.status, "body": json.loads(reply.read())}
    finally:
        connection.close()


def main(sections: Mapping[str, Section]) -> None:
    """Run the command of before.py and now.py: run sections, and write their values as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkout", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="an empty folder")
    parser.add_argument("--section", action="append", required=True)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    import torch

    import heedful

    imported = Path(heedful.__file__).resolve()
    if not imported.is_relative_to(options.checkout.resolve()):
        raise SystemExit(f"heedful was imported from {imported}, not from {options.checkout}")
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name in options.section:
        start, folder = time.monotonic(), options.work / name
        folder.mkdir()
        os.chdir(folder)
        try:
            results[name] = {"values": json.loads(json.dumps(sections[name](folder, options.quick)))}
        except BaseException:
            results[name] = {"error": traceback.format_exc()}
        results[name]["seconds"] = time.monotonic() - start
        status = "failed" if "error" in results[name] else "done"
        print(f"{options.checkout}: {name} {status} in {results[name]['seconds']:.0f} s", file=sys.stderr, flush=True)
    (options.work / "values.json").write_text(json.dumps(results))
