// GroupNorm + activation, forward, where the channels are neighbours in memory (channels_last).
//
// Idea.  A tile is some whole groups of one sample, as columns through all its rows.  It is copied
// to shared memory asynchronously, measured there, and after an exchange of moments written as the
// result.  Where a block or a cluster holds it, each block has its slice of one tile, and others on
// the same processor compute meanwhile (normalize_tile).  A larger one is for the whole grid, whose
// blocks take their slices of one tile after the other through rings of chunks: while moments
// travel and results leave, the next copies are on their way.  What the chip cannot hold gives way
// in the order in which it came, and is read again backwards, for the L2 cache still holds the last
// of it (normalize_tiles).  Elsewhere: moments of chunks of rows, merged by a second launch, and a
// second pass over the data, from its end, in a third.
//
// Statistics.  Two passes over some rows in registers, then Chan's formula in a fixed order.  As in
// groups.cuh, relative to the group's first value where input or output is wider than 16 bits.
// Means are averaged by their distance from one of them, so that a constant group gives exactly 0.
//
// Work split.  See Tiling and choose_tiling (forward_plan.h); a thread owns a column of vectors.
//
// Limits.  In tiles: 16-byte accesses, groups of 256 values or more that span up to 512
// vectors, not double; clusters from compute capability 9.0 on.  Offsets have 64 bits, everything
// is on grid x.
//
// Measured.  See forward_plan.h.
//
// Fallback.  The three launches take everything; element by element where a pointer or the number
// of channels forbids 16-byte accesses.
#pragma once
#include <cooperative_groups.h>

#include <utility>

#include "normalize.cuh"

namespace fxfuse::cuda {

// Moments of kRuns runs of kRun neighbouring channels in a vector, over rows, relative to origins.
template <class A, int kRuns, int kRun>
struct RunMoments {
  Moments<A> of[kRuns] = {};
  A count = 0;  // of each

  // Adds those of R rows, of which the first `existing` exist (at least 1; kAll: all): two passes
  // over registers, then Chan's formula.  Without kOrigins, these are 0.
  template <bool kAll, bool kOrigins, class T, int V, int R>
  FXFUSE_INLINE void add(const Loaded<T, V> (&rows)[R], int existing, const A (&origins)[kRuns]) {
    static_assert(V == kRuns * kRun);
    const A added = kAll ? A(R * kRun) : static_cast<A>(existing * kRun);
    const A inverse = kAll ? A(1) / (R * kRun) : divide(A(1), added);
    const A share = divide(added, count + added);
#pragma unroll
    for (int n = 0; n < kRuns; ++n) {
      A values[R * kRun], of_row[R] = {}, sum = 0;  // for an addition waits for the one before
#pragma unroll
      for (int r = 0; r < R; ++r) {
        if (kAll || r < existing) {
#pragma unroll
          for (int j = 0; j < kRun; ++j) {
            A& value = values[r * kRun + j];
            value = rows[r].at(n * kRun + j);
            if constexpr (kOrigins) value -= origins[n];
            of_row[r] += value;
          }
        }
        sum += of_row[r];
      }
      // R * kRun is a power of two: no rounding.
      Moments<A> here = {kAll ? sum * inverse : quotient(sum, added, inverse), 0};
#pragma unroll
      for (int r = 0; r < R; ++r) {
        of_row[r] = 0;
        if (kAll || r < existing) {
#pragma unroll
          for (int j = 0; j < kRun; ++j) {
            const A distance = values[r * kRun + j] - here.mean;
            of_row[r] = multiply_add(distance, distance, of_row[r]);
          }
        }
        here.m2 += of_row[r];
      }
      of[n].merge(here, count, share);
    }
    count += added;
  }
};

// ---- tiles in shared memory, in one launch ------------------------------------------------------

// A block's moments of one group travel to the others without a fence: that would wait for all that
// the block has under way, which is what the exchange should overlap with.  An earlier form of this
// kernel, with a barrier of the cluster or of the grid for each tile, took 147 us at best for
// (64, 256, 56, 56) in bfloat16 and 310 for (8, 128, 256, 256) (H200, 2026-11-30; now: see
// forward_plan.h).  In a cluster, each member sends them into the others' lists.
//
// In a grid, each number has a word of the workspace to itself, and says by not being kAbsent that
// it is there.  Every block clears its own words before a barrier of the grid and writes each once
// after it, so nothing depends on what the workspace held.
constexpr uint32_t kAbsent = 0xffffffff, kOtherNaN = 0x7fffffff;

namespace post {

FXFUSE_INLINE void put(Moments<float>* to, uint32_t mean, uint32_t m2) {
  asm volatile("st.relaxed.gpu.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(mean), "r"(m2)
               : "memory");
}

FXFUSE_INLINE void clear(Moments<float>* to) { put(to, kAbsent, kAbsent); }

FXFUSE_INLINE void send(Moments<float>* to, const Moments<float>& moments) {
  const auto word = [](float value) { return value == value ? __float_as_uint(value) : kOtherNaN; };
  put(to, word(moments.mean), word(moments.m2));
}

// Whether they have come.
FXFUSE_INLINE bool fetch(const Moments<float>* from, Moments<float>& moments) {
  uint32_t mean, m2;
  asm volatile("ld.relaxed.gpu.global.v2.b32 {%0, %1}, [%2];"
               : "=r"(mean), "=r"(m2)
               : "l"(from)
               : "memory");
  moments = {__uint_as_float(mean), __uint_as_float(m2)};
  return mean != kAbsent && m2 != kAbsent;
}

}  // namespace post

// A block of either kernel, for all types but double.  A thread reads from the chunks only what it
// copied there itself: its column of vectors in every lines-th row.
template <class T, class O, int kRun, bool kGrid, bool kResidual>
class TileBlock {
 public:
  FXFUSE_INLINE TileBlock(const Forward& problem, const Tiling& tiling,
                          Pair<Accumulate<T>>* partial, unsigned char* shared)
      : problem_(problem),
        tiling_(tiling),
        partial_(reinterpret_cast<Moments<A>*>(partial)),
        shared_(shared),
        first_tile_(kGrid ? 0 : blockIdx.x / tiling.members),
        rank_(kGrid ? blockIdx.x : blockIdx.x % tiling.members),
        line_(threadIdx.x / tiling.width),
        column_(threadIdx.x % tiling.width),
        count_(kGrid ? tiling.tiles : 1),
        rows_(rows_of(rank_)) {
    const int of_chunk = tiling.lines * tiling.of_line;
    whole_chunks_ = rows_ / of_chunk;
    const int left = rows_ - whole_chunks_ * of_chunk - line_;
    last_ = line_ >= tiling.lines || left <= 0 ? 0 : (left + tiling.lines - 1) / tiling.lines;
#pragma unroll
    for (int n = 0; n < kRuns; ++n) {
      group_[n] = static_cast<unsigned>(column_ * V + n * kRun) / tiling.per_group;
    }
  }

