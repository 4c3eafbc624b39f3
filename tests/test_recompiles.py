"""Under torch.compile every op and module makes one graph for the first number of tokens, and one for all others."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tk_modeling
from tk_core.math import align, ceil_div
from tk_core.op import Op
from tk_core.testing import Case, OpSpec, load_specs
from tk_core.testing.trees import map_tensors, tensors
from tk_engram.layout import engram_layout

FACTORS = range(2, 12)
SIZES = (8, 24, 40, 57, 64, 96, 100, 128, 150, 192)
MAX_NUMEL = 70_000
# Arguments whose size no number of tokens changes.
FIXED = {
    *("norm_weight", "conv_weight", "weight_fused", "weight_hidden", "weight_embed", "multipliers", "table"),
    *("grad_weight_hidden", "grad_weight_embed", "vocab_sizes", "col_scale", "col_sumsq", "masked_m", "ks"),
    *("fn", "mhc_fn", "fn_folded", "mhc_scale", "mhc_base", "layer_norm_weight", "mhc_norm_weight", "fi", "grad_loss"),
    *(
        "bias",
        "image_bias",
        "grad_scores_sum",
        "random_offset",
        "seed",
        "to_physical_map",
        "logical_count",
        "tensor_sf",
        "clamped_count",
        "reduce_fused.sf",
        "table_sf",
    ),
    *("bf16_gemm_nt.b", "fp8_gemm_nt.b", "m_grouped_bf16_gemm_nt_contiguous.b", "m_grouped_bf16_gemm_nt_masked.b"),
    *("m_grouped_fp8_gemm_nt_contiguous.b", "m_grouped_fp8_gemm_nt_masked.b", "engram_lookup_bwd.grad"),
    *("m_grouped_fp8_gemm_swiglu_nt_contiguous.b", "k_grouped_bf16_gemm_tn_contiguous.d", "router_gemm_nt.weight"),
    *("k_grouped_fp8_gemm_nt_contiguous.d", "k_grouped_fp8_gemm_nt_contiguous.c", "engram_hash.offsets"),
    *("cp_gather_indexer_k_quant_cache.block_table", "cp_gather_indexer_k_quant_cache.cu_seq_lens"),
    *("norm_forward.weight", "norm_forward_and_per_token_cast.weight", "norm_backward.weight", "weight_grad"),
    *("query_weight", "key_weight", "query_weight_grad", "key_weight_grad"),
}
# Where tokens are another dimension than the first: that of the tensor, or of each of a pair.
DIMENSIONS = {
    "mhc_pre_big_fuse_from_partials.gemm_out_mul": (1,),
    "mhc_pre_big_fuse_from_partials.gemm_out_sqrsum": (1,),
    "m_grouped_bf16_gemm_nt_masked.a": (1,),
    "m_grouped_bf16_gemm_nt_masked.d": (1,),
    "m_grouped_fp8_gemm_nt_masked.a": (1, 1),
    "m_grouped_fp8_gemm_nt_masked.d": (1,),
    "k_grouped_fp8_gemm_nt_contiguous.a": (1, 0),
    "k_grouped_fp8_gemm_nt_contiguous.b": (1, 0),
    "batched_transpose.x": (1,),
}


class Graphs:
    """A backend that counts the graphs it is given and runs them as they are."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, module: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.count += 1
        return module.forward


