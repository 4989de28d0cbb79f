// Chooses the instruction set, cuts the problem into work for threads, and lends scratch memory.
// The loops are in the headers that kernels.h includes.
#include "group_norm.h"

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <memory>
#include <type_traits>

#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "work.h"

namespace fxfuse::cpu {
namespace {

// A channel shorter than this is folded: each of its values becomes a channel, with its own copy of
// weight and bias, so that a row is one run of full vectors.
constexpr int64_t kFold = 16;
// Values that a thread must have before a second one pays, and what an item costs beside its
// values.  Forward of float with hardtanh, one thread and two (AVX-512, EPYC, Zen 5, 2026-11-30;
// the spread is that of calls at different times): 32x512 in 8 groups 6.0 us and 5.3 to 8.2,
// 64x512 9.1 and 6.7 to 10.6; 1536 rows of 3 values 23.7 and 13.9 to 17.1.  Thresholds from 4096 to
// 32768 differ by less than that spread.
constexpr int64_t kGrain = 32768, kItem = 64;
// Units that each thread must have for one thread to do all steps of a unit.
constexpr int64_t kUnitsPerThread = 4;
// Values in a chunk of pixels, so that its second pass runs from L2, and the most pixels in one: a
// lane adds up a value of each, and of 5461 it lost too much.  Forward of six shapes in bfloat16 on
// two threads (AVX-512, EPYC, Zen 5, 2026-11-30): 16384 values are 1 to 7 % slower, 65536 from 9 %
// faster to 4 % slower, but would leave threads idle where there are many.
constexpr int64_t kPixelChunk = 32768, kMaxPixels = 256;
// The same for the gradients, whose chunks are read once and leave their sums in memory.
constexpr int64_t kGradientPixelChunk = 65536, kMinGradientPixels = 16, kMaxGradientPixels = 64;
// Samples whose affine gradients are added up before they are added to those of the others in
// double.  Fewer would take memory and time, more would lose digits and leave threads idle, so a
// small batch is cut in four.
constexpr int64_t kMinSlice = 8, kMaxSlice = 32;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// ---- Instruction set ---------------------------------------------------------------------------

enum class Isa { kPlain, kAvx2, kAvx512 };

Isa supported_isa() {
#if defined(__x86_64__)
  // Not every compiler knows the name "f16c".
  unsigned eax, ebx, ecx = 0, edx;
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
  if (f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2")) {
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return avx512 ? Isa::kAvx512 : Isa::kAvx2;
  }
#endif
  return Isa::kPlain;
}

// The most that the environment variable of torch's own kernels allows.
Isa allowed_isa() {
  const char* capability = std::getenv("ATEN_CPU_CAPABILITY");
  if (capability == nullptr) return Isa::kAvx512;
  if (std::strcmp(capability, "default") == 0) return Isa::kPlain;
  if (std::strcmp(capability, "avx2") == 0) return Isa::kAvx2;
  return Isa::kAvx512;
}

template <class A>
const Kernels<A>& kernels(const Problem& problem) {
#if defined(__x86_64__)
  static const Isa isa = std::min(supported_isa(), allowed_isa());
  if (isa == Isa::kAvx512) return avx512::kernels<A>(problem.dtype, problem.activation);
  if (isa == Isa::kAvx2) return avx2::kernels<A>(problem.dtype, problem.activation);
#endif
  return plain::kernels<A>(problem.dtype, problem.activation);
}

// ---- Memory ------------------------------------------------------------------------------------

// glibc maps blocks of 32 MiB and more anew each time, and then half of the time of a forward goes
// into faults of 4 KiB pages: 1024x8192 float 11.7 ms without, 5.5 with (2 threads of a Sapphire
// Rapids, 2026-11-30).  A hint: where it is refused nothing changes.
void advise_huge_pages(void* data, size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr size_t kFreshlyMapped = size_t{32} << 20;
  constexpr uintptr_t kPage = 4096;
  if (bytes < kFreshlyMapped) return;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kPage - 1) & ~(kPage - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) & ~(kPage - 1);
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  static_cast<void>(data), static_cast<void>(bytes);
#endif
}

size_t size_in_bytes(const Problem& problem) {
  const int64_t values = problem.batch * problem.channels * problem.spatial;
  return values * (problem.dtype == kDouble ? 8 : problem.dtype == kFloat ? 4 : 2);
}

// Uninitialised memory.
template <class T>
class Scratch {
 public:
  explicit Scratch(int64_t size) : data_(size == 0 ? nullptr : new T[size]) {}
  T* data() const { return data_.get(); }

