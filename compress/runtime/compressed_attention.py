"""Compressed attention in serving (`models/compressed.py`), with the kernels selected for it.

The cache holds of each position its key, which is its value, and what entries are computed of; entries are
computed anew in each pass, so that blocks of the cache hold all that a sequence has, as in other models:
prefixes are shared, and rejected tokens of a draft are written over.

A row attends to its sequence up to its own position, in every pass by the same kernel. The rows of a decode
pass are the last of each sequence, and those of a pass over prompts lie one sequence after the other.

Shapes: T rows, F outputs of a linear, H heads, C head dimension, B blocks of the longest sequence, R
sequences.
"""

from typing import Any

import torch
from torch import Tensor

from compress.kernels.operands.paged_latents import PagedLatents
from compress.kernels.operands.tiles import FixedLists
from compress.kernels.problem import Op, Phase
from compress.kernels.step.host_memory import sent
from compress.models.arch import Arch
from compress.models.layer_shape import LayerShape
from compress.models.rope import cos_sin
from compress.runtime.compressed_linears import CompressedLinears
from compress.runtime.deployment import Deployment
from compress.runtime.fused_linear import BoundKernel
from compress.runtime.layer_attention import Attend, Projected
from compress.runtime.layer_weights import LayerWeights

_Key = tuple[int, int, int, int, tuple[int, int]]
"""The numbers by which the kernels of a layer are selected (`_key_of`)."""


class CompressedAttention:
    """Attention of the layers of one architecture over pages in one format.

    Raises:
        EnvironmentUnfit: no kernel here serves an op.
    """

    takes_lists = False

    def __init__(self, arch: Arch, deployment: Deployment, kv_format: str, *, max_model_len: int) -> None:
        self._arch = arch
        self._kernels = {_key_of(layer): _bound(layer, deployment, kv_format) for layer in arch.layers}
        # One position more than a sequence has, as in `layer_attention.py`.
        positions = torch.arange(max_model_len + 1, device=deployment.device)
        self._rope_tables = {
            each: cos_sin(*each, positions, deployment.dtype, length=max_model_len)
            for each in {(layer.rope, _key_of(layer)[1]) for layer in arch.layers}
        }

    def decode(
        self, block_table_RB: Tensor, context_lens_R: Tensor, *, q_len: int, block_size: int
    ) -> Attend:
        """Return attention for the last `q_len` rows of each sequence; `context_lens` count them."""
        del block_size
        sequences_R = torch.arange(len(context_lens_R), device=context_lens_R.device)
        return self._of_rows(block_table_RB, sequences_R.repeat_interleave(q_len), "decode")

    def prefill(
        self,
        block_table_RB: Tensor,
        query_lens: tuple[int, ...],
        context_lens: tuple[int, ...],
        lists: FixedLists | None = None,
        *,
        block_size: int,
        phase: Phase,
    ) -> Attend:
        """Return attention for `query_lens[r]` rows of each sequence. A row has the bits that it has in
        `decode`, if its linears have kernels of the `decode` phase."""
        del block_size, context_lens
        assert lists is None
        of_row = [sequence for sequence, length in enumerate(query_lens) for _ in range(length)]
        return self._of_rows(block_table_RB, sent(torch.tensor(of_row), block_table_RB.device), phase)

    def _of_rows(self, block_table_RB: Tensor, sequence_T: Tensor, phase: Phase) -> Attend:
        """Return attention for rows of these sequences. What it returns is the input of the last linear
        [T, F]."""

        def attend(layer: LayerWeights, projected: Projected) -> Tensor:
            q_THC = self.queries(layer, projected, phase)
            linears = linears_of(layer)
            latent_TF, _ = linears.split(projected.qkv_TF)
            choice = linears.choice(
                latent_TF, projected.raw_TF, phase, self._ops(layer)["rms_norm"].kernel.fn
            )
            attended_THC = self._ops(layer)["compressed_attention"].kernel.fn(
                q_THC,
                projected.kv,
                linears.entries,
                *self._tables(layer),
                block_table_RB,
                sequence_T,
                projected.positions_T,
                window=layer.shape.window,
                scale=self._arch.score_scale(layer.shape),
                sinks_H=layer.sinks,
                choice=choice,
            )
            return linears.grouped(attended_THC, phase)

        return attend

    def queries(self, layer: LayerWeights, projected: Projected, phase: Phase = "decode") -> Tensor:
        """Return the turned queries [T, H, C] and write what the cache stores of their positions."""
        assert isinstance(projected.kv, PagedLatents)
        linears = linears_of(layer)
        latent_TF, k_TC = linears.split(projected.qkv_TF)
        q_THC: Tensor = self._ops(layer)["compressed_store"].kernel.fn(
            linears.q_up(latent_TF, phase, self._ops(layer)["rms_norm"].kernel.fn),
            k_TC,
            linears.cached(projected.raw_TF),
            linears.kv_norm,
            *self._tables(layer),
            projected.positions_T,
            projected.slots_T,
            projected.kv,
        )
        return q_THC

    def kernel_report(self) -> list[dict[str, Any]]:
        """Return rows of `Engine.kernel_report`, one for each op and its dimensions."""
        rows: list[dict[str, Any]] = []
        for ops in self._kernels.values():
            reported = [bound.report(layer=None, linear=op) for op, bound in ops.items()]
            rows += [row for row in reported if row not in rows]
        return rows

    def _ops(self, layer: LayerWeights) -> dict[Op, BoundKernel]:
        return self._kernels[_key_of(layer.shape)]

    def _tables(self, layer: LayerWeights) -> tuple[Tensor, Tensor]:
        return self._rope_tables[layer.shape.rope, _key_of(layer.shape)[1]]


def _key_of(layer: LayerShape) -> _Key:
    """Return the numbers by which kernels of a layer's attention are selected: the dimensions of a head,
    those that rotate, the query heads, the width of the latent of queries, and the heads and the numbers of a
    key of the indexer."""
    facts = layer.compressed
    assert facts is not None
    return layer.head_dim, facts.rope_dim, layer.num_heads, facts.q_rank, facts.index_widths


def _bound(layer: LayerShape, deployment: Deployment, kv_format: str) -> dict[Op, BoundKernel]:
    head_dim, rope_dim, num_heads, q_rank, indexer = _key_of(layer)

    def bound(op: Op, n: int, k: int = 0, **facts: Any) -> BoundKernel:
        return BoundKernel.of(deployment.kernel_device.problem(op, n=n, k=k, **facts))

    return {
        "compressed_store": bound("compressed_store", head_dim, rope_dim, scheme=kv_format),
        "compressed_attention": bound(
            "compressed_attention", head_dim, num_heads, scheme=kv_format, sinks=True, indexer=indexer
        ),
        "rms_norm": bound("rms_norm", q_rank),
    }


def linears_of(layer: LayerWeights) -> CompressedLinears:
    """Return the linears of a layer that has compressed attention."""
    assert layer.compressed is not None
    return layer.compressed
