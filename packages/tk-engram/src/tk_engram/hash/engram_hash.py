"""engram_hash: the row of each table at which the n-grams that end at a token are looked up.

    p_i = token i places back · multipliers[l, i]                      int64, wrapping
    h_n = p_0 xor … xor p_n                                            n = 1 … N - 1
    out[l, t, (n - 1)·M + m] = (h_n mod vocab_sizes[l, n - 1, m]) + offsets[l, (n - 1)·M + m]

with the floor remainder, which is never negative. Source: "Conditional Memory via Scalable Lookup", arXiv 2601.07372.

A thread block takes a layer and a tile of tokens. First each token gets its N - 1 hashes, and each column the
reciprocal of its table's size, by the only 64-bit divisions; then a thread takes a column of every so many tokens, and
a remainder is a few multiplications:

    hashes   n = 1   [ token 0 | token 1 | … ]          shared memory
             n = 2   [ token 0 | token 1 | … ]
    columns          [ M tables of n = 1 | M tables of n = 2 | … ]
    out    token 0   [ thread 0 | thread 1 | …            ]
           token 1   [ …                                  ]
"""

import math
from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.op import launching, new, op
from tk_core.tiles import DIRECT_COPIES

MAX_NGRAM = 16
"""Largest N that the kernels are built for."""
MAX_HEADS = 64
"""Most tables of an order of n-gram that the kernel is built for."""
MAX_LAYERS = 65535
"""Most thread blocks in a grid's second dimension."""