def _resized(x: Tensor, dim: int, size: int) -> Tensor:
    """Zeros with another size in one dimension, in memory laid out like x."""
    shape, strides = list(x.shape), list(x.stride())
    unit = 16 // x.element_size()  # Column-major scales are aligned for TMA.
    before, after = align(shape[dim], unit), align(size, unit)
    if strides[dim] != 1 or any(stride % before for stride in strides if stride > 1):
        before, after = shape[dim], size
    strides = [stride // before * after if stride > strides[dim] else stride for stride in strides]
    shape[dim] = size
    made = torch.empty_strided(shape, strides, dtype=x.dtype)
    made.untyped_storage().fill_(0)
    return made


def _with_tokens(spec: OpSpec, kwargs: dict[str, Any], factor: int) -> dict[str, Any]:
    """The arguments for `factor` times as many tokens; indices among them are 0."""
    op = spec.op.__name__
    made = dict(kwargs)
    block = kwargs.get("x_block_size") or kwargs.get("block_size")
    if isinstance(block, tuple) and block[0] > 1:
        # At least 3 rows of scales, and not 4: torch takes their stride, a multiple of 4, for the same number then.
        factor *= ceil_div(2 * block[0], len(tensors(kwargs["x"])[0]))
    for name, value in kwargs.items():
        key = f"{op}.{name}"
        fixed = name in FIXED or key in FIXED or (name == "grouped_layout" and kwargs["use_psum_layout"])
        if fixed or not tensors(value):
            continue
        items = tensors(value)
        dims = DIMENSIONS.get(key, (0,) * len(items))
        if name != "ks" and op == "k_grouped_fp8_gemm_nt_contiguous" and items[0].ndim == 1:
            dims = (0, 1)
        longer = [
            _resized(x, dim, _size(name, i, x.shape[dim], factor, x, kwargs))
            for i, (x, dim) in enumerate(zip(items, dims, strict=True))
        ]
        made[name] = longer[0] if isinstance(value, Tensor) else (*longer, *value[len(longer) :])
    if isinstance(kwargs.get("ks"), list):
        made["ks"] = [size * factor for size in kwargs["ks"]]
    if isinstance(made.get("cu_seqlens"), Tensor):
        made["cu_seqlens"][-1] = len(tensors(made)[0])
    return made


def _size(name: str, index: int, size: int, factor: int, x: Tensor, kwargs: dict[str, Any]) -> int:
    if name == "cu_seqlens":
        return (size - 1) * factor + 1
    block = kwargs.get("x_block_size") or kwargs.get("block_size")
    is_sf = (name == "sf" and "x" in kwargs) or (name == "x" and index == 1)
    if not is_sf or (block is None and x.ndim != 5):
        return size * factor
    num_tokens = len(tensors(kwargs["x"])[0]) * factor
    return ceil_div(num_tokens, 128 if x.ndim == 5 else block[0])


def _op_cases() -> list[Any]:
    """Small cases of each op that differ in more than sizes, dtypes and numbers."""
    found = {}
    for spec in load_specs().values():
        for case in (case for case in spec.cases if case.small and case.modes):
            kwargs = case.make("meta")
            if max(x.numel() for x in tensors(kwargs)) <= MAX_NUMEL:
                kind = tuple((name, _kind(value)) for name, value in kwargs.items())
                found.setdefault((spec.name, kind), pytest.param(spec, case, id=f"{spec.name}-{case.name}"))
    return list(found.values())


def _kind(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.ndim, value.is_contiguous()
    if isinstance(value, (tuple, list)):
        return tuple(map(_kind, value))
    return value if isinstance(value, bool) else value is None


@pytest.fixture
def _zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops give zeros on a CPU: no graph depends on values, and references would take most of the time."""
    monkeypatch.setattr(Op, "_refer", lambda self, call, results: [x.zero_() for x in results])


def _count_graphs(function: Callable[..., Any], calls: Iterable[dict[str, Any] | tuple[Any, ...]]) -> int:
    """Graphs that torch.compile makes for these calls and their backwards."""
    graphs = Graphs()
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=graphs)
    for arguments in calls:
        outputs = compiled(**arguments) if isinstance(arguments, dict) else compiled(*arguments)
        results = [y for y in tensors(outputs) if y.requires_grad]
        if results:
            torch.autograd.backward(results, [torch.ones_like(y) for y in results])
    return graphs.count


def test_every_op_has_a_case() -> None:
    assert {case.values[0].name for case in _op_cases()} == set(load_specs())


@pytest.mark.usefixtures("_zeros")
@pytest.mark.parametrize(("spec", "case"), _op_cases())
def test_ops(spec: OpSpec, case: Case) -> None:
    kwargs = case.make("cpu")
    assert _count_graphs(spec.op, (_with_tokens(spec, kwargs, factor) for factor in FACTORS)) <= 2


# ---- tk_modeling


# Functions of tk_modeling that take what an op takes, and an op whose cases have arguments for them.
FUNCTIONS = {
    name: spec
    for spec in load_specs().values()
    for name in tk_modeling.__all__
    if name == spec.op.__name__ or (name, spec.op.__name__) == ("swiglu", "swiglu_backward")
}


@pytest.mark.usefixtures("_zeros")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    """Forward and backward. The other functions are those of the modules below."""
    function, spec = getattr(tk_modeling, name), FUNCTIONS[name]
    taken = inspect.signature(function).parameters.keys() - {"out"}

    def arguments(factor: int) -> dict[str, Any]:
        found = _with_tokens(spec, kwargs, factor).items()
        return {key: _differentiable(value) for key, value in found if key in taken}

    cases = (case for case in spec.cases if case.small and case.modes and (name != "swiglu" or "all" in case.name))
    kwargs = next(cases).make("cpu")
    assert _count_graphs(function, map(arguments, FACTORS)) <= 2


def _differentiable(tree: Any) -> Any:
    return map_tensors(lambda x: x.detach().requires_grad_() if x.is_floating_point() and x.itemsize > 1 else x, tree)


def _activations(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16).requires_grad_()


BF16 = {"dtype": torch.bfloat16}
LAYOUT = engram_layout(50, layer_ids=(1,), max_ngram=3, num_heads=2, table_sizes=(17, 23))
MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, ...]]]] = {
    # More experts than pairs at first, fewer later.
    "moe": (lambda: tk_modeling.MoE(64, 64, 24, 2, **BF16), lambda n: (_activations(n, 64),)),
    "moe-fp8": (lambda: tk_modeling.MoE(128, 128, 2, 1, fp8=True, **BF16), lambda n: (_activations(n, 128),)),
    "router": (lambda: tk_modeling.Router(64, 8, 2, num_groups=2, num_topk_groups=1), lambda n: (_activations(n, 64),)),
    "fp8-linear": (lambda: tk_modeling.FP8Linear(128, 128, **BF16), lambda n: (_activations(n, 128),)),
    "grouped-fp8-linear": (
        lambda: tk_modeling.GroupedFP8Linear(2, 128, 128, **BF16),
        lambda n: (_activations(align(16 * n, 128), 128), torch.tensor([5, 130], dtype=torch.int32)),
    ),
    "hyper-connection": (
        lambda: tk_modeling.HyperConnection(nn.Linear(64, 64, **BF16), 64, sinkhorn_repeat=3),
        lambda n: (_activations(n, 4, 64),),
    ),
    "hyper-connection-shifted": (
        lambda: tk_modeling.HyperConnection(nn.Linear(64, 64, **BF16), 64, sinkhorn_repeat=3, shifted=True),
        lambda n: (_activations(n, 4, 64), torch.rand(n, 4, 1).requires_grad_()),
    ),
    "hyper-head": (lambda: tk_modeling.HyperHead(64, norm_weight=True), lambda n: (_activations(n, 4, 64),)),
    "engram": (
        lambda: tk_modeling.Engram(64, LAYOUT, 0, head_dim=32, **BF16),
        lambda n: (_activations(n, 4, 64), torch.randint(50, (n,))),
    ),
    "engram-gate": (
        lambda: tk_modeling.EngramGate(64, **BF16),
        lambda n: (_activations(n, 4, 64), _activations(n, 4, 64), _activations(n, 64)),
    ),
}
# FP8Linear makes a third graph: for up to 128 tokens it has one row of scales, and torch specializes the size 1.
MORE = {"fp8-linear": 1}


@pytest.mark.usefixtures("_zeros")
@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str) -> None:
    """With sizes as they come, and with a dimension that is marked."""
    make, arguments = MODULES[name]

    def marked(num_tokens: int) -> tuple[Tensor, ...]:
        inputs = arguments(num_tokens)
        for x in inputs:
            if x.shape[0] >= num_tokens:
                torch._dynamo.mark_dynamic(x, 0)
        return inputs

    assert _count_graphs(make(), map(arguments, SIZES)) <= 2 + MORE.get(name, 0)
    assert _count_graphs(make(), map(marked, (24, 160))) <= 1 + MORE.get(name, 0)


@pytest.mark.parametrize("name", MODULES)
def test_export_with_a_dim(name: str) -> None:
    make, arguments = MODULES[name]
    module = make().requires_grad_(False)
    # Tensors of more elements than the ops take are refused, so the dimension has to have an end.
    num_tokens = torch.export.Dim("num_tokens", min=129 if name in MORE else 2, max=4096)
    if name == "grouped-fp8-linear":
        num_tokens = 128 * torch.export.Dim("num_blocks", max=512)
    first, other = (tuple(x.detach() for x in arguments(size)) for size in (136, 200))
    shapes = tuple({0: num_tokens} if len(x) >= 136 else {} for x in first)
    if "shifted" in name:  # its forward takes (residual, *args)
        shapes = (shapes[0], shapes[1:])
    exported = torch.export.export(module, first, dynamic_shapes=shapes, strict=True).module()
    for found, expected in zip(tensors(exported(*other)), tensors(module(*other)), strict=True):
        assert torch.equal(found, expected)
