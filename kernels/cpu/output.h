// The output: one pass over the input.

// Values of a block: those for which a function is called, or short rows that are done together.
// 4 KiB of float.
constexpr int64_t kBlock = 1024;

// A coefficient along a run of values: one for all of them, or one for each.
template <class A>
struct Uniform {
  Vector<A> value;
  explicit FXFUSE_INLINE Uniform(A a) : value(broadcast<Vector<A>>(a)) {}
  template <class Part>
  FXFUSE_INLINE Vector<A> at(int64_t, Part) const {
    return value;
  }
  template <class Part>
  FXFUSE_INLINE Vector<A> from(Vector<A> x, int64_t, Part) const {
    return x - value;
  }
};
template <class A>
struct Varying {
  const A* values;
  explicit FXFUSE_INLINE Varying(const A* values) : values(values) {}
  template <class Part>
  FXFUSE_INLINE Vector<A> at(int64_t i, Part part) const {
    return load(values + i, part);
  }
  template <class Part>
  FXFUSE_INLINE Vector<A> from(Vector<A> x, int64_t i, Part part) const {
    return x - at(i, part);
  }
};

// A mean with its low part.
template <class Mean>
struct Pair {
  Mean high, low;
  template <class V, class Part>
  FXFUSE_INLINE V from(V x, int64_t i, Part part) const {
    return low.from(high.from(x, i, part), i, part);
  }
};

// weight * rstd where the weight varies.
template <class A>
struct VaryingScale {
  Varying<A> weight;
  Uniform<A> rstd;
  template <class Part>
  FXFUSE_INLINE Vector<A> at(int64_t i, Part part) const {
    return weight.at(i, part) * rstd.value;
  }
};

// z = (x - mean) * scale + bias along a run, where scale is weight * rstd.  The mean is subtracted
// first: no scale and shift is computed ahead, since it would lose the digits that the two terms
// share.  Only its low part, which is no larger than what is left of the largest x, may be left to
// the bias.
template <class Mean, class Scale, class Bias>
struct Normalization {
  Mean mean;
  Scale scale;
  Bias bias;

  template <class T, class Part>
  FXFUSE_INLINE auto centre(const T* x, int64_t i, Part part) const {
    return mean.from(load(x + i, part), i, part);
  }
  template <class V, class Part>
  FXFUSE_INLINE V z(V centred, int64_t i, Part part) const {
    return centred * scale.at(i, part) + bias.at(i, part);
  }
};

// The values of row `row` from channel `c` on, in the layout kElements.
template <class A>
FXFUSE_INLINE auto of_elements(const Work<A>& work, int64_t row, int64_t c) {
  const Uniform<A> mean(work.mean[row]), mean_low(work.mean_low[row]), rstd(work.rstd[row]);
  const VaryingScale<A> scale = {Varying<A>(work.weight + c), rstd};
  return Normalization<Pair<Uniform<A>>, VaryingScale<A>, Varying<A>>{
      {mean, mean_low}, scale, Varying<A>(work.bias + c)};
}

// The run of channel `c`; the low part of the mean is in the bias.
template <class A>
FXFUSE_INLINE auto of_run(const Work<A>& work, int64_t row, int64_t c) {
  const A scale = work.rstd[row] * work.weight[c];
  return Normalization<Uniform<A>, Uniform<A>, Uniform<A>>{
      Uniform<A>(work.mean[row]), Uniform<A>(scale),
      Uniform<A>(work.bias[c] - work.mean_low[row] * scale)};
}

// Values of rows, repeated for every channel, so that a vector may cross groups.
template <class A>
FXFUSE_INLINE void repeat(const Work<A>& work, const A* of_rows, int64_t begin, int64_t end,
                          A* to) {
  const int64_t size = work.channels / work.groups;
  for (int64_t row = begin; row < end; ++row, to += size) fill(to, size, of_rows[row]);
}

// One value for each channel of a sample.
template <class A>
class PerChannel {
 public:
  PerChannel(const Work<A>& work, const A* of_rows)
      : work_(work), of_rows_(of_rows), values_(work.channels + kWidth<A>) {}

  Varying<A> of_sample(int64_t n) {
    if (n != sample_) {
      repeat(work_, of_rows_, n * work_.groups, (n + 1) * work_.groups, values_.data());
      sample_ = n;
    }
    return Varying<A>(values_.data());
  }

 private:
  const Work<A>& work_;
  const A* of_rows_;
  Buffer<A> values_;
  int64_t sample_ = -1;
};

