"""What the ops compute of a token depends on that token alone."""

import random
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import tk_core
from tk_core.testing import OpSpec, assert_equal, load_specs
from tk_core.testing.tiers import run
from tk_core.testing.trees import map_tensors, tensors, transfer

from .collapse import test_mhc_pre_apply_mix as mhc_pre_apply_mix
from .collapse import test_mhc_pre_apply_mix_bwd as mhc_pre_apply_mix_bwd
from .expand import test_expand_to_mhc as expand_to_mhc
from .expand import test_expand_to_mhc_bwd as expand_to_mhc_bwd
from .fused import test_mhc_post_pre as mhc_post_pre
from .fused import test_mhc_pre_big_fuse as mhc_pre_big_fuse
from .fused import test_mhc_pre_big_fuse_from_partials as mhc_pre_big_fuse_from_partials
from .fused import test_mhc_pre_broadcast as mhc_pre_broadcast
from .mixes import test_mhc_head_compute_mix as mhc_head_compute_mix
from .mixes import test_mhc_head_compute_mix_bwd as mhc_head_compute_mix_bwd
from .mixes import test_mhc_pre_split_mixes as mhc_pre_split_mixes
from .mixes import test_mhc_pre_split_mixes_bwd as mhc_pre_split_mixes_bwd
from .mixes import test_sinkhorn_normalize as sinkhorn_normalize
from .mixes import test_sinkhorn_normalize_bwd as sinkhorn_normalize_bwd
from .post import test_mhc_multilayer_recompute as mhc_multilayer_recompute
from .post import test_mhc_post as mhc_post
from .post import test_mhc_post_bwd as mhc_post_bwd
from .projection import test_mhc_pre_norm_fn as mhc_pre_norm_fn
from .projection import test_mhc_pre_norm_fn_bwd as mhc_pre_norm_fn_bwd
from .projection import test_mhc_prenorm_gemm as mhc_prenorm_gemm

NUM_TOKENS = 8200
"""Of a batch; no other dimension has this size."""
ALONE = (0, 1, 77, 4095, 8199)
"""Tokens that are also computed alone."""
BATCH_SIZES = (2, 63, 65, 129, 1000, 4096)
"""Other numbers of tokens: kernels take different launch shapes for few and for many."""
SAMPLE = 9
"""Tokens at either end of more than 2³¹ elements."""
BF16, FLOAT32 = torch.bfloat16, torch.float32
SHIFTED = {"shifted": True, "layer_norm": BF16}
Row = tuple[ModuleType, tuple[int, ...], dict[str, Any]]

