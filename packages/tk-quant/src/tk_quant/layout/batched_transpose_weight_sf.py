"""batched_transpose_weight_sf: packed scale factors per row of weights w and of their transposes, for many weights.

For scale factors sf of blocks of b × b elements of w (n, k), with byte j of a word in place j:

    sf0[row, c] = exponents of sf[row // b, 4c … 4c + 3]      for the product with w
    sf1[col, c] = exponents of sf[4c … 4c + 3, col // b]      for that with its transpose

both column major, so that the b rows of a block are one word b times over. A thread block has a stretch of memory of
one of these: each thread makes at most one word from its four scale factors, and from shared memory the words are
written, 16 bytes a thread, each b times. Addresses and sizes are arguments of the kernel.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import ceil_div
from tk_core.op import launching, op

Pair = tuple[Tensor, Tensor]

_BLOCK_SIZES = (32, 128)
_SLOTS = (1, 8, 64)
"""Weights of a launch: a kernel for each of these numbers."""
_THREADS = 256
_BLOCK_WORDS = 8192
"""Words that a thread block writes."""
_OF_EXPONENT = 0x7F800000


# Each access has a guard of its own, so TileLang's bounds checks would only repeat them.
@kernel(pass_configs={"tl.disable_safe_memory_legalize": True})
def _transpose_weight_sf_kernel(num_slots: int, block_size: int, arch: Arch) -> Any:
    """Build `transpose(sf, num_blocks, *of each slot (addresses of sf, sf0, sf1, groups, rows, cols, first block))`."""
    import tilelang.language as T

    names = ("sf", "sf0", "sf1", "groups", "rows", "cols", "first_block")
    count = _BLOCK_WORDS // block_size

    @T.macro
    def find_slot(slots: Any, addresses: T.Buffer, sizes: T.Buffer) -> None:
        """Set addresses and sizes to those of the last of the slots, (has begun, arguments) each, that has begun."""
        has_begun, found = slots[len(slots) // 2]
        if len(slots) == 1:
            for k in (0, 1, 2):
                addresses[k] = found[k]
            for k in (0, 1, 2, 3):
                sizes[k] = found[3 + k]
        elif has_begun:
            find_slot(slots[len(slots) // 2 :], addresses, sizes)
        else:
            find_slot(slots[: len(slots) // 2], addresses, sizes)

    @T.prim_func
    def transpose(first_sf: T.Tensor((T.dynamic("size"),), "float32"), num_blocks: T.int32) -> None:
        arguments = [
            [T.arg(f"{name}_{i}", T.dynamic(f"{name}_{i}", "int64" if "sf" in name else "int32")) for name in names]
            for i in range(num_slots)
        ]
        with T.Kernel(num_blocks, threads=_THREADS) as block:
            addresses, sizes = T.alloc_local((3,), "int64"), T.alloc_local((4,), "int32")
            find_slot([(block >= each[6], each) for each in arguments], addresses, sizes)
            groups, rows, cols, first_block = (sizes[k] for k in range(4))
            num_words0 = groups * T.ceildiv(cols, 4) * rows
            num_blocks0 = T.ceildiv(num_words0, count)
            is_first = block - first_block < num_blocks0
            # Of what comes out: blocks beside each other, blocks that words are made of, and elements between these.
            side, depth, step = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            side, depth = T.if_then_else(is_first, rows, cols), T.if_then_else(is_first, cols, rows)
            step = T.if_then_else(is_first, 1, cols)
            first, num_words = T.alloc_var("int32"), T.alloc_var("int32")
            first = (block - first_block - T.if_then_else(is_first, 0, num_blocks0)) * count
            num_words = T.if_then_else(is_first, num_words0, groups * T.ceildiv(rows, 4) * cols)
            sf = T.make_tensor_from_addr(addresses[0], (groups * rows * cols,), "float32")
            out = T.make_tensor_from_addr(
                T.if_then_else(is_first, addresses[1], addresses[2]), (num_words, block_size), "uint32"
            )
            words = T.alloc_shared((count,), "uint32")
            thread = T.get_thread_binding()
            if thread < count and first + thread < num_words:
                # Variables, as these divisions would take 64 bits inside an address.
                along, packed, group, place = (T.alloc_var("int32") for _ in range(4))
                packed, along = T.truncdiv(first + thread, side), T.truncmod(first + thread, side)
                group = T.truncdiv(packed, T.ceildiv(depth, 4))
                packed = T.truncmod(packed, T.ceildiv(depth, 4)) * 4
                place = group * rows * cols + along * T.if_then_else(is_first, cols, 1)
                exponents = T.alloc_local((4,), "uint32")
                for j in T.unroll(4):
                    # Loaded without a condition, all four at once.
                    element = sf[place + T.min(packed + j, depth - 1) * step]
                    exponents[j] = T.reinterpret(element, "uint32") >> T.uint32(23) & T.uint32(0xFF)
                word = T.alloc_var("uint32", init=0)
                for j in T.unroll(4):
                    word = word | T.if_then_else(packed + j < depth, exponents[j], T.uint32(0)) << T.cast(
                        8 * j, "uint32"
                    )
                words[thread] = word
            T.sync_threads()
            for i, j in T.Parallel(count, block_size):
                if first + i < num_words:
                    out[first + i, j] = words[i]

    return transpose


@op(writes=("sf0s", "sf1s"), reference="batched_transpose_weight_sf.write_weight_sf")
def _batched_transpose_weight_sf(
    sf: Sequence[Tensor], block_size: int, sf0s: Sequence[Tensor], sf1s: Sequence[Tensor]
) -> None:
    if launching(sf0s, sf1s):
        arch = get_arch(sf[0].device)
        for start in range(0, len(sf), _SLOTS[-1]):
            part = list(zip(sf, sf0s, sf1s))[start : start + _SLOTS[-1]]
            num_blocks, arguments = 0, []
            for x, sf0, sf1 in part:
                groups = x.shape[0] if x.ndim == 3 else 1
                addresses = x.data_ptr(), sf0.data_ptr(), sf1.data_ptr()
                arguments += [*addresses, groups, *x.shape[-2:], num_blocks]
                num_blocks += sum(ceil_div(out.numel(), _BLOCK_WORDS) for out in (sf0, sf1))
            num_slots = next(size for size in _SLOTS if size >= len(part))
            # Slots without a weight begin where no thread block is.
            unused = [*arguments[:6], num_blocks] * (num_slots - len(part))
            transpose = _transpose_weight_sf_kernel(num_slots, block_size, arch)
            # Host code learns device and stream from a tensor; a launch with numbers alone is on the default stream.
            transpose(sf[0].view(-1), num_blocks, *arguments, *unused)


def _shapes(sf: Tensor, block_size: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(shape, strides) of sf0 and sf1 of one weight."""
    *groups, rows, cols = sf.shape
    found = []
    for side, num_packed in ((rows * block_size, ceil_div(cols, 4)), (cols * block_size, ceil_div(rows, 4))):
        found.append(((*groups, side, num_packed), (*[num_packed * side] * len(groups), 1, side)))
    return found


