// GroupNorm + activation, forward, for groups of up to 2 KB: all of (N, C) rows behind a Linear.  A
// group is whole vectors of 16 bytes.
//
// Idea.  A team of up to 32 lanes holds a group in registers and needs only shuffles.  It stays
// with one group of channels and walks down the batch: weight and bias are loaded once, where
// reading them for each group would triple the traffic of (N, C) rows.  The next samples are on
// their way while these are worked on.
//
// Statistics.  Two passes over the registers with a correction: m = p + mean(x - p), where the
// pivot p is the group's first value; d = mean(x - m), which is what rounding took from m; then (x
// - m) - d, and var = mean((x - m)^2) - d^2.  A constant group gives x - p = 0 and so exactly 0,
// which sum(x) / n does not.  16-bit types need no pivot, for the sum of up to 2^13 equal values is
// exact; and where the output has 16 bits too, no correction, for what a mean loses in float is far
// below the spacing of their values.
//
// Work split.  Teams of neighbouring lanes take neighbouring groups of channels; slice s of the
// batch has the samples s, s + slices, ...
//
// Limits.  4 vectors of 16 bytes in each lane.
//
// Fallback.  Where the size or the address of the groups forbids vectors, spans.cuh.
//
// Measured.  Graphs of launches over rotating buffers, us, behind a copy kernel's time for the same
// tensor (H200, 2026-11-30).  (1024, 8192) in 16 groups with hardtanh: 19.1 behind 18.4 in float32
// (silu 21.5), 11.4 behind 9.7 in bfloat16 (silu 12.7, gelu 16.4); (16384, 512) in 8 groups: 18.9
// behind 18.4 and 11.8 behind 9.7; (65536, 4096) in 8 groups in bfloat16: 259 behind 265; (32, 512)
// in 8 groups in float32: 1.7 behind 1.0.
#pragma once
#include "normalize.cuh"

namespace fxfuse::cuda {

constexpr int kForwardRowThreads = 128;

// Samples that a lane works on at once, with K vectors in each.
template <class T, int K>
constexpr int kRowsAtOnce = sizeof(T) > 2 ? 4 / K
                            : K == 1      ? 2
                                          : 1;

// How many times that many are on their way.  With more, the reads of the first warps go before
// those of the last ones, which start late: in bfloat16, (16384, 512) in 8 groups takes 10.5 us
// with 2, 11.7 with 3.
template <class T>
constexpr int kRowStages = sizeof(T) == 2 ? 2 : 3;

// Blocks that share a multiprocessor: as many as have enough registers for the values, weight and
// bias, and with a residual enough shared memory.  Each more would spill.
template <class T, int K, bool kResidual>
constexpr int kRowOccupancy = K == 4 && sizeof(T) == 2 && kResidual                      ? 3
                              : (K == 4 && sizeof(T) == 2) || sizeof(T) > 4 || kResidual ? 4
                              : (K == 2 && sizeof(T) == 2) || sizeof(T) == 4             ? 6
                                                                                         : 7;

// Less where the compiler needs more registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kRowOccupancyLost = 2;
#else
constexpr int kRowOccupancyLost = 0;
#endif

// How the teams go about a problem.  Their number has 31 bits.
struct TeamPlan {
  int log2_lanes;          // of a team
  int size, channels;      // of a group
  int slices;              // of the batch; the first of them have `walk` samples,
  int whole_slices;        // the others one less
  int walk, rounds;        // samples of a team; rounds that it needs for them
  int64_t sample, stride;  // elements of a sample; between a team's samples
  double eps_wide;         // eps in both widths: to convert it in the loop is slow
  float eps;
  Divisor num_groups;