  FXFUSE_INLINE void run() {
    cooperative_groups::grid_group::arrival_token cleared = {};
    if constexpr (kGrid) {
      for (int i = threadIdx.x; i < tiling_.tiles * tiling_.groups; i += blockDim.x) {
        post::clear(partial_ + int64_t(i) * tiling_.members + rank_);
      }
      cleared = cooperative_groups::this_grid().barrier_arrive();
    } else if (tiling_.members > 1) {
      if (threadIdx.x == 0) {
        letters()->init(1);
        fence_barrier_init();
      }
      arrive_at_cluster_barrier();
    }
    wait_for_previous_kernel();
    let_next_kernel_start();
#pragma unroll 1
    for (int slot = 0; slot < slots(); ++slot) copy_next_chunk();
    prefetch_residual(0, 0);
    fetch_pivots(0, first_pivot(0));
    __syncthreads();
    if constexpr (kGrid) {
      cooperative_groups::this_grid().barrier_wait(std::move(cleared));
    } else if (tiling_.members > 1) {
      wait_at_cluster_barrier();  // all members run and have opened their letters
    }

    // A block measures the next tile before it finishes one where there is room for both: then it
    // need not wait for the others.
    const int overlap = kGrid && 2 * chunks() <= slots();
#pragma unroll 1
    for (int tile = 0; tile < count_ + overlap; ++tile) {
      const int done = tile - overlap;
      const A pivot = first_pivot(tile + 1);  // of a later tile: on its way during all that follows
      if (tile < count_) measure(tile);
      Affine affine;
      if (done >= 0) affine.fetch(problem_, Place(*this, done).channel + column_ * V);
      __syncthreads();
      if (tile < count_) publish(tile);
      if (done >= 0) merge(done);
      fetch_pivots(tile + 1, pivot);
      __syncthreads();
      if (done >= 0) normalize(done, affine);
    }
  }

 private:
  using A = Accumulate<T>;
  static constexpr int V = 16 / sizeof(T);
  static constexpr int kRuns = V / kRun;
  static constexpr bool kPivot = kHasPivot<T, O>;
  // Rows for which the activation is entered once: as registers allow.
  static constexpr int kTogether = kGrid && kRuns <= 4 && !kResidual ? 2 : 1;
  static constexpr int kRowsAtOnce = sizeof(T) == 4 ? (kRun == 1 ? 4 : 8) : kRun == 1 ? 2 : 4;

  // Tile number `tile` of those that this block works on.
  struct Place {
    int index, sample;  // of all tiles
    int64_t channel;    // the first one

    FXFUSE_INLINE Place(const TileBlock& block, int tile) {
      const Tiling& t = block.tiling_;
      index = block.first_tile_ + tile;
      sample = static_cast<unsigned>(index) / t.per_sample;
      channel = int64_t(index - sample * t.per_sample) * t.width * V;
    }
  };

