"""Hostile tokenizer files, loaded in a child with 2 GB of memory: a tokenizer or a HeedfulError, never its end."""

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
    added,
    described,
    one_key,
    replace,
    special,
    split,
    state,
    template,
    text,
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
    whole, draw = path.read_bytes(), random.Random(path.name)
    for number in range(count):
        data = bytearray(whole)
        for _ in range(draw.choice([1, 1, 2, 8])):
            place = draw.randrange(len(data))
            match draw.randrange(5):
                case 0: data[place] = draw.randrange(256)
                case 1: data[place] ^= 1 << draw.randrange(8)
                case 2: del data[place : place + draw.choice([1, 4, 1000])]
                case 3: data[place:place] = draw.choice([b"9" * 30, b"\\xff" * 9, b'"', b"[" * 500, b"2000000000"])
                case 4: data = data[: place + 1]
            if not data: data = bytearray(b"0")
        path.write_bytes(data)
        try:
            Tokenizer.load(path.parent).encode("a small text, <s> and more")
            loaded += 1
        except HeedfulError:
            refused += 1
    path.write_bytes(whole)
print(refused, loaded)
"""


def run(folder: Path, count: int) -> None:
    Tokenizer.load(write_wordpiece(folder / "a", wordpieces())).save(folder / "words")
    Tokenizer.load(write_byte_level(folder / "b", ANGLE_BRACKET_TOKENS)).save(folder / "bytes")
    kept = folder / "kept"
    for name in ("words", "bytes"):
        (kept / name).mkdir(parents=True)
        (folder / name / "tokenizer.json").rename(kept / name / "tokenizer.json")
    (kept / "pieces").mkdir()
    (kept / "pieces" / "spiece.model").write_bytes(train_sentencepiece())
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(kept), str(count)], capture_output=True, text=True, timeout=3000, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    refused, loaded = map(int, done.stdout.split())
    assert refused + loaded == 3 * count and refused > count


def test_f4_a_few(tmp_path: Path) -> None:
    run(tmp_path, 150)


@pytest.mark.slow
def test_f4_ten_thousand(tmp_path: Path) -> None:
    run(tmp_path, 3_500)


STRUCTURED = """
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
def places(value, path=()):
    yield path
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for number, (key, each) in enumerate(entries):
        if number < 40:
            yield from places(each, (*path, key))
def at(value, path):
    for key in path:
        value = value[key]
    return value
def mutated(states, draw):
    state = copy.deepcopy(draw.choice(states))
    for _ in range(draw.choice([1, 1, 2, 3, 5])):
        path = draw.choice([each for each in places(state) if each] or [None])
        if path is None:
            return state
        parent, key = at(state, path[:-1]), path[-1]
        match draw.randrange(6):
            case 0 | 1: parent[key] = copy.deepcopy(draw.choice(ODD))
            case 2: del parent[key]
            case 3:
                other = draw.choice(states)
                parent[key] = copy.deepcopy(at(other, draw.choice(list(places(other)))))
            case 4 if isinstance(parent, list): parent[key:key] = [parent[key]] * draw.choice([1, 3, 30])
            case 4: parent[draw.choice(["type", "pattern", "content", "extra"])] = parent[key]
            case 5 if isinstance(parent[key], dict):
                kind = draw.choice([("normalizers", 1), ("pretokenizers", 1), ("processors", 1), ("decoders", 1)])[0]
                parent[key] = {"type": "Sequence", kind: [parent[key]] * draw.choice([1, 2, 20])}
            case _: parent[key] = [parent[key]] * draw.choice([1, 2, 20])
    return state
def use(place):
    if (place / "modules.json").exists():
        return sentence_transformers.read_modules(place, None, keeps_pooler=False)
    tokenizer = Tokenizer.load(place)
    ids = tokenizer.encode(TEXT).ids
    tokenizer.encode((TEXT, "a"))
    tokenizer.decode(ids)
