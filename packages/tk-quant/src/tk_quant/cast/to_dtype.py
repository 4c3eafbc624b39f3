"""cast: a tensor to another dtype, without scale factors, rounded to nearest or stochastically.

Rounding to nearest is to even; e4m3 saturates, infinity too. Stochastic rounding is explained in stochastic.py.

A vector of 16 bytes of the output is one thread's, whatever its shape in the tensor. The vectors of a tile go to its
threads in turn, and all are loaded before the first is stored:

    vectors   0 … 127      to threads t0 … t127
            128 … 255                 t0 … t127
              …
"""

from functools import reduce
from operator import mul
from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.op import launching, new, op
from tk_core.tiles import DIRECT_COPIES

_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)
_STOCHASTIC = {torch.bfloat16: (torch.float32,), torch.float8_e4m3fn: (torch.float32, torch.bfloat16)}
"""By dtype: those that are rounded to it stochastically."""
_THREADS = 128
_QUAD = 4
# Each access has a guard of its own: those of T.copy choose element by element, for e4m3 in local memory.
_PASS_CONFIGS = {**DIRECT_COPIES, "tl.disable_safe_memory_legalize": True}


def _turns(vector: int, itemsize: int) -> int:
    """Vectors of a thread: 64 bytes of the input, but at most four."""
    return max(1, min(4, 64 // (vector * itemsize)))


@kernel(pass_configs=_PASS_CONFIGS)
def _cast_kernel(ndim: int, dtype: torch.dtype, out_dtype: torch.dtype, arch: Arch) -> Any:
    import tilelang.language as T

    from tk_core.macros.quantize import INFINITY_BITS, MAGNITUDE_BITS, NAN_BITS

    vector = 16 // out_dtype.itemsize
    rows = _THREADS * _turns(vector, dtype.itemsize)
    # As in _unpack_kernel, tensors come in their own shape.
    shape = tuple(T.dynamic(f"size_{i}") for i in range(ndim))
    numel = reduce(mul, (T.cast(size, "int64") for size in shape))
    num_vectors = numel // vector

    def in_turn(index: Any, element: Any) -> tuple[Any, Any]:
        return index % _THREADS, index // _THREADS * vector + element

    @T.macro
    def convert(x: T.Buffer, out: T.Buffer, first: T.int64, shape: tuple[int, int]) -> None:
        """Convert a tile of this shape, rows of x from `first` on, and store it in out; skip rows past the end."""
        loaded, converted = T.alloc_fragment(shape, x.dtype), T.alloc_fragment(shape, out.dtype)
        T.annotate_layout({each: T.Fragment(shape, forward_fn=in_turn) for each in (loaded, converted)})
        for i, j in T.Parallel(*shape):
            if first + i < x.shape[0]:
                loaded[i, j] = x[first + i, j]
        if dtype is out_dtype:
            T.copy(loaded, converted)
        else:
            for i, j in T.Parallel(*shape):
                value = T.cast(loaded[i, j], "float32")
                if dtype is torch.float8_e4m3fn and out_dtype is torch.float32:
                    is_nan = (T.reinterpret(value, "uint32") & T.uint32(MAGNITUDE_BITS)) > T.uint32(INFINITY_BITS)
                    value = T.if_then_else(is_nan, T.reinterpret(T.uint32(NAN_BITS), "float32"), value)
                converted[i, j] = T.cast(value, out.dtype)
        for i, j in T.Parallel(*shape):
            if first + i < x.shape[0]:
                out[first + i, j] = converted[i, j]

    @T.prim_func
    def cast(x: T.Tensor(shape, T.dtype(dtype)), out: T.Tensor(shape, T.dtype(out_dtype))) -> None:
        num_blocks = T.max(T.ceildiv(num_vectors, rows), 1)
        with T.Kernel(T.cast(num_blocks, "int32"), threads=_THREADS) as block:
            first = T.cast(block, "int64") * rows
            x_vectors = T.Tensor((num_vectors, vector), T.dtype(dtype), x.data)
            out_vectors = T.Tensor((num_vectors, vector), T.dtype(out_dtype), out.data)
            convert(x_vectors, out_vectors, first, (rows, vector))
            if first + rows >= num_vectors:  # the tail, which is shorter than a vector
                x_elements = T.Tensor((numel, 1), T.dtype(dtype), x.data)
                out_elements = T.Tensor((numel, 1), T.dtype(out_dtype), out.data)
                convert(x_elements, out_elements, num_vectors * vector, (vector, 1))

    return cast


@kernel(pass_configs=_PASS_CONFIGS)
def _stochastic_cast_kernel(
    ndim: int, dtype: torch.dtype, out_dtype: torch.dtype, has_seed_tensor: bool, arch: Arch
) -> Any:
    import tilelang.language as T

    from tk_quant.cast import stochastic

    to_bf16 = out_dtype is torch.bfloat16
    vector, words_of_quad = 16 // out_dtype.itemsize, 2 if to_bf16 else 1
    rows = _THREADS * _turns(vector, dtype.itemsize)
    shape = tuple(T.dynamic(f"size_{i}") for i in range(ndim))
    numel = reduce(mul, (T.cast(size, "int64") for size in shape))
    num_vectors = numel // vector

    def in_turn(shape: tuple[int, int, int]) -> T.Fragment:
        _, quads, size = shape
        return T.Fragment(shape, lambda i, q, k: (i % _THREADS, (i // _THREADS * quads + q) * size + k))

    def place_in(width: int, q: Any, k: Any) -> tuple[Any, Any]:
        """Place of element k of quad q in loads of `width` elements."""
        return (q, k) if width == _QUAD else ((q * _QUAD + k) // width, (q * _QUAD + k) % width)

    @T.macro
    def convert(x: T.Buffer, out: T.Buffer, first: T.int64, shape: tuple[int, int], of_seed: T.uint32) -> None:
        """Round a tile of this shape, rows of x from `first` on, and store it in out; skip rows past the end."""
        quads, width = shape[1] // _QUAD, int(x.shape[2])
        loaded = T.alloc_fragment((shape[0], *x.shape[1:]), x.dtype)
        words = T.alloc_fragment((shape[0], quads, words_of_quad), "uint32")
        T.annotate_layout({each: in_turn(each.shape) for each in (loaded, words)})
        # With a cast in its condition, a guarded access of a tile smaller than the thread block would lose the guard.
        num_rows = T.alloc_var("int32", init=T.cast(T.min(x.shape[0] - first, shape[0]), "int32"))
        for i, q, k in T.Parallel(*loaded.shape):
            if i < num_rows:
                loaded[i, q, k] = x[first + i, q, k]
        for i, q in T.Parallel(shape[0], quads):
            values, random = T.alloc_local((_QUAD,), "float32"), T.alloc_local((words_of_quad,), "uint32")
            for k in T.unroll(_QUAD):
                values[k] = T.cast(loaded[(i, *place_in(width, q, k))], "float32")
            index = T.cast((first + i) * quads + q, "uint32")
            stochastic.hash_of_quad(values, index, of_seed, random)
            if to_bf16:
                rounded = T.alloc_local((2,), "uint32")
                stochastic.bf16_of_quad(values, random, rounded)
                for k in T.unroll(2):
                    words[i, q, k] = rounded[k]
            else:
                words[i, q, 0] = stochastic.codes_of_quad(values, random[0], "e4m3")
        for i, q, k in T.Parallel(*words.shape):
            if i < num_rows:
                out[first + i, q, k] = words[i, q, k]

    @T.prim_func
    def stochastic_cast(
        x: T.Tensor(shape, T.dtype(dtype)),
        out: T.Tensor(shape, T.dtype(out_dtype)),
        seed: T.int64,
        seed_tensor: T.Tensor((1,), "int64"),
    ) -> None:
        num_blocks = T.max(T.ceildiv(num_vectors, rows), 1)
        with T.Kernel(T.cast(num_blocks, "int32"), threads=_THREADS) as block:
            of_seed = T.alloc_var("uint32")
            of_seed = stochastic.hash_of_seed(seed_tensor[0] if has_seed_tensor else seed)
            first, quads = T.cast(block, "int64") * rows, vector // _QUAD
            # Loads of 16 bytes.
            width = 16 // dtype.itemsize
            x_vectors = T.Tensor((num_vectors, vector // width, width), T.dtype(dtype), x.data)
            out_vectors = T.Tensor((num_vectors, quads, words_of_quad), "uint32", out.data)
            convert(x_vectors, out_vectors, first, (rows, vector), of_seed)
            if first + rows >= num_vectors:  # the tail, which is shorter than a vector
                x_quads = T.Tensor((numel // _QUAD, 1, _QUAD), T.dtype(dtype), x.data)
                out_quads = T.Tensor((numel // _QUAD, 1, words_of_quad), "uint32", out.data)
                convert(x_quads, out_quads, num_vectors * quads, (quads, _QUAD), of_seed)

    return stochastic_cast


def check_seed(seed: Tensor | int | None, is_used: bool, flag: str, device: torch.device) -> None:
    """Raise unless seed is None, or, where stochastic rounding uses it, an int or an int64 tensor of one element."""
    check.require(seed is None or is_used, "seed", f"None without {flag}", seed)
    if isinstance(seed, Tensor):
        check.tensor("seed", seed, (torch.int64,), (1,) if seed.ndim else (), device=device)
    elif seed is not None:
        check.integer("seed", seed)


@op
def cast(
    x: Tensor, dtype: torch.dtype, stochastic_rounding: bool = False, *, seed: Tensor | int | None = None
) -> Tensor:
    """Convert a tensor to another dtype, rounded to nearest, ties to even, or stochastically.

    To float8_e4m3fn, values saturate at ±448, infinity too. NaN stays, as 0x7fff in bfloat16 and 0x7f in e4m3; bits
    stay where bfloat16 widens, and where the dtype is the same.

    Stochastic rounding goes to the neighbour farther from zero with the probability of the value's place between both,
    in steps of 2**-16; a finite value never becomes infinite. Its random bits are a hash of the values themselves, four
    by four, of their index and of `seed` (formula: `reference.stochastic`). So the same call gives the same bits, and
    without a seed of its own for each step, a value to which the same is added rounds alike each time. Names, hash and
    bits are those of DeepSeek's TileKernels 2.1.0, which has no `seed`.

    Args:
        x: float32, bfloat16 or float8_e4m3fn, any shape, contiguous.
        dtype: One of these three.
        stochastic_rounding: From float32 to bfloat16, or from float32 or bfloat16 to float8_e4m3fn; the number of
            elements is a multiple of 4.
        seed: For stochastic rounding an int of 64 bits, or an int64 tensor of one element, which the kernel reads, so
            that a CUDA graph gets another one in each replay. None is 0.

    Returns:
        A new tensor of x's shape, contiguous.

    Raises:
        TypeError: x is no tensor, or its dtype, `dtype` or `seed` is none of these.
        ValueError: x is not contiguous, or cannot be rounded stochastically; seed has another shape or device.
    """
    check.tensor("x", x, _DTYPES, (...,))
    check.require_type(dtype in _DTYPES, "dtype", " or ".join(map(str, _DTYPES)), dtype)
    check.flag("stochastic_rounding", stochastic_rounding)
    check_seed(seed, stochastic_rounding, "stochastic_rounding", x.device)
    if stochastic_rounding:
        allowed = _STOCHASTIC.get(dtype, ())
        if x.dtype not in allowed:
            check.require(False, "stochastic_rounding", f"False from {x.dtype} to {dtype}", True)
        check.require(x.numel() % _QUAD == 0, "x", "a multiple of 4 elements", x.numel())
    out = new(x.new_empty, x.shape, dtype=dtype)
    if launching(out):
        arch = get_arch(x.device)
        given, result = (x, out) if x.ndim else (x.view(1), out.view(1))
        if not stochastic_rounding:
            _cast_kernel(given.ndim, x.dtype, dtype, arch)(given, result)
            return out
        in_memory = isinstance(seed, Tensor)
        rounding = _stochastic_cast_kernel(given.ndim, x.dtype, dtype, in_memory, arch)
        rounding(given, result, 0 if in_memory else seed or 0, seed.view(1) if in_memory else None)
    return out
