"""The packing kernel moves the bits that torch's copies move: compiled as C and run on the CPU, and by NVRTC to PTX."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distconv.communication.packing import Packing
from distconv.distribution import Region
from distconv.kernels import packing
from tests.distconv.layouts import counting
from tests.harness import kernels_in_c
from tests.harness.late_gpu import LateGpu
from tests.harness.late_libraries import LateCupy, late_gpu

SUMMED = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
]
COPIED = [*SUMMED, torch.uint16, torch.uint64, torch.float8_e4m3fn]
FEW = settings(max_examples=8)

in_c = pytest.mark.skipif(kernels_in_c.COMPILER is None, reason="needs the package of a C compiler")


def random_bits(shape, dtype, seed):
    """Elements of any bits, infinities and NaN among them."""
    drawn = torch.randint(0, 256, (*shape, dtype.itemsize), generator=torch.Generator().manual_seed(seed))
    return (drawn % 2 if dtype is torch.bool else drawn).to(torch.uint8).view(dtype)[..., 0]


def addends(shape, dtype, seed):
    """The same; complex ones finite, because torch multiplies what it adds by 1 + 0j first."""
    found = random_bits(shape, dtype, seed)
    return torch.view_as_complex(torch.view_as_real(found).nan_to_num()) if found.is_complex() else found


@st.composite
def tensors(draw, dtype):
    """One to three tensors of as many dimensions, of any strides, with elements between theirs."""
    dims = draw(st.integers(0, 5))
    found = []
    for number in range(draw(st.integers(1, 3))):
        steps = [draw(st.integers(1, 2)) for _ in range(dims)]
        extents = [draw(st.integers(1, 6 if dims < 4 else 3)) for _ in range(dims)]
        memory = random_bits([n * step for n, step in zip(extents, steps, strict=True)], dtype, seed=number)
        found.append(
            memory[tuple(slice(None, None, step) for step in steps)].permute(draw(st.permutations(range(dims))))
        )
    return found


@st.composite
def messages(draw, tensors):
    """Boxes of ``tensors``, some of which overlap, for each of one to four messages."""

    def region():
        number = draw(st.integers(0, len(tensors) - 1))
        first = tuple(draw(st.integers(0, extent - 1)) for extent in tensors[number].shape)
        extents = tuple(draw(st.integers(1, n - at)) for n, at in zip(tensors[number].shape, first, strict=True))
        return Region(number, first, extents)

    return [[region() for _ in range(draw(st.integers(1, 3)))] for _ in range(draw(st.integers(1, 4)))]


def by_both(act):
    """Return the results of ``act()`` with torch's copies and with the kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "compile_kernel", kernels_in_c.launched)
        for kernel in (False, True):
            patch.setattr(
                "distconv.communication.packing._uses_kernel", lambda buffer, adds=False, kernel=kernel: kernel
            )
            yield act()


