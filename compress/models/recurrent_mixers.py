"""The modules of all recurrences."""

from compress.models.arch import Arch
from compress.models.delta_net import DeltaNet
from compress.models.delta_net_mixer import GatedDeltaNet
from compress.models.layer_shape import LayerShape
from compress.models.lightning import Lightning
from compress.models.lightning_mixer import LightningAttention
from compress.models.mamba1 import Mamba1
from compress.models.mamba1_mixer import Mamba1Mixer
from compress.models.mamba2 import Mamba2
from compress.models.mamba2_mixer import Mamba2Mixer
from compress.models.recurrence import Recurrence
from compress.models.short_conv import ShortConv
from compress.models.short_conv_mixer import ShortConvMixer
from compress.models.token_mixer import TokenMixer


def recurrent_mixer(arch: Arch, shape: LayerShape, recurrence: Recurrence) -> TokenMixer:
    """Return the module of the recurrence of a layer."""
    if isinstance(recurrence, DeltaNet):
        return GatedDeltaNet(arch, shape, recurrence)
    if isinstance(recurrence, Lightning):
        return LightningAttention(arch, shape, recurrence)
    if isinstance(recurrence, Mamba1):
        return Mamba1Mixer(arch, shape, recurrence)
    if isinstance(recurrence, Mamba2):
        return Mamba2Mixer(arch, shape, recurrence)
    assert isinstance(recurrence, ShortConv)
    return ShortConvMixer(arch, shape, recurrence)
