"""`export_page`, for `heedful export --to html`: one HTML file with a model, which answers in a browser, offline."""

from __future__ import annotations

import base64
import copy
import html
import json
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

from heedful.atomic_io import atomic_path, make_folder, write_synced
from heedful.checkpoint import ModelBundle
from heedful.checkpoint.bundle import cascade_refusal, pruned_refusal
from heedful.errors import HeedfulError
from heedful.infer.bundle_engine import BundleEngine
from heedful.infer.tuning.precision_gate import Tolerance, score_change
from heedful.model import config as c
from heedful.nn.inference_linear import quantize_rows
from heedful.page.assets import WEB, bundle_modules, source_hash
from heedful.page.serialize import SerializedModel, refusal, serialize_model, unsupported
from heedful.page.tokenizer_state import tokenizer_state
from heedful.tasks.answering import require_tokenizer
from heedful.tasks.label_answers import unique_label_names
from heedful.tasks.specs.qa import max_answer_tokens_of

MODULES = ("tokenizer.js", "windows.js", "answers.js", "model.js", "rows.js", "try.js")  # imported modules come first
CODE = Path(__file__).parent / "forward.wasm"
POLICY = (  # Content-Security-Policy
    "default-src 'none'; script-src {script} 'wasm-unsafe-eval'; style-src {style}; base-uri 'none'; form-action 'none'"
)
MAX_PARAMETERS = 40_000_000  # larger models are too slow in a browser


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedPage:
    """Facts about an exported page."""

    path: Path
    size: int  # bytes
    precision: str
    score_change: float | None  # change of the scores by int8, in standard deviations of the scores, if measured


def export_page(
    bundle: ModelBundle,
    output: str | Path,
    *,
    precision: str = "auto",
    title: str = "Heedful",
    overwrite: bool = False,
) -> ExportedPage:
    """Write an HTML file with the model, its tokenizer and a form.

    Args:
        bundle: An encoder with a head and a tokenizer.
        output: The file.
        precision: Precision of the weight matrices: "int8" (with a scale for each row), "float16", "float32", or
            "auto". The last one is int8 if that changes the scores of sample texts within an engine's tolerance, else
            float16.
        title: Heading of the page.
        overwrite: Whether to replace an existing file.

    Raises:
        HeedfulError: If the file exists, or HTML export does not support the model or its tokenizer.
    """
    output = Path(output)
    if bundle.early_stages:
        raise cascade_refusal(bundle.source, "exported")
    if bundle.token_pruning is not None:
        raise pruned_refusal(bundle.source, "exported")
    if (output.exists() or output.is_symlink()) and not overwrite:
        raise HeedfulError(f"{output} exists: give another name, or overwrite=True (on the command line --overwrite)")
    change = None
    if precision == "auto":
        check_size(bundle)
        change = int8_change(bundle)
        precision = gated_precision(change)
    page = render_page(bundle, precision=precision, title=title).encode()
    try:
        make_folder(output.absolute().parent)
        with atomic_path(output) as part:
            write_synced(part, [page])
    except OSError as error:
        raise HeedfulError(f"{output} could not be written: {error.strerror or error}") from error
    return ExportedPage(path=output, size=len(page), precision=precision, score_change=change)


def render_page(bundle: ModelBundle, *, precision: str = "int8", title: str = "Heedful") -> str:
    """Return the HTML of a page. See `export_page` for the arguments."""
    check_size(bundle)
    model = serialize_model(bundle, precision)
    about = json.dumps(page_facts(bundle, model), ensure_ascii=False, allow_nan=False).encode()
    script = bundle_modules((WEB / name).read_text(encoding="utf-8") for name in MODULES) + "\nstartPage();\n"
    style = (WEB / "page.css").read_text(encoding="utf-8")
    facts = f"{bundle.config.family} · {bundle.count():,} parameters · {precision} · computed in this page, offline"
    slots = {
        "policy": POLICY.format(script=source_hash(script), style=source_hash(style)),
        "title": html.escape(title),
        "facts": html.escape(facts),
        "style": style,
        "about": compressed(about),
        "code": compressed(CODE.read_bytes()),
        "weights": compressed(model.data),
        "script": script,
    }
    page = (WEB / "try.html").read_text(encoding="utf-8")
    parts = page.split("{{")
    return parts[0] + "".join(slots[slot] + rest for slot, rest in (part.split("}}", 1) for part in parts[1:]))


def check_size(bundle: ModelBundle) -> None:
    """Raise a HeedfulError if the model has too many parameters for a page."""
    if (count := bundle.count()) > MAX_PARAMETERS:
        raise HeedfulError(
            f"{bundle.source} has {count:,} parameters; a page has at most {MAX_PARAMETERS:,}: distil a smaller model"
        )


def gated_precision(change: float) -> str:
    """Return "int8" if it changes the scores within an engine's tolerance, else "float16"."""
    return "int8" if change <= Tolerance().scores else "float16"


def int8_change(bundle: ModelBundle) -> float:
    """Return the change of the scores of sample texts by int8 matrices, as `score_change` measures it."""
    if problem := unsupported(bundle):
        raise refusal(bundle, problem)
    rounded = copy.deepcopy(bundle)
    with torch.no_grad():
        for parameter in rounded.parameters():
            if parameter.ndim == 2:
                quantized, scales = quantize_rows(parameter)
                parameter.copy_(quantized * scales)
    return score_change(BundleEngine(bundle), BundleEngine(rounded))


def page_facts(bundle: ModelBundle, model: SerializedModel) -> dict[str, object]:
    """Return the data that the scripts of the page need in addition to the weights."""
    head = bundle.config.head
    tokenizer = require_tokenizer(bundle)
    mask = tokenizer.special.mask
    if isinstance(head, c.MaskedTokens) and mask is None:
        raise HeedfulError("this tokenizer has no mask token: name it as mask_token in tokenizer_config.json")
    labels = getattr(head, "labels", ())
    return {
        "head": None if head is None else head.kind,
        "labels": unique_label_names(labels) if isinstance(head, c.Classes) else list(labels),
        "problem_type": getattr(head, "problem_type", None),
        "score_activation": getattr(head, "score_activation", None),
        "thresholds": bundle.thresholds,
        "pairs": bundle.pairs,
        "max_answer_tokens": max_answer_tokens_of(bundle.thresholds),
        "no_answer_row": -1 if isinstance(head, c.SpanScores) and head.no_answer == "last" else 0,
        "prompt": bundle.default_prompt,
        "dimensions": getattr(head, "dimensions", None),
        "mask": mask,
        "mask_name": None if mask is None else tokenizer.name(mask),
        "max_length": model.max_length,
        "ops_offset": model.ops_offset,
        "num_ops": model.num_ops,
        "tokenizer": tokenizer_state(tokenizer),
    }


def compressed(data: bytes) -> str:
    """Compress data with zlib, and encode the result as base64."""
    return base64.b64encode(zlib.compress(data, 9)).decode()
