"""Engram, beyond the checks of test_modules.py."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tk_engram
import tk_modeling
from tk_core import env
from tk_core.testing import assert_equal
from tk_modeling.reference import engram as reference

from .cases import LAYOUT, randomized, relative_error, streams

N = 3
M, HIDDEN = 2, 64
OPTIONS: dict[str, Any] = {"head_dim": 32, "mhc_mult": M, "dtype": torch.bfloat16}
VARIANTS = [{}, {"short_conv": False}, {"pad_id": 2, "block_id": 5}]


def new_engram(**options: Any) -> tk_modeling.Engram:
    torch.manual_seed(0)
    return randomized(tk_modeling.Engram(HIDDEN, LAYOUT, 0, **(OPTIONS | options)))


def new_inputs(*leading: int) -> tuple[Tensor, Tensor]:
    """Streams, and ids from 0 to 7, so that block_id is among them."""
    torch.manual_seed(1)
    return streams(leading, M, HIDDEN, "cpu"), torch.randint(8, leading, dtype=torch.int32)


def with_exact_projection(module: tk_modeling.Engram) -> tk_modeling.Engram:
    """With numbers whose products and sums float32 holds, so that torch's order of adding them changes no bit."""
    with torch.no_grad():
        module.table.copy_(torch.randint(-3, 5, module.table.shape))
        module.kv_weight.copy_(torch.randint(-2, 3, module.kv_weight.shape) / 8)
    return module


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize(("leading", "offsets"), [((3, 6), None), ((17,), None), ((17,), [0, 1, 8, 8, 17])])
def test_forward_is_that_of_the_reference(
    leading: tuple[int, ...], offsets: list[int] | None, options: dict[str, Any], masked: bool
) -> None:
    module = new_engram(**options)
    plain = reference.Engram(HIDDEN, LAYOUT, 0, **(OPTIONS | options))
    plain.load_state_dict(module.state_dict())
    x, token_ids = new_inputs(*leading)
    cu_seqlens = None if offsets is None else torch.tensor(offsets, dtype=torch.int32)
    mask = torch.rand(leading) < 0.3 if masked else None
    options = {"cu_seqlens": cu_seqlens, "image_token_mask": mask}
    out = module(x, token_ids, **options)
    want = plain.double()(x.double(), token_ids, **options)
    assert out.shape == x.shape
    # The part that the layer adds, which the streams would hide.
    assert relative_error(out - x, want - x.double()) < 0.01


@pytest.mark.parametrize("options", VARIANTS)
def test_rows_are_those_of_the_hash(options: dict[str, Any]) -> None:
    plain = reference.Engram(HIDDEN, LAYOUT, 0, **(OPTIONS | options))
    _, token_ids = new_inputs(2, 40)
    constants = [each[:1] for each in LAYOUT.tensors()]
    for row, found in zip(token_ids, plain._indices(token_ids)):
        pad_id, block_id = options.get("pad_id", 0), options.get("block_id")
        windows = tk_engram.ngram_windows(row, None, N, pad_id, block_id=block_id)
        assert_equal(found.int(), tk_engram.engram_hash(windows, *constants)[0].clone())


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize("lengths", [[1] * 9, [4, 1, 3, 1], [0, 9]])
def test_decoding_a_batch_has_the_bits_of_the_whole(lengths: list[int], options: dict[str, Any]) -> None:
    module = with_exact_projection(new_engram(**options))
    x, token_ids = new_inputs(3, 9)
    state = module.new_state(3)
    with torch.no_grad():
        whole = module(x, token_ids)
        steps = [
            module(x_step, ids, state=state) for x_step, ids in zip(x.split(lengths, 1), token_ids.split(lengths, 1))
        ]
    assert_equal(torch.cat(steps, 1), whole)


@pytest.mark.parametrize("options", VARIANTS)
def test_decoding_packed_sequences_has_the_bits_of_the_whole(options: dict[str, Any]) -> None:
    module = with_exact_projection(new_engram(**options))
    x, token_ids = new_inputs(2, 9)
    state = module.new_state(2)
    # Each step's tokens of each sequence: from the first number to before the second.
    plan = [((0, 4), (0, 0)), ((4, 5), (0, 1)), ((5, 5), (1, 7)), ((5, 9), (7, 9))]
    found = torch.zeros_like(x)
    with torch.no_grad():
        whole = module(x, token_ids)
        for ranges in plan:
            lengths = [last - first for first, last in ranges]
            parts = [torch.arange(first, last) for first, last in ranges]
            cu_seqlens = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32)
            x_step, ids = (torch.cat([each[i][part] for i, part in enumerate(parts)]) for each in (x, token_ids))
            out = module(x_step, ids, cu_seqlens=cu_seqlens, state=state)
            for i, (part, piece) in enumerate(zip(parts, out.split(lengths))):
                found[i, part] = piece
    assert_equal(found, whole)


def test_decoding_one_sequence_of_tokens_without_a_batch() -> None:
    module = with_exact_projection(new_engram())
    x, token_ids = new_inputs(7)
    state = module.new_state(1)
    with torch.inference_mode():
        whole = module(x, token_ids)
        steps = [module(x[t : t + 1], token_ids[t : t + 1], state=state) for t in range(7)]
    assert torch.equal(torch.cat(steps), whole)
    assert state.history.tolist() == [token_ids[5:].flip(0).tolist()]


