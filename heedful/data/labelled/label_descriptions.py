"""Files of label descriptions: {"label": "description"} in JSON, or CSV with the columns label and description.

`heedful predict` reads them for zero-shot classification.
"""

from __future__ import annotations

import json
from pathlib import Path

from heedful.data.bad_rows import Raise, RowErrors
from heedful.data.formats.text_files import check_file, unique_keys
from heedful.data.labelled.data_file import DataSettings, open_table
from heedful.errors import DataError


def read_label_descriptions(path: Path) -> dict[str, str]:
    """Return the description of each label, in the order of the file.

    Raises:
        DataError: If the file cannot be read, has another form, describes a label twice, or has an empty cell.
    """
    check_file(path)
    if path.suffix.casefold() == ".json":
        try:
            values = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=unique_keys)
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: cannot be read as JSON: {error}") from None
        if not isinstance(values, dict) or not all(isinstance(value, str) for value in values.values()):
            raise DataError(f'{path}: expected an object of texts, like {{"bug": "something does not work"}}')
        return values
    row_errors = RowErrors(Raise())
    table = open_table(path, DataSettings(header=True), row_errors)
    if not {"label", "description"} <= {*table.names}:
        raise DataError(f"{path}: has the columns {', '.join(table.names)}; expected label and description")
    descriptions: dict[str, str] = {}
    for line, cells in table.rows(row_errors):
        row = cells if isinstance(cells, dict) else dict(zip(table.names, cells, strict=True))
        label, description = (str(row[name]).strip() for name in ("label", "description"))
        if not label or not description:
            empty = "description" if label else "label"
            raise DataError(f"{path}:{line}: the {empty} is empty; expected a text")
        if label in descriptions:
            raise DataError(f"{path}:{line}: describes the label {label} again; expected each label once")
        descriptions[label] = description
    return descriptions
