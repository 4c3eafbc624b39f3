"""expand_to_fused and expand_to_fused_with_sf."""

from typing import Any

import pytest
import torch

import tk_moe
from tk_core.math import align, ceil_div
from tk_core.testing import Case, Make, OpSpec, bench_case, tiers

from ..models import benches, name_of

_MODEL_EXPERTS = 256
_MODEL_ALIGNMENT = 16


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """A tensor of random bits, which include NaN and infinity."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, device=device).to(torch.bool)
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    info = torch.iinfo(words)
    return torch.randint(info.min, info.max + 1, shape, dtype=words, device=device).view(dtype)


def model_rows(num_tokens: int, num_topk: int) -> int:
    """About the number of rows for segments aligned to 16, if 256 experts share the tokens evenly."""
    return align(num_tokens * num_topk + _MODEL_EXPERTS * _MODEL_ALIGNMENT // 2, 128)


def make_maps(
    num_tokens: int,
    num_topk: int,
    num_rows: int | None,
    device: str,
    *,
    num_experts: int = _MODEL_EXPERTS,
    alignment: int = _MODEL_ALIGNMENT,
    share_without_position: float = 0.0,
    drop_what_does_not_fit: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`token_topk_to_pos` and `pos_to_expert` of random routing, as `get_fused_mapping` returns them.

    `share_without_position` of the (token, slot) pairs, and if it is not 0 every fifth token, go to no expert. Pairs
    that do not fit into `num_rows`, by default `model_rows`, have no position either, unless `drop_what_does_not_fit`
    is False.
    """
    num_rows = model_rows(num_tokens, num_topk) if num_rows is None else num_rows
    if device == "meta":
        return (
            torch.empty((num_tokens, num_topk), dtype=torch.int32, device=device),
            torch.empty((num_rows,), dtype=torch.int32, device=device),
        )
    if num_experts >= num_topk:
        experts = torch.rand((num_tokens, num_experts), device=device).topk(num_topk).indices
    else:
        experts = torch.randint(num_experts, (num_tokens, num_topk), device=device)
    if share_without_position:
        experts[torch.rand((num_tokens, num_topk), device=device) < share_without_position] = num_experts
        experts[::5] = num_experts
    experts = experts.flatten()
    counts = torch.bincount(experts, minlength=num_experts + 1)
    sizes = (counts + alignment - 1) // alignment * alignment
    order = torch.argsort(experts, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.numel(), device=device) - (counts.cumsum(0) - counts)[experts[order]]
    pos = (sizes.cumsum(0) - sizes)[experts] + rank
    pos[experts == num_experts] = -1
    inside = (pos >= 0) & (pos < num_rows)
    pos_to_expert = torch.full((num_rows,), -1, dtype=torch.int32, device=device)
    pos_to_expert[pos[inside]] = experts[inside].int()
    if drop_what_does_not_fit:
        pos[~inside] = -1
    return pos.int().view(num_tokens, num_topk), pos_to_expert


def make(
    num_tokens: int,
    hidden: int,
    num_topk: int,
    dtype: torch.dtype = torch.bfloat16,
    num_rows: int | None = None,
    **routing: Any,
) -> Make:
    """Inputs of expand_to_fused."""

    def build(device: str) -> dict[str, Any]:
        x = random_bits((num_tokens, hidden), dtype, device)
        token_topk_to_pos, pos_to_expert = make_maps(num_tokens, num_topk, num_rows, device, **routing)
        return {"x": x, "token_topk_to_pos": token_topk_to_pos, "pos_to_expert": pos_to_expert}

    return build