 private:
  std::unique_ptr<T[]> data_;
};

// Calls f with a value of the type.
template <class F>
void with_type(Dtype dtype, F f) {
  switch (dtype) {
    case kFloat:
      return f(float{});
    case kDouble:
      return f(double{});
    case kHalf:
      return f(c10::Half{});
    case kBFloat16:
      return f(c10::BFloat16{});
  }
}

// Weight or bias in the accumulate type, each value `fold` times.
template <class A>
class Affine {
 public:
  Affine(const void* values, const Problem& problem, A missing, int64_t fold) : own_(0) {
    constexpr Dtype kAccumulate = std::is_same_v<A, double> ? kDouble : kFloat;
    if (values != nullptr && fold == 1 && problem.affine_dtype == kAccumulate) {
      data_ = static_cast<const A*>(values);
      return;
    }
    own_ = Scratch<A>(problem.channels * fold);
    data_ = own_.data();
    if (values == nullptr) {
      std::fill_n(own_.data(), problem.channels * fold, missing);
      return;
    }
    with_type(problem.affine_dtype, [&](auto type) {
      const auto* from = static_cast<const decltype(type)*>(values);
      A* to = own_.data();
      for (int64_t c = 0; c < problem.channels; ++c) {
        to = std::fill_n(to, fold, static_cast<A>(from[c]));
      }
    });
  }
  const A* data() const { return data_; }

 private:
  Scratch<A> own_;
  const A* data_;
};

// ---- Threads -----------------------------------------------------------------------------------

template <class A>
struct Step {
  int64_t items;   // of one unit
  int64_t values;  // what an item costs, in values of one pass over the input
  Kernel<A> kernel;
};

int64_t grain(int64_t values) { return std::max<int64_t>(1, kGrain / (values + kItem)); }

// Runs the steps in order for each of `units` units.  Where each thread gets enough units it does
// all steps of one, or of several short ones, while their values are in its cache; else the threads
// share the items of each step.  The results are the same.
template <class A>
void schedule(const Work<A>& work, int64_t units, std::initializer_list<Step<A>> steps) {
  const int64_t threads = at::get_num_threads();
  if (threads > 1 && units < kUnitsPerThread * threads) {
    for (const Step<A>& step : steps) {
      at::parallel_for(0, units * step.items, grain(step.values),
                       [&](int64_t begin, int64_t end) { step.kernel(work, begin, end); });
    }
    return;
  }
  const int64_t values = steps.begin()->items * steps.begin()->values;
  const int64_t block = std::max<int64_t>(1, kChunk / values);
  at::parallel_for(0, units, grain(values), [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; unit += block) {
      const int64_t stop = std::min(end, unit + block);
      for (const Step<A>& step : steps) step.kernel(work, unit * step.items, stop * step.items);
    }
  });
}

// ---- The problem as the kernels see it ---------------------------------------------------------

template <class A>
Work<A> describe(const Problem& problem) {
  const bool pixels = problem.channels_last && problem.spatial > 1 && problem.channels > 1;
  const int64_t fold = !pixels && problem.spatial < kFold ? problem.spatial : 1;
  Work<A> work{};
  work.layout = pixels                    ? Layout::kPixels
                : problem.spatial == fold ? Layout::kElements
                                          : Layout::kRuns;
  work.batch = problem.batch;
  work.channels = problem.channels * fold;
  work.groups = problem.num_groups;
  work.spatial = problem.spatial / fold;
  work.eps = problem.eps;
  std::copy_n(problem.params, 2, work.params);
  // A bound that is NaN bounds nothing.
  if (problem.activation == kIdentity || problem.activation == kReLU) {
    work.params[0] = problem.activation == kReLU ? 0 : std::numeric_limits<double>::quiet_NaN();
    work.params[1] = std::numeric_limits<double>::quiet_NaN();
  }
  work.input = problem.input;
  return work;
}

