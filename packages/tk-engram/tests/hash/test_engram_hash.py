"""engram_hash."""

from typing import Any

import pytest
import torch

import tk_engram
from tk_core import env
from tk_core.testing import Case, Make, OpSpec, assert_equal, bench_case, empty, tiers
from tk_engram import reference

# Sizes of tables with the largest and smallest quotients and remainders.
_EXTREME_SIZES = (1, 2, 3, 2**16 - 1, 2**16 + 1, 2**30, 2**30 + 1, 2**31 - 1)


def make(
    num_tokens: int,
    num_layers: int = 2,
    max_ngram: int = 3,
    num_heads: int = 8,
    *,
    values: str = "model",
    masked: bool = False,
    first_element: int = 0,
) -> Make:
    """Ids of a vocabulary, multipliers as a layout has them, tables of some 650,000 rows; with `values` "wide" all ids,
    all multipliers and sizes of all magnitudes.

    Tensors start at element `first_element` of their storage.
    """

    def build(device: str) -> dict[str, Any]:
        def integers(low: int, high: int, shape: tuple[int, ...], dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return empty(*shape, dtype=dtype, device=device, first_element=first_element).random_(low, high)

        columns = (num_layers, (max_ngram - 1) * num_heads)
        if values == "wide":
            ids = integers(-(2**31), 2**31 - 1, (num_tokens, max_ngram))
            ids[::3, -1] = 0
            multipliers = integers(-(2**63), 2**63 - 1, (num_layers, max_ngram), torch.int64)
            sizes = integers(1, 2**31 - 1, columns)
            extremes = torch.tensor(_EXTREME_SIZES, dtype=torch.int32, device=device)[: columns[1]]
            sizes[0, : len(extremes)] = extremes
            offsets = torch.zeros_like(sizes)
        else:
            ids = integers(0, 129280, (num_tokens, max_ngram))
            multipliers = integers(0, (2**63 - 1) // 129280 // 2, (num_layers, max_ngram), torch.int64).mul_(2).add_(1)
            sizes = integers(646400, 650000, columns)
            offsets = integers(0, 2**30, columns).copy_(reference.make_offsets(sizes[:, None]))
        mask = torch.rand(num_tokens, device=device) < 0.3 if masked else None
        return {
            "ngram_token_ids": ids,
            "multipliers": multipliers,
            "vocab_sizes": sizes.view(num_layers, max_ngram - 1, num_heads),
            "offsets": offsets,
            "image_token_mask": mask,
        }

    return build


SPEC = OpSpec(
    op=tk_engram.engram_hash,
    cases=(
        # Blocks of whole warps, and (l2-n4-m7, l1-n6-m17) of 252 and 255 threads.
        Case("l2-n3-m8-t65", make(65), small=True, modes=True),
        Case("l2-n3-m8-t33-mask", make(33, masked=True), small=True, modes=True),
        Case("l1-n2-m1-t300", make(300, 1, 2, 1), small=True),
        Case("l3-n3-m1-t9", make(9, 3, 3, 1), small=True),
        Case("l2-n4-m7-t40-wide-mask", make(40, 2, 4, 7, values="wide", masked=True), small=True, compile=True),
        Case("l1-n6-m17-t3", make(3, 1, 6, 17), small=True),
        Case("l2-n3-m8-t65-wide", make(65, values="wide"), small=True),
        Case("l2-n3-m8-t17-unaligned", make(17, first_element=1), small=True),
        Case("l2-n3-m8-t1", make(1), small=True),
        Case("l2-n3-m8-t0", make(0), small=True),
        Case("l3-n4-m8-t0-mask", make(0, 3, 4, masked=True), small=True),
        *(Case(f"l3-n4-m8-t{num_tokens}", make(num_tokens, 3, 4)) for num_tokens in (1, 17, 4001)),
        *(Case(f"l2-n3-m8-t{num_tokens}-mask", make(num_tokens, masked=True)) for num_tokens in (64, 8001)),
        Case("l4-n5-m16-t4001-wide", make(4001, 4, 5, 16, values="wide")),
        Case("l2-n3-m9-t4001-wide", make(4001, 2, 3, 9, values="wide")),
        Case("l30-n3-m64-t257", make(257, 30, 3, 64)),
        Case("l2-n16-m64-t129", make(129, 2, 16, 64)),
        bench_case("l2-n3-m8-t8192", make(8192), model_shape=True),
        bench_case("l3-n4-m8-t8192", make(8192, 3, 4), model_shape=True, compile=True),
        *(bench_case(f"l2-n3-m8-t{num_tokens}", make(num_tokens)) for num_tokens in (1, 64, 4001, 8001, 65536)),
        bench_case("l3-n4-m8-t65536", make(65536, 3, 4)),
    ),
)


test_tiers = tiers.tests(SPEC)


def hash_one(
    ids: list[int], multipliers: list[int], sizes: list[list[int]], offsets: list[int], device: str
) -> list[int]:
    """All columns of one token in one layer."""
    out = tk_engram.engram_hash(
        torch.tensor([ids], dtype=torch.int32, device=device),
        torch.tensor([multipliers], device=device),
        torch.tensor([sizes], dtype=torch.int32, device=device),
        torch.tensor([offsets], dtype=torch.int32, device=device),
    )
    assert out.shape == (1, 1, len(offsets))
    assert out.dtype == torch.int32
    return out.flatten().tolist()


def test_by_hand(device: str) -> None:
    # 3·5 = 15, 4·7 = 28, 15 xor 28 = 0b01111 xor 0b11100 = 19; 2·9 = 18, 19 xor 18 = 1.
    assert hash_one([3, 4, 2], [5, 7, 9], [[10, 7], [2, 3]], [0, 100, 200, 300], device) == [9, 105, 201, 301]


def test_negative_hashes_round_down(device: str) -> None:
    # -1 xor 0 = -1, and -1 mod v is v - 1; -7 xor 0 = -7.
    assert hash_one([-1, 0], [1, 3], [[10, 1, 2**31 - 1]], [0, 5, 0], device) == [9, 5, 2**31 - 2]
    assert hash_one([-7, 0], [1, 3], [[5, 7, 100]], [1, 1, 1], device) == [4, 1, 94]


def test_products_wrap(device: str) -> None:
    # 4 · 2⁶² = 2⁶⁴, which is 0; 3 · 2⁶² = 2⁶³ + 2⁶², which is -2⁶². -2³¹ · 2³² = -2⁶³, the least of all.
    assert hash_one([4, 0], [2**62, 1], [[10]], [0], device) == [0]
    assert hash_one([3, 0], [2**62, 1], [[10, 3]], [0, 0], device) == [-(2**62) % 10, -(2**62) % 3]
    assert hash_one([-(2**31), 0], [2**32, 1], [[7, 1000]], [0, 0], device) == [-(2**63) % 7, -(2**63) % 1000]
    # An id is extended with its sign: -1 · (2⁶³ - 1) = 1 - 2⁶³.
    assert hash_one([-1, 0], [2**63 - 1, 1], [[1000003]], [0], device) == [(1 - 2**63) % 1000003]


@pytest.mark.parametrize(
    ("max_ngram", "num_heads", "values"), [(2, 1, "wide"), (3, 8, "model"), (4, 5, "wide"), (7, 16, "wide")]
)
def test_against_integers_without_bounds(max_ngram: int, num_heads: int, values: str, device: str) -> None:
    inputs = make(9, 3, max_ngram, num_heads, values=values)(device)
    ids, multipliers, sizes, offsets = (
        inputs[name].tolist() for name in ("ngram_token_ids", "multipliers", "vocab_sizes", "offsets")
    )
    expected = []
    for layer in range(3):
        for token in range(9):
            total = 0
            for n in range(max_ngram):
                total ^= (ids[token][n] * multipliers[layer][n] + 2**63) % 2**64 - 2**63
                for m in range(num_heads if n else 0):
                    row = total % sizes[layer][n - 1][m]
                    assert 0 <= row < sizes[layer][n - 1][m]
                    expected.append(row + offsets[layer][(n - 1) * num_heads + m])
    assert tk_engram.engram_hash(**inputs).flatten().tolist() == expected


def test_image_tokens_have_no_rows(device: str) -> None:
    inputs = make(65, 3, 4, masked=True)(device)
    mask = inputs.pop("image_token_mask")
    assert mask.any()
    assert not mask.all()
    plain = tk_engram.engram_hash(**inputs)
    out = tk_engram.engram_hash(**inputs, image_token_mask=mask)
    assert (out[:, mask] == -1).all()
    assert torch.equal(out[:, ~mask], plain[:, ~mask])
    assert (plain >= 0).all()


def test_make_offsets() -> None:
    sizes = torch.tensor([[[5, 7], [11, 13]], [[2, 3], [1, 4]]], dtype=torch.int32)
    expected = torch.tensor([[0, 5, 12, 23], [0, 2, 5, 6]], dtype=torch.int32)
    assert_equal(reference.make_offsets(sizes), expected)
    assert "make_offsets" not in reference.__all__


GOOD: dict[str, Any] = make(5)("cpu")
IDS, MULTIPLIERS, SIZES, OFFSETS = (GOOD[name] for name in ("ngram_token_ids", "multipliers", "vocab_sizes", "offsets"))
MASK = torch.zeros(5, dtype=torch.bool)


test_bad_input = tiers.bad_input(
    SPEC,
    GOOD,
    [
        ({"ngram_token_ids": IDS[:, :1].contiguous()}, ValueError, "N .*ngram_token_ids.*2 to 16"),
        ({"ngram_token_ids": IDS.repeat(1, 6)}, ValueError, "N .*ngram_token_ids.*2 to 16"),
        ({"multipliers": MULTIPLIERS[:0]}, ValueError, "L .*multipliers.*1 to 65535"),
        ({"vocab_sizes": SIZES[:, :, :0]}, ValueError, "M .*vocab_sizes.*1 to 64"),
        ({"vocab_sizes": SIZES.repeat(1, 1, 9)}, ValueError, "M .*vocab_sizes.*1 to 64"),
        ({"image_token_mask": MASK[:4]}, ValueError, "image_token_mask: .*shape"),
    ],
)


def test_empty_tables_raise_in_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "debug", lambda: True)
    sizes = SIZES.clone()
    tk_engram.engram_hash(**{**GOOD, "vocab_sizes": sizes})
    sizes[1, 1, 7] = 0
    with pytest.raises(ValueError, match=r"vocab_sizes: .*at least 1.*0"):
        tk_engram.engram_hash(**{**GOOD, "vocab_sizes": sizes})


def test_offsets_past_int32_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "debug", lambda: True)
    offsets = OFFSETS.clone()
    offsets[1, -1] = 2**31 - SIZES[1, -1, -1]
    tk_engram.engram_hash(**{**GOOD, "offsets": offsets})
    for wrong, message in ((offsets + 1, "last row fits int32, got 2147483648"), (offsets - 1, "at least 0, got -1")):
        with pytest.raises(ValueError, match=f"offsets: .*{message}"):
            tk_engram.engram_hash(**{**GOOD, "offsets": wrong})
    with pytest.raises(ValueError, match=r"vocab_sizes: .*2³¹ - 1 rows a layer, got 2147483648"):
        reference.make_offsets(torch.tensor([[[2**30], [2**30]]], dtype=torch.int32))


