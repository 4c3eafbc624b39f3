"""transpose and batched_transpose."""

from typing import Any

import torch

import tk_quant
from tk_core.testing import Case, Make, OpSpec, tiers

from ..per_token.test_per_token_cast import BENCH


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """A tensor of random bits, which include NaN and infinity."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, device=device).to(torch.bool)
    info = torch.iinfo(words)
    return torch.randint(info.min, info.max + 1, shape, dtype=words, device=device).view(dtype)


def make(shape: tuple[int, ...], dtype: torch.dtype) -> Make:
    """A contiguous matrix or batch of matrices."""
    return lambda device: {"x": random_bits(shape, dtype, device)}


def make_strided(shape: tuple[int, ...], dtype: torch.dtype, extra_cols: int, first_col: int = 0) -> Make:
    """A view of a wider tensor: its rows have gaps of `extra_cols` columns and start at `first_col`."""

    def build(device: str) -> dict[str, Any]:
        wide = random_bits((*shape[:-1], shape[-1] + extra_cols), dtype, device)
        return {"x": wide[..., first_col : first_col + shape[-1]]}

    return build


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype in case names."""
    return str(dtype).removeprefix("torch.").replace("_", "-")


_ALL_DTYPES = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint8,
    torch.int8,
    torch.bool,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.int32,
)
_DTYPES = (torch.float8_e4m3fn, torch.bfloat16, torch.float32)
_SIZES = tuple((tokens, hidden) for hidden in (576, 2048, 4096, 7168) for tokens in (0, 16, 4000, 8000))

SPEC = OpSpec(
    op=tk_quant.transpose,
    cases=(
        *(
            Case(
                f"{name_of(dtype)}-48x80",
                make((48, 80), dtype),
                small=True,
                modes=dtype in _DTYPES[:2],
                compile=dtype == torch.bool,
            )
            for dtype in _ALL_DTYPES
        ),
        *(
            Case(f"{name_of(dtype)}-48x80-odd-rows", make_strided((48, 80), dtype, 7, 3), compile=True, small=True)
            for dtype in _DTYPES
        ),
        *(
            Case(f"{name_of(dtype)}-{rows}x{cols}", make((rows, cols), dtype), small=True)
            for dtype in _DTYPES
            for rows, cols in ((0, 64), (16, 16), (16, 4096), (1040, 16))
        ),
        # More tiles along the columns than a grid can have.
        Case("float32-16x4194256", make((16, 4194256), torch.float32)),
        Case("bfloat16-48x80-rows-on-8-bytes", make_strided((48, 80), torch.bfloat16, 4, 4), compile=True, small=True),
        Case("bfloat16-48x80-rows-on-4-bytes", make_strided((48, 80), torch.bfloat16, 2, 2), small=True),
        Case("float8-e4m3fn-48x80-rows-on-4-bytes", make_strided((48, 80), torch.float8_e4m3fn, 4, 4), small=True),
        Case("bfloat16-64x0", make((64, 0), torch.bfloat16), small=True),
        *(
            Case(f"{name_of(dtype)}-t{tokens}-h{hidden}", make((tokens, hidden), dtype))
            for dtype in _DTYPES
            for tokens, hidden in _SIZES
        ),
        *(
            Case(f"{name_of(dtype)}-t4000-h2048-half", make_strided((4000, 2048), dtype, 2048, 2048))
            for dtype in _DTYPES
        ),
        *(
            Case(
                f"{name_of(dtype)}-t{tokens}-h{hidden}-bench",
                make((tokens, hidden), dtype),
                compile=(tokens, hidden) == (8192, 7168),
                **BENCH,
                model_shape=(tokens, hidden) == (8192, 7168),
            )
            for dtype in _DTYPES
            for tokens, hidden in (
                (8192, 7168),
                *((8192, other) for other in (576, 2048, 2560, 3072, 4096, 6144)),
                *((other, 7168) for other in (16, 64, 4000)),
            )
        ),
    ),
)

BATCHED_SPEC = OpSpec(
    op=tk_quant.batched_transpose,
    cases=(
        *(
            Case(
                f"{name_of(dtype)}-3x48x80",
                make((3, 48, 80), dtype),
                compile=True,
                small=True,
                modes=dtype == torch.bfloat16,
            )
            for dtype in _DTYPES
        ),
        Case("bfloat16-3x48x80-odd-rows", make_strided((3, 48, 80), torch.bfloat16, 7, 3), small=True),
        Case("bfloat16-0x48x80", make((0, 48, 80), torch.bfloat16), small=True),
        Case("float8-e4m3fn-2x0x80", make((2, 0, 80), torch.float8_e4m3fn), small=True),
        Case("uint8-65537x16x16-more-than-a-grid", make((65537, 16, 16), torch.uint8)),
        *(
            Case(f"{name_of(dtype)}-4x{tokens}x{hidden}", make((4, tokens, hidden), dtype))
            for dtype in _DTYPES
            for tokens, hidden in _SIZES
        ),
        Case("bfloat16-32x2048x7168-bench", make((32, 2048, 7168), torch.bfloat16), **BENCH, model_shape=True),
    ),
)


test_tiers = tiers.tests(SPEC)
test_batched_tiers = tiers.tests(BATCHED_SPEC)


def test_by_hand() -> None:
    x = torch.arange(16 * 32, dtype=torch.int32).view(16, 32)
    out = tk_quant.transpose(x)
    assert out.shape == (32, 16)
    assert out.is_contiguous()
    assert all(out[n, m] == 32 * m + n for m in range(16) for n in range(32))


def test_batched_by_hand() -> None:
    x = torch.arange(2 * 16 * 16, dtype=torch.uint8).view(2, 16, 16)
    out = tk_quant.batched_transpose(x)
    assert all(out[b, n, m] == x[b, m, n] for b in range(2) for m in range(16) for n in range(16))


def bad_sizes(*leading: int) -> list[tuple[dict[str, Any], type[Exception], str]]:
    rows, cols = len(leading), len(leading) + 1
    return [
        ({"x": torch.zeros(*leading, 17, 16)}, ValueError, rf"x.shape\[{rows}\]: expected a multiple of 16, got 17"),
        ({"x": torch.zeros(*leading, 16, 8)}, ValueError, rf"x.shape\[{cols}\]: expected a multiple of 16, got 8"),
    ]


test_bad_input = tiers.bad_input(SPEC, {}, bad_sizes())
test_batched_bad_input = tiers.bad_input(BATCHED_SPEC, {}, bad_sizes(1))