def like(tensor, seed):
    """Other elements in memory of the same strides."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return made.copy_(random_bits(tensor.shape, tensor.dtype, seed))


def same_bits(one, other):
    return torch.equal(as_bytes(one), as_bytes(other))


def as_bytes(tensor):
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).view(-1).view(torch.uint8)


def same_numbers(one, other):
    """Bit for bit, but for which NaN it is."""
    if one.is_complex():
        return same_numbers(torch.view_as_real(one), torch.view_as_real(other))
    if not one.is_floating_point():
        return torch.equal(one, other)
    return torch.equal(one.isnan(), other.isnan()) and same_bits(one.nan_to_num(), other.nan_to_num())


@in_c
@pytest.mark.parametrize("dtype", COPIED, ids=str)
@FEW
@given(st.data())
def test_boxes_of_any_strides_are_packed_and_unpacked_as_by_torch(dtype, data):
    sources = data.draw(tensors(dtype))
    plan = Packing(data.draw(messages(sources)))

    def there_and_back():
        packed, into = plan.pack(sources), [like(tensor, 7) for tensor in sources]
        room = plan.allocate_for_unpack(into)
        for message, sent in zip(room.messages, packed, strict=True):
            message.copy_(sent)
        plan.unpack(room, into)
        return [*packed, *into]

    torchs, kernels = by_both(there_and_back)
    assert all(map(same_bits, torchs, kernels))


@in_c
@pytest.mark.parametrize("dtype", SUMMED, ids=str)
@FEW
@given(st.data())
def test_what_overlapping_boxes_add_is_added_in_the_order_of_torch(dtype, data):
    given_tensors = data.draw(tensors(dtype))
    plan = Packing(data.draw(messages(given_tensors)))

    def summed():
        into = [like(tensor, 7) for tensor in given_tensors]
        room = plan.allocate_for_add(into[0])
        assert room.buffer is not None
        room.buffer.copy_(addends(room.buffer.shape, dtype, 11))
        plan.add(room, into)
        return into

    torchs, kernels = by_both(summed)
    assert all(map(same_numbers, torchs, kernels))


@in_c
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sums_of_half_precision_round_as_those_of_torch(dtype):
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    plan = Packing([[Region(0, (0,), (1 << 16,))]])
    for seed in range(8):
        addend = random_bits([1 << 16], dtype, seed) if seed else torch.zeros_like(every)

        def summed(addend=addend):
            room, into = plan.allocate_for_add(every), every.clone()
            room.buffer.copy_(addend)
            plan.add(room, [into])
            return into

        torchs, kernels = by_both(summed)
        assert same_numbers(torchs, kernels)


def test_boxes_without_elements_launch_nothing(monkeypatch):
    def compiled(text):
        raise AssertionError("a launch of no blocks, which CUDA rejects")

    monkeypatch.setattr(packing, "compile_kernel", compiled)
    regions = packing.PackedRegions([(Region(0, (1, 0), (2, 0)), 0)], [(4, 1)])
    regions.pack([torch.ones(3, 4)], torch.empty(0))
    regions.unpack([torch.ones(3, 4)], torch.empty(0))
    regions.add([torch.ones(3, 4)], torch.empty(0))


def test_cells_of_overlapping_boxes_share_no_element_and_cover_them():
    """Three windows of one row, and a box apart.

    first  ######            cells  ##
    second   ######                   ##
    third      ######                   ##
                                          ##
    fourth             ##                   ##      ##
    """
    regions = [(Region(0, (start,), (6,)), 0) for start in (0, 2, 4)] + [(Region(0, (20,), (2,)), 0)]
    cells = [(cell.first[0], cell.extents[0], len(inside)) for cell, inside in packing._cells(regions)]
    assert cells == [(0, 2, 1), (2, 2, 2), (4, 2, 3), (6, 2, 2), (8, 2, 1), (20, 2, 1)]


@in_c
def test_the_table_is_made_once_for_a_plan_and_strides(monkeypatch):
    made = []
    monkeypatch.setattr(packing, "compile_kernel", kernels_in_c.launched)
    monkeypatch.setattr("distconv.communication.packing._uses_kernel", lambda buffer, adds=False: True)
    monkeypatch.setattr(packing, "_table", lambda *given, table=packing._table: made.append(given) or table(*given))
    plan = Packing([[Region(0, (0, 1), (4, 1))]])
    for _ in range(3):
        plan.pack([counting(4, 3)])
    assert len(made) == 1
    plan.pack([counting(4, 6)[:, ::2]])
    assert len(made) == 2


@in_c
@pytest.mark.parametrize("order", LateGpu.ORDERS)
def test_the_kernel_runs_on_the_current_stream_and_its_table_lasts_until_then(order):
    with late_gpu(order) as gpu:
        x, regions, side = gpu.tensor(counting(4, 3)), [[Region(0, (0, 1), (4, 1))]], torch.cuda.Stream()
        plan = Packing(regions)
        plan.pack([x])
        with torch.cuda.stream(side):
            values = gpu.tensor(counting(4, 3) + 1)
            (message,) = plan.pack([values])
        del plan
        gpu.stream.wait_stream(side)
        assert (message * 1).cpu().tolist() == (counting(4, 3)[:, 1] + 1).tolist()


@in_c
def test_more_elements_than_32_bits_count_are_indexed_with_64(monkeypatch):
    assert "#define INDEX unsigned int\n" in packing.kernel_source(torch.float64, 2, (1 << 31) - 1)
    wide = packing.kernel_source(torch.float64, 2, 1 << 31)
    assert "#define INDEX unsigned long long\n" in wide
    x, into = counting(3, 5), torch.zeros(6, dtype=torch.float64)
    monkeypatch.setattr(packing, "compile_kernel", lambda text: kernels_in_c.launched(wide))
    packing.PackedRegions([(Region(0, (1, 1), (2, 3)), 0)], [x.stride()]).pack([x], into)
    assert into.tolist() == x[1:, 1:4].flatten().tolist()


def nvrtc():
    """NVRTC of the wheels nvidia-cuda-nvrtc-cu12 or nvidia-cuda-nvrtc, which needs no GPU; None without."""
    wheels = importlib.util.find_spec("nvidia")
    places = (wheels.submodule_search_locations if wheels else None) or []
    found = sorted(path for place in places for path in Path(place).glob("*/lib/libnvrtc.so.*"))
    return ctypes.CDLL(str(found[-1])) if found else None


@pytest.mark.parametrize("dtype", SUMMED, ids=str)
def test_nvrtc_compiles_the_kernel_without_a_warning(dtype):
    library = nvrtc()
    if library is None:
        pytest.skip("needs the package nvidia-cuda-nvrtc-cu12 or nvidia-cuda-nvrtc")
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    text = packing.kernel_source(dtype, dims=4, elements=1 << (31 if dtype is torch.float32 else 10)).encode()
    unused_sums = b"--diag-suppress=177"
    options = (ctypes.c_char_p * 2)(b"--gpu-architecture=compute_75", unused_sums)
    assert library.nvrtcCreateProgram(ctypes.byref(program), text, b"packing.cu", 0, None, None) == 0
    failed = library.nvrtcCompileProgram(program, len(options), options)
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    assert (failed, log.value) == (0, b"")
    library.nvrtcGetPTXSize(program, ctypes.byref(size))
    ptx = ctypes.create_string_buffer(size.value)
    library.nvrtcGetPTX(program, ptx)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    assert b".visible .entry move(" in ptx.value


@in_c
@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (RuntimeError("CUDA_ERROR_UNSUPPORTED_PTX_VERSION\nin cuModuleLoad"), "RuntimeError: CUDA_ERROR_UNSUPPORTED"),
        (lambda *launch: None, "the kernel has moved wrong values"),
    ],
)
def test_where_the_kernel_does_not_run_boxes_are_packed_by_torch(kernel, reason, monkeypatch):
    def raw_kernel(cupy, text, name):
        if isinstance(kernel, Exception):
            raise kernel
        return kernel

    with late_gpu("late") as gpu:
        monkeypatch.setattr(LateCupy, "RawKernel", raw_kernel)
        x, plan = gpu.tensor(counting(4, 3)), Packing([[Region(0, (0, 1), (4, 1))]])
        with pytest.warns(
            UserWarning, match=f"float64 are packed one box at a time, .* does not run on cuda:0: {reason}"
        ):
            (message,) = plan.pack([x])
        assert message.cpu().tolist() == counting(4, 3)[:, 1].tolist()
        (again,) = plan.pack([x])  # tried, and told, once
        assert again.cpu().tolist() == counting(4, 3)[:, 1].tolist()
