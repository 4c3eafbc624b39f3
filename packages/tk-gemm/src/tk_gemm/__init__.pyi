from . import reference as reference
from .dense.bf16_gemm_nt import bf16_gemm_nn as bf16_gemm_nn
from .dense.bf16_gemm_nt import bf16_gemm_nt as bf16_gemm_nt
from .dense.bf16_gemm_nt import bf16_gemm_tn as bf16_gemm_tn
from .dense.bf16_gemm_nt import bf16_gemm_tt as bf16_gemm_tt
from .dense.fp8_gemm_nt import fp8_gemm_nn as fp8_gemm_nn
from .dense.fp8_gemm_nt import fp8_gemm_nt as fp8_gemm_nt
from .dense.fp8_gemm_nt import fp8_gemm_tn as fp8_gemm_tn
from .dense.fp8_gemm_nt import fp8_gemm_tt as fp8_gemm_tt
from .k_grouped.k_grouped_bf16_gemm_tn_contiguous import (
    k_grouped_bf16_gemm_tn_contiguous as k_grouped_bf16_gemm_tn_contiguous,
)
from .k_grouped.k_grouped_fp8_gemm_nt_contiguous import (
    k_grouped_fp8_gemm_nt_contiguous as k_grouped_fp8_gemm_nt_contiguous,
)
from .layout.get_mn_major_tma_aligned_tensor import get_mn_major_tma_aligned_tensor as get_mn_major_tma_aligned_tensor
from .layout.interleave_gate_and_up import interleave_gate_and_up as interleave_gate_and_up
from .layout.transform_sf_into_required_layout import (
    transform_sf_into_required_layout as transform_sf_into_required_layout,
)
from .lib.alignment import get_mk_alignment_for_contiguous_layout as get_mk_alignment_for_contiguous_layout
from .lib.alignment import set_mk_alignment_for_contiguous_layout as set_mk_alignment_for_contiguous_layout
from .lib.num_sms import get_num_sms as get_num_sms
from .lib.num_sms import set_num_sms as set_num_sms
from .m_grouped.m_grouped_bf16_gemm_nt_contiguous import (
    m_grouped_bf16_gemm_nn_contiguous as m_grouped_bf16_gemm_nn_contiguous,
)
from .m_grouped.m_grouped_bf16_gemm_nt_contiguous import (
    m_grouped_bf16_gemm_nt_contiguous as m_grouped_bf16_gemm_nt_contiguous,
)
from .m_grouped.m_grouped_bf16_gemm_nt_masked import m_grouped_bf16_gemm_nt_masked as m_grouped_bf16_gemm_nt_masked
from .m_grouped.m_grouped_fp8_gemm_nt_contiguous import (
    m_grouped_fp8_gemm_nn_contiguous as m_grouped_fp8_gemm_nn_contiguous,
)
from .m_grouped.m_grouped_fp8_gemm_nt_contiguous import (
    m_grouped_fp8_gemm_nt_contiguous as m_grouped_fp8_gemm_nt_contiguous,
)
from .m_grouped.m_grouped_fp8_gemm_nt_masked import m_grouped_fp8_gemm_nt_masked as m_grouped_fp8_gemm_nt_masked
from .m_grouped.m_grouped_fp8_gemm_swiglu_nt_contiguous import (
    m_grouped_fp8_gemm_swiglu_nt_contiguous as m_grouped_fp8_gemm_swiglu_nt_contiguous,
)

__version__: str
