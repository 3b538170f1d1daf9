"""The mixture of experts of one layer, with the kernels chosen for it.

    out = residual + sum_k weights[t, k] expert_{ids[t, k]}(x),   ids, weights = router(x)

One choice of router kernel and of experts kernel serves decode rows, whose results must not depend on the
other rows of a call, and one serves prompts. Both read one copy of the weights where they agree on its
layout.

Shapes: T rows, D hidden, E experts, K choices of a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from compress.kernels.experts.reference import expert_quant
from compress.kernels.operands.routing import ExpertWeights, RouterWeights, router_weights
from compress.kernels.operands.rows import ActivationQuant, QuantizedRows, RawRows, RowNorm
from compress.kernels.problem import PHASES, Phase
from compress.kernels.select import select
from compress.models.experts import Experts
from compress.quant.scheme import QuantizedWeight
from compress.runtime.deployment import Deployment
from compress.runtime.fused_linear import BoundKernel, packed_bytes


@dataclass(frozen=True)
class ExpertLinears:
    """The router and the experts of a layer. A dense shared expert is no part of it: its output is added to
    `residual` by its own linears. `input_quant` is how decode rows are quantized before the experts read
    them, None where the experts do it."""

    facts: Experts
    router: RouterWeights
    routers: dict[Phase, BoundKernel]
    kernels: dict[Phase, BoundKernel]
    input_quant: ActivationQuant | None

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
    ) -> "ExpertLinears":
        """Choose the kernels of a layer and repack its experts once for each layout.

        Raises:
            EnvironmentUnfit: no kernel supports the experts.
        """
        assert len(experts) == facts.num_experts
        hidden_size, ffn_size = experts[0].down.shape
        gate = experts[0].gate
        scheme = gate.scheme.name if isinstance(gate, QuantizedWeight) else None
        device = deployment.kernel_device
        packed: dict[Any, Any] = {}
        routers: dict[Phase, BoundKernel] = {}
        kernels: dict[Phase, BoundKernel] = {}
        for phase in PHASES:
            problem = device.problem(
                "router",
                n=facts.num_experts,
                k=hidden_size,
                phase=phase,
                experts=facts.num_experts,
                top_k=facts.top_k,
                expert_groups=facts.num_groups,
            )
            routers[phase] = BoundKernel(select(problem), problem)
            problem = device.problem(
                "experts",
                n=hidden_size,
                k=ffn_size,
                phase=phase,
                scheme=scheme,
                activation=activation,
                experts=facts.num_experts,
                top_k=facts.top_k,
            )
            kernel = select(problem)
            assert kernel.repack_experts is not None, f"experts kernel {kernel.name} has no repack_experts"
            if kernel.repack_experts not in packed:
                packed[kernel.repack_experts] = kernel.repack_experts(
                    experts, dtype=deployment.dtype, device=deployment.device
                )
            kernels[phase] = BoundKernel(kernel, problem, packed[kernel.repack_experts])
        takes_codes = kernels["decode"].kernel.prepares
        input_quant = expert_quant((gate,), deployment.device) if takes_codes else None
        router = router_weights(
            router_weight_ED,
            router_bias_E,
            selection_bias_E,
            dtype=deployment.dtype,
            device=deployment.device,
        )
        return ExpertLinears(facts, router, routers, kernels, input_quant)

    @property
    def quant(self) -> ActivationQuant | None:
        """None: the router reads rows that are not quantized."""
        return None

    def prepares_input(self, phase: Phase, norm: RowNorm) -> bool:
        """Return whether the router normalizes rows by this norm, and quantizes them for the experts,
        itself."""
        router = self.routers[phase]
        return router.kernel.prepares and not norm.centered and norm.weight.dtype == router.problem.dtype

    def route(self, rows: Tensor | RawRows, phase: Phase) -> tuple[Tensor | QuantizedRows, Tensor, Tensor]:
        """Return the rows that experts read, ids int32 and weights float32, both [T, K]."""
        if isinstance(rows, RawRows):
            rows = replace(rows, quant=self.input_quant)
        read, ids_TK, weights_TK = self.routers[phase].kernel.fn(rows, self.router, self.facts)
        return read, ids_TK, weights_TK

    def experts(
        self,
        rows: Tensor | QuantizedRows,
        ids_TK: Tensor,
        weights_TK: Tensor,
        phase: Phase,
        *,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Return the weighted sum of the experts of each row, [T, D], plus `residual` if given."""
        bound = self.kernels[phase]
        out_TD: Tensor = bound.kernel.fn(rows, bound.packed, ids_TK, weights_TK, residual_TD=residual)
        return out_TD

    def __call__(self, rows: Tensor | RawRows, phase: Phase, *, residual: Tensor | None = None) -> Tensor:
        """Return the output [T, D] of the whole mixture for normalized rows, or for raw ones that the router
        prepares."""
        return self.experts(*self.route(rows, phase), phase, residual=residual)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all experts and the router."""
        return packed_bytes(self.kernels["decode"].packed) + packed_bytes(self.router)

    def bytes_read(self, experts_hit: float) -> int:
        """Return the bytes that one decode step reads whose rows are routed to so many experts."""
        experts = packed_bytes(self.kernels["decode"].packed) / self.facts.num_experts
        return round(experts_hit * experts) + packed_bytes(self.router)

    def report(self, layer: int | None) -> list[dict[str, Any]]:
        """Return rows of `Engine.kernel_report`, one for each op and phase."""
        rows = [("router", each) for each in self.routers.values()]
        rows += [("experts", each) for each in self.kernels.values()]
        return [bound.report(layer=layer, linear=name) for name, bound in rows]
