"""Loading a folder with any content raises a HeedfulError or returns exactly the right tensors.

Tensors are right if they have the names and shapes that config.json implies, and the bytes of the file. Without a hash,
a changed byte inside a tensor cannot be detected unless the number is no longer finite, and neither can two tensors of
one shape with exchanged names.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import heedful
from heedful.checkpoint import safetensors_files
from heedful.checkpoint.folder_json import read_folder_json
from heedful.checkpoint.safetensors_files import INDEX, WEIGHTS, find_tensors, read_tensors
from heedful.errors import HeedfulError
from tests.support.model_copies import ONE_LAYER, have_equal_weights, run_python
from tests.support.tiny_models import save_tiny


def split_file(raw: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the header and the data of a safetensors file."""
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def safetensors_bytes(header: Any, data: bytes, length: int | None = None) -> bytes:
    """Return a safetensors file with this header; `length` replaces the length of the header in the file."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8), **fields: Any) -> dict[str, Any]:
    """Return the entry of one tensor in a header."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **fields}


DATA = struct.pack("<4f", 1, 2, 3, 4)
TWO_TENSORS = {"a": entry(), "b": entry(offsets=(8, 16))}
BROKEN: dict[str, bytes] = {
    "empty": b"",
    "short": b"\x05\x00\x00",
    "a header alone": safetensors_bytes(TWO_TENSORS, b""),
    "no header": struct.pack("<Q", 0) + DATA,
    "2^63 bytes of header": safetensors_bytes(TWO_TENSORS, DATA, 1 << 63),
    "2^64 - 1 bytes of header": safetensors_bytes(TWO_TENSORS, DATA, (1 << 64) - 1),
    "a header of more than 100 MB": safetensors_bytes(TWO_TENSORS, DATA, 100_000_001),
    "a header that is longer than the file": safetensors_bytes(TWO_TENSORS, b"", 1 << 12),
    "bad JSON": safetensors_bytes(b'{"a": ', DATA),
    "UTF-16": safetensors_bytes(json.dumps(TWO_TENSORS).encode("utf-16"), DATA),
    "a byte order mark": safetensors_bytes(b"\xef\xbb\xbf" + json.dumps(TWO_TENSORS).encode(), DATA),
    "a list": safetensors_bytes([], DATA),
    "a number": safetensors_bytes(b"12", DATA),
    "deep JSON": safetensors_bytes(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", DATA),
    "deep metadata": safetensors_bytes({"__metadata__": {"a": {"b": "c"}}, **TWO_TENSORS}, DATA),
    "metadata of numbers": safetensors_bytes({"__metadata__": {"a": 1}, **TWO_TENSORS}, DATA),
    "metadata that are text": safetensors_bytes({"__metadata__": "pt", **TWO_TENSORS}, DATA),
    "an overlap": safetensors_bytes({"a": entry(), "b": entry(offsets=(4, 12))}, DATA[:12]),
    "one place twice": safetensors_bytes({"a": entry(), "b": entry()}, DATA[:8]),
    "a hole": safetensors_bytes({"a": entry(), "b": entry(offsets=(12, 20))}, DATA + DATA[:4]),
    "a hole at the start": safetensors_bytes({"a": entry(offsets=(8, 16))}, DATA),
    "trailing bytes": safetensors_bytes(TWO_TENSORS, DATA + b"x"),
    "a truncation": safetensors_bytes(TWO_TENSORS, DATA[:-1]),
    "an overflowing shape": safetensors_bytes({"a": entry(shape=(1 << 62, 8), offsets=(0, 0))}, b""),
    "a shape that overflows to the right size": safetensors_bytes(
        {"a": entry(shape=(1 << 63, 4, 1 << 62), offsets=(0, 0))}, b""
    ),
    "a negative shape": safetensors_bytes({"a": entry(shape=(-1, -2))}, DATA[:8]),
    "a negative offset": safetensors_bytes({"a": entry(offsets=(-8, 0))}, DATA[:8]),
    "offsets in the wrong order": safetensors_bytes({"a": entry(offsets=(8, 0))}, DATA[:8]),
    "three offsets": safetensors_bytes({"a": entry(offsets=(0, 8, 8))}, DATA[:8]),
    "a shape of text": safetensors_bytes({"a": entry(shape=("2",))}, DATA[:8]),
    "a shape of floats": safetensors_bytes({"a": entry(shape=(2.0,))}, DATA[:8]),
    "a shape of truths": safetensors_bytes({"a": entry(shape=(True, 2))}, DATA[:8]),
    "a shape that is null": safetensors_bytes({"a": entry() | {"shape": None}}, DATA[:8]),
    "a number of 5,000 digits": safetensors_bytes(b'{"a": {"shape": [' + b"1" * 5000 + b"]}}", DATA),
    "an infinite number": safetensors_bytes(b'{"a": {"dtype":"F32","shape":[1e999],"data_offsets":[0,8]}}', DATA[:8]),
    "a thousand dimensions": safetensors_bytes({"a": entry(shape=(1,) * 999 + (2,))}, DATA[:8]),
    "an unknown type": safetensors_bytes({"a": entry("F33")}, DATA[:8]),
    "a type that is no text": safetensors_bytes({"a": entry() | {"dtype": 4}}, DATA[:8]),
    "no type": safetensors_bytes({"a": {"shape": [2], "data_offsets": [0, 8]}}, DATA[:8]),
    "an unknown field": safetensors_bytes({"a": entry(file="../b")}, DATA[:8]),
    "an entry that is a list": safetensors_bytes({"a": [1]}, b""),
    "a name twice": safetensors_bytes(
        b'{"a":%s,"a":%s}' % tuple(json.dumps(value).encode() for value in TWO_TENSORS.values()), DATA
    ),
    "a field twice": safetensors_bytes(
        b'{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', DATA[:8]
    ),
    "a name with a line break": safetensors_bytes({"a\nb": entry()}, DATA[:8]),
    "a name that moves the cursor": safetensors_bytes({"\x1b[2J": entry()}, DATA[:8]),
    "half a surrogate pair": safetensors_bytes(b'{"\\ud800":%s}' % json.dumps(entry()).encode(), DATA[:8]),
    "a name of a megabyte": safetensors_bytes({"a" * (1 << 20): entry()}, DATA[:8]),
    "50 MB of metadata": safetensors_bytes({"__metadata__": {"a": "b" * 50_000_000}, **TWO_TENSORS}, DATA),
    "300,000 tensors": safetensors_bytes({f"a{n}": entry(offsets=(0, 0), shape=(0,)) for n in range(300_000)}, b""),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused(case: str, tmp_path: Path) -> None:
    (tmp_path / WEIGHTS).write_bytes(BROKEN[case])
    start = time.process_time()
    with pytest.raises(HeedfulError, match=WEIGHTS) as caught:
        find_tensors(tmp_path)
    assert time.process_time() - start < 1
    assert len(str(caught.value)) < 600
    assert str(caught.value).isprintable()


ACCEPTED: dict[str, tuple[bytes, dict[str, tuple[int, ...]]]] = {
    "two tensors": (safetensors_bytes(TWO_TENSORS, DATA), {"a": (2,), "b": (2,)}),
    "no tensors": (safetensors_bytes({}, b""), {}),
    "metadata": (safetensors_bytes({"__metadata__": {"format": "pt"}, **TWO_TENSORS}, DATA), {"a": (2,), "b": (2,)}),
    "the later one first": (safetensors_bytes(dict(reversed(TWO_TENSORS.items())), DATA), {"a": (2,), "b": (2,)}),
    "a scalar": (safetensors_bytes({"a": entry(shape=(), offsets=(0, 4))}, DATA[:4]), {"a": ()}),
    "nothing, 2^62 wide": (
        safetensors_bytes({"a": entry(shape=(0, 1 << 62), offsets=(0, 0))}, b""),
        {"a": (0, 1 << 62)},
    ),
    "a path as a name": (safetensors_bytes({"../../etc/x": entry()}, DATA[:8]), {"../../etc/x": (2,)}),
    "spaces after the header": (
        safetensors_bytes(json.dumps(TWO_TENSORS).encode() + b"   ", DATA),
        {"a": (2,), "b": (2,)},
    ),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_a_valid_file_is_read_as_safetensors_reads_it(case: str, tmp_path: Path) -> None:
    raw, shapes = ACCEPTED[case]
    (tmp_path / WEIGHTS).write_bytes(raw)
    entries = find_tensors(tmp_path)
    assert {name: entry.shape for name, entry in entries.items()} == shapes
    actual, expected = read_tensors(entries, torch.float32), load_file(tmp_path / WEIGHTS)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in actual)
    assert list(tmp_path.iterdir()) == [tmp_path / WEIGHTS]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_float_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5).to(dtype), "b": torch.randn(()).to(dtype), "c": torch.ones(0, 4, dtype=dtype)}
    save_file(tensors, tmp_path / WEIGHTS)
    entries = find_tensors(tmp_path)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in read_tensors(entries, dtype).items())
    for bad in (float("nan"), float("inf"), -float("inf")):
        save_file({"a": torch.tensor([1, bad, 2], dtype=dtype)}, tmp_path / WEIGHTS)
        with pytest.raises(HeedfulError, match="a holds NaN or infinite numbers"):
            read_tensors(find_tensors(tmp_path), dtype)


