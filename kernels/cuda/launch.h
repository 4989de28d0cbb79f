// The CUDA kernels as the operators call them: on tensors' memory, with torch's streams and memory.
#pragma once
#include "../group_norm.h"

namespace fxfuse::cuda {

// Whether this library holds code that GPU number `device` can run.
bool is_supported(int device);

// Enqueue the work on torch's current stream of problem.device.  Raise where a launch fails.
void run_forward(const Forward& problem);
void run_backward(const Backward& problem);

// Whether run_linear serves a problem, and faster than the two operators; `output` may be null.
bool is_served(const LinearForward& problem);
const char* why_served(const LinearForward& problem);  // or why not
void run_linear(const LinearForward& problem);

}  // namespace fxfuse::cuda
