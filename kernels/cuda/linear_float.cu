// The kernels for a Linear, a norm and an activation in float, where the products may be of TF32.
// Idea, work split, limits and fallback: see linear_plan.h, hopper_tiles.cuh and
// hopper_stationary.cuh.
#include "hopper_launch.cuh"

namespace fxfuse::cuda {

template cudaError_t linear_typed<float, float>(const LinearForward&, const LinearPlan&,
                                                cudaStream_t);

}  // namespace fxfuse::cuda