def test_integers_and_numbers_too_large_for_the_dtype_are_refused(tmp_path: Path) -> None:
    save_file({"a": torch.tensor([1e30])}, tmp_path / WEIGHTS)
    with pytest.raises(HeedfulError, match=r"a holds NaN or infinite numbers as torch\.float16"):
        read_tensors(find_tensors(tmp_path), torch.float16)
    for dtype, name in ((torch.int32, "I32"), (torch.uint8, "U8"), (torch.bool, "BOOL"), (torch.int64, "I64")):
        save_file({"a": torch.ones(2, dtype=dtype)}, tmp_path / WEIGHTS)
        with pytest.raises(HeedfulError, match=f"a holds {name}; expected one of F64, F32, F16, BF16"):
            read_tensors(find_tensors(tmp_path), torch.float32)


def test_a_file_that_is_truncated_while_it_is_read_is_an_error(copy: Path) -> None:
    entries = find_tensors(copy)  # a mapped file would end the process with SIGBUS here
    raw = (copy / WEIGHTS).read_bytes()
    (copy / WEIGHTS).write_bytes(raw[:-1])
    with pytest.raises(HeedfulError, match="it ended inside"):
        read_tensors(entries, torch.float32)
    (copy / WEIGHTS).unlink()
    with pytest.raises(HeedfulError, match="cannot be read: No such file"):
        read_tensors(entries, torch.float32)


