"""Machine code of the products' kernels on Blackwell, which has not run: what the tensor cores are told."""

import re
from typing import Any

import pytest
import torch

from tk_core.arch import arch_from_name
from tk_core.kernel import Kernel
from tk_core.testing.usage import machine_code
from tk_gemm.blackwell.bf16 import bf16_product_blackwell_kernel
from tk_gemm.blackwell.fp8 import fp8_product_blackwell_kernel
from tk_gemm.blackwell.swiglu import fp8_swiglu_product_blackwell_kernel

pytestmark = pytest.mark.compile

BF16 = torch.bfloat16
# With the products of 32 channels in a step, the stores of 128 columns, and their bits.
FP8 = {
    "dense": (fp8_product_blackwell_kernel, ("dense", BF16, False, False), 4, 16, 128),
    "k": (fp8_product_blackwell_kernel, ("k", torch.float32, True, False), 4, 32, 128),
    "k_flat": (fp8_product_blackwell_kernel, ("k_flat", torch.float32, True, False), 4, 32, 128),
    "swiglu": (fp8_swiglu_product_blackwell_kernel, ("ids", True, True), 8, 4, 256),
}


def sass_of(kernel: Kernel, args: tuple[Any, ...]) -> str:
    """What a kernel compiles to, in which no registers are spilled."""
    sass, _ = machine_code(kernel, *args, arch_from_name("sm_100a"))
    assert not re.search(r"\b(STL|LDL)\b", sass), "registers were spilled"
    return sass


def num_accesses(sass: str, access: str, num_bits: int) -> int:
    """Number of loads from, or stores to, global memory that have so many bits."""
    return len(re.findall(rf"\b{access}\.E\.(?:ENL2\.)?{num_bits}\b", sass))


@pytest.mark.parametrize("name", FP8)
def test_fp8(name: str) -> None:
    kernel, args, num_products, num_stores, num_bits = FP8[name]
    sass = sass_of(kernel, args)
    products = re.findall(r"UTCQMMA[^;]*", sass)
    assert products
    assert len(products) % num_products == 0
    # Sums, factors of A and of B are in tensor memory.
    assert all(product.count("tmem") == 3 for product in products), products
    assert num_accesses(sass, "STG", num_bits) == num_stores


@pytest.mark.parametrize("is_transposed", [False, True])
def test_bf16(is_transposed: bool) -> None:
    sass = sass_of(bf16_product_blackwell_kernel, ("dense", BF16, is_transposed, is_transposed, True))
    products = re.findall(r"UTCHMMA[^;]*", sass)
    # A step is four products of 16 channels, of two operands in shared memory.
    assert products
    assert len(products) % 4 == 0
    assert all(product.count("gdesc") == 2 for product in products), products
    for access in ("LDG", "STG"):  # 128 columns of c and of d, 8 at a time.
        assert num_accesses(sass, access, 128) == 16
