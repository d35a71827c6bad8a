import pytest
import torch

from datamask_pl.functional.device import backend, fits, move, multiplies_bfloat16, rows_at_once

CPU, GPU, META = torch.device("cpu"), torch.device("cuda"), torch.device("meta")


def test_a_block_may_take_half_of_what_is_free_on_a_gpu_and_anything_on_a_cpu(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda which: asked.append(which) or (1000, 9000))
    assert [fits(size, GPU) for size in (499, 500, 501)] == [True, True, False]
    assert asked == [GPU] * 3
    assert fits(2**60, CPU)


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_a_gpu_multiplies_bfloat16_since_ampere(monkeypatch, capability, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda which: capability if which is GPU else None)
    assert multiplies_bfloat16(GPU) is expected


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({}, False),
        ({"avx512_bf16": False, "amx_bf16": False}, False),
        ({"avx512_bf16": True}, True),
        ({"amx_bf16": True}, True),
    ],
)
def test_a_cpu_multiplies_bfloat16_if_it_says_so(monkeypatch, capabilities, expected):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert multiplies_bfloat16(CPU) is expected
    assert multiplies_bfloat16(META) is False


def test_a_torch_that_does_not_tell_does_not_multiply_bfloat16(monkeypatch):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert multiplies_bfloat16(CPU) is False


def test_a_gpu_takes_four_times_the_rows_and_two_process_groups():
    assert [rows_at_once(7, where) for where in (CPU, GPU)] == [7, 28]
    assert [backend(where) for where in (CPU, GPU)] == ["gloo", "cpu:gloo,cuda:nccl"]


def test_a_tensor_is_moved_to_the_device():
    tensor = torch.ones(2)
    assert move(tensor, CPU) is tensor
    assert move(tensor, META).device == META


class Moved:
    """Stands for a tensor, and writes down how it is moved."""

    def __init__(self, where):
        self.device, self.calls = where, []

    def pin_memory(self):
        self.calls.append("pinned")
        return self

    def to(self, *where, **options):
        self.calls.append((*where, options))


@pytest.mark.parametrize(
    ("origin", "target", "expected"),
    [(CPU, GPU, ["pinned", (GPU, {"non_blocking": True})]), (GPU, GPU, [(GPU, {})]), (GPU, CPU, [(CPU, {})])],
)
def test_from_the_host_to_a_gpu_it_is_moved_through_pinned_memory_and_nothing_waits(origin, target, expected):
    tensor = Moved(origin)
    move(tensor, target)
    assert tensor.calls == expected
