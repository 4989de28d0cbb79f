// Linear, GroupNorm and activation in one kernel, for products that are short (K <= 256; of
// floats, K <= 128).
//
// Idea.  With few columns to multiply, a tile's end takes longer than its product, so the two must
// overlap; and the 256 rows of W that make 256 columns of the output fit in shared memory, so that
// only x has to move.
//
// Work split.  A block, or for groups of 512 a cluster of two side by side, takes a range of tiles
// of 64 x 256 (64 x 512), down the rows of one column of tiles and then of the next; it copies W
// when the column changes.  Three times four warps take the tiles in turn, each from the copy of x
// to the output: while one multiplies, the others finish theirs.  No warp is left for copying, and
// no register: a thread of each four warps copies its next tile as soon as there is room.
//
// Room.  Four warps have room for one tile of x.  Alone they may write there as soon as their
// product is done.  In a cluster, where each block copies half of the rows into both, the other
// block's product must be done as well: that its statistics have arrived says so, and also that it
// has read the ones that were sent to it before, whose place is written again.
//
// Limits: see linear_plan.h, which gives everything else to the two operators.
#pragma once
#include "hopper_finish.cuh"
#include "linear_plan.h"

namespace fxfuse::cuda {

constexpr int kTurns = 3;  // times four warps
constexpr int kRowsOfTurn = 64;
constexpr int kStationaryThreads = 128 * kTurns;

// Of a block.
template <class T, class O, int kSteps, bool kPair>
struct StationaryMemory {
  static constexpr int kStep = kStepBytes / sizeof(T);  // columns
  // There is no room for halves and for weight and bias in float.
  static constexpr bool kStaged = sizeof(O) == 2 || !kPair;
  T w[kSteps][kTileColumns * kStep];
  T x[kTurns][kSteps][kRowsOfTurn * kStep];
  Half halves[kPair ? kTurns : 1][64];
  O weight[kStaged ? kTileColumns : 4], bias[kStaged ? kTileColumns : 4];
  SharedBarrier full[kTurns], sent[kTurns], next[kTurns], filled, used;
};

template <class T, class O, int kGroup, int kSteps>
__global__ void __launch_bounds__(kStationaryThreads, 1)
    linear_stationary(const __grid_constant__ CUtensorMap map_x,
                      const __grid_constant__ CUtensorMap map_w,
                      const __grid_constant__ LinearForward p,
                      const __grid_constant__ LinearTiling t) {
#ifdef FXFUSE_WGMMA
  constexpr bool kPair = kGroup > 256;
  constexpr int kCluster = kPair ? 2 : 1;
  using Memory = StationaryMemory<T, O, kSteps, kPair>;
  using C = Columns<O>;
  constexpr bool kStaged = Memory::kStaged;
  constexpr int kStep = Memory::kStep;
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Memory*>(memory);
  const int four = threadIdx.x / 128, thread = threadIdx.x % 128, lane = threadIdx.x % 32;
  const int rank = kPair ? rank_in_cluster() : 0;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kTurns; ++i) {
      shared.full[i].init(1);
      shared.sent[i].init(1);
      shared.next[i].init(1);
    }
    shared.filled.init(1);
    shared.used.init(kTurns);
    fence_barrier_init();
  }
  if (kPair) {
    cluster_barrier();
  } else {
    __syncthreads();
  }
  const int clusters = gridDim.x / kCluster, cluster = blockIdx.x / kCluster;
  const int begin = static_cast<int>(int64_t(t.tiles) * cluster / clusters);
  const int end = static_cast<int>(int64_t(t.tiles) * (cluster + 1) / clusters);
  const auto copy_x = [&](int tile) {  // by one thread of four warps
    if (tile >= end) return;
    const int row = tile % t.row_tiles * kRowsOfTurn;
    shared.full[four].arrive_and_expect(sizeof(shared.x[0]));
    for (int step = 0; step < kSteps; ++step) {
      T* to = shared.x[four][step];
      if constexpr (kPair) {
        copy_box(to + rank * (kRowsOfTurn / 2) * kStep, map_x, shared.full[four], step * kStep,
                 row + rank * (kRowsOfTurn / 2), 3);
      } else {
        copy_box(to, map_x, shared.full[four], step * kStep, row);
      }
    }
  };
  if (thread == 0) copy_x(begin + four);

  float c[kSums];
  int columns = 0, turn = 0, tile = begin + four;  // columns: of tiles, so far
  for (int from = begin; from < end; ++columns) {
    const int n = from / t.row_tiles, to = min(end, (n + 1) * t.row_tiles);
    const int column = (n * kCluster + rank) * kTileColumns;
    if (threadIdx.x == 0) {
      shared.used.wait(columns % 2 ^ 1);
      shared.filled.arrive_and_expect(sizeof(shared.w));
      for (int step = 0; step < kSteps; ++step) {
        copy_permuted(shared.w[step], map_w, shared.filled, step * kStep, column / C::kSpan);
      }
    }
    __syncwarp();
    if constexpr (kStaged) {
      __syncthreads();  // all have finished the tiles of the column before
      if (threadIdx.x < 64) {
        const bool first = threadIdx.x < 32;
        const int channel = column + 8 * lane;
        float values[8] = {};
        if (channel < p.channels) {
          load_channels<T>(first ? p.weight : p.bias, affine_is_wide(p), channel, first ? 1.f : 0.f,
                           values);
        }
        O* const staged = (first ? shared.weight : shared.bias) + 8 * lane;
#pragma unroll
        for (int k = 0; k < 8; ++k) staged[k] = static_cast<O>(values[k]);
      }
      __syncthreads();
    } else {
      DistantAffine<T>{p, column}.prefetch();
    }
    shared.filled.wait(columns % 2);
    const int first_column = column / kGroup * kGroup;  // of a group
    const bool idle = tile >= to;
    for (; tile < to; tile += kTurns, ++turn) {
      // The sums begin with the bias, ahead of this tile's turn.
#pragma unroll
      for (int span = 0; span < C::kSpans; ++span) {
        const int channel = column + C::kSpan * span + lane % 4 * C::kOwn;
        const int first = first_column + C::kSpan * span / kGroup * kGroup;
        begin_with<O, T>(c, span, load_linear_bias<T, kGroup, C::kOwn>(p, channel, first));
      }
      pin(c);
      shared.next[four].wait(turn % 2 ^ (four == 0));
      shared.full[four].wait(turn % 2);
      pin(c);
      fence_products();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const uint64_t a = rows_of_128_bytes(shared.x[four][step]);
        const uint64_t b = rows_of_128_bytes(shared.w[step]);
#pragma unroll
        for (int k = 0; k < kStep / Products<T>::kColumns; ++k) {
          Products<T>::add(c, a + 2 * k, b + 2 * k);
        }
      }
      commit_products();
      if (thread == 0) shared.next[(four + 1) % kTurns].arrive();
      wait_for_products<0>();
      pin(c);
      const auto go_on = [&] {  // there is room for the next tile, and perhaps for another W
        asm volatile("bar.sync %0, 128;" ::"r"(four + 1) : "memory");
        if (thread == 0) {
          copy_x(tile + kTurns);
          if (tile + kTurns >= to) shared.used.arrive();
        }
      };
      if constexpr (!kPair) go_on();
      const int row = (tile - n * t.row_tiles) * kRowsOfTurn + Exchange::row();
      const Exchange exchange = {shared.halves[kPair ? four : 0], &shared.sent[four], turn % 2,
                                 rank ^ 1};
      if constexpr (kStaged) {
        const StagedAffine<O, 0> affine = {shared.weight, shared.bias};
        finish<O, kGroup>(c, p, affine, row, column, exchange, go_on);
      } else {
        finish<O, kGroup>(c, p, DistantAffine<T>{p, column}, row, column, exchange, go_on);
      }
    }
    if (thread == 0 && idle) shared.used.arrive();
    from = to;
  }
  if (kPair) cluster_barrier();  // a block that ends must not be written to
#endif
}

}  // namespace fxfuse::cuda
