// The gradients; Work has the formula.

// dz of a run from `position` on, computed where it is needed: for the sums, and again for dinput.
template <class T, class Activation>
class InlinedGradient {
  using A = Accumulate<T>;

 public:
  InlinedGradient(const Work<A>& work, int64_t position)
      : activation_(work.params), dy_(static_cast<const T*>(work.grad_output) + position) {}

  template <class Normalization>
  FXFUSE_INLINE void prepare(const T*, int64_t, int64_t, const Normalization&) const {}

  // For a vector whose x - mean is known; 0 beyond the run.
  template <class Normalization, class Part>
  FXFUSE_INLINE Vector<A> dz(Vector<A> centred, int64_t i, Part part,
                             const Normalization& normalization) const {
    const auto z = normalization.z(centred, i, part);
    return keep<A>(activation_.grad(z, load(dy_ + i, part)), part);
  }

  // What dinput will take for dz.
  static FXFUSE_INLINE Vector<A> kept(Vector<A> dz) { return dz; }

 private:
  Activation activation_;
  const T* dy_;
};

// For the sums, the same by a call for each block; dz is kept for dinput, rounded to its type.
template <class T>
class CalledGradient {
  using A = Accumulate<T>;

 public:
  CalledGradient(const Work<A>& work, int64_t position)
      : work_(work),
        dy_(static_cast<const T*>(work.grad_output) + position),
        kept_(static_cast<T*>(work.dz) + position) {}

  // For the values [start, stop), at most a block; x is that of the run.
  template <class Normalization>
  FXFUSE_INLINE void prepare(const T* x, int64_t start, int64_t stop,
                             const Normalization& normalization) {
    alignas(64) A z[kBlock];
    start_ = start;
    for_vectors<A>(stop - start, [&](int64_t i, auto part) __attribute__((always_inline)) {
      const auto centred = normalization.centre(x, start + i, part);
      store(z + i, normalization.z(centred, start + i, part));
      store(dz_ + i, load(dy_ + start + i, part));
    });
    work_.function->grad(z, dz_, stop - start, work_.params);
    for_vectors<A>(stop - start, [&](int64_t i, auto part) __attribute__((always_inline)) {
      store(kept_ + start + i, load(dz_ + i), part);
    });
  }

  template <class Normalization, class Part>
  FXFUSE_INLINE Vector<A> dz(Vector<A>, int64_t i, Part part, const Normalization&) const {
    return keep<A>(load(dz_ + i - start_), part);
  }

  static FXFUSE_INLINE Vector<A> kept(Vector<A> dz) {
    return Storage<T>::widen(Storage<T>::narrow(dz));
  }

 private:
  const Work<A>& work_;
  const T* dy_;
  T* kept_;
  int64_t start_;
  alignas(64) A dz_[kBlock];
};

// For dinput, what a CalledGradient kept.
template <class T>
class KeptGradient {
  using A = Accumulate<T>;

 public:
  KeptGradient(const Work<A>& work, int64_t position)
      : dz_(static_cast<const T*>(work.dz) + position) {}

  template <class Normalization, class Part>
  FXFUSE_INLINE Vector<A> dz(Vector<A>, int64_t i, Part part, const Normalization&) const {
    return load(dz_ + i, part);
  }

 private:
  const T* dz_;
};

// Sets `sum` and `product`, over the values [start, stop) of a run, at most a block, what
// to what term(dz, centred, i, part) gives, and that times x - mean: the second one is dz_x_hat but
// for the factor rstd.
template <class T, class Normalization, class Gradient, class Term>
FXFUSE_INLINE void sum_block(const T* x, int64_t start, int64_t stop,
                             const Normalization& normalization, Gradient&& gradient, Term term,
                             Vector<Accumulate<T>>* sum, Vector<Accumulate<T>>* product) {
  using A = Accumulate<T>;
  gradient.prepare(x, start, stop, normalization);
  // Two of each, so that an addition need not wait for the last.
  Vector<A> sums[2] = {}, products[2] = {};
  auto add = [&](int64_t i, int j, auto part) __attribute__((always_inline)) {
    const auto centred = keep<A>(normalization.centre(x, i, part), part);
    const auto dz = gradient.dz(centred, i, part, normalization);
    const auto summand = term(dz, centred, i, part);
    sums[j] += summand;
    products[j] += summand * centred;
  };
  int64_t i = start;
  for (; i + 2 * kWidth<A> <= stop; i += 2 * kWidth<A>) {
    add(i, 0, Whole{});
    add(i + kWidth<A>, 1, Whole{});
  }
  for_vectors<A>(stop - i,
                 [&](int64_t k, auto part) __attribute__((always_inline)) { add(i + k, 0, part); });
  *sum = sums[0] + sums[1];
  *product = products[0] + products[1];
}

