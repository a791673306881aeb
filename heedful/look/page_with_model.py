"""The page as one HTML file with the model in it, which computes new texts in the browser (`--html --with-model`)."""

from __future__ import annotations

import json
from typing import Any

from heedful.checkpoint import ModelBundle
from heedful.errors import HeedfulError, RequestError
from heedful.look.attribution import explained_score
from heedful.look.block_steps import block_steps
from heedful.look.inspection import MAX_TOKENS, Inspection
from heedful.look.page import MAX_ANSWER_BYTES, MODULES, collect_answers, html_file, read_asset
from heedful.look.page_api import PageAPI
from heedful.model.classic import ClassicModel
from heedful.model.config import Choice, Classes, MaskedTokens
from heedful.model.stack import Block
from heedful.page import html
from heedful.page.assets import WEB, bundle_modules, scoped_modules
from heedful.page.serialize import SerializedModel, serialize_model, unsupported_head
from heedful.tasks.answer_heads import answer_heads_of

LIVE_MODULES = ("computed.js", "telling.js", "difference.js", "live.js")  # each imports only modules before it
ENGINE_MODULES = ("tokenizer.js", "windows.js", "answers.js", "model.js")  # modules of heedful/page/web
ENGINE_EXPORTS = ("makeTokenizer", "ANSWERS", "vectorOf", "cosine", "openModel", "unpackElement")
PYTHON_QUESTIONS = (  # questions that Python answers when the file is written, since the page cannot compute them
    *("about", "heads", "prediction", "positions", "similarity", "words", "suggested", "scatter", "analogy"),
)
TOP_K = 8  # predicted tokens that are shown for a mask, as in prediction.py


def render_html_with_model(api: PageAPI, *, precision: str = "auto", max_bytes: int = MAX_ANSWER_BYTES) -> str:
    """Return the page as one HTML file with the model, its tokenizer and the code that runs the model.

    The page computes its answers for the texts of `api` and for new texts. Answers to `PYTHON_QUESTIONS` are saved in
    the file, for the texts of `api` only.

    Args:
        api: Texts in one model.
        precision: Precision of the weight matrices: "int8", "float16", "float32" or "auto". "auto" is int8 if it
            changes the scores of the model's head little enough (see `heedful.page.html.export_page`), otherwise
            float16.
        max_bytes: See `heedful.look.page.collect_answers`.

    Raises:
        HeedfulError: If the model has no encoder that the page can compute, or its tokenizer is not supported.
        RequestError: If there are two models.
    """
    first = api.inspections[0]
    bundle = first.loaded
    if any(inspection.loaded is not bundle for inspection in (*api.inspections, *api.extra)):
        raise RequestError("there are two models: a page with a model in it has one")
    if isinstance(bundle.model, ClassicModel):
        raise HeedfulError(
            f"{bundle.source} ({bundle.config.family}) has no Transformer encoder, which a page with the model in it "
            "computes: write the file without the model"
        )
    html.check_size(bundle)
    with_head = not unsupported_head(bundle)
    if precision == "auto":
        precision = html.gated_precision(html.int8_change(bundle)) if with_head else "float16"
    model = serialize_model(bundle, precision, with_head=with_head)
    facts = json.dumps(_facts(first, model, precision, with_head), ensure_ascii=False, allow_nan=False).encode()
    saved = collect_answers(api, max_bytes=max_bytes, names=PYTHON_QUESTIONS)
    data_by_id = {"about": facts, "code": html.CODE.read_bytes(), "weights": model.data}
    elements = "".join(
        f'<script type="text/plain" id="{id}">{html.compressed(data)}</script>\n' for id, data in data_by_id.items()
    )
    return html_file(saved, live_script(), allowed=" 'wasm-unsafe-eval'", elements=elements)


def live_script() -> str:
    """Return all modules as one script that starts the page."""
    engine = ((WEB / name).read_text(encoding="utf-8") for name in ENGINE_MODULES)
    return (
        scoped_modules("engine", engine, ENGINE_EXPORTS)
        + bundle_modules(map(read_asset, (*MODULES, *LIVE_MODULES)))
        + "\nstartFileWithModel(engine);\n"
    )


def _facts(inspection: Inspection, model: SerializedModel, precision: str, with_head: bool) -> dict[str, Any]:
    """Return the facts about the model that the scripts need beside its weights.

    Args:
        inspection: A text in the model.
        model: The serialized model.
        precision: Precision of the weight matrices.
        with_head: Whether the page computes the head.
    """
    bundle = inspection.loaded
    head, stack = bundle.config.head, bundle.model.encoder
    assert stack is not None
    block = stack.blocks[0]
    assert isinstance(block, Block)
    pooled = {"first": 0, "last": -1}.get(head.pooling) if isinstance(head, Classes | Choice) else None
    has_answers = head is not None and bool(answer_heads_of(head.kind))
    facts = html.page_facts(bundle, model)
    return facts | {
        "precision": precision,
        "top_k": TOP_K,
        "max_length": min(model.max_length, MAX_TOKENS),
        "unknown": inspection.tokenizer.special.unknown,
        "pooled_row": pooled,  # row that the head reads; -1 for the last one, None for several rows
        "unexplained": "" if isinstance(head, MaskedTokens) else _unexplained(inspection),
        "unanswered": "" if with_head or not has_answers else _unanswered(bundle),
        "encoder": {
            "num_ops": model.num_encoder_ops,
            "layers": stack.config.layers,
            "heads": stack.config.heads,
            "kv_heads": block.attention.kv_heads,
            "head_width": stack.config.head_width,
            "width": stack.config.width,
            "inner_width": block.mlp.down.in_features,
            "embedding_width": bundle.config.model.embedding.width,
            "scale": block.attention.scale,
        },
        "steps": [_step_templates(inspection, layer) for layer in range(stack.config.layers)],
    }


def _unexplained(inspection: Inspection) -> str:
    """Return why a prediction for this text cannot be explained, or "" if it can."""
    try:
        explained_score(inspection)
    except RequestError as error:
        return str(error)
    return ""


def _unanswered(bundle: ModelBundle) -> str:
    """Return the sentence that the page shows in place of a prediction that it does not compute."""
    assert bundle.config.head is not None
    kind = bundle.config.head.kind
    return f"this page does not compute predictions of a {kind} head: start heedful look with this text to see them"


def _step_templates(inspection: Inspection, layer: int) -> list[dict[str, Any]]:
    """Return the steps of a block without their values. They are the same for every text."""
    return [
        {
            "name": step.name,
            "formula": step.formula,
            "about": step.about,
            "over": step.over,
            "of_head": step.of_head,
            "vectors": list(step.vectors),
        }
        for step in block_steps(inspection, "encoder", layer, 0, 0)
    ]
