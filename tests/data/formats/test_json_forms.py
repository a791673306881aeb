"""Unusual and invalid JSON in data files: it gives examples, bad rows or a HeedfulError that names the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from heedful.data import DataSettings, Skip, check, read
from heedful.errors import HeedfulError

GOOD = b'{"text": "Rain again", "label": "a"}'
VALUES: dict[str, bytes] = {  # written where the text of an example is expected
    "null": b"null",
    "true": b"true",
    "NaN": b"NaN",
    "Infinity": b"Infinity",
    "-Infinity": b"-Infinity",
    "1e400": b"1e400",
    "2^63": b"9223372036854775808",
    "a million digits": b"9" * 1_000_000,
    "minus alone": b"-",
    "leading zero": b"01",
    "plus": b"+1",
    "hexadecimal": b"0x1F",
    "single quotes": b"'x'",
    "no quotes": b"x",
    "open quote": b'"x',
    "bare newline": b'"x\ny"',
    "tab inside": b'"x\ty"',
    "NUL": b'"x\0y"',
    "escaped NUL": b'"x\\u0000y"',
    "unknown escape": b'"\\q"',
    "half an escape": b'"\\u12"',
    "lone surrogate": b'"\\ud800"',
    "surrogates in the wrong order": b'"\\udc00\\ud800"',
    "surrogate as UTF-8": b'"\xed\xa0\x80"',
    "overlong": b'"\xc0\xaf"',
    "Latin-1": b'"caf\xe9"',
    "an object": b'{"a": 1}',
    "an empty list": b"[]",
    "deep list": b"[" * 100_000 + b"]" * 100_000,
    "deep object": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "never closed": b"[" * 100_000,
    "long": b'"' + b"x" * 11_000_000 + b'"',
}
ROWS: dict[str, bytes] = {  # written where the object of an example is expected
    "key twice": b'{"text": "x", "text": "y", "label": "a"}',
    "key twice, escaped": b'{"text": "x", "\\u0074ext": "y", "label": "a"}',
    "many keys": b"{" + b",".join(b'"k%d": 1' % number for number in range(300_000)) + b', "text": "x", "label": "a"}',
    "a list": b'["x", "a"]',
    "a number": b"7",
    "comma at the end": b'{"text": "x", "label": "a",}',
    "comment": b'{"text": "x", /* y */ "label": "a"}',
    "two objects": GOOD + GOOD,
    "trailing": GOOD + b" x",
}
FORMS = {name: b'{"text": ' + value + b', "label": "a"}' for name, value in VALUES.items()} | ROWS


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jsonl", "json"])
@pytest.mark.parametrize("form", FORMS)
def test_forms(tmp_path: Path, form: str, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    rows = [GOOD, FORMS[form], b'{"text": "The last", "label": "b"}']
    path.write_bytes(b"\n".join(rows) if kind == "jsonl" else b"[" + b",\n".join(rows) + b"]")
    texts = []
    try:
        dataset = read(path, settings=DataSettings(dev_fraction=0.0), on_bad_row=Skip())
        texts = [example.texts[0] for example in dataset.examples("train")]
        check(dataset).lines()
        errors = [str(bad_row) for bad_row in dataset.row_errors.first]
    except HeedfulError as error:
        errors = [str(error)]
    assert all(str(path) in error and len(error) < 1000 and error.isprintable() for error in errors)
    if kind == "jsonl":  # the rows before and after a bad row are read
        assert texts[0] == "Rain again" and texts[-1] == "The last"
    assert len(texts) == 3 or errors, "a row is either read or reported"
