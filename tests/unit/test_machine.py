"""Facts of this machine, and rates measured on it."""

import torch

from compress.machine import environment_facts, measure_bandwidth, measure_matmul_rate


def test_rates_are_plausible_and_facts_name_the_device() -> None:
    cpu = torch.device("cpu")
    assert 1e8 < measure_bandwidth(cpu, size_bytes=1 << 24, repeats=3) < 1e13
    assert 1e8 < measure_matmul_rate(cpu, torch.float32, size=256, repeats=3) < 1e14
    facts = environment_facts(cpu)
    assert (facts["device_key"], facts["torch"], facts["threads"]) == (
        "cpu",
        torch.__version__,
        torch.get_num_threads(),
    )
