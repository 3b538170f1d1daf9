"""The weights of a checkpoint as initializers of a graph, and its linears as operators, by scheme.

    dense         Gemm(x, W^T, bias)
    W4A16_G...    MatMulNBits(x, nibbles, scales, zero points): (code - zero point) * scale by block
    W8A16         Gemm(x, DequantizeLinear(codes, scales)^T, bias)
    INT8_DYNAMIC  MatMulInteger(codes of x, codes) * scale of the row * scale of the channel

MatMulNBits is ONNX Runtime's own; `accuracy_level` 1 keeps its inputs and sums in float32. INT8_DYNAMIC takes
unsigned codes on both sides, with 128 as their zero point: sums of products of unsigned with signed codes
saturate at 16 bits on CPUs with AVX2 and without VNNI, those of unsigned with unsigned do not, so that the
integers are exact on every CPU.

Linears that a tensor holds one below the other are ranges of its rows. Where their rows take turns, or a
checkpoint stores the matrix as [I, O], the graph computes all of them in one product of the tensor, and each
linear is some columns of it.

Shapes: T tokens, I in, O out.
"""

from functools import cached_property

import torch
from torch import Tensor

from compress.export.onnx.graph import MICROSOFT, Graph, element_type
from compress.models.arch import Arch
from compress.models.family import Family
from compress.models.layout import ROTATED, Place
from compress.models.stored_tensors import members_of, places_of
from compress.models.weights import parameter_names
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import Scheme

NIBBLES = "weight_nibbles"
SIGNED = "weight_codes"
UNSIGNED = "weight_unsigned_codes"
SCALE = "weight_scale"
ZERO_POINT = "weight_zero_point"
"""The tensors of a quantized weight (see the package)."""
UNSIGNED_ZERO = 128
LARGEST_CODE = 127.0
SMALLEST_SCALE = float(torch.finfo(torch.float32).tiny)
FLOAT32_SUMS = 1
"""`accuracy_level` of MatMulNBits."""


