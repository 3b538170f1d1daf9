"""The mixture of experts of one layer, with the kernels chosen for it.

    out = residual + sum_k weights[t, k] expert_{ids[t, k]}(x),   ids, weights = router(z)

z is x in most models, and the stream normed otherwise in those with `Experts.branch_norms`. Where experts act
on latents (`Experts.latent_size`), x are the latents and z is what they are computed of; the linears before
and after are the layer's (`loader.py`).

One choice of router kernel and of experts kernel serves decode rows, whose results must not depend on the
other rows of a call, and one serves prompts. Both read one copy of the weights where they agree on its
layout.

Shapes: T rows, D hidden, L numbers that an expert reads (D without latents), E experts, K choices of a token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from compress.kernels.operands.routing import ExpertWeights, RouterWeights, router_weights
from compress.kernels.problem import PHASES, Phase, Problem
from compress.kernels.select import select
from compress.models.experts import Experts
from compress.models.moe import weighed, weights_of_identities
from compress.quant.scheme import QuantizedWeight
from compress.runtime.deployment import Deployment
from compress.runtime.fused_linear import BoundKernel, packed_bytes


@dataclass(frozen=True)
class ExpertLinears:
    """The router and the experts of a layer. The last `num_shared` of them are what the shared expert
    consists of, which decode rows all choose; elsewhere its output is added to `residual` by linears of its
    own. The `cap` is `LayerShape.expert_cap`."""

    facts: Experts
    router: RouterWeights
    routers: dict[Phase, BoundKernel]
    kernels: dict[Phase, BoundKernel]
    num_shared: int = 0
    cap: float | None = None

    @staticmethod
    def bind(
        facts: Experts,
        router_weight_ED: Tensor,
        experts: Sequence[ExpertWeights],
        deployment: Deployment,
        *,
        activation: str,
        router_bias_E: Tensor | None = None,
        selection_bias_E: Tensor | None = None,
        output_scale_E: Tensor | None = None,
        table_VK: Tensor | None = None,
        shared: Sequence[ExpertWeights] = (),
        cap: float | None = None,
    ) -> "ExpertLinears":
        """Choose the kernels of a layer and repack its experts once for each layout. Decode rows go through
        all experts of `shared`.

        Raises:
            EnvironmentUnfit: no kernel supports the experts.
        """
        assert len(experts) == facts.num_experts
        assert not (shared and facts.zero_experts)  # both follow the others by index
        device = deployment.kernel_device
        packed: dict[Any, Any] = {}
        routers: dict[Phase, BoundKernel] = {}
        kernels: dict[Phase, BoundKernel] = {}
        for phase in PHASES:
            num_shared = len(shared) if phase == "decode" else 0
            problem = device.problem(
                "router",
                n=facts.of_router.num_experts,
                k=router_weight_ED.shape[1],
                phase=phase,
                experts=facts.of_router.num_experts,
                top_k=facts.top_k + num_shared,
                expert_groups=facts.num_groups,
            )
            routers[phase] = BoundKernel.of(problem)
            problem = _problem(
                facts, experts[0], deployment, phase, activation, others=len(shared), more_choices=num_shared
            )
            kernel = select(problem)
            assert kernel.repack_experts is not None, f"experts kernel {kernel.name} has no repack_experts"
            if kernel.repack_experts not in packed:
                packed[kernel.repack_experts] = kernel.repack_experts(
                    [*experts, *shared], dtype=deployment.dtype, device=deployment.device
                )
            kernels[phase] = BoundKernel(kernel, problem, packed[kernel.repack_experts])
        router = router_weights(
            router_weight_ED,
            router_bias_E,
            selection_bias_E,
            output_scale_E,
            table_VK,
            dtype=deployment.dtype,
            device=deployment.device,
        )
        return ExpertLinears(facts, router, routers, kernels, len(shared), cap)

    @staticmethod
    def takes_shared(
        facts: Experts, expert: ExpertWeights, deployment: Deployment, *, activation: str, num_shared: int
    ) -> bool:
        """Return whether decode rows have a kernel that computes their experts at once: the reference takes
        one after the other, and linears of a shared expert alone are faster."""
        problem = _problem(
            facts, expert, deployment, "decode", activation, others=num_shared, more_choices=num_shared
        )
        return select(problem).min_sm > 0

    def route(self, x_TD: Tensor, phase: Phase, tokens_T: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return ids int32 and weights float32, both [T, K], of normalized rows. K has the choices of all
        rows where a phase has them. `tokens_T` are read where a table has the experts of each token."""
        facts: dict[str, Any] = {"shared": self.num_shared if self.has_shared(phase) else 0}
        if self.facts.table_size:
            facts["tokens_T"] = tokens_T
        ids_TK, weights_TK = self.routers[phase].kernel.fn(x_TD, self.router, self.facts.of_router, **facts)
        return ids_TK, weights_TK

    def has_shared(self, phase: Phase) -> bool:
        """Return whether the shared expert is among the experts of a phase's rows."""
        return phase == "decode" and self.num_shared > 0

    def experts(
        self,
        x_TL: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        phase: Phase,
        *,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Return the weighted sum of the experts of each row, [T, L], plus `residual` if given."""
        bound = self.kernels[phase]
        out_TL: Tensor = bound.kernel.fn(
            x_TL, bound.packed, ids_TK, weights_TK, residual_TD=residual, cap=self.cap
        )
        return out_TL

    def __call__(
        self,
        x_TL: Tensor,
        phase: Phase,
        *,
        router_input: Tensor | None = None,
        residual: Tensor | None = None,
        shared_weight: Tensor | float | None = None,
        tokens_T: Tensor | None = None,
    ) -> Tensor:
        """Return the output [T, L] of the whole mixture for normalized rows; `router_input` are those of the
        router where it has its own, and `shared_weight` the weight of the shared expert among the others, or
        those [T, 1] of its gate, None for 1."""
        ids_TK, weights_TK = self.route(x_TL if router_input is None else router_input, phase, tokens_T)
        if shared_weight is not None:
            weights_TK[:, -self.num_shared :] = shared_weight
        if self.facts.weighs_input:
            x_TL = weighed(x_TL, weights_TK.squeeze(1))
            weights_TK = torch.ones_like(weights_TK)
        if self.facts.zero_experts:
            return self._with_identities(x_TL, ids_TK, weights_TK, phase, residual)
        return self.experts(x_TL, ids_TK, weights_TK, phase, residual=residual)

    def _with_identities(
        self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, phase: Phase, residual: Tensor | None
    ) -> Tensor:
        """Return the output of a mixture of which some experts return their input. In place of each of those
        a row computes the best of its own experts that have weights once more, with a weight of 0. A row that
        chose none with weights computes the last one, and its output is replaced by 0: that expert is not
        its own, and 0 times an infinite output is NaN."""
        is_zero_TK = ids_TK >= self.facts.num_experts
        own_T1 = is_zero_TK.to(torch.int32).argmin(dim=1, keepdim=True)
        own_T1 = ids_TK.gather(1, own_T1).clamp(max=self.facts.num_experts - 1)
        ids_TK = torch.where(is_zero_TK, own_T1, ids_TK)
        weights_T1 = weights_of_identities(is_zero_TK, weights_TK)
        out_TD = self.experts(x_TD, ids_TK, weights_TK.masked_fill(is_zero_TK, 0.0), phase)
        out_TD = out_TD.masked_fill(is_zero_TK.all(dim=1, keepdim=True), 0.0)
        total_TD = out_TD.to(torch.float32) + x_TD.to(torch.float32) * weights_T1
        total_TD = total_TD.to(x_TD.dtype)
        return total_TD if residual is None else residual + total_TD

    def normed(
        self, x_TL: Tensor, router_input: Tensor, phase: Phase, norm: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return the weighted sum of the experts of each row, [T, L], whose outputs are normed each (`norm`):
        each expert of a row has a row of its own, and they are added best first."""
        ids_TK, weights_TK = self.route(router_input, phase)
        top_k = ids_TK.shape[1]
        at_once = self.kernels[phase].problem.m_max
        outputs = []
        for x_PL, ids_P1 in zip(
            x_TL.repeat_interleave(top_k, dim=0).split(at_once),
            ids_TK.reshape(-1, 1).split(at_once),
            strict=True,
        ):
            ones_P1 = torch.ones_like(ids_P1, dtype=torch.float32)
            outputs.append(norm(self.experts(x_PL, ids_P1, ones_P1, phase)))
        terms_TKL = torch.cat(outputs).view(*ids_TK.shape, x_TL.shape[1])
        total_TL = torch.zeros_like(x_TL, dtype=torch.float32)
        for k in range(top_k):
            total_TL = total_TL + terms_TKL[:, k].to(torch.float32) * weights_TK[:, k : k + 1]
        return total_TL.to(x_TL.dtype)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all experts and the router."""
        return packed_bytes(self.kernels["decode"].packed) + packed_bytes(self.router)

    def bytes_read(self, experts_hit: float) -> int:
        """Return the bytes that one decode step reads whose rows are routed to so many experts, without the
        few rows of a table that chooses them."""
        num_experts = self.facts.num_experts + self.num_shared
        experts = packed_bytes(self.kernels["decode"].packed) / num_experts
        router = packed_bytes(replace(self.router, table_VK=None))
        return round((experts_hit + self.num_shared) * experts) + router

    def report(self, layer: int | None) -> list[dict[str, Any]]:
        """Return rows of `Engine.kernel_report`, one for each op and phase."""
        rows = [("router", each) for each in self.routers.values()]
        rows += [("experts", each) for each in self.kernels.values()]
        return [bound.report(layer=layer, linear=name) for name, bound in rows]


def _problem(
    facts: Experts,
    expert: ExpertWeights,
    deployment: Deployment,
    phase: Phase,
    activation: str,
    *,
    others: int,
    more_choices: int,
) -> Problem:
    """Return the problem of the experts of a layer, like `expert`, and of so many others. Its scheme names
    that of gate and up and that of down where they are two."""
    num_rows, top_k = facts.served_choices(facts.top_k + more_choices)
    device = deployment.kernel_device.with_prompts_of(num_rows)
    schemes = [
        each.scheme.name if isinstance(each, QuantizedWeight) else device.dense
        for each in (expert.up, expert.down)
    ]
    return device.problem(
        "experts",
        n=expert.down.shape[0],
        k=expert.down.shape[1],
        phase=phase,
        scheme="+".join(dict.fromkeys(schemes)),
        activation=activation,
        experts=facts.num_experts + others,
        top_k=top_k,
    )
