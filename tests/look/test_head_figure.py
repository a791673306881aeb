"""Figures of attention heads: their lines, legend and caption, their formats, and the heads that are chosen."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree.ElementTree import parse

import pytest
import torch

import heedful
from heedful.cli import main
from heedful.errors import HeedfulError
from heedful.look.head_figure import COLOURS, choose_heads, draw_heads, write_head_figure
from heedful.look.head_patterns import telling_heads
from heedful.look.inspection import Inspection
from heedful.look.page import read_asset
from tests.support.model_folders import make_model_dir

TEXT = "The cat sat on the mat because it was tired."


@pytest.fixture(scope="module")
def inspection() -> Inspection:
    return Inspection(heedful.load("heedful-mini-en"), TEXT, name="heedful-mini-en")


def test_each_weight_is_a_line_whose_opacity_grows_with_the_weight(inspection: Inspection) -> None:
    figure = draw_heads(inspection, "encoder", 1, [2, 3])
    (axes,) = figure.axes
    (lines,) = axes.collections
    weights = inspection.weights("encoder", 1, [2, 3])
    drawn = sorted(float(colour[3]) for colour in lines.get_edgecolor())
    expected = sorted(min(1.0, float(weight) ** 0.5) for weight in weights[weights >= 0.03])
    torch.testing.assert_close(torch.tensor(drawn), torch.tensor(expected), atol=1e-4, rtol=0)
    names = [token["text"] for token in inspection.sides["source"]]
    assert [text.get_text() for text in axes.texts] == [*names, *names]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["head 2", "head 3", "5 %", "20 %", "50 %", "100 %"]
    (caption,) = [text.get_text() for text in figure.texts]
    assert caption == f"heedful-mini-en · layer 1 · heads 2, 3\n{TEXT}"


@pytest.mark.parametrize(("suffix", "first_bytes"), [("svg", b"<?xml"), ("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_a_file_has_the_format_of_its_suffix_and_the_same_bytes_each_time(
    tmp_path: Path, inspection: Inspection, suffix: str, first_bytes: bytes
) -> None:
    files = [tmp_path / f"{name}.{suffix}" for name in "ab"]
    for file in files:
        write_head_figure(inspection, file, layer=1, heads=[2])
    first, second = (file.read_bytes() for file in files)
    assert first.startswith(first_bytes) and first == second
    if suffix == "svg":
        assert parse(files[0]).getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_the_default_is_the_first_telling_head(inspection: Inspection) -> None:
    first = telling_heads(inspection)[0]
    assert choose_heads(inspection, "", None, ()) == (first["part"], first["layer"], (first["head"],))
    _, layer, _ = choose_heads(inspection, "", 0, ())
    assert layer == 0
    assert choose_heads(inspection, "encoder", 1, (3,)) == ("encoder", 1, (3,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer": 99}, r"layers \[99\] do not exist"),
        ({"heads": [99]}, r"heads \[99\] do not exist"),
        ({"part": "cross"}, 'part "cross" does not exist'),
    ],
)
def test_missing_layers_heads_and_parts_are_errors(
    tmp_path: Path, inspection: Inspection, options: dict, message: str
) -> None:
    with pytest.raises(HeedfulError, match=message):
        write_head_figure(inspection, tmp_path / "a.svg", **options)
    assert not list(tmp_path.iterdir())


def test_hostile_texts_and_missing_glyphs_are_drawn(tmp_path: Path) -> None:
    loaded = heedful.load(make_model_dir(tmp_path / "single", "single"))
    text = "$x_1$ <script>\u202e\x07 \U000e0041 ada lives in paris"
    write_head_figure(Inspection(loaded, text), tmp_path / "a.svg", layer=0, heads=range(4))
    content = (tmp_path / "a.svg").read_text()
    assert "<script" not in content and "\u202e" not in content


def test_colours_are_those_of_the_page() -> None:
    light = read_asset("look.css").partition("[data-theme")[0]
    assert tuple(re.findall(r"--head-\d: (#[0-9a-f]{6})", light)) == COLOURS


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "head.svg"
    with pytest.raises(SystemExit) as exit_info:
        main(["look", "heedful-mini-en", TEXT, "--figure", str(file), "--layer", "1", "--head", "2"])
    assert not exit_info.value.code and "head.svg is written" in capsys.readouterr().err
    assert b"<svg" in file.read_bytes()
