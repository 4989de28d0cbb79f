// The gradients; Work has the formula.  dz is computed twice, for the sums and for dinput.

// Lanes are added up in double after this many values.
constexpr int64_t kBlock = 4096;

// dz for a vector whose x_hat is known; 0 beyond the run.
template <class T, class Normalization, class Activation, class Part>
FXFUSE_INLINE Vector<Accumulate<T>> gradient_of_z(Vector<Accumulate<T>> x_hat, const T* dy,
                                                  int64_t i, Part part, Normalization normalization,
                                                  Activation activation) {
  const auto z = normalization.z(x_hat, i, part);
  return keep<Accumulate<T>>(activation.grad(z, load(dy + i, part)), part);
}

// Adds dz * x_hat to dweight and dz to dbias.
template <class A, class Part>
FXFUSE_INLINE void add_affine(Vector<A> dz, Vector<A> x_hat, A* dweight, A* dbias, Part part) {
  store(dweight, load(dweight, part) + dz * x_hat, part);
  store(dbias, load(dbias, part) + dz, part);
}

// The sums over a run of `term(dz, x_hat, i, part)`, and of it times x_hat.
template <class T, class Normalization, class Activation, class Term>
FXFUSE_INLINE Sums sum_run(const T* x, const T* dy, int64_t length, Normalization normalization,
                           Activation activation, Term term) {
  using A = Accumulate<T>;
  Sums total = {0, 0};
  for (int64_t start = 0; start < length; start += kBlock) {
    Vector<A> sum{}, sum_x_hat{};
    auto add = [&](int64_t j, auto part) __attribute__((always_inline)) {
      const int64_t i = start + j;
      const auto x_hat = keep<A>(normalization.x_hat(x, i, part), part);
      const auto dz = gradient_of_z(x_hat, dy, i, part, normalization, activation);
      const auto summand = term(dz, x_hat, i, part);
      sum += summand;
      sum_x_hat += summand * x_hat;
    };
    for_vectors<A>(min(kBlock, length - start), add);
    total.dz += sum_lanes<A>(sum);
    total.dz_x_hat += sum_lanes<A>(sum_x_hat);
  }
  return total;
}

template <class T, class Activation>
void sums_of_elements(const Work<Accumulate<T>>& work, int64_t begin, int64_t end) {
  using A = Accumulate<T>;
  const Activation activation(work.params);
  const int64_t size = work.channels / work.groups;
  const double inverse_size = 1. / size;
  int64_t n = begin / work.groups, g = begin % work.groups;
  for (int64_t row = begin; row < end; ++row) {
    const auto normalization = of_elements(work, row, g * size);
    const int64_t part_offset = n / work.slice * work.channels + g * size;
    A* dweight = work.dweight == nullptr ? nullptr : work.dweight + part_offset;
    A* dbias = work.dbias == nullptr ? nullptr : work.dbias + part_offset;
    auto term = [=](Vector<A> dz, Vector<A> x_hat, int64_t i, auto part)
                    __attribute__((always_inline)) {
                      if (dweight != nullptr)
                        add_affine<A>(dz, x_hat, dweight + i, dbias + i, part);
                      return rounded<A>(dz * normalization.weight.at(i, part));
                    };
    const Sums sums = sum_run(static_cast<const T*>(work.input) + row * size,
                              static_cast<const T*>(work.grad_output) + row * size, size,
                              normalization, activation, term);
    work.offset[row] = static_cast<A>(sums.dz * inverse_size);
    work.slope[row] = static_cast<A>(sums.dz_x_hat * inverse_size);
    if (++g == work.groups) {
      g = 0;
      ++n;
    }
  }
}