template <class A>
void cut(Work<A>* work, int64_t extent, int64_t chunk) {
  work->extent = extent;
  work->chunk = std::min(extent, chunk);
  work->chunks = divide_up(extent, work->chunk);
}

// ---- Forward -----------------------------------------------------------------------------------

template <class A>
void run_forward(const Work<A>& described, const Kernels<A>& kernels) {
  Work<A> work = described;
  work.function = &kernels.function;
  const int64_t rows = work.batch * work.groups, size = work.channels / work.groups * work.spatial;
  if (work.layout == Layout::kPixels) {
    cut(&work, work.spatial, std::clamp<int64_t>(kPixelChunk / work.channels, 1, kMaxPixels));
    const Scratch<Moments> moments(rows * work.chunks);
    work.moments = moments.data();
    const int64_t values = work.chunk * work.channels;
    schedule<A>(work, work.batch,
                {{work.chunks, values, kernels.moments},
                 {work.groups, 16 * work.chunks, kernels.combine},
                 {work.chunks, values, kernels.output}});
  } else if (rows < kUnitsPerThread * at::get_num_threads() && size > 2 * kChunk) {
    cut(&work, size, kChunk);
    const Scratch<Moments> moments(rows * work.chunks);
    work.moments = moments.data();
    schedule<A>(work, rows,
                {{work.chunks, work.chunk, kernels.moments},
                 {1, 16 * work.chunks, kernels.combine},
                 {work.chunks, work.chunk, kernels.output}});
  } else {
    cut(&work, size, size);
    schedule<A>(work, rows, {{1, size, kernels.statistics}, {1, size, kernels.output}});
  }
}

template <class A>
void forward_in(const Forward& problem) {
  Work<A> work = describe<A>(problem);
  const int64_t rows = work.batch * work.groups, fold = work.channels / problem.channels;
  const Affine<A> weight(problem.weight, problem, 1, fold), bias(problem.bias, problem, 0, fold);
  const Scratch<A> statistics(problem.mean == nullptr ? 3 * rows : 0);
  work.weight = weight.data();
  work.bias = bias.data();
  work.output = problem.output;
  work.mean = problem.mean == nullptr ? statistics.data() : static_cast<A*>(problem.mean);
  work.mean_low = work.mean + rows;
  work.rstd = problem.rstd == nullptr ? work.mean + 2 * rows : static_cast<A*>(problem.rstd);
  run_forward(work, kernels<A>(problem));
}

// ---- Backward ----------------------------------------------------------------------------------

// kPixels, samples: sums from the parts of the chunks.
template <class A>
void add_chunks(const Work<A>& work, int64_t begin, int64_t end) {
  const int64_t size = work.channels / work.groups;
  for (int64_t n = begin; n < end; ++n) {
    Sums* sums = work.sums + n * work.channels;
    std::fill_n(sums, work.channels, Sums{0, 0});
    for (int64_t k = 0; k < work.chunks; ++k) {
      const int64_t offset = (n * work.chunks + k) * work.channels;
      for (int64_t c = 0; c < work.channels; ++c) {
        sums[c].dz += work.dbias[offset + c];
        sums[c].dz_x_hat += work.dweight[offset + c];
      }
    }
    for (int64_t c = 0; c < work.channels; ++c) {
      const int64_t row = n * work.groups + c / size;
      sums[c].dz_x_hat -= work.mean_low[row] * sums[c].dz;
      sums[c].dz_x_hat *= work.rstd[row];
    }
  }
}

// kRuns and kPixels, rows: offset and slope from the sums.  dinput subtracts the mean without its
// low part; what that is times slope is in the offset.
template <class A>
void combine_sums(const Work<A>& work, int64_t begin, int64_t end) {
  const int64_t size = work.channels / work.groups;
  for (int64_t row = begin; row < end; ++row) {
    const Sums* sums = work.sums + row * size;
    const A* weight = work.weight + row % work.groups * size;
    Sums total = {0, 0};
    for (int64_t c = 0; c < size; ++c) {
      total.dz += sums[c].dz * weight[c];
      total.dz_x_hat += sums[c].dz_x_hat * weight[c];
    }
    const double rstd = work.rstd[row], values = static_cast<double>(size * work.spatial);
    const double slope = rstd * rstd * total.dz_x_hat / values;
    work.offset[row] = static_cast<A>(rstd * total.dz / values - work.mean_low[row] * slope);
    work.slope[row] = static_cast<A>(slope);
  }
}

