"""Page-locked memory: its size, its content, and that it is given back; with a GPU, that a kernel can use it."""

from __future__ import annotations

import gc

import pytest
import torch

from hisparse.errors import InputError
from hisparse.ops.fetch import pinned


class Driver:
    def __init__(self, code: int = 0) -> None:
        self.code, self.held = code, dict[int, int]()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        self.held[address] = size
        return self.code

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        del self.held[address]


@pytest.mark.parametrize(("rows", "row_bytes"), [(1, 16), (1000, 2592), (33, 4096)])
def test_rows_are_zero_and_registered_exactly_while_they_live(
    rows: int, row_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(pinned, "SLICE", 1000)
    made = pinned.pinned_rows(rows, row_bytes)
    assert tuple(made.shape) == (rows, row_bytes)
    assert not bool(made.any())
    assert driver.held == {made.data_ptr(): rows * row_bytes}
    part = made[-1]
    del made
    gc.collect()
    assert driver.held  # a view keeps it
    part.fill_(7)
    del part
    gc.collect()
    assert not driver.held


def test_a_refusal_names_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Driver(2))
    with pytest.raises(InputError, match=r"0\.0 GiB.*CUDA error 2"):
        pinned.pinned_rows(3, 16)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_reads_and_writes_in_place() -> None:
    from hisparse.ops.fetch import HostRows, gather_rows, store_rows

    device = torch.device("cuda", 0)
    source = HostRows.of([pinned.pinned_rows(5000, 2592)], device)
    assert source.segments[0].is_pinned()
    rows = torch.randperm(5000, device=device)[:700].int()
    pages = torch.randint(0, 256, (700, 2592), dtype=torch.uint8, device=device)
    store_rows(source, rows, pages)
    torch.cuda.synchronize()
    assert torch.equal(source.segments[0][rows.long().cpu()], pages.cpu())
    assert torch.equal(gather_rows(source, rows[None]), pages)