// The same over a whole run.  Lanes are added up in double after a block.
template <class T, class Normalization, class Gradient, class Term>
FXFUSE_INLINE Sums sum_run(const T* x, int64_t length, const Normalization& normalization,
                           Gradient&& gradient, Term term) {
  using A = Accumulate<T>;
  Sums total = {0, 0};
  for (int64_t start = 0; start < length; start += kBlock) {
    Vector<A> sum, product;
    sum_block(x, start, min(start + kBlock, length), normalization, gradient, term, &sum, &product);
    total.dz += sum_lanes<A>(sum);
    total.dz_x_hat += sum_lanes<A>(product);
  }
  return total;
}

template <class A, class Part>
FXFUSE_INLINE void add_to(A* to, Vector<A> v, Part part) {
  store(to, load(to, part) + v, part);
}

// Of a group's row: `slice` says which part of the affine gradients its sample adds to.
template <class Gradient, class A>
FXFUSE_INLINE auto affine_term(const Work<A>& work, int64_t slice, int64_t c, Uniform<A> rstd,
                               VaryingScale<A> scale) {
  A* dweight = work.dweight == nullptr ? nullptr : work.dweight + slice * work.channels + c;
  A* dbias = work.dbias + slice * work.channels + c;
  return [=](Vector<A> dz, Vector<A> centred, int64_t i, auto part) __attribute__((always_inline)) {
    if (dweight != nullptr) {
      add_to<A>(dweight + i, dz * (centred * rstd.value), part);
      add_to<A>(dbias + i, dz, part);
    }
    return rounded<A>(Gradient::kept(dz) * scale.at(i, part));
  };
}

// offset and slope of a row, from the sums of dz * scale and of that times x - mean.
template <class A>
FXFUSE_INLINE void save_sums(const Work<A>& work, int64_t row, double inverse_size, double scaled,
                             double product) {
  const double rstd = work.rstd[row];
  work.offset[row] = static_cast<A>(scaled * inverse_size);
  work.slope[row] = static_cast<A>(product * inverse_size * (rstd * rstd));
}

// kElements, rows shorter than a vector: the neighbours of a sample as one run.
template <class T, class Gradient>
void sums_of_short_rows(const Work<Accumulate<T>>& work, int64_t begin, int64_t end) {
  using A = Accumulate<T>;
  const int64_t size = work.channels / work.groups;
  const double inverse_size = 1. / size;
  PixelNormalization<A> normalizations(work);
  PerChannel<A> rstds(work, work.rstd);
  const Buffer<A> scaled(work.channels), product(work.channels);
  for (int64_t row = begin; row < end;) {
    const int64_t n = row / work.groups, first = row % work.groups;
    const int64_t last = min(work.groups, first + end - row), length = (last - first) * size;
    const T* x = static_cast<const T*>(work.input) + row * size;
    const auto normalization = normalizations.of_groups(n, first, last, size);
    const auto rstd = rstds.of_groups(n, first, last);
    const int64_t position = n / work.slice * work.channels + first * size;
    Gradient gradient(work, row * size);
    for (int64_t block = 0; block < length; block += kBlock) {
      const int64_t stop = min(block + kBlock, length);
      gradient.prepare(x, block, stop, normalization);
      for_vectors<A>(stop - block, [&](int64_t k, auto part) __attribute__((always_inline)) {
        const int64_t i = block + k;
        const auto centred = normalization.centre(x, i, part);
        const auto dz = gradient.dz(centred, i, part, normalization);
        if (work.dweight != nullptr) {
          add_to<A>(work.dweight + position + i, dz * (centred * rstd.at(i, part)), part);
          add_to<A>(work.dbias + position + i, dz, part);
        }
        const auto value = rounded<A>(Gradient::kept(dz) * normalization.scale.at(i, part));
        store(scaled.data() + i, value, part);
        store(product.data() + i, value * centred, part);
      });
    }
    for (int64_t i = 0; i < length; i += size, ++row) {
      A sum = 0, sum_of_products = 0;
      for (int64_t k = i; k < i + size; ++k) {
        sum += scaled[k];
        sum_of_products += product[k];
      }
      save_sums<A>(work, row, inverse_size, sum, sum_of_products);
    }
  }
}

