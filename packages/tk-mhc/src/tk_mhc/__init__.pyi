from . import reference as reference
from .collapse.mhc_pre_apply_mix import mhc_pre_apply_mix as mhc_pre_apply_mix
from .collapse.mhc_pre_apply_mix_bwd import mhc_pre_apply_mix_bwd as mhc_pre_apply_mix_bwd
from .expand.expand_to_mhc import expand_to_mhc as expand_to_mhc
from .expand.expand_to_mhc_bwd import expand_to_mhc_bwd as expand_to_mhc_bwd
from .fused.mhc_post_pre import mhc_post_pre as mhc_post_pre
from .fused.mhc_pre_big_fuse import mhc_pre_big_fuse as mhc_pre_big_fuse
from .fused.mhc_pre_big_fuse_from_partials import mhc_pre_big_fuse_from_partials as mhc_pre_big_fuse_from_partials
from .fused.mhc_pre_broadcast import mhc_pre_broadcast as mhc_pre_broadcast
from .mixes.mhc_head_compute_mix import mhc_head_compute_mix as mhc_head_compute_mix
from .mixes.mhc_head_compute_mix_bwd import mhc_head_compute_mix_bwd as mhc_head_compute_mix_bwd
from .mixes.mhc_pre_split_mixes import mhc_pre_split_mixes as mhc_pre_split_mixes
from .mixes.mhc_pre_split_mixes_bwd import mhc_pre_split_mixes_bwd as mhc_pre_split_mixes_bwd
from .mixes.sinkhorn_normalize import sinkhorn_normalize as sinkhorn_normalize
from .mixes.sinkhorn_normalize_bwd import sinkhorn_normalize_bwd as sinkhorn_normalize_bwd
from .post.mhc_multilayer_recompute import mhc_multilayer_recompute as mhc_multilayer_recompute
from .post.mhc_post import mhc_post as mhc_post
from .post.mhc_post_bwd import mhc_post_bwd as mhc_post_bwd
from .projection.mhc_fold_fn import mhc_fold_fn as mhc_fold_fn
from .projection.mhc_pre_norm_fn import mhc_pre_norm_fn as mhc_pre_norm_fn
from .projection.mhc_pre_norm_fn_bwd import mhc_pre_norm_fn_bwd as mhc_pre_norm_fn_bwd
from .projection.mhc_prenorm_gemm import mhc_prenorm_gemm as mhc_prenorm_gemm

__version__: str
