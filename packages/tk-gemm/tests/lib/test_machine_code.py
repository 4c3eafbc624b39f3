"""Machine code of the products' kernels: what ptxas makes of them decides how fast they are."""

import re

import pytest
import torch

from tk_core.arch import arch_from_name
from tk_core.kernel import KernelRequest
from tk_core.testing.usage import cuobjdump, lower, resource_usage, resource_usages
from tk_gemm.lib.bf16_product import bf16_product_kernel
from tk_gemm.lib.bf16_product_blackwell import bf16_product_blackwell_kernel
from tk_gemm.lib.fp8_k_product import fp8_k_product_kernel
from tk_gemm.lib.fp8_k_product_blackwell import fp8_k_product_blackwell_kernel
from tk_gemm.lib.fp8_product import fp8_product_kernel
from tk_gemm.lib.fp8_product_blackwell import fp8_product_blackwell_kernel
from tk_gemm.lib.fp8_product_config import BLOCK_K, CONFIGS, WIDE, ProductConfig
from tk_gemm.lib.fp8_product_wide import fp8_product_wide_kernel
from tk_gemm.lib.fp8_swiglu_product import fp8_swiglu_product_kernel
from tk_gemm.lib.fp8_swiglu_product_blackwell import fp8_swiglu_product_blackwell_kernel

pytestmark = pytest.mark.compile

ARCH = arch_from_name("sm_90a")
BF16 = torch.bfloat16
REQUESTS = {
    # Five additions of 32 elements a thread: two in the loop, two at an even end, one at an odd one.
    "fp8": (fp8_product_kernel, ("dense", ProductConfig(64, 128, 8), BF16, True, False), 5 * 32),
    "fp8-wide": (fp8_product_wide_kernel, ("dense", BF16, True, False), 2 * 64),
    "fp8-k": (fp8_k_product_kernel, (torch.float32, False), 64),
    "bf16": (bf16_product_kernel, ("dense", ProductConfig(128, 256, 4), BF16, False, False, False), 0),
}

# With the number of products of 32 channels in a step.
ON_BLACKWELL = {
    "fp8": (fp8_product_blackwell_kernel, ("dense", BF16, False, False), 4),
    "fp8-k": (fp8_k_product_blackwell_kernel, (torch.float32, False), 4),
    "fp8-swiglu": (fp8_swiglu_product_blackwell_kernel, ("ids", True, True), 8),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_machine_code(name: str) -> None:
    kernel, args, num_fmas = REQUESTS[name]
    sass = cuobjdump(KernelRequest(kernel, (*args, ARCH)).compile(), "--dump-sass")
    products = re.findall(r"[QH]GMMA\.[^;]*", sass)
    assert products
    # A product is four instructions, of which the last one signals: if each does, ptxas makes each wait.
    assert len(products) == 4 * sum("gsb0" in product for product in products)
    assert len(re.findall(r"\bFFMA\b", sass)) == num_fmas, "expected one fused multiply-add an element"
    assert not re.search(r"\b(STL|LDL)\b", sass), "registers were spilled"


@pytest.mark.parametrize("name", ON_BLACKWELL)
def test_machine_code_on_blackwell(name: str) -> None:
    kernel, args, num_products = ON_BLACKWELL[name]
    sass = cuobjdump(KernelRequest(kernel, (*args, arch_from_name("sm_100a"))).compile(), "--dump-sass")
    products = re.findall(r"UTCQMMA[^;]*", sass)
    assert products
    assert len(products) % num_products == 0
    # Sums, factors of A and of B are in tensor memory.
    assert all(product.count("tmem") == 3 for product in products), products
    assert not re.search(r"\b(STL|LDL)\b", sass), "registers were spilled"


def test_every_tile_of_float32_fits() -> None:
    """float32 results take the most shared memory; ops choose the tile by the shape alone."""
    requests = [
        KernelRequest(fp8_product_wide_kernel, ("dense", torch.float32, True, False, ARCH))
        if config == WIDE
        else KernelRequest(fp8_product_kernel, ("dense", config, torch.float32, True, False, ARCH))
        for config in CONFIGS
    ]
    usages = resource_usages(requests, [lower(request.kernel, *request.args) for request in requests])
    for config, usage in zip(CONFIGS, usages, strict=True):
        for used in usage.values():
            assert used.shared_bytes <= ARCH.shared_memory_each(1), config
            assert used.stack_bytes == 0, config


def test_swiglu_keeps_one_tile_of_codes() -> None:
    (used,) = resource_usage(fp8_swiglu_product_kernel, "ids", True, True, True, ARCH).values()
    ring = WIDE.num_stages * (BLOCK_K * (WIDE.block_m + WIDE.block_n) + 4 * WIDE.block_m)
    assert used.shared_bytes - ring < 2 * WIDE.block_m * 128


@pytest.mark.parametrize("is_transposed", [False, True])
def test_machine_code_of_bf16_on_blackwell(is_transposed: bool) -> None:
    args = ("dense", BF16, is_transposed, is_transposed, True, arch_from_name("sm_100a"))
    sass = cuobjdump(KernelRequest(bf16_product_blackwell_kernel, args).compile(), "--dump-sass")
    products = re.findall(r"UTCHMMA[^;]*", sass)
    # A step is four products of 16 channels, of two operands in shared memory.
    assert products
    assert len(products) % 4 == 0
    assert all(product.count("gdesc") == 2 for product in products), products
    # 128 columns of c and of d, 8 at a time.
    for access in ("LDG", "STG"):
        found = re.findall(rf"\b{access}\.[^ ]*", sass)
        assert len(found) == 16
        assert all("128" in each for each in found), found
    assert not re.search(r"\b(STL|LDL)\b", sass), "registers were spilled"
