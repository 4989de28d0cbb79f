// GroupNorm + activation, forward, for small groups that are not whole vectors of 16 bytes, or do
// not lie at multiples of those: (N, C) rows in groups of any size.
//
// Idea.  Groups of (N, C) rows lie one behind another, across the rows too.  So what a warp works
// on at once, one to 128 whole groups, is one span of memory: it is copied into shared memory in
// whole 16 bytes, with what lies beside it in the first and the last of them, and stored the same
// way.  In between a team of lanes holds a group in registers, as in rows.cuh: it stays with one
// group of channels and walks down the batch, and the next spans are on their way meanwhile.
//
// Statistics.  As in rows.cuh.
//
// Work split.  The groups of the batch are numbered as they lie.  A team has every step-th of them,
// where a step is whole rows.  A lane has a run of neighbouring elements, of more than 4 an odd
// number: so lanes that read the same element of their runs hardly ever meet in a bank of shared
// memory.  Of groups of 4 or 8 bytes a lane has several, side by side.
//
// Limits.  K elements in each lane of a warp: up to 31 of 16 bits, 15 floats, 9 doubles.
//
// Fallback.  None: any size, any address.
//
// Measured.  As in rows.cuh, in parentheses the time with every lane loading its own elements
// (H200, 2026-12-01).  (1023, 8190) in 18 groups with hardtanh: 22.6 us behind 18.1 in float32
// (43), 16.1 behind 9.6 in bfloat16 (45); (4096, 1000) in 8 groups in bfloat16 with silu: 11.7
// behind 5.0 (15); (16384, 510) in 34 groups in bfloat16 with relu: 16 behind 9.6 (38).  (16384,
// 510) in 255, of which a lane has several: 20 (22).
#pragma once
#include "normalize.cuh"

namespace fxfuse::cuda {

constexpr int kSpanThreads = 128;

// Spans of a warp that are on their way.  One more takes 3 to 8 % more time.
constexpr int kSpanStages = 2;

// Blocks that share a multiprocessor: as many as have enough registers for values, weight and bias.
template <class T, int K, bool kResidual>
constexpr int kSpanOccupancy = sizeof(T) == 8                             ? (K < 4 ? 8 : 5)
                               : K < 4                                    ? 10
                               : K < 8                                    ? 8
                               : K < 16 && !(kResidual && sizeof(T) == 2) ? 6
                               : K < 16                                   ? 5
                                                                          : 3;

// Copies neighbouring elements at any address into shared memory, by a warp, in whole 16 bytes:
// they lie there as far behind a multiple of 16 as in global memory.  The tensor ends at `end`.
template <class T>
FXFUSE_INLINE void copy_span(char* room, const T* from, int count, const T* end) {
  const int skipped = static_cast<int>(reinterpret_cast<uintptr_t>(from) % 16);
  const int first = static_cast<int>(threadIdx.x % 32) * 16;
  const char* source = reinterpret_cast<const char*>(from) - skipped + first;
  char* to = room + first;
  int left = skipped + count * static_cast<int>(sizeof(T)) - first;  // bytes
#pragma unroll 1
  for (; left >= 16; left -= 32 * 16) {
    copy_piece<16>(to, source);
    to += 32 * 16;
    source += 32 * 16;
  }
  if (left > 0) copy_part(to, source, left, end);
}

// Where they begin, and where those begin that are to be stored at `at`.
template <class T>
FXFUSE_INLINE T* span_in(char* room, const T* at) {
  return reinterpret_cast<T*>(room + reinterpret_cast<uintptr_t>(at) % 16);
}

// The way back: whole 16 bytes, and one by one the elements of the first and the last ones that are
// shared with others.
template <class O>
FXFUSE_INLINE void store_span(O* to, char* room, int count) {
  constexpr int V = 16 / sizeof(O);
  const int lane = threadIdx.x % 32;
  const int skipped = static_cast<int>(reinterpret_cast<uintptr_t>(to) % 16 / sizeof(O));
  const int head = min((V - skipped) % V, count), tail = head + (count - head) / V * V;
  const O* const from = span_in(room, to);
#pragma unroll 1
  for (int i = head + lane * V; i < tail; i += 32 * V) {
    Vector<O, V> vector;
    memcpy(&vector, __builtin_assume_aligned(from + i, 16), sizeof(vector));
    store(to + i, vector);
  }
  const int loose = lane < V ? lane : tail + lane - V;
  if (lane < V ? loose < head : lane < 2 * V && loose < count) to[loose] = from[loose];
}

// How the warps go about a problem.
struct SpanPlan {
  int log2_lanes;       // of a team
  int size, channels;   // of a group
  int step;             // groups from one of a team to its next one
  int rounds;           // of the walk
  int stage, residual;  // bytes of a span on its way; where in them the residual's begin
  int shared;           // bytes of a warp
  int64_t groups;       // of the batch
  int64_t stride;       // elements of a step
  double eps_wide;      // eps in both widths: to convert it in the loop is slow
  float eps;
  Divisor spatial, num_groups;

