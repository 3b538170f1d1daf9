"""ONNX decoders in float16, for execution providers that compute in it: half the bytes of the format `onnx`
(`onnx/`), with the same tensors and operators.

Scales are refused unless float16 holds each of them exactly, so that quantized weights keep their values.
Dense weights are rounded to the nearest float16, and refused where one is too large for it.
"""

import torch

from compress.export import FORMATS
from compress.export.onnx import Onnx

FORMATS.add("onnx-float16", Onnx("onnx-float16", torch.float16))
