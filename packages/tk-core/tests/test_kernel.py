"""@kernel: the compiled-kernel table, capture, and what is read out of a compiled kernel."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tk_core import compat
from tk_core.arch import Arch, arch_from_name
from tk_core.kernel import KernelRequest, capture, kernel
from tk_core.testing.usage import cuobjdump, lower, resource_usage, resource_usages

SM_90A = arch_from_name("sm_90a")


@kernel
def _add_kernel(width: int, arch: Arch) -> Any:
    """Adds two rows."""
    import tilelang.language as T

    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def add(
        a: T.Tensor((num_tokens, width), "float32"),
        b: T.Tensor((num_tokens, width), "float32"),
        out: T.Tensor((num_tokens, width), "float32"),
    ) -> None:
        with T.Kernel(num_tokens, threads=width) as token:
            col = T.get_thread_binding()
            out[token, col] = a[token, col] * 3.0 + b[token, col]

    return add


@kernel
def _spilling_kernel(width: int, arch: Arch) -> Any:
    import tilelang.language as T

    @T.prim_func
    def spill(
        x: T.Tensor((width,), "float32"), index: T.Tensor((width,), "int32"), out: T.Tensor((width,), "float32")
    ) -> None:
        with T.Kernel(1, threads=32):
            lane = T.get_thread_binding()
            values = T.alloc_local((32,), "float32")
            for i in T.serial(32):
                values[i] = x[i * 32 + lane]
            for i in T.serial(32):
                out[i * 32 + lane] = values[index[i * 32 + lane] % 32]

    return spill


@kernel
def _strided_kernel(stride_type: str, arch: Arch) -> Any:
    import tilelang.language as T

    size, stride = T.dynamic("size"), T.dynamic("stride", stride_type)

    @T.prim_func
    def gather(x: T.StridedTensor((size,), (stride,), "float32"), out: T.Tensor((size,), "float32")) -> None:
        with T.Kernel(T.ceildiv(size, 32), threads=32) as block:
            index = block * 32 + T.get_thread_binding()
            if index < size:
                out[index] = x[index]

    return gather


def test_capture_records_and_launches_nothing() -> None:
    with capture(SM_90A) as requests:
        _add_kernel(64, SM_90A)(None, None, None)
        with capture(arch_from_name("sm_100a")) as inner:
            _add_kernel(32, arch_from_name("sm_100a"))()
    assert requests == [KernelRequest(_add_kernel, (64, SM_90A))]
    assert [request.arch.name for request in inner] == ["sm_100a"]
    assert _add_kernel.__doc__ == "Adds two rows."


def test_the_last_argument_is_the_arch() -> None:
    with pytest.raises(TypeError, match="_add_kernel: expected an Arch as the last argument, got 64"):
        _add_kernel(64)


def test_compiling_can_be_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    before = compat.num_compilations
    monkeypatch.setenv("TK_COMPILE", "forbid")
    message = re.escape(f"{_add_kernel.name}(33, sm_90a): TK_COMPILE=forbid, and it is not in the cache")
    with pytest.raises(compat.CompilationForbiddenError, match=message):
        _add_kernel.compile(33, SM_90A)  # a width that no other test compiles
    monkeypatch.setenv("TK_COMPILE", "no")
    with pytest.raises(ValueError, match="TK_COMPILE: expected 'allow' or 'forbid', got 'no'"):
        _add_kernel.compile(33, SM_90A)
    assert compat.num_compilations == before


@pytest.mark.compile
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
def test_compiles_without_a_gpu(arch: str) -> None:
    compiled = _add_kernel.compile(64, arch_from_name(arch))
    assert "add_kernel" in compiled.source()
    usage = resource_usage(_add_kernel, 64, arch_from_name(arch))
    assert usage["add_kernel"].stack_bytes == 0
    assert 0 < usage["add_kernel"].registers <= 255


@pytest.mark.compile
def test_nothing_is_contracted() -> None:
    sass = cuobjdump(_add_kernel.compile(64, SM_90A), "--dump-sass")
    assert "FMUL" in sass
    assert "FADD" in sass
    assert "FFMA" not in sass


@pytest.mark.compile
def test_local_memory_is_seen() -> None:
    assert resource_usage(_spilling_kernel, 1024, SM_90A)["spill_kernel"].stack_bytes >= 128


@pytest.mark.compile
def test_disk_cache_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    before = compat.num_compilations
    _add_kernel.compile(96, SM_90A)
    assert compat.num_compilations == before + 1
    assert list(tmp_path.glob("**/executable.so"))


@pytest.mark.compile
def test_kernels_that_differ_only_in_the_type_of_a_stride_are_two() -> None:
    sources = [_strided_kernel.compile(stride_type, SM_90A).source() for stride_type in ("int32", "int64")]
    assert ["int64_t stride" in source for source in sources] == [False, True]


@pytest.mark.compile
def test_source_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TK_PRINT_KERNEL_SOURCE", "1")
    _add_kernel.compile(64, SM_90A)
    assert "__global__ void" in capsys.readouterr().out


@pytest.mark.gpu
def test_launch(caplog: pytest.LogCaptureFixture) -> None:
    from tk_core.arch import get_arch

    a, b = torch.randn(2, 5, 64, device="cuda")
    out = torch.empty_like(a)
    with caplog.at_level(logging.DEBUG, "tk_core"):
        function = _add_kernel(64, get_arch())
        assert _add_kernel(64, get_arch()) is function
    assert len([record for record in caplog.records if "loading" in record.message]) <= 1
    function(a, b, out)
    assert torch.equal(out, a * 3 + b)


@kernel
def _shared_kernel(width: int, dtype: str, arch: Arch) -> Any:
    import tilelang.language as T

    @T.prim_func
    def shared(x: T.Tensor((width,), dtype), out: T.Tensor((width,), dtype)) -> None:
        with T.Kernel(1, threads=128):
            tile = T.alloc_shared((width,), dtype)
            thread = T.get_thread_binding()
            for i in T.serial(width // 128):
                tile[i * 128 + thread] = x[i * 128 + thread]
            T.sync_threads()
            for i in T.serial(width // 128):
                out[i * 128 + thread] = tile[width - 1 - i * 128 - thread]

    return shared


@pytest.mark.compile
def test_shared_memory_asked_for_at_launch_is_seen() -> None:
    # The kibibyte that sm_90 reserves for itself does not count.
    assert resource_usage(_shared_kernel, 16384, "float32", SM_90A)["shared_kernel"].shared_bytes == 65536


@kernel
def _number_kernel(arch: Arch) -> Any:
    import tilelang.language as T

    @T.prim_func
    def number(size: T.int32) -> None:
        with T.Kernel(size, threads=32):
            T.sync_threads()

    return number


@pytest.mark.compile
def test_a_kernel_has_a_tensor() -> None:
    with pytest.raises(ValueError, match="_number_kernel: expected a tensor among the kernel's arguments"):
        lower(_number_kernel, SM_90A)


@kernel(pass_configs={"tl.disable_safe_memory_legalize": True})
def _guarded_kernel(has_cast: bool, arch: Arch) -> Any:
    import tilelang.language as T

    @T.prim_func
    def guarded(out: T.Tensor((T.dynamic("rows"), 4), "int32")) -> None:
        with T.Kernel(1, threads=32):
            lane = T.get_thread_binding()
            num_rows = T.alloc_var("int32", init=out.shape[0])
            for k in T.vectorized(4):
                if lane < 8:  # noqa: SIM102, as the two conditions are what is tested
                    if (T.cast(lane, "int64") if has_cast else lane) < num_rows:
                        out[lane, k] = 1

    return guarded


@pytest.mark.compile
def test_no_access_loses_a_guard() -> None:
    lower(_guarded_kernel, False, SM_90A)
    with pytest.raises(ValueError, match="_guarded_kernel: expected one condition, or none with a cast"):
        lower(_guarded_kernel, True, SM_90A)


@pytest.mark.compile
def test_kernels_compiled_together_are_told_apart() -> None:
    """Some have the same name, one uses local memory, and two shared memory of the same name, but another type."""
    requests = [
        KernelRequest(_add_kernel, (64, SM_90A)),
        KernelRequest(_spilling_kernel, (1024, SM_90A)),
        KernelRequest(_add_kernel, (32, SM_90A)),
        KernelRequest(_shared_kernel, (16384, "float32", SM_90A)),
        KernelRequest(_shared_kernel, (8192, "int32", SM_90A)),
    ]
    usages = resource_usages(requests, [lower(request.kernel, *request.args) for request in requests])
    names = ["add_kernel", "spill_kernel", "add_kernel", "shared_kernel", "shared_kernel"]
    assert [list(usage) for usage in usages] == [[name] for name in names]
    first, spilling, second, *shared = (used for usage in usages for used in usage.values())
    assert spilling.stack_bytes >= 128
    assert [used.stack_bytes for used in (first, second, *shared)] == [0, 0, 0, 0]
    assert [used.shared_bytes for used in shared] == [65536, 32768]
    assert max(first.shared_bytes, second.shared_bytes, spilling.shared_bytes) == 0
