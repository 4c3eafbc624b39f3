"""Sizes and cases that the ops' test files share."""

from collections.abc import Callable, Sequence
from typing import Any

from tk_core.testing import Case, Make, bench_case

HIDDEN_SIZES = (128, 576, 1280, 2560, 4096, 5120, 7168, 8192)
"""Hidden sizes that the gpu tier runs."""
TOKEN_COUNTS = (0, 1, 3, 17, 64, 4096, 8192)
"""Numbers of tokens that the gpu tier runs."""
STREAM_SHAPES = [(m, *each) for m in (2, 8) for each in ((64, 4096), (576, 65), (7168, 1), (8192, 1000))]
"""(m, H, T) of the gpu tier where there are not 4 streams."""


def size_cases(make: Callable[..., Make]) -> list[Case]:
    """Cases of make(tokens, mhc_mult, hidden) for the gpu tier: all hidden sizes, numbers of tokens and of streams."""
    shapes = [(4, hidden, t) for hidden in HIDDEN_SIZES for t in ((65, 4096) if hidden != 7168 else TOKEN_COUNTS)]
    return [Case(f"m{m}-h{hidden}-t{t}", make(t, m, hidden)) for m, hidden, t in (*shapes, *STREAM_SHAPES)]


def bench_cases(
    make: Callable[..., Make],
    num_tokens: Sequence[int] = (1, 64, 4096),
    hidden_sizes: Sequence[int] = (576, 2048, 2560, 4096),
    mhc_mults: Sequence[int] = (),
    model_tokens: Sequence[int] = (8192,),
    compiled_tokens: Sequence[int] = (8192,),
    **options: Any,
) -> list[Case]:
    """Benchmarks of make((tokens,), mhc_mult, hidden, **options): of (8192, 4, 7168) one number varies at a time.

    Those of `model_tokens` have a model's shape; of these the compile tier compiles those of `compiled_tokens`.
    """
    shapes = [(t, 4, 7168) for t in (*model_tokens, *num_tokens)]
    shapes += [(8192, 4, hidden) for hidden in hidden_sizes] + [(8192, m, 7168) for m in mhc_mults]
    cases = []
    for index, (tokens, mhc_mult, hidden) in enumerate(shapes):
        name, of_model = f"m{mhc_mult}-h{hidden}-t{tokens}", index < len(model_tokens)
        made = make((tokens,), mhc_mult, hidden, **options)
        cases.append(bench_case(name, made, model_shape=of_model, compile=of_model and tokens in compiled_tokens))
    return cases


def stream_cases(make: Callable[..., Make], suffix: str = "", **options: Any) -> list[Case]:
    """Cases of make(leading, mhc_mult, hidden) for ops on streams; those named with `suffix` have `options`."""
    return [
        Case("m4-h64-t3", make((3,), 4, 64), small=True, modes=True),
        Case(f"m2-h576-t2x3{suffix}", make((2, 3), 2, 576, **options), small=True, modes=True, compile=True),
        Case("m4-h128-no-leading", make((), 4, 128), small=True),
        Case(f"m4-h64-t0{suffix}", make((0,), 4, 64, **options), small=True),
        Case("m8-h64-t2x0", make((2, 0), 8, 64), small=True),
        Case(f"m4-h64-t3-unaligned{suffix}", make((3,), 4, 64, first_element=1, **options), small=True),
        *(Case(f"m4-h7168-t{num_tokens}", make((num_tokens,), 4, 7168)) for num_tokens in TOKEN_COUNTS),
        *(Case(f"m{m}-h{hidden}-t1001", make((1001,), m, hidden)) for m in (2, 8) for hidden in (576, 7168)),
        *bench_cases(make, mhc_mults=(2, 8)),
    ]


def mix_cases(
    make: Callable[..., Make], std: float, short: int = 67, larger: Sequence[tuple[int, int]] = ((2, 4001), (8, 4001))
) -> tuple[Case, ...]:
    """Cases of make(leading, mhc_mult, **options) for ops on mixes, which have no hidden size.

    `std` of the mixes rounds sigmoids to 0 and 1, and exponentials overflow; `short` tokens are those of two streams;
    `larger` has numbers of streams and of tokens for the gpu tier.
    """
    return (
        Case("m4-t17", make((17,), 4), small=True, modes=True, compile=True),
        Case(f"m2-t{short}", make((short,), 2), small=True),
        Case("m8-t33", make((33,), 8), small=True, compile=True),
        Case("m4-2x3", make((2, 3), 4), small=True, modes=True),
        Case("m4-one-token", make((), 4), small=True),
        Case("m4-t1", make((1,), 4), small=True),
        Case("m4-t0", make((0,), 4), small=True),
        Case("m8-0x3", make((0, 3), 8), small=True),
        Case("m4-t67-wide", make((67,), 4, std=std), small=True),
        Case("m4-t67-unaligned", make((67,), 4, first_element=1), small=True),
        *(Case(f"m4-t{num_tokens}", make((num_tokens,), 4)) for num_tokens in TOKEN_COUNTS if num_tokens > 17),
        *(Case(f"m{mhc_mult}-t{num_tokens}", make((num_tokens,), mhc_mult)) for mhc_mult, num_tokens in larger),
        bench_case("m4-t8192", make((8192,), 4), model_shape=True),
        *(bench_case(f"m4-t{n}", make((n,), 4)) for n in (1, 64, 4096)),
    )
