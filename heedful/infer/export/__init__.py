"""Export of encoders and decoders as ONNX files."""

from heedful.infer.export.onnx_export import TOLERANCE as TOLERANCE
from heedful.infer.export.onnx_export import Exported as Exported
from heedful.infer.export.onnx_export import export as export