  template <class A>
  FXFUSE_INLINE A epsilon() const {
    if constexpr (sizeof(A) == 8) {
      return eps_wide;
    } else {
      return eps;
    }
  }
};

// K: elements of each lane in a group; P: groups of a team, several only where it is one lane.
template <class T, class O, int K, int P, bool kResidual>
__global__ __launch_bounds__(
    kSpanThreads, kSpanOccupancy<T, K * P, kResidual>) void normalize_spans(const Forward problem,
                                                                            const SpanPlan plan) {
  constexpr bool kPivot = sizeof(T) > 2, kCorrection = sizeof(O) > 2;
  using A = Accumulate<T>;
  extern __shared__ __align__(128) unsigned char memory[];
  const int log2_lanes = P > 1 ? 0 : plan.log2_lanes, lanes = 1 << log2_lanes;
  const int size = P > 1 ? K : plan.size, teams = 32 >> log2_lanes;
  const int lane = threadIdx.x % 32, rank = lane & (lanes - 1), team = lane >> log2_lanes;
  const int warp = static_cast<int>(blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32);
  const int first = warp * teams * P, mine = min(teams * P, plan.step - first);  // groups
  if (mine <= 0) return;
  // Of the lane, in its group and in the span.  Every lane has all K, without a question for any of
  // them: the last ones of a team share elements with those before, which alone count these.  Where
  // the warp has no group, or none is left, lanes work on what lies in shared memory.
  const int begin = min(rank * K, size - K), in_span = team * P * size + begin;
  const int shared = rank * K - begin;

  char* const room = reinterpret_cast<char*>(memory) + threadIdx.x / 32 * plan.shared;
  // Elements ahead of the warp's span, which lies the same way in all tensors.
  int64_t offset = int64_t(first) * size;
  const auto input = [&](int64_t at) { return static_cast<const T*>(problem.input) + at; };
  const auto output = [&](int64_t at) { return static_cast<O*>(problem.output) + at; };
  const auto residual = [&](int64_t at) { return static_cast<const O*>(problem.residual) + at; };
  // Groups of the warp in the last round, in which some may be missing.
  const int64_t rest_of_batch = plan.groups - int64_t(plan.rounds - 1) * plan.step - first;
  const int last = static_cast<int>(max(min(rest_of_batch, int64_t(mine)), int64_t(0)));
  const int64_t all = plan.groups * size;  // elements
  const auto groups_in = [&](int round) { return round + 1 < plan.rounds ? mine : last; };
  int stage = 0;
  const auto fetch = [&](int round, int64_t at) {
    if (round < plan.rounds && groups_in(round) > 0) {
      char* const to = room + stage * plan.stage;
      const int count = groups_in(round) * size;
      copy_span(to, input(at), count, input(all));
      if constexpr (kResidual) copy_span(to + plan.residual, residual(at), count, residual(all));
    }
    commit_copies();
    stage = stage + 1 == kSpanStages ? 0 : stage + 1;
  };
  wait_for_previous_kernel();
  let_next_kernel_start();
#pragma unroll
  for (int i = 0; i < kSpanStages; ++i) fetch(i, offset + i * plan.stride);

  A weight[P * K], bias[P * K];
  // All loads of one kind behind one branch, so that they are on their way together.
  const auto load_run = [&](const auto* values, A(&result)[P* K]) {
#pragma unroll
    for (int p = 0; p < P; ++p) {
      const int number = first + team * P + p, row = plan.num_groups.quotient(number);
      const int64_t channel = (number - row * problem.num_groups) * plan.channels;
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const int c = problem.spatial == 1 ? begin + k : plan.spatial.quotient(begin + k);
        result[p * K + k] = static_cast<A>(values[channel + c]);
      }
    }
  };
  const bool wide = affine_is_wide(problem);
  const auto load_parameter = [&](const void* values, A otherwise, A(&result)[P* K]) {
    if (values == nullptr) {
#pragma unroll
      for (A& value : result) value = otherwise;
    } else if (wide) {
      load_run(static_cast<const A*>(values), result);
    } else {
      load_run(static_cast<const T*>(values), result);
    }
  };
  load_parameter(problem.weight, A(1), weight);
  load_parameter(problem.bias, A(0), bias);
  const ActivationOf<A, O> activation(problem);
  const A count = static_cast<A>(size), share = A(1) / count;

