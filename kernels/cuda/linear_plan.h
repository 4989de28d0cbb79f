// Which kernel computes a Linear with the norm and the activation behind it, if one does.
//
//   way          K          rows of x and W from           see
//   tiles        > 256      shared memory, in steps        hopper_tiles.cuh
//   stationary   <= 256     x in tiles, W stays            hopper_stationary.cuh
//   none         all else   the Linear alone, and then the kernels of forward_plan.h
//
// In 16 bits, or in float where its products may be of TF32: then stationary up to K = 128, for
// which rows are as long in memory.
//
// The time of the Linear alone in us, and of both ways as multiples of it, for bfloat16 with a cold
// L2 cache, in turn (H200, torch 2.11, 2026-11-30):
//
//         M      K      N   group    Linear   two kernels   one    in float32: two   one
//      1024   8192   8192     512       175         1.058   1.030            1.087   1.050
//      1024   8192   8192     256       176         1.066   1.016
//      8192   4096   4096     512       368         1.096   1.034            1.148   1.065
//     16384   2048   2048     512       227         1.167   1.062            1.279   1.116
//     65536   1024   1024     512       218         1.319   1.100            1.521   1.215
//     65536    512   2048     512       223         1.593   1.181            1.903   1.387
//     65536    256   4096     512       251         2.034   1.044            2.621   2.124
//     65536    256   4096      64       254         2.073   1.083            2.545   1.409
//     65536    128   4096     256       183         2.518   1.100
//      4096  32768   4096     512      1591         1.006   0.998
//      4096  65536   4096     512      3212         1.011   1.038
//
// Where the last round of tiles leaves multiprocessors idle; `used` is what the rules below call
// so, all for one round:
//
//         M      K      N   group    used    Linear   two kernels   one
//      2048    512   1024     128    0.48      10.2         1.522   1.412
//      1536    512   1024     128    0.36       9.2         1.382   1.517
//      1024   1024   2560     128    0.61      15.4         1.334   1.251
//      2048   1024   1024     128    0.48      13.0         1.399   1.468
//      1024   2048   3328     128    0.79      28.0         1.199   1.057
//      1024   2048   3072     128    0.73      23.3         1.229   1.261
//      1024   4096   3840     128    0.91      46.9         1.139   1.035
//      1024   4096   3584     128    0.85      43.5         1.130   1.101
//      1024   4096   3072     128    0.73      38.1         1.138   1.244
//      1024   8192   4096     128    0.97      90.2         1.079   1.034
//      1024   8192   3584     128    0.85      81.9         1.077   1.095
//
// W stays, and there are few tiles of 64 x 256: with 32, (512, 256) to 1024, 9.8 against 10.4 with
// two kernels, in float32 10.6 against 10.5; with 16, (256, 256) to 1024, 9.8 and 9.8.
//
// Float with TF32, in the same way (H200, torch 2.11, 2026-12-01):
//
//         M      K      N   group    used    Linear   two kernels   one
//      4096   8192   8192     512    0.97      1474         1.045   1.007
//      8192   4096   4096     512    0.97       840         1.080   0.935
//      8192   2048   4096     512    0.97       446         1.133   0.961
//     16384   1024   4096     512    0.97       392         1.339   1.105
//     16384    512   4096     512    0.97       241         1.576   1.240
//     16384    256   4096      64    0.97       140         1.978   1.218
//     16384    128   4096      64                100         2.335   1.013
//     16384    128   8192     512                207         2.309   1.506
//       768   8192   4096     128    0.73       164         1.037   0.997
//       768   2048   4096     128    0.73        51         1.129   0.977
//       512   1024   4096     128    0.48        21         1.252   1.445
//       512    512   4096     128    0.48        15         1.351   1.356
//       512    256   4096     128    0.48        13         1.432   1.274
//      1024    256   1024     128    0.24        10         1.333   1.494
#pragma once
#include "plan.h"

namespace fxfuse::cuda {

constexpr int kTileColumns = 256;  // of the output, of a block
constexpr int kStepBytes = 128;    // of rows of x and W

// How both kernels cut up a problem.
struct LinearTiling {
  int steps;                    // along K
  int row_tiles, column_tiles;  // of a cluster
  int tiles;                    // all of them
  int band;                     // rows of tiles that are done together
};

// The activations that cost next to nothing.  Others would add their arithmetic to that of the
// norm, behind which no product can hide: SiLU's exponential and quotient take 4096 cycles of a
// tile's 8192 at K = 1024, and two kernels are faster (H200, 2026-11-30: 1.67 against 1.35 times
// the bare product).
inline bool is_bounded(const Problem& p) {
  return p.activation == kIdentity || p.activation == kHardtanh || p.activation == kClamp ||
         p.activation == kOpenClamp || p.activation == kReLU;
}

struct LinearPlan {
  enum class Way { kNone, kTiles, kStationary };

