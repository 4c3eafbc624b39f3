"""per_channel_cast_and_transpose; test_per_channel_cast.py tests its values beside those of per_channel_cast."""

import torch

import tk_quant
from tk_core.testing import Case, OpSpec, tiers

from ..per_token.test_per_token_cast import BENCH
from .test_per_channel_cast import BAD, BF16, GOOD, HIDDENS, case, extremes, make, strided, tiny_case

_KINDS = tuple((num_per_tokens, round_sf) for num_per_tokens in (32, 128) for round_sf in (False, True))

SPEC = OpSpec(
    op=tk_quant.per_channel_cast_and_transpose,
    cases=(
        *(
            case(tokens, hidden, BF16, *kind, small=True, modes=tokens == 128 and not kind[1])
            for kind in _KINDS
            for tokens, hidden in ((128, 64), (256, 192), (0, 64))
        ),
        *(
            Case(
                f"{num_per_tokens}{'-round' if round_sf else ''}-extremes-t{tokens}",
                make(extremes(tokens, BF16), num_per_tokens, round_sf),
                small=True,
            )
            for num_per_tokens, round_sf in _KINDS
            for tokens in (128, 256)
        ),
        tiny_case(BF16, 128, False),
        tiny_case(BF16, 32, True),
        *(
            Case(
                f"{num_per_tokens}-apart{extra}-from{first}",
                make(strided(128, 192, BF16, extra, first), num_per_tokens),
                small=True,
                compile=True,
            )
            for num_per_tokens, extra, first in ((128, 64, 64), (32, 4, 4), (128, 6, 2), (32, 3, 1))
        ),
        *(
            case(tokens, hidden, BF16, *_KINDS[(row + column) % len(_KINDS)], compile=(tokens, hidden) == (128, 7168))
            for row, tokens in enumerate((128, 3968, 8064))
            for column, hidden in enumerate(HIDDENS)
        ),
        case(65536, 64, BF16, 32, False),
        *(
            case(
                *(8192, 7168, BF16, *kind, "-bench"),
                **BENCH,
                model_shape=kind == (128, False),
                # No smaller case compiles the other kinds' kernels; (128, False) is compiled at 128 rows above.
                compile=kind != (128, False),
            )
            for kind in _KINDS
        ),
        *(
            case(tokens, hidden, BF16, 128, False, "-bench", **BENCH)
            for tokens, hidden in (
                *((8192, hidden) for hidden in HIDDENS[:-1]),
                *((tokens, 7168) for tokens in (128, 3968, 8064)),
            )
        ),
    ),
)


test_tiers = tiers.tests(SPEC)
test_bad_input = tiers.bad_input(SPEC, GOOD, BAD)


def test_transposing_changes_nothing_else() -> None:
    x = extremes(256, torch.bfloat16)("cpu")
    data, sf = tk_quant.per_channel_cast(x, "e4m3", 128)
    transposed, same_sf = tk_quant.per_channel_cast_and_transpose(x, "e4m3", 128)
    assert torch.equal(transposed.view(torch.uint8).t(), data.view(torch.uint8))
    assert torch.equal(same_sf.view(torch.int32), sf.view(torch.int32))