  // Weight and bias of this thread's channels, as they lie in memory until they are needed.
  class Affine {
   public:
    FXFUSE_INLINE void fetch(const Forward& problem, int64_t channel) {
      wide_ = affine_is_wide(problem);
      has_weight_ = problem.weight != nullptr;
      has_bias_ = problem.bias != nullptr;
      if (has_weight_) fetch(problem.weight, channel, weight_);
      if (has_bias_) fetch(problem.bias, channel, bias_);
    }

    FXFUSE_INLINE void get(A (&weight)[V], A (&bias)[V]) const {
      decode(has_weight_, A(1), weight_, weight);
      decode(has_bias_, A(0), bias_, bias);
    }

   private:
    static constexpr int kWords = sizeof(A) / sizeof(T);  // of 16 bytes, at most

    FXFUSE_INLINE void fetch(const void* from, int64_t channel, uint4 (&words)[kWords]) const {
      if (kWords > 1 && wide_) {
        const uint4* word = reinterpret_cast<const uint4*>(static_cast<const A*>(from) + channel);
#pragma unroll
        for (int i = 0; i < kWords; ++i) words[i] = word[i];
      } else {
        words[0] = *reinterpret_cast<const uint4*>(static_cast<const T*>(from) + channel);
      }
    }

    FXFUSE_INLINE void decode(bool given, A otherwise, const uint4 (&words)[kWords],
                              A (&values)[V]) const {
      if (!given) {
#pragma unroll
        for (int j = 0; j < V; ++j) values[j] = otherwise;
      } else if (kWords > 1 && wide_) {
        memcpy(values, words, sizeof(values));
      } else {
        Loaded<T, V> narrow;
        memcpy(&narrow, words, sizeof(narrow));
#pragma unroll
        for (int j = 0; j < V; ++j) values[j] = narrow.at(j);
      }
    }

    bool wide_, has_weight_, has_bias_;
    uint4 weight_[kWords], bias_[kWords];
  };

  // Of a slice, those that shared memory holds, and those that must give way before the statistics
  // are known and are read twice.
  FXFUSE_INLINE int chunks() const { return kGrid ? tiling_.chunks : 1; }
  FXFUSE_INLINE int slots() const { return kGrid ? tiling_.slots : 1; }
  FXFUSE_INLINE int reloads() const { return max(chunks() - slots(), 0); }

  // Rows of a member's slice.
  FXFUSE_INLINE int rows_of(int rank) const {
    return rank < tiling_.whole ? tiling_.slice : rank == tiling_.whole ? tiling_.rest : 0;
  }

  // This thread's rows in a chunk of the slice.
  FXFUSE_INLINE int rows_in(int chunk) const {
    const int whole = line_ < tiling_.lines ? tiling_.of_line : 0;
    return chunk < whole_chunks_ ? whole : chunk == whole_chunks_ ? last_ : 0;
  }

  // The chunk that the loads of a tile take at place `load`: in order, and then those that had to
  // give way, the last first, for the L2 cache may still hold them.
  FXFUSE_INLINE int chunk_of(int load) const {
    return load < chunks() ? load : 2 * chunks() - slots() - 1 - load;
  }

  // This thread's first vector in a slot.
  FXFUSE_INLINE char* in_ring(int slot) const {
    return reinterpret_cast<char*>(shared_) + slot * tiling_.chunk_pitch + threadIdx.x * 16;
  }

  FXFUSE_INLINE void advance(int& slot, int by) const {
    if constexpr (kGrid) {
      slot += by;
      while (slot >= slots()) slot -= slots();
    }
  }

  // Offset in memory of this thread's first vector of a tile, in elements.
  FXFUSE_INLINE int64_t offset(int tile) const {
    const Place place(*this, tile);
    const int64_t row = place.sample * problem_.spatial + int64_t(rank_) * tiling_.slice + line_;
    return row * problem_.channels + place.channel + column_ * V;
  }

  FXFUSE_INLINE void copy_next_chunk() {
    if (next_tile_ < count_) {
      if (next_load_ == 0) {
        next_ = reinterpret_cast<const char*>(static_cast<const T*>(problem_.input) +
                                              offset(next_tile_));
      }
      const int chunk = chunk_of(next_load_);
      const char* from = next_ + chunk * tiling_.chunk_step;
      char* to = in_ring(next_slot_);
#pragma unroll 4
      for (int left = rows_in(chunk); left > 0; --left) {
        copy_piece<16>(to, from);
        from += tiling_.row_step;
        to += tiling_.row_pitch;
      }
      advance(next_slot_, 1);
      if (++next_load_ == chunks() + reloads()) {
        next_load_ = 0;
        ++next_tile_;
      }
    }
    commit_copies();
    ++sets_;
  }

  // Waits for set number `set` of the copies.
  static_assert(kMostSlots - 1 <= kMostSetsAhead);
  FXFUSE_INLINE void wait_for(int set) const { wait_for_copies(sets_ - 1 - set); }

