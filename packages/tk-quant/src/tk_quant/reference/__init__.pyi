from .and_back import per_token_cast_and_cast_back as per_token_cast_and_cast_back
from .back import cast_back as cast_back
from .back import cast_back_e5m6 as cast_back_e5m6
from .back import per_token_cast_back as per_token_cast_back
from .batched_transpose_weight_sf import batched_transpose_weight_sf as batched_transpose_weight_sf
from .lossless import per_block_cast_lossless as per_block_cast_lossless
from .norm import norm_backward as norm_backward
from .norm import norm_forward as norm_forward
from .norm import norm_forward_and_per_token_cast as norm_forward_and_per_token_cast
from .per_block import per_block_cast as per_block_cast
from .per_block import per_block_cast_with_precomputed_sf as per_block_cast_with_precomputed_sf
from .per_block import per_block_cast_with_sf_only as per_block_cast_with_sf_only
from .per_channel import per_channel_cast as per_channel_cast
from .per_channel import per_channel_cast_and_transpose as per_channel_cast_and_transpose
from .per_channel import per_channel_cast_fused as per_channel_cast_fused
from .per_token import per_token_cast as per_token_cast
from .per_token import per_token_cast_to_e5m6 as per_token_cast_to_e5m6
from .per_token import per_token_cast_with_precomputed_sf as per_token_cast_with_precomputed_sf
from .per_token import per_token_cast_with_sf_only as per_token_cast_with_sf_only
from .per_token_and_channel import per_token_and_channel_cast as per_token_and_channel_cast
from .rotary import apply_rotary as apply_rotary
from .rotary import qk_norm_rotary as qk_norm_rotary
from .rotary import qk_norm_rotary_backward as qk_norm_rotary_backward
from .swiglu import swiglu_backward as swiglu_backward
from .swiglu import swiglu_backward_and_per_token_cast as swiglu_backward_and_per_token_cast
from .swiglu import swiglu_forward as swiglu_forward
from .swiglu import (
    swiglu_forward_and_per_channel_cast_and_transpose as swiglu_forward_and_per_channel_cast_and_transpose,
)
from .swiglu import swiglu_forward_and_per_token_cast as swiglu_forward_and_per_token_cast
from .to_dtype import cast as cast
from .transpose import batched_transpose as batched_transpose
from .transpose import transpose as transpose
from .unpack import unpack_from_e2m1fn_x2 as unpack_from_e2m1fn_x2
