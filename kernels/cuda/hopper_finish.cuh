// What happens to 64 x 256 sums of products in the registers of four warps: statistics of each
// group, normalisation, weight and bias, the activation, the output.
//
// Which sums a thread holds.  The chip gives lane 4 g + q of warp w the rows 16 w + g and 8 further
// down, and of each 8 columns the two from 2 q on.  The rows of the Linear's weight, which are the
// columns here, are copied in another order (Columns::place): so of each 32 columns, or 16 where
// the output is float, the lane holds the 8 (4) neighbours from 8 q (4 q) on.  It reads parameters
// and writes the output out of its registers, 16 bytes at a time, and the four lanes of a row 64
// neighbouring ones.
//
// Statistics.  One pass over d = z - p, where the pivot p is an element of the group itself: (p -
// mean)^2 is at most n - 1 variances, so that sum(d^2) - sum(d)^2 / n loses at most a factor n,
// here 256, of float's precision, however large the mean.  A group of 512 columns lies in two
// blocks, which send each other mean and sum of squares (st.async: a barrier of the cluster would
// have to flush all memory) and combine them by Chan's formula.
#pragma once
#include "hopper.cuh"
#include "linear_plan.h"

namespace fxfuse::cuda {

// ---- columns ------------------------------------------------------------------------------------

template <class O>
struct Columns {
  static constexpr int kOwn = 16 / sizeof(O);  // neighbours of a lane
  static constexpr int kSpan = 4 * kOwn;       // of the lanes of a row
  static constexpr int kSpans = kTileColumns / kSpan;

  // Where among the rows of W in shared memory a column of the tile lies.
  FXFUSE_EVERYWHERE static constexpr int place(int column) {
    const int lane = column % kSpan / kOwn, pair = column % kOwn / 2;
    return column / kSpan * kSpan + 8 * pair + 2 * lane + column % 2;
  }
  // Of the sum in row 8 r, column j of the lane's neighbours of a span.
  FXFUSE_EVERYWHERE static constexpr int index(int span, int r, int j) {
    return span * (kSpan / 2) + j / 2 * 4 + 2 * r + j % 2;
  }
};

// ---- the activation -----------------------------------------------------------------------------

FXFUSE_INLINE float2 bounds_of(const Problem& p) {
  const float infinity = __int_as_float(0x7f800000);
  if (p.activation == kIdentity) return {-infinity, infinity};
  if (p.activation == kReLU) return {0, infinity};
  return {static_cast<float>(p.params[0]), static_cast<float>(p.params[1])};
}

template <class T>
struct PairOf;
template <>
struct PairOf<__nv_bfloat16> {
  using type = __nv_bfloat162;
  static FXFUSE_INLINE type of(float a, float b) { return __floats2bfloat162_rn(a, b); }
};
template <>
struct PairOf<__half> {
  using type = __half2;
  static FXFUSE_INLINE type of(float a, float b) { return __floats2half2_rn(a, b); }
};

// Up to two bounds, applied to two neighbours, and the words that these are written as.  In 16 bits
// to the rounded values: rounding is monotonous, and bounds are values of the type, so it is the
// same.
template <class O>
struct Bounds {
  using Two = typename PairOf<O>::type;
  Two low, high;

  FXFUSE_INLINE explicit Bounds(const Problem& p) {
    const float2 bounds = bounds_of(p);
    low = PairOf<O>::of(bounds.x, bounds.x);
    high = PairOf<O>::of(bounds.y, bounds.y);
  }
  FXFUSE_INLINE void apply(float a, float b, uint32_t* words) const {
    const Two bounded = __hmin2_nan(__hmax2_nan(PairOf<O>::of(a, b), low), high);
    memcpy(words, &bounded, sizeof(bounded));
  }
};
template <>
struct Bounds<float> {
  float2 bounds;

