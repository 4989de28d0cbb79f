// The kernels for any processor: SSE2 on x86-64, NEON on aarch64.
#include "work.h"

#define FXFUSE_VECTOR_BYTES 16

namespace fxfuse::cpu::plain {
#include "kernels.h"
}  // namespace fxfuse::cpu::plain
