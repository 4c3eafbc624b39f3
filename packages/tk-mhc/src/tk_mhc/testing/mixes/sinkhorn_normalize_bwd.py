"""Named cases of sinkhorn_normalize_bwd."""

from collections.abc import Callable
from typing import Any

from tk_core.testing import Case, OpSpec
from tk_mhc import reference
from tk_mhc.mixes.sinkhorn_normalize_bwd import sinkhorn_normalize_bwd
from tk_mhc.testing.compare import TOKEN_COUNTS, within
from tk_mhc.testing.mixes.sinkhorn_normalize import make_logits

Make = Callable[[str], dict[str, Any]]


def make(
    leading: tuple[int, ...], mhc_mult: int, repeat: int = 10, eps: float = 1e-6, *, std: float = 1.0, **layout: Any
) -> Make:
    """Arguments of the op: normal gradients, of the same layout as x."""

    def build(device: str) -> dict[str, Any]:
        return {
            "d_o": make_logits(leading, mhc_mult, device, **layout),
            "x": make_logits(leading, mhc_mult, device, std=std, **layout),
            "repeat": repeat,
            "eps": eps,
        }

    return build


SPEC = OpSpec(
    op=sinkhorn_normalize_bwd,
    reference=reference.sinkhorn_normalize_bwd,
    compare=within(),
    cases=(
        Case("m4-t17", make((17,), 4), small=True, modes=True, compile=True),
        Case("m2-t67", make((67,), 2), small=True),
        Case("m8-t33-r20", make((33,), 8, repeat=20), small=True, compile=True),
        Case("m4-t33-once", make((33,), 4, repeat=1), small=True, compile=True),
        # Of so many iterations, sums of 4 tokens at most fit in shared memory.
        Case("m8-t33-r800", make((33,), 8, repeat=800), small=True, compile=True),
        Case("m4-2x3", make((2, 3), 4, repeat=2, eps=1e-3), small=True, modes=True),
        Case("m4-one-token", make((), 4), small=True),
        Case("m4-t1", make((1,), 4), small=True),
        Case("m4-t0", make((0,), 4), small=True),
        Case("m8-0x3", make((0, 3), 8), small=True),
        Case("m4-t33-no-eps", make((33,), 4, eps=0.0), small=True),
        Case("m4-t67-wide", make((67,), 4, std=20.0), small=True),
        Case("m8-t67-very-wide", make((67,), 8, std=80.0), small=True),
        Case("m4-t67-transposed", make((67,), 4, transposed=True), small=True),
        Case("m4-t67-unaligned", make((67,), 4, first_element=1), small=True),
        *(Case(f"m4-t{num_tokens}", make((num_tokens,), 4, std=3.0)) for num_tokens in TOKEN_COUNTS if num_tokens > 17),
        *(
            Case(f"m{mhc_mult}-t4001-r{repeat}", make((4001,), mhc_mult, repeat=repeat, std=3.0))
            for mhc_mult in (2, 4, 8)
            for repeat in (1, 2, 20)
        ),
        Case("m4-t8192-bench", make((8192,), 4), bench=True, model_shape=True, gpu=False),
        *(Case(f"m4-t{n}-bench", make((n,), 4), bench=True, gpu=False) for n in (1, 64, 4096)),
        Case("m8-t8192-bench", make((8192,), 8), bench=True, gpu=False),
    ),
)