// The pixels of a sample; the low part of the mean is in the bias.
template <class A>
class PixelNormalization {
 public:
  explicit PixelNormalization(const Work<A>& work)
      : work_(work),
        mean_(work, work.mean),
        mean_low_(work, work.mean_low),
        rstd_(work, work.rstd),
        scale_(work.channels),
        bias_(work.channels) {}

  auto of_sample(int64_t n) {
    const Varying<A> mean = mean_.of_sample(n);
    if (n != sample_) {
      const Varying<A> low = mean_low_.of_sample(n), rstd = rstd_.of_sample(n);
      for_vectors<A>(work_.channels, [&](int64_t c, auto part) __attribute__((always_inline)) {
        const auto scale = load(work_.weight + c, part) * rstd.at(c, part);
        store(scale_.data() + c, scale, part);
        store(bias_.data() + c, load(work_.bias + c, part) - low.at(c, part) * scale, part);
      });
      sample_ = n;
    }
    return Normalization<Varying<A>, Varying<A>, Varying<A>>{mean, Varying<A>(scale_.data()),
                                                             Varying<A>(bias_.data())};
  }

 private:
  const Work<A>& work_;
  PerChannel<A> mean_, mean_low_, rstd_;
  Buffer<A> scale_, bias_;
  int64_t sample_ = -1;
};

// Rows of the layout kElements that are shorter than a vector: some of them as one run, which may
// go through samples.
template <class A>
class ShortRows {
 public:
  explicit ShortRows(const Work<A>& work) : work_(work), size_(work.channels / work.groups) {}

  int64_t at_a_time() const { return kBlock / size_; }

  // Calls f(i, c, n) for the parts of the run [begin, end) that lie in one sample: its values
  // [i, i + n) are those of the channels from c on.
  template <class F>
  FXFUSE_INLINE void for_samples(int64_t begin, int64_t end, F f) const {
    const int64_t length = (end - begin) * size_;
    int64_t c = begin % work_.groups * size_;
    for (int64_t i = 0, n; i < length; i += n, c = 0) {
      n = min(work_.channels - c, length - i);
      f(i, c, n);
    }
  }

  auto normalization(int64_t begin, int64_t end) {
    repeat(work_, work_.mean, begin, end, mean_);
    repeat(work_, work_.mean_low, begin, end, mean_low_);
    repeat(work_, work_.rstd, begin, end, rstd_);
    for_samples(begin, end, [this](int64_t i, int64_t c, int64_t n) {
      for_vectors<A>(n, [&](int64_t k, auto part) __attribute__((always_inline)) {
        const auto weight = load(work_.weight + c + k, part);
        store(scale_ + i + k, weight * load(rstd_ + i + k, part), part);
        store(bias_ + i + k, load(work_.bias + c + k, part), part);
      });
    });
    return Normalization<Pair<Varying<A>>, Varying<A>, Varying<A>>{
        {Varying<A>(mean_), Varying<A>(mean_low_)}, Varying<A>(scale_), Varying<A>(bias_)};
  }
  Varying<A> rstd() const { return Varying<A>(rstd_); }  // of the last normalization

 private:
  static constexpr int64_t kRoom = kBlock + kWidth<A>;  // whole vectors are stored
  const Work<A>& work_;
  int64_t size_;
  alignas(64) A mean_[kRoom], mean_low_[kRoom], rstd_[kRoom], scale_[kRoom], bias_[kRoom];
};

// ---- Activations -------------------------------------------------------------------------------

// What the activation of values of type T is computed in.
template <class T>
using Precision = std::conditional_t<sizeof(T) == 2, Coarse, Vector<Accumulate<T>>>;

template <class T, class Activation>
void value_of(const Accumulate<T>* z, void* y, int64_t n, const double* params) {
  const Activation activation(params);
  for_vectors<Accumulate<T>>(n, [=](int64_t i, auto part) __attribute__((always_inline)) {
    store(static_cast<T*>(y) + i, activation.value(load(z + i, part)), part);
  });
}

template <class T, class Activation>
void grad_of(const Accumulate<T>* z, const void* input, const void* dy, Accumulate<T>* dz,
             void* kept, int64_t n, const double* params) {
  const Activation activation(params);
  for_vectors<Accumulate<T>>(n, [=](int64_t i, auto part) __attribute__((always_inline)) {
    // Of the next block: the memory bus would be idle here.  64x2048x7x7 and 2x320x64x64 on two
    // threads: 2 to 14 % faster in 16 bits, 10 to 18 % in float and double (EPYC, Zen 5,
    // 2026-11-30).
    __builtin_prefetch(static_cast<const T*>(input) + kBlock + i);
    __builtin_prefetch(static_cast<const T*>(dy) + kBlock + i);
    const Vector<Accumulate<T>> v =
        activation.grad(load(z + i, part), load(static_cast<const T*>(dy) + i, part));
    store(dz + i, v, part);
    if (!std::is_same_v<T, Accumulate<T>>) store(static_cast<T*>(kept) + i, v, part);
  });
}