  FXFUSE_INLINE explicit Bounds(const Problem& p) : bounds(bounds_of(p)) {}
  FXFUSE_INLINE void apply(float a, float b, uint32_t* words) const {
    words[0] = __float_as_uint(smaller(larger(a, bounds.x), bounds.y));
    words[1] = __float_as_uint(smaller(larger(b, bounds.x), bounds.y));
  }
};

// ---- parameters ---------------------------------------------------------------------------------

// What the sums of the V columns from `channel` on begin with: the Linear's bias.  Of floats, that
// of their group's first column is taken off, which a norm does not see: a large one would cost the
// sums digits with every product, of which the two operators, that add it last, lose none.  Those
// of 16 bits round the Linear's result, and lose more.
template <class T, int kGroup, int V>
FXFUSE_INLINE Loaded<T, V> load_linear_bias(const LinearForward& p, int channel, int first) {
  Loaded<T, V> bias = {};
  // Pairs of tiles with one group have all their columns.
  if (p.linear_bias == nullptr || (kGroup <= kTileColumns && channel >= p.channels)) return bias;
  const T* const from = static_cast<const T*>(p.linear_bias);
  bias = load<T, V>(from + channel);
  if constexpr (sizeof(T) == 4) {
    Vector<T, V> values;
    memcpy(&values, &bias, sizeof(bias));
    const T taken_off = from[first];
#pragma unroll
    for (T& value : values.at) value -= taken_off;
    memcpy(&bias, &values, sizeof(bias));
  }
  return bias;
}

// The sums of a lane in one span of columns.
template <class O, class T>
FXFUSE_INLINE void begin_with(float (&c)[kSums], int span,
                              const Loaded<T, Columns<O>::kOwn>& bias) {
#pragma unroll
  for (int j = 0; j < Columns<O>::kOwn; ++j) {
    c[Columns<O>::index(span, 0, j)] = c[Columns<O>::index(span, 1, j)] = bias.at(j);
  }
}

// Weight and bias of a block's 256 columns in shared memory, in the output's type: 16-bit ones
// would take less work in float, but twice the reads of a memory that is busy with the operands of
// the products (1.12 instead of 1.10 times the bare product at K = 1024; H200, 2026-11-30).  kAhead
// is how many vectors of each are read ahead of their use.
template <class O, int kAhead_>
struct StagedAffine {
  static constexpr int kAhead = kAhead_;
  const O *weight, *bias;

  using Own = Loaded<O, Columns<O>::kOwn>;
  struct Values {
    Own weight, bias;
  };
  // Where it stands in the code, or the compiler would put it behind the output of the vector
  // before.
  static FXFUSE_INLINE Own load_now(const O* from) {
    uint4 words;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "r"(shared_address(from)));
    Own result;
    memcpy(&result, &words, sizeof(result));
    return result;
  }
  FXFUSE_INLINE Values load(int column) const {
    return {load_now(weight + column), load_now(bias + column)};
  }
};

// The same of an output of floats in device memory, where shared memory has no room for them.
template <class T>
struct DistantAffine {
  static constexpr int kAhead = 0;
  const LinearForward& p;
  int first;  // column of the block

  struct Four {
    float values[4];
    FXFUSE_INLINE float at(int j) const { return values[j]; }
  };
  struct Values {
    Four weight, bias;
  };
  FXFUSE_INLINE Values load(int column) const {
    Values v;
    if (first + column < p.channels) {
      load_affine<T, 4>(p, first + column, v.weight.values, v.bias.values);
    }
    return v;
  }
  // Ahead of the first use, which would wait for each of them in turn.
  FXFUSE_INLINE void prefetch() const {
    const int bytes = affine_is_wide(p) ? 4 : sizeof(T), column = threadIdx.x % 32 * 8;
    const void* from = threadIdx.x < 32 ? p.weight : p.bias;
    if (threadIdx.x < 64 && from != nullptr && first + column < p.channels) {
      const char* address = static_cast<const char*>(from) + (first + column) * bytes;
      asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
    }
  }
};

// ---- statistics ---------------------------------------------------------------------------------

// Of one group in the lane's two rows: mean is that of z - pivot, squares the sum of squared
// deviations from it.
struct Moments {
  float pivot[2], mean[2], squares[2];
};

// Of the columns of kBlocks times 32 from number `first` on.  Takes the pivot off their sums.
template <int kBlocks>
FXFUSE_INLINE Moments take_moments(float (&c)[kSums], int first) {
  Moments m;
  float sum[2], squares[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    m.pivot[r] = __shfl_sync(~0u, c[first * 16 + 2 * r], threadIdx.x & 28);
    float s[4] = {}, q[4] = {};
#pragma unroll
    for (int k = 0; k < kBlocks * 4; ++k) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& z = c[(first * 4 + k) * 4 + 2 * r + j];
        const int n = k % 2 * 2 + j;
        z -= m.pivot[r];
        s[n] += z;
        q[n] = fmaf(z, z, q[n]);
      }
    }
    sum[r] = (s[0] + s[1]) + (s[2] + s[3]);
    squares[r] = (q[0] + q[1]) + (q[2] + q[3]);
  }
  sum_over_lanes(sum, 4);
  sum_over_lanes(squares, 4);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    m.mean[r] = sum[r] * (1.f / (32 * kBlocks));
    m.squares[r] = fmaf(-sum[r], m.mean[r], squares[r]);
  }
  return m;
}

// Half of a group: what the block of the other half sends.
struct Half {
  float mean, squares;
};

// The exchange of four warps with those that have the same rows in the other block of the cluster.
// A barrier's plain wait is enough: who has waited for bytes that it counts sees them.
struct Exchange {
  Half* received;       // of 64 rows, in this block
  SharedBarrier* sent;  // that counts their bytes
  int parity, other;    // of its phase; the other block

  FXFUSE_INLINE static int row() { return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4; }

