"""The handler of the Open Inference Protocol (V2 of KServe and Triton), which sends and receives tensors."""

from __future__ import annotations

from typing import Literal, TypedDict

import numpy as np
import orjson

from heedful.errors import HeedfulError
from heedful.serve import requests
from heedful.serve.context import RequestContext
from heedful.serve.routes import labels_of, vectors
from heedful.tasks.answering import Answer

# names of the input tensors by kind of head; other heads have the single input "text"
_INPUT_NAMES = {
    "question_answering": ("question", "context"),
    "next_sentence": ("text", "text_pair"),
    "multiple_choice": (),
}
_PAIR_KINDS = ("sequence_classification",)  # kinds of heads with the optional input "text_pair"


class TensorMetadata(TypedDict):
    """An input or output tensor of a model; -1 in its shape is any size."""

    name: str
    datatype: Literal["BYTES", "FP32"]
    shape: list[int]


class ResponseOutput(TensorMetadata):
    """An output tensor with its data."""

    data: object


def input_tensors(kind: str) -> list[TensorMetadata]:
    """Return the input tensors of a model with this kind of head."""
    names = _INPUT_NAMES.get(kind, ("text",))
    return [{"name": name, "datatype": "BYTES", "shape": [-1]} for name in names]


def output_tensors(kind: str, labels: list[str] | None) -> list[TensorMetadata]:
    """Return the output tensors of a model with this kind of head. Values of the tensor "answer" are JSON."""
    if kind == "embedding":
        return [{"name": "embedding", "datatype": "FP32", "shape": [-1, -1]}]
    if kind == "sequence_classification":
        scores: TensorMetadata = {"name": "scores", "datatype": "FP32", "shape": [-1, len(labels or [])]}
        return [scores, {"name": "label", "datatype": "BYTES", "shape": [-1]}]
    return [{"name": "answer", "datatype": "BYTES", "shape": [-1]}]


async def infer(context: RequestContext, name: str, body: requests.InferBody) -> dict[str, object]:
    """Return the outputs of a model for tensors of texts.

    Args:
        context: The request.
        name: Name of the model.
        body: Body of the request.

    Raises:
        HeedfulError: If the names or shapes of the tensors do not fit the model.
    """
    _, model_queue = context.select_model(name, None)
    kind = getattr(model_queue.engine, "kind", "")
    columns = _text_columns(kind, name, body.inputs)
    answers: np.ndarray | list[Answer]
    if kind == "embedding":
        answers = await vectors(context, model_queue, columns["text"], normalize=False)
    else:
        inputs = _engine_inputs(columns)
        context.set_texts(*("".join(column) for column in zip(*columns.values(), strict=True)))
        answers = await context.predict(model_queue, inputs) if inputs else []
    outputs = {output["name"]: output for output in _outputs(kind, answers)}
    if body.outputs is not None:
        if missing := [output.name for output in body.outputs if output.name not in outputs]:
            raise HeedfulError(f"there is no output {missing[0][:80]!r}: this model has {', '.join(outputs)}")
        outputs = {output.name: outputs[output.name] for output in body.outputs}
    response: dict[str, object] = {"model_name": name, "outputs": list(outputs.values())}
    return response if body.id is None else response | {"id": body.id}


def _text_columns(kind: str, model: str, tensors: list[requests.InputTensor]) -> dict[str, list[str]]:
    """Return the texts of input tensors by name.

    Raises:
        HeedfulError: If the names, the shapes or the lengths do not fit the model.
    """
    expected_names = [tensor["name"] for tensor in input_tensors(kind)]
    names = {tensor.name for tensor in tensors}
    if len(names) != len(tensors):
        raise HeedfulError("two tensors have one name")
    if not expected_names:
        raise HeedfulError("this protocol does not serve a multiple-choice model: use POST /multiple-choice")
    if names != set(expected_names) and not (kind in _PAIR_KINDS and names == {"text", "text_pair"}):
        raise HeedfulError(f"this model reads the tensors {', '.join(expected_names)}: see /v2/models/{model}")
    columns = {tensor.name: _flat_texts(tensor.data) for tensor in tensors}
    for tensor in tensors:
        if (count := len(columns[tensor.name])) != tensor.shape[0] or {*tensor.shape[1:]} - {1}:
            raise HeedfulError(f"a tensor has {count} texts: its shape must be [{count}] or [{count}, 1]")
    if len({len(column) for column in columns.values()}) != 1:
        raise HeedfulError("the tensors have different lengths")
    return columns


def _flat_texts(data: list[str | list[str]]) -> list[str]:
    """Flatten a list of texts, or of lists with one text."""
    if any(len(texts) != 1 for texts in data if isinstance(texts, list)):
        raise HeedfulError("a tensor has a list in its data without exactly one text: send texts, or lists of one text")
    return [text if isinstance(text, str) else text[0] for text in data]


def _engine_inputs(columns: dict[str, list[str]]) -> list[object]:
    """Convert the texts of input tensors to inputs of an engine."""
    if set(columns) == {"question", "context"}:
        questions = zip(columns["question"], columns["context"], strict=True)
        return [{"question": question, "context": context} for question, context in questions]
    if "text_pair" in columns:
        return list(zip(columns["text"], columns["text_pair"], strict=True))
    return list(columns["text"])


def _outputs(kind: str, answers: np.ndarray | list[Answer]) -> list[ResponseOutput]:
    """Convert answers or embeddings to output tensors; see `output_tensors`."""
    count = len(answers)
    if isinstance(answers, np.ndarray):
        return [_tensor("embedding", [count, answers.shape[1]], answers.ravel())]
    if kind == "sequence_classification":
        scores = [list((answer.get("probabilities") or answer["values"]).values()) for answer in answers]
        labels = [labels_of(answer)[0]["label"] for answer in answers]
        flat_scores = [score for row in scores for score in row]
        shape = [count, len(scores[0]) if scores else 0]
        return [_tensor("scores", shape, flat_scores), _tensor("label", [count], labels)]
    return [_tensor("answer", [count], [orjson.dumps(answer).decode() for answer in answers])]


def _tensor(name: str, shape: list[int], data: object) -> ResponseOutput:
    """Return an output tensor; its data type depends on its name."""
    is_numeric = name in ("embedding", "scores")
    return {"name": name, "shape": shape, "datatype": "FP32" if is_numeric else "BYTES", "data": data}
