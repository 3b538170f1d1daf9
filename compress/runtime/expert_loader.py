"""The experts of a layer as the runtime loads them, the shared one among them where it can be.

A shared expert whose width is that of n others is n experts that every token chooses with the weight one, or
with that of its gate: its rows of gate and up are cut into n, and its columns of down. Few rows wait for
launches and not for bytes, and so it costs next to nothing among the others. Experts of one launch have one
cap.
"""

from torch import Tensor

from compress.kernels.operands.routing import ExpertWeights
from compress.models.arch import Arch
from compress.models.experts import EXPERTS_OF_TOKENS
from compress.models.layer_shape import LayerShape
from compress.models.layout import Value, columns, rows_of
from compress.models.moe import for_choice
from compress.models.weights import Weights, dense
from compress.quant.scheme import QuantizedWeight, Scheme
from compress.runtime.deployment import Deployment
from compress.runtime.expert_linears import ExpertLinears


def load_experts(
    arch: Arch, shape: LayerShape, weights: Weights, deployment: Deployment
) -> ExpertLinears | None:
    """Return the router and the experts of a layer, None where it has none.

    Raises:
        EnvironmentUnfit: no kernel supports the experts.
    """
    facts = shape.experts
    if facts is None:
        return None

    def rare(name: str) -> Tensor | None:
        return dense(weights[name]) if name in weights else None

    def expert(name: str) -> ExpertWeights:
        gate, up, down = (f"{name}.{linear}" for linear in ("gate", "up", "down"))
        return ExpertWeights(
            weights.get(f"{gate}.weight"),
            weights[f"{up}.weight"],
            weights[f"{down}.weight"],
            rare(f"{gate}.bias"),
            rare(f"{up}.bias"),
            rare(f"{down}.bias"),
        )

    bias_E = rare("moe.selection_bias")
    scale_E = rare("moe.factor")
    experts = [expert(f"moe.experts.{idx}") for idx in range(facts.num_experts)]
    num_shared = shape.shared_parts
    activation = facts.activation_of(arch.activation)
    joins = num_shared > 0 and ExpertLinears.takes_shared(
        facts, experts[0], deployment, activation=activation, num_shared=num_shared
    )
    return ExpertLinears.bind(
        facts,
        dense(weights["moe.router.weight"]),
        experts,
        deployment,
        activation=activation,
        router_bias_E=rare("moe.router.bias"),
        selection_bias_E=None if bias_E is None else for_choice(facts, bias_E),
        output_scale_E=rare("moe.output_scale") if scale_E is None else scale_E.expand(facts.num_experts),
        table_VK=rare(EXPERTS_OF_TOKENS),
        shared=parts(expert("moe.shared"), experts[0], num_shared) if joins else (),
        cap=shape.expert_cap,
    )


def parts(shared: ExpertWeights, other: ExpertWeights, num_parts: int) -> list[ExpertWeights]:
    """Return a shared expert as so many experts; none where its formats are not those of the `other`, it has
    biases, a cut would change its numbers, or its inputs would be rounded by static scales of the others."""
    if any(each is not None for each in (*shared.gate_up_bias, shared.down_bias)):
        return []
    schemes = _schemes(shared)
    size = other.down.shape[1]
    if schemes != _schemes(other) or any(each is not None and each.has_static_inputs for each in schemes):
        return []
    if not all(_can_cut(each, size, num_parts) for each in schemes):
        return []
    spans = [(start, start + size) for start in range(0, num_parts * size, size)]
    return [
        ExpertWeights(
            None if shared.gate is None else rows_of(shared.gate, *span),
            rows_of(shared.up, *span),
            columns(shared.down, *span),
        )
        for span in spans
    ]


def _schemes(expert: ExpertWeights) -> list[Scheme | None]:
    return [_scheme(each) for each in (expert.gate, expert.up, expert.down) if each is not None]


def _scheme(weight: Value) -> Scheme | None:
    return weight.scheme if isinstance(weight, QuantizedWeight) else None


def _can_cut(scheme: Scheme | None, size: int, num_parts: int) -> bool:
    """Return whether parts of `size` rows, or columns, are computed as the whole is: they are whole blocks
    and whole groups, and no scale is found over all inputs of a row, or over all scales of the weight."""
    if scheme is None or num_parts == 1:
        return True
    whole = size % scheme.block_rows == 0 and size % (scheme.group_size or 1) == 0
    return whole and scheme.activation != "token" and scheme.scale_type != "e4m3"
