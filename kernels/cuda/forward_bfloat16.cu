// The forward kernels for bfloat16, with output in that type and, under autocast, in float32. Idea,
// work split, limits and fallback: see forward.cuh.
#include "forward.cuh"

namespace fxfuse::cuda {

template cudaError_t forward_typed<__nv_bfloat16, __nv_bfloat16, false>(const Forward&,
                                                                        const ForwardPlan&, void*,
                                                                        cudaStream_t);
template cudaError_t forward_typed<__nv_bfloat16, float, false>(const Forward&, const ForwardPlan&,
                                                                void*, cudaStream_t);

}  // namespace fxfuse::cuda
