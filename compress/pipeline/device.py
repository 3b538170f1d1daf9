"""The device that a run or a model uses: checked before any work."""

from collections.abc import Mapping

from compress.errors import EnvironmentUnfit, UsageError


def pick_device(name: str | None) -> str:
    """Return the device called `name`, or by default the first GPU, or the CPU where there is none.

    Raises:
        UsageError: it is not the name of a device.
        EnvironmentUnfit: CUDA is asked for and not usable, or there is no GPU of that index.
    """
    import torch

    usable = torch.cuda.is_available()
    if name is None:
        return "cuda" if usable else "cpu"
    if device_kind(name) == "cuda":
        if not usable:
            raise EnvironmentUnfit(
                f"the device {name} was asked for, and torch finds no usable GPU here; `compress doctor` "
                f"says why."
            )
        if (torch.device(name).index or 0) >= torch.cuda.device_count():
            raise EnvironmentUnfit(
                f"the device {name} was asked for, and this machine has {torch.cuda.device_count()} GPUs, "
                f"counted from 0."
            )
    return name


def device_kind(name: str) -> str:
    """Return `cpu` or `cuda`; the device need not be on this machine.

    Raises:
        UsageError: it is not the name of a device.
    """
    import torch

    try:
        kind = torch.device(name).type
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise UsageError(f"'{name}' is not a device; write cpu, cuda or cuda:<index>.")
    return kind


def visible_gpus(count: int, environ: Mapping[str, str]) -> list[str]:
    """Return the names of the `count` GPUs that CUDA finds here, for `CUDA_VISIBLE_DEVICES` of a process that
    is to have one of them: indices and UUIDs as this process was given them, else indices from 0.
    """
    given = environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in given.split(",") if name.strip()] or [str(idx) for idx in range(count)]
    return names[:count]