  // The chunk that a tile's results are made of at place `place` of them.
  FXFUSE_INLINE int result_chunk(int place) const { return chunk_of(reloads() + place); }

  FXFUSE_INLINE char* output_of(int tile) const {
    return reinterpret_cast<char*>(static_cast<O*>(problem_.output) + offset(tile));
  }

  // Asks for the residual of a chunk of results into L2, while there are no registers for it.
  FXFUSE_INLINE void prefetch_residual(int tile, int place) const {
    if constexpr (kResidual) {
      constexpr int kAtOnce = 64 / (V * sizeof(O));  // vectors
      if (tile >= count_ || column_ % kAtOnce != 0) return;
      const int chunk = result_chunk(place);
      const char* from = residual_of(problem_, output_of(tile) + chunk * tiling_.chunk_step_out);
#pragma unroll 4
      for (int left = rows_in(chunk); left > 0; --left) {
        prefetch_line(from);
        from += tiling_.row_step_out;
      }
    }
  }

  // ---- statistics

  // The first value of a group is its pivot.
  FXFUSE_INLINE A pivot_of(int tile, int group) const {
    const Place place(*this, tile);
    const T* sample = static_cast<const T*>(problem_.input) +
                      place.sample * problem_.spatial * problem_.channels + place.channel;
    return static_cast<A>(sample[group * tiling_.per_group]);
  }

  FXFUSE_INLINE A* pivots(int tile) const {
    return reinterpret_cast<A*>(shared_ + tiling_.pivots) + tile % kPivotsKept * tiling_.groups;
  }

  FXFUSE_INLINE A first_pivot(int tile) const {
    const int group = threadIdx.x;
    return kPivot && tile < count_ && group < tiling_.groups ? pivot_of(tile, group) : A(0);
  }

  FXFUSE_INLINE void fetch_pivots(int tile, A first) const {
    if (!kPivot || tile >= count_) return;
    int group = threadIdx.x;
    if (group < tiling_.groups) pivots(tile)[group] = first;
#pragma unroll 1
    for (group += blockDim.x; group < tiling_.groups; group += blockDim.x) {
      pivots(tile)[group] = pivot_of(tile, group);
    }
  }

  FXFUSE_INLINE Moments<A>* scratch() const {
    return reinterpret_cast<Moments<A>*>(shared_ + tiling_.scratch);
  }

  // Leaves the moments of every thread's runs in scratch().
  FXFUSE_INLINE void measure(int tile) {
    A origins[kRuns];
    if constexpr (kPivot) {
#pragma unroll
      for (int n = 0; n < kRuns; ++n) origins[n] = pivots(tile)[group_[n]];
    }
    RunMoments<A, kRuns, kRun> running;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks(); ++chunk) {
      wait_for(tile * (chunks() + reloads()) + chunk);
      const char* from = in_ring(measured_slot_);
      int left = rows_in(chunk);
#pragma unroll 1
      for (; left >= kRowsAtOnce; left -= kRowsAtOnce) {
        add_rows<kRowsAtOnce>(from, origins, running);
        from += kRowsAtOnce * tiling_.row_pitch;
      }
#pragma unroll 1
      for (; left > 0; --left) {
        add_rows<1>(from, origins, running);
        from += tiling_.row_pitch;
      }
      advance(measured_slot_, 1);
      if (chunk < reloads()) copy_next_chunk();
    }
    advance(measured_slot_, reloads());
    if (line_ < tiling_.lines) {
#pragma unroll
      for (int n = 0; n < kRuns; ++n) scratch()[threadIdx.x * kRuns + n] = running.of[n];
    }
  }

  FXFUSE_INLINE static Loaded<T, V> in_row(const char* vector) {
    return load<T, V>(reinterpret_cast<const T*>(vector));
  }

  template <int R>
  FXFUSE_INLINE void add_rows(const char* from, const A (&origins)[kRuns],
                              RunMoments<A, kRuns, kRun>& running) const {
    Loaded<T, V> rows[R];
#pragma unroll
    for (int r = 0; r < R; ++r) rows[r] = in_row(from + r * tiling_.row_pitch);
    running.template add<true, kPivot>(rows, R, origins);
  }

  // Moments of `total` values from those of parts: each(body) calls body(moments, count) for this
  // lane's.  By a warp, and to the same bits in each lane.  `some` is the mean of one of the parts:
  // equal ones have themselves as their mean.
  template <class Each>
  FXFUSE_INLINE static Moments<A> merged(A total, A some, Each each) {
    const Team warp(32);
    A sum[1] = {};
    each([&](const Moments<A>& part, A count) { sum[0] += (part.mean - some) * count; });
    warp.sum(sum);
    const A mean = total > A(0) ? some + sum[0] / total : A(0);
    A m2[1] = {};
    each([&](const Moments<A>& part, A count) {
      const A distance = part.mean - mean;
      m2[0] += part.m2 + distance * distance * count;
    });
    warp.sum(m2);
    return {mean, m2[0]};
  }

