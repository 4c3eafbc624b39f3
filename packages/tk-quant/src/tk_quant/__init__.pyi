from . import reference as reference
from .cast import cast as cast
from .cast.and_back import per_token_cast_and_cast_back as per_token_cast_and_cast_back
from .cast.back import cast_back as cast_back
from .cast.back import cast_back_e5m6 as cast_back_e5m6
from .cast.back import per_token_cast_back as per_token_cast_back
from .cast.lossless import per_block_cast_lossless as per_block_cast_lossless
from .cast.per_block import per_block_cast as per_block_cast
from .cast.per_block import per_block_cast_with_precomputed_sf as per_block_cast_with_precomputed_sf
from .cast.per_block import per_block_cast_with_sf_only as per_block_cast_with_sf_only
from .cast.per_channel import per_channel_cast as per_channel_cast
from .cast.per_channel import per_channel_cast_and_transpose as per_channel_cast_and_transpose
from .cast.per_channel import per_channel_cast_fused as per_channel_cast_fused
from .cast.per_token import per_token_cast as per_token_cast
from .cast.per_token import per_token_cast_to_e5m6 as per_token_cast_to_e5m6
from .cast.per_token import per_token_cast_with_precomputed_sf as per_token_cast_with_precomputed_sf
from .cast.per_token import per_token_cast_with_sf_only as per_token_cast_with_sf_only
from .cast.per_token_and_channel import per_token_and_channel_cast as per_token_and_channel_cast
from .cast.unpack import unpack_from_e2m1fn_x2 as unpack_from_e2m1fn_x2
from .layout.batched_transpose_weight_sf import batched_transpose_weight_sf as batched_transpose_weight_sf
from .layout.transpose import batched_transpose as batched_transpose
from .layout.transpose import transpose as transpose
from .norm.backward import norm_backward as norm_backward
from .norm.forward import norm_forward as norm_forward
from .norm.forward_and_per_token_cast import (
    norm_forward_and_per_token_cast as norm_forward_and_per_token_cast,
)
from .rotary.apply_rotary import apply_rotary as apply_rotary
from .rotary.qk_norm_rotary import qk_norm_rotary as qk_norm_rotary
from .rotary.qk_norm_rotary_backward import qk_norm_rotary_backward as qk_norm_rotary_backward
from .swiglu.backward import swiglu_backward as swiglu_backward
from .swiglu.backward_and_per_token_cast import (
    swiglu_backward_and_per_token_cast as swiglu_backward_and_per_token_cast,
)
from .swiglu.forward import swiglu_forward as swiglu_forward
from .swiglu.forward_and_per_channel_cast import (
    swiglu_forward_and_per_channel_cast_and_transpose as swiglu_forward_and_per_channel_cast_and_transpose,
)
from .swiglu.forward_and_per_token_cast import (
    swiglu_forward_and_per_token_cast as swiglu_forward_and_per_token_cast,
)

__version__: str
