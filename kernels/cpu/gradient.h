// The gradients; Work has the formula.

// What gives dz.  A block of runs that lie one after the other in memory is announced by start(),
// each run by collect(), and then finish(); dz() is for values of that block.  `position` is where
// the run begins, i counts its values.

// Computed where it is needed: for the sums, and again for dinput.
template <class T, class Activation>
class InlinedGradient {
  using A = Accumulate<T>;

 public:
  explicit InlinedGradient(const Work<A>& work)
      : activation_(work.params), dy_(static_cast<const T*>(work.grad_output)) {}

  void start(int64_t) const {}
  template <class Normalization>
  FXFUSE_INLINE void collect(const T*, int64_t, int64_t, const Normalization&) const {}
  void finish() const {}

  // For a vector whose x - mean is known; 0 beyond the run.
  template <class Normalization, class Part>
  FXFUSE_INLINE Vector<A> dz(int64_t position, int64_t i, Part part, Vector<A> centred,
                             const Normalization& normalization) const {
    const auto z = normalization.z(centred, i, part);
    return keep<A>(activation_.grad(z, load(dy_ + position + i, part)), part);
  }

  // For the sums, which find the bus as idle as statistics.h says: 1024x8192 in 16 bits on two
  // threads 11 to 21 % faster, 64x2048x7x7 2 to 10 % (EPYC, Zen 5, 2026-11-30).
  FXFUSE_INLINE void prefetch(const T* x, int64_t position, int64_t i) const {
    __builtin_prefetch(reinterpret_cast<const char*>(x + i) + kAhead);
    __builtin_prefetch(reinterpret_cast<const char*>(dy_ + position + i) + kAhead);
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
  explicit CalledGradient(const Work<A>& work) : work_(work) {}

  void start(int64_t position) {
    position_ = position;
    count_ = 0;
  }

  // The values [first, last) of a run; x is that of the run.
  template <class Normalization>
  FXFUSE_INLINE void collect(const T* x, int64_t first, int64_t last,
                             const Normalization& normalization) {
    A* z = z_ + count_;
    for_vectors<A>(last - first, [=](int64_t i, auto part) __attribute__((always_inline)) {
      const auto centred = normalization.centre(x, first + i, part);
      store(z + i, normalization.z(centred, first + i, part));
    });
    count_ += last - first;
  }

  void finish() {
    const T* input = static_cast<const T*>(work_.input) + position_;
    const T* dy = static_cast<const T*>(work_.grad_output) + position_;
    T* kept = static_cast<T*>(work_.dz) + position_;
    if constexpr (std::is_same_v<T, A>) {
      dz_ = kept;
    } else {
      dz_ = buffer_;
    }
    work_.function->grad(z_, input, dy, dz_, kept, count_, work_.params);
  }

  template <class Normalization, class Part>
  FXFUSE_INLINE Vector<A> dz(int64_t position, int64_t i, Part part, Vector<A>,
                             const Normalization&) const {
    return load(dz_ + (position - position_) + i, part);
  }

  void prefetch(const T*, int64_t, int64_t) const {}  // the function does

  static FXFUSE_INLINE Vector<A> kept(Vector<A> dz) {
    return Storage<T>::widen(Storage<T>::narrow(dz));
  }

 private:
  const Work<A>& work_;
  int64_t position_ = 0, count_ = 0;
  A* dz_ = nullptr;                      // of the block
  alignas(64) A z_[kBlock + kWidth<A>];  // whole vectors are stored
  alignas(64) A buffer_[kBlock];
};

// For dinput, what a CalledGradient kept.
template <class T>
class KeptGradient {
  using A = Accumulate<T>;

 public:
  explicit KeptGradient(const Work<A>& work) : dz_(static_cast<const T*>(work.dz)) {}

  template <class Normalization, class Part>
  FXFUSE_INLINE Vector<A> dz(int64_t position, int64_t i, Part part, Vector<A>,
                             const Normalization&) const {
    return load(dz_ + position + i, part);
  }