// Writes value(i) to element start + i of dweight or dbias.
template <class A, class Value>
void write(void* to, Dtype dtype, int64_t start, int64_t width, Value value) {
  if (to == nullptr) return;
  with_type(dtype, [&](auto type) {
    auto* out = static_cast<decltype(type)*>(to) + start;
    for (int64_t i = 0; i < width; ++i) out[i] = static_cast<A>(value(i));
  });
}

// dweight and dbias as the sum of part(0, c) to part(parts - 1, c), over the `fold` values c that
// stand for one channel.
template <class A, class Part>
void write_affine(const Backward& problem, int64_t parts, int64_t fold, Part part) {
  constexpr int64_t kWidth = 64;  // neighbouring channels at a time, for the sake of cache lines
  auto channels = [&](int64_t begin, int64_t end) {
    for (int64_t start = begin; start < end; start += kWidth) {
      const int64_t width = std::min(kWidth, end - start);
      Sums total[kWidth] = {};
      for (int64_t s = 0; s < parts; ++s) {
        for (int64_t i = 0; i < width; ++i) {
          for (int64_t c = (start + i) * fold; c < (start + i + 1) * fold; ++c) {
            const Sums sums = part(s, c);
            total[i].dz += sums.dz;
            total[i].dz_x_hat += sums.dz_x_hat;
          }
        }
      }
      const Dtype dtype = problem.affine_dtype;
      write<A>(problem.dweight, dtype, start, width, [&](int64_t i) { return total[i].dz_x_hat; });
      write<A>(problem.dbias, dtype, start, width, [&](int64_t i) { return total[i].dz; });
    }
  };
  at::parallel_for(0, problem.channels, std::max(kWidth, grain(4 * parts * fold)), channels);
}

// A thread goes through the samples of its slice, and through the groups of each, in the
// order of memory.
template <class A>
void backward_of_elements(Work<A> work, const Backward& problem, const Kernels<A>& kernels) {
  work.slice = std::clamp(work.batch / 4, kMinSlice, kMaxSlice);
  const int64_t slices = divide_up(work.batch, work.slice);
  const int64_t size = work.channels / work.groups;
  const bool affine = problem.dweight != nullptr || problem.dbias != nullptr;
  const Scratch<A> parts(affine ? 2 * slices * work.channels : 0);
  work.dweight = parts.data();
  work.dbias = affine ? parts.data() + slices * work.channels : nullptr;

  auto groups_of_slice = [&](int64_t slice, int64_t first, int64_t last) {
    if (affine) {
      const int64_t offset = slice * work.channels + first * size;
      std::fill_n(work.dweight + offset, (last - first) * size, A{0});
      std::fill_n(work.dbias + offset, (last - first) * size, A{0});
    }
    const int64_t stop = std::min(work.batch, (slice + 1) * work.slice);
    // The rows of whole samples have no gap between them.
    const bool whole = last - first == work.groups;
    const int64_t step = whole ? std::max<int64_t>(1, kChunk / work.channels) : 1;
    for (int64_t n = slice * work.slice; n < stop; n += step) {
      const int64_t begin = n * work.groups + first;
      const int64_t end = (std::min(n + step, stop) - 1) * work.groups + last;
      kernels.sums(work, begin, end);
      if (work.dinput != nullptr) kernels.dinput(work, begin, end);
    }
  };
  at::parallel_for(0, slices * work.groups,
                   grain((2 * size + kItem) * std::min(work.batch, work.slice)),
                   [&](int64_t begin, int64_t end) {
                     while (begin < end) {
                       const int64_t slice = begin / work.groups, first = begin % work.groups;
                       const int64_t last = std::min(work.groups, first + end - begin);
                       groups_of_slice(slice, first, last);
                       begin += last - first;
                     }
                   });
  if (!affine) return;
  write_affine<A>(problem, slices, work.channels / problem.channels, [&](int64_t s, int64_t c) {
    const int64_t i = s * work.channels + c;
    return Sums{work.dbias[i], work.dweight[i]};
  });
}

