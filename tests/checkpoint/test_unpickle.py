"""Pickles are never run: load refuses them, and convert_pickles reads only tables of tensors, in a child process."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import heedful
from heedful.checkpoint import unpickle, unpickle_child
from heedful.checkpoint.safetensors_files import INDEX, WEIGHTS
from heedful.checkpoint.unpickle import PICKLE, PICKLE_INDEX, Unpickled, convert_pickles
from heedful.errors import HeedfulError, HeedfulWarning
from tests.support.tiny_models import random_batch, save_tiny

pytestmark = pytest.mark.filterwarnings("ignore:.*with the network in reach:heedful.errors.HeedfulWarning")


class Canary:
    """An object whose pickle creates the file `path` if it is run, by os.system."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


class EvalCanary(Canary):
    """An object whose pickle creates the file `path` if it is run, by eval."""

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, (f"open({str(self.path)!r}, 'w')",)


class OpenCanary(Canary):
    """An object whose pickle creates the file `path` if it is run, by open."""

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


@pytest.fixture(scope="module")
def safe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with safetensors, which tests must not change."""
    folder = tmp_path_factory.mktemp("pickles") / "safe"
    save_tiny(folder, "bert", "BertForMaskedLM", num_hidden_layers=1)
    return folder


@pytest.fixture
def folder(safe: Path, tmp_path: Path) -> Path:
    """A copy of `safe` without weights."""
    copy = Path(shutil.copytree(safe, tmp_path / "model"))
    (copy / WEIGHTS).unlink()
    return copy


def outputs(folder: Path) -> torch.Tensor:
    """Return the outputs of the model in a folder."""
    with torch.no_grad():
        return torch.as_tensor(heedful.load(folder)(random_batch("bert")))


def write_pickle(path: Path, canary: Canary) -> None:
    path.write_bytes(pickle.dumps(canary))


def write_torch(path: Path, canary: Canary) -> None:
    torch.save({"a": torch.ones(2), "b": canary}, path)


def write_old_torch(path: Path, canary: Canary) -> None:
    torch.save({"a": torch.ones(2), "b": canary}, path, _use_new_zipfile_serialization=False)


def write_numpy(path: Path, canary: Canary) -> None:
    with path.open("wb") as file:
        np.save(file, np.array([canary], dtype=object), allow_pickle=True)


WRITERS: list[tuple[str, Callable[[Path, Canary], None]]] = [
    (PICKLE, write_torch),
    (PICKLE, write_old_torch),
    (PICKLE, write_pickle),
    ("model.pt", write_torch),
    ("model.pth", write_old_torch),
    ("model.pkl", write_pickle),
    ("weights.npy", write_numpy),
    ("model.joblib", write_pickle),
    ("training.ckpt", write_torch),
]


@pytest.mark.parametrize(("name", "write"), WRITERS)
@pytest.mark.parametrize("kind", [Canary, EvalCanary, OpenCanary])
def test_load_runs_no_pickle(
    name: str, write: Callable[[Path, Canary], None], kind: type[Canary], folder: Path, tmp_path: Path
) -> None:
    write(folder / name, kind(tmp_path / "canary"))
    with pytest.raises(HeedfulError, match=f"{name}: such files can run code.* heedful convert --pickle {folder} OUT"):
        heedful.load(folder)
    with pytest.raises(HeedfulError, match="is a file; expected the folder"):
        heedful.load(folder / name)
    assert not (tmp_path / "canary").exists()


def test_a_pickle_called_safetensors_is_refused(folder: Path, tmp_path: Path) -> None:
    write_torch(folder / WEIGHTS, Canary(tmp_path / "canary"))
    with pytest.raises(HeedfulError, match="is not a complete safetensors file"):
        heedful.load(folder)
    (folder / WEIGHTS).rename(folder / PICKLE)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": PICKLE, "b": PICKLE}}))
    with pytest.raises(HeedfulError, match="is not a complete safetensors file"):
        heedful.load(folder)
    assert not (tmp_path / "canary").exists()


def test_the_canary_works_where_a_pickle_is_run(tmp_path: Path) -> None:
    """Without this, the other tests would prove nothing."""
    write_torch(tmp_path / PICKLE, Canary(tmp_path / "canary"))
    torch.load(tmp_path / PICKLE, weights_only=False)
    assert (tmp_path / "canary").exists()


# -- unpickle -----------------------------------------------------------------------------------------------------


def test_a_good_pickle_becomes_a_safe_folder(safe: Path, folder: Path, tmp_path: Path) -> None:
    state = load_file(safe / WEIGHTS)
    state["bert.embeddings.position_ids"] = torch.arange(40)[None]  # as in folders of older versions
    words = state["bert.embeddings.word_embeddings.weight"]
    state["cls.predictions.decoder.weight"] = words  # tied weights share memory
    state["cls.predictions.decoder.bias"] = state["cls.predictions.bias"]
    down = "bert.encoder.layer.0.output.dense.weight"
    state[down] = state[down].T.contiguous().T  # a tensor that is not contiguous
    torch.save(state, folder / PICKLE)
    (folder / "special_tokens_map.json").write_bytes(b"{}")
    (folder / "run.py").write_text("raise SystemExit")
    (folder / "training_args.bin").write_bytes(pickle.dumps(Canary(tmp_path / "canary")))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")

    result = convert_pickles(folder, tmp_path / "out")
    assert result.tensors == len(state)
    names = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert names == {WEIGHTS, "config.json", "special_tokens_map.json", "1_Pooling/config.json"}
    assert torch.equal(outputs(tmp_path / "out"), outputs(safe))
    with pytest.raises(HeedfulError, match="has safetensors already"):
        convert_pickles(tmp_path / "out", tmp_path / "second")
    with pytest.raises(HeedfulError, match="exists and is not empty"):
        convert_pickles(folder, tmp_path / "out")
    assert not (tmp_path / "canary").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


@pytest.mark.slow
def test_a_pickle_in_the_old_format_and_bfloat16(safe: Path, folder: Path, tmp_path: Path) -> None:
    state = {name: tensor.bfloat16() for name, tensor in load_file(safe / WEIGHTS).items()}
    torch.save(state, folder / PICKLE, _use_new_zipfile_serialization=False)
    convert_pickles(folder, tmp_path / "out")
    written = load_file(tmp_path / "out" / WEIGHTS)
    assert written.keys() == state.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in state.items())
    heedful.load(tmp_path / "out")


def pickle_shards(safe: Path, folder: Path) -> dict[str, Any]:
    """Write the weights of `safe` to `folder` as pickled shards; returns their index."""
    state = load_file(safe / WEIGHTS)
    file_of = {name: f"pytorch_model-0000{1 + number % 2}-of-00002.bin" for number, name in enumerate(sorted(state))}
    for file in set(file_of.values()):
        torch.save({name: state[name] for name in state if file_of[name] == file}, folder / file)
    index = {"metadata": {}, "weight_map": file_of}
    (folder / PICKLE_INDEX).write_text(json.dumps(index))
    return index


def test_pickled_shards_become_safe_shards(safe: Path, folder: Path, tmp_path: Path) -> None:
    pickle_shards(safe, folder)
    convert_pickles(folder, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        INDEX,
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }
    assert torch.equal(outputs(tmp_path / "out"), outputs(safe))


@pytest.mark.slow
def test_pickled_shards_that_do_not_fit_their_index(safe: Path, folder: Path, tmp_path: Path) -> None:
    index = pickle_shards(safe, folder)
    name = next(iter(index["weight_map"]))
    for file, message in (
        ("../elsewhere.bin", "lies outside the folder"),
        ("absent.bin", "is missing"),
        ("config.json", "config.json could not be converted: it is damaged, or torch.save did not write it"),
    ):
        changed = {"weight_map": index["weight_map"] | {name: file}}
        (folder / PICKLE_INDEX).write_text(json.dumps(changed))
        with pytest.raises(HeedfulError, match=message):
            convert_pickles(folder, tmp_path / "out")
    exchanged = next(file for file in index["weight_map"].values() if file != index["weight_map"][name])
    (folder / PICKLE_INDEX).write_text(json.dumps({"weight_map": index["weight_map"] | {name: exchanged}}))
    with pytest.raises(HeedfulError, match="are not of one save"):
        convert_pickles(folder, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def write_bomb(path: Path) -> None:
    """Write a file that decompresses to a thousand times its size."""
    torch.save({"a": torch.zeros(64 << 20, dtype=torch.uint8)}, path)
    with zipfile.ZipFile(path) as small:
        parts = {name: small.read(name) for name in small.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as squeezed:
        for name, part in parts.items():
            squeezed.writestr(name, part)


def write_tar(path: Path) -> None:
    """Write a file in the format of the first versions of PyTorch."""
    with tarfile.open(path, "w") as file:
        for name in ("sys_info", "pickle", "tensors", "storages"):
            file.add(__file__, name)


BAD: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "os.system": (lambda path, canary: write_torch(path, Canary(canary)), r"asks for posix\.system.*may be malicious"),
    "eval": (
        lambda path, canary: write_old_torch(path, EvalCanary(canary)),
        r"asks for (\w+\.)?eval,",
    ),
    "open": (lambda path, canary: write_torch(path, OpenCanary(canary)), r"asks for (io|_io|__builtin__)\.open"),
    "a bare pickle": (lambda path, canary: write_pickle(path, Canary(canary)), "torch.save did not write it"),
    "a tar": (lambda path, canary: write_tar(path), "tar format of before 2018"),
    "nothing": (lambda path, canary: path.touch(), "it is damaged, or torch.save did not write it"),
    "noise": (lambda path, canary: path.write_bytes(b"\x80\x02}" * 99), "it is damaged"),
    "a list": (lambda path, canary: torch.save([torch.ones(2)], path), "holds a list; expected names and tensors"),
    "a tensor": (lambda path, canary: torch.save(torch.ones(2), path), "holds a Tensor; expected names"),
    "a module": (lambda path, canary: torch.save(torch.nn.Linear(2, 2), path), r"asks for torch\.nn\.modules\.linear"),
    "a training checkpoint": (
        lambda path, canary: torch.save({"epoch": 3, "model": {"a": torch.ones(2)}}, path),
        "under 'epoch' it holds a int; expected names and tensors.*save only the state_dict",
    ),
    "a number as a name": (lambda path, canary: torch.save({1: torch.ones(2)}, path), "under 1 it holds a Tensor"),
    "a sparse tensor": (lambda path, canary: torch.save({"a": torch.eye(2).to_sparse()}, path), "not a plain tensor"),
    "a tensor without data": (
        lambda path, canary: torch.save({"a": torch.ones(2, device="meta")}, path),
        "not a plain",
    ),
    "one number, 2^40 wide": (
        lambda path, canary: torch.save({"a": torch.ones(1).expand(1 << 40)}, path),
        "its tensors are more than .* bytes",
    ),
    "what inflates": (lambda path, canary: write_bomb(path), "takes far more memory|are more than|it is damaged"),
    "a line break": (
        lambda path, canary: torch.save({"a\n\x1b[2J": torch.ones(2)}, path),
        "names a tensor",
    ),
}


@pytest.mark.parametrize("case", [case for case in BAD if case != "what inflates"])
def test_the_child_explains_refusals(case: str, tmp_path: Path) -> None:
    """Call functions of the child in this process; they run no pickle either."""
    write, message = BAD[case]
    write(tmp_path / PICKLE, tmp_path / "canary")
    try:
        with warnings.catch_warnings(action="ignore"):  # nobody sees warnings of the child
            unpickle_child.convert(str(tmp_path / PICKLE), str(tmp_path / WEIGHTS), (tmp_path / PICKLE).stat().st_size)
    except Exception as error:
        explanation = f"{PICKLE} could not be converted: {unpickle_child.explain_refusal(error)}"
        assert re.search(message, explanation), explanation
        assert "weights_only" not in explanation
        assert "add_safe_globals" not in explanation
    else:
        assert case == "a line break"  # the parent process refuses this
    assert not (tmp_path / "canary").exists()


FAST_CASES = {"os.system", "what inflates", "a line break"}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case not in FAST_CASES)) for case in BAD]
)
def test_anything_else_than_tensors_is_refused(case: str, folder: Path, tmp_path: Path) -> None:
    write, message = BAD[case]
    write(folder / PICKLE, tmp_path / "canary")
    with pytest.raises(HeedfulError, match=message) as caught:
        convert_pickles(folder, tmp_path / "out")
    assert "weights_only" not in str(caught.value)  # the message does not advise to switch this off
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 800
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "a canary ran, or incomplete files remain"


@pytest.mark.slow
def test_missing_files_and_links_out_of_the_folder_are_refused(safe: Path, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(HeedfulError, match=f"has neither {PICKLE} nor {PICKLE_INDEX}"):
        convert_pickles(folder, tmp_path / "out")
    torch.save(load_file(safe / WEIGHTS), tmp_path / "outside.bin")
    (folder / PICKLE).symlink_to("../outside.bin")
    with pytest.raises(HeedfulError, match="lies outside the folder"):
        convert_pickles(folder, tmp_path / "out")
    (folder / PICKLE).unlink()
    shutil.copy(tmp_path / "outside.bin", folder / PICKLE)
    (tmp_path / "secret.json").write_text("{}")
    (folder / "tokenizer_config.json").symlink_to("../secret.json")
    with pytest.raises(HeedfulError, match="is a link to a place outside the folder, and was not copied"):
        convert_pickles(folder, tmp_path / "out")
    (folder / "config.json").unlink()
    with pytest.raises(HeedfulError, match=r"needs config\.json beside its weights"):
        convert_pickles(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# -- the child ----------------------------------------------------------------------------------------------------

PROBE = """
import importlib.util, json, os, resource, socket, sys
spec = importlib.util.spec_from_file_location("child", sys.argv[1])
child = importlib.util.module_from_spec(spec); spec.loader.exec_module(child)
answer = {"network": child.cut_off_network()}
try:
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), 1).close()
    answer["connected"] = True
