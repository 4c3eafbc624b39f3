"""Results, operands and weights of more than 2³¹ elements: samples of every family against products in float64."""

import pytest
import torch
from torch import Tensor

import tk_gemm
from tk_core.math import align, ceil_div
from tk_core.testing.numeric import calc_diff

from .inputs import dequantized, row_factors

pytestmark = pytest.mark.gpu(gib=10)

Operand = Tensor | tuple[Tensor, Tensor]
DEVICE = "cuda"
LARGE = 2**24 + 128
"""Rows of 128 elements, more than 2³¹ in all."""


def _data(kind: str, *shape: int) -> Tensor:
    """Random bfloat16, or finite e4m3 from -240 to 240, without a float32 copy of it."""
    if kind == "bf16":
        return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)
    codes = torch.randint(0, 120, shape, dtype=torch.uint8, device=DEVICE)
    signs = torch.randint(0, 2, shape, dtype=torch.uint8, device=DEVICE).mul_(128)
    return codes.bitwise_or_(signs).view(torch.float8_e4m3fn)


def _rows(kind: str, m: int, k: int) -> Operand:
    data = _data(kind, m, k)
    return data if kind == "bf16" else (data, row_factors(m, k // 128, DEVICE))


def _weights(kind: str, *shape: int) -> Operand:
    data = _data(kind, *shape)
    blocks = (*shape[:-2], ceil_div(shape[-2], 128), shape[-1] // 128)
    return data if kind == "bf16" else (data, torch.rand(blocks, device=DEVICE) + 0.5)


def _at(x: Operand, index: slice | int | Tensor, blocks: slice | int | Tensor | None = None) -> Operand:
    return x[index] if isinstance(x, Tensor) else (x[0][index], x[1][index if blocks is None else blocks])


def _values(x: Operand) -> Tensor:
    return x.double() if isinstance(x, Tensor) else dequantized(x)


def _samples(d: Tensor, a: Operand, b: Operand) -> list[tuple[Tensor, Tensor]]:
    """Places of a result (M, N), the first and the last ones too: what is there, and the product in float64."""
    m, n = d.shape
    rows = torch.tensor([0, m // 3, m // 2, m - 1], device=d.device)
    found = []
    for first in dict.fromkeys((0, (n - 1) // 128 * 128)):
        cols = slice(first, min(first + 128, n))
        exact = _values(_at(a, rows)) @ _values(_at(b, cols, slice(first // 128, first // 128 + 1))).T
        found.append((d[rows][:, cols].double(), exact))
    return found


def _check(d: Tensor, a: Operand, b: Operand) -> None:
    for found, exact in _samples(d, a, b):
        diff, limit = calc_diff(found, exact), 3e-6 if d.dtype is torch.bfloat16 else 1e-6
        assert diff < limit, f"expected a difference below {limit}, got {diff:.3g}"


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
@pytest.mark.parametrize(
    ("m", "n"), [(73728, 36864), (LARGE, 144), (144, LARGE)], ids=["result", "rows-and-result", "weights-and-result"]
)
def test_dense(m: int, n: int, kind: str) -> None:
    a, b = _rows(kind, m, 128), _weights(kind, n, 128)
    d = _data("bf16", m, n)
    before = [c for c, _ in _samples(d, a, b)]
    (tk_gemm.bf16_gemm_nt if kind == "bf16" else tk_gemm.fp8_gemm_nt)(a, b, d, d)
    for c, (found, exact) in zip(before, _samples(d, a, b), strict=True):
        assert calc_diff(found, exact + c) < 3e-6


def test_dense_of_transposed_operands() -> None:
    a, b = _data("bf16", 128, LARGE), _data("bf16", 128, 144)
    _check(tk_gemm.bf16_gemm_tn(a, b), a.t(), b.t())
    _check(tk_gemm.bf16_gemm_tn(b, a), b.t(), a.t())


@pytest.mark.gpu(gib=15)  # The result is float32.
def test_dense_with_factors_of_each_row() -> None:
    a, b = _rows("fp8", LARGE, 128), _rows("fp8", 144, 128)
    d = tk_gemm.fp8_gemm_nt(a, b, recipe=(1, 1, 128))
    rows = torch.tensor([0, LARGE // 2, LARGE - 1], device=DEVICE)
    assert calc_diff(d[rows], _values(_at(a, rows)) @ _values(b).T) < 1e-6


BOTH = pytest.mark.parametrize(
    ("groups", "rows", "n", "k"),
    [(2, LARGE // 2, 144, 128), (256, 128, 4096, 2176)],
    ids=["rows-and-result", "weights"],
)
"""Groups, rows of each, columns and channels."""


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
@BOTH
def test_contiguous(groups: int, rows: int, n: int, k: int, kind: str) -> None:
    rows = align(rows, 128)
    a, b = _rows(kind, groups * rows, k), _weights(kind, groups, n, k)
    layout = torch.arange(groups, dtype=torch.int32, device=DEVICE).repeat_interleave(rows)
    of_kind = f"m_grouped_{kind}_gemm_nt_contiguous"
    d = getattr(tk_gemm, of_kind)(a, b, None, layout)
    for group in (0, groups // 2, groups - 1):
        own = slice(group * rows, (group + 1) * rows)
        _check(d[own], _at(a, own), _at(b, group))


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
@BOTH
def test_masked(groups: int, rows: int, n: int, k: int, kind: str) -> None:
    a = _data(kind, groups, rows, k)
    if kind == "fp8":
        sf = torch.rand((groups, k // 128, align(rows, 4)), device=DEVICE) + 0.5
        a = (a, sf.mT[:, :rows])
    b = _weights(kind, groups, n, k)
    d = torch.full((groups, rows, n), 7.0, dtype=torch.bfloat16, device=DEVICE)
    masked_m = torch.full((groups,), rows, dtype=torch.int32, device=DEVICE)
    masked_m[-1] -= 1
    getattr(tk_gemm, f"m_grouped_{kind}_gemm_nt_masked")(a, b, d, masked_m, rows)
    for group in (0, (groups - 1) // 2):
        _check(d[group], _at(a, group), _at(b, group))
    count = int(masked_m[-1])
    _check(d[-1, :count], _at(_at(a, -1), slice(count)), _at(b, -1))
    assert (d[-1, count:] == 7.0).all()


@pytest.mark.parametrize(
    ("inner", "rows", "groups", "k"), [(128, LARGE // 2, 2, 128), (2048, 128, 256, 2176)], ids=["rows", "weights"]
)
def test_swiglu(inner: int, rows: int, groups: int, k: int) -> None:
    rows = align(rows, 128)
    (data, sf), (weights, weights_sf) = _rows("fp8", groups * rows, k), _weights("fp8", groups, 2 * inner, k)
    a, b = (data, sf.mul_(1e-4)), (weights, weights_sf)
    ends = torch.arange(1, groups + 1, dtype=torch.int32, device=DEVICE) * rows
    out, out_sf = tk_gemm.m_grouped_fp8_gemm_swiglu_nt_contiguous(a, b, ends, use_psum_layout=True)
    for group in (0, groups - 1):
        picked = torch.tensor([0, rows // 2, rows - 1], device=DEVICE) + group * rows
        sums = _values(_at(a, picked)) @ _values(_at(b, group)).T
        gate, up = sums.unflatten(1, (-1, 2, 128)).unbind(2)  # Columns of both alternate in runs of 128.
        exact = (torch.nn.functional.silu(gate) * up).flatten(1)
        assert calc_diff(dequantized((out[picked], out_sf[picked])), exact) < 1e-3


@pytest.mark.parametrize("form", ["bf16", "fp8", "flat"])
@pytest.mark.parametrize(
    ("m", "n", "ks"), [(8208, 144, [65536] * 4), (8192, 4112, [128] * 64)], ids=["operands", "result"]
)
def test_k_grouped(m: int, n: int, ks: list[int], form: str) -> None:
    total, firsts = sum(ks), [sum(ks[:group]) for group in range(len(ks))]
    if form == "bf16":
        a, b = _data("bf16", total, m), _data("bf16", total, n)
        d = tk_gemm.k_grouped_bf16_gemm_tn_contiguous(a, b, None, ks)
    else:
        sizes = (m, n)
        whole = [_data("fp8", rows, total) if form == "fp8" else _data("fp8", rows * total) for rows in sizes]
        factors = [torch.rand((total // 128, rows), device=DEVICE) + 0.5 for rows in sizes]
        pairs = [(data, sf if form == "fp8" else sf.t()) for data, sf in zip(whole, factors)]
        d = tk_gemm.k_grouped_fp8_gemm_nt_contiguous(*pairs, None, ks)
    for group in (0, len(ks) // 2, len(ks) - 1):
        first, last = firsts[group], firsts[group] + ks[group]
        if form == "bf16":
            _check(d[group], a[first:last].t(), b[first:last].t())
            continue
        own = []
        for rows, data, sf in zip(sizes, whole, factors):
            part = data[:, first:last] if form == "fp8" else data[rows * first : rows * last].view(rows, last - first)
            own.append((part, sf[first // 128 : last // 128].t()))
        picked = torch.tensor([0, m // 2, m - 1], device=DEVICE)
        assert calc_diff(d[group, picked], _values(_at(own[0], picked)) @ _values(own[1]).T) < 1e-6
