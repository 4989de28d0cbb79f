// The backward kernels for bfloat16, with gradients in that type and, under autocast, in float32.
// Idea, work split, limits and fallback: see backward.cuh.
#include "backward.cuh"

namespace fxfuse::cuda {

template cudaError_t backward_typed<__nv_bfloat16, __nv_bfloat16>(const Backward&,
                                                                  const BackwardPlan&, void*,
                                                                  cudaStream_t);
template cudaError_t backward_typed<__nv_bfloat16, float>(const Backward&, const BackwardPlan&,
                                                          void*, cudaStream_t);

}  // namespace fxfuse::cuda
