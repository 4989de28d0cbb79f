// Mean and rstd of each row.
//
// A chunk of a row is read twice, the second time from L1: once for its mean m in the accumulate
// type, then for d = sum (x - m) and q = sum (x - m)^2, from which the mean is m + d / n and the
// sum of squared differences q - d^2 / n (Chan, Golub and LeVeque 1983, "corrected two-pass").
// Chunks are combined in order, in double, so that the result depends on the shape only.  No type
// is wider than double: for it means are kept relative to the first value of the row, or a spread
// far below the mean would lose its digits.

// Bytes that the first pass fetches ahead.  The passes that follow run from cache and leave the
// memory bus idle.  1024x8192 float on one thread: 1.5 copies without, 1.2 to 1.3 with; 1, 2 and
// 4 KiB are alike (Sapphire Rapids, 2026-11-30).
constexpr int kAhead = 2048;

// The mean is relative to `pivot`.  `inverse` is 1 / n: callers with many chunks of one length
// divide once.
template <class T>
FXFUSE_INLINE Moments chunk_moments(const T* x, int64_t n, double inverse, double pivot) {
  using A = Accumulate<T>;
  using V = Vector<A>;
  constexpr int64_t w = kWidth<A>;
  V sum[4] = {};
  int64_t i = 0;
  for (; i + 4 * w <= n; i += 4 * w) {
    FXFUSE_UNROLL
    for (int64_t line = 0; line < 4 * w * int64_t{sizeof(T)}; line += 64) {
      __builtin_prefetch(reinterpret_cast<const char*>(x + i) + kAhead + line);
    }
    FXFUSE_UNROLL
    for (int j = 0; j < 4; ++j) sum[j] += load(x + i + j * w);
  }
  for_vectors<A>(n - i, [&](int64_t k, auto part)
                            __attribute__((always_inline)) { sum[0] += load(x + i + k, part); });
  const A m = static_cast<A>(sum_lanes<A>((sum[0] + sum[1]) + (sum[2] + sum[3])) * inverse);

  V difference[4] = {}, square[4] = {};
  auto add = [&](V v, int j) __attribute__((always_inline)) {
    difference[j] += v;
    square[j] += v * v;
  };
  for (i = 0; i + 4 * w <= n; i += 4 * w) {
    FXFUSE_UNROLL
    for (int j = 0; j < 4; ++j) add(load(x + i + j * w) - m, j);
  }
  for_vectors<A>(n - i, [&](int64_t k, auto part) __attribute__((always_inline)) {
    add(keep<A>(load(x + i + k, part) - m, part), 0);
  });
  const double d = sum_lanes<A>((difference[0] + difference[1]) + (difference[2] + difference[3]));
  const double q = sum_lanes<A>((square[0] + square[1]) + (square[2] + square[3]));
  return {(m - pivot) + d * inverse, q - d * d * inverse};
}

// Adds the next chunk to what was combined so far, from which `count` values came.
FXFUSE_INLINE void add_chunk(Moments* total, double count, Moments chunk, double chunk_count) {
  const double delta = chunk.mean - total->mean, share = chunk_count / (count + chunk_count);
  total->mean += delta * share;
  total->m2 += chunk.m2 + delta * delta * (count * share);
}

// What the means of a row are relative to: its first value, in double.
FXFUSE_INLINE double row_pivot(const Work<float>&, int64_t) { return 0; }
FXFUSE_INLINE double row_pivot(const Work<double>& work, int64_t row) {
  const int64_t size = work.channels / work.groups;
  const int64_t first =
      work.layout == Layout::kPixels
          ? row / work.groups * work.spatial * work.channels + row % work.groups * size
          : row * size * work.spatial;
  return static_cast<const double*>(work.input)[first];
}

// 1 / sqrt(value) for an rstd of type A.  Of a double, one step of Newton's takes off most of what
// the root and the quotient are rounded by: it is off by more than half an ulp once in sixty times.
template <class A>
FXFUSE_INLINE A reciprocal_root(double value) {
  if constexpr (sizeof(A) < sizeof(double)) return static_cast<A>(1 / __builtin_sqrt(value));
  const double root = 1 / __builtin_sqrt(value), square = root * root;
  const double lost = __builtin_fma(root, root, -square);
  const double rest = __builtin_fma(-value, square, 1.0) - value * lost;
  return rest - rest == 0 ? __builtin_fma(0.5 * root, rest, root) : root;  // root: infinite, NaN
}

