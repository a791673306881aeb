"""The Open Inference Protocol: texts in, tensors out."""

from __future__ import annotations

from typing import Any

import orjson

from heedful.errors import HeedfulError
from heedful.serve import requests
from heedful.serve.context import RequestContext
from heedful.serve.routes import labels_of, vectors

_READS = {
    "question_answering": ("question", "context"),
    "next_sentence": ("text", "text_pair"),
    "multiple_choice": (),
}
_PAIRS = ("sequence_classification",)  # may have a second text


def input_tensors(kind: str) -> list[dict[str, Any]]:
    """The tensors that a model of such a head reads."""
    names = _READS.get(kind, ("text",))
    return [{"name": name, "datatype": "BYTES", "shape": [-1]} for name in names]


def output_tensors(kind: str, labels: list[str] | None) -> list[dict[str, Any]]:
    """Return the output tensors of a model with such a head; values other than numbers are JSON."""
    if kind == "embedding":
        return [{"name": "embedding", "datatype": "FP32", "shape": [-1, -1]}]
    if kind == "sequence_classification":
        scores = {"name": "scores", "datatype": "FP32", "shape": [-1, len(labels or [])]}
        return [scores, {"name": "label", "datatype": "BYTES", "shape": [-1]}]
    return [{"name": "answer", "datatype": "BYTES", "shape": [-1]}]


async def infer(call: RequestContext, name: str, body: requests.InferBody) -> Any:
    """Texts in, tensors out: the Open Inference Protocol."""
    _, model_queue = call.select_model(name, None)
    kind = getattr(model_queue.engine, "kind", "")
    given = {tensor.name: tensor for tensor in body.inputs}
    wanted = [each["name"] for each in input_tensors(kind)]
    if len(given) != len(body.inputs):
        raise HeedfulError("two tensors have one name")
    if not wanted:
        raise HeedfulError("this protocol does not serve a multiple-choice model: use POST /multiple-choice")
    if set(given) != set(wanted) and not (kind in _PAIRS and set(given) == {"text", "text_pair"}):
        raise HeedfulError(f"this model reads the tensors {', '.join(wanted)}: see /v2/models/{name}")
    columns = {input_value.name: _flat(input_value.data) for input_value in body.inputs}
    for tensor in body.inputs:
        if (count := len(columns[tensor.name])) != tensor.shape[0] or {*tensor.shape[1:]} - {1}:
            raise HeedfulError(f"a tensor has {count} texts: its shape is to be [{count}], or [{count}, 1]")
    if len({len(column) for column in columns.values()}) != 1:
        raise HeedfulError("the tensors have different lengths")
    if kind == "embedding":
        found: Any = await vectors(call, model_queue, columns["text"], unit=False)
    else:
        inputs = _rows(columns)
        call.texts(*("".join(column) for column in zip(*columns.values(), strict=True)))
        found = await call.ask(model_queue, inputs) if inputs else []
    made = {each["name"]: each for each in _outputs(kind, found)}
    if body.outputs is not None:
        if missing := [output.name for output in body.outputs if output.name not in made]:
            raise HeedfulError(f"there is no output {missing[0][:80]!r}: this model gives {', '.join(made)}")
        made = {output.name: made[output.name] for output in body.outputs}
    return {"model_name": name, "outputs": list(made.values())} | ({} if body.id is None else {"id": body.id})


def _flat(data: list[str | list[str]]) -> list[str]:
    """Return texts from a list of texts or of lists with one text."""
    if any(len(each) != 1 for each in data if isinstance(each, list)):
        raise HeedfulError("a tensor has lists in its data that are not of one text")
    return [each if isinstance(each, str) else each[0] for each in data]


def _rows(columns: dict[str, list[str]]) -> list[Any]:
    if set(columns) == {"question", "context"}:
        asked = zip(columns["question"], columns["context"], strict=True)
        return [{"question": question, "context": context} for question, context in asked]
    if "text_pair" in columns:
        return list(zip(columns["text"], columns["text_pair"], strict=True))
    return list(columns["text"])


def _outputs(kind: str, found: Any) -> list[dict[str, Any]]:
    count = len(found)
    if kind == "embedding":
        return [_tensor("embedding", [count, found.shape[1]], found.ravel())]
    if kind == "sequence_classification":
        scores = [list((each.get("probabilities") or each["numbers"]).values()) for each in found]
        labels = [labels_of(each)[0]["label"] for each in found]
        flat = [each for row in scores for each in row]
        return [_tensor("scores", [count, len(scores[0]) if scores else 0], flat), _tensor("label", [count], labels)]
    return [_tensor("answer", [count], [orjson.dumps(each).decode() for each in found])]


def _tensor(name: str, shape: list[int], data: Any) -> dict[str, Any]:
    numbers = name in ("embedding", "scores")
    return {"name": name, "shape": shape, "datatype": "FP32" if numbers else "BYTES", "data": data}
