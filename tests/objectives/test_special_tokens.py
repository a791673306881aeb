"""The special tokens around texts are those that the tokenizer itself puts there."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from heedful.errors import HeedfulError
from heedful.objectives.special_tokens import SpecialTokenTemplate
from heedful.tokenizer import Tokenizer
from tests.support.corpora import make_documents, train_on

TEXTS = make_documents(12, seed=2)


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    """A tokenizer of each kind, and some that put other things around a text."""
    if kind in ("wordpiece", "bpe", "unigram"):
        return train_on(TEXTS, algorithm=kind, vocab_size=330)
    names = {name: id for id, name in enumerate(["<s>", "</s>", "a", "b", "c"])}
    backend = tokenizers.Tokenizer(models.WordLevel(names, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    single, pair = {
        "nothing": ("$A", "$A $B:1"),
        "end": ("$A </s>", "$A </s> $B </s>"),
        "behind": ("$A:0 </s>:0 <s>:2", "$A:0 </s>:0 $B:1 </s>:1 <s>:2"),  # as XLNet's
        "swapped": ("$A", "$B $A"),
    }[kind]
    backend.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"})


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram", "nothing", "end", "behind"])
@pytest.mark.parametrize("pair", [False, True])
def test_filled_as_the_tokenizer_would(kind: str, pair: bool) -> None:
    tokenizer = tokenizer_of(kind)
    one, two = ("b c b", "c c") if kind in ("nothing", "end", "behind") else (TEXTS[0][0], TEXTS[1][0])
    ids = tokenizer.ids([one, two])
    frame = SpecialTokenTemplate.of(tokenizer, pair=pair)
    filled, types = frame.fill(*ids if pair else ids[:1])
    expected = tokenizer.encode((one, two) if pair else one)
    assert filled.tolist() == list(expected.ids) and types.tolist() == list(expected.types)
    assert (filled.dtype, types.dtype) == (np.int32, np.uint8)
    assert frame.width == len(filled) - sum(len(each) for each in (ids if pair else ids[:1]))
    assert len(frame.runs) == 2 + pair and len(frame.text_types) == 1 + pair


def test_no_text_at_all() -> None:
    nothing = np.zeros(0, dtype=np.int32)
    frame = SpecialTokenTemplate.of(tokenizer_of("wordpiece"), pair=True)
    ids, types = frame.fill(nothing, nothing)
    assert ids.tolist() == [2, 3, 3] and types.tolist() == [0, 0, 1]


def test_room() -> None:
    frame = SpecialTokenTemplate.of(tokenizer_of("wordpiece"), pair=True)
    assert (frame.width, frame.room(64), frame.room(7)) == (3, 61, 4)
    with pytest.raises(HeedfulError, match=r"length is 6, and 3 of these tokens are special: set it to at least 7"):
        frame.room(6)
    assert SpecialTokenTemplate.of(tokenizer_of("bpe"), pair=True).width == 4, "two between the texts"
    assert SpecialTokenTemplate.of(tokenizer_of("nothing"), pair=False).room(2) == 2
    with pytest.raises(HeedfulError, match=r"length is 1, and 0 of these tokens are special: set it to at least 2"):
        SpecialTokenTemplate.of(tokenizer_of("nothing"), pair=False).room(1)


def test_another_order_is_refused() -> None:
    with pytest.raises(HeedfulError, match="swaps the texts of a pair"):
        SpecialTokenTemplate.of(tokenizer_of("swapped"), pair=True)
    assert SpecialTokenTemplate.of(tokenizer_of("swapped"), pair=False).width == 0