  template <class A>
  FXFUSE_INLINE A epsilon() const {
    if constexpr (sizeof(A) == 8) {
      return eps_wide;
    } else {
      return eps;
    }
  }
};

// kWhole: the lanes' vectors make up the group, none is left over.
template <class T, class O, int K, bool kWhole, bool kResidual>
__global__ __launch_bounds__(kForwardRowThreads,
                             kRowOccupancy<T, K, kResidual> -
                                 kRowOccupancyLost) void normalize_rows(const Forward problem,
                                                                        const TeamPlan teams) {
  constexpr int V = 16 / sizeof(T), R = kRowsAtOnce<T, K>;
  constexpr bool kPivot = sizeof(T) > 2, kCorrection = sizeof(O) > 2;
  constexpr bool kWarp = kWhole && K > 1;  // more than one vector in each of 32 lanes
  using A = Accumulate<T>;
  const int log2_lanes = kWarp ? 5 : teams.log2_lanes, size = teams.size;
  const int rank = threadIdx.x & ((1 << log2_lanes) - 1);
  const int in_block = threadIdx.x >> log2_lanes, of_block = blockDim.x >> log2_lanes;
  const int team = static_cast<int>(blockIdx.x) * of_block + in_block;
  const int slice = teams.num_groups.quotient(team);
  const int group = team - slice * static_cast<int>(problem.num_groups);
  const int first = rank * V, step = V << log2_lanes;
  const auto exists = [&](int k) { return kWhole || first + k * step < size; };
  // Of this team.  Every team makes the same rounds, for its lanes meet others in the shuffles;
  // past the last sample the arithmetic goes on with what the registers hold.
  int left = slice < teams.whole_slices ? teams.walk : slice < teams.slices ? teams.walk - 1 : 0;
  const int64_t stride = teams.stride;
  const int64_t start = slice * teams.sample + int64_t(group) * size + first;
  const T* x = static_cast<const T*>(problem.input) + start;
  O* y = static_cast<O*>(problem.output) + start;
  const auto over_rows = [&](int samples, auto body) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (r < samples) {
#pragma unroll
        for (int k = 0; k < K; ++k) {
          if (exists(k)) body(r, k, r * stride + k * step);
        }
      }
    }
  };
  // Each thread reads back only what it copied itself, so that no barrier is needed.
  __shared__ Loaded<T, V> stages[kRowStages<T>][R * K][kForwardRowThreads];
  // Of the residual, which takes the same way.
  [[maybe_unused]] __shared__ Loaded<O, V> added_stages[kResidual ? kRowStages<T> : 1]
                                                       [kResidual ? R * K : 1][kForwardRowThreads];
  [[maybe_unused]] const O* added = kResidual ? residual_of(problem, y) : nullptr;
  int stage = 0;
  const auto fetch = [&](int samples) {
    over_rows(samples, [&](int r, int k, int64_t offset) {
      copy_piece<16>(&stages[stage][r * K + k][threadIdx.x], x + offset);
      if constexpr (kResidual) {
        copy_vector(&added_stages[stage][r * K + k][threadIdx.x], added + offset);
      }
    });
    commit_copies();
    x += R * stride;
    if constexpr (kResidual) added += R * stride;
    stage = stage + 1 == kRowStages<T> ? 0 : stage + 1;
  };
  wait_for_previous_kernel();
  let_next_kernel_start();
#pragma unroll
  for (int i = 0; i < kRowStages<T>; ++i) fetch(left - i * R);
  A weight[K * V], bias[K * V];
#pragma unroll
  for (int k = 0; k < K; ++k) {
    if (left > 0 && exists(k)) {
      A w[V], b[V];
      load_affine<T>(problem, int64_t(group) * teams.channels, first + k * step, w, b);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        weight[k * V + j] = w[j];
        bias[k * V + j] = b[j];
      }
    }
  }
  const ActivationOf<A, O> activation(problem);
  const A count = static_cast<A>(size), share = A(1) / count;

  for (int round = 0; round < teams.rounds; ++round) {
    Loaded<T, V> data[R][K];
    wait_for_copies<kRowStages<T> - 1>();
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int k = 0; k < K; ++k) data[r][k] = stages[stage][r * K + k][threadIdx.x];
    }
    A z[R * K * V], pivot[R], total[R] = {}, other[R] = {};