// The mean is pivot + difference.
template <class A>
FXFUSE_INLINE void save_statistics(const Work<A>& work, int64_t row, double pivot,
                                   double difference, double variance) {
  if (variance < 0) variance = 0;  // by rounding; false for NaN
  // What the addition loses (Knuth's two-sum) belongs to the low part.
  const double mean = pivot + difference, added = mean - pivot;
  const double lost = (pivot - (mean - added)) + (difference - added);
  const A high = static_cast<A>(mean), low = static_cast<A>((mean - high) + lost);
  work.mean[row] = high;
  work.mean_low[row] = low - low == 0 ? low : 0;  // NaN where the mean is infinite
  work.rstd[row] = reciprocal_root<A>(variance + work.eps);
}

// Rows of at most this many values are done kWidth at a time, for the sake of the sums over lanes:
// of one row after the other they take longer than all the rest.
constexpr int64_t kShortRow = 128;

template <class T>
void statistics_of_short_rows(const Work<Accumulate<T>>& work, int64_t begin, int64_t end) {
  using A = Accumulate<T>;
  using V = Vector<A>;
  constexpr int64_t w = kWidth<A>;
  const int64_t size = work.channels / work.groups * work.spatial;
  const double inverse_size = 1. / size;
  for (int64_t start = begin; start < end; start += w) {
    const int64_t last = min(end - start, w) - 1;  // stands for those that are missing
    const T* x = static_cast<const T*>(work.input) + start * size;
    V sum[w], square[w];
    for (int64_t r = 0; r < w; ++r) {
      V s = {};
      for_vectors<A>(size, [&, row = x + min(r, last) * size](int64_t i, auto part)
                               __attribute__((always_inline)) { s += load(row + i, part); });
      sum[r] = s;
    }
    const V means = sum_rows<A>(sum) * static_cast<A>(inverse_size);
    alignas(64) A mean[w], d[w], q[w];
    store(mean, means);
    for (int64_t r = 0; r < w; ++r) {
      V difference = {}, squares = {};
      for_vectors<A>(size, [&, row = x + min(r, last) * size](int64_t i, auto part)
                               __attribute__((always_inline)) {
                                 const V v = keep<A>(load(row + i, part) - mean[r], part);
                                 difference += v;
                                 squares += v * v;
                               });
      sum[r] = difference;
      square[r] = squares;
    }
    store(d, sum_rows<A>(sum));
    store(q, sum_rows<A>(square));
    for (int64_t r = 0; r <= last; ++r) {
      const double pivot = row_pivot(work, start + r), lost = d[r];
      save_statistics(work, start + r, pivot, (mean[r] - pivot) + lost * inverse_size,
                      (q[r] - lost * lost * inverse_size) * inverse_size);
    }
  }
}

template <class T>
void statistics(const Work<Accumulate<T>>& work, int64_t begin, int64_t end) {
  const int64_t size = work.channels / work.groups * work.spatial, first = min(size, kChunk);
  if (size <= kShortRow) return statistics_of_short_rows<T>(work, begin, end);
  const double inverse_first = 1. / first, inverse_size = 1. / size;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(work.input) + row * size;
    const double pivot = row_pivot(work, row);
    Moments total = chunk_moments(x, first, inverse_first, pivot);
    for (int64_t start = first; start < size; start += kChunk) {
      const int64_t count = min(kChunk, size - start);
      add_chunk(&total, start, chunk_moments(x + start, count, 1. / count, pivot), count);
    }
    save_statistics(work, row, pivot, total.mean, total.m2 * inverse_size);
  }
}

template <class A>
void combine(const Work<A>& work, int64_t begin, int64_t end) {
  const int64_t size = work.channels / work.groups * work.spatial;
  const int64_t unit = size / work.extent;  // values of a row in one step along the extent
  for (int64_t row = begin; row < end; ++row) {
    const Moments* chunks = work.moments + row * work.chunks;
    Moments total = chunks[0];
    for (int64_t k = 1; k < work.chunks; ++k) {
      const int64_t start = k * work.chunk, count = min(work.chunk, work.extent - start);
      add_chunk(&total, start * unit, chunks[k], count * unit);
    }
    save_statistics(work, row, row_pivot(work, row), total.mean, total.m2 * (1. / size));
  }
}

// Calls f(c, vectors, part) for the channels from c on: for four neighbouring vectors at a time,
// then for the rest one at a time.
template <class A, class F>
FXFUSE_INLINE void for_columns(int64_t channels, F f) {
  constexpr int64_t w = kWidth<A>;
  int64_t c = 0;
  for (; c + 4 * w <= channels; c += 4 * w) f(c, std::integral_constant<int, 4>{}, Whole{});
  for_vectors<A>(channels - c, [&](int64_t i, auto part) __attribute__((always_inline)) {
    f(c + i, std::integral_constant<int, 1>{}, part);
  });
}

