// The backward kernels for half, with gradients in that type and, under autocast, in float32. Idea,
// work split, limits and fallback: see backward.cuh.
#include "backward.cuh"

namespace fxfuse::cuda {

template cudaError_t backward_typed<__half, __half>(const Backward&, const BackwardPlan&, void*,
                                                    cudaStream_t);
template cudaError_t backward_typed<__half, float>(const Backward&, const BackwardPlan&, void*,
                                                   cudaStream_t);

}  // namespace fxfuse::cuda
