// What kernels use to overlap: copies into shared memory that run on, barriers that count arrivals
// or bytes, clusters of blocks that reach each other's shared memory, and launches that begin
// before the kernel ahead has ended.  GPUs before compute capability 9.0 have only the copies of
// single threads: compiled for those, the other functions do nothing, and the host does not launch
// what needs them.
#pragma once
#include "common.cuh"

namespace fxfuse::cuda {

FXFUSE_INLINE uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- copies by single threads -------------------------------------------------------------------

// The thread that copied sees the bytes after it has waited; other threads after a barrier behind
// that.
template <int kBytes>
FXFUSE_INLINE void copy_piece(void* to, const void* from) {
  const uint32_t address = shared_address(to);
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(from), "n"(kBytes)
                 : "memory");
  }
}

// A vector of any size but two bytes.
template <class T, int V>
FXFUSE_INLINE void copy_vector(Loaded<T, V>* to, const T* from) {
  constexpr int kPiece = sizeof(*to) < 16 ? sizeof(*to) : 16;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(*to)); i += kPiece) {
    copy_piece<kPiece>(reinterpret_cast<char*>(to) + i, reinterpret_cast<const char*>(from) + i);
  }
}

// A vector, or zeros.
template <class T, int V>
FXFUSE_INLINE void copy_async(Loaded<T, V>* to, const T* from, bool exists = true) {
  static_assert(sizeof(*to) % 16 == 0, "a vector is whole copies");
#pragma unroll
  for (size_t i = 0; i < sizeof(*to) / 16; ++i) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                     shared_address(reinterpret_cast<char*>(to) + 16 * i)),
                 "l"(reinterpret_cast<const char*>(from) + 16 * i), "r"(exists ? 16 : 0)
                 : "memory");
  }
}

// One float or double, or 0.
template <class A>
FXFUSE_INLINE void copy_async_value(A* to, const A* from, bool exists) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)), "l"(from),
               "n"(sizeof(A)), "r"(exists ? static_cast<int>(sizeof(A)) : 0)
               : "memory");
}

// 16 bytes of an input that is aligned to `width` bytes only, in pieces of those; by elements, and
// then at once, where that is less than 4.
template <class T>
FXFUSE_INLINE void copy_unaligned(void* to, const T* from, int width) {
  char* bytes = static_cast<char*>(to);
  const char* source = reinterpret_cast<const char*>(from);
  if (width >= 4) {
#pragma unroll
    for (int i = 0; i < 16; i += 8) {
      if (width == 8) {
        copy_piece<8>(bytes + i, source + i);
      } else {
        copy_piece<4>(bytes + i, source + i);
        copy_piece<4>(bytes + i + 4, source + i + 4);
      }
    }
    return;
  }
  T elements[16 / sizeof(T)];
#pragma unroll
  for (int j = 0; j < static_cast<int>(16 / sizeof(T)); ++j) elements[j] = from[j];
#pragma unroll
  for (int j = 0; j < static_cast<int>(16 / sizeof(T)); ++j) static_cast<T*>(to)[j] = elements[j];
}

// Ends a set of copies, which may be empty; wait_for_copies<N> waits for all of this thread's sets
// but the last N.
FXFUSE_INLINE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int N>
FXFUSE_INLINE void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// The same for a number that the compiler does not know; more than kMostSetsAhead count as that
// many.
constexpr int kMostSetsAhead = 7;
template <int kSets = 0>
FXFUSE_INLINE void wait_for_copies(int sets) {
  if (kSets == sets || kSets == kMostSetsAhead) {
    wait_for_copies<kSets>();
  } else if constexpr (kSets < kMostSetsAhead) {
    wait_for_copies<kSets + 1>(sets);
  }
}

FXFUSE_INLINE void wait_for_all_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// 16 bytes, of which the first `bytes` are wanted, from a tensor that ends at `end`.  Where it ends
// in them they go by elements; all else that is read beside them belongs to the same allocation.
template <class T>
FXFUSE_INLINE void copy_part(char* to, const char* from, int bytes, const T* end) {
  if (from + 16 <= reinterpret_cast<const char*>(end)) {
    copy_piece<16>(to, from);
    return;
  }
  for (int i = 0; i < min(bytes, 16); i += sizeof(T)) {
    *reinterpret_cast<T*>(to + i) = *reinterpret_cast<const T*>(from + i);
  }
}

