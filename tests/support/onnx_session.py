"""An ONNX decoder in ONNX Runtime on the CPU: logits of tokens in steps, with its own KV cache."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from compress.export.onnx import GRAPH_NAME

onnxruntime = pytest.importorskip("onnxruntime")


def logits_of(
    directory: Path,
    tokens_BS: Tensor,
    steps: Sequence[tuple[int, int]],
    *,
    padding: Tensor | None = None,
) -> Tensor:
    """Return logits [B, S, V] in float32, computed from `begin` to `end` in each step. `padding` is the
    number of tokens at the start of each row that are none."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        str(directory / GRAPH_NAME), options, providers=["CPUExecutionProvider"]
    )
    num_rows, length = tokens_BS.shape
    past = {
        each.name: np.zeros(
            (num_rows, each.shape[1], 0, each.shape[3]), np.float16 if "16" in each.type else np.float32
        )
        for each in session.get_inputs()
        if each.name.startswith("past_key_values.")
    }
    begins = torch.zeros(num_rows, dtype=torch.int64) if padding is None else padding
    positions = (torch.arange(length) - begins.unsqueeze(1)).clamp_min(0)
    mask = (torch.arange(length) >= begins.unsqueeze(1)).to(torch.int64)
    names = [each.name for each in session.get_outputs()]
    pieces = []
    for begin, end in steps:
        inputs = {
            "input_ids": tokens_BS[:, begin:end].numpy(),
            "attention_mask": mask[:, :end].numpy(),
            "position_ids": positions[:, begin:end].numpy(),
        }
        outputs = dict(zip(names, session.run(names, {**inputs, **past}), strict=True))
        past = {name: outputs[name.replace("past_key_values", "present")] for name in past}
        pieces.append(torch.from_numpy(outputs["logits"]).to(torch.float32))
    return torch.cat(pieces, dim=1)
