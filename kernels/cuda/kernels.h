// The CUDA kernels as plain functions: no torch header, so that nvcc compiles them quickly and
// anything that has device pointers can call them.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>

#include "../group_norm.h"

namespace fxfuse::cuda {

// Bytes of device memory that the call needs beside its tensors, possibly 0.  They hold partial
// results: their contents before the call do not matter, and the memory may be reused as soon as
// the stream has passed the call.
size_t workspace_bytes(const Forward& problem);
size_t workspace_bytes(const Backward& problem);

// Enqueue the work on `stream` of the current device, which must be problem.device, and return the
// first launch error.  They neither wait nor allocate and can be captured in a CUDA graph.  Same
// input, same device: same bits.
cudaError_t forward(const Forward& problem, void* workspace, cudaStream_t stream);
cudaError_t backward(const Backward& problem, void* workspace, cudaStream_t stream);

// Whether forward(LinearForward) serves a problem, and faster than a matrix product with
// forward(Forward) behind it; `output` may still be null.  Why it does or does not.
bool serves(const LinearForward& problem);
const char* choice(const LinearForward& problem);

// Only for a problem that is served.
cudaError_t forward(const LinearForward& problem, cudaStream_t stream);

// Whether this binary holds code that GPU number `device` can run.  Asked once per device.
bool supported(int device);

}  // namespace fxfuse::cuda
