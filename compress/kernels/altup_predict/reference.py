"""Reference of the prediction of streams before a layer with alternating updates (`models/altup.py`), and of
the norm of the first of them, which the layer reads."""

from torch import Tensor

from compress.kernels.operands.altup import AltUpWeights, routed
from compress.kernels.operands.rows import ActivationQuant, QuantizedRows, RowNorm
from compress.kernels.rms_norm.reference import rms_norm_rows
from compress.kernels.select import Kernel, anything, register
from compress.models.altup import predicted


def altup_predict(
    streams_TE: Tensor,
    altup: AltUpWeights,
    following: RowNorm | None = None,
    quant: ActivationQuant | None = None,
) -> tuple[Tensor, Tensor | QuantizedRows | None]:
    """Return the predicted streams [T, n D], and the norm by `following` of the first of them [T, D],
    quantized if the next linear needs it; None without `following`."""
    size = streams_TE.shape[1] // altup.num_streams
    routed_Tn = routed(streams_TE[:, :size], altup)
    predicted_TE = predicted(streams_TE, routed_Tn, altup.predict_OI)
    if following is None:
        return predicted_TE, None
    return predicted_TE, rms_norm_rows(predicted_TE[:, :size], following.weight, following.eps, quant)


register(Kernel("altup_predict", "reference", min_sm=0, priority=0, supports=anything, fn=altup_predict))
