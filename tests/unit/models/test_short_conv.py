"""Gated short convolutions in place of attention: the module against its formula, and the widths of every
recurrence in a manifest."""

import json
from typing import Any

import pytest
import torch

from compress.errors import StorageError
from compress.models.arch import Arch
from compress.models.attention import CachedAttention, FullAttention
from compress.models.decoder import Decoder
from compress.models.delta_net import DeltaNet
from compress.models.layer_manifest import layer_from_json, layer_to_json
from compress.models.lightning import Lightning
from compress.models.mamba1 import Mamba1
from compress.models.mamba2 import Mamba2
from compress.models.recurrence import Recurrence
from compress.models.short_conv import ShortConv
from compress.models.short_conv_mixer import ShortConvMixer
from tests.support.tiny_source import tiny_shape, tiny_source

RECURRENCES: dict[str, Recurrence] = {
    "conv": ShortConv.of(56, 3),
    "lightning": Lightning.of(4, 12),
    "mamba1": Mamba1.of(40, 12, 4, 5, conv_bias=True),
    "mamba": Mamba2(4, 2, 8, 12, 4, conv_bias=True),
    "delta": DeltaNet(4, 2, 8, 12, 4),
}
each_recurrence = pytest.mark.parametrize("recurrence", RECURRENCES.values(), ids=RECURRENCES)


def tiny_arch(recurrence: Recurrence) -> Arch:
    return tiny_source(layers=(tiny_shape(recurrence=recurrence, rope=None), tiny_shape())).arch


@pytest.mark.parametrize("kernel_size", [1, 3, 4])
def test_the_module_is_its_formula(kernel_size: int) -> None:
    arch = tiny_arch(ShortConv.of(40, kernel_size))
    torch.manual_seed(0)
    mixer = Decoder(arch).requires_grad_(False).layers[0].conv
    assert isinstance(mixer, ShortConvMixer)
    x_BSD = torch.randn(2, 9, arch.hidden_size)
    out = mixer.heads(x_BSD, torch.arange(9), FullAttention(), layer_idx=0).double()
    b, c, x = (x_BSD.double() @ each.weight.double().T for each in (mixer.B, mixer.C, mixer.x))
    weight = mixer.conv.weight.double()
    for t in range(9):
        total = torch.zeros(2, 40, dtype=torch.float64)
        for back in range(min(kernel_size, t + 1)):
            total += weight[:, 0, kernel_size - 1 - back] * b[:, t - back] * x[:, t - back]
        torch.testing.assert_close(out[:, t], c[:, t] * total, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kernel_size", [1, 3, 4])
def test_a_cached_decode_goes_on_where_it_ended(kernel_size: int) -> None:
    arch = tiny_arch(ShortConv.of(40, kernel_size))
    torch.manual_seed(0)
    decoder = Decoder(arch).requires_grad_(False)
    tokens_BS = torch.randint(arch.vocab_size, (2, 12))
    whole = decoder(tokens_BS, attention=FullAttention())
    cache = CachedAttention()
    cuts = (0, 1, 2, 7, 8, 12)
    pieces = [
        decoder(tokens_BS[:, begin:end], torch.arange(begin, end), cache)
        for begin, end in zip(cuts, cuts[1:], strict=False)
    ]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=0, atol=2e-4)


@each_recurrence
def test_a_manifest_is_read_back_equal(recurrence: Recurrence) -> None:
    arch = tiny_arch(recurrence)
    facts, layers = json.loads(json.dumps(arch.to_json()))
    assert [recurrence.module in layer for layer in layers] == [True, False]
    assert Arch.from_json(facts, layers) == arch


@each_recurrence
@pytest.mark.parametrize("value", [0, -1, "4", 2.0, True, 2**60, None], ids=repr)
def test_a_manifest_with_a_wrong_width_is_refused(recurrence: Recurrence, value: Any) -> None:
    layer = json.loads(json.dumps(layer_to_json(tiny_arch(recurrence).layers[0])))
    for name, right in layer[recurrence.module].items():
        if isinstance(right, bool) and value is True:
            continue
        if value == 0 and name == "key_dim" and isinstance(recurrence, ShortConv):
            continue
        widths = {**layer[recurrence.module], name: value}
        if value is None:
            del widths[name]
        with pytest.raises(StorageError, match=name):
            layer_from_json({**layer, recurrence.module: widths}, 0)