#pragma unroll
    for (int r = 0; r < R; ++r) {
      pivot[r] = kPivot ? __shfl_sync(~0u, data[r][0].at(0), 0, 1 << log2_lanes) : A(0);
#pragma unroll
      for (int k = 0; k < K; ++k) {
        if (exists(k)) {
#pragma unroll
          for (int j = 0; j < V; ++j) {
            A& at = z[(r * K + k) * V + j];
            at = data[r][k].at(j);
            (j % 2 == 0 ? total : other)[r] += at - pivot[r];
          }
        }
      }
      total[r] += other[r];
    }
    // Into what has just been read, or, of a residual, will have been.
    if constexpr (!kResidual) fetch(left - kRowStages<T> * R);
    sum_over_lanes(total, 1 << log2_lanes);
    constexpr int kSums = kCorrection ? 2 : 1;  // of squares; of what is left
    A totals[kSums * R] = {}, others[R] = {};
#pragma unroll
    for (int r = 0; r < R; ++r) {
      total[r] = pivot[r] + quotient(total[r], count, share);  // the mean
#pragma unroll
      for (int k = 0; k < K; ++k) {
        if (exists(k)) {
#pragma unroll
          for (int j = 0; j < V; ++j) {
            A& at = z[(r * K + k) * V + j];
            at -= total[r];
            A& squares = j % 2 == 0 ? totals[kSums * r] : others[r];
            squares = multiply_add(at, at, squares);
            if constexpr (kCorrection) totals[2 * r + 1] += at;
          }
        }
      }
      totals[kSums * r] += others[r];
    }
    sum_over_lanes(totals, 1 << log2_lanes);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      A variance = totals[kSums * r] * share, rest = 0;
      if constexpr (kCorrection) {
        rest = quotient(totals[2 * r + 1], count, share);
        variance = multiply_add(-rest, rest, variance);
      }
      const A rstd = rstd_of(variance, teams.epsilon<A>());
      if (problem.mean != nullptr && r < left && rank == 0) {
        Statistics<A> statistics;
        statistics.mean = total[r];
        statistics.rest = rest;
        statistics.rstd = rstd;
        const int64_t sample = slice + int64_t(round * R + r) * teams.slices;
        save(problem, sample * problem.num_groups + group, statistics);
      }
#pragma unroll
      for (int n = 0; n < K * V; ++n) {
        A& at = z[r * K * V + n];
        at = kCorrection ? multiply_add(at, rstd, -rest * rstd) : at * rstd;
        at = multiply_add(at, weight[n], bias[n]);
      }
      if constexpr (kResidual) {
#pragma unroll
        for (int k = 0; k < K; ++k) {
          const Loaded<O, V> loaded = added_stages[stage][r * K + k][threadIdx.x];
#pragma unroll
          for (int j = 0; j < V; ++j) z[(r * K + k) * V + j] += loaded.at(j);
        }
      }
    }
    if constexpr (kResidual) fetch(left - kRowStages<T> * R);
    // 16 at a time: more of them would need more registers than all before.
    constexpr int kAtOnce = R * K * V < 16 ? R * K * V : 16;
#pragma unroll
    for (int n = 0; n < R * K * V; n += kAtOnce) {
      activation.value(reinterpret_cast<A(&)[kAtOnce]>(z[n]));
    }
    over_rows(left, [&](int r, int k, int64_t offset) {
      Vector<O, V> result;
#pragma unroll
      for (int j = 0; j < V; ++j) result.at[j] = static_cast<O>(z[(r * K + k) * V + j]);
      store(y + offset, result);
    });
    y += R * stride;
    left -= R;
  }
}

// ---- host ---------------------------------------------------------------------------------------

