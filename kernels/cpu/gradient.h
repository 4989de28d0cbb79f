// The gradients; Work has the formula.  dz is computed twice, for the sums and for dinput.

// Lanes are added up in double after this many values.
constexpr int64_t kBlock = 512;

// dz for a vector whose x - mean is known; 0 beyond the run.
template <class T, class Normalization, class Activation, class Part>
FXFUSE_INLINE Vector<Accumulate<T>> gradient_of_z(Vector<Accumulate<T>> centred, const T* dy,
                                                  int64_t i, Part part,
                                                  const Normalization& normalization,
                                                  const Activation& activation) {
  const auto z = normalization.z(centred, i, part);
  return keep<Accumulate<T>>(activation.grad(z, load(dy + i, part)), part);
}

// The sums over a run of term(dz, centred, i, part) and of it times x - mean: the second one is
// dz_x_hat but for the factor rstd.
template <class T, class Normalization, class Activation, class Term>
FXFUSE_INLINE Sums sum_run(const T* x, const T* dy, int64_t length,
                           const Normalization& normalization, const Activation& activation,
                           Term term) {
  using A = Accumulate<T>;
  Sums total = {0, 0};
  for (int64_t start = 0; start < length; start += kBlock) {
    const int64_t stop = min(start + kBlock, length);
    // Two of each, so that an addition need not wait for the last.
    Vector<A> sum[2] = {}, product[2] = {};
    auto add = [&](int64_t i, int j, auto part) __attribute__((always_inline)) {
      const auto centred = keep<A>(normalization.centre(x, i, part), part);
      const auto dz = gradient_of_z(centred, dy, i, part, normalization, activation);
      const auto summand = term(dz, centred, i, part);
      sum[j] += summand;
      product[j] += summand * centred;
    };
    int64_t i = start;
    for (; i + 2 * kWidth<A> <= stop; i += 2 * kWidth<A>) {
      add(i, 0, Whole{});
      add(i + kWidth<A>, 1, Whole{});
    }
    for_vectors<A>(stop - i, [&](int64_t k, auto part)
                                 __attribute__((always_inline)) { add(i + k, 0, part); });
    total.dz += sum_lanes<A>(sum[0] + sum[1]);
    total.dz_x_hat += sum_lanes<A>(product[0] + product[1]);
  }
  return total;
}

template <class A, class Part>
FXFUSE_INLINE void add_to(A* to, Vector<A> v, Part part) {
  store(to, load(to, part) + v, part);
}

template <class T, class Activation>
void sums_of_elements(const Work<Accumulate<T>>& work, int64_t begin, int64_t end) {
  using A = Accumulate<T>;
  const Activation activation(work.params);
  const int64_t size = work.channels / work.groups;
  const double inverse_size = 1. / size;
  Counter group(begin, work.groups);
  int64_t slice = group.outer / work.slice;
  for (int64_t row = begin; row < end; ++row) {
    const auto normalization = of_elements(work, row, group.inner * size);
    const int64_t position = slice * work.channels + group.inner * size;
    A* dweight = work.dweight == nullptr ? nullptr : work.dweight + position;
    A* dbias = work.dbias == nullptr ? nullptr : work.dbias + position;
    auto term = [&](Vector<A> dz, Vector<A> centred, int64_t i,
                    auto part) __attribute__((always_inline)) {
      if (dweight != nullptr) {
        add_to<A>(dweight + i, dz * (centred * normalization.scale.rstd.value), part);
        add_to<A>(dbias + i, dz, part);
      }
      return rounded<A>(dz * normalization.scale.at(i, part));
    };
    const Sums sums = sum_run(static_cast<const T*>(work.input) + row * size,
                              static_cast<const T*>(work.grad_output) + row * size, size,
                              normalization, activation, term);
    const double rstd = work.rstd[row];
    work.offset[row] = static_cast<A>(sums.dz * inverse_size);
    work.slope[row] = static_cast<A>(sums.dz_x_hat * inverse_size * (rstd * rstd));
    group.next();
    if (group.inner == 0) slice = group.outer / work.slice;
  }
}

template <class T, class Activation>
void sums_of_runs(const Work<Accumulate<T>>& work, int64_t begin, int64_t end) {
  using A = Accumulate<T>;
  const Activation activation(work.params);
  const int64_t size = work.channels / work.groups;
  Counter in_group(begin, size), in_sample(begin, work.channels);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t row = in_group.outer, c = in_sample.inner, position = item * work.spatial;
    Sums sums = sum_run(static_cast<const T*>(work.input) + position,
                        static_cast<const T*>(work.grad_output) + position, work.spatial,
                        of_run(work, row, c), activation,
                        [](Vector<A> dz, Vector<A>, int64_t, auto)
                            __attribute__((always_inline)) { return dz; });
    sums.dz_x_hat *= work.rstd[row];
    work.sums[item] = sums;
    in_group.next();
    in_sample.next();
  }
}