  // Calls body(group) for the groups of this warp.
  template <class Body>
  FXFUSE_INLINE void each_group(Body body) const {
#pragma unroll 1
    for (int group = threadIdx.x / 32; group < tiling_.groups; group += blockDim.x / 32) {
      body(group);
    }
  }

  // The moments that the members found of a tile's groups: (groups, members).
  FXFUSE_INLINE Moments<A>* list() const {
    return reinterpret_cast<Moments<A>*>(shared_ + tiling_.list);
  }
  FXFUSE_INLINE Moments<A>* posted(int tile) const {
    return partial_ + int64_t(Place(*this, tile).index) * tiling_.groups * tiling_.members;
  }
  FXFUSE_INLINE SharedBarrier* letters() const {
    return reinterpret_cast<SharedBarrier*>(shared_ + tiling_.letters);
  }

  // Merges the threads' moments and lets the other members know.
  FXFUSE_INLINE void publish(int tile) const {
    const int lane = threadIdx.x % 32;
    const int runs = tiling_.per_group / kRun, of_line = tiling_.width * kRuns;  // entries
    const int whole = rows_ / tiling_.lines, rest = rows_ - whole * tiling_.lines;
    if (!kGrid && tiling_.members > 1 && threadIdx.x == 0) {
      const int entries = tiling_.groups * tiling_.members;
      letters()->arrive_and_expect(entries * static_cast<int>(sizeof(Moments<A>)));
    }
    each_group([&](int group) {
      const int parts = tiling_.lines * runs;
      const Moments<A>* first = scratch() + group * runs;
      const A total = static_cast<A>(rows_) * tiling_.per_group;
      const Moments<A> moments = merged(total, first->mean, [&](auto body) {
#pragma unroll 2
        for (int i = lane; i < parts; i += 32) {
          const int line = runs == 1 ? i : static_cast<int>(static_cast<unsigned>(i) / runs);
          body(first[line * of_line + (i - line * runs)],
               static_cast<A>((whole + (line < rest)) * kRun));
        }
      });
      const int entry = group * tiling_.members + rank_;
      if constexpr (kGrid) {
        if (lane == 0) post::send(posted(tile) + entry, moments);
      } else if (tiling_.members > 1) {
        if (lane < tiling_.members) send_to_block(lane, list() + entry, letters(), moments);
      } else if (lane == 0) {
        list()[entry] = moments;
      }
    });
  }

  // What normalize() needs to know about the groups of a tile.
  FXFUSE_INLINE Statistics<A>* statistics() const {
    return reinterpret_cast<Statistics<A>*>(shared_ + tiling_.statistics);
  }

  // Merges what all members found.
  FXFUSE_INLINE void merge(int tile) const {
    if (!kGrid && tiling_.members > 1) letters()->wait(0);
    each_group([&](int group) {
      const int lane = threadIdx.x % 32, members = tiling_.members, per_group = tiling_.per_group;
      const A total = static_cast<A>(problem_.spatial) * per_group;
      const auto count_of = [&](int member) { return static_cast<A>(rows_of(member)) * per_group; };
      Moments<A> moments;
      if constexpr (kGrid) {
        constexpr int K = kMostMembers / 32;  // all at once: each is a trip to the L2 cache
        const Moments<A>* from = posted(tile) + group * members;
        Moments<A> part[K];
        bool all;
        do {
          all = true;
          each<K>(lane, 32, members, [&](int k, int i) { all &= post::fetch(from + i, part[k]); });
        } while (!all);
        moments = merged(total, __shfl_sync(~0u, part[0].mean, 0), [&](auto body) {
          each<K>(lane, 32, members, [&](int k, int i) { body(part[k], count_of(i)); });
        });
      } else {
        __syncwarp();  // with its only member, this warp has written it
        const Moments<A>* from = list() + group * members;
        moments = merged(total, from->mean, [&](auto body) {
          if (lane < members) body(from[lane], count_of(lane));
        });
      }
      if (lane != 0) return;
      Statistics<A> result;
      split_mean(kPivot ? pivots(tile)[group] : A(0), moments.mean, result);
      result.rstd = rstd_of(moments.m2 / total, static_cast<A>(problem_.eps));
      statistics()[group] = result;
      if (rank_ == 0) {
        const Place place(*this, tile);
        const int64_t first = place.sample * problem_.num_groups + place.channel / per_group;
        save(problem_, first + group, result);
      }
    });
  }

  // ---- the result