// How normalize_rows cuts up a group of that many vectors.
struct Rows {
  int log2_lanes, held;  // of a team; vectors of each lane
  bool whole;

  static Rows of(int64_t vectors) {
    Rows rows = {0, 1, false};
    const auto room = [&] { return int64_t(rows.held) << rows.log2_lanes; };
    while (rows.log2_lanes < 5 && room() < vectors) ++rows.log2_lanes;
    if (vectors > 32) rows.held = vectors == 64 ? 2 : kMostRowVectors;
    if (vectors > 32 && vectors < 64) rows.log2_lanes = 4;
    rows.whole = room() == vectors;
    return rows;
  }
};

template <class T, class O, bool kResidual, int K, bool kWhole>
cudaError_t launch_rows(const Forward& p, const Rows& rows, const Gpu& gpu, cudaStream_t stream) {
  constexpr int R = kRowsAtOnce<T, K>, occupancy = kRowOccupancy<T, K, kResidual>;
  const int64_t lanes = p.num_groups << rows.log2_lanes;  // of one slice
  const int64_t wave = int64_t(gpu.multiprocessors) * occupancy * kForwardRowThreads;
  // One wave of blocks, in which every multiprocessor has as many; or, where that would be more
  // than 8 samples for each team, many short walks, which even out: 264 us with 4 samples, 272 with
  // 8 for (65536, 4096) in 8 groups in bfloat16, 129 with 1 and 144 with 8 for (65536, 1024) in 2
  // groups in float32 (H200, 2026-11-30).
  int64_t slices = std::max<int64_t>(std::min(wave / lanes, ceil_div(p.batch, R)), 1);
  if (ceil_div(p.batch, slices) > 8) slices = ceil_div(p.batch, sizeof(T) == 2 ? 4 : R);
  slices = std::min(slices, std::max<int64_t>((int64_t(1) << 30) / p.num_groups, 1));
  const int64_t walk = ceil_div(p.batch, slices);
  TeamPlan teams;
  teams.log2_lanes = rows.log2_lanes;
  teams.channels = static_cast<int>(p.channels / p.num_groups);
  teams.size = static_cast<int>(group_size(p));
  teams.slices = static_cast<int>(slices);
  teams.whole_slices = static_cast<int>(p.batch - slices * (walk - 1));
  teams.walk = static_cast<int>(walk);
  teams.rounds = static_cast<int>(ceil_div(walk, R));
  teams.sample = p.channels * p.spatial;
  teams.stride = slices * teams.sample;
  teams.eps_wide = p.eps;
  teams.eps = static_cast<float>(p.eps);
  teams.num_groups = Divisor::of(p.num_groups);
  // Small problems in small blocks, to reach more multiprocessors.
  const int64_t threads_needed = slices * lanes;
  int threads = kForwardRowThreads;
  while (threads > 32 && ceil_div(threads_needed, threads) < gpu.multiprocessors) threads /= 2;
  Shape shape = {ceil_div(threads_needed, threads), threads};
  shape.early = gpu.clusters;
  return launch(normalize_rows<T, O, K, kWhole, kResidual>, shape, stream, p, teams);
}

template <class T, class O, bool kResidual>
cudaError_t launch_rows(const Forward& p, const Gpu& gpu, cudaStream_t stream) {
  const Rows rows = Rows::of(group_size(p) / vector_width(p.dtype));
  if (rows.held == 4 && rows.whole)
    return launch_rows<T, O, kResidual, 4, true>(p, rows, gpu, stream);
  if (rows.held == 4) return launch_rows<T, O, kResidual, 4, false>(p, rows, gpu, stream);
  if (rows.held == 2) return launch_rows<T, O, kResidual, 2, true>(p, rows, gpu, stream);
  if (rows.whole) return launch_rows<T, O, kResidual, 1, true>(p, rows, gpu, stream);
  return launch_rows<T, O, kResidual, 1, false>(p, rows, gpu, stream);
}

}  // namespace fxfuse::cuda
