"""expand_to_fused and expand_to_fused_with_sf."""

from typing import Any

import pytest
import torch

import tk_moe
from tk_core import env
from tk_core.arch import ARCHS
from tk_core.testing import tiers
from tk_moe.lib.expand_to_fused_bulk_kernel import BulkConfig
from tk_moe.lib.expand_to_fused_kernel import ExpandConfig
from tk_moe.testing.expand.expand_to_fused import SPEC, WITH_SF_SPEC

test_cpu = tiers.cpu_tests(SPEC)
test_compile = tiers.compile_tests(SPEC)
test_gpu = tiers.gpu_tests(SPEC)
test_gpu_modes = tiers.gpu_mode_tests(SPEC)

test_with_sf_cpu = tiers.cpu_tests(WITH_SF_SPEC)
test_with_sf_compile = tiers.compile_tests(WITH_SF_SPEC)
test_with_sf_gpu = tiers.gpu_tests(WITH_SF_SPEC)
test_with_sf_gpu_modes = tiers.gpu_mode_tests(WITH_SF_SPEC)

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


def expand_arguments(**changes: Any) -> dict[str, Any]:
    """Good arguments of expand_to_fused, some of them exchanged."""
    good = {"x": torch.ones(3, 4), "token_topk_to_pos": TOKEN_TOPK_TO_POS, "pos_to_expert": POS_TO_EXPERT}
    return {**good, **changes}


@pytest.mark.parametrize(
    ("error", "changes"),
    [
        (TypeError, {"x": [1.0]}),
        (TypeError, {"x": torch.ones(3, 4, dtype=torch.float64)}),
        (TypeError, {"x": torch.ones(3, 4, dtype=torch.complex64)}),
        (ValueError, {"x": torch.ones(3)}),
        (ValueError, {"x": torch.ones(3, 8)[:, :4]}),
        (ValueError, {"x": torch.ones(4, 3).t()}),
        (TypeError, {"token_topk_to_pos": TOKEN_TOPK_TO_POS.long()}),
        (TypeError, {"token_topk_to_pos": None}),
        (ValueError, {"token_topk_to_pos": TOKEN_TOPK_TO_POS[:2]}),
        (ValueError, {"token_topk_to_pos": TOKEN_TOPK_TO_POS[:, 0]}),
        (ValueError, {"token_topk_to_pos": TOKEN_TOPK_TO_POS[:, :0]}),
        (ValueError, {"token_topk_to_pos": TOKEN_TOPK_TO_POS[:, :1]}),
        (ValueError, {"token_topk_to_pos": TOKEN_TOPK_TO_POS.to("meta")}),
        (TypeError, {"pos_to_expert": POS_TO_EXPERT.float()}),
        (ValueError, {"pos_to_expert": POS_TO_EXPERT[None]}),
        (ValueError, {"pos_to_expert": POS_TO_EXPERT[::2]}),
        (ValueError, {"pos_to_expert": POS_TO_EXPERT.to("meta")}),
    ],
)
def test_bad_input(error: type[Exception], changes: dict[str, Any]) -> None:
    with pytest.raises(error, match=next(iter(changes))):
        tk_moe.expand_to_fused(**expand_arguments(**changes))


DATA = torch.ones(3, 256).to(torch.float8_e4m3fn)


def expand_with_sf_arguments(**changes: Any) -> dict[str, Any]:
    """Good arguments of expand_to_fused_with_sf, some of them exchanged."""
    good = {
        "x": (DATA, torch.ones(3, 2)),
        "num_per_channels": 128,
        "token_topk_to_pos": TOKEN_TOPK_TO_POS,
        "pos_to_expert": POS_TO_EXPERT,
    }
    return {**good, **changes}