// Neighbouring elements at any address, copied by a block in whole 16 bytes: in shared memory they
// lie as far behind a multiple of 16 as in global memory.  16 bytes of room beside their own.
template <class T>
struct Staged {
  char* room;  // aligned to 16

  FXFUSE_INLINE const T* begin(const T* from) const {
    return reinterpret_cast<const T*>(room + reinterpret_cast<uintptr_t>(from) % 16);
  }

  // `end` is that of the tensor.
  FXFUSE_INLINE void copy(const T* from, int count, const T* end) const {
    const int skipped = static_cast<int>(reinterpret_cast<uintptr_t>(from) % 16);
    const char* const base = reinterpret_cast<const char*>(from) - skipped;
    const int bytes = count > 0 ? skipped + count * static_cast<int>(sizeof(T)) : 0;
    for (int i = 16 * threadIdx.x; i < bytes; i += 16 * blockDim.x) {
      copy_part(room + i, base + i, bytes - i, end);
    }
  }
};

// An instruction that chips before compute capability 9.0 do not have.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define FXFUSE_HOPPER(...) static_cast<void>(0)
#else
#define FXFUSE_HOPPER(...) asm volatile(__VA_ARGS__)
#endif

// ---- barriers in shared memory, and bulk copies -------------------------------------------------

// An mbarrier, as PTX has it: a phase ends when all have arrived and all announced bytes have
// landed.  The parity of phase n is n % 2.
class SharedBarrier {
 public:
  // Other threads see it after fence_barrier_init and a barrier of the block or of the cluster.
  FXFUSE_INLINE void init(int arrivals) {
    FXFUSE_HOPPER("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()),
                  "r"(arrivals) : "memory");
  }
  FXFUSE_INLINE void arrive() {
    FXFUSE_HOPPER("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory");
  }
  FXFUSE_INLINE void arrive_and_expect(int bytes) {
    FXFUSE_HOPPER("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()),
                  "r"(bytes) : "memory");
  }
  // At this object in block `rank` of the cluster.  What the thread wrote to the cluster's shared
  // memory before is seen after wait_for_cluster.
  FXFUSE_INLINE void arrive_at(int rank) {
    FXFUSE_HOPPER(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];\n"
        "}" ::"r"(address()),
        "r"(rank) : "memory");
  }
  // The same without a fence, for a thread that has only read: others may write where it read. With
  // the qualifiers the compiler flushes the whole memory of the block before every arrival: 1.40
  // instead of 1.02 times the bare matrix product (H200, 2026-11-30).
  FXFUSE_INLINE void release_at(int rank) {
    FXFUSE_HOPPER(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
        "}" ::"r"(address()),
        "r"(rank) : "memory");
  }
  // Until the phase of that parity has ended.  Compiled with FXFUSE_WATCHDOG, for work on the
  // protocols, a kernel that waits for seconds is stopped.
  FXFUSE_INLINE void wait(int parity) {
#ifdef FXFUSE_WATCHDOG
    for (int left = 1 << 20; !has_ended(parity); --left) {
      if (left == 0) __trap();
    }
    return;
#endif
    FXFUSE_HOPPER(
        "{\n"
        ".reg .pred ended;\n"
        "again_%=:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 ended, [%0], %1;\n"
        "@!ended bra again_%=;\n"
        "}" ::"r"(address()),
        "r"(parity) : "memory");
  }
  FXFUSE_INLINE void wait_for_cluster(int parity) {
    FXFUSE_HOPPER(
        "{\n"
        ".reg .pred ended;\n"
        "again_%=:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 ended, [%0], %1;\n"
        "@!ended bra again_%=;\n"
        "}" ::"r"(address()),
        "r"(parity) : "memory");
  }
  // `bytes` are announced by arrive_and_expect.  Read once: not to be kept in L2.
  FXFUSE_INLINE void copy_bulk(void* to, const void* from, int bytes) {
    [[maybe_unused]] uint64_t policy = 0;
    FXFUSE_HOPPER("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    FXFUSE_HOPPER(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1], %2, [%3], %4;" ::"r"(shared_address(to)),
        "l"(from), "r"(bytes), "r"(address()), "l"(policy) : "memory");
  }

  FXFUSE_INLINE uint32_t address() const { return shared_address(&state_); }

 private:
