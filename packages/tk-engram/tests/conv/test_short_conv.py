"""short_conv."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import tk_core
import tk_engram
from tk_core.arch import ARCHS
from tk_core.kernel import KernelRequest, capture
from tk_core.testing import Case, Make, OpSpec, assert_equal, bench_case, empty, tiers
from tk_core.testing.usage import lower, resource_usages

from ..compare import assert_within_a_step

_BF16, _FP32 = torch.bfloat16, torch.float32


def make_conv(
    num_tokens: int,
    mhc_mult: int,
    hidden: int,
    device: str,
    *,
    dilation: int = 3,
    lengths: tuple[int, ...] | None = None,
    dtypes: tuple[torch.dtype, torch.dtype] = (_BF16, _BF16),
    first_element: int = 0,
) -> dict[str, Any]:
    """Normal tokens of several magnitudes, norm weights around 1, normal taps. The sequences' `lengths` add up to T.

    Tensors start at element `first_element` of their storage.
    """
    tensor = partial(empty, device=device, first_element=first_element)
    u = tensor(num_tokens, mhc_mult, hidden, dtype=_BF16).normal_()
    u.mul_(torch.exp2(torch.randint(-2, 3, (num_tokens, mhc_mult, 1), device=device)))
    cu_seqlens = None
    if lengths is not None:
        assert sum(lengths) == num_tokens
        offsets = [sum(lengths[:b]) for b in range(len(lengths) + 1)]
        cu_seqlens = torch.tensor(offsets, dtype=torch.int32).to(device)
    norm_weight = tensor(mhc_mult, hidden, dtype=dtypes[0]).normal_()
    conv_weight = tensor(mhc_mult, hidden, 4, dtype=dtypes[1]).normal_()
    return {
        "u": u,
        "norm_weight": norm_weight.mul_(0.2).add_(1.0),
        "conv_weight": conv_weight.mul_(0.5),
        "dilation": dilation,
        "cu_seqlens": cu_seqlens,
    }


def make(
    num_tokens: int,
    mhc_mult: int,
    hidden: int,
    *,
    residual: bool = False,
    state: bool = False,
    first_element: int = 0,
    **options: Any,
) -> Make:
    """Arguments of the op: those of `make_conv`, and a residual or a state if wanted."""

    def build(device: str) -> dict[str, Any]:
        inputs = make_conv(num_tokens, mhc_mult, hidden, device, first_element=first_element, **options)
        tensor = partial(empty, dtype=_BF16, device=device, first_element=first_element)
        inputs["residual"] = tensor(num_tokens, mhc_mult, hidden).normal_() if residual else None
        num_sequences = 1 if inputs["cu_seqlens"] is None else len(inputs["cu_seqlens"]) - 1
        kept = (num_sequences, 3 * inputs["dilation"], mhc_mult, hidden)
        inputs["state"] = tensor(*kept).normal_() if state else None
        return inputs

    return build


def compare(actual: Any, expected: Any) -> None:
    """The result within a step of bfloat16, the state bit for bit."""
    assert_within_a_step(actual[0], expected[0], "out")
    assert_equal(actual[1], expected[1], name="state")


SPEC = OpSpec(
    op=tk_engram.short_conv,
    compare=compare,
    mutates=("state",),
    cases=(
        # Sequences shorter and longer than the reach of the taps, and an empty one; full and partial steps.
        Case("m2-h64-t17", make(17, 2, 64), small=True, modes=True),
        Case(
            "m1-h64-t23-packed-residual-state",
            make(23, 1, 64, lengths=(1, 0, 15, 7), residual=True, state=True, dilation=2),
            small=True,
            modes=True,
            compile=True,
        ),
        Case("m2-h64-t11-residual", make(11, 2, 64, residual=True, dilation=1, dtypes=(_FP32, _FP32)), small=True),
        Case("m1-h576-t9-packed", make(9, 1, 576, lengths=(4, 5), dtypes=(_FP32, _BF16)), small=True),
        Case("m3-h64-t5-far-taps", make(5, 3, 64, dilation=4), small=True),
        Case("m1-h8256-t9-two-passes", make(9, 1, 8256, lengths=(4, 5))),
        Case("m1-h64-t3-state-far-taps", make(3, 1, 64, dilation=7, state=True), small=True),
        Case("m1-h128-t4-decode", make(4, 1, 128, lengths=(1, 1, 1, 1), state=True), small=True),
        Case("m2-h64-t0-state", make(0, 2, 64, state=True), small=True),
        Case("m2-h64-t6-unaligned", make(6, 2, 64, residual=True, state=True, first_element=1), small=True),
        Case("m4-h7168-t1-state-float32", make(1, 4, 7168, state=True, dtypes=(_FP32, _FP32)), compile=True),
        Case("m4-h7168-t17", make(17, 4, 7168)),
        Case("m4-h7168-t4001-packed", make(4001, 4, 7168, lengths=(1000, 1, 3000))),
        Case("m4-h7168-t8001-residual", make(8001, 4, 7168, residual=True)),
        Case("m1-h576-t8001-state", make(8001, 1, 576, lengths=(4000, 2, 3999), state=True)),
        Case("m2-h1280-t4001-residual-state", make(4001, 2, 1280, residual=True, state=True, dilation=2)),
        Case("m8-h2560-t1001", make(1001, 8, 2560)),
        Case("m2-h4096-t1001-float32", make(1001, 2, 4096, dtypes=(_FP32, _FP32))),
        Case("m1-h5120-t1001-far-taps", make(1001, 1, 5120, dilation=500)),
        Case("m2-h8192-t257-packed", make(257, 2, 8192, lengths=(100, 157), residual=True)),
        Case("m1-h16384-t65", make(65, 1, 16384)),
        Case("m4-h7168-t64-decode", make(64, 4, 7168, lengths=(1,) * 64, state=True, residual=True)),
        bench_case("m4-h7168-t8192", make(8192, 4, 7168), model_shape=True, compile=True),
        bench_case("m4-h7168-t8192-residual", make(8192, 4, 7168, residual=True), model_shape=True),
        bench_case(
            "m4-h7168-t8192-packed",
            make(8192, 4, 7168, residual=True, lengths=(2048,) * 4),
            model_shape=True,
            compile=True,
        ),
        bench_case(
            "m4-h7168-t64-decode", make(64, 4, 7168, residual=True, lengths=(1,) * 64, state=True), model_shape=True
        ),
        *(bench_case(f"m4-h7168-t{n}", make(n, 4, 7168)) for n in (1, 64, 4001, 8001)),
        *(bench_case(f"m4-h{h}-t8192", make(8192, 4, h)) for h in (2048, 4096)),
    ),
)


test_tiers = tiers.tests(SPEC)


def silu(y: float) -> float:
    """y / (1 + exp(-y))."""
    return y / (1 + math.exp(-y))


def signs(*values: float, device: str) -> Tensor:
    """Tokens of one stream of 64 channels, each ± one value: n of such a token is ±1."""
    pattern = torch.tensor([1.0, -1.0] * 32)
    return torch.stack([value * pattern for value in values])[:, None].bfloat16().to(device)


def test_by_hand(device: str) -> None:
    u = signs(1.0, 2.0, -4.0, 8.0, 0.5, device=device)
    norm_weight = torch.full((1, 64), 2.0, device=device)
    conv_weight = torch.tensor([0.125, 0.25, 0.5, 1.0], device=device).expand(1, 64, 4).contiguous()
    # n is ±2 with the token's sign; two tokens apart, so that tokens 4, 2, 0 meet, and 3 and 1.
    y = [2.0, 2.0, -2.0 + 1.0, 2.0 + 1.0, 2.0 - 1.0 + 0.5]
    out = tk_engram.short_conv(u, norm_weight, conv_weight, dilation=2, eps=1e-12)
    expected = torch.tensor([[silu(each), silu(-each)] for each in y])
    torch.testing.assert_close(out[:, 0, :2].cpu(), expected.bfloat16(), rtol=2**-8, atol=0)
    residual = torch.full_like(u, 16.0)
    out = tk_engram.short_conv(u, norm_weight, conv_weight, dilation=2, eps=1e-12, residual=residual)
    torch.testing.assert_close(
        out[:, 0, :2].cpu(), (expected + u[:, 0, :2].cpu().float() + 16).bfloat16(), rtol=2**-8, atol=0
    )


def test_the_sum_is_rounded_once(device: str) -> None:
    # n is 1, so y is 129.25, and SiLU(y) the same but for 1e-54. 129.25 + 1 + 127 = 257.25 goes to 258. With SiLU(y)
    # rounded before, to 129, it would be 257, which goes to the even 256; with 129.25 + 1 rounded, to 130, also 256.
    u = torch.ones(1, 1, 64, device=device).bfloat16()
    weights = torch.ones(1, 64, device=device), torch.full((1, 64, 4), 129.25, device=device)
    out = tk_engram.short_conv(u, *weights, dilation=1, eps=1e-12, residual=u * 127)
    assert out.unique().tolist() == [258.0]


def test_a_sequence_does_not_see_another(device: str) -> None:
    lengths = (5, 1, 0, 11, 6)
    inputs = make(23, 2, 128, lengths=lengths, residual=True)(device)
    packed = tk_engram.short_conv(**inputs)
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        alone = {name: inputs[name][part].clone() for name in ("u", "residual")}
        assert_equal(tk_engram.short_conv(**{**inputs, **alone, "cu_seqlens": None}), packed[part].clone())
        start += length
    # Not even NaN.
    inputs["u"][5] = torch.nan
    again = tk_engram.short_conv(**inputs)
    assert again[5].isnan().all()
    assert_equal(again[:5].clone(), packed[:5].clone())
    assert_equal(again[6:].clone(), packed[6:].clone())


@pytest.mark.parametrize("dilation", [1, 3])
@pytest.mark.parametrize("sizes", [(1,) * 17, (16, 1), (2, 5, 1, 1, 8), (17,), (0, 17)])
def test_decode_has_the_bits_of_the_whole_sequence(sizes: tuple[int, ...], dilation: int, device: str) -> None:
    inputs = make(17, 2, 128, dilation=dilation, residual=True)(device)
    whole = tk_engram.short_conv(**inputs)
    state = torch.zeros(1, 3 * dilation, 2, 128, device=device).bfloat16()
    start = 0
    for size in sizes:
        part = slice(start, start + size)
        token = {name: inputs[name][part].clone() for name in ("u", "residual")}
        assert_equal(tk_engram.short_conv(**{**inputs, **token, "state": state}), whole[part].clone())
        start += size
    last = torch.cat((torch.zeros_like(state[0]), inputs["u"]))[-3 * dilation :]
    assert_equal(state, last[None].clone())


def test_decode_of_several_sequences(device: str) -> None:
    # Sequences of 9, 4 and 7 tokens, of which each call takes another number.
    dilation, totals = 2, (9, 4, 7)
    inputs = make(20, 2, 64, dilation=dilation, lengths=totals)(device)
    whole = tk_engram.short_conv(**inputs).split(totals)
    rows = inputs["u"].split(totals)
    state = torch.zeros(3, 3 * dilation, 2, 64, device=device).bfloat16()
    done = [0, 0, 0]
    for sizes in ((1, 0, 3), (7, 1, 0), (1, 1, 1), (0, 2, 3)):
        parts = [slice(at, at + size) for at, size in zip(done, sizes, strict=True)]
        u = torch.cat([x[part] for x, part in zip(rows, parts, strict=True)])
        cu_seqlens = torch.tensor([0, *torch.tensor(sizes).cumsum(0)], dtype=torch.int32, device=device)
        out = tk_engram.short_conv(**{**inputs, "u": u, "cu_seqlens": cu_seqlens, "state": state})
        assert_equal(out, torch.cat([x[part] for x, part in zip(whole, parts, strict=True)]))
        done = [at + size for at, size in zip(done, sizes, strict=True)]
    assert done == [*totals]
    for b, x in enumerate(rows):
        assert_equal(state[b].clone(), torch.cat((torch.zeros_like(state[b]), x))[-3 * dilation :].clone())


def test_against_conv1d(device: str) -> None:
    inputs = make(50, 3, 64, dtypes=(torch.float32, torch.float32), residual=True)(device)
    u = inputs["u"].double()
    n = torch.nn.functional.rms_norm(u, (64,), eps=1e-5) * inputs["norm_weight"].double()
    padded = torch.nn.functional.pad(n.flatten(1).T, (9, 0))
    filters = inputs["conv_weight"].double().flatten(0, 1)[:, None]
    y = torch.nn.functional.conv1d(padded[None], filters, dilation=3, groups=192)[0].T.view_as(u)
    expected = torch.nn.functional.silu(y) + u + inputs["residual"].double()
    assert_within_a_step(tk_engram.short_conv(**inputs), expected.bfloat16().contiguous(), "out")


U = torch.ones(6, 2, 64).bfloat16()
GOOD: dict[str, Any] = {
    "u": U,
    "norm_weight": torch.ones(2, 64),
    "conv_weight": torch.ones(2, 64, 4),
    "dilation": 2,
    "cu_seqlens": torch.tensor([0, 4, 6], dtype=torch.int32),
    "residual": U,
    "state": torch.full((2, 6, 2, 64), 7.0).bfloat16(),
}


test_bad_input = tiers.bad_input(
    SPEC,
    GOOD,
    [
        ({"u": U.repeat(1, 5, 1)[:, :9].contiguous()}, ValueError, "m .*u.*1 to 8"),
        ({"u": U[..., :32].contiguous()}, ValueError, "H .*u.*64 to 16384"),
        ({"u": U.repeat(1, 1, 2)[..., :96].contiguous()}, ValueError, "H .*u.*multiple of 64"),
        ({"dilation": 0}, ValueError, "dilation: .*1 to 65536"),
        ({"dilation": 65537}, ValueError, "dilation: .*1 to 65536"),
        ({"cu_seqlens": torch.zeros(1, dtype=torch.int32)}, ValueError, "cu_seqlens: .*two offsets"),
        ({"eps": 0.0}, ValueError, "eps: .*positive"),
        ({"eps": 1e-50}, ValueError, "eps: .*float32"),
        ({"eps": float("inf")}, ValueError, "eps: .*finite"),
        ({"residual": U[:5]}, ValueError, "residual: .*shape"),
        ({"state": torch.ones(1, 6, 2, 64).bfloat16()}, ValueError, "state: .*shape"),
        ({"state": torch.ones(2, 3, 2, 64).bfloat16()}, ValueError, "state: .*shape"),
    ],
)


@pytest.mark.parametrize("offsets", [[1, 4, 6], [0, 4, 5], [0, 7, 6], [0, 4, 8]])
def test_offsets_are_checked_in_debug_mode(offsets: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tk_core.env.debug", lambda: True)
    tk_engram.short_conv(**{**GOOD, "state": GOOD["state"].clone()})
    with pytest.raises(ValueError, match=r"cu_seqlens: .*ascend from 0 to 6"):
        tk_engram.short_conv(**{**GOOD, "cu_seqlens": torch.tensor(offsets, dtype=torch.int32)})


# (H, whether there is a residual).
_ROWS_OF_ONE_PASS = ((4864, True), (4096, False), (5888, False))


@pytest.mark.compile
@pytest.mark.parametrize(
    ("arch", "rows"),
    [("sm_90a", (*_ROWS_OF_ONE_PASS, (7936, True))), ("sm_100a", _ROWS_OF_ONE_PASS[-1:])],
    ids=["sm_90a", "sm_100a"],
)
def test_no_registers_spill(arch: str, rows: tuple[tuple[int, bool], ...]) -> None:
    """With the most threads of one pass and where registers are fewest; on sm_90a with more threads, in two passes.

    The tiers compile H = 7168, whose kernels leave 16 registers or more; two passes leave 100 on sm_100a, which takes
    two registers more or fewer for the other rows.
    """
    found: list[KernelRequest] = []
    for hidden, residual in rows:
        with capture(ARCHS[arch]) as requests:
            tk_engram.short_conv(**make(64, 4, hidden, residual=residual, lengths=(24, 40))("meta"))
        found += [request for request in requests if request not in found]
    lowered = [lower(each.kernel, *each.args, simplified=False) for each in found]
    for request, usage in zip(found, resource_usages(found, lowered)):
        assert {function: each.stack_bytes for function, each in usage.items()} == dict.fromkeys(usage, 0), request


@pytest.mark.gpu
def test_gpu_bits_of_a_token_do_not_depend_on_the_others() -> None:
    inputs = make(4001, 4, 7168, residual=True)("cuda")
    out = tk_engram.short_conv(**inputs)
    for count in (1, 17, 132):
        with tk_core.num_sms(count):
            assert_equal(tk_engram.short_conv(**inputs), out)
    # Token 2000 depends on itself and on three before it.
    alone = {name: inputs[name][1991:2001].clone() for name in ("u", "residual")}
    assert_equal(tk_engram.short_conv(**{**inputs, **alone})[-1:].clone(), out[2000:2001].clone())


@pytest.mark.gpu(gib=13)
def test_gpu_beyond_two_to_the_31_elements() -> None:
    num_tokens = 2**31 // (8 * 8192) + 5
    inputs = make(num_tokens, 8, 8192, residual=True)("cuda")
    out = tk_engram.short_conv(**inputs)
    last = {name: inputs[name][-20:].clone() for name in ("u", "residual")}
    assert_equal(out[-11:].clone(), tk_engram.short_conv(**{**inputs, **last})[-11:].clone())


@pytest.mark.gpu
def test_gpu_bad_offsets_write_nothing_outside() -> None:
    inputs = make(64, 1, 64, lengths=(30, 34), state=True)("cuda")
    inputs["cu_seqlens"].copy_(torch.tensor([50, -(2**20), 2**20]))
    tk_engram.short_conv(**inputs)
    torch.cuda.synchronize()
