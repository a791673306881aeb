"""docs/settings.md has every setting, as the code has it."""

from __future__ import annotations

import runpy
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "scripts" / "settings_page.py"


def test_the_reference_of_settings_is_up_to_date() -> None:
    script = runpy.run_path(str(SCRIPT))
    written = script["PAGE"].read_text(encoding="utf-8")
    assert written == script["page"](), "run: python scripts/settings_page.py"


def test_the_reference_has_paths_flags_and_names_of_other_libraries() -> None:
    rows = {
        line.split(" | ")[0].strip("| `"): line
        for line in reversed(runpy.run_path(str(SCRIPT))["page"]().splitlines())
        if line.startswith("| `")
    }
    row = rows["train.optimizer.lr"]
    assert all(f"`{name}`" in row for name in ("--lr", "learning_rate", "lr0")) and "peak learning rate" in row
    assert "`--batch-size`" in rows["train.batch_size"] and "`--max-length`" in rows["max_length"]
    assert "`mlm_probability`" in rows["objective.mask_prob"] and "limits.max_concurrent_requests" in rows
