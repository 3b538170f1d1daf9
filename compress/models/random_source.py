"""Random weights of a model's shape, made on the device one layer at a time, for benchmarks in which only
shapes and schemes matter.

Dense weights are normal with the deviation 1 / sqrt(I), so that a product keeps the size of its input and
80 layers stay finite; norms are one, biases small, and the parameters of an activation those of a model that
is not trained. Codes are drawn directly, never rounded from a dense
copy: integers uniform over their range, e4m3 codes normal with their largest value at 3.5 deviations,
both with scales that give the weight the same deviation, up to 25 % more or less from group to group. A
layer is the same in every call.

Shapes: O out, I in, G groups along I.
"""

import torch
from torch import Tensor

from compress.errors import UsageError
from compress.models.arch import Arch
from compress.models.delta_net import PLAIN_NORM
from compress.models.experts import EXPERTS_OF_TOKENS
from compress.models.moe import table_in_turns
from compress.models.weights import parameter_names
from compress.models.xielu import initial_parameters
from compress.quant.block_inputs import global_scale_of_inputs
from compress.quant.numerics import nearest_codes, storable
from compress.quant.scheme import QuantizedWeight, Scheme

SCALE_SPREAD = 0.25
INPUT_ABSMAX = 8.0
"""The largest input that a static activation scale covers; rows after a norm reach about 5."""
_BIAS_STD = 0.02
_OF_ACTIVATION = {f"ffn.{name}": value.to(torch.bfloat16) for name, value in initial_parameters().items()}
"""Parameters of activations as published models have them, and vLLM in a model of any dtype: in bfloat16."""
_OUTER = -1
"""The index that seeds the weights outside layers."""


class RandomSource:
    """A `WeightSource` of an arch alone. Linears have `scheme` (None: dense), the head `head_scheme`.

    Raises:
        UsageError: a quantized head was asked for and the model's head is its embedding.
    """

    def __init__(
        self,
        arch: Arch,
        *,
        device: torch.device,
        dtype: torch.dtype,
        scheme: Scheme | None = None,
        head_scheme: Scheme | None = None,
        seed: int = 0,
    ) -> None:
        if head_scheme is not None and arch.tied_head:
            raise UsageError(
                f"a head in {head_scheme.name} was asked for, but this model's head is its embedding, which "
                "stays dense."
            )
        self._arch = arch
        self._device = device
        self._dtype = dtype
        self._scheme = scheme
        self._head_scheme = head_scheme
        self._seed = seed
        self._outer_shapes, self._layer_shapes = parameter_names(arch)

    @property
    def arch(self) -> Arch:
        return self._arch

    @property
    def kv_format(self) -> str | None:
        return None

    def outer(self) -> dict[str, Tensor | QuantizedWeight]:
        generator = self._generator(_OUTER)
        return {
            name: self._parameter(
                shape, self._head_scheme if name == "head.weight" else None, name, generator
            )
            for name, shape in self._outer_shapes.items()
        }

    def layer(self, layer_idx: int) -> dict[str, Tensor | QuantizedWeight]:
        generator = self._generator(layer_idx)
        linears = self._arch.layers[layer_idx].linears
        return {
            name: self._parameter(
                shape, self._scheme if name.removesuffix(".weight") in linears else None, name, generator
            )
            for name, shape in self._layer_shapes[layer_idx].items()
        }

    def _parameter(
        self, shape: tuple[int, ...], scheme: Scheme | None, name: str, generator: torch.Generator
    ) -> Tensor | QuantizedWeight:
        if name == EXPERTS_OF_TOKENS:
            num_experts = max(
                each.experts.num_experts for each in self._arch.layers if each.experts is not None
            )
            return table_in_turns(*shape, num_experts=num_experts).to(self._device)
        if len(shape) == 2:
            return random_weight((shape[0], shape[1]), scheme, dtype=self._dtype, generator=generator)
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        if name in _OF_ACTIVATION:
            return tensor.copy_(_OF_ACTIVATION[name])
        if len(shape) == 3:
            return tensor.normal_(0.0, shape[-1] ** -0.5, generator=generator)
        if name.endswith("growth_scale"):  # queries do not grow
            return tensor.zero_()
        if name.endswith("bias"):
            return tensor.normal_(0.0, _BIAS_STD, generator=generator)
        offset = 0.0 if name == PLAIN_NORM else self._arch.offset_of(name.removesuffix(".weight"))
        return tensor.fill_(self._gain(name, shape) - offset)

    def _gain(self, name: str, shape: tuple[int, ...]) -> float:
        """Return what a norm multiplies by: 1, and for normed queries what gives scores of a deviation of
        1."""
        scale = 1 / shape[0] if self._arch.inverse_scale else self._arch.attn_scale
        if name != "attn.q_norm.weight" or scale is None or self._is_of_all_heads:
            return 1.0
        return shape[0] ** -0.5 / scale

    @property
    def _is_of_all_heads(self) -> bool:
        return self._arch.whole_qk_norm or self._arch.own_qk_norm

    def _generator(self, layer_idx: int) -> torch.Generator:
        return torch.Generator(self._device).manual_seed((self._seed << 20) + layer_idx - _OUTER)


