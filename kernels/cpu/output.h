// The output: one pass over the input.

// A coefficient along a run of values: one for all of them, or one for each.
template <class A>
struct Uniform {
  Vector<A> value;
  explicit FXFUSE_INLINE Uniform(A a) : value(broadcast<Vector<A>>(a)) {}
  template <class Part>
  FXFUSE_INLINE Vector<A> at(int64_t, Part) const {
    return value;
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
};

// The normalisation of a run.  The mean is subtracted first: no scale and shift is computed ahead,
// since it would lose the digits that the two terms share.
template <class A, template <class> class Statistic, template <class> class Affine>
struct Normalization {
  Statistic<A> mean, mean_low, rstd;
  Affine<A> weight, bias;

  template <class T, class Part>
  FXFUSE_INLINE Vector<A> x_hat(const T* x, int64_t i, Part part) const {
    return ((load(x + i, part) - mean.at(i, part)) - mean_low.at(i, part)) * rstd.at(i, part);
  }
  template <class Part>
  FXFUSE_INLINE Vector<A> z(Vector<A> x_hat, int64_t i, Part part) const {
    return x_hat * weight.at(i, part) + bias.at(i, part);
  }
};

// The values of row `row` from channel `c` on, in the layout kElements.
template <class A>
FXFUSE_INLINE Normalization<A, Uniform, Varying> of_elements(const Work<A>& work, int64_t row,
                                                             int64_t c) {
  return {Uniform<A>(work.mean[row]), Uniform<A>(work.mean_low[row]), Uniform<A>(work.rstd[row]),
          Varying<A>(work.weight + c), Varying<A>(work.bias + c)};
}

// The run of channel `c`.
template <class A>
FXFUSE_INLINE Normalization<A, Uniform, Uniform> of_run(const Work<A>& work, int64_t row,
                                                        int64_t c) {
  return {Uniform<A>(work.mean[row]), Uniform<A>(work.mean_low[row]), Uniform<A>(work.rstd[row]),
          Uniform<A>(work.weight[c]), Uniform<A>(work.bias[c])};
}

// Values of the rows of a sample, repeated for every channel, so that a vector of a pixel may cross
// groups.
template <class A>
class PerChannel {
 public:
  PerChannel(const Work<A>& work, const A* of_rows)
      : work_(work), of_rows_(of_rows), values_(work.channels) {}

  Varying<A> of_sample(int64_t n) {
    if (n != sample_) repeat(n);
    return Varying<A>(values_.data());
  }

 private:
  void repeat(int64_t n) {
    const int64_t size = work_.channels / work_.groups;
    for (int64_t g = 0; g < work_.groups; ++g) {
      const A value = of_rows_[n * work_.groups + g];
      for (int64_t c = g * size; c < (g + 1) * size; ++c) values_[c] = value;
    }
    sample_ = n;
  }

  const Work<A>& work_;
  const A* of_rows_;
  Buffer<A> values_;
  int64_t sample_ = -1;
};

template <class A>
class PixelStatistics {
 public:
  explicit PixelStatistics(const Work<A>& work)
      : work_(work),
        mean_(work, work.mean),
        mean_low_(work, work.mean_low),
        rstd_(work, work.rstd) {}

  Normalization<A, Varying, Varying> of_sample(int64_t n) {
    return {mean_.of_sample(n), mean_low_.of_sample(n), rstd_.of_sample(n),
            Varying<A>(work_.weight), Varying<A>(work_.bias)};
  }

 private:
  const Work<A>& work_;
  PerChannel<A> mean_, mean_low_, rstd_;
};

template <class T, class Normalization, class Activation>
FXFUSE_INLINE void output_run(const T* x, T* y, int64_t length, Normalization normalization,
                              Activation activation) {
  for_vectors<Accumulate<T>>(length, [=](int64_t i, auto part) __attribute__((always_inline)) {
    const auto z = normalization.z(normalization.x_hat(x, i, part), i, part);
    store(y + i, activation.value(z), part);
  });
}

template <class T, class Activation>
void output_of_pixels(const Work<Accumulate<T>>& work, int64_t begin, int64_t end) {
  const Activation activation(work.params);
  PixelStatistics<Accumulate<T>> statistics(work);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t n = item / work.chunks, start = item % work.chunks * work.chunk;
    const auto normalization = statistics.of_sample(n);
    for (int64_t i = start; i < min(start + work.chunk, work.spatial); ++i) {
      const int64_t offset = (n * work.spatial + i) * work.channels;
      output_run(static_cast<const T*>(work.input) + offset, static_cast<T*>(work.output) + offset,
                 work.channels, normalization, activation);
    }
  }
}

template <class T, class Activation>
void output(const Work<Accumulate<T>>& work, int64_t begin, int64_t end) {
  if (work.layout == Layout::kPixels) return output_of_pixels<T, Activation>(work, begin, end);
  const Activation activation(work.params);
  const int64_t size = work.channels / work.groups, spatial = work.spatial;
  // Counted rather than divided out for each item: a row may be as short as one value.
  int64_t row = begin / work.chunks, k = begin % work.chunks, g = row % work.groups;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t start = k * work.chunk, stop = min(start + work.chunk, work.extent);
    const T* x = static_cast<const T*>(work.input) + row * work.extent;
    T* y = static_cast<T*>(work.output) + row * work.extent;
    if (work.layout == Layout::kElements) {
      output_run(x + start, y + start, stop - start, of_elements(work, row, g * size + start),
                 activation);
    } else {
      int64_t c = start / spatial;
      for (int64_t i = start; i < stop; ++c) {
        const int64_t length = min((c + 1) * spatial, stop) - i;
        output_run(x + i, y + i, length, of_run(work, row, g * size + c), activation);
        i += length;
      }
    }
    if (++k < work.chunks) continue;
    k = 0;
    ++row;
    if (++g == work.groups) g = 0;
  }
}
