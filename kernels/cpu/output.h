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
// share.
template <class Mean, class Scale, class Bias>
struct Normalization {
  Mean mean, mean_low;
  Scale scale;
  Bias bias;

  template <class T, class Part>
  FXFUSE_INLINE auto centre(const T* x, int64_t i, Part part) const {
    return (load(x + i, part) - mean.at(i, part)) - mean_low.at(i, part);
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
  return Normalization<Uniform<A>, VaryingScale<A>, Varying<A>>{mean, mean_low, scale,
                                                                Varying<A>(work.bias + c)};
}

// The run of channel `c`.
template <class A>
FXFUSE_INLINE auto of_run(const Work<A>& work, int64_t row, int64_t c) {
  const Uniform<A> mean(work.mean[row]), mean_low(work.mean_low[row]);
  const Uniform<A> scale(work.rstd[row] * work.weight[c]), bias(work.bias[c]);
  return Normalization<Uniform<A>, Uniform<A>, Uniform<A>>{mean, mean_low, scale, bias};
}

// Values of the rows of a sample, repeated for every channel and multiplied by its factor if there
// is one, so that a vector of a pixel may cross groups.
template <class A>
class PerChannel {
 public:
  PerChannel(const Work<A>& work, const A* of_rows, const A* factor = nullptr)
      : work_(work), of_rows_(of_rows), factor_(factor), values_(work.channels) {}

  Varying<A> of_sample(int64_t n) {
    if (n != sample_) repeat(n);
    return Varying<A>(values_.data());
  }

 private:
  void repeat(int64_t n) {
    const int64_t size = work_.channels / work_.groups;
    for (int64_t g = 0; g < work_.groups; ++g) {
      const A value = of_rows_[n * work_.groups + g];
      for (int64_t c = g * size; c < (g + 1) * size; ++c) {
        values_[c] = factor_ == nullptr ? value : value * factor_[c];
      }
    }
    sample_ = n;
  }

  const Work<A>& work_;
  const A *of_rows_, *factor_;
  Buffer<A> values_;
  int64_t sample_ = -1;
};

// The pixels of a sample.
template <class A>
class PixelNormalization {
 public:
  explicit PixelNormalization(const Work<A>& work)
      : mean_(work, work.mean),
        mean_low_(work, work.mean_low),
        scale_(work, work.rstd, work.weight),
        bias_(work.bias) {}

  auto of_sample(int64_t n) {
    return Normalization<Varying<A>, Varying<A>, Varying<A>>{
        mean_.of_sample(n), mean_low_.of_sample(n), scale_.of_sample(n), bias_};
  }

 private:
  PerChannel<A> mean_, mean_low_, scale_;
  Varying<A> bias_;
};

template <class T, class Normalization, class Activation>
FXFUSE_INLINE void output_run(const T* x, T* y, int64_t length, Normalization normalization,
                              Activation activation) {
  for_vectors<Accumulate<T>>(length, [=](int64_t i, auto part) __attribute__((always_inline)) {
    const auto z = normalization.z(normalization.centre(x, i, part), i, part);
    store(y + i, activation.value(z), part);
  });
}

template <class T, class Activation>
void output_of_pixels(const Work<Accumulate<T>>& work, int64_t begin, int64_t end) {
  const Activation activation(work.params);
  PixelNormalization<Accumulate<T>> normalizations(work);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t n = item / work.chunks, start = item % work.chunks * work.chunk;
    const auto normalization = normalizations.of_sample(n);
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
  Counter chunk(begin, work.chunks), group(chunk.outer, work.groups);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t row = chunk.outer, first = group.inner * size;  // channel
    const int64_t start = chunk.inner * work.chunk, stop = min(start + work.chunk, work.extent);
    const T* x = static_cast<const T*>(work.input) + row * work.extent;
    T* y = static_cast<T*>(work.output) + row * work.extent;
    if (work.layout == Layout::kElements) {
      output_run(x + start, y + start, stop - start, of_elements(work, row, first + start),
                 activation);
    } else {
      int64_t c = start / spatial;
      for (int64_t i = start; i < stop; ++c) {
        const int64_t length = min((c + 1) * spatial, stop) - i;
        output_run(x + i, y + i, length, of_run(work, row, first + c), activation);
        i += length;
      }
    }
    chunk.next();
    if (chunk.inner == 0) group.next();
  }
}