template <class T, class Activation>
void sums_of_pixels(const Work<Accumulate<T>>& work, int64_t begin, int64_t end) {
  using A = Accumulate<T>;
  const Activation activation(work.params);
  PixelNormalization<A> normalizations(work);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t n = item / work.chunks, start = item % work.chunks * work.chunk;
    const auto normalization = normalizations.of_sample(n);
    A* dweight = work.dweight + item * work.channels;
    A* dbias = work.dbias + item * work.channels;
    for (int64_t c = 0; c < work.channels; ++c) dweight[c] = dbias[c] = 0;
    for (int64_t i = start; i < min(start + work.chunk, work.spatial); ++i) {
      const int64_t position = (n * work.spatial + i) * work.channels;
      const T* x = static_cast<const T*>(work.input) + position;
      const T* dy = static_cast<const T*>(work.grad_output) + position;
      for_vectors<A>(work.channels, [=](int64_t c, auto part) __attribute__((always_inline)) {
        const auto centred = normalization.centre(x, c, part);
        const auto dz = gradient_of_z(centred, dy, c, part, normalization, activation);
        add_to<A>(dweight + c, dz * centred, part);
        add_to<A>(dbias + c, dz, part);
      });
    }
  }
}

template <class T, class Activation>
void sums(const Work<Accumulate<T>>& work, int64_t begin, int64_t end) {
  switch (work.layout) {
    case Layout::kElements:
      return sums_of_elements<T, Activation>(work, begin, end);
    case Layout::kRuns:
      return sums_of_runs<T, Activation>(work, begin, end);
    case Layout::kPixels:
      return sums_of_pixels<T, Activation>(work, begin, end);
  }
}

// dz * scale is rounded as it was for the offset: in a group of one value the two are equal, and
// the gradient is exactly 0.
template <class T, class Normalization, class Coefficient, class Activation>
FXFUSE_INLINE void dinput_run(const T* x, const T* dy, T* dx, int64_t length,
                              Normalization normalization, Coefficient offset, Coefficient slope,
                              Activation activation) {
  using A = Accumulate<T>;
  for_vectors<A>(length, [=](int64_t i, auto part) __attribute__((always_inline)) {
    const auto centred = normalization.centre(x, i, part);
    const auto dz = gradient_of_z(centred, dy, i, part, normalization, activation);
    const auto scaled = rounded<A>(dz * normalization.scale.at(i, part));
    store(dx + i, (scaled - offset.at(i, part)) - centred * slope.at(i, part), part);
  });
}

template <class T, class Activation>
void dinput_of_pixels(const Work<Accumulate<T>>& work, int64_t begin, int64_t end) {
  using A = Accumulate<T>;
  const Activation activation(work.params);
  PixelNormalization<A> normalizations(work);
  PerChannel<A> offset(work, work.offset), slope(work, work.slope);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t n = item / work.chunks, start = item % work.chunks * work.chunk;
    const auto normalization = normalizations.of_sample(n);
    const auto offsets = offset.of_sample(n), slopes = slope.of_sample(n);
    for (int64_t i = start; i < min(start + work.chunk, work.spatial); ++i) {
      const int64_t position = (n * work.spatial + i) * work.channels;
      dinput_run(static_cast<const T*>(work.input) + position,
                 static_cast<const T*>(work.grad_output) + position,
                 static_cast<T*>(work.dinput) + position, work.channels, normalization, offsets,
                 slopes, activation);
    }
  }
}

template <class T, class Activation>
void dinput(const Work<Accumulate<T>>& work, int64_t begin, int64_t end) {
  using A = Accumulate<T>;
  if (work.layout == Layout::kPixels) return dinput_of_pixels<T, Activation>(work, begin, end);
  const Activation activation(work.params);
  const bool elements = work.layout == Layout::kElements;
  const int64_t size = work.channels / work.groups, length = elements ? size : work.spatial;
  const int64_t step = elements ? size : 1;  // channels of an item
  Counter in_group(begin, size / step), in_sample(begin, work.channels / step);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t row = in_group.outer, c = in_sample.inner * step;
    const T* x = static_cast<const T*>(work.input) + item * length;
    const T* dy = static_cast<const T*>(work.grad_output) + item * length;
    T* dx = static_cast<T*>(work.dinput) + item * length;
    const Uniform<A> offset(work.offset[row]), slope(work.slope[row]);
    if (elements) {
      dinput_run(x, dy, dx, length, of_elements(work, row, c), offset, slope, activation);
    } else {
      dinput_run(x, dy, dx, length, of_run(work, row, c), offset, slope, activation);
    }
    in_group.next();
    in_sample.next();
  }
}
