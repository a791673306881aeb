"""Models by their names on the Hugging Face hub, read from a local cache without a network."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import heedful
from heedful.checkpoint import folder_of, hub
from heedful.checkpoint.safetensors_files import WEIGHTS
from heedful.errors import HeedfulError, HeedfulWarning
from tests.support.model_copies import file_contents, have_equal_weights, make_hub_cache
from tests.support.tiny_models import random_batch


@pytest.fixture
def cache(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Snapshot of the only model in a cache of the hub, without network."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "_resolved", {})
    return make_hub_cache(folder, tmp_path)


def test_a_name_without_a_revision_is_main_with_one_warning_that_names_the_commit(cache: Path) -> None:
    with pytest.warns(HeedfulWarning, match=f"using main, which is commit {cache.name}"):
        assert heedful.load("maker/model").source == f"maker/model@{cache.name}"
    assert heedful.load("maker/model").source == hub.pinned("maker/model") == f"maker/model@{cache.name}"


def test_the_commit_of_main_stays_the_same_within_a_process(folder: Path, cache: Path) -> None:
    with pytest.warns(HeedfulWarning, match="using main"):
        first = hub.pinned("maker/model")
    (cache.parent.parent / "refs" / "main").write_text("f" * 40)
    assert hub.pinned("maker/model") == first


def test_missing_folders_are_not_looked_for_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for name in ("runs/best", "./best", "../best", "/best", "a/b/c", ".", "", "heedful-mini-en", "maker/model@v1"):
        assert not hub.unpinned(name), name
    for name in ("runs/best", "./best", "a/b/c"):
        with pytest.raises(HeedfulError, match="neither a folder here nor a name on the hub"):
            heedful.load(name)


def test_a_name_on_the_hub_loads_from_the_cache(folder: Path, cache: Path) -> None:
    for revision in ("main", cache.name):
        loaded = heedful.load("maker/model", revision=revision)
        assert loaded.source == f"maker/model@{cache.name}"
        first = heedful.load(folder)
        assert all(torch.equal(first.named_tensors()[name], tensor) for name, tensor in loaded.named_tensors().items())


def test_a_name_may_include_the_revision(folder: Path, cache: Path, tmp_path: Path) -> None:
    assert heedful.load("maker/model@main").source == f"maker/model@{cache.name}"
    assert folder_of(f"maker/model@{cache.name}", None) == cache
    local = shutil.copytree(folder, tmp_path / "a@b")
    assert heedful.load(local).source == str(local)


@pytest.mark.parametrize(
    ("name", "revision"),
    [
        ("maker/absent", "main"),
        ("maker/model", "v2"),
        ("maker/model", "../../x"),
        ("no/such/folder", "main"),
        ("../model", "main"),
        ("maker/mo del", "main"),
        ("a\0b", "main"),
        ("x" * 5000, "main"),
        ("http://example.org/model", "main"),
    ],
)
def test_models_that_are_not_on_the_hub_are_refused(name: str, revision: str, cache: Path) -> None:
    with pytest.raises(
        HeedfulError, match=r"not in the local cache and could not be fetched|neither a folder"
    ) as caught:
        heedful.load(name, revision=revision)
    assert caught.value.__suppress_context__
    assert len(str(caught.value)) < 6000


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("HTTPError", "a proxy said no\nand more", "a proxy said no"),
        ("HTTPError", "", "HTTPError"),
        ("XetDownloadError", "\n", "XetDownloadError"),
        ("OfflineModeIsEnabled", "offline", "offline"),
    ],
)
def test_network_errors_are_in_the_message(
    kind: str, text: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.errors

    def fail(*arguments: Any, **keywords: Any) -> str:
        raise getattr(huggingface_hub.errors, kind)(text)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(HeedfulError, match=f"not in the local cache and could not be fetched: {expected}$"):
        heedful.load("maker/model", revision="main")


def test_links_in_the_cache_of_the_hub_may_not_leave_it(folder: Path, tmp_path: Path) -> None:
    snapshot = make_hub_cache(folder, tmp_path)
    assert have_equal_weights(folder, snapshot)
    shutil.copy(folder / WEIGHTS, tmp_path / "models--maker--model" / WEIGHTS)
    (snapshot / WEIGHTS).unlink()
    (snapshot / WEIGHTS).symlink_to(f"../../{WEIGHTS}")
    with pytest.raises(HeedfulError, match="lies outside the folder"):
        heedful.load(snapshot)


def test_saving_a_hub_folder_does_not_touch_the_cache(folder: Path, tmp_path: Path) -> None:
    snapshot = make_hub_cache(folder, tmp_path / "cache")
    before = file_contents(tmp_path / "cache")
    heedful.save(heedful.load(snapshot), tmp_path / "out")
    assert file_contents(tmp_path / "cache") == before
    with torch.no_grad():
        assert torch.equal(heedful.load(tmp_path / "out")(make_batch()), heedful.load(snapshot)(make_batch()))


def make_batch() -> heedful.Packed:
    """Return a batch of three short sequences."""
    batch = random_batch("bert", (4, 1, 7))
    return heedful.Packed.of([[token % 31 for token in ids.tolist()] for ids in batch.unpack(batch.tokens)])