  FXFUSE_INLINE void normalize(int tile, const Affine& affine) {
    A mean[kRuns], rest[kRuns], scale[V], bias[V];
    affine.get(scale, bias);
#pragma unroll
    for (int n = 0; n < kRuns; ++n) {
      const Statistics<A> group = statistics()[group_[n]];
      mean[n] = group.mean;
      rest[n] = group.rest;
#pragma unroll
      for (int j = 0; j < kRun; ++j) scale[n * kRun + j] *= group.rstd;
    }
    const ActivationOf<A, O> activation(problem_);
    char* const first = output_of(tile);
    advance(finished_slot_, reloads());
#pragma unroll 1
    for (int i = 0; i < chunks(); ++i) {
      const int load_number = reloads() + i, chunk = chunk_of(load_number);
      if constexpr (kGrid) {
        if (i + 1 < chunks()) {
          prefetch_residual(tile, i + 1);
        } else {
          prefetch_residual(tile + 1, 0);
        }
      }
      wait_for(tile * (chunks() + reloads()) + load_number);
      const char* from = in_ring(finished_slot_);
      char* to = first + chunk * tiling_.chunk_step_out;
      // The residual of the next row is on its way while one is worked on, where registers allow.
      constexpr bool kAhead = kResidual && sizeof(O) == sizeof(T);
      const auto residual = [&](const char* output) {
        return load<O, V>(reinterpret_cast<const O*>(residual_of(problem_, output)));
      };
      [[maybe_unused]] Loaded<O, V> added, next;
      if (kAhead && rows_in(chunk) > 0) next = residual(to);
#pragma unroll 1
      for (int left = rows_in(chunk); left > 0; left -= kTogether) {
        const bool both = left > 1;
        if constexpr (kAhead) {
          added = next;
          if (both) next = residual(to + tiling_.row_step_out);
        } else if constexpr (kResidual) {
          added = residual(to);
        }
        Loaded<T, V> x[kTogether];
#pragma unroll
        for (int r = 0; r < kTogether; ++r) {
          x[r] = in_row(from + (r == 0 || both ? r * tiling_.row_pitch : 0));
        }
        A z[kTogether * V];
#pragma unroll
        for (int r = 0; r < kTogether; ++r) {
#pragma unroll
          for (int j = 0; j < V; ++j) z[r * V + j] = x[r].at(j) - mean[j / kRun];
        }
        // Less than a quarter of the last place of a 16-bit result: the values of a group that is
        // not constant differ by 2^-12 of the mean, and this is below 2^-24 of it.
        if constexpr (sizeof(O) > 2) {
#pragma unroll
          for (int j = 0; j < kTogether * V; ++j) z[j] -= rest[j % V / kRun];
        }
#pragma unroll
        for (int j = 0; j < kTogether * V; ++j) {
          z[j] = multiply_add(z[j], scale[j % V], bias[j % V]);
          if constexpr (kResidual) z[j] += added.at(j);
        }
        activation.value(z);
#pragma unroll
        for (int r = 0; r < kTogether; ++r) {
          if (r > 0 && !both) break;
          Vector<O, V> y;
#pragma unroll
          for (int j = 0; j < V; ++j) y.at[j] = static_cast<O>(z[r * V + j]);
          store(reinterpret_cast<O*>(to + r * tiling_.row_step_out), y);
        }
        from += kTogether * tiling_.row_pitch;
        to += kTogether * tiling_.row_step_out;
      }
      advance(finished_slot_, 1);
      copy_next_chunk();
    }
  }

  const Forward& problem_;
  const Tiling& tiling_;
  Moments<A>* const partial_;
  unsigned char* const shared_;
  const int first_tile_, rank_;  // of this block: its first tile, and which member it is
  const int line_, column_;      // of this thread; there is work where line_ < lines
  const int count_;              // of the block's tiles
  const int rows_;               // of the slice
  int whole_chunks_, last_;      // of the slice; rows of this thread in the chunk behind them
  int group_[kRuns];             // of the tile, in which this thread's runs lie
  int sets_ = 0;                 // of copies so far
  int next_tile_ = 0, next_load_ = 0, next_slot_ = 0;  // of the next set
  const char* next_ = nullptr;                         // this thread's first vector of its tile
  int measured_slot_ = 0, finished_slot_ = 0;
};

// 64 registers: two blocks of 512 threads on a processor, or more smaller ones.
template <class T, class O, int kRun, bool kResidual>
__global__ __launch_bounds__(kTileThreads,
                             2) void normalize_tile(const __grid_constant__ Forward problem,
                                                    const __grid_constant__ Tiling tiling) {
  extern __shared__ __align__(16) unsigned char shared[];
  TileBlock<T, O, kRun, false, kResidual>(problem, tiling, nullptr, shared).run();
}

template <class T, class O, int kRun, bool kResidual>
__global__ __launch_bounds__(kTileThreads) void normalize_tiles(
    const __grid_constant__ Forward problem, const __grid_constant__ Tiling tiling,
    Pair<Accumulate<T>>* const partial) {
  extern __shared__ __align__(16) unsigned char shared[];
  TileBlock<T, O, kRun, true, kResidual>(problem, tiling, partial, shared).run();
}

// ---- chunks of rows, in three launches ----------------------------------------------------------

constexpr int kRowsInFlight = 4;  // of a thread

