// The forward kernels for double.  Idea, work
// split, limits and fallback: see forward.cuh.
#include "forward.cuh"

namespace fxfuse::cuda {

template cudaError_t forward_typed<double, double, false>(const Forward&, const ForwardPlan&, void*,
                                                          cudaStream_t);

}  // namespace fxfuse::cuda
