"""The recurrences of layers in serving, in place of attention or with it, and the convolutions of others,
with the kernels selected for them.

Shapes: T rows, H heads, V value dimension, B blocks of the longest sequence, R sequences.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compress.kernels.operands.recurrent_states import CHUNK, LONG_CHUNK, RecurrentStates, Sequences
from compress.kernels.operands.tiles import FixedLists
from compress.kernels.problem import CONVOLUTION_OPS, RECURRENCE_OPS, Op
from compress.models.arch import Arch
from compress.models.recurrence import Recurrence
from compress.runtime.deployment import Deployment
from compress.runtime.fused_linear import BoundKernel
from compress.runtime.layer_weights import LayerWeights

if TYPE_CHECKING:
    from compress.runtime.layer_attention import Projected


class RecurrentOps:
    """The recurrences of the layers of one architecture.

    Raises:
        EnvironmentUnfit: no kernel here serves one of them.
    """

    def __init__(self, arch: Arch, deployment: Deployment) -> None:
        self._ops: dict[tuple[Op, tuple[int, int]], BoundKernel] = {}
        keys = {key for each in arch.states for key in (_key(each), _convolution_key(each))}
        for op, (n, k) in sorted(each for each in keys if each is not None):
            self._ops[op, (n, k)] = BoundKernel.of(deployment.kernel_device.problem(op, n=n, k=k))

    def decoded(self, block_table_RB: Tensor, context_lens_R: Tensor, q_len: int) -> Sequences | None:
        """Return the sequences of a decode step as recurrences read them, None where there are none."""
        if not self._ops:
            return None
        return Sequences.of_decode(block_table_RB[:, 0], context_lens_R, q_len)

    def prefilled(
        self,
        block_table_RB: Tensor,
        query_lens: tuple[int, ...],
        context_lens: tuple[int, ...],
        lists: FixedLists | None,
    ) -> Sequences | None:
        """Return the sequences of a pass over prompts as recurrences read them, None where there are none."""
        if not self._ops:
            return None
        slots_R = block_table_RB[:, 0]
        if lists is None:
            return Sequences.of_prefill(slots_R, query_lens, context_lens)
        context_lens_R, starts_R, of_row_T = lists.sequences()
        of_lists = (lists.query_tiles(size) for size in (CHUNK, LONG_CHUNK))
        return Sequences(query_lens, context_lens_R, slots_R.contiguous(), starts_R, of_row_T, *of_lists)

    def recurred(self, layer: LayerWeights, projected: "Projected", sequences: Sequences | None) -> Tensor:
        """Return the gated outputs of a recurrence [T, H V], or rows with a convolution added, or the
        outputs of a convolution of the rows themselves, whose weights come with them."""
        states = projected.kv
        assert isinstance(states, RecurrentStates)
        of_convolution = None if projected.conv_FW is None else _convolution_key(states.recurrence)
        fn = self._ops[of_convolution or _key(states.recurrence)].kernel.fn
        if projected.conv is not None:
            conv = projected.conv
            added_TF: Tensor = fn(
                projected.qkv_TF, conv.weight_FW, states, sequences, first_channel=conv.first_channel
            )
            return added_TF
        if projected.conv_FW is not None:
            rows_TF = projected.qkv_TF
            ones_TF = rows_TF.new_ones(1, 1).expand(len(rows_TF), 2 * rows_TF.shape[1])
            of_rows_TF: Tensor = fn(
                torch.cat((ones_TF, rows_TF), dim=1), projected.conv_FW, states, sequences
            )
            return of_rows_TF
        if projected.scan is not None:
            assert layer.selective is not None
            scanned_TV: Tensor = fn(*projected.scan, layer.selective.weights, states, sequences)
            return scanned_TV
        operands: tuple[Any, ...] = (layer.mamba if layer.conv_FW is None else layer.conv_FW,)
        facts: dict[str, Any] = {}
        if layer.delta is not None:
            operands = projected.beta_decay_TH, layer.delta.weights
            facts = {"gate_TZ": projected.gate_TZ}
        out_TZ: Tensor = fn(projected.qkv_TF, *operands, states, sequences, **facts)
        return out_TZ

    @property
    def takes_lists(self) -> bool:
        """Whether the recurrences of prompts can be captured in a CUDA graph."""
        return all(bound.kernel.takes_lists for bound in self._ops.values())

    def kernel_report(self) -> list[dict[str, Any]]:
        """Return rows of `Engine.kernel_report`, one for each kind of recurrence."""
        return [bound.report(layer=None, linear=op) for (op, _), bound in self._ops.items()]


def _key(recurrence: Recurrence) -> tuple[Op, tuple[int, int]]:
    """Return the op of a recurrence and the dimensions by which its kernels are selected."""
    return RECURRENCE_OPS[recurrence.module], (recurrence.key_dim, recurrence.value_dim)


def _convolution_key(recurrence: Recurrence) -> tuple[Op, tuple[int, int]] | None:
    """Return the op of the convolution of a recurrence that has an op of its own, and its dimensions; None
    where the recurrence has one op."""
    op = CONVOLUTION_OPS.get(recurrence.module)
    return None if op is None else (op, (0, recurrence.num_channels))
