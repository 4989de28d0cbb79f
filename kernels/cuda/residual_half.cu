// The forward kernels for half that add a residual, with output in that type and, under autocast,
// in float32.  Idea, work split, limits and fallback: see forward.cuh.
#include "forward.cuh"

namespace fxfuse::cuda {

template cudaError_t forward_typed<__half, __half, true>(const Forward&, const ForwardPlan&, void*,
                                                         cudaStream_t);
template cudaError_t forward_typed<__half, float, true>(const Forward&, const ForwardPlan&, void*,
                                                        cudaStream_t);

}  // namespace fxfuse::cuda
