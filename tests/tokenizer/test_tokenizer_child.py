"""Randomly changed tokenizer files, loaded in a process with limited memory: a tokenizer or a HeedfulError."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_tokenizer_limits import (
    BERT,
    BYTES,
    META,
    PAIRS,
    SECONDS,
    UNIGRAM,
    WORDS,
    added_token,
    charsmap_of_a,
    replace_step,
    special_description,
    special_piece,
    split_step,
    template,
    text_piece,
    tokenizer_json,
)

from heedful.checkpoint import sentence_transformers
from heedful.model.config import SentenceEmbedding
from heedful.tokenizer import Tokenizer
from tests.support.sentencepiece_models import train_sentencepiece
from tests.support.tokenizer_folders import ANGLE_BRACKET_TOKENS, wordpieces, write_byte_level, write_wordpiece

CHILD = """
import pathlib, random, resource, sys, warnings
warnings.simplefilter("ignore")
from heedful.errors import HeedfulError
from heedful.tokenizer import Tokenizer
folder, count = pathlib.Path(sys.argv[1]), int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_AS, (2 * 2**30, 2 * 2**30))
refused = loaded = 0
for path in sorted(folder.glob("*/*.*")):
    original, rng = path.read_bytes(), random.Random(path.name)
    for _ in range(count):
        data = bytearray(original)
        for _ in range(rng.choice([1, 1, 2, 8])):
            position = rng.randrange(len(data))
            match rng.randrange(5):
                case 0: data[position] = rng.randrange(256)
                case 1: data[position] ^= 1 << rng.randrange(8)
                case 2: del data[position : position + rng.choice([1, 4, 1000])]
                case 3: data[position:position] = rng.choice([b"9" * 30, b"\\xff" * 9, b'"', b"[" * 500, b"2000000000"])
                case 4: data = data[: position + 1]
            if not data: data = bytearray(b"0")
        path.write_bytes(data)
        try:
            Tokenizer.load(path.parent).encode("a small text, <s> and more")
            loaded += 1
        except HeedfulError:
            refused += 1
    path.write_bytes(original)
print(refused, loaded)
"""


def run_byte_changes(folder: Path, count: int) -> None:
    """Change random bytes of three files, `count` times each, and load them."""
    Tokenizer.load(write_wordpiece(folder / "a", wordpieces())).save(folder / "words")
    Tokenizer.load(write_byte_level(folder / "b", ANGLE_BRACKET_TOKENS)).save(folder / "bytes")
    stored = folder / "kept"
    for name in ("words", "bytes"):
        (stored / name).mkdir(parents=True)
        (folder / name / "tokenizer.json").rename(stored / name / "tokenizer.json")
    (stored / "pieces").mkdir()
    (stored / "pieces" / "spiece.model").write_bytes(train_sentencepiece())
    result = subprocess.run(
        [sys.executable, "-c", CHILD, str(stored), str(count)],
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    refused, loaded = map(int, result.stdout.split())
    assert refused + loaded == 3 * count and refused > count


def test_byte_changes_of_files_fast(tmp_path: Path) -> None:
    run_byte_changes(tmp_path, 150)


@pytest.mark.slow
def test_byte_changes_of_files(tmp_path: Path) -> None:
    run_byte_changes(tmp_path, 3_500)


STRUCTURED_CHILD = """
import copy, json, pathlib, random, resource, sys, time, warnings
warnings.simplefilter("ignore")
from heedful.checkpoint import sentence_transformers
from heedful.errors import HeedfulError
from heedful.tokenizer import Tokenizer
folder, count, seed = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30, 4 * 2**30))
ODD = [None, True, -1, 0, 1, 16, 2**31, 2**32 - 1, 2**63, 1e308, 0.5, "", "x", "a" * 16, "a" * 5000, ["a"] * 100]
ODD += ["\\u00e9", "\\ufdfa", "\\ud800", "\\0", [], {}, [[]], "Sequence", {"Regex": ""}, {"String": ""}]
ODD += [{"Regex": "(?:a|aa)+$"}, {"Regex": "a*?b*x"}, {"Regex": "a?"}, {"String": " "}]
TEXT = "a small text, \\u00e9\\u4e2d\\ufdfa <s> and  more " + "a" * 500
def all_paths(value, path=()):
    yield path
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for index, (key, inner) in enumerate(entries):
        if index < 40:
            yield from all_paths(inner, (*path, key))
def value_at(value, path):
    for key in path:
        value = value[key]
    return value
def change_randomly(states, rng):
    state = copy.deepcopy(rng.choice(states))
    for _ in range(rng.choice([1, 1, 2, 3, 5])):
        path = rng.choice([path for path in all_paths(state) if path] or [None])
        if path is None:
            return state
        parent, key = value_at(state, path[:-1]), path[-1]
        match rng.randrange(6):
            case 0 | 1: parent[key] = copy.deepcopy(rng.choice(ODD))
            case 2: del parent[key]
            case 3:
                other = rng.choice(states)
                parent[key] = copy.deepcopy(value_at(other, rng.choice(list(all_paths(other)))))
            case 4 if isinstance(parent, list): parent[key:key] = [parent[key]] * rng.choice([1, 3, 30])
            case 4: parent[rng.choice(["type", "pattern", "content", "extra"])] = parent[key]
            case 5 if isinstance(parent[key], dict):
                kind = rng.choice([("normalizers", 1), ("pretokenizers", 1), ("processors", 1), ("decoders", 1)])[0]
                parent[key] = {"type": "Sequence", kind: [parent[key]] * rng.choice([1, 2, 20])}
            case _: parent[key] = [parent[key]] * rng.choice([1, 2, 20])
    return state