template <class A>
FXFUSE_INLINE A sum_values(const A* values, int64_t n) {
  Vector<A> sum = {};
  for_vectors<A>(n, [&](int64_t i, auto part)
                        __attribute__((always_inline)) { sum += load(values + i, part); });
  return sum_lanes<A>(sum);
}

// The two passes of chunk_moments, down kVectors neighbouring vectors of channels, the first at
// channel c: `part` is of the last one.
template <int kVectors, class T, class Part>
FXFUSE_INLINE void column_sums(const T* x, int64_t pixels, int64_t channels, int64_t c, Part part,
                               Accumulate<T>* sum) {
  using A = Accumulate<T>;
  constexpr int64_t w = kWidth<A>;
  Vector<A> sums[kVectors] = {};
  for (int64_t i = 0; i < pixels; ++i) {
    FXFUSE_UNROLL
    for (int j = 0; j < kVectors; ++j) sums[j] += load(x + i * channels + c + j * w, part);
  }
  FXFUSE_UNROLL
  for (int j = 0; j < kVectors; ++j) store(sum + c + j * w, sums[j], part);
}

template <int kVectors, class T, class Part>
FXFUSE_INLINE void column_moments(const T* x, int64_t pixels, int64_t channels, int64_t c,
                                  Part part, const Accumulate<T>* mean, Accumulate<T>* difference,
                                  Accumulate<T>* square) {
  using A = Accumulate<T>;
  constexpr int64_t w = kWidth<A>;
  Vector<A> means[kVectors], differences[kVectors] = {}, squares[kVectors] = {};
  FXFUSE_UNROLL
  for (int j = 0; j < kVectors; ++j) means[j] = load(mean + c + j * w, part);
  for (int64_t i = 0; i < pixels; ++i) {
    FXFUSE_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      const Vector<A> v = load(x + i * channels + c + j * w, part) - means[j];
      differences[j] += v;
      squares[j] += v * v;
    }
  }
  FXFUSE_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    store(difference + c + j * w, differences[j], part);
    store(square + c + j * w, squares[j], part);
  }
}

template <class T>
void moments_of_pixels(const Work<Accumulate<T>>& work, int64_t begin, int64_t end) {
  using A = Accumulate<T>;
  const int64_t channels = work.channels, size = channels / work.groups;
  // Of each channel; the mean is that of its group.
  const Buffer<A> sum(channels), square(channels), mean(channels + kWidth<A>);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t n = item / work.chunks, k = item % work.chunks, start = k * work.chunk;
    const int64_t pixels = min(work.chunk, work.spatial - start);
    const T* x = static_cast<const T*>(work.input) + (n * work.spatial + start) * channels;
    const double inverse = 1. / (size * pixels);
    for_columns<A>(channels,
                   [&](int64_t c, auto vectors, auto part) __attribute__((always_inline)) {
                     column_sums<vectors>(x, pixels, channels, c, part, sum.data());
                   });
    for (int64_t c = 0; c < channels; c += size) {
      fill(mean.data() + c, size, static_cast<A>(sum_values(sum.data() + c, size) * inverse));
    }
    for_columns<A>(channels, [&](int64_t c, auto vectors,
                                 auto part) __attribute__((always_inline)) {
      column_moments<vectors>(x, pixels, channels, c, part, mean.data(), sum.data(), square.data());
    });
    for (int64_t g = 0; g < work.groups; ++g) {
      const int64_t row = n * work.groups + g, c = g * size;
      const double d = sum_values(sum.data() + c, size), q = sum_values(square.data() + c, size);
      work.moments[row * work.chunks + k] = {(mean[c] - row_pivot(work, row)) + d * inverse,
                                             q - d * d * inverse};
    }
  }
}

template <class T>
void moments(const Work<Accumulate<T>>& work, int64_t begin, int64_t end) {
  if (work.layout == Layout::kPixels) return moments_of_pixels<T>(work, begin, end);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t row = item / work.chunks, start = item % work.chunks * work.chunk;
    const int64_t count = min(work.chunk, work.extent - start);
    const T* x = static_cast<const T*>(work.input) + row * work.extent + start;
    work.moments[item] = chunk_moments(x, count, 1. / count, row_pivot(work, row));
  }
}
