// GroupNorm + activation, forward, for contiguous groups of a megabyte and more, read once.
//
// Idea.  No block can hold such a group, but the shared memory of all of them can.  A team of
// blocks, one on each multiprocessor, owns a group; each streams its slice through a ring of
// chunks in shared memory.  Four roles of warps run apart, tied only by barriers in shared memory:
//   loader      asks for chunks as they are released, running ahead into the next groups
//   statistics  moments of each chunk as it lands; those of the slice go to the team
//   merger      polls the team's moments and merges them in a fixed order
//   finish      normalises out of shared memory
// So the reads and statistics of the next groups overlap with the exchange and the writes of this
// one.  What counts is how far the loader runs ahead: for 32 groups of 8 MB, 158 us with two more
// chunks asked into L2, 168 without; chunks of 8 KB take 182 instead of 158.
//
// The exchange.  A slot of the workspace takes the moments of one slice: two words of 64 bits, each
// a value and a tag, so that one store publishes and one load receives, without a fence.  The slots
// hold anything when the kernel starts.  A tag that counts launches would have to outlive the
// launch, in memory that a second stream must not share and a graph replays unchanged; so every
// block clears its slots, and the barrier of the cooperative launch, which the driver provides,
// separates that from the first value.  It costs nothing: the ring is being filled meanwhile.
//
// Work split.  Team t takes the groups t, t + teams, ...
//
// Limits.  Bulk copies (sm_90).  A slice fits into the ring.  Groups of whole vectors of 16 bytes,
// each within one channel.  All blocks run at once, hence the cooperative launch.
//
// Fallback.  chunks.cuh, which reads everything twice; for double too, which is too rare for this.
//
// Measured.  As in rows.cuh, in bfloat16 with silu.  (1, 128, 1024, 1024) in 32 groups: 163 us
// behind 135; 256 groups of 0.75 MB 122 behind 102, of 1 MB 157 behind 135; 32 groups of 16 MB,
// where the ring holds less than two slices, 360 behind 266.
#pragma once
#include <cooperative_groups.h>

#include "normalize.cuh"

namespace fxfuse::cuda {

// Moments of one slice, with a tag beside each number.
struct Slot {
  uint64_t words[2];
};
static_assert(sizeof(Slot) == kSlotBytes);

FXFUSE_INLINE void publish(Slot* slot, float mean, float m2) {
  const uint64_t tag = uint64_t(1) << 32;
  asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};" ::"l"(slot),
               "l"(tag | __float_as_uint(mean)), "l"(tag | __float_as_uint(m2))
               : "memory");
}

// Whether they were there.
FXFUSE_INLINE bool receive(const Slot* slot, float& mean, float& m2) {
  uint64_t first, second;
  asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];"
               : "=l"(first), "=l"(second)
               : "l"(slot)
               : "memory");
  mean = __uint_as_float(static_cast<uint32_t>(first));
  m2 = __uint_as_float(static_cast<uint32_t>(second));
  return first >> 32 != 0 && second >> 32 != 0;
}

// Where a role stands in the ring.
struct Place {
  int chunk = 0, phase = 0;
  FXFUSE_INLINE void next(int capacity) {
    if (++chunk == capacity) {
      chunk = 0;
      phase ^= 1;
    }
  }
};

