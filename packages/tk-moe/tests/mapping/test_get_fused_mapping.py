"""get_fused_mapping."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import tk_core
import tk_moe
from tk_core.arch import ARCHS, arch_from_name
from tk_core.testing import Case, Make, OpSpec, assert_equal, tiers
from tk_moe import reference
from tk_moe.mapping.get_fused_mapping import MAX_POSITIONS, GetFusedMappingConfig

from ..models import MODEL_EXPERTS, benches

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
        if routing == "last":
            topk_idx = torch.full(shape, num_experts - 1, device=device)
        elif routing == "half":
            topk_idx = torch.randint(0, num_experts, shape, device=device)
            topk_idx.masked_fill_(torch.rand(shape, device=device) < 0.5, num_experts - 1)
        elif routing == "few":
            few = torch.randint(0, num_experts, (3,), device=device)
            topk_idx = few[torch.randint(0, 3, shape, device=device)]
        elif routing == "distinct" and num_topk <= num_experts:
            topk_idx = torch.rand((num_tokens, num_experts), device=device).topk(num_topk, sorted=False).indices
        else:
            topk_idx = torch.randint(0, num_experts, shape, device=device)
        if routing == "none":
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
    op=tk_moe.get_fused_mapping,
    cases=(
        # Small cases do not read sizes back, which fake tensors cannot.
        Case("e32-k6-t67", make(67, 6, 32), small=True, modes=True, compile=True),
        Case("e256-k8-t31", make(31, 8, 256), small=True),
        Case("e13-k3-t31", make(31, 3, 13, 1), small=True),
        Case("e1024-k32-t9", make(9, 32, 1024, 2), small=True, compile=True),
        Case("e1-k1-t5", make(5, 1, 1, 128), small=True),
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
        Case("e32-k6-t67-psum", make(67, 6, 32, with_psum=True), small=True, modes=True),
        Case("e32-k6-t67-psum-none", make(67, 6, 32, 128, routing="none", with_psum=True), small=True),
        Case("e32-k6-t0-psum", make(0, 6, 32, with_psum=True), small=True),
        Case("e32-k6-t67-int32", make(67, 6, 32, idx_dtype=torch.int32), small=True, modes=True),
        Case("e32-k6-t67-int32-none", make(67, 6, 32, routing="none", idx_dtype=torch.int32), small=True),
        # More than 4096 pairs need clusters, and more than clusters can take need two launches.
        Case("e32-k8-t520", make(520, 8, 32), small=True, modes=True),
        Case("e1024-k8-t520-none", make(520, 8, 1024, routing="none")),
        Case("e13-k7-t601-few", make(601, 7, 13, 1, routing="few")),
        Case("e256-k8-t16385", make(16385, 8, 256), modes=True),
        Case("e72-k9-t20001-none", make(20001, 9, 72, 128, routing="none")),
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
        *benches("e256-k8-t{}", lambda t: make(t, 8, 256), (8192,), models=(8192,), compile=True),
        *benches(
            "e256-k8-t{}",
            lambda t: make(t, 8, 256),
            (128, 1, 64, 512, 1024, 2048, 4001, 8001, 16384, 32768),
            models=(128,),
        ),
        *benches("e256-k8-t{}-int32", lambda t: make(t, 8, 256, idx_dtype=torch.int32), (8192,)),
        *benches("e256-k8-t{}-last", lambda t: make(t, 8, 256, routing="last"), (8192,)),
        *benches("e256-k8-t{}-half", lambda t: make(t, 8, 256, routing="half"), (8192,)),
        *benches("e256-k8-t{}-a128", lambda t: make(t, 8, 256, 128), (8192,)),
        *benches("e{}-k{}-t8192", lambda e, k: make(8192, k, e), ((64, 6), (128, 8), (384, 8), (512, 8))),
    ),
)


test_tiers = tiers.tests(SPEC)

NAMES = (
    *("pos_to_expert", "pos_to_token", "pos_to_token_topk", "token_topk_to_pos"),
    *("expert_start", "expert_end", "num_tokens_per_expert"),
)


def run(topk_idx: list[list[int]], *args: Any) -> dict[str, Any]:
    """The op's outputs as lists, by name."""
    *outputs, sizes = tk_moe.get_fused_mapping(torch.tensor(topk_idx), *args)
    assert all(x.dtype == torch.int32 for x in outputs)
    return {**{name: x.tolist() for name, x in zip(NAMES, outputs, strict=True)}, "list": sizes}


