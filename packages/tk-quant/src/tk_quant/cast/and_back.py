"""per_token_cast_and_cast_back: the values that per_token_cast would keep, in the dtype of x.

A thread block loads a tile of whole groups as in by_block.py, and keeps it in registers until the store, so x may be
written in place.
"""

from typing import Any

from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import ceil_div
from tk_core.op import launching, op
from tk_core.tiles import DIRECT_COPIES
from tk_quant.cast.config import CastInput, TileConfig
from tk_quant.cast.format import PLAIN_DTYPES, least_amax_of

_GROUPS = (16, 32, 64, 128)
_FORMATS = ("e4m3", "e2m1")

# Each access has a guard of its own, so TileLang's bounds checks would only repeat them.
_PASS_CONFIGS = {**DIRECT_COPIES, "tl.disable_safe_memory_legalize": True}


@kernel(pass_configs=_PASS_CONFIGS)
def _cast_and_back_kernel(
    source: CastInput, hidden: int, fmt: str, num_per_channels: int, round_sf: bool, use_e4m3_sf: bool, arch: Arch
) -> Any:
    import tilelang.language as T

    from tk_core.macros import quantize
    from tk_quant.cast import scales
    from tk_quant.cast import tile as tiles
    from tk_quant.cast.e2m1 import round_to_e2m1

    config = TileConfig.best(hidden, (1, num_per_channels), source.bits, "e4m3", True, False, arch)
    splits, num_tiles = config.splits((1, num_per_channels)), ceil_div(hidden, config.channels)
    dtype, num_tokens = T.dtype(source.dtype), T.dynamic("num_tokens")

    def sf_of_amax(amax: Any) -> tuple[Any, Any]:
        if use_e4m3_sf:
            return scales.e4m3_sf_of_amax(amax, fmt)
        return quantize.sf_of_amax(amax, fmt, round_sf)

    @T.macro
    def kept(value: T.float32) -> T.float32:
        """The value of the code that a scaled value gets."""
        if fmt == "e2m1":
            return round_to_e2m1(value)
        code = T.alloc_local((1,), "float8_e4m3fn")
        code[0] = T.cast(value, "float8_e4m3fn")
        return T.cast(code[0], "float32")

    @T.prim_func
    def cast_and_back(
        x: tiles.input_type(source, num_tokens, hidden),
        out: T.StridedTensor((num_tokens, hidden), (T.dynamic("out_stride", "int64"), 1), dtype),
        least_amax: T.float32,
    ) -> None:
        with T.Kernel(T.ceildiv(num_tokens, config.tokens) * num_tiles, threads=config.threads) as index:
            T.assume(out.strides[0] % (source.alignment // source.dtype.itemsize) == 0)
            row, col = index // num_tiles * config.tokens, index % num_tiles * config.channels
            values, rounded = T.alloc_fragment(config.tile, dtype), T.alloc_fragment(config.tile, dtype)
            sf, factors = T.alloc_fragment(config.parts, "float32"), T.alloc_fragment(config.parts, "float32")
            T.annotate_layout({each: tiles.layout_of_tile(config) for each in (values, rounded)})
            tiles.load_values(x, x, values, row, col, source, config)
            whole = T.alloc_var("int32", init=0)
            amax = T.alloc_fragment(config.parts, "int32")
            tiles.block_amax(values, amax, config)
            if splits:
                tiles.amax_of_parts(amax, whole)
                whole = quantize.raised(whole, least_amax)
            for i, g in T.Parallel(*config.parts):
                of_group = whole if splits else quantize.raised(amax[i, g], least_amax)
                of_sf = sf_of_amax(of_group)
                sf[i, g] = of_sf[0]
                factors[i, g] = of_sf[1]
            for i, t, g, j in T.Parallel(*config.tile):
                scaled = T.cast(values[i, t, g, j], "float32") * factors[i, g]
                rounded[i, t, g, j] = T.cast(kept(scaled) * sf[i, g], dtype)
            for i, t, g, j in T.Parallel(*config.tile):
                token, channel = row + i * config.block_tokens + t, col + g * config.block_channels + j
                # Compares vectors, so that TileLang sees one guard for all elements of a vector.
                if token < num_tokens and channel // config.vec < hidden // config.vec:
                    out[token, channel] = rounded[i, t, g, j]

    return cast_and_back


def _check(x: Tensor, fmt: str, num_per_channels: int, round_sf: bool, use_e4m3_sf: bool) -> tuple[int, int]:
    num_tokens, hidden = check.tensor("x", x, PLAIN_DTYPES, ("num_tokens", "hidden"), layout="rows")
    check.require(hidden > 0 and hidden % 64 == 0, "x", "a positive multiple of 64 channels", hidden)
    check.one_of("fmt", fmt, _FORMATS)
    check.integer("num_per_channels", num_per_channels)
    check.flag("round_sf", round_sf)
    check.flag("use_e4m3_sf", use_e4m3_sf)
    groups = _GROUPS if use_e4m3_sf else (*_GROUPS, hidden)
    check.one_of("num_per_channels", num_per_channels, groups)
    check.require(not (round_sf and use_e4m3_sf), "round_sf", "False beside use_e4m3_sf", round_sf)
    return num_tokens, hidden


def _launch(
    x: Tensor, out: Tensor, fmt: str, num_per_channels: int, round_sf: bool, use_e4m3_sf: bool, hidden: int
) -> None:
    source = CastInput(x.dtype, min(check.row_alignment(x), check.row_alignment(out)))
    flags = round_sf, use_e4m3_sf, get_arch(x.device)
    _cast_and_back_kernel(source, hidden, fmt, num_per_channels, *flags)(x, out, least_amax_of(fmt, None, use_e4m3_sf))


@op(writes=("x",), aligned=(), reference="per_token_cast_and_cast_back")
def _per_token_cast_and_cast_back_in_place(
    x: Tensor, fmt: str, num_per_channels: int, round_sf: bool, use_e4m3_sf: bool
) -> None:
    _, hidden = _check(x, fmt, num_per_channels, round_sf, use_e4m3_sf)
    if launching(x):
        _launch(x, x, fmt, num_per_channels, round_sf, use_e4m3_sf, hidden)


@op(writes=("out",), aligned=(), reference="per_token_cast_and_cast_back")
def _per_token_cast_and_cast_back_to_out(
    x: Tensor, fmt: str, num_per_channels: int, round_sf: bool, use_e4m3_sf: bool, *, out: Tensor
) -> None:
    num_tokens, hidden = _check(x, fmt, num_per_channels, round_sf, use_e4m3_sf)
    check.tensor("out", out, (x.dtype,), (num_tokens, hidden), layout="rows", device=x.device)
    if launching(out):
        _launch(x, out, fmt, num_per_channels, round_sf, use_e4m3_sf, hidden)


def per_token_cast_and_cast_back(
    x: Tensor,
    fmt: str,
    num_per_channels: int,
    round_sf: bool = False,
    use_e4m3_sf: bool = False,
    *,
    out: Tensor | None = None,
) -> None:
    """`per_token_cast`, then `per_token_cast_back` to x's dtype, in one pass: what quantizing makes of the values.

    Every bit is that of the two ops. Names are those of DeepSeek's TileKernels 2.1.0, which has no `out`.

    Args:
        x: bfloat16 or float32 (num_tokens, hidden), hidden a multiple of 64, rows may be strided. It is written in
            place, unless `out` is given.
        fmt: "e4m3" or "e2m1".
        num_per_channels: Channels of a group: 16, 32, 64, 128 or, without use_e4m3_sf, hidden. The last group of a row
            may be shorter.
        round_sf: Round sf up to a power of two.
        use_e4m3_sf: Round sf to e4m3; not with round_sf.
        out: A tensor like x to write to, rows may be strided; it overlaps x nowhere, and x stays as it is.

    Raises:
        TypeError: x or out is no tensor, or has another dtype.
        ValueError: Any other argument is not as described, or is on another device.
    """
    options = (x, fmt, num_per_channels, round_sf, use_e4m3_sf)
    if out is None:
        _per_token_cast_and_cast_back_in_place(*options)
    else:
        _per_token_cast_and_cast_back_to_out(*options, out=out)
