from . import reference as reference
from .casts.cp_gather_indexer_k_quant_cache import cp_gather_indexer_k_quant_cache as cp_gather_indexer_k_quant_cache
from .casts.fused_indexer_q_rope_quant import fused_indexer_q_rope_quant as fused_indexer_q_rope_quant
from .casts.indexer_k_quant_and_cache import indexer_k_quant_and_cache as indexer_k_quant_and_cache
from .scores.dense import fp8_fp4_mqa_logits as fp8_fp4_mqa_logits
from .scores.dense import fp8_mqa_logits as fp8_mqa_logits
from .selection.topk_indices import topk_indices as topk_indices

__version__: str