def test_a_tensor_larger_than_memory_is_an_error(tmp_path: Path) -> None:
    entry = safetensors_files.TensorEntry(file=tmp_path / WEIGHTS, key="a", shape=(1 << 44, 4), dtype="F32", start=0)
    entry.file.touch()
    with pytest.raises(HeedfulError, match="not enough memory for a"):
        read_tensors({"a": entry}, torch.float32)


# -- load: names, shapes and dtypes follow from config.json --------------------------------------------------------

Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]
WORDS, TYPES = "bert.embeddings.word_embeddings.weight", "bert.embeddings.token_type_embeddings.weight"
QUERY, UP = "bert.encoder.layer.0.attention.self.query.weight", "bert.encoder.layer.0.intermediate.dense.weight"
WRONG: dict[str, tuple[Change, str]] = {
    "missing": (lambda t: {name: t[name] for name in t if name != QUERY}, f"missing: {QUERY}"),
    "all missing": (lambda t: {}, "1 layers .see num_hidden_layers., but the weights hold only 0 tensors: none"),
    "extra": (lambda t: t | {"evil.weight": torch.ones(2)}, r"not expected: (bert\.)?evil\.weight"),
    "a path": (lambda t: t | {"../../etc/x": torch.ones(2)}, r"not expected: (bert\.)?\.\./\.\./etc/x"),
    "a layer too many": (lambda t: t | {UP.replace("0", "1"): t[UP] + 1}, r"not expected: bert\.encoder\.layer\.1"),
    "a layer 01": (lambda t: t | {UP.replace("0", "00"): t[UP] + 1}, r"not expected: bert\.encoder\.layer\.00"),
    "another shape": (lambda t: t | {UP: t[UP].T.contiguous()}, rf"{UP} has the shape \[32, 48\].*\[48, 32\]"),
    "another rank": (lambda t: t | {UP: t[UP].flatten()}, rf"{UP} has the shape \[1536\]"),
    "a scalar": (lambda t: t | {UP: torch.tensor(1.0)}, rf"{UP} has the shape \[\]"),
    "exchanged": (lambda t: t | {WORDS: t[TYPES], TYPES: t[WORDS]}, rf"{WORDS} has the shape"),
    "integers": (lambda t: t | {UP: t[UP].to(torch.int32)}, f"{UP} holds I32"),
    "NaN": (lambda t: t | {UP: t[UP] * float("nan")}, f"{UP} holds NaN"),
    "two names for one": (lambda t: t | {_old_name(t): torch.ones(32)}, "two names of one tensor"),
    "tied, but different": (lambda t: t | {"cls.predictions.decoder.weight": t[WORDS] + 1}, "should be one tensor"),
    "tied, of another shape": (lambda t: t | {"cls.predictions.decoder.weight": t[UP] + 1}, "should be one tensor"),
}