class Linears:
    """The weights of a model in the layout of its family, and the linears that read them."""

    def __init__(self, graph: Graph, arch: Arch, family: Family, scheme: ModelScheme | None) -> None:
        self._graph = graph
        self._arch = arch
        self._family = family
        self._scheme = scheme
        self._products: dict[tuple[str, str], str] = {}

    def weight(self, name: str) -> str:
        """Return the initializer of a dense parameter, by its canonical name."""
        shape = self._shape(name)
        shape = shape[::-1] if self._family.is_transposed(name) else shape
        return self._graph.stored(self._family.tensor(name), shape, self._rows(name))

    def of_norm(self, name: str) -> str:
        """Return a parameter of a norm, by its canonical name; that of a norm of heads in the order of the
        outputs of their linear."""
        stored = self.weight(name)
        place = self._place(name)
        linear = name.rpartition(".")[0].removesuffix("_norm")
        if place is None or place.order is None or not self._is_in_one_product(linear):
            return stored
        return self._graph.op("Gather", stored, self._graph.constant(place.order, torch.int64), axis=0)

    def order(self, module: str) -> Tensor | None:
        """Return, for each canonical output of a rotated module, its place among the outputs of the stored
        one; None where both are the same."""
        place = self._place(f"{module}.weight")
        return None if place is None or self._is_in_one_product(module) else place.order

    def __call__(self, x: str, module: str) -> str:
        """Add the linear of that canonical name to inputs [T, I]; return outputs [T, O], in the order of the
        stored rows, or in canonical order where they take turns with others."""
        if not self._is_in_one_product(module):
            return self._product(x, module)
        key = x, self._family.to_disk(module)
        if key not in self._products:
            self._products[key] = self._product(x, module)
        place = self._place(f"{module}.weight")
        assert place is not None
        columns = self._graph.constant(place.rows, torch.int64)
        return self._graph.op("Gather", self._products[key], columns, axis=-1)

    def _product(self, x: str, module: str) -> str:
        """Add the product of inputs [T, I] with a linear, or with all those that it takes turns with."""
        scheme = None if self._scheme is None else self._scheme.for_linear(module)
        bias = self.weight(f"{module}.bias") if self._has_bias(module) else ""
        if scheme is None:
            name = f"{module}.weight"
            return self._gemm(x, self.weight(name), bias, transposed=self._family.is_transposed(name))
        if scheme.num_bits == 4:
            return self._biased(self._in_nibbles(x, module, scheme), bias)
        if scheme.activation is None:
            shape = self._shape(f"{module}.weight")
            codes = self._leaf(module, SIGNED, shape)
            scale = self._leaf(module, SCALE, shape[:1])
            return self._gemm(x, self._graph.op("DequantizeLinear", codes, scale, axis=0), bias)
        return self._biased(self._dynamic(x, module), bias)

    def tied_head(self, x: str) -> str:
        """Add the head that is the embedding; return logits [T, V]."""
        return self._gemm(x, self.weight("embed.weight"), "")

    def _gemm(self, x: str, weight: str, bias: str, *, transposed: bool = False) -> str:
        """Add the product of inputs [T, I] with a weight [O, I], or [I, O] where it is `transposed`."""
        inputs = [each for each in (x, weight, bias) if each]
        return self._graph.op("Gemm", *inputs, transB=int(not transposed))

    def _biased(self, y: str, bias: str) -> str:
        return self._graph.op("Add", y, bias) if bias else y

    def _in_nibbles(self, x: str, module: str, scheme: Scheme) -> str:
        num_rows, num_columns = self._shape(f"{module}.weight")
        block = scheme.group_size
        assert block is not None
        num_blocks = num_columns // block
        inputs = [
            x,
            self._leaf(module, NIBBLES, (num_rows, num_blocks, block // 2)),
            self._leaf(module, SCALE, (num_rows, num_blocks)),
        ]
        if not scheme.symmetric:
            inputs.append(self._leaf(module, ZERO_POINT, (num_rows, -(-num_blocks // 2))))
        return self._graph.op(
            "MatMulNBits",
            *inputs,
            domain=MICROSOFT,
            K=num_columns,
            N=num_rows,
            bits=scheme.num_bits,
            block_size=block,
            accuracy_level=FLOAT32_SUMS,
        )

    def _dynamic(self, x: str, module: str) -> str:
        """Round each row to codes by its largest number, as the runtime does (`kernels/operands/rows.py`),
        and multiply codes; rows are float32."""
        graph = self._graph
        num_rows, num_columns = self._shape(f"{module}.weight")

        def number(value: float) -> str:
            return graph.constant(value, torch.float32)

        last = graph.constant([-1], torch.int64)
        largest = graph.op("ReduceMax", graph.op("Abs", x), last, keepdims=1)
        scale_T1 = graph.op("Max", graph.op("Div", largest, number(LARGEST_CODE)), number(SMALLEST_SCALE))
        scaled = graph.op("Div", x, scale_T1)
        rounded = graph.op("Round", graph.op("Clip", scaled, number(-LARGEST_CODE), number(LARGEST_CODE)))
        codes = graph.op(
            "Cast", graph.op("Add", rounded, number(UNSIGNED_ZERO)), to=element_type(torch.uint8)
        )
        weight = graph.op("Transpose", self._leaf(module, UNSIGNED, (num_rows, num_columns)), perm=[1, 0])
        zero = graph.constant(UNSIGNED_ZERO, torch.uint8)
        sums = graph.op("MatMulInteger", codes, weight, zero, zero)
        scale_O = self._leaf(module, SCALE, (num_rows,))
        product = graph.op("Mul", graph.op("Cast", sums, to=element_type(torch.float32)), scale_T1)
        return graph.op("Mul", product, scale_O)

    def _leaf(self, module: str, leaf: str, shape: tuple[int, ...]) -> str:
        """Return the initializer of one tensor of a quantized weight."""
        return self._graph.stored(
            f"{self._family.to_disk(module)}.{leaf}", shape, self._rows(f"{module}.weight")
        )

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        outer, layers = parameter_names(self._arch)
        return outer | {
            f"layers.{idx}.{name}": shape for idx, layer in enumerate(layers) for name, shape in layer.items()
        }

    def _has_bias(self, module: str) -> bool:
        return f"{module}.bias" in self._shapes

    def _shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter, or of the tensor that is in one product with it."""
        num_rows, *others = self._shapes[name]
        if self._is_in_one_product(name.rpartition(".")[0]):
            num_rows = sum(self._shapes[each][0] for each in members_of(self._family, self._arch, name))
        return (num_rows, *others)

    def _is_in_one_product(self, module: str) -> bool:
        """Return whether a linear is computed in one product with the others that its tensor holds, because
        its rows take turns with theirs there or are columns."""
        *_, of_layer = module.split(".", 2)
        if self._family.layer_modules.get(of_layer) in self._family.rows_in_turns:
            return True
        name = f"{module}.weight"
        return self._family.is_transposed(name) and len(members_of(self._family, self._arch, name)) > 1

    def _place(self, name: str) -> Place | None:
        """Return where a parameter lies in the tensor that holds it; None for all of it."""
        members = members_of(self._family, self._arch, name)
        if len(members) == 1 and not name.rpartition(".")[0].endswith(ROTATED):
            return None
        sizes = [self._shapes[each][0] for each in members]
        places = dict(zip(members, places_of(self._family, self._arch, members, sizes), strict=True))
        return places[name]

    def _rows(self, name: str) -> tuple[int, int] | None:
        """Return the range of rows of a parameter in a tensor that holds several; None for all of them."""
        if self._is_in_one_product(name.rpartition(".")[0]):
            return None
        place = self._place(name)
        alone = len(members_of(self._family, self._arch, name)) == 1
        return None if place is None or alone else (place.start, place.stop)