except OSError:
    answer["connected"] = False
child.limit(1000, 7)
for name in ("AS", "FSIZE", "CPU", "CORE"):
    answer[name] = resource.getrlimit(getattr(resource, "RLIMIT_" + name))
try:
    bytearray(1 << 29)
    answer["memory"] = True
except MemoryError:
    answer["memory"] = False
print(json.dumps(answer))
"""


def test_the_child_is_limited() -> None:
    command = [sys.executable, "-I", "-W", "error", "-c", PROBE, unpickle_child.__file__]
    answer = json.loads(subprocess.run(command, capture_output=True, timeout=60, check=True).stdout)
    assert answer["connected"] == bool(answer["network"]), "its answer about the network is wrong"
    assert answer["FSIZE"] == [2 * 1000 + (1 << 20)] * 2
    assert answer["CPU"] == [7, 7]
    assert answer["CORE"] == [0, 0]
    assert 1 << 28 < answer["AS"][1] < 1 << 34
    assert not answer["memory"]


def test_a_network_in_reach_is_warned_of(
    safe: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(safe / WEIGHTS, tmp_path / WEIGHTS)
    torch.save({}, folder / PICKLE)

    def in_child(files: list[tuple[Path, Path]]) -> Unpickled:
        shutil.copy(tmp_path / WEIGHTS, files[0][1])
        return Unpickled(tensors=3, network="Operation not permitted")

    monkeypatch.setattr(unpickle, "_read_in_child", in_child)
    with pytest.warns(HeedfulWarning, match=r"with the network in reach \(Operation not permitted\)"):
        convert_pickles(folder, tmp_path / "out")
    assert str(Unpickled(tensors=3, network="")) == "3 tensors were read in a child process without network"


FAKE_CHILDREN: dict[str, tuple[str, str]] = {
    "a crash": ("import os; os.abort()", "ended with -6"),
    "no answer": ("", "the child process ended with 0"),
    "an answer that is no JSON": ("print('x')", "the child process ended with 0"),
    "an answer of another kind": ("print([1])", "the child process ended with 0"),
    "success without a file": ('print(\'{"network": "", "tensors": 1}\')', "could not be converted"),
    "a flood": ("print('x' * 10**7)", "could not be converted"),
    "no end": ("import time; time.sleep(60)", "reading took over 1 s and was stopped"),
    "a link": (
        "import json, os, sys\nos.symlink('/etc/passwd', json.loads(sys.argv[1])['files'][0][1])\nprint('{}')",
        "could not be converted",
    ),
    "garbage": (
        "import json, sys\nopen(json.loads(sys.argv[1])['files'][0][1], 'w').write('x' * 99)\nprint('{}')",
        "is not a complete safetensors file",
    ),
}


@pytest.mark.parametrize("case", FAKE_CHILDREN)
def test_the_child_is_not_trusted(case: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, message = FAKE_CHILDREN[case]
    (tmp_path / "child.py").write_text(code)
    torch.save({}, folder / PICKLE)
    monkeypatch.setattr(unpickle, "_CHILD", tmp_path / "child.py")
    run = subprocess.run
    if case == "no end":
        monkeypatch.setattr(
            subprocess, "run", lambda *arguments, **keywords: run(*arguments, **keywords | {"timeout": 0.5})
        )
        message = "and was stopped"
    with pytest.raises(HeedfulError, match=message):
        convert_pickles(folder, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["child.py", "model"]


def test_importing_checkpoint_does_not_import_unpickle() -> None:
    code = "import sys, heedful.checkpoint; print([name for name in sys.modules if 'checkpoint.unpickle' in name])"
    root = Path(heedful.__file__).parent.parent
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True, timeout=60
    )
    assert process.stdout.strip() == "[]"