@kernel(pass_configs=DIRECT_COPIES)
def _engram_hash_kernel(max_ngram: int, num_heads: int, has_mask: bool, arch: Arch) -> Any:
    import tilelang.language as T

    from tk_engram.lib import remainder

    num_columns = (max_ngram - 1) * num_heads
    # Four outputs a thread, all of one column; whole warps where 512 threads allow it. Untuned.
    threads = math.lcm(num_columns, 32)
    if threads > 512:
        threads = num_columns
    threads *= max(256 // threads, 1)
    block_tokens = 4 * threads // num_columns
    num_tokens, num_layers = T.dynamic("num_tokens"), T.dynamic("num_layers")

    def u32(x: Any) -> Any:
        return T.cast(x, "uint32")

    def u64(x: Any) -> Any:
        return T.cast(x, "uint64")

    floor_remainder = T.macro(remainder.floor_remainder)

    def ngram_hash(token_ids: Any, multipliers: Any, token: Any, layer: Any, order: Any) -> Any:
        """p_0 xor … xor p_(order + 1). Unsigned: in C only unsigned products may wrap."""

        def product(n: int) -> Any:
            return u64(T.cast(token_ids[token, n], "int64")) * u64(multipliers[layer, n])

        total = product(0) ^ product(1)
        for n in range(2, max_ngram):
            total = total ^ T.if_then_else(order + 1 >= n, product(n), u64(0))
        return total

    @T.prim_func
    def engram_hash(
        ngram_token_ids: T.Tensor((num_tokens, max_ngram), "int32"),
        multipliers: T.Tensor((num_layers, max_ngram), "int64"),
        vocab_sizes: T.Tensor((num_layers, num_columns), "int32"),
        offsets: T.Tensor((num_layers, num_columns), "int32"),
        image_token_mask: T.Tensor((num_tokens,), "bool"),
        out: T.Tensor((num_layers, num_tokens, num_columns), "int32"),
    ) -> None:
        with T.Kernel(T.ceildiv(num_tokens, block_tokens), num_layers, threads=threads) as (block, layer):
            token = block * block_tokens
            hashes = T.alloc_shared((max_ngram - 1, block_tokens), "uint64")
            reciprocals = T.alloc_shared((num_columns,), "uint64")
            sizes, starts = (T.alloc_fragment((num_columns,), "int32") for _ in range(2))
            rows = T.alloc_fragment((block_tokens, num_columns), "int32")

            # Loaded first, so that there is only one wait for memory.
            T.copy(vocab_sizes[layer, :], sizes)
            T.copy(offsets[layer, :], starts)
            for order, i in T.Parallel(max_ngram - 1, block_tokens):
                hashes[order, i] = ngram_hash(ngram_token_ids, multipliers, token + i, layer, order)
            for c in T.Parallel(num_columns):
                reciprocals[c] = remainder.reciprocal_of(sizes[c], u64, T.truncdiv)
            # One column a thread: TileLang has no vectors of these expressions.
            for i, c in T.Parallel(block_tokens, num_columns, coalesced_width=T.int32(1)):
                row = floor_remainder(hashes[c // num_heads, i], u32(sizes[c]), reciprocals[c], u32, u64, T.Select)
                rows[i, c] = T.cast(row, "int32") + starts[c]
            if has_mask:
                for i, c in T.Parallel(block_tokens, num_columns):
                    rows[i, c] = T.if_then_else(image_token_mask[token + i], -1, rows[i, c])
            T.copy(rows, out[layer, token : token + block_tokens, :])

    return engram_hash


@op(aligned=("ngram_token_ids", "multipliers", "vocab_sizes", "offsets"))
def engram_hash(
    ngram_token_ids: Tensor,
    multipliers: Tensor,
    vocab_sizes: Tensor,
    offsets: Tensor,
    *,
    image_token_mask: Tensor | None = None,
) -> Tensor:
    """Hash the n-grams that end at each token: (xor of ids · multipliers) mod table size + offset, for every table.

    With p_i = ngram_token_ids[:, i] · multipliers[l, i] in wrapping int64 and h_n = p_0 xor … xor p_n, table m of the
    (n + 1)-grams, 1 ≤ n < N, is looked up in row (h_n mod vocab_sizes[l, n - 1, m]) + offsets[l, (n - 1)·M + m],
    with the remainder of floor division, never negative. Exact. Source: Engram, arXiv 2601.07372.

    Args:
        ngram_token_ids: int32 (T, N), contiguous, as `ngram_windows` makes them: column i is the id i places back. N is
            2 to 16; ids may be negative.
        multipliers: int64 (L, N), contiguous; L is 1 to 65535.
        vocab_sizes: rows of each table, int32 (L, N - 1, M), contiguous, at least 1 (`TK_DEBUG=1` raises ValueError
            otherwise); M is 1 to 64.
        offsets: int32 (L, (N - 1)·M), contiguous; `reference.make_offsets(vocab_sizes)` where the tables of a layer
            lie one after the other. None negative, and the last row of every table fits int32 (`TK_DEBUG=1` raises
            ValueError otherwise).
        image_token_mask: bool (T), contiguous: tokens that are no text and get -1 in all columns of all layers.

    Returns:
        int32 (L, T, (N - 1)·M).

    Raises:
        TypeError: an argument is not a tensor of its dtype.
        ValueError: a shape, stride or device does not fit, or N, M or L is out of range.
    """
    num_tokens, max_ngram = check.tensor("ngram_token_ids", ngram_token_ids, (torch.int32,), ("num_tokens", "N"))
    check.in_range("N (columns of ngram_token_ids)", max_ngram, 2, MAX_NGRAM)
    device = ngram_token_ids.device
    num_layers, _ = check.tensor("multipliers", multipliers, (torch.int64,), ("L", max_ngram), device=device)
    check.in_range("L (rows of multipliers)", num_layers, 1, MAX_LAYERS)
    shape = (num_layers, max_ngram - 1, "M")
    num_heads = check.tensor("vocab_sizes", vocab_sizes, (torch.int32,), shape, device=device)[2]
    check.in_range("M (last dimension of vocab_sizes)", num_heads, 1, MAX_HEADS)
    num_columns = (max_ngram - 1) * num_heads
    check.tensor("offsets", offsets, (torch.int32,), (num_layers, num_columns), device=device)
    if image_token_mask is not None:
        check.tensor("image_token_mask", image_token_mask, (torch.bool,), (num_tokens,), device=device)
    if check.reads_data(vocab_sizes):
        smallest = int(vocab_sizes.min())
        check.require(smallest >= 1, "vocab_sizes", "at least 1", smallest)
        first, last = int(offsets.min()), int((offsets + vocab_sizes.flatten(1).to(torch.int64)).max()) - 1
        check.require(first >= 0, "offsets", "at least 0", first)
        check.require(last < 2**31, "offsets", "tables whose last row fits int32", last)
    out = new(ngram_token_ids.new_empty, (num_layers, num_tokens, num_columns))
    if launching(out):
        launch = _engram_hash_kernel(max_ngram, num_heads, image_token_mask is not None, get_arch(device))
        sizes = vocab_sizes.view(num_layers, num_columns)
        launch(ngram_token_ids, multipliers, sizes, offsets, image_token_mask, out)
    return out
