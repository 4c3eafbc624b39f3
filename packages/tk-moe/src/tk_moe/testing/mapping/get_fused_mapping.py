"""Named cases of get_fused_mapping."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.testing import Case, OpSpec
from tk_moe import reference
from tk_moe.mapping.get_fused_mapping import get_fused_mapping
from tk_moe.testing.models import MODEL_EXPERTS

Make = Callable[[str], dict[str, Any]]

# Not an expert for any number of experts; includes values whose low 32 bits alone would be one.
_NO_EXPERT = (-1, -2, -(2**31), -(2**32), -(2**32) + 3, -(2**63), 1024, 2**31, 2**32, 2**32 + 3, 2**63 - 1)


def make(
    num_tokens: int,
    num_topk: int,
    num_experts: int,
    alignment: int = 16,
    num_expanded_tokens: int = 0,
    force_no_sync: bool = True,
    routing: str = "distinct",
    with_psum: bool = False,
    idx_dtype: torch.dtype = torch.int64,
) -> Make:
    """Experts that are `distinct` within a token, `any`, all the `last` one, `half` of them that one, or of `few`.

    With "none" most indices are negative or too large.
    """

    def build(device: str) -> dict[str, Any]:
        shape = (num_tokens, num_topk)
        if device == "meta":
            topk_idx = torch.empty(shape, dtype=torch.int64, device=device)
        elif routing == "last":
            topk_idx = torch.full(shape, num_experts - 1, device=device)
        elif routing == "half":
            topk_idx = torch.randint(0, num_experts, shape, device=device)
            topk_idx[torch.rand(shape, device=device) < 0.5] = num_experts - 1
        elif routing == "few":
            few = torch.randint(0, num_experts, (3,), device=device)
            topk_idx = few[torch.randint(0, 3, shape, device=device)]
        elif routing == "distinct" and num_topk <= num_experts:
            topk_idx = torch.rand((num_tokens, num_experts), device=device).topk(num_topk, sorted=False).indices
        else:
            topk_idx = torch.randint(0, num_experts, shape, device=device)
        if routing == "none" and device != "meta":
            table = torch.tensor(_NO_EXPERT, device=device)
            nothing = table[torch.randint(0, len(_NO_EXPERT), shape, device=device)]
            topk_idx = torch.where(torch.rand(shape, device=device) < 0.7, nothing, topk_idx)
        if idx_dtype == torch.int32:
            topk_idx = topk_idx.clamp(-(2**31), 2**31 - 1)
        return {
            "topk_idx": topk_idx.to(idx_dtype),
            "num_experts": num_experts,
            "num_expanded_tokens": num_expanded_tokens,
            "alignment": alignment,
            "force_no_sync": force_no_sync,
            "with_psum": with_psum,
        }

    return build


SPEC = OpSpec(
    op=get_fused_mapping,
    reference=reference.get_fused_mapping,
    cases=(
        # Small cases do not read sizes back, which fake tensors cannot.
        Case("e32-k6-t67", make(67, 6, 32), small=True, modes=True, compile=True),
        Case("e256-k8-t31", make(31, 8, 256), small=True, compile=True),
        Case("e13-k3-t31", make(31, 3, 13, 1), small=True, compile=True),
        Case("e1024-k32-t9", make(9, 32, 1024, 2), small=True, compile=True),
        Case("e1-k1-t5", make(5, 1, 1, 128), small=True, compile=True),
        Case("e32-k6-t0", make(0, 6, 32), small=True),
        Case("e32-k6-t0-no-alignment", make(0, 6, 32, 1), small=True),
        Case("e32-k6-t1", make(1, 6, 32), small=True),
        Case("e32-k6-t67-given", make(67, 6, 32, 16, 1000), small=True, modes=True),
        Case("e32-k6-t67-given-sync-not-asked", make(67, 6, 32, 16, 1000, force_no_sync=False), small=True),
        Case("e32-k6-t67-too-small", make(67, 6, 32, 16, 300), small=True),
        Case("e32-k6-t67-one-position", make(67, 6, 32, 16, 1), small=True),
        Case("e32-k6-t67-last", make(67, 6, 32, routing="last"), small=True),
        Case("e300-k6-t67-few", make(67, 6, 300, routing="few"), small=True),
        Case("e32-k6-t67-none", make(67, 6, 32, routing="none"), small=True),
        Case("e32-k6-t67-any", make(67, 6, 32, routing="any"), small=True),
        Case("e8-k9-t40", make(40, 9, 8, 7), small=True),
        Case("e256-k8-t67-half", make(67, 8, 256, routing="half"), small=True),
        Case("e32-k6-t67-psum", make(67, 6, 32, with_psum=True), small=True, modes=True, compile=True),
        Case("e32-k6-t67-psum-none", make(67, 6, 32, 128, routing="none", with_psum=True), small=True),
        Case("e32-k6-t0-psum", make(0, 6, 32, with_psum=True), small=True),
        Case("e32-k6-t67-int32", make(67, 6, 32, idx_dtype=torch.int32), small=True, modes=True, compile=True),
        Case("e32-k6-t67-int32-none", make(67, 6, 32, routing="none", idx_dtype=torch.int32), small=True),
        # More than 4096 pairs need clusters, and more than clusters can take need two launches.
        Case("e32-k8-t520", make(520, 8, 32), small=True, modes=True, compile=True),
        Case("e1024-k8-t520-none", make(520, 8, 1024, routing="none"), compile=True),
        Case("e13-k7-t601-few", make(601, 7, 13, 1, routing="few"), compile=True),
        Case("e256-k8-t16385", make(16385, 8, 256), modes=True, compile=True),
        Case("e72-k9-t20001-none", make(20001, 9, 72, 128, routing="none"), compile=True),
        Case("e1024-k32-t8001", make(8001, 32, 1024, 128), compile=True),
        Case("e256-k8-t4001-psum", make(4001, 8, 256, 128, with_psum=True)),
        Case("e256-k8-t16385-psum", make(16385, 8, 256, with_psum=True)),
        Case("e256-k8-t131071-psum", make(131071, 8, 256, with_psum=True), compile=True),
        Case("e256-k8-t4001-int32", make(4001, 8, 256, 128, idx_dtype=torch.int32)),
        Case("e256-k8-t131071-int32", make(131071, 8, 256, idx_dtype=torch.int32), compile=True),
        Case("e7-k32-t65536", make(65536, 32, 7, 128, routing="any")),
        # Around the capacity of thread blocks.
        *(
            Case(f"e256-k8-t{num_tokens}-any", make(num_tokens, 8, 256, routing="any"))
            for num_tokens in (512, 513, 2048, 2049, 4096, 8192, 8193, 16384, 16385, 65536, 65537)
        ),
        *(
            Case(f"e256-k8-t{num_tokens}-{routing}", make(num_tokens, 8, 256, 16, routing=routing))
            for num_tokens in (128, 4001, 16401)
            for routing in ("last", "half", "few", "none")
        ),
        *(
            Case(f"e256-k8-t{num_tokens}-too-small", make(num_tokens, 8, 256, 16, num_tokens * 4))
            for num_tokens in (128, 4001, 16401)
        ),
        *(
            Case(f"e256-k8-t{num_tokens}-given", make(num_tokens, 8, 256, 16, num_tokens * 8 + 9999))
            for num_tokens in (0, 1, 128, 4001, 16401)
        ),
        *(
            Case(f"e256-k8-t{num_tokens}-a{alignment}-sync", make(num_tokens, 8, 256, alignment, force_no_sync=False))
            for num_tokens in (0, 1, 31, 4001, 16401)
            for alignment in (1, 16, 128)
        ),
        *(
            Case(f"e{num_experts}-k{num_topk}-t{num_tokens}", make(num_tokens, num_topk, num_experts, alignment))
            for num_experts in MODEL_EXPERTS
            for num_topk, num_tokens, alignment in ((1, 2, 128), (2, 31, 16), (6, 8001, 16), (7, 1, 1), (9, 4001, 128))
        ),
        Case("e256-k8-t8192-bench", make(8192, 8, 256), bench=True, model_shape=True, gpu=False, compile=True),
        Case("e256-k8-t128-bench", make(128, 8, 256), bench=True, model_shape=True, gpu=False),
        Case("e256-k8-t8192-int32-bench", make(8192, 8, 256, idx_dtype=torch.int32), bench=True, gpu=False),
        Case("e256-k8-t8192-last-bench", make(8192, 8, 256, routing="last"), bench=True, gpu=False),
        Case("e256-k8-t8192-half-bench", make(8192, 8, 256, routing="half"), bench=True, gpu=False),
        Case("e256-k8-t8192-a128-bench", make(8192, 8, 256, 128), bench=True, gpu=False),
        *(
            Case(f"e256-k8-t{num_tokens}-bench", make(num_tokens, 8, 256), bench=True, gpu=False)
            for num_tokens in (1, 64, 512, 1024, 2048, 4001, 8001, 16384, 32768)
        ),
        *(
            Case(f"e{num_experts}-k{num_topk}-t8192-bench", make(8192, num_topk, num_experts), bench=True, gpu=False)
            for num_experts, num_topk in ((64, 6), (128, 8), (384, 8), (512, 8))
        ),
    ),
)