def test_decoding_compiles() -> None:
    module = with_exact_projection(new_engram())
    x, token_ids = new_inputs(2, 2)
    expected, state = module.new_state(2), module.new_state(2)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for t in range(2):
            step = x[:, t : t + 1], token_ids[:, t : t + 1]
            assert_equal(compiled(*step, state=state), module(*step, state=expected))
    assert_equal(tuple(state), tuple(expected))


def test_int64_ids_are_those_of_int32() -> None:
    module = new_engram()
    x, token_ids = new_inputs(2, 5)
    assert_equal(module(x, token_ids.long()).detach(), module(x, token_ids).detach())


def test_an_id_past_int32_is_that_of_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    module = new_engram(block_id=5)
    x, token_ids = new_inputs(1, 1)
    narrow, wide, widest = (torch.full_like(token_ids, i, dtype=torch.int64) for i in (5, 2**32 + 5, 2**31 - 1))
    assert_equal(module(x, wide).detach(), module(x, widest).detach())
    assert not torch.equal(module(x, wide), module(x, narrow))
    monkeypatch.setattr(env, "debug", lambda: True)
    module(x, narrow)
    with pytest.raises(ValueError, match="token_ids: expected ids of 32 bits, got 4294967301"):
        module(x, wide)


def test_the_table_can_be_frozen_and_kept_in_codes() -> None:
    module = new_engram()
    x, token_ids = new_inputs(2, 9)
    scale = torch.full((module.table.shape[0], 1), 127, dtype=torch.uint8)
    codes = module.table.detach().to(torch.float8_e4m3fn)
    module.table = nn.Parameter(codes.bfloat16(), requires_grad=False)
    expected = module(x, token_ids).detach()
    module.table, module.table_sf = nn.Parameter(codes, requires_grad=False), scale
    out = module(x, token_ids)
    out.sum().backward()
    assert_equal(out.detach(), expected)
    assert module.table.grad is None
    assert module.kv_weight.grad.any()
    assert torch.equal(module.state_dict()["table_sf"], scale)


@pytest.mark.gpu
def test_the_table_can_stay_in_pinned_memory() -> None:
    module = new_engram().cuda()
    x, token_ids = (each.cuda() for each in new_inputs(2, 9))
    expected = module(x, token_ids).detach()
    module.table = nn.Parameter(module.table.detach().cpu().pin_memory(), requires_grad=False)
    assert_equal(module(x, token_ids).detach(), expected)


def test_initial_values() -> None:
    torch.manual_seed(0)
    module = tk_modeling.Engram(HIDDEN, LAYOUT, 1, head_dim=64, mhc_mult=M)
    assert all(parameter.dtype == torch.float32 for parameter in module.parameters())
    assert abs(module.table.std().item() - 1) < 0.05
    assert 0.9 * 256**-0.5 < module.kv_weight.abs().max().item() <= 256**-0.5
    assert not module.conv_weight.any()
    for weight in (module.weight_hidden, module.weight_embed, module.norm_weight):
        assert (weight == 1).all()


@pytest.mark.parametrize("layer", [0, 1])
def test_a_layer_has_the_hash_of_its_index(layer: int) -> None:
    module = tk_modeling.Engram(HIDDEN, LAYOUT, layer, **OPTIONS)
    assert module.multipliers.tolist() == [list(LAYOUT.multipliers[layer])]
    assert module.offsets.tolist() == [list(LAYOUT.offsets[layer])]
    assert len(module.table) == LAYOUT.num_rows[layer]


def test_sparse_gradients_of_the_table_are_the_dense_ones() -> None:
    inputs, grads = new_inputs(2, 9), []
    for sparse_grad in (False, True):
        module = new_engram(sparse_grad=sparse_grad)
        module(*inputs).square().sum().backward()
        assert module.table.grad.is_sparse == sparse_grad
        grads.append(module.table.grad.to_dense())
    assert_equal(*grads)


@pytest.mark.parametrize(
    ("change", "error", "name"),
    [
        ({"hidden_states": torch.zeros(2, 9, M, HIDDEN)}, TypeError, "hidden_states"),
        ({"hidden_states": torch.zeros(18, M, HIDDEN).bfloat16()}, ValueError, "hidden_states"),
        ({"hidden_states": torch.zeros(2, 9, M + 1, HIDDEN).bfloat16()}, ValueError, "hidden_states"),
        ({"token_ids": torch.zeros(2, 9)}, TypeError, "token_ids"),
        ({"token_ids": torch.zeros(1, 2, 9).int()}, ValueError, "token_ids"),
        ({"cu_seqlens": torch.tensor([0, 18]).int()}, ValueError, "cu_seqlens"),
        ({"image_token_mask": torch.zeros(18).bool()}, ValueError, "image_token_mask"),
    ],
)
def test_forward_names_what_is_wrong(change: dict[str, Any], error: type[Exception], name: str) -> None:
    x, token_ids = new_inputs(2, 9)
    with pytest.raises(error, match=f"^{name}:"):
        new_engram()(**({"hidden_states": x, "token_ids": token_ids} | change))


def test_a_state_takes_no_gradients_and_keeps_its_shape() -> None:
    module = new_engram()
    x, token_ids = new_inputs(2, 3)
    state = module.new_state(2)
    with pytest.raises(ValueError, match=r"^state:"):
        module(x, token_ids, state=state)
    with pytest.raises(ValueError, match=r"^history:"), torch.no_grad():
        module(x, token_ids, state=module.new_state(3))
    assert_equal(tuple(state), tuple(module.new_state(2)))
    module.requires_grad_(False)
    assert module(x, token_ids, state=state).shape == x.shape
