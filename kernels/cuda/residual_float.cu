// The forward kernels for float that add a residual.  Idea, work split, limits and fallback: see
// forward.cuh.
#include "forward.cuh"

namespace fxfuse::cuda {

template cudaError_t forward_typed<float, float, true>(const Forward&, const ForwardPlan&, void*,
                                                       cudaStream_t);

}  // namespace fxfuse::cuda
