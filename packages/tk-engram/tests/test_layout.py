"""The layout of a model's tables."""

from typing import Any

import numpy as np
import pytest
import torch

import tk_engram
from tk_engram import reference
from tk_engram.layout import engram_layout, is_prime


def test_primes_against_a_sieve() -> None:
    end = 200_000
    sieve = np.ones(end, bool)
    sieve[:2] = False
    for n in range(2, 448):
        if sieve[n]:
            sieve[n * n :: n] = False
    assert [n for n in range(end) if is_prime(n)] == np.flatnonzero(sieve).tolist()
    assert not any(map(is_prime, (-7, -2, -1)))


@pytest.mark.parametrize(
    "n",
    [
        # The least numbers that the first 1, 2, …, 7 bases do not tell from primes, and then 9 to 11.
        *(2047, 1373653, 25326001, 3215031751, 2152302898747, 3474749660383, 341550071728321, 3825123056546413051),
        # Carmichael numbers, squares of primes, products of large ones.
        *(561, 41041, 825265, 41**2, 46337**2, 2147483647 * 2147483629, (2**31 - 1) ** 2),
    ],
)
def test_numbers_that_pass_for_primes(n: int) -> None:
    assert not is_prime(n)


@pytest.mark.parametrize("n", [2, 37, 41, 646403, 2**31 - 1, 2**61 - 1, 2**64 - 59, 2**63 - 25])
def test_large_primes(n: int) -> None:
    assert is_prime(n)


def test_by_hand() -> None:
    layout = engram_layout(100, (0, 3), max_ngram=3, num_heads=2, table_sizes=(10, 12))
    # Order 2 begins at 10, order 3 at 12, where 13 is taken; the second layer goes on where the first has left off.
    assert layout.vocab_sizes == (((11, 13), (17, 19)), ((23, 29), (31, 37)))
    assert layout.offsets == ((0, 11, 24, 41), (0, 23, 52, 83))
    assert layout.num_rows == (60, 120)
    assert layout.layer_ids == (0, 3)


def test_a_size_that_is_a_prime_is_taken() -> None:
    assert engram_layout(100, (0,), 2, 3, 13).vocab_sizes == (((13, 17, 19),),)
    assert engram_layout(100, (0,), 2, 3, 1).vocab_sizes == (((2, 3, 5),),)


def test_orders_of_falling_size_fill_what_is_left_below() -> None:
    layout = engram_layout(100, (0, 1), max_ngram=3, num_heads=2, table_sizes=(20, 10))
    assert layout.vocab_sizes == (((23, 29), (11, 13)), ((31, 37), (17, 19)))


