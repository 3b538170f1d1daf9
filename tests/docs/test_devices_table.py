"""The table of schemes by device is computed: from the kernels that are selected, and from rows of result
files.
"""

import pytest

from compress.kernels.select import select
from compress.quant.kv import KV_CACHES, page_format
from compress.quant.scheme import DENSE, SCHEMES
from scripts.docs.result_files import ROOT, ResultFile
from scripts.docs.tables import devices
from scripts.docs.tables.devices import CACHE, COMPILED, DEVICES, EXPERTS, LINEAR, MEASURED, REFERENCE

SUBJECTS = {LINEAR: (*SCHEMES, DENSE), EXPERTS: (*SCHEMES, DENSE), CACHE: (*KV_CACHES.values(), DENSE)}
CELLS = [(device, subject, name) for device in DEVICES for subject in SUBJECTS for name in SUBJECTS[subject]]


def test_every_scheme_and_cache_has_a_word_for_every_device() -> None:
    for text, names in (
        (devices.linears(), SUBJECTS[LINEAR]),
        (devices.experts(), SUBJECTS[EXPERTS]),
        (devices.caches(), SUBJECTS[CACHE]),
    ):
        header, _, *rows = [
            [part.strip() for part in line.strip("| ").split("|")] for line in text.splitlines()
        ]
        assert header[1:] == list(DEVICES)
        assert sorted(", ".join(row[0] for row in rows).split(", ")) == sorted(f"`{name}`" for name in names)
        cells = {cell.strip("[").partition("]")[0] for row in rows for cell in row[1:]}
        assert cells <= {MEASURED, COMPILED, REFERENCE}


@pytest.mark.parametrize(("device", "subject", "name"), CELLS)
def test_a_word_follows_the_kernels_that_a_loader_selects(device: str, subject: str, name: str) -> None:
    own = DEVICES[device].dense if name == DENSE else name
    problems = [
        row.problem for row in devices.served(device, subject) if row.problem.scheme == page_format(own)
    ]
    assert problems
    slow = any(select(each).priority == 0 for each in problems)
    assert (devices.word(device, subject, name) == REFERENCE) == slow


def test_a_measured_cell_links_to_a_file_with_a_row_of_that_scheme_on_that_device() -> None:
    linked = 0
    for device, subject, name in CELLS:
        cell = devices.cell(device, subject, name)
        if "](" not in cell:
            continue
        file = ResultFile(ROOT / cell.partition("](../../")[2].rstrip(")"))
        on_cpu = file.facts["device"] == (file.facts.get("host") or {}).get("cpu")
        assert on_cpu == (DEVICES[device].sm == 0)
        own = DEVICES[device].dense if name == DENSE else name
        rows = [row for run in file.runs for row in run.rows]
        assert any(own in (row.get("scheme"), str(row.get("kv")).upper()) for row in rows)
        linked += 1
    assert linked > 10


def test_no_device_is_measured_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "timings", tuple)
    words = {devices.word(*cell) for cell in CELLS}
    assert words == {COMPILED, REFERENCE}


def test_accuracy_and_other_programs_are_no_timing() -> None:
    paths = {each.path for each in devices.timings()}
    assert "benchmarks/quality.json" not in paths
    assert all(each.row.get("tool", "compress") == "compress" for each in devices.timings())
