"""The size of thread block clusters, and CUDA device functions for distributed shared memory."""

from tk_core.arch import Arch

# mapa maps an address in this block's shared memory to the same place in that of another block of the cluster.
LOAD_FROM_CLUSTER = """
__device__ __forceinline__ int tk_load_from_cluster(const int* pointer, int rank) {
  unsigned int here = static_cast<unsigned int>(__cvta_generic_to_shared(pointer)), there;
  int value;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
  asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(value) : "r"(there) : "memory");
  return value;
}
"""

# Thread blocks send each other 16 bytes at a time; the receiver's mbarrier counts the bytes that have arrived. Before
# that, a cluster barrier ensures that the receiver's mbarrier is initialized. For kernels that also import MBARRIER.
SEND_TO_CLUSTER = """
__device__ __forceinline__ void tk_send_to_cluster(void* to, const void* from, void* barrier, int rank) {
  unsigned int there, barrier_there;
  uint4 value = *static_cast<const uint4*>(from);
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(tk_shared_address(to)), "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(barrier_there) : "r"(tk_shared_address(barrier)), "r"(rank));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];"
               :: "r"(there), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(barrier_there) : "memory");
}

__device__ __forceinline__ void tk_wait_for_cluster(void* barrier) {
  unsigned int done = 0;
  while (!done) {
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;"
                 " selp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(tk_shared_address(barrier)) : "memory");
  }
}
"""


def largest_cluster(num_sms: int, arch: Arch) -> int:
    """Number of thread blocks of the largest cluster that fits on `num_sms` SMs; 1 where clusters of 8 do not."""
    if arch.sm < 90 or num_sms < 8:
        return 1
    # The blocks of a cluster share a GPC. If 8 GPCs have more than 120 SMs together, one of them has at least 16.
    return 16 if arch.sm in (90, 100, 103) and num_sms > 120 else 8