def random_weight(
    shape: tuple[int, int], scheme: Scheme | None, *, dtype: torch.dtype, generator: torch.Generator
) -> Tensor | QuantizedWeight:
    """Return one weight [O, I] on the generator's device; `dtype` is that of a dense weight or of the
    scales."""
    device = generator.device
    (out_features, in_features) = shape
    std = in_features**-0.5
    if scheme is None:
        return torch.empty(shape, dtype=dtype, device=device).normal_(0.0, std, generator=generator)
    if scheme.type == "float":
        code_std = scheme.max_code / 3.5
        if scheme.scale_type == "e8m0":  # a power of two has no deviation of its own to give
            code_std = std / float(storable(torch.tensor(std / code_std), scheme, torch.float32))
        # Not in bfloat16, where a normal draw of torch 2.11 on a CPU ends at 3.3 deviations.
        codes_OI = torch.empty(shape, dtype=torch.float32, device=device).normal_(
            0.0, code_std, generator=generator
        )
        one = torch.ones((), device=device)
        codes_OI = nearest_codes(codes_OI, scheme, one, None).to(scheme.code_dtype)
    else:
        count = scheme.max_code - scheme.min_code + 1
        code_std = ((count**2 - 1) / 12) ** 0.5  # of a uniform draw from so many neighbouring integers
        codes_OI = torch.randint(
            scheme.min_code,
            scheme.max_code + 1,
            shape,
            dtype=scheme.code_dtype,
            device=device,
            generator=generator,
        )
    groups = (scheme.num_scale_rows(out_features), scheme.num_groups(in_features))
    spread_OG = torch.empty(groups, dtype=torch.float32, device=device).uniform_(
        1 - SCALE_SPREAD, 1 + SCALE_SPREAD, generator=generator
    )
    zero_point_OG = None
    if not scheme.symmetric:
        quarter = scheme.max_code // 4 + 1
        zero_point_OG = torch.randint(
            -quarter, quarter, groups, dtype=torch.int8, device=device, generator=generator
        )
    return QuantizedWeight(
        scheme,
        codes_OI,
        storable(spread_OG * (std / code_std), scheme, dtype)
        if scheme.scale_type is not None
        else (spread_OG * (std / code_std)).to(dtype),
        zero_point_OG,
        **_static_input(scheme, device),
    )


def _static_input(scheme: Scheme, device: torch.device) -> dict[str, Tensor]:
    """Return the fields of a weight for inputs of at most `INPUT_ABSMAX`."""
    if not scheme.has_static_inputs:
        return {}
    if scheme.has_input_global_scale:
        return {"input_global_scale": global_scale_of_inputs(torch.tensor(INPUT_ABSMAX, device=device))}
    scale = torch.tensor(INPUT_ABSMAX / scheme.max_code, device=device)
    if scheme.input_symmetric:
        return {"input_scale": scale}
    return {"input_scale": scale, "input_zero_point": torch.zeros((), dtype=torch.int8, device=device)}