  const Gpu& gpu;
  Way way = Way::kNone;
  const char* reason = "";  // of the choice
  LinearTiling tiling = {};
  int group = 0;     // columns of a group
  int clusters = 0;  // of `cluster` blocks, that stay
  int cluster = 0;

  // Not judged: a kernel wherever one can, for the measurements that the judgement rests on.
  LinearPlan(const LinearForward& p, const Gpu& gpu, bool judged = true) : gpu(gpu) {
    reason = choose(p, judged);
  }

 private:
  const char* choose(const LinearForward& p, bool judged) {
    if (!gpu.wgmma) return "the GPU, or what the library was built for, is not Hopper";
    if (p.dtype == kDouble) return "the dtype is neither float32 nor a 16-bit one";
    if (p.dtype == kFloat && !p.tf32) return "float32 without TF32";
    if (p.output_dtype == p.dtype && p.affine_dtype != p.dtype) return "weight and bias are wider";
    if (!is_bounded(p)) return "the activation takes more than bounds";
    const int64_t size = p.channels / p.num_groups;
    if (size != 32 && size != 64 && size != 128 && size != 256 && size != 512) {
      return "groups are not of 32, 64, 128, 256 or 512 channels";
    }
    const int element = static_cast<int>(element_size(p.dtype)), step = kStepBytes / element;
    if (p.features * element % 16 != 0) return "rows are not whole units of 16 bytes";
    if (!aligned(p.input, p.linear_weight, p.linear_bias, p.weight, p.bias, p.output)) {
      return "a tensor is not aligned to 16 bytes";
    }
    constexpr int64_t kMost = std::numeric_limits<int>::max() / 2;
    if (p.batch < 1 || p.features < 1) return "the input is empty";
    if (p.batch > kMost || p.channels > kMost || p.features > kMost) return "a size is too large";
    group = static_cast<int>(size);
    const bool stays = p.features <= 4 * step, pair = group > kTileColumns;
    const int64_t rows = stays ? 64 : pair ? 128 : 256, columns = pair ? 512 : 256;
    const int64_t row_tiles = ceil_div(p.batch, rows), column_tiles = ceil_div(p.channels, columns);
    if (row_tiles * column_tiles > kMost) return "a size is too large";
    cluster = stays && !pair ? 1 : 2;
    tiling.steps = static_cast<int>(ceil_div(p.features, step));
    tiling.row_tiles = static_cast<int>(row_tiles);
    tiling.column_tiles = static_cast<int>(column_tiles);
    tiling.tiles = static_cast<int>(row_tiles * column_tiles);
    tiling.band = pair ? 8 : 4;
    int64_t most = gpu.resident(cluster, 1);
    // Clusters that share rows of x keep step, so that x comes from memory once: (65536, 256) to
    // 4096 takes 6 % less on 128 of 132 multiprocessors (H200, 2026-11-30).
    if (stays && most % column_tiles * 16 <= most) most -= most % column_tiles;
    clusters = static_cast<int>(std::min<int64_t>(most, tiling.tiles));
    const double blocks = static_cast<double>(tiling.tiles) * cluster;
    // Of the time of all multiprocessors, in full rounds of tiles, what goes into the output.
    const double used = static_cast<double>(p.batch) / rows * p.channels / columns /
                        static_cast<double>(ceil_div(tiling.tiles, most) * most);
    if (!judged) {
      // any
    } else if (p.features > 32768) {
      return "what the norm costs is nothing beside the product";
    } else if (stays) {
      const int share = p.output_dtype == kFloat ? 3 : 5;
      if (p.batch < 64 || blocks * share < gpu.multiprocessors) {
        return "the output has too few tiles for the GPU";
      }
    } else if (used < least_used(p.dtype, p.features)) {
      return "too much of the GPU would be idle, or in tiles that are not full";
    }
    way = stays ? Way::kStationary : Way::kTiles;
    if (p.dtype == kFloat) {
      return stays ? "in TF32, W stays in shared memory"
                   : "in TF32, x and W go through shared memory";
    }
    return stays ? "W stays in shared memory" : "x and W go through shared memory";
  }

  // Two kernels fill the GPU better where tiles do not, but write and read the Linear's result,
  // which is less beside a longer product.
  static double least_used(Dtype dtype, int64_t features) {
    if (dtype == kFloat) return features <= 256 ? 0.45 : 0.7;
    return features <= 512    ? 0.6
           : features <= 1024 ? 0.65
           : features <= 2048 ? 0.78
           : features <= 4096 ? 0.85
                              : 0.93;
  }
};

inline const char* plan_name(const LinearForward& problem, const Gpu& gpu) {
  const char* const names[] = {"none", "tiles", "stationary"};
  return names[static_cast<int>(LinearPlan(problem, gpu).way)];
}

}  // namespace fxfuse::cuda
