// The backward kernels for float.  Idea, work
// split, limits and fallback: see backward.cuh.
#include "backward.cuh"

namespace fxfuse::cuda {

template cudaError_t backward_typed<float, float>(const Backward&, const BackwardPlan&, void*,
                                                  cudaStream_t);

}  // namespace fxfuse::cuda
