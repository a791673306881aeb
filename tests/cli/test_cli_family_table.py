"""The table of model families."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from heedful.cli.family_table import newest_record, print_family_table


def test_family_table_reads_configurations_and_newest_records(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    print_family_table(as_json=True, records=tmp_path)
    families = {family["name"]: family for family in json.loads(capsys.readouterr().out)}
    assert list(families) == ["BERT", "RoBERTa", "DistilBERT", "XLNet", "ALBERT", "T5", "GPT-2"]
    assert families["BERT"]["parameters"]["bert-base-uncased"] == 109_482_240
    assert (
        families["ALBERT"]["shares"]
        == "1 block for all layers, vectors 128 wide, projected, input and output embeddings"
    )
    assert all("input and output embeddings" in family["shares"] for family in families.values())
    assert families["XLNet"]["positions"] == "relative sinusoids, in attention"
    assert all(family["published"] != "–" and family["measured"] == "–" for family in families.values())
    record = {"machine": {"date": "2030-01-02"}, "tables": [{"rows": [
        {"ours": False, "to_best_peer": {"median": 9.0}}, {"ours": True, "to_best_peer": {"median": 1.5}},
    ]}]}  # fmt: skip
    (tmp_path / "decoding-2030-01-02.json").write_text(json.dumps(record))
    assert list(newest_record("decoding", tmp_path)) == [
        "decoding: 1.50 to 1.50 times the fastest peer's speed (2030-01-02)"
    ]
    rows = [
        ["SST-2", "accuracy", "89.83 ± 0.52 (3 seeds)", "", "", ""],
        ["RTE", "accuracy", "58.48 (1 seed)", "", "", ""],
    ]
    record = {"machine": {"date": "2030-01-02"}, "tables": {"plan": rows, "defaults": []}}
    for date, shown in (("2030-01-01", []), ("2030-01-02", rows)):
        text = json.dumps(record | {"tables": {"plan": shown}})
        (tmp_path / f"finetune-{date}.json").write_text(text)
    assert list(newest_record("finetune", tmp_path)) == [
        "finetune: all-MiniLM-L6-v2 with a fresh head, SST-2 accuracy 89.83 ± 0.52 (3 seeds), "
        "RTE accuracy 58.48 (1 seed) (2030-01-02)"
    ]