def _old_name(tensors: dict[str, Tensor]) -> str:
    """Return the old name of a norm weight, which ends with gamma."""
    return next(name for name in tensors if name.endswith("LayerNorm.weight")).replace(".weight", ".gamma")


@pytest.mark.parametrize("case", WRONG)
def test_tensors_that_do_not_fit_the_config_are_refused(case: str, copy: Path) -> None:
    change, message = WRONG[case]
    save_file(change(load_file(copy / WEIGHTS)), copy / WEIGHTS)
    with pytest.raises(HeedfulError, match=message):
        heedful.load(copy)


def test_many_foreign_tensors_are_refused_quickly(copy: Path) -> None:
    header, data = split_file((copy / WEIGHTS).read_bytes())
    header |= {f"x.{number}.weight": entry(shape=(0,), offsets=(0, 0)) for number in range(15_000)}
    (copy / WEIGHTS).write_bytes(safetensors_bytes(header, data))
    start = time.process_time()
    with pytest.raises(HeedfulError, match=r"asks for 1 layers .*, but the weights hold 15026 tensors"):
        heedful.load(copy)
    assert time.process_time() - start < 10, "loading took longer than a linear search"


def mutate(raw: bytes, rng: random.Random) -> bytes:
    """Return the bytes of a file with one byte, one cut or one value of the header changed."""
    (length,) = struct.unpack("<Q", raw[:8])
    place = rng.randrange(8 + length) if rng.random() < 0.7 else rng.randrange(len(raw))
    kind = rng.random()
    if kind < 0.4:
        return raw[:place] + bytes([raw[place] ^ (1 << rng.randrange(8))]) + raw[place + 1 :]
    if kind < 0.6:
        return raw[:place] + bytes([rng.randrange(256)]) + raw[place + 1 :]
    if kind < 0.65:
        return raw[:place]
    if kind < 0.7:
        return raw[:place] + raw[place + rng.randrange(1, 9) :]
    if kind < 0.75:
        return raw[:place] + rng.randbytes(rng.randrange(1, 9)) + raw[place:]
    header, data = split_file(raw)
    name = rng.choice([name for name in header if name != "__metadata__"])
    numbers = [0, 1, 2, 12, 31, 32, 48, -1, 1 << 31, 1 << 62, (1 << 64) - 1, 4096]
    value = rng.choice([*numbers, None, "x", 0.5, [], {}, True, [32], [32, 32], [0, 4096]])
    where = rng.choice(["name", "copy", "dtype", "shape", "data_offsets", "one of shape", "one of data_offsets", "all"])
    if where in ("name", "copy"):
        new_name = rng.choice(
            [*header, name.replace("0", "1"), name.upper(), "bert." + name, name.removeprefix("bert.")]
        )
        header[new_name] = header[name] if where == "copy" else header.pop(name)
    elif where == "dtype":
        header[name]["dtype"] = rng.choice(["F16", "BF16", "F64", "I32", "U32", "I64", "f32", "C64", value])
    elif where.startswith("one of"):
        numbers_in_entry = header[name][where.removeprefix("one of ")]
        numbers_in_entry[rng.randrange(len(numbers_in_entry))] = value
    elif where == "all":
        header[name] = value
    else:
        header[name][where] = value
    return safetensors_bytes(header, data)


