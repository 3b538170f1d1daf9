"""The choice of a kernel: every candidate either supports a problem or gives the reason why it does not.

An op is a package of this one; a kernel is one file in it that adds itself to `KERNELS[op]`. `select` takes
the candidate of the highest priority that refuses nothing. Nothing falls back silently: refusals are kept and
shown (`refusals`, `Engine.kernel_report`).

The signature of `fn`, by op (T rows, O out, I in, D hidden, F ffn, H heads, K kv heads, C head dimension, R
requests, B blocks of a table, P positions, E experts, K choices of a token; "rows" is a tensor, or
`QuantizedRows` where a `quant` is given):

    linear             fn(rows_TI, packed, bias_O | None, *, residual_TO=None, out_dtype=None) -> y_TO
                       packed = repack(weights stacked along O). A gated linear (`Problem.activation`) gives
                       activation(first half) * second half, [T, O / 2]. The residual is added after rounding
                       to the model's dtype.
    rms_norm           fn(x, weight, eps, quant=None, *, centered=False, bias=None) -> rows like x
                       over the last axis; `weight` broadcasts against x, in its dtype or float32 (`RowNorm`);
                       a float32 bias of the last axis, for a float32 weight, is added before rounding
    post_norm          fn(y_TD, x_TD, norm, following=None, quant=None, *, also=(), scale=1.0, laurel=None)
                       -> (s, rows or None, others); norms are `RowNorm`
                       s = scale (x + norm(y)), rows = following(s), others = each of `also` of s
                       y may be two `Branch`, which are normed and added
                       with `LaurelRows` x is the sum of x and of their terms, and columns of wider rows
    act_mul            fn(gate_up_TF, activation, quant=None, *, up_TF=None, xielu_4=None, gate_factor=1.0,
                          gated=True, cap=None, sparsity=None) -> rows [T, F / 2]
                       with `up_TF` [T, F] the first is the gate alone, and either may be columns of a tensor
                       where they are not `gated`, or of an activation of `UNGATED`, rows are [T, F], of the
                       activation of the first
                       `gate_factor` multiplies the gate; with a `cap`, min(activation(gate), cap) times up
                       between -cap and cap, or silu(min(gate, cap)) times that with `silu_capped`
                       with a `sparsity` the gate is first its excess over that quantile of its row
                       (`models/ffn.py`)
                       `xielu_4` float32 are the numbers of the activation xielu (`models/xielu.py`)
    quantize_rows      fn(x_TI, quant) -> QuantizedRows
    rope_store         fn(qkv_TF, cos_PC, sin_PC, positions_T, slots_T, kv, *, num_heads, qk_norm, eps,
                          qk_bias=None, whole=False, rotates_first=False, centered=False, growth_P=None,
                          v_norm=False, hadamard=False, leading_dim=0, value_dim=None, early=False) -> q_THC
                       `qk_bias` float32 is added to the norms of q and k, whose weights are float32 then
                       writes k and v to kv; v are the last K heads, normed without a weight if `v_norm`
                       `whole`: the norms of q and of k span all heads; `growth_P` multiplies q by position
                       `rotates_first`: heads are normed after they are turned
                       `hadamard`: q, k and v are returned and written in the transform of their head
                       `leading_dim`: so many first dimensions of q and k turn, half with half
                       `value_dim`: heads of v have so many dimensions, and zeros up to those of k in kv
                       `early`: attention may start before this launch waits for those before it
    hadamard           fn(x_THC) -> the transform of each head
    delta_net          fn(qkv_gate_TF, beta_decay_TH, weights, states, sequences, *, gate_TZ=None)
                          -> the gated outputs [T, Z]; `gate_TZ` are gates that do not follow q, k and v
                       weights are `DeltaWeights`; writes slots of `RecurrentStates` that `Sequences` names
    mamba2             fn(rows_TF, weights, states, sequences) -> the gated and normed outputs [T, Z]
                       rows are C, B, x, gates and dt; weights are `MambaWeights`; writes such slots, too
    selective_scan     fn(x_TV, gate_TV, dt_TV, bc_TK, weights, states, sequences) -> the gated outputs [T, V]
                       the rows are `ScanRows`, weights `ScanWeights`; writes the states of such slots, whose
                       inputs `short_conv` writes
    short_conv         fn(rows_TF, conv_FW, states, sequences) -> the outputs [T, F]
                       rows are B, C and x; writes such slots, too
    residual_conv      fn(rows_TF, conv_FW, states, sequences, *, first_channel) -> the rows with their
                          convolutions added [T, F], whose channels begin at `first_channel` of such slots
    latent_store       fn(q_TF, latent_TF, norm, cos_LP, sin_LP, positions_T, slots_T, pages, *, latent,
                          head_dim, quant=None) -> rotated q_THC
                       writes the latents, normed and rounded by `quant`, and the rotated dimensions of keys
                       to pages of latents; nothing where latents and norm are None
    latent_heads       fn(kv_MF, rotated_MP, k_HMC, v_HMC, *, latent, head_dim)
                       writes keys and values of M positions
    latent_attention   fn(q_THR, q_THC, pages, block_table_RB, context_lens_R, *, q_len, scale, window=None,
                          sinks_H=None)
                       -> [T, H, R], over pages of latents of R numbers; the last dimensions of q_THC rotate
    head_linear        fn(x_THI, packed) -> [T, H, O]; packed = repack(matrices [O, I] of the heads)
    compressed_store   fn(q_TF, k_TC, raw_TF, norm, cos_LR, sin_LR, positions_T, slots_T, pages) -> q_THC
                       the normed and turned queries; writes the normed and turned keys, and what entries are
                       computed of, None where there are none, to pages of latents
    compressed_attention  fn(q_THC, pages, weights, cos_LR, sin_LR, block_table_RB, sequence_T, positions_T,
                          *, window, scale, sinks_H, choice=None) -> [T, H, C], turned back
                       weights are `EntryWeights`, None without entries; row t is of sequence `sequence_T[t]`
                       and sees its window and the entries that are over at `positions_T[t]`, or those of
                       them that an `EntryChoice` chooses
    index_store        fn(q_TF, k_TI, weights_TH, norm, cos_LP, sin_LP, positions_T, slots_T, pages, *, facts,
                          gate_TI=None, growth=None) -> (q_THI, factors_TH)
                       the queries of an `Indexer` grown by a `QueryGrowth`, turned, and weights times their
                       factor; writes keys, normed and turned, and after them gates of pools, to pages
    index_choice       fn(q_THI, weights_TH, pages, block_table_TB, ends_T, *, top_k) -> slots [T, K]
                       of some of the `ends_T[t]` positions that row t sees in its own blocks, in their order,
                       then of the first
    pool_choice        fn(q_THI, weights_TH, pages, block_table_TB, ends_T, *, pools) -> slots [T, K]
                       of the positions of the pools that an indexer chooses for row t, which sees `ends_T[t]`
                       positions in its own blocks, and of those after the last pool, in their order, then of
                       the first; pools are `KeyPools`
    block_choice       fn(q_TNI, keys, pages, block_table_TB, ends_T) -> slots [T, N or 1, W]
                       of the positions of the blocks that the heads of an indexer choose for row t, which
                       sees `ends_T[t]` positions, in their order, then any; keys are `BlockKeys`, queries are
                       normed and turned
    attention_decode   fn(q_THC, kv, block_table_RB, context_lens_R, *, q_len, window, scale, softcap=None,
                          sinks_H=None, relative=None, slopes_H=None) -> [T, H, C]; T = R q_len,
                          the last q_len positions of each context
    attention_prefill  fn(q_THC, kv, block_table_RB, query_lens, context_lens, *, window, scale, softcap=None,
                          sinks_H=None, relative=None, slopes_H=None) -> [T, H, C]; ragged, with lengths
                       as tuples
                       kernels of problems with `relative` take a `RelativeTerm`, those with `alibi` slopes,
                       float32, of which each times the distance of the key is subtracted from scores
                       a kernel that `takes_lists` also takes lists=FixedLists, in place of the lengths
    soft_cap           fn(logits_TV, cap) -> the same tensor, changed in place
    hyper_mix          fn(streams_TE, hyper, norm, quant=None) -> (rows [T, D], factors_TF or None)
                       rows: the norm of a mixture of the n streams [T, n D]; hyper is a `HyperWeights`
                       factors float32: those of the output of the half-layer, then those of the streams
                       [n, n] where they are mixed; None for the head
    hyper_spread       fn(y_TD, streams_TE, factors_TF) -> the streams [T, n D] after a half-layer
    gated_mix          fn(streams_TE, packed, norm) -> (rows [T, D], factors_Tn float32 or None)
                       packed = repack((W_down, W_up, W_q)) of gated residuals, without W_q for the head, of
                       which no factors are returned; the weights of the norm are float32 [n, D]
    altup_first        fn(x_TD, products) -> the streams of AltUp [T, n D] of embeddings and of their products
                       with the matrix of each stream but the first, float32 [T, D]
    altup_predict      fn(streams_TE, altup, following=None, quant=None) -> (predicted_TE, rows or None)
                       altup is an `AltUpWeights`; rows: the norm of the first predicted stream [T, D]
    altup_correct      fn(y_TD, predicted_TE, altup) -> (streams_TE, the first of them by its scale [T, D])
    altup_add          fn(y_TD, streams_TE, norm) -> the same streams, changed in place
                       the norm of y is added to all but the first
    altup_join         fn(streams_TE, products) -> the mean [T, D] of the first of the streams and of products
                       as above, of the other streams, brought to its magnitude
    router             fn(x_TD, router, facts, *, shared=0, tokens_T=None) -> (ids_TK int32, weights_TK f32)
                       router is a `RouterWeights`, facts are `Experts`; distinct experts, the best first
                       then ids E to E + `shared` - 1 of every row, with the weight 1
                       `tokens_T` are given where a table has the experts of each token
    experts            fn(x_TD, packed, ids_TK, weights_TK, *, residual_TD=None, cap=None) -> [T, D]
                       packed = repack_experts(experts); the sum over K in the order of K
                       `cap`: that of activated gates (of gates before silu with `silu_capped`), and of the
                       magnitudes of what they multiply
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from compress.errors import EnvironmentUnfit
from compress.kernels.operands.routing import ExpertWeights
from compress.kernels.problem import OPS, Op, Problem
from compress.plugins import PluginSet
from compress.quant.scheme import QuantizedWeight


class Repack(Protocol):
    """A function that stacks weights [O_j, I] along O, gate before up when `gated`, in the layout that a
    kernel reads."""

    def __call__(
        self,
        weights: Sequence[Tensor | QuantizedWeight],
        *,
        dtype: torch.dtype,
        device: torch.device,
        gated: bool,
    ) -> Any: ...


class RepackExperts(Protocol):
    """A function that stores the experts of a layer, in the order of their ids, in the layout that a kernel
    reads. A bias is given to all experts or to none."""

    def __call__(
        self, experts: Sequence[ExpertWeights], *, dtype: torch.dtype, device: torch.device
    ) -> Any: ...


@dataclass(frozen=True)
class Kernel:
    """One implementation of an op. `supports` returns None, or the reason of its refusal.

    `repack` turns canonical weights into the layout that `fn` reads (tensors or a frozen dataclass of
    tensors), once, at load; kernels with the same `repack` share its result. `min_sm` is the least compute
    capability times ten (90 for Hopper), 0 for kernels that run anywhere. Of the kernels that refuse nothing,
    the one of the highest `priority` serves. A linear that `prepares` also takes `RawRows`. Kernels of
    experts have `repack_experts` in place of `repack`. Prefill attention that `takes_lists` can be captured
    in a CUDA graph for chunks of other lengths.
    """

    op: Op
    name: str
    min_sm: int
    priority: int
    supports: Callable[[Problem], str | None]
    fn: Callable[..., Any]
    repack: Repack | None = None
    prepares: bool = False
    repack_experts: RepackExperts | None = None
    takes_lists: bool = False

    def refusal(self, problem: Problem) -> str | None:
        """Return why this kernel cannot serve a problem; None where it can."""
        if self.min_sm > problem.sm:
            where = f"sm_{problem.sm}" if problem.sm else problem.device
            return f"needs sm_{self.min_sm} or newer and this device is {where}"
        return self.supports(problem)


KERNELS: dict[Op, PluginSet[Kernel]] = {op: PluginSet(f"{op} kernel", f"compress.kernels.{op}") for op in OPS}


def register(kernel: Kernel) -> Kernel:
    """Add a kernel to its op's set. A kernel's file calls it once, at its end."""
    KERNELS[kernel.op].add(kernel.name, kernel)
    return kernel


def anything(problem: Problem) -> str | None:
    """Refuse nothing; the `supports` of a kernel that serves every problem."""
    return None


def candidates(op: Op) -> list[Kernel]:
    """Return the kernels of an op, highest priority first."""
    return sorted(
        (kernel for _, kernel in KERNELS[op].items()), key=lambda kernel: (-kernel.priority, kernel.name)
    )


def select(problem: Problem) -> Kernel:
    """Return the kernel that serves a problem.

    Raises:
        EnvironmentUnfit: no candidate supports it; the message has each candidate's reason.
    """
    for kernel in candidates(problem.op):
        if kernel.refusal(problem) is None:
            return kernel
    why = "; ".join(f"{name}: {reason}" for name, reason in refusals(problem).items())
    raise EnvironmentUnfit(
        f"no {problem.op} kernel for scheme {problem.scheme}, N = {problem.n}, K = {problem.k}, "
        f"M = {problem.m_min}..{problem.m_max} on {problem.device}: {why}."
    )


def refusals(problem: Problem) -> dict[str, str]:
    """Return the reasons of the candidates that refuse a problem, by kernel name."""
    reasons = {kernel.name: kernel.refusal(problem) for kernel in candidates(problem.op)}
    return {name: reason for name, reason in reasons.items() if reason is not None}
