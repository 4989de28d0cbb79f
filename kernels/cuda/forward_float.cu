// The forward kernels for float.  Idea, work
// split, limits and fallback: see forward.cuh.
#include "forward.cuh"

namespace fxfuse::cuda {

template cudaError_t forward_typed<float, float, false>(const Forward&, const ForwardPlan&, void*,
                                                        cudaStream_t);

}  // namespace fxfuse::cuda