def make_with_sf(
    num_tokens: int,
    hidden: int,
    num_topk: int,
    num_per_channels: int,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    packed: bool = False,
    col_major: bool = False,
    num_rows: int | None = None,
    **routing: Any,
) -> Make:
    """Inputs of expand_to_fused_with_sf with `hidden` values per token."""

    def build(device: str) -> dict[str, Any]:
        num_sf = ceil_div(hidden, num_per_channels)
        data = random_bits((num_tokens, hidden if dtype == torch.float8_e4m3fn else hidden // 2), dtype, device)
        if packed:
            sf = random_bits((num_tokens, ceil_div(num_sf, 4)), torch.int32, device)
        else:
            sf = random_bits((num_tokens, num_sf), torch.float32, device)
        token_topk_to_pos, pos_to_expert = make_maps(num_tokens, num_topk, num_rows, device, **routing)
        return {
            "x": (data, sf),
            "num_per_channels": num_per_channels,
            "token_topk_to_pos": token_topk_to_pos,
            "pos_to_expert": pos_to_expert,
            "use_tma_aligned_col_major_sf": col_major,
        }

    return build


_SMALL_ROUTING = {"num_experts": 4, "alignment": 4, "share_without_position": 0.2}
_DTYPES = (
    *(torch.float16, torch.float32, torch.int32, torch.int16, torch.uint16, torch.int8, torch.uint8, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
)
# Output rows of the large cases stay below 1 GB.
_TOPK_OF_HIDDEN = {576: 9, 2048: 8, 4096: 6, 7168: 8}
_BENCH_HIDDEN = (576, 2048, 2560, 3072, 4096, 6144, 7168)

SPEC = OpSpec(
    op=tk_moe.expand_to_fused,
    cases=(
        # Vectors of 16, 8, 4, 2 bytes and 1; several chunks of columns.
        Case("bf16-h64-t7", make(7, 64, 3, num_rows=40, **_SMALL_ROUTING), small=True, modes=True, compile=True),
        Case("bf16-h65-t7", make(7, 65, 3, num_rows=40, **_SMALL_ROUTING), small=True, compile=True),
        Case("bf16-h66-t7", make(7, 66, 3, num_rows=40, **_SMALL_ROUTING), small=True),
        Case("bf16-h68-t7", make(7, 68, 3, num_rows=40, **_SMALL_ROUTING), small=True),
        Case("int8-h67-t7", make(7, 67, 3, torch.int8, num_rows=40, **_SMALL_ROUTING), small=True, compile=True),
        Case("bf16-h1-t7", make(7, 1, 3, num_rows=40, **_SMALL_ROUTING), small=True),
        Case("float32-h4100-t3", make(3, 4100, 2, torch.float32, num_rows=12, **_SMALL_ROUTING), compile=True),
        Case("uint8-h5001-t3", make(3, 5001, 2, torch.uint8, num_rows=12, **_SMALL_ROUTING)),
        # Bulk copies, slots that divide 32 or not; rows that no piece divides, and rows not aligned to 16 bytes.
        Case(
            "bf16-h2560-t1025-bulk",
            make(1025, 2560, 3, num_rows=1800, drop_what_does_not_fit=False, **_SMALL_ROUTING),
            small=True,
            modes=True,
            compile=True,
        ),
        Case(
            "uint8-h4096-t1500-k1-bulk", make(1500, 4096, 1, torch.uint8, num_rows=1300, **_SMALL_ROUTING), small=True
        ),
        Case("float32-h2048-t1100-k5-bulk", make(1100, 2048, 5, torch.float32, num_experts=32), compile=True),
        Case("bf16-h4112-t1024", make(1024, 4112, 2)),
        # Nothing to copy, nothing to write, more rows than needed, fewer.
        Case("bf16-h64-t0", make(0, 64, 3, num_rows=40, **_SMALL_ROUTING), small=True),
        Case("bf16-h64-t7-no-rows", make(7, 64, 3, num_rows=0, **_SMALL_ROUTING), small=True),
        Case("bf16-h0-t7", make(7, 0, 3, num_rows=40, **_SMALL_ROUTING), small=True),
        Case("bf16-h64-t1-one-row", make(1, 64, 1, num_rows=1, num_experts=1, alignment=1), small=True),
        Case("bf16-h64-t3-mostly-padding", make(3, 64, 2, num_rows=600, **_SMALL_ROUTING), small=True),
        Case("bf16-h64-t40-few-rows", make(40, 64, 1, num_rows=5, **_SMALL_ROUTING), small=True),
        Case(
            "bf16-h64-t40-past-the-end",
            make(40, 64, 3, num_rows=30, drop_what_does_not_fit=False, **_SMALL_ROUTING),
            small=True,
        ),
        Case("bf16-h576-t67-no-position", make(67, 576, 4, num_rows=256, share_without_position=1.0)),
        Case("bf16-h576-t67-one-expert", make(67, 576, 4, num_rows=300, num_experts=1)),
        Case("bf16-h7168-t1-all-rows-of-256-experts", make(1, 7168, 8, num_rows=32640, alignment=128)),
        *(Case(f"{name_of(dtype)}-h576-t67-k3", make(67, 576, 3, dtype)) for dtype in _DTYPES),
        *(Case(f"bf16-h576-t131-k{k}", make(131, 576, k, share_without_position=0.1)) for k in (1, 2, 3, 4, 5, 7)),
        *(
            Case(f"bf16-h{hidden}-t{num_tokens}", make(num_tokens, hidden, num_topk))
            for hidden, num_topk in _TOPK_OF_HIDDEN.items()
            for num_tokens in ((0, 1, 4001, 8001) if hidden < 7168 else (0, 1, 4001))
        ),
        Case("bf16-h7168-t8001-k4", make(8001, 7168, 4)),
        # The kernel for few tokens; the bench case below has the other one.
        Case("bf16-h7168-t64", make(64, 7168, 8), model_shape=True),
        Case("float8-e4m3fn-h2560-t4001", make(4001, 2560, 8, torch.float8_e4m3fn)),
        Case("bf16-h2560-t4001", make(4001, 2560, 8)),
        # 552 MB: 32768 rows of tokens and 1664 of padding, in the segments and after the last one.
        bench_case(
            "bf16-h7168-t4096",
            make(4096, 7168, 8, num_rows=34432, num_experts=32, alignment=64),
            model_shape=True,
            compile=True,
        ),
        *benches("bf16-h{}-t4096", lambda h: make(4096, h, 8), _BENCH_HIDDEN[:-1]),
        *benches("bf16-h7168-t{}", lambda t: make(t, 7168, 8), (1, 64, 4001, 8001)),
    ),
)


def _small_with_sf(
    name: str,
    hidden: int,
    num_per_channels: int,
    num_tokens: int = 7,
    num_topk: int = 3,
    num_rows: int = 41,
    *,
    small: bool = True,
    modes: bool = False,
    compile: bool = False,
    **options: Any,
) -> Case:
    sizes = num_tokens, hidden, num_topk, num_per_channels
    made = make_with_sf(*sizes, num_rows=num_rows, **_SMALL_ROUTING, **options)
    return Case(name, made, small=small, modes=modes, compile=compile)


WITH_SF_SPEC = OpSpec(
    op=tk_moe.expand_to_fused_with_sf,
    cases=(
        _small_with_sf("e4m3-h256-t7", 256, 128, modes=True, compile=True),
        _small_with_sf("e4m3-h256-t7-col-major", 256, 32, col_major=True, modes=True, compile=True),
        _small_with_sf("e4m3-h256-t7-packed", 256, 32, packed=True, col_major=True, compile=True),
        _small_with_sf("e4m3-h256-t7-packed-row-major", 256, 32, packed=True, compile=True),
        _small_with_sf("e4m3-h4096-t7-packed-row-major", 4096, 32, packed=True),
        _small_with_sf("e2m1-h256-t7-packed", 256, 32, dtype=torch.int8, packed=True, col_major=True, compile=True),
        _small_with_sf("e2m1-h256-t7", 256, 128, dtype=torch.int8),
        # Scale factors gathered by a second launch: whole tiles or not, without tokens, many rows.
        _small_with_sf("e4m3-h512-t7-gathered", 512, 32, 7, 4, 75, col_major=True, modes=True, compile=True),
        _small_with_sf(
            *("e2m1-h1200-t40-packed-gathered", 1200, 32, 40, 3, 110),
            dtype=torch.int8,
            packed=True,
            col_major=True,
            drop_what_does_not_fit=False,
            compile=True,
        ),
        _small_with_sf("e4m3-h300-t0-gathered", 300, 32, 0, col_major=True, small=False),
        Case("e4m3-h288-t35000-gathered", make_with_sf(35000, 288, 8, 32, col_major=True)),
        # Partial blocks, one column of factors, one row, columns that are not whole vectors, more factors
        # than threads.
        _small_with_sf("e4m3-h200-t7", 200, 128),
        _small_with_sf("e4m3-h128-t7-col-major", 128, 128, col_major=True, small=False),
        Case(
            "e4m3-h128-t1-one-row", make_with_sf(1, 128, 1, 128, col_major=True, num_rows=1, num_experts=1), small=True
        ),
        _small_with_sf("e4m3-h131-t7", 131, 32, col_major=True),
        _small_with_sf("e4m3-h16384-t7", 16384, 32, col_major=True, small=False),
        _small_with_sf("e4m3-h16384-t7-row-major", 16384, 32, small=False),
        _small_with_sf("e4m3-h256-t0", 256, 128, 0, col_major=True),
        _small_with_sf("e4m3-h256-t7-no-rows", 256, 128, num_rows=0, col_major=True),
        _small_with_sf("e4m3-h256-t40-past-the-end", 256, 128, 40, num_rows=30, drop_what_does_not_fit=False),
        *(
            Case(f"e4m3-h{hidden}-t{num_tokens}", make_with_sf(num_tokens, hidden, 8, 128, col_major=True))
            for hidden in (576, 2048, 4096, 7168)
            for num_tokens in (0, 1, 4001, 8001)
        ),
        Case("e4m3-h7168-t4001-row-major", make_with_sf(4001, 7168, 8, 128)),
        Case("e4m3-h7168-t4001-packed", make_with_sf(4001, 7168, 8, 128, packed=True, col_major=True)),
        Case("e2m1-h7168-t4001-packed", make_with_sf(4001, 7168, 8, 32, dtype=torch.int8, packed=True, col_major=True)),
        Case("e4m3-h2560-t4001-packed", make_with_sf(4001, 2560, 8, 32, packed=True, col_major=True)),
        *benches("e4m3-h7168-t{}-row-major", lambda t: make_with_sf(t, 7168, 8, 128), (4096,)),
        *benches(
            "e4m3-h7168-t{}-packed",
            lambda t: make_with_sf(t, 7168, 8, 128, packed=True, col_major=True),
            (4096,),
            models=(4096,),
        ),
        *benches(
            "e4m3-h{}-t4096", lambda h: make_with_sf(4096, h, 8, 128, col_major=True), _BENCH_HIDDEN, models=(7168,)
        ),
        *benches("e4m3-h7168-t{}", lambda t: make_with_sf(t, 7168, 8, 128, col_major=True), (1, 64, 4001, 8001)),
    ),
)


test_tiers = tiers.tests(SPEC)

test_with_sf_tiers = tiers.tests(WITH_SF_SPEC)

# Experts 0 and 2 of three, segments of a multiple of 2 rows, one row after the last: token 0 goes to both.
TOKEN_TOPK_TO_POS = torch.tensor([[0, 4], [2, -1], [-7, 1]], dtype=torch.int32)
POS_TO_EXPERT = torch.tensor([0, 0, 0, -1, 2, -3, -1], dtype=torch.int32)
EXPANDED_TOKENS = [0, 2, 1, None, 0, None, None]


def test_rows_by_hand() -> None:
    x = torch.arange(1, 13, dtype=torch.float32).view(3, 4)
    out = tk_moe.expand_to_fused(x, TOKEN_TOPK_TO_POS, POS_TO_EXPERT)
    expected = [[0.0] * 4 if token is None else x[token].tolist() for token in EXPANDED_TOKENS]
    assert out.tolist() == expected


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.int8, torch.uint16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2],
)
def test_every_dtype_keeps_its_bits(dtype: torch.dtype) -> None:
    x = torch.tensor([[0, 1], [1, 0], [1, 1]]).to(dtype)
    out = tk_moe.expand_to_fused(x, TOKEN_TOPK_TO_POS, POS_TO_EXPERT)
    assert out.dtype == dtype
    expected = [[0, 0] if token is None else x[token].float().tolist() for token in EXPANDED_TOKENS]
    assert out.float().tolist() == expected


def test_nan_payload_and_negative_zero_survive() -> None:
    bits = torch.tensor([[0x7FC00001, -(2**31)]], dtype=torch.int32)
    pos = torch.tensor([[1]], dtype=torch.int32)
    out = tk_moe.expand_to_fused(bits.view(torch.float32), pos, torch.tensor([-1, 0], dtype=torch.int32))
    assert out.view(torch.int32).tolist() == [[0, 0], bits[0].tolist()]


@pytest.mark.parametrize("col_major", [False, True])
def test_scale_factors_by_hand(col_major: bool) -> None:
    data = torch.arange(3 * 256).view(3, 256).remainder(100).to(torch.float8_e4m3fn)
    sf = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    out, out_sf = tk_moe.expand_to_fused_with_sf((data, sf), 128, TOKEN_TOPK_TO_POS, POS_TO_EXPERT, col_major)
    assert out_sf.tolist() == [[0.0, 0.0] if token is None else sf[token].tolist() for token in EXPANDED_TOKENS]
    assert out_sf.stride() == ((1, 8) if col_major else (2, 1))
    assert torch.equal(out.float(), tk_moe.expand_to_fused(data.float(), TOKEN_TOPK_TO_POS, POS_TO_EXPERT))


def test_packed_scale_factors_of_fp4() -> None:
    data = torch.arange(3 * 128).view(3, 128).to(torch.int8)
    sf = torch.tensor([[0x7F808182, 0x01], [0x11223344, -1], [5, 6]], dtype=torch.int32)
    out, out_sf = tk_moe.expand_to_fused_with_sf((data, sf[:, :2]), 32, TOKEN_TOPK_TO_POS, POS_TO_EXPERT, True)
    assert out.shape == (7, 128)
    assert out_sf.tolist() == [[0, 0] if token is None else sf[token].tolist() for token in EXPANDED_TOKENS]
    assert out_sf.dtype == torch.int32
    assert out_sf.stride() == (1, 8)


def test_positions_past_the_end_are_ignored() -> None:
    x = torch.ones(2, 3)
    pos = torch.tensor([[0, 2], [1, 2**31 - 1]], dtype=torch.int32)
    out = tk_moe.expand_to_fused(x, pos, torch.tensor([0, 0], dtype=torch.int32))
    assert out.tolist() == [[1.0] * 3] * 2


def test_no_tokens_gives_zeros_and_no_rows_gives_none() -> None:
    pos = torch.empty((0, 2), dtype=torch.int32)
    assert tk_moe.expand_to_fused(torch.empty(0, 3), pos, POS_TO_EXPERT).tolist() == [[0.0] * 3] * 7
    nowhere = torch.full((2, 2), -1, dtype=torch.int32)
    assert tk_moe.expand_to_fused(torch.ones(2, 3), nowhere, POS_TO_EXPERT[:0]).shape == (0, 3)


EXPAND = {"x": torch.ones(3, 4), "token_topk_to_pos": TOKEN_TOPK_TO_POS, "pos_to_expert": POS_TO_EXPERT}

test_bad_input = tiers.bad_input(
    SPEC,
    EXPAND,
    [
        ({"token_topk_to_pos": TOKEN_TOPK_TO_POS[:2]}, ValueError, "token_topk_to_pos"),
        ({"token_topk_to_pos": TOKEN_TOPK_TO_POS[:, :0]}, ValueError, "token_topk_to_pos"),
    ],
)

DATA = torch.ones(3, 256).to(torch.float8_e4m3fn)

test_with_sf_bad_input = tiers.bad_input(
    WITH_SF_SPEC,
    EXPAND | {"x": (DATA, torch.ones(3, 2)), "num_per_channels": 128},
    [
        ({"x": DATA}, TypeError, "x"),
        ({"x": (DATA, torch.ones(3, 2), None)}, TypeError, "x"),
        ({"x": (DATA, torch.ones(3, 3))}, ValueError, r"x\[1\]"),
        ({"x": (DATA, torch.ones(3, 2, dtype=torch.int32))}, ValueError, r"x\[1\]"),
        ({"num_per_channels": 64}, ValueError, "num_per_channels"),
        ({"token_topk_to_pos": TOKEN_TOPK_TO_POS[:2]}, ValueError, "token_topk_to_pos"),
    ],
)
