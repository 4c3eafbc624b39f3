"""Machine code of the products' kernels on Hopper: what ptxas makes of a step decides how fast they are."""

import re
from dataclasses import replace

import pytest
import torch

from tk_core.arch import arch_from_name
from tk_core.testing.sass import count, loops_with
from tk_core.testing.usage import machine_code
from tk_gemm.group_maps import group_maps_kernel
from tk_gemm.hopper.fp8 import fp8_product_kernel
from tk_gemm.hopper.swiglu import fp8_swiglu_product_kernel
from tk_gemm.hopper.tiles import BY_K, BY_K_TILES, FEW_ROWS, ON_DEMAND, TILES, WIDE_LONG, TileShape
from tk_gemm.kernels import BLOCK_K, Addend

pytestmark = pytest.mark.compile

ARCH = arch_from_name("sm_90a")
CASES = [("dense", tile) for tile in (*TILES, WIDE_LONG)] + [("k", tile) for tile in BY_K_TILES] + [("ids", ON_DEMAND)]


def check_loops(sass: str, num_warpgroups: int, num_sums: int, products: int) -> None:
    """A loop for each multiplying warpgroup: `products` products, and one fused multiply-add for each of its sums."""
    loops = loops_with(sass, "GMMA")
    assert len(loops) == num_warpgroups
    for loop in loops:
        found = count(loop)
        assert found["QGMMA"] == 4 * products
        # A product is four instructions, of which the last one signals: if each does, ptxas makes each wait.
        assert sum("GMMA" in code and "gsb0" in code for code in loop) == products
        assert found["FFMA"] == num_sums, "expected one fused multiply-add an element"
        assert found["LDG"] == found["LDC"] == 0, "expected factors from shared memory"
        assert found["R2UR"] <= 4, "expected descriptors in uniform registers"
    assert not re.search(r"\b(STL|LDL)\b", sass), "registers were spilled"


@pytest.mark.parametrize(
    ("kind", "tile"),
    CASES,
    ids=lambda x: x if isinstance(x, str) else f"{x.block_m}x{x.block_n}x{x.num_stages}" + "-on-demand" * x.on_demand,
)
def test_a_step_of_fp8(kind: str, tile: TileShape) -> None:
    """With float32 results, which take the most shared memory: ops choose the tile by the shape alone."""
    args = (kind, tile, torch.float32, True, None, ARCH)
    sass, usage = machine_code(fp8_product_kernel, *args)
    steps = 1 if tile.warpgroup_n > 128 else 2  # Loops of the others have an even and an odd step.
    products = steps * (2 if tile.warpgroup_n == 256 else 1)
    check_loops(sass, tile.num_warpgroups, steps * tile.warpgroup_n // 2, products)
    (used,) = usage.values()
    assert used.shared_bytes <= ARCH.shared_memory_each(1)
    assert used.stack_bytes == 0


@pytest.mark.parametrize(
    ("tile", "loads"), [(TileShape(64, 64, 12, 1), [2, 1]), (TileShape(128, 192, 4), [3])], ids=["small", "wide"]
)
def test_loads_take_their_addresses_from_uniform_registers(tile: TileShape, loads: list[int]) -> None:
    """A warp that ptxas does not take to be whole, or a stage without a known range, made each step's loads late.

    A and its factors are loaded by one warp and B by another, or all three by one.
    """
    assert tile in TILES
    if tile.block_m > FEW_ROWS[-1]:
        tile = replace(tile, max_rows=FEW_ROWS[-1])
    sass, _ = machine_code(fp8_product_kernel, "dense", tile, torch.bfloat16, True, None, ARCH)
    loops = loops_with(sass, "UTMALDG")
    assert len(loops) == len(loads)
    for loop, loads_a_step in zip(loops, loads):
        found = count(loop)
        assert found["R2UR"] == 0
        steps = found["UTMALDG"] // loads_a_step
        assert len(loop) <= 55 * steps, "expected at most 55 instructions a step"


@pytest.mark.parametrize(("tile", "addend", "loads"), [(BY_K, None, [2, 2]), (WIDE_LONG, "d", [4])], ids=["2", "1"])
def test_loads_by_maps_take_no_longer(tile: TileShape, addend: Addend | None, loads: list[int]) -> None:
    """A map's address is in uniform registers, and the warp drops what it knows of a map only for another group."""
    sass, _ = machine_code(fp8_product_kernel, "k_flat", tile, torch.float32, True, addend, ARCH)
    loops = loops_with(sass, "UTMALDG")
    assert len(loops) == len(loads)
    for loop, loads_a_step in zip(loops, loads):
        found = count(loop)
        assert found["R2UR"] == found["UTMACCTL"] == 0
        assert len(loop) <= 55 * found["UTMALDG"] // loads_a_step, "expected at most 55 instructions a step"
    assert sass.count("UTMACCTL.IV") == 2
    assert not re.search(r"\b(STL|LDL)\b", sass), "registers were spilled"


def test_maps_of_groups() -> None:
    sass, usage = machine_code(group_maps_kernel, 128, 256, ARCH)
    assert not re.search(r"\b(STL|LDL)\b", sass)
    (used,) = usage.values()
    assert used.shared_bytes == 128
    # TileLang's strides are in bytes, and a map's in 16 bytes: tensormap.replace shifts them since CUDA 12.5.
    assert re.search(r"SHF\.R\.\w+(\.HI)? R\d+, R\d+, 0x4,", sass)


@pytest.mark.parametrize("tile", [WIDE_LONG, ON_DEMAND], ids=["in order", "on demand"])
def test_a_step_of_swiglu(tile: TileShape) -> None:
    args = ("ids", tile, True, True, True, ARCH)
    sass, usage = machine_code(fp8_swiglu_product_kernel, *args)
    check_loops(sass, 2, 128, 2)
    (used,) = usage.values()
    ring = WIDE_LONG.num_stages * (BLOCK_K * (WIDE_LONG.block_m + WIDE_LONG.block_n) + 4 * WIDE_LONG.block_m)
    assert used.shared_bytes - ring < 2 * WIDE_LONG.block_m * 128, "expected one buffer of codes"
