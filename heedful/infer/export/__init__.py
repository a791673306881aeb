"""Export of an encoder or a decoder with its head as an ONNX file."""

from heedful.infer.export.onnx_export import TOLERANCE as TOLERANCE
from heedful.infer.export.onnx_export import Exported as Exported
from heedful.infer.export.onnx_export import export as export