template <class T, class O, bool kResidual>
__global__ __launch_bounds__(kRingThreads,
                             1) void normalize_ring(const Forward problem, const Ring plan,
                                                    const Divisor num_groups, Slot* const slots) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr int V = 16 / sizeof(T);
  constexpr bool kPivot = kHasPivot<T, O>;
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ SharedBarrier landed[kMostChunks], released[kMostChunks], merged[kMostChunks];
  __shared__ Statistics<float> statistics[kMostChunks];
  __shared__ CountedMoments<float> of_warp[2][kStatisticsWarps];
  auto* const ring = reinterpret_cast<Loaded<T, V>*>(memory);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int team = blockIdx.x / plan.team, rank = blockIdx.x % plan.team;
  const int first = rank * plan.slice, mine = max(0, min(plan.slice, plan.vectors - first));
  const int64_t groups = problem.batch * problem.num_groups;
  const int64_t group_size = int64_t(plan.vectors) * V;
  const T* const input = static_cast<const T*>(problem.input);
  const auto chunk_size = [&](int chunk) { return min(plan.chunk, mine - chunk * plan.chunk); };
  const auto pivot_of = [&](int64_t group) {
    return kPivot && group < groups ? static_cast<float>(input[group * group_size]) : 0.0f;
  };

  if (thread == 0) {
    for (int i = 0; i < plan.capacity; ++i) {
      landed[i].init(1);
      released[i].init(kFinishWarps);
      merged[i].init(1);
    }
    fence_barrier_init();
  }
  for (int64_t group = team + int64_t(thread) * plan.teams; group < groups;
       group += int64_t(kRingThreads) * plan.teams) {
    slots[group * plan.team + rank] = {};
  }

  // The loader's state; thread 0 fills the ring before the barrier.
  Place place;
  int64_t loading = team, asking = team;  // groups
  int chunk = 0, asked = 0, ahead = 0;    // chunks of them; from the one to the other
  const auto load_chunk = [&](bool ring_is_full) {
    const T* const x = input + loading * group_size + int64_t(first) * V;
    for (; ahead < plan.ahead && asking < groups; ++ahead) {
      const int size = chunk_size(asked);
      if (size > 0 && ring_is_full) {
        prefetch_bulk(input + asking * group_size + int64_t(first + asked * plan.chunk) * V,
                      size * 16);
      }
      if (++asked == plan.chunks) {
        asked = 0;
        asking += plan.teams;
      }
    }
    if (ahead > 0) --ahead;
    if (ring_is_full) released[place.chunk].wait(place.phase ^ 1);
    const int size = max(0, chunk_size(chunk));
    landed[place.chunk].arrive_and_expect(size * 16);
    if (size > 0) {
      landed[place.chunk].copy_bulk(ring + place.chunk * kChunkVectors,
                                    x + int64_t(chunk) * plan.chunk * V, size * 16);
    }
    place.next(plan.capacity);
    if (++chunk == plan.chunks) {
      chunk = 0;
      loading += plan.teams;
    }
  };
  if (thread == 0) {
    for (int i = 0; i < plan.capacity && loading < groups; ++i) load_chunk(false);
  }
  cooperative_groups::this_grid().sync();

  if (warp == 0) {
    if (lane == 0) {
      while (loading < groups) load_chunk(true);
    }
  } else if (warp == 1) {  // merger
    float pivot = pivot_of(team);
    int place = 0;
    for (int64_t group = team; group < groups; group += plan.teams) {
      const float next_pivot = pivot_of(group + plan.teams);
      const Slot* const of_group = slots + group * plan.team;
      float means[kMostPolls], m2s[kMostPolls];
      bool complete;
      do {  // all polls at once: one after the other they would take as many round trips
        complete = true;
#pragma unroll
        for (int k = 0; k < kMostPolls; ++k) {
          const int from = lane + 32 * k;
          if (from < plan.team) complete &= receive(of_group + from, means[k], m2s[k]);
        }
      } while (!complete);
      CountedMoments<float> moments = {};
#pragma unroll
      for (int k = 0; k < kMostPolls; ++k) {
        const int from = lane + 32 * k;
        if (from < plan.team) {
          const int size = max(0, min(plan.slice, plan.vectors - from * plan.slice));
          moments.merge({means[k], m2s[k], static_cast<float>(size) * V, 0.0f});
        }
      }
      moments.merge_warp();
      if (lane == 0) {
        Statistics<float> result;
        split_mean(pivot, moments.mean, result);
        result.rstd =
            rstd_of(moments.m2 / static_cast<float>(group_size), static_cast<float>(problem.eps));
        if (rank == 0) save(problem, group, result);
        statistics[place] = result;
        merged[place].arrive();
      }
      if (++place == plan.capacity) place = 0;
      pivot = next_pivot;
    }
  } else if (warp < 2 + kStatisticsWarps) {
    constexpr int kThreadsOfRole = 32 * kStatisticsWarps, U = kChunkVectors / kThreadsOfRole;
    const int index = thread - 64;
    float pivot = pivot_of(team);
    int buffer = 0;
    Place place;
    for (int64_t group = team; group < groups; group += plan.teams) {
      const float next_pivot = pivot_of(group + plan.teams);
      CountedMoments<float> moments = {};
      for (int c = 0; c < plan.chunks; ++c) {
        const int size = chunk_size(c);
        const Loaded<T, V>* const from = ring + place.chunk * kChunkVectors;
        landed[place.chunk].wait(place.phase);
        Loaded<T, V> data[U];
        // Not by a count of vectors: ptxas 13.0 turns "count == U" of a clamped count into the
        // predicate of VIMNMX, which is wrong above U.
        if (index + (U - 1) * kThreadsOfRole < size) {
#pragma unroll
          for (int u = 0; u < U; ++u) data[u] = from[index + u * kThreadsOfRole];
          moments.template add<true>(data, U, pivot);
        } else if (index < size) {
          int loaded = 0;
#pragma unroll
          for (int u = 0; u < U; ++u) {
            if (index + u * kThreadsOfRole < size) {
              data[u] = from[index + u * kThreadsOfRole];
              loaded = u + 1;
            }
          }
          moments.template add<false>(data, loaded, pivot);
        }
        place.next(plan.capacity);
      }
      moments.merge_warp();
      if (lane == 0) of_warp[buffer][warp - 2] = moments;
      asm volatile("bar.sync 1, %0;" ::"n"(kThreadsOfRole) : "memory");
      if (warp == 2) {
        moments = {};
        if (lane < kStatisticsWarps) moments = of_warp[buffer][lane];
        moments.merge_warp();
        if (lane == 0) publish(slots + group * plan.team + rank, moments.mean, moments.m2);
      }
      buffer ^= 1;
      pivot = next_pivot;
    }
  } else {
    constexpr int kThreadsOfRole = 32 * kFinishWarps, U = kChunkVectors / kThreadsOfRole;
    // Vectors for which the activation is entered once; with a residual there are registers for
    // one.
    constexpr int kTogether = kResidual ? 1 : U;
    const int index = thread - 32 * (2 + kStatisticsWarps);
    const int channels = static_cast<int>(problem.channels / problem.num_groups);
    const bool wide = affine_is_wide(problem);
    const ActivationOf<float, O> activation(problem);
    // Of a group's slice, into L2, from where it is loaded as the results need it.
    const auto prefetch_residual = [&](int64_t group) {
      if (kResidual && index == 0 && mine > 0 && group < groups) {
        const O* const y = static_cast<O*>(problem.output) + group * group_size;
        prefetch_bulk(residual_of(problem, y + int64_t(first) * V),
                      mine * V * static_cast<int>(sizeof(O)));
      }
    };
    prefetch_residual(team);
    Place place, done;
    for (int64_t group = team; group < groups; group += plan.teams) {
      O* const y = static_cast<O*>(problem.output) + group * group_size;
      const int64_t channel = (group - num_groups.quotient(group) * problem.num_groups) * channels;
      prefetch_residual(group + plan.teams);
      merged[done.chunk].wait(done.phase);
      const Statistics<float> of_group = statistics[done.chunk];
      done.next(plan.capacity);
      int current = -1;
      float scale = 0, shift = 0;
      const auto enter = [&](int c) {  // a channel
        if (c == current) return;
        current = c;
        scale = of_group.rstd * load_channel<T>(problem.weight, wide, channel + c, 1.0f);
        shift = load_channel<T>(problem.bias, wide, channel + c, 0.0f);
      };
      for (int c = 0; c < plan.chunks; ++c) {
        const int size = chunk_size(c), begin = first + c * plan.chunk;
        const Loaded<T, V>* const from = ring + place.chunk * kChunkVectors;
        [[maybe_unused]] Loaded<O, V> added[U];
        if constexpr (kResidual) {
#pragma unroll
          for (int u = 0; u < U; ++u) {
            const int at = index + u * kThreadsOfRole;
            if (at < size) {
              added[u] = load<O, V>(residual_of(problem, y + int64_t(begin + at) * V));
            }
          }
        }
        landed[place.chunk].wait(place.phase);
        Loaded<T, V> data[U];
#pragma unroll
        for (int u = 0; u < U; ++u) {
          if (index + u * kThreadsOfRole < size) data[u] = from[index + u * kThreadsOfRole];
        }
        __syncwarp();
        if (lane == 0) released[place.chunk].arrive();
        place.next(plan.capacity);
        const int last = min(begin + max(size, 1), plan.vectors) - 1;
        const int of_first = plan.channel.quotient(min(begin, last));
        const bool one_channel = of_first == plan.channel.quotient(last);
        if (one_channel) enter(of_first);
#pragma unroll
        for (int n = 0; n < U; n += kTogether) {
          float z[kTogether * V];
#pragma unroll
          for (int u = n; u < n + kTogether; ++u) {
            if (!one_channel) {
              enter(plan.channel.quotient(min(begin + index + u * kThreadsOfRole, last)));
            }
#pragma unroll
            for (int j = 0; j < V; ++j) {
              const float distance = data[u].at(j) - of_group.mean;
              const float centered = kPivot ? distance - of_group.rest : distance;
              float& at = z[(u - n) * V + j];
              at = multiply_add(centered, scale, shift);
              if constexpr (kResidual) at += added[u].at(j);
            }
          }
          activation.value(z);
#pragma unroll
          for (int u = n; u < n + kTogether; ++u) {
            const int at = index + u * kThreadsOfRole;
            if (at < size) {
              Vector<O, V> result;
#pragma unroll
              for (int j = 0; j < V; ++j) result.at[j] = static_cast<O>(z[(u - n) * V + j]);
              store(y + int64_t(begin + at) * V, result);
            }
          }
        }
      }
    }
  }
#endif
}

}  // namespace fxfuse::cuda
