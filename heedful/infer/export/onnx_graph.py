"""Graphs of ONNX operators: how they are put together, and the layers that rows go through one by one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Shaped
from torch import Tensor, nn

from heedful.errors import HeedfulError
from heedful.nn.layers import Mlp

if TYPE_CHECKING:
    from onnx import ModelProto

OPSET, IR = 17, 8  # the first with LayerNormalization, and the version of the file that came with it (2022)
FLOAT, INT64, BOOL = 1, 7, 9  # how ONNX numbers types

Operand = str | int | float | Sequence[int] | Shaped[np.ndarray, "..."]  # the name of a value, or a constant
Attribute = int | float | str | Sequence[int]  # of an operator
Shape = tuple[str | int, ...]


class Node(NamedTuple):
    """An operator and what it takes."""

    kind: str
    inputs: tuple[str, ...]
    outputs: int
    attributes: tuple[tuple[str, Any], ...]


class Output(NamedTuple):
    """A value that comes out, and its shape."""

    value: str
    shape: Shape


class Graph:
    """Operators and tensors, in order; what is asked for twice is there once."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self.inputs: dict[str, Shape] = {}  # all of them whole numbers
        self.outputs: dict[str, Output] = {}
        self.nodes: dict[Node, tuple[str, ...]] = {}  # with the names of what comes out
        self.tensors: dict[str, Shaped[np.ndarray, ...]] = {}
        self._names = names  # of parameters, by id
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}

    def op(self, kind: str, *operands: Operand, **attributes: Attribute) -> str:
        """The output of an operator; numbers and lists become constants."""
        return self._add(Node(kind, tuple(map(self._name, operands)), 1, tuple(attributes.items())))[0]

    def split(self, x: str, *sizes: int) -> tuple[str, ...]:
        """Parts of the last dimension, of these sizes; a single number is a count of equal parts."""
        if len(sizes) == 1:
            return self._add(Node("Split", (x,), sizes[0], (("axis", -1),)))
        return self._add(Node("Split", (x, self._name(sizes)), len(sizes), (("axis", -1),)))

    def weight(self, parameter: Tensor, *, turned: bool = False) -> str:
        """A parameter, or its transpose, which is an operator where the parameter itself is there already (tied)."""
        if id(parameter) not in self._names:
            raise HeedfulError(
                "this model was made ready to answer: give what heedful.load gives, and not an engine's model"
            )
        name = self._names[id(parameter)]
        if turned and name in self.tensors:
            return self.op("Transpose", name, perm=(1, 0))
        key = f"{name}.turned" if turned else name
        if key not in self.tensors:
            values = parameter.detach().numpy()
            self.tensors[key] = np.ascontiguousarray(values.T) if turned else values
        return key

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(array.nbytes for array in self.tensors.values())

    def model(self, notes: Mapping[str, str]) -> ModelProto:
        """The whole as onnx has it, with notes in its metadata."""
        from onnx import TensorProto, checker, helper, numpy_helper

        from heedful._version import __version__

        nodes = [
            helper.make_node(node.kind, node.inputs, several, several[0], **dict(node.attributes))
            for node, several in self.nodes.items()
        ]
        nodes += [helper.make_node("Identity", [output.value], [name], name) for name, output in self.outputs.items()]
        graph = helper.make_graph(
            nodes,
            "encoder",
            [helper.make_tensor_value_info(name, TensorProto.INT64, shape) for name, shape in self.inputs.items()],
            [
                helper.make_tensor_value_info(name, TensorProto.FLOAT, output.shape)
                for name, output in self.outputs.items()
            ],
            [numpy_helper.from_array(array, name) for name, array in self.tensors.items()],
        )
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=IR,
            producer_name="heedful",
            producer_version=__version__,
        )
        helper.set_model_props(model, dict(notes))
        checker.check_model(model)
        return model

    def _add(self, node: Node) -> tuple[str, ...]:
        if node not in self.nodes:
            name = f"{node.kind}_{len(self.nodes)}"
            several = tuple(f"{name}_{number}" for number in range(node.outputs))
            self.nodes[node] = (name,) if node.outputs == 1 else several
        return self.nodes[node]

    def _name(self, operand: Operand) -> str:
        if isinstance(operand, str):
            return operand
        array = operand if isinstance(operand, np.ndarray) else _constant(operand)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = f"constant_{len(self._constants)}"
            self.tensors[self._constants[key]] = array
        return self._constants[key]


def _constant(value: int | float | Sequence[int]) -> Shaped[np.ndarray, ...]:
    return np.asarray(value, np.float32 if isinstance(value, float) else np.int64)


# -- layers ---------------------------------------------------------------------------------------------------


def add_linear(g: Graph, layer: nn.Linear, x: str) -> str:
    """W x + b."""
    y = g.op("MatMul", x, g.weight(layer.weight, turned=True))
    return y if layer.bias is None else g.op("Add", y, g.weight(layer.bias))


def norm(g: Graph, layer: nn.Module, x: str) -> str:
    """Either norm, or none."""
    if isinstance(layer, nn.LayerNorm):
        affine = [g.weight(parameter) for parameter in (layer.weight, layer.bias) if parameter is not None]
        return g.op("LayerNormalization", x, *affine, axis=-1, epsilon=layer.eps)
    if isinstance(layer, nn.RMSNorm):
        assert layer.eps is not None
        square = g.op("ReduceMean", g.op("Mul", x, x), axes=(-1,), keepdims=1)
        return g.op("Mul", g.op("Div", x, g.op("Sqrt", g.op("Add", square, layer.eps))), g.weight(layer.weight))
    assert isinstance(layer, nn.Identity)
    return x


def activate(g: Graph, name: str, x: str) -> str:
    """The activation of that name, as in nn/layers.py."""
    match name:
        case "relu":
            return g.op("Relu", x)
        case "tanh":
            return g.op("Tanh", x)
        case "silu":
            return g.op("Mul", x, g.op("Sigmoid", x))
        case "gelu":  # in the order in which runtimes know it again, and take a faster operator for all of it
            twice_phi = g.op("Add", g.op("Erf", g.op("Div", x, math.sqrt(2))), 1.0)
        case "gelu_tanh":
            cube = g.op("Mul", g.op("Mul", g.op("Mul", x, x), x), 0.044715)
            twice_phi = g.op("Add", g.op("Tanh", g.op("Mul", g.op("Add", x, cube), math.sqrt(2 / math.pi))), 1.0)
        case _:
            raise AssertionError(f"no operators for the activation {name}")
    return g.op("Mul", g.op("Mul", x, twice_phi), 0.5)


def mlp(g: Graph, part: Mlp, x: str, activation: str) -> str:
    """The MLP, gated or not."""
    inner = add_linear(g, part.up, x)
    if part.gated:
        gate, inner = g.split(inner, 2)
        inner = g.op("Mul", activate(g, activation, gate), inner)
    else:
        inner = activate(g, activation, inner)
    return add_linear(g, part.down, inner)