TOPK_IDX = [[2, 0], [0, -1], [2, 0], [-7, 2]]
MAPPING = {
    "pos_to_expert": [0, 0, 0, -1, 2, 2, 2, -1],
    "pos_to_token": [0, 1, 2, -1, 0, 2, 3, -1],
    "pos_to_token_topk": [1, 2, 5, -1, 0, 4, 7, -1],
    "token_topk_to_pos": [[4, 0], [1, -1], [5, 2], [-1, 6]],
    "expert_start": [0, 4, 4],
    "expert_end": [4, 4, 8],
    "num_tokens_per_expert": [4, 0, 4],
    "list": [4, 0, 4],
}


def test_by_hand() -> None:
    assert run(TOPK_IDX, 3, 0, 2) == MAPPING


def test_psum_is_where_each_segment_s_pairs_end() -> None:
    *outputs, sizes, psum = tk_moe.get_fused_mapping(torch.tensor(TOPK_IDX, dtype=torch.int32), 3, 0, 2, with_psum=True)
    assert psum.dtype == torch.int32
    assert psum.tolist() == [3, 4, 7]
    assert [x.tolist() for x in outputs] == [MAPPING[name] for name in NAMES]
    assert sizes == MAPPING["list"]


def test_sizes_can_not_be_read_where_there_are_none() -> None:
    def mapped(idx: torch.Tensor) -> torch.Tensor:
        return tk_moe.get_fused_mapping(idx, 3, 0, 2)[0]

    class Mapped(torch.nn.Module):
        def forward(self, idx: torch.Tensor) -> torch.Tensor:
            return mapped(idx)

    idx = torch.tensor(TOPK_IDX)
    message = "num_expanded_tokens.*tk_moe.max_expanded_tokens"
    with FakeTensorMode() as mode, pytest.raises(ValueError, match=message):
        mapped(mode.from_tensor(idx))
    with pytest.raises(ValueError, match=message):
        torch.export.export(Mapped(), (idx,))
    with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
        torch.compile(mapped, fullgraph=True, backend="aot_eager")(idx)
    size = tk_moe.max_expanded_tokens(*idx.shape, 3, 2)
    sized = torch.compile(lambda idx: tk_moe.get_fused_mapping(idx, 3, size, 2)[0], fullgraph=True, backend="aot_eager")
    assert sized(idx).shape == (size,)


def test_pairs_that_do_not_fit_have_no_position() -> None:
    expected = {
        **MAPPING,
        **{name: MAPPING[name][:5] for name in NAMES[:3]},
        "token_topk_to_pos": [[4, 0], [1, -1], [-1, 2], [-1, -1]],
        "list": [],
    }
    assert run(TOPK_IDX, 3, 5, 2) == expected


@pytest.mark.parametrize(("alignment", "worst_case"), [(1, 0), (16, 32), (128, 256)])
def test_no_tokens(alignment: int, worst_case: int) -> None:
    nothing = [0, 0, 0]
    for args, length, sizes in (
        ((0, alignment), 0, nothing),
        ((0, alignment, True), worst_case, []),
        ((7, alignment), 7, []),
    ):
        *maps, token_topk_to_pos, start, end, counts, listed = tk_moe.get_fused_mapping(
            torch.empty(0, 4, dtype=torch.int64), 3, *args
        )
        assert [x.tolist() for x in maps] == [[-1] * length] * 3
        assert token_topk_to_pos.shape == (0, 4)
        assert [x.tolist() for x in (start, end, counts)] == [nothing] * 3
        assert listed == sizes


def naive_mapping(
    topk_idx: list[list[int]], num_experts: int, num_expanded_tokens: int, alignment: int, force_no_sync: bool
) -> dict[str, Any]:
    """Fill the segments one pair after another."""
    num_pairs = sum(map(len, topk_idx))
    length = num_expanded_tokens or (num_pairs + (alignment - 1) * num_experts) // alignment * alignment
    cut = not num_expanded_tokens and not force_no_sync
    out: dict[str, Any] = {name: [] for name in NAMES}
    out["token_topk_to_pos"] = [[-1] * len(row) for row in topk_idx]
    maps: list[list[int]] = [[], [], []]
    for expert in range(num_experts):
        out["expert_start"].append(len(maps[0]))
        for token, row in enumerate(topk_idx):
            for slot, chosen in enumerate(row):
                if chosen == expert:
                    if len(maps[0]) < length:
                        out["token_topk_to_pos"][token][slot] = len(maps[0])
                    for values, value in zip(maps, (expert, token, token * len(row) + slot), strict=True):
                        values.append(value)
        while len(maps[0]) % alignment:
            for values in maps:
                values.append(-1)
        out["expert_end"].append(len(maps[0]))
        out["num_tokens_per_expert"].append(out["expert_end"][-1] - out["expert_start"][-1])
    for name, values in zip(NAMES[:3], maps, strict=True):
        out[name] = values if cut else (values + [-1] * length)[:length]
    out["list"] = out["num_tokens_per_expert"] if cut else []
    return out


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_reference_against_a_loop(data: st.DataObject) -> None:
    num_experts = data.draw(st.integers(1, 6))
    num_topk = data.draw(st.integers(1, 4))
    index = st.integers(-2, num_experts) | st.sampled_from([-(2**63), 2**32, 2**63 - 1])
    row = st.lists(index, min_size=num_topk, max_size=num_topk)
    topk_idx = data.draw(st.lists(row, min_size=1, max_size=12))
    args = (num_experts, data.draw(st.integers(0, 60)), data.draw(st.integers(1, 9)), data.draw(st.booleans()))
    assert run(topk_idx, *args) == naive_mapping(topk_idx, *args)


