"""`Graph`: a builder for graphs of ONNX operators; and the layers that compute each token independently."""

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

OPSET, IR = 17, 8  # first opset with LayerNormalization, and the version of the file format released with it (2022)
FLOAT, INT64, BOOL = 1, 7, 9  # data types (onnx.TensorProto.DataType)

Operand = str | int | float | Sequence[int] | Shaped[np.ndarray, "..."]  # name of a value, or a constant
Attribute = int | float | str | Sequence[int]  # value of an operator's attribute
Shape = tuple[str | int, ...]  # size of each dimension; a name is a variable size


class Node(NamedTuple):
    """An operator with its inputs and attributes."""

    kind: str  # name of the ONNX operator
    inputs: tuple[str, ...]  # names of the input values
    outputs: int  # number of outputs
    attributes: tuple[tuple[str, Any], ...]


class Output(NamedTuple):
    """An output of the graph."""

    value: str  # name of the value
    shape: Shape


class Graph:
    """A graph of ONNX operators and tensors that grows operator by operator.

    A value is represented by its name, a string. Equal operators with the same inputs are added only once, and so are
    equal constants.

    Attributes:
        inputs: Shapes of the inputs by name; all inputs are int64.
        outputs: The outputs by name.
        nodes: The operators in order, with the names of their outputs.
        tensors: Weights and constants by name.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        """Make an empty graph; `names` are the names of the model's parameters, by id() of the parameter."""
        self.inputs: dict[str, Shape] = {}
        self.outputs: dict[str, Output] = {}
        self.nodes: dict[Node, tuple[str, ...]] = {}
        self.tensors: dict[str, Shaped[np.ndarray, ...]] = {}
        self._names = names
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}  # names by (dtype, shape, bytes)

    def op(self, kind: str, *operands: Operand, **attributes: Attribute) -> str:
        """Add an operator with one output, and return the output's name; numbers and arrays become constants."""
        return self._add(Node(kind, tuple(map(self._name, operands)), 1, tuple(attributes.items())))[0]

    def split(self, x: str, *sizes: int) -> tuple[str, ...]:
        """Split the last dimension of x into parts of these sizes; a single number is the number of equal parts."""
        if len(sizes) == 1:
            return self._add(Node("Split", (x,), sizes[0], (("axis", -1),)))
        return self._add(Node("Split", (x, self._name(sizes)), len(sizes), (("axis", -1),)))

    def weight(self, parameter: Tensor, *, transposed: bool = False) -> str:
        """Return the name of a parameter, or of its transpose.

        A transpose is stored as a tensor, unless the parameter itself is stored (tied weights): then it is an operator.
        """
        if id(parameter) not in self._names:
            raise HeedfulError("this model belongs to an engine, which changed its layers: export one of heedful.load")
        name = self._names[id(parameter)]
        if transposed and name in self.tensors:
            return self.op("Transpose", name, perm=(1, 0))
        key = f"{name}.transposed" if transposed else name
        if key not in self.tensors:
            values = parameter.detach().numpy()
            self.tensors[key] = np.ascontiguousarray(values.T) if transposed else values
        return key

    @property
    def size(self) -> int:
        """The size of all tensors in bytes."""
        return sum(array.nbytes for array in self.tensors.values())

    def to_model_proto(self, metadata: Mapping[str, str]) -> ModelProto:
        """Return the graph as an ONNX model with metadata."""
        from onnx import TensorProto, checker, helper, numpy_helper

        from heedful._version import __version__

        nodes = [
            helper.make_node(node.kind, node.inputs, names, names[0], **dict(node.attributes))
            for node, names in self.nodes.items()
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
        helper.set_model_props(model, dict(metadata))
        checker.check_model(model)
        return model

    def _add(self, node: Node) -> tuple[str, ...]:
        """Add an operator unless the graph has an equal one, and return the names of its outputs."""
        if node not in self.nodes:
            name = f"{node.kind}_{len(self.nodes)}"
            output_names = tuple(f"{name}_{number}" for number in range(node.outputs))
            self.nodes[node] = (name,) if node.outputs == 1 else output_names
        return self.nodes[node]

    def _name(self, operand: Operand) -> str:
        """Return the name of an operand; a number or an array is added as a constant."""
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
    """Add a linear layer, W x + b."""
    y = g.op("MatMul", x, g.weight(layer.weight, transposed=True))
    return y if layer.bias is None else g.op("Add", y, g.weight(layer.bias))


def add_norm_layer(g: Graph, layer: nn.Module, x: str) -> str:
    """Add a LayerNorm or an RMSNorm; for an Identity, return x."""
    if isinstance(layer, nn.LayerNorm):
        affine = [g.weight(parameter) for parameter in (layer.weight, layer.bias) if parameter is not None]
        return g.op("LayerNormalization", x, *affine, axis=-1, epsilon=layer.eps)
    if isinstance(layer, nn.RMSNorm):
        assert layer.eps is not None
        square = g.op("ReduceMean", g.op("Mul", x, x), axes=(-1,), keepdims=1)
        return g.op("Mul", g.op("Div", x, g.op("Sqrt", g.op("Add", square, layer.eps))), g.weight(layer.weight))
    assert isinstance(layer, nn.Identity)
    return x


def add_activation(g: Graph, name: str, x: str) -> str:
    """Add the activation of this name, as in nn/layers.py."""
    match name:
        case "relu":
            return g.op("Relu", x)
        case "tanh":
            return g.op("Tanh", x)
        case "silu":
            return g.op("Mul", x, g.op("Sigmoid", x))
        case "gelu":  # runtimes recognize this order of operators, and replace them by one faster operator
            twice_phi = g.op("Add", g.op("Erf", g.op("Div", x, math.sqrt(2))), 1.0)
        case "gelu_tanh":
            cube = g.op("Mul", g.op("Mul", g.op("Mul", x, x), x), 0.044715)
            twice_phi = g.op("Add", g.op("Tanh", g.op("Mul", g.op("Add", x, cube), math.sqrt(2 / math.pi))), 1.0)
        case _:
            raise AssertionError(f"no operators for the activation {name}")
    return g.op("Mul", g.op("Mul", x, twice_phi), 0.5)


def add_mlp(g: Graph, layer: Mlp, x: str, activation: str) -> str:
    """Add an MLP, with a gate if it has one."""
    inner = add_linear(g, layer.up, x)
    if layer.gated:
        gate, inner = g.split(inner, 2)
        inner = g.op("Mul", add_activation(g, activation, gate), inner)
    else:
        inner = add_activation(g, activation, inner)
    return add_linear(g, layer.down, inner)
