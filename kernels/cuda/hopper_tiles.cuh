// Linear, GroupNorm and activation in one kernel, for products that are long (K > 256; of floats,
// K > 128).
//
// Idea.  The matrix product of 128 x 256 tiles as the best libraries have it, with the norm in its
// end: the sums of a tile are whole groups, or halves of them, and never leave the registers before
// they are the output.
//
// Work split.  A cluster of two blocks takes a tile of 256 x 256, or 128 x 512 for groups of 512,
// and then the next: the clusters stay, as many as fit.  What both blocks need, the rows of W or of
// x, is copied once, half by each, into both.  One thread copies, four steps of 128 bytes ahead;
// one warp prepares bias, weight and bias of the norm of the next tile; two times four warps
// multiply 64 x 256 each and finish them.  Tiles follow each other down the rows in bands of 1024,
// so that what runs at once shares rows of x and W in L2.
//
// The bias of the Linear is where the sums begin.  In 16 bits the first product is one of ones and
// the bias, which is exact; TF32 would round it.
//
// Limits: see linear_plan.h, which gives everything else to the two operators.
#pragma once
#include "hopper_finish.cuh"
#include "linear_plan.h"

namespace fxfuse::cuda {

constexpr int kTileRows = 128, kStages = 4;
constexpr int kTilesThreads = 384;

// Of a block.
template <class T, class O>
struct TilesMemory {
  static constexpr int kStep = kStepBytes / sizeof(T);  // columns
  // Whether the Linear's bias is an operand, of 256 rows of 16 bytes.
  static constexpr bool kMultiplied = sizeof(T) == 2;
  static constexpr int kBias = kMultiplied ? 2048 : kTileColumns;  // elements
  T x[kStages][kTileRows * kStep];
  T w[kStages][kTileColumns * kStep];
  T linear_bias[2][kBias];
  O weight[2][kTileColumns], bias[2][kTileColumns];  // as wide as the output
  Half halves[2][2][64];        // of one of the two times four warps, and of odd or even tiles
  SharedBarrier full[kStages];  // with a step's boxes
  SharedBarrier empty[kStages];
  SharedBarrier sent[2][2];  // as halves
  SharedBarrier ready[2];    // parameters of a tile
  SharedBarrier used[2];
};

template <class T, class O, int kGroup>
__global__ void __launch_bounds__(kTilesThreads, 1)
    linear_tiles(const __grid_constant__ CUtensorMap map_x,
                 const __grid_constant__ CUtensorMap map_w, const __grid_constant__ LinearForward p,
                 const __grid_constant__ LinearTiling t) {
#ifdef FXFUSE_WGMMA
  constexpr bool kAcross = kGroup > 256;  // the blocks of a cluster lie side by side
  extern __shared__ __align__(1024) unsigned char memory[];
  using Memory = TilesMemory<T, O>;
  using C = Columns<O>;
  constexpr int kStep = Memory::kStep;
  auto& shared = *reinterpret_cast<Memory*>(memory);
  const int rank = rank_in_cluster(), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      shared.full[s].init(1);
      shared.empty[s].init(4);  // two times four warps of both blocks
    }
    for (int i = 0; i < 2; ++i) {
      shared.sent[i][0].init(1);
      shared.sent[i][1].init(1);
      shared.ready[i].init(32);
      shared.used[i].init(8);
    }
    fence_barrier_init();
  }
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(shared.linear_bias) / 16);
       i += kTilesThreads) {
    reinterpret_cast<uint4*>(shared.linear_bias)[i] = make_uint4(0, 0, 0, 0);
  }
  fence_for_products();
  cluster_barrier();

  const int clusters = gridDim.x / 2, cluster = blockIdx.x / 2;
  const int in_band = t.band * t.column_tiles;
  // The first row and column of this block in tile number `tile` of the clusters.
  const auto place = [&](int tile, int& row, int& column) {
    const int band = tile / in_band, rest = tile - band * in_band;
    const int height = min(t.band, t.row_tiles - band * t.band);
    const int n = rest / height, m = band * t.band + rest - n * height;
    row = (kAcross ? m : 2 * m + rank) * kTileRows;
    column = (kAcross ? 2 * n + rank : n) * kTileColumns;
  };

  if (warp < 4) {
    give_up_registers<40>();
    if (threadIdx.x == 0) {
      int stage = 0, parity = 1;
      for (int tile = cluster; tile < t.tiles; tile += clusters) {
        int row, column;
        place(tile, row, column);
        for (int step = 0; step < t.steps; ++step) {
          SharedBarrier& full = shared.full[stage];
          T *x = shared.x[stage], *w = shared.w[stage];
          const int k = step * kStep;
          shared.empty[stage].wait(parity);
          full.arrive_and_expect(sizeof(shared.x[0]) + sizeof(shared.w[0]));
          if constexpr (kAcross) {
            copy_box(x + rank * (kTileRows / 2) * kStep, map_x, full, k,
                     row + rank * (kTileRows / 2), 3);
            copy_permuted(w, map_w, full, k, column / C::kSpan);
          } else {
            copy_box(x, map_x, full, k, row);
            copy_permuted(w + rank * (kTileColumns / 2) * kStep, map_w, full, k,
                          column / C::kSpan + rank * (C::kSpans / 2), 3);
          }
          if (++stage == kStages) stage = 0, parity ^= 1;
        }
      }
    } else if (warp == 1) {
      int turn = 0;
      for (int tile = cluster; tile < t.tiles; tile += clusters, ++turn) {
        int row, column;
        place(tile, row, column);
        const int i = turn % 2;
        const int channel = column + 8 * lane;
        const auto linear_bias =
            load_linear_bias<T, kGroup, 8>(p, channel, channel / kGroup * kGroup);
        float weight[8] = {}, bias[8] = {};
        if (channel < p.channels) load_affine<T, 8>(p, channel, weight, bias);
        shared.used[i].wait(turn / 2 % 2 ^ 1);
        if constexpr (Memory::kMultiplied) {
          T values[8];
          memcpy(values, &linear_bias, sizeof(values));
#pragma unroll
          for (int k = 0; k < 8; ++k) {
            shared.linear_bias[i][C::place(8 * lane + k) * 8] = values[k];
          }
          fence_for_products();
        } else {
          reinterpret_cast<Loaded<T, 8>*>(shared.linear_bias[i])[lane] = linear_bias;
        }
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          shared.weight[i][8 * lane + k] = static_cast<O>(weight[k]);
          shared.bias[i][8 * lane + k] = static_cast<O>(bias[k]);
        }
        shared.ready[i].arrive();
      }
    }
    __syncwarp();
  } else {
    take_registers<232>();
    const int half = warp / 4 - 1, thread = threadIdx.x % 128;
    int stage = 0, parity = 0, turn = 0;
    float c[kSums];
    for (int tile = cluster; tile < t.tiles; tile += clusters, ++turn) {
      int row, column;
      place(tile, row, column);
      const int i = turn % 2;
      shared.ready[i].wait(turn / 2 % 2);
      if constexpr (Memory::kMultiplied) {
        fence_products();
        Products<T>::begin_with_column(c, rows_of_16_bytes(shared.linear_bias[i]));
      } else {
#pragma unroll
        for (int span = 0; span < C::kSpans; ++span) {
          const T* bias = shared.linear_bias[i] + C::kSpan * span + lane % 4 * C::kOwn;
          begin_with<O, T>(c, span, load<T, C::kOwn>(bias));
        }
        pin(c);
      }
      int before = 0;
      for (int step = 0; step < t.steps; ++step) {
        shared.full[stage].wait(parity);
        const uint64_t x = rows_of_128_bytes(shared.x[stage] + half * 64 * kStep);
        const uint64_t w = rows_of_128_bytes(shared.w[stage]);
        fence_products();
#pragma unroll
        for (int k = 0; k < kStep / Products<T>::kColumns; ++k) {
          Products<T>::add(c, x + 2 * k, w + 2 * k);
        }
        commit_products();
        if (step > 0) {
          wait_for_products<1>();
          if (thread < 2) shared.empty[before].release_at(thread);
        }
        before = stage;
        if (++stage == kStages) stage = 0, parity ^= 1;
      }
      wait_for_products<0>();
      pin(c);
      if (thread < 2) shared.empty[before].release_at(thread);
      const StagedAffine<O, 2> affine = {shared.weight[i], shared.bias[i]};
      const Exchange exchange = {shared.halves[half][i], &shared.sent[half][i], turn / 2 % 2,
                                 rank ^ 1};
      finish<O, kGroup>(c, p, affine, row + half * 64 + Exchange::row(), column, exchange, [] {});
      __syncwarp();
      if (lane == 0) shared.used[i].arrive();
    }
  }
  cluster_barrier();  // a block that ends must not be written to
#endif
}

}  // namespace fxfuse::cuda