GOOD: dict[str, Any] = {
    "topk_idx": torch.zeros(4, 2, dtype=torch.int64),
    "num_experts": 4,
    "num_expanded_tokens": 0,
    "alignment": 16,
}


test_bad_input = tiers.bad_input(
    SPEC,
    GOOD,
    [
        ({"topk_idx": torch.zeros(4, 33, dtype=torch.int64)}, ValueError, "topk_idx.*1 to 32"),
        ({"num_experts": 1025}, ValueError, "num_experts.*1 to 1024"),
        ({"num_expanded_tokens": MAX_POSITIONS + 1}, ValueError, "num_expanded_tokens.*0 to"),
        ({"alignment": 0}, ValueError, "alignment"),
        ({"alignment": MAX_POSITIONS, "num_experts": 2}, ValueError, "topk_idx.*positions"),
    ],
)


@pytest.mark.parametrize("arch", ARCHS.values(), ids=str)
@pytest.mark.parametrize("num_experts", [1, 8, 256, 512, 1024])
def test_every_config_has_room(arch: tk_core.Arch, num_experts: int) -> None:
    for num_sms in (1, 7, 16, 60, 132):
        for exponent in range(24):
            config = GetFusedMappingConfig.best(1 << exponent, num_experts, num_sms, arch)
            assert config.shared_memory_bytes(num_experts) <= arch.max_shared_memory
            assert config.room % 32 == 0
            assert 0 < config.room < 2**16
            assert config.warps * 32 >= num_experts
            assert config.cluster_size * config.num_clusters <= num_sms
            assert config.cluster_size in (0, 1) or arch.sm >= 90
            assert not config.cluster_size or config.max_pairs >= 1 << exponent


def naive_parts(num_pairs: int, config: GetFusedMappingConfig) -> list[range]:
    """Parts of the blocks as the kernel works them out, in the order of the pairs."""
    num_chunks = config.cluster_size or math.ceil(num_pairs / config.room)
    part = math.ceil(math.ceil(num_pairs / num_chunks) / (config.num_clusters * 32)) * 32
    return [range(i * part, min((i + 1) * part, num_pairs)) for i in range(num_chunks * config.num_clusters)]


@pytest.mark.parametrize("num_sms", [1, 8, 100, 132])
def test_no_block_runs_out_of_room(num_sms: int) -> None:
    for exponent in range(24):
        config = GetFusedMappingConfig.best(1 << exponent, 256, num_sms, arch_from_name("sm_90a"))
        for num_pairs in ((1 << exponent) // 2 + 1, (1 << exponent) - 1, 1 << exponent):
            parts = naive_parts(num_pairs, config)
            assert sum(map(len, parts)) == num_pairs
            assert max(map(len, parts)) <= config.room
            assert config.cluster_size <= 1 or len(parts[0]) * config.num_clusters < 2**16


# Poisoned outputs are full of -1, as padding has to be, so this test fills them with something else.
@pytest.mark.gpu
@pytest.mark.parametrize("num_sms", [None, 8, 1])
@pytest.mark.parametrize("num_tokens", [0, 1, 128, 520, 4001, 16401])
def test_gpu_writes_all_padding_whatever_the_number_of_blocks(num_tokens: int, num_sms: int | None) -> None:
    topk_idx = torch.randint(-1, 256, (num_tokens, 8), device="cuda")
    for num_pos, alignment in ((num_tokens * 8 + 5000, 16), (num_tokens * 8 + 40000, 128), (num_tokens * 4 + 1, 16)):
        *expected, _, psum = reference.get_fused_mapping(topk_idx, 256, num_pos, alignment, True, with_psum=True)
        expected.append(psum)
        outputs = [torch.full_like(x, 0x55555555) for x in expected]
        with tk_core.num_sms(num_sms):
            torch.ops.tk_moe.get_fused_mapping(topk_idx, 256, num_pos, alignment, True, True, outputs)
        assert_equal(outputs, expected)
