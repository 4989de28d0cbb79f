// How the host launches kernels: what it asks a GPU, once, and one function for every kind of
// launch.
#pragma once
#include <cuda_runtime.h>

#include <atomic>
#include <limits>

#include "plan.h"

namespace fxfuse::cuda {

constexpr int kMostGpus = 128;  // that are remembered

// Of GPU number `device`; what a Gpu is by default where there is none.  Defined in interface.cu.
const Gpu& gpu_of(int device);

struct Shape {
  int64_t blocks;
  int threads;
  int64_t shared = 0;        // bytes
  int cluster = 1;           // blocks
  bool early = false;        // before the kernel ahead has ended; needs Gpu::clusters
  bool cooperative = false;  // all blocks at once
};

template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), const Shape& shape, cudaStream_t stream,
                   Arguments... arguments) {
  if (shape.blocks > std::numeric_limits<int>::max()) return cudaErrorInvalidConfiguration;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(shape.blocks));
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.shared;
  config.stream = stream;
  cudaLaunchAttribute attributes[3];
  config.attrs = attributes;
  const auto add = [&](cudaLaunchAttributeID id) -> cudaLaunchAttributeValue& {
    attributes[config.numAttrs].id = id;
    return attributes[config.numAttrs++].val;
  };
  if (shape.cluster > 1) {
    auto& size = add(cudaLaunchAttributeClusterDimension).clusterDim;
    size.x = shape.cluster;
    size.y = size.z = 1;
  }
  if (shape.early) {
    add(cudaLaunchAttributeProgrammaticStreamSerialization).programmaticStreamSerializationAllowed =
        1;
  }
  if (shape.cooperative) add(cudaLaunchAttributeCooperative).cooperative = 1;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

// The blocks of teams of `size` threads, one for each piece of work, `threads` in a block where a
// team is not a block itself.
inline Shape of_teams(int64_t pieces, int size, int threads = kThreads) {
  if (size > 32) threads = size;
  return {ceil_div(pieces, threads / size), threads};
}

// Lets a kernel have all the shared memory that a block can, and clusters as large as the GPU has,
// once per kernel and device: asking for it in every call would cost more than the launch of a
// small kernel.
template <auto kKernel>
cudaError_t allow_shared(int device) {
  static std::atomic<bool> done[kMostGpus];  // a race only sets it twice
  const bool kept = device >= 0 && device < kMostGpus;
  if (kept && done[device].load(std::memory_order_relaxed)) return cudaSuccess;
  const Gpu& gpu = gpu_of(device);
  cudaFuncAttributes declared = {};
  cudaError_t error = cudaFuncGetAttributes(&declared, kKernel);
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 gpu.shared - static_cast<int>(declared.sharedSizeBytes));
  }
  if (error == cudaSuccess && gpu.largest_cluster > 8) {
    error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  if (kept && error == cudaSuccess) done[device].store(true, std::memory_order_relaxed);
  return error;
}

// A kernel whose blocks have shared memory, or are in clusters.
template <auto kKernel, class... Arguments>
cudaError_t launch_shared(int device, const Shape& shape, cudaStream_t stream,
                          Arguments... arguments) {
  const cudaError_t error = allow_shared<kKernel>(device);
  return error == cudaSuccess ? launch(kKernel, shape, stream, arguments...) : error;
}

}  // namespace fxfuse::cuda
