"""The Open Inference Protocol: texts in, tensors out."""

from __future__ import annotations

from typing import Literal, TypedDict

import numpy as np
import orjson

from heedful.errors import HeedfulError
from heedful.serve import requests
from heedful.serve.context import RequestContext
from heedful.serve.routes import labels_of, vectors
from heedful.tasks.answering import Answer

_READS = {
    "question_answering": ("question", "context"),
    "next_sentence": ("text", "text_pair"),
    "multiple_choice": (),
}
_PAIRS = ("sequence_classification",)  # may have a second text


class TensorMetadata(TypedDict):
    """A tensor that a model reads or writes."""

    name: str
    datatype: Literal["BYTES", "FP32"]
    shape: list[int]


class ResponseOutput(TensorMetadata):
    """A tensor with its numbers or texts."""

    data: object


def input_tensors(kind: str) -> list[TensorMetadata]:
    """The tensors that a model of such a head reads."""
    names = _READS.get(kind, ("text",))
    return [{"name": name, "datatype": "BYTES", "shape": [-1]} for name in names]


def output_tensors(kind: str, labels: list[str] | None) -> list[TensorMetadata]:
    """Return the output tensors of a model with such a head; values other than numbers are JSON."""
    if kind == "embedding":
        return [{"name": "embedding", "datatype": "FP32", "shape": [-1, -1]}]
    if kind == "sequence_classification":
        scores: TensorMetadata = {"name": "scores", "datatype": "FP32", "shape": [-1, len(labels or [])]}
        return [scores, {"name": "label", "datatype": "BYTES", "shape": [-1]}]
    return [{"name": "answer", "datatype": "BYTES", "shape": [-1]}]


async def infer(call: RequestContext, name: str, body: requests.InferBody) -> dict[str, object]:
    """Texts in, tensors out: the Open Inference Protocol."""
    _, model_queue = call.select_model(name, None)
    kind = getattr(model_queue.engine, "kind", "")
    tensors = {tensor.name: tensor for tensor in body.inputs}
    wanted = [input_tensor["name"] for input_tensor in input_tensors(kind)]
    if len(tensors) != len(body.inputs):
        raise HeedfulError("two tensors have one name")
    if not wanted:
        raise HeedfulError("this protocol does not serve a multiple-choice model: use POST /multiple-choice")
    if set(tensors) != set(wanted) and not (kind in _PAIRS and set(tensors) == {"text", "text_pair"}):
        raise HeedfulError(f"this model reads the tensors {', '.join(wanted)}: see /v2/models/{name}")
    columns = {input_value.name: _flat(input_value.data) for input_value in body.inputs}
    for tensor in body.inputs:
        if (count := len(columns[tensor.name])) != tensor.shape[0] or {*tensor.shape[1:]} - {1}:
            raise HeedfulError(f"a tensor has {count} texts: its shape is to be [{count}], or [{count}, 1]")
    if len({len(column) for column in columns.values()}) != 1:
        raise HeedfulError("the tensors have different lengths")
    answers: np.ndarray | list[Answer]
    if kind == "embedding":
        answers = await vectors(call, model_queue, columns["text"], unit=False)
    else:
        inputs = _rows(columns)
        call.texts(*("".join(column) for column in zip(*columns.values(), strict=True)))
        answers = await call.ask(model_queue, inputs) if inputs else []
    outputs = {output["name"]: output for output in _outputs(kind, answers)}
    if body.outputs is not None:
        if missing := [output.name for output in body.outputs if output.name not in outputs]:
            raise HeedfulError(f"there is no output {missing[0][:80]!r}: this model gives {', '.join(outputs)}")
        outputs = {output.name: outputs[output.name] for output in body.outputs}
    response: dict[str, object] = {"model_name": name, "outputs": list(outputs.values())}
    return response if body.id is None else response | {"id": body.id}


def _flat(data: list[str | list[str]]) -> list[str]:
    """Return texts from a list of texts or of lists with one text."""
    if any(len(texts) != 1 for texts in data if isinstance(texts, list)):
        raise HeedfulError("a tensor has lists in its data that are not of one text")
    return [text if isinstance(text, str) else text[0] for text in data]


def _rows(columns: dict[str, list[str]]) -> list[object]:
    if set(columns) == {"question", "context"}:
        asked = zip(columns["question"], columns["context"], strict=True)
        return [{"question": question, "context": context} for question, context in asked]
    if "text_pair" in columns:
        return list(zip(columns["text"], columns["text_pair"], strict=True))
    return list(columns["text"])


def _outputs(kind: str, answers: np.ndarray | list[Answer]) -> list[ResponseOutput]:
    count = len(answers)
    if isinstance(answers, np.ndarray):
        return [_tensor("embedding", [count, answers.shape[1]], answers.ravel())]
    if kind == "sequence_classification":
        scores = [list((answer.get("probabilities") or answer["values"]).values()) for answer in answers]
        labels = [labels_of(answer)[0]["label"] for answer in answers]
        flat = [score for row in scores for score in row]
        return [_tensor("scores", [count, len(scores[0]) if scores else 0], flat), _tensor("label", [count], labels)]
    return [_tensor("answer", [count], [orjson.dumps(answer).decode() for answer in answers])]


def _tensor(name: str, shape: list[int], data: object) -> ResponseOutput:
    numbers = name in ("embedding", "scores")
    return {"name": name, "shape": shape, "datatype": "FP32" if numbers else "BYTES", "data": data}