def use(model_folder):
    if (model_folder / "modules.json").exists():
        return sentence_transformers.read_modules(model_folder, None, keeps_pooler=False)
    tokenizer = Tokenizer.load(model_folder)
    ids = tokenizer.encode(TEXT).ids
    tokenizer.encode((TEXT, "a"))
    tokenizer.decode(ids)
refused = used = 0
slowest = 0.0
rng = random.Random(seed)
for name in ("tokenizer.json", "tokenizer_config.json", "modules.json", "1_Pooling/config.json"):
    model_folders = sorted(path.parent if "/" not in name else path.parent.parent for path in folder.glob(f"*/{name}"))
    states = [json.loads((model_folder / name).read_text()) for model_folder in model_folders]
    for number in range(count):
        model_folder = model_folders[number % len(model_folders)]
        original = (model_folder / name).read_bytes()
        (model_folder / name).write_text(json.dumps(change_randomly(states, rng)))
        start = time.process_time()
        try:
            use(model_folder)
            used += 1
        except HeedfulError as error:
            assert len(str(error)) < 5000
            refused += 1
        except BaseException:
            print(name, (model_folder / name).read_text()[-3000:])
            raise
        if time.process_time() - start > slowest:
            slowest = time.process_time() - start
            worst = (model_folder / name).read_bytes()
        (model_folder / name).write_bytes(original)
status = dict(line.split(":", 1) for line in open("/proc/self/status"))  # ru_maxrss would count the parent's memory
print(refused, used, slowest, int(status["VmHWM"].split()[0]) // 1024, worst.decode()[-1500:])
"""


def write_model_folders(folder: Path) -> None:
    """Write tokenizer folders that together have components of all kinds, and a folder of sentence embeddings."""
    steps = {
        "normalizers": [
            *(
                BERT,
                {"type": "Lowercase"},
                {"type": "NFKC"},
                {"type": "NFD"},
                {"type": "StripAccents"},
                {"type": "Nmt"},
            ),
            *({"type": "Strip", "strip_left": True, "strip_right": True}, {"type": "Prepend", "prepend": "_"}),
            *(replace_step("a", "b"), replace_step({"Regex": " {2,}"}, " "), charsmap_of_a(b"b")),
        ],
        "pretokenizers": [
            *(BYTES, {**META, "replacement": "▁"}, split_step(r"\s+"), {"type": "Digits", "individual_digits": True}),
            *({"type": "FixedLength", "length": 5}, {"type": "UnicodeScripts"}, {"type": "Whitespace"}),
            *({"type": "Punctuation", "behavior": "Isolated"}, {"type": "CharDelimiterSplit", "delimiter": "_"}),
        ],
        "processors": [
            template(
                [special_piece("k"), text_piece()],
                [text_piece(), special_piece("k"), text_piece("B")],
                special_description("k"),
            ),
            BYTES,
        ],
        "decoders": [
            *(
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "BPEDecoder", "suffix": "</w>"},
                replace_step("▁", " "),
            ),
            *(
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
                {"type": "WordPiece", "prefix": "##", "cleanup": True},
            ),
            {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True},
        ],
    }
    parts = dict(zip(("normalizer", "pre_tokenizer", "post_processor", "decoder"), steps.items(), strict=True))
    sequences = {part: {"type": "Sequence", name: components} for part, (name, components) in parts.items()}
    tokens = [added_token("<s>", 7), added_token("<x>", 8, special=False, normalized=True)]
    for model_index, model in enumerate((WORDS, PAIRS, UNIGRAM)):
        for part in (*parts, ""):
            model_folder = folder / f"{model_index}{part}"
            model_folder.mkdir()
            added_tokens = [{**token, "id": len(model["vocab"]) + index} for index, token in enumerate(tokens)]
            changes = {part: sequences[part]} if part else {}
            content = tokenizer_json(model=model, added_tokens=added_tokens, **changes)
            (model_folder / "tokenizer.json").write_text(json.dumps(content))
            config = {"added_tokens_decoder": {}, "cls_token": "<s>", "model_max_length": 64, "do_lower_case": True}
            (model_folder / "tokenizer_config.json").write_text(
                json.dumps(config | {"additional_special_tokens": ["<s>"]})
            )
    (folder / "sentences").mkdir()
    sentence_transformers.write_modules(
        folder / "sentences", SentenceEmbedding(normalise=True, pooling=("mean", "max")), 8
    )


def run_structural_changes(folder: Path, count: int, seed: int) -> None:
    """Change values, lists and components of all kinds of files, `count` times each, and use what is loaded."""
    write_model_folders(folder)
    result = subprocess.run(
        [sys.executable, "-c", STRUCTURED_CHILD, str(folder), str(count), str(seed)],
        **{"capture_output": True, "text": True, "timeout": 3000, "check": False},
    )
    assert result.returncode == 0 and result.stderr == "", result.stdout[-4000:] + result.stderr[-2000:]
    refused, used, slowest, megabytes, worst = result.stdout.split(maxsplit=4)
    assert int(refused) + int(used) == 4 * count
    assert int(refused) > count // 2
    assert int(used) > count // 4
    assert float(slowest) < SECONDS and int(megabytes) < 1_500, (slowest, megabytes, worst)


@pytest.mark.slow
def test_structural_changes_of_files_fast(tmp_path: Path) -> None:
    run_structural_changes(tmp_path, 100, 0)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_structural_changes_of_files(tmp_path: Path) -> None:
    run_structural_changes(tmp_path, 2_500, 1)