  for (int round = 0; round < plan.rounds; ++round) {
    wait_for_copies<kSpanStages - 1>();
    __syncwarp();
    char* const at = room + stage * plan.stage;
    const T* const from = span_in(at, input(offset)) + in_span;
    // Of a long run one more, so that activations take it in parts.
    A z[P * K < 15 ? P * K : P * K + 1], pivot[P], total[P] = {}, other[P] = {};
    if constexpr (P * K >= 15) z[P * K] = A(0);
    int own = shared;  // from this one on
    asm volatile("" : "+r"(own));
#pragma unroll
    for (int p = 0; p < P; ++p) {
      pivot[p] = kPivot ? static_cast<A>(from[p * K - begin]) : A(0);  // the group's first
#pragma unroll
      for (int k = 0; k < K; ++k) {
        A& at_k = z[p * K + k];
        at_k = static_cast<A>(from[p * K + k]);
        if (k >= own) (k % 2 == 0 ? total : other)[p] += at_k - pivot[p];
      }
      total[p] += other[p];
    }
    if constexpr (!kResidual) {
      __syncwarp();  // all have read
      fetch(round + kSpanStages, offset + kSpanStages * plan.stride);
    }
    sum_over_lanes(total, lanes);
    constexpr int kSums = kCorrection ? 2 : 1;  // of squares; of what is left
    A totals[kSums * P] = {};
    int mirrored = ~own;
    asm volatile("" : "+r"(mirrored));  // compared anew: there are not as many predicates
#pragma unroll
    for (int p = 0; p < P; ++p) {
      total[p] = pivot[p] + quotient(total[p], count, share);  // the mean
      other[p] = A(0);
#pragma unroll
      for (int k = 0; k < K; ++k) {
        A& centered = z[p * K + k];
        centered -= total[p];
        if (mirrored >= ~k) {
          A& squares = k % 2 == 0 ? totals[kSums * p] : other[p];
          squares = multiply_add(centered, centered, squares);
          if constexpr (kCorrection) totals[kSums * p + 1] += centered;
        }
      }
      totals[kSums * p] += other[p];
    }
    sum_over_lanes(totals, lanes);
    const int groups = groups_in(round);
    [[maybe_unused]] const O* const added = span_in(at + plan.residual, residual(offset)) + in_span;
#pragma unroll
    for (int p = 0; p < P; ++p) {
      A variance = totals[kSums * p] * share, rest = A(0);
      if constexpr (kCorrection) {
        rest = quotient(totals[kSums * p + 1], count, share);
        variance = multiply_add(-rest, rest, variance);
      }
      const A rstd = rstd_of(variance, plan.epsilon<A>());
      if (problem.mean != nullptr && rank == 0 && team * P + p < groups) {
        Statistics<A> statistics;
        statistics.mean = total[p];
        statistics.rest = rest;
        statistics.rstd = rstd;
        save(problem, int64_t(round) * plan.step + first + team * P + p, statistics);
      }
#pragma unroll
      for (int n = p * K; n < p * K + K; ++n) {
        z[n] = kCorrection ? multiply_add(z[n], rstd, -rest * rstd) : z[n] * rstd;
        z[n] = multiply_add(z[n], weight[n], bias[n]);
        if constexpr (kResidual) z[n] += static_cast<A>(added[n]);
      }
    }
    if constexpr (kResidual) {
      __syncwarp();
      fetch(round + kSpanStages, offset + kSpanStages * plan.stride);
    }
    activation.value(z);
    O* const y = output(offset);
    char* const results = room + kSpanStages * plan.stage;
    O* const to = span_in(results, y) + in_span;
#pragma unroll
    for (int n = 0; n < P * K; ++n) to[n] = static_cast<O>(z[n]);
    __syncwarp();
    store_span(y, results, groups * size);
    __syncwarp();  // before the next results
    offset += plan.stride;
  }
}