template <class A>
void sum_and_subtract(const Work<A>& work, const Kernels<A>& kernels) {
  const int64_t size = work.channels / work.groups;
  if (work.layout == Layout::kPixels) {
    const Step<A> sums = {work.chunks, 2 * work.chunk * work.channels, kernels.sums};
    const Step<A> add = {1, 2 * work.chunks * work.channels, add_chunks<A>};
    const Step<A> combine = {work.groups, 2 * size, combine_sums<A>};
    const Step<A> dinput = {work.chunks, sums.values, kernels.dinput};
    if (work.dinput != nullptr) return schedule<A>(work, work.batch, {sums, add, combine, dinput});
    return schedule<A>(work, work.batch, {sums, add});
  }
  const Step<A> sums = {size, 2 * work.spatial, kernels.sums};
  const Step<A> combine = {1, 2 * size, combine_sums<A>};
  const Step<A> dinput = {size, 2 * work.spatial, kernels.dinput};
  const int64_t rows = work.batch * work.groups;
  if (work.dinput != nullptr) return schedule<A>(work, rows, {sums, combine, dinput});
  schedule<A>(work, rows, {sums});
}

template <class A>
void backward_of_channels(Work<A> work, const Backward& problem, const Kernels<A>& kernels) {
  const Scratch<Sums> sums(work.batch * work.channels);
  work.sums = sums.data();
  int64_t parts_size = 0;
  if (work.layout == Layout::kPixels) {
    cut(&work, work.spatial,
        std::clamp(kGradientPixelChunk / work.channels, kMinGradientPixels, kMaxGradientPixels));
    parts_size = work.batch * work.chunks * work.channels;
  }
  const Scratch<A> parts(2 * parts_size);
  work.dweight = parts.data();
  work.dbias = parts.data() + parts_size;
  sum_and_subtract(work, kernels);
  if (problem.dweight == nullptr && problem.dbias == nullptr) return;
  write_affine<A>(problem, work.batch, 1,
                  [&](int64_t n, int64_t c) { return work.sums[n * work.channels + c]; });
}

template <class A>
void backward_in(const Backward& problem) {
  Work<A> work = describe<A>(problem);
  const int64_t rows = work.batch * work.groups, fold = work.channels / problem.channels;
  const Affine<A> weight(problem.weight, problem, 1, fold), bias(problem.bias, problem, 0, fold);
  const Kernels<A>& chosen = kernels<A>(problem);
  const Scratch<A> coefficients(2 * rows);
  // A caller who wants no dinput gives no memory for dz either.
  const bool keeps_dz = chosen.function.grad != nullptr && problem.dinput == nullptr;
  const Scratch<char> dz(keeps_dz ? size_in_bytes(problem) : 0);
  work.function = &chosen.function;
  work.dz = keeps_dz ? dz.data() : problem.dinput;
  work.weight = weight.data();
  work.bias = bias.data();
  // Only the forward kernels write to the statistics.
  work.mean = const_cast<A*>(static_cast<const A*>(problem.mean));
  work.mean_low = work.mean + rows;
  work.rstd = const_cast<A*>(static_cast<const A*>(problem.rstd));
  work.grad_output = problem.grad_output;
  work.dinput = problem.dinput;
  work.offset = coefficients.data();
  work.slope = coefficients.data() + rows;
  if (work.layout == Layout::kElements) {
    backward_of_elements(work, problem, chosen);
  } else {
    backward_of_channels(work, problem, chosen);
  }
}

}  // namespace

void forward(const Forward& problem) {
  advise_huge_pages(problem.output, size_in_bytes(problem));
  if (problem.dtype == kDouble) return forward_in<double>(problem);
  forward_in<float>(problem);
}

void backward(const Backward& problem) {
  if (problem.dinput != nullptr) advise_huge_pages(problem.dinput, size_in_bytes(problem));
  if (problem.dtype == kDouble) return backward_in<double>(problem);
  backward_in<float>(problem);
}

}  // namespace fxfuse::cpu