 private:
  const T* dz_;
};

template <class A, class Part>
FXFUSE_INLINE void add_to(A* to, Vector<A> v, Part part) {
  store(to, load(to, part) + v, part);
}

// offset and slope of a row, from the sums of dz * scale and of that times x - mean.
template <class A>
FXFUSE_INLINE void save_sums(const Work<A>& work, int64_t row, double inverse_size, double scaled,
                             double product) {
  const double rstd = work.rstd[row];
  work.offset[row] = static_cast<A>(scaled * inverse_size);
  work.slope[row] = static_cast<A>(product * inverse_size * (rstd * rstd));
}

// Goes through the rows of the layout kElements, each of which is a run.
template <class A>
class Rows {
 public:
  Rows(const Work<A>& work, int64_t begin)
      : work_(work),
        size_(work.channels / work.groups),
        inverse_size_(1. / size_),
        row_(begin),
        group_(begin, work.groups),
        slice_(group_.outer / work.slice) {}

  void next() {
    ++row_;
    group_.next();
    if (group_.inner == 0) slice_ = group_.outer / work_.slice;
  }

  int64_t length() const { return size_; }
  int64_t row() const { return row_; }
  auto normalization() const { return of_elements(work_, row_, group_.inner * size_); }

  // Adds to the affine gradients, and returns what to add up for the row.
  template <class Gradient, class Normalization>
  FXFUSE_INLINE auto term(const Normalization& normalization) const {
    const int64_t c = group_.inner * size_, position = slice_ * work_.channels + c;
    A* dweight = work_.dweight == nullptr ? nullptr : work_.dweight + position;
    A* dbias = work_.dbias + position;
    return [=, scale = normalization.scale](int64_t i, auto part, Vector<A> dz, Vector<A> centred)
               __attribute__((always_inline)) {
                 if (dweight != nullptr) {
                   add_to<A>(dweight + i, dz * (centred * scale.rstd.value), part);
                   add_to<A>(dbias + i, dz, part);
                 }
                 return rounded<A>(Gradient::kept(dz) * scale.at(i, part));
               };
  }

  void save(Sums sums) const { save_sums<A>(work_, row_, inverse_size_, sums.dz, sums.dz_x_hat); }

 private:
  const Work<A>& work_;
  int64_t size_;
  double inverse_size_;
  int64_t row_;
  Counter group_;
  int64_t slice_;
};

// Goes through the channels of all samples in the layout kRuns.
template <class A>
class Channels {
 public:
  Channels(const Work<A>& work, int64_t begin)
      : work_(work),
        item_(begin),
        in_group_(begin, work.channels / work.groups),
        in_sample_(begin, work.channels) {}

  void next() {
    ++item_;
    in_group_.next();
    in_sample_.next();
  }

  int64_t length() const { return work_.spatial; }
  int64_t row() const { return in_group_.outer; }
  auto normalization() const { return of_run(work_, row(), in_sample_.inner); }

  template <class Gradient, class Normalization>
  FXFUSE_INLINE auto term(const Normalization&) const {
    return [](int64_t, auto, Vector<A> dz, Vector<A>) __attribute__((always_inline)) { return dz; };
  }

  void save(Sums sums) const {
    const double product = sums.dz_x_hat - work_.mean_low[row()] * sums.dz;
    work_.sums[item_] = {sums.dz, product * work_.rstd[row()]};
  }

