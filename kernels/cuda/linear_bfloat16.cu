// The kernels for a Linear, a norm and an activation in bfloat16, with output in that type and,
// under autocast, in float32.  Idea, work split, limits and fallback: see linear_plan.h,
// hopper_tiles.cuh and hopper_stationary.cuh.
#include "hopper_launch.cuh"

namespace fxfuse::cuda {

template cudaError_t linear_typed<__nv_bfloat16, __nv_bfloat16>(const LinearForward&,
                                                                const LinearPlan&, cudaStream_t);
template cudaError_t linear_typed<__nv_bfloat16, float>(const LinearForward&, const LinearPlan&,
                                                        cudaStream_t);

}  // namespace fxfuse::cuda
