"""FP8, FP4 and E5M6 casts, fused SwiGLU and transposes as GPU kernels. Names load on first use."""

from typing import TYPE_CHECKING

from tk_core.lazy import export

if TYPE_CHECKING:
    from tk_quant.dequantize.cast_back import cast_back as cast_back
    from tk_quant.dequantize.cast_back import cast_back_e5m6 as cast_back_e5m6
    from tk_quant.dequantize.per_token_cast_back import per_token_cast_back as per_token_cast_back
    from tk_quant.dequantize.unpack_from_e2m1fn_x2 import unpack_from_e2m1fn_x2 as unpack_from_e2m1fn_x2
    from tk_quant.layout.transpose import batched_transpose as batched_transpose
    from tk_quant.layout.transpose import transpose as transpose
    from tk_quant.per_block.per_block_cast import per_block_cast as per_block_cast
    from tk_quant.per_block.per_block_cast import (
        per_block_cast_with_precomputed_sf as per_block_cast_with_precomputed_sf,
    )
    from tk_quant.per_block.per_block_cast import per_block_cast_with_sf_only as per_block_cast_with_sf_only
    from tk_quant.per_block.per_block_cast_lossless import per_block_cast_lossless as per_block_cast_lossless
    from tk_quant.per_channel.per_channel_cast import per_channel_cast as per_channel_cast
    from tk_quant.per_channel.per_channel_cast_and_transpose import (
        per_channel_cast_and_transpose as per_channel_cast_and_transpose,
    )
    from tk_quant.per_channel.per_channel_cast_fused import per_channel_cast_fused as per_channel_cast_fused
    from tk_quant.per_channel.per_token_and_channel_cast import per_token_and_channel_cast as per_token_and_channel_cast
    from tk_quant.per_token.per_token_cast import per_token_cast as per_token_cast
    from tk_quant.per_token.per_token_cast import per_token_cast_to_e5m6 as per_token_cast_to_e5m6
    from tk_quant.per_token.per_token_cast import (
        per_token_cast_with_precomputed_sf as per_token_cast_with_precomputed_sf,
    )
    from tk_quant.per_token.per_token_cast import per_token_cast_with_sf_only as per_token_cast_with_sf_only
    from tk_quant.swiglu.swiglu_backward import swiglu_backward as swiglu_backward
    from tk_quant.swiglu.swiglu_backward_and_per_token_cast import (
        swiglu_backward_and_per_token_cast as swiglu_backward_and_per_token_cast,
    )
    from tk_quant.swiglu.swiglu_forward import swiglu_forward as swiglu_forward
    from tk_quant.swiglu.swiglu_forward_and_per_channel_cast_and_transpose import (
        swiglu_forward_and_per_channel_cast_and_transpose as swiglu_forward_and_per_channel_cast_and_transpose,
    )
    from tk_quant.swiglu.swiglu_forward_and_per_token_cast import (
        swiglu_forward_and_per_token_cast as swiglu_forward_and_per_token_cast,
    )

__version__: str

__all__ = [
    "batched_transpose",
    "cast_back",
    "cast_back_e5m6",
    "per_block_cast",
    "per_block_cast_lossless",
    "per_block_cast_with_precomputed_sf",
    "per_block_cast_with_sf_only",
    "per_channel_cast",
    "per_channel_cast_and_transpose",
    "per_channel_cast_fused",
    "per_token_and_channel_cast",
    "per_token_cast",
    "per_token_cast_back",
    "per_token_cast_to_e5m6",
    "per_token_cast_with_precomputed_sf",
    "per_token_cast_with_sf_only",
    "swiglu_backward",
    "swiglu_backward_and_per_token_cast",
    "swiglu_forward",
    "swiglu_forward_and_per_channel_cast_and_transpose",
    "swiglu_forward_and_per_token_cast",
    "transpose",
    "unpack_from_e2m1fn_x2",
]

export(
    __name__,
    {
        "batched_transpose": "layout.transpose",
        "cast_back": "dequantize.cast_back",
        "cast_back_e5m6": "dequantize.cast_back",
        "per_block_cast": "per_block.per_block_cast",
        "per_block_cast_lossless": "per_block.per_block_cast_lossless",
        "per_block_cast_with_precomputed_sf": "per_block.per_block_cast",
        "per_block_cast_with_sf_only": "per_block.per_block_cast",
        "per_channel_cast": "per_channel.per_channel_cast",
        "per_channel_cast_and_transpose": "per_channel.per_channel_cast_and_transpose",
        "per_channel_cast_fused": "per_channel.per_channel_cast_fused",
        "per_token_and_channel_cast": "per_channel.per_token_and_channel_cast",
        "per_token_cast": "per_token.per_token_cast",
        "per_token_cast_back": "dequantize.per_token_cast_back",
        "per_token_cast_to_e5m6": "per_token.per_token_cast",
        "per_token_cast_with_precomputed_sf": "per_token.per_token_cast",
        "per_token_cast_with_sf_only": "per_token.per_token_cast",
        "swiglu_backward": "swiglu.swiglu_backward",
        "swiglu_backward_and_per_token_cast": "swiglu.swiglu_backward_and_per_token_cast",
        "swiglu_forward": "swiglu.swiglu_forward",
        "swiglu_forward_and_per_channel_cast_and_transpose": "swiglu.swiglu_forward_and_per_channel_cast_and_transpose",
        "swiglu_forward_and_per_token_cast": "swiglu.swiglu_forward_and_per_token_cast",
        "transpose": "layout.transpose",
        "unpack_from_e2m1fn_x2": "dequantize.unpack_from_e2m1fn_x2",
    },
)