// ---- host ---------------------------------------------------------------------------------------

template <class T, class O, bool kResidual, int K, int P = 1>
cudaError_t launch_spans_of(const Forward& p, int log2_lanes, const Gpu& gpu, cudaStream_t stream) {
  SpanPlan plan;
  plan.log2_lanes = log2_lanes;
  plan.size = static_cast<int>(group_size(p));
  plan.channels = static_cast<int>(p.channels / p.num_groups);
  plan.groups = p.batch * p.num_groups;
  plan.spatial = Divisor::of(p.spatial);
  plan.num_groups = Divisor::of(p.num_groups);
  const int at_once = P * 32 >> log2_lanes;  // groups of a warp

  // Room for a span at any address, a multiple of 16 bytes.
  const auto room = [&](size_t element) {
    return static_cast<int>(ceil_div(at_once * plan.size * element, 16) + 1) * 16;
  };
  plan.residual = room(sizeof(T));
  plan.stage = plan.residual + (kResidual ? room(sizeof(O)) : 0);
  plan.shared = kSpanStages * plan.stage + room(sizeof(O));

  // One wave of blocks, in which every multiprocessor has as many; or, where that would be more
  // than 8 samples for each team, many short walks, which even out.
  const int64_t blocks = std::clamp<int64_t>(gpu.fitting(kSpanThreads / 32 * plan.shared), 1,
                                             kSpanOccupancy<T, K * P, kResidual>);
  const int64_t wave = gpu.multiprocessors * blocks * (kSpanThreads / 32) * at_once;  // groups
  int64_t slices = std::clamp<int64_t>(wave / p.num_groups, 1, p.batch);
  if (ceil_div(p.batch, slices) > 8) slices = ceil_div(p.batch, 4);
  slices = std::min(slices, std::max<int64_t>((int64_t(1) << 30) / p.num_groups, 1));
  plan.step = static_cast<int>(slices * p.num_groups);
  plan.stride = int64_t(plan.step) * plan.size;
  plan.eps_wide = p.eps;
  plan.eps = static_cast<float>(p.eps);
  plan.rounds = static_cast<int>(ceil_div(p.batch, slices));
  const int64_t warps = ceil_div(plan.step, at_once);
  // Small problems in small blocks, to reach more multiprocessors.
  int of_block = kSpanThreads / 32;
  while (of_block > 1 && ceil_div(warps, of_block) < gpu.multiprocessors) of_block /= 2;
  Shape shape = {ceil_div(warps, of_block), of_block * 32, of_block * plan.shared};
  shape.early = gpu.clusters;
  return launch_shared<normalize_spans<T, O, K, P, kResidual>>(p.device, shape, stream, p, plan);
}

// With the run that was chosen, the kIndex-th or one behind it.
template <class T, class O, bool kResidual, int kIndex = 0>
cudaError_t launch_spans(const Forward& p, const Spans& spans, const Gpu& gpu,
                         cudaStream_t stream) {
  if constexpr (kIndex + 1 < std::size(Spans::kRuns) &&
                Spans::kRuns[kIndex + 1] <= Spans::longest(sizeof(T))) {
    if (spans.run != Spans::kRuns[kIndex]) {
      return launch_spans<T, O, kResidual, kIndex + 1>(p, spans, gpu, stream);
    }
  }
  constexpr int K = Spans::kRuns[kIndex];
  // Of the smallest groups a lane has 16 bytes, or a warp would have next to nothing at once.
  constexpr int P = K % 2 == 0 ? 16 / (K * sizeof(T)) : 1;
  if constexpr (P > 1) {
    if (spans.log2_lanes == 0) return launch_spans_of<T, O, kResidual, K, P>(p, 0, gpu, stream);
  }
  return launch_spans_of<T, O, kResidual, K>(p, spans.log2_lanes, gpu, stream);
}

}  // namespace fxfuse::cuda