refused = used = 0
slowest = 0.0
draw = random.Random(seed)
for name in ("tokenizer.json", "tokenizer_config.json", "modules.json", "1_Pooling/config.json"):
    homes = sorted(path.parent if "/" not in name else path.parent.parent for path in folder.glob(f"*/{name}"))
    states = [json.loads((home / name).read_text()) for home in homes]
    for number in range(count):
        home = homes[number % len(homes)]
        kept = (home / name).read_bytes()
        (home / name).write_text(json.dumps(mutated(states, draw)))
        start = time.process_time()
        try:
            use(home)
            used += 1
        except HeedfulError as error:
            assert len(str(error)) < 5000
            refused += 1
        except BaseException:
            print(name, (home / name).read_text()[-3000:])
            raise
        if time.process_time() - start > slowest:
            slowest = time.process_time() - start
            worst = (home / name).read_bytes()
        (home / name).write_bytes(kept)
status = dict(line.split(":", 1) for line in open("/proc/self/status"))  # ru_maxrss would count the parent's memory
print(refused, used, slowest, int(status["VmHWM"].split()[0]) // 1024, worst.decode()[-1500:])
"""


def run_structured(folder: Path, count: int, seed: int) -> None:
    """Change values, lists and components of all kinds of files, and use what is loaded."""
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
            *(replace("a", "b"), replace({"Regex": " {2,}"}, " "), one_key(b"b")),
        ],
        "pretokenizers": [
            *(BYTES, {**META, "replacement": "▁"}, split(r"\s+"), {"type": "Digits", "individual_digits": True}),
            *({"type": "FixedLength", "length": 5}, {"type": "UnicodeScripts"}, {"type": "Whitespace"}),
            *({"type": "Punctuation", "behavior": "Isolated"}, {"type": "CharDelimiterSplit", "delimiter": "_"}),
        ],
        "processors": [template([special("k"), text()], [text(), special("k"), text("B")], described("k")), BYTES],
        "decoders": [
            *({"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "BPEDecoder", "suffix": "</w>"}, replace("▁", " ")),
            *(
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
                {"type": "WordPiece", "prefix": "##", "cleanup": True},
            ),
            {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True},
        ],
    }
    parts = dict(zip(("normalizer", "pre_tokenizer", "post_processor", "decoder"), steps.items(), strict=True))
    sequences = {part: {"type": "Sequence", name: every} for part, (name, every) in parts.items()}
    tokens = [added("<s>", 7), added("<x>", 8, special=False, normalized=True)]
    for number, model in enumerate((WORDS, PAIRS, UNIGRAM)):
        for kept in (*parts, ""):
            home = folder / f"{number}{kept}"
            home.mkdir()
            names = [{**token, "id": len(model["vocab"]) + n} for n, token in enumerate(tokens)]
            whole = state(model=model, added_tokens=names, **{kept: sequences[kept]} if kept else {})
            (home / "tokenizer.json").write_text(json.dumps(whole))
            config = {"added_tokens_decoder": {}, "cls_token": "<s>", "model_max_length": 64, "do_lower_case": True}
            (home / "tokenizer_config.json").write_text(json.dumps(config | {"additional_special_tokens": ["<s>"]}))
    (folder / "sentences").mkdir()
    sentence_transformers.write_modules(
        folder / "sentences", SentenceEmbedding(normalise=True, pooling=("mean", "max")), 8
    )
    done = subprocess.run(
        [sys.executable, "-c", STRUCTURED, str(folder), str(count), str(seed)],
        **{"capture_output": True, "text": True, "timeout": 3000, "check": False},
    )
    assert done.returncode == 0 and done.stderr == "", done.stdout[-4000:] + done.stderr[-2000:]
    refused, used, slowest, megabytes, worst = done.stdout.split(maxsplit=4)
    assert int(refused) + int(used) == 4 * count and int(refused) > count // 2 and int(used) > count // 4
    assert float(slowest) < SECONDS and int(megabytes) < 1_500, (slowest, megabytes, worst)


@pytest.mark.slow
def test_structured_mutations_a_few(tmp_path: Path) -> None:
    run_structured(tmp_path, 100, 0)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_structured_mutations_ten_thousand(tmp_path: Path) -> None:
    run_structured(tmp_path, 2_500, 1)
