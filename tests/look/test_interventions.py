"""Predictions with attention heads switched off and with tokens replaced, and errors for other changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import heedful
from heedful.errors import HeedfulError, RequestError
from heedful.look.head_masking import gated_heads
from heedful.look.inspection import Inspection, TokenRecord
from heedful.look.interventions import intervene, masking_gates, replace_tokens
from heedful.look.page_api import PageAPI
from heedful.packed import Packed
from tests.support.classic_models import make_classic
from tests.support.model_folders import make_model_dir

PAIR = ("The cat sat on the mat.", "A dog ran.")


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Inspection:
    return Inspection(heedful.load(make_model_dir(tmp_path_factory.mktemp("single"), "single")), PAIR)


def test_without_a_change_the_answer_is_the_same(single: Inspection) -> None:
    result = intervene([single], 0, [], {})
    assert result.before == result.after and result.changed_item == PAIR and result.before is not None


def test_masked_heads_have_no_output(single: Inspection) -> None:
    """The answer equals that of the model with gates of 0. Afterwards the model is unchanged."""
    off = [("encoder", layer, head) for layer in range(2) for head in range(4)]
    result = intervene([single], 0, off, {})
    assert result.before is not None and result.after is not None
    gates = masking_gates(single, off)
    assert gates is not None and float(gates["encoder"].sum()) == 0
    loaded, packed = single.loaded, Packed.of([single.encoded.ids], [single.encoded.types])
    with torch.no_grad(), gated_heads(loaded.model, gates):
        logits = loaded.head_outputs(packed)[0]
    expected = torch.softmax(logits.float().flatten(), 0)
    torch.testing.assert_close(torch.tensor([*result.after["probabilities"].values()]), expected, atol=1e-4, rtol=1e-3)
    assert result.after["probabilities"] != result.before["probabilities"]
    assert intervene([single], 0, [], {}).after == result.before


def test_tokens_are_replaced_at_their_offsets(single: Inspection) -> None:
    names = [token["text"] for token in single.sides["source"]]
    rows = {names.index("cat"): "dog", names.index("mat"): "big \u732b"}
    assert replace_tokens(single, rows) == ("The dog sat on the big \u732b.", "A dog ran.")
    result = intervene([single], 0, [], {names.index("cat"): "dog"})
    expected = intervene([Inspection(single.loaded, ("The dog sat on the mat.", "A dog ran."))], 0, [], {}).before
    assert result.after == expected


def test_tokens_that_share_characters_are_not_replaced_together(
    single: Inspection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of single bytes have the offsets of their common character."""
    records = [
        TokenRecord(text=text, id=9, segment=segment, special=False, continues=False, start=4, stop=7)
        for text, segment in (("<0xF0>", 0), ("<0x9F>", 0), ("dog", 1))
    ]
    monkeypatch.setitem(single.sides, "source", records)
    assert replace_tokens(single, {1: "dog"}) == ("The dog sat on the mat.", "A dog ran.")
    assert replace_tokens(single, {1: "dog", 2: "cat"}) == ("The dog sat on the mat.", "A docatan.")
    with pytest.raises(RequestError, match="<0xF0> shares characters with another replaced token: replace one of"):
        replace_tokens(single, {0: "a lion", 1: "dog"})


def test_candidates_are_refused_before_the_model_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = heedful.load(make_model_dir(tmp_path, "choice"))
    inspection = Inspection(bundle, PAIR, choices=(PAIR[1], "A cat."))
    monkeypatch.setattr(Inspection, "__init__", lambda *_, **__: pytest.fail("the model ran on the new text"))
    with pytest.raises(RequestError, match="tokens of one candidate cannot be replaced here"):
        intervene([inspection], 0, [], {2: "dog"})


def test_an_embedding_is_compared_with_the_embedding_before_the_change(tmp_path: Path) -> None:
    inspection = Inspection(heedful.load("heedful-mini-en"), "The cat sat on the mat.")
    unchanged = intervene([inspection], 0, [], {})
    assert unchanged.before is None and unchanged.cosine == pytest.approx(1.0, abs=1e-5)
    changed = intervene([inspection], 0, [("encoder", 1, 2)], {2: "dog"})
    assert changed.cosine is not None and -1 <= changed.cosine < 0.999


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"off": "encoder.1"}, "expected PART.LAYER.HEAD"),
        ({"off": "encoder.-1.2"}, "expected PART.LAYER.HEAD"),
        ({"off": "elsewhere.1.2"}, "use one of encoder"),
        ({"off": "encoder.9.2"}, "layers .9. do not exist"),
        ({"off": "encoder.1.9"}, "heads .9. do not exist"),
        ({"tokens": "[1]"}, "expected words"),
        ({"tokens": '{"1": 3}'}, "expected words"),
        ({"tokens": '{"1": "' + "a" * 201 + '"}'}, "expected words"),
        ({"tokens": '{"999": "a"}'}, "tokens .999. do not exist"),
        ({"tokens": '{"0": "a"}'}, "is in no text"),
        ({"tokens": "[" * 100_000}, "expected words"),
    ],
)
def test_invalid_changes_are_errors(single: Inspection, params: dict[str, str], message: str) -> None:
    with pytest.raises(HeedfulError, match=message):
        PageAPI([single])("changed", params)


def test_heads_of_a_model_without_self_attention_cannot_be_masked() -> None:
    inspection = Inspection(make_classic("plain attention"), "the film was good")
    with pytest.raises(HeedfulError, match="this model has no heads that can be switched off: replace tokens instead"):
        PageAPI([inspection])("changed", {"off": "reader.0.0"})
