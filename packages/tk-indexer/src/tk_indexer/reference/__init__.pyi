from .scores import fp8_fp4_mqa_logits as fp8_fp4_mqa_logits
from .selection import topk_indices as topk_indices
