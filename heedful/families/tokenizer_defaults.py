"""Defaults for SentencePiece models of fairseq (XLM-RoBERTa, CamemBERT): their special tokens have other ids there."""

from __future__ import annotations


def _fairseq(leading: list[str], replaced: list[str]) -> dict[str, object]:
    """Return the defaults.

    Args:
        leading: First tokens of the vocabulary.
        replaced: First pieces of the file, which they replace; the unknown one first.
    """
    names = {"bos_token": "<s>", "eos_token": "</s>", "cls_token": "<s>", "sep_token": "</s>"}
    return {
        "file": "sentencepiece.bpe.model",
        "leading": leading,
        "replaced": replaced,
        "appended": ["<mask>"],
        "single": "<s>:0 $A:0 </s>:0",
        "pair": "<s>:0 $A:0 </s>:0 </s>:0 $B:0 </s>:0",
        "special": names | {"unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>"},
    }


XLM_ROBERTA = _fairseq(["<s>", "<pad>", "</s>", "<unk>"], ["<unk>", "<s>", "</s>"])
CAMEMBERT = _fairseq(["<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED"], ["<unk>"])