// A thread of the first and of the last launch: a column of vectors, through every slots-th row of
// a chunk, several of them at once.  kRun neighbouring channels lie in one vector and one group.
template <class T, int V, int kRun>
struct RowWalk : Column<V> {
  static constexpr int kRuns = V / kRun;

  using Column<V>::Column;

  // Of the group of run n among those of its sample.
  FXFUSE_INLINE int64_t group_of(const Divisor& per_group, int n) const {
    return per_group.quotient(this->channel + n * kRun);
  }

  // Calls body(rows, left): K rows as they lie in memory, of which the first `left` exist, at least
  // one, or all of them.
  template <int K, class Body>
  FXFUSE_INLINE void over_rows(const Problem& problem, Body body) const {
    const int64_t step = this->slots * problem.channels;
    const T* from =
        static_cast<const T*>(problem.input) + this->offset(problem, this->begin + this->slot);
    int left = static_cast<int>(this->rows_of(this->slot));
    for (; left > 0; left -= K) {
      Loaded<T, V> rows[K];
#pragma unroll
      for (int k = 0; k < K; ++k) {
        if (k < left) rows[k] = load<T, V>(from + k * step);
      }
      body(rows, left);
      from += K * step;
    }
  }
};

// Moments of `fold` runs in a chunk of rows, relative to the first value of their group where the
// statistics need that: (batch, chunks, channels / (kRun * fold)).
template <class T, class O, int V, int kRun>
__global__ __launch_bounds__(kThreads, row_blocks(sizeof(T), V, kRun)) void measure_row_chunks(
    const Problem problem, const ColumnTiles tiles, const Divisor per_group, const int fold,
    Moments<Accumulate<T>>* const partial) {
  using Walk = RowWalk<T, V, kRun>;
  using A = Accumulate<T>;
  constexpr int K = kRowsInFlight, kRuns = Walk::kRuns;
  constexpr bool kPivot = kHasPivot<T, O>;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const Walk walk(problem, tiles);
  __shared__ Moments<A> of_slot[kThreads * kRuns];
  if (walk.active) {
    A origins[kRuns];
    if constexpr (kPivot) {
      const T* const sample =
          static_cast<const T*>(problem.input) + walk.sample * problem.spatial * problem.channels;
#pragma unroll
      for (int n = 0; n < kRuns; ++n) {
        origins[n] = static_cast<A>(sample[walk.group_of(per_group, n) * per_group.divisor]);
      }
    }
    RunMoments<A, kRuns, kRun> running;
    walk.template over_rows<K>(problem, [&](const Loaded<T, V>(&rows)[K], int left) {
      if (left >= K) {
        running.template add<true, kPivot>(rows, K, origins);
      } else {
        running.template add<false, kPivot>(rows, left, origins);
      }
    });
#pragma unroll
    for (int n = 0; n < kRuns; ++n) of_slot[threadIdx.x * kRuns + n] = running.of[n];
  }
  // A thread for each run of the tile merges its slots, those that have rows, and leaves the result
  // where the first one was.
  __syncthreads();
  const int runs = tiles.width * kRuns, rows = static_cast<int>(walk.end - walk.begin);
  const int slots = min(tiles.slots, rows);
  // In float the rounding of the mean of a few values would show in a float32 result.
  using Wide = std::conditional_t<kPivot, double, A>;
  for (int run = threadIdx.x; run < runs; run += kThreads) {
    const Wide some = of_slot[run].mean;
    const int of_last = rows / tiles.slots, more = rows - of_last * tiles.slots;
    Wide mean = 0, m2 = 0;
#pragma unroll 4
    for (int slot = 0; slot < slots; ++slot) {
      mean += (of_slot[slot * runs + run].mean - some) * (of_last + (slot < more));
    }
    mean = mean / rows + some;
#pragma unroll 4
    for (int slot = 0; slot < slots; ++slot) {
      const Moments<A> of = of_slot[slot * runs + run];
      const Wide distance = of.mean - mean;
      m2 += of.m2 + distance * distance * ((of_last + (slot < more)) * kRun);
    }
    of_slot[run] = {static_cast<A>(mean), static_cast<A>(m2)};
  }
  __syncthreads();
  const unsigned tile = blockIdx.x % static_cast<unsigned>(tiles.count);
  const int entries = runs / fold;
  const int64_t row = problem.channels / (kRun * fold), first = int64_t(tile) * entries;
  for (int entry = threadIdx.x; entry < entries && first + entry < row; entry += kThreads) {
    const Moments<A>* const from = of_slot + entry * fold;
    Moments<A> all = {};
    for (int i = 0; i < fold; ++i) all.mean += from[i].mean - from->mean;
    all.mean = all.mean * divide(A(1), static_cast<A>(fold)) + from->mean;
    for (int i = 0; i < fold; ++i) {
      const A distance = from[i].mean - all.mean;
      all.m2 += from[i].m2 + distance * distance * (static_cast<A>(rows) * kRun);
    }
    partial[walk.part * row + first + entry] = all;
  }
}