def test_multipliers_are_those_of_released_models() -> None:
    layout = engram_layout(129280, (1, 15), max_ngram=3, num_heads=8, table_sizes=646400)
    # numpy's draws for these seeds; a numpy that draws others must not be used.
    assert layout.multipliers == (
        (58737837727525, 3709723095905, 27562777300965),
        (22166238923025, 42939128327945, 41336139856257),
    )
    for layer, multipliers in zip((1, 15), layout.multipliers, strict=True):
        drawn = np.random.default_rng(10007 * layer).integers(0, (2**63 - 1) // 129280 // 2, 3)
        assert multipliers == tuple(2 * int(r) + 1 for r in drawn)
    assert layout.vocab_sizes[0][0] == (646403, 646411, 646421, 646423, 646433, 646453, 646519, 646523)
    assert layout.num_rows == (10344164, 10348242)


def test_multipliers_depend_on_seed_layer_and_vocabulary() -> None:
    def multipliers(**change: Any) -> tuple[int, ...]:
        arguments = {"vocab_size": 1000, "layer_ids": (2,), "max_ngram": 3, "num_heads": 1, "table_sizes": 5, **change}
        return engram_layout(**arguments).multipliers[0]

    others = [multipliers(), multipliers(seed=1), multipliers(layer_ids=(3,)), multipliers(vocab_size=1001)]
    assert len(set(others)) == 4
    # A layer's do not depend on the others, and seeds of layers are 10007 apart.
    assert engram_layout(1000, (7, 2), 3, 1, 5).multipliers[1] == multipliers()
    assert multipliers(seed=10007) == multipliers(layer_ids=(3,))
    assert multipliers(max_ngram=5)[:3] == multipliers()


@pytest.mark.parametrize("vocab_size", [1, 2, 1000, 129280, 2**31 - 1])
def test_products_fit_int64(vocab_size: int) -> None:
    for multiplier in engram_layout(vocab_size, range(20), 4, 1, 5).multipliers[-1]:
        assert multiplier % 2 == 1
        assert 0 < multiplier * (vocab_size - 1) < 2**63 or vocab_size == 1


def test_all_tables_differ_and_are_the_next_primes() -> None:
    layers, heads, sizes = 5, 6, (1000, 900, 1000)
    layout = engram_layout(50_000, tuple(range(layers)), 4, heads, sizes)
    used: set[int] = set()
    for layer in layout.vocab_sizes:
        for size, order in zip(sizes, layer, strict=True):
            n = size - 1
            for found in order:
                n += 1
                while n in used or any(n % d == 0 for d in range(2, n)):
                    n += 1
                assert found == n
                used.add(n)
    assert len(used) == layers * 3 * heads


def test_tensors_are_what_the_hash_takes() -> None:
    layout = engram_layout(50, (1, 4), max_ngram=4, num_heads=3, table_sizes=(40, 30, 20))
    multipliers, vocab_sizes, offsets = layout.tensors()
    assert (multipliers.dtype, vocab_sizes.dtype, offsets.dtype) == (torch.int64, torch.int32, torch.int32)
    assert multipliers.tolist() == [list(row) for row in layout.multipliers]
    assert vocab_sizes.shape == (2, 3, 3)
    assert torch.equal(offsets, reference.make_offsets(vocab_sizes))
    assert vocab_sizes.flatten(1).sum(1).tolist() == list(layout.num_rows)
    ids = tk_engram.ngram_windows(torch.randint(0, 50, (500,), dtype=torch.int32), None, 4, 0)
    rows = tk_engram.engram_hash(ids, multipliers, vocab_sizes, offsets)
    assert (rows >= offsets[:, None]).all()
    assert (rows.flatten(1).amax(1) < torch.tensor(layout.num_rows)).all()
    assert layout.tensors("meta")[0].is_meta


GOOD: dict[str, Any] = {
    "vocab_size": 100,
    "layer_ids": (1, 2),
    "max_ngram": 3,
    "num_heads": 2,
    "table_sizes": (10, 20),
    "seed": 0,
}


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"vocab_size": 1e5}, TypeError, "vocab_size: .*int"),
        ({"vocab_size": 0}, ValueError, "vocab_size: .*1 to"),
        ({"vocab_size": 2**31}, ValueError, "vocab_size: .*1 to"),
        ({"layer_ids": 1}, TypeError, "layer_ids: .*sequence"),
        ({"layer_ids": ()}, ValueError, "layer_ids: .*at least one"),
        ({"layer_ids": (1.0,)}, TypeError, "layer_ids: .*int"),
        ({"layer_ids": (-1,)}, ValueError, "layer_ids: .*0 to"),
        ({"layer_ids": (1, 2, 1)}, ValueError, "layer_ids: .*differ"),
        ({"max_ngram": 3.0}, TypeError, "max_ngram: .*int"),
        ({"max_ngram": 1}, ValueError, "max_ngram: .*2 to"),
        ({"num_heads": None}, TypeError, "num_heads: .*int"),
        ({"num_heads": 0}, ValueError, "num_heads: .*1 to"),
        ({"table_sizes": 10.0}, TypeError, "table_sizes: .*int or a sequence"),
        ({"table_sizes": (10.0, 20)}, TypeError, "table_sizes: .*int"),
        ({"table_sizes": True}, TypeError, "table_sizes: .*int"),
        ({"table_sizes": 0}, ValueError, "table_sizes: .*1 to"),
        ({"table_sizes": (10,)}, ValueError, "table_sizes: .*each of 2 orders"),
        ({"table_sizes": 2**30}, ValueError, "table_sizes: .*rows a layer"),
        ({"seed": 0.5}, TypeError, "seed: .*int"),
        ({"seed": -1}, ValueError, "seed: .*0 to"),
    ],
)
def test_bad_input(change: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        engram_layout(**{**GOOD, **change})
