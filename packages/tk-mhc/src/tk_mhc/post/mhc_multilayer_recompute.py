"""mhc_multilayer_recompute: computes the streams and inputs of several sublayers again, from the sublayers' outputs.

    R_0 = initial_residual
    layer_input_i = bf16(Σ_s pre_i[s] · R_i[s])                                  as mhc_pre_apply_mix
    R_{i+1}[n]    = bf16(post_i[n] · layer_output_i + Σ_k comb_i[k, n] · R_i[k])   as mhc_post

bit for bit as those ops compute it, in one launch.
The paper recomputes them so in the backward pass instead of keeping them.

A thread block takes a token and a stretch of its channels and walks the layers; a thread keeps eight neighbouring
channels of all streams in registers, so that of the residuals only the first is read. The mixes of all layers come
first, into shared memory; the output of a sublayer is loaded while the layer before it is computed:

    all mixes, initial_residual, layer_output_0
    layer 0     load layer_output_1     collapse → layer_input_0    mix → residual_0
    layer 1     load layer_output_2     collapse → layer_input_1    mix → residual_1
    …

Each tensor of the lists is an argument of the kernel. So that the layers are a loop and not code for each, the block
writes the addresses of all of them into shared memory, where the loop looks them up.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.op import launching, op
from tk_core.tiles import DIRECT_COPIES, VECTOR, channel_tile
from tk_core.views import flat
from tk_mhc.lib.tokens import check_streams

# Rows of the table of addresses.
_PRE, _LAYER_OUTPUT, _POST, _COMB, _LAYER_INPUT, _RESIDUAL = range(6)


# Explicit loads and stores: nvcc splits a 16-byte store where it cannot see that the address is aligned.
@kernel(pass_configs={**DIRECT_COPIES, "tl.enable_lower_ldgstg": True})
def _mhc_multilayer_recompute_kernel(num_layers: int, num_posts: int, mhc_mult: int, hidden: int, arch: Arch) -> Any:
    import tilelang.language as T

    from tk_mhc.lib.stream_steps import collapse_streams, post_streams

    # As many blocks as fit without spilled registers. m 4, H 7168, ten layers, 8192 tokens on an H200: 1848 µs with
    # five blocks of 1024 channels, 1888 with four, 1934 with two of 1792.
    block_channels = channel_tile(hidden, max_threads=128)
    threads = block_channels // VECTOR
    registers = {2: 64, 4: 96, 8: 168}[mhc_mult]
    # An SM has four partitions, each with 512 registers for each lane of a warp.
    min_blocks = 4 * (512 // registers) // (threads // 32)
    # Tuples, for loops that Python unrolls: each layer has arguments of its own.
    layers, posts = tuple(range(num_layers)), tuple(range(num_posts))
    num_tokens = T.dynamic("num_tokens")
    channels_shape, streams_shape = (num_tokens, hidden), (num_tokens, mhc_mult, hidden)
    mix_shape, comb_shape = (num_tokens, mhc_mult, 1), (num_tokens, mhc_mult, mhc_mult)

    @T.prim_func
    def mhc_multilayer_recompute(initial_residual: T.Tensor(streams_shape, "bfloat16")) -> None:
        # The other arguments, as many as there are layers, in the order of the public function's lists.
        pre_mixes = [T.arg(f"pre_mix_{i}", T.Tensor(mix_shape, "float32")) for i in layers]
        layer_outputs = [T.arg(f"layer_output_{i}", T.Tensor(channels_shape, "bfloat16")) for i in posts]
        post_mixes = [T.arg(f"post_mix_{i}", T.Tensor(mix_shape, "float32")) for i in posts]
        comb_mixes = [T.arg(f"comb_mix_{i}", T.Tensor(comb_shape, "float32")) for i in posts]
        layer_inputs = [T.arg(f"layer_input_{i}", T.Tensor(channels_shape, "bfloat16")) for i in layers]
        residuals = [T.arg(f"residual_{i}", T.Tensor(streams_shape, "bfloat16")) for i in posts]

        with T.Kernel(num_tokens, T.ceildiv(hidden, block_channels), threads=threads) as (token, block):
            T.annotate_min_blocks_per_sm(min_blocks)
            first, last = block * block_channels, (block + 1) * block_channels
            addresses = T.alloc_shared((6, num_layers), "int64")
            all_pre = T.alloc_shared((num_layers, mhc_mult), "float32")
            all_post = T.alloc_shared((num_layers, mhc_mult), "float32")
            all_comb = T.alloc_shared((num_layers, mhc_mult, mhc_mult), "float32")
            pre = T.alloc_fragment((mhc_mult,), "float32")
            post = T.alloc_fragment((mhc_mult,), "float32")
            comb = T.alloc_fragment((mhc_mult, mhc_mult), "float32")
            streams = T.alloc_fragment((mhc_mult, block_channels), "bfloat16")
            new_streams = T.alloc_fragment((mhc_mult, block_channels), "bfloat16")
            layer_output = T.alloc_fragment((block_channels,), "bfloat16")
            next_layer_output = T.alloc_fragment((block_channels,), "bfloat16")
            collapsed = T.alloc_fragment((block_channels,), "float32")
            layer_input = T.alloc_fragment((block_channels,), "bfloat16")

            # One thread writes them.
            for _ in T.Parallel(1):
                for i in layers:
                    addresses[_PRE, i] = T.reinterpret(pre_mixes[i].access_ptr("rw"), "int64")
                    addresses[_LAYER_INPUT, i] = T.reinterpret(layer_inputs[i].access_ptr("rw"), "int64")
                for i in posts:
                    addresses[_LAYER_OUTPUT, i] = T.reinterpret(layer_outputs[i].access_ptr("rw"), "int64")
                    addresses[_POST, i] = T.reinterpret(post_mixes[i].access_ptr("rw"), "int64")
                    addresses[_COMB, i] = T.reinterpret(comb_mixes[i].access_ptr("rw"), "int64")
                    addresses[_RESIDUAL, i] = T.reinterpret(residuals[i].access_ptr("rw"), "int64")

            T.copy(initial_residual[token, :, first:last], streams)
            if num_posts:
                T.copy(layer_outputs[0][token, first:last], layer_output)
                for i, n in T.Parallel(num_posts, mhc_mult):
                    all_post[i, n] = T.make_tensor(addresses[_POST, i], mix_shape, "float32")[token, n, 0]
                for i, k, n in T.Parallel(num_posts, mhc_mult, mhc_mult):
                    all_comb[i, k, n] = T.make_tensor(addresses[_COMB, i], comb_shape, "float32")[token, k, n]
            for i, s in T.Parallel(num_layers, mhc_mult):
                all_pre[i, s] = T.make_tensor(addresses[_PRE, i], mix_shape, "float32")[token, s, 0]

            # A loop also where there are so few layers that nvcc would unroll it, and need more registers.
            for i in T.unroll(num_layers, unroll_factor=1):
                if i + 1 < num_posts:
                    next_output = T.make_tensor(addresses[_LAYER_OUTPUT, i + 1], channels_shape, "bfloat16")
                    T.copy(next_output[token, first:last], next_layer_output)
                T.copy(all_pre[i, :], pre)
                collapse_streams(streams, pre, collapsed)
                T.copy(collapsed, layer_input)
                layer_input_out = T.make_tensor(addresses[_LAYER_INPUT, i], channels_shape, "bfloat16")
                T.copy(layer_input, layer_input_out[token, first:last])
                if i < num_posts:
                    T.copy(all_post[i, :], post)
                    T.copy(all_comb[i, :, :], comb)
                    post_streams(layer_output, streams, post, comb, new_streams)
                    residual_out = T.make_tensor(addresses[_RESIDUAL, i], streams_shape, "bfloat16")
                    T.copy(new_streams, residual_out[token, :, first:last])
                    T.copy(new_streams, streams)
                    T.copy(next_layer_output, layer_output)

    return mhc_multilayer_recompute


@op(writes=("layer_input_list", "residual_list"))
def mhc_multilayer_recompute(
    initial_residual: Tensor,
    pre_mix_list: Sequence[Tensor],
    layer_output_list: Sequence[Tensor],
    post_mix_list: Sequence[Tensor],
    comb_mix_list: Sequence[Tensor],
    layer_input_list: Sequence[Tensor],
    residual_list: Sequence[Tensor],
) -> None:
    """Compute the streams and inputs of several sublayers again, in one launch, from what the sublayers returned.

    With R_0 = initial_residual: layer_input_list[i] = mhc_pre_apply_mix(R_i, pre_mix_list[i]), then
    R_{i+1} = residual_list[i] = mhc_post(layer_output_list[i], R_i, post_mix_list[i], comb_mix_list[i]), bit for bit.
    Source: arXiv 2512.24880.

    pre_mix_list and layer_input_list have one tensor for each of L ≥ 1 layers, the other lists one for each of L - 1 or
    L posts. Every tensor is contiguous; what is written shares no memory with anything else. Each number of layers and
    posts is a kernel of its own.

    Args:
        initial_residual: bfloat16 (..., m, H); m is 2, 4 or 8, H a multiple of 64, 64 to 8192.
        pre_mix_list: L of float32 (..., m, 1).
        layer_output_list: bfloat16 (..., H).
        post_mix_list: float32 (..., m, 1).
        comb_mix_list: float32 (..., m, m).
        layer_input_list: L of bfloat16 (..., H), to be written.
        residual_list: bfloat16 (..., m, H), to be written.

    Raises:
        TypeError: a list is not a list or tuple, or a tensor is not one of its dtype.
        ValueError: a list's length, or a tensor's shape, stride or device does not fit, m or H is out of range, or what
            is written shares memory. The message names a tensor by its place, such as comb_mix_list[3].
    """
    leading, mhc_mult, hidden, device = check_streams("initial_residual", initial_residual)
    bfloat16, float32 = torch.bfloat16, torch.float32

    num_layers = _length("pre_mix_list", pre_mix_list)
    check.require(num_layers >= 1, "pre_mix_list", "1 tensor or more", num_layers)
    num_posts = _length("layer_output_list", layer_output_list)
    fits = num_posts in (num_layers - 1, num_layers)
    check.require(fits, "layer_output_list", "{} or {} tensors", num_posts, num_layers - 1, num_layers)

    def flat_tensors(name: str, tensors: Any, length: int, dtype: torch.dtype, *shape: int) -> list[Tensor]:
        found = _length(name, tensors)
        check.require(found == length, name, "{} tensors", found, length)
        wanted = (*leading, *shape)
        for i, x in enumerate(tensors):
            # The usual case, in half of check.tensor's time: ten layers have 57 tensors.
            is_usual = type(x) is Tensor and x.dtype == dtype and x.device == device and x.shape == wanted
            if not (is_usual and x.is_contiguous()):
                check.tensor(f"{name}[{i}]", x, (dtype,), wanted, device=device)
        return [flat(x, len(shape)) for x in tensors]

    tensors = (
        flat(initial_residual, 2),
        *flat_tensors("pre_mix_list", pre_mix_list, num_layers, float32, mhc_mult, 1),
        *flat_tensors("layer_output_list", layer_output_list, num_posts, bfloat16, hidden),
        *flat_tensors("post_mix_list", post_mix_list, num_posts, float32, mhc_mult, 1),
        *flat_tensors("comb_mix_list", comb_mix_list, num_posts, float32, mhc_mult, mhc_mult),
        *flat_tensors("layer_input_list", layer_input_list, num_layers, bfloat16, hidden),
        *flat_tensors("residual_list", residual_list, num_posts, bfloat16, mhc_mult, hidden),
    )
    if launching(layer_input_list, residual_list):
        _mhc_multilayer_recompute_kernel(num_layers, num_posts, mhc_mult, hidden, get_arch(device))(*tensors)


def _length(name: str, tensors: Any) -> int:
    check.require_type(isinstance(tensors, (list, tuple)), name, "a list of tensors", type(tensors).__name__)
    return len(tensors)