template <class T, class Activation>
void sums_of_runs(const Work<Accumulate<T>>& work, int64_t begin, int64_t end) {
  using A = Accumulate<T>;
  const Activation activation(work.params);
  const int64_t size = work.channels / work.groups;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t row = item / size, c = item % work.channels, offset = item * work.spatial;
    work.sums[item] = sum_run(static_cast<const T*>(work.input) + offset,
                              static_cast<const T*>(work.grad_output) + offset, work.spatial,
                              of_run(work, row, c), activation,
                              [](Vector<A> dz, Vector<A>, int64_t, auto)
                                  __attribute__((always_inline)) { return dz; });
  }
}

template <class T, class Activation>
void sums_of_pixels(const Work<Accumulate<T>>& work, int64_t begin, int64_t end) {
  using A = Accumulate<T>;
  const Activation activation(work.params);
  PixelStatistics<A> statistics(work);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t n = item / work.chunks, start = item % work.chunks * work.chunk;
    const auto normalization = statistics.of_sample(n);
    A* dweight = work.dweight + item * work.channels;
    A* dbias = work.dbias + item * work.channels;
    for (int64_t c = 0; c < work.channels; ++c) dweight[c] = dbias[c] = 0;
    for (int64_t i = start; i < min(start + work.chunk, work.spatial); ++i) {
      const int64_t offset = (n * work.spatial + i) * work.channels;
      const T* x = static_cast<const T*>(work.input) + offset;
      const T* dy = static_cast<const T*>(work.grad_output) + offset;
      for_vectors<A>(work.channels, [=](int64_t c, auto part) __attribute__((always_inline)) {
        const auto x_hat = normalization.x_hat(x, c, part);
        const auto dz = gradient_of_z(x_hat, dy, c, part, normalization, activation);
        add_affine<A>(dz, x_hat, dweight + c, dbias + c, part);
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

// The difference from the offset is of a product that was rounded as the sums had it: in a group of
// one value it is exactly 0.
template <class T, class Normalization, class Coefficient, class Activation>
FXFUSE_INLINE void dinput_run(const T* x, const T* dy, T* dx, int64_t length,
                              Normalization normalization, Coefficient offset, Coefficient slope,
                              Activation activation) {
  using A = Accumulate<T>;
  for_vectors<A>(length, [=](int64_t i, auto part) __attribute__((always_inline)) {
    const auto x_hat = normalization.x_hat(x, i, part);
    const auto dz = gradient_of_z(x_hat, dy, i, part, normalization, activation);
    const auto dx_hat = rounded<A>(dz * normalization.weight.at(i, part));
    const auto centred = (dx_hat - offset.at(i, part)) - x_hat * slope.at(i, part);
    store(dx + i, centred * normalization.rstd.at(i, part), part);
  });
}

template <class T, class Activation>
void dinput_of_pixels(const Work<Accumulate<T>>& work, int64_t begin, int64_t end) {
  using A = Accumulate<T>;
  const Activation activation(work.params);
  PixelStatistics<A> statistics(work);
  PerChannel<A> offset(work, work.offset), slope(work, work.slope);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t n = item / work.chunks, start = item % work.chunks * work.chunk;
    const auto normalization = statistics.of_sample(n);
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
  const int64_t items_per_row = elements ? 1 : size;
  int64_t row = begin / items_per_row, in_row = begin % items_per_row, g = row % work.groups;
  for (int64_t item = begin; item < end; ++item) {
    const T* x = static_cast<const T*>(work.input) + item * length;
    const T* dy = static_cast<const T*>(work.grad_output) + item * length;
    T* dx = static_cast<T*>(work.dinput) + item * length;
    const Uniform<A> offset(work.offset[row]), slope(work.slope[row]);
    if (elements) {
      dinput_run(x, dy, dx, length, of_elements(work, row, g * size), offset, slope, activation);
    } else {
      dinput_run(x, dy, dx, length, of_run(work, row, g * size + in_row), offset, slope,
                 activation);
    }
    if (++in_row < items_per_row) continue;
    in_row = 0;
    ++row;
    if (++g == work.groups) g = 0;
  }
}