// A team for each group.  A row of `partial` has `runs` entries for each group, of `run` channels
// each.
template <class T, class O>
__global__ __launch_bounds__(kThreads) void merge_row_chunks(
    const Forward problem, const Chunks chunks, const Divisor num_groups, const Divisor runs,
    const int run, const int lanes, const Moments<Accumulate<T>>* const partial) {
  using A = Accumulate<T>;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const Team team(lanes);
  const int64_t sample = num_groups.quotient(team.index);
  const int64_t group = team.index - sample * problem.num_groups;
  const int64_t row = problem.num_groups * runs.divisor;
  const int64_t entries = sample < problem.batch ? chunks.count * runs.divisor : 0;
  const Moments<A>* const from = partial + sample * chunks.count * row + group * runs.divisor;
  const auto over_entries = [&](auto body) {
#pragma unroll 2
    for (int64_t entry = team.rank; entry < entries; entry += team.size) {
      const int64_t chunk = runs.quotient(entry);
      const Moments<A> moments = from[chunk * row + (entry - chunk * runs.divisor)];
      const int64_t count = min(chunks.size, problem.spatial - chunk * chunks.size) * run;
      body(static_cast<double>(moments.mean), static_cast<double>(moments.m2),
           static_cast<double>(count));
    }
  };
  const double elements = static_cast<double>(problem.spatial) * (run * runs.divisor);
  double mean[1] = {}, m2[1] = {};
  const double some = entries > 0 ? static_cast<double>(from->mean) : 0;
  over_entries(
      [&](double its_mean, double, double count) { mean[0] += (its_mean - some) * count; });
  team.sum(mean);
  mean[0] = some + mean[0] / elements;
  over_entries([&](double its_mean, double its_m2, double count) {
    const double distance = its_mean - mean[0];
    m2[0] += its_m2 + distance * distance * count;
  });
  team.sum(m2);
  if (entries == 0 || team.rank > 0) return;
  const T* const first = static_cast<const T*>(problem.input) +
                         sample * problem.channels * problem.spatial + group * runs.divisor * run;
  const double pivot = kHasPivot<T, O> ? static_cast<double>(static_cast<A>(*first)) : 0;
  save(problem, team.index, round_statistics<A>(pivot, mean[0], m2[0] / elements, problem.eps));
}

// From the end, for the L2 cache still holds it.
template <class T, class O, int V, int kRun, bool kResidual>
__global__ __launch_bounds__(kThreads, row_blocks(sizeof(T), V, kRun)) void normalize_row_chunks(
    const Forward problem, const ColumnTiles tiles, const Divisor per_group) {
  using Walk = RowWalk<T, V, kRun>;
  using A = Accumulate<T>;
  // As many bytes in flight with a residual, from fewer rows.
  constexpr int kOfBoth = sizeof(T) + sizeof(O);
  constexpr int K = kResidual ? kRowsInFlight * sizeof(T) / kOfBoth : kRowsInFlight;
  constexpr int kRuns = Walk::kRuns;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const Walk walk(problem, tiles, gridDim.x - 1 - blockIdx.x);
  if (!walk.active) return;
  A scale[V], bias[V], mean[kRuns];
  [[maybe_unused]] A rest[kRuns];
  load_affine<T>(problem, walk.channel, scale, bias);
#pragma unroll
  for (int n = 0; n < kRuns; ++n) {
    const Statistics<A> of(problem.mean, problem.rstd, problem.batch * problem.num_groups,
                           walk.sample * problem.num_groups + walk.group_of(per_group, n));
    mean[n] = of.mean;
    rest[n] = of.rest;
#pragma unroll
    for (int j = n * kRun; j < (n + 1) * kRun; ++j) scale[j] *= of.rstd;
  }
  const ActivationOf<A, O> activation(problem);
  const int64_t step = walk.slots * problem.channels;
  O* to = static_cast<O*>(problem.output) + walk.offset(problem, walk.begin + walk.slot);
  walk.template over_rows<K>(problem, [&](const Loaded<T, V>(&data)[K], int left) {
    [[maybe_unused]] Loaded<O, V> added[K];
    if constexpr (kResidual) {
#pragma unroll
      for (int k = 0; k < K; ++k) {
        if (k < left) added[k] = load<O, V>(residual_of(problem, to + k * step));
      }
    }
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (k < left) {
        A z[V];
#pragma unroll
        for (int j = 0; j < V; ++j) {
          z[j] = data[k].at(j) - mean[j / kRun];
          if constexpr (kHasPivot<T, O>) z[j] -= rest[j / kRun];
          z[j] = multiply_add(z[j], scale[j], bias[j]);
          if constexpr (kResidual) z[j] += added[k].at(j);
        }
        activation.value(z);
        Vector<O, V> y;
#pragma unroll
        for (int j = 0; j < V; ++j) y.at[j] = static_cast<O>(z[j]);
        store(to + k * step, y);
      }
    }
    to += K * step;
  });
}

}  // namespace fxfuse::cuda