// What writes the runs of the output, which come in the order of memory without a gap.
template <class T, class Activation>
class InlinedOutput {
 public:
  explicit InlinedOutput(const Work<Accumulate<T>>& work) : activation_(work.params) {}

  template <class Normalization>
  FXFUSE_INLINE void run(const T* x, T* y, int64_t length, Normalization normalization) {
    write_run(y, length,
              [=, activation = activation_](int64_t i, auto part) __attribute__((always_inline)) {
                return activation.value(normalization.z(normalization.centre(x, i, part), i, part));
              });
  }
  void finish() {}

 private:
  Activation activation_;
};

// Collects the z of runs of any length, so that short ones share a call.
template <class T>
class CalledOutput {
  using A = Accumulate<T>;

 public:
  explicit CalledOutput(const Work<A>& work) : work_(work) {}

  template <class Normalization>
  FXFUSE_INLINE void run(const T* x, T* y, int64_t length, Normalization normalization) {
    for (int64_t start = 0; start < length;) {
      if (count_ == kBlock) finish();
      if (count_ == 0) y_ = y + start;
      const int64_t n = min(length - start, kBlock - count_);
      A* z = z_ + count_;
      for_vectors<A>(n, [=](int64_t i, auto part) __attribute__((always_inline)) {
        const auto centred = normalization.centre(x, start + i, part);
        store(z + i, normalization.z(centred, start + i, part));
      });
      count_ += n;
      start += n;
    }
  }

  void finish() {
    work_.function->value(z_, y_, count_, work_.params);
    count_ = 0;
  }

 private:
  const Work<A>& work_;
  T* y_ = nullptr;
  int64_t count_ = 0;
  alignas(64) A z_[kBlock + kWidth<A>];  // whole vectors are stored
};

// ---- Layouts -----------------------------------------------------------------------------------

template <class T, class Output>
void output_of_pixels(const Work<Accumulate<T>>& work, int64_t begin, int64_t end) {
  Output out(work);
  PixelNormalization<Accumulate<T>> normalizations(work);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t n = item / work.chunks, start = item % work.chunks * work.chunk;
    const auto normalization = normalizations.of_sample(n);
    for (int64_t i = start; i < min(start + work.chunk, work.spatial); ++i) {
      const int64_t offset = (n * work.spatial + i) * work.channels;
      out.run(static_cast<const T*>(work.input) + offset, static_cast<T*>(work.output) + offset,
              work.channels, normalization);
    }
  }
  out.finish();
}

template <class T, class Output>
void output_of_short_rows(const Work<Accumulate<T>>& work, int64_t begin, int64_t end) {
  const int64_t size = work.channels / work.groups;
  Output out(work);
  ShortRows<Accumulate<T>> rows(work);
  for (int64_t row = begin; row < end; row += rows.at_a_time()) {
    const int64_t stop = min(row + rows.at_a_time(), end);
    out.run(static_cast<const T*>(work.input) + row * size,
            static_cast<T*>(work.output) + row * size, (stop - row) * size,
            rows.normalization(row, stop));
    out.finish();  // before the normalization changes
  }
}

template <class T, class Output>
void output(const Work<Accumulate<T>>& work, int64_t begin, int64_t end) {
  if (work.layout == Layout::kPixels) return output_of_pixels<T, Output>(work, begin, end);
  const int64_t size = work.channels / work.groups, spatial = work.spatial;
  if (work.layout == Layout::kElements && size < kWidth<Accumulate<T>>) {
    return output_of_short_rows<T, Output>(work, begin, end);
  }
  Output out(work);
  Counter chunk(begin, work.chunks), group(chunk.outer, work.groups);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t row = chunk.outer, first = group.inner * size;  // channel
    const int64_t start = chunk.inner * work.chunk, stop = min(start + work.chunk, work.extent);
    const T* x = static_cast<const T*>(work.input) + row * work.extent;
    T* y = static_cast<T*>(work.output) + row * work.extent;
    if (work.layout == Layout::kElements) {
      out.run(x + start, y + start, stop - start, of_elements(work, row, first + start));
    } else {
      int64_t c = start / spatial;
      for (int64_t i = start; i < stop; ++c) {
        const int64_t length = min((c + 1) * spatial, stop) - i;
        out.run(x + i, y + i, length, of_run(work, row, first + c));
        i += length;
      }
    }
    chunk.next();
    if (chunk.inner == 0) group.next();
  }
  out.finish();
}