BATCHES: list[Row] = [
    (expand_to_mhc, (4, 7168), {}),
    (expand_to_mhc_bwd, (4, 7168), {}),
    (mhc_pre_apply_mix, (4, 7168), {}),
    (mhc_pre_apply_mix_bwd, (4, 7168), {}),
    # The whole batch is strided, a part is contiguous.
    (mhc_post, (4, 7168), {"strided": True}),
    *((mhc_post_bwd, (m, hidden), {"strided": True}) for m, hidden in ((4, 7168), (8, 576))),
    (mhc_multilayer_recompute, (4, 7168, 3, 2), {}),
    *((mhc_head_compute_mix, (m,), {}) for m in (2, 4, 8)),
    (mhc_head_compute_mix_bwd, (4,), {}),
    *((mhc_pre_split_mixes, (m,), {}) for m in (2, 4, 8)),
    (mhc_pre_split_mixes_bwd, (4,), {}),
    *((op, (m,), {"std": 3.0}) for op in (sinkhorn_normalize, sinkhorn_normalize_bwd) for m in (2, 4, 8)),
    *(
        (mhc_pre_norm_fn, (4, 7168), {"return_rstd": True, **options})
        for options in ({}, {"norm_weight": False}, {"head": True}, {"n_splits": 1}, {"n_splits": 7})
    ),
    (mhc_pre_norm_fn, (2, 576), {}),
    (mhc_pre_norm_fn, (2, 64), {"n_splits": 10_000}),
    (mhc_pre_norm_fn, (8, 1280), {}),
    (mhc_pre_norm_fn, (8, 8192), {"n_splits": 16}),
    *(
        (mhc_prenorm_gemm, (4, 7168, n_splits), {"num_rms_groups": g})
        for n_splits, g in ((1, 1), (7, 1), (16, 1), (2, 4))
    ),
    (mhc_prenorm_gemm, (2, 576, 3), {}),
    (mhc_prenorm_gemm, (8, 1280, 4), {"num_rms_groups": 2}),
    *((mhc_pre_norm_fn_bwd, (4, 7168), options) for options in ({}, {"given": True}, {"head": True})),
    (mhc_pre_norm_fn_bwd, (2, 64), {"norm_weight": False}),
    (mhc_pre_norm_fn_bwd, (8, 1280), {}),
    *((op, (4, 7168), {}) for op in (mhc_pre_big_fuse, mhc_post_pre, mhc_pre_broadcast)),
    *((op, (4, 7168), {"n_splits": 7, "norm_weight": False}) for op in (mhc_pre_big_fuse, mhc_post_pre)),
    *((op, (4, 7168), {"layer_norm": BF16}) for op in (mhc_pre_big_fuse, mhc_post_pre)),
    *((op, (4, 7168), {"shifted": True, "layer_norm": FLOAT32}) for op in (mhc_pre_big_fuse, mhc_post_pre)),
    *((op, (2, 576), {}) for op in (mhc_pre_big_fuse, mhc_post_pre, mhc_pre_broadcast)),
    *((op, (2, 64), {"shifted": True, "pre_mix": False}) for op in (mhc_pre_big_fuse, mhc_post_pre)),
    (mhc_pre_big_fuse, (2, 64), {"n_splits": 10_000, "layer_norm": BF16}),
    *((op, (8, 1280), {}) for op in (mhc_pre_big_fuse, mhc_post_pre)),
    *((op, (4, 7168), {"has_comb": False}) for op in (mhc_post, mhc_post_bwd, mhc_pre_norm_fn, mhc_pre_norm_fn_bwd)),
    *((op, (4, 7168), {"has_comb": False, "post_eps": 0.25}) for op in (mhc_pre_big_fuse, mhc_post_pre)),
    *((op, (m,), {"has_comb": False}) for op in (mhc_pre_split_mixes, mhc_pre_split_mixes_bwd) for m in (2, 8)),
    *((op, (8, 8192), {"n_splits": 16}) for op in (mhc_pre_big_fuse, mhc_post_pre, mhc_pre_broadcast)),
    *((mhc_pre_broadcast, (4, 7168), {"n_splits": n_splits}) for n_splits in (1, 7)),
    (mhc_pre_broadcast, (2, 64), {}),
    *((mhc_pre_big_fuse_from_partials, (4, 7168, n_splits), {}) for n_splits in (1, 16)),
    (mhc_pre_big_fuse_from_partials, (4, 7168, 7), {"layer_norm": BF16}),
    (mhc_pre_big_fuse_from_partials, (4, 7168, 16), {"shifted": True, "layer_norm": FLOAT32}),
    (mhc_pre_big_fuse_from_partials, (2, 576, 16), {}),
    (mhc_pre_big_fuse_from_partials, (8, 1280, 5), {"shifted": True}),
]
# With the elements of a token in the largest tensor.
LARGE: list[tuple[int, Row]] = [
    *((8 * 8192, (op, (8, 8192), {})) for op in (expand_to_mhc, expand_to_mhc_bwd, mhc_pre_apply_mix, mhc_post)),
    *((8 * 8192, (mhc_pre_apply_mix_bwd, (8, 8192), {"given": given})) for given in (False, True)),
    (8 * 8192, (mhc_post_bwd, (8, 8192), {})),
    (8 * 8192, (mhc_multilayer_recompute, (8, 8192, 2, 1), {})),
    (80, (mhc_pre_split_mixes, (8,), {})),
    (64, (sinkhorn_normalize, (8, 2), {})),
    (4 * 7168, (mhc_pre_norm_fn, (4, 7168), {"return_rstd": True})),
    (4 * 7168, (mhc_prenorm_gemm, (4, 7168, 2), {})),
    *((4 * 7168, (mhc_pre_big_fuse, (4, 7168), options)) for options in ({}, SHIFTED)),
    *((4 * 7168, (op, (4, 7168), {})) for op in (mhc_post_pre, mhc_pre_broadcast)),
]


