"""The layout of a model's tables: their sizes, where each begins, and the multipliers of the hash. Without a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from tk_core import check

_MAX_SIZE = 2**31 - 1
_LAYER_SEEDS_APART = 10007
# Together they tell primes from other numbers below 3.1 · 10²³ (Sorenson and Webster, arXiv 1509.00864).
_BASES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


@dataclass(frozen=True)
class EngramLayout:
    """Arguments of `engram_hash` beside the ids, for L layers with M tables for each order of n-gram, 2 to N."""

    layer_ids: tuple[int, ...]
    """The layers' numbers in the model. The other fields are indexed by position in this tuple."""
    vocab_sizes: tuple[tuple[tuple[int, ...], ...], ...]
    """Rows of each table, (L, N - 1, M): primes that all differ."""
    multipliers: tuple[tuple[int, ...], ...]
    """(L, N): odd, and so small that a product with an id of the vocabulary fits int64."""

    @property
    def offsets(self) -> tuple[tuple[int, ...], ...]:
        """Where each table begins, (L, (N - 1)·M), if those of a layer lie one after the other."""
        return tuple(tuple(accumulate(sizes[:-1], initial=0)) for sizes in self._layers())

    @property
    def num_rows(self) -> tuple[int, ...]:
        """Rows that the tables of each layer have together, (L)."""
        return tuple(map(sum, self._layers()))

    def _layers(self) -> list[tuple[int, ...]]:
        return [tuple(size for order in layer for size in order) for layer in self.vocab_sizes]

    def tensors(self, device: torch.device | str | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """multipliers int64, vocab_sizes and offsets int32, in the order in which `engram_hash` takes them."""
        return (
            torch.tensor(self.multipliers, dtype=torch.int64, device=device),
            torch.tensor(self.vocab_sizes, dtype=torch.int32, device=device),
            torch.tensor(self.offsets, dtype=torch.int32, device=device),
        )


def is_prime(n: int) -> bool:
    """Whether n is a prime: Miller and Rabin's test with bases that make it certain for all n below 2⁷⁸."""
    if n < 2 or any(n % p == 0 for p in _BASES):
        return n in _BASES
    twos = ((n - 1) & (1 - n)).bit_length() - 1
    for base in _BASES:
        power = pow(base, (n - 1) >> twos, n)
        if power == 1:
            continue
        for _ in range(twos):
            if power == n - 1:
                break
            power = power * power % n
        else:
            return False
    return True


def engram_layout(
    vocab_size: int,
    layer_ids: Sequence[int],
    max_ngram: int,
    num_heads: int,
    table_sizes: int | Sequence[int],
    seed: int = 0,
) -> EngramLayout:
    """Lay out the tables of a model's Engram layers as the released models do, so that their weights fit.

    Layer by layer, order by order, head by head, a table gets the least prime that no table has yet, and that is at
    least its order's table size. A layer's multipliers are 2 · r + 1 for N numbers r that numpy's
    `default_rng(seed + 10007 · layer)` draws from 0 to max(1, (2⁶³ - 1) // vocab_size // 2) - 1.

        layout = engram_layout(129280, layer_ids=(1, 15), max_ngram=3, num_heads=8, table_sizes=646400)
        rows = engram_hash(ngram_windows(token_ids, None, 3, pad_id), *layout.tensors("cuda"))
        tables = [torch.empty(num_rows, 64) for num_rows in layout.num_rows]

    Source: Engram, arXiv 2601.07372, and its demonstration.

    Args:
        vocab_size: Number of ids, 1 to 2³¹ - 1.
        layer_ids: Numbers of the layers in the model, at least one, all different, not negative.
        max_ngram: N, the ids of the longest n-gram, at least 2.
        num_heads: M, the tables of each order, at least 1.
        table_sizes: Least number of rows of a table, for each order from 2 on; an int for all orders.
        seed: Not negative.

    Raises:
        TypeError: a number is not an int, or an argument no sequence of them.
        ValueError: a number is out of range, or the rows of a layer do not fit int32.
    """
    check.in_range("vocab_size", vocab_size, 1, _MAX_SIZE)
    check.require_type(isinstance(layer_ids, Sequence), "layer_ids", "a sequence of ints", layer_ids)
    check.require_type(isinstance(table_sizes, (int, Sequence)), "table_sizes", "an int or a sequence", table_sizes)
    check.require(len(layer_ids) > 0, "layer_ids", "at least one layer", layer_ids)
    for layer in layer_ids:
        check.in_range("layer_ids", layer, 0, _MAX_SIZE)
    check.require(len(set(layer_ids)) == len(layer_ids), "layer_ids", "layers that differ", layer_ids)
    check.in_range("max_ngram", max_ngram, 2, _MAX_SIZE)
    check.in_range("num_heads", num_heads, 1, _MAX_SIZE)
    sizes = [table_sizes] * (max_ngram - 1) if isinstance(table_sizes, int) else list(table_sizes)
    check.require(len(sizes) == max_ngram - 1, "table_sizes", f"one for each of {max_ngram - 1} orders", table_sizes)
    for size in sizes:
        check.in_range("table_sizes", size, 1, _MAX_SIZE)
    check.in_range("seed", seed, 0, 2**63 - 1)

    layout = EngramLayout(
        tuple(layer_ids),
        _vocab_sizes(len(layer_ids), sizes, num_heads),
        tuple(_multipliers(vocab_size, max_ngram, seed + _LAYER_SEEDS_APART * layer) for layer in layer_ids),
    )
    check.require(max(layout.num_rows) <= _MAX_SIZE, "table_sizes", f"at most {_MAX_SIZE} rows a layer", table_sizes)
    return layout


def _vocab_sizes(num_layers: int, sizes: list[int], num_heads: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    used: set[int] = set()
    # From a size on, all primes up to the last one found from there are used: the next search begins there.
    last = {size: size - 1 for size in sizes}

    def next_prime(size: int) -> int:
        n = last[size] + 1
        while n in used or not is_prime(n):
            n += 1
        used.add(n)
        last[size] = n
        return n

    return tuple(tuple(tuple(next_prime(size) for _ in range(num_heads)) for size in sizes) for _ in range(num_layers))


def _multipliers(vocab_size: int, max_ngram: int, seed: int) -> tuple[int, ...]:
    import numpy as np

    end = max(1, (2**63 - 1) // vocab_size // 2)
    drawn = np.random.default_rng(seed).integers(0, end, max_ngram)
    return tuple(2 * r + 1 for r in drawn.tolist())