@pytest.mark.gpu
def test_gpu_remainders_of_all_magnitudes() -> None:
    """Hashes and sizes of all magnitudes, each against the reference on the CPU."""
    inputs = make(20_011, 8, 3, 64, values="wide")("cpu")
    shifts = torch.arange(64, dtype=torch.int32) % 31
    inputs["vocab_sizes"] = (inputs["vocab_sizes"] >> shifts).clamp_(min=1)
    # A last id of 0 leaves the xor of the other products as it is; products get smaller from layer to layer.
    inputs["multipliers"] >>= torch.arange(8)[:, None] * 8
    expected = tk_engram.engram_hash(**inputs)
    moved = {name: x.cuda() for name, x in inputs.items() if x is not None}
    assert_equal(tk_engram.engram_hash(**moved).cpu(), expected)


@pytest.mark.gpu(gib=9)
def test_gpu_beyond_two_to_the_31_elements() -> None:
    num_tokens = 2**31 // (30 * 128) + 77
    inputs = make(num_tokens, 30, 3, 64)("cuda")
    out = tk_engram.engram_hash(**inputs)
    assert out.numel() > 2**31
    for part in (slice(0, 9), slice(num_tokens - 9, num_tokens)):
        expected = reference.engram_hash(**{**inputs, "ngram_token_ids": inputs["ngram_token_ids"][part]})
        assert_equal(out[:, part].clone(memory_format=torch.contiguous_format), expected)