 private:
  const Work<A>& work_;
  int64_t item_;
  Counter in_group_, in_sample_;
};

// Sets `sum` and `product`, over the values [first, last) of a run, to the sum of what
// term(i, part, dz, centred) gives, and of that times x - mean: the second one is dz_x_hat but for
// the factor rstd.
template <class T, class Normalization, class Gradient, class Term>
FXFUSE_INLINE void sum_block(const T* x, int64_t position, int64_t first, int64_t last,
                             const Normalization& normalization, const Gradient& gradient,
                             Term term, Vector<Accumulate<T>>* sum,
                             Vector<Accumulate<T>>* product) {
  using A = Accumulate<T>;
  // Two of each, so that an addition need not wait for the last.
  Vector<A> sums[2] = {}, products[2] = {};
  auto add = [&](int64_t i, int j, auto part) __attribute__((always_inline)) {
    gradient.prefetch(x, position, i);
    const auto centred = keep<A>(normalization.centre(x, i, part), part);
    const auto dz = gradient.dz(position, i, part, centred, normalization);
    const auto summand = term(i, part, dz, centred);
    sums[j] += summand;
    products[j] += summand * centred;
  };
  int64_t i = first;
  for (; i + 2 * kWidth<A> <= last; i += 2 * kWidth<A>) {
    add(i, 0, Whole{});
    add(i + kWidth<A>, 1, Whole{});
  }
  for_vectors<A>(last - i,
                 [&](int64_t k, auto part) __attribute__((always_inline)) { add(i + k, 0, part); });
  *sum = sums[0] + sums[1];
  *product = products[0] + products[1];
}

// Short runs are done some at a time, for the sake of the sums over lanes as for the statistics.
// Lanes are added up in double after a block.
template <class T, class Gradient, template <class> class Runs>
void sums_of_runs(const Work<Accumulate<T>>& work, int64_t begin, int64_t end) {
  using A = Accumulate<T>;
  constexpr int64_t w = kWidth<A>;
  const T* input = static_cast<const T*>(work.input);
  Runs<A> runs(work, begin);
  Gradient gradient(work);
  const int64_t length = runs.length(), at_a_time = length < kBlock ? min(kBlock / length, w) : 1;
  for (int64_t item = begin; item < end; item += at_a_time) {
    const int64_t count = min(at_a_time, end - item), position = item * length;
    Sums total[w];
    total[0] = {0, 0};
    for (int64_t first = 0; first < length; first += kBlock) {
      const int64_t last = min(first + kBlock, length);
      gradient.start(position + first);
      Runs<A> ahead = runs, run = runs;
      for (int64_t r = 0; r < count; ++r, ahead.next()) {
        gradient.collect(input + position + r * length, first, last, ahead.normalization());
      }
      gradient.finish();
      Vector<A> sum[w], product[w];
      for (int64_t r = 0; r < count; ++r, run.next()) {
        const int64_t start = position + r * length;
        const auto normalization = run.normalization();
        sum_block(input + start, start, first, last, normalization, gradient,
                  run.template term<Gradient>(normalization), &sum[r], &product[r]);
      }
      if (at_a_time == 1) {
        total[0].dz += sum_lanes<A>(sum[0]);
        total[0].dz_x_hat += sum_lanes<A>(product[0]);
        continue;
      }
      for (int64_t r = count; r < w; ++r) sum[r] = product[r] = Vector<A>{};
      alignas(64) A sums[w], products[w];
      store(sums, sum_rows<A>(sum));
      store(products, sum_rows<A>(product));
      for (int64_t r = 0; r < count; ++r) total[r] = {sums[r], products[r]};
    }
    for (int64_t r = 0; r < count; ++r, runs.next()) runs.save(total[r]);
  }
}

template <class T, class Gradient>
void sums_of_short_rows(const Work<Accumulate<T>>& work, int64_t begin, int64_t end) {
  using A = Accumulate<T>;
  const int64_t size = work.channels / work.groups;
  const double inverse_size = 1. / size;
  ShortRows<A> rows(work);
  Gradient gradient(work);
  alignas(64) A dbias[kBlock], dweight[kBlock], scaled[kBlock], product[kBlock];
  for (int64_t start = begin; start < end; start += rows.at_a_time()) {
    const int64_t stop = min(start + rows.at_a_time(), end), position = start * size;
    const int64_t length = (stop - start) * size;
    const T* x = static_cast<const T*>(work.input) + position;
    const auto normalization = rows.normalization(start, stop);
    gradient.start(position);
    gradient.collect(x, 0, length, normalization);
    gradient.finish();
    for_vectors<A>(length, [&](int64_t i, auto part) __attribute__((always_inline)) {
      const auto centred = normalization.centre(x, i, part);
      const auto dz = gradient.dz(position, i, part, centred, normalization);
      store(dbias + i, dz, part);
      store(dweight + i, dz * (centred * rows.rstd().at(i, part)), part);
      const auto value = rounded<A>(Gradient::kept(dz) * normalization.scale.at(i, part));
      store(scaled + i, value, part);
      store(product + i, value * centred, part);
    });
    if (work.dweight != nullptr) {
      const int64_t slice = start / work.groups / work.slice * work.channels;
      rows.for_samples(start, stop, [&](int64_t i, int64_t c, int64_t n) {
        for_vectors<A>(n, [&](int64_t k, auto part) __attribute__((always_inline)) {
          add_to<A>(work.dweight + slice + c + k, load(dweight + i + k, part), part);
          add_to<A>(work.dbias + slice + c + k, load(dbias + i + k, part), part);
        });
      });
    }
    for (int64_t row = start, i = 0; row < stop; ++row) {
      A sum = 0, sum_of_products = 0;
      for (const int64_t last = i + size; i < last; ++i) {
        sum += scaled[i];
        sum_of_products += product[i];
      }
      save_sums<A>(work, row, inverse_size, sum, sum_of_products);
    }
  }
}

template <class T, class Gradient>
void sums_of_pixels(const Work<Accumulate<T>>& work, int64_t begin, int64_t end) {
  using A = Accumulate<T>;
  PixelNormalization<A> normalizations(work);
  Gradient gradient(work);
  const int64_t pixels = work.channels < kBlock ? kBlock / work.channels : 1;  // of a block
  for (int64_t item = begin; item < end; ++item) {
    const int64_t n = item / work.chunks, start = item % work.chunks * work.chunk;
    const auto normalization = normalizations.of_sample(n);
    A* dweight = work.dweight + item * work.channels;
    A* dbias = work.dbias + item * work.channels;
    for (int64_t c = 0; c < work.channels; ++c) dweight[c] = dbias[c] = 0;
    const int64_t end_of_chunk = min(start + work.chunk, work.spatial);
    for (int64_t i = start; i < end_of_chunk; i += pixels) {
      const int64_t count = min(pixels, end_of_chunk - i);
      const int64_t position = (n * work.spatial + i) * work.channels;
      const T* x = static_cast<const T*>(work.input) + position;
      for (int64_t first = 0; first < work.channels; first += kBlock) {
        const int64_t last = min(first + kBlock, work.channels);
        gradient.start(position + first);
        for (int64_t p = 0; p < count; ++p) {
          gradient.collect(x + p * work.channels, first, last, normalization);
        }
        gradient.finish();
        for (int64_t p = 0; p < count; ++p) {
          const int64_t pixel = p * work.channels;
          for_vectors<A>(last - first, [&](int64_t k, auto part) __attribute__((always_inline)) {
            const int64_t c = first + k;
            const auto centred = normalization.centre(x + pixel, c, part);
            const auto dz = gradient.dz(position + pixel, c, part, centred, normalization);
            add_to<A>(dweight + c, dz * centred, part);
            add_to<A>(dbias + c, dz, part);
          });
        }
      }
    }
  }
}

template <class T, class Gradient>
void sums(const Work<Accumulate<T>>& work, int64_t begin, int64_t end) {
  switch (work.layout) {
    case Layout::kElements:
      if (work.channels / work.groups < kWidth<Accumulate<T>>) {
        return sums_of_short_rows<T, Gradient>(work, begin, end);
      }
      return sums_of_runs<T, Gradient, Rows>(work, begin, end);
    case Layout::kRuns:
      return sums_of_runs<T, Gradient, Channels>(work, begin, end);
    case Layout::kPixels:
      return sums_of_pixels<T, Gradient>(work, begin, end);
  }
}

// dz * scale is rounded as it was for the offset: in a group of one value the two are equal, and
// the gradient is exactly 0.
template <class T, class Normalization, class Coefficient, class Gradient>
FXFUSE_INLINE void dinput_run(const Work<Accumulate<T>>& work, int64_t position, int64_t length,
                              Normalization normalization, Coefficient offset, Coefficient slope,
                              Gradient gradient) {
  using A = Accumulate<T>;
  const T* x = static_cast<const T*>(work.input) + position;
  T* dx = static_cast<T*>(work.dinput) + position;
  write_run(dx, length, [=](int64_t i, auto part) __attribute__((always_inline)) {
    const auto centred = normalization.centre(x, i, part);
    const auto dz = gradient.dz(position, i, part, centred, normalization);
    const auto scaled = rounded<A>(dz * normalization.scale.at(i, part));
    return (scaled - offset.at(i, part)) - centred * slope.at(i, part);
  });
}

template <class T, class Gradient>
void dinput_of_pixels(const Work<Accumulate<T>>& work, int64_t begin, int64_t end) {
  using A = Accumulate<T>;
  PixelNormalization<A> normalizations(work);
  PerChannel<A> offset(work, work.offset), slope(work, work.slope);
  const Gradient gradient(work);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t n = item / work.chunks, start = item % work.chunks * work.chunk;
    const auto normalization = normalizations.of_sample(n);
    const auto offsets = offset.of_sample(n), slopes = slope.of_sample(n);
    for (int64_t i = start; i < min(start + work.chunk, work.spatial); ++i) {
      const int64_t position = (n * work.spatial + i) * work.channels;
      dinput_run<T>(work, position, work.channels, normalization, offsets, slopes, gradient);
    }
  }
}

