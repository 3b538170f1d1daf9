"""Attention over a cache of latents (arXiv 2405.04434) in serving, with the kernels selected for it.

Decode, and short prompts, attend to the latents themselves: queries are multiplied by the matrices of keys
before and what is attended to by those of values after (`latent_linears.py`), so that the cache is read once
for all heads. Long prompts are bound by arithmetic, which heads of their own width need less of: keys and
values of all heads are computed from the cached latents, one layer at a time, and prefill attention reads
them as pages. Where an indexer chooses latents, rows attend to these themselves in every pass
(`chosen_latents.py`).

Shapes: T rows, F outputs of a linear, H heads, C head dimension, V dimensions of a value, B blocks of the
longest sequence, R sequences, L positions, P dimensions that rotate.
"""

from typing import Any

import torch
from torch import Tensor

from compress.errors import EnvironmentUnfit
from compress.kernels.operands.paged import PagedKV
from compress.kernels.operands.paged_latents import PagedLatents
from compress.kernels.operands.recurrent_states import RecurrentStates, Sequences
from compress.kernels.operands.tiles import FixedLists, query_tiles
from compress.kernels.problem import Op, Phase
from compress.models.arch import Arch
from compress.models.latent import Latent
from compress.models.layer_shape import LayerShape
from compress.models.query_growth import learned_growth
from compress.models.rope import cos_sin
from compress.runtime.chosen_latents import Choices, Chosen, IndexQueries, LatentChoice
from compress.runtime.deployment import Deployment
from compress.runtime.fused_linear import BoundKernel
from compress.runtime.latent_linears import LatentLinears, latent_of
from compress.runtime.latent_passes import LatentPass, latent_passes
from compress.runtime.layer_attention import Attend, Projected, growth_of_positions
from compress.runtime.layer_weights import LayerWeights
from compress.runtime.recurrent_ops import RecurrentOps
from compress.runtime.row_contexts import RowContexts, rows_at_once

MOST_PARTIAL_BYTES = 1 << 28
"""Bytes of partial results of the rows of short prompts that attend at once."""
LEAST_CHUNK = 64
"""Positions that have a partial result, at least."""


