// What the chips of compute capability 9.0 have and no other: products by four warps at once
// (wgmma), whose operands lie in shared memory, and copies of boxes of a tensor (TMA).  Compiled
// for sm_90a only: a kernel that uses them has an empty body for everything else, and the host does
// not launch it (Gpu::wgmma).
#pragma once
#include <cuda.h>  // CUtensorMap

#include "async.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define FXFUSE_WGMMA
#endif

namespace fxfuse::cuda {

// ---- copies of boxes ----------------------------------------------------------------------------

// Copies the box of a matrix that begins at (column, row), whose bytes `barrier` counts.  With
// blocks, a bit for each block of the cluster, the box goes to the same place in all of those, and
// is counted by the same barrier in each.
FXFUSE_INLINE void copy_box(void* to, const CUtensorMap& map, SharedBarrier& barrier, int column,
                            int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4}], [%2];" ::"r"(shared_address(to)),
      "l"(&map), "r"(barrier.address()), "r"(column), "r"(row)
      : "memory");
}

FXFUSE_INLINE void copy_box(void* to, const CUtensorMap& map, SharedBarrier& barrier, int column,
                            int row, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(to)),
      "l"(&map), "r"(barrier.address()), "r"(column), "r"(row), "h"(blocks)
      : "memory");
}

// The same of a matrix whose rows the map has in five dimensions; `row` counts the outermost.
FXFUSE_INLINE void copy_permuted(void* to, const CUtensorMap& map, SharedBarrier& barrier,
                                 int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %5, %5, %5, %4}], [%2];" ::"r"(shared_address(to)),
      "l"(&map), "r"(barrier.address()), "r"(column), "r"(row), "r"(0)
      : "memory");
}

FXFUSE_INLINE void copy_permuted(void* to, const CUtensorMap& map, SharedBarrier& barrier,
                                 int column, int row, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %6, %6, %6, %4}], [%2], %5;" ::"r"(shared_address(to)),
      "l"(&map), "r"(barrier.address()), "r"(column), "r"(row), "h"(blocks), "r"(0)
      : "memory");
}

// Makes what this thread wrote to shared memory visible to products and copies.
FXFUSE_INLINE void fence_for_products() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- products -----------------------------------------------------------------------------------

// How an operand lies in shared memory.  Rows of 128 bytes as a copy writes them that swizzles 128
// bytes: units of 8 rows, 1024 bytes apart.  32 bytes further along the row is `+ 2`.
FXFUSE_INLINE uint64_t rows_of_128_bytes(const void* operand) {
  const uint64_t address = (shared_address(operand) & 0x3ffff) >> 4;
  return address | uint64_t(1) << 16 | uint64_t(64) << 32 | uint64_t(1) << 62;
}

// Rows of 16 bytes, not swizzled: units of 8 rows, one behind the other, of which each stands for
// the other half of its 32 bytes too.
FXFUSE_INLINE uint64_t rows_of_16_bytes(const void* operand) {
  return (shared_address(operand) & 0x3ffff) >> 4 | uint64_t(8) << 32;
}

// What a thread of four warps holds of 64 x 256 sums: see hopper_finish.cuh.
constexpr int kSums = 128;

#define FXFUSE_SUMS                                                                            \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                    \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "           \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "           \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "           \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "           \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "           \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, "     \
  "%111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, " \
  "%126, %127}"
#define FXFUSE_8(n)                                                                           \
  "+f"(c[n]), "+f"(c[n + 1]), "+f"(c[n + 2]), "+f"(c[n + 3]), "+f"(c[n + 4]), "+f"(c[n + 5]), \
      "+f"(c[n + 6]), "+f"(c[n + 7])
#define FXFUSE_ALL_SUMS                                                                           \
  FXFUSE_8(0), FXFUSE_8(8), FXFUSE_8(16), FXFUSE_8(24), FXFUSE_8(32), FXFUSE_8(40), FXFUSE_8(48), \
      FXFUSE_8(56), FXFUSE_8(64), FXFUSE_8(72), FXFUSE_8(80), FXFUSE_8(88), FXFUSE_8(96),         \
      FXFUSE_8(104), FXFUSE_8(112), FXFUSE_8(120)

// add: c += a b^T over kColumns columns, 32 bytes, of the operands, of which a has 64 rows and b
// 256. begin_with_column: c = b's first column in every row; the other columns meet zeros.
template <class T>
struct Products;

#define FXFUSE_PRODUCTS(T, type, one)                                                           \
  template <>                                                                                   \
  struct Products<T> {                                                                          \
    static constexpr int kColumns = 16;                                                         \
    static FXFUSE_INLINE void add(float (&c)[kSums], uint64_t a, uint64_t b) {                  \
      asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " " FXFUSE_SUMS \
                   ", %128, %129, 1, 1, 1, 0, 0;"                                               \
                   : FXFUSE_ALL_SUMS                                                            \
                   : "l"(a), "l"(b));                                                           \
    }                                                                                           \
    static FXFUSE_INLINE void begin_with_column(float (&c)[kSums], uint64_t b) {                \
      const uint32_t first = threadIdx.x % 4 == 0 ? one : 0u;                                   \
      asm volatile(                                                                             \
          "{\n"                                                                                 \
          ".reg .pred adds;\n"                                                                  \
          "setp.ne.b32 adds, 0, 0;\n"                                                           \
          "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " " FXFUSE_SUMS          \
          ", {%128, %128, %129, %129}, %130, adds, 1, 1, 0;\n"                                  \
          "}"                                                                                   \
          : FXFUSE_ALL_SUMS                                                                     \
          : "r"(first), "r"(0), "l"(b));                                                        \
    }                                                                                           \
  }
FXFUSE_PRODUCTS(__nv_bfloat16, "bf16", 0x3f80u);
FXFUSE_PRODUCTS(__half, "f16", 0x3c00u);
// TF32: of the 23 digits of a float the products see 10, to which the copy has rounded them.
template <>
struct Products<float> {
  static constexpr int kColumns = 8;
  static FXFUSE_INLINE void add(float (&c)[kSums], uint64_t a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k8.f32.tf32.tf32 " FXFUSE_SUMS
                 ", %128, %129, 1, 1, 1;"
                 : FXFUSE_ALL_SUMS
                 : "l"(a), "l"(b));
  }
};
#undef FXFUSE_PRODUCTS
#undef FXFUSE_ALL_SUMS
#undef FXFUSE_8
#undef FXFUSE_SUMS

// Before the first product, and after other code has written to the sums.
FXFUSE_INLINE void fence_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Ends a set of products; wait_for_products<N> waits for all sets but the last N.
FXFUSE_INLINE void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int N>
FXFUSE_INLINE void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Keeps the compiler from moving a use of the sums to the other side.
FXFUSE_INLINE void pin(float (&c)[kSums]) {
#pragma unroll
  for (float& sum : c) asm volatile("" : "+f"(sum)::"memory");
}

// ---- registers ----------------------------------------------------------------------------------

// Sets how many each thread of these four warps has.  A block's are handed from one to another.
template <int kCount>
FXFUSE_INLINE void give_up_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

template <int kCount>
FXFUSE_INLINE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

}  // namespace fxfuse::cuda
