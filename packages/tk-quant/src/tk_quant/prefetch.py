"""Reading ahead: while a block works on a tile, its threads fetch what they will need of the next one.

Every thread copies its own pieces of a row into places of its own in shared memory, so no barrier is needed; when the
copies are done it takes the pieces into registers, and at once sends for those that come to the same places next.
"""

from functools import cache
from typing import Any

from tk_quant.quantize import load_macro

PREFETCH_SOURCE = r"""
// Copies num_bytes (4, 8 or 16) from global to shared memory some time before the next tk_wait_for_copies, if `wanted`.
template <int num_bytes>
__device__ __forceinline__ void tk_copy_later(void *to, const void *from, bool wanted) {
  const unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(to));
  if (num_bytes == 16)
    asm volatile(
        "{\n  .reg .pred p;\n  setp.ne.b32 p, %2, 0;\n  @p cp.async.cg.shared.global [%0], [%1], 16;\n}\n"
        :: "r"(place), "l"(from), "r"(int(wanted)) : "memory");
  else
    asm volatile(
        "{\n  .reg .pred p;\n  setp.ne.b32 p, %2, 0;\n  @p cp.async.ca.shared.global [%0], [%1], %3;\n}\n"
        :: "r"(place), "l"(from), "r"(int(wanted)), "n"(num_bytes) : "memory");
}

// The copies of this thread are done, for this thread.
__device__ __forceinline__ void tk_wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
"""
"""For T.import_source: what the macro below calls, and `tk_wait_for_copies()`."""


@cache
def prefetch_macro(num_words: int, elements_per_word: int, alignment: int) -> Any:
    """Macro `prefetch(x, stage, slot, thread, row, col, wanted)`: 4 or 8 words of a row of x to stage[slot, thread].

    stage is uint32 (slots, threads, num_words) in shared memory. The rest is as in `load_macro`, but where it is not
    wanted the words stay as they are.
    """
    import tilelang.language as T

    num_bytes = min(alignment, 16)
    words_per_copy = num_bytes // 4

    @T.macro
    def prefetch(
        x: T.Buffer, stage: T.Buffer, slot: T.int32, thread: T.int32, row: T.int32, col: T.int32, wanted: T.bool
    ) -> None:
        if num_bytes >= 4:
            for j in T.unroll(num_words // words_per_copy):
                T.call_extern(
                    "void",
                    f"tk_copy_later<{num_bytes}>",
                    T.access_ptr(stage[slot, thread, j * words_per_copy], "w"),
                    T.access_ptr(x[row, col + j * words_per_copy * elements_per_word], "r"),
                    wanted,
                )
        else:
            if wanted:
                words = T.alloc_local((1, num_words), "uint32")
                load_macro(num_words, elements_per_word, alignment)(x, words, 0, row, col, True)
                for j in T.vectorized(num_words):
                    stage[slot, thread, j] = words[0, j]

    return prefetch