class LatentAttention:
    """Attention of the layers of one architecture over pages of latents in one format.

    Raises:
        EnvironmentUnfit: no kernel here serves an op, or layers have facts that latents are not served with.
    """

    def __init__(self, arch: Arch, deployment: Deployment, kv_format: str, *, max_model_len: int) -> None:
        unserved = any(layer.chunk is not None for layer in arch.layers) or arch.attn_softcap is not None
        if unserved:
            raise EnvironmentUnfit(
                "the runtime serves latent attention without chunks of positions or caps of scores."
            )
        self._arch = arch
        self._deployment = deployment
        self._recurrent = RecurrentOps(arch, deployment)
        attending = [layer for layer in arch.layers if layer.attends]
        self._kernels = {
            key: _bound(key, deployment, kv_format, sinks=arch.attn_sinks) for key in map(_key_of, attending)
        }
        # One position more than a sequence has, as in `layer_attention.py`.
        positions = torch.arange(max_model_len + 1, device=deployment.device)
        self._rope_tables = {
            (rope, rope_dim): cos_sin(rope, rope_dim, positions, deployment.dtype, length=max_model_len)
            for rope, rope_dim in {(layer.rope, latent_of(layer).rope_dim) for layer in attending}
        }
        self._growth_P = growth_of_positions(arch, positions, deployment.dtype)
        self._expanded_positions = max(max_model_len, deployment.max_step_tokens)
        self._choice = LatentChoice(arch, deployment, self._rope_tables)

    def decode(
        self, block_table_RB: Tensor, context_lens_R: Tensor, *, q_len: int, block_size: int
    ) -> Attend:
        """Return attention for the last `q_len` rows of each sequence; `context_lens` count them."""
        sequences = self._recurrent.decoded(block_table_RB, context_lens_R, q_len)
        choices = None
        if self._choice.may_choose(block_table_RB.shape[1] * block_size):
            choices = Choices(RowContexts.decoded(block_table_RB, context_lens_R, q_len))

        def attend(layer: LayerWeights, projected: Projected) -> Tensor:
            if isinstance(projected.kv, RecurrentStates):
                return self._recurrent.recurred(layer, projected, sequences)
            return self._absorbed(layer, projected, block_table_RB, context_lens_R, q_len, choices=choices)

        return attend

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
        """Return attention for `query_lens[r]` rows of each sequence; `context_lens` count them. `lists` are
        those of the chunks, for a CUDA graph. In the `decode` phase a row has the bits that it has in
        `decode`."""
        device = block_table_RB.device
        sequences = self._recurrent.prefilled(block_table_RB, query_lens, context_lens, lists)
        if phase == "decode":
            rows = query_tiles(query_lens, context_lens, 1, device) if lists is None else lists.query_tiles(1)
            # The blocks of all contexts are those of the longest, at most.
            table_RB = block_table_RB if lists is None else block_table_RB[:, : lists.max_blocks]
            chooses = self._choice.may_choose(max(context_lens))
            return self._by_row(table_RB, rows, query_lens, block_size, sequences, chooses=chooses)
        if lists is None:
            passes = list(
                latent_passes(
                    block_table_RB,
                    query_lens,
                    context_lens,
                    self._expanded_positions,
                    block_size,
                    self._choice.least,
                )
            )
        else:
            places = lists.dense_blocks(block_size)
            passes = [LatentPass(slice(None), block_table_RB, query_lens, context_lens, *places, lists)]
        choices = [
            Choices(RowContexts.prefilled(each.block_table_RB, each.query_lens, each.context_lens))
            if self._choice.may_choose(max(each.context_lens))
            else None
            for each in passes
        ]

        def attend(layer: LayerWeights, projected: Projected) -> Tensor:
            if isinstance(projected.kv, RecurrentStates):
                return self._recurrent.recurred(layer, projected, sequences)
            q_THC, index = self._stored(layer, projected, phase)
            assert isinstance(projected.kv, PagedLatents)
            value_dim = latent_of(layer.shape).value_dim
            attended = []
            for each, of_pass in zip(passes, choices, strict=True):
                chosen = self._choice.slots(layer, index, of_pass, each.rows)
                if of_pass is None or chosen is None:
                    attended.append(self._expanded(layer, q_THC, projected.kv, each)[..., :value_dim])
                else:
                    own_THC = q_THC[each.rows]
                    attended.append(self._to_chosen(layer, own_THC, projected.kv, of_pass.rows, chosen))
            return attended[0] if len(attended) == 1 else torch.cat(attended)

        return attend

    def _by_row(
        self,
        block_table_RB: Tensor,
        rows_N4: Tensor,
        query_lens: tuple[int, ...],
        block_size: int,
        sequences: Sequences | None,
        *,
        chooses: bool,
    ) -> Attend:
        """Return attention in which every row is a sequence of its own that ends with it; `rows` are tiles of
        one query (`query_tiles`), of which those without a token count for nothing. Recurrences have the
        `sequences` as they are."""
        num_rows = sum(query_lens)
        first, real, position, sequence = rows_N4.to(torch.int64).unbind(1)
        facts_2T = torch.zeros(2, num_rows, dtype=torch.int64, device=rows_N4.device)
        facts_2T.index_add_(1, first, torch.stack((sequence, position + 1)) * real)
        table_TB = block_table_RB[facts_2T[0]]
        num_positions = table_TB.shape[1] * block_size
        choices = Choices(RowContexts(table_TB, facts_2T[1])) if chooses else None

        def attend(layer: LayerWeights, projected: Projected) -> Tensor:
            if isinstance(projected.kv, RecurrentStates):
                return self._recurrent.recurred(layer, projected, sequences)
            at_once = _rows_of_partials(layer, num_positions)
            return self._absorbed(layer, projected, table_TB, facts_2T[1], 1, at_once, choices)

        return attend

    def _to_chosen(
        self,
        layer: LayerWeights,
        q_THC: Tensor,
        pages: PagedLatents,
        rows: RowContexts,
        chosen: Chosen,
    ) -> Tensor:
        """Return attention [T, H, V] of rows to the latents in these slots."""
        top_k = chosen.slots_TK.shape[1]
        at_once = min(rows_at_once(pages, top_k), _rows_of_partials(layer, top_k))
        parts = []
        for start in range(0, len(rows), at_once):
            own = slice(start, start + at_once)
            of_part = chosen.slots_TK[own], chosen.lens_T[own]
            gathered, where = rows.part(own).chosen(pages, *of_part)
            parts.append(self._to_latents(layer, q_THC[own], gathered, where.table_TB, where.ends_T, 1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _absorbed(
        self,
        layer: LayerWeights,
        projected: Projected,
        block_table_RB: Tensor,
        context_lens_R: Tensor,
        q_len: int,
        at_once: int | None = None,
        choices: Choices | None = None,
    ) -> Tensor:
        """Return attention [T, H, V] over the latents themselves, of all requests at once or of so many."""
        q_THC, index = self._stored(layer, projected, "decode")
        assert isinstance(projected.kv, PagedLatents)
        chosen = self._choice.slots(layer, index, choices, slice(None))
        if choices is not None and chosen is not None:
            return self._to_chosen(layer, q_THC, projected.kv, choices.rows, chosen)
        return self._to_latents(layer, q_THC, projected.kv, block_table_RB, context_lens_R, q_len, at_once)

    def _to_latents(
        self,
        layer: LayerWeights,
        q_THC: Tensor,
        pages: PagedLatents,
        block_table_RB: Tensor,
        context_lens_R: Tensor,
        q_len: int,
        at_once: int | None = None,
    ) -> Tensor:
        """Return attention [T, H, V] over the latents of pages."""
        linears = linears_of(layer)
        absorbed_THR = linears.absorb(q_THC)
        at_once = at_once or len(context_lens_R)
        attended = [
            self._ops(layer)["latent_attention"].kernel.fn(
                absorbed_THR[start * q_len : (start + at_once) * q_len],
                q_THC[start * q_len : (start + at_once) * q_len],
                pages,
                block_table_RB[start : start + at_once],
                context_lens_R[start : start + at_once],
                q_len=q_len,
                scale=self._arch.score_scale(layer.shape),
                window=layer.shape.window,
                sinks_H=layer.sinks,
            )
            for start in range(0, len(context_lens_R), at_once)
        ]
        return linears.values(attended[0] if len(attended) == 1 else torch.cat(attended))

    def _expanded(self, layer: LayerWeights, q_THC: Tensor, pages: PagedLatents, part: LatentPass) -> Tensor:
        """Return attention [T, H, C] over the keys and values of all heads, computed from latents."""
        linears = linears_of(layer)
        sequence, column, _ = part.blocks_N3.long().unbind(1)
        latent_MR, rotated_MP = pages.gather(
            part.block_table_RB[sequence, column], linears.facts.kv_rank, q_THC.dtype
        )
        k_HMC, v_HMC = (latent_MR.new_empty(q_THC.shape[1], len(latent_MR), linears.head_dim) for _ in "kv")
        most = self._deployment.max_step_tokens
        for start in range(0, len(latent_MR), most):
            rows = slice(start, start + most)
            self._ops(layer)["latent_heads"].kernel.fn(
                linears.kv_up(latent_MR[rows], "prefill"),
                rotated_MP[rows],
                k_HMC[:, rows],
                v_HMC[:, rows],
                latent=linears.facts,
                head_dim=linears.head_dim,
            )
        as_pages = [each.unflatten(1, (-1, pages.block_size)) for each in (k_HMC, v_HMC)]
        fixed = {} if part.lists is None else {"lists": part.lists}
        attended_THC: Tensor = self._ops(layer)["attention_prefill"].kernel.fn(
            q_THC[part.rows],
            PagedKV(*as_pages),
            part.table_RB,
            part.query_lens,
            part.context_lens,
            window=layer.shape.window,
            scale=self._arch.score_scale(layer.shape),
            sinks_H=layer.sinks,
            **fixed,
        )
        return attended_THC

    def queries(self, layer: LayerWeights, projected: Projected, phase: Phase = "decode") -> Tensor:
        """Return the rotated queries [T, H, C] and write what the cache stores of their positions. Of gated
        latents `projected` has the queries already (`with_gates`)."""
        return self._stored(layer, projected, phase)[0]

    def _stored(
        self, layer: LayerWeights, projected: Projected, phase: Phase
    ) -> tuple[Tensor, IndexQueries | None]:
        """Return what `queries` returns, and the queries of the indexer."""
        linears = linears_of(layer)
        q_TF, latent_TF = linears.split(projected.qkv_TF)
        if linears.rope_norm is not None and latent_TF is not None:
            latent_TF = linears.rope_norm.of_last(latent_TF)
        if linears.q_up is not None and not linears.facts.gated:
            q_TF = linears.q_up(q_TF, phase, self._ops(layer)["rms_norm"].kernel.fn)
        if self._growth_P is not None and self._arch.queries_grow(layer.shape):
            q_TF = q_TF * self._growth_P[projected.positions_T].unsqueeze(1)
        if layer.growth_2H is not None:
            scale_H, base_H = layer.growth_2H
            growth_TH = learned_growth(scale_H, base_H, projected.positions_T, q_TF.dtype)
            q_TF = (q_TF.unflatten(1, (-1, linears.head_dim)) * growth_TH.unsqueeze(-1)).flatten(1)
        index = self._choice.store(layer, projected)
        q_THC: Tensor = self._ops(layer)["latent_store"].kernel.fn(
            q_TF,
            latent_TF,
            linears.kv_norm,
            *self._rope_tables[layer.shape.rope, linears.facts.rope_dim],
            projected.positions_T,
            projected.slots_T,
            projected.kv,
            latent=linears.facts,
            head_dim=linears.head_dim,
            quant=linears.kv_quant,
        )
        return q_THC, index

    def with_gates(self, layer: LayerWeights, first_TF: Tensor, phase: Phase) -> Tensor:
        """Return what the first linears of a layer compute, with queries in place of their latents and the
        outputs of gates last, where latents are gated (`LatentLinears.with_gates`)."""
        if not latent_of(layer.shape).gated:
            return first_TF
        return linears_of(layer).with_gates(first_TF, phase, self._ops(layer)["rms_norm"].kernel.fn)

    def _ops(self, layer: LayerWeights) -> dict[Op, BoundKernel]:
        return self._kernels[_key_of(layer.shape)]

    @property
    def takes_lists(self) -> bool:
        """Whether prefill attention can be captured in a CUDA graph."""
        prefilling = [bound["attention_prefill"].kernel for bound in self._kernels.values()]
        takes_all = self._choice.least is None and all(kernel.takes_lists for kernel in prefilling)
        return takes_all and self._recurrent.takes_lists

    def kernel_report(self) -> list[dict[str, Any]]:
        """Return rows of `Engine.kernel_report`, one for each op and its dimensions."""
        rows: list[dict[str, Any]] = []
        for ops in self._kernels.values():
            reported = [bound.report(layer=None, linear=op) for op, bound in ops.items()]
            rows += [row for row in reported if row not in rows]
        return rows + self._choice.kernel_report() + self._recurrent.kernel_report()


def _key_of(layer: LayerShape) -> tuple[Latent, int, int]:
    """Return the facts by which kernels of a layer's attention are selected: its latents, the number of
    query heads and their dimensions."""
    return latent_of(layer), layer.num_heads, layer.head_dim


def _bound(
    key: tuple[Latent, int, int], deployment: Deployment, kv_format: str, *, sinks: bool
) -> dict[Op, BoundKernel]:
    latent, num_heads, head_dim = key

    def bound(op: Op, n: int, k: int = 0, phase: Phase = "decode", scheme: str | None = None) -> BoundKernel:
        has_sinks = sinks and op in ("latent_attention", "attention_prefill")
        problem = deployment.kernel_device.problem(op, n=n, k=k, phase=phase, scheme=scheme, sinks=has_sinks)
        return BoundKernel.of(problem)

    ops: dict[Op, BoundKernel] = {
        "latent_store": bound("latent_store", latent.kv_rank, latent.rope_dim, scheme=kv_format),
        "latent_attention": bound("latent_attention", latent.kv_rank, num_heads, scheme=kv_format),
        "latent_heads": bound("latent_heads", head_dim),
        "attention_prefill": bound("attention_prefill", head_dim, 1, "prefill"),
    }
    if latent.q_rank:
        ops["rms_norm"] = bound("rms_norm", latent.q_rank)
    return ops


def linears_of(layer: LayerWeights) -> LatentLinears:
    """Return the linears of a layer that has latents."""
    assert layer.latent is not None
    return layer.latent


def _rows_of_partials(layer: LayerWeights, num_positions: int) -> int:
    """Return how many rows attend at once to so many latents each, by the bytes of their partial results."""
    partials = -(-num_positions // LEAST_CHUNK)
    row_bytes = 4 * layer.shape.num_heads * latent_of(layer.shape).kv_rank * partials
    return max(1, MOST_PARTIAL_BYTES // row_bytes)