  FXFUSE_INLINE void send(const Moments& m) const {
    if (threadIdx.x % 128 == 0) sent->arrive_and_expect(64 * sizeof(Half));
    const int lane = threadIdx.x % 4, r = lane % 2;
    const Half own = {r == 0 ? m.pivot[0] + m.mean[0] : m.pivot[1] + m.mean[1],
                      r == 0 ? m.squares[0] : m.squares[1]};
    if (lane < 2) send_to_block(other, received + row() + 8 * r, sent, own);
  }
  FXFUSE_INLINE Half receive(int r) const {
    Half half;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(half.mean), "=f"(half.squares)
                 : "r"(shared_address(received + row() + 8 * r))
                 : "memory");
    return half;
  }
};

// ---- the rest -----------------------------------------------------------------------------------

// The output of a lane in one span.  In order with what is read ahead, where something is.
template <bool kOrdered, class O>
FXFUSE_INLINE void write(O* output, const uint32_t (&words)[4]) {
  const uint4 vector = make_uint4(words[0], words[1], words[2], words[3]);
  if constexpr (kOrdered) {
    __stwb(reinterpret_cast<uint4*>(output), vector);
  } else {
    *reinterpret_cast<uint4*>(output) = vector;
  }
}

// Rows `row` and row + 8 of the lane, of the 256 columns from `column` on.  `exchanged` is called
// by every thread once it has read what the other block sent, where a group is 512 columns.
template <class O, int kGroup, class Affine, class Exchanged>
FXFUSE_INLINE void finish(float (&c)[kSums], const LinearForward& p, const Affine& affine, int row,
                          int column, const Exchange& exchange, Exchanged exchanged) {
  using C = Columns<O>;
  constexpr int kBlocks = kGroup < 256 ? kGroup / 32 : 8;             // of 32 columns, of a group
  constexpr int kGroups = 8 / kBlocks, kSpans = C::kSpans / kGroups;  // of the tile; of a group
  // The scale and shift of a few groups at a time, or, where registers are few, of one.
  constexpr int kAtOnce = Affine::kAhead == 0 ? 1 : kGroups < 4 ? kGroups : 4;
  constexpr int kAhead = Affine::kAhead > 0 ? Affine::kAhead : 1;
  const float eps = static_cast<float>(p.eps);
  const int own = threadIdx.x % 4 * C::kOwn;
  const bool has_row = row < p.batch, has_row_below = row + 8 < p.batch;
#pragma unroll
  for (int first = 0; first < kGroups; first += kAtOnce) {
    float scale[kAtOnce][2], shift[kAtOnce][2];
    typename Affine::Values ahead[kAhead];
    const auto read_ahead = [&] {
#pragma unroll
      for (int n = 0; n < Affine::kAhead; ++n) {
        ahead[n] = affine.load(C::kSpan * (first * kSpans + n) + own);
      }
    };
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const Moments m = take_moments<kBlocks>(c, (first + n) * kBlocks);
      if constexpr (kGroup > 256) {
        exchange.send(m);
        read_ahead();
        exchange.sent->wait(exchange.parity);
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float squares = m.squares[r], off = m.mean[r];  // of the mean from the pivot
        if constexpr (kGroup > 256) {
          const Half other = exchange.receive(r);
          const float half = 0.5f * ((m.pivot[r] + m.mean[r]) - other.mean);
          squares = larger(squares + other.squares, 0.f) + half * half * kGroup;
          off -= half;
        }
        scale[n][r] = rsqrtf(larger(squares, 0.f) * (1.f / kGroup) + eps);
        shift[n][r] = -off * scale[n][r];
      }
      if constexpr (kGroup > 256) exchanged();
    }
    if constexpr (kGroup <= 256) read_ahead();
    const Bounds<O> bounds(p);
    O* const output = static_cast<O*>(p.output) + (row * p.channels + column + own);
    O* const below = output + 8 * p.channels;
    [[maybe_unused]] const int left = static_cast<int>(p.channels) - column;
#pragma unroll
    for (int k = 0; k < kAtOnce * kSpans; ++k) {
      const int span = first * kSpans + k, n = k / kSpans;
      const auto of = Affine::kAhead > 0 ? ahead[k % kAhead] : affine.load(C::kSpan * span + own);
      uint32_t words[2][4];
#pragma unroll
      for (int j = 0; j < C::kOwn; j += 2) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float z[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float x = fmaf(c[C::index(span, r, j + i)], scale[n][r], shift[n][r]);
            z[i] = fmaf(x, of.weight.at(j + i), of.bias.at(j + i));
          }
          bounds.apply(z[0], z[1], &words[r][j * sizeof(O) / 4]);
        }
      }
      if (Affine::kAhead > 0 && k + Affine::kAhead < kAtOnce * kSpans) {
        ahead[k % kAhead] = affine.load(C::kSpan * (span + Affine::kAhead) + own);
      }
      constexpr bool kOrdered = Affine::kAhead > 0;
      if (kGroup < 256 && C::kSpan * span >= left) continue;
      if (has_row) write<kOrdered>(output + C::kSpan * span, words[0]);
      if (has_row_below) write<kOrdered>(below + C::kSpan * span, words[1]);
    }
  }
}

}  // namespace fxfuse::cuda
