"""The form in which ranks send values to one another: JSON that has a place for each tensor, and then the
bytes of the tensors.

Only scalars, strings, lists, tuples, dicts and tensors are sent; who sends an object sends its parts, and who
receives them builds the object.
"""

from typing import Any

import torch
from torch import Tensor


def encode(value: Any, tensors: list[Tensor]) -> Any:
    """Return `value` as JSON; its tensors are appended to `tensors`, in order.

    Raises:
        TypeError: an object other than a scalar, string, list, tuple, dict or tensor.
    """
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [encode(each, tensors) for each in value]
        case tuple():
            return {"tuple": [encode(each, tensors) for each in value]}
        case dict():
            return {"dict": [[encode(key, tensors), encode(each, tensors)] for key, each in value.items()]}
        case Tensor():
            tensors.append(value.detach().contiguous())
            return {
                "tensor": str(value.dtype).removeprefix("torch."),
                "shape": list(value.shape),
                "on_host": value.device.type == "cpu",
            }
    raise TypeError(f"a {type(value).__name__} cannot be sent to another rank: send its parts.")


def decode(encoded: Any, tensors: list[Tensor], device: torch.device) -> Any:
    """Return the value that `encode` was given; its tensors are uninitialised and appended to `tensors`, in
    order."""
    match encoded:
        case list():
            return [decode(each, tensors, device) for each in encoded]
        case {"tuple": items}:
            return tuple(decode(each, tensors, device) for each in items)
        case {"dict": items}:
            return {decode(key, tensors, device): decode(each, tensors, device) for key, each in items}
        case {"tensor": dtype, "shape": shape, "on_host": on_host}:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu" if on_host else device)
            tensors.append(tensor)
            return tensor
    return encoded


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, uint8 [number of bytes], in the same memory."""
    return tensor.reshape(-1).view(torch.uint8)
