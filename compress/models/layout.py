"""Places of the canonical parameters of a model in the tensors of a checkpoint.

Most parameters are a tensor of their own. Some families stack linears that read one input (`qkv_proj`,
`gate_up_proj`): a canonical parameter is then some rows of a tensor. Rows of q and k may be in another order:
the canonical rotation takes dimensions c and c + C/2 of a head as a pair, while a checkpoint may take
neighbours, or may rotate a part of each head only, which stays first in heads wider than a block of rows that
share scales (`Rope.leading`). A checkpoint whose pairs turn the other way has the two of each in the other
order, because (a, b) turned by -x is (b, a) turned by x, swapped. Experts may be matrices of one tensor of
three dimensions, transposed, with the rows of gate and up in turns, or lie one below the other in a tensor of
two. A permutation of rows changes no bit of a
weight, so export restores the tensors of the source exactly.

Shapes: O rows of a tensor, C head dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compress.errors import UnsupportedFormat
from compress.models.layer_shape import LayerShape
from compress.models.rope import in_halves
from compress.quant.global_scale import with_one_global_scale
from compress.quant.scheme import QuantizedWeight

Value = Tensor | QuantizedWeight
ROTATED = ("attn.q", "attn.k", "attn.q_norm", "attn.k_norm")
"""Modules whose outputs, or whose factors of them, are rotated."""


@dataclass(frozen=True)
class Place:
    """The rows `start` to `stop` of a tensor, every `step`-th; canonical row i is row `order[i]` of them,
    None for the same order. Of a tensor with a matrix for each expert they are rows of that of `expert`,
    which may be stored `transposed`. In a tensor of two dimensions that matrix is `flat_rows` of its rows."""

    start: int
    stop: int
    order: Tensor | None = None
    step: int = 1
    expert: int | None = None
    transposed: bool = False
    flat_rows: int | None = None

    def read(self, stored: Value) -> Value:
        """Return a canonical parameter from the tensor that holds it."""
        if self.expert is not None:
            assert isinstance(stored, Tensor)
            return self.matrix_of(stored)
        num_rows = stored.shape[0]
        value = stored if (self.start, self.stop) == (0, num_rows) else rows_of(stored, self.start, self.stop)
        return value if self.order is None else reordered(value, self.order)

    def matrix_of(self, stored: Tensor) -> Tensor:
        """Return the matrix, or vector, of an expert from the tensor of all experts."""
        return self._rows_of(stored).contiguous()

    @property
    def rows(self) -> Tensor:
        """The row of the tensor that holds each canonical row."""
        if self.order is None:
            return torch.arange(self.start, self.stop)
        return self.start + self.order

    def write_(self, stored: Tensor, value: Tensor) -> None:
        """Put a canonical parameter into the tensor of all experts."""
        self._rows_of(stored).copy_(value)

    def _rows_of(self, stored: Tensor) -> Tensor:
        matrix = stored[self.expert] if self.flat_rows is None else self._flat_matrix_of(stored)
        matrix = matrix.t() if self.transposed and matrix.dim() == 2 else matrix
        return matrix[self.start : self.stop : self.step]

    def _flat_matrix_of(self, stored: Tensor) -> Tensor:
        """Return the matrix of an expert, as it is stored in a tensor of two dimensions."""
        assert self.expert is not None
        assert self.flat_rows is not None
        return stored[self.expert * self.flat_rows : (self.expert + 1) * self.flat_rows]


def expert_places(
    num_experts: int,
    num_rows: Sequence[int],
    *,
    transposed: bool,
    interleaved: bool,
    flat_rows: int | None = None,
) -> list[Place]:
    """Return where the parameters of all experts lie in the one tensor that holds them; `num_rows` is that
    of each parameter of one expert, and `flat_rows` the rows of an expert in a tensor of two dimensions."""
    places = []
    for expert in range(num_experts):
        start = 0
        for idx, size in enumerate(num_rows):
            if interleaved and len(num_rows) > 1:
                rows_of = (idx, sum(num_rows), len(num_rows))
            else:
                rows_of = (start, start + size, 1)
            begin, stop, step = rows_of
            places.append(
                Place(begin, stop, step=step, expert=expert, transposed=transposed, flat_rows=flat_rows)
            )
            start += size
    return places


def in_turns(num_turns: int, num_rows: Sequence[int], orders: Sequence[Tensor | None]) -> list[Place]:
    """Return where parameters lie whose rows take turns in a tensor: in each of `num_turns` turns, some rows
    of the first, then some of the next. `num_rows` is that of each parameter, and `orders` are those of the
    canonical rows among its own."""
    total = sum(num_rows)
    places = []
    start = 0
    for size, order in zip(num_rows, orders, strict=True):
        of_turn = torch.arange(start, start + size // num_turns)
        own = (torch.arange(0, total, total // num_turns).unsqueeze(1) + of_turn).view(-1)
        places.append(Place(0, total, own if order is None else own[order]))
        start += size // num_turns
    return places


def expert_stack(places: Sequence[Place], values: Sequence[Value], name: str) -> Tensor:
    """Return the tensor that holds the parameters of all experts.

    Raises:
        UnsupportedFormat: they are quantized; no format stores codes in such a tensor.
    """
    tensors = [value for value in values if isinstance(value, Tensor)]
    if len(tensors) < len(values):
        raise UnsupportedFormat(
            f"'{name}' holds the weights of all experts of a layer in one tensor, and no format here stores "
            "codes so. Leave the experts dense."
        )
    shapes = {place.expert: 0 for place in places}
    for place, tensor in zip(places, tensors, strict=True):
        shapes[place.expert] += tensor.shape[0]
    first = tensors[0]
    size = (shapes[0], *first.shape[1:])
    size = size[::-1] if places[0].transposed else size
    is_flat = places[0].flat_rows is not None
    stored = first.new_empty((len(shapes) * size[0], *size[1:]) if is_flat else (len(shapes), *size))
    for place, tensor in zip(places, tensors, strict=True):
        place.write_(stored, tensor)
    return stored


def row_order(
    shape: LayerShape, module: str, num_rows: int, *, interleaved: bool, turned_back: bool = False
) -> Tensor | None:
    """Return, for each canonical row of a module, its place among the rows that a checkpoint stores; None
    where all have the same. `interleaved` states that neighbours are pairs there, `turned_back` that
    pairs turn by the negative angle there. Heads of latent attention are put in order as they are computed,
    because the order would cut blocks of rows that share a scale."""
    rope = shape.rope
    if module not in ROTATED or rope is None or rope.kind == "proportional" or shape.latent is not None:
        return None
    head_dim = shape.head_dim
    rotary_dim = rope.rotary_dim or head_dim
    if not interleaved and not turned_back and (rotary_dim == head_dim or rope.leading):
        return None
    order_C = torch.arange(head_dim)
    if interleaved:
        order_C[:rotary_dim] = torch.cat((order_C[:rotary_dim:2], order_C[1:rotary_dim:2]))
    if turned_back:
        order_C[:rotary_dim] = order_C[:rotary_dim].roll(rotary_dim // 2)
    if not rope.leading:
        order_C = in_halves(order_C, rotary_dim)
    return (torch.arange(0, num_rows, head_dim).unsqueeze(1) + order_C).view(-1)


def rows_of(value: Value, start: int, stop: int) -> Value:
    """Return rows of a weight.

    Raises:
        UnsupportedFormat: blocks of rows share scales, and these rows cut one.
    """
    if isinstance(value, Tensor):
        return value[start:stop]
    block = value.scheme.block_rows
    last = stop == value.shape[0]
    if start % block or (stop % block and not last):
        raise UnsupportedFormat(
            f"rows {start} to {stop} are a linear of their own, and they cut a block of {block} rows that "
            "share scales."
        )
    scale_rows = slice(start // block, -(-stop // block))
    zero = value.zero_point_OG
    return replace(
        value,
        codes_OI=value.codes_OI[start:stop],
        scale_OG=value.scale_OG[scale_rows],
        zero_point_OG=None if zero is None else zero[start:stop],
    )


def columns(value: Value, start: int, stop: int) -> Value:
    """Return columns of a weight; of a quantized one, whole groups."""
    if isinstance(value, Tensor):
        return value[:, start:stop]
    num_groups = value.scale_OG.shape[1]
    group_size = value.shape[1] // num_groups
    assert num_groups == 1 or (start % group_size == 0 and stop % group_size == 0)
    groups = slice(None) if num_groups == 1 else slice(start // group_size, stop // group_size)
    zero = value.zero_point_OG
    return replace(
        value,
        codes_OI=value.codes_OI[:, start:stop],
        scale_OG=value.scale_OG[:, groups],
        zero_point_OG=None if zero is None else zero[:, groups],
    )


def reordered(value: Value, order: Tensor) -> Value:
    """Return a weight with its rows, or some of them, in another order.

    Raises:
        UnsupportedFormat: rows that share scales would no longer be in one block.
    """
    if isinstance(value, Tensor):
        return value[order.to(value.device)]
    order = order.to(value.codes_OI.device)
    block = value.scheme.block_rows
    blocks = blocks_taken(order, block)
    if blocks is None:
        raise UnsupportedFormat(
            f"the rows of its heads have another order on disk, and blocks of {block} rows share scales."
        )
    zero = value.zero_point_OG
    return replace(
        value,
        codes_OI=value.codes_OI[order],
        scale_OG=value.scale_OG[blocks],
        zero_point_OG=None if zero is None else zero[order],
    )


def blocks_taken(order: Tensor, block: int) -> Tensor | None:
    """Return the block of `block` rows that each block of rows in another order consists of, None where rows
    of several come into one."""
    block_of_row = order // block
    firsts = block_of_row[::block]
    return firsts if torch.equal(block_of_row, firsts.repeat_interleave(block)[: len(order)]) else None


def stacked(name: str, places: Sequence[Place], values: Sequence[Value]) -> Value:
    """Return the tensor that holds several parameters.

    Raises:
        UnsupportedFormat: they are of different schemes, or blocks of rows would cross from one to the next.
    """
    below = _one_below_the_other(name, values)
    rows = torch.cat([place.rows for place in places])
    if torch.equal(rows, torch.arange(len(rows))):
        return below
    return reordered(below, torch.argsort(rows))


def _one_below_the_other(name: str, values: Sequence[Value]) -> Value:
    if len(values) == 1:
        return values[0]
    tensors = [value for value in values if isinstance(value, Tensor)]
    if len(tensors) == len(values):
        return torch.cat(tensors)
    codes = [value for value in values if isinstance(value, QuantizedWeight)]
    schemes = {each.scheme for each in codes}
    if len(codes) < len(values) or len(schemes) > 1:
        raise UnsupportedFormat(
            f"'{name}' holds linears of several schemes; all of them need one. Give them one by overrides."
        )
    scheme = codes[0].scheme
    if any(each.shape[0] % scheme.block_rows for each in codes[:-1]):
        raise UnsupportedFormat(
            f"'{name}' holds linears whose numbers of rows are no multiples of {scheme.block_rows}, the rows "
            f"that share a scale in {scheme.name}."
        )
    input_scales = [each.input_scale for each in codes if each.input_scale is not None]
    input_zeros = [each.input_zero_point for each in codes if each.input_zero_point is not None]
    input_globals = [each.input_global_scale for each in codes if each.input_global_scale is not None]
    of_inputs = (input_scales, input_zeros, input_globals)
    if any(not torch.equal(each, found[0]) for found in of_inputs for each in found):
        raise UnsupportedFormat(
            f"'{name}' holds linears whose inputs have several static scales or zero points, and has a place "
            "for one."
        )
    codes = with_one_global_scale(codes)
    zeros = [each.zero_point_OG for each in codes if each.zero_point_OG is not None]
    return QuantizedWeight(
        scheme,
        torch.cat([each.codes_OI for each in codes]),
        torch.cat([each.scale_OG for each in codes]),
        torch.cat(zeros) if zeros else None,
        input_scales[0] if input_scales else None,
        codes[0].global_scale,
        input_zeros[0] if input_zeros else None,
        input_globals[0] if input_globals else None,
    )