#ifdef FXFUSE_WATCHDOG
  FXFUSE_INLINE bool has_ended(int parity) {
    uint32_t ended = 1;
    FXFUSE_HOPPER(
        "{\n"
        ".reg .pred ended;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
        "selp.u32 %0, 1, 0, ended;\n"
        "}" : "=r"(ended) : "r"(address()),
        "r"(parity) : "memory");
    return ended != 0;
  }
#endif

  uint64_t state_;
};

FXFUSE_INLINE void prefetch_bulk(const void* from, int bytes) {
  FXFUSE_HOPPER("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// The cache line of an address; on any GPU.
FXFUSE_INLINE void prefetch_line(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

// ---- clusters -----------------------------------------------------------------------------------

FXFUSE_INLINE int rank_in_cluster() {
  int rank = 0;
  FXFUSE_HOPPER("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Makes the initialisation of barriers visible to the cluster; then the arrival, which needs no
// fence of its own, may be relaxed.
FXFUSE_INLINE void fence_barrier_init() {
  FXFUSE_HOPPER("fence.mbarrier_init.release.cluster;" :: : "memory");
}

FXFUSE_INLINE void arrive_at_cluster_barrier() {
  FXFUSE_HOPPER("barrier.cluster.arrive.relaxed.aligned;" :: : "memory");
}

FXFUSE_INLINE void wait_at_cluster_barrier() {
  FXFUSE_HOPPER("barrier.cluster.wait.acquire.aligned;" :: : "memory");
}

// Everything that the cluster's threads wrote to shared memory before it is seen after it.
FXFUSE_INLINE void cluster_barrier() {
  FXFUSE_HOPPER(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" :: : "memory");
}

// The object at the same place in the shared memory of block `rank`.
template <class T>
FXFUSE_INLINE T* of_block(T* object, [[maybe_unused]] int rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  return object;
#else
  uint64_t result;
  asm("mapa.u64 %0, %1, %2;" : "=l"(result) : "l"(object), "r"(rank));
  return reinterpret_cast<T*>(result);
#endif
}

// Writes a value to where `to` would be if it belonged to block `rank` of the cluster, and counts
// its bytes at `barrier` of that block.  A barrier of the cluster instead would have to flush all
// that the block has written.
template <class Value>
FXFUSE_INLINE void send_to_block(int rank, Value* to, SharedBarrier* barrier, const Value& value) {
  static_assert(sizeof(Value) == 8 || sizeof(Value) % 16 == 0);
  [[maybe_unused]] uint32_t address = 0, counter = 0;
  FXFUSE_HOPPER("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(to)),
                "r"(rank));
  FXFUSE_HOPPER("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(counter) : "r"(barrier->address()),
                "r"(rank));
  if constexpr (sizeof(Value) == 8) {
    uint2 words;
    memcpy(&words, &value, sizeof(Value));
    FXFUSE_HOPPER(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32"
        " [%0], {%1, %2}, [%3];" ::"r"(address),
        "r"(words.x), "r"(words.y), "r"(counter) : "memory");
  } else {
    uint4 words[sizeof(Value) / 16];
    memcpy(words, &value, sizeof(Value));
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Value) / 16); ++i) {
      FXFUSE_HOPPER(
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32"
          " [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address + 16 * i),
          "r"(words[i].x), "r"(words[i].y), "r"(words[i].z), "r"(words[i].w),
          "r"(counter) : "memory");
    }
  }
}

// ---- early launches -----------------------------------------------------------------------------

// A kernel that is launched early starts while the one before it in the stream ends, and must not
// touch memory before this returns: what it reads may be that kernel's output (weights too, if an
// optimiser or a cast came before), what it writes that kernel's input.
FXFUSE_INLINE void wait_for_previous_kernel() {
  FXFUSE_HOPPER("griddepcontrol.wait;" :: : "memory");
}

// Lets the next kernel in the stream begin as soon as there is room, if it was launched so.
FXFUSE_INLINE void let_next_kernel_start() {
  FXFUSE_HOPPER("griddepcontrol.launch_dependents;" :: : "memory");
}

}  // namespace fxfuse::cuda
