"""Every call of a profile is one that its op accepts."""

from itertools import product
from typing import Any

import pytest

import tk_quant
from tk_core.arch import arch_from_name
from tk_core.kernel import capture
from tk_quant.warmup import Format, Profile, Swiglu, calls

LAYOUTS = ("row_major", "col_major", "packed_ue8m0", "swizzled")
FORMS = [("e5m6", 0), *product(("e4m3", "e2m1"), (0, 16, 32, 64, 128))]
HIDDEN = 256


def arguments_of(op: Any, profile: Profile) -> list[dict[str, Any]]:
    return [arguments for called, arguments in calls(profile, 300) if called is op]


def flags_of(arguments: dict[str, Any]) -> tuple[bool, ...]:
    names = ("use_tma_aligned_col_major_sf", "use_packed_ue8m0", "use_swizzled_sf")
    return tuple(arguments.get(name, False) for name in names)


@pytest.mark.parametrize(("fmt", "num_per_channels"), FORMS)
def test_every_layout_of_every_format(fmt: Any, num_per_channels: int) -> None:
    forms = (Format(fmt, num_per_channels, LAYOUTS),)
    profile = Profile((512,), (HIDDEN,), forms, separate_sf=True, recasts=((1, 128),), training=True)
    for op, arguments in calls(profile, 300):
        with capture(arch_from_name("sm_100a")) as requests:
            op(**arguments)
        assert requests


def test_e5m6_is_cast_to_every_layout() -> None:
    profile = Profile((512,), activations=(Format("e5m6", 0, LAYOUTS),))
    named, general = (arguments_of(op, profile) for op in (tk_quant.per_token_cast_to_e5m6, tk_quant.per_token_cast))
    assert len({flags_of(arguments) for arguments in named}) == len(named) == 3
    assert [(arguments["fmt"], *flags_of(arguments)) for arguments in general] == [("e5m6", False, False, True)]


def test_every_swiglu() -> None:
    """With alpha or not, the kernels of a call whose alpha is another number."""
    swiglus = (
        Swiglu("swiglu_oai", interleaved=True),
        Swiglu("relu2", gated=False),
        Swiglu(alpha=True, clamp_after=True),
    )
    profile = Profile(
        (512,), (HIDDEN,), (Format("e4m3", 128),), swiglus=swiglus, swiglu_clamps=(False, True), training=True
    )
    found = set()
    for op, arguments in calls(profile, 300):
        if op.__name__.startswith("swiglu") and "activation" in arguments:
            with capture(arch_from_name("sm_90a")) as requests:
                op(**arguments)
            found.add((op.__name__, arguments["activation"]))
            with capture(arch_from_name("sm_90a")) as again:
                op(**(arguments if arguments["alpha"] is None else {**arguments, "alpha": 3}))
            assert requests
            assert requests == again
    ops = (
        "swiglu_forward",
        "swiglu_backward",
        "swiglu_forward_and_per_token_cast",
        "swiglu_backward_and_per_token_cast",
    )
    assert found == set(product(ops, ("swiglu_oai", "relu2", "silu")))


@pytest.mark.parametrize(("hidden", "num_layouts"), [(128, 4), (HIDDEN, 1)])
def test_swiglu_with_a_group_a_row(hidden: int, num_layouts: int) -> None:
    """The op has other layouts than row major for groups of 32 and 128 only."""
    profile = Profile((512,), (hidden,), (Format("e4m3", 0, LAYOUTS),))
    found = [flags_of(arguments) for arguments in arguments_of(tk_quant.swiglu_forward_and_per_token_cast, profile)]
    assert len(set(found)) == len(found) == num_layouts
    assert (False, False, False) in found
