// The functions of kernels.h: which plan and which instantiation solve a problem.
//
// Idea.  The kernels are compiled in one file for each dtype and direction, so that they build in
// parallel; this file only knows their names.  Work split, limits and fallback: see forward.cuh and
// backward.cuh.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <mutex>

#include "backward_plan.h"
#include "forward_plan.h"
#include "kernels.h"
#include "launch.cuh"
#include "linear_plan.h"

namespace fxfuse::cuda {

template <class T, class O, bool kResidual>
cudaError_t forward_typed(const Forward&, const ForwardPlan&, void*, cudaStream_t);
template <class T, class O>
cudaError_t backward_typed(const Backward&, const BackwardPlan&, void*, cudaStream_t);
template <class T, class O>
cudaError_t linear_typed(const LinearForward&, const LinearPlan&, cudaStream_t);

size_t workspace_bytes(const Forward& p) {
  return ForwardPlan(p, gpu_of(p.device)).workspace_bytes(p);
}

size_t workspace_bytes(const Backward& p) {
  return BackwardPlan(p, gpu_of(p.device)).workspace_bytes(p);
}

namespace {

// Types in memory: of the input, and of what is of output_dtype.
template <class T, class O>
struct Types {
  using Input = T;
  using Output = O;
};

template <class Call>
cudaError_t with_types(const Problem& p, Call call) {
  const bool same = p.output_dtype == p.dtype;
  switch (p.dtype) {
    case kFloat:
      return call(Types<float, float>());
    case kDouble:
      return call(Types<double, double>());
    case kHalf:
      return same ? call(Types<__half, __half>()) : call(Types<__half, float>());
    case kBFloat16:
      return same ? call(Types<__nv_bfloat16, __nv_bfloat16>())
                  : call(Types<__nv_bfloat16, float>());
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t forward(const Forward& p, void* workspace, cudaStream_t stream) {
  const ForwardPlan plan(p, gpu_of(p.device));
  return with_types(p, [&](auto types) {
    using T = typename decltype(types)::Input;
    using O = typename decltype(types)::Output;
    return p.residual == nullptr ? forward_typed<T, O, false>(p, plan, workspace, stream)
                                 : forward_typed<T, O, true>(p, plan, workspace, stream);
  });
}

cudaError_t backward(const Backward& p, void* workspace, cudaStream_t stream) {
  const BackwardPlan plan(p, gpu_of(p.device));
  return with_types(p, [&](auto types) {
    using Of = decltype(types);
    return backward_typed<typename Of::Input, typename Of::Output>(p, plan, workspace, stream);
  });
}

bool serves(const LinearForward& p) {
  return LinearPlan(p, gpu_of(p.device)).way != LinearPlan::Way::kNone;
}

const char* choice(const LinearForward& p) { return LinearPlan(p, gpu_of(p.device)).reason; }

cudaError_t forward(const LinearForward& p, cudaStream_t stream) {
  const LinearPlan plan(p, gpu_of(p.device));
  if (plan.way == LinearPlan::Way::kNone) return cudaErrorInvalidValue;
  return with_types(p, [&](auto types) {
    using Of = decltype(types);
    if constexpr (sizeof(typename Of::Input) <= 4) {
      return linear_typed<typename Of::Input, typename Of::Output>(p, plan, stream);
    } else {
      return cudaErrorInvalidValue;
    }
  });
}

// ---- the GPU ------------------------------------------------------------------------------------

namespace {

// Compiled for the same architectures as all the others.
__global__ void probe() {}

// Has shared memory where the kernels of hopper.cuh have code.
__global__ void probe_wgmma() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ volatile int mark;
  mark = 1;
#endif
}

// Clusters of `cluster` blocks that run at once; 0 where none does.
int count_clusters(int cluster, int64_t shared) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(cluster);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int count = 0;
  return cudaOccupancyMaxActiveClusters(&count, probe, &config) == cudaSuccess ? count : 0;
}

// Of the current device.
Gpu ask_current(int device) {
  Gpu gpu;
  cudaFuncAttributes code = {};
  if (cudaFuncGetAttributes(&code, probe) != cudaSuccess) return gpu;
  int cooperates = 0;
  cudaDeviceGetAttribute(&cooperates, cudaDevAttrCooperativeLaunch, device);
  gpu.cooperates = cooperates != 0;
  cudaDeviceGetAttribute(&gpu.shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  cudaDeviceGetAttribute(&gpu.shared_of_all, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  if (cudaDeviceGetAttribute(&gpu.multiprocessors, cudaDevAttrMultiProcessorCount, device) !=
      cudaSuccess) {
    return {};
  }
  cudaFuncAttributes hopper = {};
  gpu.wgmma = cudaFuncGetAttributes(&hopper, probe_wgmma) == cudaSuccess &&
              hopper.sharedSizeBytes > code.sharedSizeBytes;
  // What the code was compiled for counts: the driver translates older code for newer GPUs.
  gpu.clusters = code.ptxVersion >= 90;
  if (!gpu.clusters) return gpu;
  cudaFuncSetAttribute(probe, cudaFuncAttributeMaxDynamicSharedMemorySize, gpu.shared);
  cudaFuncSetAttribute(probe, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  for (int log2 = 1; log2 <= 4; ++log2) {
    if (count_clusters(1 << log2, gpu.shared) > 0) gpu.largest_cluster = 1 << log2;
    for (int blocks = 1; blocks <= 2 && log2 < 4; ++blocks) {
      gpu.most_clusters[blocks - 1][log2] =
          std::max(count_clusters(1 << log2, gpu.share(blocks)), 1);
    }
  }
  return gpu;
}

Gpu ask(int device) {
  Gpu gpu;
  int current = 0;
  cudaError_t error = cudaGetDevice(&current);
  if (error == cudaSuccess && device != current) error = cudaSetDevice(device);
  if (error == cudaSuccess) gpu = ask_current(device);
  cudaGetLastError();  // an error that stays would be reported by the next launch
  if (device != current) cudaSetDevice(current);
  return gpu;
}

}  // namespace

const Gpu& gpu_of(int device) {
  static std::once_flag asked[kMostGpus];
  static Gpu known[kMostGpus];
  static const Gpu none;
  if (device < 0 || device >= kMostGpus) return none;
  std::call_once(asked[device], [&] { known[device] = ask(device); });
  return known[device];
}

bool supported(int device) { return gpu_of(device).multiprocessors > 0; }

}  // namespace fxfuse::cuda