def check_mutations(folder: Path, work: Path, count: int, seed: int) -> Counter[str]:
    """Load mutated copies of a folder, check the results, and return the number of each outcome."""
    raw = (folder / WEIGHTS).read_bytes()
    start = 8 + struct.unpack("<Q", raw[:8])[0]
    shapes = {name: entry.shape for name, entry in find_tensors(folder).items()}
    expected = read_tensors(find_tensors(folder), torch.float32)
    target = Path(shutil.copytree(folder, work / "mutated"))
    rng, outcomes = random.Random(seed), Counter[str]()
    for number in range(count):
        changed = mutate(raw, rng)
        (target / WEIGHTS).write_bytes(changed)
        before = time.process_time()
        outcome = "right"
        try:
            entries = find_tensors(target)
            if has_same_shapes := {name: entry.shape for name, entry in entries.items()} == shapes:
                tensors = read_tensors(entries, torch.float32)
        except HeedfulError:
            outcome, has_same_shapes = "refused by the file functions", True
        if outcome == "right" and has_same_shapes:
            num_changed = sum(
                int((tensors[n].view(torch.uint8) != expected[n].view(torch.uint8)).sum()) for n in shapes
            )
            assert num_changed <= (raw[start:] != changed[-len(raw[start:]) :]), changed
            if num_changed:
                outcome = "a number changed"
        if not has_same_shapes or number % 50 == 0:  # load checks names and shapes
            try:
                loaded = heedful.load(target)
            except HeedfulError:
                assert not has_same_shapes or "file functions" in outcome
                outcome = outcome if has_same_shapes else "refused by load"
            else:
                assert has_same_shapes
                assert "file functions" not in outcome
                assert {name for name, _ in loaded.named_parameters()}
        assert time.process_time() - before < 1
        outcomes[outcome] += 1
        if "refused" not in outcome:  # compare with safetensors
            with safetensors.safe_open(target / WEIGHTS, framework="pt") as file:
                assert {n: tuple(file.get_slice(n).get_shape()) for n in file.keys()} == shapes  # noqa: SIM118
    return outcomes


def test_mutations(folder: Path, tmp_path: Path) -> None:
    outcomes = check_mutations(folder, tmp_path, 500, seed=1)
    assert min(outcomes[outcome] for outcome in ("refused by load", "refused by the file functions")) > 20, outcomes
    assert outcomes["a number changed"] > 20, outcomes


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(2, 7))
def test_many_mutations(folder: Path, tmp_path: Path, seed: int) -> None:
    print(check_mutations(folder, tmp_path, 20_000, seed))


PEAK_MEMORY_SCRIPT = """
import sys, heedful
from pathlib import Path
heedful.load(sys.argv[1])
def peak_bytes(): return 1024 * int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
Path("/proc/self/clear_refs").write_text("5")  # reset the peak
before = peak_bytes()
loaded = heedful.load(sys.argv[2])
print((peak_bytes() - before) / (Path(sys.argv[2]) / "model.safetensors").stat().st_size)
"""


def test_memory_while_loading_is_at_most_twice_the_file(folder: Path, tmp_path: Path) -> None:
    save_tiny(tmp_path, "bert", "BertForMaskedLM", vocab_size=20_000, hidden_size=512, num_hidden_layers=2)
    assert (tmp_path / WEIGHTS).stat().st_size > 45_000_000
    ratio = float(run_python(PEAK_MEMORY_SCRIPT, folder, tmp_path))
    assert 1 <= ratio <= 2, ratio