def assert_the_same_alone(row: Row, num_tokens: int, parts: list[tuple[int, int]]) -> None:
    """Parts of the tokens, (first, number), have the same bits alone as among all, in each result that is by token."""
    module, arguments, options = row
    spec: OpSpec = module.SPEC

    def part(tree: Any, first: int, number: int) -> Any:
        def of(x: Tensor) -> Tensor:
            if num_tokens not in x.shape:
                return x
            chosen = x.narrow(x.shape.index(num_tokens), first, number)
            return chosen.clone(memory_format=torch.contiguous_format)

        return map_tensors(of, tree)

    inputs = module.make((num_tokens,), *arguments, **options)("cuda")
    # Before the op writes into its arguments.
    given = [part(inputs, *each) for each in parts]
    whole = tensors(run(spec, spec.op, inputs))
    by_token = [index for index, x in enumerate(whole) if num_tokens in x.shape]
    assert by_token
    for each, kwargs in zip(parts, given):
        alone = tensors(run(spec, spec.op, kwargs))
        for index in by_token:
            assert_equal(alone[index], part(whole[index], *each), name=f"result {index}, (first, number) {each}")


def _id(row: Row) -> str:
    return "-".join(map(str, (row[0].SPEC.op.__name__, *row[1], *row[2].values())))


@pytest.mark.gpu(gib=18)
@pytest.mark.parametrize("row", BATCHES, ids=map(_id, BATCHES))
def test_gpu_bits_do_not_depend_on_the_batch(row: Row) -> None:
    draws = random.Random(0)
    parts = [(token, 1) for token in ALONE] + [(0, number) for number in BATCH_SIZES]
    for _ in range(8):
        number = draws.randint(1, NUM_TOKENS - 1)
        parts.append((draws.randint(0, NUM_TOKENS - number), number))
    assert_the_same_alone(row, NUM_TOKENS, parts)


@pytest.mark.gpu(gib=28)
@pytest.mark.parametrize(("elements", "row"), LARGE, ids=[_id(row) for _, row in LARGE])
def test_gpu_more_than_two_to_the_31_elements(elements: int, row: Row) -> None:
    num_tokens = 2**31 // elements + SAMPLE
    assert_the_same_alone(row, num_tokens, [(0, SAMPLE), (num_tokens - SAMPLE, SAMPLE)])


@pytest.mark.gpu(gib=2)
@pytest.mark.parametrize("num_tokens", [1, 64, 300, 8192])
@pytest.mark.parametrize(
    "module",
    [mhc_pre_norm_fn, mhc_prenorm_gemm, mhc_pre_big_fuse, mhc_post_pre, mhc_pre_broadcast],
    ids=lambda module: module.SPEC.op.__name__,
)
def test_gpu_bits_do_not_depend_on_multiprocessors(module: ModuleType, num_tokens: int) -> None:
    op, inputs = module.SPEC.op, module.make(num_tokens)("cuda")
    expected = op(**inputs)
    for num_sms in (1, 7, 100):
        with tk_core.num_sms(num_sms):
            assert_equal(op(**inputs), expected)


LEADING = [spec for spec in load_specs("tk_mhc").values() if any("2x3" in case.name for case in spec.cases)]


@pytest.mark.parametrize("spec", LEADING, ids=lambda spec: spec.op.__name__)
def test_leading_dimensions_are_those_of_the_results(spec: OpSpec) -> None:
    """On a CPU, of the references; the cases compare kernels with these."""

    def flat(x: Tensor) -> Tensor:
        return x.flatten(0, 1) if x.shape[:2] == (2, 3) else x

    for case in spec.cases:
        if "2x3" in case.name:
            inputs = case.make("cpu")
            merged = map_tensors(flat, transfer(inputs))
            for x, y in zip(tensors(run(spec, spec.op, inputs)), tensors(run(spec, spec.op, merged)), strict=True):
                assert_equal(flat(x), y)
                assert x.shape == y.shape or x.shape == (2, 3, *y.shape[1:])
