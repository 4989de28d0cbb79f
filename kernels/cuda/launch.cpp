// Between torch and the kernels: device, stream and workspace.  Only c10 headers, because ATen's
// CUDA headers ask for every CUDA library to be installed.
#ifndef C10_CUDA_NO_CMAKE_CONFIGURE_FILE
#define C10_CUDA_NO_CMAKE_CONFIGURE_FILE  // that file is not in torch builds for the CPU
#endif
#include "launch.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>

#include "kernels.h"

namespace fxfuse::cuda {
namespace {

void check(cudaError_t error, const Problem& problem, const char* name) {
  TORCH_CHECK(error == cudaSuccess, "fxfuse.group_norm_activation: the ", name,
              " kernel did not start on CUDA device ", problem.device, ": ",
              cudaGetErrorString(error));
}

// `enqueue` is forward or backward of kernels.h.
template <class P>
void run(const P& problem, cudaError_t (*enqueue)(const P&, void*, cudaStream_t),
         const char* name) {
  const auto device = static_cast<c10::DeviceIndex>(problem.device);
  const c10::cuda::CUDAGuard guard(device);
  const auto stream = c10::cuda::getCurrentCUDAStream(device);
  // Taken from the current stream's pool and given back when this function returns: whatever gets
  // the memory next runs on the same stream, so after the kernels.
  c10::DataPtr workspace;
  if (const size_t bytes = workspace_bytes(problem); bytes > 0) {
    workspace = c10::cuda::CUDACachingAllocator::get()->allocate(bytes);
  }
  check(enqueue(problem, workspace.get(), stream.stream()), problem, name);
}

}  // namespace

bool is_supported(int device) { return supported(device); }

void run_forward(const Forward& problem) { run<Forward>(problem, forward, "forward"); }

void run_backward(const Backward& problem) { run<Backward>(problem, backward, "backward"); }

bool is_served(const LinearForward& problem) { return serves(problem); }

const char* why_served(const LinearForward& problem) { return choice(problem); }

void run_linear(const LinearForward& problem) {
  const auto device = static_cast<c10::DeviceIndex>(problem.device);
  const c10::cuda::CUDAGuard guard(device);
  const auto stream = c10::cuda::getCurrentCUDAStream(device);
  check(forward(problem, stream.stream()), problem, "linear");
}

// The registration of the operators for CUDA tensors (TORCH_LIBRARY_IMPL) belongs to the file that
// checks their arguments; it calls the functions above.

}  // namespace fxfuse::cuda