# -- JSON ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "not valid JSON"),
        (b"[1]", "holds a list; expected an object"),
        (b"null", "holds a NoneType; expected an object"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "gives the key 'c' twice"),
        (b'{"a": NaN}', "holds NaN, which is not a number"),
        (b'{"a": -Infinity}', "holds -Infinity, which is not a number"),
        (b'{"a": 1e999}', "holds 1e999, which is not a number"),
        (b'{"a": ' + b"1" * 5000 + b"}", "not valid JSON"),
        (b'{"a": "\xff"}', "not valid JSON in UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "not valid JSON in UTF-8"),
        (b"[" * 500_000, "not valid JSON"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "not valid JSON"),
        (b'{"a": "' + b"x" * (1 << 20) + b'"}', "has 1048585 bytes; at most 1048576 are read"),
        (b'{"a": 1}}', "not valid JSON"),
    ],
)
def test_json_is_read_strictly(text: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(text)
    with pytest.raises(HeedfulError, match=message) as caught:
        read_folder_json(tmp_path / "x.json")
    assert "x.json" in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_repeated_key_among_many_is_refused_quickly(tmp_path: Path) -> None:
    keys = ", ".join(f'"{number}": 1' for number in range(60_000))
    (tmp_path / "x.json").write_text(f'{{{keys}, "59999": 1}}')
    start = time.process_time()
    with pytest.raises(HeedfulError, match="gives the key '59999' twice"):
        read_folder_json(tmp_path / "x.json")
    assert time.process_time() - start < 1


def test_json_that_is_not_a_plain_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("/dev/zero")
    with pytest.raises(HeedfulError, match="no plain file"):
        heedful.load(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").symlink_to("config.json")
    with pytest.raises(HeedfulError, match="cannot be read: Too many levels of symbolic links"):
        heedful.load(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    with pytest.raises(HeedfulError, match="no plain file"):
        heedful.load(tmp_path)
    with pytest.raises(HeedfulError, match="does not exist: a model folder holds"):
        heedful.load(tmp_path / "config.json")


def test_a_byte_order_mark_is_accepted(copy: Path) -> None:
    (copy / "config.json").write_bytes(b"\xef\xbb\xbf" + (copy / "config.json").read_bytes())
    heedful.load(copy)


# -- shards -------------------------------------------------------------------------------------------------------


def shard_weights(folder: Path) -> dict[str, Any]:
    """Split the weights of a folder into two shards; returns the index."""
    tensors = load_file(folder / WEIGHTS)
    names, (first, second) = sorted(tensors), ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    file_of = {name: first if number % 2 else second for number, name in enumerate(names)}
    for file in (first, second):
        save_file({name: tensors[name] for name in names if file_of[name] == file}, folder / file)
    (folder / WEIGHTS).unlink()
    index = {"metadata": {"total_size": 1}, "weight_map": file_of}
    (folder / INDEX).write_text(json.dumps(index))
    return index


def test_shards_load_as_one_file_does(folder: Path, copy: Path) -> None:
    shard_weights(copy)
    assert have_equal_weights(folder, copy)


def test_one_file_comes_before_shards(folder: Path, copy: Path) -> None:
    """Transformers reads one file first too: when it saves one, it does not remove an old index."""
    index = shard_weights(copy)
    for file in set(index["weight_map"].values()):
        save_file({name: tensor + 1 for name, tensor in load_file(copy / file).items()}, copy / file)
    shutil.copy(folder / WEIGHTS, copy / WEIGHTS)
    assert have_equal_weights(folder, copy)


def test_shards_of_transformers_are_loaded(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "one", "bert", "BertForMaskedLM", **ONE_LAYER)
    model.save_pretrained(tmp_path / "many", max_shard_size="16KB")
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 2
    assert have_equal_weights(tmp_path / "one", tmp_path / "many")


def _set_shard(index: dict[str, Any], name: str) -> None:
    """Change the file of one tensor in an index."""
    index["weight_map"][WORDS] = name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("../outside.safetensors", "lies outside the folder"),
        ("..", "lies outside the folder"),
        (".", "lies outside the folder"),
        ("", "lies outside the folder"),
        ("sub/x.safetensors", "lies outside the folder"),
        ("./model-00001-of-00002.safetensors", "lies outside the folder"),
        ("a\0b", "lies outside the folder"),
        ("a\nb", "lies outside the folder"),
        ("x" * 5000, "lies outside the folder"),
        ("é" * 150, "is missing"),
        ("absent.safetensors", "'absent.safetensors' is missing"),
        ("outside-link.safetensors", "lies outside the folder"),
        ("dangling-link.safetensors", "is missing"),
        ("circle-a.safetensors", "is missing"),
        ("folder.safetensors", "is missing"),
        ("pipe.safetensors", "is missing"),
        (INDEX, "are not of one save|is not a complete safetensors file"),
        ("config.json", "are not of one save|is not a complete safetensors file"),
    ],
)
def test_shards_that_are_missing_or_outside_the_folder_are_refused(
    name: str, message: str, folder: Path, copy: Path
) -> None:

    index = shard_weights(copy)
    shutil.copy(folder / WEIGHTS, copy.parent / "outside.safetensors")
    (copy / "outside-link.safetensors").symlink_to("../outside.safetensors")
    (copy / "dangling-link.safetensors").symlink_to("nowhere")
    (copy / "circle-a.safetensors").symlink_to("circle-b.safetensors")
    (copy / "circle-b.safetensors").symlink_to("circle-a.safetensors")
    (copy / "folder.safetensors").mkdir()
    os.mkfifo(copy / "pipe.safetensors")
    for shard_name in {name, str(copy.parent / "outside.safetensors") if name.startswith("..") else name}:
        _set_shard(index, shard_name)
        (copy / INDEX).write_text(json.dumps(index))
        with pytest.raises(HeedfulError, match=message) as caught:
            heedful.load(copy)
        assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "value", [None, {}, [], {"a": None}, {"weight_map": {}}, {"weight_map": [1]}, {"weight_map": {"a": 1}}]
)
def test_an_index_without_a_map(value: Any, copy: Path) -> None:
    shard_weights(copy)
    (copy / INDEX).write_text(json.dumps(value))
    with pytest.raises(HeedfulError, match=r"weight_map is missing|expected an object"):
        heedful.load(copy)


