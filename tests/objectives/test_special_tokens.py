"""Templates put the same special tokens around texts as the tokenizer does."""

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
    """Return a tokenizer of each algorithm, or a word tokenizer with unusual special tokens around a text."""
    if kind in ("wordpiece", "bpe", "unigram"):
        return train_on(TEXTS, algorithm=kind, vocab_size=330)
    names = {name: id for id, name in enumerate(["<s>", "</s>", "a", "b", "c"])}
    backend = tokenizers.Tokenizer(models.WordLevel(names, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    single, pair = {
        "nothing": ("$A", "$A $B:1"),
        "end": ("$A </s>", "$A </s> $B </s>"),
        "behind": ("$A:0 </s>:0 <s>:2", "$A:0 </s>:0 $B:1 </s>:1 <s>:2"),  # as in XLNet
        "swapped": ("$A", "$B $A"),
    }[kind]
    backend.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"})


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram", "nothing", "end", "behind"])
@pytest.mark.parametrize("pair", [False, True])
def test_a_filled_template_equals_the_encoding_of_the_tokenizer(kind: str, pair: bool) -> None:
    tokenizer = tokenizer_of(kind)
    first, second = ("b c b", "c c") if kind in ("nothing", "end", "behind") else (TEXTS[0][0], TEXTS[1][0])
    ids = tokenizer.ids([first, second])
    template = SpecialTokenTemplate.of(tokenizer, pair=pair)
    filled, types = template.fill(*ids if pair else ids[:1])
    expected = tokenizer.encode((first, second) if pair else first)
    assert filled.tolist() == list(expected.ids) and types.tolist() == list(expected.types)
    assert (filled.dtype, types.dtype) == (np.int32, np.uint8)
    assert template.width == len(filled) - sum(len(text_ids) for text_ids in (ids if pair else ids[:1]))
    assert len(template.runs) == 2 + pair and len(template.text_types) == 1 + pair


def test_empty_texts() -> None:
    empty = np.zeros(0, dtype=np.int32)
    template = SpecialTokenTemplate.of(tokenizer_of("wordpiece"), pair=True)
    ids, types = template.fill(empty, empty)
    assert ids.tolist() == [2, 3, 3] and types.tolist() == [0, 0, 1]


def test_the_room_for_text() -> None:
    template = SpecialTokenTemplate.of(tokenizer_of("wordpiece"), pair=True)
    assert (template.width, template.room(64), template.room(7)) == (3, 61, 4)
    with pytest.raises(HeedfulError, match=r"length is 6, and 3 of these tokens are special: set it to at least 7"):
        template.room(6)
    assert SpecialTokenTemplate.of(tokenizer_of("bpe"), pair=True).width == 4, "there are two tokens between the texts"
    assert SpecialTokenTemplate.of(tokenizer_of("nothing"), pair=False).room(2) == 2
    with pytest.raises(HeedfulError, match=r"length is 1, and 0 of these tokens are special: set it to at least 2"):
        SpecialTokenTemplate.of(tokenizer_of("nothing"), pair=False).room(1)


def test_a_tokenizer_that_swaps_texts_is_refused() -> None:
    with pytest.raises(HeedfulError, match="swaps the texts of a pair"):
        SpecialTokenTemplate.of(tokenizer_of("swapped"), pair=True)
    assert SpecialTokenTemplate.of(tokenizer_of("swapped"), pair=False).width == 0
