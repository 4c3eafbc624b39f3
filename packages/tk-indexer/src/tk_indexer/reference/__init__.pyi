from .casts import cp_gather_indexer_k_quant_cache as cp_gather_indexer_k_quant_cache
from .casts import indexer_k_quant_and_cache as indexer_k_quant_and_cache
from .scores import fp8_fp4_mqa_logits as fp8_fp4_mqa_logits
from .selection import topk_indices as topk_indices
