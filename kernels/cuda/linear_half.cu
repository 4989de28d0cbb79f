// The kernels for a Linear, a norm and an activation in half, with output in that type and, under
// autocast, in float32.  Idea, work split, limits and fallback: see linear_plan.h,
// hopper_tiles.cuh and hopper_stationary.cuh.
#include "hopper_launch.cuh"

namespace fxfuse::cuda {

template cudaError_t linear_typed<__half, __half>(const LinearForward&, const LinearPlan&,
                                                  cudaStream_t);
template cudaError_t linear_typed<__half, float>(const LinearForward&, const LinearPlan&,
                                                 cudaStream_t);

}  // namespace fxfuse::cuda
