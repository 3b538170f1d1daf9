"""A graph of ONNX operators under construction, whose weights stay in the safetensors files of its directory.

An initializer names a file, an offset and a length (external data of the ONNX specification), and a
safetensors file holds each tensor as plain little-endian bytes, row-major, at a known offset. So the graph
refers to the checkpoint's own files, a weight is on disk once, and the graph itself has some hundred
kilobytes whatever the size of the model. Some rows of a tensor are a range of bytes, too.

Operators are those of opset 20, and of ONNX Runtime's own domain (`com.microsoft`) where one is named.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from compress.artifact.atomic import write_atomic
from compress.artifact.tensors import TensorFiles

OPSET = 20
IR_VERSION = 9
"""The first version of the file format that has this opset."""
MICROSOFT = "com.microsoft"
DTYPES: Mapping[torch.dtype, str] = {
    torch.float32: "FLOAT",
    torch.float16: "FLOAT16",
    torch.int64: "INT64",
    torch.int8: "INT8",
    torch.uint8: "UINT8",
}
"""torch's dtype -> its name in ONNX."""


class Graph:
    """Operators in the order in which they were added; values are known by name."""

    def __init__(self, files: TensorFiles) -> None:
        self._files = files
        self._nodes: list[Any] = []
        self._initializers: dict[str, Any] = {}
        self._constants: dict[tuple[torch.dtype, tuple[int, ...], bytes], str] = {}
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []

    def input(self, name: str, dtype: torch.dtype, shape: Sequence[int | str]) -> str:
        """Add an input; a text in its shape is the name of a size that is free."""
        from onnx import helper

        self._inputs.append(helper.make_tensor_value_info(name, element_type(dtype), list(shape)))
        return name

    def output(self, value: str, name: str, dtype: torch.dtype, shape: Sequence[int | str]) -> None:
        """Make a value an output of that name."""
        from onnx import helper

        self._nodes.append(helper.make_node("Identity", [value], [name], name=name))
        self._outputs.append(helper.make_tensor_value_info(name, element_type(dtype), list(shape)))

    def op(self, kind: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """Add an operator with one output and return the name of that; an input that is left out is ''."""
        return self.ops(kind, *inputs, num_outputs=1, domain=domain, **attributes)[0]

    def ops(
        self, kind: str, *inputs: str, num_outputs: int, domain: str = "", **attributes: Any
    ) -> list[str]:
        """Add an operator and return the names of its outputs."""
        from onnx import helper

        name = f"{kind}_{len(self._nodes)}"
        outputs = [f"{name}.{idx}" for idx in range(num_outputs)]
        self._nodes.append(
            helper.make_node(kind, list(inputs), outputs, name=name, domain=domain, **attributes)
        )
        return outputs

    def constant(self, value: Any, dtype: torch.dtype) -> str:
        """Return the name of a small constant, which is stored in the graph; equal ones are stored once."""
        from onnx import numpy_helper

        array = torch.as_tensor(value, dtype=dtype).numpy()
        key = (dtype, array.shape, array.tobytes())
        if key not in self._constants:
            name = self._constants[key] = f"constant_{len(self._constants)}"
            self._initializers[name] = numpy_helper.from_array(array, name)
        return self._constants[key]

    def stored(self, tensor: str, shape: Sequence[int], rows: tuple[int, int] | None = None) -> str:
        """Return the name of the initializer for a tensor of the files, or for the range `rows` of its
        rows; `shape` are the dimensions that the operators see."""
        import onnx

        name = tensor if rows is None else f"{tensor}[{rows[0]}:{rows[1]}]"
        if name in self._initializers:
            return name
        header = self._files.header(tensor)
        dtype = self._files.dtype(tensor)
        length = math.prod(shape) * dtype.itemsize
        begin = header.begin
        if rows is not None:
            row_bytes = (header.end - header.begin) // header.shape[0]
            begin += rows[0] * row_bytes
            assert length == (rows[1] - rows[0]) * row_bytes, f"{name} is no {list(shape)}"
        assert begin + length <= header.end, f"{tensor} is smaller than {list(shape)}"
        proto = onnx.TensorProto(name=name, data_type=element_type(dtype), dims=list(shape))
        proto.data_location = onnx.TensorProto.EXTERNAL
        places = {"location": self._files.file(tensor).name, "offset": str(begin), "length": str(length)}
        for key, value in places.items():
            proto.external_data.add(key=key, value=value)
        self._initializers[name] = proto
        return name

    def save(self, path: Path, *, producer: str, version: str) -> None:
        """Check the graph and write it, in one step."""
        import onnx
        from onnx import helper

        graph = helper.make_graph(
            self._nodes, "decoder", self._inputs, self._outputs, list(self._initializers.values())
        )
        domains = sorted({node.domain for node in self._nodes} - {""})
        model = helper.make_model(
            graph,
            opset_imports=[
                helper.make_opsetid("", OPSET),
                *(helper.make_opsetid(domain, 1) for domain in domains),
            ],
            producer_name=producer,
            producer_version=version,
            ir_version=IR_VERSION,
        )
        write_atomic(path, model.SerializeToString(deterministic=True))
        onnx.checker.check_model(str(path))


def element_type(dtype: torch.dtype) -> int:
    """Return ONNX's number of a dtype."""
    import onnx

    return int(getattr(onnx.TensorProto, DTYPES[dtype]))
