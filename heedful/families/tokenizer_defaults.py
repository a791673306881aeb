"""Tokenizer settings for folders with a SentencePiece file of fairseq and no tokenizer.json: XLM-RoBERTa, mBART, ...

Their special tokens have other ids than in the SentencePiece file. `heedful.tokenizer` applies these defaults.
"""

from __future__ import annotations


def _fairseq(leading: list[str], replaced: list[str]) -> dict[str, object]:
    """Return the tokenizer defaults of a family.

    Args:
        leading: First tokens of the vocabulary.
        replaced: First pieces of the file, which `leading` replaces; the first piece is the unknown token.
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


# language codes of mBART-50 (Tang et al. 2020, arXiv:2008.00401), in the order of their ids
ML50 = """
    ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT lv_LV my_MM
    ne_NP nl_XX ro_RO ru_RU si_LK tr_TR vi_VN zh_CN af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID ka_GE km_KH
    mk_MK ml_IN mn_MN mr_IN pl_PL ps_AF pt_XX sv_SE sw_KE ta_IN te_IN th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES
    sl_SI
""".split()  # noqa: SIM905
CC25 = ML50[:25]  # language codes of mBART (Liu et al. 2020, arXiv:2001.08210)


def _with_languages(codes: list[str], single: str, pair: str) -> dict[str, object]:
    """Return the tokenizer defaults for texts with a language code.

    Args:
        codes: Language codes, which follow the pieces of the SentencePiece file in the vocabulary.
        single: Template of special tokens around a text.
        pair: Template of special tokens around a pair of texts.
    """
    return XLM_ROBERTA | {"trailing": codes, "single": single, "pair": pair}


MBART = _with_languages(CC25, "$A:0 </s>:0 en_XX:0", "$A:0 $B:0 </s>:0 en_XX:0") | {
    "by_class": {"MBart50Tokenizer": _with_languages(ML50, "en_XX:0 $A:0 </s>:0", "en_XX:0 $A:0 $B:0 </s>:0")}
}
