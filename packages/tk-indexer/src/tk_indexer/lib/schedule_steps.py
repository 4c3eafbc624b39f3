"""The schedule of paged scores: for each thread block the sequence and the chunk of it at which it begins."""

import tilelang.language as T

from tk_indexer.lib.paged_steps import num_chunks


@T.macro
def chunks_of(lengths: T.Buffer, seq: T.PrimExpr) -> T.PrimExpr:
    """Chunks of a sequence, which is as long as the longest of its queries."""
    length = T.alloc_var("int32", init=0)
    for i in T.unroll(lengths.shape[1]):
        length = T.max(length, lengths[seq, i])
    return num_chunks(length)


@T.macro
def write_schedule(lengths: T.Buffer, out: T.Buffer) -> None:
    """In a thread block: out[i] = where chunk total · i // n is, for n thread blocks; out[n] = the end.

    A thread sums some consecutive sequences; then it finds the threads, and in these the sequences, of its bounds.
    """
    thread, threads = T.get_thread_binding(), int(T.get_thread_extent())
    num_seqs, num_bounds = lengths.shape[0], out.shape[0]
    sums = T.alloc_shared((threads + 1,), "int64")
    sum_, lower, place = (T.alloc_var("int64", init=0) for _ in range(3))
    seq, owner, end, middle, chunks = (T.alloc_var("int32", init=0) for _ in range(5))
    share = T.ceildiv(num_seqs, threads)
    for i in T.serial(share):
        if thread * share + i < num_seqs:
            sum_ += T.cast(chunks_of(lengths, thread * share + i), "int64")
    if thread == 0:
        sums[0] = T.int64(0)
    # sums[i] = the chunks of the threads before i
    sums[thread + 1] = sum_
    T.sync_threads()
    for step in T.unroll(threads.bit_length() - 1):
        lower = T.int64(0)
        if thread >= (1 << step):
            lower = sums[thread + 1 - (1 << step)]
        T.sync_threads()
        sums[thread + 1] = sums[thread + 1] + lower
        T.sync_threads()
    for i in T.serial(T.ceildiv(num_bounds, threads)):
        bound = i * threads + thread
        place = T.truncdiv(sums[threads] * T.cast(bound, "int64"), T.cast(num_bounds - 1, "int64"))
        if bound < num_bounds:
            seq = num_seqs
            if bound == 0:
                seq = 0
            elif place < sums[threads]:
                owner = 0
                end = threads
                while end - owner > 1:
                    middle = (owner + end) // 2
                    if sums[middle] <= place:
                        owner = middle
                    else:
                        end = middle
                place -= sums[owner]
                seq = owner * share
                chunks = chunks_of(lengths, seq)
                while place >= T.cast(chunks, "int64"):
                    place -= T.cast(chunks, "int64")
                    seq += 1
                    chunks = chunks_of(lengths, seq)
            else:
                place = T.int64(0)
            out[bound, 0] = seq
            out[bound, 1] = T.cast(place, "int32")
