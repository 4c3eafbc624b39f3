from .selection import topk_indices as topk_indices
