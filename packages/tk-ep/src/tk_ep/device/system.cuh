#pragma once
// Memory that other GPUs or the host read and write: accesses at system scope, and waits that end at a limit.

__device__ __forceinline__ int tk_load_acquire(const int* address) {
  int value;
  asm volatile("ld.acquire.sys.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ int tk_load_relaxed(const int* address) {
  int value;
  asm volatile("ld.relaxed.sys.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void tk_store_relaxed(int* address, int value) {
  asm volatile("st.relaxed.sys.global.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// An epoch and a value travel in one word of 8 bytes, so that nothing has to order them.
__device__ __forceinline__ void tk_tell(int* address, int epoch, int value) {
  unsigned long long told = static_cast<unsigned long long>(static_cast<unsigned int>(value)) << 32;
  told |= static_cast<unsigned int>(epoch);
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(told) : "memory");
}

__device__ __forceinline__ long long tk_load_told(const int* address) {
  long long told;
  asm volatile("ld.relaxed.sys.global.s64 %0, [%1];" : "=l"(told) : "l"(address) : "memory");
  return told;
}

__device__ __forceinline__ void tk_fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// What the block has written, on any GPU, is visible to the block that takes the last ticket, and to whom that signals.
__device__ __forceinline__ int tk_take_ticket(int* address) {
  int taken;
  asm volatile("fence.acq_rel.sys;" ::: "memory");
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(taken) : "l"(address) : "memory");
  return taken;
}

__device__ __forceinline__ long long tk_nanoseconds() {
  long long now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// Epochs wrap around, so they are compared by their difference.
__device__ __forceinline__ int tk_await(const int* address, int wanted, long long limit) {
  long long start = tk_nanoseconds();
  int found = tk_load_acquire(address);
  while (found - wanted < 0 && tk_nanoseconds() - start < limit) {
    found = tk_load_acquire(address);
  }
  return found;
}

__device__ __forceinline__ void tk_store_on_host(long long address, int index, int value) {
  asm volatile("st.relaxed.sys.s32 [%0], %1;" ::"l"(address + 4ll * index), "r"(value) : "memory");
}

// Only the first failure is told; word 0 is written after the others.
__device__ __forceinline__ void tk_fail(int* failed, long long host, int op, int awaited, int wanted, int found) {
  if (atomicExch(failed, 1) != 0) {
    return;
  }
  tk_store_on_host(host, 1, op);
  tk_store_on_host(host, 2, awaited);
  tk_store_on_host(host, 3, wanted);
  tk_store_on_host(host, 4, found);
  asm volatile("fence.acq_rel.sys;" ::: "memory");
  tk_store_on_host(host, 0, 1);
}

// Orders what threads have written or acquired, in global memory too, before bulk copies that follow. It waits for the
// thread's stores to be visible to the whole GPU, which takes a microsecond and more.
__device__ __forceinline__ void tk_fence_bulk_copies() { asm volatile("fence.proxy.async;" ::: "memory"); }

__device__ __forceinline__ void tk_bulk_store(void* destination, const void* source, int num_bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination),
               "r"(static_cast<unsigned int>(__cvta_generic_to_shared(source))), "r"(num_bytes)
               : "memory");
}