def test_index_and_shards_must_agree(copy: Path) -> None:
    index = shard_weights(copy)
    first, second = sorted(set(index["weight_map"].values()))
    name = next(name for name, file in index["weight_map"].items() if file == first)
    tensors = load_file(copy / first)

    save_file({key: tensors[key] for key in tensors if key != name}, copy / first)
    with pytest.raises(HeedfulError, match=f"lacks {name}: the index and the shards are not of one save"):
        heedful.load(copy)
    save_file(tensors, copy / first)
    save_file(load_file(copy / second) | {name: tensors[name]}, copy / second)  # now the tensor is in both shards
    with pytest.raises(HeedfulError, match=f"holds {name} that {INDEX} does not place there"):
        heedful.load(copy)
    (copy / second).unlink()
    with pytest.raises(HeedfulError, match=f"{second}' is missing"):
        heedful.load(copy)


def test_weights_that_are_a_link(folder: Path, copy: Path) -> None:
    shutil.move(copy / WEIGHTS, copy.parent / "outside.safetensors")
    (copy / WEIGHTS).symlink_to("../outside.safetensors")
    with pytest.raises(HeedfulError, match="lies outside the folder"):
        heedful.load(copy)
    (copy / WEIGHTS).unlink()
    (copy / WEIGHTS).symlink_to("here.safetensors")
    shutil.copy(folder / WEIGHTS, copy / "here.safetensors")
    assert have_equal_weights(folder, copy)


def test_a_file_is_not_a_folder(folder: Path) -> None:
    with pytest.raises(HeedfulError, match="is a file; expected the folder that holds config"):
        heedful.load(folder / WEIGHTS)
