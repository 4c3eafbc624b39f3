"""Machine code of the BF16 products' kernel: what ptxas makes of it decides how fast it is."""

import re

import pytest
import torch

from tk_core.arch import arch_from_name
from tk_core.testing.sass import count, loops_with
from tk_core.testing.usage import machine_code
from tk_gemm.hopper.bf16 import bf16_product_kernel
from tk_gemm.hopper.tiles import TILES, TileShape
from tk_gemm.kernels import Kind

pytestmark = pytest.mark.compile

ARCH = arch_from_name("sm_90a")
# Half of the tiles with operands as they are in a forward pass, half as in gradients.
CASES = [(tile, *(("k", torch.float32) if i % 2 else ("ids", torch.bfloat16))) for i, tile in enumerate(TILES)]


@pytest.mark.parametrize(("shape", "kind", "dtype"), CASES, ids=str)
def test_machine_code(shape: TileShape, kind: Kind, dtype: torch.dtype) -> None:
    by_k = kind == "k"  # Operands are transposed, and C is added.
    args = (kind, shape, dtype, by_k, by_k, by_k, ARCH)
    sass, usage = machine_code(bf16_product_kernel, *args)
    for used in usage.values():
        assert used.shared_bytes <= ARCH.shared_memory_each(1)
        assert used.stack_bytes == 0, "registers were spilled"
    products = re.findall(r"HGMMA\.[^;]*", sass)
    # A step's product is four instructions, of which the last one signals: if each does, ptxas makes each wait.
    assert len(products) == 4 * sum("gsb0" in each for each in products)
    loops = loops_with(sass, "GMMA")
    assert len(loops) == shape.num_warpgroups
    for names in map(count, loops):
        assert names["WARPGROUP"] == names["HGMMA"] // 2, "expected one arrival and one wait a step"
        assert not names["LDG"]
        assert not names["LDS"]
        assert names["R2UR"] <= 2, "descriptors are not made in uniform registers"
