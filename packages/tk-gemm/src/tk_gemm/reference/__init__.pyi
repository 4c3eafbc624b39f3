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
from .layout.interleave_gate_and_up import interleave_gate_and_up as interleave_gate_and_up
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
