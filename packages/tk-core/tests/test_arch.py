"""Architectures."""

import pickle

import pytest
import torch

from tk_core.arch import ARCHS, UnsupportedArchError, arch_from_name, compiling_for, get_arch


def test_features_grow_with_the_architecture() -> None:
    assert [arch.sm for arch in ARCHS.values()] == [80, 86, 89, 90, 100, 103, 120]
    assert [name for name, arch in ARCHS.items() if arch.has_wgmma] == ["sm_90a"]
    assert all(arch.has_tma == (arch.sm >= 90) for arch in ARCHS.values())
    assert all(arch.has_fp4_convert == (arch.sm >= 100) for arch in ARCHS.values())
    assert arch_from_name("sm_90a").max_shared_memory == 232448


def test_target_is_explicit() -> None:
    assert arch_from_name("sm_100a").target == {"kind": "cuda", "arch": "sm_100a"}


def test_names() -> None:
    assert arch_from_name("sm_90") is arch_from_name("sm_90a")
    with pytest.raises(ValueError, match=r"arch: expected one of sm_80, .* got 'sm_70'"):
        arch_from_name("sm_70")


def test_pickle_keeps_identity() -> None:
    arch = arch_from_name("sm_90a")
    assert pickle.loads(pickle.dumps(arch)) is arch
    error = pickle.loads(pickle.dumps(UnsupportedArchError("tk_x.f", "sm_80", "sm_90 or newer")))
    assert str(error) == "tk_x.f: found sm_80, needs sm_90 or newer"


def test_meta_device_counts_only_while_compiling_for() -> None:
    meta = torch.device("meta")
    with pytest.raises(ValueError, match="device: expected a CUDA device, got meta"):
        get_arch(meta)
    with compiling_for(arch_from_name("sm_100a")):
        assert get_arch(meta).name == "sm_100a"
    with pytest.raises(ValueError, match="device"):
        get_arch("cpu")


@pytest.mark.gpu
def test_this_gpu() -> None:
    major, minor = torch.cuda.get_device_capability()
    assert get_arch().sm == 10 * major + minor
    assert get_arch() is get_arch("cuda:0") is get_arch(torch.device("cuda", 0)) is get_arch(0)
