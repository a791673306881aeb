"""Loading reads each file of a model folder once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import heedful
from heedful import untrusted_files
from heedful.checkpoint.new_head import with_head
from heedful.families import FAMILIES
from heedful.families.family import Family
from tests.support.tiny_models import save_tiny


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Number of reads of each file, by name."""
    counts: Counter[str] = Counter()
    read_bytes = untrusted_files.read_bytes

    def count_read(folder: Path, name: str, **options: Any) -> bytes:
        counts[name] += 1
        return read_bytes(folder, name, **options)

    monkeypatch.setattr(untrusted_files, "read_bytes", count_read)
    return counts


@pytest.mark.filterwarnings("ignore:.*belong to other heads")
@pytest.mark.parametrize("head", [None, "masked_lm"])
def test_config_and_notes_are_read_once(tmp_path: Path, reads: Counter[str], head: str | None) -> None:
    """This holds too if the folder has tensors of other heads, whose names follow from the configuration."""
    save_tiny(tmp_path / "hf", "bert", "BertForPreTraining")
    heedful.save(heedful.load(tmp_path / "hf"), tmp_path / "ours")
    reads.clear()
    loaded = heedful.load(tmp_path / "ours", head=head)
    assert bool(loaded.unused_tensors) == (head is not None)
    assert reads["config.json"] == 1 and reads["heedful.json"] == 1


def test_a_sentence_embedding_is_read_once(tmp_path: Path, reads: Counter[str]) -> None:
    save_tiny(tmp_path / "hf", "bert", "BertModel")
    heedful.save(with_head(heedful.load(tmp_path / "hf"), "embedding"), tmp_path / "ours")
    reads.clear()
    heedful.load(tmp_path / "ours")
    assert reads["config.json"] == 1 and reads["modules.json"] == 1 and reads["heedful.json"] == 1


@pytest.mark.filterwarnings("ignore:.*belong to other heads")
def test_the_config_is_parsed_once_more_for_all_other_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path / "hf", "bert", "BertForPreTraining")
    calls: list[str] = []
    read = FAMILIES["bert"].read

    def count_call(reader: Any) -> Any:
        calls.append(reader.source)
        return read(reader)

    family = FAMILIES["bert"]
    counting_family = Family(
        **{name: getattr(family, name) for name in Family.__dataclass_fields__} | {"read": count_call}
    )
    monkeypatch.setitem(FAMILIES, "bert", counting_family)
    heedful.load(tmp_path / "hf", head="masked_lm")
    assert len(calls) == 2