template <class T, class Gradient>
void sums_of_elements(const Work<Accumulate<T>>& work, int64_t begin, int64_t end) {
  using A = Accumulate<T>;
  constexpr int64_t w = kWidth<A>;
  const int64_t size = work.channels / work.groups;
  if (size < w) return sums_of_short_rows<T, Gradient>(work, begin, end);
  const double inverse_size = 1. / size;
  const T* input = static_cast<const T*>(work.input);
  Counter group(begin, work.groups);
  int64_t slice = group.outer / work.slice;
  auto next = [&] {
    group.next();
    if (group.inner == 0) slice = group.outer / work.slice;
  };
  // kWidth rows at a time, as for the statistics of short ones.
  for (int64_t start = begin; start < end; start += w) {
    const int64_t count = min(end - start, w);
    Vector<A> sum[w] = {}, product[w] = {};
    for (int64_t r = 0; r < count; ++r, next()) {
      const int64_t row = start + r, c = group.inner * size;
      const auto normalization = of_elements(work, row, c);
      const auto scale = normalization.scale;
      const auto term = affine_term<Gradient>(work, slice, c, scale.rstd, scale);
      Gradient gradient(work, row * size);
      Sums total = {0, 0};
      for (int64_t block = 0; block < size; block += kBlock) {
        sum_block(input + row * size, block, min(block + kBlock, size), normalization, gradient,
                  term, &sum[r], &product[r]);
        if (size > kBlock) {
          total.dz += sum_lanes<A>(sum[r]);
          total.dz_x_hat += sum_lanes<A>(product[r]);
        }
      }
      if (size > kBlock) save_sums<A>(work, row, inverse_size, total.dz, total.dz_x_hat);
    }
    if (size > kBlock) continue;
    alignas(64) A scaled[w], products[w];
    store(scaled, sum_rows<A>(sum));
    store(products, sum_rows<A>(product));
    for (int64_t r = 0; r < count; ++r) {
      save_sums<A>(work, start + r, inverse_size, scaled[r], products[r]);
    }
  }
}

template <class T, class Gradient>
void sums_of_runs(const Work<Accumulate<T>>& work, int64_t begin, int64_t end) {
  using A = Accumulate<T>;
  const int64_t size = work.channels / work.groups;
  Counter in_group(begin, size), in_sample(begin, work.channels);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t row = in_group.outer, c = in_sample.inner, position = item * work.spatial;
    Sums sums = sum_run(static_cast<const T*>(work.input) + position, work.spatial,
                        of_run(work, row, c), Gradient(work, position),
                        [](Vector<A> dz, Vector<A>, int64_t, auto)
                            __attribute__((always_inline)) { return dz; });
    sums.dz_x_hat *= work.rstd[row];
    work.sums[item] = sums;
    in_group.next();
    in_sample.next();
  }
}

template <class T, class Gradient>
void sums_of_pixels(const Work<Accumulate<T>>& work, int64_t begin, int64_t end) {
  using A = Accumulate<T>;
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
      Gradient gradient(work, position);
      for (int64_t block = 0; block < work.channels; block += kBlock) {
        const int64_t stop = min(block + kBlock, work.channels);
        gradient.prepare(x, block, stop, normalization);
        for_vectors<A>(stop - block, [&](int64_t k, auto part) __attribute__((always_inline)) {
          const int64_t c = block + k;
          const auto centred = normalization.centre(x, c, part);
          const auto dz = gradient.dz(centred, c, part, normalization);
          add_to<A>(dweight + c, dz * centred, part);
          add_to<A>(dbias + c, dz, part);
        });
      }
    }
  }
}

