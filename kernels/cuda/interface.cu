// The functions of kernels.h: which instantiation solves a problem.
//
// Idea.  The kernels are compiled in one file for each dtype and direction, so that they build in
// parallel; this file only knows their names.  Work split, limits and fallback: see forward.cuh and
// backward.cuh.
#include <atomic>

#include "backward.cuh"
#include "forward.cuh"

namespace fxfuse::cuda {

#define FXFUSE_COMPILED_ELSEWHERE(T, O)                                                 \
  extern template cudaError_t forward_typed<T, O>(const Forward&, void*, cudaStream_t); \
  extern template cudaError_t backward_typed<T, O>(const Backward&, void*, cudaStream_t);
FXFUSE_COMPILED_ELSEWHERE(float, float)
FXFUSE_COMPILED_ELSEWHERE(double, double)
FXFUSE_COMPILED_ELSEWHERE(__half, __half)
FXFUSE_COMPILED_ELSEWHERE(__half, float)
FXFUSE_COMPILED_ELSEWHERE(__nv_bfloat16, __nv_bfloat16)
FXFUSE_COMPILED_ELSEWHERE(__nv_bfloat16, float)

size_t workspace_bytes(const Forward& p) {
  const ForwardPlan plan(p);
  return plan.partial_bytes(p) + plan.statistics_bytes(p);
}

size_t workspace_bytes(const Backward& p) { return BackwardPlan(p).bytes(p); }

cudaError_t forward(const Forward& p, void* workspace, cudaStream_t stream) {
  const bool same = p.output_dtype == p.dtype;
  switch (p.dtype) {
    case kFloat:
      return forward_typed<float, float>(p, workspace, stream);
    case kDouble:
      return forward_typed<double, double>(p, workspace, stream);
    case kHalf:
      return same ? forward_typed<__half, __half>(p, workspace, stream)
                  : forward_typed<__half, float>(p, workspace, stream);
    case kBFloat16:
      return same ? forward_typed<__nv_bfloat16, __nv_bfloat16>(p, workspace, stream)
                  : forward_typed<__nv_bfloat16, float>(p, workspace, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t backward(const Backward& p, void* workspace, cudaStream_t stream) {
  const bool same = p.output_dtype == p.dtype;
  switch (p.dtype) {
    case kFloat:
      return backward_typed<float, float>(p, workspace, stream);
    case kDouble:
      return backward_typed<double, double>(p, workspace, stream);
    case kHalf:
      return same ? backward_typed<__half, __half>(p, workspace, stream)
                  : backward_typed<__half, float>(p, workspace, stream);
    case kBFloat16:
      return same ? backward_typed<__nv_bfloat16, __nv_bfloat16>(p, workspace, stream)
                  : backward_typed<__nv_bfloat16, float>(p, workspace, stream);
  }
  return cudaErrorInvalidValue;
}

namespace {

// Compiled for the same architectures as all the others.
__global__ void probe() {}

bool can_run(int device) {
  int current = 0;
  cudaFuncAttributes attributes;
  cudaError_t error = cudaGetDevice(&current);
  if (error == cudaSuccess && device != current) error = cudaSetDevice(device);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, probe);
  cudaGetLastError();  // an error that stays would be reported by the next launch
  if (device != current) cudaSetDevice(current);
  return error == cudaSuccess;
}

}  // namespace

bool supported(int device) {
  enum : int { kUnknown, kNo, kYes };
  constexpr int kMostDevices = 128;
  static std::atomic<int> known[kMostDevices];  // all kUnknown; a race only asks twice
  if (device < 0 || device >= kMostDevices) return false;
  int answer = known[device].load(std::memory_order_relaxed);
  if (answer == kUnknown) {
    answer = can_run(device) ? kYes : kNo;
    known[device].store(answer, std::memory_order_relaxed);
  }
  return answer == kYes;
}

}  // namespace fxfuse::cuda