template <class T, class Gradient>
void dinput_of_short_rows(const Work<Accumulate<T>>& work, int64_t begin, int64_t end) {
  using A = Accumulate<T>;
  const int64_t size = work.channels / work.groups;
  ShortRows<A> rows(work);
  const Gradient gradient(work);
  alignas(64) A offset[kBlock + kWidth<A>], slope[kBlock + kWidth<A>];
  for (int64_t start = begin; start < end; start += rows.at_a_time()) {
    const int64_t stop = min(start + rows.at_a_time(), end);
    repeat(work, work.offset, start, stop, offset);
    repeat(work, work.slope, start, stop, slope);
    dinput_run<T>(work, start * size, (stop - start) * size, rows.normalization(start, stop),
                  Varying<A>(offset), Varying<A>(slope), gradient);
  }
}

template <class T, class Gradient, template <class> class Runs>
void dinput_of_runs(const Work<Accumulate<T>>& work, int64_t begin, int64_t end) {
  using A = Accumulate<T>;
  const Gradient gradient(work);
  Runs<A> run(work, begin);
  for (int64_t item = begin; item < end; ++item, run.next()) {
    const Uniform<A> offset(work.offset[run.row()]), slope(work.slope[run.row()]);
    dinput_run<T>(work, item * run.length(), run.length(), run.normalization(), offset, slope,
                  gradient);
  }
}

template <class T, class Gradient>
void dinput(const Work<Accumulate<T>>& work, int64_t begin, int64_t end) {
  switch (work.layout) {
    case Layout::kElements:
      if (work.channels / work.groups < kWidth<Accumulate<T>>) {
        return dinput_of_short_rows<T, Gradient>(work, begin, end);
      }
      return dinput_of_runs<T, Gradient, Rows>(work, begin, end);
    case Layout::kRuns:
      return dinput_of_runs<T, Gradient, Channels>(work, begin, end);
    case Layout::kPixels:
      return dinput_of_pixels<T, Gradient>(work, begin, end);
  }
}