template <class T, class Gradient>
void sums(const Work<Accumulate<T>>& work, int64_t begin, int64_t end) {
  switch (work.layout) {
    case Layout::kElements:
      return sums_of_elements<T, Gradient>(work, begin, end);
    case Layout::kRuns:
      return sums_of_runs<T, Gradient>(work, begin, end);
    case Layout::kPixels:
      return sums_of_pixels<T, Gradient>(work, begin, end);
  }
}

// dz * scale is rounded as it was for the offset: in a group of one value the two are equal, and
// the gradient is exactly 0.
template <class T, class Normalization, class Coefficient, class Gradient>
FXFUSE_INLINE void dinput_run(const T* x, T* dx, int64_t length, Normalization normalization,
                              Coefficient offset, Coefficient slope, const Gradient& gradient) {
  using A = Accumulate<T>;
  for_vectors<A>(length, [=](int64_t i, auto part) __attribute__((always_inline)) {
    const auto centred = normalization.centre(x, i, part);
    const auto dz = gradient.dz(centred, i, part, normalization);
    const auto scaled = rounded<A>(dz * normalization.scale.at(i, part));
    store(dx + i, (scaled - offset.at(i, part)) - centred * slope.at(i, part), part);
  });
}

template <class T, class Gradient>
void dinput_of_pixels(const Work<Accumulate<T>>& work, int64_t begin, int64_t end) {
  using A = Accumulate<T>;
  PixelNormalization<A> normalizations(work);
  PerChannel<A> offset(work, work.offset), slope(work, work.slope);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t n = item / work.chunks, start = item % work.chunks * work.chunk;
    const auto normalization = normalizations.of_sample(n);
    const auto offsets = offset.of_sample(n), slopes = slope.of_sample(n);
    for (int64_t i = start; i < min(start + work.chunk, work.spatial); ++i) {
      const int64_t position = (n * work.spatial + i) * work.channels;
      dinput_run(static_cast<const T*>(work.input) + position,
                 static_cast<T*>(work.dinput) + position, work.channels, normalization, offsets,
                 slopes, Gradient(work, position));
    }
  }
}

template <class T, class Gradient>
void dinput_of_short_rows(const Work<Accumulate<T>>& work, int64_t begin, int64_t end) {
  using A = Accumulate<T>;
  const int64_t size = work.channels / work.groups;
  PixelNormalization<A> normalizations(work);
  PerChannel<A> offset(work, work.offset), slope(work, work.slope);
  for (int64_t row = begin; row < end;) {
    const int64_t n = row / work.groups, first = row % work.groups;
    const int64_t last = min(work.groups, first + end - row), position = row * size;
    dinput_run(static_cast<const T*>(work.input) + position,
               static_cast<T*>(work.dinput) + position, (last - first) * size,
               normalizations.of_groups(n, first, last, size), offset.of_groups(n, first, last),
               slope.of_groups(n, first, last), Gradient(work, position));
    row += last - first;
  }
}

template <class T, class Gradient>
void dinput(const Work<Accumulate<T>>& work, int64_t begin, int64_t end) {
  using A = Accumulate<T>;
  if (work.layout == Layout::kPixels) return dinput_of_pixels<T, Gradient>(work, begin, end);
  const bool elements = work.layout == Layout::kElements;
  const int64_t size = work.channels / work.groups, length = elements ? size : work.spatial;
  if (elements && size < kWidth<A>) return dinput_of_short_rows<T, Gradient>(work, begin, end);
  const int64_t step = elements ? size : 1;  // channels of an item
  Counter in_group(begin, size / step), in_sample(begin, work.channels / step);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t row = in_group.outer, c = in_sample.inner * step;
    const T* x = static_cast<const T*>(work.input) + item * length;
    T* dx = static_cast<T*>(work.dinput) + item * length;
    const Gradient gradient(work, item * length);
    const Uniform<A> offset(work.offset[row]), slope(work.slope[row]);
    if (elements) {
      dinput_run(x, dx, length, of_elements(work, row, c), offset, slope, gradient);
    } else {
      dinput_run(x, dx, length, of_run(work, row, c), offset, slope, gradient);
    }
    in_group.next();
    in_sample.next();
  }
}