def batched_transpose_weight_sf(
    sf: Sequence[Tensor], block_size: int, transpose_sf1s: Sequence[bool], outs: Sequence[Pair | None]
) -> list[Pair]:
    """Packed scale factors per row of quantized weights, and of their transposes, from those of blocks, by one launch.

    For each weight w (n, k), quantized by blocks of b × b, b = block_size: byte j of sf0[row, c] is the biased exponent
    of sf[row // b, 4c + j], byte j of sf1[col, c] that of sf[4c + j, col // b]; bytes past the last block are 0. So
    matrix products that want a scale factor for each row read w by sf0 and its transpose by sf1. More than 64 weights
    take several launches. Names are those of DeepSeek's TileKernels 2.1.0.

    Args:
        sf: for each weight float32 (n / b, k / b) or, for G weights of one size, (G, n / b, k / b), contiguous, all on
            one device; n and k are multiples of 128. A scale factor counts by its exponent (`TK_DEBUG=1` raises
            ValueError for one that is no power of two).
        block_size: 32 or 128.
        transpose_sf1s: for each weight whether to return sf1 as (…, ceil(n / b / 4), k), contiguous: the same memory.
        outs: for each weight None, or the pair that an earlier call returned for it, to be written again. These overlap
            no other argument.

    Returns:
        For each weight `(sf0, sf1)`: int32 (…, n, ceil(k / b / 4)) and (…, k, ceil(n / b / 4)), with stride 1 in the
        dimension of rows. New ones are views of one tensor.

    Raises:
        TypeError: sf, transpose_sf1s or outs is no list, or an item is not of its type or dtype.
        ValueError: The lists have different lengths; a size, stride or device is not as described.
    """
    check.require_type(isinstance(sf, (list, tuple)), "sf", "a list of tensors", type(sf).__name__)
    check.integer("block_size", block_size)
    check.one_of("block_size", block_size, _BLOCK_SIZES)
    for name, given in (("transpose_sf1s", transpose_sf1s), ("outs", outs)):
        check.require_type(isinstance(given, (list, tuple)), name, "a list", type(given).__name__)
        check.require(len(given) == len(sf), name, "{} items", len(given), len(sf))
    shapes, results, num_new = [], [], 0
    for i, (x, flag, out) in enumerate(zip(sf, transpose_sf1s, outs)):
        found = check.tensor(f"sf[{i}]", x, (torch.float32,), (..., "n / block_size", "k / block_size"))
        check.require(len(found) <= 3, f"sf[{i}]", "2 or 3 dimensions", len(found))
        check.require(x.device == sf[0].device, f"sf[{i}]", f"device {sf[0].device}", str(x.device))
        for side in found[-2:]:
            check.multiple_of(f"sf[{i}]", side * block_size, 128)
        check.flag(f"transpose_sf1s[{i}]", flag)
        if check.reads_data(x):
            rest = int((x.view(torch.int32) & ~_OF_EXPONENT).count_nonzero())
            check.require(rest == 0, f"sf[{i}]", "powers of two", f"{rest} others")
        shapes.append(_shapes(x, block_size))
        if out is not None:
            _check_out(f"outs[{i}]", out, x, shapes[i], flag)
            results.append((out[0], out[1].transpose(-1, -2) if flag else out[1]))
        else:
            results.append(None)
            num_new += sum(torch.Size(shape).numel() for shape, _ in shapes[i])
    if not sf:
        return []
    # Each part is a multiple of 128 words, so all are aligned.
    pool, first = sf[0].new_empty((num_new,), dtype=torch.int32), 0
    for i, result in enumerate(results):
        if result is None:
            parts = []
            for shape, strides in shapes[i]:
                parts.append(pool.as_strided(shape, strides, first))
                first += torch.Size(shape).numel()
            results[i] = tuple(parts)
    _batched_transpose_weight_sf(list(sf), block_size, [pair[0] for pair in results], [pair[1] for pair in results])
    return [
        (sf0, sf1.transpose(-1, -2) if flag else sf1) if out is None else tuple(out)
        for (sf0, sf1), flag, out in zip(results, transpose_sf1s, outs)
    ]


def _check_out(name: str, out: Any, sf: Tensor, shapes: list[Any], is_transposed: bool) -> None:
    """Raise unless `out` is the pair that a call returns for this weight."""
    check.pair(name, out)
    for k, (x, (shape, strides)) in enumerate(zip(out, shapes)):
        if k == 1 and is_transposed:
            shape, strides = ((*y[:-2], y[-1], y[-2]) for y in (shape, strides))
        found = check.tensor(f"{name}[{k}]", x, (torch.int32,), tuple(shape), layout="any", device=sf.device)
        fits = all(size <= 1 or got == want for size, got, want in zip(found, x.stride(), strides))
        check.require(fits or not x.numel(), f"{name}[{k}]", "strides {}", x.stride(), tuple(strides))