@pytest.mark.parametrize(
    ("error", "name", "changes"),
    [
        (TypeError, "x", {"x": DATA}),
        (TypeError, "x", {"x": (DATA, torch.ones(3, 2), None)}),
        (TypeError, r"x\[0\]", {"x": (torch.ones(3, 256), torch.ones(3, 2))}),
        (ValueError, r"x\[0\]", {"x": (DATA[0], torch.ones(3, 2))}),
        (ValueError, r"x\[0\]", {"x": (DATA[:, ::2], torch.ones(3, 1))}),
        (TypeError, r"x\[1\]", {"x": (DATA, torch.ones(3, 2).bfloat16())}),
        (TypeError, r"x\[1\]", {"x": (DATA, None)}),
        (ValueError, r"x\[1\]", {"x": (DATA, torch.ones(3, 3))}),
        (ValueError, r"x\[1\]", {"x": (DATA, torch.ones(3, 2, dtype=torch.int32))}),
        (ValueError, r"x\[1\]", {"x": (DATA, torch.ones(2, 3).t())}),
        (ValueError, r"x\[1\]", {"x": (DATA, torch.ones(3, 2, device="meta"))}),
        (ValueError, "use_tma_aligned_col_major_sf", {"x": (DATA, torch.ones(3, 1, dtype=torch.int32))}),
        (ValueError, "num_per_channels", {"num_per_channels": 64}),
        (ValueError, "token_topk_to_pos", {"token_topk_to_pos": TOKEN_TOPK_TO_POS[:2]}),
        (TypeError, "pos_to_expert", {"pos_to_expert": POS_TO_EXPERT.long()}),
    ],
)
def test_with_sf_bad_input(error: type[Exception], name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(error, match=name):
        tk_moe.expand_to_fused_with_sf(**expand_with_sf_arguments(**changes))


def test_debug_mode_finds_maps_that_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "debug", lambda: True)
    tk_moe.expand_to_fused(**expand_arguments())
    tk_moe.expand_to_fused_with_sf(**expand_with_sf_arguments())
    for wrong in ([[0, 4], [2, -1], [-7, 7]], [[0, 4], [2, -1], [-7, 2]], [[0, 4], [2, 3], [-7, 1]]):
        pos = torch.tensor(wrong, dtype=torch.int32)
        with pytest.raises(ValueError, match="token_topk_to_pos"):
            tk_moe.expand_to_fused(**expand_arguments(token_topk_to_pos=pos))
        with pytest.raises(ValueError, match="token_topk_to_pos"):
            tk_moe.expand_to_fused_with_sf(**expand_with_sf_arguments(token_topk_to_pos=pos))


@pytest.mark.parametrize("has_sf", [False, True])
@pytest.mark.parametrize("num_vectors", [1, 31, 32, 33, 72, 256, 257, 320, 448, 896, 1024, 1025, 1792, 7167, 28672])
def test_config_covers_a_row_with_little_waste(num_vectors: int, has_sf: bool) -> None:
    config = ExpandConfig.best(num_vectors, has_sf, None)
    per_chunk = config.threads * config.vectors_per_thread
    assert config.threads % 32 == 0
    assert 32 <= config.threads <= 256
    assert 1 <= config.vectors_per_thread <= 4
    num_chunks = -(-num_vectors // per_chunk)
    assert num_chunks * per_chunk - num_vectors <= 32 * config.vectors_per_thread * num_chunks


@pytest.mark.parametrize("row_bytes", [4096, 5120, 5152, 6144, 7168, 8192, 12288, 14336, 32768, 131072])
def test_bulk_config_divides_a_row_and_leaves_room_for_all_blocks(row_bytes: int) -> None:
    arch = ARCHS["sm_90a"]
    config = BulkConfig.best(row_bytes, arch)
    piece_bytes = row_bytes // config.pieces_per_row
    assert piece_bytes * config.pieces_per_row == row_bytes
    assert piece_bytes % 16 == 0
    assert 2048 <= piece_bytes <= 4096
    assert 1 <= config.stages <= 32
    assert config.blocks_per_sm * (config.stages * piece_bytes + 128 + 1024) <= arch.max_shared_memory + 1024


@pytest.mark.parametrize(
    ("row_bytes", "arch"), [(4096, "sm_80"), (4096, "sm_120a"), (4080, "sm_90a"), (4112, "sm_90a")]
)
def test_bulk_config_is_none_where_it_does_not_pay(row_bytes: int, arch: str) -> None:
    assert BulkConfig.best(row_bytes, ARCHS[arch]) is None


@pytest.mark.parametrize("num_sms", [1, 16, 132, 148])
@pytest.mark.parametrize("num_tokens", [1024, 2303, 4001, 4096, 65537])
def test_bulk_config_deals_out_every_piece(num_tokens: int, num_sms: int) -> None:
    config = BulkConfig(4, 21)
    num_blocks, pieces_per_block = config.split(num_tokens, num_sms)
    assert 1 <= pieces_per_block <= config.stages
    # Every block has a piece, and only the last round of pieces may be incomplete.
    assert num_blocks <= num_tokens * 4 <= num_blocks * pieces_per_block
    assert num_tokens * 4 > num_blocks * (pieces_per_block - 1)
