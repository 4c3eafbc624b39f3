"""transform_sf_into_required_layout and get_mn_major_tma_aligned_tensor."""

from typing import Any

import pytest
import torch

import tk_gemm


def test_column_major_with_columns_on_16_bytes() -> None:
    x = torch.rand(2, 5, 3)
    out = tk_gemm.get_mn_major_tma_aligned_tensor(x)
    assert out.stride() == (24, 1, 8)
    assert torch.equal(out, x)
    assert tk_gemm.get_mn_major_tma_aligned_tensor(out) is out
    assert tk_gemm.get_mn_major_tma_aligned_tensor(x[0].t()).stride() == (1, 4)
    off = torch.rand(9)[1:].view(1, 8).t()
    assert off.stride() == (1, 8)
    assert tk_gemm.get_mn_major_tma_aligned_tensor(off).data_ptr() % 16 == 0
    for error, wrong in ((TypeError, x.double()), (ValueError, x[0, 0]), (ValueError, x[None])):
        with pytest.raises(error, match=r"^x: "):
            tk_gemm.get_mn_major_tma_aligned_tensor(wrong)


@pytest.mark.parametrize(
    ("recipe", "is_sfa", "per_row"),
    [
        ((1, 128), False, True),
        ((128, 128), True, False),
        ((1, 128, 128), True, True),
        ((1, 128, 128), False, False),
        ((1, 1, 128), False, True),
    ],
)
def test_recipes(recipe: tuple[int, ...], is_sfa: bool, per_row: bool) -> None:
    sf = torch.rand(130 if per_row else 2, 3)
    out = tk_gemm.transform_sf_into_required_layout(sf, 130, 384, recipe, is_sfa=is_sfa)
    assert torch.equal(out, sf)
    assert out.stride() == ((1, 132) if per_row else (3, 1))


@pytest.mark.parametrize(
    ("error", "name", "changes"),
    [
        (TypeError, "sf", {"sf": torch.rand(5, 3).double()}),
        (ValueError, "sf", {"mn": 6}),
        (ValueError, "sf", {"num_groups": 2}),
        (TypeError, "mn", {"mn": 5.0}),
        (TypeError, "k", {"k": None}),
        (ValueError, "recipe", {"recipe": (1, 32)}),
        (TypeError, "recipe", {"recipe": 128}),
        (ValueError, "num_groups", {"num_groups": 0}),
        (TypeError, "is_sfa", {"is_sfa": 1}),
        (TypeError, "disable_ue8m0_cast", {"disable_ue8m0_cast": 1}),
    ],
)
def test_bad_input(error: type[Exception], name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(error, match=f"^{name}"):
        tk_gemm.transform_sf_into_required_layout(
            **{"sf": torch.rand(5, 3), "mn": 5, "k": 384, "recipe": (1, 128), **changes}
        )
